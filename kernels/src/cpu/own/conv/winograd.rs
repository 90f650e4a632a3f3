//! Convolutions with 3x3 filters and stride 1 by Winograd's minimal filtering F(2x2, 3x3), which takes 16 instead of
//! 36 multiplications for 2x2 outputs.
//!
//! Tiles of 4x4 pixels, which overlap by 2 pixels, and filters are transformed to 16 *points* each. At each point,
//! BLAS multiplies the matrix of the filters by the matrix of the tiles. The products are transformed to 2x2 outputs.
//! The gradient of the image is such a convolution too: its filters are turned by 180 degrees, which exchanges points.
//! The weight gradient is F(3x3, 2x2), whose transforms are the transposed ones.
//!
//! Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015, section 4. Blocks, and the parts
//! that threads share, depend on sizes alone.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cpu::own::conv::columns::{add_all, copy};
use crate::cpu::own::conv::geometry::{Conv, matrix, product, with_scratch};
use crate::cpu::own::each_row;
use crate::cpu::own::kernel::Shared;
use crate::cpu::widest::widest;
use crate::host::HostKernels;

/// Number of points of a transformed tile or filter, 4 vertically by 4 horizontally.
const POINTS: usize = 16;
/// Number of elements of a filter.
const TAPS: usize = 9;
/// Largest number of floats in the points of a block: half of a second-level cache.
const ROOM: usize = 1 << 18;
/// Smallest and largest number of tiles of a block.
const TILES: [usize; 2] = [32, 512];
/// Largest number of parts that work is split into.
const PARTS: usize = 8;
/// Largest number of channels that one matrix product adds up. Sums of more channels are less accurate.
const DEPTH: usize = 128;
/// Largest number of floats in the partial sums of the weight gradient.
const SUMS: usize = 1 << 20;
/// Smallest number of tiles of a partial sum of the weight gradient.
const LONG: usize = 128;
/// Smallest number of channels of a part of the weight gradient.
const CHANNELS: usize = 32;
/// Number of pairs of pixels that are transformed at once: together with their points they fit in a first-level cache.
const PAIRS: usize = 1 << 10;
/// Number of floats after the end of a row or a buffer that vectors may read or overwrite. It is a cache line, which
/// also keeps the rows of the points in different sets of a cache.
const SLACK: usize = 16;

/// The tiles of a batch of images. A *tile row* has the tiles of two output rows of an image.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    /// Height and width of an input image.
    size: [usize; 2],
    /// Height and width of an output image.
    out: [usize; 2],
    padding: [usize; 2],
    /// Number of tile rows of an image.
    down: usize,
    /// Number of tiles of a tile row.
    across: usize,
    /// Number of tile rows of the batch.
    rows: usize,
}

/// Consecutive tile rows of one image.
#[derive(Clone, Copy)]
struct Strip {
    picture: usize,
    /// First tile row in the image.
    row: usize,
    rows: usize,
    /// Number of tiles of the block before the strip.
    at: usize,
}

impl Tiling {
    fn of(n: usize, size: [usize; 2], out: [usize; 2], padding: [usize; 2]) -> Tiling {
        let down = out[0].div_ceil(2);
        Tiling { size, out, padding, down, across: out[1].div_ceil(2), rows: n * down }
    }

    /// The tiles from which the grid is computed.
    fn of_image(conv: &Conv) -> Tiling {
        Tiling::of(conv.n, conv.size, conv.out, conv.padding)
    }

    /// The tiles from which the gradient of the image is computed.
    fn of_grid(conv: &Conv) -> Tiling {
        Tiling::of(conv.n, conv.out, conv.size, conv.padding.map(|p| 2 - p))
    }

    fn tiles(&self) -> usize {
        self.rows * self.across
    }

    /// Number of parts that the tile rows are split into.
    fn parts(&self) -> usize {
        (self.tiles() / TILES[0]).clamp(1, PARTS).min(self.rows)
    }

    /// Largest number of tile rows of a block if a tile has `channels` channels, inputs and outputs together.
    fn block(&self, channels: usize) -> usize {
        let tiles = (ROOM / (POINTS * channels)).clamp(TILES[0], TILES[1]);
        (tiles / self.across).max(1)
    }

