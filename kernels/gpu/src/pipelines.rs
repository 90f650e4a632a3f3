//! Compilation of kernels on background threads, with a cache by their WGSL text.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::{Sender, unbounded};
use rustc_hash::FxHashMap;

use crate::device::Gpu;
use crate::kernel::Kernel;
use crate::print::{BFLOAT16, parameter_bytes, wgsl};
use crate::structure::structure;
use crate::vulkan;
use tandem_executor::threads::locks::{Condvar, Mutex, Rank};

/// A compiled kernel, or one that is being compiled.
#[derive(Debug)]
pub struct Pipeline {
    /// Name for debugging and error messages.
    pub label: &'static str,
    /// Whether each buffer of bind group 0 is written.
    pub written: Box<[bool]>,
    /// Size of the parameters in bytes.
    pub parameter_bytes: u32,
    /// Whether the parameters are passed as immediates instead of in a uniform buffer.
    pub immediates: bool,
    /// Index of the layout of bind group 0.
    pub layout: u32,
    compiled: Mutex<Option<Result<wgpu::ComputePipeline, String>>>,
    done: Condvar,
}

impl Pipeline {
    /// The compiled pipeline or the compiler's error. Waits while the kernel is being compiled.
    pub fn get(&self) -> Result<wgpu::ComputePipeline, String> {
        let mut compiled = self.compiled.lock();
        loop {
            match &*compiled {
                Some(result) => return result.clone(),
                None => self.done.wait(&mut compiled),
            }
        }
    }

    fn set(&self, result: Result<wgpu::ComputePipeline, String>) {
        *self.compiled.lock() = Some(result);
        self.done.notify_all();
    }
}

struct Compilation {
    pipeline: Arc<Pipeline>,
    source: Arc<str>,
    layout: wgpu::PipelineLayout,
}

/// Pipelines of a device.
#[derive(Debug)]
pub struct Pipelines {
    /// Device that the pipelines are for.
    pub gpu: Arc<Gpu>,
    by_source: FxHashMap<Arc<str>, Arc<Pipeline>>,
    by_structure: FxHashMap<Box<[u32]>, Arc<Pipeline>>,
    /// Layouts of bind group 0, by which buffers are written.
    layouts: Vec<(Box<[bool]>, wgpu::BindGroupLayout)>,
    /// Layout of bind group 1, a uniform buffer with the parameters.
    pub uniforms: wgpu::BindGroupLayout,
    jobs: Sender<Compilation>,
}

impl Pipelines {
    /// An empty cache; starts the threads that compile.
    pub fn new(gpu: Arc<Gpu>) -> Pipelines {
        let uniforms = gpu.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some("parameters"),
            entries: &[wgpu::BindGroupLayoutEntry {
                binding: 0,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Uniform,
                    has_dynamic_offset: true,
                    min_binding_size: None,
                },
                count: None,
            }],
        });
        let (jobs, incoming) = unbounded::<Compilation>();
        for n in 0..std::thread::available_parallelism().map_or(1, |n| n.get().min(8)) {
            let (gpu, incoming) = (gpu.clone(), incoming.clone());
            let compile = move || {
                for job in incoming {
                    // Kernels wait for the result, so a panic of naga or of the driver is turned into an error.
                    let compiled = catch_unwind(AssertUnwindSafe(|| compile(&gpu, &job)));
                    job.pipeline.set(compiled.unwrap_or_else(|_| {
                        let label = job.pipeline.label;
                        Err(format!("the compiler panicked on the kernel {label} for {}", gpu.name))
                    }));
                }
            };
            // The stack is large because naga and drivers recurse. If a thread cannot be started, the other threads do
            // its work.
            let thread =
                std::thread::Builder::new().name(format!("tandem-compiler-{n}")).stack_size(16 << 20);
            if let Err(error) = thread.spawn(compile) {
                tracing::error!(%error, "cannot start a thread that compiles kernels");
            }
        }
        Pipelines {
            gpu,
            by_source: FxHashMap::default(),
            by_structure: FxHashMap::default(),
            layouts: Vec::new(),
            uniforms,
            jobs,
        }
    }

    /// Number of pipelines.
    pub fn len(&self) -> usize {
        self.by_source.len()
    }

    /// Whether there are no pipelines.
    pub fn is_empty(&self) -> bool {
        self.by_source.is_empty()
    }

    /// The layout of bind group 0 with this index.
    pub fn layout(&self, number: u32) -> &wgpu::BindGroupLayout {
        &self.layouts[number as usize].1
    }

    /// The pipeline of a kernel, which is compiled in the background if it is new. Returns `None` if the device
    /// lacks a feature that the kernel needs.
    pub fn of(&mut self, kernel: &Kernel) -> Option<Arc<Pipeline>> {
        if kernel.bufs.len() as u32 > self.gpu.max_buffers {
            return None;
        }
        let structure = structure(kernel);
        if let Some(known) = self.by_structure.get(&structure) {
            return Some(known.clone());
        }
        let source = wgsl(kernel, self.gpu.target)?;
        let pipeline = match self.by_source.get(source.as_str()) {
            Some(known) => known.clone(),
            None => self.compiled(kernel, source),
        };
        self.by_structure.insert(structure, pipeline.clone());
        Some(pipeline)
    }

    /// A new pipeline, which is compiled in the background.
    fn compiled(&mut self, kernel: &Kernel, source: String) -> Arc<Pipeline> {
        tracing::trace!(target: "wgsl", "{}:\n{source}", kernel.label);
        let source: Arc<str> = source.into();
        let written: Box<[bool]> = kernel.bufs.iter().map(|b| b.written).collect();
        let layout = self.layout_of(&written);
        let bytes = parameter_bytes(kernel.words.len());
        let immediates = bytes <= self.gpu.target.immediates;
        let pipeline = Arc::new(Pipeline {
            label: kernel.label,
            written,
            parameter_bytes: bytes,
            immediates,
            layout,
            compiled: Mutex::new(Rank::GpuPipeline, None),
            done: Condvar::new(),
        });
        let groups = [Some(self.layout(layout)), (!immediates).then_some(&self.uniforms)];
        let layout = self.gpu.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.label),
            bind_group_layouts: if immediates { &groups[..1] } else { &groups },
            immediate_size: if immediates { bytes } else { 0 },
        });
        let job = Compilation { pipeline: pipeline.clone(), source: source.clone(), layout };
        // Sending fails only if no thread could be started.
        let _ = self.jobs.send(job);
        self.by_source.insert(source, pipeline.clone());
        pipeline
    }

    fn layout_of(&mut self, written: &[bool]) -> u32 {
        if let Some(known) = self.layouts.iter().position(|(w, _)| **w == *written) {
            return known as u32;
        }
        let layout = storage_layout(&self.gpu.device, written);
        self.layouts.push((written.into(), layout));
        self.layouts.len() as u32 - 1
    }
}

