//! Convolutions of channels-last tensors, computed tile by tile without laying out patches.
//!
//! **Strategy.** The weights are laid out so that the channels of the result are contiguous. A tile has some pixels of
//! the result as rows and some of their channels as lanes; through each tap, a row reads the channels of a pixel in
//! place, or zeros. In the weight gradient, rows are channels of the image as a tap reads it, lanes are filters, and the
//! sum goes over pixels.
//!
//! A convolution maps a batch of images (`image`) to its output (`grid`); a transposed convolution maps `grid` to
//! `image`. Results depend on sizes alone: sums over pixels are split by them.

use std::ops::Range;

use crate::cpu::own::conv::geometry::Conv;
use crate::cpu::own::conv::panels::{Block, Lines, MOVE, Panels, blocks, lanes, turn};
use crate::cpu::own::conv::reads::Reads;
use crate::cpu::own::conv::tile::{MOST_LANES, MOST_ROWS, Rows, Shape, Tile};
use crate::cpu::own::each_row;
use crate::cpu::own::kernel::Shared;
use crate::cpu::own::scratch::with_scratch;
use crate::host::HostKernels;

/// Number of bytes of the operands that consecutive tiles read: a part of a second-level cache.
const NEAR: usize = 1 << 18;
/// Number of multiplications that cost as much as an element of a simple loop.
const PRODUCTS: usize = 16;
/// Largest number of partial sums of a weight gradient, smallest number of pixels of a partial sum, and largest number
/// of floats in all of them.
const SPLITS: usize = 16;
pub(super) const PIXELS: usize = 160;
const SUMS: usize = 1 << 19;
/// Number of pixels whose products are added to each other before they are added to a partial sum, which keeps its
/// rounding errors small.
const LONG: usize = 64;
/// Number of floats after the end of a grid that a tile may read.
const SLACK: usize = MOST_LANES;

/// The kernels of a convolution.
#[derive(Debug)]
pub(super) struct Direct {
    conv: Conv,
    to_grid: Map,
    to_image: Map,
    gradient: Gradient,
}

impl Direct {
    pub(super) fn of(conv: Conv) -> Direct {
        let map =
            |of: fn(&Conv, usize) -> Reads, to_grid| Map::of(&conv, [0, 1].map(|d| of(&conv, d)), to_grid);
        Direct {
            to_grid: map(Reads::of_grid, true),
            to_image: map(Reads::of_image, false),
            gradient: Gradient::of(&conv),
            conv,
        }
    }

    /// Computes the grid from an image, with an optional bias per filter.
    ///
    /// # Safety
    /// The addresses are those of dense tensors with the sizes of the convolution, images and grids channels last.
    /// During the call, nobody writes those that are read or uses the one that is written.
    pub(super) unsafe fn to_grid(
        &self,
        host: &dyn HostKernels,
        tensors: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        // SAFETY: this function has the requirements of `compute`.
        unsafe { self.to_grid.compute(host, self.conv.n, tensors, bias) }
    }

    /// Computes the image from a grid, with an optional bias per channel.
    ///
    /// # Safety
    /// The requirements are those of [`Direct::to_grid`].
    pub(super) unsafe fn to_image(
        &self,
        host: &dyn HostKernels,
        tensors: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        // SAFETY: this function has the requirements of `compute`.
        unsafe { self.to_image.compute(host, self.conv.n, tensors, bias) }
    }

    /// Computes the weight gradient from an image and a grid.
    ///
    /// # Safety
    /// The requirements are those of [`Direct::to_grid`].
    pub(super) unsafe fn to_weight(&self, host: &dyn HostKernels, tensors: [Shared<f32>; 3]) -> bool {
        // SAFETY: this function has the requirements of `compute`.
        unsafe { self.gradient.compute(host, &self.conv, tensors) }
    }
}

/// The map from a source to a result, which computes the grid or the image.
#[derive(Debug)]
struct Map {
    shape: Shape,
    /// What the result's pixels read of the source, down and across.
    reads: [Reads; 2],
    /// Number of channels of all groups in the source and in the result.
    channels: [usize; 2],
    /// Size of an image of the result.
    size: [usize; 2],
    panels: Panels,
    phases: Vec<Phase>,
}

