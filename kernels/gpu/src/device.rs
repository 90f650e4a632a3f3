//! An opened adapter: the wgpu device and queue, capabilities and limits, and whether the device was lost.

use std::path::PathBuf;
use std::sync::Arc;

use crate::adapter::{AdapterError, FEATURES, adapter};
use crate::bundling::Limits;
use crate::cache::DiskCache;
use crate::print::Target;
use crate::tiling::Matrices;
use crate::vulkan::{self, Vulkan};
use tandem_executor::threads::locks::{Mutex, Rank};

/// Options for opening a device.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Names of optional features that are not used, from `TANDEM_GPU_WITHOUT`. Besides WebGPU features:
    ///
    /// - `limits`: the adapter's limits, so that WebGPU's default limits are used.
    /// - `random`: random numbers on the device, so that the host path draws them, with the values of eager CPU.
    /// - `matrices`: cooperative matrices.
    /// - `spirv`: kernels as SPIR-V.
    pub without: Vec<String>,
    /// Whether shaders check bounds (`TANDEM_GPU_CHECKS=1`).
    pub checks: bool,
    /// Folder of compiled kernels (`TANDEM_CACHE_DIR`).
    pub cache: Option<PathBuf>,
}

/// An opened device with its capabilities and limits.
#[derive(Debug)]
pub struct Gpu {
    /// wgpu device.
    pub device: wgpu::Device,
    /// Queue of the device.
    pub queue: wgpu::Queue,
    /// `N` of the PyTorch device `tandem:N`.
    pub index: u8,
    /// Name of the adapter.
    pub name: String,
    /// Whether the adapter is a device of its own rather than software on the CPU.
    pub is_hardware: bool,
    /// Capabilities that the text of kernels depends on.
    pub target: Target,
    /// Capabilities of the device beyond `wgpu`'s features, if kernels are passed as SPIR-V.
    pub vulkan: Option<Vulkan>,
    /// Maximum number of bytes of a buffer that can be bound to a kernel.
    pub max_binding: u64,
    /// Maximum size of a buffer in bytes.
    pub max_buffer: u64,
    /// Maximum number of storage buffers bound to a kernel.
    pub max_buffers: u32,
    /// Maximum number of workgroups along one axis of a dispatch.
    pub max_groups: u32,
    /// Alignment of dynamic offsets in uniform buffers, in bytes.
    pub uniform_step: u32,
    /// Alignment of offsets of storage bindings, in bytes; at least 16.
    pub binding_step: u64,
    /// Whether shaders check bounds.
    pub checks: bool,
    /// Whether random numbers are drawn by the host path.
    pub host_random: bool,
    /// Disk cache of pipelines, if the driver supports one.
    pub cache: Option<DiskCache>,
    /// Message of the first uncaptured error or of the loss of the device.
    ended: Arc<Mutex<Option<String>>>,
}

/// Features of kernels that use cooperative matrices.
const MATRICES: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::SHADER_F16);

/// The adapter's cooperative matrices of f16 with 32-bit sums. `None` if there are none, or if subgroups have several
/// sizes.
fn matrices(adapter: &wgpu::Adapter) -> Option<Matrices> {
    let info = adapter.get_info();
    let subgroup = info.subgroup_min_size;
    if !adapter.features().contains(MATRICES) || info.subgroup_max_size != subgroup {
        return None;
    }
    let all = adapter.cooperative_matrix_properties();
    let fits = |size: &u32| {
        all.iter().any(|c| {
            [c.m_size, c.n_size, c.k_size] == [*size; 3]
                && [c.ab_type, c.cr_type]
                    == [wgpu::CooperativeScalarType::F16, wgpu::CooperativeScalarType::F32]
        })
    };
    let size = [16, 8].into_iter().find(fits)?;
    Some(Matrices { size, subgroup, bfloat16: false })
}

/// A device, its queue, and its capabilities beyond `wgpu`'s features.
type Opened = (wgpu::Device, wgpu::Queue, Option<Vulkan>);

/// Opens the device of an adapter. With `own`, it is a Vulkan device that Tandem creates itself, if that is possible.
fn opened(
    adapter: &wgpu::Adapter,
    description: &wgpu::DeviceDescriptor<'_>,
    own: bool,
) -> Result<Opened, wgpu::RequestDeviceError> {
    if own && let Some((device, queue, vulkan)) = vulkan::open(adapter, description) {
        return Ok((device, queue, Some(vulkan)));
    }
    let (device, queue) = pollster::block_on(adapter.request_device(description))?;
    Ok((device, queue, None))
}

impl Gpu {
    /// The properties that bundles depend on.
    pub(super) fn bundles(&self) -> Limits {
        Limits { buffers: self.max_buffers, int16: self.target.int16 }
    }

