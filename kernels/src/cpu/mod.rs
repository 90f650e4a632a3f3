//! The cpu executor: ATen's own kernels on host buffers.

mod executor;
pub mod pool;

pub use executor::CpuExecutor;
