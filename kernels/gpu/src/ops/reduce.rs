//! Reductions over any dimensions: sums, means, extremes, variances.
//!
//! [`launch`] distributes them over threads. A row is an element of the result, and the row's members are the elements
//! that are reduced to it. If members are adjacent in memory, a team of threads reduces each row. If rows are adjacent,
//! each thread reduces a row, and neighbouring threads take neighbouring rows. If this leaves the device idle, rows are
//! split into parts, whose accumulators a second kernel merges. The distribution depends on sizes and strides alone.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, highest, lowest, team};
use crate::lower::{Dims, Lowering, Operand, Source, dense, wrap};
use crate::ops::elementwise::coalesce;
use crate::ops::types::result_type;
use tandem_executor::ir::{E, Mem, Ty, larger, smaller};

// --- What is reduced ------------------------------------------------------------------------------------

/// Dimensions of a tensor, and which of them are reduced.
pub struct Space {
    /// Sizes of all dimensions.
    pub sizes: Dims,
    /// Whether each dimension is reduced.
    pub reduced: Vec<bool>,
    /// Whether members are numbered in row-major order, for reductions that use the numbers.
    pub ordered: bool,
}

impl Space {
    /// Space of a tensor of these sizes.
    pub fn new(sizes: &[i64], reduced: Vec<bool>) -> Space {
        Space { sizes: sizes.into(), reduced, ordered: false }
    }

    /// Number of members of a row.
    pub fn members(&self) -> i64 {
        self.select(true).iter().map(|d| self.sizes[*d]).product()
    }

    /// Sizes of a result. Reduced dimensions have size 1 if `keep` is true, else they are left out.
    pub fn result(&self, keep: bool) -> Dims {
        let of = |d: usize| match (self.reduced[d], keep) {
            (false, _) => Some(self.sizes[d]),
            (true, keep) => keep.then_some(1),
        };
        (0..self.sizes.len()).filter_map(of).collect()
    }

    /// Result, expanded over the reduced dimensions.
    pub fn spread(&self, result: &Operand) -> Operand {
        let keep = result.ndim() == self.sizes.len();
        let mut own = 0;
        let mut strides = Dims::new();
        for reduced in &self.reduced {
            strides.push(if *reduced { 0 } else { result.strides[own] });
            own += usize::from(keep || !reduced);
        }
        result.viewed(&self.sizes, &strides)
    }

    fn select(&self, reduced: bool) -> Vec<usize> {
        (0..self.sizes.len()).filter(|d| self.reduced[*d] == reduced).collect()
    }

    /// Sizes of the reduced dimensions, or of the others, and each operand's strides along them. Dimensions are
    /// coalesced where possible.
    fn group(&self, reduced: bool, operands: &[&Operand]) -> (Dims, Vec<Dims>) {
        let dims = self.select(reduced);
        let pick = |of: &Dims| -> Dims { dims.iter().map(|d| of[*d]).collect() };
        let sizes = pick(&self.sizes);
        let mut views: Vec<Operand> = operands.iter().map(|x| x.viewed(&sizes, &pick(&x.strides))).collect();
        let ordered = reduced && self.ordered && !views.is_empty();
        if ordered {
            // Coalescing orders dimensions by the strides of the first operand, which here is a row-major tensor.
            views.insert(0, views[0].viewed(&sizes, &dense(&sizes)));
        }
        let (sizes, mut strides) = coalesce(&sizes, &views.iter().collect::<Vec<_>>());
        if ordered {
            strides.remove(0);
        }
        (sizes, strides)
    }
}

/// Function that returns the accumulators after a member.
pub type Fold<'f, const N: usize> = dyn Fn(&mut Kernel, [E; N], &[E], &E) -> [E; N] + 'f;

