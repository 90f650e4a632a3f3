//! Batch norm, which normalizes channels to mean 0 and variance 1, and its gradient.
//!
//! One thread computes a whole channel, so that the elements it reads again are in its cache. Sums are added image
//! by image.

mod channels_last;

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::cpu::channels_last::Planes;
use crate::cpu::own::additions::Sum;
use crate::cpu::own::batch_norm::channels_last::{Strip, WIDTH, strips};
use crate::cpu::own::kernel::{Addresses, Kernel, Shared};
use crate::cpu::own::norm::{Windows, output, wanted, weights};
use crate::cpu::own::rows::at;
use crate::cpu::own::{contiguous, count, each_row};
use crate::cpu::widest::widest;
use crate::host::HostKernels;
use crate::ir::{Mem, Ty};
use crate::ops::express::Param;

/// Layout of a channel: number of images, distance between their parts of the channel in elements, elements per
/// image.
#[derive(Clone, Copy)]
struct Channel {
    pictures: usize,
    step: usize,
    pixels: usize,
}

impl Channel {
    fn count(self) -> usize {
        self.pictures * self.pixels
    }

    /// Whether the elements of all images are copied together.
    fn is_gathered(self) -> bool {
        self.pixels < FEW && self.count() <= ROOM
    }

    /// The layout of adjacent ones of `channels` channels in a channels-last tensor.
    fn strip(self, channels: usize) -> Strip {
        match self.is_gathered() {
            true => Strip { groups: 1, pixels: self.count(), step: channels },
            false => Strip { groups: self.pictures, pixels: self.pixels, step: channels },
        }
    }

    fn planes(self, channels: usize) -> Option<Planes> {
        let planes = Planes { images: self.pictures, channels, pixels: self.pixels };
        (channels > 1).then_some(planes)
    }
}

/// Number of channels of a contiguous input, and their layout. `None` for fewer than 4 elements per image and
/// channel, for which the loops here are not made.
fn channels(sizes: &[i64]) -> Option<(usize, Channel)> {
    let [pictures, channels, rest @ ..] = sizes else { return None };
    let (pictures, channels, pixels) = (*pictures as usize, *channels as usize, count(rest));
    let long = !rest.is_empty() && pixels >= 4 && pictures * channels > 0;
    long.then_some((channels, Channel { pictures, step: channels * pixels, pixels }))
}

fn flag(call: &Call<'_>, arg: usize) -> Option<bool> {
    match call.args.get(arg)? {
        Arg::Bool(b) => Some(*b),
        _ => None,
    }
}

/// The running mean and variance: both or neither, and both if the call is not in training mode.
fn statistics(call: &Call<'_>, n: usize, training: bool) -> Option<Option<[crate::ops::express::Window; 2]>> {
    match (weights(call, 3, n)?, weights(call, 4, n)?) {
        (Some(mean), Some(variance)) => Some(Some([mean, variance])),
        (None, None) if training => Some(None),
        _ => None,
    }
}