/// The pixels of a result that read through the same taps.
#[derive(Debug)]
struct Phase {
    /// Indices in `Map::reads` of the phases down and across.
    of: [usize; 2],
    /// Number of rows and columns.
    size: [usize; 2],
    /// Rows and columns for which all that is read is in the source.
    inside: [Range<usize>; 2],
    /// The pixel of the source that the first pixel reads through each tap, and the tap's place in a panel.
    taps: Vec<([isize; 2], usize)>,
    /// Number of taps whose channels are adjacent both in the source and in a panel.
    adjacent: usize,
}

impl Phase {
    fn pixels(&self) -> usize {
        self.size[0] * self.size[1]
    }
}

/// Memory that a thread uses for all its tiles.
struct Room {
    /// Addresses of a tile's rows.
    a: Vec<*const f32>,
    /// Offsets of a tile's segments.
    segments: Vec<[usize; 2]>,
    /// Row and column of the source that each row of a tile reads through a tap that reads pixel 0 first, and the
    /// pixel's offset in the source.
    read: [[usize; MOST_ROWS]; 3],
    /// Offset of each row in the result.
    written: [usize; MOST_ROWS],
    /// Results of a tile that has lanes without a channel.
    apart: [f32; MOST_ROWS * MOST_LANES],
}

impl Room {
    fn new() -> Room {
        Room {
            a: Vec::new(),
            segments: Vec::new(),
            read: [[0; MOST_ROWS]; 3],
            written: [0; MOST_ROWS],
            apart: [0.0; MOST_ROWS * MOST_LANES],
        }
    }
}

static ZEROS: [f32; MOST_LANES] = [0.0; MOST_LANES];
static SAME: [usize; MOST_ROWS] = [0; MOST_ROWS];

impl Map {
    fn of(conv: &Conv, reads: [Reads; 2], to_grid: bool) -> Map {
        let shape = Shape::of_cpu();
        let (filters, each) = (conv.outputs / conv.groups, conv.inputs / conv.groups);
        let channels = if to_grid { [conv.inputs, conv.outputs] } else { [conv.outputs, conv.inputs] };
        let mut places = vec![None; conv.filter[0] * conv.filter[1]];
        let (mut phases, mut used) = (Vec::new(), 0);
        for (y, down) in reads[0].phases.iter().enumerate() {
            for (x, across) in reads[1].phases.iter().enumerate() {
                let mut taps = Vec::new();
                for (row, down) in &down.taps {
                    for (column, across) in &across.taps {
                        places[row * conv.filter[1] + column] = Some(used);
                        taps.push(([*down, *across], used));
                        used += 1;
                    }
                }
                let together = conv.groups == 1 && across.is_adjacent() && !across.taps.is_empty();
                phases.push(Phase {
                    of: [y, x],
                    size: [down.count, across.count],
                    inside: [reads[0].all_inside(down), reads[1].all_inside(across)],
                    taps,
                    adjacent: if together { across.taps.len() } else { 1 },
                });
            }
        }
        let panels = Panels {
            groups: conv.groups,
            filters,
            channels: each,
            by_filter: to_grid,
            blocks: blocks(shape, if to_grid { filters } else { each }),
            places,
        };
        let size = if to_grid { conv.out } else { conv.size };
        Map { shape, reads, channels, size, panels, phases }
    }

    /// Computes the results of `n` images from sources and weights.
    ///
    /// # Safety
    /// The addresses are those of dense tensors, sources and results channels last. During the call, nobody writes
    /// those that are read or uses the one that is written.
    unsafe fn compute(
        &self,
        host: &dyn HostKernels,
        n: usize,
        [from, weight, to]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        let lanes = self.panels.groups * lanes(&self.panels.blocks);
        with_scratch(self.panels.len() + lanes + self.panels.inner(), |scratch| {
            let (panels, scratch) = scratch.split_at_mut(self.panels.len());
            let (start, zeros) = scratch.split_at_mut(lanes);
            zeros.fill(0.0);
            let [panels, first, zeros] =
                [panels.as_mut_ptr(), start.as_mut_ptr(), zeros.as_mut_ptr()].map(Shared);
            let all = [from, zeros, panels, first, to];
            // SAFETY: the scratch memory was sized for the panels and the lanes of all groups. The bias has an element
            // per channel of the result.
            unsafe {
                self.start(bias, start);
                self.panels.lay_out(host, weight, panels);
                self.tiles(host, n, all);
            }
            true
        })
    }

