//! Weights laid out for [`Tile`](crate::kernels::conv::tile::Tile): the lanes of a tile are contiguous.
//!
//! The layout is `[group][block of lanes][tap][inner channel][lane]`. Inner channels are summed over; the lanes are
//! channels of the result.

use crate::kernels::conv::tile::{MAX_LANES, Shape};
use crate::kernels::each_row;
use crate::kernels::kernel::SendPtr;
use crate::vector::{MAX_LANES as BLOCK, Vector, with_vectors};
use tandem_executor::host::HostKernels;

/// Cost of a float of a weight that is not in a cache, in elements of a simple loop.
pub(super) const MOVE: usize = 8;

/// A channel range of a group that a tile computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// First channel, which is also the number of lanes of the blocks before.
    pub(super) first: usize,
    /// Number of channels.
    pub(super) channels: usize,
    /// Number of lanes, which is at least the number of channels.
    pub(super) lanes: usize,
}

/// Splits the channels of a group into blocks.
pub(super) fn blocks(shape: Shape, channels: usize) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut first = 0;
    while first < channels {
        let left = channels - first;
        let lanes = shape.lanes(left);
        blocks.push(Block { first, channels: left.min(lanes), lanes });
        first += lanes;
    }
    blocks
}

/// Number of lanes of all blocks.
pub(super) fn lanes(blocks: &[Block]) -> usize {
    blocks.last().map_or(0, |block| block.first + block.lanes)
}

/// Layout of the panels of a weight `[groups * filters, channels, taps]`.
#[derive(Clone, Debug)]
pub(super) struct Panels {
    pub(super) groups: usize,
    /// Number of filters of a group, and of their channels.
    pub(super) filters: usize,
    pub(super) channels: usize,
    /// Whether filters are the lanes. Otherwise channels are.
    pub(super) by_filter: bool,
    /// Blocks of lanes.
    pub(super) blocks: Vec<Block>,
    /// Index of each tap among the taps of a block; `None` for taps that are not used.
    pub(super) places: Vec<Option<usize>>,
}

impl Panels {
    /// Number of inner channels.
    pub(super) fn inner(&self) -> usize {
        if self.by_filter { self.channels } else { self.filters }
    }

    /// Number of floats of a lane.
    fn depth(&self) -> usize {
        self.places.len() * self.inner()
    }

    /// Number of floats of all panels.
    pub(super) fn len(&self) -> usize {
        self.groups * lanes(&self.blocks) * self.depth()
    }

    /// Offset of a block's panel.
    pub(super) fn offset(&self, group: usize, block: &Block) -> usize {
        (group * lanes(&self.blocks) + block.first) * self.depth()
    }

    /// Lays out a weight.
    ///
    /// # Safety
    /// - `weight` has the sizes of this layout, and nobody writes it during the call.
    /// - `to` has room for `self.len()` floats, which nobody else uses.
    pub(super) unsafe fn lay_out(&self, host: &dyn HostKernels, weight: SendPtr<f32>, to: SendPtr<f32>) {
        let (taps, patch) = (self.places.len(), self.places.len() * self.channels);
        let rows = if self.by_filter { patch.div_ceil(BLOCK) } else { self.filters };
        let (all, blocks) = (self.groups * self.filters * patch, self.blocks.len());
        let each = MOVE * MAX_LANES * if self.by_filter { BLOCK } else { taps };
        // Offsets of the columns in a panel. The unit is a line: the lanes of a tap and an inner channel.
        let inner = self.inner();
        let offsets: Vec<Option<usize>> = match self.by_filter {
            true => (0..patch).map(|at| Some(self.places[at % taps]? * inner + at / taps)).collect(),
            false => self.places.iter().map(|place| Some((*place)? * inner)).collect(),
        };
        each_row(host, self.groups * blocks * rows, each, &|begin, end| {
            for item in begin..end {
                let (row, block, group) =
                    (item % rows, &self.blocks[item / rows % blocks], item / rows / blocks);
                let from = group * self.filters * patch;
                let (from, step, columns) = match self.by_filter {
                    true => {
                        let columns = row * BLOCK..patch.min((row + 1) * BLOCK);
                        (from + block.first * patch + row * BLOCK, patch, columns)
                    }
                    false => (from + row * patch + block.first * taps, taps, 0..taps),
                };
                let to_row = if self.by_filter { 0 } else { row * block.lanes };
                // SAFETY: the rows and columns are inside the weight, which has `all` floats. Each item writes lines of
                // its own, and each line has room for the block's lanes.
                unsafe {
                    let lines = Lines {
                        from: weight.at(from),
                        step,
                        left: all - from,
                        rows: block.channels,
                        columns: columns.len(),
                        addends: 1,
                        apart: 0,
                    };
                    let to = to.at(self.offset(group, block) + to_row);
                    turn(&lines, block.lanes, to, &offsets[columns], block.lanes);
                }
            }
        });
    }
}

