//! Loops over channels-last tensors: threads compute blocks of pixels, some adjacent channels at a time.

use crate::channels_last::strips;
use crate::kernels::channel_norms::{LANES, Layout, total};
use crate::kernels::each_row;
use crate::kernels::kernel::SendPtr;
use crate::kernels::rows::divided;
use crate::kernels::scratch::{with_doubles, with_scratch};
use crate::widest::widest;
use tandem_executor::host::HostKernels;

/// Largest number of adjacent channels: a cache line of floats, and a vector of float64 numbers in sums.
const WIDTH: usize = 16;
const WIDE: usize = 8;

/// Pixels of a block, and the number of channels of the tensor.
#[derive(Clone, Copy)]
struct Strip {
    pixels: usize,
    step: usize,
}

/// Calls `$body` with the constant `$width` as type argument.
macro_rules! by_width {
    ($width:expr, $body:ident($($arg:expr),*)) => {
        match $width {
            WIDTH => $body::<WIDTH>($($arg),*),
            8 => $body::<8>($($arg),*),
            4 => $body::<4>($($arg),*),
            _ => $body::<1>($($arg),*),
        }
    };
}

impl Layout {
    fn strip(self, block: usize) -> Strip {
        let pixels = self.block.min(self.count() - block * self.block);
        Strip { pixels, step: self.planes.channels }
    }
}

/// Function that computes two sums for each of some adjacent channels of a block: `sums(strip, row, at, first, width,
/// to)`, where `at` is the offset of the block's first value of channel `first`.
type Sums<'s> = dyn Fn(Strip, usize, usize, usize, usize, &mut [[f64; WIDE]; 2]) + Sync + 's;

/// Computes two sums per channel of each of `rows` tensors that follow each other in memory. Passes the sums to `then`:
/// for each row, the first sums of all channels, and then the second sums. Returns false if there is no memory for the
/// sums.
fn sums(
    host: &dyn HostKernels,
    layout: Layout,
    rows: usize,
    sums: &Sums<'_>,
    then: impl FnOnce(&[f64]) -> bool,
) -> bool {
    let (n, blocks) = (layout.planes.channels, layout.blocks());
    with_doubles((blocks + 1) * rows * 2 * n, |all| {
        let (totals, all) = all.split_at_mut(rows * 2 * n);
        divided(host, all, rows * blocks, layout.block * n * 2, &|range, all| {
            for (item, to) in range.zip(all.chunks_exact_mut(2 * n)) {
                let (row, block) = (item / blocks, item % blocks);
                let at = row * layout.planes.len() + block * layout.block * n;
                for (first, width) in strips(n, WIDE) {
                    let mut found = [[0.0; WIDE]; 2];
                    sums(layout.strip(block), row, at + first, first, width, &mut found);
                    for (to, found) in to.chunks_exact_mut(n).zip(&found) {
                        to[first..][..width].copy_from_slice(&found[..width]);
                    }
                }
            }
        });
        totals.fill(0.0);
        for (total, blocks) in totals.chunks_exact_mut(2 * n).zip(all.chunks_exact(blocks * 2 * n)) {
            for block in blocks.chunks_exact(2 * n) {
                total.iter_mut().zip(block).for_each(|(total, sum)| *total += sum);
            }
        }
        then(totals)
    })
}

/// Computes, for each channel of each row, the sum of the differences of its values from `near`, and of their squares.
/// `near` has a number per row and channel. See [`sums`].
///
/// # Safety
/// `x` points to `rows` channels-last tensors with this layout, which nobody writes during the call.
pub(super) unsafe fn moments(
    host: &dyn HostKernels,
    layout: Layout,
    rows: usize,
    x: SendPtr<f32>,
    near: &[f32],
    then: impl FnOnce(&[f64]) -> bool,
) -> bool {
    let of_block = |strip: Strip, row, at, first, width, to: &mut [[f64; WIDE]; 2]| {
        let near = some(near, layout, row, first, width);
        // SAFETY: the channels and the block are those of a tensor.
        unsafe { moments_of_strip(SendPtr(x.at(at)), strip, width, &near, to) };
    };
    sums(host, layout, rows, &of_block, then)
}