/// Operands of a reduction. All have the sizes of the space. `outs` and `also` have strides of 0 in reduced dimensions.
#[derive(Clone, Copy)]
pub struct Operands<'o> {
    /// Inputs.
    pub ins: &'o [&'o Operand],
    /// Results.
    pub outs: &'o [&'o Operand],
    /// Inputs that are read once per row.
    pub also: &'o [&'o Operand],
}

/// Accumulation over the members of a row.
pub struct Accumulate<'f, const N: usize> {
    /// Initial accumulators, which are neutral in `merge`.
    pub init: [E; N],
    /// Returns the next accumulators from the current ones, the inputs' values at a member, and the member's
    /// number.
    pub step: &'f Fold<'f, N>,
    /// Merges the accumulators of two parts of a row.
    pub merge: &'f dyn Fn([E; N], [E; N]) -> [E; N],
}

/// Function that returns the outputs' values, from the accumulators and the values that are read once per row.
pub type Finish<'f, const N: usize> = &'f dyn Fn(&Lowering<'_>, &mut Kernel, [E; N], &[E]) -> Vec<E>;

/// Number of threads that fills a device.
pub const FILL: i64 = 1 << 18;

/// Distribution of rows over threads.
struct Partition {
    team: u32,
    /// Whether neighbouring threads take neighbouring rows.
    together: bool,
    /// Number of parts of each row.
    parts: i64,
}

fn plan(rows: i64, len: i64, together: bool) -> Partition {
    if together {
        let parts = if rows < FILL && len >= 64 { (FILL / rows).min(len / 16).min(4096) } else { 1 };
        return Partition { team: 1, together, parts: parts.max(1) };
    }
    let team = team(len, false);
    let threads = rows * i64::from(team);
    let parts = if threads < FILL && len >= 4096 { (FILL / threads).min(len / 2048) } else { 1 };
    Partition { team, together, parts: parts.max(1) }
}

/// Launches a reduction.
pub fn launch<const N: usize>(
    l: &mut Lowering<'_>,
    label: &'static str,
    space: &Space,
    operands: Operands<'_>,
    acc: &Accumulate<'_, N>,
    finish: Finish<'_, N>,
) -> Option<()> {
    let Operands { ins, outs, also } = operands;
    let all: Vec<&Operand> = ins.iter().chain(outs).chain(also).copied().collect();
    let (kept, kept_strides) = space.group(false, &all);
    let (members, member_strides) = space.group(true, ins);
    let (rows, len): (i64, i64) = (kept.iter().product(), members.iter().product());
    if rows == 0 {
        return Some(());
    }
    let nearest = |strides: Option<&Dims>| strides.and_then(|s| s.last()).copied().unwrap_or(0);
    let together = kept.last().is_some_and(|n| *n >= 16)
        && nearest(kept_strides.first()) < nearest(member_strides.first());
    let plan = plan(rows, len, together);

    // Dimensions of members follow the kept ones.
    let both: Dims = kept.iter().chain(&members).copied().collect();
    let views: Vec<Operand> = ins
        .iter()
        .enumerate()
        .map(|(i, x)| {
            let strides: Dims = kept_strides[i].iter().chain(&member_strides[i]).copied().collect();
            x.viewed(&both, &strides)
        })
        .collect();
    let row_views: Vec<Operand> =
        all[ins.len()..].iter().zip(&kept_strides[ins.len()..]).map(|(x, s)| x.viewed(&kept, s)).collect();
    let (outs, also) = row_views.split_at(outs.len());

    let mut k = Kernel::new(label);
    let sources: Vec<Source> = views.iter().map(|x| l.read(&mut k, x)).collect();
    let step = |k: &mut Kernel, row: &[E], member: &E, a: [E; N]| {
        let mut coords = row.to_vec();
        coords.extend(k.coords(&members, member));
        let values: Vec<E> = sources.iter().map(|s| s.at(k, &coords)).collect();
        (acc.step)(k, a, &values, member)
    };
    let last = |k: &mut Kernel, l: &Lowering<'_>| -> Option<_> {
        let targets: Option<Vec<_>> = outs.iter().map(|o| l.write(k, o)).collect();
        let extras: Vec<Source> = also.iter().map(|x| l.read(k, x)).collect();
        Some((targets?, extras))
    };
    if plan.parts == 1 {
        let (targets, extras) = last(&mut k, l)?;
        k.rows(rows, len, plan.team, |r, row| {
            let coords = r.k.coords(&kept, row);
            let a = r.reduce(acc.init.clone(), |k, member, a| step(k, &coords, member, a), acc.merge);
            r.once(|k| {
                let extras: Vec<E> = extras.iter().map(|s| s.at(k, &coords)).collect();
                let values = finish(l, k, a, &extras);
                targets.iter().zip(values).map(|(t, v)| k.store(t, &coords, v)).collect()
            });
        });
        return l.launch(k);
    }

    let parts = plan.parts;
    let partials: Option<Vec<Operand>> =
        acc.init.iter().map(|e| l.temp(&[rows, parts], kept_as(e.ty()))).collect();
    let partials = partials?;
    let targets: Option<Vec<_>> = partials.iter().map(|o| l.write(&mut k, o)).collect();
    let targets = targets?;
    let (rows_e, parts_e, len_e) = (k.size(rows), k.size(parts), k.size(len));
    let chunk_e = k.size((len + parts - 1) / parts);
    let part_of = |number: &E| number / &rows_e;
    // If rows are adjacent, their parts are interleaved, so that concurrent threads read neighbouring elements.
    let part_len = |_: &mut Kernel, number: &E| match plan.together {
        true => (&len_e - part_of(number) + &parts_e - 1u32) / &parts_e,
        false => {
            let begin = (part_of(number) * &chunk_e).min(&len_e);
            (&len_e - begin).min(&chunk_e)
        }
    };
    k.rows_of(rows * parts, part_len, plan.team, |r, number| {
        let (row, part) = (number % &rows_e, part_of(number));
        let coords = r.k.coords(&kept, &row);
        let a = r.reduce(
            acc.init.clone(),
            |k, j, a| {
                let member = if plan.together { j * &parts_e + &part } else { &part * &chunk_e + j };
                step(k, &coords, &member, a)
            },
            acc.merge,
        );
        r.once(|k| targets.iter().zip(a).map(|(t, v)| k.store(t, &[row.clone(), part.clone()], v)).collect());
    });
    l.launch(k)?;

    let mut k = Kernel::new(label);
    let sources: Vec<Source> = partials.iter().map(|x| l.read(&mut k, x)).collect();
    let (targets, extras) = last(&mut k, l)?;
    k.rows(rows, parts, team(parts, false), |r, row| {
        let coords = r.k.coords(&kept, row);
        let part = |k: &mut Kernel, member: &E, a: [E; N]| {
            let mut read = sources.iter().zip(&acc.init);
            let b = std::array::from_fn(|n| match read.next() {
                Some((s, init)) => s.at(k, &[row.clone(), member.clone()]).cast(init.ty()),
                None => acc.init[n].clone(),
            });
            (acc.merge)(a, b)
        };
        let a = r.reduce(acc.init.clone(), part, acc.merge);
        r.once(|k| {
            let extras: Vec<E> = extras.iter().map(|s| s.at(k, &coords)).collect();
            let values = finish(l, k, a, &extras);
            targets.iter().zip(values).map(|(t, v)| k.store(t, &coords, v)).collect()
        });
    });
    l.launch(k)
}

