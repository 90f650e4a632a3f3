//! Runs calls on the device: natively where there is a lowering, on the host otherwise.
//!
//! A storage's contents are on the device, on the host, or on both ([`storages`]). Kernels that find an index out of
//! range say so in a word on the device, which is read with every value that goes to the host ([`faults`]): nothing
//! that a failed op has spoilt gets out. [`Devices`] runs programs that use several devices.

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
