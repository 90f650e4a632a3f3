//! Calls of PyTorch's modules, and accesses to what they hold, without PyTorch's Python functions.
//!
//! `Module.__call__` runs two Python functions before `forward`, and `Module.__getattr__` runs for each parameter, buffer
//! and submodule that is named. The methods here do the same, but leave to these functions all that they do not know:
//! hooks, compiled and scripted modules, replaced functions.

use std::cell::Cell;
use std::ffi::c_char;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::ffi::{
    METH_FASTCALL, METH_KEYWORDS, Py_ssize_t, PyDescr_NewMethod, PyDict_GetItemWithError, PyMethodDef,
    PyMethodDefPointer, PyObject, PyObject_CallMethodObjArgs, PyObject_GenericGetDict, PyTypeObject,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};
use pyo3::{Borrowed, intern};
use smallvec::{SmallVec, smallvec};
use tandem_executor::threads::locks::{Mutex, Rank};

use crate::ffi::ttc_is_scripted;

/// Folder of PyTorch's modules.
pub const MODULES: &str = "/torch/nn/modules/";

/// PyTorch's own functions, and what they read.
struct Torch {
    /// `Module._wrapped_call_impl`, which is `Module.__call__`.
    wrapped_call: Py<PyAny>,
    /// `Module._call_impl`.
    call: Py<PyAny>,
    /// `Module.__getattr__`.
    getattr: Py<PyAny>,
    /// Globals of the file of `Module`, among them the hooks of all modules.
    globals: Py<PyDict>,
    /// Globals of `torch.nn.functional`.
    functional: Py<PyDict>,
    leaves: Vec<Leaf>,
}

/// A class of `torch.nn` whose `forward` passes its input and attributes of the module to a function.
struct Leaf {
    class: Py<PyAny>,
    /// Methods that must be those of PyTorch, by name.
    methods: Vec<(Py<PyString>, Py<PyAny>)>,
    /// Name of the function in `torch.nn.functional`.
    function: Py<PyString>,
    /// Names of the attributes that follow the input.
    attributes: Vec<Py<PyString>>,
    kind: Kind,
}

/// The steps of `forward`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A call of the function.
    Plain,
    /// A call of `_conv_forward`, which calls the function if `padding_mode` is `zeros`.
    Convolution,
    /// An increment of `num_batches_tracked`, and a call of the function with the running statistics or without.
    BatchNorm,
}

/// The classes of [`Leaf`], with the functions and the attributes.
const LEAVES: [(&str, Kind, &str, &[&str]); 11] = [
    ("Linear", Kind::Plain, "linear", &["weight", "bias"]),
    ("LayerNorm", Kind::Plain, "layer_norm", &["normalized_shape", "weight", "bias", "eps"]),
    ("RMSNorm", Kind::Plain, "rms_norm", &["normalized_shape", "weight", "eps"]),
    ("GroupNorm", Kind::Plain, "group_norm", &["num_groups", "weight", "bias", "eps"]),
    ("Embedding", Kind::Plain, "embedding", EMBEDDING),
    ("Conv1d", Kind::Convolution, "conv1d", CONVOLUTION),
    ("Conv2d", Kind::Convolution, "conv2d", CONVOLUTION),
    ("Conv3d", Kind::Convolution, "conv3d", CONVOLUTION),
    ("BatchNorm1d", Kind::BatchNorm, "batch_norm", BATCH_NORM),
    ("BatchNorm2d", Kind::BatchNorm, "batch_norm", BATCH_NORM),
    ("BatchNorm3d", Kind::BatchNorm, "batch_norm", BATCH_NORM),
];

const EMBEDDING: &[&str] =
    &["weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"];

const CONVOLUTION: &[&str] = &["weight", "bias", "stride", "padding", "dilation", "groups"];

#[rustfmt::skip]
const BATCH_NORM: &[&str] = &[
    "running_mean", "running_var", "weight", "bias", "momentum", "eps",
    "training", "track_running_stats", "num_batches_tracked",
];

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Function that is called instead of the outermost module call of a thread, with the same arguments.
static AROUND: Mutex<Option<Py<PyAny>>> = Mutex::new(Rank::ModuleCalls, None);

