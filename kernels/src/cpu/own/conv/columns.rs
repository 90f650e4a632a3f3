//! Convolutions computed tile by tile: the pixels under the filter windows are laid out as matrix columns in a cache
//! (`im2col`), and BLAS multiplies the matrices.
//!
//! A convolution maps a batch of images (`image`) to its output (`grid`); a transposed convolution maps `grid` to
//! `image`. There are three kernels: [`to_grid`], [`to_image`] and [`to_weight`]. Tiles, and the parts that threads
//! share, depend on sizes alone.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cpu::own::conv::axis::Axis;
use crate::cpu::own::conv::geometry::{Conv, matrix, with_scratch};
use crate::cpu::own::each_row;
use crate::cpu::own::kernel::Shared;
use crate::cpu::widest::widest;
use crate::host::HostKernels;

/// Largest number of floats in the columns of a tile: half of a second-level cache.
const ROOM: usize = 1 << 17;
/// Smallest and largest number of columns of a tile.
const COLUMNS: [usize; 2] = [64, 1024];
/// Number of parts that work is split into, if there is enough of it.
const PARTS: usize = 8;
/// Smallest number of rows of a part's matrix product.
const ROWS: usize = 64;
/// Smallest number of columns of a part's matrix product in the weight gradient.
const WIDE: usize = 512;
/// Smallest number of columns of a tile in the weight gradient, unless [`ROOM`] allows fewer.
const LONG: usize = 256;
/// Largest number of floats in the partial sums of the weight gradient.
const SUMS: usize = 1 << 20;
/// Number of floats after the end of a buffer that vector copies may read or overwrite.
const SLACK: usize = 16;

/// A range of output rows of consecutive images of the batch.
#[derive(Clone, Copy, Debug)]
struct Tile {
    picture: usize,
    pictures: usize,
    row: usize,
    rows: usize,
}

/// Sizes of a convolution and of the buffers that its columns are laid out in.
#[derive(Clone, Debug)]
pub struct Layout {
    conv: Conv,
    y: Axis,
    x: Axis,
}

impl Layout {
    pub fn of(conv: Conv) -> Layout {
        Layout { conv, y: Axis::of(&conv, 0), x: Axis::of(&conv, 1) }
    }

    fn taps(&self) -> usize {
        self.conv.filter[0] * self.conv.filter[1]
    }

    /// Index pairs (vertical, horizontal) of the phases of a plane.
    fn phases(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let [down, across] = [self.y.phases.len(), self.x.phases.len()];
        (0..down).flat_map(move |y| (0..across).map(move |x| (y, x)))
    }

