//! Losses of predictions and targets of the same shape, and their gradients with respect to the predictions.
//!
//! The formulas ([`Loss`]) are the same in both executors and are compiled to tile programs here. A block's losses are
//! computed in pieces that stay in the first-level cache, and added in the order of [`super::reduce::sums`].

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::reduce::sums;
use crate::kernels::{contiguous, count, each_row, int, output};
use crate::tiles::group::Lane;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::{E, Mem, Ty};
use tandem_executor::ops::arguments::is_absent;
use tandem_executor::ops::express::{Param, TensorGeometry};
use tandem_executor::ops::losses::{Loss, Reduction, cross_entropy_with_logits};
use tandem_executor::plan::Draft;
use tandem_executor::shapes::Dims;

/// Number of losses that are computed at a time.
const PIECE: usize = 512;
/// Cost of a loss, in additions.
const COST: usize = 8;

/// The windows of predictions and targets, which are arguments `at` and `at + 1`, and their number of elements.
fn pair(call: &Call<'_>, at: usize) -> Option<(TensorGeometry, TensorGeometry, usize)> {
    let (x, t) = (contiguous(call, at, Mem::F32)?, contiguous(call, at + 1, Mem::F32)?);
    let n = count(&x.sizes);
    (x.sizes == t.sizes && n > 0).then_some((x, t, n))
}

/// The only output, if it is contiguous and has `n` elements.
fn result(outputs: &Outputs, n: usize) -> Option<TensorGeometry> {
    output(outputs).filter(|y| y.mem == Mem::F32 && count(&y.sizes) == n)
}

/// The number of a loss, such as `beta`, as parameter 0. It is argument `arg`, if the loss has a number.
fn numbers(arg: Option<u32>) -> (SmallVec<[Param; 2]>, E) {
    match arg {
        Some(arg) => (smallvec![Param::Number(arg, 0, Ty::F32)], E::param(Ty::F32, 0)),
        None => (smallvec![], E::lit(Ty::F32, 1.0)),
    }
}

/// Compiles an expression of the elements of windows. They are numbered in the order of `ins`, and `out` has the next
/// number.
fn compiled(ins: &[TensorGeometry], out: &TensorGeometry, value: impl FnOnce(&[E]) -> E) -> Option<Lane> {
    let draft = Draft::<usize, Param>::of_expression(ins, out, value);
    Lane::of(&draft.lanes[0], &mut Vec::new(), &|_, _| false)
}

/// A loss whose `Reduction` is argument `reduction`, and whose number is argument `arg`.
fn forward(
    call: &Call<'_>,
    outputs: &Outputs,
    loss: Loss,
    reduction: usize,
    arg: Option<u32>,
) -> Option<Kernel> {
    let value = |x: &E, t: &E, number: &E| loss.value(x, t, number);
    let values = if loss == Loss::BinaryCrossEntropy { Values::Probabilities } else { Values::Any };
    reduced(call, outputs, value, values, reduction, arg)
}

/// Predictions and targets that a kernel accepts. PyTorch's kernel reports others.
#[derive(Clone, Copy, PartialEq)]
enum Values {
    Any,
    Probabilities,
}

/// The losses `value` of predictions, targets and the number of argument `arg`, reduced as argument `reduction` says.
fn reduced(
    call: &Call<'_>,
    outputs: &Outputs,
    value: impl FnOnce(&E, &E, &E) -> E,
    values: Values,
    reduction: usize,
    arg: Option<u32>,
) -> Option<Kernel> {
    let (x, t, n) = pair(call, 0)?;
    let reduction = Reduction::of(int(call, reduction)?)?;
    let y = result(outputs, if reduction == Reduction::None { n } else { 1 })?;
    let by = if reduction == Reduction::Mean { 1.0 / n as f64 } else { 1.0 };
    let (params, number) = numbers(arg);
    // If losses are added, each piece of memory has them in the order of the predictions.
    let each = TensorGeometry { sizes: x.sizes.clone(), strides: x.strides.clone(), ..y.clone() };
    let lane = compiled(&[x.clone(), t.clone()], &each, |v| value(&v[0], &v[1], &number))?;
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let [x, t, y] = [0, 1, 2].map(|w| data.of::<f32>(w));
        let is_valid = AtomicBool::new(true);
        let losses = |at: usize, to: &mut [f32]| {
            if values == Values::Probabilities {
                // SAFETY: the range is within the `n` elements of both windows, which nobody writes.
                let (x, t) = unsafe { (x.read(at, to.len()), t.read(at, to.len())) };
                if !(are_probabilities(x) && are_probabilities(t)) {
                    is_valid.store(false, Ordering::Relaxed);
                }
            }
            // The lane computes element `at` at the address of the window's element `at`.
            let to_window = to.as_mut_ptr().wrapping_sub(at);
            let data = [x.get().cast(), t.get().cast(), to_window.cast()];
            // SAFETY: the range is within the `n` elements of the inputs, which nobody writes, and `to` has room for it.
            unsafe { lane.run(&data, params, at, at + to.len()) };
        };
        if reduction == Reduction::None {
            each_row(host, n.div_ceil(PIECE), PIECE * COST, &|begin, end| {
                for at in (begin..end).map(|i| i * PIECE) {
                    // SAFETY: the output has `n` elements, and ranges of different threads are disjoint.
                    losses(at, unsafe { y.slice(at, PIECE.min(n - at)) });
                }
            });
        } else {
            let sum = sums::blocks(host, n, &|at, n| {
                let mut piece = [0.0; PIECE];
                let pieces = (0..n).step_by(PIECE).map(|i| {
                    let piece = &mut piece[..PIECE.min(n - i)];
                    losses(at + i, piece);
                    sums::sum(piece)
                });
                pieces.sum()
            });
            // SAFETY: the output has one element, which only this call uses.
            unsafe { *y.get() = (sum * by) as f32 };
        }
        is_valid.into_inner()
    };
    Some(Kernel::new(smallvec![x, t, y], params, work))
}

