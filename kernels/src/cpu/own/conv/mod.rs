//! Convolutions that are products of matrices.
//!
//! oneDNN's kernels are made for large planes and steps of one pixel: each call lays its operands out anew, and where
//! there is little to do that takes longer than computing; weights' gradients of a few pixels take a hundred times as
//! long as a product. Here the pixels that filters see are laid out in a cache, and products do the rest: [`columns`],
//! or [`patches`] where a grid is [`FEW`] pixels. Where oneDNN is faster, calls stay PyTorch's.

mod columns;
mod patches;

use std::cell::RefCell;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};
use tandem_tracegraph::tensor_meta::Dtype;

use crate::cpu::own::conv::columns::Layout;
use crate::cpu::own::scratch::filled;
use crate::cpu::own::sums::channel_sums;
use crate::cpu::own::{Kernel, Shared, contiguous, int, is_contiguous, tensor};
use crate::host::{HostKernels, Matrix, Product};
use crate::ir::Mem;
use crate::ops::express::{Window, fresh_window};
use crate::ops::outputs::new_tensors;
use crate::shapes::dense;

/// Pixels of a grid at most, where patches are laid out.
const FEW: usize = 4;

/// Pictures up to which filters that go on by several pixels are faster here, whatever their channels,
const MANY: usize = 16;
/// and channels below which they are for any number of pictures.
const DEEP: usize = 8;
/// Multiplications up to which filters that go on by one pixel are faster here.
const LITTLE: usize = 50 << 20;
/// Pixels of all pictures' grids up to which their gradients are.
const SHORT: usize = 192;

thread_local!(static SCRATCH: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) });

/// Calls `work` with a scratch buffer of uninitialized floats; false where there is no memory for it.
fn with_scratch(n: usize, work: impl FnOnce(&mut [f32]) -> bool) -> bool {
    let mut scratch = SCRATCH.with_borrow_mut(Vec::pop).unwrap_or_default();
    if scratch.len() < n {
        match filled(n, 0.0) {
            Some(more) => scratch = more,
            None => return false,
        }
    }
    let done = work(&mut scratch[..n]);
    SCRATCH.with_borrow_mut(|all| all.push(scratch));
    done
}

/// The sizes of a convolution from an image to a grid; a transposed one is the way back.
#[derive(Clone, Copy, Debug)]
struct Conv {
    n: usize,
    /// Channels of the image.
    inputs: usize,
    /// Filters: channels of the grid.
    outputs: usize,
    /// Of the image.
    size: [usize; 2],
    filter: [usize; 2],
    /// Of the grid.
    out: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

/// A number for each of so many dimensions of pictures; lines are pictures of one row. One number for two dimensions is
/// left to PyTorch.
fn pair(call: &Call<'_>, arg: usize, dims: usize, missing: usize) -> Option<[usize; 2]> {
    let Some(Arg::Ints(list)) = call.args.get(arg) else { return None };
    match (dims, &**list) {
        (2, &[a, b]) => Some([usize::try_from(a).ok()?, usize::try_from(b).ok()?]),
        (1, &[b]) => Some([missing, usize::try_from(b).ok()?]),
        _ => None,
    }
}

/// Whether a convolution is transposed.
fn is_transposed(call: &Call<'_>, first: usize) -> Option<bool> {
    Some(int(call, first + 3)? != 0)
}

impl Conv {
    /// From an image, weights, a grid, and the arguments from the `first`-th on: stride, padding, dilation, transposed,
    /// output padding, groups.
    fn of(image: &Window, weight: &Window, grid: &Window, call: &Call<'_>, first: usize) -> Option<Conv> {
        let sizes = |w: &Window| match w.sizes[..] {
            [a, b, c, d] => Some([a as usize, b as usize, c as usize, d as usize]),
            [a, b, d] => Some([a as usize, b as usize, 1, d as usize]),
            _ => None,
        };
        let [n, inputs, height, width] = sizes(image)?;
        let [outputs, each, rows, columns] = sizes(weight)?;
        let [pictures, filters, down, across] = sizes(grid)?;
        let fits = int(call, first + 5)? == 1 && each == inputs && filters == outputs && pictures == n;
        let some = n * inputs * outputs * rows * columns * height * width * down * across > 0;
        (fits && some).then_some(())?;
        let dims = image.sizes.len() - 2;
        Some(Conv {
            n,
            inputs,
            outputs,
            size: [height, width],
            filter: [rows, columns],
            out: [down, across],
            stride: pair(call, first, dims, 1)?,
            padding: pair(call, first + 1, dims, 0)?,
            dilation: pair(call, first + 2, dims, 1)?,
        })
    }