    /// Phase and offset that each tap reads, vertical and horizontal.
    fn seen_by_taps(&self) -> impl Iterator<Item = ((usize, usize), (usize, usize))> + '_ {
        self.y.taps.iter().flat_map(|y| self.x.taps.iter().map(move |x| (*y, *x)))
    }

    /// Number of pixels of a channel of an image.
    fn plane(&self) -> usize {
        self.conv.size[0] * self.conv.size[1]
    }

    /// Number of floats in the phases of a plane that `rows` output rows read.
    fn seen(&self, rows: usize) -> usize {
        self.y.phases.len() * self.x.phases.len() * (rows + self.y.reach) * self.width()
    }

    fn width(&self) -> usize {
        self.x.out + self.x.reach
    }

    fn columns(&self, tile: &Tile) -> usize {
        tile.pictures * tile.rows * self.x.out
    }

    /// Whether the columns are equal to the image, so that it is multiplied in place.
    fn is_plain(&self, tile: &Tile) -> bool {
        self.conv.is_pointwise() && tile.pictures == 1
    }

    /// Splits the output into tiles of about `columns` columns.
    fn tiles(&self, columns: usize) -> Vec<Tile> {
        let Conv { n, out: [down, across], .. } = self.conv;
        let columns = columns.clamp(COLUMNS[0], COLUMNS[1]);
        let at_once = (columns / (down * across)).max(1);
        let parts = if at_once > 1 { 1 } else { (down * across).div_ceil(columns).min(down) };
        let mut tiles = Vec::new();
        for picture in (0..n).step_by(at_once) {
            for part in 0..parts {
                let (row, end) = (down * part / parts, down * (part + 1) / parts);
                tiles.push(Tile { picture, pictures: at_once.min(n - picture), row, rows: end - row });
            }
        }
        tiles
    }

    /// Returns the tile's part of the grid as a matrix with a row per filter, and its row stride: the grid in place
    /// if the tile has one image, a copy in `room` otherwise.
    ///
    /// # Safety
    /// `grid` points to the grids of all images of the batch, which nobody writes during the call. The tile is one of
    /// this layout's.
    unsafe fn rows_of(&self, grid: Shared<f32>, tile: &Tile, room: &mut [f32]) -> (*mut f32, usize) {
        let (pixels, filters) = (self.conv.pixels(), self.conv.outputs);
        if tile.pictures == 1 {
            // SAFETY: the tile is one of the layout's, so its image and row are inside the batch's grids.
            let at = unsafe { grid.at(tile.picture * filters * pixels + tile.row * self.x.out) };
            return (at, pixels);
        }
        // SAFETY: the tile is one of the layout's, so its images are inside the batch's grids, which nobody writes.
        let from = unsafe { grid.read(tile.picture * filters * pixels, tile.pictures * filters * pixels) };
        swap_rows(from, room, [tile.pictures, filters, pixels]);
        (room.as_mut_ptr(), self.columns(tile))
    }

    /// Number of floats of `room` that [`Layout::rows_of`] needs for these tiles.
    fn gathered(&self, tiles: &[Tile]) -> usize {
        let most = tiles.iter().filter(|tile| tile.pictures > 1).map(|tile| self.columns(tile)).max();
        most.unwrap_or_default() * self.conv.outputs
    }
}

/// Copies `[a, b, n]` to `[b, a, n]`.
fn swap_rows(from: &[f32], to: &mut [f32], [a, b, n]: [usize; 3]) {
    for (at, from) in from.chunks_exact(n).enumerate() {
        let to_row = at % b * a + at / b;
        to[to_row * n..(to_row + 1) * n].copy_from_slice(from);
    }
}

widest! {
    /// Lays out a tile's columns for `channels` channels, in one row of `ld` floats per channel and tap. `room` and
    /// `to` have [`SLACK`] floats after their used part.
    ///
    /// # Safety
    /// `image` points to the first of `channels` channels of the tile's first image, and the batch has all images of
    /// the tile. Nobody writes them during the call. The tile is one of the layout's.
    unsafe fn lay_out(
        layout: &Layout, tile: &Tile, image: *const f32, channels: usize, room: &mut [f32], to: &mut [f32], ld: usize,
    ) => run_lay_out
}

/// # Safety
/// The requirements are those of [`lay_out`].
#[inline(always)]
unsafe fn run_lay_out(
    layout: &Layout,
    tile: &Tile,
    image: *const f32,
    channels: usize,
    room: &mut [f32],
    to: &mut [f32],
    ld: usize,
) {
    if layout.conv.is_pointwise() {
        let (step, n) = (layout.conv.inputs * layout.plane(), tile.rows * layout.x.out);
        for (channel, to) in to.chunks_mut(ld).take(channels).enumerate() {
            for (picture, to) in to.chunks_exact_mut(n).take(tile.pictures).enumerate() {
                // SAFETY: `image` has `channels` planes per image. A pointwise tile of several images consists of whole
                // planes; the rows of a tile of one image begin at `image`.
                let from = unsafe {
                    std::slice::from_raw_parts(image.add(picture * step + channel * layout.plane()), n)
                };
                copy_row(from, to);
            }
        }
        return;
    }
    let seen = layout.seen(tile.rows);
    assert!(room.len() >= tile.pictures * seen + SLACK);
    assert!(ld >= layout.columns(tile) && to.len() >= channels * layout.taps() * ld + SLACK);
    // The padding, which stays 0, is at the same positions for all channels.
    room[..tile.pictures * seen].fill(0.0);
    for channel in 0..channels {
        // SAFETY: `image` has `channels` planes per image of the tile; the asserts above check the sizes of `room` and
        // `to`, with `SLACK` floats after them.
        unsafe {
            for picture in 0..tile.pictures {
                let plane = image.add((picture * layout.conv.inputs + channel) * layout.plane());
                take_apart(layout, tile, plane, &mut room[picture * seen..]);
            }
            let to = to[channel * layout.taps() * ld..].as_mut_ptr();
            match layout.x.out {
                ..=4 => shift::<4, true>(layout, tile, room.as_ptr(), to, ld),
                5..=8 => shift::<8, true>(layout, tile, room.as_ptr(), to, ld),
                9..=16 => shift::<16, true>(layout, tile, room.as_ptr(), to, ld),
                _ => shift::<16, false>(layout, tile, room.as_ptr(), to, ld),
            }
        }
    }
}