/// The gradient of a loss: `(grad_output, self, target, ..)`.
fn backward(
    call: &Call<'_>,
    outputs: &Outputs,
    loss: Loss,
    reduction: usize,
    arg: Option<u32>,
) -> Option<Kernel> {
    let (mut grad, (x, t, n)) = (contiguous(call, 0, Mem::F32)?, pair(call, 1)?);
    if count(&grad.sizes) == 1 {
        (grad.sizes, grad.strides) = (Dims::new(), Dims::new());
    } else if grad.sizes != x.sizes {
        return None;
    }
    let by = if Reduction::of(int(call, reduction)?)? == Reduction::Mean { 1.0 / n as f32 } else { 1.0 };
    let y = result(outputs, n)?;
    let (params, number) = numbers(arg);
    let lane = compiled(&[grad.clone(), x.clone(), t.clone()], &y, |v| {
        loss.derivative(&(&v[0] * f64::from(by)), &v[1], &v[2], &number)
    })?;
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let data = [0, 1, 2, 3].map(|w| data.of::<u8>(w));
        each_row(host, n.div_ceil(PIECE), PIECE * COST, &|begin, end| {
            let data = data.map(|window| window.get());
            // SAFETY: the range is within the `n` elements of the windows. Nobody writes the inputs, and ranges of
            // different threads are disjoint.
            unsafe { lane.run(&data, params, begin * PIECE, n.min(end * PIECE)) };
        });
        true
    };
    Some(Kernel::new(smallvec![grad, x, t, y], params, work))
}

/// `mse_loss(self, target, reduction)`.
pub fn mse(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, Loss::Mse, 2, None)
}

/// `mse_loss_backward(grad_output, self, target, reduction)`.
pub fn mse_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    backward(call, outputs, Loss::Mse, 3, None)
}

/// `smooth_l1_loss(self, target, reduction, beta)`.
pub fn smooth_l1(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, Loss::SmoothL1, 2, Some(3))
}

/// `smooth_l1_loss_backward(grad_output, self, target, reduction, beta)`.
pub fn smooth_l1_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    backward(call, outputs, Loss::SmoothL1, 3, Some(4))
}

/// `huber_loss(self, target, reduction, delta)`.
pub fn huber(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, Loss::Huber, 2, Some(3))
}

/// `huber_loss_backward(grad_output, self, target, reduction, delta)`.
pub fn huber_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    backward(call, outputs, Loss::Huber, 3, Some(4))
}

/// `binary_cross_entropy(self, target, weight, reduction)` without weights.
pub fn cross_entropy(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    is_absent(call, 2).then(|| forward(call, outputs, Loss::BinaryCrossEntropy, 3, None))?
}

/// `binary_cross_entropy_backward(grad_output, self, target, weight, reduction)` without weights.
pub fn cross_entropy_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    is_absent(call, 3).then(|| backward(call, outputs, Loss::BinaryCrossEntropy, 4, None))?
}

/// `binary_cross_entropy_with_logits(self, target, weight, pos_weight, reduction)` without weights.
pub fn cross_entropy_of_logits(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let plain = is_absent(call, 2) && is_absent(call, 3);
    plain.then(|| {
        reduced(call, outputs, |x, t, _| cross_entropy_with_logits(x, t, None), Values::Any, 4, None)
    })?
}

/// Whether all elements are between 0 and 1.
fn are_probabilities(x: &[f32]) -> bool {
    x.iter().fold(true, |all, x| all & (0.0..=1.0).contains(x))
}