    /// The strips of a block.
    fn strips(&self, block: Range<usize>) -> impl Iterator<Item = Strip> {
        let Tiling { down, across, .. } = *self;
        let pictures = block.start / down..(block.end - 1) / down + 1;
        pictures.map(move |picture| {
            let rows = (picture * down).max(block.start)..((picture + 1) * down).min(block.end);
            let at = (rows.start - block.start) * across;
            Strip { picture, row: rows.start - picture * down, rows: rows.len(), at }
        })
    }

    /// Number of floats of [`Room`] for blocks of `rows` tile rows.
    fn room(&self, rows: usize) -> usize {
        8 * rounded((2 * (rows + 1) * self.across).max(PAIRS) + SLACK)
    }
}

/// Number of floats of a buffer of `n`, with slack.
fn rounded(n: usize) -> usize {
    n.next_multiple_of(SLACK) + SLACK
}

/// The points of a block: `[POINTS, channels, ld]`, with slack after each point.
#[derive(Clone, Copy)]
struct Points {
    channels: usize,
    /// Number of floats of a channel at a point.
    ld: usize,
}

impl Points {
    fn of(channels: usize, tiles: usize) -> Points {
        Points { channels, ld: rounded(tiles) }
    }

    /// Index of a channel at a point.
    #[inline(always)]
    fn at(&self, point: usize, channel: usize) -> usize {
        point * (self.channels * self.ld + SLACK) + channel * self.ld
    }

    /// Number of floats.
    fn len(&self) -> usize {
        self.at(POINTS, 0)
    }
}

/// The part `number` of `parts` of `n` items.
fn part(n: usize, number: usize, parts: usize) -> Range<usize> {
    n * number / parts..n * (number + 1) / parts
}

/// Consecutive ranges of at most `most` items.
fn blocks(all: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    all.clone().step_by(most).map(move |from| from..(from + most).min(all.end))
}

/// Number of tiles or filters that are transformed at once.
const LANES: usize = 16;

type Lanes = [f32; LANES];