/// Copies the pixels of a plane that are inside the image to their phases in `room`.
///
/// # Safety
/// `plane` points to a channel of an image with the layout's sizes, which nobody writes during the call.
#[inline(always)]
unsafe fn take_apart(layout: &Layout, tile: &Tile, plane: *const f32, room: &mut [f32]) {
    let Layout { y, x, .. } = layout;
    let (width, height) = (layout.width(), tile.rows + y.reach);
    for (py, px) in layout.phases() {
        let (rows, first_row) = y.inside(py, tile.row, tile.rows);
        let (columns, first) = x.inside(px, 0, x.out);
        let Some(last) = columns.len().checked_sub(1) else { continue };
        let to = (py * x.phases.len() + px) * height * width + columns.start;
        for (i, row) in rows.enumerate() {
            let to = &mut room[to + row * width..][..columns.len()];
            // SAFETY: `inside` returns coordinates of pixels of the image, so the first and the last of the line are
            // in the plane.
            let from = unsafe {
                let line = plane.add((first_row + i * y.stride) * x.size + first);
                std::slice::from_raw_parts(line, last * x.stride + 1)
            };
            match x.stride {
                1 => copy_row(from, to),
                // The most frequent stride, as a constant that the compiler can use.
                2 => to.iter_mut().zip(from.iter().step_by(2)).for_each(|(to, x)| *to = *x),
                stride => to.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, x)| *to = *x),
            }
        }
    }
}

