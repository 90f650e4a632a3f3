//! Scaled dot product attention (flash attention), which never materializes the scores.
//!
//! A workgroup computes a tile of rows and loops over the rows of the other operand. In the forward pass, rows are
//! queries. The backward pass recomputes the scores, and their softmax from the saved logsumexp. One kernel has queries
//! as rows and computes the gradient of the queries. Another has keys as rows and computes the gradients of keys and
//! values. Halves are multiplied by cooperative matrices if the device has them ([`matrices`]), other floats by tiles
//! ([`tiles`]).

mod arguments;
mod matrices;
mod text;
mod tiles;

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, team};
use crate::lower::{Dims, Lowering, Operand, Source, dense};
use crate::ops::attention::arguments::{Attention, Given, Shape};
use crate::ops::types::preserved;
use tandem_executor::ir::{E, Ty};

/// `_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale)`.
pub fn forward(l: &mut Lowering<'_>) -> Option<()> {
    let a = Attention::plain(l, 0, 3)?;
    output(l, &a)
}

/// `tandem::attention(query, key, value, mask, seed, dropout_p, is_causal, scale)`.
pub fn dropping_forward(l: &mut Lowering<'_>) -> Option<()> {
    let a = Attention::dropping(l, 0, 5)?;
    output(l, &a)
}

/// Computes the output and the rows' logsumexps.
fn output(l: &mut Lowering<'_>, a: &Attention) -> Option<()> {
    let s = a.shape;
    let out = l.new_storage(&a.query.sizes, &preserved(&a.query), a.query.dtype)?;
    let order: Dims = [s.queries * s.heads, 1, s.heads].into_iter().collect();
    let sums = l.new_storage(&[s.batch, s.heads, s.queries], &order, Dtype::FLOAT32)?;
    match a.matrices(l) {
        Some(matrices) => matrices::forward(l, a, matrices, &out, &sums),
        None => tiles::forward(l, a, &out, &sums),
    }
}

/// `_scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p,
/// is_causal, attn_mask, scale)`.
pub fn backward(l: &mut Lowering<'_>) -> Option<()> {
    let a = Attention::plain(l, 1, 6)?;
    gradients(l, &a, [0, 4, 5])
}

/// `tandem::attention_backward(grad, query, key, value, mask, seed, out, logsumexp, dropout_p, is_causal, scale)`.
pub fn dropping_backward(l: &mut Lowering<'_>) -> Option<()> {
    let a = Attention::dropping(l, 1, 8)?;
    gradients(l, &a, [0, 6, 7])
}

/// Computes the gradients. `given` are the indices of the output's gradient, the output and the rows' logsumexps.
fn gradients(l: &mut Lowering<'_>, a: &Attention, given: [usize; 3]) -> Option<()> {
    let s = a.shape;
    let [grad, out, saved] = given.map(|arg| l.tensor(arg));
    let (grad, out, saved) = (grad?, out?, saved?);
    let fits = grad.sizes == a.query.sizes
        && out.sizes == a.query.sizes
        && grad.dtype == a.query.dtype
        && out.dtype == a.query.dtype
        && saved.sizes[..] == [s.batch, s.heads, s.queries]
        && saved.dtype == Dtype::FLOAT32;
    if !fits {
        return None;
    }
    // Heads are side by side in the gradients of PyTorch's operator for the CPU. With dropout its CPU multiplies matrices.
    let rows_first = |heads: i64, rows: i64| -> Dims {
        match a.dropout {
            Some(_) => dense(&[s.batch, heads, rows, s.dim]),
            None => [rows * heads * s.dim, s.dim, heads * s.dim, 1].into_iter().collect(),
        }
    };
    let of_query = l.new_storage(&a.query.sizes, &rows_first(s.heads, s.queries), a.query.dtype)?;
    let of_key = l.new_storage(&a.key.sizes, &rows_first(s.shared, s.keys), a.query.dtype)?;
    let of_value = l.new_storage(&a.key.sizes, &rows_first(s.shared, s.keys), a.query.dtype)?;
    let stats = statistics(l, s, &grad, &out, &saved)?;
    let given = Given { grad: &grad, stats: &stats };
    match a.matrices(l) {
        Some(matrices) => {
            matrices::query_gradient(l, a, matrices, given, &of_query)?;
            matrices::value_gradient(l, a, matrices, given, &of_value)?;
            matrices::key_gradient(l, a, matrices, given, &of_key)
        }
        None => {
            tiles::query_gradient(l, a, given, &of_query)?;
            tiles::key_gradients(l, a, given, &of_key, &of_value)
        }
    }
}

/// Returns a row of the queries' saved logsumexps, followed by a row of the dot products of their outputs and
/// gradients.
fn statistics(
    l: &mut Lowering<'_>,
    s: Shape,
    grad: &Operand,
    out: &Operand,
    saved: &Operand,
) -> Option<Operand> {
    let sizes = [s.batch, s.heads, s.queries];
    let all: i64 = sizes.iter().product();
    let stats = l.temp(&[2, all], Dtype::FLOAT32)?;
    let mut k = Kernel::new("attention's statistics");
    let (Source::TensorGeometry(tg), Source::TensorGeometry(to), Source::TensorGeometry(ts)) =
        (l.read(&mut k, grad), l.read(&mut k, out), l.read(&mut k, saved))
    else {
        return None;
    };
    let t = l.write(&mut k, &stats)?;
    k.rows(all, s.dim, team(s.dim, false), |r, row| {
        let c = r.k.coords(&sizes, row);
        let sum = r.sum(Ty::F32, |k, d| {
            let c = [c[0].clone(), c[1].clone(), c[2].clone(), d.clone()];
            k.load(&tg, &c) * k.load(&to, &c)
        });
        r.once(|k| {
            let saved = k.load(&ts, &c);
            vec![k.store(&t, &[E::u32(0), row.clone()], saved), k.store(&t, &[E::u32(1), row.clone()], sum)]
        });
    });
    l.launch(k)?;
    Some(stats)
}
