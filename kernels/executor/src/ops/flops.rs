//! Numbers of arithmetic operations of calls, for the roofline model of the report. A multiply-add counts as two.

use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

/// Function that returns the number of arithmetic operations of a call.
pub type Flops = fn(&Call<'_>, &Outputs) -> u64;

/// Number of elements of a flat input.
fn numel(call: &Call<'_>, input: usize) -> u64 {
    call.inputs.get(input).map_or(0, |x| x.sizes.iter().product::<i64>() as u64)
}

/// Size of a flat input's dimension, where dimension 0 is the last one; 1 if the input has no such dimension.
fn size(call: &Call<'_>, input: usize, from_last: usize) -> u64 {
    let sizes = call.inputs.get(input).map_or(&[][..], |x| x.sizes);
    sizes.len().checked_sub(from_last + 1).map_or(1, |at| sizes[at] as u64)
}

/// Number of elements of all new outputs.
fn made(outputs: &Outputs) -> u64 {
    let numel = |out: &OutSpec| match out {
        OutSpec::NewStorage { meta, .. } => meta.numel().max(0) as u64,
        _ => 0,
    };
    outputs.outs.iter().map(numel).sum()
}

/// One operation per element of the outputs or of the largest input, whichever has more elements.
pub fn elementwise(call: &Call<'_>, outputs: &Outputs) -> u64 {
    let largest = (0..call.inputs.len()).map(|input| numel(call, input)).max();
    made(outputs).max(largest.unwrap_or(0))
}

/// A product whose left matrix is the first input.
pub fn product_0(call: &Call<'_>, outputs: &Outputs) -> u64 {
    2 * made(outputs) * size(call, 0, 0)
}

/// A product whose left matrix is the second input.
pub fn product_1(call: &Call<'_>, outputs: &Outputs) -> u64 {
    2 * made(outputs) * size(call, 1, 0)
}

/// A product of the first input and a vector.
pub fn dot(call: &Call<'_>, _: &Outputs) -> u64 {
    2 * numel(call, 0)
}

/// Number of elements of one filter of a weight.
fn per_filter(call: &Call<'_>, weight: usize) -> u64 {
    let filters = call.inputs.get(weight).and_then(|w| w.sizes.first()).map_or(1, |n| (*n).max(1) as u64);
    numel(call, weight) / filters
}

/// `convolution(input, weight, ..)`.
pub fn convolution(call: &Call<'_>, outputs: &Outputs) -> u64 {
    2 * made(outputs) * per_filter(call, 1)
}

/// `convolution_backward(grad_output, input, weight, .., output_mask)`: the gradients of input and weight, as far as
/// the mask asks for them.
pub fn convolution_backward(call: &Call<'_>, _: &Outputs) -> u64 {
    let wanted = call.args.iter().find_map(|arg| match arg {
        Arg::Bools(mask) => Some(mask.iter().take(2).filter(|m| **m != 0).count() as u64),
        _ => None,
    });
    2 * numel(call, 0) * per_filter(call, 2) * wanted.unwrap_or(2)
}

/// Attention of queries `[.., L, E]` and keys `[.., S, E]`: the scores, and their product with the values.
pub fn attention(call: &Call<'_>, _: &Outputs) -> u64 {
    2 * 2 * numel(call, 0) * size(call, 1, 1)
}

/// The five products of attention's backward pass. The first input is the gradient.
pub fn attention_backward(call: &Call<'_>, _: &Outputs) -> u64 {
    2 * 5 * numel(call, 1) * size(call, 2, 1)
}