/// Copies a row that is usually short.
#[inline(always)]
pub(super) fn copy_row(from: &[f32], to: &mut [f32]) {
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

/// Lays out the rows of all taps of a channel, each a shifted copy of a phase in `room`. Copies `N` floats at a
/// time; what is written after the end of a row is overwritten by the next row. `ONE` says that a row has at most
/// `N` floats.
///
/// # Safety
/// `room` has the phases of all images of the tile and `to` a row of `ld` floats per tap, and [`SLACK`] floats follow
/// both.
#[inline(always)]
unsafe fn shift<const N: usize, const ONE: bool>(
    layout: &Layout,
    tile: &Tile,
    room: *const f32,
    to: *mut f32,
    ld: usize,
) {
    let Layout { y, x, .. } = layout;
    let (width, across, seen) = (layout.width(), x.out, layout.seen(tile.rows));
    let plane = (tile.rows + y.reach) * width;
    for (tap, ((py, down), (px, right))) in layout.seen_by_taps().enumerate() {
        let first = (py * x.phases.len() + px) * plane + down * width + right;
        // SAFETY: a tap's offset in a phase is at most the reach, so all rows that it reads are in `room`, and its row
        // in `to` has room for the tile's columns. `SLACK` floats follow for the last copy of a row.
        unsafe {
            let mut to = to.add(tap * ld);
            for picture in 0..tile.pictures {
                let mut from = room.add(picture * seen + first);
                for _ in 0..tile.rows {
                    to.cast::<[f32; N]>().write_unaligned(from.cast::<[f32; N]>().read_unaligned());
                    if !ONE {
                        for k in (N..across).step_by(N) {
                            let part = from.add(k).cast::<[f32; N]>().read_unaligned();
                            to.add(k).cast::<[f32; N]>().write_unaligned(part);
                        }
                    }
                    (from, to) = (from.add(width), to.add(across));
                }
            }
        }
    }
}

widest! {
    /// Adds a tile's columns to the phases of the planes that they were read from: `[channels, pictures, seen]`.
    fn add_up(layout: &Layout, tile: &Tile, channels: usize, columns: &[f32], to: &mut [f32]) => run_add_up
}

#[inline(always)]
fn run_add_up(layout: &Layout, tile: &Tile, channels: usize, columns: &[f32], to: &mut [f32]) {
    let Layout { conv, y, x } = layout;
    let (width, across) = (layout.width(), x.out);
    let (plane, seen) = ((conv.out[0] + y.reach) * width, layout.seen(conv.out[0]));
    let mut columns = columns.chunks_exact(tile.rows * across);
    for channel in 0..channels {
        for ((py, down), (px, right)) in layout.seen_by_taps() {
            let first = (py * x.phases.len() + px) * plane + (tile.row + down) * width + right;
            for picture in 0..tile.pictures {
                let to = &mut to[(channel * tile.pictures + picture) * seen + first..];
                let Some(from) = columns.next() else { return };
                for (from, to) in from.chunks_exact(across).zip(to.chunks_mut(width)) {
                    add(from, &mut to[..across]);
                }
            }
        }
    }
}

/// Adds a row that is usually short.
#[inline(always)]
fn add(from: &[f32], to: &mut [f32]) {
    #[inline(always)]
    fn by<'s, const N: usize>(from: &'s [f32], to: &'s mut [f32]) -> (&'s [f32], &'s mut [f32]) {
        let (from, rest) = from.as_chunks::<N>();
        let (to, last) = to.as_chunks_mut::<N>();
        for (from, to) in from.iter().zip(to) {
            for i in 0..N {
                to[i] += from[i];
            }
        }
        (rest, last)
    }
    let (from, to) = by::<8>(from, to);
    let (from, to) = by::<4>(from, to);
    from.iter().zip(to).for_each(|(from, to)| *to += from);
}

widest! {
    /// Fills a plane with the bias and adds the plane's phases.
    fn put_together(layout: &Layout, seen: &[f32], bias: f32, to: &mut [f32]) => run_put_together
}

#[inline(always)]
fn run_put_together(layout: &Layout, seen: &[f32], bias: f32, to: &mut [f32]) {
    let Layout { conv, y, x } = layout;
    let width = layout.width();
    to.fill(bias);
    for (py, px) in layout.phases() {
        let (rows, first_row) = y.inside(py, 0, conv.out[0]);
        let (columns, first) = x.inside(px, 0, conv.out[1]);
        if columns.is_empty() {
            continue;
        }
        let phase = (py * x.phases.len() + px) * (conv.out[0] + y.reach) * width;
        for (i, row) in rows.enumerate() {
            let from = &seen[phase + row * width..][columns.clone()];
            let to = &mut to[(first_row + i * y.stride) * x.size..][first..];
            match x.stride {
                1 => to.iter_mut().zip(from).for_each(|(to, x)| *to += x),
                stride => to.iter_mut().step_by(stride).zip(from).for_each(|(to, x)| *to += x),
            }
        }
    }
}

