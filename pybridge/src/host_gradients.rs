//! Assignments of gradients (`tensor.grad = gradient`) that PyTorch refuses, since the two are on different devices.
//!
//! The attribute is a descriptor in C, whose function this module replaces: a property in Python would slow each use of
//! `tensor.grad` down.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

/// PyTorch's function, and the one that prepares the tensor and the gradient for another try.
static REPLACED: OnceLock<(ffi::setter, Py<PyAny>)> = OnceLock::new();

/// Makes `tensor.grad = gradient` call `prepare(tensor, gradient)` where PyTorch has refused the assignment, and assign
/// again if that returns True. `descriptor` is `TensorBase.grad`. Only the first call has an effect.
#[pyfunction]
pub fn prepare_gradients(descriptor: &Bound<'_, PyAny>, prepare: Py<PyAny>) -> PyResult<()> {
    if descriptor.get_type().name()? != "getset_descriptor" {
        return Err(PyTypeError::new_err("the attribute is not one in C"));
    }
    // SAFETY: such a descriptor has five pointers before that of its functions (`descrobject.h`), in CPython 3.11 to
    // 3.14. PyTorch's are static and not constant, and code that uses them holds the GIL, as this function does.
    let functions = unsafe { &mut **descriptor.as_ptr().cast::<*mut ffi::PyGetSetDef>().add(5) };
    let Some(original) = functions.set else {
        return Err(PyTypeError::new_err("the attribute cannot be set"));
    };
    if REPLACED.set((original, prepare)).is_ok() {
        functions.set = Some(set);
    }
    Ok(())
}

/// # Safety
///
/// - CPython calls the function as the setter of the attribute: with a tensor, and an object or null.
/// - The calling thread holds the GIL.
unsafe extern "C" fn set(tensor: *mut PyObject, gradient: *mut PyObject, closure: *mut c_void) -> c_int {
    let Some((original, prepare)) = REPLACED.get() else { return -1 };
    // SAFETY: the arguments are those of this function.
    let assign = || unsafe { original(tensor, gradient, closure) };
    let status = assign();
    if status == 0 || gradient.is_null() {
        return status;
    }
    // SAFETY: the thread holds the GIL.
    let py = unsafe { Python::assume_attached() };
    let refused = PyErr::take(py);
    // SAFETY: the caller holds both objects.
    let given = unsafe { [tensor, gradient].map(|object| Bound::from_borrowed_ptr(py, object)) };
    let [tensor, gradient] = given;
    let is_prepared = prepare.bind(py).call1((tensor, gradient)).and_then(|answer| answer.is_truthy());
    match (is_prepared, refused) {
        (Ok(true), _) => assign(),
        (Ok(false), Some(refused)) => {
            refused.restore(py);
            status
        }
        (Ok(false), None) => status,
        (Err(error), _) => {
            error.restore(py);
            status
        }
    }
}
