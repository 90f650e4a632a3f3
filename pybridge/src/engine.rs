//! The process's engine behind its lock, and the functions that the shim calls.
//!
//! Lock order: engine, GIL, executor. A thread never blocks on the engine's lock or on GraphRunner with the GIL
//! in hand, and never waits for GraphRunner with the engine's lock in hand.

use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::{Mutex, MutexGuard, RwLock};
use pyo3::exceptions::{PyIndexError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use tandem_kernels::cpu::CpuDevice;
use tandem_kernels::deferred::Deferred;
use tandem_kernels::driver::Driver;
use tandem_kernels::error::{Cause, Failure, Fault};
use tandem_kernels::executor::Executor;
use tandem_kernels::gpu::adapter::{Choice, choose, choose_each, entries, list, may_have_gpu};
use tandem_kernels::gpu::device::Gpu;
use tandem_kernels::gpu::{Devices, GpuDevice};
use tandem_kernels::host::Exception;
use tandem_runtime::engine::{Engine, Progress};
use tandem_runtime::error::CallError;
use tandem_runtime::graph_runner::{GraphRunner, Ticket, WaitTime, Waited, Waiter};
use tandem_runtime::site::{AutogradNode, Site};
use tandem_runtime::storage::{AddressRange, Storages, collects_deaths, died};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::OpId;
use tandem_tracegraph::ops::{ArgClass, OpDecl, leaves_default};
use tandem_tracegraph::tensor_meta::Dtype;

use crate::convert::{Reply, context_of, fill, storage_of};
use crate::environment::{ENVIRONMENT, Environment};
use crate::ffi::*;
use crate::host::{POOL, SHIM, in_executor, kept};
use crate::python::{WithoutGil, interrupted, thread_token, user_line, walk_stack};

/// Bytes of address space in which tandem tensors have their addresses.
const ADDRESS_SPACE: usize = 1 << 44;

static ENGINE: LazyLock<Mutex<Engine>> = LazyLock::new(|| {
    let executor = Deferred::new(Box::new(open_executor), &SHIM);
    let runner = GraphRunner::start(executor, &SHIM);
    Mutex::new(Engine::new(ENVIRONMENT.config(), runner, Storages::new(reserve_addresses()), &SHIM))
});

/// What executors ask of operators.
struct Declared {
    name: Arc<str>,
    writes: Box<[bool]>,
}

/// Operators by id, readable while the engine is locked.
static DECLARED: RwLock<Vec<Declared>> = RwLock::new(Vec::new());

static DEVICE_COUNT: LazyLock<usize> = LazyLock::new(|| entries(&ENVIRONMENT.device).len());

/// Number of devices: those that a list names, else one.
pub fn device_count() -> usize {
    *DEVICE_COUNT
}

/// The executor that `TANDEM_DEVICE` asks for.
fn open_executor() -> Result<Box<dyn Executor>, String> {
    let Environment { device, allow_software, own_kernels, .. } = &*ENVIRONMENT;
    let asks_drivers = match device.as_str() {
        "cpu" => false,
        "" => may_have_gpu(),
        _ => true,
    };
    let adapters = if asks_drivers { list() } else { Vec::new() };
    let open = |number, index| {
        let gpu = Gpu::open(number, index, &ENVIRONMENT.gpu).map_err(|e| e.to_string())?;
        Ok::<_, String>(GpuDevice::new(gpu, &SHIM))
    };
    if device_count() > 1 {
        let numbers = choose_each(device, *allow_software, &adapters).map_err(|e| e.to_string())?;
        let all = numbers.into_iter().zip(0..).map(|(number, index)| open(number, index));
        return Ok(Box::new(Driver::on(Devices::new(all.collect::<Result<_, _>>()?))));
    }
    match choose(device, *allow_software, &adapters).map_err(|e| e.to_string())? {
        Choice::Cpu => Ok(Box::new(Driver::on(CpuDevice::new(&SHIM, *own_kernels)))),
        Choice::Adapter(number) => Ok(Box::new(Driver::on(open(number, 0)?))),
    }
}

/// The thread whose ops are traced: the first that issues one.
static PROGRAM_THREAD: AtomicUsize = AtomicUsize::new(0);

/// Set in a forked child, where there is no GraphRunner.
pub static FORKED: AtomicBool = AtomicBool::new(false);

thread_local!(static REPLY: Cell<Option<Box<Reply>>> = const { Cell::new(None) });

fn reserve_addresses() -> AddressRange {
    // SAFETY: a fresh mapping that nothing can access; it is never unmapped.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            ADDRESS_SPACE,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        // Non-canonical on every 64-bit machine with 48-bit addresses: an access faults just as well.
        return AddressRange::new(0x8000_0000_0000, ADDRESS_SPACE as u64);
    }
    AddressRange::new(start as u64, ADDRESS_SPACE as u64)
}

