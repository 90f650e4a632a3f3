//! The check of a program's state before a call of a function is replayed.
//!
//! `_functions/walk.py` walks over the state that a recorded call could read, and lists each value: how the value is
//! reached from a value that was listed before, and what the value has to be. Before a replay, the check visits the
//! values from which other values are reached, in the same order, and compares the objects that they hold with those
//! that they held at the previous check.
//!
//! **Speed.** A value that has not been replaced is still the same object, so one comparison of pointers is enough.
//! CPython 3.11 and 3.12 count the changes of each dict, so an unchanged dict takes one comparison too.
//! **Validity of pointers.** A value's pointer is followed only after the object that holds the value was found to be
//! the same and still to hold it. The check itself holds the objects at which the walk begins. No Python code runs
//! meanwhile; values that are reached by Python code, such as the items of a set, are compared last.
//! **Reuse of addresses.** An object may have the address of one that was freed. So the check holds the objects whose
//! pointers stand for more than the type of the object: those that must be the same, and those that were found equal.
//! The referent of a weak reference is compared with the reference, and the items of tuples are compared each time.

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::PyTypeInfo;
use pyo3::exceptions::PyValueError;
use pyo3::ffi::{self, PyObject};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyFloat, PyList, PySet, PyString, PyTuple, PyType};

/// How a value is reached from its parent, the value that holds it.
enum Access {
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
enum Expected {
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
    /// The same object as the value with this number.
    As(usize),
}

/// Value of a state.
struct Value {
    access: Access,
    expected: Expected,
    parent: usize,
    /// Values that are reached from this value, in order.
    children: Vec<usize>,
    /// Whether Python code has to run to reach the value.
    is_late: bool,
    /// Whether the value is a Python function. Its code, defaults and closure are compared as pointers.
    is_function: bool,
    /// Whether the value is a list, dict or set that is reached from another value.
    is_distinct: bool,
}

/// The object that a value was in the latest comparison, null for no object.
#[derive(Default)]
struct Last {
    object: *mut PyObject,
    /// The object, if it was found equal to the expected one.
    held: Option<Py<PyAny>>,
    /// Number of the latest change, if the object is a dict.
    changes: u64,
    /// Pointers in the object, if it is a function.
    function: [usize; FUNCTION_WORDS],
}

// SAFETY: only the thread that holds the GIL follows the pointers, after the objects that hold them were compared.
unsafe impl Send for Last {}

/// Number of pointers after the header of a function's object: its globals, builtins, names, code, defaults and
/// closure, in CPython 3.11 to 3.14 (`_Py_COMMON_FIELDS` in `funcobject.h`).
const FUNCTION_WORDS: usize = 8;

/// The values of a state, each after the values from which it is reached.
#[pyclass(frozen, module = "torch_tandem._core")]
pub struct StateCheck {
    values: Vec<Value>,
    /// Pairs of values that have to be the same object: a value, and an earlier one.
    shared: Vec<(usize, usize)>,
    /// Lists, dicts and sets that are different objects, and must remain so: code may compare or change them.
    distinct: Vec<usize>,
    /// Whether one of these was replaced since they were last found to be different.
    is_replaced: AtomicBool,
    last: Mutex<Vec<Last>>,
    /// Whether dicts count their changes.
    counts_changes: bool,
}

type Listed<'py> = (char, usize, Bound<'py, PyAny>, char, Bound<'py, PyAny>, usize);

#[pymethods]
impl StateCheck {
    /// Takes a tuple for each value: a letter for the access, the number of the parent, and an operand; a letter for
    /// what the value has to be, and two operands. `_functions/state.py` lists the letters.
    #[new]
    fn new(py: Python<'_>, listed: Vec<Listed<'_>>) -> PyResult<StateCheck> {
        let mut values: Vec<Value> = Vec::with_capacity(listed.len());
        let mut shared = Vec::new();
        for (i, (access, parent, operand, kind, expected, n)) in listed.into_iter().enumerate() {
            let access = parse_access(access, operand)?;
            let has_parent = !matches!(access, Access::Root(_) | Access::Referent(_) | Access::Argument(_));
            let is_function = kind == 's' && is_function(&expected);
            let expected = parse_expected(kind, expected, n)?;
            let is_earlier = |number: usize| number < i;
            let other = if let Expected::As(other) = expected { Some(other) } else { None };
            if (has_parent && !is_earlier(parent)) || other.is_some_and(|n| !is_earlier(n)) {
                return Err(PyValueError::new_err("a value is reached from one that is listed later"));
            }
            let is_late = matches!(access, Access::Call(_))
                || has_parent && values[parent].is_late
                || other.is_some_and(|n| values[n].is_late);
            if has_parent {
                values[parent].children.push(i);
            }
            shared.extend(other.filter(|_| !is_late).map(|other| (i, other)));
            let is_distinct = !is_late && is_reached(&access) && is_of_containers(py, &expected);
            let children = Vec::new();
            values.push(Value { access, expected, parent, children, is_late, is_function, is_distinct });
        }
        let distinct = (0..values.len()).filter(|i| values[*i].is_distinct).collect();
        let last = Mutex::new(values.iter().map(|_| Last::default()).collect());
        // CPython 3.13 has no `ma_version_tag`.
        let counts_changes = py.version_info() < (3, 13);
        Ok(StateCheck { values, shared, distinct, is_replaced: AtomicBool::new(true), last, counts_changes })
    }