/// Dtype in which accumulators of a type are stored.
pub fn kept_as(ty: Ty) -> Dtype {
    match ty {
        Ty::Bool | Ty::I32 | Ty::U32 => Dtype::INT32,
        Ty::I64 => Dtype::INT64,
        Ty::F32 => Dtype::FLOAT32,
        Ty::F64 => Dtype::FLOAT64,
    }
}

// --- Arguments ------------------------------------------------------------------------------------------

/// Number of arguments without the arguments for `out=`.
pub fn inputs(l: &Lowering<'_>, outputs: usize) -> usize {
    l.call.args.len() - if l.has_out() { outputs } else { 0 }
}

/// Returns the space that reduces the dimensions which an argument names, or all dimensions if the argument is absent
/// or empty.
pub fn dims(l: &Lowering<'_>, x: &Operand, arg: Option<usize>) -> Option<Space> {
    let named = match arg {
        Some(arg) => l.ints(arg)?,
        None => Dims::new(),
    };
    let mut reduced = vec![named.is_empty(); x.ndim()];
    for dim in named {
        let dim = wrap(dim, x.ndim())?;
        if let Some(reduced) = reduced.get_mut(dim) {
            // PyTorch rejects a dimension that is named twice.
            if std::mem::replace(reduced, true) {
                return None;
            }
        }
    }
    Some(Space::new(&x.sizes, reduced))
}