    /// Opens the adapter with index `number` as `tandem:index`.
    pub fn open(number: usize, index: u8, options: &Options) -> Result<Gpu, AdapterError> {
        let missing = || AdapterError::None { asked: number.to_string(), hint: "" };
        let adapter = adapter(number).ok_or_else(missing)?;
        let info = adapter.get_info();
        let without = |name: &str| options.without.iter().any(|w| w == name);
        let baseline = without("limits");
        let offered = adapter.features();
        let mut features = wgpu::Features::empty();
        for (name, feature) in FEATURES {
            if offered.contains(feature) && !without(name) {
                features |= feature;
            }
        }
        if offered.contains(wgpu::Features::PIPELINE_CACHE) {
            features |= wgpu::Features::PIPELINE_CACHE;
        }
        if offered.contains(wgpu::Features::TIMESTAMP_QUERY) {
            features |= wgpu::Features::TIMESTAMP_QUERY;
        }
        let own = offered.contains(wgpu::Features::PASSTHROUGH_SHADERS) && !without("spirv");
        if own {
            features |= wgpu::Features::PASSTHROUGH_SHADERS;
        }
        let mut matrices = matrices(&adapter).filter(|_| !without("matrices"));
        if matrices.is_some() {
            features |= MATRICES;
        }
        let experimental_features = if matrices.is_some() {
            // SAFETY: the only experimental feature enabled is cooperative matrices. `naga` validates the kernels
            // that use them, and their loads and stores stay within the arrays in workgroup memory.
            unsafe { wgpu::ExperimentalFeatures::enabled() }
        } else {
            wgpu::ExperimentalFeatures::disabled()
        };
        let immediates = features.contains(wgpu::Features::IMMEDIATES);
        let mut limits = if baseline { wgpu::Limits::default() } else { adapter.limits() };
        limits.max_immediate_size = if immediates { adapter.limits().max_immediate_size } else { 0 };
        let description = wgpu::DeviceDescriptor {
            label: Some("tandem"),
            required_features: features,
            required_limits: limits.clone(),
            experimental_features,
            ..Default::default()
        };
        let refused = |e: wgpu::RequestDeviceError| AdapterError::Refused {
            name: info.name.clone(),
            error: e.to_string(),
        };
        let (device, queue, vulkan) = opened(&adapter, &description, own).map_err(refused)?;
        if let Some(matrices) = &mut matrices {
            matrices.bfloat16 = vulkan.is_some_and(|vulkan| vulkan.bfloat16() == Some(matrices.size));
        }
        let ended = Arc::new(Mutex::new(Rank::GpuEnded, None));
        let tell = ended.clone();
        device.set_device_lost_callback(move |reason, text| {
            tell.lock().get_or_insert_with(|| format!("the device was lost ({reason:?}): {text}"));
        });
        let tell = ended.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            tracing::error!(%error, "the GPU reports an error that nobody expected");
            tell.lock().get_or_insert_with(|| error.to_string());
        }));
        let folder = options.cache.as_deref();
        let cache = folder.and_then(|folder| DiskCache::open(folder, &device, &info));
        Ok(Gpu {
            index,
            name: info.name.clone(),
            is_hardware: info.device_type != wgpu::DeviceType::Cpu,
            target: Target {
                int64: features.contains(wgpu::Features::SHADER_INT64),
                int16: features.contains(wgpu::Features::SHADER_I16),
                // Native f64 is only used together with native i64, because parameters of type f64 are assembled from
                // 64-bit integers.
                float64: features.contains(wgpu::Features::SHADER_F64 | wgpu::Features::SHADER_INT64),
                immediates: limits.max_immediate_size,
                matrices,
            },
            max_binding: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size),
            max_buffer: limits.max_buffer_size,
            max_buffers: limits.max_storage_buffers_per_shader_stage,
            max_groups: limits.max_compute_workgroups_per_dimension,
            uniform_step: limits.min_uniform_buffer_offset_alignment,
            binding_step: u64::from(limits.min_storage_buffer_offset_alignment).max(16),
            vulkan,
            checks: options.checks,
            host_random: without("random"),
            device,
            queue,
            cache,
            ended,
        })
    }

    /// Name of the device in error messages.
    pub fn title(&self) -> String {
        format!("tandem:{} ({})", self.index, self.name)
    }

    /// Reason why the device cannot be used any more, or `None` if it can.
    pub fn ended(&self) -> Option<String> {
        self.ended.lock().clone()
    }

    /// Runs `work` in an error scope. Returns the message of an error that matches `filter`.
    pub fn scoped<T>(&self, filter: wgpu::ErrorFilter, work: impl FnOnce() -> T) -> Result<T, String> {
        let scope = self.device.push_error_scope(filter);
        let value = work();
        match pollster::block_on(scope.pop()) {
            None => Ok(value),
            Some(error) => Err(error.to_string()),
        }
    }
}
