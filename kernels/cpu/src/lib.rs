//! The CPU executor: ATen's kernels on host buffers, and Tandem's own kernels for point-wise and other frequent
//! operators.

mod ahead;
pub(crate) mod channels_last;
mod device;
mod fusion;
pub mod kernels;
mod natives;
pub mod pool;
pub(crate) mod random;
pub mod scarcity;
mod shared;
pub mod table;
pub mod tiles;
mod vector;
mod widest;

pub use device::CpuDevice;