    /// Writes what is added to the sums, for each lane of each group.
    ///
    /// # Safety
    /// `bias` has an element per channel of the result.
    unsafe fn start(&self, bias: Option<Shared<f32>>, to: &mut [f32]) {
        to.fill(0.0);
        let Some(bias) = bias else { return };
        let (all, each) = (lanes(&self.panels.blocks), self.channels[1] / self.panels.groups);
        for (group, to) in to.chunks_exact_mut(all).enumerate() {
            // SAFETY: a group has `each` of the bias's elements.
            to[..each].copy_from_slice(unsafe { bias.read(group * each, each) });
        }
    }

    /// Computes all tiles of the result.
    ///
    /// # Safety
    /// The addresses are those of the sources, as many zeros as there are inner channels, the panels, what is added to the
    /// sums, and the results. Nobody writes what is read during the call or uses the results.
    unsafe fn tiles(&self, host: &dyn HostKernels, n: usize, tensors: [Shared<f32>; 5]) {
        let tiles_of = |phase: &Phase| (n * phase.pixels()).div_ceil(self.shape.rows);
        let mut ends = Vec::with_capacity(self.phases.len());
        for phase in &self.phases {
            ends.push(ends.last().copied().unwrap_or(0) + tiles_of(phase));
        }
        let (all, blocks) = (ends.last().copied().unwrap_or(0), &self.panels.blocks);
        // Tiles whose sources are near each other are computed for all blocks before the next ones.
        let source = n * self.reads[0].source * self.reads[1].source * self.channels[0] * size_of::<f32>();
        let near = (NEAR * all / source.max(1)).clamp(1, all.max(1));
        let group_items = all * blocks.len();
        let longest = self.phases.iter().map(|phase| phase.taps.len()).max().unwrap_or(0);
        let each = self.shape.rows * blocks[0].lanes * longest * self.panels.inner() / PRODUCTS;
        each_row(host, self.panels.groups * group_items, each, &|begin, end| {
            let mut room = Room::new();
            for item in begin..end {
                let (group, item) = (item / group_items, item % group_items);
                let chunk = item / (near * blocks.len());
                let (item, tiles) = (item % (near * blocks.len()), near.min(all - chunk * near));
                let (block, tile) = (&blocks[item / tiles], chunk * near + item % tiles);
                let number = ends.partition_point(|end| *end <= tile);
                let (phase, tiles) = (&self.phases[number], tiles_of(&self.phases[number]));
                let (count, tile) = (n * phase.pixels(), tile + tiles - ends[number]);
                let pixels = count * tile / tiles..count * (tile + 1) / tiles;
                // SAFETY: the tile is one of the result's, and one thread alone computes it.
                unsafe { self.tile(tensors, group, block, phase, pixels, &mut room) };
            }
        });
    }

    /// Finds the pixels of a tile and their offsets in the result. Returns whether all that they read is in the source.
    fn place(&self, phase: &Phase, pixels: Range<usize>, room: &mut Room) -> bool {
        let [down, across] = [0, 1].map(|d| (&self.reads[d], &self.reads[d].phases[phase.of[d]]));
        let (mut image, at) = (pixels.start / phase.pixels(), pixels.start % phase.pixels());
        let (mut row, mut column) = (at / phase.size[1], at % phase.size[1]);
        let (mut inside, [height, width]) = (true, [down.0.source, across.0.source]);
        let [rows, columns, offsets] = &mut room.read;
        let mut begin = 0;
        // Pixels of a row of the phase at a time.
        while begin < pixels.len() {
            let count = (pixels.len() - begin).min(phase.size[1] - column);
            let (y, x) = (row * down.0.step, column * across.0.step);
            let first = (image * height + y) * width + x;
            let line = (image * self.size[0] + down.1.first + row * down.0.stride) * self.size[1];
            let first_written = line + across.1.first + column * across.0.stride;
            for i in 0..count {
                (rows[begin + i], columns[begin + i]) = (y, x + i * across.0.step);
                offsets[begin + i] = (first + i * across.0.step) * self.channels[0];
                room.written[begin + i] = (first_written + i * across.0.stride) * self.channels[1];
            }
            let whole = &phase.inside;
            inside &= whole[0].contains(&row) && whole[1].start <= column && column + count <= whole[1].end;
            (begin, row, column) = (begin + count, row + 1, 0);
            if row == phase.size[0] {
                (image, row) = (image + 1, 0);
            }
        }
        inside
    }

