//! Convolutions computed as matrix products, and depthwise ones.
//!
//! **Why.** oneDNN's kernels are tuned for large planes and stride 1. Each call reorders its operands, which takes
//! longer than the computation of a small convolution, and the weight gradient of a few pixels takes a hundred times
//! as long as a matrix product.
//! **Strategy.** The pixels under the filter windows are laid out in a cache (`im2col`) and multiplied by the weight
//! matrix: in [`columns`] in general, in [`patches`] if an output has at most [`FEW`] pixels. [`depthwise`] sums planes
//! instead. [`Way::of`] returns `None` where oneDNN is faster, and PyTorch's kernel runs.
//!
//! `image` is the input of a convolution and `grid` its output; a transposed convolution maps `grid` to `image`.

mod axis;
mod columns;
mod depthwise;
mod geometry;
mod patches;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::cpu::channels_last::Planes;
use crate::cpu::own::conv::columns::Layout;
use crate::cpu::own::conv::geometry::Conv;
use crate::cpu::own::kernel::{Addresses, Kernel, Shared};
use crate::cpu::own::sums::channel_sums;
use crate::cpu::own::{contiguous, is_contiguous, tensor};
use crate::host::HostKernels;
use crate::ir::Mem;
use crate::ops::convolution::{is_transposed, sizes};
use crate::ops::express::{Window, fresh_window};

// Limits up to which convolutions are computed by this module. Those with a 1x1 filter always are.
//
// | name   | value    | unit                       | meaning                                                  |
// | ------ | -------- | -------------------------- | -------------------------------------------------------- |
// | FEW    | 4        | output pixels of an image  | maximum for `patches`; 1 if the convolution is pointwise |
// | MANY   | 16       | images in the batch        | maximum for a stride above 1                             |
// | DEEP   | 8        | input channels             | below this number, `MANY` does not apply                 |
// | LITTLE | 50 << 20 | multiplications            | maximum for stride 1, forward                            |
// | SHORT  | 192      | output pixels of the batch | maximum for stride 1, backward                           |
const FEW: usize = 4;

const MANY: usize = 16;
const DEEP: usize = 8;
const LITTLE: usize = 50 << 20;
const SHORT: usize = 192;

/// The algorithm that computes a convolution.
enum Way {
    Patches(Conv),
    Columns(Box<Layout>),
    Depthwise(Conv),
}

impl Way {
    /// Chooses the algorithm; `None` if oneDNN is faster.
    fn of(conv: Conv, gradients: bool) -> Option<Way> {
        if conv.is_depthwise {
            return depthwise::fits(&conv).then_some(Way::Depthwise(conv));
        }
        let few = if conv.is_pointwise() { 1 } else { FEW };
        if conv.pixels() <= few {
            return Some(Way::Patches(conv));
        }
        let worth = match conv {
            _ if conv.filter == [1, 1] => true,
            _ if conv.stride != [1, 1] => conv.n <= MANY || conv.inputs < DEEP,
            _ if gradients => conv.rows() <= SHORT,
            _ => conv.rows() * conv.outputs * conv.patch() <= LITTLE,
        };
        worth.then(|| Way::Columns(Box::new(Layout::of(conv))))
    }

