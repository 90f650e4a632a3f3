//! Depthwise convolutions of channels-last tensors: each channel has a filter of its own.
//!
//! **Why.** A matrix product per channel would have one row. oneDNN's kernels compute at 4 to 30 GFLOP/s here.
//! **Strategy.** Vectors hold adjacent channels. An output is the sum of the pixels that it reads times weights, tap by
//! tap. Adjacent outputs that read through the same taps are computed together. The gradient of a weight is the sum of
//! products of pixels that outputs read through its tap and the gradients of these outputs.
//!
//! Channels are computed independently of each other, outputs are added in the order of the taps, and the sums of
//! gradients are split by sizes alone. So neither the number of threads nor the SIMD units change a bit.

use std::ops::Range;

use smallvec::SmallVec;

use crate::channels_last::{Order, Planes, strips};
use crate::kernels::conv::geometry::Conv;
use crate::kernels::conv::reads::Reads;
use crate::kernels::each_row;
use crate::kernels::kernel::SendPtr;
use crate::kernels::scratch::{with_doubles, with_scratch};
use crate::widest::widest;
use tandem_executor::host::HostKernels;

/// Largest number of adjacent channels that are computed together.
const WIDTH: usize = 32;
/// Number of adjacent outputs that are computed together.
const OUTPUTS: usize = 4;
/// Largest number of partial sums of a weight's gradient, and smallest number of pixels of a partial sum.
const SPLITS: usize = 16;
const PIXELS: usize = 256;
/// Number of pixels whose products are added in float32 before they are added to a sum in float64.
const LONG: usize = 64;

/// Calls `$body` with constants: the number of adjacent channels, and the number of pixels whose products are added to
/// sums of their own.
macro_rules! by_width {
    ($width:expr, $body:ident($($arg:expr),*)) => {
        match $width {
            WIDTH => $body::<WIDTH, 2>($($arg),*),
            16 => $body::<16, 4>($($arg),*),
            8 => $body::<8, 4>($($arg),*),
            4 => $body::<4, 4>($($arg),*),
            _ => $body::<1, 4>($($arg),*),
        }
    };
}

/// The kernels of a depthwise convolution.
#[derive(Debug)]
pub(super) struct Depthwise {
    pub(super) conv: Conv,
    pub(super) to_grid: Map,
    pub(super) to_image: Map,
    /// For each tap, rows and columns of the grid that read pixels of the image through it.
    taps: Vec<[Lane; 2]>,
}

/// Outputs along one dimension that read pixels of the source through a tap, and the pixel that output 0 would read.
type Lane = (Range<usize>, isize);

/// The kernel of a grid or an image.
#[derive(Debug)]
pub(super) struct Map {
    /// For each row of the result, pairs of a row of the filter and the row of the source that is read through it.
    rows: Vec<SmallVec<[(usize, usize); 4]>>,
    /// The outputs of a row.
    spans: Vec<Span>,
    /// Sizes of the source and of the result.
    source: [usize; 2],
    result: [usize; 2],
    /// Distance between the pixels that neighbouring outputs of a span read.
    step: usize,
    /// Distance between neighbouring outputs of a span.
    stride: usize,
}

/// Outputs of a row, at equal distances, that read through the same columns of the filter.
#[derive(Debug)]
struct Span {
    /// First output, and number of outputs.
    first: usize,
    count: usize,
    /// Pairs of a column of the filter and the column of the source that the first output reads through it.
    taps: SmallVec<[(usize, usize); 4]>,
}

impl Span {
    /// Splits all outputs along a dimension into spans.
    fn all(reads: &Reads) -> Vec<Span> {
        let mut spans = Vec::new();
        for phase in &reads.phases {
            let inside = || phase.taps.iter().map(|(tap, start)| (*tap, *start, reads.inside(phase, *start)));
            let mut ends: Vec<usize> = inside().flat_map(|(_, _, range)| [range.start, range.end]).collect();
            ends.extend([0, phase.count]);
            ends.sort_unstable();
            ends.dedup();
            for pair in ends.windows(2) {
                let read = inside().filter(|(_, _, range)| range.contains(&pair[0]));
                let at = |start: isize| (pair[0] * reads.step).wrapping_add_signed(start);
                spans.push(Span {
                    first: phase.first + pair[0] * reads.stride,
                    count: pair[1] - pair[0],
                    taps: read.map(|(tap, start, _)| (tap, at(start))).collect(),
                });
            }
        }
        spans
    }
}