    /// Computes a block of channels of some pixels.
    ///
    /// # Safety
    /// The requirements are those of [`Map::tiles`], and the pixels are some of the phase's in all images, at most
    /// `self.shape.rows` of them.
    unsafe fn tile(
        &self,
        [source, zeros, panels, start, to]: [Shared<f32>; 5],
        group: usize,
        block: &Block,
        phase: &Phase,
        pixels: Range<usize>,
        room: &mut Room,
    ) {
        let (inner, each) = (self.panels.inner(), self.channels[1] / self.panels.groups);
        let rows = pixels.len();
        let inside = self.place(phase, pixels, room);
        let [height, width] = [0, 1].map(|d| self.reads[d].source);
        let source = source.get().cast_const().wrapping_add(group * inner);
        // Distance in the source to what is read through a tap.
        let apart = |[y, x]: [isize; 2]| (y * width as isize + x) * self.channels[0] as isize;
        let adjacent = if inside { phase.adjacent } else { 1 };
        let count = if inside { rows } else { phase.taps.len() * rows };
        room.a.resize(count, source);
        room.segments.clear();
        let first = if inside { phase.taps.first().map_or(0, |(tap, _)| apart(*tap)) } else { 0 };
        for (tap, place) in phase.taps.iter().step_by(adjacent) {
            let from = if inside { (apart(*tap) - first) as usize } else { 0 };
            room.segments.push([from, place * inner * block.lanes]);
        }
        let [y, x, offsets] = &room.read;
        if inside {
            for (to, offset) in room.a.iter_mut().zip(offsets) {
                *to = source.wrapping_add(*offset).wrapping_offset(first);
            }
        } else {
            let zeros = zeros.get().cast_const();
            for (([down, across], _), to) in phase.taps.iter().zip(room.a.chunks_exact_mut(rows)) {
                let apart = apart([*down, *across]);
                for (i, to) in to.iter_mut().enumerate() {
                    let exists = (y[i].wrapping_add_signed(*down) < height)
                        & (x[i].wrapping_add_signed(*across) < width);
                    let from = source.wrapping_add(offsets[i]).wrapping_offset(apart);
                    *to = if exists { from } else { zeros };
                }
            }
        }
        let is_whole = block.channels == block.lanes;
        // SAFETY: all offsets are inside the tensors that the caller names. Lanes without a channel are written to
        // `apart`.
        unsafe {
            let first = to.at(group * each + block.first);
            let tile = Tile {
                a: Rows::Anywhere(&room.a),
                b: panels.at(self.panels.offset(group, block)),
                b_step: block.lanes,
                segments: &room.segments,
                length: adjacent * inner,
                start: (start.at(group * lanes(&self.panels.blocks) + block.first), &SAME[..rows]),
                to: match is_whole {
                    true => (first, &room.written[..rows]),
                    false => (room.apart.as_mut_ptr(), &APART[..rows]),
                },
            };
            self.shape.compute(&tile, block.lanes);
            if !is_whole {
                for (row, from) in room.written[..rows].iter().zip(room.apart.chunks_exact(MOST_LANES)) {
                    std::ptr::copy_nonoverlapping(from.as_ptr(), first.add(*row), block.channels);
                }
            }
        }
    }
}

/// Offsets of the rows in `Room::apart`.
static APART: [usize; MOST_ROWS] = {
    let mut offsets = [0; MOST_ROWS];
    let mut row = 0;
    while row < MOST_ROWS {
        offsets[row] = row * MOST_LANES;
        row += 1;
    }
    offsets
};

/// The map from an image and a grid to the weight gradient.
#[derive(Debug)]
pub(super) struct Gradient {
    shape: Shape,
    taps: Vec<Tap>,
    /// Blocks of a group's filters.
    blocks: Vec<Block>,
    /// Number of channels of a group.
    channels: usize,
    /// Number of rows of the grid that are read before other rows, of all images.
    near: usize,
    /// Number of partial sums.
    splits: usize,
}

/// The pixels of the grid that read pixels of the image through a tap.
#[derive(Debug)]
struct Tap {
    /// Rows and columns of the grid.
    rows: Range<usize>,
    columns: Range<usize>,
    /// The pixel of the image that the grid's pixel 0 reads.
    first: [isize; 2],
}