/// `native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let x = contiguous(call, 0, Mem::F32)?;
    let (n, channel) = channels(&x.sizes)?;
    let training = flag(call, 5)?;
    let running = statistics(call, n, training)?;
    let mut windows = Windows::default();
    let (weight, bias) = (weights(call, 1, n)?, weights(call, 2, n)?);
    let (x, y) = (windows.add(x), windows.add(output(outputs, 0)?));
    let saved = match training {
        true => Some([windows.add(output(outputs, 1)?), windows.add(output(outputs, 2)?)]),
        false => None,
    };
    let running = running.map(|both| both.map(|w| windows.add(w)));
    let (weight, bias) = (windows.maybe(weight), windows.maybe(bias));
    // Mean and factor of a channel in the call: the batch's, from its mean and sum of squares, or the running ones.
    let numbers = move |data: Addresses<'_>, params: &[u64], c: usize, moments: &dyn Fn() -> [f64; 2]| {
        let [momentum, eps] = [f64::from_bits(params[0]), f64::from_bits(params[1])];
        // SAFETY: the windows have an element per channel, and one thread alone uses each channel.
        let number = |w: usize| unsafe { &mut *data.of::<f32>(w).at(c) };
        let [mean, scale] = match (saved, running) {
            (Some(saved), running) => {
                let [mean, squares] = moments();
                let count = channel.count() as f64;
                let scale = 1.0 / (squares / count + eps).sqrt();
                (*number(saved[0]), *number(saved[1])) = (mean as f32, scale as f32);
                if let Some([to_mean, to_variance]) = running.map(|both| both.map(number)) {
                    let next =
                        |old: f32, new: f64| (momentum * new + (1.0 - momentum) * f64::from(old)) as f32;
                    *to_mean = next(*to_mean, mean);
                    *to_variance = next(*to_variance, squares / (count - 1.0));
                }
                [mean, scale]
            }
            (None, Some([mean, variance])) => {
                [f64::from(*number(mean)), 1.0 / (f64::from(*number(variance)) + eps).sqrt()]
            }
            (None, None) => [0.0, 1.0],
        };
        let factor = scale * weight.map_or(1.0, |w| f64::from(*number(w)));
        [mean as f32, factor as f32, bias.map_or(0.0, |b| *number(b))]
    };
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        each_row(host, n, channel.count() * 4, &|from, to| {
            let mut room = [0.0; ROOM];
            for c in from..to {
                // SAFETY: all windows have `n` channels, and `c` is below `n`. The windows of `first` have the layout
                // `channel`. One thread alone uses each channel.
                unsafe {
                    let first = |w: usize| data.of::<f32>(w).at(c * channel.pixels);
                    let (near, together) = gathered(first(x), channel, &mut room);
                    let numbers = numbers(data, params, c, &|| {
                        let mut found = [0.0; 2];
                        moments(near, together, &mut found);
                        found
                    });
                    if together.pictures == channel.pictures {
                        normalize(near, first(y), channel, numbers);
                    } else {
                        normalize(near, near, together, numbers);
                        move_pictures(first(y), channel, near, true);
                    }
                }
            }
        });
        true
    };
    let on_strips = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let (strip, strips) = (channel.strip(n), strips(n));
        each_row(host, strips.len(), channel.count() * 4 * WIDTH, &|from, to| {
            for (first, width) in &strips[from..to] {
                // SAFETY: the windows are channels last, with `n` channels and the pixels of `strip`. One thread alone
                // uses each strip.
                unsafe {
                    let [x, y] = [x, y].map(|w| Shared(data.of::<f32>(w).at(*first)));
                    let mut found = [[0.0; 2]; WIDTH];
                    if saved.is_some() {
                        channels_last::moments(x, strip, *width, &mut found);
                    }
                    let mut all = [[0.0; WIDTH]; 3];
                    for (i, found) in found.iter().enumerate().take(*width) {
                        let [mean, factor, bias] = numbers(data, params, first + i, &|| *found);
                        (all[0][i], all[1][i], all[2][i]) = (mean, factor, bias);
                    }
                    channels_last::normalize(x, y, strip, *width, &all);
                }
            }
        });
        true
    };
    let params = smallvec![Param::Number(6, 0, Ty::F64), Param::Number(7, 0, Ty::F64)];
    let kernel = Kernel::new(windows.0, params, work);
    Some(match channel.planes(n) {
        Some(planes) => kernel.or_channels_last(&[(x, planes), (y, planes)], on_strips),
        None => kernel,
    })
}