/// The layout of storage buffers at the bindings from 0 on. `written` says for each buffer whether a kernel writes it.
pub fn storage_layout(device: &wgpu::Device, written: &[bool]) -> wgpu::BindGroupLayout {
    let entry = |(binding, written): (usize, &bool)| wgpu::BindGroupLayoutEntry {
        binding: binding as u32,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only: !written },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    };
    let entries: Vec<wgpu::BindGroupLayoutEntry> = written.iter().enumerate().map(entry).collect();
    device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries })
}

/// Makes the module of a kernel: Tandem's SPIR-V if the device takes it, otherwise WGSL for `wgpu`. Errors of `wgpu` go
/// to the error scopes.
pub fn shader_module(gpu: &Gpu, label: &str, source: &str) -> Result<wgpu::ShaderModule, String> {
    let label = Some(label);
    if let Some(vulkan) = gpu.vulkan {
        let spirv = vulkan::spirv(source, vulkan, gpu.checks, source.starts_with(BFLOAT16))?;
        let entry_points =
            [wgpu::PassthroughShaderEntryPoint { name: "main".into(), workgroup_size: (0, 0, 0) }];
        let description = wgpu::ShaderModuleDescriptorPassthrough {
            label,
            entry_points: (&entry_points[..]).into(),
            spirv: Some(spirv.into()),
            ..Default::default()
        };
        // SAFETY: the SPIR-V was printed from a validated kernel, which accesses only elements within the windows bound
        // to it, as explained below.
        return Ok(unsafe { gpu.device.create_shader_module_passthrough(description) });
    }
    let source = wgpu::ShaderSource::Wgsl(source.into());
    let description = wgpu::ShaderModuleDescriptor { label, source };
    if gpu.checks {
        return Ok(gpu.device.create_shader_module(description));
    }
    // SAFETY: kernels access only elements within the windows bound to them. Addresses are computed from coordinates
    // below the windows' sizes, and indices that come from data are compared with the sizes before use. The tests run
    // with bounds checks.
    Ok(unsafe {
        gpu.device.create_shader_module_trusted(description, wgpu::ShaderRuntimeChecks::unchecked())
    })
}

fn compile(gpu: &Gpu, job: &Compilation) -> Result<wgpu::ComputePipeline, String> {
    let label = job.pipeline.label;
    let made = gpu.scoped(wgpu::ErrorFilter::Internal, || {
        gpu.scoped(wgpu::ErrorFilter::Validation, || {
            let module = shader_module(gpu, label, &job.source)?;
            Ok(gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(label),
                layout: Some(&job.layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: gpu.cache.as_ref().map(|c| &c.pipelines),
            }))
        })
    });
    made.and_then(|made| made).and_then(|made| made).map_err(|error: String| {
        tracing::error!(%error, "a kernel does not compile:\n{}", job.source);
        format!("the kernel {label} does not compile on {}: {error}", gpu.name)
    })
}
