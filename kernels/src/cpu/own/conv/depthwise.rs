//! Depthwise convolutions with stride 1: each channel has a filter of its own.
//!
//! **Why.** A matrix product per channel would have one row. oneDNN's kernels compute at 4 to 30 GFLOP/s here.
//! **Strategy.** For each column of the filter, a plane is copied so that the elements under this column are at the
//! positions of the outputs, with padding as zeros. A filter element then meets the elements of all outputs in one
//! contiguous range: outputs are sums of such ranges times a weight, and the gradient of a weight is the product of
//! its range and the grid. The input's gradient is the same convolution of the grid, with the filter turned round.
//!
//! Outputs are added in the order of the filter's elements, and the lanes of a weight's gradient do not depend on the
//! CPU, so that neither the number of threads nor the SIMD units change a bit.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use crate::cpu::own::conv::geometry::{Conv, with_scratch};
use crate::cpu::own::each_row;
use crate::cpu::own::kernel::Shared;
use crate::cpu::widest::widest;
use crate::host::HostKernels;

/// Number of outputs whose sums are kept in registers, and of partial sums of a weight's gradient.
const LANES: usize = 64;
/// Maximum number of floats of a plane's copies: a quarter of a second-level cache of 2 MiB.
const ROOM: usize = 1 << 17;

type Weights = SmallVec<[(usize, f32); 49]>;

/// A depthwise convolution of planes, in one direction.
#[derive(Clone, Copy)]
struct Sliding {
    /// Height and width of the planes that are read, and of those that are computed.
    from: [usize; 2],
    to: [usize; 2],
    filter: [usize; 2],
    dilation: [usize; 2],
    /// Number of rows and columns of padding before the first element.
    padding: [usize; 2],
}

impl Sliding {
    /// From the image to the grid.
    fn forward(conv: &Conv) -> Sliding {
        let Conv { filter, dilation, padding, .. } = *conv;
        Sliding { from: conv.size, to: conv.out, filter, dilation, padding }
    }

    /// From the grid to the image; `None` if the padding is wider than the filter.
    fn backward(conv: &Conv) -> Option<Sliding> {
        let Conv { filter, dilation, .. } = *conv;
        let before = |d: usize| ((filter[d] - 1) * dilation[d]).checked_sub(conv.padding[d]);
        Some(Sliding { from: conv.out, to: conv.size, filter, dilation, padding: [before(0)?, before(1)?] })
    }

    /// Number of rows of a copy.
    fn rows(&self) -> usize {
        self.to[0] + (self.filter[0] - 1) * self.dilation[0]
    }

    /// Number of floats of a plane's copies.
    fn copies(&self) -> usize {
        self.filter[1] * self.rows() * self.to[1]
    }

    /// Number of elements of a computed plane.
    fn len(&self) -> usize {
        self.to[0] * self.to[1]
    }

    /// Copies a plane for each column of the filter.
    #[inline(always)]
    fn copy(&self, plane: &[f32], copies: &mut [f32]) {
        let (width, across) = (self.from[1], self.to[1]);
        for (j, copy) in copies.chunks_exact_mut(self.rows() * across).enumerate() {
            let column = j * self.dilation[1];
            // Output `x` meets element `x + column - padding` of a row.
            let begin = self.padding[1].saturating_sub(column).min(across);
            let end = (width + self.padding[1]).saturating_sub(column).clamp(begin, across);
            for (row, to) in copy.chunks_exact_mut(across).enumerate() {
                match row.checked_sub(self.padding[0]).filter(|row| *row < self.from[0] && begin < end) {
                    Some(row) => {
                        let first = row * width + begin + column - self.padding[1];
                        to[..begin].fill(0.0);
                        to[begin..end].copy_from_slice(&plane[first..first + end - begin]);
                        to[end..].fill(0.0);
                    }
                    None => to.fill(0.0),
                }
            }
        }
    }

    /// Offset in a plane's copies of the element that a filter element meets for the first output.
    fn offset(&self, tap: usize) -> usize {
        let (i, j) = (tap / self.filter[1], tap % self.filter[1]);
        (j * self.rows() + i * self.dilation[0]) * self.to[1]
    }

    /// Computes all planes. `turned` says that the filter is turned round.
    ///
    /// # Safety
    /// `from`, `weight` and `to` have `n * channels` planes, a filter per channel, and `n * channels` planes. During the
    /// call, nobody writes those that are read or uses the one that is written.
    unsafe fn run(
        &self,
        host: &dyn HostKernels,
        [n, channels]: [usize; 2],
        [from, weight, to]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
        turned: bool,
    ) -> bool {
        let (taps, [height, width]) = (self.filter[0] * self.filter[1], self.from);
        let done = AtomicBool::new(true);
        each_row(host, n * channels, self.len() * taps / 4, &|begin, end| {
            let found = with_scratch(self.copies(), |copies| {
                for plane in begin..end {
                    let channel = plane % channels;
                    // SAFETY: the planes, the filter and the bias of this channel exist, and one thread alone writes
                    // a plane.
                    let (from, weight, to, start) = unsafe {
                        (
                            from.read(plane * height * width, height * width),
                            weight.read(channel * taps, taps),
                            to.slice(plane * self.len(), self.len()),
                            bias.map_or(0.0, |bias| *bias.at(channel)),
                        )
                    };
                    let tap = |i: usize| weight[if turned { taps - 1 - i } else { i }];
                    let weights: Weights = (0..taps).map(|i| (self.offset(i), tap(i))).collect();
                    compute(self, from, &weights, start, copies, to);
                }
                true
            });
            if !found {
                done.store(false, Ordering::Relaxed);
            }
        });
        done.into_inner()
    }
}

