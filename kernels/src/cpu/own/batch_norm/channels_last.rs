//! Batch norm of channels-last tensors: threads compute blocks of pixels, some adjacent channels at a time.

use crate::cpu::own::batch_norm::{LANES, Layout, total};
use crate::cpu::own::each_row;
use crate::cpu::own::kernel::Shared;
use crate::cpu::own::scratch::{with_doubles, with_scratch};
use crate::cpu::widest::widest;
use crate::host::HostKernels;

/// Largest number of adjacent channels: a cache line of floats, and a vector of float64 numbers in sums.
const WIDTH: usize = 16;
const WIDE: usize = 8;

/// Pixels of a block, and the number of channels of the tensor.
#[derive(Clone, Copy)]
struct Strip {
    pixels: usize,
    step: usize,
}

/// Splits channels into strips of `widest`, 8, 4 or 1: the first channel and the number of channels of each.
fn strips(channels: usize, widest: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let (first, left) = (next, channels - next);
        let width = [widest, 8, 4, 1].into_iter().find(|width| *width <= left)?;
        next += width;
        Some((first, width))
    })
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

/// Computes two sums for each of some adjacent channels of a block: `sums(strip, pixel, channel, width, to)`.
type Sums<'s> = dyn Fn(Strip, usize, usize, usize, &mut [[f64; WIDE]; 2]) + Sync + 's;

/// Computes two sums per channel with `sums(strip, pixel, channel, width, to)`, which computes those of the block that
/// begins at a pixel, for some adjacent channels. Passes them to `then`: all first sums, then all second ones. Returns
/// false if there is no memory for them.
fn sums(host: &dyn HostKernels, layout: Layout, sums: &Sums<'_>, then: impl FnOnce(&[f64]) -> bool) -> bool {
    let (n, blocks) = (layout.planes.channels, layout.blocks());
    with_doubles(blocks * 2 * n, |all| {
        let to = Shared(all.as_mut_ptr());
        each_row(host, blocks, layout.block * n * 2, &|begin, end| {
            for block in begin..end {
                // SAFETY: there are two sums per channel for each block, which one thread alone computes.
                let to = unsafe { to.slice(block * 2 * n, 2 * n) };
                for (first, width) in strips(n, WIDE) {
                    let mut found = [[0.0; WIDE]; 2];
                    sums(layout.strip(block), block * layout.block, first, width, &mut found);
                    for (to, found) in to.chunks_exact_mut(n).zip(&found) {
                        to[first..][..width].copy_from_slice(&found[..width]);
                    }
                }
            }
        });
        let (to, others) = all.split_at_mut(2 * n);
        for other in others.chunks_exact(2 * n) {
            to.iter_mut().zip(other).for_each(|(to, more)| *to += more);
        }
        then(to)
    })
}

impl Layout {
    fn strip(self, block: usize) -> Strip {
        let pixels = self.block.min(self.count() - block * self.block);
        Strip { pixels, step: self.planes.channels }
    }
}

/// Computes the output. `numbers(sums, to)` gets the sums of the differences of each channel's values from its first one,
/// followed by those of their squares, and writes the mean, the factor and the bias of all channels.
///
/// # Safety
/// `x` and `y` point to channels-last tensors with this layout. Nobody writes `x` or uses `y` during the call.
pub(super) unsafe fn forward(
    host: &dyn HostKernels,
    layout: Layout,
    [x, y]: [Shared<f32>; 2],
    training: bool,
    numbers: &dyn Fn(&[f64], &mut [f32]),
) -> bool {
    let n = layout.planes.channels;
    let then = |sums: &[f64]| {
        with_scratch(3 * n, |all| {
            numbers(sums, all);
            let all = &*all;
            each_row(host, layout.blocks(), layout.block * n * 2, &|begin, end| {
                for block in begin..end {
                    for (first, width) in strips(n, WIDTH) {
                        let mut numbers = [[0.0; WIDTH]; 3];
                        for (to, from) in numbers.iter_mut().zip(all.chunks_exact(n)) {
                            to[..width].copy_from_slice(&from[first..][..width]);
                        }
                        // SAFETY: the block and the channels are the tensors', and one thread alone computes the block.
                        unsafe {
                            let [x, y] = [x, y].map(|x| Shared(x.at(block * layout.block * n + first)));
                            normalize(x, y, layout.strip(block), width, &numbers);
                        }
                    }
                }
            });
            true
        })
    };
    if !training {
        return then(&[]);
    }
    let of_block = |strip: Strip, pixel: usize, first: usize, width: usize, to: &mut [[f64; WIDE]; 2]| {
        let mut near = [0.0; WIDE];
        // SAFETY: the channels and the block are those of `x`.
        unsafe {
            near[..width].copy_from_slice(x.read(first, width));
            moments(Shared(x.at(pixel * n + first)), strip, width, &near, to);
        }
    };
    sums(host, layout, &of_block, then)
}

