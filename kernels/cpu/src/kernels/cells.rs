//! Fused LSTM and GRU cells, whose gates come from matrix products, and their gradients.
//!
//! The workspaces have the layout of the shim's kernels (`pybridge/cpp/aten/cells.cpp`): the activated gates of an
//! LSTM cell, or the gates, the hidden state and the hidden part of the new gate of a GRU cell.

use smallvec::smallvec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::norm::{Windows, output, wanted, weights};
use crate::kernels::rows::{Division, read, whole, written};
use crate::kernels::{contiguous, count, each_row};
use crate::tiles::math::{exp, tanh};
use crate::widest::widest;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::TensorGeometry;

/// Cost of an element of the hidden state, in additions.
const COST: usize = 64;

/// Rows and columns of a contiguous matrix of floats.
fn shape(window: &TensorGeometry) -> Option<[usize; 2]> {
    let [rows, n] = <[i64; 2]>::try_from(&window.sizes[..]).ok()?;
    (rows > 0 && n > 0).then_some([rows as usize, n as usize])
}

/// A matrix argument of `rows` rows of `n` floats.
fn matrix(call: &Call<'_>, arg: usize, [rows, n]: [usize; 2]) -> Option<TensorGeometry> {
    contiguous(call, arg, Mem::F32).filter(|w| shape(w) == Some([rows, n]))
}

/// A new matrix of `rows` rows of `n` floats.
fn made(outputs: &Outputs, number: usize, [rows, n]: [usize; 2]) -> Option<TensorGeometry> {
    output(outputs, number).filter(|w| shape(w) == Some([rows, n]))
}

/// Row `i` of a window of rows of `n` elements; an empty row if the window is absent.
///
/// # Safety
/// - The window has these elements.
/// - Nobody writes the elements while the slice is in use.
unsafe fn row<'a>(data: Addresses<'_>, window: Option<usize>, i: usize, n: usize) -> &'a [f32] {
    // SAFETY: the window has these elements, which this function requires.
    window.map_or(&[], |w| unsafe { data.of(w).read(i * n, n) })
}

/// The kernel of a cell's forward pass. Each row has `gates` gates of as many elements as the state, and saves `saved`
/// times as many elements for the gradient.
fn forward(
    call: &Call<'_>,
    outputs: &Outputs,
    gates: usize,
    saved: usize,
    compute: fn(&mut Cell<'_>),
) -> Option<Kernel> {
    let state = contiguous(call, 2, Mem::F32)?;
    let [rows, n] = shape(&state)?;
    let all = gates * n;
    let last = outputs.outs.len() - 1;
    let cell = match last {
        2 => Some(made(outputs, 1, [rows, n])?),
        _ => None,
    };
    let windows = (
        read::<f32>(matrix(call, 0, [rows, all])?),
        read::<f32>(matrix(call, 1, [rows, all])?),
        weights(call, 3, all)?.map(whole::<f32>),
        weights(call, 4, all)?.map(whole::<f32>),
        read::<f32>(state),
        written::<f32>(made(outputs, 0, [rows, n])?),
        cell.map(written::<f32>),
        written::<f32>(made(outputs, last, [rows, saved * n])?),
    );
    let by = Division { rows, n, cost: COST };
    Kernel::of_each_row(by, windows, smallvec![], move |_, elements| {
        let (input, hidden, input_bias, hidden_bias, state, new, cell, work) = elements;
        let [input_bias, hidden_bias] = [input_bias, hidden_bias].map(Option::unwrap_or_default);
        let cell = cell.unwrap_or_default();
        compute(&mut Cell { input, hidden, input_bias, hidden_bias, state, new, cell, work });
    })
}

/// A row of a cell's forward pass.
struct Cell<'a> {
    /// Products with the input, and with the hidden state: the gates, one after the other.
    input: &'a [f32],
    hidden: &'a [f32],
    /// Biases of the products; empty if there are none.
    input_bias: &'a [f32],
    hidden_bias: &'a [f32],
    /// Previous state of the cell (LSTM) or previous hidden state (GRU).
    state: &'a [f32],
    /// New hidden state.
    new: &'a mut [f32],
    /// New state of the cell; empty in a GRU cell.
    cell: &'a mut [f32],
    /// Values that the gradient needs.
    work: &'a mut [f32],
}

