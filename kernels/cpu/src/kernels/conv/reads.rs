//! One spatial dimension of a convolution: the pixels of a source that each output pixel reads.

use std::ops::Range;

use crate::kernels::conv::geometry::Conv;

/// The pixels of a source that outputs read along one dimension.
#[derive(Clone, Debug)]
pub(super) struct Reads {
    /// Number of pixels of the source.
    pub(super) source: usize,
    /// Distance between the pixels that two successive outputs of a phase read through a tap.
    pub(super) step: usize,
    /// Distance between two successive outputs of a phase.
    pub(super) stride: usize,
    /// The outputs that read through the same taps of the filter.
    pub(super) phases: Vec<Phase>,
}

/// Outputs at equal distances that read through the same taps.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    /// First output and number of outputs.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Pairs of a tap and the pixel that the first output reads through it, in the order of the pixels. Pixels outside
    /// of the source are zero.
    pub(super) taps: Vec<(usize, isize)>,
}

impl Reads {
    /// The pixels of the image that pixels of the grid read.
    pub(super) fn of_grid(conv: &Conv, d: usize) -> Reads {
        let first = |tap: usize| (tap * conv.dilation[d]) as isize - conv.padding[d] as isize;
        let taps = (0..conv.filter[d]).map(|tap| (tap, first(tap))).collect();
        let phases = vec![Phase { first: 0, count: conv.out[d], taps }];
        Reads { source: conv.size[d], step: conv.stride[d], stride: 1, phases }
    }

    /// The pixels of the grid that pixels of the image read. Through a tap, pixel `y` reads grid pixel `(y + padding -
    /// tap * dilation) / stride` if this is a whole number.
    pub(super) fn of_image(conv: &Conv, d: usize) -> Reads {
        let (stride, dilation, padding) = (conv.stride[d], conv.dilation[d], conv.padding[d]);
        let phase = |number: usize| {
            let first = (number + stride - padding % stride) % stride;
            let read =
                |tap: usize| ((first + padding) as isize - (tap * dilation) as isize) / stride as isize;
            let taps = (0..conv.filter[d]).rev().filter(|tap| tap * dilation % stride == number);
            let count = conv.size[d].saturating_sub(first).div_ceil(stride);
            Phase { first, count, taps: taps.map(|tap| (tap, read(tap))).collect() }
        };
        let phases = (0..stride).map(phase).filter(|phase| phase.count > 0).collect();
        Reads { source: conv.out[d], step: 1, stride, phases }
    }

    /// The outputs of a phase, counted from 0, that read a pixel inside of the source through a tap by which the first
    /// output reads pixel `start`.
    pub(super) fn inside(&self, phase: &Phase, start: isize) -> Range<usize> {
        let begin = start.min(0).unsigned_abs().div_ceil(self.step);
        let end = ((self.source as isize - start).max(0) as usize).div_ceil(self.step).min(phase.count);
        begin.min(end)..end
    }

    /// The outputs of a phase that only read pixels inside of the source.
    pub(super) fn all_inside(&self, phase: &Phase) -> Range<usize> {
        let all = phase.taps.iter().map(|(_, start)| self.inside(phase, *start));
        all.reduce(|a, b| a.start.max(b.start)..a.end.min(b.end)).unwrap_or(0..phase.count)
    }
}

impl Phase {
    /// Whether the taps read adjacent pixels.
    pub(super) fn is_adjacent(&self) -> bool {
        self.taps.windows(2).all(|pair| pair[1].1 == pair[0].1 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conv(size: usize, filter: usize, stride: usize, padding: usize, dilation: usize) -> Option<Conv> {
        let out = (size + 2 * padding).checked_sub(dilation * (filter - 1) + 1)? / stride + 1;
        Some(Conv {
            n: 1,
            groups: 1,
            inputs: 1,
            outputs: 1,
            size: [size; 2],
            filter: [filter; 2],
            out: [out; 2],
            stride: [stride; 2],
            padding: [padding; 2],
            dilation: [dilation; 2],
        })
    }

    /// For all outputs and all pixels that they read: the output, the tap and the pixel of the source.
    fn pairs(reads: &Reads) -> Vec<[usize; 3]> {
        let mut pairs = Vec::new();
        for phase in &reads.phases {
            for (tap, start) in &phase.taps {
                for at in reads.inside(phase, *start) {
                    let pixel = start + (at * reads.step) as isize;
                    assert!((0..reads.source as isize).contains(&pixel), "{reads:?}");
                    pairs.push([phase.first + at * reads.stride, *tap, pixel as usize]);
                }
            }
        }
        pairs.sort_unstable();
        pairs
    }

    #[test]
    fn grids_and_images_read_what_the_definition_says() {
        for case in 0..7 * 4 * 4 * 4 * 3 {
            let (size, filter, stride) = (case % 7 + 1, case / 7 % 4 + 1, case / 28 % 4 + 1);
            let (padding, dilation) = (case / 112 % 4, case / 448 + 1);
            let Some(conv) = conv(size, filter, stride, padding, dilation) else { continue };
            let mut expected = Vec::new();
            for (out, tap) in (0..conv.out[0]).flat_map(|out| (0..filter).map(move |tap| (out, tap))) {
                let pixel = (out * stride + tap * dilation).wrapping_sub(padding);
                if pixel < size {
                    expected.push([out, tap, pixel]);
                }
            }
            assert_eq!(pairs(&Reads::of_grid(&conv, 0)), expected, "{conv:?}");
            let swapped =
                pairs(&Reads::of_image(&conv, 0)).into_iter().map(|[image, tap, out]| [out, tap, image]);
            let mut swapped: Vec<[usize; 3]> = swapped.collect();
            swapped.sort_unstable();
            assert_eq!(swapped, expected, "{conv:?}");
        }
    }
}
