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
use super::value::Access;

/// A word in memory, and its value at the latest comparison.
#[derive(Clone, Copy)]
pub struct Word {
    address: *const usize,
    pub value: usize,
}

static ZERO: usize = 0;
/// The words of a step that need not be taken, and of one that always is.
const HOLDS: Word = Word { address: &raw const ZERO, value: 0 };
const DIFFERS: Word = Word { address: &raw const ZERO, value: 1 };

const WORD: isize = std::mem::size_of::<usize>() as isize;
/// Offsets in bytes of an object's first two fields.
const FIRST: isize = std::mem::size_of::<PyObject>() as isize;
const SECOND: isize = FIRST + WORD;
/// `Py_TPFLAGS_MANAGED_DICT` (`object.h`), and the offset of the pointer to such a dict of attributes.
const HAS_MANAGED_DICT: std::ffi::c_ulong = 1 << 4;
const MANAGED_DICT: isize = -3 * WORD;

impl Word {
    /// The type of a living object.
    pub fn of_type(object: *mut PyObject) -> Word {
        read(at(object, TYPE_OFFSET as isize))
    }

    /// In CPython 3.11 and 3.12, the size of a list or a tuple, and the referent of a weak reference.
    pub fn first_field(object: *mut PyObject) -> Word {
        read(at(object, FIRST))
    }

    /// In CPython 3.11 and 3.12, the pointer to a list's items, and a dict's version.
    pub fn second_field(object: *mut PyObject) -> Word {
        read(at(object, SECOND))
    }

    /// The pointer to what an access reaches in a living object. Returns nothing if its place is not known.
    pub fn stored(access: &Access, object: *mut PyObject, are_guarded: bool) -> Option<Word> {
        place(access, object, are_guarded).map(read)
    }

    /// The same place with another value.
    pub fn with(self, value: usize) -> Word {
        Word { value, ..self }
    }
}

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

    /// Adds the words of the next step, or of one that is always taken.
    pub fn push(&mut self, words: Option<&[Word]>) {
        self.first.push(self.words.len());
        match words {
            Some([]) => self.words.push(HOLDS),
            Some(words) => self.words.extend(words),
            None => self.words.push(DIFFERS),
        }
    }

    /// Replaces the words of a step. A step that had fewer is always taken from now on.
    pub fn set(&mut self, step: usize, words: Option<&[Word]>) {
        let end = self.first.get(step + 1).copied().unwrap_or(self.words.len());
        let room = &mut self.words[self.first[step]..end];
        room.fill(HOLDS);
        match words {
            Some(words) if words.len() <= room.len() => room[..words.len()].copy_from_slice(words),
            _ => room[0] = DIFFERS,
        }
    }
}

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
