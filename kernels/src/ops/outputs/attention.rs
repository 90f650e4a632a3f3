//! Outputs of attention and of recurrent cells.

use tandem_tracegraph::call::{Arg, Call, Input};
use tandem_tracegraph::node::Outputs;
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

use crate::ops::arguments::{int, is_absent, optional, tensor};
use crate::ops::outputs::{new_tensors, push};
use crate::shapes::{Dims, is_dense, output_strides};

/// Sizes of queries and of keys, if both operators accept these tensors: `[batch, heads, length, width]`.
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
    // The output is laid out as the query, without its gaps.
    let strides: Dims = match is_dense(q.sizes, q.strides) {
        true => q.strides.into(),
        false if q.sizes.contains(&1) => return None,
        false => output_strides(q.sizes, &[(q.sizes, q.strides)]),
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

/// Sizes of a cell's state, `[batch, width]`, if its gates are `gates` times as wide.
fn state(call: &Call<'_>, gates: i64) -> Option<[i64; 2]> {
    let [input, hidden, state] = [0, 1, 2].map(|arg| tensor(call, arg));
    let (input, hidden, state) = (input?, hidden?, state?);
    let sizes @ [batch, width] = <[i64; 2]>::try_from(state.sizes).ok()?;
    let wide = [batch, gates * width];
    let float = [input, hidden, state].iter().all(|x| x.dtype == Dtype::FLOAT32);
    let biases = [3, 4].iter().all(|arg| optional(call, *arg, &wide[1..], Dtype::FLOAT32).is_some());
    (float && biases && input.sizes == wide && hidden.sizes == wide).then_some(sizes)
}

/// `_thnn_fused_lstm_cell(input_gates, hidden_gates, cx, input_bias, hidden_bias)`.
pub(crate) fn lstm(call: &Call<'_>) -> Option<Outputs> {
    let sizes @ [batch, width] = state(call, 4)?;
    Some(new_tensors(Dtype::FLOAT32, [Some(&sizes[..]), Some(&sizes), Some(&[batch, 4 * width])]))
}

/// `_thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace, has_bias)`.
pub(crate) fn lstm_backward(call: &Call<'_>) -> Option<Outputs> {
    let (before, work) = (tensor(call, 2)?, tensor(call, 4)?);
    let sizes @ [batch, width] = <[i64; 2]>::try_from(before.sizes).ok()?;
    let wide = [batch, 4 * width];
    let given = [0, 1].map(|arg| optional(call, arg, &sizes, Dtype::FLOAT32));
    let after = optional(call, 3, &sizes, Dtype::FLOAT32)?;
    let float = before.dtype == Dtype::FLOAT32 && work.dtype == Dtype::FLOAT32;
    if !float || !after || !(given[0]? || given[1]?) || work.sizes != wide {
        return None;
    }
    let bias = (int(call, 5)? != 0).then_some(&wide[1..]);
    Some(new_tensors(Dtype::FLOAT32, [Some(&wide[..]), Some(&sizes), bias]))
}

/// `_thnn_fused_gru_cell(input_gates, hidden_gates, hx, input_bias, hidden_bias)`.
pub(crate) fn gru(call: &Call<'_>) -> Option<Outputs> {
    let sizes @ [batch, width] = state(call, 3)?;
    Some(new_tensors(Dtype::FLOAT32, [Some(&sizes[..]), Some(&[batch, 5 * width])]))
}

/// `_thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias)`.
pub(crate) fn gru_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, work) = (tensor(call, 0)?, tensor(call, 1)?);
    let sizes @ [batch, width] = <[i64; 2]>::try_from(grad.sizes).ok()?;
    let float = grad.dtype == Dtype::FLOAT32 && work.dtype == Dtype::FLOAT32;
    if !float || work.sizes != [batch, 5 * width] {
        return None;
    }
    let (wide, bias) = ([batch, 3 * width], [3 * width]);
    let bias = (int(call, 2)? != 0).then_some(&bias[..]);
    Some(new_tensors(Dtype::FLOAT32, [Some(&wide[..]), Some(&wide), Some(&sizes), bias, bias]))
}