/// Whether `AROUND` has a function.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether the thread is inside of a module's call that is watched.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
    /// The module whose function is called without `forward`, null if there is none.
    static LEAF: Cell<*mut PyObject> = const { Cell::new(null_mut()) };
}

/// The module that the calling thread is in, if it was called without its `forward`.
pub fn leaf(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    // SAFETY: the pointer is to a module that its caller keeps alive until the call ends, which resets the pointer.
    unsafe { Bound::from_borrowed_ptr_or_opt(py, LEAF.get()) }
}

/// Whether modules are called without this function of `torch.nn.modules`, given its qualified name.
pub fn is_left_out(function: &str) -> bool {
    let Some((class, method)) = function.rsplit_once('.') else { return false };
    match method {
        "_call_impl" | "_wrapped_call_impl" => class == "Module",
        "forward" | "_conv_forward" => {
            class == "_BatchNorm"
                || LEAVES.iter().any(|(leaf, kind, ..)| *leaf == class && *kind != Kind::BatchNorm)
        }
        _ => false,
    }
}

/// Arguments of a method, as the interpreter passes them.
#[derive(Clone, Copy)]
struct Arguments<'a, 'py> {
    positional: &'a [Borrowed<'a, 'py, PyAny>],
    /// Values of the keyword arguments, in the order of `names`.
    keyword: &'a [Borrowed<'a, 'py, PyAny>],
    names: Option<Borrowed<'a, 'py, PyTuple>>,
}

impl<'py> Arguments<'_, 'py> {
    /// Calls a function with these arguments, after `first` if there is one.
    fn pass(
        self,
        py: Python<'py>,
        to: &Bound<'py, PyAny>,
        first: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let positional = self.positional.iter().map(|argument| (**argument).clone());
        let all: Vec<Bound<'py, PyAny>> = first.cloned().into_iter().chain(positional).collect();
        let all = PyTuple::new(py, all)?;
        let Some(names) = self.names else { return to.call1(all) };
        let named = PyDict::new(py);
        for (name, value) in names.iter().zip(self.keyword) {
            named.set_item(name, value)?;
        }
        to.call(all, Some(&named))
    }
}

/// Returns the attributes that an object holds itself.
fn attributes<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: the object is alive. The function returns a new reference, or null and an exception.
    let dict = unsafe {
        Bound::from_owned_ptr_or_err(object.py(), PyObject_GenericGetDict(object.as_ptr(), null_mut()))?
    };
    Ok(dict.cast_into::<PyDict>()?)
}

/// Whether `dict[name]` is an empty dict, as the hooks of most modules are.
fn has_none<'py>(dict: &Bound<'py, PyDict>, name: &Bound<'py, PyString>) -> PyResult<bool> {
    // SAFETY: the objects are alive. The result is borrowed from the dict, which keeps it since no code of the program
    // runs until the function returns; it is null for an absent item, or with an exception.
    let hooks = unsafe {
        let hooks = PyDict_GetItemWithError(dict.as_ptr(), name.as_ptr());
        Borrowed::from_ptr_or_opt(dict.py(), hooks)
    };
    match hooks {
        Some(hooks) => Ok(hooks.cast::<PyDict>().is_ok_and(|hooks| hooks.is_empty())),
        None => PyErr::take(dict.py()).map_or(Ok(false), Err),
    }
}

/// Returns what a module holds in a table, such as `_parameters`. The outer `None` says that there is no such dict.
fn held<'py>(
    own: &Bound<'py, PyDict>,
    table: &Bound<'py, PyString>,
    name: &Bound<'py, PyAny>,
) -> PyResult<Option<Option<Bound<'py, PyAny>>>> {
    let Some(table) = own.get_item(table)? else { return Ok(None) };
    let Ok(table) = table.cast_exact::<PyDict>() else { return Ok(None) };
    table.get_item(name).map(Some)
}

