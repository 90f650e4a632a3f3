//! Tandem as a PyTorch device: the extension module `torch_tandem._core`.
//!
//! [`ffi`] mirrors the shim's C interface, [`convert`] converts between the shim's records and calls, [`engine`] passes
//! calls to the runtime, [`host`] implements PyTorch's part for the runtime, and [`python`] uses the interpreter.
//! [`report`], [`graphs`], [`timeline`] and [`memory`] describe a program's execution to users, as plain data, and
//! [`profile`] describes it to PyTorch's profiler.

mod convert;
mod devices;
mod engine;
mod environment;
#[allow(missing_docs)]
mod ffi;
mod functions;
mod graphs;
mod host;
mod host_gradients;
mod host_memory;
mod kernel_times;
mod memory;
mod modules;
mod profile;
mod python;
mod report;
mod state;
mod timeline;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use pyo3::exceptions::{PyImportError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyType;
use serde::Serialize;
use tandem_cpu::scarcity::fail_nth;
use tandem_runtime::config::Mode;
use tandem_tracegraph::svg::svg;
use tandem_tracegraph::text::{self, Listing};
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::engine::{Raise, lock, to_py, with_executor};
use crate::environment::ENVIRONMENT;
use crate::graphs::Graphs;
use crate::host::POOL;
use crate::memory::Snapshot;
use crate::report::Report;
use crate::timeline::Timeline;

fn raise<T>(py: Python<'_>, result: Result<T, Raise>) -> PyResult<T> {
    result.map_err(|r| to_py(r, py))
}

/// Returns plain data as Python's dicts, lists, strings and numbers. The caller holds no lock.
fn to_python<'py>(py: Python<'py>, data: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(data).map_err(|e| PyValueError::new_err(e.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}

/// Starts the log on standard error if `TANDEM_DEBUG` is set; see docs/debugging.md.
fn start_log() {
    let level = match ENVIRONMENT.debug {
        0 => return,
        1 => Level::INFO,
        2 => Level::DEBUG,
        _ => Level::TRACE,
    };
    let ours = ["tandem_executor", "tandem_runtime", "tandem_tracegraph", "_core"];
    let from = |rung: u8| if ENVIRONMENT.debug >= rung { Level::TRACE } else { Level::INFO };
    let (plans, wgsl) = (from(4), from(5));
    // Graphics libraries log too much below the level `ERROR`.
    let targets = Targets::new().with_default(Level::ERROR).with_targets(ours.map(|name| (name, level)));
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).without_time();
    let log = log.with_target(false).with_ansi(std::io::stderr().is_terminal());
    let log = tracing_subscriber::registry()
        .with(targets.with_target("plan", plans).with_target("wgsl", wgsl))
        .with(log);
    // Another library may have installed a log already; then this log is not started.
    let _ = log.try_init();
}

#[pymodule]
mod _core {
    use super::*;

    /// Loads the shim from the file `shim` and connects it to this library, whose file is `core`.
    #[pyfunction]
    fn connect(core: PathBuf, shim: PathBuf) -> PyResult<()> {
        ffi::connect(&core, &shim).map_err(PyImportError::new_err)
    }

    /// Registers the device with PyTorch, and the calling thread as the program's thread.
    #[pyfunction]
    fn init(py: Python<'_>) -> PyResult<()> {
        start_log();
        engine::claim_program_thread();
        // SAFETY: PyTorch is loaded, since the shim is linked to it.
        let status = unsafe { ffi::ttc_register() };
        raise(py, engine::registered(status))
    }

    /// Waits until all work is done. Raises the first failure that has not been raised yet.
    #[pyfunction]
    fn synchronize(py: Python<'_>) -> PyResult<()> {
        raise(py, engine::synchronize())
    }

    /// Waits until all work is done. Failures are raised when a poisoned tensor is read.
    #[pyfunction]
    fn drain(py: Python<'_>) -> PyResult<()> {
        raise(py, engine::drain())
    }

    /// Waits for pending random draws.
    #[pyfunction]
    fn wait_random(py: Python<'_>) -> PyResult<()> {
        raise(py, engine::wait_random())
    }

