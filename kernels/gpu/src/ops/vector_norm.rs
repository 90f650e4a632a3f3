//! Norms of vectors, and distances between them.

use tandem_executor::ir::{E, Mem, Ty, larger, smaller};
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::highest;
use crate::lower::{Dims, Lowering, Operand, dense};
use crate::ops::elementwise;
use crate::ops::reduce::{Accumulate, Operands, Space, dims, inputs, launch, output};
use crate::ops::types::{broadcast, result_type};

/// Order of a norm, as far as the code depends on it.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    Zero,
    One,
    Two,
    Max,
    Min,
    Other,
}

fn order(p: f64) -> Option<Order> {
    Some(match p {
        p if p.is_nan() => return None,
        0.0 => Order::Zero,
        1.0 => Order::One,
        2.0 => Order::Two,
        f64::INFINITY => Order::Max,
        f64::NEG_INFINITY => Order::Min,
        _ => Order::Other,
    })
}

/// A norm.
#[derive(Clone, Copy)]
struct Norm {
    /// Index of the order among the arguments.
    arg: usize,
    order: Order,
    /// Type of the computation.
    ty: Ty,
}

impl Norm {
    /// Launches the norm of `value` of the inputs.
    fn launch(
        self,
        l: &mut Lowering<'_>,
        space: &Space,
        ins: &[&Operand],
        out: &Operand,
        value: &dyn Fn(&[E]) -> E,
    ) -> Option<()> {
        let Norm { arg, order, ty } = self;
        let merge = move |a: &E, b: &E| match order {
            Order::Max => larger(a, b),
            Order::Min => smaller(a, b),
            _ => a + b,
        };
        let acc = Accumulate {
            init: [if order == Order::Min { highest(ty) } else { E::lit(ty, 0.0) }],
            step: &|k, [a], x, _| {
                let v = value(x).abs();
                let v = match order {
                    Order::Zero => v.cast(Ty::Bool).cast(ty),
                    Order::Two => &v * &v,
                    Order::Other => E::call("pow_", ty, [v, k.number(arg, ty)]),
                    _ => v,
                };
                [merge(&a, &v)]
            },
            merge: &|[a], [b]| [merge(&a, &b)],
        };
        let operands = Operands { ins, outs: &[out], also: &[] };
        launch(l, "norm", space, operands, &acc, &|_, k, [a], _| {
            vec![match order {
                Order::Two => a.sqrt(),
                Order::Other => E::call("pow_", ty, [a, 1.0 / k.number(arg, ty)]),
                _ => a,
            }]
        })
    }
}

/// `linalg_vector_norm(self, ord, dim, keepdim, *, dtype)`.
pub fn vector_norm(l: &mut Lowering<'_>) -> Option<()> {
    let (p, keep, dtype) = (l.pin(1)?, l.flag(3, false), l.dtype(4)?);
    norm_along(l, p, Some(2), keep, dtype)
}

/// `norm(self, p)`, also with `dim` and `keepdim`, and with `dtype` as the last argument. `p` is 2 if it is `None`.
pub fn norm(l: &mut Lowering<'_>) -> Option<()> {
    let p = if l.has(1) { l.pin(1)? } else { 2.0 };
    let (dim, keep, dtype) = match inputs(l, 1) {
        2 => (None, false, None),
        3 => (None, false, l.dtype(2)?),
        4 => (Some(2), l.flag(3, false), None),
        _ => (Some(2), l.flag(3, false), l.dtype(4)?),
    };
    norm_along(l, p, dim, keep, dtype)
}

/// The norm of order `p`, which is argument 1, along the dimensions that argument `dim` names, or all.
fn norm_along(
    l: &mut Lowering<'_>,
    p: f64,
    dim: Option<usize>,
    keep: bool,
    dtype: Option<Dtype>,
) -> Option<()> {
    let x = l.tensor(0)?;
    let space = dims(l, &x, dim)?;
    let dtype = dtype.unwrap_or(x.dtype);
    if !x.dtype.is_floating()
        || !dtype.is_floating()
        || (space.members() == 0 && (p < 0.0 || p.is_infinite()))
        // PyTorch does not raise a single element to a power, so the result does not overflow.
        || (space.members() == 1 && ![0.0, 1.0, 2.0].contains(&p) && p.is_finite())
    {
        return None;
    }
    let ty = Mem::of(dtype)?.ty();
    let out = output(l, 0, &space, keep, dtype)?;
    Norm { arg: 1, order: order(p)?, ty }.launch(l, &space, &[&x], &out, &|x| x[0].cast(ty))
}

/// `dist(self, other, p)`: the norm of the difference.
pub fn dist(l: &mut Lowering<'_>) -> Option<()> {
    let (a, b) = (l.tensor(0)?, l.tensor(1)?);
    let p = l.pin(2)?;
    let dtype = result_type([&a, &b], l.call.default_dtype);
    let sizes = broadcast([&a.sizes[..], &b.sizes[..]])?;
    if !dtype.is_floating() || sizes.contains(&0) {
        return None;
    }
    let ty = Mem::of(dtype)?.ty();
    let space = Space::new(&sizes, vec![true; sizes.len()]);
    let out = output(l, 0, &space, false, dtype)?;
    let ins = [&a.expanded(&sizes), &b.expanded(&sizes)];
    let norm = Norm { arg: 2, order: order(p)?, ty };
    norm.launch(l, &space, &ins, &out, &|x| x[0].cast(ty) - x[1].cast(ty))
}

