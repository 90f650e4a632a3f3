//! Group norm, which normalizes groups of an image's channels to mean 0 and variance 1, and its gradient.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::channels_last::{Order, Planes};
use crate::kernels::channel_norms::{Layout, channels_last, row_major};
use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::norm::{Windows, output, weights};
use crate::kernels::permuted::{Tensor, given, in_either_order, made, wanted};
use crate::kernels::scratch::{with_doubles, with_scratch};
use crate::kernels::{contiguous, count, each_row};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::express::Param;

/// Sizes of a call.
#[derive(Clone, Copy)]
struct Groups {
    /// Layout of an image.
    layout: Layout,
    images: usize,
    /// Number of groups of an image, and of channels of a group.
    groups: usize,
    each: usize,
}

impl Groups {
    /// The sizes in the arguments `first..first + 4`: N, C, HxW and group. `None` if they do not match the input's
    /// sizes, or if the input is empty.
    fn of(call: &Call<'_>, first: usize, sizes: &[i64]) -> Option<Groups> {
        let int = |arg: usize| crate::kernels::int(call, arg).and_then(|i| usize::try_from(i).ok());
        let (images, channels, pixels, groups) =
            (int(first)?, int(first + 1)?, int(first + 2)?, int(first + 3)?);
        let [first, second, rest @ ..] = sizes else { return None };
        let fits = [*first as usize, *second as usize, count(rest)] == [images, channels, pixels]
            && images * channels * pixels > 0
            && groups > 0
            && channels % groups == 0;
        fits.then(|| Groups {
            layout: Layout::of(Planes { images: 1, channels, pixels }),
            images,
            groups,
            each: channels / groups,
        })
    }

    fn channels(self) -> usize {
        self.layout.planes.channels
    }

    /// Number of values of a group.
    fn count(self) -> usize {
        self.each * self.layout.planes.pixels
    }

    /// The mean of a group as a float, the remainder that was lost by rounding the mean, and the variance. `sums` has
    /// two sums for each channel of the group: of the differences from the group's first value `first`, and of the
    /// squares of these differences.
    fn moments(self, first: f32, sums: impl Iterator<Item = [f64; 2]>) -> (f32, f64, f64) {
        let count = self.count() as f64;
        let [sum, squares] = sums.fold([0.0; 2], |all, some| [all[0] + some[0], all[1] + some[1]]);
        let mean = f64::from(first) + sum / count;
        let variance = ((squares - sum * (sum / count)) / count).max(0.0);
        (mean as f32, mean - f64::from(mean as f32), variance)
    }

    /// The [`Groups::moments`] of a group of a row-major image.
    ///
    /// # Safety
    /// `x` points to the group's first value, and nobody writes the group during the call.
    unsafe fn row_major_moments(self, x: SendPtr<f32>) -> (f32, f64, f64) {
        // SAFETY: the group has `each` channels of as many values as an image has pixels.
        unsafe {
            let first = *x.get();
            let sums = (0..self.each).map(|c| {
                let mut found = [0.0; 2];
                let channel = SendPtr(x.at(c * self.layout.planes.pixels));
                row_major::moments(channel, self.layout, first, &mut found);
                found
            });
            self.moments(first, sums)
        }
    }

    /// The two sums of each channel of a group. `sums` has the sums of all images: for each image, the first sums of
    /// all channels, and then the second sums.
    fn of_channels(self, sums: &[f64], row: usize) -> impl Iterator<Item = [f64; 2]> + '_ {
        let (image, first, channels) = (row / self.groups, row % self.groups * self.each, self.channels());
        let of_image = &sums[image * 2 * channels..];
        (first..first + self.each).map(move |c| [of_image[c], of_image[channels + c]])
    }

    /// Fills `to` with the first value of each group of channels-last images, once for each channel of the group.
    ///
    /// # Safety
    /// - `x` points to the images.
    /// - Nobody writes the images during the call.
    unsafe fn first(self, x: SendPtr<f32>, to: &mut [f32]) {
        for (row, to) in to.chunks_exact_mut(self.each).enumerate() {
            let (image, group) = (row / self.groups, row % self.groups);
            // SAFETY: the group is one of the image's.
            to.fill(unsafe { *x.at(image * self.layout.planes.len() + group * self.each) });
        }
    }
}

