//! One spatial dimension of a convolution: the pixels that the taps of its filter read.

use std::ops::Range;

use smallvec::SmallVec;

use crate::cpu::own::conv::geometry::Conv;

/// One spatial dimension of a convolution. A stride `s` splits a row of pixels into `s` *phases*, the pixels whose
/// padded coordinates are equal modulo `s`. The pixels of a phase are contiguous in the scratch buffer.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) size: usize,
    pub(super) out: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    /// Padded coordinates, below the stride, of the first pixels of the phases that some tap reads.
    pub(super) phases: SmallVec<[usize; 2]>,
    /// Phase that each tap reads, as an index into `phases`, and the tap's offset in it.
    pub(super) taps: SmallVec<[(usize, usize); 4]>,
    /// Largest offset in `taps`.
    pub(super) reach: usize,
}

impl Axis {
    pub(super) fn of(conv: &Conv, d: usize) -> Axis {
        let (stride, all) = (conv.stride[d], (0..conv.filter[d]).map(|tap| tap * conv.dilation[d]));
        let phases: SmallVec<[usize; 2]> =
            (0..stride).filter(|phase| all.clone().any(|at| at % stride == *phase)).collect();
        let number = |at: usize| phases.iter().position(|phase| at % stride == *phase).unwrap_or_default();
        let taps = all.clone().map(|at| (number(at), at / stride)).collect();
        let reach = all.map(|at| at / stride).max().unwrap_or_default();
        let (size, out, padding) = (conv.size[d], conv.out[d], conv.padding[d]);
        Axis { size, out, stride, padding, phases, taps, reach }
    }

    /// Returns the part of a phase that lies inside the image, in positions relative to `first`, and the coordinate of
    /// its first pixel. `phase` is the padded coordinate of position 0.
    pub(super) fn pixels(&self, phase: usize, first: usize) -> (Range<usize>, usize) {
        self.pixels_before(phase, first, usize::MAX)
    }

    /// Returns the part of a phase that lies inside the image, and the coordinate of its first pixel. Positions are
    /// relative to the one that output pixel `first` reads with a tap of offset 0; only those that the outputs
    /// `first..first + n` read count.
    pub(super) fn inside(&self, phase: usize, first: usize, n: usize) -> (Range<usize>, usize) {
        self.pixels_before(self.phases[phase], first, n + self.reach)
    }

    fn pixels_before(&self, phase: usize, first: usize, end: usize) -> (Range<usize>, usize) {
        let begin = self.padding.saturating_sub(phase).div_ceil(self.stride).saturating_sub(first);
        let all = match (self.size + self.padding).checked_sub(phase + 1) {
            Some(last) => (last / self.stride + 1).saturating_sub(first),
            None => 0,
        };
        let end = end.min(all);
        let range = begin.min(end)..end;
        let pixel = ((first + range.start) * self.stride + phase).saturating_sub(self.padding);
        (range, pixel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_the_pixels_that_filters_see() {
        for (size, filter, stride, padding, dilation) in [
            (8, 3, 1, 1, 1),
            (9, 3, 2, 1, 1),
            (7, 2, 3, 0, 2),
            (5, 1, 2, 0, 1),
            (4, 4, 2, 5, 1),
            (3, 3, 4, 2, 2),
        ] {
            let out = (size + 2 * padding - dilation * (filter - 1) - 1) / stride + 1;
            let conv = Conv {
                n: 1,
                inputs: 1,
                outputs: 1,
                size: [1, size],
                filter: [1, filter],
                out: [1, out],
                stride: [1, stride],
                padding: [0, padding],
                dilation: [1, dilation],
                groups: 1,
            };
            let axis = Axis::of(&conv, 1);
            for first in 0..out {
                for n in 1..=out - first {
                    for place in first..first + n {
                        for (tap, (phase, shift)) in axis.taps.iter().enumerate() {
                            let (range, pixel) = axis.inside(*phase, first, n);
                            let at = place - first + shift;
                            let found = range.contains(&at).then(|| pixel + (at - range.start) * axis.stride);
                            let seen = (place * stride + tap * dilation).checked_sub(padding);
                            assert_eq!(found, seen.filter(|seen| *seen < size), "{conv:?} {first} {n}");
                        }
                    }
                }
            }
        }
    }
}
