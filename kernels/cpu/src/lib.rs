//! The CPU executor: ATen's kernels on host buffers, and native kernels for point-wise and other frequent
//! operators.

mod ahead;
pub(crate) mod channels_last;
mod device;
mod fusion;
mod implementation;
pub mod kernels;
pub mod pool;
pub(crate) mod random;
pub mod scarcity;
mod shared;
mod storages;
pub mod table;
pub mod tiles;
mod vector;
mod widest;

pub use device::CpuDevice;
