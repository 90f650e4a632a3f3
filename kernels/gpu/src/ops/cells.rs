//! Fused cells of recurrent layers. Workspaces contain the activated gates, as in the CPU kernels of the shim
//! (pybridge/cpp/aten/cells.cpp).

use crate::kernel::{Kernel, team};
use crate::lower::{Lowering, Operand, Source, dense};
use crate::store::Tensor;
use tandem_executor::ir::{E, Ty};

/// Tensor of sizes `[batch, parts * width]`.
struct Gates<'t> {
    of: &'t Tensor,
    width: &'t E,
}

impl Gates<'_> {
    /// Coordinates of a part's value.
    fn at(&self, place: &[E], part: u32) -> [E; 2] {
        let column = if part == 0 { place[1].clone() } else { &place[1] + self.width * f64::from(part) };
        [place[0].clone(), column]
    }

    fn load(&self, k: &Kernel, place: &[E], part: u32) -> E {
        k.load(self.of, &self.at(place, part)).cast(Ty::F32)
    }
}

/// Whether operands are batches of vectors of these lengths, of one dtype that is computed in 32 bits.
fn fit(operands: &[(&Operand, i64)], batch: i64) -> bool {
    let dtype = operands[0].0.dtype;
    operands.iter().all(|(x, columns)| {
        x.sizes[..] == [batch, *columns] && x.dtype == dtype && x.mem.ty() == Ty::F32 && x.is_contiguous()
    })
}

fn window(l: &Lowering<'_>, k: &mut Kernel, x: &Operand) -> Option<Tensor> {
    match l.read(k, x) {
        Source::TensorGeometry(t) => Some(t),
        Source::Value(_) => None,
    }
}

/// Returns the biases of the input's gates and of the hidden state's gates, or `None` if neither is given.
fn biases(l: &mut Lowering<'_>, arg: usize, like: &Operand, columns: i64) -> Option<Option<[Operand; 2]>> {
    let (input, hidden) = (l.optional(arg)?, l.optional(arg + 1)?);
    match (input, hidden) {
        (None, None) => Some(None),
        (Some(input), Some(hidden)) => {
            let fits = |x: &Operand| x.sizes[..] == [columns] && x.dtype == like.dtype;
            (fits(&input) && fits(&hidden)).then_some(Some([input, hidden]))
        }
        _ => None,
    }
}

/// Sums gradients of sizes `[batch, columns]` over the batch.
fn sum_over_batch(l: &mut Lowering<'_>, x: &Operand) -> Option<()> {
    let (batch, columns) = (x.sizes[0], x.sizes[1]);
    let out = l.new_storage(&[columns], &[1], x.dtype)?;
    let mut k = Kernel::new("cell bias");
    let source = window(l, &mut k, x)?;
    let t = l.write(&mut k, &out)?;
    k.rows(columns, batch, team(batch, true), |r, column| {
        let sum = r.sum(Ty::F32, |k, j| k.load(&source, &[j.clone(), column.clone()]).cast(Ty::F32));
        r.once(|k| vec![k.store(&t, std::slice::from_ref(column), sum)]);
    });
    l.launch(k)
}

/// `_thnn_fused_lstm_cell(input_gates, hidden_gates, cx, input_bias, hidden_bias)`: returns the hidden state, the
/// cell state, and the activated gates i, f, g, o.
pub fn lstm(l: &mut Lowering<'_>) -> Option<()> {
    let (input, hidden, cx) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?);
    let [batch, width] = cx.sizes[..] else { return None };
    if l.has_out()
        || cx.numel() == 0
        || !fit(&[(&cx, width), (&input, 4 * width), (&hidden, 4 * width)], batch)
    {
        return None;
    }
    let biases = biases(l, 3, &cx, 4 * width)?;
    let hy = l.new_storage(&cx.sizes, &dense(&cx.sizes), cx.dtype)?;
    let cy = l.new_storage(&cx.sizes, &dense(&cx.sizes), cx.dtype)?;
    let workspace = l.new_storage(&input.sizes, &dense(&input.sizes), cx.dtype)?;
    let mut k = Kernel::new("lstm cell");
    let (input, hidden, cx) =
        (window(l, &mut k, &input)?, window(l, &mut k, &hidden)?, window(l, &mut k, &cx)?);
    let (hy, cy, workspace) = (l.write(&mut k, &hy)?, l.write(&mut k, &cy)?, l.write(&mut k, &workspace)?);
    let biases = match &biases {
        Some([a, b]) => Some([window(l, &mut k, a)?, window(l, &mut k, b)?]),
        None => None,
    };
    let columns = k.size(width);
    k.map(&[batch, width], |k, at, _| {
        let gates = |of| Gates { of, width: &columns };
        let sum = |part: u32| {
            let mut sum = gates(&hidden).load(k, at, part) + gates(&input).load(k, at, part);
            for bias in biases.iter().flatten() {
                let [_, column] = gates(&hidden).at(at, part);
                sum = sum + k.load(bias, &[column]).cast(Ty::F32);
            }
            sum
        };
        let (i, f, g, o) = (sum(0).sigmoid(), sum(1).sigmoid(), sum(2).tanh(), sum(3).sigmoid());
        let state = &f * k.load(&cx, at).cast(Ty::F32) + &i * &g;
        let mut stores = vec![k.store(&hy, at, &o * state.tanh()), k.store(&cy, at, state)];
        for (part, value) in (0..).zip([i, f, g, o]) {
            stores.push(k.store(&workspace, &gates(&workspace).at(at, part), value));
        }
        stores
    });
    l.launch(k)
}

