//! Losses of predictions and targets of the same shape, and their gradients with respect to the predictions: squared
//! error, smooth L1, Huber, and binary cross entropy of probabilities and of logits.
//!
//! A block's losses are computed in pieces that stay in the first-level cache, and added in the order of
//! [`super::reduce::sums`].

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::reduce::sums;
use crate::kernels::{contiguous, count, each_row, int, output};
use crate::tiles::math::{exp, log, log1p};
use crate::widest::widest;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::arguments::is_absent;
use tandem_executor::ops::express::{Param, Window};
use tandem_executor::plan::RowShape;

/// Number of losses that are computed at a time.
const PIECE: usize = 512;
/// Cost of a loss, in additions.
const COST: usize = 8;

/// A loss of a prediction `x` and a target `t`.
#[derive(Clone, Copy)]
enum Loss {
    /// `(x - t)^2`.
    Squared,
    /// Quadratic up to a difference of `beta`, which is the number, and linear beyond.
    SmoothL1,
    /// `beta` times smooth L1; the number is called `delta`.
    Huber,
    /// Cross entropy of the probability `x`, with logarithms of at least -100.
    CrossEntropy,
    /// Cross entropy of the logit `x`.
    CrossEntropyOfLogits,
}

/// How losses are reduced.
#[derive(Clone, Copy, PartialEq)]
enum Reduction {
    None,
    Mean,
    Sum,
}

impl Reduction {
    fn of(call: &Call<'_>, arg: usize) -> Option<Reduction> {
        match int(call, arg)? {
            0 => Some(Reduction::None),
            1 => Some(Reduction::Mean),
            2 => Some(Reduction::Sum),
            _ => None,
        }
    }
}

/// The windows of predictions and targets, which are arguments `at` and `at + 1`, and their number of elements.
fn pair(call: &Call<'_>, at: usize) -> Option<(Window, Window, usize)> {
    let (x, t) = (contiguous(call, at, Mem::F32)?, contiguous(call, at + 1, Mem::F32)?);
    let n = count(&x.sizes);
    (x.sizes == t.sizes && n > 0).then_some((x, t, n))
}

/// The only output, if it is contiguous and has `n` elements.
fn result(outputs: &Outputs, n: usize) -> Option<Window> {
    output(outputs).filter(|y| y.mem == Mem::F32 && count(&y.sizes) == n)
}

/// The number of a loss, which is argument `arg` if the loss has one.
fn numbers(arg: Option<u32>) -> SmallVec<[Param; 2]> {
    arg.map(|arg| Param::Number(arg, 0, Ty::F64)).into_iter().collect()
}

fn number(params: &[u64]) -> f32 {
    params.first().map_or(1.0, |bits| f64::from_bits(*bits) as f32)
}

/// A loss whose `Reduction` is argument `reduction`, and whose number is argument `arg`.
fn forward(
    call: &Call<'_>,
    outputs: &Outputs,
    loss: Loss,
    reduction: usize,
    arg: Option<u32>,
) -> Option<Kernel> {
    let (x, t, n) = pair(call, 0)?;
    let reduction = Reduction::of(call, reduction)?;
    let y = result(outputs, if reduction == Reduction::None { n } else { 1 })?;
    let by = if reduction == Reduction::Mean { 1.0 / n as f64 } else { 1.0 };
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let [x, t, y] = [0, 1, 2].map(|w| data.of::<f32>(w));
        let (number, is_valid) = (number(params), AtomicBool::new(true));
        let losses = |at: usize, to: &mut [f32]| {
            // SAFETY: the range is within the `n` elements of both windows, which nobody writes.
            let (x, t) = unsafe { (x.read(at, to.len()), t.read(at, to.len())) };
            if matches!(loss, Loss::CrossEntropy) && !(are_probabilities(x) && are_probabilities(t)) {
                is_valid.store(false, Ordering::Relaxed);
            }
            values(loss, number, x, t, to);
        };
        if reduction == Reduction::None {
            each_row(host, n.div_ceil(PIECE), PIECE * COST, &|begin, end| {
                for at in (begin..end).map(|i| i * PIECE) {
                    // SAFETY: the output has `n` elements, and ranges of different threads are disjoint.
                    losses(at, unsafe { y.slice(at, PIECE.min(n - at)) });
                }
            });
        } else {
            // SAFETY: the output has one element, which only this call uses.
            let y = unsafe { y.slice(0, 1) };
            sums::sum_rows(host, y, &RowShape { rows: 1, n, by }, &|at, n| {
                let mut piece = [0.0; PIECE];
                let pieces = (0..n).step_by(PIECE).map(|i| {
                    let piece = &mut piece[..PIECE.min(n - i)];
                    losses(at + i, piece);
                    sums::sum(piece)
                });
                pieces.sum()
            });
        }
        // PyTorch's kernel reports what is not a probability.
        is_valid.into_inner()
    };
    Some(Kernel::new(smallvec![x, t, y], numbers(arg), work))
}

