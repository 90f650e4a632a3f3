//! Objects that are reached from others without Python code, and their comparison.

use std::ffi::c_void;

use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyFloat, PyString, PyTuple};

use super::value::{Access, Expected, referent};

/// Returns the object that is reached from the object `from`, borrowed from the object that holds it, or null.
/// `are_guarded`: whether members are where they were.
pub fn reach(py: Python<'_>, access: &Access, from: *mut PyObject, are_guarded: bool) -> *mut PyObject {
    // SAFETY: `from` is alive. New references may be released at once, because `from` holds the objects that they refer
    // to. Objects that Python functions make would be an exception, but `is_late` excludes them.
    unsafe {
        let borrowed = |object: *mut PyObject| {
            if object.is_null() {
                ffi::PyErr_Clear();
            } else {
                ffi::Py_DECREF(object);
            }
            object
        };
        // Unlike `getattr`, this function calls no methods of the program.
        let attribute =
            |name: &Py<PyString>| borrowed(ffi::PyObject_GenericGetAttr(from, name.bind(py).as_ptr()));
        match access {
            Access::Key(key) if ffi::PyDict_Check(from) != 0 => {
                let found = ffi::PyDict_GetItemWithError(from, key.as_ptr());
                if found.is_null() {
                    ffi::PyErr_Clear();
                }
                found
            }
            Access::Stored(member, of) => {
                member.read(from, are_guarded).unwrap_or_else(|| reach(py, of, from, are_guarded))
            }
            Access::Attribute(name) => attribute(name),
            Access::Attributes => {
                borrowed(ffi::PyObject_GenericGetDict(from, std::ptr::null_mut::<c_void>()))
            }
            Access::Item(at) if ffi::PyTuple_Check(from) != 0 && *at < size_of(from) => {
                ffi::PyTuple_GetItem(from, *at)
            }
            Access::Item(at) if ffi::PyList_Check(from) != 0 && *at < size_of(from) => {
                ffi::PyList_GetItem(from, *at)
            }
            _ => std::ptr::null_mut(),
        }
    }
}

/// Returns the length of a list, tuple or dict, or -1 for other objects.
pub fn size_of(object: *mut PyObject) -> isize {
    // SAFETY: the object is alive, and each function is called for an object of its type.
    unsafe {
        if ffi::PyList_Check(object) != 0 {
            ffi::PyList_Size(object)
        } else if ffi::PyTuple_Check(object) != 0 {
            ffi::PyTuple_Size(object)
        } else if ffi::PyDict_Check(object) != 0 {
            ffi::PyDict_Size(object)
        } else {
            -1
        }
    }
}

/// Whether the dict `object` has these keys, in this order.
pub fn has_keys(object: *mut PyObject, keys: &Bound<'_, PyTuple>) -> bool {
    let (mut at, mut key) = (0, std::ptr::null_mut());
    let mut next = || {
        // SAFETY: the dict is alive, and does not change between the steps, because no Python code runs.
        let is_found = unsafe { ffi::PyDict_Next(object, &raw mut at, &raw mut key, std::ptr::null_mut()) };
        (is_found != 0).then_some(key)
    };
    // Names of attributes are interned. A name that is not is another object, and counts as another name.
    keys.iter().all(|name| next() == Some(name.as_ptr())) && next().is_none()
}

/// Returns the key or the value of a dict at a position among all keys and values. Keys have even positions.
pub fn paired<'py>(dict: &Bound<'py, PyAny>, position: usize) -> Option<Bound<'py, PyAny>> {
    let (key, value) = dict.cast::<PyDict>().ok()?.iter().nth(position / 2)?;
    Some(if position.is_multiple_of(2) { key } else { value })
}

/// Whether a weak reference refers to an object.
pub fn refers_to(reference: &Bound<'_, PyAny>, object: *mut PyObject) -> bool {
    // SAFETY: the function is called for a weak reference, and its result is only compared.
    unsafe {
        if ffi::PyWeakref_CheckRef(reference.as_ptr()) == 0 {
            return referent(reference).is_some_and(|found| found.as_ptr() == object);
        }
        ffi::PyWeakref_GetObject(reference.as_ptr()) == object
    }
}

/// Whether an object, or its absence, is as expected. `other` returns the object of the value with a number.
pub fn holds(
    py: Python<'_>,
    object: Option<&Bound<'_, PyAny>>,
    expected: &Expected,
    other: impl Fn(usize) -> *mut PyObject,
) -> bool {
    let Some(object) = object else { return matches!(expected, Expected::Absent | Expected::Any) };
    let is_of = |kind: &Py<PyAny>| object.get_type().as_ptr() == kind.as_ptr();
    match expected {
        Expected::Any => true,
        Expected::Absent => false,
        Expected::Same(same) => object.as_ptr() == same.as_ptr(),
        Expected::Referent(reference, kind) => {
            referent(reference.bind(py)).is_some_and(|same| same.is(object))
                && object.get_type().as_ptr() as usize == *kind
        }
        Expected::Equal(equal) => object.as_ptr() == equal.as_ptr() || is_equal(object, equal.bind(py)),
        Expected::Type(kind) => is_of(kind),
        Expected::Sized(kind, n) => is_of(kind) && size_of(object.as_ptr()) == *n,
        Expected::Named(keys) => {
            object.is_exact_instance_of::<PyDict>() && has_keys(object.as_ptr(), keys.bind(py))
        }
        Expected::As(n) => other(*n) == object.as_ptr(),
    }
}

/// Whether two values of built-in types are equal and have the same type.
pub fn is_equal(one: &Bound<'_, PyAny>, two: &Bound<'_, PyAny>) -> bool {
    if !one.get_type().is(two.get_type()) {
        return false;
    }
    match (one.cast_exact::<PyFloat>(), two.cast_exact::<PyFloat>()) {
        (Ok(one), Ok(two)) => one.value().to_bits() == two.value().to_bits(),
        _ => one.eq(two).unwrap_or(false),
    }
}

/// Returns the dict of an object's attributes, if it has one. Unlike `__dict__`, the program cannot override it.
#[pyfunction]
pub fn attributes_of<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    // SAFETY: the function takes any object, and returns a new reference or raises an exception.
    let dict = unsafe { ffi::PyObject_GenericGetDict(object.as_ptr(), std::ptr::null_mut::<c_void>()) };
    // SAFETY: `dict` is a new reference, or null if an exception was raised. The exception is dropped.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), dict) }.ok()
}
