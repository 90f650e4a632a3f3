//! Opens devices with extensions that `wgpu` does not know.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;

use ash::khr;
use ash::vk;
use wgpu::hal::vulkan::Api;

/// Capabilities of a device beyond `wgpu`'s features.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vulkan {
    /// SPIR-V version.
    pub version: (u8, u8),
    /// Widths of the floats whose NaN, infinities and signs of zero can be kept.
    pub specials: Widths,
    /// Widths of the floats whose denormals can be kept.
    pub denormals: Widths,
    /// Number of rows and columns of cooperative matrices of bfloat16 with 32-bit sums, if there are any.
    pub(super) bfloat16: Option<u32>,
}

impl Vulkan {
    /// Number of rows and columns of cooperative matrices of bfloat16 with 32-bit sums, if there are any.
    pub fn bfloat16(self) -> Option<u32> {
        self.bfloat16
    }
}

/// Widths of floats.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Widths {
    /// 16 bits.
    pub b16: bool,
    /// 32 bits.
    pub b32: bool,
    /// 64 bits.
    pub b64: bool,
}

impl Widths {
    /// Whether floats of `bits` bits are included.
    pub fn contains(self, bits: u32) -> bool {
        match bits {
            16 => self.b16,
            32 => self.b32,
            64 => self.b64,
            _ => false,
        }
    }
}

const BFLOAT16: &CStr = c"VK_KHR_shader_bfloat16";
/// `VK_COMPONENT_TYPE_BFLOAT16_KHR`.
const BFLOAT16_COMPONENT: i32 = 1_000_141_000;

/// `VkPhysicalDeviceShaderBfloat16FeaturesKHR`, which `ash` does not have yet.
#[repr(C)]
struct Bfloat16Features<'a> {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    types: vk::Bool32,
    dot_product: vk::Bool32,
    matrices: vk::Bool32,
    _lifetime: PhantomData<&'a ()>,
}

// SAFETY: the layout and the structure type are the ones of the specification.
unsafe impl vk::TaggedStructure for Bfloat16Features<'_> {
    const STRUCTURE_TYPE: vk::StructureType = vk::StructureType::from_raw(1_000_141_000);
}
// SAFETY: the specification allows this structure in the chain.
unsafe impl vk::ExtendsPhysicalDeviceFeatures2 for Bfloat16Features<'_> {}
// SAFETY: the specification allows this structure in the chain.
unsafe impl vk::ExtendsDeviceCreateInfo for Bfloat16Features<'_> {}

impl Default for Bfloat16Features<'_> {
    fn default() -> Self {
        let s_type = <Self as vk::TaggedStructure>::STRUCTURE_TYPE;
        let (p_next, no) = (std::ptr::null_mut(), vk::FALSE);
        Bfloat16Features { s_type, p_next, types: no, dot_product: no, matrices: no, _lifetime: PhantomData }
    }
}

/// Opens an adapter's device. Returns `None` if the adapter is not Vulkan's, is too old, or lacks a feature. `wgpu`
/// opens such adapters.
pub fn open(
    adapter: &wgpu::Adapter,
    description: &wgpu::DeviceDescriptor<'_>,
) -> Option<(wgpu::Device, wgpu::Queue, Vulkan)> {
    // SAFETY: the adapter is used while the guard lives, and nothing is destroyed.
    let hal = unsafe { adapter.as_hal::<Api>() }?;
    let mut found = describe(&hal)?;
    let cooperative = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    found.bfloat16 = found.bfloat16.filter(|_| description.required_features.contains(cooperative));
    let mut bfloat16 = Bfloat16Features { types: vk::TRUE, matrices: vk::TRUE, ..Default::default() };
    let callback: Box<wgpu::hal::vulkan::CreateDeviceCallback<'_>> = Box::new(|args| {
        if found.bfloat16.is_some() {
            args.extensions.push(BFLOAT16);
            *args.create_info = std::mem::take(args.create_info).push_next(&mut bfloat16);
        }
    });
    // SAFETY: the callback adds an extension and its features, both of which the device has.
    let opened = unsafe {
        hal.open_with_callback(
            description.required_features,
            &description.required_limits,
            &description.memory_hints,
            Some(callback),
        )
    };
    drop(hal);
    // SAFETY: the device was opened from this adapter, with these features.
    let made = unsafe { adapter.create_device_from_hal::<Api>(opened.ok()?, description) };
    let (device, queue) = made.ok()?;
    Some((device, queue, found))
}

/// Asks the driver for a device's capabilities.
fn describe(hal: &<Api as wgpu::hal::Api>::Adapter) -> Option<Vulkan> {
    let device = hal.raw_physical_device();
    let (entry, instance) = (hal.shared_instance().entry(), hal.shared_instance().raw_instance());
    let mut controls = vk::PhysicalDeviceFloatControlsProperties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut controls);
    // SAFETY: the device belongs to the instance, and instances of Vulkan 1.1 have the function.
    unsafe { instance.get_physical_device_properties2(device, &mut properties) };
    let version = match properties.properties.api_version {
        v if v >= vk::API_VERSION_1_3 => (1, 6),
        v if v >= vk::API_VERSION_1_2 => (1, 5),
        _ => return None,
    };
    let independent = controls.denorm_behavior_independence != vk::ShaderFloatControlsIndependence::NONE;
    let specials = Widths {
        b16: controls.shader_signed_zero_inf_nan_preserve_float16 == vk::TRUE,
        b32: controls.shader_signed_zero_inf_nan_preserve_float32 == vk::TRUE,
        b64: controls.shader_signed_zero_inf_nan_preserve_float64 == vk::TRUE,
    };
    let denormals = Widths {
        b32: independent && controls.shader_denorm_preserve_float32 == vk::TRUE,
        ..Widths::default()
    };
    let mut bfloat16 = None;
    let capabilities = hal.physical_device_capabilities();
    if capabilities.supports_extension(BFLOAT16)
        && capabilities.supports_extension(khr::cooperative_matrix::NAME)
    {
        let mut has = Bfloat16Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut has);
        // SAFETY: the device belongs to the instance, and has the extension of these features.
        unsafe { instance.get_physical_device_features2(device, &mut features) };
        let matrices = khr::cooperative_matrix::Instance::new(entry, instance);
        // SAFETY: the device belongs to the instance, and has the extension of cooperative matrices.
        let all = unsafe { matrices.get_physical_device_cooperative_matrix_properties(device) };
        let fits = |m: &vk::CooperativeMatrixPropertiesKHR<'_>, size: u32| {
            [m.m_size, m.n_size, m.k_size] == [size; 3]
                && [m.a_type, m.b_type].iter().all(|t| t.as_raw() == BFLOAT16_COMPONENT)
                && [m.c_type, m.result_type] == [vk::ComponentTypeKHR::FLOAT32; 2]
                && m.scope == vk::ScopeKHR::SUBGROUP
        };
        let all = all.ok().filter(|_| [has.types, has.matrices] == [vk::TRUE; 2]).unwrap_or_default();
        bfloat16 = [16, 8].into_iter().find(|size| all.iter().any(|m| fits(m, *size)));
    }
    Some(Vulkan { version, specials, denormals, bfloat16 })
}
