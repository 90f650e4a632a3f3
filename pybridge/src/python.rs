//! The bridge's use of the interpreter: stacks, source lines, the GIL, signals.
//!
//! The functions of frames belong to Python's public C API, but not to the limited API that pyo3's abi3 offers, so they
//! are declared here.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use pyo3::ffi::{
    Py_DecRef, PyErr_CheckSignals, PyEval_GetFrame, PyEval_RestoreThread, PyEval_SaveThread, PyFrameObject,
    PyGILState_Ensure, PyGILState_Release, PyObject, PyThreadState,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyWeakrefMethods, PyWeakrefReference};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use tandem_executor::threads::locks::{Mutex, Rank, may_acquire};
use tandem_runtime::site::Stack;
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::{Frame, Locations, fold_recursion};

use crate::modules::{MODULES, is_left_out, leaf};
use crate::state::attributes_of;

unsafe extern "C" {
    fn PyFrame_GetBack(frame: *mut PyFrameObject) -> *mut PyFrameObject;
    fn PyFrame_GetCode(frame: *mut PyFrameObject) -> *mut PyObject;
    fn PyFrame_GetLasti(frame: *mut PyFrameObject) -> c_int;
    fn PyFrame_GetLocals(frame: *mut PyFrameObject) -> *mut PyObject;
    fn PyGILState_Check() -> c_int;
}

/// Table of the code objects seen in frames. Equal code objects of one file have one id, because a program may compile
/// the same text, or define the same function, repeatedly. The table keeps no code object alive.
#[derive(Default)]
struct Codes {
    /// Ids of code objects by address. An entry is valid while its code object lives; afterwards the address may be
    /// reused.
    by_address: FxHashMap<usize, (u32, Py<PyWeakrefReference>)>,
    /// Number of entries in `by_address` at which the entries of dead code objects are dropped.
    most: usize,
    /// Ids by hash of file name and contents.
    by_value: FxHashMap<u64, u32>,
    /// Codes by id.
    all: Vec<Code>,
    /// The module that each stack leads to, by folded stack.
    modules: FxHashMap<SmallVec<[Frame; 48]>, String>,
}

/// Description of a code object.
struct Code {
    file: String,
    /// Qualified name.
    name: String,
    /// Offset of the first instruction of each line, with the line number, ascending by offset.
    lines: Box<[(c_int, c_int)]>,
    /// Whether the code may be the call of a module, its local variable `self`: PyTorch's, or a method `forward`.
    calls_module: bool,
    /// Whether locations leave the code's frames out, because most modules are called without them (`modules.rs`).
    is_left_out: bool,
}

/// Minimum number of entries at which the entries of dead code objects are dropped.
const MANY: usize = 1 << 10;

static CODES: Mutex<Option<Codes>> = Mutex::new(Rank::Codes, None);

/// Id of the code of this package. Not every stack has such frames, so locations leave them out.
const OUR_OWN: u32 = u32::MAX;

impl Codes {
    /// Returns the id of a code object. Takes ownership of the reference `code`.
    fn intern(&mut self, code: *mut PyObject, py: Python<'_>) -> u32 {
        // SAFETY: PyFrame_GetCode returned a new reference to an object.
        let code = unsafe { Bound::from_owned_ptr(py, code) };
        let address = code.as_ptr() as usize;
        if let Some((id, object)) = self.by_address.get(&address)
            && object.bind(py).upgrade().is_some_and(|object| object.is(&code))
        {
            return *id;
        }
        let id = self.id_by_value(&code).unwrap_or(0);
        if self.by_address.len() >= self.most.max(MANY) {
            self.by_address.retain(|_, (_, object)| object.bind(py).upgrade().is_some());
            self.most = 2 * self.by_address.len();
        }
        if let Ok(object) = PyWeakrefReference::new(&code) {
            self.by_address.insert(address, (id, object.unbind()));
        }
        id
    }

