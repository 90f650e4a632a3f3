//! An opened adapter: device, queue, what it can do, and whether it is still there.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::gpu::adapter::{AdapterError, FEATURES, adapter};
use crate::gpu::cache::DiskCache;
use crate::gpu::print::Target;
use crate::gpu::tiling::{MATRIX, SUBGROUP};

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Names of optional features that are not used, `limits` for WebGPU's baseline limits, and `random` for random
    /// numbers as eager CPU draws them, by the host path: `TANDEM_GPU_WITHOUT`.
    pub without: Vec<String>,
    /// Whether shaders check bounds: `TANDEM_GPU_CHECKS=1`.
    pub checks: bool,
    /// Whether large products of halves may use cooperative matrices: `TANDEM_GPU_COOPERATIVE=1`.
    pub cooperative: bool,
    /// Folder in which compiled kernels are kept: `TANDEM_CACHE_DIR`.
    pub cache: Option<PathBuf>,
}

/// An opened adapter.
#[derive(Debug)]
pub struct Gpu {
    /// The device.
    pub device: wgpu::Device,
    /// Its only queue.
    pub queue: wgpu::Queue,
    /// `N` of `tandem:N`.
    pub index: u8,
    /// What it is called.
    pub name: String,
    /// What kernels may use.
    pub target: Target,
    /// The most bytes of a buffer that a kernel can reach.
    pub max_binding: u64,
    /// The most bytes of a buffer.
    pub max_buffer: u64,
    /// The most buffers that a kernel can reach.
    pub max_buffers: u32,
    /// The most workgroups along one axis.
    pub max_groups: u32,
    /// Steps in which parameters may lie in a uniform buffer, in bytes.
    pub uniform_step: u32,
    /// Steps in which what a kernel reaches of a buffer may begin, in bytes.
    pub binding_step: u64,
    /// Whether shaders check bounds.
    pub checks: bool,
    /// Whether random numbers are drawn on the host.
    pub host_random: bool,
    /// Kept pipelines, where the driver can keep them.
    pub cache: Option<DiskCache>,
    /// What ended it: errors that nobody expected, the device's loss.
    ended: Arc<Mutex<Option<String>>>,
}

/// Whether an adapter multiplies 16 by 16 matrices of halves into floats, by subgroups of 32 threads.
fn has_cooperative_matrices(adapter: &wgpu::Adapter) -> bool {
    let needed = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX | wgpu::Features::SHADER_F16;
    let info = adapter.get_info();
    let fits = |c: &wgpu::CooperativeMatrixProperties| {
        let sizes = [c.m_size, c.n_size, c.k_size] == [MATRIX; 3];
        let types = [c.ab_type, c.cr_type];
        sizes && types == [wgpu::CooperativeScalarType::F16, wgpu::CooperativeScalarType::F32]
    };
    adapter.features().contains(needed)
        && [info.subgroup_min_size, info.subgroup_max_size] == [SUBGROUP; 2]
        && adapter.cooperative_matrix_properties().iter().any(fits)
}

impl Gpu {
    /// Opens the adapter of a number as `tandem:index`.
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
        // Off unless asked for: the kernels have not run on an adapter that has them.
        let cooperative = options.cooperative && has_cooperative_matrices(&adapter);
        if cooperative {
            features |= wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX | wgpu::Features::SHADER_F16;
        }
        let experimental_features = if cooperative {
            // SAFETY: `naga` validates the kernels that use the feature; they stay within workgroup memory's bounds.
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
        let (device, queue) = pollster::block_on(adapter.request_device(&description)).map_err(refused)?;
        let ended = Arc::new(Mutex::new(None));
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
            target: Target {
                int64: features.contains(wgpu::Features::SHADER_INT64),
                // Parameters of 64-bit floats are made of 64-bit integers.
                float64: features.contains(wgpu::Features::SHADER_F64 | wgpu::Features::SHADER_INT64),
                immediates: limits.max_immediate_size,
                cooperative,
            },
            max_binding: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size),
            max_buffer: limits.max_buffer_size,
            max_buffers: limits.max_storage_buffers_per_shader_stage,
            max_groups: limits.max_compute_workgroups_per_dimension,
            uniform_step: limits.min_uniform_buffer_offset_alignment,
            binding_step: u64::from(limits.min_storage_buffer_offset_alignment).max(16),
            checks: options.checks,
            host_random: without("random"),
            device,
            queue,
            cache,
            ended,
        })
    }

    /// What errors call it.
    pub fn title(&self) -> String {
        format!("tandem:{} ({})", self.index, self.name)
    }

    /// Why nothing works any more, where that is so.
    pub fn ended(&self) -> Option<String> {
        self.ended.lock().clone()
    }

    /// Runs `work`; an error that it causes is told in words.
    pub fn scoped<T>(&self, filter: wgpu::ErrorFilter, work: impl FnOnce() -> T) -> Result<T, String> {
        let scope = self.device.push_error_scope(filter);
        let value = work();
        match pollster::block_on(scope.pop()) {
            None => Ok(value),
            Some(error) => Err(error.to_string()),
        }
    }
}