    /// Pixels of the grid.
    fn pixels(&self) -> usize {
        self.out[0] * self.out[1]
    }

    /// Pixels of all pictures' grids.
    fn rows(&self) -> usize {
        self.n * self.pixels()
    }

    /// Numbers of a patch.
    fn patch(&self) -> usize {
        self.inputs * self.filter[0] * self.filter[1]
    }

    /// Whether filters see a pixel each, and all of them.
    fn is_pointwise(&self) -> bool {
        self.filter == [1, 1] && self.stride == [1, 1] && self.padding == [0, 0]
    }

    fn product(&self, [m, n, k]: [usize; 3], a: Matrix, b: Matrix, c: Matrix, beta: f64) -> Product {
        let [m, n, k] = [m as i64, n as i64, k as i64];
        Product { double: false, m, n, k, alpha: 1.0, beta, a, b, c }
    }
}

/// How a convolution is computed.
enum Way {
    Patches(Conv),
    Columns(Box<Layout>),
}

impl Way {
    /// The way of a convolution; `None` where oneDNN is faster.
    fn of(conv: Conv, gradients: bool) -> Option<Way> {
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

    /// From an image to the grid; a bias for each filter.
    fn to_grid(
        &self,
        host: &dyn HostKernels,
        [image, weight, grid]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        match self {
            Way::Patches(conv) => patches::to_grid(conv, host, image, weight, bias, grid),
            Way::Columns(layout) => columns::to_grid(layout, host, image, weight, bias, grid),
        }
    }

    /// From the grid to an image; a bias for each channel.
    fn to_image(
        &self,
        host: &dyn HostKernels,
        [grid, weight, image]: [Shared<f32>; 3],
        bias: Option<Shared<f32>>,
    ) -> bool {
        match self {
            Way::Patches(conv) => patches::to_image(conv, host, grid, weight, bias, image),
            Way::Columns(layout) => columns::to_image(layout, host, grid, weight, bias, image),
        }
    }

    /// The weights' gradient.
    fn to_weight(&self, host: &dyn HostKernels, [image, grid, weight]: [Shared<f32>; 3]) -> bool {
        match self {
            Way::Patches(conv) => patches::to_weight(conv, host, image, grid, weight),
            Way::Columns(layout) => columns::to_weight(layout, host, image, grid, weight),
        }
    }
}

fn matrix(data: *mut f32, ld: usize, transposed: bool) -> Matrix {
    Matrix { data: data.cast(), transposed, ld: ld as i64 }
}

fn output(outputs: &Outputs, number: usize) -> Option<Window> {
    match outputs.outs.get(number)? {
        OutSpec::Fresh { storage, meta, offset } => {
            fresh_window(*storage, meta, *offset).filter(|w| w.mem == Mem::F32 && is_contiguous(w))
        }
        _ => None,
    }
}

/// An argument without gaps in row-major order, also where a dimension has one place: else PyTorch may lay results out
/// in another order.
fn exact(call: &Call<'_>, arg: usize) -> Option<Window> {
    contiguous(call, arg, Mem::F32).filter(|w| w.strides[..] == dense(&w.sizes)[..])
}

/// The sizes of what a convolution makes of `x`, with the arguments from the `first`-th on.
fn result(x: &Window, weight: &Window, call: &Call<'_>, first: usize) -> Option<SmallVec<[i64; 4]>> {
    let back = is_transposed(call, first)?;
    let (&[n, channels, ref size @ ..], &[outputs, inputs, ref filter @ ..]) =
        (&x.sizes[..], &weight.sizes[..])
    else {
        return None;
    };
    let Some(Arg::Ints(more)) = call.args.get(first + 4) else { return None };
    let [stride, padding, dilation] = [(first, 1), (first + 1, 0), (first + 2, 1)]
        .map(|(arg, missing)| pair(call, arg, size.len(), missing).map(|both| both.map(|n| n as i64)));
    let [stride, padding, dilation] = [stride?, padding?, dilation?];
    let lines = 2 - size.len().min(2);
    let fits = size.len() == filter.len() && matches!(size.len(), 1 | 2) && more.len() == size.len();
    (fits && channels == if back { outputs } else { inputs } && int(call, first + 5)? == 1).then_some(())?;
    let mut sizes = SmallVec::from_slice(&[n, if back { inputs } else { outputs }]);
    for (d, (size, filter)) in size.iter().zip(filter).enumerate() {
        let (stride, padding, reach) =
            (stride[d + lines], padding[d + lines], dilation[d + lines] * (filter - 1));
        let more = more[d];
        let to = match back {
            true => (size - 1) * stride - 2 * padding + reach + more + 1,
            false => (size + 2 * padding - reach - 1).div_euclid(stride.max(1)) + 1,
        };
        // PyTorch refuses what is longer than a step.
        let valid = stride > 0
            && dilation[d + lines] > 0
            && to > 0
            && (!back || (0..stride.max(dilation[d + lines])).contains(&more));
        valid.then_some(())?;
        sizes.push(to);
    }
    Some(sizes)
}

/// What `convolution` gives.
pub fn forward_gives(call: &Call<'_>) -> Option<Outputs> {
    let (x, weight) = (exact(call, 0)?, exact(call, 1)?);
    let sizes = result(&x, &weight, call, 3)?;
    let biased = match call.args.get(2)? {
        Arg::None => true,
        _ => contiguous(call, 2, Mem::F32)?.sizes[..] == [sizes[1]],
    };
    (biased && !x.sizes.contains(&0)).then(|| new_tensors(Dtype::FLOAT32, [Some(&sizes[..])]))
}

/// What `convolution_backward` gives.
pub fn backward_gives(call: &Call<'_>) -> Option<Outputs> {
    let (grad, x, weight) = (exact(call, 0)?, exact(call, 1)?, exact(call, 2)?);
    let sizes = result(&x, &weight, call, 4)?;
    let Some(Arg::Bools(wanted)) = call.args.get(10) else { return None };
    let [to_x, to_weight, to_bias] =
        <[_; 3]>::try_from(wanted.iter().map(|w| *w != 0).collect::<Vec<_>>()).ok()?;
    let bias = [sizes[1]];
    let all = [(to_x, &x.sizes[..]), (to_weight, &weight.sizes[..]), (to_bias, &bias[..])];
    let fits = grad.sizes[..] == sizes[..] && !x.sizes.contains(&0);
    fits.then(|| new_tensors(Dtype::FLOAT32, all.map(|(wanted, sizes)| wanted.then_some(sizes))))
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
    let work = move |host: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        let at = |i: usize| Shared(data[i].cast::<f32>());
        let (all, bias) = ([0, 1, 2].map(at), biased.then(|| at(3)));
        if back { way.to_image(host, all, bias) } else { way.to_grid(host, all, bias) }
    };
    Some(Kernel { windows, params: SmallVec::new(), work: Box::new(work) })
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
    let work = move |host: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        let at = |i: usize| Shared(data[i].cast::<f32>());
        let [grad, x, weight] = [0, 1, 2].map(at);
        let mut done = true;
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
        done
    };
    Some(Kernel { windows, params: SmallVec::new(), work: Box::new(work) })
}