    fn id_by_value(&mut self, code: &Bound<'_, PyAny>) -> PyResult<u32> {
        let file: String = code.getattr("co_filename")?.extract()?;
        let file = if cfg!(windows) { file.replace('\\', "/") } else { file };
        if file.contains("/torch_tandem/") {
            return Ok(OUR_OWN);
        }
        let mut hasher = DefaultHasher::new();
        file.hash(&mut hasher);
        // Version 2 of the format encodes equal objects equally, independent of other references to their parts.
        let bytes = code.py().import("marshal")?.call_method1("dumps", (code, 2))?;
        bytes.cast::<PyBytes>()?.as_bytes().hash(&mut hasher);
        let digest = hasher.finish();
        if let Some(id) = self.by_value.get(&digest) {
            return Ok(*id);
        }
        let mut lines = Vec::new();
        for line in code.call_method0("co_lines")?.try_iter()? {
            let (start, _, line): (c_int, c_int, Option<c_int>) = line?.extract()?;
            lines.extend(line.map(|line| (start, line)));
        }
        let name: String = code.getattr("co_qualname")?.extract()?;
        let id = self.all.len() as u32;
        self.by_value.insert(digest, id);
        let is_left_out = file.contains(MODULES) && is_left_out(&name);
        let calls_module = name.ends_with(".forward") || (is_left_out && name == "Module._call_impl");
        self.all.push(Code { file, name, lines: lines.into(), calls_module, is_left_out });
        Ok(id)
    }
}

impl Code {
    fn line(&self, instruction: c_int) -> c_int {
        let next = self.lines.partition_point(|(start, _)| *start <= instruction);
        next.checked_sub(1).map_or(-1, |at| self.lines[at].1)
    }
}

/// Returns the Python stack of the calling thread.
pub fn walk_stack() -> Stack {
    let mut stack = Stack::default();
    may_acquire(Rank::Gil);
    Python::attach(|py| {
        let mut calls = Vec::new();
        let mut in_module = leaf(py).is_some();
        let mut folded = SmallVec::new();
        {
            let mut codes = CODES.lock();
            let codes = codes.get_or_insert_default();
            each_frame(|frame, depth| {
                // SAFETY: the frame is alive. `intern` takes ownership of the code object.
                let (code, instruction) =
                    unsafe { (codes.intern(PyFrame_GetCode(frame), py), PyFrame_GetLasti(frame)) };
                let known = codes.all.get(code as usize);
                if code != OUR_OWN && !known.is_some_and(|code| code.is_left_out) {
                    stack.0.push(Frame { code, instruction });
                }
                calls.extend(known.is_some_and(|code| code.calls_module).then_some(depth));
            });
            in_module |= !calls.is_empty();
            if in_module {
                folded.clone_from(&stack.0);
                fold_recursion(&mut folded);
                in_module = !codes.modules.contains_key(&folded);
            }
        }
        // A collection of garbage may run finalizers of the program here, which issue ops, too.
        if in_module {
            let path = path_of(&called_modules(py, &calls));
            CODES.lock().get_or_insert_default().modules.insert(folded, path);
        }
    });
    stack
}

/// Calls `visit` with each frame of the calling thread's stack, innermost first, and the frame's place.
fn each_frame(mut visit: impl FnMut(*mut PyFrameObject, usize)) {
    // SAFETY: the GIL is held. The first frame is borrowed; the others are new references, dropped after the next frame
    // has been read.
    unsafe {
        let mut frame = PyEval_GetFrame();
        let mut depth = 0;
        while !frame.is_null() {
            visit(frame, depth);
            let back = PyFrame_GetBack(frame);
            if depth > 0 {
                Py_DecRef(frame.cast());
            }
            frame = back;
            depth += 1;
        }
    }
}

/// Returns the modules that the frames at these places call, outermost first.
fn called_modules<'py>(py: Python<'py>, calls: &[usize]) -> Vec<Bound<'py, PyAny>> {
    let mut modules = Vec::new();
    each_frame(|frame, depth| {
        if calls.contains(&depth) {
            // SAFETY: the frame is alive. Its locals are a new reference, or null after an error, which is dropped.
            let locals = unsafe { Bound::from_owned_ptr_or_err(py, PyFrame_GetLocals(frame)) };
            let called = locals.and_then(|locals| locals.get_item("self")).ok();
            modules.extend(called.filter(|called| submodules_of(called).is_some()));
        }
    });
    modules.reverse();
    modules.extend(leaf(py));
    modules
}

/// Number of containers, such as `nn.ModuleList`, between a module and one that it calls, at most.
const MAX_CONTAINERS: usize = 3;

/// Returns the path to the last of some modules, each of which calls the next: `Encoder.layers.*.attention`. Numbers are
/// left out, since one line calls all modules of a list.
fn path_of(modules: &[Bound<'_, PyAny>]) -> String {
    let class = |module: &Bound<'_, PyAny>| module.get_type().name().map(|name| name.to_string());
    let Some(mut path) = modules.first().and_then(|module| class(module).ok()) else { return String::new() };
    for pair in modules.windows(2) {
        if pair[0].is(&pair[1]) {
            continue;
        }
        let name = name_in(&pair[0], &pair[1], MAX_CONTAINERS).or_else(|| class(&pair[1]).ok());
        path += &format!(".{}", name.unwrap_or_default());
    }
    path
}

/// Returns the submodules of a module by name. `None` if the object is no module. Runs no code of the program.
fn submodules_of<'py>(module: &Bound<'py, PyAny>) -> Option<Bound<'py, PyDict>> {
    attributes_of(module)?.get_item("_modules").ok()?.cast_into_exact::<PyDict>().ok()
}