/// Computes, for each channel of each row, the sum of its gradient, and of the gradient times `x - near`. `near` has a
/// number per row and channel. See [`sums`].
///
/// # Safety
/// `grad` and `x` point to `rows` channels-last tensors with this layout, which nobody writes during the call.
pub(super) unsafe fn products(
    host: &dyn HostKernels,
    layout: Layout,
    rows: usize,
    [grad, x]: [SendPtr<f32>; 2],
    near: &[f32],
    then: impl FnOnce(&[f64]) -> bool,
) -> bool {
    let of_block = |strip: Strip, row, at, first, width, to: &mut [[f64; WIDE]; 2]| {
        let near = some(near, layout, row, first, width);
        // SAFETY: the channels and the block are those of both tensors.
        unsafe { products_of_strip(SendPtr(grad.at(at)), SendPtr(x.at(at)), strip, width, &near, to) };
    };
    sums(host, layout, rows, &of_block, then)
}

/// The numbers of some channels of a row.
fn some(numbers: &[f32], layout: Layout, row: usize, first: usize, width: usize) -> [f32; WIDE] {
    let mut some = [0.0; WIDE];
    some[..width].copy_from_slice(&numbers[row * layout.planes.channels + first..][..width]);
    some
}

/// Normalizes channels with `numbers(row, channel)`: mean, factor and bias.
///
/// # Safety
/// `x` and `y` point to `rows` channels-last tensors with this layout. Nobody writes `x` or uses `y` during the call.
pub(super) unsafe fn normalize(
    host: &dyn HostKernels,
    layout: Layout,
    rows: usize,
    [x, y]: [SendPtr<f32>; 2],
    numbers: &dyn Fn(usize, usize) -> [f32; 3],
) -> bool {
    each_strip(host, layout, rows, numbers, &|strip, at, width, numbers| {
        // SAFETY: the strip is one of both tensors, and one thread alone computes it.
        unsafe { normalize_strip(SendPtr(x.at(at)), SendPtr(y.at(at)), strip, width, numbers) };
    })
}

/// Computes the gradient of the input, `grad * a + (mean - x) * b + c` for `[mean, a, b, c] = numbers(row, channel)`.
///
/// # Safety
/// `grad`, `x` and `to` point to `rows` channels-last tensors with this layout. Nobody writes `grad` and `x` or uses `to`
/// during the call.
pub(super) unsafe fn gradient(
    host: &dyn HostKernels,
    layout: Layout,
    rows: usize,
    tensors: [SendPtr<f32>; 3],
    numbers: &dyn Fn(usize, usize) -> [f32; 4],
) -> bool {
    each_strip(host, layout, rows, numbers, &|strip, at, width, numbers| {
        // SAFETY: the strip is one of all tensors, and one thread alone computes it.
        unsafe {
            let [grad, x, to] = tensors.map(|tensor| SendPtr(tensor.at(at)));
            gradient_of_strip(grad, x, to, strip, width, numbers);
        }
    })
}

/// Function that computes some adjacent channels of a block: `compute(strip, at, width, numbers)`, where `at` is the
/// offset of their first value.
type OfStrip<'s, const N: usize> = dyn Fn(Strip, usize, usize, &[[f32; WIDTH]; N]) + Sync + 's;

/// Calls `compute` for all strips of all blocks and rows. Returns false if there is no memory
/// for the numbers.
fn each_strip<const N: usize>(
    host: &dyn HostKernels,
    layout: Layout,
    rows: usize,
    numbers: &dyn Fn(usize, usize) -> [f32; N],
    compute: &OfStrip<'_, N>,
) -> bool {
    let (n, blocks) = (layout.planes.channels, layout.blocks());
    with_scratch(rows * N * n, |all| {
        for (row, to) in all.chunks_exact_mut(N * n).enumerate() {
            for c in 0..n {
                to.chunks_exact_mut(n).zip(numbers(row, c)).for_each(|(to, number)| to[c] = number);
            }
        }
        let all = &*all;
        each_row(host, rows * blocks, layout.block * n * 2, &|begin, end| {
            for item in begin..end {
                let (row, block) = (item / blocks, item % blocks);
                let at = row * layout.planes.len() + block * layout.block * n;
                for (first, width) in strips(n, WIDTH) {
                    let mut numbers = [[0.0; WIDTH]; N];
                    for (to, from) in numbers.iter_mut().zip(all[row * N * n..].chunks_exact(n)) {
                        to[..width].copy_from_slice(&from[first..][..width]);
                    }
                    compute(layout.strip(block), at + first, width, &numbers);
                }
            }
        });
        true
    })
}