impl Gradient {
    pub(super) fn of(conv: &Conv) -> Gradient {
        let (shape, [down, across]) = (Shape::of_cpu(), [0, 1].map(|d| Reads::of_grid(conv, d)));
        let taps_of = |reads: &Reads| {
            let phase = &reads.phases[0];
            phase.taps.iter().map(|(_, start)| (reads.inside(phase, *start), *start)).collect::<Vec<_>>()
        };
        let (rows, columns) = (taps_of(&down), taps_of(&across));
        let pairs =
            rows.iter().flat_map(|row| columns.iter().map(move |column| (row.clone(), column.clone())));
        let taps: Vec<Tap> =
            pairs.map(|((rows, y), (columns, x))| Tap { rows, columns, first: [y, x] }).collect();
        let blocks = blocks(shape, conv.outputs / conv.groups);
        let channels = conv.inputs / conv.groups;
        let line = (down.step * across.source * conv.inputs + conv.out[1] * conv.outputs) * size_of::<f32>();
        let sums = conv.groups * lanes(&blocks) * channels * taps.len();
        let splits = SPLITS.min(conv.rows() / PIXELS).min(SUMS / sums).min(conv.n * conv.out[0]).max(1);
        let near = (NEAR / line).min(LONG / conv.out[1]).max(1);
        Gradient { shape, taps, blocks, channels, near, splits }
    }

    /// Number of elements of a group's patch.
    fn patch(&self) -> usize {
        self.channels * self.taps.len()
    }

    /// Computes the weight gradient from an image and a grid.
    ///
    /// # Safety
    /// The requirements are those of [`Direct::to_grid`].
    pub(super) unsafe fn compute(
        &self,
        host: &dyn HostKernels,
        conv: &Conv,
        [image, grid, weight]: [Shared<f32>; 3],
    ) -> bool {
        // Lanes without a filter may be read after the end of the grid.
        let whole = self.blocks.iter().all(|block| block.channels == block.lanes);
        let copied = if whole { 0 } else { conv.rows() * conv.outputs + SLACK };
        let sum = conv.groups * lanes(&self.blocks) * self.patch();
        with_scratch(copied + self.splits * sum, |scratch| {
            let (copy, sums) = scratch.split_at_mut(copied);
            let (copy, sums) = (Shared(copy.as_mut_ptr()), Shared(sums.as_mut_ptr()));
            // SAFETY: the scratch memory was sized for the copy and the partial sums, and the tensors have the sizes of
            // the convolution.
            unsafe {
                if !whole {
                    let (rows, each) = (conv.n * conv.out[0], conv.out[1] * conv.outputs);
                    each_row(host, rows, each, &|begin, end| {
                        let (at, n) = (begin * each, (end - begin) * each);
                        copy.slice(at, n).copy_from_slice(grid.read(at, n));
                    });
                }
                self.sums(host, conv, [image, if whole { grid } else { copy }, sums]);
                self.add(host, conv, sums, weight);
            }
            true
        })
    }

    /// The ranges of the image and of the grid that are multiplied for a tap and some rows of the grid, and their length
    /// in pixels.
    fn segments(&self, conv: &Conv, tap: &Tap, lines: Range<usize>, to: &mut Vec<[usize; 2]>) -> usize {
        let ([height, width], [down, across]) = (conv.size, conv.stride);
        to.clear();
        let mut length = tap.columns.len();
        // Pixels that follow each other from row to row are one range.
        let joined = tap.columns.len() == conv.out[1]
            && conv.out[1] * across == width * down
            && tap.rows.len() == conv.out[0]
            && conv.out[0] * down == height;
        if length > 0 {
            let column = tap.columns.start;
            for line in lines.clone() {
                let (image, row) = (line / conv.out[0], line % conv.out[0]);
                if tap.rows.contains(&row) {
                    let y = (row * down).wrapping_add_signed(tap.first[0]);
                    let x = (column * across).wrapping_add_signed(tap.first[1]);
                    let from = ((image * height + y) * width + x) * conv.inputs;
                    to.push([from, (line * conv.out[1] + column) * conv.outputs]);
                }
                if joined {
                    length *= lines.len();
                    break;
                }
            }
        }
        length
    }