/// `_thnn_fused_lstm_cell(input_gates, hidden_gates, cx, input_bias, hidden_bias)`. Returns the hidden state, the
/// cell's state and the workspace.
pub fn lstm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, 4, 4, lstm_row)
}

/// `_thnn_fused_gru_cell(input_gates, hidden_gates, hx, input_bias, hidden_bias)`. Returns the hidden state and the
/// workspace.
pub fn gru(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, 3, 5, gru_row)
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Adds a bias, which may be empty, to a row of products.
#[inline(always)]
fn add_bias(to: &mut [f32], products: &[f32], bias: &[f32]) {
    to.copy_from_slice(products);
    for (to, bias) in to.iter_mut().zip(bias) {
        *to += bias;
    }
}

widest! {
    fn lstm_row(cell: &mut Cell<'_>) => run_lstm
}

#[inline(always)]
fn run_lstm(cell: &mut Cell<'_>) {
    let n = cell.state.len();
    add_bias(cell.work, cell.hidden, cell.hidden_bias);
    if cell.input_bias.is_empty() {
        cell.work.iter_mut().zip(cell.input).for_each(|(gate, x)| *gate += x);
    } else {
        let input = cell.input.iter().zip(cell.input_bias);
        cell.work.iter_mut().zip(input).for_each(|(gate, (x, bias))| *gate += x + bias);
    }
    let (inputs, rest) = cell.work.split_at_mut(n);
    let (forgets, rest) = rest.split_at_mut(n);
    let (news, outs) = rest.split_at_mut(n);
    for gate in inputs.iter_mut().chain(forgets.iter_mut()) {
        *gate = sigmoid(*gate);
    }
    news.iter_mut().for_each(|gate| *gate = tanh(*gate));
    outs.iter_mut().for_each(|gate| *gate = sigmoid(*gate));
    let gates = inputs.iter().zip(forgets.iter()).zip(news.iter());
    for ((c, ((i, f), g)), before) in cell.cell.iter_mut().zip(gates).zip(cell.state) {
        *c = f * before + i * g;
    }
    for ((h, o), c) in cell.new.iter_mut().zip(outs.iter()).zip(cell.cell.iter()) {
        *h = o * tanh(*c);
    }
}

widest! {
    fn gru_row(cell: &mut Cell<'_>) => run_gru
}

#[inline(always)]
fn run_gru(cell: &mut Cell<'_>) {
    let n = cell.state.len();
    let (gates, rest) = cell.work.split_at_mut(3 * n);
    let (before, hidden_new) = rest.split_at_mut(n);
    before.copy_from_slice(cell.state);
    let part = |bias: &'_ [f32], at: usize| if bias.is_empty() { [0, 0] } else { [at, at + n] };
    // The new gate's hidden part is scaled by the reset gate, so it is kept apart.
    let [from, to] = part(cell.hidden_bias, 2 * n);
    add_bias(hidden_new, &cell.hidden[2 * n..], &cell.hidden_bias[from..to]);
    add_bias(gates, cell.input, cell.input_bias);
    let (resets, news) = gates.split_at_mut(2 * n);
    if cell.hidden_bias.is_empty() {
        resets.iter_mut().zip(cell.hidden).for_each(|(gate, h)| *gate = sigmoid(h + *gate));
    } else {
        let hidden = cell.hidden.iter().zip(cell.hidden_bias);
        resets.iter_mut().zip(hidden).for_each(|(gate, (h, bias))| *gate = sigmoid(h + bias + *gate));
    }
    let (resets, updates) = resets.split_at(n);
    for ((gate, hidden), reset) in news.iter_mut().zip(hidden_new.iter()).zip(resets) {
        *gate = tanh(*gate + hidden * reset);
    }
    for (((h, gate), update), before) in cell.new.iter_mut().zip(news.iter()).zip(updates).zip(cell.state) {
        *h = (before - gate) * update + gate;
    }
}

/// Adds up the columns of a matrix of `rows` rows of `n` elements.
fn add_columns(host: &dyn HostKernels, from: SendPtr<f32>, to: SendPtr<f32>, [rows, n]: [usize; 2]) {
    each_row(host, n, rows, &|begin, end| {
        for column in begin..end {
            // SAFETY: the matrix has these elements, and one thread alone writes each sum.
            unsafe {
                let sum: f64 = (0..rows).map(|i| f64::from(*from.at(i * n + column))).sum();
                *to.at(column) = sum as f32;
            }
        }
    });
}

/// `_thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace, has_bias)`. Returns the gradients of the
/// gates, of the cell's state and of a bias.
pub fn lstm_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let before = contiguous(call, 2, Mem::F32)?;
    let shape @ [rows, n] = shape(&before)?;
    let gates = [rows, 4 * n];
    let mut windows = Windows::default();
    let [grad_hidden, grad_cell] = [0, 1].map(|arg| weights(call, arg, rows * n));
    let (grad_hidden, grad_cell) = (windows.maybe(grad_hidden?), windows.maybe(grad_cell?));
    let (before, after) = (windows.add(before), windows.add(matrix(call, 3, shape)?));
    let work = windows.add(matrix(call, 4, gates)?);
    let grad_gates = windows.add(made(outputs, 0, gates)?);
    let grad_before = windows.add(made(outputs, 1, shape)?);
    let bias = windows.maybe(wanted(outputs, 2)?.filter(|w| count(&w.sizes) == 4 * n));
    let run = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        each_row(host, rows, n * COST, &|from, to| {
            for i in from..to {
                // SAFETY: the windows have `rows` rows of these sizes; one thread alone writes a row.
                unsafe {
                    lstm_backward_row(
                        [row(data, grad_hidden, i, n), row(data, grad_cell, i, n)],
                        [row(data, Some(before), i, n), row(data, Some(after), i, n)],
                        row(data, Some(work), i, 4 * n),
                        data.of(grad_gates).slice(i * 4 * n, 4 * n),
                        data.of(grad_before).slice(i * n, n),
                    );
                }
            }
        });
        if let Some(bias) = bias {
            add_columns(host, data.of(grad_gates), data.of(bias), gates);
        }
        true
    };
    Some(Kernel::new(windows.0, Default::default(), run))
}