/// Returns an attribute of a module: one that the object holds itself, a parameter or a buffer.
fn attribute<'py>(
    own: &Bound<'py, PyDict>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    if let Some(found) = own.get_item(name)? {
        return Ok(Some(found));
    }
    for table in [intern!(own.py(), "_parameters"), intern!(own.py(), "_buffers")] {
        if let Some(found) = held(own, table, name)?.flatten() {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Whether the code of a function is in PyTorch's folder of modules.
fn is_pytorchs(function: &Bound<'_, PyAny>) -> bool {
    let file = function.getattr("__code__").and_then(|code| code.getattr("co_filename")?.extract::<String>());
    file.is_ok_and(|file| file.replace('\\', "/").contains(MODULES))
}

/// Does what `_BatchNorm.forward` does with an input and the attributes of [`BATCH_NORM`]. `None` if the momentum
/// depends on the number of batches.
fn batch_norm<'py>(
    module: &Bound<'py, PyAny>,
    function: &Bound<'py, PyAny>,
    values: &[Bound<'py, PyAny>],
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = module.py();
    let [input, mean, variance, weight, bias, momentum, eps, training, tracks, batches] = values else {
        return Ok(None);
    };
    let (Ok(is_training), Ok(tracks)) = (training.extract::<bool>(), tracks.extract::<bool>()) else {
        return Ok(None);
    };
    if momentum.is_none() {
        return Ok(None);
    }
    module.call_method1(intern!(py, "_check_input_dim"), (input,))?;
    if is_training && tracks && !batches.is_none() {
        batches.call_method1(intern!(py, "add_"), (1,))?;
    }
    let none = py.None().into_bound(py);
    let (mean, variance) = if !is_training || tracks { (mean, variance) } else { (&none, &none) };
    let by_batch = is_training || (values[1].is_none() && values[2].is_none());
    function.call1((input, mean, variance, weight, bias, by_batch, momentum, eps)).map(Some)
}

impl Leaf {
    /// The leaf of a class. `None` if this version of PyTorch lacks the class, or if the program has replaced a method
    /// before Tandem was imported.
    fn of(
        classes: &Bound<'_, PyModule>,
        (class, kind, function, attributes): (&str, Kind, &str, &[&str]),
    ) -> PyResult<Option<Leaf>> {
        let py = classes.py();
        let Some(class) = classes.getattr_opt(class)? else { return Ok(None) };
        let name = |name: &str| PyString::intern(py, name).unbind();
        let methods = match kind {
            Kind::Convolution => &["forward", "_conv_forward"][..],
            Kind::Plain | Kind::BatchNorm => &["forward"],
        };
        let methods = methods.iter().map(|method| Ok((name(method), class.getattr(*method)?.unbind())));
        let methods: Vec<(Py<PyString>, Py<PyAny>)> = methods.collect::<PyResult<_>>()?;
        if !methods.iter().all(|(_, method)| is_pytorchs(method.bind(py))) {
            return Ok(None);
        }
        Ok(Some(Leaf {
            methods,
            class: class.unbind(),
            function: name(function),
            attributes: attributes.iter().map(|attribute| name(attribute)).collect(),
            kind,
        }))
    }
}

impl Torch {
    /// Whether PyTorch's functions would call the module's `forward` and nothing else.
    fn calls_forward<'py>(&self, module: &Bound<'py, PyAny>, own: &Bound<'py, PyDict>) -> PyResult<bool> {
        let py = module.py();
        let call = intern!(py, "_call_impl");
        let globals = self.globals.bind(py);
        // SAFETY: the function only reads a thread-local variable.
        let is_scripted = unsafe { ttc_is_scripted() } != 0;
        Ok(!is_scripted
            && module.getattr(intern!(py, "_compiled_call_impl"))?.is_none()
            && module.get_type().getattr(call)?.is(&self.call)
            && own.get_item(call)?.is_none()
            && has_none(own, intern!(py, "_forward_hooks"))?
            && has_none(own, intern!(py, "_forward_pre_hooks"))?
            && has_none(own, intern!(py, "_backward_hooks"))?
            && has_none(own, intern!(py, "_backward_pre_hooks"))?
            && has_none(globals, intern!(py, "_global_forward_hooks"))?
            && has_none(globals, intern!(py, "_global_forward_pre_hooks"))?
            && has_none(globals, intern!(py, "_global_backward_hooks"))?
            && has_none(globals, intern!(py, "_global_backward_pre_hooks"))?)
    }

    /// Calls what the module's `forward` calls. `None` if the module is not known to do only this.
    fn call_leaf<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        own: &Bound<'py, PyDict>,
        input: Borrowed<'_, 'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = module.py();
        let class = module.get_type();
        let Some(leaf) = self.leaves.iter().find(|leaf| class.is(&leaf.class)) else { return Ok(None) };
        for (name, method) in &leaf.methods {
            let name = name.bind(py);
            if !class.getattr(name)?.is(method) || own.get_item(name)?.is_some() {
                return Ok(None);
            }
        }
        if leaf.kind == Kind::Convolution {
            let mode = own.get_item(intern!(py, "padding_mode"))?;
            if !mode.is_some_and(|mode| mode.cast::<PyString>().is_ok_and(|mode| mode == "zeros")) {
                return Ok(None);
            }
        }
        let mut values: SmallVec<[Bound<'py, PyAny>; 10]> = smallvec![(*input).clone()];
        for name in &leaf.attributes {
            let Some(found) = attribute(own, name.bind(py))? else { return Ok(None) };
            values.push(found);
        }
        let Some(function) = self.functional.bind(py).get_item(&leaf.function)? else { return Ok(None) };
        let outer = LEAF.replace(module.as_ptr());
        let result = match leaf.kind {
            Kind::BatchNorm => batch_norm(module, &function, &values),
            Kind::Plain | Kind::Convolution => function.call1(PyTuple::new(py, values)?).map(Some),
        };
        LEAF.set(outer);
        result
    }

    fn call<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        arguments: Arguments<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = module.py();
        if IS_WATCHED.load(Ordering::Relaxed) && !IS_INSIDE.get() {
            let around = AROUND.lock().as_ref().map(|around| around.clone_ref(py));
            if let Some(around) = around {
                IS_INSIDE.set(true);
                let result = arguments.pass(py, around.bind(py), Some(module));
                IS_INSIDE.set(false);
                return result;
            }
        }
        let own = attributes(module)?;
        if !self.calls_forward(module, &own)? {
            return arguments.pass(py, self.wrapped_call.bind(py), Some(module));
        }
        if let ([input], None) = (arguments.positional, arguments.names)
            && let Some(result) = self.call_leaf(module, &own, *input)?
        {
            return Ok(result);
        }
        let forward = intern!(py, "forward");
        let (object, name, end) = (module.as_ptr(), forward.as_ptr(), null_mut::<PyObject>());
        // SAFETY: all pointers are to live objects, and null ends them. The function returns a new reference, or null
        // and an exception.
        let result = unsafe {
            match (arguments.positional, arguments.names) {
                ([a], None) => PyObject_CallMethodObjArgs(object, name, a.as_ptr(), end),
                ([a, b], None) => PyObject_CallMethodObjArgs(object, name, a.as_ptr(), b.as_ptr(), end),
                _ => return arguments.pass(py, &module.getattr(forward)?, None),
            }
        };
        // SAFETY: as above.
        unsafe { Bound::from_owned_ptr_or_err(py, result) }
    }

    fn getattr<'py>(
        &self,
        module: &Bound<'py, PyAny>,
        arguments: Arguments<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = module.py();
        if let ([name], None) = (arguments.positional, arguments.names) {
            let own = attributes(module)?;
            for table in [intern!(py, "_parameters"), intern!(py, "_buffers"), intern!(py, "_modules")] {
                match held(&own, table, name)? {
                    Some(Some(found)) => return Ok(found),
                    Some(None) => {}
                    None => break,
                }
            }
        }
        arguments.pass(py, self.getattr.bind(py), Some(module))
    }
}

