//! PyTorch's functions for the executor and the runtime.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tandem_cpu::pool::Pool;
use tandem_cpu::scarcity::may_allocate;
use tandem_executor::host::Mt19937;
use tandem_executor::host::{Buffer, Exception, Generator};
use tandem_executor::host::{HostError, HostKernels, HostResult, HostResultKind, Matrix, Product};
use tandem_executor::ops::registry::Operators;
use tandem_executor::run::HostFeed;
use tandem_executor::threads::floats::Floats;
use tandem_executor::threads::team::{TEAM, is_beside_the_program};
use tandem_runtime::torch::Torch;
use tandem_tracegraph::call::{Call, InlineValue, Input, Place};
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::Locations;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::convert::{Records, window_record};
use crate::ffi::*;
use crate::python::Lines;

/// Memory pool for the outputs of kernels.
pub static POOL: Pool = Pool::new();

#[unsafe(no_mangle)]
extern "C" fn tt_pool_take(nbytes: usize) -> *mut c_void {
    POOL.take(nbytes).map_or(std::ptr::null_mut(), |block| block.as_ptr().cast())
}

/// Returns the pool's free memory to the system. Returns 0 if the pool had no free memory.
#[unsafe(no_mangle)]
extern "C" fn tt_pool_trim() -> i32 {
    let [_, _, free] = POOL.bytes();
    POOL.clear();
    i32::from(free > 0)
}

#[unsafe(no_mangle)]
extern "C" fn tt_may_allocate() -> i32 {
    i32::from(may_allocate())
}

#[unsafe(no_mangle)]
extern "C" fn tt_pool_give(block: *mut c_void) -> i32 {
    i32::from(POOL.give(block.cast()))
}

/// Interface to PyTorch through the shim.
pub struct Shim;

pub static SHIM: Shim = Shim;

/// The operators that PyTorch has declared. Unlike the engine's own table, it can be read while the engine is locked.
pub static OPERATORS: Operators = Operators::new();

/// Whether PyTorch's profilers may be running. They must not see kernels of runs on the program's thread as part of the
/// call that happens to execute the run.
pub static HIDES_KERNELS: AtomicBool = AtomicBool::new(false);

thread_local! {
    static IN_EXECUTOR: Cell<bool> = const { Cell::new(false) };
    static RECORDS: Cell<Records> = Cell::default();
}

/// Returns whether the calling thread is inside a call of the executor. Such a thread must not wait for the executor,
/// because the wait would not end.
pub fn in_executor() -> bool {
    IN_EXECUTOR.get()
}

/// Returns a slice of the shim's memory. The pointer of an empty slice may be null.
///
/// # Safety
///
/// `ptr` must point to `len` items that live as long as `'a`, or `len` must be 0.
unsafe fn items<'a, T>(ptr: *const T, len: usize) -> &'a [T] {
    // SAFETY: `ptr` points to `len` items that live as long as `'a`, and is not used if `len` is 0.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(ptr, len) } }
}

/// Takes the exception that this thread's latest failed function of the shim threw.
pub fn kept() -> HostError {
    // SAFETY: the function has no preconditions and returns an exception that the caller owns.
    unsafe { HostError::new(ttc_take_exception()) }
}

/// Returns a storage that the shim has made, or the exception if the shim has failed and `storage` is null.
fn made(storage: *mut c_void) -> Result<*mut c_void, HostError> {
    if storage.is_null() { Err(kept()) } else { Ok(storage) }
}

fn result(out: &TtOut, resized: bool) -> HostResult<'_> {
    let kind = match out.kind {
        _ if resized => HostResultKind::Resized(out.input),
        OUT_NEW => HostResultKind::NewStorage(out.storage, out.nbytes),
        OUT_SAME => HostResultKind::Same(out.input),
        OUT_ALIAS => HostResultKind::Alias(out.input),
        OUT_HOST => HostResultKind::Host(out.input),
        OUT_LIST => HostResultKind::List(out.input),
        _ => HostResultKind::Undefined,
    };
    // SAFETY: the records point to metadata of tensors that the shim keeps until `ttc_clear`.
    let (sizes, strides) =
        unsafe { (items(out.sizes, out.ndim as usize), items(out.strides, out.ndim as usize)) };
    HostResult { kind, sizes, strides, offset: out.offset, dtype: Dtype(out.dtype), flags: out.flags }
}

/// Minimum number of elements for which PyTorch's kernels use several threads.
const PARALLEL: i64 = 1 << 15;
/// Time that OpenMP's threads spin after a kernel, in the expectation of the next kernel.
const SPINS: Duration = Duration::from_millis(5);

fn elements(input: &Input<'_>) -> i64 {
    input.sizes.iter().product()
}

