//! Executors, which run the ops and plans of a symbolic graph on devices.
//!
//! [`driver::Driver`] implements the trait [`executor::Executor`] on a [`executor::Device`]: [`cpu::CpuDevice`]
//! uses Tandem's own CPU kernels and PyTorch's, [`gpu::GpuDevice`] WGSL kernels on any adapter. This crate does not
//! depend on Python; it calls PyTorch through [`host::HostKernels`].
//!
//! | folder | contents |
//! | --- | --- |
//! | [`ops`] | operators: expressions, outputs, dtypes |
//! | [`run`] | runs, and iteration over their ops |
//! | `plan` | plans: which ops of a run are fused |
//! | [`host`] | PyTorch's kernels, memory and generators |
//! | [`threads`] | threads that share the work of a kernel |
//! | [`cpu`], [`gpu`] | the devices |

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
