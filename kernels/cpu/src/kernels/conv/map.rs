//! The grid of a convolution, computed from an image, or the image, computed from a grid.
//!
//! The weights are laid out so that the channels of the result are contiguous. A tile has some pixels of the result as
//! rows and some of their channels as lanes. Through each tap, a row reads the channels of a pixel in place, or zeros.

use std::ops::Range;

use crate::kernels::conv::geometry::Conv;
use crate::kernels::conv::panels::{Block, Panels, blocks, lanes};
use crate::kernels::conv::reads::Reads;
use crate::kernels::conv::tile::{MAX_LANES, MAX_ROWS, NEAR, PRODUCTS, Rows, SAME, Shape, Tile};
use crate::kernels::each_row;
use crate::kernels::kernel::SendPtr;
use crate::kernels::scratch::with_scratch;
use tandem_executor::host::HostKernels;

/// The map from a source to a result, which computes the grid or the image.
#[derive(Debug)]
pub(super) struct Map {
    shape: Shape,
    /// The pixels of the source that the result's pixels read, down and across.
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
    /// Rows and columns whose pixels only read pixels inside of the source.
    inside: [Range<usize>; 2],
    /// For each tap, the pixel of the source that the first pixel reads through it, and the tap's index in a panel.
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
    /// For each row of a tile, the row and the column of the source that it reads through a tap at pixel 0, and the
    /// offset of this pixel in the source.
    read: [[usize; MAX_ROWS]; 3],
    /// Offset of each row in the result.
    written: [usize; MAX_ROWS],
    /// Memory for the results of a tile that has lanes without a channel.
    apart: [f32; MAX_ROWS * MAX_LANES],
}

impl Room {
    fn new() -> Room {
        Room {
            a: Vec::new(),
            segments: Vec::new(),
            read: [[0; MAX_ROWS]; 3],
            written: [0; MAX_ROWS],
            apart: [0.0; MAX_ROWS * MAX_LANES],
        }
    }
}

impl Map {
    /// The map to the grid, or to the image. `reads` has the pixels that its pixels read, down and across.
    pub(super) fn of(conv: &Conv, reads: [Reads; 2], to_grid: bool) -> Map {
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
    /// - The addresses point to dense tensors; sources and results are channels last.
    /// - During the call, nobody writes the sources, the weights or the bias, and nobody else uses the results.
    pub(super) unsafe fn compute(
        &self,
        host: &dyn HostKernels,
        n: usize,
        [from, weight, to]: [SendPtr<f32>; 3],
        bias: Option<SendPtr<f32>>,
    ) -> bool {
        let lanes = self.panels.groups * lanes(&self.panels.blocks);
        with_scratch(self.panels.len() + lanes + self.panels.inner(), |scratch| {
            let (panels, scratch) = scratch.split_at_mut(self.panels.len());
            let (start, zeros) = scratch.split_at_mut(lanes);
            zeros.fill(0.0);
            let [panels, first, zeros] =
                [panels.as_mut_ptr(), start.as_mut_ptr(), zeros.as_mut_ptr()].map(SendPtr);
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

    /// Writes the initial value of the sums, for each lane of each group.
    ///
    /// # Safety
    /// `bias` has an element per channel of the result.
    unsafe fn start(&self, bias: Option<SendPtr<f32>>, to: &mut [f32]) {
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
    /// - The addresses point to the sources, to as many zeros as there are inner channels, to the panels, to the
    ///   initial value of the sums, and to the results.
    /// - During the call, nobody else uses the results, and nobody writes the other memory.
    unsafe fn tiles(&self, host: &dyn HostKernels, n: usize, tensors: [SendPtr<f32>; 5]) {
        let tiles_of = |phase: &Phase| (n * phase.pixels()).div_ceil(self.shape.rows);
        let mut ends = Vec::with_capacity(self.phases.len());
        for phase in &self.phases {
            ends.push(ends.last().copied().unwrap_or(0) + tiles_of(phase));
        }
        let (all, blocks) = (ends.last().copied().unwrap_or(0), &self.panels.blocks);
        // Neighbouring tiles are computed for all blocks of channels before the next tiles, because their sources are
        // near each other.
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

    /// Finds the pixels of a tile and their offsets in the result. Returns whether all pixels that they read are in the
    /// source.
    fn place(&self, phase: &Phase, pixels: Range<usize>, room: &mut Room) -> bool {
        let [down, across] = [0, 1].map(|d| (&self.reads[d], &self.reads[d].phases[phase.of[d]]));
        let (mut image, at) = (pixels.start / phase.pixels(), pixels.start % phase.pixels());
        let (mut row, mut column) = (at / phase.size[1], at % phase.size[1]);
        let (mut inside, [height, width]) = (true, [down.0.source, across.0.source]);
        let [rows, columns, offsets] = &mut room.read;
        let mut begin = 0;
        // Each round takes pixels of one row of the phase.
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
    /// - The requirements of [`Map::tiles`].
    /// - The pixels are pixels of the phase, counted over all images.
    /// - There are at most `self.shape.rows` pixels.
    unsafe fn tile(
        &self,
        [source, zeros, panels, start, to]: [SendPtr<f32>; 5],
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
        // Distance in the source from pixel 0 to the pixel that is read through a tap.
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
                for (row, from) in room.written[..rows].iter().zip(room.apart.chunks_exact(MAX_LANES)) {
                    std::ptr::copy_nonoverlapping(from.as_ptr(), first.add(*row), block.channels);
                }
            }
        }
    }
}

/// Offsets of the rows in `Room::apart`.
static APART: [usize; MAX_ROWS] = {
    let mut offsets = [0; MAX_ROWS];
    let mut row = 0;
    while row < MAX_ROWS {
        offsets[row] = row * MAX_LANES;
        row += 1;
    }
    offsets
};
