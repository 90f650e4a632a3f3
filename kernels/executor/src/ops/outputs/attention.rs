//! Outputs of attention.

use tandem_tracegraph::call::{Arg, Call, Input};
use tandem_tracegraph::node::Outputs;
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

use crate::ops::arguments::{is_absent, optional, tensor};
use crate::ops::outputs::push;
use crate::shapes::{Dims, View, is_dense, output_strides};

/// Sizes of queries and of keys, if the forward and the backward operator accept these tensors: `[batch, heads, length,
/// width]`.
fn sizes(call: &Call<'_>, [q, k, v]: [&Input<'_>; 3], dropout: usize) -> Option<[[i64; 4]; 2]> {
    let queries @ [batch, heads, length, width] = <[i64; 4]>::try_from(q.sizes).ok()?;
    let keys = <[i64; 4]>::try_from(k.sizes).ok()?;
    let float = [q, k, v].iter().all(|x| x.dtype == Dtype::FLOAT32);
    let fits = keys == [batch, heads, keys[2], width] && v.sizes == keys && float && !q.sizes.contains(&0);
    let no_dropout = matches!(call.args.get(dropout), Some(Arg::Float(p)) if *p == 0.0);
    let mask = dropout + 2;
    let masked = is_absent(call, mask)
        || [&[length, keys[2]][..], &[1, 1, length, keys[2]], &[batch, heads, length, keys[2]]]
            .iter()
            .any(|sizes| optional(call, mask, sizes, q.dtype) == Some(true));
    (fits && keys[2] > 0 && no_dropout && masked).then_some([queries, keys])
}

/// `_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale)`.
pub(crate) fn forward(call: &Call<'_>) -> Option<Outputs> {
    let [q, k, v] = [0, 1, 2].map(|arg| tensor(call, arg));
    let (q, k, v) = (q?, k?, v?);
    let [[batch, heads, length, _], _] = sizes(call, [q, k, v], 3)?;
    // The output has the memory order of the query, without gaps.
    let strides: Dims = match is_dense(q.sizes, q.strides) {
        true => q.strides.into(),
        false if q.sizes.contains(&1) => return None,
        false => output_strides(q.sizes, &[View { sizes: q.sizes, strides: q.strides }]),
    };
    let mut outputs = Outputs::default();
    push(&mut outputs, Some(TensorMeta::new(q.sizes, &strides, q.dtype, 0)));
    let sums = TensorMeta::new(&[batch, heads, length], &[length * heads, 1, heads], q.dtype, 0);
    push(&mut outputs, Some(sums));
    Some(outputs)
}

/// `_scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p,
/// is_causal, attn_mask, scale)`. The heads of the gradients are side by side in memory.
pub(crate) fn backward(call: &Call<'_>) -> Option<Outputs> {
    let [grad, q, k, v, y] = [0, 1, 2, 3, 4].map(|arg| tensor(call, arg));
    let (grad, q, k, v, y) = (grad?, q?, k?, v?, y?);
    let [queries, keys] = sizes(call, [q, k, v], 6)?;
    let same = |x: &Input<'_>| x.sizes == queries && x.dtype == q.dtype;
    optional(call, 5, &queries[..3], q.dtype).filter(|given| *given)?;
    if !same(grad) || !same(y) {
        return None;
    }
    let mut outputs = Outputs::default();
    for sizes @ [_, heads, length, width] in [queries, keys, keys] {
        let strides = [length * heads * width, width, heads * width, 1];
        push(&mut outputs, Some(TensorMeta::new(&sizes, &strides, q.dtype, 0)));
    }
    Some(outputs)
}
