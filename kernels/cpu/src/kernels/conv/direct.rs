//! Convolutions of channels-last tensors, computed tile by tile without laying out patches.
//!
//! [`Map`] computes the grid or the image, [`Gradient`] the weight gradient. A tile of their results is summed in
//! registers (see [`tile`](crate::kernels::conv::tile)).
//!
//! A convolution maps a batch of images (`image`) to its output (`grid`); a transposed convolution maps `grid` to
//! `image`.

use crate::kernels::conv::geometry::Conv;
use crate::kernels::conv::gradient::Gradient;
use crate::kernels::conv::map::Map;
use crate::kernels::conv::reads::Reads;

/// The kernels of a convolution.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) conv: Conv,
    pub(super) to_grid: Map,
    pub(super) to_image: Map,
    pub(super) gradient: Gradient,
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
}
