//! Attributes in C whose places in their objects are known.

use std::ffi::c_int;

use pyo3::PyTypeInfo;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAny, PyDict, PyString, PyType};

/// Where the objects of a type store an attribute.
#[derive(Clone, Copy)]
pub struct Member {
    /// Address of the type.
    pub kind: usize,
    /// Offset in bytes.
    pub offset: usize,
    /// Whether the attribute is None if no object is stored.
    pub is_optional: bool,
    /// Whether the type is one that Python code can change.
    pub is_guarded: bool,
}

/// The descriptor of a member, which must remain in the dict of its type.
pub struct Guard {
    pub members: Py<PyAny>,
    pub name: Py<PyString>,
    pub descriptor: Py<PyAny>,
}

/// Offset of an object's type.
pub const TYPE_OFFSET: usize = std::mem::offset_of!(PyObject, ob_type);

/// `_Py_T_OBJECT` of `descrobject.h`.
pub const OBJECT: c_int = 6;

impl Member {
    /// Returns what the object `from` stores, borrowed from it, or null. Returns nothing if the place is not known.
    ///
    /// # Safety
    ///
    /// The object is alive.
    pub unsafe fn read(self, from: *mut PyObject, are_guarded: bool) -> Option<*mut PyObject> {
        // SAFETY: objects of the type have a pointer at the offset, and one that is not null is to an object.
        unsafe {
            if ffi::Py_TYPE(from) as usize != self.kind || (self.is_guarded && !are_guarded) {
                return None;
            }
            let found = from.byte_add(self.offset).cast::<*mut PyObject>().read();
            Some(if found.is_null() && self.is_optional { ffi::Py_None() } else { found })
        }
    }
}

impl Guard {
    pub fn holds(&self, py: Python<'_>) -> bool {
        self.members.bind(py).get_item(&self.name).is_ok_and(|found| found.is(&self.descriptor))
    }
}

/// The place of an attribute of functions and cells that is a property in C: a field of the object, in CPython 3.11 to
/// 3.14 (`funcobject.h`, `cellobject.h`).
pub fn field_of(kind: &Bound<'_, PyType>, name: &str) -> Option<Member> {
    static TYPES: PyOnceLock<[Py<PyAny>; 2]> = PyOnceLock::new();
    let find = || -> PyResult<[Py<PyAny>; 2]> {
        let types = kind.py().import("types")?;
        Ok([types.getattr("FunctionType")?.unbind(), types.getattr("CellType")?.unbind()])
    };
    let [function, cell] = TYPES.get_or_try_init(kind.py(), find).ok()?;
    let (number, is_optional) = match name {
        "__name__" if kind.is(function) => (2, false),
        "__qualname__" if kind.is(function) => (3, false),
        "__code__" if kind.is(function) => (4, false),
        "__defaults__" if kind.is(function) => (5, true),
        "__kwdefaults__" if kind.is(function) => (6, true),
        "cell_contents" if kind.is(cell) => (0, false),
        _ => return None,
    };
    let offset = std::mem::size_of::<PyObject>() + number * std::mem::size_of::<usize>();
    Some(Member { kind: kind.as_ptr() as usize, offset, is_optional, is_guarded: false })
}

/// Whether an object is a class that Python code has made or can change.
pub fn is_heap_type(object: &Bound<'_, PyAny>) -> bool {
    let Ok(class) = object.cast::<PyType>() else { return false };
    // SAFETY: the function takes any type.
    unsafe { ffi::PyType_GetFlags(class.as_type_ptr()) & ffi::Py_TPFLAGS_HEAPTYPE != 0 }
}

/// The offsets in bytes of the name and the qualified name in a class that Python code has made: those of the two
/// strings in a class with two different names.
pub fn offsets_of_names(py: Python<'_>) -> Option<[usize; 2]> {
    static FOUND: PyOnceLock<Option<[usize; 2]>> = PyOnceLock::new();
    let find = || -> PyResult<Option<[usize; 2]>> {
        let members = PyDict::new(py);
        members.set_item("__qualname__", "Outer.Named")?;
        let kind = PyType::type_object(py);
        let class = kind.call1(("Named", (), members))?;
        let size: usize = kind.getattr("__basicsize__")?.extract()?;
        let first = class.as_ptr().cast::<usize>();
        // SAFETY: a class without slots has the size of `type`'s objects.
        let words = unsafe { std::slice::from_raw_parts(first, size / std::mem::size_of::<usize>()) };
        let offset_of = |name: &str| -> PyResult<Option<usize>> {
            let text = class.getattr(name)?.as_ptr() as usize;
            Ok(words.iter().position(|word| *word == text).map(|at| at * std::mem::size_of::<usize>()))
        };
        Ok(offset_of("__name__")?.zip(offset_of("__qualname__")?).map(|(name, qualname)| [name, qualname]))
    };
    *FOUND.get_or_init(py, || find().unwrap_or_default())
}
