//! Depthwise convolutions: each channel has a filter of its own.
//!
//! **Why.** A matrix product per channel would have one row. oneDNN's kernels compute at 4 to 30 GFLOP/s here.
//! **Strategy.** A plane is copied with its padding; with a stride above 1, each phase ([`Axis`]) has a copy. Outputs
//! are computed in rows as long as the rows of a copy. The elements that a tap of the filter reads for all outputs are
//! then one contiguous range of a copy. The outputs between the end of an image row and the end of such a row are
//! dropped. An output is the sum of these ranges times weights, and the gradient of a weight is the product of its range
//! and the grid. The image's gradient is computed in the same way from the grid, phase by phase.
//!
//! Outputs are added in the order of the taps, and the partial sums of a weight's gradient do not depend on the CPU, so
//! that neither the number of threads nor the SIMD units change a bit.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use crate::cpu::own::conv::axis::Axis;
use crate::cpu::own::conv::geometry::Conv;
use crate::cpu::own::each_row;
use crate::cpu::own::kernel::Shared;
use crate::cpu::own::scratch::with_scratch;
use crate::cpu::widest::widest;
use crate::host::HostKernels;

/// Number of outputs that are computed together, and of partial sums of a weight's gradient.
const LANES: usize = 16;
/// Number of blocks of `LANES` outputs whose sums are kept in registers.
const BLOCKS: usize = 4;
/// Number of weights whose gradients are summed together.
const TAPS: usize = 5;
/// Maximum number of floats of a plane's copies: half of a second-level cache of 1 MiB.
const ROOM: usize = 1 << 17;
/// Maximum number of floats in the copies that are read once for each group of `TAPS` weights, if there are several
/// copies: a first-level cache of 32 KiB.
const NEAR: usize = 1 << 13;
/// Number of positions of a plane after which partial sums are added to those in float64.
const LONG: usize = 1 << 12;

/// Copies a row that is usually short.
#[inline(always)]
fn copy_row(from: &[f32], to: &mut [f32]) {
    /// Copies `N` floats at a time; the last copy may overlap the one before it.
    #[inline(always)]
    fn by<const N: usize>(from: &[f32], to: &mut [f32]) {
        for (from, to) in from.chunks_exact(N).zip(to.chunks_exact_mut(N)) {
            to.copy_from_slice(from);
        }
        let last = from.len() - N;
        to[last..].copy_from_slice(&from[last..]);
    }
    match from.len() {
        16.. => by::<16>(from, to),
        8.. => by::<8>(from, to),
        4.. => by::<4>(from, to),
        _ => to.iter_mut().zip(from).for_each(|(to, x)| *to = *x),
    }
}

/// A rectangle of elements that a plane and its copy share.
#[derive(Clone, Debug)]
struct Part {
    /// Number of rows and columns.
    size: [usize; 2],
    /// Offset in the plane of the first element, and strides of rows and columns.
    first: usize,
    strides: [usize; 2],
    /// Offset in the copy of the first element; rows of it have the stride of the copy.
    at: usize,
}

impl Part {
    /// The part at these rows and columns of a copy, whose first row and column have the given coordinates in a plane
    /// with rows of `width` elements.
    fn of([down, across]: [(Range<usize>, usize); 2], steps: [usize; 2], width: usize, pitch: usize) -> Part {
        let ((rows, row), (columns, column)) = (down, across);
        Part {
            size: if columns.is_empty() { [0, 0] } else { [rows.len(), columns.len()] },
            first: row * width + column,
            strides: [steps[0] * width, steps[1]],
            at: rows.start * pitch + columns.start,
        }
    }

    /// Copies the elements from a plane to its copy, which has rows of `pitch` elements.
    #[inline(always)]
    fn load(&self, plane: &[f32], copy: &mut [f32], pitch: usize) {
        let ([rows, columns], [down, across]) = (self.size, self.strides);
        for row in 0..rows {
            let to = &mut copy[self.at + row * pitch..][..columns];
            let from = &plane[self.first + row * down..];
            match across {
                1 => copy_row(&from[..columns], to),
                // The most frequent stride, as a constant that the compiler can use.
                2 => to.iter_mut().zip(from.iter().step_by(2)).for_each(|(to, x)| *to = *x),
                _ => to.iter_mut().zip(from.iter().step_by(across)).for_each(|(to, x)| *to = *x),
            }
        }
    }