/// `native_group_norm(input, weight, bias, N, C, HxW, group, eps)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let x = given(call, 0)?;
    let groups = Groups::of(call, 3, &x.sizes)?;
    let (layout, channels, each) = (groups.layout, groups.channels(), groups.each);
    let mut windows = Windows::default();
    let (weight, bias) = (weights(call, 1, channels)?, weights(call, 2, channels)?);
    let (x, y) = (windows.add(x), windows.add(made(outputs, 0)?));
    let (mean, scale) = (windows.add(output(outputs, 1)?), windows.add(output(outputs, 2)?));
    let (weight, bias) = (windows.maybe(weight), windows.maybe(bias));
    // Writes the statistics of a group. Returns the numbers with which its channels are normalized.
    let write = move |data: Addresses<'_>, eps: f64, row: usize, (near, off, variance): (f32, f64, f64)| {
        let by = 1.0 / (variance + eps).sqrt();
        // SAFETY: the windows have an element per group; one thread alone uses each group.
        unsafe { (*data.of(mean).at(row), *data.of(scale).at(row)) = (near, by as f32) };
        (near, off, by)
    };
    let numbers = move |data: Addresses<'_>, channel: usize, (near, off, by): (f32, f64, f64)| {
        // SAFETY: the windows have an element per channel.
        let number = |w: usize| unsafe { f64::from(*data.of::<f32>(w).at(channel)) };
        let factor = by * weight.map_or(1.0, number);
        [near, factor as f32, (bias.map_or(0.0, number) - off * factor) as f32]
    };
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let eps = f64::from_bits(params[0]);
        each_row(host, groups.images * groups.groups, groups.count() * 4, &|from, to| {
            for row in from..to {
                // SAFETY: the windows have `count` elements per group; one thread alone uses each group.
                unsafe {
                    let at = |w: usize, c: usize| {
                        SendPtr(data.of::<f32>(w).at((row * each + c) * layout.planes.pixels))
                    };
                    let of_group = write(data, eps, row, groups.row_major_moments(at(x, 0)));
                    for c in 0..each {
                        let numbers = numbers(data, row % groups.groups * each + c, of_group);
                        row_major::normalize(at(x, c), at(y, c), layout, numbers);
                    }
                }
            }
        });
        true
    };
    let on_pixels = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let (eps, [x, y]) = (f64::from_bits(params[0]), [x, y].map(|w| data.of::<f32>(w)));
        with_scratch(groups.images * channels, |first| {
            // SAFETY: `x` and `y` are channels last and have the sizes of the layout.
            unsafe {
                groups.first(x, first);
                channels_last::moments(host, layout, groups.images, x, first, |sums| {
                    let rows = 0..groups.images * groups.groups;
                    let of_groups: Vec<(f32, f64, f64)> = rows
                        .map(|row| {
                            let moments = groups.moments(first[row * each], groups.of_channels(sums, row));
                            write(data, eps, row, moments)
                        })
                        .collect();
                    let numbers = |image: usize, c: usize| {
                        numbers(data, c, of_groups[image * groups.groups + c / each])
                    };
                    channels_last::normalize(host, layout, groups.images, [x, y], &numbers)
                })
            }
        })
    };
    let params = smallvec![Param::Number(7, 0, Ty::F64)];
    let tensors = [Tensor::read(x, Order::ChannelsLast), Tensor::written(y, Order::ChannelsLast)];
    Some(in_either_order(windows.0, params, &tensors, work, on_pixels))
}