/// `native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
/// output_mask)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, x) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let (n, channel) = channels(&x.sizes)?;
    if grad.sizes != x.sizes || !flag(call, 7)? {
        return None;
    }
    let given = |number: usize| wanted(outputs, number);
    let (to_x, to_weight, to_bias) = (given(0)?, given(1)?, given(2)?);
    let mut windows = Windows::default();
    let weight = weights(call, 2, n)?;
    let (mean, scale) = (weights(call, 5, n)??, weights(call, 6, n)??);
    let (grad, x) = (windows.add(grad), windows.add(x));
    let (mean, scale) = (windows.add(mean), windows.add(scale));
    let weight = windows.maybe(weight);
    let (to_x, to_weight, to_bias) = (windows.maybe(to_x), windows.maybe(to_weight), windows.maybe(to_bias));
    // Writes the gradients of a channel's weight and bias. Returns the numbers of its input's gradient.
    let numbers = move |data: Addresses<'_>, c: usize, [sum, product]: [f64; 2]| {
        // SAFETY: the windows have an element per channel, and one thread alone uses each channel.
        let number = |w: usize| unsafe { &mut *data.of::<f32>(w).at(c) };
        let (mean, scale) = (*number(mean), f64::from(*number(scale)));
        to_weight.into_iter().for_each(|to| *number(to) = (product * scale) as f32);
        to_bias.into_iter().for_each(|to| *number(to) = sum as f32);
        let count = channel.count() as f64;
        let factor = scale * weight.map_or(1.0, |w| f64::from(*number(w)));
        let by = product * scale * scale / count;
        [mean, (sum / count) as f32, by as f32, factor as f32]
    };
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        each_row(host, n, channel.count() * 4, &|from, to| {
            let mut rooms = [[0.0; ROOM]; 2];
            for c in from..to {
                // SAFETY: all windows have `n` channels, and `c` is below `n`. The windows of `first` have the layout
                // `channel`. One thread alone uses each channel.
                unsafe {
                    let first = |w: usize| data.of::<f32>(w).at(c * channel.pixels);
                    let mean = *data.of::<f32>(mean).at(c);
                    let mut sums = [0.0; 2];
                    let [room, other] = &mut rooms;
                    let (near, together) = gathered(first(grad), channel, room);
                    let (near_x, _) = gathered(first(x), channel, other);
                    products(near, near_x, together, mean, &mut sums);
                    let numbers = numbers(data, c, sums);
                    let Some(to) = to_x else { continue };
                    if together.pictures == channel.pictures {
                        gradient(near, near_x, first(to), channel, numbers);
                    } else {
                        gradient(near, near_x, near, together, numbers);
                        move_pictures(first(to), channel, near, true);
                    }
                }
            }
        });
        true
    };
    let on_strips = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (strip, strips) = (channel.strip(n), strips(n));
        each_row(host, strips.len(), channel.count() * 4 * WIDTH, &|from, to| {
            for (first, width) in &strips[from..to] {
                // SAFETY: the windows are channels last, with `n` channels and the pixels of `strip`. One thread alone
                // uses each strip.
                unsafe {
                    let at = |w: usize| Shared(data.of::<f32>(w).at(*first));
                    let (mut means, mut sums) = ([0.0; WIDTH], [[0.0; 2]; WIDTH]);
                    means[..*width].copy_from_slice(data.of::<f32>(mean).read(*first, *width));
                    channels_last::products(at(grad), at(x), strip, *width, &means, &mut sums);
                    let mut all = [[0.0; WIDTH]; 4];
                    for (i, sums) in sums.iter().enumerate().take(*width) {
                        for (all, number) in all.iter_mut().zip(numbers(data, first + i, *sums)) {
                            all[i] = number;
                        }
                    }
                    if let Some(to) = to_x {
                        channels_last::gradient(at(grad), at(x), at(to), strip, *width, &all);
                    }
                }
            }
        });
        true
    };
    let kernel = Kernel::new(windows.0, SmallVec::new(), work);
    let planes = channel.planes(n).map(|planes| [Some(grad), Some(x), to_x].map(|w| w.map(|w| (w, planes))));
    Some(match planes {
        Some(planes) => {
            let planes: SmallVec<[(usize, Planes); 3]> = planes.into_iter().flatten().collect();
            kernel.or_channels_last(&planes, on_strips)
        }
        None => kernel,
    })
}

/// Largest number of elements of a channel that are copied together, and number of elements per image from which
/// they are not.
const ROOM: usize = 1024;
const FEW: usize = 64;

/// Returns a channel's elements, copied together in `room` if each image has few of them.
///
/// # Safety
/// `x` points to a channel with this layout, which nobody writes during the call.
unsafe fn gathered(x: *mut f32, channel: Channel, room: &mut [f32; ROOM]) -> (*mut f32, Channel) {
    let count = channel.count();
    if !channel.is_gathered() {
        return (x, channel);
    }
    // SAFETY: `x` has this layout and is not written, and `count` is at most the size of `room`.
    unsafe { move_pictures(x, channel, room.as_mut_ptr(), false) };
    (room.as_mut_ptr(), Channel { pictures: 1, step: 0, pixels: count })
}

/// Copies a channel's elements from all images to `room`, or back.
///
/// # Safety
/// `x` points to a channel with this layout and `room` to as many floats; nobody else uses either.
unsafe fn move_pictures(x: *mut f32, channel: Channel, room: *mut f32, back: bool) {
    // SAFETY: `x` and `room` are those of this function, which requires the same of them; 1, 4 and 16 divide the number
    // of pixels where they are used.
    unsafe {
        match channel.pixels {
            4 => move_parts::<4>(x, channel, room, back),
            16 => move_parts::<16>(x, channel, room, back),
            _ => move_parts::<1>(x, channel, room, back),
        }
    }
}

/// Implements [`move_pictures`] with `N` elements at a time.
///
/// # Safety
/// The requirements are those of [`move_pictures`], and `N` divides the number of pixels.
#[inline(always)]
unsafe fn move_parts<const N: usize>(x: *mut f32, channel: Channel, room: *mut f32, back: bool) {
    for number in 0..channel.pictures {
        for part in (0..channel.pixels).step_by(N) {
            // SAFETY: `N` divides the number of pixels, so the part ends within the image's elements and within
            // `room`.
            unsafe {
                let there = x.add(number * channel.step + part).cast::<[f32; N]>();
                let here = room.add(number * channel.pixels + part).cast::<[f32; N]>();
                if back {
                    there.write_unaligned(here.read_unaligned());
                } else {
                    here.write_unaligned(there.read_unaligned());
                }
            }
        }
    }
}

/// Returns an image's part of a channel.
///
/// # Safety
/// `x` points to a channel with this layout that has the image, and nobody writes it while the slice is in use.
unsafe fn picture<'a>(x: *mut f32, channel: Channel, number: usize) -> &'a [f32] {
    // SAFETY: the channel has the image, whose elements are contiguous, and nobody writes them.
    unsafe { Shared(x).read(number * channel.step, channel.pixels) }
}