/// Returns the name of a module in another one that holds it. Runs no code of the program.
fn name_in(holder: &Bound<'_, PyAny>, module: &Bound<'_, PyAny>, containers: usize) -> Option<String> {
    let held = submodules_of(holder)?;
    let readable = |name: &Bound<'_, PyAny>| {
        let name = name.extract::<String>().ok()?;
        Some(if name.bytes().all(|b| b.is_ascii_digit()) { "*".to_owned() } else { name })
    };
    if let Some((name, _)) = held.iter().find(|(_, child)| child.is(module)) {
        return readable(&name);
    }
    let inner = containers.checked_sub(1)?;
    held.iter()
        .find_map(|(name, child)| Some(format!("{}.{}", readable(&name)?, name_in(&child, module, inner)?)))
}

/// Frame in readable form.
struct FrameText {
    file: String,
    line: i32,
    name: String,
}

impl fmt::Display for FrameText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} in {}", self.file, self.line, self.name)
    }
}

impl FrameText {
    /// Returns whether the frame is the user's, and not PyTorch's or another library's.
    fn is_users(&self) -> bool {
        let library =
            ["/torch/", "/torch_tandem/", "/site-packages/", "/lib/python3.", "<frozen", "<string>"];
        !library.iter().any(|l| self.file.contains(l))
    }

    /// Returns whether the frame is of an installed package other than PyTorch and Tandem.
    fn is_of_library(&self) -> bool {
        self.file.contains("/site-packages/")
            && !["/torch/", "/torch_tandem/"].iter().any(|l| self.file.contains(l))
    }

    fn file_name(&self) -> &str {
        self.file.rsplit('/').next().unwrap_or(&self.file)
    }
}

fn describe_frame(frame: Frame) -> Option<FrameText> {
    let codes = CODES.lock();
    let code = codes.as_ref()?.all.get(frame.code as usize)?;
    Some(FrameText { file: code.file.clone(), line: code.line(frame.instruction), name: code.name.clone() })
}

/// Readable forms of frames, each computed once.
#[derive(Default)]
pub struct Lines(FxHashMap<Frame, Option<Rc<FrameText>>>);

impl Lines {
    fn text(&mut self, frame: Frame) -> Option<Rc<FrameText>> {
        self.0.entry(frame).or_insert_with(|| describe_frame(frame).map(Rc::new)).clone()
    }

    fn frames(&mut self, frames: &[Frame]) -> Vec<Rc<FrameText>> {
        frames.iter().filter_map(|frame| self.text(*frame)).collect()
    }

    /// Returns the file, line and function of each frame.
    pub fn readable(&mut self, frames: &[Frame]) -> Vec<(String, i32, String)> {
        let frames = self.frames(frames);
        frames.iter().map(|frame| (frame.file.clone(), frame.line, frame.name.clone())).collect()
    }

    /// Returns the location of the forward op for an op that autograd itself issues, and otherwise the location.
    fn forward_of(&mut self, location: LocationId, locations: &Locations) -> LocationId {
        let frames = self.frames(locations.frames(location));
        // Tandem's own engine is called as an operator.
        let issuer = frames.iter().find(|frame| !frame.file.ends_with("/torch/_ops.py"));
        let in_engine = issuer.is_some_and(|frame| frame.name == "_engine_run_backward");
        match locations.get(location).backward {
            Some(backward) if in_engine && backward.forward != LocationId::UNKNOWN => {
                self.forward_of(backward.forward, locations)
            }
            _ => location,
        }
    }

    /// Returns the innermost frame of the location that is the user's. For an op that autograd itself issues, returns
    /// the frame of the forward op.
    pub fn user_frame(&mut self, location: LocationId, locations: &Locations) -> Option<Frame> {
        let forward = self.forward_of(location, locations);
        let frames = locations.frames(forward);
        let users = |frame: &&Frame| self.text(**frame).is_some_and(|text| text.is_users());
        frames.iter().find(users).or(frames.last()).copied()
    }