    /// Returns the number of the first value that differs in a call with these objects as arguments, or -1.
    fn __call__(&self, objects: &Bound<'_, PyList>) -> isize {
        // Another thread, or a function that the comparison calls, is already comparing this state.
        let Ok(mut last) = self.last.try_lock() else { return 0 };
        match self.compare(objects, &mut last) {
            Ok(()) => -1,
            Err(number) => number as isize,
        }
    }

    /// Compares the values that are reached without Python code, and returns the containers among them with the numbers
    /// of their values. Returns nothing if a value differs.
    fn containers<'py>(&self, objects: &Bound<'py, PyList>) -> Vec<(usize, Bound<'py, PyAny>)> {
        let py = objects.py();
        let Ok(mut last) = self.last.try_lock() else { return Vec::new() };
        if self.compare_early(objects, &mut last).is_err() {
            return Vec::new();
        }
        let is_container = |value: &Value| {
            !value.is_late && matches!(value.expected, Expected::Type(_) | Expected::Sized(..))
        };
        // SAFETY: the comparison has found the objects where they are held, and nothing has run since.
        let found = |i: usize| unsafe { Bound::from_borrowed_ptr_or_opt(py, last[i].object) };
        let numbers = (0..self.values.len()).filter(|i| is_container(&self.values[*i]));
        // A tuple cannot change, so it does not matter which of two equal ones is there.
        numbers
            .filter_map(|i| Some((i, found(i)?)))
            .filter(|(_, object)| !object.is_exact_instance_of::<PyTuple>())
            .collect()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.values.iter().flat_map(Value::objects).try_for_each(|object| visit.call(object))?;
        let Ok(last) = self.last.try_lock() else { return Ok(()) };
        last.iter().filter_map(|value| value.held.as_ref()).try_for_each(|object| visit.call(object))
    }
}

fn parse_access(letter: char, operand: Bound<'_, PyAny>) -> PyResult<Access> {
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

fn parse_expected(letter: char, operand: Bound<'_, PyAny>, n: usize) -> PyResult<Expected> {
    Ok(match letter {
        '*' => Expected::Any,
        '0' => Expected::Absent,
        's' => Expected::Same(operand.unbind()),
        'w' => Expected::Referent(operand.unbind(), n),
        '=' => Expected::Equal(operand.unbind()),
        't' => Expected::Type(operand.unbind()),
        'l' => Expected::Sized(operand.unbind(), n as isize),
        '&' => Expected::As(n),
        other => return Err(PyValueError::new_err(format!("no expectation {other:?}"))),
    })
}

impl Value {
    fn objects(&self) -> impl Iterator<Item = &Py<PyAny>> {
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
            Expected::Any | Expected::Absent | Expected::As(_) => None,
        };
        held.into_iter().chain(compared)
    }

    /// The type and the length that the object must have at each visit: the type if another type can be assigned to it,
    /// the length if it can change.
    fn shape(&self) -> (Option<usize>, Option<isize>) {
        match &self.expected {
            Expected::Referent(_, kind) => (Some(*kind), None),
            Expected::Type(kind) => (Some(kind.as_ptr() as usize), None),
            Expected::Sized(kind, n) => (Some(kind.as_ptr() as usize), Some(*n)),
            _ => (None, None),
        }
    }
}