widest! {
    fn compute(sliding: &Sliding, from: &[f32], weights: &Weights, start: f32, copies: &mut [f32], to: &mut [f32])
        => run_compute
}

#[inline(always)]
fn run_compute(
    sliding: &Sliding,
    from: &[f32],
    weights: &Weights,
    start: f32,
    copies: &mut [f32],
    to: &mut [f32],
) {
    sliding.copy(from, copies);
    let whole = to.len() / LANES * LANES;
    let (blocks, rest) = to.split_at_mut(whole);
    for (number, block) in blocks.chunks_exact_mut(LANES).enumerate() {
        let mut sums = [start; LANES];
        for (offset, weight) in weights {
            let range = &copies[offset + number * LANES..][..LANES];
            for (sum, x) in sums.iter_mut().zip(range) {
                *sum += weight * x;
            }
        }
        block.copy_from_slice(&sums);
    }
    rest.fill(start);
    for (offset, weight) in weights {
        for (sum, x) in rest.iter_mut().zip(&copies[offset + whole..]) {
            *sum += weight * x;
        }
    }
}

widest! {
    /// Adds the products of a plane's elements and a grid's to the gradient of each weight.
    fn accumulate(sliding: &Sliding, image: &[f32], grid: &[f32], copies: &mut [f32], sums: &mut [f64])
        => run_accumulate
}

#[inline(always)]
fn run_accumulate(sliding: &Sliding, image: &[f32], grid: &[f32], copies: &mut [f32], sums: &mut [f64]) {
    sliding.copy(image, copies);
    for (tap, sum) in sums.iter_mut().enumerate() {
        let range = &copies[sliding.offset(tap)..][..grid.len()];
        let mut lanes = [0.0_f32; LANES];
        let (blocks, elements) = (grid.chunks_exact(LANES), range.chunks_exact(LANES));
        let rest = blocks.remainder().iter().zip(elements.remainder());
        let last: f64 = rest.map(|(g, x)| f64::from(*g) * f64::from(*x)).sum();
        for (block, elements) in blocks.zip(elements) {
            for ((lane, g), x) in lanes.iter_mut().zip(block).zip(elements) {
                *lane += g * x;
            }
        }
        *sum += lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>() + last;
    }
}

/// Whether this module computes a depthwise convolution.
pub(super) fn fits(conv: &Conv) -> bool {
    let backward = Sliding::backward(conv).is_some_and(|backward| backward.copies() <= ROOM);
    conv.stride == [1, 1] && backward && Sliding::forward(conv).copies() <= ROOM
}

/// Computes the grid.
///
/// # Safety
/// The requirements are those of `Way::to_grid`.
pub(super) unsafe fn to_grid(
    conv: &Conv,
    host: &dyn HostKernels,
    all: [Shared<f32>; 3],
    bias: Option<Shared<f32>>,
) -> bool {
    // SAFETY: the image has `n * outputs` planes, as the grid has, which this function requires.
    unsafe { Sliding::forward(conv).run(host, [conv.n, conv.outputs], all, bias, false) }
}

/// Computes the image.
///
/// # Safety
/// The requirements are those of `Way::to_image`.
pub(super) unsafe fn to_image(
    conv: &Conv,
    host: &dyn HostKernels,
    all: [Shared<f32>; 3],
    bias: Option<Shared<f32>>,
) -> bool {
    let Some(backward) = Sliding::backward(conv) else { return false };
    // SAFETY: the grid has `n * outputs` planes, as the image has, which this function requires.
    unsafe { backward.run(host, [conv.n, conv.outputs], all, bias, true) }
}

/// Computes the weight gradient.
///
/// # Safety
/// The requirements are those of `Way::to_weight`.
pub(super) unsafe fn to_weight(
    conv: &Conv,
    host: &dyn HostKernels,
    [image, grid, weight]: [Shared<f32>; 3],
) -> bool {
    let (sliding, taps) = (Sliding::forward(conv), conv.filter[0] * conv.filter[1]);
    let (pixels, channels) = (conv.size[0] * conv.size[1], conv.outputs);
    let done = AtomicBool::new(true);
    each_row(host, channels, conv.n * sliding.len() * taps / 4, &|begin, end| {
        let found = with_scratch(sliding.copies(), |copies| {
            for channel in begin..end {
                let mut sums: SmallVec<[f64; 49]> = SmallVec::from_elem(0.0, taps);
                for plane in (0..conv.n).map(|i| i * channels + channel) {
                    // SAFETY: the planes exist and are only read.
                    let (image, grid) = unsafe {
                        (image.read(plane * pixels, pixels), grid.read(plane * sliding.len(), sliding.len()))
                    };
                    accumulate(&sliding, image, grid, copies, &mut sums);
                }
                // SAFETY: the filter of this channel exists, and one thread alone writes it.
                let weight = unsafe { weight.slice(channel * taps, taps) };
                for (to, sum) in weight.iter_mut().zip(&sums) {
                    *to = *sum as f32;
                }
            }
            true
        });
        if !found {
            done.store(false, Ordering::Relaxed);
        }
    });
    done.into_inner()
}
