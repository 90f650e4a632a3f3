//! The check of a program's state before a call of a function is replayed.
//!
//! `_functions/walk.py` walks over the state that a recorded call could read, and lists each value: how the value is
//! reached from a value that was listed before, and what the value has to be. Before a replay, the check visits the
//! values from which other values are reached, in the same order, and compares the objects that they hold with those
//! that they held at the previous check.
//!
//! **Speed.** A value that has not been replaced is still the same object, so one comparison of pointers is enough.
//! CPython 3.11 and 3.12 count the changes of each dict, so an unchanged dict takes one comparison too. A list of steps
//! names the values that have to be looked at even so. In these versions, `words.rs` compares the words that all steps
//! would read in one loop, and only steps that find others are taken.
//! **Validity of pointers.** A value's pointer is followed only after the object that holds the value was found to be
//! the same and still to hold it. The check itself holds the objects at which the walk begins. No Python code runs
//! meanwhile; values that are reached by Python code, such as the items of a set, are compared last.
//! **Reuse of addresses.** An object may have the address of one that was freed. So the check holds the objects whose
//! pointers stand for more than the type of the object: those that must be the same, those that were found equal, and
//! tuples of constants. The referent of a weak reference is compared with the reference, and the items of other tuples
//! are compared each time.

mod member;
mod reach;
mod value;
mod words;

use std::collections::HashSet;
use std::sync::Mutex;

use pyo3::PyTypeInfo;
use pyo3::exceptions::PyValueError;
use pyo3::ffi::{self, PyObject};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyList, PyTuple};

use self::member::{Guard, Member, is_heap_type};
pub use self::reach::attributes_of;
use self::reach::{has_keys, holds, paired, reach, refers_to, size_of};
use self::value::{
    Access, Action, Expected, Step, Value, is_of_containers, is_reached, parse_access, parse_expected,
    referent,
};
use self::words::{Word, Words};

/// What the latest comparison has found.
#[derive(Default)]
struct Memory {
    /// The object that each value was, null for no object.
    objects: Vec<*mut PyObject>,
    /// The number of the latest change of each value that is a dict, 0 for a constant tuple whose items were compared,
    /// and `NO_DICT` for others.
    changes: Vec<u64>,
    /// The pointers in each function's object.
    functions: Vec<[usize; FUNCTION_WORDS]>,
    /// The words that show that the steps find the same objects as before. Known after a comparison that has passed.
    words: Option<Words>,
    /// The values whose objects were replaced since their words were read.
    replaced: Vec<usize>,
    /// The objects that were found equal to the expected ones.
    held: Vec<Option<Py<PyAny>>>,
    /// Whether the roots are noted. They stay the same, since the check holds them.
    knows_roots: bool,
    /// Whether all guards hold.
    are_guarded: bool,
    /// Whether an object was replaced since all pairs were found to be the same object.
    is_replaced: bool,
    /// Whether a container was replaced since all containers were found to be different.
    is_container_replaced: bool,
    /// The containers at that time.
    containers: HashSet<*mut PyObject>,
}

// SAFETY: only the thread that holds the GIL follows the pointers, after the objects that hold them were compared.
unsafe impl Send for Memory {}

const NO_DICT: u64 = u64::MAX;

/// Number of pointers after the header of a function's object: its globals, builtins, names, code, defaults, closure,
/// doc, dict, weak references, module and annotations, in CPython 3.11 to 3.14 (`funcobject.h`).
const FUNCTION_WORDS: usize = 13;
/// The pointer to the function's weak references, which do not matter.
const WEAK_REFERENCES: usize = 10;

