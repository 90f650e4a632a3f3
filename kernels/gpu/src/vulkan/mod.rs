//! Vulkan beyond `wgpu`: kernels as SPIR-V, so that floats keep NaN and denormals, and matrices of bfloat16.
//!
//! `wgpu` cannot express these properties of a device, but it accepts devices that are opened here and SPIR-V that is
//! printed here. Other backends, and drivers older than Vulkan 1.2, get WGSL.

mod open;
mod spirv;

pub use open::{Vulkan, open};
pub use spirv::spirv;
