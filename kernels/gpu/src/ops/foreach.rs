//! Operators on lists of tensors (`_foreach_*`). Their expressions are in the point-wise table, and one kernel computes
//! several tensors.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, highest, lowest};
use crate::lower::{Lowering, Operand, Source, Spot};
use crate::ops::chunks;
use crate::ops::chunks::Summed;
use crate::ops::elementwise;
use crate::ops::pointwise::InKernel;
use crate::ops::types::{broadcast, output_strides, preserved};
use tandem_executor::ir::{E, Mem, Ty, larger, smaller};
use tandem_executor::ops::pointwise::{Args, Reads, find};

/// Computation of an item of the lists.
struct ItemJob {
    item: usize,
    out: Operand,
    ins: Vec<Operand>,
    /// Formats that the values of the operands are rounded to.
    rounds: Vec<Option<Mem>>,
    /// Dtype of the computation.
    dtype: Dtype,
    ty: Ty,
}

impl ItemJob {
    /// Computation of an item that copies `from` to `out`.
    fn copy(item: usize, from: Operand, out: Operand) -> ItemJob {
        let (dtype, ty) = (from.dtype, from.mem.ty());
        ItemJob { item, out, ins: vec![from], rounds: vec![None], dtype, ty }
    }
}

type Value = fn(&mut Args<'_>) -> Option<E>;

/// Returns the number of items in the call's lists, which must all have the same length.
fn items(l: &Lowering<'_>) -> Option<usize> {
    let mut lengths = l.call.args.iter().filter_map(|arg| match arg {
        Arg::Tensors(n) => Some(*n as usize),
        Arg::Scalars(list) => Some(list.len()),
        _ => None,
    });
    let first = lengths.next()?;
    lengths.all(|n| n == first).then_some(first)
}

/// Returns the destination of an item's result: the item itself for an in-place operator, or a new tensor with strides
/// that follow the operands.
fn target(l: &mut Lowering<'_>, item: usize, ins: &[Operand], dtype: Dtype) -> Option<Operand> {
    let sizes = broadcast(ins.iter().map(|x| &x.sizes[..]))?;
    if l.in_place() {
        return l.written_item(0, item, &sizes, dtype);
    }
    if l.has_out() {
        return None;
    }
    let tensors: Vec<Operand> = ins.iter().filter(|x| x.ndim() > 0 || sizes.is_empty()).cloned().collect();
    l.new_storage(&sizes, &output_strides(&sizes, &tensors), dtype)
}

/// Lowers an operator of the point-wise table.
pub fn pointwise(l: &mut Lowering<'_>) -> Option<()> {
    let inner = l.base.strip_prefix("_foreach_")?;
    let op = find(inner)?.op(l.call.args).filter(|op| op.reads == Reads::Promoted)?;
    let n = items(l)?;
    // The factor of `addcmul` and `addcdiv` may be a tensor of numbers on the host, which is not supported here.
    if matches!(l.call.args.get(op.operands.len()), Some(Arg::Tensor)) {
        return None;
    }
    if !l.in_place() {
        l.returns_list(n);
    }
    let mut jobs = Vec::new();
    for item in 0..n {
        let ins: Option<Vec<Operand>> = op.operands.iter().map(|arg| l.operand_of(*arg, item)).collect();
        let ins = ins?;
        let (computed, given) = op.dtypes(ins.iter().map(Operand::kind), l.call.default_dtype);
        // Most operators do not support bools, and integers have no negative powers.
        if computed == Dtype::BOOL || op.float_lists && !computed.is_floating() {
            return None;
        }
        if inner == "sub" && ins.iter().any(|x| x.dtype == Dtype::BOOL)
            || !converts(l, op.operands.len(), item, computed)
        {
            return None;
        }
        let tensors = ins.iter().filter(|x| !matches!(x.place, Spot::Number(..)));
        if inner == "lerp" && tensors.clone().any(|x| x.dtype != ins[0].dtype) {
            return None;
        }
        let out = target(l, item, &ins, given)?;
        let rounds = ins.iter().enumerate().map(|(n, x)| op.rounds_to(n, x.kind(), computed)).collect();
        jobs.push(ItemJob { item, out, ins, rounds, dtype: computed, ty: Mem::of(computed)?.ty() });
    }
    carry_out(l, &jobs, op.value)
}

/// Whether the operator's factor, if it has one, can be converted to the dtype.
fn converts(l: &Lowering<'_>, arg: usize, item: usize, dtype: Dtype) -> bool {
    let factor = match l.call.args.get(arg) {
        Some(Arg::Scalars(list)) => list.get(item),
        arg => arg,
    };
    match factor {
        Some(Arg::Float(_)) => dtype.is_floating(),
        Some(Arg::Bool(_) | Arg::Complex(..)) => false,
        _ => true,
    }
}

/// `_foreach_copy_(self, src)`.
pub fn copy(l: &mut Lowering<'_>) -> Option<()> {
    let n = l.in_place().then(|| items(l))??;
    let mut jobs = Vec::new();
    for item in 0..n {
        let (to, from) = (l.operand_of(0, item)?, l.operand_of(1, item)?);
        if broadcast([&to.sizes[..], &from.sizes[..]])? != to.sizes {
            return None;
        }
        let out = l.written_item(0, item, &to.sizes, to.dtype)?;
        jobs.push(ItemJob::copy(item, from, out));
    }
    carry_out(l, &jobs, |a| Some(a.x[0].clone()))
}

/// `_foreach_clone(self, memory_format)`.
pub fn clone(l: &mut Lowering<'_>) -> Option<()> {
    if l.in_place() || l.has_out() || l.has(1) {
        return None;
    }
    let n = items(l)?;
    l.returns_list(n);
    let mut jobs = Vec::new();
    for item in 0..n {
        let from = l.operand_of(0, item)?;
        let out = l.new_storage(&from.sizes, &preserved(&from), from.dtype)?;
        jobs.push(ItemJob::copy(item, from, out));
    }
    carry_out(l, &jobs, |a| Some(a.x[0].clone()))
}

/// `_foreach_zero_(self)`.
pub fn zero(l: &mut Lowering<'_>) -> Option<()> {
    let n = l.in_place().then(|| items(l))??;
    let mut jobs = Vec::new();
    for item in 0..n {
        let to = l.operand_of(0, item)?;
        let out = l.written_item(0, item, &to.sizes, to.dtype)?;
        jobs.push(ItemJob {
            item,
            dtype: out.dtype,
            ty: out.mem.ty(),
            out,
            ins: Vec::new(),
            rounds: Vec::new(),
        });
    }
    carry_out(l, &jobs, |a| Some(E::lit(a.ty, 0.0)))
}

/// Launches kernels for the jobs. Jobs that depend on each other run in order.
fn carry_out(l: &mut Lowering<'_>, jobs: &[ItemJob], value: Value) -> Option<()> {
    let mut kernels = Vec::new();
    for job in jobs.iter().filter(|job| job.out.numel() > 0) {
        let ins: Vec<(&Operand, Ty)> = job.ins.iter().map(|x| (x, job.ty)).collect();
        kernels.push(elementwise::kernel(l, "foreach", &[&job.out], &ins, |l, k, x, _| {
            let scope = &mut InKernel { l, k };
            let x = x.iter().zip(&job.rounds).map(|(x, to)| x.rounded(*to)).collect();
            let mut args = Args { scope, x, ty: job.ty, dtype: job.dtype, item: job.item };
            value(&mut args).map(|v| vec![v])
        })?);
    }
    l.launch_all(kernels)
}

// --- Reductions ---------------------------------------------------------------------------------------

/// Reduction of a tensor to one element.
#[derive(Clone, Copy)]
enum Fold {
    Sum,
    Max,
    Min,
}

impl Fold {
    fn start(self, ty: Ty) -> E {
        match self {
            Fold::Sum => E::lit(ty, 0.0),
            Fold::Max => lowest(ty),
            Fold::Min => highest(ty),
        }
    }

    fn join(self, a: &E, b: &E) -> E {
        match self {
            Fold::Sum => a + b,
            Fold::Max => larger(a, b),
            Fold::Min => smaller(a, b),
        }
    }
}

/// Number of elements that one workgroup reduces.
const CHUNK: i64 = 1 << 14;

/// Reduces all elements of `x`, converted to `ty`, in several chunks if there are many. `before` is applied to each
/// element, and `after` to the result.
fn fold_all(
    l: &mut Lowering<'_>,
    x: &Operand,
    ty: Ty,
    out: &Operand,
    how: Fold,
    before: &dyn Fn(&E) -> E,
    after: &dyn Fn(&E) -> E,
) -> Option<()> {
    let n = x.numel();
    let chunks = (n + CHUNK - 1) / CHUNK;
    let once = chunks <= 1;
    let dtype = match ty {
        Ty::F32 => Dtype::FLOAT32,
        Ty::F64 => Dtype::FLOAT64,
        Ty::I64 => Dtype::INT64,
        _ => Dtype::INT32,
    };
    let partial = if once { out.viewed(&[1], &[1]) } else { l.temp(&[chunks], dtype)? };
    let keep = |e: &E| e.clone();
    fold_rows(l, x, ty, &partial, how, before, if once { after } else { &keep })?;
    if once { Some(()) } else { fold_all(l, &partial, ty, out, how, &keep, after) }
}

/// Reduces a chunk of `x`, converted to `ty`, to each element of `out`.
fn fold_rows(
    l: &mut Lowering<'_>,
    x: &Operand,
    ty: Ty,
    out: &Operand,
    how: Fold,
    before: &dyn Fn(&E) -> E,
    after: &dyn Fn(&E) -> E,
) -> Option<()> {
    let n = x.numel();
    let x = if x.is_contiguous() { x.viewed(&[n], &[1]) } else { x.clone() };
    let mut k = Kernel::new("foreach reduce");
    let source = l.read_as(&mut k, &x, ty);
    let t = l.write(&mut k, out)?;
    k.rows(out.numel(), CHUNK.min(n), 256, |r, row| {
        let (count, chunk) = (r.k.size(n), r.k.size(CHUNK));
        let start = how.start(ty);
        let [all] = r.reduce(
            [start.clone()],
            |k, j, [a]| {
                let number = row * &chunk + j;
                let inside = number.lt(&count);
                let coords = k.coords(&x.sizes, &number);
                let value = match &source {
                    Source::TensorGeometry(t) => {
                        k.load_if(t, &coords, inside.clone(), E::lit(t.mem.ty(), 0.0))
                    }
                    Source::Value(e) => e.clone(),
                };
                let joined = how.join(&a, &before(&value.cast(ty)));
                [inside.select(joined, a)]
            },
            |[a], [b]| [how.join(&a, &b)],
        );
        let result = after(&all);
        r.once(|k| vec![k.store(&t, std::slice::from_ref(row), result)]);
    });
    l.launch(k)
}

/// `_foreach_norm(self, ord, dtype)`.
pub fn norm(l: &mut Lowering<'_>) -> Option<()> {
    powers(l, true)
}

/// `_foreach_powsum(self, ord, dtype)`: the sums of which norms are roots.
pub fn powsum(l: &mut Lowering<'_>) -> Option<()> {
    powers(l, false)
}

fn powers(l: &mut Lowering<'_>, rooted: bool) -> Option<()> {
    if l.in_place() || l.has_out() {
        return None;
    }
    let n = items(l)?;
    let order = l.pin(1)?;
    let dtype = l.dtype(2)?;
    l.returns_list(n);
    let mut summed = Vec::new();
    for item in 0..n {
        let x = l.operand_of(0, item)?;
        let dtype = dtype.unwrap_or(x.dtype);
        let empty = x.numel() == 0;
        if !x.dtype.is_floating() || !dtype.is_floating() || empty && !(order >= 0.0 && order.is_finite()) {
            return None;
        }
        let out = l.new_storage(&[], &[], dtype)?;
        let ty = out.mem.ty();
        if empty {
            l.clear(&out);
            continue;
        }
        if (order == 1.0 || order == 2.0) && ty == Ty::F32 && chunks::is_member(l, &x) {
            summed.push(Summed { x, out });
            continue;
        }
        let how = match order {
            f64::INFINITY => Fold::Max,
            f64::NEG_INFINITY => Fold::Min,
            _ => Fold::Sum,
        };
        let power = |x: &E, p: f64| E::call("pow_", ty, [x.clone(), x.like(p)]);
        let before = |x: &E| match order {
            2.0 => x * x,
            0.0 => x.ne(0.0).cast(ty),
            o if o == 1.0 || o.is_infinite() => x.abs(),
            o => power(&x.abs(), o),
        };
        let after = |x: &E| match order {
            o if !rooted || o == 1.0 || o == 0.0 || o.is_infinite() => x.clone(),
            2.0 => x.sqrt(),
            o => power(x, 1.0 / o),
        };
        fold_all(l, &x, ty, &out, how, &before, &after)?;
    }
    let of = if order == 1.0 { "abs(v)" } else { "v * v" };
    chunks::sums(l, &summed, of, if rooted && order == 2.0 { "sqrt(s)" } else { "s" })
}

/// `_foreach_max(self)`.
pub fn max(l: &mut Lowering<'_>) -> Option<()> {
    if l.in_place() || l.has_out() {
        return None;
    }
    let n = items(l)?;
    l.returns_list(n);
    for item in 0..n {
        let x = l.operand_of(0, item)?;
        if x.numel() == 0 {
            return None;
        }
        let out = l.new_storage(&[], &[], x.dtype)?;
        // Bools are compared as integers.
        let ty = if x.mem == Mem::Bool { Ty::I32 } else { x.mem.ty() };
        let keep = |e: &E| e.clone();
        fold_all(l, &x, ty, &out, Fold::Max, &keep, &keep)?;
    }
    Some(())
}