impl StateCheck {
    /// Compares all values. If one differs, returns its number as the error.
    fn compare(&self, objects: &Bound<'_, PyList>, last: &mut [Last]) -> Result<(), usize> {
        let late = self.compare_early(objects, last)?;
        if late.is_empty() { Ok(()) } else { self.compare_late(objects.py(), &late, last) }
    }

    /// Compares the values that are reached without Python code. Returns the numbers of the others.
    fn compare_early(&self, objects: &Bound<'_, PyList>, last: &mut [Last]) -> Result<Vec<usize>, usize> {
        let py = objects.py();
        let mut late = Vec::new();
        for (i, value) in self.values.iter().enumerate() {
            if value.is_late {
                late.push(i);
                continue;
            }
            match &value.access {
                Access::Root(object) => self.note(py, i, object.as_ptr(), last)?,
                Access::Referent(reference) => {
                    let object = referent(reference.bind(py));
                    // The program still holds the object, and nothing runs that could drop it.
                    self.note(py, i, object.map_or(std::ptr::null_mut(), |o| o.as_ptr()), last)?;
                }
                Access::Argument(number) => {
                    let object = objects.get_item(*number).map_err(|_| i)?;
                    self.note(py, i, object.as_ptr(), last)?;
                }
                _ => {}
            }
            // A container that was empty may have got items.
            if !value.children.is_empty()
                || value.is_function
                || matches!(value.expected, Expected::Sized(..))
            {
                self.visit(py, i, last)?;
            }
        }
        // The earlier value of a pair may be reached after the later one, so pairs are compared when all objects are
        // known.
        for (i, other) in &self.shared {
            if last[*i].object != last[*other].object {
                return Err(*i);
            }
        }
        if self.is_replaced.load(Ordering::Relaxed) {
            let mut met = HashSet::new();
            let mut is_new = |i: &&usize| last[**i].object.is_null() || met.insert(last[**i].object);
            if let Some(i) = self.distinct.iter().find(|i| !is_new(i)) {
                return Err(*i);
            }
            self.is_replaced.store(false, Ordering::Relaxed);
        }
        Ok(late)
    }

    /// Compares the objects that a value holds with its children. The value itself was compared before.
    fn visit(&self, py: Python<'_>, i: usize, last: &mut [Last]) -> Result<(), usize> {
        let value = &self.values[i];
        let object = last[i].object;
        if object.is_null() {
            return Ok(());
        }
        let (kind, length) = value.shape();
        // SAFETY: the value was found where it is held, so its object is alive.
        if kind.is_some_and(|kind| unsafe { ffi::Py_TYPE(object) } as usize != kind) {
            return Err(i);
        }
        if value.is_function {
            // SAFETY: a function's object has these pointers after its header, and they are only compared.
            let words = unsafe { object.cast::<usize>().add(2).cast::<[usize; FUNCTION_WORDS]>().read() };
            let is_same = words == last[i].function;
            last[i].function = [0; FUNCTION_WORDS];
            // The pointers do not cover the contents of the closure's cells, which are values of their own, and the
            // attributes.
            self.visit_each(py, i, object, |access| !is_same || matches!(access, Access::Attributes), last)?;
            last[i].function = words;
            return Ok(());
        }
        // SAFETY: the object is alive.
        if unsafe { ffi::PyDict_Check(object) } != 0 {
            if self.counts_changes {
                // SAFETY: `ma_version_tag` follows the header and `ma_used` in CPython 3.11 and 3.12.
                let changes = unsafe { object.cast::<u64>().add(3).read() };
                if changes == last[i].changes {
                    return Ok(());
                }
                last[i].changes = 0;
                self.visit_dict(py, i, object, length, last)?;
                last[i].changes = changes;
                return Ok(());
            }
            return self.visit_dict(py, i, object, length, last);
        }
        if length.is_some_and(|n| size_of(object) != n) {
            return Err(i);
        }
        self.visit_each(py, i, object, |_| true, last)
    }