/// `_thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace, has_bias)`: returns the gradients of
/// the gates, of the cell state, and of a bias.
pub fn lstm_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad_hy, grad_cy) = (l.optional(0)?, l.optional(1)?);
    let (cx, cy, workspace) = (l.tensor(2)?, l.tensor(3)?, l.tensor(4)?);
    let [batch, width] = cx.sizes[..] else { return None };
    let given = [grad_hy.as_ref(), grad_cy.as_ref()];
    let grads = given.into_iter().flatten();
    let fits = fit(&[(&cx, width), (&cy, width), (&workspace, 4 * width)], batch)
        && grads.clone().all(|g| g.sizes == cx.sizes && g.dtype == cx.dtype);
    if l.has_out() || cx.numel() == 0 || !fits || grads.count() == 0 {
        return None;
    }
    let grad_gates = l.new_storage(&workspace.sizes, &dense(&workspace.sizes), cx.dtype)?;
    let grad_cx = l.new_storage(&cx.sizes, &dense(&cx.sizes), cx.dtype)?;
    let mut k = Kernel::new("lstm cell backward");
    let sources: Vec<Option<Tensor>> =
        given.into_iter().map(|g| g.and_then(|g| window(l, &mut k, g))).collect();
    let (cx, cy) = (window(l, &mut k, &cx)?, window(l, &mut k, &cy)?);
    let workspace = window(l, &mut k, &workspace)?;
    let (to_gates, to_cx) = (l.write(&mut k, &grad_gates)?, l.write(&mut k, &grad_cx)?);
    let columns = k.size(width);
    k.map(&[batch, width], |k, at, _| {
        let gates = |of| Gates { of, width: &columns };
        let load = |t: &Option<Tensor>| match t {
            Some(t) => k.load(t, at).cast(Ty::F32),
            None => E::lit(Ty::F32, 0.0),
        };
        let part = |part| gates(&workspace).load(k, at, part);
        let (i, f, g, o) = (part(0), part(1), part(2), part(3));
        let (grad_h, grad_c) = (load(&sources[0]), load(&sources[1]));
        let tanh = k.load(&cy, at).cast(Ty::F32).tanh();
        let grad_o = &grad_h * &tanh * (&o * (1.0 - &o));
        let grad_c = grad_c + grad_h * &o * (1.0 - &tanh * &tanh);
        let parts = [
            &grad_c * &g * (&i * (1.0 - &i)),
            &grad_c * k.load(&cx, at).cast(Ty::F32) * (&f * (1.0 - &f)),
            &grad_c * &i * (1.0 - &g * &g),
            grad_o,
        ];
        let mut stores = vec![k.store(&to_cx, at, grad_c * f)];
        for (part, value) in (0..).zip(parts) {
            stores.push(k.store(&to_gates, &gates(&to_gates).at(at, part), value));
        }
        stores
    });
    l.launch(k)?;
    if l.flag(5, false) {
        return sum_over_batch(l, &grad_gates);
    }
    l.returns_undefined();
    Some(())
}