/// A row of a result that is being computed.
struct Line<'l> {
    map: &'l Map,
    /// Rows of the filter and of the source, as in [`Map::rows`].
    rows: &'l [(usize, usize)],
    channels: usize,
    /// Number of columns of the filter.
    filter: usize,
    /// The source, the weight `[taps, channels]`, the bias, and the row.
    from: SendPtr<f32>,
    weight: SendPtr<f32>,
    bias: Option<SendPtr<f32>>,
    to: SendPtr<f32>,
}

impl Map {
    fn of([down, across]: [Reads; 2], result: [usize; 2]) -> Map {
        let mut rows = vec![SmallVec::new(); result[0]];
        for span in Span::all(&down) {
            for at in 0..span.count {
                let read = span.taps.iter().map(|(tap, row)| (*tap, row + at * down.step));
                rows[span.first + at * down.stride] = read.collect();
            }
        }
        let source = [down.source, across.source];
        Map { rows, spans: Span::all(&across), source, result, step: across.step, stride: across.stride }
    }

    /// Computes all images or grids, with an optional bias per channel. Returns false if there is no memory for the
    /// reordered weight.
    ///
    /// # Safety
    /// - `from` and `to` point to channels-last tensors with the sizes of the convolution.
    /// - `weight` points to the convolution's row-major weight.
    /// - During the call, nobody writes `from`, the weight or the bias, and nobody else uses `to`.
    pub(super) unsafe fn compute(
        &self,
        host: &dyn HostKernels,
        conv: &Conv,
        [from, weight, to]: [SendPtr<f32>; 3],
        bias: Option<SendPtr<f32>>,
    ) -> bool {
        let (channels, taps) = (conv.outputs, conv.filter[0] * conv.filter[1]);
        with_scratch(channels * taps, |reordered| {
            let reordered = SendPtr(reordered.as_mut_ptr());
            let filters = Planes { images: 1, channels, pixels: taps };
            // SAFETY: the weight has a filter per channel, and the scratch buffer is as large.
            unsafe { filters.reorder(host, weight.get(), reordered.get(), Order::ChannelsLast) };
            let ([height, width], [rows, columns]) = (self.source, self.result);
            each_row(host, conv.n * rows, columns * channels * taps / 4, &|begin, end| {
                for line in begin..end {
                    // SAFETY: the image and the row exist, and one thread alone computes a row.
                    unsafe {
                        compute_line(&Line {
                            map: self,
                            rows: &self.rows[line % rows],
                            channels,
                            filter: conv.filter[1],
                            from: SendPtr(from.at(line / rows * height * width * channels)),
                            weight: reordered,
                            bias,
                            to: SendPtr(to.at(line * columns * channels)),
                        });
                    }
                }
            });
            true
        })
    }
}

