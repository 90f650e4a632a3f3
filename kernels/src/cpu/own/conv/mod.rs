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
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::cpu::channels_last::{Order, Planes};
use crate::cpu::own::conv::depthwise::Depthwise;
use crate::cpu::own::conv::direct::Direct;
use crate::cpu::own::conv::geometry::Conv;
use crate::cpu::own::conv::gradient::{Gradient, PIXELS};
use crate::cpu::own::kernel::{Addresses, Kernel, Shared};
use crate::cpu::own::scratch::with_scratch;
use crate::cpu::own::sums::{channel_sums, columns};
use crate::cpu::own::{contiguous, tensor};
use crate::host::HostKernels;
use crate::ir::Mem;
use crate::ops::convolution::is_transposed;
use crate::ops::express::{Window, fresh_window};

/// Largest number of output pixels of an image for which patches are laid out.
const FEW: usize = 4;

/// The algorithm that computes a convolution.
enum Way {
    Direct(Box<Direct>),
    Patches(Conv),
    /// A convolution of images that have one pixel each, which is the product of two matrices. If the weight gradient
    /// sums over many of them, it is computed in parts.
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
        [image, weight, grid]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Patches(conv) | Way::Pixels(conv, _) => {
                    patches::to_grid(conv, host, image, weight, bias, grid)
                }
                Way::Direct(direct) => direct.to_grid(host, [image, weight, grid], bias),
                Way::Depthwise(depthwise) => depthwise.to_grid(host, [image, weight, grid], bias),
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
        [grid, weight, image]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Patches(conv) | Way::Pixels(conv, _) => {
                    patches::to_image(conv, host, grid, weight, bias, image)
                }
                Way::Direct(direct) => direct.to_image(host, [grid, weight, image], bias),
                Way::Depthwise(depthwise) => depthwise.to_image(host, [grid, weight, image], bias),
            }
        }
    }

    /// Computes the weight gradient.
    ///
    /// # Safety
    /// The addresses are those of dense tensors with the sizes of the convolution, in the order that the algorithm
    /// computes on. During the call, nobody writes those that are read or uses the one that is written.
    unsafe fn to_weight(&self, host: &dyn HostKernels, [image, grid, weight]: [Shared<f32>; 3]) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Pixels(conv, Some(gradient)) => gradient.compute(host, conv, [image, grid, weight]),
                Way::Patches(conv) | Way::Pixels(conv, None) => {
                    patches::to_weight(conv, host, image, grid, weight)
                }
                Way::Direct(direct) => direct.to_weight(host, [image, grid, weight]),
                Way::Depthwise(depthwise) => depthwise.to_weight(host, [image, grid, weight]),
            }
        }
    }
}

/// A tensor of a convolution, if its elements are floats in an order that [`kernel`] can turn.
fn dense(window: Option<Window>) -> Option<Window> {
    window.filter(|w| w.mem == Mem::F32 && Order::of(&w.sizes, &w.strides).is_some())
}

fn output(outputs: &Outputs, number: usize) -> Option<Window> {
    match outputs.outs.get(number)? {
        OutSpec::Fresh { storage, meta, offset } => dense(fresh_window(*storage, meta, *offset)),
        _ => None,
    }
}

/// A tensor of a kernel.
#[derive(Clone, Copy)]
struct Tensor {
    window: usize,
    is_written: bool,
    /// The order that the code computes on.
    wanted: Order,
}

/// A tensor that is computed on in another order than its strides say.
#[derive(Clone, Copy)]
struct Turned {
    tensor: Tensor,
    planes: Planes,
}

/// The kernel of a convolution, given its windows and code that computes on `tensors` in the orders that they are wanted
/// in.
fn kernel(
    windows: SmallVec<[Window; 4]>,
    tensors: &[Tensor],
    compute: impl Fn(&dyn HostKernels, &[Shared<f32>]) -> bool + Clone + Send + Sync + 'static,
) -> Kernel {
    let turned = tensors.iter().filter_map(|tensor| {
        let Window { sizes, strides, .. } = &windows[tensor.window];
        let planes = Planes::of(sizes)?;
        (Order::of(sizes, strides) != Some(tensor.wanted)).then_some(Turned { tensor: *tensor, planes })
    });
    let turned: Vec<Turned> = turned.collect();
    // The device turns contents to channels last. Other tensors are copied.
    let (last, copied): (Vec<Turned>, Vec<Turned>) =
        turned.iter().partition(|turned| turned.tensor.wanted == Order::ChannelsLast);
    let planes: Vec<(usize, Planes)> =
        last.iter().map(|turned| (turned.tensor.window, turned.planes)).collect();
    let kernel = Kernel::new(windows, SmallVec::new(), on_copies(turned, compute.clone()));
    match planes.is_empty() {
        true => kernel,
        false => kernel.or_channels_last(&planes, true, on_copies(copied, compute)),
    }
}

