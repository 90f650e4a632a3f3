//! The process's engine and its lock, and the functions that the shim calls.
//!
//! [`Rank`] has the lock order. A thread that holds the GIL never blocks on the engine's lock or on GraphRunner, and a
//! thread that holds the engine's lock never waits for GraphRunner.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use pyo3::exceptions::{PyIndexError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use rustc_hash::FxHashMap;
use tandem_executor::deferred::Deferred;
use tandem_executor::error::{Cause, Failure, Fault};
use tandem_executor::executor::Executor;
use tandem_executor::host::Exception;
use tandem_executor::ops::table::kept_default;
use tandem_executor::threads::locks::{Mutex, MutexGuard, Rank};
use tandem_runtime::engine::{Engine, Progress};
use tandem_runtime::error::CallError;
use tandem_runtime::graph_runner::{GraphRunner, Ticket, WaitTime, Waited, Waiter};
use tandem_runtime::site::{AutogradNode, Site, Stack};
use tandem_runtime::storage::{AddressRange, Amount, Collector, Storages, collects_deaths, died};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{LocationId, OpId};
use tandem_tracegraph::location::Frame;
use tandem_tracegraph::ops::{ArgClass, OpDecl};
use tandem_tracegraph::tensor_meta::Dtype;

use crate::convert::{Reply, context_of, fill, storage_of};
use crate::devices;
use crate::environment::ENVIRONMENT;
use crate::ffi::*;
use crate::host::{OPERATORS, POOL, SHIM, in_executor, kept};
use crate::host_memory;
use crate::python::{
    Lines, WithoutGil, innermost_user_line, interrupted, line_of, thread_token, user_line, walk_stack,
};

/// Size in bytes of the address range from which tandem tensors get their fake addresses.
const ADDRESS_SPACE: usize = 1 << 44;

static ENGINE: LazyLock<Mutex<Engine>> = LazyLock::new(|| {
    let executor = Deferred::new(Box::new(open_executor), &SHIM);
    let runner = GraphRunner::start(executor, &SHIM);
    let storages = Storages::new(reserve_addresses());
    Mutex::new(Rank::Engine, Engine::new(ENVIRONMENT.config(), runner, storages, &SHIM, &OPERATORS))
});

/// Opens the executor, on GraphRunner's thread.
fn open_executor() -> Result<Box<dyn Executor>, String> {
    OPENED.store(true, Ordering::Relaxed);
    devices::open()
}

/// Token of the program's thread, whose ops are traced: the thread that imported Tandem, until another thread takes
/// over.
static PROGRAM_THREAD: AtomicUsize = AtomicUsize::new(NO_THREAD);
/// The token of no thread.
const NO_THREAD: usize = 0;

/// The collection of storages that die on the program's thread.
static COLLECTOR: Mutex<Option<Collector>> = Mutex::new(Rank::Collector, None);

/// Whether the stacks of calls are recorded for the history of storages.
pub static MEMORY_STACKS: AtomicBool = AtomicBool::new(false);

/// Set before the executor is opened. Its threads and devices do not exist in a forked child.
static OPENED: AtomicBool = AtomicBool::new(false);

/// Set in a forked child that cannot use tandem tensors.
pub static FORKED: AtomicBool = AtomicBool::new(false);

/// Prepares a forked child. The child can use tandem tensors if the parent has not computed anything with them.
pub fn after_fork_in_child() {
    match ENGINE.try_lock().filter(|_| !OPENED.load(Ordering::Relaxed)) {
        Some(mut engine) => engine.start_in_child(),
        None => FORKED.store(true, Ordering::Relaxed),
    }
}

thread_local!(static REPLY: Cell<Option<Box<Reply>>> = const { Cell::new(None) });

fn reserve_addresses() -> AddressRange {
    // The fallback address is non-canonical on 64-bit machines with 48-bit addresses, so an access to it faults too.
    let start = host_memory::reserve(ADDRESS_SPACE).unwrap_or(0x8000_0000_0000);
    AddressRange::new(start, ADDRESS_SPACE as u64)
}

