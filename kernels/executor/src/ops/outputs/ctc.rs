//! Connectionist temporal classification, whose lengths are lists of ints.

use tandem_tracegraph::call::{Call, Input};
use tandem_tracegraph::node::Outputs;

use crate::ops::arguments::{floats, int, ints, tensor};
use crate::ops::outputs::{new_tensors, one};

/// The length of the longest target, on which the size of `log_alpha` depends. `log_probs` is argument `at`; the
/// targets and both lists of lengths follow it. `None` if PyTorch refuses the lengths.
fn longest(call: &Call<'_>, at: usize) -> Option<i64> {
    let (x, targets) = (tensor(call, at)?, tensor(call, at + 1)?);
    let (steps, lengths) = (ints(call, at + 2)?, ints(call, at + 3)?);
    let [most, items, _] = *x.sizes else { return None };
    let each = |list: &[i64]| list.len() as i64 == items && list.iter().all(|n| *n >= 0);
    let longest = lengths.iter().copied().max()?;
    let fit = match *targets.sizes {
        [all] => lengths.iter().try_fold(0i64, |sum, n| sum.checked_add(*n)) == Some(all),
        [rows, row] => rows == items && longest <= row,
        _ => false,
    };
    (each(steps) && each(lengths) && steps.iter().all(|n| *n <= most) && fit).then_some(longest)
}

/// The length of the longest target of `_ctc_loss`.
pub(crate) fn longest_target(call: &Call<'_>) -> Option<i64> {
    longest(call, 0)
}

/// The length of the longest target of `_ctc_loss_backward`.
pub(crate) fn longest_target_backward(call: &Call<'_>) -> Option<i64> {
    longest(call, 1)
}

/// The tensor `log_probs`, which is argument `at`, if it has the class in argument `blank`.
fn probabilities<'c>(call: &'c Call<'_>, at: usize, blank: usize) -> Option<&'c Input<'c>> {
    let x = floats(call, at)?;
    let classes = *x.sizes.get(2)?;
    (!x.sizes.contains(&0) && (0..classes).contains(&int(call, blank)?)).then_some(x)
}

/// `_ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)`.
pub(crate) fn loss(call: &Call<'_>) -> Option<Outputs> {
    let x = probabilities(call, 0, 4)?;
    let (steps, items) = (x.sizes[0], x.sizes[1]);
    let alpha = [items, steps, 2 * longest_target(call)? + 1];
    Some(new_tensors(x.dtype, [Some(&[items][..]), Some(&alpha)]))
}

/// `_ctc_loss_backward(grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, log_alpha, blank,
/// zero_infinity)`.
pub(crate) fn backward(call: &Call<'_>) -> Option<Outputs> {
    let x = probabilities(call, 1, 7)?;
    let (steps, items) = (x.sizes[0], x.sizes[1]);
    let alpha = [items, steps, 2 * longest_target_backward(call)? + 1];
    let is_of_loss = floats(call, 6)?.sizes == alpha && floats(call, 5)?.sizes == [items];
    (is_of_loss && floats(call, 0)?.sizes == [items]).then(|| one(x.dtype, x.sizes))?
}