    /// Finishes pending work at exit. Failures that have not been raised are dropped.
    #[pyfunction]
    fn shutdown() {
        let _ = engine::synchronize();
    }

    /// Ends an iteration.
    #[pyfunction]
    fn mark_step(py: Python<'_>) -> PyResult<()> {
        raise(py, engine::mark_step())
    }

    /// Returns the methods that take the place of `Module.__call__` and `Module.__getattr__`.
    #[pyfunction]
    fn module_methods<'py>(module: &Bound<'py, PyType>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        modules::methods(module)
    }

    /// Has a function called instead of each outermost module call of a thread, or none.
    #[pyfunction]
    fn watch_module_calls(around: Option<Py<PyAny>>) {
        modules::watch(around);
    }

    #[pymodule_export]
    use crate::host_gradients::prepare_gradients;

    #[pymodule_export]
    use crate::state::{StateCheck, attributes_of};

    /// Returns why a recorded call cannot be replayed, and whether the reason may be absent from a later call.
    #[pyfunction]
    fn refusal(recording: u64) -> Option<(String, bool)> {
        functions::refusal(recording)
    }

    /// Returns how the ops of two recorded calls differ. Fed numbers at the indices `free` into `numbers_of` may
    /// differ.
    #[pyfunction]
    #[pyo3(signature = (one, two, free = Vec::new()))]
    fn unequal(one: u64, two: u64, free: Vec<usize>) -> Option<String> {
        functions::unequal(one, two, &free.into_iter().collect())
    }

    /// Returns the fed numbers of a recorded call: first the numbers of ops, then the host tensors of one element.
    /// `None` stands for a number or a host tensor that cannot be replaced.
    #[pyfunction]
    fn numbers_of(recording: u64) -> Vec<Option<f64>> {
        functions::numbers_of(recording)
    }

    /// Replaces fed numbers of a recorded call, each by its index in `numbers_of`.
    #[pyfunction]
    fn set_numbers(recording: u64, numbers: Vec<(usize, f64)>) {
        functions::set_numbers(recording, &numbers);
    }

    /// Returns the number of the read value in which two recorded calls differ first, if all their ops before it are
    /// equal.
    #[pyfunction]
    fn parting(one: u64, two: u64) -> Option<usize> {
        functions::parting(one, two)
    }

    /// Returns the number of values that a recorded call has read.
    #[pyfunction]
    fn fetches_of(recording: u64) -> usize {
        functions::fetches_of(recording)
    }

    /// Lists the ops of a recorded call. `names` are the names of the storages that existed before the call.
    #[pyfunction]
    fn text_of(recording: u64, names: Vec<String>) -> String {
        functions::text_of(recording, &names)
    }

    /// Returns the first op that uses the `given`-th storage that existed before the recorded call, with its source
    /// line.
    #[pyfunction]
    fn first_use(recording: u64, given: u32) -> Option<String> {
        functions::first_use(recording, given)
    }

    /// Returns the number of ops of a recorded call.
    #[pyfunction]
    fn ops_of(recording: u64) -> usize {
        functions::ops_of(recording)
    }

    /// Returns whether iterations end within a recorded call.
    #[pyfunction]
    fn ends_of(recording: u64) -> bool {
        functions::ends_of(recording)
    }

    /// Returns whether a recorded call writes storages that existed before the call, or draws random numbers.
    #[pyfunction]
    fn changes(recording: u64) -> bool {
        functions::changes(recording)
    }

    /// Makes a recorded call a template. Returns false if the recording was dropped or forgotten.
    #[pyfunction]
    fn make_template(recording: u64) -> bool {
        functions::make_template(recording)
    }

    /// Drops a recorded call.
    #[pyfunction]
    fn drop_recording(recording: u64) {
        functions::drop_recording(recording);
    }

    /// Prepares a forked child, which can use tandem tensors if its parent has not used them.
    #[pyfunction]
    fn after_fork_in_child() {
        engine::after_fork_in_child();
    }

    /// Returns whether this process is a forked child that cannot use tandem tensors.
    #[pyfunction]
    fn in_bad_fork() -> bool {
        engine::FORKED.load(Ordering::Relaxed)
    }