/// Locks the engine without holding up the interpreter.
pub fn lock() -> MutexGuard<'static, Engine> {
    ENGINE.try_lock().unwrap_or_else(|| {
        let gil = WithoutGil::new();
        let engine = ENGINE.lock();
        // The engine comes before the GIL in the lock order.
        drop(gil);
        engine
    })
}

/// Uses the executor. GraphRunner may hold it and need the GIL, for a kernel that is written in Python.
pub fn with_executor<R>(engine: &Engine, with: impl FnOnce(&mut Deferred) -> R) -> R {
    let gil = WithoutGil::new();
    let result = with(&mut engine.runner().executor());
    // The executor's lock is released before the GIL is taken again: the lock order is engine, GIL, executor.
    drop(gil);
    result
}

/// An operator's name.
pub fn op_name(op: OpId) -> String {
    DECLARED.read().get(op.index()).map_or_else(|| "an operator".to_owned(), |d| d.name.to_string())
}

/// Which of its arguments an operator writes.
pub fn op_writes(op: OpId) -> Box<[bool]> {
    DECLARED.read().get(op.index()).map(|d| d.writes.clone()).unwrap_or_default()
}

/// What goes to Python as an exception.
#[derive(Debug)]
pub enum Raise {
    /// An operator failed.
    Call(CallError),
    /// A signal handler raised; the interpreter has the exception.
    Interrupted,
    /// Anything else, in words.
    Message(String),
}

impl From<CallError> for Raise {
    fn from(error: CallError) -> Raise {
        Raise::Call(error)
    }
}

impl Raise {
    /// Leaves the exception in this thread's pending slot.
    fn set_pending(self) {
        let message = |text: &str, kind| {
            // SAFETY: a pointer to `len` bytes.
            unsafe { ttc_set_pending_message(kind, text.as_ptr().cast(), text.len()) }
        };
        match self {
            Raise::Interrupted => message("", PYTHON_ERROR),
            Raise::Message(text) => message(&text, RUNTIME_ERROR),
            Raise::Call(CallError::Dead) => message(&CallError::Dead.to_string(), RUNTIME_ERROR),
            Raise::Call(CallError::Raised(failure)) => match &failure.cause {
                // SAFETY: the failure owns the exception.
                Cause::Kernel(e) => unsafe { ttc_set_pending(e.as_ptr(), std::ptr::null(), 0) },
                _ => message(&explain(&failure), RUNTIME_ERROR),
            },
            Raise::Call(CallError::Poisoned(failure)) => {
                let text = explain(&failure);
                match &failure.cause {
                    // SAFETY: as above; the context is `len` bytes.
                    Cause::Kernel(e) => unsafe {
                        ttc_set_pending(e.as_ptr(), text.as_ptr().cast(), text.len());
                    },
                    Cause::Fault(Fault::Index) => message(&text, INDEX_ERROR),
                    _ => message(&text, RUNTIME_ERROR),
                }
            }
        }
    }
}

/// The failed operator and the user's line.
pub fn explain(failure: &Failure) -> String {
    let engine = lock();
    let line = user_line(failure.location, engine.locations());
    let text = match &failure.cause {
        Cause::Kernel(_) => String::new(),
        cause => format!("tandem: {cause}; "),
    };
    format!("{text}raised by {}, issued at {line} (set TANDEM_SYNC=1 to have it raised there)", failure.name)
}

/// Runs `body` for the shim: errors and panics become a pending exception.
fn for_shim(body: impl FnOnce() -> Result<(), Raise>) -> i32 {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default();
        Err(Raise::Message(format!("tandem: internal error: {text}. Please report it")))
    });
    match outcome {
        Ok(()) => OK,
        Err(raise) => {
            raise.set_pending();
            RAISE
        }
    }
}

/// Waits for GraphRunner, without the GIL and without locks. Signal handlers may end the wait.
fn wait(waiter: &Waiter, ticket: Ticket) -> Result<WaitTime, Raise> {
    wait_unless(waiter, ticket, &mut interrupted)
}