/// The values of a state, each after the values from which it is reached.
#[pyclass(frozen, module = "torch_tandem._core")]
pub struct StateCheck {
    values: Vec<Value>,
    /// Pairs of values that have to be the same object: a value, and an earlier one.
    shared: Vec<(usize, usize)>,
    /// Lists, dicts and sets that are different objects, and must remain so: code may compare or change them.
    distinct: Vec<usize>,
    /// Arguments that must be other objects than the containers, and than the values of their classes.
    arguments: Vec<usize>,
    others: Vec<usize>,
    /// The numbers of the values that are roots, and of those that are reached by Python code.
    roots: Vec<usize>,
    late: Vec<usize>,
    steps: Vec<Step>,
    /// Where values are stored in the values that hold them: the place, and the stored value's number.
    stored: Vec<(Member, usize)>,
    guards: Vec<Guard>,
    memory: Mutex<Memory>,
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
        let function_type = py.import("types")?.getattr("FunctionType")?;
        let (mut shared, mut functions, mut guards) = (Vec::new(), 0, Vec::new());
        for (i, (access, parent, operand, kind, expected, n)) in listed.into_iter().enumerate() {
            let mut access = parse_access(access, operand)?;
            if let Some(member) = values.get(parent).and_then(|value| value.member(py, &access, &mut guards))
            {
                access = Access::Stored(member, Box::new(access));
            }
            let has_parent = !matches!(access, Access::Root(_) | Access::Referent(_) | Access::Argument(_));
            let is_function = kind == 's' && expected.get_type().is(&function_type);
            // Another class can be assigned to an object of a class of Python.
            let of = expected.get_type();
            let kind_of = if kind == 's' && is_heap_type(&of) { of.as_ptr() as usize } else { 0 };
            let function = if is_function { functions } else { usize::MAX };
            functions += usize::from(is_function);
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
            values.push(Value {
                access,
                expected,
                parent,
                kind: kind_of,
                children: Vec::new(),
                is_late,
                function,
                is_distinct,
                is_constant: false,
            });
        }
        for i in 0..values.len() {
            let is_constant = |child: &usize| {
                let item = &values[*child];
                matches!(item.access, Access::Item(_))
                    && matches!(item.expected, Expected::Equal(_) | Expected::Same(_))
            };
            let is_tuple =
                matches!(&values[i].expected, Expected::Sized(kind, _) if kind.is(PyTuple::type_object(py)));
            values[i].is_constant =
                is_tuple && !values[i].is_late && values[i].children.iter().all(is_constant);
        }
        let numbers = |which: fn(&Value) -> bool| -> Vec<usize> {
            (0..values.len()).filter(|i| which(&values[*i])).collect()
        };
        let distinct = numbers(|value| value.is_distinct);
        let arguments = numbers(|value| {
            matches!((&value.access, &value.expected), (Access::Argument(_), Expected::Type(_)))
        });
        let classes: HashSet<usize> = arguments.iter().filter_map(|i| values[*i].class()).collect();
        let is_other = |i: &usize| {
            !values[*i].is_late
                && !matches!(values[*i].access, Access::Argument(_))
                && values[*i].class().is_some_and(|class| classes.contains(&class))
        };
        let others = (0..values.len()).filter(is_other).collect();
        let roots = numbers(|value| matches!(value.access, Access::Root(_)));
        let late = numbers(|value| value.is_late);
        let mut stored = Vec::new();
        let mut steps: Vec<Step> = Vec::new();
        for (i, value) in values.iter().enumerate() {
            steps.extend(value.steps(i));
            let Some(Step { number, action: action @ Action::Visit(..) }) = steps.last_mut() else {
                continue;
            };
            let Action::Visit(kind, length) = *action else { continue };
            let first = stored.len();
            if *number != i {
                continue;
            } else if length < 0
                && matches!(value.expected, Expected::Same(_))
                && let Some(members) = value.stored(&values, |_| true)
            {
                stored.extend(members);
                *action = Action::Stored(kind, first..stored.len());
            } else if value.children.iter().any(|child| values[*child].is_part()) {
                stored.extend(value.stored(&values, Value::is_part).unwrap_or_default());
                *action = Action::VisitParts(kind, length, first..stored.len());
            }
        }
        let memory = Mutex::new(Memory {
            objects: vec![std::ptr::null_mut(); values.len()],
            changes: vec![0; values.len()],
            functions: vec![[0; FUNCTION_WORDS]; functions],
            held: values.iter().map(|_| None).collect(),
            ..Memory::default()
        });
        // CPython 3.13 has no `ma_version_tag`.
        let counts_changes = py.version_info() < (3, 13);
        Ok(StateCheck {
            values,
            shared,
            distinct,
            arguments,
            others,
            roots,
            late,
            steps,
            stored,
            guards,
            memory,
            counts_changes,
        })
    }

    /// Returns the number of the first value that differs in a call with these objects as arguments, or -1.
    fn __call__(&self, objects: &Bound<'_, PyList>) -> isize {
        // Another thread, or a function that the comparison calls, is already comparing this state.
        let Ok(mut memory) = self.memory.try_lock() else { return 0 };
        match self.compare(objects, &mut memory) {
            Ok(()) => -1,
            Err(number) => number as isize,
        }
    }

    /// Compares the values that are reached without Python code, and returns the containers among them with the numbers
    /// of their values. Returns nothing if a value differs.
    fn containers<'py>(&self, objects: &Bound<'py, PyList>) -> Vec<(usize, Bound<'py, PyAny>)> {
        let py = objects.py();
        let Ok(mut memory) = self.memory.try_lock() else { return Vec::new() };
        if self.compare_early(objects, &mut memory).is_err() {
            return Vec::new();
        }
        let is_container = |value: &Value| {
            !value.is_late
                && matches!(value.expected, Expected::Type(_) | Expected::Sized(..) | Expected::Named(_))
        };
        // SAFETY: the comparison has found the objects where they are held, and nothing has run since.
        let found = |i: usize| unsafe { Bound::from_borrowed_ptr_or_opt(py, memory.objects[i]) };
        let numbers = (0..self.values.len()).filter(|i| is_container(&self.values[*i]));
        // A tuple cannot change, so it does not matter which of two equal ones is there.
        numbers
            .filter_map(|i| Some((i, found(i)?)))
            .filter(|(_, object)| !object.is_exact_instance_of::<PyTuple>())
            .collect()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.values.iter().flat_map(Value::objects).try_for_each(|object| visit.call(object))?;
        self.guards
            .iter()
            .flat_map(|guard| [&guard.members, &guard.descriptor])
            .try_for_each(|o| visit.call(o))?;
        let Ok(memory) = self.memory.try_lock() else { return Ok(()) };
        memory.held.iter().flatten().try_for_each(|object| visit.call(object))
    }
}

