//! Convolutions with few output pixels: the patches under the filter windows are laid out as matrix rows (`im2col`),
//! and the whole batch is one matrix product, which reads the weights once.

use crate::kernels::conv::geometry::{Conv, matrix};
use crate::kernels::each_row;
use crate::kernels::kernel::SendPtr;
use crate::kernels::matmul::multiply;
use crate::kernels::rows::divided;
use crate::kernels::scratch::with_scratch;
use tandem_executor::host::HostKernels;

impl Conv {
    /// Whether the patches are equal to the image, so that the image itself is multiplied.
    fn is_plain(&self) -> bool {
        self.pixels() == 1 && self.is_pointwise()
    }

    /// Calls `each(to, from)` for each element of an image's patches: `to` is its index in the patches, `from` its
    /// index in the image, or `None` for padding.
    #[inline(always)]
    fn each(&self, mut each: impl FnMut(usize, Option<usize>)) {
        let [height, width] = self.size;
        let at = |d: usize, out: usize, tap: usize| {
            (out * self.stride[d] + tap * self.dilation[d]).checked_sub(self.padding[d])
        };
        let patch = self.patch();
        for pixel in 0..self.pixels() {
            let mut to = pixel * patch;
            for channel in 0..self.inputs {
                for row in 0..self.filter[0] {
                    let y = at(0, pixel / self.out[1], row).filter(|y| *y < height);
                    for column in 0..self.filter[1] {
                        let x = at(1, pixel % self.out[1], column).filter(|x| *x < width);
                        let from = y.zip(x).map(|(y, x)| (channel * height + y) * width + x);
                        each(to, from);
                        to += 1;
                    }
                }
            }
        }
    }

    /// Lays out the patches of the batch, a row per output pixel.
    ///
    /// # Safety
    /// `x` points to the batch's images, which nobody writes during the call.
    unsafe fn patches(&self, host: &dyn HostKernels, x: SendPtr<f32>, to: &mut [f32]) {
        let (picture, all) = (self.inputs * self.size[0] * self.size[1], self.pixels() * self.patch());
        assert_eq!(to.len(), self.n * all);
        divided(host, to, self.n, all * 4, &|images, to| {
            for (i, to) in images.zip(to.chunks_exact_mut(all)) {
                // SAFETY: `x` has the size of `n` images.
                let x = unsafe { x.read(i * picture, picture) };
                self.each(|to_, from| to[to_] = from.map_or(0.0, |from| x[from]));
            }
        });
    }

    /// Fills images with a bias per channel and adds each element of the patches to the pixel that it was read from.
    ///
    /// # Safety
    /// `bias` points to an element per channel, which nobody writes during the call, and `to` to the batch's images,
    /// which nobody else uses.
    unsafe fn pictures(
        &self,
        host: &dyn HostKernels,
        patches: &[f32],
        bias: Option<SendPtr<f32>>,
        to: SendPtr<f32>,
    ) {
        let (picture, all) = (self.inputs * self.size[0] * self.size[1], self.pixels() * self.patch());
        each_row(host, self.n, all * 4, &|begin, end| {
            for i in begin..end {
                // SAFETY: `to` has the size of `n` images, each used by one thread alone, and the bias an element per
                // channel.
                let (to, bias) =
                    unsafe { (to.slice(i * picture, picture), bias.map(|bias| bias.read(0, self.inputs))) };
                let from = &patches[i * all..][..all];
                fill_planes(to, self.inputs, bias);
                self.each(|at, place| {
                    if let Some(place) = place {
                        to[place] += from[at];
                    }
                });
            }
        });
    }
}

/// Copies `[n, channels, pixels]` to `[n, pixels, channels]`.
fn channels_last(from: &[f32], to: &mut [f32], channels: usize, pixels: usize) {
    let each = channels * pixels;
    for (from, to) in from.chunks_exact(each).zip(to.chunks_exact_mut(each)) {
        for (c, from) in from.chunks_exact(pixels).enumerate() {
            for (p, x) in from.iter().enumerate() {
                to[p * channels + c] = *x;
            }
        }
    }
}

/// Fills each channel's plane with the channel's bias, or 0.
fn fill_planes(to: &mut [f32], channels: usize, bias: Option<&[f32]>) {
    let plane = to.len() / channels;
    for (channel, to) in to.chunks_exact_mut(plane).enumerate() {
        to.fill(bias.map_or(0.0, |bias| bias[channel]));
    }
}