    /// Returns the number of devices.
    #[pyfunction]
    fn device_count() -> usize {
        devices::count()
    }

    /// Returns the calling thread's current device.
    #[pyfunction]
    fn current_device() -> i32 {
        // SAFETY: the function only reads a thread-local number.
        unsafe { ffi::ttc_current_device() }
    }

    /// Sets the calling thread's current device, which must exist.
    #[pyfunction]
    fn set_device(device: i32) {
        // SAFETY: the function only writes a thread-local number.
        unsafe { ffi::ttc_set_device(device) }
    }

    /// Returns the bytes that live tensors hold on a device.
    #[pyfunction]
    #[pyo3(signature = (device = 0))]
    fn memory_allocated(device: usize) -> u64 {
        let mut engine = lock();
        engine.collect_dead();
        engine.storages().held().get(device).map_or(0, |held| held.bytes.live)
    }

    /// Returns the peak of the bytes that live tensors have held on a device.
    #[pyfunction]
    #[pyo3(signature = (device = 0))]
    fn max_memory_allocated(device: usize) -> u64 {
        lock().storages().held().get(device).map_or(0, |held| held.bytes.peak)
    }

    /// Resets a device's peak to its current bytes.
    #[pyfunction]
    #[pyo3(signature = (device = 0))]
    fn reset_peak_memory_stats(device: u8) {
        let mut engine = lock();
        engine.collect_dead();
        engine.storages().reset_peak(device);
    }

    /// Returns the free and the total memory of the host.
    #[pyfunction]
    fn host_memory() -> (u64, u64) {
        let memory = crate::host_memory::host_memory();
        (memory.free, memory.total)
    }

    /// Frees the memory that the executor and the pool cache.
    #[pyfunction]
    fn empty_cache(py: Python<'_>) -> PyResult<()> {
        raise(py, engine::empty_cache())
    }

    /// Records the history of storages, of at most `most` changes. Ends the recording if `most` is None.
    #[pyfunction]
    fn record_memory(most: Option<usize>, stacks: bool, clear: bool) {
        memory::record(most, stacks, clear);
    }

    /// Returns the live storages and the recorded history.
    #[pyfunction]
    fn memory_snapshot(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        to_python(py, &Snapshot::of())
    }

    /// Makes the engine treat a GPU as lost by the driver, so that tests see the consequences.
    #[pyfunction]
    #[pyo3(signature = (device = 0))]
    fn lose_device(py: Python<'_>, device: u8) -> PyResult<()> {
        raise(py, engine::drain())?;
        with_executor(&lock(), |executor| executor.get().device().lose(device));
        Ok(())
    }

    /// Opens the devices. Returns the names of the executor and of the graphics adapters that it uses.
    #[pyfunction]
    fn open_devices() -> (String, Vec<String>) {
        with_executor(&lock(), |executor| {
            let device = executor.get().device();
            (device.name().to_owned(), device.devices().into_iter().map(|adapter| adapter.name).collect())
        })
    }

    /// Returns a sentence for each environment variable whose value is ignored.
    #[pyfunction]
    fn ignored_settings() -> Vec<String> {
        ENVIRONMENT.ignored.clone()
    }

    /// Returns the number of calls of a function of which one is audited, if the environment sets it.
    #[pyfunction]
    fn audit_period() -> Option<u32> {
        ENVIRONMENT.audit
    }

    /// Sets the mode: `"coexec"`, `"lazy"` or `"trace"`.
    #[pyfunction]
    fn set_mode(mode: &str) -> PyResult<()> {
        let unknown =
            || PyValueError::new_err(format!("unknown mode {mode:?}; use 'coexec', 'lazy' or 'trace'"));
        let mode = Mode::named(mode).ok_or_else(unknown)?;
        lock().configure(|c| c.mode = mode);
        Ok(())
    }