impl StateCheck {
    /// Compares all values. If one differs, returns its number as the error.
    fn compare(&self, objects: &Bound<'_, PyList>, memory: &mut Memory) -> Result<(), usize> {
        self.compare_early(objects, memory)?;
        if self.late.is_empty() { Ok(()) } else { self.compare_late(objects.py(), memory) }
    }

    /// Compares the values that are reached without Python code.
    fn compare_early(&self, objects: &Bound<'_, PyList>, memory: &mut Memory) -> Result<(), usize> {
        let py = objects.py();
        memory.are_guarded = self.guards.iter().all(|guard| guard.holds(py));
        if memory.are_guarded && memory.words.is_some() {
            self.take_changed_steps(objects, memory)?;
        } else {
            self.take_all_steps(objects, memory)?;
        }
        // The earlier value of a pair may be reached after the later one, so pairs are compared when all objects are
        // known.
        if memory.is_replaced {
            let differs = |(i, other): &&(usize, usize)| memory.objects[*i] != memory.objects[*other];
            if let Some((i, _)) = self.shared.iter().find(differs) {
                return Err(*i);
            }
            memory.is_replaced = false;
        }
        if memory.is_container_replaced {
            memory.containers.clear();
            for i in self.distinct.iter().copied() {
                let object = memory.objects[i];
                if !object.is_null() && !memory.containers.insert(object) {
                    return Err(i);
                }
            }
            memory.is_container_replaced = false;
        }
        let is_of_state = |i: &&usize| {
            let object = memory.objects[**i];
            memory.containers.contains(&object)
                || self.others.iter().any(|other| memory.objects[*other] == object)
        };
        self.arguments.iter().find(is_of_state).map_or(Ok(()), |i| Err(*i))
    }