fn wait_unless(
    waiter: &Waiter,
    ticket: Ticket,
    interrupted: &mut dyn FnMut() -> bool,
) -> Result<WaitTime, Raise> {
    let gil = WithoutGil::new();
    let (waited, time) = waiter.wait(ticket, interrupted);
    drop(gil);
    match waited {
        Waited::Reached => Ok(time),
        Waited::Interrupted => Err(Raise::Interrupted),
        Waited::Dead => Err(CallError::Dead.into()),
    }
}

/// Repeats `attempt` on the locked engine until it needs no more waiting.
fn settled<T>(mut attempt: impl FnMut(&mut Engine) -> Result<T, Ticket>) -> Result<T, Raise> {
    check_process()?;
    loop {
        let mut engine = lock();
        match attempt(&mut engine) {
            Ok(value) => return Ok(value),
            Err(ticket) => {
                let waiter = engine.runner().waiter();
                let begin = engine.runner().timeline().now();
                drop(engine);
                let time = wait(&waiter, ticket)?;
                lock().waited(time, false, begin);
            }
        }
    }
}

fn check_process() -> Result<(), Raise> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(Raise::Message(
            "Cannot use tandem tensors in a forked subprocess. To use tandem with multiprocessing, you must use \
             the 'spawn' start method"
                .into(),
        ));
    }
    Ok(())
}

fn is_program_thread() -> bool {
    let token = thread_token();
    match PROGRAM_THREAD.load(Ordering::Relaxed) {
        0 => PROGRAM_THREAD.compare_exchange(0, token, Ordering::Relaxed, Ordering::Relaxed).is_ok(),
        program => program == token,
    }
}

/// Makes the calling thread the program's.
pub fn claim_program_thread() {
    collects_deaths();
    PROGRAM_THREAD.store(thread_token(), Ordering::Relaxed);
}

fn dispatch(op: u32, device: u8, args: &[TtArg], reply: &mut Reply) -> Result<(), Raise> {
    check_process()?;
    if in_executor() {
        return Err(Raise::Message(format!(
            "{} was called on a tandem tensor from inside a kernel that Tandem runs; a custom operator's CPU \
             implementation may use only the tensors it is given",
            op_name(OpId(op))
        )));
    }
    let mut place = TtSite::default();
    // SAFETY: a place to write to.
    unsafe { ttc_site(&raw mut place) };
    let node = AutogradNode { id: place.node, sequence: place.node_sequence };
    let mut site = Site {
        program_thread: is_program_thread(),
        sequence: place.sequence,
        node: (place.node != 0).then_some(node),
        stack: None,
    };
    loop {
        let mut engine = lock();
        let mut call = Call::blank(OpId(op));
        call.device = device;
        call.grad_enabled = place.modes & 1 != 0;
        call.default_dtype = Dtype((place.modes >> 1) as u8);
        // SAFETY: the shim keeps the records alive until tt_dispatch returns.
        unsafe { fill(&mut call, args, engine.storages()) };
        call.numbers_fit = engine.op(call.op).takes(&call);
        match engine.dispatch(&call, &site, reply)? {
            Progress::Done => {
                if let Some(ticket) = engine.runner().inline_work() {
                    let waiter = engine.runner().waiter();
                    let begin = engine.runner().timeline().now();
                    drop(engine);
                    // The call is done and its outputs must reach the program: signals wait until Python runs on.
                    let time = wait_unless(&waiter, ticket, &mut || false)?;
                    lock().waited(time, false, begin);
                }
                return Ok(());
            }
            Progress::NeedStack => {
                drop(engine);
                site.stack = Some(walk_stack());
            }
            Progress::NeedTicket(ticket, fetch) => {
                let waiter = engine.runner().waiter();
                let begin = engine.runner().timeline().now();
                drop(engine);
                let time = wait(&waiter, ticket)?;
                lock().waited(time, fetch, begin);
            }
        }
    }
}

/// Ends an iteration.
pub fn mark_step() -> Result<(), Raise> {
    check_process()?;
    lock().mark_step();
    Ok(())
}

/// Waits until everything is done; the first failure that nobody has seen is raised.
pub fn synchronize() -> Result<(), Raise> {
    let failures = settled(|engine| {
        let ticket = engine.flush();
        if engine.runner().pending() > 0 { Err(ticket) } else { Ok(engine.take_failures()) }
    })?;
    match failures.into_iter().next() {
        Some(failure) => Err(CallError::Poisoned(failure).into()),
        None => Ok(()),
    }
}

/// Waits until everything is done. A forked child has nothing to wait for.
pub fn drain() -> Result<(), Raise> {
    if FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    settled(|engine| {
        let ticket = engine.flush();
        if engine.runner().pending() > 0 { Err(ticket) } else { Ok(()) }
    })
}

