//! Batch norm, which normalizes channels to mean 0 and variance 1, and its gradient.
//!
//! In row-major order, one thread computes a whole channel, so that the values it reads again are in its cache.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::channels_last::{Order, Planes};
use crate::kernels::channel_norms::{Layout, channels_last, row_major};
use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::norm::{Windows, output, weights};
use crate::kernels::permuted::{Tensor, given, in_either_order, made, wanted};
use crate::kernels::{count, each_row};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Ty;
use tandem_executor::ops::express::Param;

/// The layout of an input. `None` for 2 or 3 elements per image and channel, for which these loops are not intended.
fn layout(sizes: &[i64]) -> Option<Layout> {
    let [images, channels, rest @ ..] = sizes else { return None };
    let planes = Planes { images: *images as usize, channels: *channels as usize, pixels: count(rest) };
    let fits = (planes.pixels == 1 || planes.pixels >= 4) && planes.images * planes.channels > 0;
    fits.then(|| Layout::of(planes))
}

fn flag(call: &Call<'_>, arg: usize) -> Option<bool> {
    match call.args.get(arg)? {
        Arg::Bool(b) => Some(*b),
        _ => None,
    }
}

/// The windows of the running mean and variance. Either both are given or neither, and both must be given unless the
/// call is in training mode.
fn statistics(
    call: &Call<'_>,
    n: usize,
    training: bool,
) -> Option<Option<[tandem_executor::ops::express::TensorGeometry; 2]>> {
    match (weights(call, 3, n)?, weights(call, 4, n)?) {
        (Some(mean), Some(variance)) => Some(Some([mean, variance])),
        (None, None) if training => Some(None),
        _ => None,
    }
}

/// `native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let x = given(call, 0)?;
    let layout = layout(&x.sizes)?;
    let n = layout.planes.channels;
    let training = flag(call, 5)?;
    let running = statistics(call, n, training)?;
    let mut windows = Windows::default();
    let (weight, bias) = (weights(call, 1, n)?, weights(call, 2, n)?);
    let (x, y) = (windows.add(x), windows.add(made(outputs, 0)?));
    let saved = match training {
        true => Some([windows.add(output(outputs, 1)?), windows.add(output(outputs, 2)?)]),
        false => None,
    };
    let running = running.map(|both| both.map(|w| windows.add(w)));
    let (weight, bias) = (windows.maybe(weight), windows.maybe(bias));
    // Mean and factor of a channel: from the batch's mean and sum of squares, or from the running statistics.
    let numbers = move |data: Addresses<'_>, params: &[u64], c: usize, first: f32, sums: [f64; 2]| {
        let [momentum, eps] = [f64::from_bits(params[0]), f64::from_bits(params[1])];
        // SAFETY: the windows have an element per channel, and one thread alone uses each channel.
        let number = |w: usize| unsafe { &mut *data.of::<f32>(w).at(c) };
        let [mean, scale] = match (saved, running) {
            (Some(saved), running) => {
                // The sums are over differences from the first value, so that little precision is lost if all values
                // are far from 0.
                let count = layout.count() as f64;
                let mean = f64::from(first) + sums[0] / count;
                let squares = (sums[1] - sums[0] * (sums[0] / count)).max(0.0);
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
        each_row(host, n, layout.count() * 4, &|from, to| {
            for c in from..to {
                // SAFETY: all windows have `n` channels, and `c` is below `n`. One thread alone uses each channel.
                unsafe {
                    let [x, y] = [x, y].map(|w| SendPtr(data.of::<f32>(w).at(c * layout.planes.pixels)));
                    let (first, mut sums) = (*x.get(), [0.0; 2]);
                    if saved.is_some() {
                        row_major::moments(x, layout, first, &mut sums);
                    }
                    row_major::normalize(x, y, layout, numbers(data, params, c, first, sums));
                }
            }
        });
        true
    };
    let on_pixels = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let [x, y] = [x, y].map(|w| data.of::<f32>(w));
        // SAFETY: `x` and `y` are channels last and have the sizes of the layout.
        unsafe {
            let first = x.read(0, n);
            let normalize = |sums: &[f64]| {
                let numbers = |_, c: usize| {
                    let of = |number: usize| sums.get(number * n + c).copied().unwrap_or_default();
                    numbers(data, params, c, first[c], [of(0), of(1)])
                };
                channels_last::normalize(host, layout, 1, [x, y], &numbers)
            };
            match saved {
                Some(_) => channels_last::moments(host, layout, 1, x, first, normalize),
                None => normalize(&[]),
            }
        }
    };
    let params = smallvec![Param::Number(6, 0, Ty::F64), Param::Number(7, 0, Ty::F64)];
    if layout.planes.pixels == 1 {
        // Both orders are the same.
        return Some(Kernel::new(windows.0, params, on_pixels));
    }
    let tensors = [Tensor::read(x, Order::ChannelsLast), Tensor::written(y, Order::ChannelsLast)];
    Some(in_either_order(windows.0, params, &tensors, work, on_pixels))
}

/// `native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
/// output_mask)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, x) = (given(call, 0)?, given(call, 1)?);
    let layout = layout(&x.sizes)?;
    let n = layout.planes.channels;
    if grad.sizes != x.sizes || !flag(call, 7)? {
        return None;
    }
    let (to_x, to_weight, to_bias) = (wanted(outputs, 0)?, wanted(outputs, 1)?, wanted(outputs, 2)?);
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
        let count = layout.count() as f64;
        let factor = scale * weight.map_or(1.0, |w| f64::from(*number(w)));
        let by = factor * product * scale * scale / count;
        [mean, factor as f32, by as f32, (-factor * sum / count) as f32]
    };
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        each_row(host, n, layout.count() * 4, &|from, to| {
            for c in from..to {
                // SAFETY: all windows have `n` channels, and `c` is below `n`. One thread alone uses each channel.
                unsafe {
                    let at = |w: usize| SendPtr(data.of::<f32>(w).at(c * layout.planes.pixels));
                    let (mean, mut sums) = (*data.of::<f32>(mean).at(c), [0.0; 2]);
                    row_major::products(at(grad), at(x), layout, mean, &mut sums);
                    let numbers = numbers(data, c, sums);
                    if let Some(to) = to_x {
                        row_major::gradient(at(grad), at(x), at(to), layout, numbers);
                    }
                }
            }
        });
        true
    };
    let on_pixels = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let at = |w: usize| data.of::<f32>(w);
        // SAFETY: the windows are channels last and have the sizes of the layout; there is a mean per channel.
        unsafe {
            let means = at(mean).read(0, n);
            channels_last::products(host, layout, 1, [at(grad), at(x)], means, |sums| {
                let numbers = |_, c: usize| numbers(data, c, [sums[c], sums[n + c]]);
                match to_x.map(at) {
                    Some(to) => channels_last::gradient(host, layout, 1, [at(grad), at(x), to], &numbers),
                    None => {
                        for c in 0..n {
                            numbers(0, c);
                        }
                        true
                    }
                }
            })
        }
    };
    if layout.planes.pixels == 1 {
        return Some(Kernel::new(windows.0, SmallVec::new(), on_pixels));
    }
    let read = [grad, x].map(|w| Tensor::read(w, Order::ChannelsLast));
    let to_x = to_x.map(|w| Tensor::written(w, Order::ChannelsLast));
    let tensors: SmallVec<[Tensor; 3]> = read.into_iter().chain(to_x).collect();
    Some(in_either_order(windows.0, SmallVec::new(), &tensors, work, on_pixels))
}