/// Computes `grid = weight @ columns`, with an optional bias per filter.
///
/// # Safety
/// The addresses are those of contiguous tensors with the sizes of `layout`. During the call, nobody writes those that
/// are read or uses the one that is written.
pub unsafe fn to_grid(
    layout: &Layout,
    host: &dyn HostKernels,
    image: Shared<f32>,
    weight: Shared<f32>,
    bias: Option<Shared<f32>>,
    grid: Shared<f32>,
) -> bool {
    let conv = &layout.conv;
    let (filters, patch, pixels) = (conv.outputs, conv.patch(), conv.pixels());
    let tiles = layout.tiles((conv.rows() / PARTS).min(ROOM / patch));
    let splits = (PARTS / 2 / tiles.len()).min(filters / ROWS).max(1);
    let done = AtomicBool::new(true);
    let each = conv.rows() * filters * patch / (tiles.len() * splits) / 16;
    each_row(host, tiles.len() * splits, each, &|from, end| {
        for part in from..end {
            let (tile, split) = (&tiles[part / splits], part % splits);
            let some = filters * split / splits..filters * (split + 1) / splits;
            let n = layout.columns(tile);
            let (plain, together) = (layout.is_plain(tile), tile.pictures > 1);
            let cols = if plain { 0 } else { patch * n + SLACK };
            let seen = if plain { 0 } else { tile.pictures * layout.seen(tile.rows) + SLACK };
            let room = cols + seen + if together { some.len() * n } else { 0 };
            let ok = with_scratch(room, |scratch| {
                let (cols, scratch) = scratch.split_at_mut(cols);
                let (seen, out) = scratch.split_at_mut(seen);
                // SAFETY: the tensors have the sizes in `layout`, and the tile is one of the layout's. Parts write
                // different filters or pixels of the grid. The scratch memory was sized for the tile's columns above.
                unsafe {
                    let picture = image.at(tile.picture * conv.inputs * layout.plane());
                    let b = if plain {
                        matrix(picture.add(tile.row * conv.out[1]), layout.plane(), false)
                    } else {
                        lay_out(layout, tile, picture, conv.inputs, seen, cols, n);
                        matrix(cols.as_mut_ptr(), n, false)
                    };
                    let own = (tile.picture * filters + some.start) * pixels + tile.row * conv.out[1];
                    let (to, ld) = if together { (out.as_mut_ptr(), n) } else { (grid.at(own), pixels) };
                    if let Some(bias) = bias {
                        for (row, bias) in bias.read(some.start, some.len()).iter().enumerate() {
                            Shared(to).slice(row * ld, n).fill(*bias);
                        }
                    }
                    let (a, c) = (matrix(weight.at(some.start * patch), patch, false), matrix(to, ld, false));
                    let beta = f64::from(u8::from(bias.is_some()));
                    let ok = host.multiply(&conv.product([some.len(), n, patch], a, b, c, beta));
                    if together {
                        for (picture, rows) in (0..tile.pictures).map(|p| (p, out.chunks_exact(n))) {
                            let to = grid.slice(own + picture * filters * pixels, some.len() * pixels);
                            for (to, row) in to.chunks_exact_mut(pixels).zip(rows) {
                                to.copy_from_slice(&row[picture * pixels..][..pixels]);
                            }
                        }
                    }
                    ok
                }
            });
            done.fetch_and(ok, Ordering::Relaxed);
        }
    });
    done.into_inner()
}