widest! {
    /// Computes the sum of the differences of each channel's values from `first`, and of their squares.
    ///
    /// # Safety
    /// `x` points to the first value of `width` channels of the strip, which nobody writes during the call.
    unsafe fn moments_of_strip(
        x: SendPtr<f32>, strip: Strip, width: usize, first: &[f32; WIDE], to: &mut [[f64; WIDE]; 2],
    ) => run_moments
}

/// # Safety
/// The requirements are those of [`moments_of_strip`].
#[inline(always)]
unsafe fn run_moments(
    x: SendPtr<f32>,
    strip: Strip,
    width: usize,
    first: &[f32; WIDE],
    to: &mut [[f64; WIDE]; 2],
) {
    // SAFETY: this function has the requirements of `moments_of`.
    unsafe {
        match width {
            8 => moments_of::<8>(x, strip, first, to),
            4 => moments_of::<4>(x, strip, first, to),
            _ => moments_of::<1>(x, strip, first, to),
        }
    }
}

/// # Safety
/// The requirements are those of [`moments_of_strip`], for `W` channels.
#[inline(always)]
unsafe fn moments_of<const W: usize>(
    x: SendPtr<f32>,
    strip: Strip,
    first: &[f32; WIDE],
    to: &mut [[f64; WIDE]; 2],
) {
    let mut near = [0.0; W];
    for c in 0..W {
        near[c] = f64::from(first[c]);
    }
    lanes::<W>(strip.pixels, to, |pixel, sums, squares| {
        // SAFETY: the pixel is one of the strip's.
        let x = unsafe { *x.at(pixel * strip.step).cast::<[f32; W]>() };
        for c in 0..W {
            let x = f64::from(x[c]) - near[c];
            sums[c] += x;
            squares[c] += x * x;
        }
    });
}

widest! {
    /// Computes the sum of each channel's gradient, and of the gradient times `x - mean`.
    ///
    /// # Safety
    /// `grad` and `x` point to the first values of `width` channels of the strip, which nobody writes during the call.
    unsafe fn products_of_strip(
        grad: SendPtr<f32>, x: SendPtr<f32>, strip: Strip, width: usize, means: &[f32; WIDE], to: &mut [[f64; WIDE]; 2],
    ) => run_products
}

/// # Safety
/// The requirements are those of [`products_of_strip`].
#[inline(always)]
unsafe fn run_products(
    grad: SendPtr<f32>,
    x: SendPtr<f32>,
    strip: Strip,
    width: usize,
    means: &[f32; WIDE],
    to: &mut [[f64; WIDE]; 2],
) {
    // SAFETY: this function has the requirements of `products_of`.
    unsafe {
        match width {
            8 => products_of::<8>(grad, x, strip, means, to),
            4 => products_of::<4>(grad, x, strip, means, to),
            _ => products_of::<1>(grad, x, strip, means, to),
        }
    }
}

/// # Safety
/// The requirements are those of [`products_of_strip`], for `W` channels.
#[inline(always)]
unsafe fn products_of<const W: usize>(
    grad: SendPtr<f32>,
    x: SendPtr<f32>,
    strip: Strip,
    means: &[f32; WIDE],
    to: &mut [[f64; WIDE]; 2],
) {
    let mut near = [0.0; W];
    for c in 0..W {
        near[c] = f64::from(means[c]);
    }
    lanes::<W>(strip.pixels, to, |pixel, sums, products| {
        let at = pixel * strip.step;
        // SAFETY: the pixel is one of the strip's.
        let (grad, x) = unsafe { (*grad.at(at).cast::<[f32; W]>(), *x.at(at).cast::<[f32; W]>()) };
        for c in 0..W {
            sums[c] += f64::from(grad[c]);
            products[c] += f64::from(grad[c]) * (f64::from(x[c]) - near[c]);
        }
    });
}

