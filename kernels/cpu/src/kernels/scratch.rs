//! Scratch memory of kernels. If there is not enough memory, PyTorch's kernel runs instead, which needs less or raises
//! an error.

use std::cell::RefCell;
use std::thread::LocalKey;

use crate::scarcity::may_allocate;

/// Largest number of bytes of a buffer that a thread keeps.
const KEPT: usize = 64 << 20;

type Buffers<T> = RefCell<Vec<Vec<T>>>;

thread_local! {
    static FLOATS: Buffers<f32> = const { RefCell::new(Vec::new()) };
    static DOUBLES: Buffers<f64> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with a scratch buffer of `n` floats, whose contents are arbitrary; returns false if there is no
/// memory for it.
pub fn with_scratch(n: usize, work: impl FnOnce(&mut [f32]) -> bool) -> bool {
    lent(&FLOATS, n, 0.0, work)
}

/// Calls `work` with a scratch buffer of `n` float64 numbers, whose contents are arbitrary; returns false if there is no
/// memory for it.
pub fn with_doubles(n: usize, work: impl FnOnce(&mut [f64]) -> bool) -> bool {
    lent(&DOUBLES, n, 0.0, work)
}

fn lent<T: Clone>(
    buffers: &'static LocalKey<Buffers<T>>,
    n: usize,
    value: T,
    work: impl FnOnce(&mut [T]) -> bool,
) -> bool {
    let mut scratch = buffers.with_borrow_mut(Vec::pop).unwrap_or_default();
    if scratch.len() < n {
        match filled(n, value) {
            Some(more) => scratch = more,
            None => return false,
        }
    }
    let done = work(&mut scratch[..n]);
    if scratch.len() * size_of::<T>() <= KEPT {
        buffers.with_borrow_mut(|all| all.push(scratch));
    }
    done
}

/// Returns an empty vector with capacity for `n` items; `None` if there is no memory for it.
pub fn room<T>(n: usize) -> Option<Vec<T>> {
    let mut items = Vec::new();
    (may_allocate() && items.try_reserve_exact(n).is_ok()).then_some(items)
}

/// Returns a vector of `n` copies of a value; `None` if there is no memory for it.
pub fn filled<T: Clone>(n: usize, value: T) -> Option<Vec<T>> {
    let mut items = room(n)?;
    items.resize(n, value);
    Some(items)
}
