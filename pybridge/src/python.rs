//! What the bridge does with the interpreter: stacks, lines, the GIL, signals.
//!
//! The frame functions are public C API, but outside the limited API that pyo3's abi3 offers, so they are
//! declared here.

use std::ffi::{c_int, c_void};

use parking_lot::Mutex;
use pyo3::ffi::{
    Py_DecRef, PyErr_CheckSignals, PyEval_GetFrame, PyEval_RestoreThread, PyEval_SaveThread, PyFrameObject,
    PyGILState_Ensure, PyGILState_Release, PyObject, PyThreadState,
};
use pyo3::prelude::*;
use rustc_hash::FxHashMap;
use tandem_runtime::site::Stack;
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::{Frame, Locations};

use crate::ffi::ttc_current_node;

unsafe extern "C" {
    fn PyFrame_GetBack(frame: *mut PyFrameObject) -> *mut PyFrameObject;
    fn PyFrame_GetCode(frame: *mut PyFrameObject) -> *mut PyObject;
    fn PyFrame_GetLasti(frame: *mut PyFrameObject) -> c_int;
    fn PyCode_Addr2Line(code: *mut PyObject, instruction: c_int) -> c_int;
    fn PyGILState_Check() -> c_int;
}

/// Code objects that frames have shown, kept alive so that their addresses stay theirs.
#[derive(Default)]
struct Codes {
    by_address: FxHashMap<usize, u32>,
    all: Vec<Py<PyAny>>,
}

static CODES: Mutex<Option<Codes>> = Mutex::new(None);

impl Codes {
    /// Takes over a new reference.
    fn intern(&mut self, code: *mut PyObject, py: Python<'_>) -> u32 {
        if let Some(&id) = self.by_address.get(&(code as usize)) {
            // SAFETY: the reference is ours, and `all` holds another one.
            unsafe { Py_DecRef(code) };
            return id;
        }
        let id = self.all.len() as u32;
        self.by_address.insert(code as usize, id);
        // SAFETY: PyFrame_GetCode gave a new reference to an object.
        self.all.push(unsafe { Bound::from_owned_ptr(py, code) }.unbind());
        id
    }
}

/// Walks the calling thread's Python stack and asks autograd which node it runs.
pub fn walk_stack() -> Stack {
    let mut stack = Stack::default();
    let mut id = 0;
    // SAFETY: `id` is a valid place to write to.
    let sequence = unsafe { ttc_current_node(&raw mut id) };
    if sequence >= 0 {
        stack.node = Some((sequence as u64, id));
    }
    Python::attach(|py| {
        let mut codes = CODES.lock();
        let codes = codes.get_or_insert_default();
        // SAFETY: the GIL is held; the first frame is borrowed, those behind it are new references that are
        // dropped one step later; code objects are handed to `intern`, which takes them over.
        unsafe {
            let mut frame = PyEval_GetFrame();
            let mut owned = false;
            while !frame.is_null() {
                let code = codes.intern(PyFrame_GetCode(frame), py);
                stack.frames.push(Frame { code, instruction: PyFrame_GetLasti(frame) });
                let back = PyFrame_GetBack(frame);
                if owned {
                    Py_DecRef(frame.cast());
                }
                frame = back;
                owned = true;
            }
        }
    });
    stack
}

/// A frame in words.
struct FrameText {
    file: String,
    line: i32,
    name: String,
}

impl FrameText {
    /// Whether it is neither PyTorch's nor another library's.
    fn is_users(&self) -> bool {
        let library = ["/torch/", "/torch_tandem/", "/site-packages/", "<frozen", "<string>"];
        !library.iter().any(|l| self.file.contains(l))
    }
}

fn describe_frame(frame: Frame, py: Python<'_>) -> Option<FrameText> {
    let code = CODES.lock().as_ref()?.all.get(frame.code as usize)?.clone_ref(py).into_bound(py);
    Some(FrameText {
        file: code.getattr("co_filename").ok()?.extract().ok()?,
        // SAFETY: a code object, with the GIL held.
        line: unsafe { PyCode_Addr2Line(code.as_ptr(), frame.instruction) },
        name: code.getattr("co_name").ok()?.extract().ok()?,
    })
}

/// `file.py:12 in train`: the innermost frame of the location that is the user's. For an op that autograd itself
/// issues it is that of the forward op.
pub fn user_line(location: LocationId, locations: &Locations, py: Python<'_>) -> String {
    let place = locations.get(location);
    let frames: Vec<FrameText> = place.frames.iter().filter_map(|f| describe_frame(*f, py)).collect();
    let in_engine = frames.first().is_some_and(|f| f.name == "_engine_run_backward");
    if let (Some(backward), true) = (place.backward, in_engine)
        && backward.forward != LocationId::UNKNOWN
    {
        return user_line(backward.forward, locations, py);
    }
    let user = frames.iter().find(|f| f.is_users()).or(frames.last());
    user.map_or_else(|| "unknown".into(), |f| format!("{}:{} in {}", f.file, f.line, f.name))
}

/// Whether the calling thread holds the GIL.
fn holds_gil() -> bool {
    // SAFETY: may be called from any thread.
    unsafe { PyGILState_Check() == 1 }
}

/// Gives up the GIL for as long as it lives, if the thread holds it.
pub struct WithoutGil(*mut PyThreadState);

impl WithoutGil {
    /// Releases the GIL if it is held.
    pub fn new() -> WithoutGil {
        // SAFETY: the GIL is held where it is released.
        WithoutGil(if holds_gil() { unsafe { PyEval_SaveThread() } } else { std::ptr::null_mut() })
    }
}

impl Drop for WithoutGil {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the state that PyEval_SaveThread gave, on the same thread.
            unsafe { PyEval_RestoreThread(self.0) };
        }
    }
}

/// Runs the signal handlers that are due; true where one raised, which leaves the exception set. Does nothing
/// but on the main thread.
pub fn interrupted() -> bool {
    // SAFETY: Ensure and Release are paired, and the handlers run with the GIL held.
    unsafe {
        let state = PyGILState_Ensure();
        let raised = PyErr_CheckSignals() != 0;
        PyGILState_Release(state);
        raised
    }
}

/// A thread id for telling the program's thread from others: the address of a thread-local.
pub fn thread_token() -> usize {
    thread_local!(static TOKEN: u8 = const { 0 });
    TOKEN.with(|t| std::ptr::from_ref(t).cast::<c_void>() as usize)
}