    /// Copies the elements from a plane's copy to the plane.
    #[inline(always)]
    fn store(&self, copy: &[f32], plane: &mut [f32], pitch: usize) {
        let ([rows, columns], [down, across]) = (self.size, self.strides);
        for row in 0..rows {
            let from = &copy[self.at + row * pitch..][..columns];
            let to = &mut plane[self.first + row * down..];
            match across {
                1 => copy_row(from, &mut to[..columns]),
                2 => to.iter_mut().step_by(2).zip(from).for_each(|(to, x)| *to = *x),
                _ => to.iter_mut().step_by(across).zip(from).for_each(|(to, x)| *to = *x),
            }
        }
    }
}

/// A tap of the filter, and the offset in the copies of the element that it reads for the first output.
#[derive(Clone, Copy, Debug)]
struct Tap {
    number: usize,
    offset: usize,
}

/// Computation of a part of the outputs.
#[derive(Clone, Debug)]
struct Step {
    taps: SmallVec<[Tap; 9]>,
    /// Rectangle of the outputs that the step computes.
    to: Part,
}

/// A depthwise convolution of planes, in one direction.
#[derive(Clone, Debug)]
struct Sliding {
    /// Parts of a plane that are copied.
    from: SmallVec<[Part; 1]>,
    steps: SmallVec<[Step; 1]>,
    /// Number of elements of a plane that is read, and of one that is computed.
    sizes: [usize; 2],
    /// Stride of the copies' rows.
    pitch: usize,
    /// Number of floats of a plane's copies, with those that blocks read after the last output.
    room: usize,
    /// Number of positions of outputs, a multiple of `LANES`.
    positions: usize,
}

/// Returns the taps that read pixels of the phases that `reads` accepts.
fn taps(
    [y, x]: [&Axis; 2],
    reads: impl Fn([usize; 2]) -> bool,
    offset: impl Fn([(usize, usize); 2]) -> usize,
) -> SmallVec<[Tap; 9]> {
    let all = y.taps.iter().flat_map(|down| x.taps.iter().map(move |across| [*down, *across]));
    all.enumerate()
        .filter(|(_, [down, across])| reads([y.phases[down.0], x.phases[across.0]]))
        .map(|(number, tap)| Tap { number, offset: offset(tap) })
        .collect()
}

/// Number of positions of `rows` rows of `columns` outputs, rounded up.
fn positions([rows, columns]: [usize; 2], pitch: usize) -> usize {
    ((rows - 1) * pitch + columns).next_multiple_of(LANES)
}

impl Sliding {
    /// From the image to the grid.
    fn forward(conv: &Conv) -> Sliding {
        let [y, x] = [0, 1].map(|d| Axis::of(conv, d));
        let (pitch, rows) = (x.out + x.reach, y.out + y.reach);
        let phases =
            (0..y.phases.len()).flat_map(|down| (0..x.phases.len()).map(move |across| [down, across]));
        let from = phases.enumerate().map(|(number, [down, across])| {
            let mut part = Part::of(
                [y.inside(down, 0, y.out), x.inside(across, 0, x.out)],
                [y.stride, x.stride],
                x.size,
                pitch,
            );
            part.at += number * rows * pitch;
            part
        });
        let offset = |[down, across]: [(usize, usize); 2]| {
            ((down.0 * x.phases.len() + across.0) * rows + down.1) * pitch + across.1
        };
        let to = Part { size: conv.out, first: 0, strides: [x.out, 1], at: 0 };
        let taps = taps([&y, &x], |_| true, offset);
        Sliding {
            from: from.collect(),
            steps: SmallVec::from_iter([Step { taps, to }]),
            sizes: [conv.size[0] * conv.size[1], conv.pixels()],
            pitch,
            room: y.phases.len() * x.phases.len() * rows * pitch + LANES,
            positions: positions(conv.out, pitch),
        }
    }