/// Waits for pending random draws.
pub fn wait_random() -> Result<(), Raise> {
    if in_executor() || FORKED.load(Ordering::Relaxed) || LazyLock::get(&ENGINE).is_none() {
        return Ok(());
    }
    settled(|engine| engine.flush_random().map_or(Ok(()), Err))
}

/// An exception for pyo3 from one for the shim.
pub fn to_py(raise: Raise, py: Python<'_>) -> PyErr {
    match raise {
        Raise::Interrupted => PyErr::fetch(py),
        Raise::Message(text) => PyRuntimeError::new_err(text),
        Raise::Call(CallError::Dead) => PyRuntimeError::new_err(CallError::Dead.to_string()),
        Raise::Call(CallError::Poisoned(failure) | CallError::Raised(failure)) => {
            let exception = match &failure.cause {
                Cause::Kernel(exception) => exception,
                Cause::Fault(Fault::Index) => return PyIndexError::new_err(explain(&failure)),
                _ => return PyRuntimeError::new_err(explain(&failure)),
            };
            let (kind, message) = describe_exception(exception);
            let text = format!("{message}\n{}", explain(&failure));
            match kind {
                1 => PyIndexError::new_err(text),
                2 => PyValueError::new_err(text),
                3 => PyTypeError::new_err(text),
                4 => PyNotImplementedError::new_err(text),
                5 => torch_error(py, "torch.linalg", "LinAlgError", text),
                6 => torch_error(py, "torch", "OutOfMemoryError", text),
                _ => PyRuntimeError::new_err(text),
            }
        }
    }
}

/// An exception of a class of PyTorch's.
fn torch_error(py: Python<'_>, module: &str, class: &str, text: String) -> PyErr {
    match py.import(module).and_then(|module| module.getattr(class)?.call1((text,))) {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

/// What a registration with PyTorch says.
pub fn registered(status: i32) -> Result<(), Raise> {
    match status {
        OK => Ok(()),
        _ => Err(Raise::Message(describe_exception(&Exception::adopt(kept(), &SHIM)).1)),
    }
}

/// The kind (`TtException`) and the message of a kept exception.
fn describe_exception(exception: &Exception) -> (i32, String) {
    let mut message = vec![0u8; 4096];
    let mut len = 0;
    // SAFETY: the buffer has the capacity that is passed.
    let kind = unsafe {
        ttc_describe_exception(exception.as_ptr(), message.as_mut_ptr().cast(), message.len(), &raw mut len)
    };
    message.truncate(len);
    (kind, String::from_utf8_lossy(&message).into_owned())
}

// --- Called by the shim -----------------------------------------------------------------------------------

/// # Safety
/// `decl` and what it points to are valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_declare_op(decl: *const TtOpDecl) -> u32 {
    // SAFETY: the caller's promise.
    let (decl, name, args, written) = unsafe {
        let d = &*decl;
        let args: &[u8] = if d.n_args == 0 { &[] } else { std::slice::from_raw_parts(d.args, d.n_args) };
        let written: &[u8] =
            if d.n_args == 0 { &[] } else { std::slice::from_raw_parts(d.written, d.n_args) };
        (d, std::slice::from_raw_parts(d.name, d.name_len), args, written)
    };
    let class = |c: &u8| match c {
        b't' => ArgClass::Tensor,
        b's' => ArgClass::Shape,
        b'v' => ArgClass::Value,
        b'd' => ArgClass::Device,
        b'g' => ArgClass::Generator,
        _ => ArgClass::Attr,
    };
    let name = std::str::from_utf8(name).unwrap_or_default();
    let writes: Box<[bool]> = written.iter().map(|w| *w != 0).collect();
    let id = lock().declare(OpDecl {
        name,
        args: args.iter().map(class).collect(),
        written: writes.to_vec(),
        returns_host: decl.returns_host != 0,
        dynamic_shape: decl.dynamic_shape != 0,
        random: decl.random != 0,
        pointwise: decl.pointwise != 0,
        foreign: decl.foreign != 0,
    });
    DECLARED.write().push(Declared { name: name.into(), writes });
    id.0
}

/// # Safety
/// `name` points to `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_captures_default(name: *const u8, len: usize) -> i32 {
    // SAFETY: the caller's promise.
    let name = unsafe { std::slice::from_raw_parts(name, len) };
    i32::from(leaves_default(std::str::from_utf8(name).unwrap_or_default()).is_none())
}