widest! {
    fn lstm_backward_row(
        grads: [&[f32]; 2],
        cells: [&[f32]; 2],
        work: &[f32],
        grad_gates: &mut [f32],
        grad_before: &mut [f32],
    ) => run_lstm_backward
}

#[inline(always)]
fn run_lstm_backward(
    [grad_hidden, grad_cell]: [&[f32]; 2],
    [before, after]: [&[f32]; 2],
    work: &[f32],
    grad_gates: &mut [f32],
    grad_before: &mut [f32],
) {
    let n = before.len();
    let (i, rest) = work.split_at(n);
    let (f, rest) = rest.split_at(n);
    let (g, o) = rest.split_at(n);
    let (grad_i, rest) = grad_gates.split_at_mut(n);
    let (grad_f, rest) = rest.split_at_mut(n);
    let (grad_g, grad_o) = rest.split_at_mut(n);
    let (o, after) = (&o[..n], &after[..n]);
    let (grad_o, grad_before) = (&mut grad_o[..n], &mut grad_before[..n]);
    for j in 0..n {
        let hidden = if grad_hidden.is_empty() { 0.0 } else { grad_hidden[j] };
        let cell = if grad_cell.is_empty() { 0.0 } else { grad_cell[j] };
        let tanh = tanh(after[j]);
        let cell = cell + hidden * o[j] * (1.0 - tanh * tanh);
        grad_o[j] = hidden * tanh * (o[j] * (1.0 - o[j]));
        grad_i[j] = cell * g[j] * (i[j] * (1.0 - i[j]));
        grad_f[j] = cell * before[j] * (f[j] * (1.0 - f[j]));
        grad_g[j] = cell * i[j] * (1.0 - g[j] * g[j]);
        grad_before[j] = cell * f[j];
    }
}

