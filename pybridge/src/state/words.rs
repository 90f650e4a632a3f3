//! Places in memory whose words show that a step of the comparison finds what it found before.
//!
//! A step that finds the same objects as before reads a few words: the type of its object, the version of a dict, the
//! pointers to what the object holds. All words of all steps stand in one list, in the order of the steps, so an
//! unchanged state takes one loop over the list. Where a word differs, its step is taken, and its words are read anew.
//!
//! An address is valid because the words before it hold: they are those of the objects that lead to this one.

use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

use super::member::TYPE_OFFSET;
use super::reach::size_of;
use super::value::{Access, Action, Expected, Step};
use super::{Memory, NO_DICT, StateCheck};

/// A word in memory, and its value at the latest comparison.
#[derive(Clone, Copy)]
pub struct Word {
    address: *const usize,
    value: usize,
}

static ZERO: usize = 0;
/// The words of a step that need not be taken, and of one that always is.
const HOLDS: Word = Word { address: &raw const ZERO, value: 0 };
const DIFFERS: Word = Word { address: &raw const ZERO, value: 1 };

const WORD: isize = std::mem::size_of::<usize>() as isize;
/// Offsets in bytes in CPython 3.11 and 3.12: of an object's first field, which is the size of a list or a tuple and the
/// referent of a weak reference, and of the second one, which is a tuple's first item, the pointer to a list's items and
/// a dict's version.
const FIRST: isize = std::mem::size_of::<PyObject>() as isize;
const SECOND: isize = FIRST + WORD;
/// `Py_TPFLAGS_MANAGED_DICT` (`object.h`), and the offset of the pointer to such a dict of attributes.
const HAS_MANAGED_DICT: std::ffi::c_ulong = 1 << 4;
const MANAGED_DICT: isize = -3 * WORD;

/// The words of all steps.
#[derive(Default)]
pub struct Words {
    words: Vec<Word>,
    /// The index of each step's first word. A step has at least one word.
    first: Vec<usize>,
}

impl Words {
    /// Returns the first step, from `step` on, of which a word differs.
    ///
    /// # Safety
    ///
    /// The state was compared up to that step, and no Python code has run since.
    pub unsafe fn differing(&self, step: usize) -> Option<usize> {
        let first = *self.first.get(step)?;
        // SAFETY: the words before this one hold, so the object that has the address is alive.
        let differs = |word: &Word| unsafe { word.address.read() } != word.value;
        let at = first + self.words[first..].iter().position(differs)?;
        Some(self.first.partition_point(|first| *first <= at) - 1)
    }

    fn push(&mut self, words: Option<&[Word]>) {
        self.first.push(self.words.len());
        match words {
            Some([]) => self.words.push(HOLDS),
            Some(words) => self.words.extend(words),
            None => self.words.push(DIFFERS),
        }
    }

    /// Replaces the words of a step. A step that had fewer is always taken from now on.
    fn set(&mut self, step: usize, words: Option<&[Word]>) {
        let end = self.first.get(step + 1).copied().unwrap_or(self.words.len());
        let room = &mut self.words[self.first[step]..end];
        room.fill(HOLDS);
        match words {
            Some(words) if words.len() <= room.len() => room[..words.len()].copy_from_slice(words),
            _ => room[0] = DIFFERS,
        }
    }
}

impl StateCheck {
    /// Reads the words of all steps, after a comparison that has passed.
    pub(super) fn read_words(&self, memory: &mut Memory) {
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
    pub(super) fn read_words_again(&self, step: usize, passed: bool, memory: &mut Memory) {
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
                let found = read(at(object, TYPE_OFFSET as isize));
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
            words.push(Word { address: at(object, SECOND), value: memory.changes[i] as usize });
        } else if size_of(object) >= 0 {
            words.push(read(at(object, FIRST)));
            // SAFETY: the object is alive.
            if unsafe { ffi::PyList_Check(object) } != 0 {
                words.push(read(at(object, SECOND)));
            }
        }
        let children = self.values[i].children.iter().copied();
        for child in children.filter(|child| !self.values[*child].is_late) {
            if is_dict && !self.values[child].is_part() {
                continue;
            }
            let access = &self.values[child].access;
            let word = read(place(access, object, memory.are_guarded)?);
            // SAFETY: None is immortal.
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

    /// Adds the words that show that a value is still what it has to be, if it is the same object.
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
                words.push(Word { address: at(reference, FIRST), value: object as usize });
                *kind
            }
            _ => return Some(()),
        };
        words.push(Word { address: at(object, TYPE_OFFSET as isize), value: kind });
        Some(())
    }
}

/// Where a living object stores what an access reaches. Returns nothing if that is not known.
fn place(access: &Access, object: *mut PyObject, are_guarded: bool) -> Option<*const usize> {
    match access {
        Access::Stored(member, _) => {
            let is_known = read(at(object, TYPE_OFFSET as isize)).value == member.kind;
            (is_known && (are_guarded || !member.is_guarded)).then(|| at(object, member.offset as isize))
        }
        Access::Attributes => place_of_attributes(object),
        Access::Item(item) if *item < size_of(object) => {
            // SAFETY: the object is alive.
            let is_list = unsafe { ffi::PyList_Check(object) } != 0;
            let second = at(object, SECOND);
            let items = if is_list { read(second).value as *const usize } else { second };
            Some(items.wrapping_offset(*item))
        }
        _ => None,
    }
}

/// Where a living object stores the pointer to the dict of its attributes.
fn place_of_attributes(object: *mut PyObject) -> Option<*const usize> {
    // SAFETY: the object is alive, and so is its type.
    let (kind, flags) = unsafe { (ffi::Py_TYPE(object), ffi::PyType_GetFlags(ffi::Py_TYPE(object))) };
    if flags & HAS_MANAGED_DICT != 0 {
        return Some(at(object, MANAGED_DICT));
    }
    // SAFETY: the type of types is alive.
    let is_plain = unsafe { ffi::Py_TYPE(kind.cast()) == &raw mut ffi::PyType_Type };
    if !is_plain {
        // Python code may look the attributes of this type up.
        return None;
    }
    Python::attach(|py| {
        // SAFETY: the type is alive.
        let kind = unsafe { Bound::from_borrowed_ptr(py, kind.cast()) };
        let offset = kind.getattr("__dictoffset__").ok()?.extract::<isize>().ok()?;
        (offset > 0).then(|| at(object, offset))
    })
}

fn at(object: *mut PyObject, offset: isize) -> *const usize {
    object.cast_const().cast::<usize>().wrapping_byte_offset(offset)
}

/// The word at a place in a living object.
fn read(address: *const usize) -> Word {
    // SAFETY: the address is that of a field.
    Word { address, value: unsafe { address.read() } }
}
