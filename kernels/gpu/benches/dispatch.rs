//! Benchmark: CPU time per op of GraphRunner's thread on the wgpu executor, after all kernels are compiled and
//! cached.
//!
//! Run with `cargo bench -p tandem-gpu --bench dispatch`. Measures runs of 100 additions on any adapter,
//! including a software adapter; the adapter's own threads, which run its kernels, are not counted.

#![recursion_limit = "256"]

use std::ffi::c_void;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tandem_executor::driver::Driver;
use tandem_executor::executor::Executor;
use tandem_executor::host::Mt19937;
use tandem_executor::host::{HostError, HostKernels, HostResult, Product};
use tandem_executor::ops::registry::Operators;
use tandem_executor::run::{BlockRun, OpDeclaration};
use tandem_gpu::GpuDevice;
use tandem_gpu::adapter::{Choice, choose, list};
use tandem_gpu::device::{Gpu, Options};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{BlockId, LocationId, NodeId, OpId, StorageId};
use tandem_tracegraph::node::{ArgSpec, InputSpec, NodeKey, Number, OutSpec, Outputs, Variant};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

/// Replaces PyTorch, which this benchmark does not call.
struct NoTorch;

// SAFETY: `parallel` passes all elements as one range, and there are no objects to keep alive.
unsafe impl HostKernels for NoTorch {
    unsafe fn call(&self, _: &Call<'_>, _: &mut dyn FnMut(HostResult<'_>)) -> Result<(), HostError> {
        // SAFETY: the exceptions of this host are null, and `exception_drop` ignores them.
        Err(unsafe { HostError::new(std::ptr::null_mut()) })
    }
    fn operators(&self) -> &Operators {
        static OPERATORS: LazyLock<Operators> = LazyLock::new(|| {
            let operators = Operators::new();
            operators.declare("aten::add.Tensor", &[false; 3]);
            operators
        });
        &OPERATORS
    }
    fn parallel(&self, n: usize, _: f64, body: &(dyn Fn(usize, usize) + Sync)) {
        body(0, n);
    }

    unsafe fn draw(&self, _: *mut c_void, _: &mut dyn FnMut(&mut Mt19937)) -> bool {
        false
    }

    unsafe fn exponential(&self, _: *mut c_void, _: &mut [f32]) -> bool {
        false
    }

    unsafe fn multiply(&self, _: &Product) -> bool {
        false
    }

    unsafe fn random_key(&self, _: *mut c_void) -> u64 {
        0
    }
    fn buffer_new(&self, _: u64) -> Result<*mut c_void, HostError> {
        Ok(std::ptr::null_mut())
    }
    unsafe fn buffer_retain(&self, _: *mut c_void) {}
    unsafe fn buffer_release(&self, _: *mut c_void) {}
    unsafe fn buffer_bytes(&self, _: *mut c_void) -> (*mut u8, u64) {
        (std::ptr::null_mut(), 0)
    }
    unsafe fn buffer_is_shared(&self, _: *mut c_void) -> bool {
        false
    }
    unsafe fn buffer_resize(&self, _: *mut c_void, _: u64) -> Result<(), HostError> {
        Ok(())
    }
    unsafe fn generator_retain(&self, _: *mut c_void) {}
    unsafe fn generator_release(&self, _: *mut c_void) {}
    unsafe fn exception_drop(&self, _: *mut c_void) {}
}

static TORCH: NoTorch = NoTorch;

const OPS: u32 = 100;

fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid `timespec` that may be written.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// `y = x + alpha * x` for `n` elements.
fn addition(n: i64) -> OpDeclaration {
    let meta = TensorMeta::new(&[n], &[1], Dtype::FLOAT32, 0);
    let out = OutSpec::NewStorage { storage: 0, meta: meta.clone(), offset: 0 };
    let outputs =
        Outputs { outs: vec![out], new_storages: [n as u64 * 4].into_iter().collect(), resized: Vec::new() };
    let variant = Variant::new(vec![meta.clone(), meta].into(), Box::default(), outputs);
    OpDeclaration {
        key: NodeKey {
            op: OpId(0),
            args: Box::new([ArgSpec::Tensor, ArgSpec::Tensor, ArgSpec::Value(Number::Int)]),
            inputs: Box::new([InputSpec::Storage, InputSpec::Storage]),
            device: 0,
            modes: u64::from(Dtype::FLOAT32.0) << 56,
            location: LocationId::UNKNOWN,
        },
        variants: vec![Arc::new(variant)],
        writes: Box::default(),
        sized_by_number: false,
        draws: false,
        pure: true,
    }
}

/// A chain of additions. Each addition reads the result of the previous one, which is then released.
fn chain() -> BlockRun {
    let mut run = BlockRun::default();
    for i in 0..OPS {
        run.push(BlockId(0), i, 0);
        let input = StorageId(i);
        run.storages.extend([input, input, StorageId(i + 1)]);
        run.offsets.extend([0, 0]);
        run.numbers.push(1);
        if i > 0 {
            run.released.push(input);
        }
    }
    run
}

fn main() {
    let adapters = list();
    let Ok(Choice::Adapter(index)) = choose("gpu", true, 0, &adapters) else {
        println!("there is no adapter");
        return;
    };
    for without in [vec![], vec!["immediates".to_owned()]] {
        let parameters = if without.is_empty() { "as the adapter offers" } else { "in a uniform buffer" };
        let gpu = match Gpu::open(index, 0, &Options { without, ..Options::default() }) {
            Ok(gpu) => gpu,
            Err(error) => return println!("{error}"),
        };
        let mut executor = Driver::on(GpuDevice::new(gpu, &TORCH));
        for node in 1..=OPS {
            executor.program().declare(NodeId(node), addition(256));
        }
        executor.program().lower(vec![(1..=OPS).map(NodeId).collect()]);
        executor.device().allocate(StorageId(0), 0, 1024).expect("there is memory");
        let run = chain();
        let mut times = Vec::new();
        for round in 0..300 {
            let begin = thread_cpu_time();
            executor.run(&run);
            let spent = thread_cpu_time() - begin;
            if round >= 100 {
                times.push(spent.as_nanos() as f64 / f64::from(OPS));
            }
        }
        executor.device().synchronize();
        times.sort_by(f64::total_cmp);
        println!(
            "{}, parameters {parameters}: {:.0} ns an op (quartiles {:.0} to {:.0})",
            adapters[index].name,
            times[times.len() / 2],
            times[times.len() / 4],
            times[times.len() * 3 / 4],
        );
    }
}