/// Returns the `n`-th output, expanded over the reduced dimensions. New outputs are contiguous, as in PyTorch.
pub fn output(l: &mut Lowering<'_>, n: usize, space: &Space, keep: bool, dtype: Dtype) -> Option<Operand> {
    let sizes = space.result(keep);
    let out = l.destination(n, &sizes, &dense(&sizes), dtype)?;
    Some(space.spread(&out))
}

/// Reduction with one accumulator.
struct Single<'f> {
    init: E,
    step: &'f dyn Fn(E, &E) -> E,
    merge: &'f dyn Fn(&E, &E) -> E,
    finish: &'f dyn Fn(&mut Kernel, E) -> E,
}

impl Single<'_> {
    fn launch(&self, l: &mut Lowering<'_>, space: &Space, x: &Operand, out: &Operand) -> Option<()> {
        let acc = Accumulate {
            init: [self.init.clone()],
            step: &|_, [a], x, _| [(self.step)(a, &x[0])],
            merge: &|[a], [b]| [(self.merge)(&a, &b)],
        };
        let operands = Operands { ins: &[x], outs: &[out], also: &[] };
        launch(l, "reduce", space, operands, &acc, &|_, k, [a], _| vec![(self.finish)(k, a)])
    }
}

// --- Sums -----------------------------------------------------------------------------------------------

/// An operator that combines the members of a row to one number.
#[derive(Clone, Copy, PartialEq)]
pub enum Sums {
    /// `sum`.
    Sum,
    /// `nansum`, to which NaNs add nothing.
    Nansum,
    /// `mean`.
    Mean,
    /// `prod`.
    Prod,
}

/// `sum`, `nansum`, `mean` and `prod`: over all dimensions, `(self, dtype)`, or over some, `(self, dim, keepdim,
/// dtype)`.
pub fn sums(l: &mut Lowering<'_>, of: Sums) -> Option<()> {
    let x = l.tensor(0)?;
    let full = inputs(l, 1) == 2;
    let (dim, keep, dtype) =
        if full { (None, false, l.dtype(1)?) } else { (Some(1), l.flag(2, false), l.dtype(3)?) };
    let mut space = dims(l, &x, dim)?;
    if of == Sums::Prod && !full {
        // This overload reduces one dimension, also for a tensor without dimensions.
        let dim = l.dim(1, x.ndim())?;
        space.reduced = (0..x.ndim()).map(|d| d == dim).collect();
    }
    let given = if l.has_out() { Some(l.tensor(inputs(l, 1))?.dtype) } else { None };
    let promotes = !x.dtype.is_floating() && of != Sums::Mean;
    let dtype = match (dtype, given) {
        (Some(d), Some(g)) if d != g => return None,
        (Some(d), _) | (None, Some(d)) => d,
        (None, None) if promotes => Dtype::INT64,
        (None, None) => x.dtype,
    };
    if dtype == Dtype::BOOL
        || of == Sums::Mean && !dtype.is_floating()
        || of == Sums::Nansum && !dtype.is_floating() && x.dtype.is_floating()
    {
        return None;
    }
    let ty = Mem::of(dtype)?.ty();
    let out = output(l, 0, &space, keep, dtype)?;
    let count = space.members();
    let (product, mean, nan) = (of == Sums::Prod, of == Sums::Mean, of == Sums::Nansum);
    let value = move |x: &E| {
        let v = x.cast(ty);
        if nan { v.is_nan().select(0.0, &v) } else { v }
    };
    let single = Single {
        init: E::lit(ty, f64::from(u8::from(product))),
        step: &|a, x| if product { a * value(x) } else { a + value(x) },
        merge: &|a, b| if product { a * b } else { a + b },
        finish: &|k, a| {
            if mean {
                let count = k.size(count).cast(ty);
                a / count
            } else {
                a
            }
        },
    };
    single.launch(l, &space, &x, &out)
}