    /// From the grid to the image.
    fn backward(conv: &Conv) -> Sliding {
        let axes = [0, 1].map(|d| Axis::of(conv, d));
        // A phase's positions begin with those of the first pixels.
        let first = axes.each_ref().map(|axis| axis.padding / axis.stride);
        let n = [0, 1].map(|d| (axes[d].size + axes[d].padding - 1) / axes[d].stride + 1 - first[d]);
        let [y, x] = &axes;
        let pitch = n[1] + x.reach;
        // Position `p` of a phase reads grid element `first + p - offset` with a tap of this offset.
        let seen = [0, 1].map(|d| -> (Range<usize>, usize) {
            let (axis, skipped) = (&axes[d], first[d].saturating_sub(axes[d].reach));
            let begin = (axis.reach + skipped - first[d]).min(n[d] + axis.reach);
            (begin..(begin + axis.out.saturating_sub(skipped)).min(n[d] + axis.reach), skipped)
        });
        let from = Part::of(seen, [1, 1], x.out, pitch);
        let phases = (0..y.stride).flat_map(|down| (0..x.stride).map(move |across| [down, across]));
        let steps = phases.map(|[down, across]| {
            let seen = [y.pixels(down, first[0]), x.pixels(across, first[1])];
            let to = Part::of(seen, [y.stride, x.stride], x.size, pitch);
            let offset = |tap: [(usize, usize); 2]| (y.reach - tap[0].1) * pitch + x.reach - tap[1].1;
            Step { taps: taps([y, x], |phases| phases == [down, across], offset), to }
        });
        Sliding {
            from: SmallVec::from_iter([from]),
            steps: steps.collect(),
            sizes: [conv.pixels(), conv.size[0] * conv.size[1]],
            pitch,
            room: (n[0] + y.reach) * pitch + LANES,
            positions: positions(n, pitch),
        }
    }

    /// Number of multiplications of a plane.
    fn products(&self) -> usize {
        self.steps.iter().map(|step| step.taps.len()).sum::<usize>() * self.positions
    }

