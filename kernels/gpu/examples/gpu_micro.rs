//! The part of the GPU check that needs no PyTorch: an adapter's properties, its ceilings and costs, and the arithmetic
//! of its compiler.
//!
//! `gpu_micro facts|ceilings|probes [--adapter N] [--seconds S]` prints a JSON object a row, as soon as the row is known.
//! Times are medians of wall-clock times of whole submissions, so that they include the driver.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_gpu::adapter::{adapter, list};
use tandem_gpu::device::{Gpu, Options};
use tandem_gpu::pipelines::{shader_module, storage_layout};

/// Number of threads of a workgroup.
const WORKGROUP: u32 = 256;
/// Number of timings whose median is a row's figure.
const TIMINGS: usize = 7;
/// Number of fetches whose quantiles are reported.
const FETCHES: usize = 100;
/// Number of kernels that are compiled for a row.
const SHADERS: usize = 20;

type Failure = Box<dyn std::error::Error>;

/// Prints a row.
fn row(value: Value) {
    println!("{value}");
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// An opened adapter, and the sizes and times of its measurements.
struct Bench {
    gpu: Arc<Gpu>,
    /// Size in bytes of large buffers.
    bytes: u64,
    /// Approximate time of a timing, in seconds.
    patience: f64,
}

impl Bench {
    fn buffer(&self, bytes: u64) -> wgpu::Buffer {
        self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    }

    /// A buffer with these words.
    fn words(&self, words: &[u32]) -> wgpu::Buffer {
        let buffer = self.buffer(size_of_val(words) as u64);
        self.gpu.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(words));
        buffer
    }

    /// Compiles a kernel in the way of the executor, or with `wgpu`'s bounds checks. `written` says for each buffer
    /// whether the kernel writes it.
    fn pipeline(
        &self,
        source: &str,
        written: &[bool],
        checked: bool,
    ) -> Result<wgpu::ComputePipeline, Failure> {
        let device = &self.gpu.device;
        let module = if checked {
            let source = wgpu::ShaderSource::Wgsl(source.into());
            device.create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source })
        } else {
            shader_module(&self.gpu, "measured", source)?
        };
        let group = storage_layout(device, written);
        let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&group)],
            immediate_size: 0,
        });
        Ok(device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: Some(&layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        }))
    }

    fn bind(&self, pipeline: &wgpu::ComputePipeline, buffers: &[&wgpu::Buffer]) -> wgpu::BindGroup {
        let entries: Vec<wgpu::BindGroupEntry<'_>> = buffers
            .iter()
            .enumerate()
            .map(|(i, buffer)| wgpu::BindGroupEntry {
                binding: i as u32,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        self.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        })
    }

    fn encoder(&self) -> wgpu::CommandEncoder {
        self.gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    fn wait(&self) -> Result<(), Failure> {
        self.gpu.device.poll(wgpu::PollType::Wait { submission_index: None, timeout: None })?;
        Ok(())
    }

    /// Seconds of one command. `record` records several, and the result is the median over submissions.
    fn time(&self, mut record: impl FnMut(&mut wgpu::CommandEncoder)) -> Result<f64, Failure> {
        let mut submit = |count: usize| -> Result<f64, Failure> {
            let begin = Instant::now();
            let mut encoder = self.encoder();
            (0..count).for_each(|_| record(&mut encoder));
            self.gpu.queue.submit([encoder.finish()]);
            self.wait()?;
            Ok(begin.elapsed().as_secs_f64() / count as f64)
        };
        submit(1)?;
        let count = (self.patience / submit(1)?).clamp(1.0, 100.0) as usize;
        let times: Result<Vec<f64>, Failure> = (0..TIMINGS).map(|_| submit(count)).collect();
        Ok(median(times?))
    }

    /// Reads a buffer of words.
    fn read(&self, buffer: &wgpu::Buffer) -> Result<Vec<u32>, Failure> {
        let staging = self.staging(buffer.size());
        let mut encoder = self.encoder();
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, buffer.size());
        self.gpu.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |_| {});
        self.wait()?;
        let words = bytemuck::pod_collect_to_vec(&staging.get_mapped_range(..)?);
        Ok(words)
    }

    fn staging(&self, bytes: u64) -> wgpu::Buffer {
        self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    }
}

