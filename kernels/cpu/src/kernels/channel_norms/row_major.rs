//! Loops over a channel of a row-major tensor.

use std::mem::MaybeUninit;

use crate::kernels::channel_norms::{BLOCKS, LANES, Layout, total};
use crate::kernels::kernel::SendPtr;
use crate::widest::widest;

/// Room for the values of a block.
type Room = [MaybeUninit<f32>; BLOCKS[1]];

/// The values of a block, which are copied to `room` if they are in several images.
///
/// # Safety
/// - `x` points to the first value of a channel that has this layout and this block.
/// - Nobody writes the channel during the call, or while the values are in use.
#[inline(always)]
unsafe fn values(x: SendPtr<f32>, layout: Layout, block: usize, room: &mut Room) -> &[f32] {
    let pixels = layout.planes.pixels;
    let (begin, end) = (block * layout.block, layout.count().min((block + 1) * layout.block));
    let at = |value: usize| value / pixels * layout.planes.channels * pixels + value % pixels;
    // SAFETY: the values belong to the channel, and the values of an image are contiguous. The loop fills `room[..end -
    // begin]`.
    unsafe {
        if begin / pixels == (end - 1) / pixels {
            return x.read(at(begin), end - begin);
        }
        let mut from = begin;
        while from < end {
            let n = (pixels - from % pixels).min(end - from);
            room[from - begin..][..n].write_copy_of_slice(x.read(at(from), n));
            from += n;
        }
        room[..end - begin].assume_init_ref()
    }
}

widest! {
    /// Computes the sum of the differences of a channel's values from `first`, and of their squares.
    ///
    /// # Safety
    /// `x` points to the first value of a channel with this layout, which nobody writes during the call.
    pub(super) unsafe fn moments(x: SendPtr<f32>, layout: Layout, first: f32, to: &mut [f64; 2]) => run_moments
}

/// # Safety
/// The requirements are those of [`moments`].
#[inline(always)]
unsafe fn run_moments(x: SendPtr<f32>, layout: Layout, first: f32, to: &mut [f64; 2]) {
    let (first, mut room) = (f64::from(first), [const { MaybeUninit::uninit() }; BLOCKS[1]]);
    for block in 0..layout.blocks() {
        // SAFETY: the channel has the block.
        let x = unsafe { values(x, layout, block, &mut room) };
        let (mut sums, mut squares) = ([0.0; LANES], [0.0; LANES]);
        let (whole, rest) = x.as_chunks::<LANES>();
        // A loop per result, because other forms are not vectorized.
        for x in whole {
            for lane in 0..LANES {
                sums[lane] += f64::from(x[lane]) - first;
            }
        }
        for x in whole {
            for lane in 0..LANES {
                let x = f64::from(x[lane]) - first;
                squares[lane] += x * x;
            }
        }
        // Lanes are indexed by constants alone, so that they stay in registers.
        for lane in 0..LANES - 1 {
            if let Some(x) = rest.get(lane) {
                let x = f64::from(*x) - first;
                sums[lane] += x;
                squares[lane] += x * x;
            }
        }
        *to = [to[0] + total(&sums), to[1] + total(&squares)];
    }
}

widest! {
    /// Computes the sum of a channel's gradient, and of the gradient times `x - mean`.
    ///
    /// # Safety
    /// `grad` and `x` point to the first values of channels with this layout, which nobody writes during the call.
    pub(super) unsafe fn products(
        grad: SendPtr<f32>, x: SendPtr<f32>, layout: Layout, mean: f32, to: &mut [f64; 2],
    ) => run_products
}

/// # Safety
/// The requirements are those of [`products`].
#[inline(always)]
unsafe fn run_products(grad: SendPtr<f32>, x: SendPtr<f32>, layout: Layout, mean: f32, to: &mut [f64; 2]) {
    let mean = f64::from(mean);
    let [room, other] = &mut [[const { MaybeUninit::uninit() }; BLOCKS[1]]; 2];
    for block in 0..layout.blocks() {
        // SAFETY: both channels have the block.
        let (grad, x) = unsafe { (values(grad, layout, block, room), values(x, layout, block, other)) };
        let (mut sums, mut products) = ([0.0; LANES], [0.0; LANES]);
        let ((whole, rest), (whole_x, rest_x)) = (grad.as_chunks::<LANES>(), x.as_chunks::<LANES>());
        for grad in whole {
            for lane in 0..LANES {
                sums[lane] += f64::from(grad[lane]);
            }
        }
        for (grad, x) in whole.iter().zip(whole_x) {
            for lane in 0..LANES {
                products[lane] += f64::from(grad[lane]) * (f64::from(x[lane]) - mean);
            }
        }
        for lane in 0..LANES - 1 {
            if let (Some(grad), Some(x)) = (rest.get(lane), rest_x.get(lane)) {
                let grad = f64::from(*grad);
                sums[lane] += grad;
                products[lane] += grad * (f64::from(*x) - mean);
            }
        }
        *to = [to[0] + total(&sums), to[1] + total(&products)];
    }
}

widest! {
    /// Normalizes a channel with its mean, factor and bias.
    ///
    /// # Safety
    /// `x` and `y` point to the first values of channels with this layout. Nobody writes `x` or uses `y` during the call.
    pub(super) unsafe fn normalize(x: SendPtr<f32>, y: SendPtr<f32>, layout: Layout, numbers: [f32; 3]) => run_normalize
}

/// # Safety
/// The requirements are those of [`normalize`].
#[inline(always)]
unsafe fn run_normalize(x: SendPtr<f32>, y: SendPtr<f32>, layout: Layout, [mean, factor, bias]: [f32; 3]) {
    for image in 0..layout.planes.images {
        let begin = image * layout.planes.channels * layout.planes.pixels;
        for i in begin..begin + layout.planes.pixels {
            // SAFETY: `i` is the offset of an element of the image in both channels, which have this layout.
            unsafe { *y.at(i) = (*x.at(i) - mean).mul_add(factor, bias) };
        }
    }
}

widest! {
    /// Computes the gradient of a channel's input, `grad * a + (mean - x) * b + c` for the numbers `[mean, a, b, c]`.
    ///
    /// # Safety
    /// `grad`, `x` and `to` point to the first values of channels with this layout. Nobody writes `grad` and `x` or uses
    /// `to` during the call.
    pub(super) unsafe fn gradient(
        grad: SendPtr<f32>, x: SendPtr<f32>, to: SendPtr<f32>, layout: Layout, numbers: [f32; 4],
    ) => run_gradient
}

/// # Safety
/// The requirements are those of [`gradient`].
#[inline(always)]
unsafe fn run_gradient(
    grad: SendPtr<f32>,
    x: SendPtr<f32>,
    to: SendPtr<f32>,
    layout: Layout,
    [mean, a, b, c]: [f32; 4],
) {
    for image in 0..layout.planes.images {
        let begin = image * layout.planes.channels * layout.planes.pixels;
        for i in begin..begin + layout.planes.pixels {
            // SAFETY: `i` is the offset of an element of the image in all three channels, which have this layout.
            unsafe { *to.at(i) = (*grad.at(i)).mul_add(a, (mean - *x.at(i)).mul_add(b, c)) };
        }
    }
}
