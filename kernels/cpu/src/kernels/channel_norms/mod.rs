//! Norms whose statistics are sums over the pixels of channels: batch norm and group norm.
//!
//! The values of a channel, image by image, are split into blocks. A block has [`LANES`] sums, to which its values are
//! added in turn. So the sums have the same bits in row-major and in channels-last order.

pub(crate) mod batch;
mod channels_last;
pub(crate) mod group;
mod row_major;

use crate::channels_last::Planes;

/// Sizes of a contiguous tensor, and the blocks that its sums are split into.
#[derive(Clone, Copy)]
struct Layout {
    /// Sizes of the images whose pixels are summed together.
    planes: Planes,
    /// Number of a channel's values in a block.
    block: usize,
}

impl Layout {
    fn of(planes: Planes) -> Layout {
        let block = (NEAR / planes.channels).clamp(BLOCKS[0], BLOCKS[1]) / LANES * LANES;
        Layout { planes, block }
    }

    /// Number of values of a channel.
    fn count(self) -> usize {
        self.planes.images * self.planes.pixels
    }

    /// Number of blocks of a channel.
    fn blocks(self) -> usize {
        self.count().div_ceil(self.block)
    }
}

/// Number of sums of a block. The block's values are added to them in turn.
const LANES: usize = 8;
/// Number of values of all channels in a block, which fill a part of a first-level cache; and the smallest and largest
/// number of a channel's values in a block.
const NEAR: usize = 1 << 13;
const BLOCKS: [usize; 2] = [32, 256];

/// Returns the sum of a block.
#[inline(always)]
fn total(lanes: &[f64; LANES]) -> f64 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}