    /// Returns the text of [`Lines::user_frame`], such as `file.py:12 in train`. If that line calls a library other than
    /// PyTorch, which issues the op, the library's innermost function follows, since all ops of a trainer have one line
    /// of the user: `file.py:12 in train > model.py:80 in Attention.forward`. For an op that autograd itself issues, the
    /// text is the forward op's, followed by `, backward`.
    pub fn user_line(&mut self, location: LocationId, locations: &Locations) -> String {
        let forward = self.forward_of(location, locations);
        let frames = self.frames(locations.frames(forward));
        let users = frames.iter().position(|frame| frame.is_users());
        let Some(line) = users.or(frames.len().checked_sub(1)) else {
            return "unknown".into();
        };
        let mut text = frames[line].to_string();
        if let Some(called) = frames[..line].iter().find(|frame| frame.is_of_library()) {
            text += &format!(" > {}:{} in {}", called.file_name(), called.line, called.name);
        }
        if forward != location {
            text += ", backward";
        }
        text
    }

    /// Returns the path of the module that issues an op, such as `Encoder.layers.*.attention`; empty if no module does.
    /// For an op of a backward pass, returns the path of the module that issues the forward op.
    pub fn module(&mut self, location: LocationId, locations: &Locations) -> String {
        let forward = self.forward_of(location, locations);
        let codes = CODES.lock();
        let known = codes.as_ref().and_then(|codes| codes.modules.get(locations.frames(forward)));
        known.cloned().unwrap_or_default()
    }

    /// Returns the functions that lead to an op, outermost first, each with the line that calls the next function and
    /// the name of the file. For an op of a backward pass, returns the functions that lead to the forward op.
    pub fn functions(&mut self, location: LocationId, locations: &Locations) -> Vec<String> {
        let frames = self.frames(locations.user_frames(location));
        let launches = |f: &FrameText| f.file.starts_with("<frozen runpy") || f.file.ends_with("/bin/tandem");
        let named = |f: &Rc<FrameText>| format!("{}:{} {}", f.name, f.line, f.file_name());
        frames.iter().rev().skip_while(|f| launches(f)).map(named).collect()
    }
}

/// Returns the innermost frame of the calling thread's stack that is the user's.
pub fn innermost_user_line() -> String {
    let stack = walk_stack();
    let mut frames = stack.0.iter().filter_map(|frame| describe_frame(*frame)).peekable();
    let innermost = frames.peek().map(ToString::to_string);
    let users = frames.find(FrameText::is_users).map(|f| f.to_string());
    users.or(innermost).unwrap_or_else(|| "unknown".into())
}

/// Returns the text of a frame, such as `file.py:12 in train`.
pub fn line_of(frame: Frame) -> String {
    describe_frame(frame).map_or_else(|| "unknown".into(), |text| text.to_string())
}

/// Returns the text of [`Lines::user_line`] for a single location.
pub fn user_line(location: LocationId, locations: &Locations) -> String {
    Lines::default().user_line(location, locations)
}

/// Returns whether the calling thread holds the GIL.
fn holds_gil() -> bool {
    // SAFETY: the function may be called from any thread.
    unsafe { PyGILState_Check() == 1 }
}

/// Guard that releases the GIL, if the thread holds it, until it is dropped.
pub struct WithoutGil(*mut PyThreadState);

impl WithoutGil {
    /// Releases the GIL if the thread holds it.
    pub fn new() -> WithoutGil {
        // SAFETY: PyEval_SaveThread is called only if this thread holds the GIL.
        WithoutGil(if holds_gil() { unsafe { PyEval_SaveThread() } } else { std::ptr::null_mut() })
    }
}

impl Drop for WithoutGil {
    fn drop(&mut self) {
        if !self.0.is_null() {
            may_acquire(Rank::Gil);
            // SAFETY: PyEval_SaveThread returned this state on this thread, because the guard is not `Send`.
            unsafe { PyEval_RestoreThread(self.0) };
        }
    }
}

/// Runs pending signal handlers. Returns true if a handler raised; its exception is then set in the interpreter. Does
/// nothing on threads other than the main thread.
pub fn interrupted() -> bool {
    may_acquire(Rank::Gil);
    // SAFETY: Ensure and Release are paired, and the handlers run with the GIL held.
    unsafe {
        let state = PyGILState_Ensure();
        let raised = PyErr_CheckSignals() != 0;
        PyGILState_Release(state);
        raised
    }
}

/// Returns a number that identifies the calling thread: the address of a thread-local.
pub fn thread_token() -> usize {
    thread_local!(static TOKEN: u8 = const { 0 });
    TOKEN.with(|t| std::ptr::from_ref(t).cast::<c_void>() as usize)
}