/// Whether a call has so few elements that the start of threads takes longer than its kernel.
fn is_small(call: &Call<'_>) -> bool {
    call.inputs.iter().map(elements).sum::<i64>() < PARALLEL
}

thread_local! {
    /// Time when this thread's latest kernel on OpenMP's threads ended.
    static LARGE: Cell<Option<Instant>> = const { Cell::new(None) };
}

// SAFETY: `Team::run` and the shim pass disjoint ranges. The shim keeps the objects of PyTorch whose pointers it
// returns and passes alive until `ttc_clear`, or gives the caller a reference to them.
unsafe impl HostKernels for Shim {
    unsafe fn call(&self, call: &Call<'_>, sink: &mut dyn FnMut(HostResult<'_>)) -> Result<(), HostError> {
        let mut records = RECORDS.take();
        records.fill(call);
        let mut outs = TtOuts { outs: std::ptr::null(), n_outs: 0, resized: std::ptr::null(), n_resized: 0 };
        // SAFETY: the records point into `call`, whose objects are alive; the outputs are read before `ttc_clear`.
        unsafe {
            let (args, grad_mode) = (records.args(), i32::from(call.grad_enabled));
            let one_thread = i32::from(OPERATORS.get(call.op).is_always_parallel && is_small(call));
            let status = ttc_call(call.op.0, args.as_ptr(), args.len(), grad_mode, one_thread, &raw mut outs);
            RECORDS.set(records);
            items(outs.outs, outs.n_outs).iter().for_each(|o| sink(result(o, false)));
            items(outs.resized, outs.n_resized).iter().for_each(|o| sink(result(o, true)));
            ttc_clear();
            if status != OK {
                return Err(kept());
            }
        }
        if call.inputs.iter().any(|input| elements(input) >= PARALLEL) {
            LARGE.set(Some(Instant::now()));
        }
        Ok(())
    }

    fn operators(&self) -> &Operators {
        &OPERATORS
    }

    fn parallel(&self, n: usize, grain: f64, body: &(dyn Fn(usize, usize) + Sync)) {
        let spinning = LARGE.get().is_some_and(|ended| ended.elapsed() < SPINS);
        if !spinning || is_beside_the_program() {
            // SAFETY: the function only reads a setting.
            let threads = unsafe { ttc_num_threads() };
            return TEAM.run(threads as usize, n, grain, body);
        }
        // OpenMP's threads keep the floating-point mode with which they were started.
        let mode = Floats::now();
        let body = &|from: usize, to: usize| {
            let _during = mode.during();
            body(from, to);
        };
        type Body<'a> = &'a (dyn Fn(usize, usize) + Sync);
        let body: Body<'_> = body;
        extern "C" fn part(body: *const c_void, from: usize, to: usize) {
            // SAFETY: `body` points to the reference of the same name below, which lives until all parts are done.
            unsafe { (*body.cast::<Body<'_>>())(from, to) }
        }
        // SAFETY: the shim calls `part` with this pointer only before it returns.
        unsafe { ttc_parallel_for(n, grain.max(1.0) as usize, part, (&raw const body).cast()) };
        LARGE.set(Some(Instant::now()));
    }

    unsafe fn multiply(&self, product: &Product) -> bool {
        let matrix = |m: &Matrix| TtMatrix { data: m.data.cast(), transposed: m.transposed, ld: m.ld };
        let Product { double, m, n, k, alpha, beta, .. } = *product;
        let [a, b, c] = [&product.a, &product.b, &product.c].map(matrix);
        let record = TtProduct { is_double: double, m, n, k, alpha, beta, a, b, c };
        // SAFETY: the record has the sizes and addresses of the product's matrices, which are in live memory.
        unsafe { ttc_multiply(&raw const record) != 0 }
    }

    unsafe fn draw(&self, generator: *mut c_void, with: &mut dyn FnMut(&mut Mt19937)) -> bool {
        let twister = Mt19937::from_parts(|words| {
            let (mut left, mut next) = (0, 0);
            // SAFETY: the generator is null or alive, and `words` has room for all words of the state.
            unsafe { ttc_generator_state(generator, words.as_mut_ptr(), &raw mut left, &raw mut next) };
            [left as usize, next as usize]
        });
        let Some(mut twister) = twister else { return false };
        with(&mut twister);
        let (words, [left, next]) = twister.parts();
        // SAFETY: the generator is null or alive, and `words` has all words of the state.
        unsafe { ttc_set_generator_state(generator, words.as_ptr(), left as i32, next as u32) };
        true
    }

    unsafe fn exponential(&self, generator: *mut c_void, to: &mut [f32]) -> bool {
        // SAFETY: the generator is null or alive, and `to` has room for its elements.
        unsafe { ttc_exponential(generator, to.as_mut_ptr(), to.len() as i64) != 0 }
    }

    unsafe fn random_key(&self, generator: *mut c_void) -> u64 {
        // SAFETY: the generator is null or alive.
        unsafe { ttc_random_key(generator) }
    }

    fn buffer_new(&self, nbytes: u64) -> Result<*mut c_void, HostError> {
        // SAFETY: the function has no preconditions.
        made(unsafe { ttc_buffer_new(nbytes) })
    }

    unsafe fn buffer_retain(&self, buffer: *mut c_void) {
        // SAFETY: the buffer is a storage that is alive.
        unsafe { ttc_buffer_retain(buffer) }
    }

    unsafe fn buffer_release(&self, buffer: *mut c_void) {
        // SAFETY: the reference that is released is the caller's.
        unsafe { ttc_buffer_release(buffer) }
    }

    unsafe fn buffer_bytes(&self, buffer: *mut c_void) -> (*mut u8, u64) {
        // SAFETY: the buffer is a storage that is alive.
        unsafe { (ttc_buffer_data(buffer).cast(), ttc_buffer_nbytes(buffer)) }
    }

    unsafe fn buffer_is_shared(&self, buffer: *mut c_void) -> bool {
        // SAFETY: the buffer is a storage that is alive.
        unsafe { ttc_buffer_is_shared(buffer) != 0 }
    }

    unsafe fn buffer_resize(&self, buffer: *mut c_void, nbytes: u64) -> Result<(), HostError> {
        // SAFETY: the buffer is a storage that is alive.
        match unsafe { ttc_buffer_resize(buffer, nbytes) } {
            OK => Ok(()),
            _ => Err(kept()),
        }
    }

    unsafe fn generator_retain(&self, generator: *mut c_void) {
        // SAFETY: the generator is alive.
        unsafe { ttc_generator_retain(generator) }
    }

    unsafe fn generator_release(&self, generator: *mut c_void) {
        // SAFETY: the reference that is released is the caller's.
        unsafe { ttc_generator_release(generator) }
    }

    unsafe fn exception_drop(&self, exception: *mut c_void) {
        // SAFETY: the exception is the caller's.
        unsafe { ttc_drop_exception(exception) }
    }
}

impl Torch for Shim {
    fn snapshot(&self, input: &Input<'_>) -> Result<HostFeed, Exception> {
        let Place::Host(storage) = input.place else { unreachable!("only host windows are snapshotted") };
        // SAFETY: the program's tensor keeps its storage alive during the call, and a window without dimensions
        // has one element, which is inside its storage. The snapshot is new and comes with a reference.
        unsafe {
            if input.sizes.is_empty() {
                let size = input.dtype.size();
                let mut value = InlineValue([0; 16]);
                let from = ttc_buffer_data(storage).cast::<u8>().add(input.offset as usize * size);
                std::ptr::copy_nonoverlapping(from, value.0.as_mut_ptr(), size);
                return Ok(HostFeed::Inline(value));
            }
            let record = window_record(HOST, storage, input);
            let buffer = made(ttc_snapshot(&raw const record));
            let buffer = buffer.map_err(|e| Exception::adopt(e, &SHIM))?;
            Ok(HostFeed::Buffer(Buffer::adopt(buffer, &SHIM)))
        }
    }

    fn generator(&self, generator: *mut c_void) -> Generator {
        // SAFETY: the program's call keeps the generator alive.
        unsafe { Generator::retain(generator, &SHIM) }
    }

    fn line(&self, location: LocationId, locations: &Locations) -> String {
        Lines::default().user_line(location, locations)
    }

    fn thread_settings(&self) -> i32 {
        // SAFETY: the function has no preconditions.
        unsafe { ttc_thread_settings() }
    }

    fn use_thread_settings(&self, settings: i32) {
        // SAFETY: the function has no preconditions.
        unsafe { ttc_use_thread_settings(settings) }
    }

    fn enter_graph_runner(&self) {
        // SAFETY: the function has no preconditions.
        unsafe { ttc_enter_graph_runner() }
    }

    fn in_executor(&self, work: &mut dyn FnMut()) {
        let before = IN_EXECUTOR.replace(true);
        if HIDES_KERNELS.load(Ordering::Relaxed) {
            // SAFETY: the functions only set a thread-local flag.
            let recorded = unsafe { ttc_observe_calls(0) };
            work();
            // SAFETY: the function only sets a thread-local flag.
            unsafe { ttc_observe_calls(recorded) };
        } else {
            work();
        }
        IN_EXECUTOR.set(before);
    }
}
