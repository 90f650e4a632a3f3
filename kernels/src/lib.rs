//! Executors: what runs the ops and plans of a symbolic graph on a device.
//!
//! [`executor::Executor`] is the one trait; [`cpu::CpuExecutor`] implements it with Tandem's own CPU kernels and
//! PyTorch's, [`gpu::GpuExecutor`] with WGSL kernels on any adapter. Nothing here knows of Python; PyTorch is reached
//! through [`host::HostKernels`].
//!
//! | folder | holds |
//! | --- | --- |
//! | [`ops`] | operators: expressions, outputs, dtypes |
//! | [`run`] | what a run is, and the walk through it |
//! | `plan` | plans: which ops of a run are fused |
//! | [`host`] | PyTorch's kernels, memory and generators |
//! | [`threads`] | threads that share kernels |
//! | [`cpu`], [`gpu`] | the executors |

pub mod cpu;
pub mod deferred;
pub mod driver;
pub mod error;
pub mod executor;
pub mod gpu;
pub mod host;
pub mod ir;
pub mod ops;
pub mod overlap;
mod plan;
pub mod run;
pub mod shapes;
pub mod threads;
