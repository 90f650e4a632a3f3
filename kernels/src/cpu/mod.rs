//! The cpu executor: ATen's own kernels on host buffers.

mod executor;

pub use executor::CpuExecutor;