    /// Computes all planes.
    ///
    /// # Safety
    /// `from`, `weight` and `to` have `n * channels` planes, a filter per channel, and `n * channels` planes. During the
    /// call, nobody writes those that are read or uses the one that is written.
    unsafe fn run(
        &self,
        host: &dyn HostKernels,
        [n, channels, filter]: [usize; 3],
        [from, weight, to]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        let done = AtomicBool::new(true);
        each_row(host, n * channels, self.products() / 4, &|begin, end| {
            let found = with_scratch(self.room + self.positions, |room| {
                let (copy, sums) = room.split_at_mut(self.room);
                copy.fill(0.0);
                for plane in begin..end {
                    let channel = plane % channels;
                    // SAFETY: the planes, the filter and the bias of this channel exist, and one thread alone writes
                    // a plane.
                    let (from, weight, to, start) = unsafe {
                        (
                            from.read(plane * self.sizes[0], self.sizes[0]),
                            weight.read(channel * filter, filter),
                            to.slice(plane * self.sizes[1], self.sizes[1]),
                            bias.map_or(0.0, |bias| *bias.at(channel)),
                        )
                    };
                    compute(self, [from, weight], start, copy, sums, to);
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
    /// Computes a plane from another one and a filter. `copy` is zero outside of the copied parts.
    fn compute(
        sliding: &Sliding, given: [&[f32]; 2], start: f32, copy: &mut [f32], sums: &mut [f32], to: &mut [f32],
    ) => run_compute
}

#[inline(always)]
fn run_compute(
    sliding: &Sliding,
    [from, weight]: [&[f32]; 2],
    start: f32,
    copy: &mut [f32],
    sums: &mut [f32],
    to: &mut [f32],
) {
    for part in &sliding.from {
        part.load(from, copy, sliding.pitch);
    }
    for step in &sliding.steps {
        let taps: SmallVec<[(usize, f32); 49]> =
            step.taps.iter().map(|tap| (tap.offset, weight[tap.number])).collect();
        let (blocks, rest) = sums.split_at_mut(sums.len() / (BLOCKS * LANES) * BLOCKS * LANES);
        for (number, block) in blocks.as_chunks_mut::<{ BLOCKS * LANES }>().0.iter_mut().enumerate() {
            *block = sums_of(&taps, start, &copy[number * BLOCKS * LANES..]);
        }
        for (number, block) in rest.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            *block = sums_of(&taps, start, &copy[blocks.len() + number * LANES..]);
        }
        step.to.store(sums, to, sliding.pitch);
    }
}

/// Returns the sums of the elements that taps read times their weights, for the first `N` positions of `copy`.
#[inline(always)]
fn sums_of<const N: usize>(taps: &[(usize, f32)], start: f32, copy: &[f32]) -> [f32; N] {
    let mut sums = [start; N];
    for (offset, weight) in taps {
        let range = &copy[*offset..][..N];
        for (sum, x) in sums.iter_mut().zip(range) {
            *sum = weight.mul_add(*x, *sum);
        }
    }
    sums
}

widest! {
    /// Adds products of the elements of copies and of grids to the gradients of the weights.
    fn accumulate(sliding: &Sliding, copies: &[f32], grids: &[f32], to: &mut [f64]) => run_accumulate
}

#[inline(always)]
fn run_accumulate(sliding: &Sliding, copies: &[f32], grids: &[f32], to: &mut [f64]) {
    let taps = &sliding.steps[0].taps;
    for begin in (0..sliding.positions).step_by(LONG) {
        let range = begin..sliding.positions.min(begin + LONG);
        for (taps, to) in taps.chunks(TAPS).zip(to.chunks_mut(TAPS)) {
            let last = taps[taps.len() - 1];
            let offsets: [usize; TAPS] = std::array::from_fn(|i| taps.get(i).unwrap_or(&last).offset);
            let mut lanes = [[0.0_f32; LANES]; TAPS];
            let planes = copies.chunks_exact(sliding.room).zip(grids.chunks_exact(sliding.positions));
            for (copy, grid) in planes {
                let (elements, grid) =
                    (offsets.map(|offset| &copy[offset..][range.clone()]), &grid[range.clone()]);
                for (number, grid) in grid.as_chunks::<LANES>().0.iter().enumerate() {
                    for (lanes, elements) in lanes.iter_mut().zip(&elements) {
                        let elements = &elements[number * LANES..][..LANES];
                        for ((lane, x), g) in lanes.iter_mut().zip(elements).zip(grid) {
                            *lane = x.mul_add(*g, *lane);
                        }
                    }
                }
            }
            for (to, lanes) in to.iter_mut().zip(&lanes) {
                *to += lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>();
            }
        }
    }
}

/// Whether this module computes a depthwise convolution.
pub(super) fn fits(conv: &Conv) -> bool {
    [Sliding::forward(conv), Sliding::backward(conv)].iter().all(|way| way.room + way.positions <= ROOM)
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
    let sizes = [conv.n, conv.outputs, conv.filter[0] * conv.filter[1]];
    // SAFETY: the image has `n * outputs` planes, as the grid has, which this function requires.
    unsafe { Sliding::forward(conv).run(host, sizes, all, bias) }
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
    let sizes = [conv.n, conv.outputs, conv.filter[0] * conv.filter[1]];
    // SAFETY: the grid has `n * outputs` planes, as the image has, which this function requires.
    unsafe { Sliding::backward(conv).run(host, sizes, all, bias) }
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
    let ([pixels, outputs], channels) = (sliding.sizes, conv.outputs);
    let together = (NEAR / (sliding.room + sliding.positions)).clamp(1, conv.n);
    let done = AtomicBool::new(true);
    each_row(host, channels, conv.n * sliding.products() / 4, &|begin, end| {
        let found = with_scratch(together * (sliding.room + sliding.positions), |room| {
            room.fill(0.0);
            let (copies, grids) = room.split_at_mut(together * sliding.room);
            for channel in begin..end {
                let mut sums: SmallVec<[f64; 49]> = SmallVec::from_elem(0.0, taps);
                for first in (0..conv.n).step_by(together) {
                    let n = together.min(conv.n - first);
                    let copies = &mut copies[..n * sliding.room];
                    let grids = &mut grids[..n * sliding.positions];
                    for i in 0..n {
                        let plane = (first + i) * channels + channel;
                        // SAFETY: the planes exist and are only read.
                        let (image, grid) = unsafe {
                            (image.read(plane * pixels, pixels), grid.read(plane * outputs, outputs))
                        };
                        for part in &sliding.from {
                            part.load(image, &mut copies[i * sliding.room..], sliding.pitch);
                        }
                        sliding.steps[0].to.load(grid, &mut grids[i * sliding.positions..], sliding.pitch);
                    }
                    accumulate(&sliding, copies, grids, &mut sums);
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
