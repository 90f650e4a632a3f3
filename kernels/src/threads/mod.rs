//! Threads that run kernels together, their CPU affinity and their floating-point mode.

pub mod cores;
pub mod floats;
pub mod team;
