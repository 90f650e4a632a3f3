//! Convolutions.
//!
//! **Why.** oneDNN's kernels are tuned for large planes and stride 1. Each call reorders its operands, which takes
//! longer than the computation of a small convolution, and the weight gradient of a few pixels takes a hundred times
//! as long as a matrix product.
//! **Strategy.** [`direct`] computes on channels-last tensors, whose storages keep that order. A pointwise convolution of
//! such tensors is a matrix product; [`depthwise`] computes channels independently of each other. If an output has at
//! most [`FEW`] pixels, [`patches`] lays out what each of them reads, also for a matrix product.
//!
//! `image` is the input of a convolution and `grid` its output; a transposed convolution maps `grid` to `image`.

mod depthwise;
mod direct;
mod geometry;
mod gradient;
mod map;
mod panels;
mod patches;
mod reads;
mod tile;

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::channels_last::Order;
use crate::kernels::conv::depthwise::Depthwise;
use crate::kernels::conv::direct::Direct;
use crate::kernels::conv::geometry::Conv;
use crate::kernels::conv::gradient::{Gradient, PIXELS};
use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::permuted::{Tensor, given, in_orders, made, wanted};
use crate::kernels::reduce::sums::{channel_sums, columns};
use crate::kernels::{contiguous, tensor};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::convolution::is_transposed;
use tandem_executor::ops::express::TensorGeometry;

/// Largest number of output pixels of an image for which patches are laid out.
const FEW: usize = 4;

/// The algorithm that computes a convolution.
enum Way {
    Direct(Box<Direct>),
    Patches(Conv),
    /// A convolution of images of one pixel each, which is the product of two matrices. If the weight gradient sums
    /// over many images, it is computed in parts.
    Pixels(Conv, Option<Gradient>),
    Depthwise(Box<Depthwise>),
}

impl Way {
    /// Chooses the algorithm.
    fn of(conv: Conv) -> Way {
        if conv.is_depthwise() {
            return Way::Depthwise(Box::new(Depthwise::of(conv)));
        }
        if conv.groups == 1 && conv.is_pointwise() {
            let conv = Conv { n: conv.rows(), size: [1, 1], out: [1, 1], ..conv };
            return Way::Pixels(conv, (conv.n > PIXELS).then(|| Gradient::of(&conv)));
        }
        if conv.groups == 1 && conv.pixels() <= FEW {
            return Way::Patches(conv);
        }
        Way::Direct(Box::new(Direct::of(conv)))
    }

    /// The order of images and grids that the algorithm computes on.
    fn order(&self) -> Order {
        if let Way::Patches(_) = self { Order::RowMajor } else { Order::ChannelsLast }
    }

    /// Computes the grid from an image, with an optional bias per filter.
    ///
    /// # Safety
    /// The addresses are those of dense tensors with the sizes of the convolution, in the order that the algorithm
    /// computes on. During the call, nobody writes those that are read or uses the one that is written.
    unsafe fn to_grid(
        &self,
        host: &dyn HostKernels,
        [image, weight, grid]: [SendPtr<f32>; 3],
        bias: Option<SendPtr<f32>>,
    ) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Patches(conv) | Way::Pixels(conv, _) => {
                    patches::to_grid(conv, host, image, weight, bias, grid)
                }
                Way::Direct(direct) => {
                    direct.to_grid.compute(host, direct.conv.n, [image, weight, grid], bias)
                }
                Way::Depthwise(of) => of.to_grid.compute(host, &of.conv, [image, weight, grid], bias),
            }
        }
    }

    /// Computes an image from the grid, with an optional bias per channel.
    ///
    /// # Safety
    /// The addresses are those of dense tensors with the sizes of the convolution, in the order that the algorithm
    /// computes on. During the call, nobody writes those that are read or uses the one that is written.
    unsafe fn to_image(
        &self,
        host: &dyn HostKernels,
        [grid, weight, image]: [SendPtr<f32>; 3],
        bias: Option<SendPtr<f32>>,
    ) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Patches(conv) | Way::Pixels(conv, _) => {
                    patches::to_image(conv, host, grid, weight, bias, image)
                }
                Way::Direct(direct) => {
                    direct.to_image.compute(host, direct.conv.n, [grid, weight, image], bias)
                }
                Way::Depthwise(of) => of.to_image.compute(host, &of.conv, [grid, weight, image], bias),
            }
        }
    }

    /// Computes the weight gradient.
    ///
    /// # Safety
    /// The addresses are those of dense tensors with the sizes of the convolution, in the order that the algorithm
    /// computes on. During the call, nobody writes those that are read or uses the one that is written.
    unsafe fn to_weight(&self, host: &dyn HostKernels, [image, grid, weight]: [SendPtr<f32>; 3]) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Pixels(conv, Some(gradient)) => gradient.compute(host, conv, [image, grid, weight]),
                Way::Patches(conv) | Way::Pixels(conv, None) => {
                    patches::to_weight(conv, host, image, grid, weight)
                }
                Way::Direct(direct) => direct.gradient.compute(host, &direct.conv, [image, grid, weight]),
                Way::Depthwise(depthwise) => depthwise.to_weight(host, [image, grid, weight]),
            }
        }
    }
}

