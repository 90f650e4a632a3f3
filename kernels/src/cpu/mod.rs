//! The cpu executor: ATen's own kernels on host buffers, and Tandem's for point-wise operators.

mod computation;
mod executor;
mod express;
mod group;
mod native;
mod own;
mod plan;
pub mod pool;
pub mod random;
pub mod tile;
mod widest;

pub use executor::CpuExecutor;