    fn visit_dict(
        &self,
        py: Python<'_>,
        i: usize,
        dict: *mut PyObject,
        length: Option<isize>,
        last: &mut [Last],
    ) -> Result<(), usize> {
        if length.is_some_and(|n| size_of(dict) != n) {
            return Err(i);
        }
        let (mut at, mut key, mut item) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        let mut is_key = true;
        for child in self.values[i].children.iter().copied() {
            let value = &self.values[child];
            if value.is_late {
                continue;
            }
            let object = match &value.access {
                Access::Paired if is_key => {
                    // SAFETY: the dict does not change between the steps, because no Python code runs.
                    if unsafe { ffi::PyDict_Next(dict, &raw mut at, &raw mut key, &raw mut item) } == 0 {
                        return Err(i);
                    }
                    is_key = false;
                    key
                }
                Access::Paired => {
                    is_key = true;
                    item
                }
                access => reach(py, access, dict),
            };
            self.note(py, child, object, last)?;
        }
        Ok(())
    }

    fn visit_each(
        &self,
        py: Python<'_>,
        i: usize,
        object: *mut PyObject,
        which: impl Fn(&Access) -> bool,
        last: &mut [Last],
    ) -> Result<(), usize> {
        for child in self.values[i].children.iter().copied() {
            let value = &self.values[child];
            if !value.is_late && which(&value.access) {
                let found = reach(py, &value.access, object);
                self.note(py, child, found, last)?;
            }
        }
        Ok(())
    }

    /// Stores the object that a value is now, if it is as expected. Otherwise returns the value's number as the error.
    fn note(&self, py: Python<'_>, i: usize, object: *mut PyObject, last: &mut [Last]) -> Result<(), usize> {
        let expected = &self.values[i].expected;
        if object == last[i].object && !object.is_null() {
            let Expected::Referent(reference, kind) = expected else { return Ok(()) };
            // SAFETY: the object is alive because the object that holds it is.
            let is_of_kind = unsafe { ffi::Py_TYPE(object) } as usize == *kind;
            return if is_of_kind && refers_to(reference.bind(py), object) { Ok(()) } else { Err(i) };
        }
        // SAFETY: the object is null, or alive because the object that holds it is.
        let found = unsafe { Bound::from_borrowed_ptr_or_opt(py, object) };
        if !holds(py, found.as_ref(), expected, |_| object) {
            return Err(i);
        }
        let held = found.filter(|_| matches!(expected, Expected::Equal(_))).map(Bound::unbind);
        last[i] = Last { object, held, changes: 0, function: [0; FUNCTION_WORDS] };
        if self.values[i].is_distinct {
            self.is_replaced.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Compares the values that are reached by running Python code.
    fn compare_late(&self, py: Python<'_>, late: &[usize], last: &[Last]) -> Result<(), usize> {
        // Python code may let other threads run, which may drop objects that were compared before.
        let held: Vec<Option<Bound<'_, PyAny>>> = late.iter().map(|i| self.parent_of(py, *i, last)).collect();
        let mut found: Vec<Option<Bound<'_, PyAny>>> = Vec::with_capacity(late.len());
        for (number, i) in late.iter().enumerate() {
            let value = &self.values[*i];
            let parent = match late[..number].binary_search(&value.parent) {
                Ok(at) => found[at].clone(),
                Err(_) => held[number].clone(),
            };
            let object = parent.and_then(|parent| match &value.access {
                Access::Call(function) => function.bind(py).call1((parent,)).ok(),
                Access::Paired => {
                    let position = self.values[value.parent].children.iter().position(|child| child == i)?;
                    paired(&parent, position)
                }
                // SAFETY: the parent holds the object, and `found` or `held` holds the parent.
                access => unsafe { Bound::from_borrowed_ptr_or_opt(py, reach(py, access, parent.as_ptr())) },
            });
            let other = |n: usize| match late[..number].binary_search(&n) {
                Ok(at) => found[at].as_ref().map_or(std::ptr::null_mut(), Bound::as_ptr),
                Err(_) => last[n].object,
            };
            if !holds(py, object.as_ref(), &value.expected, other) {
                return Err(*i);
            }
            found.push(object);
        }
        Ok(())
    }

    fn parent_of<'py>(&self, py: Python<'py>, i: usize, last: &[Last]) -> Option<Bound<'py, PyAny>> {
        let parent = self.values[i].parent;
        if self.values[parent].is_late {
            return None;
        }
        // SAFETY: the parent was compared, and nothing has run since.
        unsafe { Bound::from_borrowed_ptr_or_opt(py, last[parent].object) }
    }
}