/// `convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, weight) = (given(call, 0)?, given(call, 1)?);
    let (y, back) = (made(outputs, 0)?, is_transposed(call, 3)?);
    let (image, grid) = if back { (&y, &x) } else { (&x, &y) };
    let way = Arc::new(Way::of(Conv::of(image, &weight, grid, call, 3)?));
    let bias = match call.args.get(2)? {
        Arg::None => None,
        _ => tensor(call, 2).map(|_| contiguous(call, 2, Mem::F32)).map_or(Some(None), |b| b.map(Some))?,
    };
    let biased = bias.is_some();
    let windows = [x, weight, y].into_iter().chain(bias).collect();
    let order = way.order();
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (all, bias) = ([0, 1, 2].map(|w| data.of(w)), biased.then(|| data.of(3)));
        // SAFETY: `Conv::of` read the sizes from the windows of these tensors, which are dense. PyTorch, or the rule for
        // the outputs, refuses a bias of another size than the output's channels.
        unsafe { if back { way.to_image(host, all, bias) } else { way.to_grid(host, all, bias) } }
    };
    let tensors = [Tensor::read(0, order), Tensor::read(1, Order::RowMajor), Tensor::written(2, order)];
    Some(in_orders(windows, SmallVec::new(), &tensors, work))
}

/// `convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
/// groups, output_mask)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, x) = (given(call, 0)?, given(call, 1)?);
    let (weight, back) = (given(call, 2)?, is_transposed(call, 4)?);
    let (image, grid) = if back { (&grad, &x) } else { (&x, &grad) };
    let conv = Conv::of(image, &weight, grid, call, 4)?;
    let way = Arc::new(Way::of(conv));
    let planes = match back {
        true => [conv.n, conv.inputs, conv.size[0] * conv.size[1]],
        false => [conv.n, conv.outputs, conv.pixels()],
    };
    let mut windows: SmallVec<[TensorGeometry; 4]> = SmallVec::from_iter([grad, x, weight]);
    let mut add = |number: usize| {
        let window = wanted(outputs, number)?;
        windows.extend(window.iter().cloned());
        Some(window.map(|_| windows.len() - 1))
    };
    let (to_x, to_weight, to_bias) = (add(0)?, add(1)?, add(2)?);
    let order = way.order();
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let at = |w: usize| data.of::<f32>(w);
        let [grad, x, weight] = [0, 1, 2].map(at);
        let mut done = true;
        // SAFETY: `Conv::of` read the sizes from the windows of these tensors, which are dense, and each gradient has
        // the sizes of its tensor. `planes` are the sizes of `grad`, and the bias has an element per channel of it.
        unsafe {
            if let Some(to) = to_x.map(at) {
                let all = [grad, weight, to];
                done &= if back { way.to_grid(host, all, None) } else { way.to_image(host, all, None) };
            }
            if let Some(to) = to_weight.map(at) {
                done &= way.to_weight(host, if back { [grad, x, to] } else { [x, grad, to] });
            }
            if let Some(to) = to_bias.map(at) {
                let [images, channels, pixels] = planes;
                match order {
                    Order::ChannelsLast => columns(host, grad, to, [1, images * pixels, channels], 1.0),
                    Order::RowMajor => channel_sums(host, grad, to, planes),
                }
            }
        }
        done
    };
    let read = [(0, order), (1, order), (2, Order::RowMajor)].map(|(w, order)| Tensor::read(w, order));
    let to_x = to_x.map(|w| Tensor::written(w, order));
    let to_weight = to_weight.map(|w| Tensor::written(w, Order::RowMajor));
    let tensors: SmallVec<[Tensor; 5]> = read.into_iter().chain(to_x).chain(to_weight).collect();
    Some(in_orders(windows, SmallVec::new(), &tensors, work))
}