/// A method of [`Torch`].
type Method = for<'py> fn(&Torch, &Bound<'py, PyAny>, Arguments<'_, 'py>) -> PyResult<Bound<'py, PyAny>>;

/// Calls a method with what the interpreter passes, and returns what the interpreter expects.
///
/// # Safety
/// The requirements are those of a method with `METH_FASTCALL | METH_KEYWORDS`.
unsafe fn enter(
    method: Method,
    module: *mut PyObject,
    arguments: *const *mut PyObject,
    n: Py_ssize_t,
    names: *mut PyObject,
) -> *mut PyObject {
    // SAFETY: the interpreter calls methods with the GIL held.
    let py = unsafe { Python::assume_attached() };
    // SAFETY: the interpreter keeps the module and the tuple of names alive during the call.
    let (module, names) = unsafe {
        let names = Borrowed::from_ptr_or_opt(py, names);
        (Borrowed::from_ptr(py, module), names.map(|names| names.cast_unchecked::<PyTuple>()))
    };
    let named = names.map_or(0, |names| names.len());
    let all: &[Borrowed<'_, '_, PyAny>] = match n as usize + named {
        0 => &[],
        // SAFETY: `arguments` points to `total` objects, which the interpreter keeps alive during the call. `Borrowed`
        // is a transparent wrapper of a pointer.
        total => unsafe { std::slice::from_raw_parts(arguments.cast(), total) },
    };
    let (positional, keyword) = all.split_at(n as usize);
    let Some(torch) = TORCH.get(py) else { return null_mut() };
    match method(torch, &module, Arguments { positional, keyword, names }) {
        Ok(result) => result.into_ptr(),
        Err(error) => {
            error.restore(py);
            null_mut()
        }
    }
}

