//! Executors: what runs the ops and plans of a symbolic graph on a device.
//!
//! [`executor::Executor`] is the one trait; [`cpu::CpuExecutor`] implements it with PyTorch's own CPU kernels.
//! Nothing here knows of Python; PyTorch is reached through [`executor::HostKernels`].

pub mod cpu;
pub mod error;
pub mod executor;
pub mod host;
pub mod liveness;