widest! {
    /// Computes a row of a result.
    ///
    /// # Safety
    /// - The line's addresses point to a source, a weight, a bias and a row of the line's sizes.
    /// - During the call, nobody writes the source, the weight or the bias, and nobody else uses the row.
    unsafe fn compute_line(line: &Line<'_>) => run_line
}

/// # Safety
/// The requirements are those of [`compute_line`].
#[inline(always)]
unsafe fn run_line(line: &Line<'_>) {
    for (channel, width) in strips(line.channels, WIDTH) {
        // SAFETY: the channels are some of the line's.
        unsafe { by_width!(width, strip(line, channel)) }
    }
}

/// Computes `W` channels of a row.
///
/// # Safety
/// The requirements are those of [`compute_line`], and the channels from `channel` on exist.
#[inline(always)]
unsafe fn strip<const W: usize, const LANES: usize>(line: &Line<'_>, channel: usize) {
    for span in &line.map.spans {
        let whole = span.count / OUTPUTS * OUTPUTS;
        // SAFETY: the outputs are some of the span's.
        unsafe {
            for at in (0..whole).step_by(OUTPUTS) {
                outputs::<W, OUTPUTS>(line, span, at, channel);
            }
            for at in whole..span.count {
                outputs::<W, 1>(line, span, at, channel);
            }
        }
    }
}

/// Computes `W` channels of the outputs `at..at + N` of a span.
///
/// # Safety
/// The requirements are those of [`compute_line`]; the outputs and the channels from `channel` on exist.
#[inline(always)]
unsafe fn outputs<const W: usize, const N: usize>(line: &Line<'_>, span: &Span, at: usize, channel: usize) {
    let (map, channels) = (line.map, line.channels);
    // SAFETY: taps of rows and spans read pixels of the source, and the weight has all taps.
    unsafe {
        let start = line.bias.map_or([0.0; W], |bias| *bias.at(channel).cast::<[f32; W]>());
        let mut sums = [start; N];
        for (down, row) in line.rows {
            for (across, column) in &span.taps {
                let weight =
                    *line.weight.at((down * line.filter + across) * channels + channel).cast::<[f32; W]>();
                let pixel = row * map.source[1] + column + at * map.step;
                let from = line.from.at(pixel * channels + channel);
                for (n, sums) in sums.iter_mut().enumerate() {
                    let x = *from.add(n * map.step * channels).cast::<[f32; W]>();
                    for c in 0..W {
                        sums[c] = weight[c].mul_add(x[c], sums[c]);
                    }
                }
            }
        }
        for (n, sums) in sums.iter().enumerate() {
            let pixel = span.first + (at + n) * map.stride;
            *line.to.at(pixel * channels + channel).cast::<[f32; W]>() = *sums;
        }
    }
}

/// A part of a weight's gradient: some channels, and some rows of the batch's grids.
struct Part<'p> {
    of: &'p Depthwise,
    channel: usize,
    width: usize,
    lines: Range<usize>,
    image: SendPtr<f32>,
    grid: SendPtr<f32>,
    /// Sums `[taps, channels]` of the part, from its first channel on.
    to: SendPtr<f64>,
}

widest! {
    /// Computes the sums of a part.
    ///
    /// # Safety
    /// - The part's addresses point to images, grids and sums of its sizes.
    /// - During the call, nobody writes the images or the grids, and nobody else uses the sums.
    unsafe fn compute_part(part: &Part<'_>) => run_part
}

/// # Safety
/// The requirements are those of [`compute_part`].
#[inline(always)]
unsafe fn run_part(part: &Part<'_>) {
    // SAFETY: this function has the requirements of `sums`.
    unsafe { by_width!(part.width, sums(part)) }
}

/// # Safety
/// The requirements are those of [`compute_part`], for a part of `W` channels.
#[inline(always)]
unsafe fn sums<const W: usize, const LANES: usize>(part: &Part<'_>) {
    let conv = &part.of.conv;
    let (channels, [height, width], [rows, columns]) = (conv.outputs, conv.size, conv.out);
    for tap in 0..part.of.taps.len() {
        // SAFETY: there is a sum for each tap and channel.
        unsafe { *part.to.at(tap * channels).cast::<[f64; W]>() = [0.0; W] };
    }
    for first in part.lines.clone().step_by((LONG / columns).max(1)) {
        let near = first..part.lines.end.min(first + (LONG / columns).max(1));
        for (tap, [(down, y), (across, x)]) in part.of.taps.iter().enumerate() {
            if across.is_empty() {
                continue;
            }
            let mut lanes = [[0.0; W]; LANES];
            for line in near.clone() {
                let (image, row) = (line / rows, line % rows);
                if !down.contains(&row) {
                    continue;
                }
                let y = (row * conv.stride[0]).wrapping_add_signed(*y);
                let x = (across.start * conv.stride[1]).wrapping_add_signed(*x);
                // SAFETY: the outputs of a tap read pixels of the image.
                unsafe {
                    let grid = part.grid.at((line * columns + across.start) * channels + part.channel);
                    let image = part.image.at(((image * height + y) * width + x) * channels + part.channel);
                    let steps = [channels, conv.stride[1] * channels];
                    multiply(across.len(), [grid, image], steps, &mut lanes);
                }
            }
            // SAFETY: there is a sum for each tap and channel.
            let to = unsafe { &mut *part.to.at(tap * channels).cast::<[f64; W]>() };
            for lane in &lanes {
                for c in 0..W {
                    to[c] += f64::from(lane[c]);
                }
            }
        }
    }
}

/// Adds the products of the `W` channels of `count` pixels to one lane after the other.
///
/// # Safety
/// - `grid` and `image` point to the channels of the first pixel, and the other pixels follow at the distances `steps`.
/// - Nobody writes the pixels during the call.
#[inline(always)]
unsafe fn multiply<const W: usize, const LANES: usize>(
    count: usize,
    [grid, image]: [*const f32; 2],
    [grid_step, image_step]: [usize; 2],
    lanes: &mut [[f32; W]; LANES],
) {
    let add = |lane: &mut [f32; W], at: usize| {
        // SAFETY: the pixel is one of the given ones.
        unsafe {
            let g = *grid.add(at * grid_step).cast::<[f32; W]>();
            let x = *image.add(at * image_step).cast::<[f32; W]>();
            for c in 0..W {
                lane[c] = g[c].mul_add(x[c], lane[c]);
            }
        }
    };
    let whole = count / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        for (n, lane) in lanes.iter_mut().enumerate() {
            add(lane, at + n);
        }
    }
    // The lanes of the last pixels are indexed by a constant, so that they stay in registers.
    for (n, lane) in lanes.iter_mut().enumerate().take(LANES - 1) {
        if whole + n < count {
            add(lane, whole + n);
        }
    }
}

