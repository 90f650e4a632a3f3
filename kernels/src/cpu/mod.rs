//! The cpu executor: ATen's own kernels on host buffers.

mod call;
mod executor;

pub use executor::CpuExecutor;
