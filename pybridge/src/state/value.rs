//! The values of a state: the access by which each is found, and the requirement that the object found has to meet.

use std::ops::Range;

use pyo3::PyTypeInfo;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyList, PySet, PyString, PyTuple, PyType};

use super::member::{Guard, Member, OBJECT, TYPE_OFFSET, field_of, is_heap_type, offsets_of_names};

/// How a value is reached from its parent, the value that holds it.
pub enum Access {
    /// Object that the check holds.
    Root(Py<PyAny>),
    /// Object that a weak reference refers to.
    Referent(Py<PyAny>),
    /// Argument of the call that is neither a tensor nor a plain value, by number.
    Argument(usize),
    /// Value of a dict, by its key.
    Key(Py<PyAny>),
    /// Attribute that is implemented in C.
    Attribute(Py<PyString>),
    /// Such an access by which an object is reached that is stored at a known place.
    Stored(Member, Box<Access>),
    /// The dict of an object's attributes.
    Attributes,
    /// Item of a list or a tuple.
    Item(isize),
    /// Key or value of a dict whose keys and values are all listed, in order.
    Paired,
    /// Result of a Python function, called with the parent.
    Call(Py<PyAny>),
}

/// The requirement that a value has to meet.
pub enum Expected {
    /// Any object, or none.
    Any,
    /// No object.
    Absent,
    /// This object.
    Same(Py<PyAny>),
    /// The object that a weak reference refers to, whose type is at this address.
    Referent(Py<PyAny>, usize),
    /// An equal object of the same type. Floats are equal if they have the same bits.
    Equal(Py<PyAny>),
    /// An object of this type.
    Type(Py<PyAny>),
    /// A list, tuple or dict of this type and length.
    Sized(Py<PyAny>, isize),
    /// A dict with these keys, in this order.
    Named(Py<PyTuple>),
    /// The same object as the value with this number.
    As(usize),
}

/// Value of a state.
pub struct Value {
    pub access: Access,
    pub expected: Expected,
    pub parent: usize,
    /// Address of the type that the same object must keep, 0 if it cannot get another one.
    pub kind: usize,
    /// Values that are reached from this value, in order.
    pub children: Vec<usize>,
    /// Whether Python code has to run to reach the value.
    pub is_late: bool,
    /// The value's number among Python functions, whose objects are compared as pointers; `usize::MAX` for others.
    pub function: usize,
    /// Whether the value is a list, dict or set that is reached from another value.
    pub is_distinct: bool,
    /// Whether the value is a tuple of objects that are compared by identity or are equal for good.
    pub is_constant: bool,
}

/// One step of each comparison.
pub struct Step {
    /// The value's number.
    pub number: usize,
    pub action: Action,
}

pub enum Action {
    /// Note the object that a weak reference refers to.
    Referent,
    /// Note an argument of the call, by number.
    Argument(usize),
    /// Compare the pointers in a function's object, by the function's number, and what it holds if they differ.
    Function(usize),
    /// Compare the object's type, 0 for any, and what it stores at known places with what it stored, by the range in
    /// `StateCheck::stored`.
    Stored(usize, Range<usize>),
    /// Compare the items of a constant tuple with this length, once.
    Tuple(isize),
    /// Compare the object's type, 0 for any, and length, -1 for any, and the objects that it holds.
    Visit(usize, isize),
    /// Likewise for a dict that holds objects besides its keys and values. The range in `StateCheck::stored` has those
    /// that are stored at known places, and is empty if the others are not.
    VisitParts(usize, isize, Range<usize>),
}

pub fn parse_access(letter: char, operand: Bound<'_, PyAny>) -> PyResult<Access> {
    Ok(match letter {
        'r' => Access::Root(operand.unbind()),
        'w' => Access::Referent(operand.unbind()),
        'o' => Access::Argument(operand.extract()?),
        'k' => Access::Key(operand.unbind()),
        'a' => Access::Attribute(operand.cast_into::<PyString>()?.unbind()),
        'd' => Access::Attributes,
        'i' => Access::Item(operand.extract()?),
        'p' => Access::Paired,
        'c' => Access::Call(operand.unbind()),
        other => return Err(PyValueError::new_err(format!("no access {other:?}"))),
    })
}

pub fn parse_expected(letter: char, operand: Bound<'_, PyAny>, n: usize) -> PyResult<Expected> {
    Ok(match letter {
        '*' => Expected::Any,
        '0' => Expected::Absent,
        's' => Expected::Same(operand.unbind()),
        'w' => Expected::Referent(operand.unbind(), n),
        '=' => Expected::Equal(operand.unbind()),
        't' => Expected::Type(operand.unbind()),
        'l' => Expected::Sized(operand.unbind(), n as isize),
        'n' => Expected::Named(operand.cast_into::<PyTuple>()?.unbind()),
        '&' => Expected::As(n),
        other => return Err(PyValueError::new_err(format!("no expectation {other:?}"))),
    })
}

impl Value {
    pub fn objects(&self) -> impl Iterator<Item = &Py<PyAny>> {
        let held = match &self.access {
            Access::Root(object) | Access::Referent(object) | Access::Key(object) | Access::Call(object) => {
                Some(object)
            }
            _ => None,
        };
        let compared = match &self.expected {
            Expected::Same(object)
            | Expected::Referent(object, _)
            | Expected::Equal(object)
            | Expected::Type(object)
            | Expected::Sized(object, _) => Some(object),
            Expected::Named(keys) => Some(keys.as_any()),
            Expected::Any | Expected::Absent | Expected::As(_) => None,
        };
        held.into_iter().chain(compared)
    }

    /// Whether this value is none of the keys and values of a dict, if a dict holds it.
    pub fn is_part(&self) -> bool {
        !self.is_late && !matches!(self.access, Access::Key(_) | Access::Paired)
    }