// --- Extremes -------------------------------------------------------------------------------------------

/// The extreme value that a reduction finds.
#[derive(Clone, Copy, PartialEq)]
pub enum Extreme {
    /// The largest value.
    Max,
    /// The smallest value.
    Min,
}

/// `amax(self, dim, keepdim)`, `amin`.
pub fn extreme(l: &mut Lowering<'_>, which: Extreme) -> Option<()> {
    let x = l.tensor(0)?;
    let space = dims(l, &x, Some(1))?;
    let keep = l.flag(2, false);
    extremes(l, &x, &space, keep, which)
}

/// Launches the reduction to the largest or the smallest value.
fn extremes(l: &mut Lowering<'_>, x: &Operand, space: &Space, keep: bool, which: Extreme) -> Option<()> {
    if space.members() == 0 {
        return None;
    }
    let out = output(l, 0, space, keep, x.dtype)?;
    let ty = x.mem.ty();
    let (init, join): (E, fn(&E, &E) -> E) = match which {
        Extreme::Max => (lowest(ty), larger),
        Extreme::Min => (highest(ty), smaller),
    };
    let single = Single { init, step: &|a, x| join(&a, x), merge: &join, finish: &|_, a| a };
    single.launch(l, space, x, &out)
}

/// `aminmax(self, *, dim, keepdim)`.
pub fn aminmax(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let space = dims(l, &x, Some(1))?;
    if space.members() == 0 {
        return None;
    }
    let keep = l.flag(2, false);
    let (low, high) = (output(l, 0, &space, keep, x.dtype)?, output(l, 1, &space, keep, x.dtype)?);
    let ty = x.mem.ty();
    let acc = Accumulate {
        init: [highest(ty), lowest(ty)],
        step: &|_, [a, b], x, _| [smaller(&a, &x[0]), larger(&b, &x[0])],
        merge: &|[a, b], [c, d]| [smaller(&a, &c), larger(&b, &d)],
    };
    let operands = Operands { ins: &[&x], outs: &[&low, &high], also: &[] };
    launch(l, "aminmax", &space, operands, &acc, &|_, _, a, _| a.to_vec())
}

/// `max(self)`, and `max(self, dim, keepdim)`, which also returns indices; `min`.
pub fn max_min(l: &mut Lowering<'_>, which: Extreme) -> Option<()> {
    let x = l.tensor(0)?;
    if let Some(Arg::Int(_)) = l.call.args.get(1) {
        let (dim, keep) = (l.dim(1, x.ndim())?, l.flag(2, false));
        let space = Space::new(&x.sizes, (0..x.ndim()).map(|d| d == dim).collect());
        let values = output(l, 0, &space, keep, x.dtype)?;
        let indices = output(l, 1, &space, keep, Dtype::INT64)?;
        return places(l, &x, space, Some(&values), &indices, which);
    }
    // The other overload takes two tensors.
    if inputs(l, 1) != 1 {
        return None;
    }
    let space = dims(l, &x, None)?;
    extremes(l, &x, &space, false, which)
}