/// # Safety
/// The records are valid during the call, and `outs` can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_dispatch(
    op: u32,
    device: u8,
    args: *const TtArg,
    n_args: usize,
    outs: *mut TtOuts,
) -> i32 {
    for_shim(|| {
        // SAFETY: the caller's promise.
        let args = if n_args == 0 { &[] } else { unsafe { std::slice::from_raw_parts(args, n_args) } };
        // Taken, not borrowed: a signal handler may issue an op while this one waits.
        let mut reply = REPLY.take().unwrap_or_default();
        let outcome = dispatch(op, device, args, &mut reply);
        // SAFETY: the caller's promise; the records stay where they are when the reply is put back.
        unsafe { *outs = reply.as_outs() };
        REPLY.set(Some(reply));
        outcome
    })
}

/// # Safety
/// As of [`tt_dispatch`], and the room has the bytes that it says.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_fetch(
    op: u32,
    device: u8,
    args: *const TtArg,
    n_args: usize,
    room: *mut TtRoom,
    outs: *mut TtOuts,
) -> i32 {
    for_shim(|| {
        // SAFETY: the caller's promise.
        let args = unsafe { std::slice::from_raw_parts(args, n_args) };
        // SAFETY: as above.
        let (bytes, nbytes) = unsafe { ((*room).bytes.cast(), (*room).nbytes) };
        let mut reply = REPLY.take().unwrap_or_default();
        reply.make_room(bytes, nbytes);
        let outcome = dispatch(op, device, args, &mut reply);
        // SAFETY: as above.
        unsafe {
            (*room).filled = i32::from(reply.take_room());
            *outs = reply.as_outs();
        }
        REPLY.set(Some(reply));
        outcome
    })
}

/// # Safety
/// `address` can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_storage_new(nbytes: u64, device: u8, address: *mut *mut c_void) -> *mut c_void {
    let mut context = std::ptr::null_mut();
    for_shim(|| {
        let made = settled(|engine| engine.create_storage(nbytes, device))??;
        context = context_of(made.id);
        // SAFETY: the caller's promise.
        unsafe { *address = made.address as *mut c_void };
        Ok(())
    });
    context
}

#[unsafe(no_mangle)]
extern "C" fn tt_device_count() -> i32 {
    device_count() as i32
}

#[unsafe(no_mangle)]
extern "C" fn tt_storage_at(address: *mut c_void) -> *mut c_void {
    lock().storages().at_address(address as u64).map_or(std::ptr::null_mut(), context_of)
}

#[unsafe(no_mangle)]
extern "C" fn tt_storage_release(context: *mut c_void) {
    if !context.is_null() {
        died(storage_of(context));
    }
}

#[unsafe(no_mangle)]
extern "C" fn tt_storage_resize(context: *mut c_void, nbytes: u64) -> i32 {
    for_shim(|| Ok(settled(|engine| engine.resize_storage(storage_of(context), nbytes))??))
}

#[unsafe(no_mangle)]
extern "C" fn tt_synchronize() -> i32 {
    for_shim(synchronize)
}

#[unsafe(no_mangle)]
extern "C" fn tt_is_program() -> i32 {
    i32::from(!in_executor() && PROGRAM_THREAD.load(Ordering::Relaxed) == thread_token())
}

#[unsafe(no_mangle)]
extern "C" fn tt_wait_random() -> i32 {
    for_shim(wait_random)
}

/// Frees what is cached.
pub fn empty_cache() -> Result<(), Raise> {
    synchronize()?;
    with_executor(&lock(), |executor| {
        if let Some(executor) = executor.opened() {
            executor.device().empty_cache();
        }
    });
    POOL.clear();
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn tt_empty_cache() -> i32 {
    for_shim(empty_cache)
}

/// # Safety
/// `memory` can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_memory(device: u8, memory: *mut TtMemory) -> i32 {
    for_shim(|| {
        check_process()?;
        let mut engine = lock();
        engine.collect_dead();
        let held = engine.storages().held().get(usize::from(device)).copied().unwrap_or_default();
        let [_, _, kept] = POOL.bytes();
        // SAFETY: the caller's promise.
        unsafe {
            *memory = TtMemory {
                allocated: held.bytes as i64,
                peak: held.peak as i64,
                made: held.made() as i64,
                freed: held.freed() as i64,
                kept: kept as i64,
            };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn tt_reset_memory(device: u8, peak: i32) {
    for_shim(|| {
        let mut engine = lock();
        engine.collect_dead();
        match peak {
            0 => engine.storages().reset_accumulated(device),
            _ => engine.storages().reset_peak(device),
        }
        Ok(())
    });
}