/// Prints the properties that the driver reports for each adapter.
fn facts() {
    for listing in list() {
        let Some(adapter) = adapter(listing.index) else { continue };
        let (info, limits) = (adapter.get_info(), adapter.limits());
        let matrices: Vec<String> =
            adapter.cooperative_matrix_properties().iter().map(|of| format!("{of:?}")).collect();
        let features: Vec<&str> = adapter.features().iter_names().map(|(name, _)| name).collect();
        row(json!({
            "row": "adapter",
            "listing": listing,
            "vendor": info.vendor,
            "device": info.device,
            "subgroup": [info.subgroup_min_size, info.subgroup_max_size],
            "features": features,
            "cooperative_matrices": matrices,
            "max_buffer": limits.max_buffer_size,
            "max_workgroup_memory": limits.max_compute_workgroup_storage_size,
            "max_workgroup": limits.max_compute_invocations_per_workgroup,
            "max_workgroups": limits.max_compute_workgroups_per_dimension,
            "max_storage_buffers": limits.max_storage_buffers_per_shader_stage,
            "max_immediates": limits.max_immediate_size,
        }));
    }
}

/// The kernel `y = x * 1.5 + 0.5` for `each` elements a thread, in vectors of `lanes` floats.
fn map(each: u32, lanes: u32, elements: u64) -> String {
    let ty = if lanes == 1 { "f32".to_owned() } else { format!("vec{lanes}<f32>") };
    let (units, own) = (elements / u64::from(lanes), each / lanes);
    let body: String = (0..own)
        .map(|i| {
            format!(
                "  {{ let at = first + {}u; if at < {units}u {{ y[at] = x[at] * 1.5 + {ty}(0.5); }} }}\n",
                i * WORKGROUP
            )
        })
        .collect();
    format!(
        "@group(0) @binding(0) var<storage, read> x: array<{ty}>;
@group(0) @binding(1) var<storage, read_write> y: array<{ty}>;
@compute @workgroup_size({WORKGROUP})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_id) thread: vec3<u32>) {{
  let first = (group.y * groups.x + group.x) * {}u + thread.x;
{body}}}",
        WORKGROUP * own
    )
}

/// The kernel that adds 1 to the first word of a buffer.
const INCREMENT: &str = "@group(0) @binding(0) var<storage, read_write> x: array<u32>;
@compute @workgroup_size(1) fn main() { x[0] += 1u; }";