unsafe extern "C" fn call(
    module: *mut PyObject,
    arguments: *const *mut PyObject,
    n: Py_ssize_t,
    names: *mut PyObject,
) -> *mut PyObject {
    // SAFETY: the interpreter passes the arguments of a method with `METH_FASTCALL | METH_KEYWORDS`.
    unsafe { enter(Torch::call, module, arguments, n, names) }
}

unsafe extern "C" fn getattr(
    module: *mut PyObject,
    arguments: *const *mut PyObject,
    n: Py_ssize_t,
    names: *mut PyObject,
) -> *mut PyObject {
    // SAFETY: the interpreter passes the arguments of a method with `METH_FASTCALL | METH_KEYWORDS`.
    unsafe { enter(Torch::getattr, module, arguments, n, names) }
}

/// Returns the methods that take the place of `Module.__call__` and `Module.__getattr__`. The class must have PyTorch's
/// own methods at the first call; classes of modules may have others.
pub fn methods<'py>(module: &Bound<'py, PyType>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let py = module.py();
    TORCH.get_or_try_init(py, || -> PyResult<Torch> {
        let classes = py.import("torch.nn")?;
        let leaves = LEAVES.into_iter().filter_map(|leaf| Leaf::of(&classes, leaf).transpose());
        Ok(Torch {
            wrapped_call: module.getattr("_wrapped_call_impl")?.unbind(),
            call: module.getattr("_call_impl")?.unbind(),
            getattr: module.getattr("__getattr__")?.unbind(),
            globals: py.import("torch.nn.modules.module")?.dict().unbind(),
            functional: py.import("torch.nn.functional")?.dict().unbind(),
            leaves: leaves.collect::<PyResult<_>>()?,
        })
    })?;
    let method = |name: &'static [u8], doc: &'static [u8], function| {
        // The interpreter keeps pointers to the definition.
        let definition = Box::leak(Box::new(PyMethodDef {
            ml_name: name.as_ptr().cast::<c_char>(),
            ml_meth: PyMethodDefPointer { PyCFunctionFastWithKeywords: function },
            ml_flags: METH_FASTCALL | METH_KEYWORDS,
            ml_doc: doc.as_ptr().cast::<c_char>(),
        }));
        // SAFETY: the class and the definition are alive. The function returns a new reference, or null and an
        // exception.
        unsafe {
            let class = module.as_ptr().cast::<PyTypeObject>();
            Bound::from_owned_ptr_or_err(py, PyDescr_NewMethod(class, definition))
        }
    };
    let call_doc = b"__call__($self, /, *args, **kwargs)\n--\n\nCalls the module's hooks and `forward`.\0";
    let getattr_doc = b"__getattr__($self, name, /)\n--\n\nReturns a parameter, buffer or submodule.\0";
    Ok((method(b"__call__\0", call_doc, call)?, method(b"__getattr__\0", getattr_doc, getattr)?))
}

/// Has `around` called instead of each outermost module call of a thread, or no function if it is `None`. Module calls
/// inside of `around` are calls as usual.
pub fn watch(around: Option<Py<PyAny>>) {
    IS_WATCHED.store(around.is_some(), Ordering::Relaxed);
    let before = std::mem::replace(&mut *AROUND.lock(), around);
    // Released without the lock, since a finalizer may call modules.
    drop(before);
}
