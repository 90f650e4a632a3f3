//! Executors: what runs the ops and plans of a symbolic graph on a device.
//!
//! [`executor::Executor`] is the one trait; [`cpu::CpuExecutor`] implements it with PyTorch's own CPU kernels,
//! [`gpu::GpuExecutor`] with WGSL kernels on any adapter. Both walk runs with [`program::Program`].
//! Nothing here knows of Python; PyTorch is reached through [`executor::HostKernels`].

mod casts;
pub mod cores;
pub mod cpu;
pub mod deferred;
pub mod error;
pub mod executor;
mod express;
mod feeds;
pub mod gpu;
pub mod host;
pub mod ir;
pub mod liveness;
pub mod outputs;
pub mod overlap;
mod plan;
pub mod pointwise;
pub mod profile;
pub mod program;
pub mod promotion;
pub mod shapes;