    /// Computes the partial sums, `[split][group][block][channel][tap][lane]`.
    ///
    /// # Safety
    /// The addresses are those of the images, of the grids, which have [`SLACK`] floats after them if some lanes have no
    /// filter, and of the sums. Nobody writes the first two during the call or uses the sums.
    unsafe fn sums(&self, host: &dyn HostKernels, conv: &Conv, [image, grid, sums]: [Shared<f32>; 3]) {
        let (tiles, blocks, taps) =
            (self.channels.div_ceil(self.shape.rows), self.blocks.len(), self.taps.len());
        let (lines, split_items) = (conv.n * conv.out[0], conv.groups * taps * tiles * blocks);
        let rows = self.channels.div_ceil(tiles);
        let each = conv.rows() * rows * self.blocks[0].lanes / self.splits / PRODUCTS;
        each_row(host, self.splits * split_items, each, &|begin, end| {
            let (mut segments, mut offsets) = (Vec::new(), Vec::new());
            for split in begin / split_items..end.div_ceil(split_items) {
                let items = begin.max(split * split_items)..end.min((split + 1) * split_items);
                let own = lines * split / self.splits..lines * (split + 1) / self.splits;
                for first in own.clone().step_by(self.near) {
                    let near = first..own.end.min(first + self.near);
                    let mut known = (usize::MAX, 0);
                    for item in items.clone() {
                        let (block, tile) = (&self.blocks[item % blocks], item / blocks % tiles);
                        let (number, group) =
                            (item / (blocks * tiles) % taps, item / (blocks * tiles * taps) % conv.groups);
                        if known.0 != number {
                            let tap = &self.taps[number];
                            known = (number, self.segments(conv, tap, near.clone(), &mut segments));
                        }
                        let channels = self.channels * tile / tiles..self.channels * (tile + 1) / tiles;
                        offsets.clear();
                        offsets
                            .extend(channels.clone().map(|channel| (channel * taps + number) * block.lanes));
                        // SAFETY: the tile is one of the split's, and one thread alone computes it. Its segments are
                        // inside the image and the grid.
                        unsafe {
                            let first_channel = group * self.channels + channels.start;
                            let at = (split * conv.groups + group) * lanes(&self.blocks) + block.first;
                            let to = sums.at(at * self.patch());
                            let start = match first == own.start {
                                true => (ZEROS.as_ptr(), &SAME[..channels.len()]),
                                false => (to.cast_const(), &offsets[..]),
                            };
                            let tile = Tile {
                                a: Rows::Adjacent(image.at(first_channel), conv.stride[1] * conv.inputs),
                                b: grid.at(group * (conv.outputs / conv.groups) + block.first),
                                b_step: conv.outputs,
                                segments: &segments,
                                length: known.1,
                                start,
                                to: (to, &offsets),
                            };
                            self.shape.compute(&tile, block.lanes);
                        }
                    }
                }
            }
        });
    }

    /// Adds the partial sums, and writes them as a weight `[groups * filters, patch]`.
    ///
    /// # Safety
    /// The addresses are those of the partial sums and of the weight. Nobody writes the first during the call or uses
    /// the second.
    unsafe fn add(&self, host: &dyn HostKernels, conv: &Conv, sums: Shared<f32>, weight: Shared<f32>) {
        let (groups, filters, patch) = (conv.groups, conv.outputs / conv.groups, self.patch());
        let (parts, all) = (patch.div_ceil(PART), groups * lanes(&self.blocks) * patch);
        let (blocks, each) = (self.blocks.len(), MOVE * PART * MOST_LANES * self.splits);
        let filters_of_block: Vec<Option<usize>> = (0..MOST_LANES).map(Some).collect();
        each_row(host, groups * blocks * parts, each, &|begin, end| {
            for item in begin..end {
                let (first, block, group) =
                    (item % parts * PART, &self.blocks[item / parts % blocks], item / parts / blocks);
                let from = (group * lanes(&self.blocks) + block.first) * patch + first * block.lanes;
                // SAFETY: the rows are some of the block's, and one thread alone writes its elements of the weight.
                unsafe {
                    let lines = Lines {
                        from: sums.at(from),
                        step: block.lanes,
                        left: self.splits * all - from,
                        rows: PART.min(patch - first),
                        columns: block.channels,
                        addends: self.splits,
                        apart: all,
                    };
                    let to = weight.at((group * filters + block.first) * patch + first);
                    turn(&lines, lines.rows, to, &filters_of_block, patch);
                }
            }
        });
    }
}

/// Number of elements of a patch whose partial sums a thread adds at once.
const PART: usize = 64;
