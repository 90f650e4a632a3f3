//! Outputs of the fused cells of recurrent layers.

use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::ops::arguments::{int, optional, tensor};
use crate::ops::outputs::new_tensors;

/// Sizes of a cell's state, `[batch, width]`. The gates are `gates` times as wide as the state.
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