#[inline(always)]
fn zip(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Transforms 4 pixels to the points 0, 1, -1 and infinity.
#[inline(always)]
fn pixels_to_points([a, b, c, d]: [Lanes; 4]) -> [Lanes; 4] {
    [zip(a, c, |a, c| a - c), zip(b, c, |b, c| b + c), zip(c, b, |c, b| c - b), zip(b, d, |b, d| b - d)]
}

/// Transforms 4 points to 2 outputs.
#[inline(always)]
fn points_to_outputs([a, b, c, d]: [Lanes; 4]) -> [Lanes; 2] {
    let (sum, difference) = (zip(b, c, |b, c| b + c), zip(b, c, |b, c| b - c));
    [zip(a, sum, |a, s| a + s), zip(difference, d, |x, d| x - d)]
}

/// Transforms 2 gradients of outputs to points, by the transposed matrix of [`points_to_outputs`].
#[inline(always)]
fn outputs_to_points([a, b]: [Lanes; 2]) -> [Lanes; 4] {
    [a, zip(a, b, |a, b| a + b), zip(a, b, |a, b| a - b), b.map(|b| -b)]
}

/// Transforms 3 taps of a filter to points.
#[inline(always)]
fn taps_to_points([a, b, c]: [Lanes; 3]) -> [Lanes; 4] {
    let ends = zip(a, c, |a, c| 0.5 * (a + c));
    [a, zip(ends, b, |e, b| e + 0.5 * b), zip(ends, b, |e, b| e - 0.5 * b), c]
}

/// Transforms 4 points to the gradients of 3 taps, by the transposed matrix of [`taps_to_points`].
#[inline(always)]
fn points_to_taps([a, b, c, d]: [Lanes; 4]) -> [Lanes; 3] {
    let (sum, difference) = (zip(b, c, |b, c| 0.5 * (b + c)), zip(b, c, |b, c| 0.5 * (b - c)));
    [zip(a, sum, |a, s| a + s), difference, zip(sum, d, |s, d| s + d)]
}

/// Planes of some channels of all images of a batch.
#[derive(Clone, Copy)]
struct Planes {
    /// Address of the first channel's plane of the first image.
    first: Shared<f32>,
    /// Number of channels.
    channels: usize,
    /// Number of channels of an image.
    all: usize,
    /// Height and width of a plane.
    size: [usize; 2],
}

impl Planes {
    /// Some channels of a batch whose images have `all` channels.
    ///
    /// # Safety
    /// `batch` points to planes of this size, and the channels are among `all`.
    unsafe fn of(batch: Shared<f32>, channels: Range<usize>, all: usize, size: [usize; 2]) -> Planes {
        // SAFETY: an image has the channel, which this function requires.
        let first = Shared(unsafe { batch.at(channels.start * size[0] * size[1]) });
        Planes { first, channels: channels.len(), all, size }
    }

    /// Address of a row of a channel.
    ///
    /// # Safety
    /// The batch has such a row.
    #[inline(always)]
    unsafe fn row(&self, picture: usize, channel: usize, row: usize) -> *mut f32 {
        // SAFETY: the batch has the row, which this function requires.
        unsafe { self.first.at(((picture * self.all + channel) * self.size[0] + row) * self.size[1]) }
    }

    /// Copies rows of a channel to lines of `width` floats, the even and the odd ones `half` floats apart. The first
    /// line is row `top`, and begins at pixel `left`; both may be negative. Where there is no such row or pixel, `to`
    /// stays.
    ///
    /// # Safety
    /// The batch has the image and the channel, which nobody writes during the call.
    #[inline(always)]
    unsafe fn copy(
        &self,
        [picture, channel]: [usize; 2],
        [top, left]: [isize; 2],
        half: usize,
        width: usize,
        to: &mut [f32],
    ) {
        let [height, length] = self.size.map(|n| n as isize);
        let skipped = (-left).max(0) as usize;
        let (first, end) = (left.max(0), (left + width as isize).min(length));
        let n = (end - first).max(0) as usize;
        let lines = (-top).max(0)..(height - top).min((2 * (to.len() / (2 * width))) as isize);
        for line in lines {
            // SAFETY: the row and the pixels are inside the plane.
            let from = unsafe {
                let row = self.row(picture, channel, (top + line) as usize);
                std::slice::from_raw_parts(row.add(first as usize), n)
            };
            let line = line as usize;
            copy(from, &mut to[line % 2 * half + line / 2 * width + skipped..][..n]);
        }
    }
}

/// Intermediate values of a transform: two lists of pairs of pixels, and their 4 horizontal components. Lines of tile
/// rows are adjacent, so that short ones are transformed together; even lines come before odd ones.
struct Room<'r> {
    pairs: [&'r mut [f32]; 2],
    components: [&'r mut [f32]; 4],
}

impl<'r> Room<'r> {
    /// Divides `room`, of [`Tiling::room`] floats.
    fn of(room: &'r mut [f32]) -> Room<'r> {
        let n = room.len() / 8;
        let (left, room) = room.split_at_mut(2 * n);
        let (right, room) = room.split_at_mut(2 * n);
        let (a, room) = room.split_at_mut(n);
        let (b, room) = room.split_at_mut(n);
        let (c, d) = room.split_at_mut(n);
        Room { pairs: [left, right], components: [a, b, c, d] }
    }
}

widest! {
    /// Transforms the tiles of a block to points.
    ///
    /// # Safety
    /// `image` has the planes of the tiling's batch, which nobody writes during the call.
    unsafe fn take_tiles(
        tiling: &Tiling, block: Range<usize>, image: Planes, room: &mut [f32], to: &mut [f32],
    ) => run_take_tiles
}

/// # Safety
/// The requirements are those of [`take_tiles`].
#[inline(always)]
unsafe fn run_take_tiles(
    tiling: &Tiling,
    block: Range<usize>,
    image: Planes,
    room: &mut [f32],
    to: &mut [f32],
) {
    let Tiling { across, padding: [top, left], .. } = *tiling;
    let points = Points::of(image.channels, block.len() * across);
    let Room { mut pairs, components: [a, b, c, d] } = Room::of(room);
    for strip in tiling.strips(block) {
        let half = (strip.rows + 1) * across;
        for channels in blocks(0..image.channels, (PAIRS / (2 * half)).max(1)) {
            let n = (2 * half * channels.len()).next_multiple_of(SLACK);
            // A tile has the pixels of a pair and of the next one.
            for (pairs, shift) in pairs.iter_mut().zip([0, 2]) {
                pairs[..2 * n].fill(0.0);
                let first = [(2 * strip.row) as isize - top as isize, shift - left as isize];
                for (channel, to) in channels.clone().zip(pairs.chunks_exact_mut(4 * half)) {
                    // SAFETY: the image has the channels, and nobody writes them.
                    unsafe { image.copy([strip.picture, channel], first, 2 * half, 2 * across, to) };
                }
            }
            let [(p, _), (r, _)] = pairs.each_ref().map(|pairs| pairs[..2 * n].as_chunks::<2>());
            let components = a[..n].iter_mut().zip(&mut b[..n]).zip(c[..n].iter_mut().zip(&mut d[..n]));
            for (([p, q], [r, s]), ((a, b), (c, d))) in p.iter().zip(r).zip(components) {
                (*a, *b, *c, *d) = (p - r, q + r, r - q, q - s);
            }
            for (number, channel) in channels.enumerate() {
                let components = [&*a, b, c, d].map(|x| &x[number * 2 * half..]);
                let (lines, at) = ([0, half, across, half + across], points.at(0, channel) + strip.at);
                put_points(strip.rows * across, lines, components, pixels_to_points, points, &mut to[at..]);
            }
        }
    }
}

/// Transforms the components of `n` tiles vertically. `lines` are the indices of the lines of the first tile; `to`
/// begins at its first point.
#[inline(always)]
fn put_points<const L: usize>(
    n: usize,
    lines: [usize; L],
    components: [&[f32]; 4],
    transform: impl Fn([Lanes; L]) -> [Lanes; 4],
    points: Points,
    to: &mut [f32],
) {
    let end = n.next_multiple_of(LANES);
    assert!(components.iter().all(|x| lines.iter().all(|line| line + end <= x.len())));
    assert!(points.at(POINTS - 1, 0) + end <= to.len());
    for (x, from) in components.iter().enumerate() {
        for t in (0..end).step_by(LANES) {
            // SAFETY: the end of each line was checked above.
            let line = |line: usize| unsafe { from.as_ptr().add(line + t).cast::<Lanes>().read_unaligned() };
            for (y, point) in transform(lines.map(line)).iter().enumerate() {
                // SAFETY: the end of the last point was checked above.
                unsafe {
                    let to = to.as_mut_ptr().add(points.at(4 * y + x, 0) + t);
                    to.cast::<Lanes>().write_unaligned(*point);
                }
            }
        }
    }
}

widest! {
    /// Transforms the gradients of the outputs of a block to points.
    ///
    /// # Safety
    /// `grid` has the planes of the tiling's outputs, which nobody writes during the call.
    unsafe fn take_gradients(
        tiling: &Tiling, block: Range<usize>, grid: Planes, room: &mut [f32], to: &mut [f32],
    ) => run_take_gradients
}

/// # Safety
/// The requirements are those of [`take_gradients`].
#[inline(always)]
unsafe fn run_take_gradients(
    tiling: &Tiling,
    block: Range<usize>,
    grid: Planes,
    room: &mut [f32],
    to: &mut [f32],
) {
    let across = tiling.across;
    let points = Points::of(grid.channels, block.len() * across);
    let Room { pairs: [pairs, _], components: [a, b, c, d] } = Room::of(room);
    for strip in tiling.strips(block) {
        let half = strip.rows * across;
        for channels in blocks(0..grid.channels, (PAIRS / (2 * half)).max(1)) {
            let n = (2 * half * channels.len()).next_multiple_of(SLACK);
            pairs[..2 * n].fill(0.0);
            for (channel, to) in channels.clone().zip(pairs.chunks_exact_mut(4 * half)) {
                // SAFETY: the grid has the channels, and nobody writes them.
                unsafe {
                    grid.copy(
                        [strip.picture, channel],
                        [(2 * strip.row) as isize, 0],
                        2 * half,
                        2 * across,
                        to,
                    )
                };
            }
            let (gradients, _) = pairs[..2 * n].as_chunks::<2>();
            let components = a[..n].iter_mut().zip(&mut b[..n]).zip(c[..n].iter_mut().zip(&mut d[..n]));
            for ([p, q], ((a, b), (c, d))) in gradients.iter().zip(components) {
                (*a, *b, *c, *d) = (*p, p + q, p - q, -q);
            }
            for (number, channel) in channels.enumerate() {
                let components = [&*a, b, c, d].map(|x| &x[number * 2 * half..]);
                let at = points.at(0, channel) + strip.at;
                put_points(half, [0, half], components, outputs_to_points, points, &mut to[at..]);
            }
        }
    }
}

widest! {
    /// Transforms the points of a block to outputs, and adds the bias of each channel.
    ///
    /// # Safety
    /// `to` has the planes of the tiling's outputs; nobody else uses the block's rows. The bias has an element per
    /// channel, which nobody writes.
    unsafe fn put_outputs(
        tiling: &Tiling, block: Range<usize>, from: &[f32], bias: Option<Shared<f32>>, room: &mut [f32], to: Planes,
    ) => run_put_outputs
}

/// # Safety
/// The requirements are those of [`put_outputs`].
#[inline(always)]
unsafe fn run_put_outputs(
    tiling: &Tiling,
    block: Range<usize>,
    from: &[f32],
    bias: Option<Shared<f32>>,
    room: &mut [f32],
    to: Planes,
) {
    let across = tiling.across;
    let points = Points::of(to.channels, block.len() * across);
    let Room { pairs: [pairs, _], mut components } = Room::of(room);
    let [height, length] = to.size;
    for strip in tiling.strips(block) {
        let half = (strip.rows * across).next_multiple_of(LANES);
        for channels in blocks(0..to.channels, (PAIRS / (2 * half)).max(1)) {
            for (number, channel) in channels.clone().enumerate() {
                let from = &from[points.at(0, channel) + strip.at..];
                let to = components.each_mut().map(|x| &mut x[number * 2 * half..][..2 * half]);
                take_points(half, points, from, to);
            }
            let n = 2 * half * channels.len();
            let (outputs, _) = pairs[..2 * n].as_chunks_mut::<2>();
            let [a, b, c, d] = components.each_ref().map(|x| &x[..n]);
            for (to, ((a, b), (c, d))) in outputs.iter_mut().zip(a.iter().zip(b).zip(c.iter().zip(d))) {
                *to = [a + (b + c), (b - c) - d];
            }
            let first = 2 * strip.row;
            for (number, channel) in channels.enumerate() {
                // SAFETY: the bias has an element per channel, which nobody writes.
                let bias = bias.map(|bias| unsafe { *bias.at(channel) });
                for line in 0..(2 * strip.rows).min(height - first) {
                    let at = 2 * (number * 2 * half + line % 2 * half + line / 2 * across);
                    let from = &pairs[at..at + length];
                    // SAFETY: the row is inside the outputs, and nobody else uses it.
                    let to = unsafe {
                        std::slice::from_raw_parts_mut(to.row(strip.picture, channel, first + line), length)
                    };
                    match bias {
                        Some(bias) => to.iter_mut().zip(from).for_each(|(to, x)| *to = x + bias),
                        None => copy(from, to),
                    }
                }
            }
        }
    }
}

/// Transforms points of `n` tiles vertically to components, first those of the even lines, then those of the odd ones.
/// `from` begins at the first point of the first tile.
#[inline(always)]
fn take_points(n: usize, points: Points, from: &[f32], to: [&mut [f32]; 4]) {
    assert!(points.at(POINTS - 1, 0) + n <= from.len() && to.iter().all(|x| x.len() == 2 * n));
    for (x, to) in to.into_iter().enumerate() {
        for t in (0..n).step_by(LANES) {
            // SAFETY: `n` is a multiple of `LANES`, and the end of the last point was checked above.
            let point = |y: usize| unsafe {
                from.as_ptr().add(points.at(4 * y + x, 0) + t).cast::<Lanes>().read_unaligned()
            };
            let [even, odd] = points_to_outputs(std::array::from_fn(point));
            to[t..t + LANES].copy_from_slice(&even);
            to[n + t..n + t + LANES].copy_from_slice(&odd);
        }
    }
}

widest! {
    /// Transforms consecutive 3x3 filters, `[n, TAPS]`, to points: `[POINTS, ld]`, from the first element of `to` on.
    ///
    /// # Safety
    /// Nobody else uses elements `0..n` of the points.
    unsafe fn transform_filters(filters: &[f32], to: Shared<f32>, ld: usize) => run_transform_filters
}

/// # Safety
/// The requirements are those of [`transform_filters`].
#[inline(always)]
unsafe fn run_transform_filters(filters: &[f32], to: Shared<f32>, ld: usize) {
    for (number, filters) in filters.chunks(LANES * TAPS).enumerate() {
        let n = filters.len() / TAPS;
        let mut taps = [[0.0; LANES]; TAPS];
        for (k, filter) in filters.chunks_exact(TAPS).enumerate() {
            for (tap, x) in taps.iter_mut().zip(filter) {
                tap[k] = *x;
            }
        }
        let columns: [[Lanes; 4]; 3] =
            std::array::from_fn(|x| taps_to_points([taps[x], taps[3 + x], taps[6 + x]]));
        for y in 0..4 {
            for (x, point) in taps_to_points(columns.map(|column| column[y])).iter().enumerate() {
                // SAFETY: the points have `ld` elements each, and nobody else uses those of these filters.
                unsafe { to.slice((4 * y + x) * ld + number * LANES, n) }.copy_from_slice(&point[..n]);
            }
        }
    }
}

widest! {
    /// Transforms points, `[POINTS, ld]` from the first element of `from` on, to the gradients of consecutive filters,
    /// `[n, TAPS]`.
    ///
    /// # Safety
    /// Nobody writes the elements `0..n` of the points.
    unsafe fn put_filters(from: Shared<f32>, ld: usize, to: &mut [f32]) => run_put_filters
}

/// # Safety
/// The requirements are those of [`put_filters`].
#[inline(always)]
unsafe fn run_put_filters(from: Shared<f32>, ld: usize, to: &mut [f32]) {
    for (number, filters) in to.chunks_mut(LANES * TAPS).enumerate() {
        let n = filters.len() / TAPS;
        let point = |at: usize| {
            let mut lanes = [0.0; LANES];
            // SAFETY: the points have `ld` elements each, and nobody writes them.
            lanes[..n].copy_from_slice(unsafe { from.read(at * ld + number * LANES, n) });
            lanes
        };
        let columns: [[Lanes; 3]; 4] =
            std::array::from_fn(|x| points_to_taps(std::array::from_fn(|y| point(4 * y + x))));
        for y in 0..3 {
            let taps = points_to_taps(columns.map(|column| column[y]));
            for (x, tap) in taps.iter().enumerate() {
                for (filter, value) in filters.chunks_exact_mut(TAPS).zip(tap) {
                    filter[3 * y + x] = *value;
                }
            }
        }
    }
}

/// Whether a convolution has 3x3 filters without gaps between their taps, and stride 1.
pub(super) fn is_possible(conv: &Conv) -> bool {
    conv.filter == [3, 3]
        && conv.stride == [1, 1]
        && conv.dilation == [1, 1]
        && conv.padding.iter().all(|p| *p <= 2)
}

/// Computes the grid from an image, with an optional bias per filter.
///
/// # Safety
/// [`is_possible`] holds. The addresses are those of contiguous tensors with the sizes of `conv`. During the call,
/// nobody writes those that are read or uses the one that is written.
pub(super) unsafe fn to_grid(
    conv: &Conv,
    host: &dyn HostKernels,
    image: Shared<f32>,
    weight: Shared<f32>,
    bias: Option<Shared<f32>>,
    grid: Shared<f32>,
) -> bool {
    let (inputs, outputs) = (conv.inputs, conv.outputs);
    let tiling = Tiling::of_image(conv);
    // SAFETY: the tiling has the sizes of the image and the grid, and the other requirements are this function's.
    unsafe {
        let image = Planes::of(image, 0..inputs, inputs, tiling.size);
        let grid = Planes::of(grid, 0..outputs, outputs, tiling.out);
        with_filters(conv, host, weight, |points| {
            let filters = |point: usize| (points.at(point * between(conv)), inputs, false);
            correlate(host, &tiling, image, &filters, bias, grid)
        })
    }
}

/// Computes an image from the grid, with an optional bias per channel.
///
/// # Safety
/// [`is_possible`] holds. The addresses are those of contiguous tensors with the sizes of `conv`. During the call,
/// nobody writes those that are read or uses the one that is written.
pub(super) unsafe fn to_image(
    conv: &Conv,
    host: &dyn HostKernels,
    grid: Shared<f32>,
    weight: Shared<f32>,
    bias: Option<Shared<f32>>,
    image: Shared<f32>,
) -> bool {
    let (inputs, outputs) = (conv.inputs, conv.outputs);
    let tiling = Tiling::of_grid(conv);
    // Turning a filter exchanges the points 0 and infinity of both axes; channels and filters change places.
    let turned = |point: usize| {
        let axis = |i: usize| [3, 1, 2, 0][i];
        4 * axis(point / 4) + axis(point % 4)
    };
    // SAFETY: the tiling has the sizes of the grid and the image, and the other requirements are this function's.
    unsafe {
        let grid = Planes::of(grid, 0..outputs, outputs, tiling.size);
        let image = Planes::of(image, 0..inputs, inputs, tiling.out);
        with_filters(conv, host, weight, |points| {
            let filters = |point: usize| (points.at(turned(point) * between(conv)), inputs, true);
            correlate(host, &tiling, grid, &filters, bias, image)
        })
    }
}

/// Number of floats between the points of the filters.
fn between(conv: &Conv) -> usize {
    conv.outputs * conv.inputs + SLACK
}

/// Calls `work` with the points of the filters: `[POINTS, outputs, inputs]`, with slack after each point.
///
/// # Safety
/// `weight` is the address of `conv`'s filters, which nobody writes during the call.
unsafe fn with_filters(
    conv: &Conv,
    host: &dyn HostKernels,
    weight: Shared<f32>,
    work: impl FnOnce(Shared<f32>) -> bool,
) -> bool {
    with_scratch(POINTS * between(conv), |points| {
        let points = Shared(points.as_mut_ptr());
        each_row(host, conv.outputs, conv.inputs * TAPS, &|from, end| {
            let (at, n) = (from * conv.inputs, (end - from) * conv.inputs);
            // SAFETY: threads transform different filters, and nobody writes the weight.
            unsafe {
                let filters = weight.read(at * TAPS, n * TAPS);
                transform_filters(filters, Shared(points.at(at)), between(conv));
            }
        });
        work(points)
    })
}

/// The matrix of the filters at a point: its address, leading dimension, and whether it is transposed.
type Filters<'f> = &'f (dyn Fn(usize) -> (*mut f32, usize, bool) + Sync);

/// Computes the output images of a tiling. `filters` returns the matrix of a point, `[outputs, inputs]`.
///
/// # Safety
/// `image` and `to` are all channels of contiguous tensors with the sizes of the tiling, and `filters` returns matrices
/// of these numbers of channels. During the call, nobody writes those that are read or uses the one that is written.
unsafe fn correlate(
    host: &dyn HostKernels,
    tiling: &Tiling,
    image: Planes,
    filters: Filters<'_>,
    bias: Option<Shared<f32>>,
    to: Planes,
) -> bool {
    let (inputs, outputs) = (image.channels, to.channels);
    let (parts, most) = (tiling.parts(), tiling.block(inputs + outputs));
    let done = AtomicBool::new(true);
    let each = POINTS * tiling.tiles() * inputs * outputs / parts / 16;
    each_row(host, parts, each, &|first, end| {
        for number in first..end {
            let rows = part(tiling.rows, number, parts);
            let most = rows.len().min(most);
            let [tiles, products] =
                [inputs, outputs].map(|n| Points::of(n, most * tiling.across).len() + SLACK);
            let ok = with_scratch(tiles + products + tiling.room(most), |scratch| {
                let (tiles, scratch) = scratch.split_at_mut(tiles);
                let (products, room) = scratch.split_at_mut(products);
                let mut done = true;
                for block in blocks(rows, most) {
                    let n = block.len() * tiling.across;
                    let [from, into] = [inputs, outputs].map(|channels| Points::of(channels, n));
                    // SAFETY: the planes have the sizes of the tiling.
                    unsafe { take_tiles(tiling, block.clone(), image, room, tiles) };
                    for point in 0..POINTS {
                        let (filters, ld, transposed) = filters(point);
                        for some in blocks(0..inputs, DEPTH) {
                            let at = some.start * if transposed { ld } else { 1 };
                            let a = matrix(filters.wrapping_add(at), ld, transposed);
                            let b = matrix(tiles[from.at(point, some.start)..].as_mut_ptr(), from.ld, false);
                            let c = matrix(products[into.at(point, 0)..].as_mut_ptr(), into.ld, false);
                            let beta = f64::from(u8::from(some.start > 0));
                            // SAFETY: the matrices have these rows and columns.
                            done &=
                                unsafe { host.multiply(&product([outputs, n, some.len()], a, b, c, beta)) };
                        }
                    }
                    // SAFETY: the planes have the sizes of the tiling, and parts write different rows.
                    unsafe { put_outputs(tiling, block, products, bias, room, to) };
                }
                done
            });
            done.fetch_and(ok, Ordering::Relaxed);
        }
    });
    done.into_inner()
}

/// Computes the weight gradient. A part computes the points of some channels over some tile rows; the partial sums over
/// tile rows are then added.
///
/// # Safety
/// [`is_possible`] holds. The addresses are those of contiguous tensors with the sizes of `conv`. During the call,
/// nobody writes those that are read or uses the one that is written.
pub(super) unsafe fn to_weight(
    conv: &Conv,
    host: &dyn HostKernels,
    image: Shared<f32>,
    grid: Shared<f32>,
    weight: Shared<f32>,
) -> bool {
    let (inputs, outputs) = (conv.inputs, conv.outputs);
    let tiling = &Tiling::of_image(conv);
    let sums = (tiling.tiles() / LONG).min(tiling.parts()).min(SUMS / (POINTS * between(conv))).max(1);
    let ranges = (PARTS / 2 / sums).min(inputs / CHANNELS).max(1);
    let each = POINTS * tiling.tiles() * inputs * outputs / (sums * ranges) / 16;
    let done = AtomicBool::new(true);
    let ready = with_scratch(sums * POINTS * between(conv), |points| {
        let points = Shared(points.as_mut_ptr());
        each_row(host, sums * ranges, each, &|first, end| {
            for number in first..end {
                let channels = part(inputs, number % ranges, ranges);
                let rows = part(tiling.rows, number / ranges, sums);
                let most = rows.len().min(tiling.block(channels.len() + outputs));
                let [tiles, gradients] =
                    [channels.len(), outputs].map(|n| Points::of(n, most * tiling.across).len() + SLACK);
                let ok = with_scratch(tiles + gradients + tiling.room(most), |scratch| {
                    let (tiles, scratch) = scratch.split_at_mut(tiles);
                    let (gradients, room) = scratch.split_at_mut(gradients);
                    let mut done = true;
                    for (number_of_block, block) in blocks(rows, most).enumerate() {
                        let n = block.len() * tiling.across;
                        let [left, right] = [outputs, channels.len()].map(|channels| Points::of(channels, n));
                        // SAFETY: the tensors have the sizes of the tiling and are only read.
                        unsafe {
                            let image = Planes::of(image, channels.clone(), inputs, tiling.size);
                            take_tiles(tiling, block.clone(), image, room, tiles);
                            let grid = Planes::of(grid, 0..outputs, outputs, tiling.out);
                            take_gradients(tiling, block, grid, room, gradients);
                        }
                        for point in 0..POINTS {
                            let a = matrix(gradients[left.at(point, 0)..].as_mut_ptr(), left.ld, false);
                            let b = matrix(tiles[right.at(point, 0)..].as_mut_ptr(), right.ld, true);
                            let beta = f64::from(u8::from(number_of_block > 0));
                            // SAFETY: the matrices have these rows and columns; a part writes the columns of its
                            // channels in its own sum.
                            done &= unsafe {
                                let at = number / ranges * POINTS + point;
                                let c = matrix(points.at(at * between(conv) + channels.start), inputs, false);
                                host.multiply(&product([outputs, channels.len(), n], a, b, c, beta))
                            };
                        }
                    }
                    done
                });
                done.fetch_and(ok, Ordering::Relaxed);
            }
        });
        each_row(host, outputs, inputs * (TAPS + (sums - 1) * POINTS), &|from, end| {
            let (at, n) = (from * inputs, (end - from) * inputs);
            // SAFETY: threads get different filters; those that computed the sums have ended.
            unsafe {
                for (sum, point) in (1..sums).flat_map(|sum| (0..POINTS).map(move |point| (sum, point))) {
                    let more = points.read((sum * POINTS + point) * between(conv) + at, n);
                    add_all(more, points.slice(point * between(conv) + at, n));
                }
                put_filters(Shared(points.at(at)), between(conv), weight.slice(at * TAPS, n * TAPS));
            }
        });
        true
    });
    ready && done.into_inner()
}
