//! What the bridge does with the interpreter: stacks, lines, the GIL, signals.
//!
//! The frame functions are public C API, but outside the limited API that pyo3's abi3 offers, so they are
//! declared here.

use std::ffi::{c_int, c_void};
use std::rc::Rc;

use parking_lot::Mutex;
use pyo3::ffi::{
    Py_DecRef, PyErr_CheckSignals, PyEval_GetFrame, PyEval_RestoreThread, PyEval_SaveThread, PyFrameObject,
    PyGILState_Ensure, PyGILState_Release, PyObject, PyThreadState,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rustc_hash::FxHashMap;
use tandem_runtime::site::Stack;
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::{Frame, Locations};

unsafe extern "C" {
    fn PyFrame_GetBack(frame: *mut PyFrameObject) -> *mut PyFrameObject;
    fn PyFrame_GetCode(frame: *mut PyFrameObject) -> *mut PyObject;
    fn PyFrame_GetLasti(frame: *mut PyFrameObject) -> c_int;
    fn PyCode_Addr2Line(code: *mut PyObject, instruction: c_int) -> c_int;
    fn PyGILState_Check() -> c_int;
}

/// Code objects that frames have shown. Equal ones of one file are one: a program may compile the same text, or
/// define the same function, again and again.
struct Codes {
    /// Ids by address, of the code objects in `kept`.
    by_address: FxHashMap<usize, u32>,
    /// Kept alive so that their addresses stay theirs.
    kept: Vec<Py<PyAny>>,
    /// Ids by file and code object.
    by_value: Py<PyDict>,
    /// One object an id.
    all: Vec<Py<PyAny>>,
}

/// Code objects that are kept alive for being found by address; further ones are found by value.
const MAX_KEPT: usize = 1 << 14;

static CODES: Mutex<Option<Codes>> = Mutex::new(None);

/// Code of this package's, which is not always in between: it is no part of a location.
const OUR_OWN: u32 = u32::MAX;

impl Codes {
    fn new(py: Python<'_>) -> Codes {
        let by_value = PyDict::new(py).unbind();
        Codes { by_address: FxHashMap::default(), kept: Vec::new(), by_value, all: Vec::new() }
    }

    /// Takes over a new reference.
    fn intern(&mut self, code: *mut PyObject, py: Python<'_>) -> u32 {
        if let Some(&id) = self.by_address.get(&(code as usize)) {
            // SAFETY: the reference is ours, and `kept` holds another one.
            unsafe { Py_DecRef(code) };
            return id;
        }
        // SAFETY: PyFrame_GetCode gave a new reference to an object.
        let code = unsafe { Bound::from_owned_ptr(py, code) };
        let address = code.as_ptr() as usize;
        let id = self.id_by_value(&code).unwrap_or(0);
        if self.kept.len() < MAX_KEPT {
            self.by_address.insert(address, id);
            self.kept.push(code.unbind());
        }
        id
    }

    fn id_by_value(&mut self, code: &Bound<'_, PyAny>) -> PyResult<u32> {
        let file: String = code.getattr("co_filename")?.extract()?;
        if file.contains("/torch_tandem/") {
            return Ok(OUR_OWN);
        }
        let key = (file, code);
        let by_value = self.by_value.bind(code.py());
        if let Some(id) = by_value.get_item(&key)? {
            return id.extract();
        }
        let id = self.all.len() as u32;
        by_value.set_item(key, id)?;
        self.all.push(code.clone().unbind());
        Ok(id)
    }
}

/// Walks the calling thread's Python stack.
pub fn walk_stack() -> Stack {
    let mut stack = Stack::default();
    Python::attach(|py| {
        let mut codes = CODES.lock();
        let codes = codes.get_or_insert_with(|| Codes::new(py));
        // SAFETY: the GIL is held; the first frame is borrowed, those behind it are new references that are
        // dropped one step later; code objects are handed to `intern`, which takes them over.
        unsafe {
            let mut frame = PyEval_GetFrame();
            let mut owned = false;
            while !frame.is_null() {
                let code = codes.intern(PyFrame_GetCode(frame), py);
                if code != OUR_OWN {
                    stack.0.push(Frame { code, instruction: PyFrame_GetLasti(frame) });
                }
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
        name: code.getattr("co_qualname").ok()?.extract().ok()?,
    })
}

/// Frames in words, described once each.
#[derive(Default)]
pub struct Lines(FxHashMap<Frame, Option<Rc<FrameText>>>);

impl Lines {
    fn frames(&mut self, frames: &[Frame], py: Python<'_>) -> Vec<Rc<FrameText>> {
        let mut text =
            |f: &Frame| self.0.entry(*f).or_insert_with(|| describe_frame(*f, py).map(Rc::new)).clone();
        frames.iter().filter_map(&mut text).collect()
    }

    /// `file.py:12 in train`: the innermost frame of the location that is the user's. For an op that autograd
    /// itself issues it is that of the forward op.
    pub fn user_line(&mut self, location: LocationId, locations: &Locations, py: Python<'_>) -> String {
        let place = locations.get(location);
        let frames = self.frames(locations.frames(location), py);
        let in_engine = frames.first().is_some_and(|f| f.name == "_engine_run_backward");
        if let (Some(backward), true) = (place.backward, in_engine)
            && backward.forward != LocationId::UNKNOWN
        {
            return self.user_line(backward.forward, locations, py);
        }
        let user = frames.iter().find(|f| f.is_users()).or(frames.last());
        user.map_or_else(|| "unknown".into(), |f| format!("{}:{} in {}", f.file, f.line, f.name))
    }

    /// The functions on the way to an op, outermost first, each with the line that calls the next; for an op of
    /// backward, those of the forward op.
    pub fn functions(&mut self, location: LocationId, locations: &Locations, py: Python<'_>) -> Vec<String> {
        let frames = self.frames(locations.user_frames(location), py);
        let passes_on = |f: &FrameText| f.file.ends_with("/torch/nn/modules/module.py");
        let named = |f: &Rc<FrameText>| format!("{}:{}", f.name, f.line);
        frames.iter().rev().filter(|f| !passes_on(f)).map(named).collect()
    }
}

/// [`Lines::user_line`], once.
pub fn user_line(location: LocationId, locations: &Locations, py: Python<'_>) -> String {
    Lines::default().user_line(location, locations, py)
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
