//! The CPU executor: ATen's kernels on host buffers, and Tandem's own kernels for point-wise and other frequent
//! operators.

mod ahead;
pub(crate) mod channels_last;
mod device;
mod fusion;
mod natives;
pub mod own;
pub mod pool;
pub(crate) mod random;
pub mod scarcity;
mod shared;
pub mod tiles;
mod vector;
mod widest;

pub use device::CpuDevice;
