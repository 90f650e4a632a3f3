//! Convolutions.
//!
//! **Why.** oneDNN's kernels are tuned for large planes and stride 1. Each call reorders its operands, which takes
//! longer than the computation of a small convolution, and the weight gradient of a few pixels takes a hundred times
//! as long as a matrix product.
//! **Strategy.** [`direct`] computes on channels-last tensors, whose storages keep that order. A pointwise convolution of
//! such tensors is a matrix product. If an output has at most [`FEW`] pixels, [`patches`] lays out what each of them
//! reads, also for a matrix product. [`depthwise`] sums planes.
//!
//! `image` is the input of a convolution and `grid` its output; a transposed convolution maps `grid` to `image`.

mod axis;
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
use crate::cpu::own::conv::direct::Direct;
use crate::cpu::own::conv::geometry::Conv;
use crate::cpu::own::conv::gradient::{Gradient, PIXELS};
use crate::cpu::own::kernel::{Addresses, Kernel, Shared};
use crate::cpu::own::scratch::with_scratch;
use crate::cpu::own::sums::{channel_sums, columns};
use crate::cpu::own::{contiguous, is_contiguous, tensor};
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
    Depthwise(Conv),
}

impl Way {
    /// Chooses the algorithm; `None` if PyTorch's kernel is to run.
    fn of(conv: Conv) -> Option<Way> {
        if conv.is_depthwise() {
            return depthwise::fits(&conv).then_some(Way::Depthwise(conv));
        }
        if conv.groups == 1 && conv.is_pointwise() {
            let conv = Conv { n: conv.rows(), size: [1, 1], out: [1, 1], ..conv };
            return Some(Way::Pixels(conv, (conv.n > PIXELS).then(|| Gradient::of(&conv))));
        }
        if conv.groups == 1 && conv.pixels() <= FEW {
            return Some(Way::Patches(conv));
        }
        Some(Way::Direct(Box::new(Direct::of(conv))))
    }

    /// Whether images and grids are channels last.
    fn is_channels_last(&self) -> bool {
        matches!(self, Way::Direct(_) | Way::Pixels(..))
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
                Way::Depthwise(conv) => depthwise::to_grid(conv, host, [image, weight, grid], bias),
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
                Way::Depthwise(conv) => depthwise::to_image(conv, host, [grid, weight, image], bias),
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
                Way::Depthwise(conv) => depthwise::to_weight(conv, host, [image, grid, weight]),
            }
        }
    }
}

fn output(outputs: &Outputs, number: usize) -> Option<Window> {
    match outputs.outs.get(number)? {
        OutSpec::Fresh { storage, meta, offset } => {
            fresh_window(*storage, meta, *offset).filter(|w| w.mem == Mem::F32 && is_contiguous(w))
        }
        _ => None,
    }
}

/// A tensor of a kernel: its window, the sizes of its planes, and whether the kernel writes it.
struct Tensor {
    window: usize,
    planes: Planes,
    is_written: bool,
}

/// The kernel of a convolution, given its windows, those of the tensors with planes, and code for the order that `way`
/// computes on.
fn kernel(
    way: &Way,
    windows: SmallVec<[Window; 4]>,
    images: &[(usize, bool)],
    compute: impl Fn(&dyn HostKernels, &[Shared<f32>]) -> bool + Clone + Send + Sync + 'static,
) -> Kernel {
    let of = |&(window, is_written): &(usize, bool)| {
        let planes = Planes::of(&windows[window].sizes)?;
        Some(Tensor { window, planes, is_written })
    };
    let images: Vec<Tensor> = images.iter().filter_map(of).filter(|_| way.is_channels_last()).collect();
    let count = windows.len();
    let all =
        move |data: Addresses<'_>| (0..count).map(|i| data.of(i)).collect::<SmallVec<[Shared<f32>; 6]>>();
    if images.is_empty() {
        return Kernel::new(windows, SmallVec::new(), move |host, data, _| compute(host, &all(data)));
    }
    let planes: Vec<(usize, Planes)> = images.iter().map(|image| (image.window, image.planes)).collect();
    let room = planes.iter().map(|(_, planes)| planes.len()).sum();
    let direct = compute.clone();
    let row_major = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        with_scratch(room, |mut scratch| {
            let mut tensors = all(data);
            for Tensor { window, planes, is_written } in &images {
                let (copy, rest) = std::mem::take(&mut scratch).split_at_mut(planes.len());
                let copy = Shared(copy.as_mut_ptr());
                if !is_written {
                    // SAFETY: the window has the planes' sizes, and the copy is as large.
                    unsafe { planes.reorder(host, tensors[*window].get(), copy.get(), Order::ChannelsLast) };
                }
                (tensors[*window], scratch) = (copy, rest);
            }
            let done = compute(host, &tensors);
            for Tensor { window, planes, .. } in images.iter().filter(|image| image.is_written) {
                // SAFETY: the window has the planes' sizes, and the copy is as large.
                unsafe {
                    let to = data.of(*window).get();
                    planes.reorder(host, tensors[*window].get(), to, Order::RowMajor);
                }
            }
            done
        })
    };
    let channels_last =
        move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| direct(host, &all(data));
    Kernel::new(windows, SmallVec::new(), row_major).or_channels_last(&planes, true, channels_last)
}

/// `convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, weight) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let (y, back) = (output(outputs, 0)?, is_transposed(call, 3)?);
    let (image, grid) = if back { (&y, &x) } else { (&x, &y) };
    let way = Arc::new(Way::of(Conv::of(image, &weight, grid, call, 3)?)?);
    let bias = match call.args.get(2)? {
        Arg::None => None,
        _ => tensor(call, 2).map(|_| contiguous(call, 2, Mem::F32)).map_or(Some(None), |b| b.map(Some))?,
    };
    let biased = bias.is_some();
    let windows = [x, weight, y].into_iter().chain(bias).collect();
    let of = way.clone();
    let work = move |host: &dyn HostKernels, tensors: &[Shared<f32>]| {
        let (all, bias) = ([tensors[0], tensors[1], tensors[2]], biased.then(|| tensors[3]));
        // SAFETY: `Conv::of` read the sizes from the windows of these tensors, which are dense. PyTorch, or the rule for
        // the outputs, refuses a bias of another size than the output's channels.
        unsafe { if back { way.to_image(host, all, bias) } else { way.to_grid(host, all, bias) } }
    };
    Some(kernel(&of, windows, &[(0, false), (2, true)], work))
}

/// `convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
/// groups, output_mask)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, x) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let (weight, back) = (contiguous(call, 2, Mem::F32)?, is_transposed(call, 4)?);
    let (image, grid) = if back { (&grad, &x) } else { (&x, &grad) };
    let conv = Conv::of(image, &weight, grid, call, 4)?;
    let way = Arc::new(Way::of(conv)?);
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
    let of = way.clone();
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
                match way.is_channels_last() {
                    true => columns(host, grad, to, [1, images * pixels, channels], 1.0),
                    false => channel_sums(host, grad, to, planes),
                }
            }
        }
        done
    };
    let images: SmallVec<[(usize, bool); 3]> =
        [(0, false), (1, false)].into_iter().chain(to_x.map(|to| (to, true))).collect();
    Some(kernel(&of, windows, &images, work))
}