impl Depthwise {
    pub(super) fn of(conv: Conv) -> Depthwise {
        let map = |of: fn(&Conv, usize) -> Reads, result| Map::of([0, 1].map(|d| of(&conv, d)), result);
        let lanes = |d: usize| {
            let reads = Reads::of_grid(&conv, d);
            let phase = &reads.phases[0];
            phase.taps.iter().map(|(_, start)| (reads.inside(phase, *start), *start)).collect::<Vec<Lane>>()
        };
        let (rows, columns) = (lanes(0), lanes(1));
        let taps =
            rows.iter().flat_map(|row| columns.iter().map(|column| [row.clone(), column.clone()])).collect();
        Depthwise {
            to_grid: map(Reads::of_grid, conv.out),
            to_image: map(Reads::of_image, conv.size),
            taps,
            conv,
        }
    }

    /// Computes the weight gradient from an image and a grid. Returns false if there is no memory.
    ///
    /// # Safety
    /// - The addresses point to dense tensors with the sizes of the convolution.
    /// - Images and grids are channels last.
    /// - During the call, nobody writes the image or the grid, and nobody else uses the weight gradient.
    pub(super) unsafe fn to_weight(
        &self,
        host: &dyn HostKernels,
        [image, grid, weight]: [SendPtr<f32>; 3],
    ) -> bool {
        let (conv, channels, taps) = (&self.conv, self.conv.outputs, self.taps.len());
        let lines = conv.n * conv.out[0];
        let splits = (conv.rows() / PIXELS).clamp(1, SPLITS.min(lines));
        let strips: Vec<(usize, usize)> = strips(channels, WIDTH).collect();
        with_doubles(splits * taps * channels, |partial| {
            let to = SendPtr(partial.as_mut_ptr());
            let each = conv.rows() / splits * WIDTH.min(channels) * taps / 4;
            each_row(host, splits * strips.len(), each, &|begin, end| {
                for item in begin..end {
                    let (split, (channel, width)) = (item / strips.len(), strips[item % strips.len()]);
                    let lines = lines * split / splits..lines * (split + 1) / splits;
                    // SAFETY: the channels and the lines exist, and one thread alone computes a part's sums.
                    unsafe {
                        let to = SendPtr(to.at(split * taps * channels + channel));
                        compute_part(&Part { of: self, channel, width, lines, image, grid, to });
                    }
                }
            });
            // SAFETY: the weight has a filter per channel, which nobody else uses.
            let weight = unsafe { weight.slice(0, channels * taps) };
            for (channel, filter) in weight.chunks_exact_mut(taps).enumerate() {
                for (tap, to) in filter.iter_mut().enumerate() {
                    let sums = partial[tap * channels + channel..].iter().step_by(taps * channels);
                    *to = sums.sum::<f64>() as f32;
                }
            }
            true
        })
    }
}
