//! Threads that run kernels together, their CPU affinity and their floating-point mode, and locks.

pub mod cores;
pub mod floats;
pub mod locks;
pub mod team;