/// `_thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias)`. Returns the gradients of the input's and the hidden
/// state's gates, of the hidden state, and of both biases.
pub fn gru_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let grad = contiguous(call, 0, Mem::F32)?;
    let shape @ [rows, n] = shape(&grad)?;
    let gates = [rows, 3 * n];
    let mut windows = Windows::default();
    let grad = windows.add(grad);
    let work = windows.add(matrix(call, 1, [rows, 5 * n])?);
    let [input, hidden] = [0, 1].map(|number| made(outputs, number, gates));
    let (input, hidden) = (windows.add(input?), windows.add(hidden?));
    let before = windows.add(made(outputs, 2, shape)?);
    let [input_bias, hidden_bias] = [3, 4].map(|number| wanted(outputs, number));
    let has_size = |w: &TensorGeometry| count(&w.sizes) == 3 * n;
    let input_bias = windows.maybe(input_bias?.filter(has_size));
    let hidden_bias = windows.maybe(hidden_bias?.filter(has_size));
    let run = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        each_row(host, rows, n * COST, &|from, to| {
            for i in from..to {
                // SAFETY: the windows have `rows` rows of these sizes; one thread alone writes a row.
                unsafe {
                    gru_backward_row(
                        row(data, Some(grad), i, n),
                        row(data, Some(work), i, 5 * n),
                        data.of(input).slice(i * 3 * n, 3 * n),
                        data.of(hidden).slice(i * 3 * n, 3 * n),
                        data.of(before).slice(i * n, n),
                    );
                }
            }
        });
        for (bias, gradients) in [(input_bias, input), (hidden_bias, hidden)] {
            if let Some(bias) = bias {
                add_columns(host, data.of(gradients), data.of(bias), gates);
            }
        }
        true
    };
    Some(Kernel::new(windows.0, Default::default(), run))
}

widest! {
    fn gru_backward_row(
        grad: &[f32],
        work: &[f32],
        input: &mut [f32],
        hidden: &mut [f32],
        before: &mut [f32],
    ) => run_gru_backward
}

#[inline(always)]
fn run_gru_backward(grad: &[f32], work: &[f32], input: &mut [f32], hidden: &mut [f32], before: &mut [f32]) {
    let n = grad.len();
    let (r, rest) = work.split_at(n);
    let (z, rest) = rest.split_at(n);
    let (new, rest) = rest.split_at(n);
    let (state, hidden_new) = rest.split_at(n);
    let (grad_r, rest) = input.split_at_mut(n);
    let (grad_z, grad_n) = rest.split_at_mut(n);
    let (hidden_new, before, grad_n) = (&hidden_new[..n], &mut before[..n], &mut grad_n[..n]);
    for j in 0..n {
        grad_n[j] = grad[j] * (1.0 - z[j]) * (1.0 - new[j] * new[j]);
        grad_z[j] = grad[j] * (state[j] - new[j]) * (z[j] * (1.0 - z[j]));
        grad_r[j] = grad_n[j] * hidden_new[j] * (r[j] * (1.0 - r[j]));
        before[j] = grad[j] * z[j];
    }
    let (hidden_rz, hidden_n) = hidden.split_at_mut(2 * n);
    hidden_rz[..n].copy_from_slice(grad_r);
    hidden_rz[n..].copy_from_slice(grad_z);
    for ((to, grad), r) in hidden_n.iter_mut().zip(grad_n.iter()).zip(r) {
        *to = grad * r;
    }
}