/// Computes `grid = patches @ weight.T`, with an optional bias per filter.
///
/// # Safety
/// The addresses are those of contiguous tensors with the sizes of `conv`. During the call, nobody writes those that
/// are read or uses the one that is written.
pub unsafe fn to_grid(
    conv: &Conv,
    host: &dyn HostKernels,
    image: SendPtr<f32>,
    weight: SendPtr<f32>,
    bias: Option<SendPtr<f32>>,
    grid: SendPtr<f32>,
) -> bool {
    let (rows, patch, filters) = (conv.rows(), conv.patch(), conv.outputs);
    let one = conv.pixels() == 1;
    let cols = if conv.is_plain() { 0 } else { rows * patch };
    with_scratch(cols + if one { 0 } else { rows * filters }, |scratch| {
        let (patches, pixels) = scratch.split_at_mut(cols);
        let from = if cols == 0 {
            image.get()
        } else {
            // SAFETY: `image` has the batch's images and is only read.
            unsafe { conv.patches(host, image, patches) };
            patches.as_mut_ptr()
        };
        // SAFETY: the grid has `conv.outputs` channels of `conv.pixels()` for each image, and only this call uses
        // it.
        let grid = unsafe { grid.slice(0, rows * filters) };
        let to = if one { &mut *grid } else { &mut *pixels };
        if let Some(bias) = bias {
            // SAFETY: the bias has an element per filter and is only read.
            let bias = unsafe { bias.read(0, filters) };
            to.chunks_exact_mut(filters).for_each(|row| row.copy_from_slice(bias));
        }
        let (a, b) = (matrix(from, patch, false), matrix(weight.get(), patch, true));
        let (c, beta) = (matrix(to.as_mut_ptr(), filters, false), f64::from(u8::from(bias.is_some())));
        // SAFETY: `from` has `rows` rows of `patch` elements, `weight` a row per filter, and the result, which is the
        // grid or scratch memory, `rows` rows of `filters` elements.
        let done = unsafe { multiply(host, &conv.product([rows, filters, patch], a, b, c, beta)) };
        if !one {
            // Back to the layout of a tensor, in which each channel is contiguous.
            channels_last(pixels, grid, conv.pixels(), filters);
        }
        done
    })
}

/// Calls `with` with the grid as a matrix with a row per output pixel; returns false if there is no memory for it.
///
/// # Safety
/// `grid` points to the grids of all images of the batch, which nobody writes during the call.
unsafe fn with_rows(conv: &Conv, grid: SendPtr<f32>, with: impl FnOnce(*mut f32) -> bool) -> bool {
    if conv.pixels() == 1 {
        return with(grid.get());
    }
    with_scratch(conv.rows() * conv.outputs, |rows| {
        // SAFETY: the slice is the whole batch's grids, which nobody writes during the call.
        let grid = unsafe { grid.read(0, conv.rows() * conv.outputs) };
        channels_last(grid, rows, conv.outputs, conv.pixels());
        with(rows.as_mut_ptr())
    })
}

/// Computes `patches = grid @ weight` and adds each patch element to the pixel that it was read from, with an
/// optional bias per channel.
///
/// # Safety
/// The addresses are those of contiguous tensors with the sizes of `conv`. During the call, nobody writes those that
/// are read or uses the one that is written.
pub unsafe fn to_image(
    conv: &Conv,
    host: &dyn HostKernels,
    grid: SendPtr<f32>,
    weight: SendPtr<f32>,
    bias: Option<SendPtr<f32>>,
    image: SendPtr<f32>,
) -> bool {
    let (rows, patch, filters) = (conv.rows(), conv.patch(), conv.outputs);
    let plain = conv.is_plain() && bias.is_none();
    // SAFETY: `grid` has the batch's grids, as rows of `filters` elements in the closure, and `weight` a row of `patch`
    // elements per filter. The result, which is the image or scratch memory, has `rows` rows of `patch` elements.
    unsafe {
        with_rows(conv, grid, |grid| {
            with_scratch(if plain { 0 } else { rows * patch }, |patches| {
                let to = if plain { image.get() } else { patches.as_mut_ptr() };
                let (a, b) = (matrix(grid, filters, false), matrix(weight.get(), patch, false));
                let c = matrix(to, patch, false);
                let done = multiply(host, &conv.product([rows, patch, filters], a, b, c, 0.0));
                if !plain {
                    conv.pictures(host, patches, bias, image);
                }
                done
            })
        })
    }
}

/// Computes the weight gradient `grid.T @ patches`.
///
/// # Safety
/// The addresses are those of contiguous tensors with the sizes of `conv`. During the call, nobody writes those that
/// are read or uses the one that is written.
pub unsafe fn to_weight(
    conv: &Conv,
    host: &dyn HostKernels,
    image: SendPtr<f32>,
    grid: SendPtr<f32>,
    weight: SendPtr<f32>,
) -> bool {
    let (rows, patch, filters) = (conv.rows(), conv.patch(), conv.outputs);
    // SAFETY: `grid` has the batch's grids, as rows of `filters` elements in the closure, and `from` has `rows` rows of
    // `patch` elements: the image or scratch memory. `weight` has a row of `patch` elements per filter.
    unsafe {
        with_rows(conv, grid, |grid| {
            with_scratch(if conv.is_plain() { 0 } else { rows * patch }, |patches| {
                let from = if conv.is_plain() {
                    image.get()
                } else {
                    conv.patches(host, image, patches);
                    patches.as_mut_ptr()
                };
                let (a, b) = (matrix(grid, filters, true), matrix(from, patch, false));
                let c = matrix(weight.get(), patch, false);
                multiply(host, &conv.product([filters, patch, rows], a, b, c, 0.0))
            })
        })
    }
}
