//! Threads that share kernels, the cores that they wake on, and how their units compute.

pub mod cores;
pub mod floats;
pub mod team;