/// The code that computes on copies of some tensors in the orders that they are wanted in.
fn on_copies(
    turned: Vec<Turned>,
    compute: impl Fn(&dyn HostKernels, &[Shared<f32>]) -> bool + Send + Sync + 'static,
) -> impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static {
    let room = turned.iter().map(|turned| turned.planes.len()).sum();
    move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let mut tensors: SmallVec<[Shared<f32>; 6]> = data.all().collect();
        if turned.is_empty() {
            return compute(host, &tensors);
        }
        with_scratch(room, |mut scratch| {
            for Turned { tensor, planes } in &turned {
                let (copy, rest) = std::mem::take(&mut scratch).split_at_mut(planes.len());
                let copy = Shared(copy.as_mut_ptr());
                if !tensor.is_written {
                    let from = tensors[tensor.window].get();
                    // SAFETY: the window has the planes' sizes, and the copy is as large.
                    unsafe { planes.reorder(host, from, copy.get(), tensor.wanted) };
                }
                (tensors[tensor.window], scratch) = (copy, rest);
            }
            let done = compute(host, &tensors);
            for Turned { tensor, planes } in turned.iter().filter(|turned| turned.tensor.is_written) {
                let (from, to) = (tensors[tensor.window].get(), data.of(tensor.window).get());
                // SAFETY: the window has the planes' sizes, and the copy is as large.
                unsafe { planes.reorder(host, from, to, tensor.wanted.other()) };
            }
            done
        })
    }
}

/// `convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, weight) = (dense(tensor(call, 0))?, dense(tensor(call, 1))?);
    let (y, back) = (output(outputs, 0)?, is_transposed(call, 3)?);
    let (image, grid) = if back { (&y, &x) } else { (&x, &y) };
    let way = Arc::new(Way::of(Conv::of(image, &weight, grid, call, 3)?));
    let bias = match call.args.get(2)? {
        Arg::None => None,
        _ => tensor(call, 2).map(|_| contiguous(call, 2, Mem::F32)).map_or(Some(None), |b| b.map(Some))?,
    };
    let biased = bias.is_some();
    let windows = [x, weight, y].into_iter().chain(bias).collect();
    let wanted = way.order();
    let work = move |host: &dyn HostKernels, tensors: &[Shared<f32>]| {
        let (all, bias) = ([tensors[0], tensors[1], tensors[2]], biased.then(|| tensors[3]));
        // SAFETY: `Conv::of` read the sizes from the windows of these tensors, which are dense. PyTorch, or the rule for
        // the outputs, refuses a bias of another size than the output's channels.
        unsafe { if back { way.to_image(host, all, bias) } else { way.to_grid(host, all, bias) } }
    };
    let tensors = [
        Tensor { window: 0, is_written: false, wanted },
        Tensor { window: 1, is_written: false, wanted: Order::RowMajor },
        Tensor { window: 2, is_written: true, wanted },
    ];
    Some(kernel(windows, &tensors, work))
}

/// `convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
/// groups, output_mask)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, x) = (dense(tensor(call, 0))?, dense(tensor(call, 1))?);
    let (weight, back) = (dense(tensor(call, 2))?, is_transposed(call, 4)?);
    let (image, grid) = if back { (&grad, &x) } else { (&x, &grad) };
    let conv = Conv::of(image, &weight, grid, call, 4)?;
    let way = Arc::new(Way::of(conv));
    let planes = match back {
        true => [conv.n, conv.inputs, conv.size[0] * conv.size[1]],
        false => [conv.n, conv.outputs, conv.pixels()],
    };
    let mut windows: SmallVec<[Window; 4]> = SmallVec::from_iter([grad, x, weight]);
    let mut given = |number: usize| match outputs.outs.get(number)? {
        OutSpec::Undefined => Some(None),
        _ => {
            windows.push(output(outputs, number)?);
            Some(Some(windows.len() - 1))
        }
    };
    let (to_x, to_weight, to_bias) = (given(0)?, given(1)?, given(2)?);
    let wanted = way.order();
    let work = move |host: &dyn HostKernels, tensors: &[Shared<f32>]| {
        let ([grad, x, weight], at) = ([tensors[0], tensors[1], tensors[2]], |i: usize| tensors[i]);
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
                match wanted {
                    Order::ChannelsLast => columns(host, grad, to, [1, images * pixels, channels], 1.0),
                    Order::RowMajor => channel_sums(host, grad, to, planes),
                }
            }
        }
        done
    };
    let tensors = [(0, false, wanted), (1, false, wanted), (2, false, Order::RowMajor)].into_iter();
    let given = to_x.map(|to| (to, true, wanted)).into_iter();
    let given = given.chain(to_weight.map(|to| (to, true, Order::RowMajor)));
    let tensors: SmallVec<[Tensor; 5]> = tensors
        .chain(given)
        .map(|(window, is_written, wanted)| Tensor { window, is_written, wanted })
        .collect();
    Some(kernel(windows, &tensors, work))
}