    fn take_all_steps(&self, objects: &Bound<'_, PyList>, memory: &mut Memory) -> Result<(), usize> {
        memory.words = None;
        memory.replaced.clear();
        if !memory.knows_roots {
            for i in self.roots.iter().copied() {
                let Access::Root(object) = &self.values[i].access else { continue };
                self.note(objects.py(), i, object.as_ptr(), memory)?;
            }
            memory.knows_roots = true;
        }
        for step in &self.steps {
            self.take(step, objects, memory)?;
        }
        // Without versions, most steps have to be taken.
        if self.counts_changes && memory.are_guarded {
            self.read_words(memory);
        }
        Ok(())
    }

    /// Takes the steps that may find other objects than before.
    fn take_changed_steps(&self, objects: &Bound<'_, PyList>, memory: &mut Memory) -> Result<(), usize> {
        let mut next = 0;
        // SAFETY: the steps before `next` were compared, and no Python code has run since.
        while let Some(step) = memory.words.as_ref().and_then(|words| unsafe { words.differing(next) }) {
            let taken = self.take(&self.steps[step], objects, memory);
            self.read_words_again(step, taken.is_ok(), memory);
            taken?;
            next = step + 1;
        }
        Ok(())
    }

    fn take(
        &self,
        Step { number, action }: &Step,
        objects: &Bound<'_, PyList>,
        memory: &mut Memory,
    ) -> Result<(), usize> {
        let (py, i) = (objects.py(), *number);
        match action {
            Action::Function(function) => self.visit_function(py, i, *function, memory),
            Action::Stored(kind, range) => {
                self.visit_stored(py, i, *kind, &self.stored[range.clone()], memory)
            }
            Action::Tuple(length) => self.visit_tuple(py, i, *length, memory),
            Action::Visit(kind, length) => self.visit(py, i, *kind, *length, None, memory),
            Action::VisitParts(kind, length, parts) => {
                self.visit(py, i, *kind, *length, Some(&self.stored[parts.clone()]), memory)
            }
            Action::Argument(argument) => {
                let object = objects.get_item(*argument).map_err(|_| i)?;
                self.note(py, i, object.as_ptr(), memory)
            }
            Action::Referent => {
                let Access::Referent(reference) = &self.values[i].access else { return Ok(()) };
                let object = referent(reference.bind(py));
                // The program still holds the object, and nothing runs that could drop it.
                self.note(py, i, object.map_or(std::ptr::null_mut(), |o| o.as_ptr()), memory)
            }
        }
    }

    /// Reads the words of all steps, after a comparison that has passed.
    fn read_words(&self, memory: &mut Memory) {
        let (mut all, mut words) = (Words::default(), Vec::new());
        for step in &self.steps {
            words.clear();
            let is_known = self.words_of(step, memory, &mut words).is_some();
            all.push(is_known.then_some(&words));
        }
        memory.words = Some(all);
        memory.replaced.clear();
    }

    /// Reads the words of a step that was taken, and of the steps for the values that it has replaced.
    fn read_words_again(&self, step: usize, passed: bool, memory: &mut Memory) {
        let Some(mut all) = memory.words.take() else { return };
        let mut words = Vec::new();
        let mut read = |step: usize, memory: &Memory| {
            words.clear();
            let is_known = self.words_of(&self.steps[step], memory, &mut words).is_some();
            all.set(step, is_known.then_some(&words));
        };
        let replaced = std::mem::take(&mut memory.replaced);
        for number in &replaced {
            let first = self.steps.partition_point(|step| step.number < *number);
            let of_value = self.steps[first..].iter().take_while(|step| step.number == *number).count();
            (first..first + of_value).for_each(|step| read(step, memory));
        }
        read(step, memory);
        if !passed {
            all.set(step, None);
        }
        memory.words = Some(all);
    }

