//! Asking for memory before it is needed.
//!
//! A loop that computes much an element rests memory meanwhile: the hardware fetches ahead only as far as a loop reads
//! without pausing, and not beyond a page. So a loop over tiles asks for the next one.

use std::ops::Range;

/// Bytes of a line.
pub const LINE: usize = 64;

/// Has the caches fetch some of the lines behind an address, to be written where that is so. No harm is done where
/// nothing is.
#[inline(always)]
pub fn fetch(first: *const u8, lines: Range<usize>, written: bool) {
    for line in lines {
        fetch_line(first.wrapping_add(line * LINE), written);
    }
}

#[inline(always)]
fn fetch_line(line: *const u8, written: bool) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: this changes no state that a program sees, wherever it points.
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