/// Locks the engine, and releases the GIL while waiting for the lock.
pub fn lock() -> MutexGuard<'static, Engine> {
    ENGINE.try_lock().unwrap_or_else(|| {
        let gil = WithoutGil::new();
        let engine = ENGINE.lock();
        // The GIL is acquired again after the engine's lock, according to the lock order.
        drop(gil);
        engine
    })
}

/// Calls `with` with the executor locked and the GIL released, because GraphRunner may hold the executor and need the
/// GIL for a kernel that is written in Python.
pub fn with_executor<R>(engine: &Engine, with: impl FnOnce(&mut Deferred) -> R) -> R {
    let gil = WithoutGil::new();
    let result = with(&mut engine.runner().executor());
    // The executor's lock is released before the GIL is acquired again, according to the lock order.
    drop(gil);
    result
}

/// An error to raise as a Python exception.
#[derive(Debug)]
pub enum Raise {
    /// Failure of an operator.
    Call(CallError),
    /// Exception that a signal handler raised and that the interpreter holds.
    Interrupted,
    /// Any other error, with its message.
    Message(String),
}

impl From<CallError> for Raise {
    fn from(error: CallError) -> Raise {
        Raise::Call(error)
    }
}

impl Raise {
    /// Stores the error as the exception that is pending on this thread.
    fn set_pending(self) {
        let message = |text: &str, kind| {
            // SAFETY: the pointer and the length are those of `text`.
            unsafe { ttc_set_pending_message(kind, text.as_ptr().cast(), text.len()) }
        };
        match self {
            Raise::Interrupted => message("", PYTHON_ERROR),
            Raise::Message(text) => message(&text, RUNTIME_ERROR),
            Raise::Call(CallError::Dead) => message(&CallError::Dead.to_string(), RUNTIME_ERROR),
            Raise::Call(CallError::Raised(failure)) => match &failure.cause {
                // SAFETY: the failure owns the exception, so its pointer is valid.
                Cause::Kernel(e) => unsafe { ttc_set_pending(e.as_ptr(), std::ptr::null(), 0) },
                _ => message(&explain(&failure), RUNTIME_ERROR),
            },
            Raise::Call(CallError::Poisoned(failure)) => {
                let text = explain(&failure);
                match &failure.cause {
                    // SAFETY: the failure owns the exception, and the other pointer and the length are those of
                    // `text`.
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

/// Describes a failure with its operator and the user's source line.
pub fn explain(failure: &Failure) -> String {
    let engine = lock();
    let line = user_line(failure.location, engine.locations());
    let text = match &failure.cause {
        Cause::Kernel(_) => String::new(),
        cause => format!("tandem: {cause}; "),
    };
    format!("{text}raised by {}, issued at {line} (set TANDEM_SYNC=1 to have it raised there)", failure.name)
}

/// Runs `body` for the shim. Errors and panics become a pending exception.
pub fn for_shim(body: impl FnOnce() -> Result<(), Raise>) -> i32 {
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

/// Waits for GraphRunner, with the GIL released. The caller must hold no locks. If a signal handler raises, the wait
/// ends.
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

/// Returns the calling thread's stack if the history of storages needs it.
#[inline]
pub fn memory_stack() -> Option<Arc<Stack>> {
    MEMORY_STACKS.load(Ordering::Relaxed).then(|| Arc::new(walk_stack()))
}

/// Sets the stack for storages that the next call may create.
#[inline]
pub fn note_memory_stack(engine: &mut Engine, stack: Option<&Arc<Stack>>) {
    if let (Some(stack), Some(history)) = (stack, engine.storages().history()) {
        history.set_stack(Some(stack.clone()));
    }
}

/// Repeats `attempt` with the engine locked, and waits without the lock in between, until `attempt` need not wait any
/// more.
pub fn settled<T>(mut attempt: impl FnMut(&mut Engine) -> Result<T, Ticket>) -> Result<T, Raise> {
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

/// Returns an error in a forked child that cannot use tandem tensors.
pub fn check_process() -> Result<(), Raise> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(Raise::Message(
            "Cannot use tandem tensors in a forked subprocess of a process that has used them. To use tandem with \
             multiprocessing, you must use the 'spawn' start method"
                .into(),
        ));
    }
    Ok(())
}

/// Returns whether the calling thread is the program's thread.
pub fn is_program_thread() -> bool {
    PROGRAM_THREAD.load(Ordering::Relaxed) == thread_token()
}

/// Returns whether the calling thread is the program's thread. If that thread has ended, the calling thread takes its
/// place, unless a call of a function is open.
pub fn is_program_thread_or_next() -> bool {
    match PROGRAM_THREAD.load(Ordering::Relaxed) {
        NO_THREAD => take_over(),
        token => token == thread_token(),
    }
}

#[cold]
fn take_over() -> bool {
    let (mut engine, order) = (lock(), Ordering::Relaxed);
    let taken = !engine.has_open_call()
        && PROGRAM_THREAD.compare_exchange(NO_THREAD, thread_token(), order, order).is_ok();
    if taken {
        claim_program_thread();
        engine.mark_step();
    }
    taken
}

/// Frees the program's place when the thread that has it ends. Another thread may get the same token later.
struct Place;

impl Drop for Place {
    fn drop(&mut self) {
        let order = Ordering::Relaxed;
        // The exchange fails if another thread has become the program's.
        let _ = PROGRAM_THREAD.compare_exchange(thread_token(), NO_THREAD, order, order);
    }
}

/// Makes the calling thread the program's thread.
pub fn claim_program_thread() {
    thread_local!(static PLACE: Place = const { Place });
    PLACE.with(|_| ());
    if let Some(before) = COLLECTOR.lock().replace(collects_deaths()) {
        before.stop();
    }
    PROGRAM_THREAD.store(thread_token(), Ordering::Relaxed);
    // SAFETY: the function only sets a thread-local flag of PyTorch's.
    unsafe { ttc_single_threaded_backward(1) };
}

fn dispatch(op: u32, device: u8, args: &[TtArg], reply: &mut Reply) -> Result<(), Raise> {
    check_process()?;
    if in_executor() {
        return Err(Raise::Message(format!(
            "{} was called on a tandem tensor from inside a kernel that Tandem runs; a custom operator's CPU \
             implementation may use only the tensors it is given",
            OPERATORS.name(OpId(op))
        )));
    }
    let mut place = TtSite::default();
    // SAFETY: `place` is valid for writes.
    unsafe { ttc_site(&raw mut place) };
    let node = AutogradNode { id: place.node, sequence: place.node_sequence };
    let mut site = Site {
        program_thread: is_program_thread_or_next(),
        sequence: place.sequence,
        node: (place.node != 0).then_some(node),
        stack: None,
    };
    let memory_stack = memory_stack();
    loop {
        let mut engine = lock();
        note_memory_stack(&mut engine, memory_stack.as_ref());
        let mut call = Call::blank(OpId(op));
        call.device = device;
        call.grad_enabled = place.modes & 1 != 0;
        call.default_dtype = Dtype((place.modes >> 1) as u8);
        // SAFETY: the shim keeps the records and everything they point to alive until `tt_dispatch` returns.
        unsafe { fill(&mut call, args, engine.storages()) };
        call.numbers_fit = engine.op(call.op).takes(&call);
        match engine.dispatch(&call, &site, reply)? {
            Progress::Done => return finish_inline_work(engine),
            Progress::NeedStack => {
                drop(engine);
                site.stack = Some(walk_stack());
            }
            Progress::NeedTicket(ticket, fetch) => wait_for(engine, ticket, fetch)?,
        }
    }
}

/// Waits without the engine's lock until GraphRunner has passed a position. `fetch` says whether the wait is part of a
/// fetch.
pub fn wait_for(engine: MutexGuard<'static, Engine>, ticket: Ticket, fetch: bool) -> Result<(), Raise> {
    let waiter = engine.runner().waiter();
    let begin = engine.runner().timeline().now();
    drop(engine);
    let time = wait(&waiter, ticket)?;
    lock().waited(time, fetch, begin);
    Ok(())
}

/// Executes pending runs if the program's thread has to execute them. Signal handlers run only afterwards, because the
/// call that has sent the runs is complete, and its outputs must reach the program.
pub fn finish_inline_work(engine: MutexGuard<'static, Engine>) -> Result<(), Raise> {
    let Some(ticket) = engine.runner().inline_work() else { return Ok(()) };
    let waiter = engine.runner().waiter();
    let begin = engine.runner().timeline().now();
    drop(engine);
    let time = wait_unless(&waiter, ticket, &mut || false)?;
    lock().waited(time, false, begin);
    Ok(())
}

/// Ends an iteration of the program. On another thread than the program's, it only makes that thread the program's if
/// the current program's thread has been idle since the other thread's previous call.
pub fn mark_step() -> Result<(), Raise> {
    check_process()?;
    let mut engine = lock();
    if !is_program_thread() {
        if !engine.mark_step_elsewhere() {
            return Ok(());
        }
        claim_program_thread();
    }
    engine.mark_step();
    Ok(())
}

/// Waits until all work is done, and raises the first failure that has not been raised yet.
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

/// Waits until all work is done. A forked child has no work.
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
    settled(|engine| engine.flush_random(is_program_thread()).map_or(Ok(()), Err))
}

/// Converts an error to a Python exception.
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

/// Creates an exception of one of PyTorch's classes.
fn torch_error(py: Python<'_>, module: &str, class: &str, text: String) -> PyErr {
    match py.import(module).and_then(|module| module.getattr(class)?.call1((text,))) {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

/// Converts the status of a registration with PyTorch to a result.
pub fn registered(status: i32) -> Result<(), Raise> {
    match status {
        OK => Ok(()),
        _ => Err(Raise::Message(describe_exception(&Exception::adopt(kept(), &SHIM)).1)),
    }
}

/// Returns the kind (`TtException`) and the message of an exception.
fn describe_exception(exception: &Exception) -> (i32, String) {
    let mut message = vec![0u8; 4096];
    let mut len = 0;
    // SAFETY: the buffer has the capacity that is passed, and the handle owns the exception.
    let kind = unsafe {
        ttc_describe_exception(exception.as_ptr(), message.as_mut_ptr().cast(), message.len(), &raw mut len)
    };
    message.truncate(len);
    (kind, String::from_utf8_lossy(&message).into_owned())
}

// --- Called by the shim -----------------------------------------------------------------------------------

/// # Safety
///
/// `decl` must point to a valid declaration, whose pointers are valid for the lengths in it.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_declare_op(decl: *const TtOpDecl) -> u32 {
    // SAFETY: `decl` is valid, and its pointers are valid for these lengths. Null pointers are excluded by
    // `n_args`.
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
    let id = lock().declare(OpDecl {
        name,
        args: args.iter().map(class).collect(),
        written: written.iter().map(|w| *w != 0).collect(),
        returns_host: decl.returns_host != 0,
        dynamic_shape: decl.dynamic_shape != 0,
        random: decl.random != 0,
        pointwise: decl.pointwise != 0,
        foreign: decl.foreign != 0,
    });
    id.0
}

/// # Safety
///
/// `name` must point to `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_captures_default(name: *const u8, len: usize) -> i32 {
    // SAFETY: `name` points to `len` bytes.
    let name = unsafe { std::slice::from_raw_parts(name, len) };
    i32::from(kept_default(std::str::from_utf8(name).unwrap_or_default()).is_none())
}

/// # Safety
///
/// - `args` must point to `n_args` records. These, and everything that they point to, must be valid during the call.
/// - `outs` must be valid for writes.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_dispatch(
    op: u32,
    device: u8,
    args: *const TtArg,
    n_args: usize,
    outs: *mut TtOuts,
) -> i32 {
    for_shim(|| {
        // SAFETY: `args` points to `n_args` records, and is not read if there are none.
        let args = if n_args == 0 { &[] } else { unsafe { std::slice::from_raw_parts(args, n_args) } };
        // The reply is taken, not borrowed, because a signal handler may issue an op while this call waits.
        let mut reply = REPLY.take().unwrap_or_default();
        reply.clear();
        let outcome = dispatch(op, device, args, &mut reply);
        // SAFETY: `outs` is valid for writes. The reply's records are on the heap, so putting the reply back does not
        // move them.
        unsafe { *outs = reply.as_outs() };
        REPLY.set(Some(reply));
        outcome
    })
}

/// # Safety
///
/// - The conditions of [`tt_dispatch`] apply.
/// - `args` must not be null.
/// - `room` must be valid for reads and writes.
/// - `room.bytes` must point to `nbytes` writable bytes during the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_fetch(
    op: u32,
    device: u8,
    args: *const TtArg,
    n_args: usize,
    room: *mut TtHostBuffer,
    outs: *mut TtOuts,
) -> i32 {
    for_shim(|| {
        // SAFETY: `args` is not null and points to `n_args` records.
        let args = unsafe { std::slice::from_raw_parts(args, n_args) };
        // SAFETY: `room` is valid for reads.
        let (bytes, nbytes) = unsafe { ((*room).bytes.cast(), (*room).nbytes) };
        let mut reply = REPLY.take().unwrap_or_default();
        reply.make_room(bytes, nbytes);
        let outcome = dispatch(op, device, args, &mut reply);
        // SAFETY: `room` and `outs` are valid for writes. The reply's records are on the heap, so putting the reply
        // back does not move them.
        unsafe {
            (*room).filled = i32::from(reply.take_room());
            *outs = reply.as_outs();
        }
        REPLY.set(Some(reply));
        outcome
    })
}

/// # Safety
///
/// `address` must be valid for writes.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_storage_new(nbytes: u64, device: u8, address: *mut *mut c_void) -> *mut c_void {
    let mut context = std::ptr::null_mut();
    for_shim(|| {
        let memory_stack = memory_stack();
        let made = settled(|engine| {
            note_memory_stack(engine, memory_stack.as_ref());
            engine.create_storage(nbytes, device, is_program_thread())
        })??;
        context = context_of(made.id);
        // SAFETY: `address` is valid for writes.
        unsafe { *address = made.address as *mut c_void };
        Ok(())
    });
    context
}

#[unsafe(no_mangle)]
extern "C" fn tt_device_count() -> i32 {
    devices::count() as i32
}

#[unsafe(no_mangle)]
extern "C" fn tt_is_cpu() -> i32 {
    static IS_CPU: OnceLock<bool> = OnceLock::new();
    let known = IS_CPU.get().copied();
    let is_cpu =
        known.unwrap_or_else(|| with_executor(&lock(), |executor| executor.get().device().name() == "cpu"));
    i32::from(*IS_CPU.get_or_init(|| is_cpu))
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
    for_shim(|| {
        Ok(settled(|engine| engine.resize_storage(storage_of(context), nbytes, is_program_thread()))??)
    })
}

#[unsafe(no_mangle)]
extern "C" fn tt_synchronize() -> i32 {
    for_shim(synchronize)
}

#[unsafe(no_mangle)]
extern "C" fn tt_flush() -> i32 {
    for_shim(|| {
        let mut engine = lock();
        engine.flush();
        finish_inline_work(engine)
    })
}

thread_local!(
    /// The user's frame at each location, found on the program's thread.
    static USER_FRAMES: RefCell<FxHashMap<LocationId, Option<Frame>>> = RefCell::default();
);

/// Copies text to memory of the shim, cut to the memory's capacity. Returns the length of the copy in bytes.
///
/// # Safety
///
/// `to` must have room for `capacity` bytes.
unsafe fn copy_text(text: &str, to: *mut c_char, capacity: usize) -> usize {
    let len = text.len().min(capacity);
    // SAFETY: `text` has at least this length, and the caller guarantees the room.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), len) };
    len
}

#[unsafe(no_mangle)]
extern "C" fn tt_user_line(text: *mut c_char, capacity: usize) -> usize {
    // SAFETY: the shim passes memory of `capacity` bytes.
    unsafe { copy_text(&innermost_user_line(), text, capacity) }
}

#[unsafe(no_mangle)]
extern "C" fn tt_take_recent(ops: *mut TtIssued, capacity: usize) -> usize {
    let mut engine = lock();
    let recent = engine.take_recent();
    USER_FRAMES.with_borrow_mut(|frames| {
        for (i, (op, location)) in recent.iter().take(capacity).enumerate() {
            let find = || Lines::default().user_frame(*location, engine.locations());
            let frame = *frames.entry(*location).or_insert_with(find);
            let Frame { code, instruction } = frame.unwrap_or(Frame { code: u32::MAX, instruction: 0 });
            // SAFETY: the shim passes memory for `capacity` records.
            unsafe { ops.add(i).write(TtIssued { op: op.0, code, instruction }) };
        }
    });
    recent.len().min(capacity)
}

#[unsafe(no_mangle)]
extern "C" fn tt_describe_issued(issued: TtIssued, text: *mut c_char, capacity: usize) -> usize {
    let line = line_of(Frame { code: issued.code, instruction: issued.instruction });
    // SAFETY: the shim passes memory of `capacity` bytes.
    unsafe { copy_text(&format!("{} at {line}", OPERATORS.name(OpId(issued.op))), text, capacity) }
}

#[unsafe(no_mangle)]
extern "C" fn tt_is_program() -> i32 {
    i32::from(!in_executor() && is_program_thread_or_next())
}

#[unsafe(no_mangle)]
extern "C" fn tt_is_forked() -> i32 {
    i32::from(FORKED.load(Ordering::Relaxed))
}

/// Whether devices draw random numbers themselves. Finding out opens the executor.
static DRAWS: OnceLock<bool> = OnceLock::new();

#[unsafe(no_mangle)]
extern "C" fn tt_draws() -> i32 {
    let known = DRAWS.get().copied();
    let draws = known.unwrap_or_else(|| with_executor(&lock(), |executor| executor.get().device().draws()));
    i32::from(*DRAWS.get_or_init(|| draws))
}

#[unsafe(no_mangle)]
extern "C" fn tt_wait_random() -> i32 {
    for_shim(wait_random)
}

/// Waits until all work is done and frees the memory that the executor and the pool cache.
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

fn amount(of: &Amount) -> TtAmount {
    TtAmount {
        live: of.live as i64,
        peak: of.peak as i64,
        created: of.created() as i64,
        freed: of.freed() as i64,
    }
}

/// # Safety
///
/// `memory` must be valid for writes.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_memory(device: u8, memory: *mut TtMemory) -> i32 {
    for_shim(|| {
        check_process()?;
        let mut engine = lock();
        engine.collect_dead();
        let held = engine.storages().held().get(usize::from(device)).copied().unwrap_or_default();
        let [_, _, kept] = POOL.bytes();
        // SAFETY: `memory` is valid for writes.
        unsafe {
            *memory =
                TtMemory { bytes: amount(&held.bytes), storages: amount(&held.storages), kept: kept as i64 };
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
