//! Loops of batch norm over channels-last tensors: some adjacent channels of all pixels at a time.
//!
//! The sums have the bits of those over row-major tensors: a channel's values are added to the same lanes in the same
//! order (see [`additions`](crate::cpu::own::additions)).

use crate::cpu::own::additions::{LANES, total};
use crate::cpu::own::kernel::Shared;
use crate::cpu::widest::widest;

/// Largest number of adjacent channels: a cache line of floats.
pub(super) const WIDTH: usize = 16;

/// Layout of adjacent channels, and how their values are grouped in sums.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    /// Number of groups of pixels that are added one after the other.
    pub(super) groups: usize,
    /// Number of pixels of a group.
    pub(super) pixels: usize,
    /// Number of channels of the tensor.
    pub(super) step: usize,
}

/// Splits channels into strips of 16, 8, 4 or 1: the first channel and the number of channels of each.
pub(super) fn strips(channels: usize) -> Vec<(usize, usize)> {
    let mut strips = Vec::with_capacity(channels.div_ceil(WIDTH) + 4);
    let mut at = 0;
    while at < channels {
        let width = match channels - at {
            WIDTH.. => WIDTH,
            8.. => 8,
            4.. => 4,
            _ => 1,
        };
        strips.push((at, width));
        at += width;
    }
    strips
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

widest! {
    /// Computes the mean of each channel, and the sum of squared differences from it.
    ///
    /// # Safety
    /// `x` points to the first value of `width` channels with this layout, which nobody writes during the call.
    pub(super) unsafe fn moments(x: Shared<f32>, strip: Strip, width: usize, to: &mut [[f64; 2]; WIDTH]) => run_moments
}

/// # Safety
/// The requirements are those of [`moments`].
#[inline(always)]
unsafe fn run_moments(x: Shared<f32>, strip: Strip, width: usize, to: &mut [[f64; 2]; WIDTH]) {
    // SAFETY: this function has the requirements of `moments_of`.
    unsafe { by_width!(width, moments_of(x, strip, to)) }
}

/// # Safety
/// The requirements are those of [`moments`], for `W` channels.
#[inline(always)]
unsafe fn moments_of<const W: usize>(x: Shared<f32>, strip: Strip, to: &mut [[f64; 2]; WIDTH]) {
    let count = (strip.groups * strip.pixels) as f64;
    // SAFETY: the strip has `groups * pixels` pixels, of which `sum` asks for each.
    let values = |pixel: usize| unsafe { *x.at(pixel * strip.step).cast::<[f32; W]>() };
    let first = values(0);
    let sums = sum::<W>(strip, |pixel, to| {
        let x = values(pixel);
        for c in 0..W {
            to[c] += f64::from(x[c] - first[c]);
        }
    });
    let (mut means, mut near) = ([0.0; W], [0.0; W]);
    for c in 0..W {
        means[c] = f64::from(first[c]) + sums[c] / count;
        near[c] = means[c] as f32;
    }
    let squares = sum::<W>(strip, |pixel, to| {
        let x = values(pixel);
        for c in 0..W {
            to[c] += f64::from((x[c] - near[c]) * (x[c] - near[c]));
        }
    });
    for c in 0..W {
        let off = means[c] - f64::from(near[c]);
        to[c] = [means[c], (squares[c] - off * off * count).max(0.0)];
    }
}

widest! {
    /// Computes the sum of each channel's gradient, and of the gradient times `x - mean`.
    ///
    /// # Safety
    /// `grad` and `x` point to the first values of `width` channels with this layout, which nobody writes during the
    /// call.
    pub(super) unsafe fn products(
        grad: Shared<f32>, x: Shared<f32>, strip: Strip, width: usize, means: &[f32; WIDTH], to: &mut [[f64; 2]; WIDTH],
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
    means: &[f32; WIDTH],
    to: &mut [[f64; 2]; WIDTH],
) {
    // SAFETY: this function has the requirements of `products_of`.
    unsafe { by_width!(width, products_of(grad, x, strip, means, to)) }
}

/// # Safety
/// The requirements are those of [`products`], for `W` channels.
#[inline(always)]
unsafe fn products_of<const W: usize>(
    grad: Shared<f32>,
    x: Shared<f32>,
    strip: Strip,
    means: &[f32; WIDTH],
    to: &mut [[f64; 2]; WIDTH],
) {
    // SAFETY: the strip has `groups * pixels` pixels, of which `sum` asks for each.
    let values = |of: Shared<f32>, pixel: usize| unsafe { *of.at(pixel * strip.step).cast::<[f32; W]>() };
    let sums = sum::<W>(strip, |pixel, to| {
        let grad = values(grad, pixel);
        for c in 0..W {
            to[c] += f64::from(grad[c]);
        }
    });
    let products = sum::<W>(strip, |pixel, to| {
        let (grad, x) = (values(grad, pixel), values(x, pixel));
        for c in 0..W {
            to[c] += f64::from(grad[c]) * f64::from(x[c] - means[c]);
        }
    });
    for c in 0..W {
        to[c] = [sums[c], products[c]];
    }
}

/// Returns the sums of what `add(pixel, to)` adds to `to` over the pixels of a strip.
#[inline(always)]
fn sum<const W: usize>(strip: Strip, add: impl Fn(usize, &mut [f64; W])) -> [f64; W] {
    let mut lanes = [[0.0; W]; LANES];
    let mut rest = [0.0; W];
    for group in 0..strip.groups {
        let (begin, n) = (group * strip.pixels, strip.pixels);
        let (whole, halves) = (n / LANES * LANES, n / (LANES / 2) * (LANES / 2));
        for at in (0..whole).step_by(LANES) {
            for (i, lane) in lanes.iter_mut().enumerate() {
                add(begin + at + i, lane);
            }
        }
        for (i, lane) in lanes[..halves - whole].iter_mut().enumerate() {
            add(begin + whole + i, lane);
        }
        for i in halves..n {
            add(begin + i, &mut rest);
        }
    }
    let mut sums = [0.0; W];
    for c in 0..W {
        let mut channel = [0.0; LANES];
        for i in 0..LANES {
            channel[i] = lanes[i][c];
        }
        sums[c] = total(&channel, rest[c]);
    }
    sums
}

widest! {
    /// Normalizes channels: mean, factor and bias of each are in `numbers`.
    ///
    /// # Safety
    /// `x` and `y` point to the first values of `width` channels with this layout. Nobody writes `x` or uses `y` during
    /// the call.
    pub(super) unsafe fn normalize(
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
    for pixel in 0..strip.groups * strip.pixels {
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
    /// `grad`, `x` and `to` point to the first values of `width` channels with this layout. Nobody writes `grad` and `x`
    /// or uses `to` during the call.
    pub(super) unsafe fn gradient(
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
    for pixel in 0..strip.groups * strip.pixels {
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
