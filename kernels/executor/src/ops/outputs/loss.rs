//! Outputs of losses of predictions and targets.

use tandem_tracegraph::call::{Call, Input};
use tandem_tracegraph::node::Outputs;

use crate::ops::arguments::{int, is_absent, tensor};
use crate::ops::outputs::{exact, one};

/// Predictions and targets, which are arguments `at` and `at + 1`: contiguous `float32` tensors of the same sizes.
fn pair<'c>(call: &'c Call<'_>, at: usize) -> Option<&'c Input<'c>> {
    let (x, t) = (exact(call, at)?, exact(call, at + 1)?);
    (x.sizes == t.sizes && !x.sizes.contains(&0)).then_some(x)
}

fn reduced(call: &Call<'_>, reduction: usize) -> Option<Outputs> {
    let x = pair(call, 0)?;
    match int(call, reduction)? {
        0 => one(x.dtype, x.sizes),
        1 | 2 => one(x.dtype, &[]),
        _ => None,
    }
}

/// Like [`reduced`], for operators whose output's storage has room for all losses even if the output is one number.
fn reduced_in_place(call: &Call<'_>, reduction: usize) -> Option<Outputs> {
    let mut outputs = reduced(call, reduction)?;
    outputs.new_storages[0] = tensor(call, 0)?.meta().extent_bytes(0);
    Some(outputs)
}

fn gradient(call: &Call<'_>, reduction: usize) -> Option<Outputs> {
    let (grad, x) = (tensor(call, 0)?, pair(call, 1)?);
    let expected: &[i64] = match int(call, reduction)? {
        0 => x.sizes,
        1 | 2 => &[],
        _ => return None,
    };
    (grad.sizes == expected && grad.dtype == x.dtype).then(|| one(x.dtype, x.sizes))?
}

/// `mse_loss(self, target, reduction)` and `smooth_l1_loss(.., beta)`.
pub(crate) fn loss(call: &Call<'_>) -> Option<Outputs> {
    reduced_in_place(call, 2)
}

/// `huber_loss(self, target, reduction, delta)`.
pub(crate) fn huber(call: &Call<'_>) -> Option<Outputs> {
    reduced(call, 2)
}

/// `*_backward(grad_output, self, target, reduction[, number])` of the losses above.
pub(crate) fn loss_backward(call: &Call<'_>) -> Option<Outputs> {
    gradient(call, 3)
}

/// `binary_cross_entropy_with_logits(self, target, weight, pos_weight, reduction)` without weights.
pub(crate) fn cross_entropy_of_logits(call: &Call<'_>) -> Option<Outputs> {
    (is_absent(call, 2) && is_absent(call, 3)).then(|| reduced(call, 4))?
}

/// `binary_cross_entropy_backward(grad_output, self, target, weight, reduction)` without weights.
pub(crate) fn cross_entropy_backward(call: &Call<'_>) -> Option<Outputs> {
    is_absent(call, 3).then(|| gradient(call, 4))?
}
