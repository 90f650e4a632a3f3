//! Injected allocation failures for tests. All code that allocates host memory for tensors or kernels asks here
//! first.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of allocations up to and including the one that fails; 0 if none is to fail.
static LEFT: AtomicU64 = AtomicU64::new(0);

/// Makes the `n`-th allocation from now fail, and no other; none if `n` is 0. Returns the previous countdown.
pub fn fail_nth(n: u64) -> u64 {
    LEFT.swap(n, Ordering::Relaxed)
}

/// Whether the next allocation may be made.
#[inline]
pub fn may_allocate() -> bool {
    LEFT.load(Ordering::Relaxed) == 0 || !is_last()
}

#[cold]
fn is_last() -> bool {
    let less = |left: u64| left.checked_sub(1);
    LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) == Ok(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_allocation_fails() {
        assert!(may_allocate());
        fail_nth(3);
        assert_eq!([(); 5].map(|()| may_allocate()), [true, true, false, true, true]);
        assert_eq!(fail_nth(2), 0);
        assert!(may_allocate());
        assert_eq!(fail_nth(0), 1);
        assert!(may_allocate());
    }
}
