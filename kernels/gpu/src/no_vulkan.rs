//! Replacement of `vulkan` on systems without Vulkan.

/// A device opened here, of which there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vulkan {}

impl Vulkan {
    /// See `vulkan::Vulkan::bfloat16`.
    pub fn bfloat16(self) -> Option<u32> {
        match self {}
    }
}

/// Returns `None`, so that `wgpu` opens the device.
pub fn open(
    _: &wgpu::Adapter,
    _: &wgpu::DeviceDescriptor<'_>,
) -> Option<(wgpu::Device, wgpu::Queue, Vulkan)> {
    None
}

/// See `vulkan::spirv`.
pub fn spirv(_: &str, vulkan: Vulkan, _: bool, _: bool) -> Result<Vec<u32>, String> {
    match vulkan {}
}
