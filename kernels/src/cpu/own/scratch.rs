//! Memory that kernels need while they run. Where there is none, PyTorch's kernel does without it or raises.

use crate::cpu::scarcity::may_allocate;

/// An empty vector with a capacity of `n` items; `None` where there is no memory for it.
pub fn room<T>(n: usize) -> Option<Vec<T>> {
    let mut items = Vec::new();
    (may_allocate() && items.try_reserve_exact(n).is_ok()).then_some(items)
}

/// A vector of `n` copies of a value; `None` where there is no memory for it.
pub fn filled<T: Clone>(n: usize, value: T) -> Option<Vec<T>> {
    let mut items = room(n)?;
    items.resize(n, value);
    Some(items)
}