/// `_thnn_fused_gru_cell(input_gates, hidden_gates, hx, input_bias, hidden_bias)`: returns the hidden state, and a
/// workspace of r, z, n, hx and the hidden state's part of n.
pub fn gru(l: &mut Lowering<'_>) -> Option<()> {
    let (input, hidden, hx) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?);
    let [batch, width] = hx.sizes[..] else { return None };
    if l.has_out()
        || hx.numel() == 0
        || !fit(&[(&hx, width), (&input, 3 * width), (&hidden, 3 * width)], batch)
    {
        return None;
    }
    let biases = biases(l, 3, &hx, 3 * width)?;
    let hy = l.new_storage(&hx.sizes, &dense(&hx.sizes), hx.dtype)?;
    let workspace = l.new_storage(&[batch, 5 * width], &[5 * width, 1], hx.dtype)?;
    let mut k = Kernel::new("gru cell");
    let (input, hidden, hx) =
        (window(l, &mut k, &input)?, window(l, &mut k, &hidden)?, window(l, &mut k, &hx)?);
    let (hy, workspace) = (l.write(&mut k, &hy)?, l.write(&mut k, &workspace)?);
    let biases = match &biases {
        Some([a, b]) => [Some(window(l, &mut k, a)?), Some(window(l, &mut k, b)?)],
        None => [None, None],
    };
    let columns = k.size(width);
    k.map(&[batch, width], |k, at, _| {
        let gates = |of| Gates { of, width: &columns };
        let gate = |of: &Tensor, bias: &Option<Tensor>, part: u32| {
            let of = Gates { of, width: &columns };
            let value = of.load(k, at, part);
            let [_, column] = of.at(at, part);
            match bias {
                Some(bias) => value + k.load(bias, &[column]).cast(Ty::F32),
                None => value,
            }
        };
        let of_input = |part| gate(&input, &biases[0], part);
        let of_hidden = |part| gate(&hidden, &biases[1], part);
        let r = (of_hidden(0) + of_input(0)).sigmoid();
        let z = (of_hidden(1) + of_input(1)).sigmoid();
        let hidden_n = of_hidden(2);
        let n = (of_input(2) + &hidden_n * &r).tanh();
        let hx = k.load(&hx, at).cast(Ty::F32);
        let mut stores = vec![k.store(&hy, at, (&hx - &n) * &z + &n)];
        for (part, value) in (0..).zip([r, z, n, hx, hidden_n]) {
            stores.push(k.store(&workspace, &gates(&workspace).at(at, part), value));
        }
        stores
    });
    l.launch(k)
}

/// `_thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias)`: returns the gradients of the input's gates, the
/// hidden state's gates, the hidden state, and both biases.
pub fn gru_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, workspace) = (l.tensor(0)?, l.tensor(1)?);
    let [batch, width] = grad.sizes[..] else { return None };
    if l.has_out()
        || grad.numel() == 0
        || !fit(&[(&workspace, 5 * width)], batch)
        || grad.dtype != workspace.dtype
    {
        return None;
    }
    let gates_sizes = [batch, 3 * width];
    let grad_input = l.new_storage(&gates_sizes, &dense(&gates_sizes), grad.dtype)?;
    let grad_hidden = l.new_storage(&gates_sizes, &dense(&gates_sizes), grad.dtype)?;
    let grad_hx = l.new_storage(&grad.sizes, &dense(&grad.sizes), grad.dtype)?;
    let mut k = Kernel::new("gru cell backward");
    let (source, workspace) = (window(l, &mut k, &grad)?, window(l, &mut k, &workspace)?);
    let (to_input, to_hidden) = (l.write(&mut k, &grad_input)?, l.write(&mut k, &grad_hidden)?);
    let to_hx = l.write(&mut k, &grad_hx)?;
    let columns = k.size(width);
    k.map(&[batch, width], |k, at, _| {
        let gates = |of| Gates { of, width: &columns };
        let part = |part| gates(&workspace).load(k, at, part);
        let (r, z, n, hx, hidden_n) = (part(0), part(1), part(2), part(3), part(4));
        let g = k.load(&source, at).cast(Ty::F32);
        let grad_n = &g * (1.0 - &z) * (1.0 - &n * &n);
        let grad_z = &g * (hx - n) * (&z * (1.0 - &z));
        let grad_r = &grad_n * hidden_n * (&r * (1.0 - &r));
        let mut stores = vec![k.store(&to_hx, at, g * z)];
        for (part, value) in (0..).zip([&grad_r, &grad_z, &grad_n]) {
            stores.push(k.store(&to_input, &gates(&to_input).at(at, part), value.clone()));
        }
        for (part, value) in (0..).zip([&grad_r, &grad_z, &(&grad_n * r)]) {
            stores.push(k.store(&to_hidden, &gates(&to_hidden).at(at, part), value.clone()));
        }
        stores
    });
    l.launch(k)?;
    if l.flag(2, false) {
        sum_over_batch(l, &grad_input)?;
        return sum_over_batch(l, &grad_hidden);
    }
    l.returns_undefined();
    l.returns_undefined();
    Some(())
}
