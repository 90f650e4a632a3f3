//! Execution of calls on GPUs: with native kernels if there is a lowering, on the host otherwise.
//!
//! The contents of a storage are on the device, on the host, or on both ([`storages`]). Kernels that detect an index
//! out of range report the fault in a word in device memory. Every download to the host also reads this word
//! ([`faults`]), so the program never sees values that a failed op has spoiled. [`Devices`] runs programs on several
//! devices.

mod device;
mod devices;
mod faults;
mod given;
mod groups;
mod host_path;
mod parts;
mod storages;
mod windows;

pub use device::GpuDevice;
pub use devices::Devices;