/// Computes two sums per channel, to which `add(pixel, first, second)` adds terms.
#[inline(always)]
fn lanes<const W: usize>(
    pixels: usize,
    to: &mut [[f64; WIDE]; 2],
    add: impl Fn(usize, &mut [f64; W], &mut [f64; W]),
) {
    let (mut first, mut second) = ([[0.0; W]; LANES], [[0.0; W]; LANES]);
    let whole = pixels / LANES * LANES;
    for pixel in (0..whole).step_by(LANES) {
        for lane in 0..LANES {
            add(pixel + lane, &mut first[lane], &mut second[lane]);
        }
    }
    // The lanes of the last pixels are indexed by a constant, so that they stay in registers.
    for lane in 0..LANES - 1 {
        if whole + lane < pixels {
            add(whole + lane, &mut first[lane], &mut second[lane]);
        }
    }
    for c in 0..W {
        let (mut firsts, mut seconds) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES {
            (firsts[lane], seconds[lane]) = (first[lane][c], second[lane][c]);
        }
        (to[0][c], to[1][c]) = (total(&firsts), total(&seconds));
    }
}

widest! {
    /// Normalizes channels: mean, factor and bias of each are in `numbers`.
    ///
    /// # Safety
    /// `x` and `y` point to the first values of `width` channels of the strip. Nobody writes `x` or uses `y` during the
    /// call.
    unsafe fn normalize_strip(
        x: SendPtr<f32>, y: SendPtr<f32>, strip: Strip, width: usize, numbers: &[[f32; WIDTH]; 3],
    ) => run_normalize
}

/// # Safety
/// The requirements are those of [`normalize_strip`].
#[inline(always)]
unsafe fn run_normalize(
    x: SendPtr<f32>,
    y: SendPtr<f32>,
    strip: Strip,
    width: usize,
    numbers: &[[f32; WIDTH]; 3],
) {
    // SAFETY: this function has the requirements of `normalize_of`.
    unsafe { by_width!(width, normalize_of(x, y, strip, numbers)) }
}

/// # Safety
/// The requirements are those of [`normalize_strip`], for `W` channels.
#[inline(always)]
unsafe fn normalize_of<const W: usize>(
    x: SendPtr<f32>,
    y: SendPtr<f32>,
    strip: Strip,
    [mean, factor, bias]: &[[f32; WIDTH]; 3],
) {
    for pixel in 0..strip.pixels {
        // SAFETY: the pixel is one of the strip's.
        unsafe {
            let x = *x.at(pixel * strip.step).cast::<[f32; W]>();
            let y = &mut *y.at(pixel * strip.step).cast::<[f32; W]>();
            for c in 0..W {
                y[c] = (x[c] - mean[c]).mul_add(factor[c], bias[c]);
            }
        }
    }
}

widest! {
    /// Computes the gradient of the channels' input, see [`gradient`].
    ///
    /// # Safety
    /// `grad`, `x` and `to` point to the first values of `width` channels of the strip. Nobody writes `grad` and `x` or
    /// uses `to` during the call.
    unsafe fn gradient_of_strip(
        grad: SendPtr<f32>, x: SendPtr<f32>, to: SendPtr<f32>, strip: Strip, width: usize, numbers: &[[f32; WIDTH]; 4],
    ) => run_gradient
}

/// # Safety
/// The requirements are those of [`gradient_of_strip`].
#[inline(always)]
unsafe fn run_gradient(
    grad: SendPtr<f32>,
    x: SendPtr<f32>,
    to: SendPtr<f32>,
    strip: Strip,
    width: usize,
    numbers: &[[f32; WIDTH]; 4],
) {
    // SAFETY: this function has the requirements of `gradient_of`.
    unsafe { by_width!(width, gradient_of(grad, x, to, strip, numbers)) }
}

/// # Safety
/// The requirements are those of [`gradient_of_strip`], for `W` channels.
#[inline(always)]
unsafe fn gradient_of<const W: usize>(
    grad: SendPtr<f32>,
    x: SendPtr<f32>,
    to: SendPtr<f32>,
    strip: Strip,
    [mean, a, b, shift]: &[[f32; WIDTH]; 4],
) {
    for pixel in 0..strip.pixels {
        let at = pixel * strip.step;
        // SAFETY: the pixel is one of the strip's.
        unsafe {
            let (grad, x) = (*grad.at(at).cast::<[f32; W]>(), *x.at(at).cast::<[f32; W]>());
            let to = &mut *to.at(at).cast::<[f32; W]>();
            for c in 0..W {
                to[c] = grad[c].mul_add(a[c], (mean[c] - x[c]).mul_add(b[c], shift[c]));
            }
        }
    }
}