widest! {
    /// Computes the mean, and the sum of squared differences from it.
    ///
    /// # Safety
    /// `x` points to a channel with this layout, which nobody writes during the call.
    unsafe fn moments(x: *mut f32, channel: Channel, to: &mut [f64; 2]) => run_moments
}

/// # Safety
/// The requirements are those of [`moments`].
#[inline(always)]
unsafe fn run_moments(x: *mut f32, channel: Channel, to: &mut [f64; 2]) {
    let count = channel.count() as f64;
    // SAFETY: the channel has at least one element, since `channels` refuses empty ones, and nobody writes it.
    unsafe {
        // Differences from the first value lose little precision if all values are far from 0.
        let first = *x;
        let mean = f64::from(first) + sum(x, channel, |x| x - first) / count;
        let near = mean as f32;
        let off = mean - f64::from(near);
        let squares = sum(x, channel, |x| (x - near) * (x - near)) - off * off * count;
        *to = [mean, squares.max(0.0)];
    }
}

/// Returns the sum of `value(x)` over a channel.
///
/// # Safety
/// `x` points to a channel with this layout, which nobody writes during the call.
#[inline(always)]
unsafe fn sum(x: *mut f32, channel: Channel, value: impl Fn(f32) -> f32) -> f64 {
    let mut sum = Sum::new();
    for number in 0..channel.pictures {
        // SAFETY: `number` is below the number of images of the channel that `x` points to.
        let x = unsafe { picture(x, channel, number) };
        // SAFETY: `i < x.len()`.
        sum.add(x.len(), |i| value(unsafe { at(x, i) }));
    }
    sum.total()
}

widest! {
    /// Normalizes a channel. `x` and `y` may be equal.
    ///
    /// # Safety
    /// `x` and `y` point to channels with this layout. Nobody writes `x` or uses `y` during the call.
    unsafe fn normalize(x: *mut f32, y: *mut f32, channel: Channel, numbers: [f32; 3]) => run_normalize
}

/// # Safety
/// The requirements are those of [`normalize`].
#[inline(always)]
unsafe fn run_normalize(x: *mut f32, y: *mut f32, channel: Channel, [mean, factor, bias]: [f32; 3]) {
    for number in 0..channel.pictures {
        let begin = number * channel.step;
        for i in begin..begin + channel.pixels {
            // SAFETY: `i` is the offset of an element of image `number` in both channels, which have this layout.
            unsafe { *y.add(i) = (*x.add(i) - mean).mul_add(factor, bias) };
        }
    }
}

widest! {
    /// Computes the sum of a gradient, and of the gradient times `x - mean`.
    ///
    /// # Safety
    /// `grad` and `x` point to channels with this layout, which nobody writes during the call.
    unsafe fn products(grad: *mut f32, x: *mut f32, channel: Channel, mean: f32, to: &mut [f64; 2]) => run_products
}

/// # Safety
/// The requirements are those of [`products`].
#[inline(always)]
unsafe fn run_products(grad: *mut f32, x: *mut f32, channel: Channel, mean: f32, to: &mut [f64; 2]) {
    let (mut sum, mut product) = (Sum::new(), Sum::new());
    for number in 0..channel.pictures {
        // SAFETY: both channels have image `number`, since they have this layout. The slices have `channel.pixels`
        // elements, and `i` is below that.
        unsafe {
            let (grad, x) = (picture(grad, channel, number), picture(x, channel, number));
            sum.add(grad.len(), |i| at(grad, i));
            product.add_products(grad.len(), |i| at(grad, i), |i| at(x, i) - mean);
        }
    }
    *to = [sum.total(), product.total()];
}

widest! {
    /// Computes the gradient of a channel's input. `grad` and `to` may be equal.
    ///
    /// # Safety
    /// `grad`, `x` and `to` point to channels with this layout. Nobody writes `grad` and `x` or uses `to` during the
    /// call.
    unsafe fn gradient(grad: *mut f32, x: *mut f32, to: *mut f32, channel: Channel, numbers: [f32; 4]) => run_gradient
}

/// # Safety
/// The requirements are those of [`gradient`].
#[inline(always)]
unsafe fn run_gradient(
    grad: *mut f32,
    x: *mut f32,
    to: *mut f32,
    channel: Channel,
    [mean, sum, product, factor]: [f32; 4],
) {
    for number in 0..channel.pictures {
        let begin = number * channel.step;
        for i in begin..begin + channel.pixels {
            // SAFETY: `i` is the offset of an element of image `number` in all three channels, which have this layout.
            unsafe { *to.add(i) = (mean - *x.add(i)).mul_add(product, *grad.add(i) - sum) * factor };
        }
    }
}
