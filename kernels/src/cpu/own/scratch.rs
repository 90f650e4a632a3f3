//! Scratch memory of kernels. If there is none, PyTorch's kernel runs, which needs less or raises an error.

use crate::cpu::scarcity::may_allocate;

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
