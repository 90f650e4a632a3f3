//! Convolutions of channels-last tensors, computed tile by tile without laying out patches.
//!
//! [`Map`] computes the grid or the image, [`Gradient`] the weight gradient. A tile of their results is summed in
//! registers (see [`tile`](crate::cpu::own::conv::tile)).
//!
//! A convolution maps a batch of images (`image`) to its output (`grid`); a transposed convolution maps `grid` to
//! `image`.

use crate::cpu::own::conv::geometry::Conv;
use crate::cpu::own::conv::gradient::Gradient;
use crate::cpu::own::conv::map::Map;
use crate::cpu::own::conv::reads::Reads;
use crate::cpu::own::kernel::Shared;
use crate::host::HostKernels;

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