    /// Adds the words that show that a step finds what it found before. Returns nothing if no words do.
    fn words_of(&self, step: &Step, memory: &Memory, words: &mut Vec<Word>) -> Option<()> {
        let i = step.number;
        let object = memory.objects[i];
        match &step.action {
            Action::Argument(_) => return None,
            Action::Tuple(_) => return (object.is_null() || memory.changes[i] == 0).then_some(()),
            Action::Referent if object.is_null() => return None,
            Action::Referent => return self.add_kept(i, memory, words),
            _ if object.is_null() => return Some(()),
            Action::Stored(kind, _) | Action::Visit(kind, _) | Action::VisitParts(kind, ..) => {
                let found = Word::of_type(object);
                if *kind != 0 && *kind != found.value {
                    return None;
                }
                // The type says which words the object has, unless it is an object that is held.
                let value = &self.values[i];
                let is_held =
                    matches!(value.access, Access::Root(_)) || matches!(value.expected, Expected::Same(_));
                if *kind != 0 || !is_held {
                    words.push(found);
                }
            }
            // A function that is expected is held.
            Action::Function(_) => {}
        }
        let is_dict = memory.changes[i] != NO_DICT;
        if is_dict {
            words.push(Word::second_field(object).with(memory.changes[i] as usize));
        } else if size_of(object) >= 0 {
            words.push(Word::first_field(object));
            // SAFETY: the object is alive.
            if unsafe { ffi::PyList_Check(object) } != 0 {
                words.push(Word::second_field(object));
            }
        }
        let children = self.values[i].children.iter().copied();
        for child in children.filter(|child| !self.values[*child].is_late) {
            if is_dict && !self.values[child].is_part() {
                continue;
            }
            let access = &self.values[child].access;
            let word = Word::stored(access, object, memory.are_guarded)?;
            // SAFETY: None is always alive.
            let none = unsafe { ffi::Py_None() } as usize;
            let is_none =
                word.value == 0 && matches!(access, Access::Stored(member, _) if member.is_optional);
            if memory.objects[child] as usize != if is_none { none } else { word.value } {
                return None;
            }
            words.push(word);
            self.add_kept(child, memory, words)?;
        }
        Some(())
    }

    /// Adds the words that `note` reads for an unchanged object: its type, and the referent of its weak reference.
    fn add_kept(&self, i: usize, memory: &Memory, words: &mut Vec<Word>) -> Option<()> {
        let object = memory.objects[i];
        let kind = match &self.values[i].expected {
            _ if object.is_null() => return Some(()),
            Expected::Type(kind) => kind.as_ptr() as usize,
            Expected::Referent(reference, kind) => {
                let reference = reference.as_ptr();
                // SAFETY: the check holds the reference.
                if unsafe { ffi::PyWeakref_CheckRef(reference) } == 0 {
                    return None;
                }
                words.push(Word::first_field(reference).with(object as usize));
                *kind
            }
            _ => return Some(()),
        };
        words.push(Word::of_type(object).with(kind));
        Some(())
    }

