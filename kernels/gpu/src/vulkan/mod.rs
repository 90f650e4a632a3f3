//! Vulkan beyond `wgpu`: kernels as SPIR-V, so that floats keep NaN and denormals, and matrices of bfloat16.
//!
//! `wgpu` has no words for these properties of a device, but takes devices that are opened here and SPIR-V that is
//! printed here. Other backends, and drivers of before Vulkan 1.2, get WGSL.

mod open;
mod spirv;

pub use open::{Vulkan, open};
pub use spirv::spirv;