/// `argmax(self, dim, keepdim)`, `argmin`.
pub fn arg_extreme(l: &mut Lowering<'_>, which: Extreme) -> Option<()> {
    let x = l.tensor(0)?;
    let space = dims(l, &x, Some(1))?;
    let keep = l.flag(2, false);
    // PyTorch does not implement these operators for bools.
    if x.dtype == Dtype::BOOL {
        return None;
    }
    let out = output(l, 0, &space, keep, Dtype::INT64)?;
    places(l, &x, space, None, &out, which)
}

/// Launches the reduction to the extreme and its index, the first one if several are equal.
fn places(
    l: &mut Lowering<'_>,
    x: &Operand,
    mut space: Space,
    values: Option<&Operand>,
    indices: &Operand,
    which: Extreme,
) -> Option<()> {
    if space.members() == 0 {
        return None;
    }
    space.ordered = true;
    let largest = which == Extreme::Max;
    let ty = if x.mem.ty() == Ty::Bool { Ty::I32 } else { x.mem.ty() };
    let better = move |[a, i]: [E; 2], [b, j]: [E; 2]| {
        let first = j.lt(&i);
        let ahead = if largest { b.gt(&a) } else { b.lt(&a) };
        let wins = ahead.or(b.eq(&a).and(&first));
        let wins = if ty.is_float() {
            let (na, nb) = (a.is_nan(), b.is_nan());
            nb.and(na.not().or(&first)).or(na.not().and(wins))
        } else {
            wins
        };
        [wins.select(&b, &a), wins.select(&j, &i)]
    };
    let acc = Accumulate {
        init: [if largest { lowest(ty) } else { highest(ty) }, highest(Ty::U32)],
        step: &|_, a, x, member| better(a, [x[0].cast(ty), member.clone()]),
        merge: &better,
    };
    let outs: Vec<&Operand> = values.into_iter().chain([indices]).collect();
    let operands = Operands { ins: &[x], outs: &outs, also: &[] };
    launch(l, "places", &space, operands, &acc, &|_, _, [a, i], _| {
        let index = i.cast(Ty::I64);
        if values.is_some() { vec![a.cast(x.mem.ty()), index] } else { vec![index] }
    })
}

// --- Counts ---------------------------------------------------------------------------------------------

/// `any(self)`, `any(self, dim, keepdim)`, also with a list of dimensions.
pub fn any(l: &mut Lowering<'_>) -> Option<()> {
    truth(l, true)
}

/// `all`, with the arguments of `any`.
pub fn all(l: &mut Lowering<'_>) -> Option<()> {
    truth(l, false)
}

fn truth(l: &mut Lowering<'_>, any: bool) -> Option<()> {
    let x = l.tensor(0)?;
    let full = inputs(l, 1) == 1;
    let mut space = dims(l, &x, (!full).then_some(1))?;
    if let Some(Arg::Ints([])) = l.call.args.get(1) {
        // For these operators an empty list means no dimension.
        space.reduced = vec![false; x.ndim()];
    }
    let keep = !full && l.flag(2, false);
    let dtype = if x.dtype == Dtype::UINT8 { Dtype::UINT8 } else { Dtype::BOOL };
    let out = output(l, 0, &space, keep, dtype)?;
    let join = move |a: &E, b: &E| if any { a.or(b) } else { a.and(b) };
    let single = Single {
        init: E::int(Ty::Bool, i64::from(!any)),
        step: &|a, x| join(&a, &x.cast(Ty::Bool)),
        merge: &join,
        finish: &|_, a| a,
    };
    single.launch(l, &space, &x, &out)
}

/// `count_nonzero(self, dim)`.
pub fn count_nonzero(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let space = dims(l, &x, Some(1))?;
    let out = output(l, 0, &space, false, Dtype::INT64)?;
    let single = Single {
        init: E::u32(0),
        step: &|a, x| a + x.cast(Ty::Bool).cast(Ty::U32),
        merge: &|a, b| a + b,
        finish: &|_, a| a.cast(Ty::I64),
    };
    single.launch(l, &space, &x, &out)
}

