//! Softmax, log-softmax, and their derivatives.
//!
//! A call takes one kernel, unless rows are few and long. If the members of a row are adjacent in memory, a team of
//! threads takes a row. If rows are adjacent, each thread takes a row, and neighbouring threads take neighbouring rows.
//! A team keeps a short row in registers. For a longer row, a first pass computes both the largest value and the sum of
//! the exponentials, and a second pass stores the results.

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, held, team};
use crate::lower::{Dims, Lowering, Operand, Source, dense};
use crate::ops::elementwise;
use crate::ops::reduce::{Accumulate, Operands, Space, exponentials, launch};
use tandem_executor::ir::{E, Mem, Ty};

/// Rows of a tensor along a dimension.
pub struct DimRows {
    /// Sizes of the other dimensions, in the order of descending strides.
    pub kept: Dims,
    /// Indices in the tensors of the dimensions `kept`.
    order: Vec<usize>,
    dim: usize,
    /// Number of members of a row.
    pub len: i64,
    /// Number of threads per row.
    pub team: u32,
    /// Whether the members of a row are adjacent in the output.
    side_by_side: bool,
}

impl DimRows {
    /// Rows of `x`, from which `out` is computed.
    pub fn new(x: &Operand, dim: usize, out: &Operand) -> DimRows {
        let mut order: Vec<usize> = (0..x.ndim()).filter(|d| *d != dim && x.sizes[*d] != 1).collect();
        order.sort_by_key(|d| std::cmp::Reverse(x.strides[*d]));
        let kept: Dims = order.iter().map(|d| x.sizes[*d]).collect();
        let (len, stride) = x.sizes.get(dim).zip(x.strides.get(dim)).map_or((1, 1), |(n, s)| (*n, *s));
        let together = order.last().is_some_and(|d| x.strides[*d] < stride && x.sizes[*d] >= 16);
        let side_by_side = out.strides.get(dim).is_none_or(|s| *s == 1);
        DimRows { kept, order, dim, len, team: if together { 1 } else { team(len, false) }, side_by_side }
    }

    /// Number of rows.
    pub fn count(&self) -> i64 {
        self.kept.iter().product()
    }

    /// Whether rows are few and long, so that one team per row would leave most of the device idle.
    fn few(&self) -> bool {
        self.count() * i64::from(self.team) < 1 << 14 && self.len >= 1 << 15
    }

    /// Whether a team keeps a row of `x` in registers, so that it can read the row several times.
    fn held(&self, x: &Operand) -> bool {
        let adjacent = x.strides.get(self.dim) == Some(&1) && self.side_by_side;
        adjacent && held(self.len, self.team) > 0
    }

    /// View of a tensor whose dimensions are the dimensions of the rows, followed by the members.
    pub fn view(&self, x: &Operand) -> Operand {
        let mut strides: Dims = self.order.iter().map(|d| x.strides[*d]).collect();
        strides.push(x.strides.get(self.dim).copied().unwrap_or(1));
        let mut sizes = self.kept.clone();
        sizes.push(self.len);
        x.viewed(&sizes, &strides)
    }

    fn space(&self, x: &Operand) -> Space {
        Space::new(&x.sizes, (0..x.ndim()).map(|d| d == self.dim).collect())
    }
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Softmax,
    Log,
    /// Softmax with zeros for rows that are all -inf, as attention needs for masked rows.
    Safe,
}

/// Values that all members of a row share. The first is the largest value. The second is, for softmax, the reciprocal
/// of the sum of exponentials and, for log-softmax, the logarithm of this sum.
fn shared(kind: Kind, [max, sum]: [E; 2]) -> [E; 2] {
    // In PyTorch, a row whose largest value is infinite becomes NaN, since infinity minus itself is NaN.
    let finite = max.abs().lt(f64::INFINITY).or(max.is_nan());
    let sum = finite.select(sum, E::lit(Ty::F32, f64::NAN));
    match kind {
        Kind::Softmax => [max, 1.0 / sum],
        Kind::Log => [max, sum.log()],
        Kind::Safe => {
            let masked = max.clone().eq(f64::NEG_INFINITY);
            let zero = || E::lit(Ty::F32, 0.0);
            [masked.clone().select(zero(), max), masked.select(zero(), 1.0 / sum)]
        }
    }
}

fn member(kind: Kind, x: &E, [max, rest]: &[E; 2]) -> E {
    if kind == Kind::Log { x - max - rest } else { (x - max).exp() * rest }
}

