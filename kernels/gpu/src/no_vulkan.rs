//! Stands for `vulkan` where there is none.

/// A device that does not exist.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vulkan {}

impl Vulkan {
    /// See `vulkan::Vulkan::bfloat16`.
    pub fn bfloat16(self) -> Option<u32> {
        match self {}
    }
}

/// Opens nothing: `wgpu` does.
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