/// Maximum number of elements that each element is compared with. For more of them, PyTorch's kernel, which sorts, does
/// less work.
const MAX_TESTS: i64 = 4096;

/// `isin(elements, test_elements, *, assume_unique, invert)`, of two tensors.
pub fn isin(l: &mut Lowering<'_>) -> Option<()> {
    let (x, tests) = (l.tensor(0)?, l.tensor(1)?);
    let dtype = result_type([&x, &tests], l.call.default_dtype);
    let ty = Mem::of(dtype)?.ty();
    // PyTorch rounds numbers to a half type before it compares them, and refuses bools.
    let rounds = Mem::of(dtype)? != Mem::of(kept_as(ty))? && dtype.is_floating();
    let is_converted = x.dtype != dtype || tests.dtype != dtype;
    let has_bools = x.dtype == Dtype::BOOL || tests.dtype == Dtype::BOOL;
    let is_unique = l.flag(2, false); // PyTorch returns something else if elements are not unique.
    let is_flat = tests.ndim() <= 1 || tests.strides == dense(&tests.sizes); // PyTorch views it as a vector.
    let is_long = tests.sizes.iter().product::<i64>() > MAX_TESTS;
    if rounds && is_converted || has_bools || is_unique || !is_flat || is_long {
        return None;
    }
    let sizes: Dims = x.sizes.iter().chain(&tests.sizes).copied().collect();
    let no_strides = |n: usize| std::iter::repeat_n(0, n);
    let of_x: Dims = x.strides.iter().copied().chain(no_strides(tests.ndim())).collect();
    let of_tests: Dims = no_strides(x.ndim()).chain(tests.strides.iter().copied()).collect();
    let space = Space::new(&sizes, (0..sizes.len()).map(|d| d >= x.ndim()).collect());
    let out = output(l, 0, &space, false, Dtype::BOOL)?;
    let invert = l.flag(3, false);
    let acc = Accumulate {
        init: [E::int(Ty::Bool, 0)],
        step: &|_, [a], x, _| [a.or(x[0].cast(ty).eq(x[1].cast(ty)))],
        merge: &|[a], [b]| [a.or(&b)],
    };
    let ins = [&x.viewed(&sizes, &of_x), &tests.viewed(&sizes, &of_tests)];
    let operands = Operands { ins: &ins, outs: &[&out], also: &[] };
    launch(l, "isin", &space, operands, &acc, &|_, _, [a], _| vec![if invert { a.not() } else { a }])
}

// --- Variances ------------------------------------------------------------------------------------------

/// Welford's method: mean, sum of squared deviations, and count.
pub fn welford(ty: Ty) -> Accumulate<'static, 3> {
    Accumulate {
        init: [E::lit(ty, 0.0), E::lit(ty, 0.0), E::lit(ty, 0.0)],
        step: &|_, [mean, m2, n], x, _| {
            let first = n.eq(0.0);
            let n = n + 1.0;
            let x = x[0].cast(mean.ty());
            let d = &x - &mean;
            // The first member is copied: division by 1 may be inexact, and a row of one member must have deviation
            // 0.
            let mean = first.select(&x, mean + &d / &n);
            let m2 = m2 + d * (x - &mean);
            [mean, m2, n]
        },
        merge: &|[mean, m2, n], [mean_b, m2_b, n_b]| {
            let count = &n + &n_b;
            let d = &mean_b - &mean;
            let share = &n_b / (count.gt(0.0).select(&count, 1.0));
            let joined = [&mean + &d * &share, &m2 + &m2_b + &d * &d * &n * &share];
            // Merging an infinite mean with an empty part would yield NaN.
            let (only_a, only_b) = (n_b.eq(0.0), n.eq(0.0));
            let choose = |j: &E, a: &E, b: &E| only_a.select(a, only_b.select(b, j));
            [choose(&joined[0], &mean, &mean_b), choose(&joined[1], &m2, &m2_b), count]
        },
    }
}

