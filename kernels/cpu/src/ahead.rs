//! Prefetching of memory into the CPU's caches.
//!
//! The hardware prefetches only as far as a loop reads without pausing, and not across a page boundary. A loop that
//! computes much per element would therefore leave the memory idle, so loops over tiles prefetch the next tile
//! themselves.

use std::ops::Range;

/// Size of a cache line in bytes.
pub const LINE: usize = 64;

/// Prefetches the cache lines `lines`, counted from an address, for writing if `written`. Addresses without memory
/// are ignored.
#[inline(always)]
pub fn fetch(first: *const u8, lines: Range<usize>, written: bool) {
    for line in lines {
        fetch_line(first.wrapping_add(line * LINE), written);
    }
}

#[inline(always)]
fn fetch_line(line: *const u8, written: bool) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing that the program can observe and does not fault, wherever it points.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
        if written {
            _mm_prefetch::<_MM_HINT_ET0>(line.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, written);
}