/// Returns the operands of the distances between all pairs of rows, expanded to the sizes `(batch.., rows of the
/// first, rows of the second, columns)`.
fn pairs(x1: &Operand, x2: &Operand) -> Option<(Dims, Operand, Operand)> {
    let batch = x1.ndim().checked_sub(2)?;
    let fits = x1.ndim() == x2.ndim()
        && x1.sizes[..batch] == x2.sizes[..batch]
        && x1.sizes[batch + 1] == x2.sizes[batch + 1]
        && x1.dtype == x2.dtype
        && matches!(x1.dtype, Dtype::FLOAT32 | Dtype::FLOAT64);
    let mut sizes: Dims = x1.sizes.clone();
    sizes.insert(batch + 1, x2.sizes[batch]);
    if !fits || sizes.contains(&0) {
        return None;
    }
    let (mut s1, mut s2) = (x1.strides.clone(), x2.strides.clone());
    s1.insert(batch + 1, 0);
    s2.insert(batch, 0);
    let (a, b) = (x1.viewed(&sizes, &s1), x2.viewed(&sizes, &s2));
    Some((sizes, a, b))
}

/// `_cdist_forward(x1, x2, p, compute_mode)`.
pub fn cdist(l: &mut Lowering<'_>) -> Option<()> {
    let order = order(l.pin(2)?)?;
    distances(l, order)
}

/// `_euclidean_dist(x1, x2)`.
pub fn euclidean_dist(l: &mut Lowering<'_>) -> Option<()> {
    distances(l, Order::Two)
}

fn distances(l: &mut Lowering<'_>, order: Order) -> Option<()> {
    let (x1, x2) = (l.tensor(0)?, l.tensor(1)?);
    let (sizes, a, b) = pairs(&x1, &x2)?;
    let last = sizes.len() - 1;
    let space = Space::new(&sizes, (0..sizes.len()).map(|d| d == last).collect());
    let out = output(l, 0, &space, false, x1.dtype)?;
    let norm = Norm { arg: 2, order, ty: x1.mem.ty() };
    norm.launch(l, &space, &[&a, &b], &out, &|x| &x[0] - &x[1])
}

/// `_cdist_backward(grad, x1, x2, p, cdist)`: the gradient of `x1`.
pub fn cdist_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, x1, x2, dist) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?, l.tensor(4)?);
    let p = l.pin(3)?;
    let order = order(p)?;
    let (sizes, a, b) = pairs(&x1, &x2)?;
    let last = sizes.len() - 1;
    if grad.sizes[..] != sizes[..last] || dist.sizes[..] != sizes[..last] || p < 0.0 {
        return None;
    }
    if [&grad, &dist].iter().any(|x| x.dtype != x1.dtype) {
        return None;
    }
    let spread = |x: &Operand| {
        let mut strides = x.strides.clone();
        strides.push(0);
        x.viewed(&sizes, &strides)
    };
    let (grad, dist) = (spread(&grad), spread(&dist));
    let space = Space::new(&sizes, (0..sizes.len()).map(|d| d + 1 == last).collect());
    let out = output(l, 0, &space, false, x1.dtype)?;
    let ty = x1.mem.ty();
    let acc = Accumulate {
        init: [E::lit(ty, 0.0)],
        step: &|k, [sum], x, _| {
            let (g, d, dist) = (&x[0], &x[1] - &x[2], &x[3]);
            let sign = d.gt(0.0).select(E::lit(ty, 1.0), d.lt(0.0).select(E::lit(ty, -1.0), E::lit(ty, 0.0)));
            let apart = dist.eq(0.0).or(d.eq(0.0)).not();
            let value = match order {
                Order::Zero => E::lit(ty, 0.0),
                Order::One => g * sign,
                Order::Two => dist.eq(0.0).select(0.0, g * &d / dist),
                Order::Max => d.abs().eq(dist).select(g * sign, 0.0),
                Order::Min | Order::Other => {
                    let p = k.number(3, ty) - 1.0;
                    let power = |v: E| E::call("pow_", ty, [v, p.clone()]);
                    apart.select(sign * power(d.abs()) * g / power(dist.clone()), 0.0)
                }
            };
            [sum + value]
        },
        merge: &|[a], [b]| [a + b],
    };
    let operands = Operands { ins: &[&grad, &a, &b, &dist], outs: &[&out], also: &[] };
    launch(l, "cdist_backward", &space, operands, &acc, &|_, _, [a], _| vec![a])
}

/// `renorm(self, p, dim, maxnorm)`: slices whose norm is above `maxnorm` are scaled down to it.
pub fn renorm(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let p = l.pin(1)?;
    let dim = l.dim(2, x.ndim())?;
    if x.ndim() < 2 || p <= 0.0 || !x.dtype.is_floating() || l.pin(3)? < 0.0 {
        return None;
    }
    let out = l.destination(0, &x.sizes, &dense(&x.sizes), x.dtype)?;
    let ty = x.mem.ty();
    let kept = if ty == Ty::F64 { Dtype::FLOAT64 } else { Dtype::FLOAT32 };
    let space = Space::new(&x.sizes, (0..x.ndim()).map(|d| d != dim).collect());
    let norms = l.temp(&[x.sizes[dim]], kept)?;
    let norms = space.spread(&norms);
    Norm { arg: 1, order: order(p)?, ty }.launch(l, &space, &[&x], &norms, &|x| x[0].clone())?;
    elementwise::launch(l, "renorm", &[&out], &[(&x, ty), (&norms, ty)], |l, k, v, _| {
        let most = l.number(k, 3, ty);
        let scale = v[1].gt(&most).select(&most / (&v[1] + 1e-7), 1.0);
        Some(vec![&v[0] * scale])
    })
}