/// Computes `columns = weight.T @ grid` and adds each column element to the pixel that it was read from, with an
/// optional bias per channel.
///
/// # Safety
/// The addresses are those of contiguous tensors with the sizes of `layout`. During the call, nobody writes those that
/// are read or uses the one that is written.
pub unsafe fn to_image(
    layout: &Layout,
    host: &dyn HostKernels,
    grid: Shared<f32>,
    weight: Shared<f32>,
    bias: Option<Shared<f32>>,
    image: Shared<f32>,
) -> bool {
    let conv = &layout.conv;
    let (filters, patch, taps) = (conv.outputs, conv.patch(), layout.taps());
    let tiles = layout.tiles(conv.rows() / PARTS);
    // Tiles of the same images are consecutive.
    let groups: Vec<&[Tile]> = tiles.chunk_by(|a, b| a.picture == b.picture).collect();
    let ranges = PARTS.div_ceil(groups.len()).min(patch / ROWS).clamp(1, conv.inputs);
    let done = AtomicBool::new(true);
    let each = conv.rows() * filters * patch / (groups.len() * ranges) / 16;
    each_row(host, groups.len() * ranges, each, &|from, end| {
        for part in from..end {
            let (group, range) = (groups[part / ranges], part % ranges);
            let channels = conv.inputs * range / ranges..conv.inputs * (range + 1) / ranges;
            let (first, rows) = (channels.start * taps, channels.len() * taps);
            let Tile { picture, pictures, .. } = group[0];
            let n = group.iter().map(|tile| layout.columns(tile)).max().unwrap_or_default();
            let (plain, pointwise) = (layout.is_plain(&group[0]), conv.is_pointwise());
            let seen = if pointwise { 0 } else { channels.len() * pictures * layout.seen(conv.out[0]) };
            let (cols, gathered) = (if plain { 0 } else { rows * n }, layout.gathered(group));
            let ok = with_scratch(cols + seen + gathered, |scratch| {
                let mut done = true;
                let (cols, scratch) = scratch.split_at_mut(cols);
                let (seen, gathered) = scratch.split_at_mut(seen);
                seen.fill(0.0);
                let bias_of = |channel: usize| {
                    // SAFETY: the bias has an element per channel and is only read.
                    bias.map_or(0.0, |bias| unsafe { *bias.at(channel) })
                };
                // SAFETY: the image has `conv.inputs` planes per batch element, and each of them belongs to one
                // part.
                let planes = |picture: usize, channel: usize| unsafe {
                    image.slice((picture * conv.inputs + channel) * layout.plane(), layout.plane())
                };
                for tile in group {
                    let n = layout.columns(tile);
                    // SAFETY: the tensors have the sizes in `layout`, and the tile is one of the layout's. A part
                    // writes only its own channels' planes. The scratch memory was sized for the largest tile above.
                    unsafe {
                        let (b, ldb) = layout.rows_of(grid, tile, gathered);
                        let a = matrix(weight.at(first), patch, true);
                        let (c, ldc) = if plain {
                            let to = planes(picture, channels.start).as_mut_ptr();
                            (to.add(tile.row * conv.out[1]), layout.plane())
                        } else {
                            (cols.as_mut_ptr(), n)
                        };
                        if plain && bias.is_some() {
                            for (row, channel) in channels.clone().enumerate() {
                                Shared(c).slice(row * ldc, n).fill(bias_of(channel));
                            }
                        }
                        let beta = f64::from(u8::from(plain && bias.is_some()));
                        let (b, c) = (matrix(b, ldb, false), matrix(c, ldc, false));
                        let product = conv.product([rows, n, filters], a, b, c, beta);
                        done &= host.multiply(&product);
                        if !pointwise {
                            add_up(layout, tile, channels.len(), &cols[..rows * n], seen);
                        } else if !plain {
                            for (row, from) in cols[..rows * n].chunks_exact(layout.plane()).enumerate() {
                                let channel = channels.start + row / pictures;
                                let to = planes(picture + row % pictures, channel);
                                let bias = bias_of(channel);
                                to.iter_mut().zip(from).for_each(|(to, x)| *to = x + bias);
                            }
                        }
                    }
                }
                let each = layout.seen(conv.out[0]);
                for (at, seen) in seen.chunks_exact(each).enumerate() {
                    let channel = channels.start + at / pictures;
                    let to = planes(picture + at % pictures, channel);
                    put_together(layout, seen, bias_of(channel), to);
                }
                done
            });
            done.fetch_and(ok, Ordering::Relaxed);
        }
    });
    done.into_inner()
}