    fn visit_function(
        &self,
        py: Python<'_>,
        i: usize,
        function: usize,
        memory: &mut Memory,
    ) -> Result<(), usize> {
        let object = memory.objects[i];
        if object.is_null() {
            return Ok(());
        }
        let words = || {
            // SAFETY: the value was found where it is held, so its object is alive. It is a function, which has these
            // pointers after its header, and they are only compared.
            let mut words = unsafe { object.cast::<usize>().add(2).cast::<[usize; FUNCTION_WORDS]>().read() };
            words[WEAK_REFERENCES] = 0;
            words
        };
        // The contents of the closure's cells and the items of the dict are values of their own.
        let known = &memory.functions[function];
        // As a loop, the comparison is not a call of `memcmp`.
        if words().iter().zip(known).fold(0, |differs, (one, other)| differs | (one ^ other)) != 0 {
            memory.functions[function] = [0; FUNCTION_WORDS];
            self.visit_each(py, i, object, |_| true, memory)?;
            // The visit gives a function that has no dict an empty one.
            memory.functions[function] = words();
        }
        Ok(())
    }

    fn visit_stored(
        &self,
        py: Python<'_>,
        i: usize,
        kind: usize,
        stored: &[(Member, usize)],
        memory: &mut Memory,
    ) -> Result<(), usize> {
        let object = memory.objects[i];
        if object.is_null() {
            return Ok(());
        }
        // SAFETY: the value was found where it is held, so its object is alive.
        if kind != 0 && unsafe { ffi::Py_TYPE(object) } as usize != kind {
            return Err(i);
        }
        if self.stores(object, stored, memory) {
            Ok(())
        } else {
            self.visit_each(py, i, object, |_| true, memory)
        }
    }

    /// Whether the pointers at these places of a living object are those of the latest comparison.
    fn stores(&self, object: *mut PyObject, stored: &[(Member, usize)], memory: &Memory) -> bool {
        // SAFETY: the object is alive.
        let found = |member: &Member| unsafe { member.read(object, memory.are_guarded) };
        stored.iter().all(|(member, child)| {
            found(member).is_some_and(|object| !object.is_null() && object == memory.objects[*child])
        })
    }

    fn visit_tuple(&self, py: Python<'_>, i: usize, length: isize, memory: &mut Memory) -> Result<(), usize> {
        let object = memory.objects[i];
        if memory.changes[i] == 0 || object.is_null() {
            return Ok(());
        }
        if size_of(object) != length {
            return Err(i);
        }
        self.visit_each(py, i, object, |_| true, memory)?;
        memory.changes[i] = 0;
        Ok(())
    }

    /// Compares the objects that a value holds with its children. The value itself was compared before.
    fn visit(
        &self,
        py: Python<'_>,
        i: usize,
        kind: usize,
        length: isize,
        parts: Option<&[(Member, usize)]>,
        memory: &mut Memory,
    ) -> Result<(), usize> {
        let object = memory.objects[i];
        if object.is_null() {
            return Ok(());
        }
        // SAFETY: the value was found where it is held, so its object is alive.
        if kind != 0 && unsafe { ffi::Py_TYPE(object) } as usize != kind {
            return Err(i);
        }
        if memory.changes[i] != NO_DICT {
            if self.counts_changes {
                // SAFETY: `ma_version_tag` follows the header and `ma_used` in CPython 3.11 and 3.12.
                let changes = unsafe { object.cast::<u64>().add(3).read() };
                if changes == memory.changes[i] {
                    // The version of a dict does not count changes of its attributes.
                    return match parts {
                        Some(parts) if parts.is_empty() || !self.stores(object, parts, memory) => {
                            self.visit_each(py, i, object, Value::is_part, memory)
                        }
                        _ => Ok(()),
                    };
                }
                memory.changes[i] = 0;
                self.visit_dict(py, i, object, length, memory)?;
                memory.changes[i] = changes;
                return Ok(());
            }
            return self.visit_dict(py, i, object, length, memory);
        }
        if length >= 0 && size_of(object) != length {
            return Err(i);
        }
        self.visit_each(py, i, object, |_| true, memory)
    }