/// The gradient of a loss: `(grad_output, self, target, ..)`.
fn backward(
    call: &Call<'_>,
    outputs: &Outputs,
    loss: Loss,
    reduction: usize,
    arg: Option<u32>,
) -> Option<Kernel> {
    let (grad, (x, t, n)) = (contiguous(call, 0, Mem::F32)?, pair(call, 1)?);
    let each = count(&grad.sizes) != 1;
    if each && grad.sizes != x.sizes {
        return None;
    }
    let by = if Reduction::of(call, reduction)? == Reduction::Mean { 1.0 / n as f32 } else { 1.0 };
    let y = result(outputs, n)?;
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let [grad, x, t, y] = [0, 1, 2, 3].map(|w| data.of::<f32>(w));
        each_row(host, n.div_ceil(PIECE), PIECE * COST, &|begin, end| {
            for at in (begin..end).map(|i| i * PIECE) {
                let n = PIECE.min(n - at);
                // SAFETY: the range is within the `n` elements of the windows, of which `grad` may have only one.
                // Nobody writes the inputs, and ranges of different threads are disjoint.
                let (x, t, y) = unsafe { (x.read(at, n), t.read(at, n), y.slice(at, n)) };
                // SAFETY: as above.
                let grad = unsafe { if each { grad.read(at, n) } else { grad.read(0, 1) } };
                gradients(loss, number(params), by, grad, x, t, y);
            }
        });
        true
    };
    Some(Kernel::new(smallvec![grad, x, t, y], numbers(arg), work))
}

/// `mse_loss(self, target, reduction)`.
pub fn mse(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, Loss::Squared, 2, None)
}

/// `mse_loss_backward(grad_output, self, target, reduction)`.
pub fn mse_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    backward(call, outputs, Loss::Squared, 3, None)
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
    is_absent(call, 2).then(|| forward(call, outputs, Loss::CrossEntropy, 3, None))?
}

/// `binary_cross_entropy_backward(grad_output, self, target, weight, reduction)` without weights.
pub fn cross_entropy_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    is_absent(call, 3).then(|| backward(call, outputs, Loss::CrossEntropy, 4, None))?
}

/// `binary_cross_entropy_with_logits(self, target, weight, pos_weight, reduction)` without weights.
pub fn cross_entropy_of_logits(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let plain = is_absent(call, 2) && is_absent(call, 3);
    plain.then(|| forward(call, outputs, Loss::CrossEntropyOfLogits, 4, None))?
}

/// Whether all elements are between 0 and 1.
fn are_probabilities(x: &[f32]) -> bool {
    x.iter().fold(true, |all, x| all & (0.0..=1.0).contains(x))
}

widest! {
    fn values(loss: Loss, number: f32, x: &[f32], t: &[f32], to: &mut [f32]) => run_values
}

#[inline(always)]
fn run_values(loss: Loss, number: f32, x: &[f32], t: &[f32], to: &mut [f32]) {
    match loss {
        Loss::Squared => map(x, t, to, |x, t| (x - t) * (x - t)),
        Loss::SmoothL1 => map(x, t, to, |x, t| {
            let d = (x - t).abs();
            if d < number { 0.5 * d * d / number } else { d - 0.5 * number }
        }),
        Loss::Huber => map(x, t, to, |x, t| {
            let d = (x - t).abs();
            if d <= number { 0.5 * d * d } else { number * (d - 0.5 * number) }
        }),
        Loss::CrossEntropy => map(x, t, to, |x, t| {
            let (yes, no) = (log(x).max(-100.0), log1p(-x).max(-100.0));
            (t - 1.0) * no - t * yes
        }),
        Loss::CrossEntropyOfLogits => map(x, t, to, |x, t| {
            let log = x.min(0.0) - log1p(exp(-x.abs()));
            (1.0 - t) * x - log
        }),
    }
}

#[inline(always)]
fn map(x: &[f32], t: &[f32], to: &mut [f32], value: impl Fn(f32, f32) -> f32) {
    for ((to, x), t) in to.iter_mut().zip(x).zip(t) {
        *to = value(*x, *t);
    }
}

widest! {
    /// Computes gradients from those of the losses, of which `grad` has one for all or one for each.
    fn gradients(
        loss: Loss, number: f32, by: f32, grad: &[f32], x: &[f32], t: &[f32], to: &mut [f32]
    ) => run_gradients
}

#[inline(always)]
fn run_gradients(loss: Loss, number: f32, by: f32, grad: &[f32], x: &[f32], t: &[f32], to: &mut [f32]) {
    match loss {
        Loss::Squared => map_with(grad, x, t, to, |g, x, t| 2.0 * (x - t) * (g * by)),
        Loss::SmoothL1 => map_with(grad, x, t, to, |g, x, t| {
            let (d, g) = (x - t, g * by);
            let inner = d * g / number;
            let inner = if d >= number { g } else { inner };
            if d <= -number { -g } else { inner }
        }),
        Loss::Huber => map_with(grad, x, t, to, |g, x, t| {
            let (d, g) = (x - t, g * by);
            let inner = if d > number { g * number } else { d * g };
            if d < -number { -g * number } else { inner }
        }),
        Loss::CrossEntropy => map_with(grad, x, t, to, |g, x, t| {
            let slope = (1.0 - x) * x;
            (g * by) * (x - t) / if slope > 1e-12 { slope } else { 1e-12 }
        }),
        // PyTorch derives the gradient of this loss with other operators.
        Loss::CrossEntropyOfLogits => {}
    }
}

#[inline(always)]
fn map_with(grad: &[f32], x: &[f32], t: &[f32], to: &mut [f32], value: impl Fn(f32, f32, f32) -> f32) {
    let each = to.iter_mut().zip(x).zip(t);
    match grad {
        [g] => each.for_each(|((to, x), t)| *to = value(*g, *x, *t)),
        _ => each.zip(grad).for_each(|(((to, x), t), g)| *to = value(*g, *x, *t)),
    }
}