/// Computes the weight gradient `sum(grid @ columns.T)`. A part computes some channels' taps over some tiles; the
/// partial sums over tiles are then added.
///
/// # Safety
/// The addresses are those of contiguous tensors with the sizes of `layout`. During the call, nobody writes those that
/// are read or uses the one that is written.
pub unsafe fn to_weight(
    layout: &Layout,
    host: &dyn HostKernels,
    image: Shared<f32>,
    grid: Shared<f32>,
    weight: Shared<f32>,
) -> bool {
    let conv = &layout.conv;
    let (filters, patch, taps) = (conv.outputs, conv.patch(), layout.taps());
    let ranges = (patch / WIDE).clamp(1, conv.inputs);
    let tiles = layout.tiles((conv.rows() / PARTS).max(LONG).min(ROOM / (patch / ranges)));
    let sums = (PARTS / ranges).min(tiles.len()).min(SUMS / (filters * patch)).max(1);
    let done = AtomicBool::new(true);
    let each = conv.rows() * filters * patch / (ranges * sums) / 16;
    // The grids of tiles with several images are copied once, for all channel ranges.
    let whole = if layout.gathered(&tiles) > 0 { conv.rows() * filters } else { 0 };
    let ready = with_scratch(whole + (sums - 1) * filters * patch, |scratch| {
        let (gathered, others) = scratch.split_at_mut(whole);
        let (gathered, others) = (Shared(gathered.as_mut_ptr()), Shared(others.as_mut_ptr()));
        // SAFETY: `grid` has the sizes in `layout` and is only read. Tiles of several images have different ones, so
        // they copy to different parts of `gathered`, which is as large as the grid.
        let rows_of = |tile: &Tile| unsafe {
            let at = tile.picture * filters * conv.pixels();
            let n = if tile.pictures == 1 { 0 } else { layout.columns(tile) * filters };
            layout.rows_of(grid, tile, gathered.slice(if n == 0 { 0 } else { at }, n))
        };
        let rows: Vec<(Shared<f32>, usize)> =
            tiles.iter().map(&rows_of).map(|(at, ld)| (Shared(at), ld)).collect();
        each_row(host, ranges * sums, each, &|from, end| {
            for part in from..end {
                let (range, sum) = (part % ranges, part / ranges);
                let channels = conv.inputs * range / ranges..conv.inputs * (range + 1) / ranges;
                let some = tiles.len() * sum / sums..tiles.len() * (sum + 1) / sums;
                let (tiles, rows) = (&tiles[some.clone()], &rows[some]);
                let k = channels.len() * taps;
                let ld = |tile: &Tile| layout.columns(tile) + SLACK;
                let most = tiles.iter().map(ld).max().unwrap_or_default();
                let seen = tiles.iter().map(|tile| tile.pictures * layout.seen(tile.rows)).max();
                let seen = seen.unwrap_or_default() + SLACK;
                let ok = with_scratch(k * most + SLACK + seen, |scratch| {
                    let mut done = true;
                    let (cols, seen) = scratch.split_at_mut(k * most + SLACK);
                    for (number, (tile, (rows, ld_rows))) in tiles.iter().zip(rows).enumerate() {
                        let n = layout.columns(tile);
                        // SAFETY: the tensors have the sizes in `layout`, and the tile is one of the layout's. A part
                        // writes its own range of columns of its own sum. The scratch memory was sized for the largest
                        // tile above.
                        done &= unsafe {
                            let plane = tile.picture * conv.inputs + channels.start;
                            let picture = image.at(plane * layout.plane());
                            let b = if layout.is_plain(tile) {
                                matrix(picture.add(tile.row * conv.out[1]), layout.plane(), true)
                            } else {
                                lay_out(layout, tile, picture, channels.len(), seen, cols, ld(tile));
                                matrix(cols.as_mut_ptr(), ld(tile), true)
                            };
                            let to = match sum {
                                0 => weight.get(),
                                sum => others.at((sum - 1) * filters * patch),
                            };
                            let (a, c) = (matrix(rows.get(), *ld_rows, false), to.add(channels.start * taps));
                            let (c, beta) = (matrix(c, patch, false), f64::from(u8::from(number > 0)));
                            host.multiply(&conv.product([filters, k, n], a, b, c, beta))
                        };
                    }
                    done
                });
                done.fetch_and(ok, Ordering::Relaxed);
            }
        });
        if sums > 1 {
            each_row(host, filters, (sums - 1) * patch, &|from, end| {
                let (at, n) = (from * patch, (end - from) * patch);
                // SAFETY: threads get disjoint ranges of rows, and each sum has as many rows as `weight`. The threads
                // that computed the sums have ended.
                unsafe {
                    let to = weight.slice(at, n);
                    for sum in 0..sums - 1 {
                        add_all(others.read(sum * filters * patch + at, n), to);
                    }
                }
            });
        }
        true
    });
    ready && done.into_inner()
}

widest! {
    /// Adds `from` to `to`, element by element.
    fn add_all(from: &[f32], to: &mut [f32]) => run_add_all
}

#[inline(always)]
fn run_add_all(from: &[f32], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
}