    /// Computes the grid from an image, with an optional bias per filter.
    ///
    /// # Safety
    /// The addresses are those of contiguous tensors with the sizes of the convolution. During the call, nobody writes
    /// those that are read or uses the one that is written.
    unsafe fn to_grid(
        &self,
        host: &dyn HostKernels,
        [image, weight, grid]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Patches(conv) => patches::to_grid(conv, host, image, weight, bias, grid),
                Way::Columns(layout) => columns::to_grid(layout, host, image, weight, bias, grid),
                Way::Depthwise(conv) => depthwise::to_grid(conv, host, [image, weight, grid], bias),
            }
        }
    }

    /// Computes an image from the grid, with an optional bias per channel.
    ///
    /// # Safety
    /// The addresses are those of contiguous tensors with the sizes of the convolution. During the call, nobody writes
    /// those that are read or uses the one that is written.
    unsafe fn to_image(
        &self,
        host: &dyn HostKernels,
        [grid, weight, image]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Patches(conv) => patches::to_image(conv, host, grid, weight, bias, image),
                Way::Columns(layout) => columns::to_image(layout, host, grid, weight, bias, image),
                Way::Depthwise(conv) => depthwise::to_image(conv, host, [grid, weight, image], bias),
            }
        }
    }

    /// Computes the weight gradient.
    ///
    /// # Safety
    /// The addresses are those of contiguous tensors with the sizes of the convolution. During the call, nobody writes
    /// those that are read or uses the one that is written.
    unsafe fn to_weight(&self, host: &dyn HostKernels, [image, grid, weight]: [Shared<f32>; 3]) -> bool {
        // SAFETY: all algorithms keep the sizes of the convolution that this value was made for.
        unsafe {
            match self {
                Way::Patches(conv) => patches::to_weight(conv, host, image, grid, weight),
                Way::Columns(layout) => columns::to_weight(layout, host, image, grid, weight),
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

/// Whether PyTorch computes a convolution of these operands, whose further arguments begin at `first`, and the orders
/// of the elements of its images differ.
fn left_to_onednn(x: Window, weight: &Window, call: &Call<'_>, first: usize) -> bool {
    let conv = || {
        let mut y = x.clone();
        y.sizes = sizes(&x.sizes, &weight.sizes, call, first)?.into_iter().collect();
        Planes::of(&x.sizes).zip(Planes::of(&y.sizes))?;
        let (image, grid) = if is_transposed(call, first)? { (&y, &x) } else { (&x, &y) };
        Conv::of(image, weight, grid, call, first)
    };
    conv().is_some_and(|conv| Way::of(conv, first == 4).is_none())
}

/// The weight of a call of `convolution` that PyTorch computes on channels-last operands, as the index of an input.
pub fn channels_last(call: &Call<'_>) -> Option<usize> {
    let (x, weight) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    left_to_onednn(x, &weight, call, 3).then_some(1)
}

/// The weight of a call of `convolution_backward` that PyTorch computes on channels-last operands, as the index of an
/// input.
pub fn backward_channels_last(call: &Call<'_>) -> Option<usize> {
    contiguous(call, 0, Mem::F32)?;
    let (x, weight) = (contiguous(call, 1, Mem::F32)?, contiguous(call, 2, Mem::F32)?);
    left_to_onednn(x, &weight, call, 4).then_some(2)
}

/// `convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, weight) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let (y, back) = (output(outputs, 0)?, is_transposed(call, 3)?);
    let (image, grid) = if back { (&y, &x) } else { (&x, &y) };
    let way = Way::of(Conv::of(image, &weight, grid, call, 3)?, false)?;
    let bias = match call.args.get(2)? {
        Arg::None => None,
        _ => tensor(call, 2).map(|_| contiguous(call, 2, Mem::F32)).map_or(Some(None), |b| b.map(Some))?,
    };
    let biased = bias.is_some();
    let windows = [x, weight, y].into_iter().chain(bias).collect();
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let at = |i: usize| data.of::<f32>(i);
        let (all, bias) = ([0, 1, 2].map(at), biased.then(|| at(3)));
        // SAFETY: `Conv::of` read the sizes from these windows, which are contiguous. PyTorch, or the rule for the
        // outputs, refuses a bias of another size than the output's channels.
        unsafe { if back { way.to_image(host, all, bias) } else { way.to_grid(host, all, bias) } }
    };
    Some(Kernel::new(windows, SmallVec::new(), work))
}

/// `convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
/// groups, output_mask)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, x) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let (weight, back) = (contiguous(call, 2, Mem::F32)?, is_transposed(call, 4)?);
    let (image, grid) = if back { (&grad, &x) } else { (&x, &grad) };
    let conv = Conv::of(image, &weight, grid, call, 4)?;
    let way = Way::of(conv, true)?;
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
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let at = |i: usize| data.of::<f32>(i);
        let [grad, x, weight] = [0, 1, 2].map(at);
        let mut done = true;
        // SAFETY: `Conv::of` read the sizes from these windows, which are contiguous, and each gradient has the sizes
        // of its tensor. `planes` are the sizes of `grad`, and the bias has an element per channel of it.
        unsafe {
            if let Some(to) = to_x.map(at) {
                let all = [grad, weight, to];
                done &= if back { way.to_grid(host, all, None) } else { way.to_image(host, all, None) };
            }
            if let Some(to) = to_weight.map(at) {
                done &= way.to_weight(host, if back { [grad, x, to] } else { [x, grad, to] });
            }
            if let Some(to) = to_bias.map(at) {
                channel_sums(host, grad, to, planes);
            }
        }
        done
    };
    Some(Kernel::new(windows, SmallVec::new(), work))
}
