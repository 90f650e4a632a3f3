//! Attributes in C whose places in their objects are known.

use std::ffi::c_int;

use pyo3::PyTypeInfo;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAny, PyDict, PyString, PyType};

use super::value::{Access, Expected, Value};

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
const TYPE_OFFSET: usize = std::mem::offset_of!(PyObject, ob_type);

/// `_Py_T_OBJECT` of `descrobject.h`.
const OBJECT: c_int = 6;

impl Value {
    /// Where the objects that this value may be store what the access reaches. Returns nothing if that is not known. If
    /// Python code could change an attribute's descriptor, adds a guard.
    pub fn member(&self, py: Python<'_>, access: &Access, guards: &mut Vec<Guard>) -> Option<Member> {
        if !matches!(access, Access::Attribute(_) | Access::Attributes) {
            return None;
        }
        let kind = match &self.expected {
            Expected::Same(object) => object.bind(py).get_type(),
            Expected::Type(kind) | Expected::Sized(kind, _) => kind.bind(py).cast::<PyType>().ok()?.clone(),
            _ => return None,
        };
        let address = kind.as_ptr() as usize;
        let Access::Attribute(name) = access else {
            // The dict of attributes of a built-in type's objects, such as functions and `OrderedDict`s.
            if kind.is(PyType::type_object(py)) {
                return None;
            }
            let offset = kind.getattr("__dictoffset__").ok()?.extract::<isize>().ok()?;
            return (!is_heap_type(&kind) && offset > 0).then_some(Member {
                kind: address,
                offset: offset as usize,
                is_optional: false,
                is_guarded: false,
            });
        };
        let name = name.bind(py);
        if kind.is(PyType::type_object(py)) {
            let Expected::Same(class) = &self.expected else { return None };
            let in_class = |offset| Member { kind: address, offset, is_optional: false, is_guarded: false };
            match name.to_str().ok()? {
                "__class__" => return Some(in_class(TYPE_OFFSET)),
                "__name__" if is_heap_type(class.bind(py)) => {
                    return offsets_of_names(py).map(|o| in_class(o[0]));
                }
                "__qualname__" if is_heap_type(class.bind(py)) => {
                    return offsets_of_names(py).map(|o| in_class(o[1]));
                }
                _ => {}
            }
        }
        let members = kind.getattr("__dict__").ok()?;
        let descriptor = members.get_item(name).ok()?;
        if descriptor.get_type().name().ok()? != "member_descriptor" {
            return None;
        }
        // SAFETY: a member's descriptor has five pointers before that of the member (`descrobject.h`), in CPython 3.11
        // to 3.14, and is alive.
        let member = unsafe { &**descriptor.as_ptr().cast::<*const ffi::PyMemberDef>().add(5) };
        if !matches!(member.type_code, ffi::Py_T_OBJECT_EX | OBJECT) || member.offset <= 0 {
            return None;
        }
        let (offset, is_optional) = (member.offset as usize, member.type_code == OBJECT);
        let is_guarded = is_heap_type(&kind);
        if is_guarded {
            // Another type of types may look attributes up in another order.
            if !kind.get_type().is(PyType::type_object(py)) {
                return None;
            }
            if !guards.iter().any(|guard| guard.descriptor.is(&descriptor)) {
                let name = name.clone().unbind();
                guards.push(Guard { members: members.unbind(), name, descriptor: descriptor.unbind() });
            }
        }
        Some(Member { kind: address, offset, is_optional, is_guarded })
    }
}

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

/// Whether an object is a class that Python code has made or can change.
pub fn is_heap_type(object: &Bound<'_, PyAny>) -> bool {
    let Ok(class) = object.cast::<PyType>() else { return false };
    // SAFETY: the function takes any type.
    unsafe { ffi::PyType_GetFlags(class.as_type_ptr()) & ffi::Py_TPFLAGS_HEAPTYPE != 0 }
}

/// The offsets in bytes of the name and the qualified name in a class that Python code has made: those of the two
/// strings in a class with two different names.
fn offsets_of_names(py: Python<'_>) -> Option<[usize; 2]> {
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
