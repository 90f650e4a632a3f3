//! The cpu executor: ATen's kernels on host buffers, and Tandem's own for point-wise and other frequent operators.

mod ahead;
mod computation;
mod executor;
pub mod floats;
mod group;
mod native;
pub mod own;
pub mod pool;
pub mod random;
pub mod scarcity;
mod summed;
pub mod team;
pub mod tile;
mod widest;

pub use executor::CpuExecutor;