/// The outputs of `var` and its relatives.
#[derive(Clone, Copy)]
pub struct Spread {
    /// Whether the first output is the standard deviation instead of the variance.
    pub deviation: bool,
    /// Whether the mean is another output.
    pub mean: bool,
}

/// `var(self, dim, *, correction, keepdim)`, `std`, `var_mean`, `std_mean`.
pub fn variance(l: &mut Lowering<'_>, of: Spread) -> Option<()> {
    let x = l.tensor(0)?;
    // The overloads with `unbiased` have other arguments here.
    if inputs(l, if of.mean { 2 } else { 1 }) != 4
        || !x.dtype.is_floating()
        || matches!(l.call.args[2], Arg::Bool(_))
    {
        return None;
    }
    let space = dims(l, &x, Some(1))?;
    let keep = l.flag(3, false);
    let correction = if l.has(2) { l.pin(2)? } else { 1.0 };
    // PyTorch warns in this case.
    if space.members() as f64 - correction <= 0.0 {
        return None;
    }
    let ty = x.mem.ty();
    let out = output(l, 0, &space, keep, x.dtype)?;
    let mean = if of.mean { Some(output(l, 1, &space, keep, x.dtype)?) } else { None };
    let outs: Vec<&Operand> = std::iter::once(&out).chain(&mean).collect();
    let members = space.members();
    let operands = Operands { ins: &[&x], outs: &outs, also: &[] };
    launch(l, "variance", &space, operands, &welford(ty), &|l, k, [mean, m2, _], _| {
        let correction = if l.has(2) { l.number(k, 2, ty) } else { E::lit(ty, 1.0) };
        let var = m2 / (k.size(members).cast(ty) - correction);
        vec![if of.deviation { var.sqrt() } else { var }, mean]
    })
}

// --- Logarithms of sums ---------------------------------------------------------------------------------

/// Accumulators of a stable log-sum-exp: the largest value, and the sum of the exponentials of all values minus the
/// largest one.
pub fn exponentials() -> Accumulate<'static, 2> {
    Accumulate {
        init: [lowest(Ty::F32), E::lit(Ty::F32, 0.0)],
        step: &|_, [max, sum], x, _| {
            let x = x[0].cast(Ty::F32);
            let above = x.gt(&max);
            // One exponential suffices: of the smaller value minus the larger value. Equal values may be infinite.
            let ratio = x.eq(&max).select(1.0, (-(&x - &max).abs()).exp());
            [above.select(&x, &max), above.select(&sum * &ratio + 1.0, &sum + &ratio)]
        },
        merge: &|[max, sum], [max_b, sum_b]| {
            let above = max_b.gt(&max);
            let ratio = max_b.eq(&max).select(1.0, (-(&max_b - &max).abs()).exp());
            [above.select(&max_b, &max), above.select(&sum * &ratio + &sum_b, &sum + &sum_b * &ratio)]
        },
    }
}

/// `logsumexp(self, dim, keepdim)`.
pub fn logsumexp(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let space = dims(l, &x, Some(1))?;
    let keep = l.flag(2, false);
    let dtype = if x.dtype.is_floating() { x.dtype } else { l.call.default_dtype };
    // An empty list means all dimensions, but not for tensors of every rank.
    if Mem::of(dtype)?.ty() != Ty::F32 || l.ints(1)?.is_empty() {
        return None;
    }
    let out = output(l, 0, &space, keep, dtype)?;
    let operands = Operands { ins: &[&x], outs: &[&out], also: &[] };
    launch(l, "logsumexp", &space, operands, &exponentials(), &|_, _, [max, sum], _| vec![max + sum.log()])
}
