//! The weight gradient of a convolution, computed from an image and a grid.
//!
//! A tile has channels of the image as rows and filters as lanes, for one tap of the filter. The sum goes over the pixels
//! of the grid that read the image through the tap. It is split by sizes alone.

use std::ops::Range;

use crate::kernels::conv::geometry::Conv;
use crate::kernels::conv::panels::{Block, Lines, MOVE, blocks, lanes, turn};
use crate::kernels::conv::reads::Reads;
use crate::kernels::conv::tile::{MAX_LANES, NEAR, PRODUCTS, Rows, SAME, Shape, Tile};
use crate::kernels::each_row;
use crate::kernels::kernel::SendPtr;
use crate::kernels::scratch::with_scratch;
use tandem_executor::host::HostKernels;

/// Largest number of partial sums of a weight gradient, smallest number of pixels of a partial sum, and largest number
/// of floats in all of them.
const SPLITS: usize = 16;
pub(super) const PIXELS: usize = 160;
const SUMS: usize = 1 << 19;
/// Number of pixels whose products are added to each other before they are added to a partial sum, which keeps its
/// rounding errors small.
const LONG: usize = 64;
/// Number of floats after the end of a grid that a tile may read.
const SLACK: usize = MAX_LANES;

/// Number of elements of a patch whose partial sums a thread adds at once.
const PART: usize = 64;

static ZEROS: [f32; MAX_LANES] = [0.0; MAX_LANES];

/// The kernel of a weight gradient.
#[derive(Debug)]
pub(super) struct Gradient {
    shape: Shape,
    taps: Vec<Tap>,
    /// Blocks of a group's filters.
    blocks: Vec<Block>,
    /// Number of channels of a group.
    channels: usize,
    /// Number of rows of the grid, over all images, that are multiplied for all tiles before the next rows.
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
    /// The pixel of the image that pixel 0 of the grid would read.
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
    /// The requirements are those of [`Map::compute`](crate::kernels::conv::map::Map::compute).
    pub(super) unsafe fn compute(
        &self,
        host: &dyn HostKernels,
        conv: &Conv,
        [image, grid, weight]: [SendPtr<f32>; 3],
    ) -> bool {
        // Lanes without a filter may be read after the end of the grid.
        let whole = self.blocks.iter().all(|block| block.channels == block.lanes);
        let copied = if whole { 0 } else { conv.rows() * conv.outputs + SLACK };
        let sum = conv.groups * lanes(&self.blocks) * self.patch();
        with_scratch(copied + self.splits * sum, |scratch| {
            let (copy, sums) = scratch.split_at_mut(copied);
            let (copy, sums) = (SendPtr(copy.as_mut_ptr()), SendPtr(sums.as_mut_ptr()));
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

    /// Finds the pixels that are multiplied for a tap and some rows of the grid, as ranges of equal length. `to` gets the
    /// beginning of each range in the image and in the grid. Returns the length in pixels.
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
    /// - The addresses point to the images, the grids and the sums.
    /// - If some lanes have no filter, [`SLACK`] floats follow the grids.
    /// - During the call, nobody writes the images or the grids, and nobody else uses the sums.
    unsafe fn sums(&self, host: &dyn HostKernels, conv: &Conv, [image, grid, sums]: [SendPtr<f32>; 3]) {
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
    /// - The addresses point to the partial sums and to the weight.
    /// - During the call, nobody writes the partial sums, and nobody else uses the weight.
    unsafe fn add(&self, host: &dyn HostKernels, conv: &Conv, sums: SendPtr<f32>, weight: SendPtr<f32>) {
        let (groups, filters, patch) = (conv.groups, conv.outputs / conv.groups, self.patch());
        let (parts, all) = (patch.div_ceil(PART), groups * lanes(&self.blocks) * patch);
        let (blocks, each) = (self.blocks.len(), MOVE * PART * MAX_LANES * self.splits);
        let filters_of_block: Vec<Option<usize>> = (0..MAX_LANES).map(Some).collect();
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