/// A matrix whose columns are copied to given offsets, or the sum of several such matrices.
pub(super) struct Lines {
    pub(super) from: *const f32,
    /// Distance between rows.
    pub(super) step: usize,
    /// Number of floats from `from` to the end of the memory.
    pub(super) left: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Number of matrices that are added, and their distance.
    pub(super) addends: usize,
    pub(super) apart: usize,
}

with_vectors! {
    /// Copies each column of a matrix to its offset from `to`, followed by zeros up to a length of `length` floats.
    /// Columns without an offset are left out. The unit of offsets is `unit` floats.
    ///
    /// # Safety
    /// - The matrix is in live memory, with `left` floats from its beginning on, and nobody writes it during the call.
    /// - `length` is not less than the number of rows.
    /// - `offsets` has an item per column.
    /// - At each offset there is room for `length` floats, which nobody else uses.
    pub(super) unsafe fn turn(lines: &Lines, length: usize, to: *mut f32, offsets: &[Option<usize>], unit: usize) => run_turn
}

/// # Safety
/// The requirements are those of [`turn`], and the CPU has vectors of type `T`.
#[inline(always)]
unsafe fn run_turn<T: Vector>(
    lines: &Lines,
    length: usize,
    to: *mut f32,
    offsets: &[Option<usize>],
    unit: usize,
) {
    for column in (0..lines.columns).step_by(T::LANES) {
        let columns = T::LANES.min(lines.columns - column);
        for row in (0..length).step_by(T::LANES) {
            let rows = T::LANES.min(lines.rows.saturating_sub(row));
            let at = row * lines.step + column;
            let last = (lines.addends - 1) * lines.apart + (T::LANES - 1) * lines.step + T::LANES;
            let copied: [f32; BLOCK * BLOCK];
            // SAFETY: the columns are inside the matrices. A block that is read in place is inside the memory; others are
            // copied, as far as they are inside the matrices. The places have room for `length` floats.
            unsafe {
                let from = lines.from.add(at);
                let (from, step, addends) = if rows == T::LANES && at + last <= lines.left {
                    (from, lines.step, lines.addends)
                } else {
                    let mut copy = [0.0; BLOCK * BLOCK];
                    for (i, addend) in (0..rows).flat_map(|i| (0..lines.addends).map(move |a| (i, a))) {
                        for k in 0..columns {
                            copy[i * BLOCK + k] += *from.add(addend * lines.apart + i * lines.step + k);
                        }
                    }
                    copied = copy;
                    (copied.as_ptr(), BLOCK, 1)
                };
                let mut block = [T::splat(0.0); BLOCK];
                for (i, line) in block.iter_mut().enumerate().take(T::LANES) {
                    *line = T::load(from.add(i * step));
                    for addend in 1..addends {
                        *line = line.plus(T::load(from.add(addend * lines.apart + i * step)));
                    }
                }
                T::transpose(&mut block);
                let width = T::LANES.min(length - row);
                // The number of steps is constant, so that the block stays in registers.
                for i in 0..T::LANES {
                    let Some(offset) = (if i < columns { offsets[column + i] } else { None }) else {
                        continue;
                    };
                    let to = to.add(offset * unit + row);
                    if width == T::LANES {
                        block[i].store(to);
                    } else {
                        let mut line = [0.0; BLOCK];
                        block[i].store(line.as_mut_ptr());
                        std::ptr::copy_nonoverlapping(line.as_ptr(), to, width);
                    }
                }
            }
        }
    }
}