fn dispatch(
    encoder: &mut wgpu::CommandEncoder,
    pipeline: &wgpu::ComputePipeline,
    groups: &[&wgpu::BindGroup],
    [x, y]: [u32; 2],
) {
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    pass.set_pipeline(pipeline);
    for group in groups {
        pass.set_bind_group(0, *group, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }
}

/// Measures bandwidths.
fn bandwidth(bench: &Bench) -> Result<(), Failure> {
    let [from, to] = [bench.buffer(bench.bytes), bench.buffer(bench.bytes)];
    let rate = |seconds: f64| 2.0 * bench.bytes as f64 / seconds / 1e9;
    let spent = bench.time(|encoder| encoder.copy_buffer_to_buffer(&from, 0, &to, 0, bench.bytes))?;
    row(json!({"row": "copy", "bytes": bench.bytes, "gb_s": rate(spent)}));
    let elements = bench.bytes / 4;
    for (each, lanes, checked) in [
        (1, 1, false),
        (2, 1, false),
        (4, 1, false),
        (8, 1, false),
        (4, 4, false),
        (8, 4, false),
        (16, 4, false),
        (4, 4, true),
    ] {
        let pipeline = bench.pipeline(&map(each, lanes, elements), &[false, true], checked)?;
        let group = bench.bind(&pipeline, &[&from, &to]);
        let count = elements.div_ceil(u64::from(WORKGROUP * each));
        let y = count.div_ceil(u64::from(bench.gpu.max_groups));
        let grid = [count.div_ceil(y) as u32, y as u32];
        let spent = bench.time(|encoder| dispatch(encoder, &pipeline, &[&group], grid))?;
        row(json!({
            "row": "map", "elements_a_thread": each, "lanes": lanes, "bounds_checks": checked, "gb_s": rate(spent),
        }));
    }
    Ok(())
}

/// Measures the costs of dispatches, submissions and fetches.
fn costs(bench: &Bench) -> Result<(), Failure> {
    let pipeline = bench.pipeline(INCREMENT, &[true], false)?;
    let buffers: Vec<wgpu::Buffer> = (0..64).map(|_| bench.buffer(4)).collect();
    let groups: Vec<wgpu::BindGroup> =
        buffers.iter().map(|buffer| bench.bind(&pipeline, &[buffer])).collect();
    for (chain, distinct) in [("dependent", 1), ("independent", groups.len())] {
        let all: Vec<&wgpu::BindGroup> = groups.iter().take(distinct).cycle().take(256).collect();
        let spent = bench.time(|encoder| dispatch(encoder, &pipeline, &all, [1, 1]))?;
        row(json!({"row": "chain", "dispatches": chain, "us": spent / all.len() as f64 * 1e6}));
    }
    for count in [1, 8, 64, 512] {
        let all: Vec<&wgpu::BindGroup> = groups.iter().cycle().take(count).collect();
        let mut times = Vec::new();
        for _ in 0..TIMINGS {
            let begin = Instant::now();
            let mut encoder = bench.encoder();
            dispatch(&mut encoder, &pipeline, &all, [1, 1]);
            bench.gpu.queue.submit([encoder.finish()]);
            let submitted = begin.elapsed().as_secs_f64();
            bench.wait()?;
            times.push((submitted, begin.elapsed().as_secs_f64()));
        }
        let [submitted, whole] = [|t: &(f64, f64)| t.0, |t: &(f64, f64)| t.1]
            .map(|part| median(times.iter().map(part).collect()) * 1e6);
        row(json!({"row": "submission", "dispatches": count, "us_to_submit": submitted, "us": whole}));
    }
    for spins in [false, true] {
        let times: Result<Vec<f64>, Failure> =
            (0..FETCHES).map(|_| fetch(bench, &pipeline, &groups[0], spins)).collect();
        let mut times = times?;
        times.sort_by(f64::total_cmp);
        let quantile = |q: f64| times[(times.len() as f64 * q) as usize] * 1e6;
        row(json!({"row": "fetch", "spins": spins, "us_p50": quantile(0.5), "us_p95": quantile(0.95)}));
    }
    Ok(())
}

/// Seconds from the recording of a kernel until its result is in host memory.
fn fetch(
    bench: &Bench,
    pipeline: &wgpu::ComputePipeline,
    group: &wgpu::BindGroup,
    spins: bool,
) -> Result<f64, Failure> {
    let (result, staging) = (bench.buffer(4), bench.staging(4));
    let begin = Instant::now();
    let mut encoder = bench.encoder();
    dispatch(&mut encoder, pipeline, &[group], [1, 1]);
    encoder.copy_buffer_to_buffer(&result, 0, &staging, 0, 4);
    bench.gpu.queue.submit([encoder.finish()]);
    let mapped = Arc::new(AtomicBool::new(false));
    let tell = mapped.clone();
    staging.map_async(wgpu::MapMode::Read, .., move |_| tell.store(true, Ordering::Release));
    while spins && !mapped.load(Ordering::Acquire) && begin.elapsed() < Duration::from_secs(1) {
        bench.gpu.device.poll(wgpu::PollType::Poll)?;
        spin_loop();
    }
    if !mapped.load(Ordering::Acquire) {
        bench.wait()?;
    }
    let word: u32 = bytemuck::pod_read_unaligned(&staging.get_mapped_range(..)?);
    let spent = begin.elapsed().as_secs_f64();
    staging.unmap();
    std::hint::black_box(word);
    Ok(spent)
}

/// Measures how long compilation takes with several threads.
fn compilation(bench: &Bench) {
    let mut distinct = 0;
    for threads in [1, 4, 8] {
        // Drivers cache kernels by their text, so each kernel has constants of its own.
        let sources: Vec<String> = (0..SHADERS)
            .map(|_| {
                distinct += 1;
                map(8, 1, bench.bytes / 4).replace("0.5)", &format!("0.{distinct:04})"))
            })
            .collect();
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for some in sources.chunks(SHADERS.div_ceil(threads)) {
                scope.spawn(move || {
                    some.iter().for_each(|source| drop(bench.pipeline(source, &[false, true], false)))
                });
            }
        });
        let spent = begin.elapsed().as_secs_f64() * 1e3;
        row(json!({"row": "compilation", "threads": threads, "kernels": SHADERS, "ms": spent}));
    }
}

/// A probe: its name, an expression of the floats `a`, `b`, `c` whose bits are the result, these floats, and the bits that
/// separately rounded IEEE 754 operations return.
type Probe = (&'static str, &'static str, [f32; 3], u32);