    fn visit_dict(
        &self,
        py: Python<'_>,
        i: usize,
        dict: *mut PyObject,
        length: isize,
        memory: &mut Memory,
    ) -> Result<(), usize> {
        let differs = match &self.values[i].expected {
            Expected::Named(keys) => !has_keys(dict, keys.bind(py)),
            _ => length >= 0 && size_of(dict) != length,
        };
        if differs {
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
                access => reach(py, access, dict, memory.are_guarded),
            };
            self.note(py, child, object, memory)?;
        }
        Ok(())
    }

    /// Compares the objects that are reached from an object as those children that `which` accepts.
    fn visit_each(
        &self,
        py: Python<'_>,
        i: usize,
        object: *mut PyObject,
        which: impl Fn(&Value) -> bool,
        memory: &mut Memory,
    ) -> Result<(), usize> {
        for child in self.values[i].children.iter().copied() {
            let value = &self.values[child];
            if !value.is_late && which(value) {
                let found = reach(py, &value.access, object, memory.are_guarded);
                self.note(py, child, found, memory)?;
            }
        }
        Ok(())
    }

    /// Stores the object that a value is now, if it is as expected. Otherwise returns the value's number as the error.
    fn note(
        &self,
        py: Python<'_>,
        i: usize,
        object: *mut PyObject,
        memory: &mut Memory,
    ) -> Result<(), usize> {
        let value = &self.values[i];
        if object == memory.objects[i] && !object.is_null() {
            // SAFETY: the object is alive because the object that holds it is.
            let kind = unsafe { ffi::Py_TYPE(object) } as usize;
            let is_same = match &value.expected {
                Expected::Referent(reference, of) => kind == *of && refers_to(reference.bind(py), object),
                // The check does not hold the object, so another one may have its address.
                Expected::Type(of) => kind == of.as_ptr() as usize,
                _ => true,
            };
            return if is_same { Ok(()) } else { Err(i) };
        }
        // SAFETY: the object is null, or alive because the object that holds it is.
        let found = unsafe { Bound::from_borrowed_ptr_or_opt(py, object) };
        if !holds(py, found.as_ref(), &value.expected, |_| object) {
            return Err(i);
        }
        memory.objects[i] = object;
        let is_dict = found.as_ref().is_some_and(|object| object.is_instance_of::<PyDict>());
        memory.changes[i] = if is_dict { 0 } else { NO_DICT };
        if value.function != usize::MAX {
            memory.functions[value.function] = [0; FUNCTION_WORDS];
        }
        let is_held = value.is_constant || matches!(value.expected, Expected::Equal(_));
        memory.held[i] = found.filter(|_| is_held).map(Bound::unbind);
        memory.is_replaced = true;
        memory.replaced.push(i);
        memory.is_container_replaced |= value.is_distinct;
        Ok(())
    }

    /// Compares the values that are reached by running Python code.
    fn compare_late(&self, py: Python<'_>, memory: &Memory) -> Result<(), usize> {
        let late = &self.late;
        // Python code may let other threads run, which may drop objects that were compared before.
        let held: Vec<Option<Bound<'_, PyAny>>> =
            late.iter().map(|i| self.parent_of(py, *i, memory)).collect();
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
                access => unsafe {
                    Bound::from_borrowed_ptr_or_opt(
                        py,
                        reach(py, access, parent.as_ptr(), memory.are_guarded),
                    )
                },
            });
            let other = |n: usize| match late[..number].binary_search(&n) {
                Ok(at) => found[at].as_ref().map_or(std::ptr::null_mut(), Bound::as_ptr),
                Err(_) => memory.objects[n],
            };
            if !holds(py, object.as_ref(), &value.expected, other) {
                return Err(*i);
            }
            found.push(object);
        }
        Ok(())
    }

    fn parent_of<'py>(&self, py: Python<'py>, i: usize, memory: &Memory) -> Option<Bound<'py, PyAny>> {
        let parent = self.values[i].parent;
        if self.values[parent].is_late {
            return None;
        }
        // SAFETY: the parent was compared, and nothing has run since.
        unsafe { Bound::from_borrowed_ptr_or_opt(py, memory.objects[parent]) }
    }
}