/// `_softmax(self, dim, half_to_float)`, `_log_softmax`; `_safe_softmax(self, dim, dtype)`.
pub fn forward(l: &mut Lowering<'_>, kind: Kind) -> Option<()> {
    let x = l.tensor(0)?;
    let dim = l.dim(1, x.ndim())?;
    let dtype = match kind {
        Kind::Safe => l.dtype(2)?.unwrap_or(x.dtype),
        _ if l.flag(2, false) => return None, // an error in PyTorch on the CPU
        _ => x.dtype,
    };
    if dtype != x.dtype || !dtype.is_floating() || x.mem.ty() != Ty::F32 {
        return None;
    }
    let out = l.destination(0, &x.sizes, &dense(&x.sizes), dtype)?;
    if x.numel() == 0 {
        return Some(());
    }
    let rows = DimRows::new(&x, dim, &out);
    if rows.few() {
        let space = rows.space(&x);
        let sizes = space.result(true);
        let stats = [l.temp(&sizes, Dtype::FLOAT32)?, l.temp(&sizes, Dtype::FLOAT32)?];
        let stats = stats.map(|s| space.spread(&s));
        let finish = |_: &Lowering<'_>, _: &mut Kernel, a: [E; 2], _: &[E]| shared(kind, a).to_vec();
        let operands = Operands { ins: &[&x], outs: &[&stats[0], &stats[1]], also: &[] };
        launch(l, "softmax", &space, operands, &exponentials(), &finish)?;
        let ins = [(&x, Ty::F32), (&stats[0], Ty::F32), (&stats[1], Ty::F32)];
        return elementwise::launch(l, "softmax", &[&out], &ins, |_, _, v, _| {
            Some(vec![member(kind, &v[0], &[v[1].clone(), v[2].clone()])])
        });
    }
    let mut k = Kernel::new("softmax");
    let source = l.read(&mut k, &rows.view(&x));
    let target = l.write(&mut k, &rows.view(&out))?;
    k.rows(rows.count(), rows.len, rows.team, |r, row| {
        let row = r.k.coords(&rows.kept, row);
        let value = |k: &mut Kernel, j: &E| source.at(k, &at(&row, j));
        let a = if rows.held(&x) {
            let max = r.max(Ty::F32, value);
            let sum = r.sum(Ty::F32, |k, j| (value(k, j) - &max).exp());
            [max, sum]
        } else {
            let acc = exponentials();
            let step = |k: &mut Kernel, j: &E, a| {
                let x = value(k, j);
                (acc.step)(k, a, &[x], j)
            };
            r.reduce(acc.init, step, acc.merge)
        };
        let shared = shared(kind, a);
        r.each(|k, j| {
            let coords = at(&row, j);
            let store = k.store(&target, &coords, member(kind, &source.at(k, &coords), &shared));
            vec![if rows.side_by_side { store.side_by_side() } else { store }]
        });
    });
    l.launch(k)
}

/// Coordinates of a member of a row.
pub fn at(row: &[E], member: &E) -> Vec<E> {
    row.iter().chain([member]).cloned().collect()
}

/// `_softmax_backward_data(grad_output, output, dim, input_dtype)`, `_log_softmax_backward_data`.
pub fn backward(l: &mut Lowering<'_>, kind: Kind) -> Option<()> {
    let (grad, y) = (l.tensor(0)?, l.tensor(1)?);
    let dim = l.dim(2, y.ndim())?;
    let dtype = l.dtype(3)??;
    let fits = grad.sizes == y.sizes && grad.dtype == y.dtype && dtype == y.dtype;
    if !fits || !dtype.is_floating() || Mem::of(dtype)?.ty() != Ty::F32 {
        return None;
    }
    let out = l.destination(0, &y.sizes, &dense(&y.sizes), dtype)?;
    if y.numel() == 0 {
        return Some(());
    }
    let log = kind == Kind::Log;
    let term = move |g: E, y: E| if log { g } else { g * y };
    let result = move |g: E, y: E, sum: &E| if log { g - y.exp() * sum } else { (g - sum) * y };
    let rows = DimRows::new(&y, dim, &out);
    if rows.few() {
        let space = rows.space(&y);
        let sum = l.temp(&space.result(true), Dtype::FLOAT32)?;
        let sum = space.spread(&sum);
        let acc = Accumulate {
            init: [E::lit(Ty::F32, 0.0)],
            step: &|_, [a], x, _| [a + term(x[0].clone(), x[1].clone())],
            merge: &|[a], [b]| [a + b],
        };
        let operands = Operands { ins: &[&grad, &y], outs: &[&sum], also: &[] };
        launch(l, "softmax_backward", &space, operands, &acc, &|_, _, a, _| a.to_vec())?;
        let ins = [(&grad, Ty::F32), (&y, Ty::F32), (&sum, Ty::F32)];
        return elementwise::launch(l, "softmax_backward", &[&out], &ins, |_, _, v, _| {
            Some(vec![result(v[0].clone(), v[1].clone(), &v[2])])
        });
    }
    let mut k = Kernel::new("softmax_backward");
    let sources: [Source; 2] = [&grad, &y].map(|x| l.read(&mut k, &rows.view(x)));
    let target = l.write(&mut k, &rows.view(&out))?;
    k.rows(rows.count(), rows.len, rows.team, |r, row| {
        let row = r.k.coords(&rows.kept, row);
        let values = |k: &Kernel, j: &E| {
            let coords = at(&row, j);
            (sources[0].at(k, &coords), sources[1].at(k, &coords))
        };
        let sum = r.sum(Ty::F32, |k, j| {
            let (g, y) = values(k, j);
            term(g, y)
        });
        r.each(|k, j| {
            let (g, y) = values(k, j);
            let store = k.store(&target, &at(&row, j), result(g, y, &sum));
            vec![if rows.side_by_side { store.side_by_side() } else { store }]
        });
    });
    l.launch(k)
}