/// Expressions that reveal how a compiler treats floats.
fn arithmetic() -> Vec<Probe> {
    let (above, tiny) = (1.0 + f32::EPSILON * 1024.0, f32::MIN_POSITIVE / 8.0);
    let product = above * above;
    vec![
        ("product and sum stay apart", "a * b + c", [above, above, -product], 0.0_f32.to_bits()),
        ("product and difference stay apart", "c - a * b", [above, above, product], 0.0_f32.to_bits()),
        ("denormal operands are kept", "a * b", [tiny, 4.0, 0.0], (tiny * 4.0).to_bits()),
        ("denormal sums are kept", "a + b", [tiny, tiny, 0.0], (tiny + tiny).to_bits()),
        ("NaN does not equal itself", "select(0.0, 1.0, !(a == a))", [f32::NAN, 0.0, 0.0], 1.0_f32.to_bits()),
        (
            "NaN is not ordered",
            "select(0.0, 1.0, !(a < b) && !(a >= b))",
            [f32::NAN, 0.0, 0.0],
            1.0_f32.to_bits(),
        ),
        (
            "infinity times 0 is NaN",
            "select(0.0, 1.0, !(a * b == a * b))",
            [f32::INFINITY, 0.0, 0.0],
            1.0_f32.to_bits(),
        ),
        (
            "x - x is NaN for infinity",
            "select(0.0, 1.0, !(a - b == a - b))",
            [f32::INFINITY; 3],
            1.0_f32.to_bits(),
        ),
        ("sums are not reordered", "(a + b) - a", [1e8, 1.0, 0.0], 0.0_f32.to_bits()),
        ("0 keeps its sign", "a * b", [-1.0, 0.0, 0.0], (-0.0_f32).to_bits()),
        ("division is correctly rounded", "a / b", [1.0, 3.0, 0.0], (1.0_f32 / 3.0).to_bits()),
        ("square roots are correctly rounded", "sqrt(a)", [2.0, 0.0, 0.0], 2.0_f32.sqrt().to_bits()),
        (
            "fma rounds once",
            "fma(a, b, c)",
            [above, above, -product],
            above.mul_add(above, -product).to_bits(),
        ),
        ("halfway cases round to even", "f32(i32(round(a)))", [2.5, 0.0, 0.0], 2.0_f32.to_bits()),
    ]
}

/// Prints for each probe whether the adapter's result is the one of IEEE 754.
fn probes(bench: &Bench) -> Result<(), Failure> {
    let halves = (
        "halves round to even",
        "f32(f16(a)) ",
        [1.0 + 1.5 / 1024.0, 0.0, 0.0],
        (1.0_f32 + 2.0 / 1024.0).to_bits(),
    );
    let has_halves = bench.gpu.device.features().contains(wgpu::Features::SHADER_F16);
    let all = arithmetic().into_iter().chain(has_halves.then_some(halves));
    for (name, expression, given, expected) in all {
        let enable = if expression.contains("f16") { "enable f16;\n" } else { "" };
        let source = format!(
            "{enable}@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
@compute @workgroup_size(1) fn main() {{
  let a = x[0]; let b = x[1]; let c = x[2];
  y[0] = bitcast<u32>({expression});
}}"
        );
        let pipeline = bench.pipeline(&source, &[false, true], false)?;
        let (x, y) = (bench.words(&given.map(f32::to_bits)), bench.buffer(4));
        let group = bench.bind(&pipeline, &[&x, &y]);
        let mut encoder = bench.encoder();
        dispatch(&mut encoder, &pipeline, &[&group], [1, 1]);
        bench.gpu.queue.submit([encoder.finish()]);
        let found = bench.read(&y)?[0];
        row(
            json!({"row": "probe", "probe": name, "holds": found == expected, "bits": format!("{found:#010x}")}),
        );
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let phase = args.first().map(String::as_str).unwrap_or_default();
    if phase == "facts" {
        facts();
        return Ok(());
    }
    let number = option("--adapter").map_or(Ok(0), |number| number.parse())?;
    let seconds: f64 = option("--seconds").map_or(Ok(50.0), |seconds| seconds.parse())?;
    let gpu = Arc::new(Gpu::open(number, 0, &Options::default())?);
    // A run prints some thirty rows, each measured with a warm-up and several timings.
    let bench = Bench {
        bytes: if gpu.is_hardware { 256 << 20 } else { 4 << 20 },
        patience: seconds / 30.0 / (TIMINGS + 2) as f64,
        gpu,
    };
    match phase {
        "ceilings" => {
            bandwidth(&bench)?;
            costs(&bench)?;
            compilation(&bench);
        }
        "probes" => probes(&bench)?,
        _ => return Err("usage: gpu_micro facts|ceilings|probes [--adapter N] [--seconds S]".into()),
    }
    Ok(())
}
