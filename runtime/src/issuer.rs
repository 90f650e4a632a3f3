//! Issuers: the calls that issue ops, by their numbers in PyTorch's profiler, which assigns kernels to calls by these
//! numbers.

use std::cell::Cell;

thread_local!(static CURRENT: Cell<u64> = const { Cell::new(0) });

/// Sets the innermost call that PyTorch's profiler records on this thread, or 0 outside of calls.
pub fn set(call: u64) {
    CURRENT.set(call);
}

/// Returns the innermost call that PyTorch's profiler records on this thread, or 0.
pub fn current() -> u64 {
    CURRENT.get()
}
