//! Copies between windows of the same sizes and different strides.

use tandem_executor::shapes::Dims;

/// A copy, split into *runs*: ranges of bytes that are contiguous in both windows.
pub struct Copy {
    /// Number of runs along each dimension; the last dimension is the innermost.
    sizes: Dims,
    /// Strides of runs in bytes, in the source and in the destination.
    from: Dims,
    to: Dims,
    /// Number of bytes of a run.
    run: usize,
}

impl Copy {
    /// The copy between windows with these sizes, and with the strides `from` and `to` in elements of `bytes` bytes.
    pub fn of(sizes: &[i64], from: &[i64], to: &[i64], bytes: i64) -> Copy {
        let mut copy = Copy { sizes: Dims::new(), from: Dims::new(), to: Dims::new(), run: bytes as usize };
        // Dimensions that can be merged in both windows are merged.
        for d in (0..sizes.len()).filter(|d| sizes[*d] != 1) {
            let (size, from, to) = (sizes[d], from[d] * bytes, to[d] * bytes);
            if let (Some(of), Some(f), Some(t)) =
                (copy.sizes.last_mut(), copy.from.last_mut(), copy.to.last_mut())
                && (*f, *t) == (from * size, to * size)
            {
                (*of, *f, *t) = (*of * size, from, to);
            } else {
                copy.sizes.push(size);
                copy.from.push(from);
                copy.to.push(to);
            }
        }
        if let (Some(f), Some(t)) = (copy.from.last(), copy.to.last())
            && (*f, *t) == (bytes, bytes)
        {
            copy.run *= copy.sizes.pop().unwrap_or(1) as usize;
            copy.from.pop();
            copy.to.pop();
        }
        copy
    }

    /// Returns the number of runs.
    pub fn runs(&self) -> usize {
        self.sizes.iter().product::<i64>() as usize
    }

    /// Returns the number of bytes of a run.
    pub fn run(&self) -> usize {
        self.run
    }

    /// Copies runs `begin..end`.
    ///
    /// # Safety
    /// - `from` and `to` point to the windows, which have these runs.
    /// - During the call, nobody writes these runs of `from`, and nobody else uses these runs of `to`.
    pub unsafe fn carry_out(&self, from: *const u8, to: *mut u8, begin: usize, end: usize) {
        // SAFETY: runs `begin..end` are in both windows and not shared, which this function requires; `each` passes the
        // addresses of these runs alone, and the accesses may be unaligned.
        unsafe {
            match self.run {
                4 => self.each(from, to, begin, end, |from, to| {
                    to.cast::<u32>().write_unaligned(from.cast::<u32>().read_unaligned());
                }),
                8 => self.each(from, to, begin, end, |from, to| {
                    to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned());
                }),
                n => self.each(from, to, begin, end, |from, to| std::ptr::copy_nonoverlapping(from, to, n)),
            }
        }
    }

    /// Calls `copy` with the two addresses of each of the runs `begin..end`.
    #[inline(always)]
    fn each(
        &self,
        from: *const u8,
        to: *mut u8,
        begin: usize,
        end: usize,
        copy: impl Fn(*const u8, *mut u8),
    ) {
        let (Some(inner), Some(f), Some(t)) = (self.sizes.last(), self.from.last(), self.to.last()) else {
            return copy(from, to);
        };
        let (inner, f, t) = (*inner as usize, *f as isize, *t as isize);
        let mut at = begin;
        while at < end {
            let (first, row) = (at % inner, at / inner);
            let n = (inner - first).min(end - at);
            let outer = 0..self.sizes.len() - 1;
            let (from_row, to_row, _) = outer.rev().fold((0, 0, row as i64), |(f, t, rest), d| {
                let at = rest % self.sizes[d];
                (f + at * self.from[d], t + at * self.to[d], rest / self.sizes[d])
            });
            let from = from.wrapping_offset(from_row as isize + first as isize * f);
            let to = to.wrapping_offset(to_row as isize + first as isize * t);
            for i in 0..n as isize {
                copy(from.wrapping_offset(i * f), to.wrapping_offset(i * t));
            }
            at += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_copied_in_any_parts() {
        let from: Vec<u32> = (0..1000).collect();
        for (sizes, from_strides, to_strides) in [
            (&[][..], &[][..], &[][..]),
            (&[7], &[1], &[1]),
            (&[7], &[3], &[1]),
            (&[3, 4, 5], &[20, 5, 1], &[20, 5, 1]),
            (&[3, 4, 5], &[20, 5, 1], &[40, 8, 1]),
            (&[3, 4, 5], &[1, 3, 12], &[20, 5, 1]),
            (&[2, 1, 3], &[0, 9, 2], &[5, 7, 1]),
        ] {
            let copy = Copy::of(sizes, from_strides, to_strides, 4);
            let offset = |strides: &[i64], i: i64| {
                let each = (0..sizes.len()).rev().fold((0, i), |(offset, rest), d| {
                    (offset + rest % sizes[d] * strides[d], rest / sizes[d])
                });
                each.0 as usize
            };
            for part in [1, 2, 5, 1000] {
                let mut to = vec![u32::MAX; 1000];
                for begin in (0..copy.runs()).step_by(part) {
                    let end = (begin + part).min(copy.runs());
                    // SAFETY: all offsets are below 1000, the length of both vectors.
                    unsafe { copy.carry_out(from.as_ptr().cast(), to.as_mut_ptr().cast(), begin, end) };
                }
                let mut expected = vec![u32::MAX; 1000];
                for i in 0..sizes.iter().product() {
                    expected[offset(to_strides, i)] = from[offset(from_strides, i)];
                }
                assert_eq!(to, expected, "{sizes:?} {from_strides:?} {to_strides:?} {part}");
            }
        }
    }
}