/// `native_group_norm_backward(grad, input, mean, rstd, weight, N, C, HxW, group, output_mask)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, x) = (given(call, 0)?, given(call, 1)?);
    let groups = Groups::of(call, 5, &x.sizes).filter(|_| grad.sizes == x.sizes)?;
    let (layout, channels, each) = (groups.layout, groups.channels(), groups.each);
    let (to, to_weight, to_bias) = (wanted(outputs, 0)?, wanted(outputs, 1)?, wanted(outputs, 2)?);
    let mut windows = Windows::default();
    let scale = contiguous(call, 3, Mem::F32)?;
    let weight = weights(call, 4, channels)?;
    let (grad, x, scale) = (windows.add(grad), windows.add(x), windows.add(scale));
    let weight = windows.maybe(weight);
    let (to, to_weight, to_bias) = (windows.maybe(to), windows.maybe(to_weight), windows.maybe(to_bias));
    let weight_of = move |data: Addresses<'_>, channel: usize| {
        // SAFETY: the weight has an element per channel.
        weight.map_or(1.0, |w| unsafe { f64::from(*data.of::<f32>(w).at(channel)) })
    };
    // The terms of a channel in the gradients of weight and bias, from the sums of its gradient and of the gradient
    // times `x - near`. The mean is computed again, because the rounding error of the saved mean is visible if all
    // values are close together.
    let terms = move |data: Addresses<'_>, row: usize, off: f64, [sum, product]: [f64; 2]| {
        // SAFETY: there is a scale per group.
        let scale = unsafe { f64::from(*data.of::<f32>(scale).at(row)) };
        [scale * (product - off * sum), sum]
    };
    // The numbers from which the gradient of a group's channels is computed, given the terms of all of them.
    let of_group = move |data: Addresses<'_>, row: usize, (near, off): (f32, f64), terms: &[[f64; 2]]| {
        // SAFETY: there is a scale per group.
        let scale = unsafe { f64::from(*data.of::<f32>(scale).at(row)) };
        let (mut sum, mut product) = (0.0, 0.0);
        for (c, [to_weight, to_bias]) in terms.iter().enumerate() {
            let weight = weight_of(data, row % groups.groups * each + c);
            sum += weight * to_bias;
            product += weight * to_weight;
        }
        let [sum, product] = [sum, product].map(|total| total / groups.count() as f64);
        let by = scale * scale * product;
        (near, scale, by, off * by - scale * sum)
    };
    let numbers = move |data: Addresses<'_>, channel: usize, (near, scale, by, c): (f32, f64, f64, f64)| {
        [near, (scale * weight_of(data, channel)) as f32, by as f32, c as f32]
    };
    // Adds the terms of all images.
    let add = move |data: Addresses<'_>, terms: &[f64]| {
        for (to, which) in [(to_weight, 0), (to_bias, 1)] {
            let Some(to) = to else { continue };
            // SAFETY: the gradients of weight and bias have an element per channel, and all threads have ended.
            let to = unsafe { data.of::<f32>(to).slice(0, channels) };
            for (c, to) in to.iter_mut().enumerate() {
                let of_images = (0..groups.images).map(|i| terms[(i * channels + c) * 2 + which]);
                *to = of_images.sum::<f64>() as f32;
            }
        }
    };
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        with_doubles(groups.images * channels * 2, |all| {
            let partial = SendPtr(all.as_mut_ptr());
            each_row(host, groups.images * groups.groups, groups.count() * 4, &|from, end| {
                let mut own: SmallVec<[[f64; 2]; 32]> = SmallVec::new();
                for row in from..end {
                    // SAFETY: the windows have `count` elements per group; one thread alone uses each group and its
                    // terms.
                    unsafe {
                        let at = |w: usize, c: usize| {
                            SendPtr(data.of::<f32>(w).at((row * each + c) * layout.planes.pixels))
                        };
                        let (near, off, _) = groups.row_major_moments(at(x, 0));
                        own.clear();
                        own.extend((0..each).map(|c| {
                            let mut found = [0.0; 2];
                            row_major::products(at(grad, c), at(x, c), layout, near, &mut found);
                            terms(data, row, off, found)
                        }));
                        partial.slice(row * each * 2, each * 2).copy_from_slice(own.as_flattened());
                        let Some(to) = to else { continue };
                        let of_group = of_group(data, row, (near, off), &own);
                        for c in 0..each {
                            let numbers = numbers(data, row % groups.groups * each + c, of_group);
                            row_major::gradient(at(grad, c), at(x, c), at(to, c), layout, numbers);
                        }
                    }
                }
            });
            add(data, all);
            true
        })
    };
    let on_pixels = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let ([grad, x], images) = ([grad, x].map(|w| data.of::<f32>(w)), groups.images);
        let rows = images * groups.groups;
        with_scratch(2 * images * channels, |scratch| {
            let (first, near) = scratch.split_at_mut(images * channels);
            let mut means: Vec<(f32, f64)> = Vec::with_capacity(rows);
            // SAFETY: the tensors are channels last and have the sizes of the layout.
            unsafe {
                groups.first(x, first);
                let done = channels_last::moments(host, layout, images, x, first, |sums| {
                    means.extend((0..rows).map(|row| {
                        let sums = groups.of_channels(sums, row);
                        let (mean, off, _) = groups.moments(first[row * each], sums);
                        near[row * each..][..each].fill(mean);
                        (mean, off)
                    }));
                    true
                });
                let then = |sums: &[f64]| {
                    let all: Vec<[f64; 2]> = (0..rows)
                        .flat_map(|row| groups.of_channels(sums, row).map(move |sums| (row, sums)))
                        .map(|(row, sums)| terms(data, row, means[row].1, sums))
                        .collect();
                    add(data, all.as_flattened());
                    let Some(to) = to else { return true };
                    let of_group = |row: usize| of_group(data, row, means[row], &all[row * each..][..each]);
                    let of_groups: Vec<(f32, f64, f64, f64)> = (0..rows).map(of_group).collect();
                    let numbers = |image: usize, c: usize| {
                        numbers(data, c, of_groups[image * groups.groups + c / each])
                    };
                    channels_last::gradient(host, layout, images, [grad, x, data.of(to)], &numbers)
                };
                done && channels_last::products(host, layout, images, [grad, x], near, then)
            }
        })
    };
    let read = [grad, x].map(|w| Tensor::read(w, Order::ChannelsLast));
    let to = to.map(|w| Tensor::written(w, Order::ChannelsLast));
    let tensors: SmallVec<[Tensor; 3]> = read.into_iter().chain(to).collect();
    Some(in_either_order(windows.0, smallvec![], &tensors, work, on_pixels))
}