/// Computes the gradient of the input, unless `to` is `None`. `numbers(sums, to)` gets the sum of each channel's
/// gradient, followed by the sums of the gradient times `x - mean`, and writes the mean, the mean gradient, the factor of
/// `mean - x` and the factor of the result of all channels.
///
/// # Safety
/// `grad`, `x` and `to` point to channels-last tensors with this layout, and `mean` to a number per channel. Nobody
/// writes `grad`, `x` or `mean` or uses `to` during the call.
pub(super) unsafe fn backward(
    host: &dyn HostKernels,
    layout: Layout,
    [grad, x, mean]: [Shared<f32>; 3],
    to: Option<Shared<f32>>,
    numbers: &dyn Fn(&[f64], &mut [f32]),
) -> bool {
    let n = layout.planes.channels;
    let of_block = |strip: Strip, pixel: usize, first: usize, width: usize, to: &mut [[f64; WIDE]; 2]| {
        let mut means = [0.0; WIDE];
        // SAFETY: the channels and the block are those of `grad` and `x`.
        unsafe {
            means[..width].copy_from_slice(mean.read(first, width));
            let [grad, x] = [grad, x].map(|x| Shared(x.at(pixel * n + first)));
            products(grad, x, strip, width, &means, to);
        }
    };
    sums(host, layout, &of_block, |sums| {
        with_scratch(4 * n, |all| {
            numbers(sums, all);
            let (Some(to), all) = (to, &*all) else { return true };
            each_row(host, layout.blocks(), layout.block * n * 2, &|begin, end| {
                for block in begin..end {
                    for (first, width) in strips(n, WIDTH) {
                        let mut numbers = [[0.0; WIDTH]; 4];
                        for (to, from) in numbers.iter_mut().zip(all.chunks_exact(n)) {
                            to[..width].copy_from_slice(&from[first..][..width]);
                        }
                        // SAFETY: the block and the channels are the tensors', and one thread alone computes the block.
                        unsafe {
                            let at = block * layout.block * n + first;
                            let [grad, x, to] = [grad, x, to].map(|x| Shared(x.at(at)));
                            gradient(grad, x, to, layout.strip(block), width, &numbers);
                        }
                    }
                }
            });
            true
        })
    })
}

widest! {
    /// Computes the sum of the differences of each channel's values from `first`, and of their squares.
    ///
    /// # Safety
    /// `x` points to the first value of `width` channels of the strip, which nobody writes during the call.
    unsafe fn moments(
        x: Shared<f32>, strip: Strip, width: usize, first: &[f32; WIDE], to: &mut [[f64; WIDE]; 2],
    ) => run_moments
}

/// # Safety
/// The requirements are those of [`moments`].
#[inline(always)]
unsafe fn run_moments(
    x: Shared<f32>,
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
/// The requirements are those of [`moments`], for `W` channels.
#[inline(always)]
unsafe fn moments_of<const W: usize>(
    x: Shared<f32>,
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
    unsafe fn products(
        grad: Shared<f32>, x: Shared<f32>, strip: Strip, width: usize, means: &[f32; WIDE], to: &mut [[f64; WIDE]; 2],
    ) => run_products
}

/// # Safety
/// The requirements are those of [`products`].
#[inline(always)]
unsafe fn run_products(
    grad: Shared<f32>,
    x: Shared<f32>,
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
/// The requirements are those of [`products`], for `W` channels.
#[inline(always)]
unsafe fn products_of<const W: usize>(
    grad: Shared<f32>,
    x: Shared<f32>,
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

/// Computes two sums per channel of what `add(pixel, first, second)` adds to them.
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
    unsafe fn normalize(
        x: Shared<f32>, y: Shared<f32>, strip: Strip, width: usize, numbers: &[[f32; WIDTH]; 3],
    ) => run_normalize
}

/// # Safety
/// The requirements are those of [`normalize`].
#[inline(always)]
unsafe fn run_normalize(
    x: Shared<f32>,
    y: Shared<f32>,
    strip: Strip,
    width: usize,
    numbers: &[[f32; WIDTH]; 3],
) {
    // SAFETY: this function has the requirements of `normalize_of`.
    unsafe { by_width!(width, normalize_of(x, y, strip, numbers)) }
}

/// # Safety
/// The requirements are those of [`normalize`], for `W` channels.
#[inline(always)]
unsafe fn normalize_of<const W: usize>(
    x: Shared<f32>,
    y: Shared<f32>,
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
    /// Computes the gradient of the channels' input: mean, mean gradient, factor of `mean - x` and factor of the result
    /// of each are in `numbers`.
    ///
    /// # Safety
    /// `grad`, `x` and `to` point to the first values of `width` channels of the strip. Nobody writes `grad` and `x` or
    /// uses `to` during the call.
    unsafe fn gradient(
        grad: Shared<f32>, x: Shared<f32>, to: Shared<f32>, strip: Strip, width: usize, numbers: &[[f32; WIDTH]; 4],
    ) => run_gradient
}

/// # Safety
/// The requirements are those of [`gradient`].
#[inline(always)]
unsafe fn run_gradient(
    grad: Shared<f32>,
    x: Shared<f32>,
    to: Shared<f32>,
    strip: Strip,
    width: usize,
    numbers: &[[f32; WIDTH]; 4],
) {
    // SAFETY: this function has the requirements of `gradient_of`.
    unsafe { by_width!(width, gradient_of(grad, x, to, strip, numbers)) }
}

/// # Safety
/// The requirements are those of [`gradient`], for `W` channels.
#[inline(always)]
unsafe fn gradient_of<const W: usize>(
    grad: Shared<f32>,
    x: Shared<f32>,
    to: Shared<f32>,
    strip: Strip,
    [mean, sum, product, factor]: &[[f32; WIDTH]; 4],
) {
    for pixel in 0..strip.pixels {
        let at = pixel * strip.step;
        // SAFETY: the pixel is one of the strip's.
        unsafe {
            let (grad, x) = (*grad.at(at).cast::<[f32; W]>(), *x.at(at).cast::<[f32; W]>());
            let to = &mut *to.at(at).cast::<[f32; W]>();
            for c in 0..W {
                to[c] = (mean[c] - x[c]).mul_add(product[c], grad[c] - sum[c]) * factor[c];
            }
        }
    }
}