/// Returns the object that is reached from the object `from`, borrowed from the object that holds it, or null.
fn reach(py: Python<'_>, access: &Access, from: *mut PyObject) -> *mut PyObject {
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
        match access {
            Access::Key(key) if ffi::PyDict_Check(from) != 0 => {
                let found = ffi::PyDict_GetItemWithError(from, key.as_ptr());
                if found.is_null() {
                    ffi::PyErr_Clear();
                }
                found
            }
            // Unlike `getattr`, this function calls no methods of the program.
            Access::Attribute(name) => borrowed(ffi::PyObject_GenericGetAttr(from, name.bind(py).as_ptr())),
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
fn size_of(object: *mut PyObject) -> isize {
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

/// Returns the key or the value of a dict at a position among all keys and values. Keys have even positions.
fn paired<'py>(dict: &Bound<'py, PyAny>, position: usize) -> Option<Bound<'py, PyAny>> {
    let (key, value) = dict.cast::<PyDict>().ok()?.iter().nth(position / 2)?;
    Some(if position.is_multiple_of(2) { key } else { value })
}

fn referent<'py>(reference: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    reference.call0().ok().filter(|object| !object.is_none())
}

/// Whether a weak reference refers to an object.
fn refers_to(reference: &Bound<'_, PyAny>, object: *mut PyObject) -> bool {
    // SAFETY: the function is called for a weak reference, and its result is only compared.
    unsafe {
        if ffi::PyWeakref_CheckRef(reference.as_ptr()) == 0 {
            return referent(reference).is_some_and(|found| found.as_ptr() == object);
        }
        ffi::PyWeakref_GetObject(reference.as_ptr()) == object
    }
}

/// Whether an object, or its absence, is as expected. `other` returns the object of the value with a number.
fn holds(
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
        Expected::As(n) => other(*n) == object.as_ptr(),
    }
}

/// Whether two values of built-in types are equal and have the same type.
fn is_equal(one: &Bound<'_, PyAny>, two: &Bound<'_, PyAny>) -> bool {
    if !one.get_type().is(two.get_type()) {
        return false;
    }
    match (one.cast_exact::<PyFloat>(), two.cast_exact::<PyFloat>()) {
        (Ok(one), Ok(two)) => one.value().to_bits() == two.value().to_bits(),
        _ => one.eq(two).unwrap_or(false),
    }
}

/// Whether a value is reached from another one, other than as the dict of an object's attributes, which several objects
/// may share.
fn is_reached(access: &Access) -> bool {
    matches!(access, Access::Key(_) | Access::Attribute(_) | Access::Item(_) | Access::Paired)
}

/// Whether a value is expected to be a list, a dict or a set.
fn is_of_containers(py: Python<'_>, expected: &Expected) -> bool {
    let (Expected::Sized(kind, _) | Expected::Type(kind)) = expected else { return false };
    let Ok(kind) = kind.bind(py).cast::<PyType>() else { return false };
    let is_of = |base: Bound<'_, PyType>| kind.is_subclass(&base).unwrap_or(false);
    is_of(PyList::type_object(py)) || is_of(PyDict::type_object(py)) || is_of(PySet::type_object(py))
}

fn is_function(object: &Bound<'_, PyAny>) -> bool {
    object.get_type().name().is_ok_and(|name| name == "function")
}

/// Returns the dict of an object's attributes, if it has one. Unlike `__dict__`, the program cannot override it.
#[pyfunction]
pub fn attributes_of<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    // SAFETY: the function takes any object, and returns a new reference or raises an exception.
    let dict = unsafe { ffi::PyObject_GenericGetDict(object.as_ptr(), std::ptr::null_mut::<c_void>()) };
    // SAFETY: `dict` is a new reference, or null if an exception was raised. The exception is dropped.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), dict) }.ok()
}