    /// The address of the type of the objects that this value may be, if the type is known.
    pub fn class(&self) -> Option<usize> {
        match &self.expected {
            Expected::Type(kind) => Some(kind.as_ptr() as usize),
            Expected::Referent(_, kind) => Some(*kind),
            Expected::Same(_) if self.kind != 0 => Some(self.kind),
            _ => None,
        }
    }

    /// Where this value stores those of its children that `which` accepts, if it stores all of them at known places.
    pub fn stored(&self, values: &[Value], which: impl Fn(&Value) -> bool) -> Option<Vec<(Member, usize)>> {
        let member = |child: &usize| match &values[*child] {
            // Another object may have the address.
            Value { expected: Expected::Referent(..) | Expected::Type(_), .. }
            | Value { is_late: true, .. } => None,
            Value { access: Access::Stored(member, _), .. } => Some((*member, *child)),
            _ => None,
        };
        self.children.iter().filter(|child| which(&values[**child])).map(member).collect()
    }

    /// The steps of each comparison for the value with this number.
    pub fn steps(&self, number: usize) -> impl Iterator<Item = Step> {
        let reached = match self.access {
            Access::Referent(_) => Some(Action::Referent),
            Access::Argument(argument) => Some(Action::Argument(argument)),
            _ => None,
        };
        // A container that was empty may have got items. The type is compared if another one can be assigned to it.
        let visit = match &self.expected {
            _ if self.function != usize::MAX => Some(Action::Function(self.function)),
            Expected::Sized(_, n) if self.is_constant => Some(Action::Tuple(*n)),
            Expected::Sized(kind, n) => Some(Action::Visit(kind.as_ptr() as usize, *n)),
            Expected::Named(_) => Some(Action::Visit(0, -1)),
            Expected::Referent(_, kind) => Some(Action::Visit(*kind, -1)),
            Expected::Type(kind) if !self.children.is_empty() => {
                Some(Action::Visit(kind.as_ptr() as usize, -1))
            }
            Expected::Same(_) if self.kind != 0 || !self.children.is_empty() => {
                Some(Action::Visit(self.kind, -1))
            }
            _ if self.children.is_empty() => None,
            _ => Some(Action::Visit(0, -1)),
        };
        let actions = [reached, visit].into_iter().flatten().filter(|_| !self.is_late);
        actions.map(move |action| Step { number, action })
    }

    /// Where the objects that this value may be store what the access reaches. Returns nothing if that is not known. If
    /// Python code could change an attribute's descriptor, adds a guard.
    pub fn member(&self, py: Python<'_>, access: &Access, guards: &mut Vec<Guard>) -> Option<Member> {
        if !matches!(access, Access::Attribute(_) | Access::Attributes) {
            return None;
        }
        let kind = match (&self.access, &self.expected) {
            (Access::Root(object), _) | (_, Expected::Same(object)) => object.bind(py).get_type(),
            (_, Expected::Type(kind) | Expected::Sized(kind, _)) => {
                kind.bind(py).cast::<PyType>().ok()?.clone()
            }
            (_, Expected::Referent(reference, _)) => referent(reference.bind(py))?.get_type(),
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
        let at = |offset| Member { kind: address, offset, is_optional: false, is_guarded: false };
        let type_of_types = PyType::type_object(py);
        let is_of_types = kind.is_subclass(&type_of_types).ok()?;
        if is_of_types && !kind.is(&type_of_types) && is_overridden(&kind, name) {
            return None;
        }
        match name.to_str().ok()? {
            "__class__" if is_of_types || !is_heap_type(&kind) => return Some(at(TYPE_OFFSET)),
            "__name__" | "__qualname__" if is_of_types => {
                let Expected::Same(class) = &self.expected else { return None };
                let which = usize::from(name == "__qualname__");
                return offsets_of_names(py).filter(|_| is_heap_type(class.bind(py))).map(|o| at(o[which]));
            }
            name => {
                if let Some(field) = field_of(&kind, name) {
                    return Some(field);
                }
            }
        }
        // The walk lists the names of a metaclass's members, so the members of `type` need no guard.
        let owner = if is_of_types { &type_of_types } else { &kind };
        let members = owner.getattr("__dict__").ok()?;
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
        let is_guarded = is_heap_type(owner);
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

/// The object that a weak reference refers to, if it is alive.
pub fn referent<'py>(reference: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    reference.call0().ok().filter(|object| !object.is_none())
}

/// Whether a metaclass, or a base of it in Python, overrides this member of `type` or `object`.
fn is_overridden(kind: &Bound<'_, PyType>, name: &Bound<'_, PyString>) -> bool {
    let has = |base: Bound<'_, PyAny>| {
        is_heap_type(&base)
            && base.getattr("__dict__").and_then(|members| members.contains(name)).unwrap_or(true)
    };
    kind.mro().iter().any(has)
}

/// Whether a value is reached from another one, other than as the dict of an object's attributes, which several objects
/// may share.
pub fn is_reached(access: &Access) -> bool {
    matches!(access, Access::Key(_) | Access::Attribute(_) | Access::Item(_) | Access::Paired)
        || matches!(access, Access::Stored(_, of) if is_reached(of))
}

/// Whether a value is expected to be a list, a dict or a set.
pub fn is_of_containers(py: Python<'_>, expected: &Expected) -> bool {
    let (Expected::Sized(kind, _) | Expected::Type(kind)) = expected else { return false };
    let Ok(kind) = kind.bind(py).cast::<PyType>() else { return false };
    let is_of = |base: Bound<'_, PyType>| kind.is_subclass(&base).unwrap_or(false);
    is_of(PyList::type_object(py)) || is_of(PyDict::type_object(py)) || is_of(PySet::type_object(py))
}