    /// Returns the mode, in the form that `set_mode` takes.
    #[pyfunction]
    fn mode() -> &'static str {
        lock().config().mode.name()
    }

    /// Sets whether failures are raised at the op.
    #[pyfunction]
    fn set_sync(sync: bool) {
        lock().configure(|c| c.sync = sync);
    }

    /// Returns the GPU adapters.
    #[pyfunction]
    fn list_devices(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        to_python(py, &devices::adapters())
    }

    /// Returns the report.
    #[pyfunction]
    fn report(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let report = Report::of(&mut lock());
        to_python(py, &report)
    }

    /// Returns the TraceGraph and the symbolic graph.
    #[pyfunction]
    fn graph(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let graphs = Graphs::of(&lock());
        to_python(py, &graphs)
    }

    /// Returns the recorded events.
    #[pyfunction]
    fn timeline(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let timeline = Timeline::of(&lock());
        to_python(py, &timeline)
    }

    /// Sets whether to record events and to measure each op.
    #[pyfunction]
    fn record(py: Python<'_>, on: bool) -> PyResult<()> {
        raise(py, engine::drain())?;
        let engine = lock();
        engine.runner().timeline().record(on);
        with_executor(&engine, |executor| executor.get().profile().measure(on));
        Ok(())
    }

    /// Discards all traces and graphs.
    #[pyfunction]
    fn reset() {
        lock().reset();
    }

    /// Resets the counters.
    #[pyfunction]
    fn reset_report(py: Python<'_>) {
        // The GIL is released, because GraphRunner may hold the executor and need the GIL.
        py.detach(|| lock().reset_report());
        // SAFETY: the function only sets a counter.
        unsafe { ffi::ttc_reset_host_calls() };
        POOL.count_anew();
    }

    /// Returns the symbolic graph as `"text"`, `"dot"` (Graphviz) or `"svg"`.
    #[pyfunction]
    fn symbolic(form: &str) -> PyResult<String> {
        let engine = lock();
        let listing = Listing::of(engine.symbolic(), engine.graph(), &|op| engine.op(op).name.to_string());
        match form {
            "text" => Ok(listing.to_string()),
            "dot" => Ok(listing.dot()),
            "svg" => Ok(svg(&listing)),
            other => {
                Err(PyValueError::new_err(format!("unknown form {other:?}; use 'text', 'dot' or 'svg'")))
            }
        }
    }

    /// Returns the TraceGraph in Graphviz' DOT language.
    #[pyfunction]
    fn tracegraph_dot() -> String {
        let engine = lock();
        text::dot(engine.graph(), &|op| engine.op(op).name.to_string())
    }

    /// Makes `generator`, a `torch.Generator`, share the state of the default CPU generator that `default` holds.
    /// Returns false, and does nothing, if `default` does not hold it.
    #[pyfunction]
    fn share_default_generator(generator: &Bound<'_, PyAny>, default: &Bound<'_, PyAny>) -> bool {
        // SAFETY: the Python side passes two `torch.Generator` objects.
        unsafe { ffi::ttc_share_default_generator(generator.as_ptr().cast(), default.as_ptr().cast()) == 1 }
    }

    /// Returns the nanoseconds that PyTorch takes to create and free one tensor and its storage.
    #[pyfunction]
    fn time_torch_objects(times: i64) -> f64 {
        // SAFETY: the function has no preconditions.
        unsafe { ffi::ttc_time_torch_objects(times) }
    }

    /// Makes factory functions and moves for "cuda" create tandem tensors.
    #[pyfunction]
    fn enable_cuda_alias(py: Python<'_>) -> PyResult<()> {
        // SAFETY: PyTorch is loaded, and errors of the registration are returned.
        raise(py, engine::registered(unsafe { ffi::ttc_enable_cuda_alias() }))
    }

    /// Makes the `n`-th allocation of host memory for Tandem from now on fail, so that tests see the consequences. If
    /// `n` is 0, no allocation fails. Returns how many allocations were left until a failure that an earlier call had
    /// asked for.
    #[pyfunction]
    fn fail_allocation(n: u64) -> u64 {
        fail_nth(n)
    }

    /// Sets whether backward runs on the thread that calls it.
    #[pyfunction]
    fn single_threaded_backward(on: bool) {
        // SAFETY: the function only sets a thread-local flag.
        unsafe { ffi::ttc_single_threaded_backward(i32::from(on)) }
    }
}
