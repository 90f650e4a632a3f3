//! Extremes along dimensions, with and without their positions, and sorting.
//!
//! As in PyTorch, NaN is larger than all numbers for `max` and for sorting and smaller than all for `min`, and the first
//! of equal elements counts.

use smallvec::smallvec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::reduce::sums;
use crate::kernels::rows::{self, Division, read, written};
use crate::kernels::scratch::room;
use crate::kernels::short_rows::{LONG, ROWS, Tile, by_length, store_each};
use crate::kernels::softmax::larger;
use crate::kernels::{SMALL, contiguous, count, dimension, each_row, int, is_contiguous, output};
use crate::widest::widest;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::{TensorGeometry, new_geometry};

/// Elements that have an order.
trait Element: rows::Element + PartialOrd {
    const MEM: Mem;
    fn is_nan(self) -> bool;
    /// Order in which NaN is the largest and equal to itself.
    fn order(&self, other: &Self) -> std::cmp::Ordering;
}

impl Element for f32 {
    const MEM: Mem = Mem::F32;
    fn is_nan(self) -> bool {
        self.is_nan()
    }
    fn order(&self, other: &f32) -> std::cmp::Ordering {
        self.partial_cmp(other).unwrap_or_else(|| self.is_nan().cmp(&other.is_nan()))
    }
}

impl Element for i64 {
    const MEM: Mem = Mem::I64;
    fn is_nan(self) -> bool {
        false
    }
    fn order(&self, other: &i64) -> std::cmp::Ordering {
        self.cmp(other)
    }
}

/// The `number`-th output, if it is new, contiguous and of these elements.
fn made(outputs: &Outputs, number: usize, mem: Mem) -> Option<TensorGeometry> {
    match outputs.outs.get(number)? {
        OutSpec::NewStorage { storage, meta, offset } => {
            new_geometry(*storage, meta, *offset).filter(|w| w.mem == mem && is_contiguous(w))
        }
        _ => None,
    }
}

/// Position of the first extreme of `n` elements, `step` apart.
#[inline(always)]
fn extreme<T: Element>(x: &[T], n: usize, step: usize, is_better: impl Fn(T, T) -> bool) -> usize {
    let (mut found, mut best) = (0, x[0]);
    for i in 0..n {
        let value = x[i * step];
        if value.is_nan() {
            return i;
        }
        if is_better(value, best) {
            (found, best) = (i, value);
        }
    }
    found
}

/// Values and positions of the extremes of short rows of `n` floats.
type ShortExtremes = fn(x: &[f32], n: usize, values: Option<&mut [f32]>, positions: &mut [i64]);

widest! {
    fn short_largest(x: &[f32], n: usize, values: Option<&mut [f32]>, positions: &mut [i64]) => run_short_largest
}

#[inline(always)]
fn run_short_largest(x: &[f32], n: usize, values: Option<&mut [f32]>, positions: &mut [i64]) {
    by_length!(n, short_extremes(x, values, positions, |a, b| a > b));
}

widest! {
    fn short_smallest(x: &[f32], n: usize, values: Option<&mut [f32]>, positions: &mut [i64]) => run_short_smallest
}

#[inline(always)]
fn run_short_smallest(x: &[f32], n: usize, values: Option<&mut [f32]>, positions: &mut [i64]) {
    by_length!(n, short_extremes(x, values, positions, |a, b| a < b));
}

#[inline(always)]
fn short_extremes<const N: usize>(
    x: &[f32],
    mut values: Option<&mut [f32]>,
    positions: &mut [i64],
    is_better: fn(f32, f32) -> bool,
) {
    if N == 1 {
        positions.fill(0);
        if let Some(values) = values {
            values.copy_from_slice(x);
        }
        return;
    }
    for (i, positions) in positions.chunks_mut(ROWS).enumerate() {
        let rows = i * ROWS..i * ROWS + positions.len();
        let tile = Tile::<N>::load(&x[rows.start * N..rows.end * N]);
        let (mut best, mut found) = (tile.places()[0], [0; ROWS]);
        for (place, lanes) in (0i32..).zip(tile.places()).skip(1) {
            for ((best, found), x) in best.iter_mut().zip(&mut found).zip(lanes) {
                let takes = !best.is_nan() && (x.is_nan() || is_better(*x, *best));
                *best = if takes { *x } else { *best };
                *found = if takes { place } else { *found };
            }
        }
        positions.iter_mut().zip(&found).for_each(|(to, place)| *to = i64::from(*place));
        if let Some(values) = &mut values {
            values[rows].copy_from_slice(&best[..positions.len()]);
        }
    }
}

/// The kernel that stores the extremes' values, if `values` is a window, and their positions. `short` is for rows of
/// floats.
fn extremes<T: Element>(
    x: TensorGeometry,
    [outer, n, inner]: [usize; 3],
    (values, positions): (Option<TensorGeometry>, TensorGeometry),
    is_better: fn(T, T) -> bool,
    short: Option<ShortExtremes>,
) -> Option<Kernel> {
    let all = outer * inner;
    let is_short = inner == 1 && n < LONG;
    if n == 0 || all == 0 || count(&positions.sizes) != all || !is_short && all * n > SMALL {
        return None;
    }
    if let Some(short) = short.filter(|_| is_short) {
        let windows = (read::<f32>(x), written::<i64>(positions), values.map(written::<f32>));
        let by = Division { rows: all, n, cost: 2 };
        return Kernel::of_rows(by, windows, smallvec![], move |_, (x, positions, values)| {
            short(x, n, values, positions);
            true
        });
    }
    let has_values = values.is_some();
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (x, positions, values) =
            (data.of::<T>(0), data.of::<i64>(1), has_values.then(|| data.of::<T>(2)));
        each_row(host, all, n, &|begin, end| {
            for item in begin..end {
                let first = item / inner * n * inner + item % inner;
                // SAFETY: the input has `outer * n * inner` elements, and each output has an element for each of `all`
                // rows. One thread alone writes each row's elements.
                unsafe {
                    let row = x.read(first, (n - 1) * inner + 1);
                    let found = extreme(row, n, inner, is_better);
                    *positions.at(item) = found as i64;
                    if let Some(values) = values {
                        *values.at(item) = row[found * inner];
                    }
                }
            }
        });
        true
    };
    let mut windows = smallvec![x, positions];
    windows.extend(values);
    Some(Kernel::new(windows, smallvec![], work))
}

/// Sizes before, of, and after a dimension.
fn split(sizes: &[i64], dim: usize) -> [usize; 3] {
    [count(&sizes[..dim]), sizes[dim] as usize, count(&sizes[dim + 1..])]
}

fn along<T: Element>(
    call: &Call<'_>,
    outputs: &Outputs,
    is_better: fn(T, T) -> bool,
    short: Option<ShortExtremes>,
) -> Option<Kernel> {
    let x = contiguous(call, 0, T::MEM).filter(|x| !x.sizes.is_empty())?;
    let shape = split(&x.sizes, dimension(call, 1, x.sizes.len())?);
    let both = (Some(made(outputs, 0, T::MEM)?), made(outputs, 1, Mem::I64)?);
    extremes(x, shape, both, is_better, short)
}

/// `max.dim(self, dim, keepdim)`: values and positions.
pub fn max(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    along::<f32>(call, outputs, |a, b| a > b, Some(short_largest))
        .or_else(|| along::<i64>(call, outputs, |a, b| a > b, None))
}

/// `min.dim(self, dim, keepdim)`: values and positions.
pub fn min(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    along::<f32>(call, outputs, |a, b| a < b, Some(short_smallest))
        .or_else(|| along::<i64>(call, outputs, |a, b| a < b, None))
}

fn positions<T: Element>(
    call: &Call<'_>,
    outputs: &Outputs,
    is_better: fn(T, T) -> bool,
    short: Option<ShortExtremes>,
) -> Option<Kernel> {
    let (x, to) = (contiguous(call, 0, T::MEM)?, made(outputs, 0, Mem::I64)?);
    let shape = match call.args.get(1)? {
        Arg::None => [1, count(&x.sizes), 1],
        _ if x.sizes.is_empty() => return None,
        _ => split(&x.sizes, dimension(call, 1, x.sizes.len())?),
    };
    extremes(x, shape, (None, to), is_better, short)
}

/// `argmax(self, dim, keepdim)`.
pub fn argmax(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    positions::<f32>(call, outputs, |a, b| a > b, Some(short_largest))
        .or_else(|| positions::<i64>(call, outputs, |a, b| a > b, None))
}

/// `argmin(self, dim, keepdim)`.
pub fn argmin(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    positions::<f32>(call, outputs, |a, b| a < b, Some(short_smallest))
        .or_else(|| positions::<i64>(call, outputs, |a, b| a < b, None))
}

/// `amax(self, dim, keepdim)` over adjacent dimensions.
pub fn amax(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    values(call, outputs, max_row, short_max, larger)
}

/// `amin(self, dim, keepdim)` over adjacent dimensions.
pub fn amin(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    values(call, outputs, min_row, short_min, smaller)
}

/// `max(self)`.
pub fn max_of_all(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    (call.args.len() == 1).then(|| amax(call, outputs))?
}

/// `min(self)`.
pub fn min_of_all(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    (call.args.len() == 1).then(|| amin(call, outputs))?
}

fn values(
    call: &Call<'_>,
    outputs: &Outputs,
    row: fn(&[f32], &mut f32),
    short: fn(&[f32], usize, &mut [f32]),
    better: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
) -> Option<Kernel> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    let [outer, n, inner] = sums::split(&x.sizes, &sums::dims(call, x.sizes.len())?)?;
    let is_short = inner == 1 && n < LONG && outer > 1;
    let fits = count(&y.sizes) == outer * inner && (is_short || count(&x.sizes) <= SMALL);
    if y.mem != Mem::F32 || x.sizes.contains(&0) || !fits {
        return None;
    }
    let (by, windows) =
        (Division { rows: outer, n: n * inner, cost: 1 }, (read::<f32>(x), written::<f32>(y)));
    if is_short {
        return Kernel::of_rows(by, windows, smallvec![], move |_, (x, y)| {
            short(x, n, y);
            true
        });
    }
    Kernel::of_each_row(by, windows, smallvec![], move |_, (x, y)| {
        if inner == 1 {
            return row(x, &mut y[0]);
        }
        y.copy_from_slice(&x[..inner]);
        for x in x[inner..].chunks_exact(inner) {
            y.iter_mut().zip(x).for_each(|(y, x)| *y = better(*y, *x));
        }
    })
}

/// Number of extremes that are kept side by side.
const LANES: usize = 16;

/// Returns the smaller number, or NaN if one of them is NaN.
#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    if a < b || a.is_nan() { a } else { b }
}

/// Returns the best of the elements; `better` returns the better of two.
#[inline(always)]
fn folded(x: &[f32], better: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [x[0]; LANES];
    for chunk in x.chunks(LANES) {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane = better(*lane, *x));
    }
    lanes.into_iter().reduce(better).unwrap_or(f32::NAN)
}

widest! {
    fn max_row(x: &[f32], y: &mut f32) => run_max
}

#[inline(always)]
fn run_max(x: &[f32], y: &mut f32) {
    *y = folded(x, larger);
}

widest! {
    fn min_row(x: &[f32], y: &mut f32) => run_min
}

#[inline(always)]
fn run_min(x: &[f32], y: &mut f32) {
    *y = folded(x, smaller);
}

widest! {
    fn short_max(x: &[f32], n: usize, y: &mut [f32]) => run_short_max
}

#[inline(always)]
fn run_short_max(x: &[f32], n: usize, y: &mut [f32]) {
    by_length!(n, folded_rows(x, y, larger));
}

widest! {
    fn short_min(x: &[f32], n: usize, y: &mut [f32]) => run_short_min
}

#[inline(always)]
fn run_short_min(x: &[f32], n: usize, y: &mut [f32]) {
    by_length!(n, folded_rows(x, y, smaller));
}

#[inline(always)]
fn folded_rows<const N: usize>(x: &[f32], y: &mut [f32], better: fn(f32, f32) -> f32) {
    for (x, y) in x.chunks(N * ROWS).zip(y.chunks_mut(ROWS)) {
        store_each(&Tile::<N>::load(x).folded(better), y);
    }
}

/// Values and positions of `n` elements in order, along the last dimension. If elements are equal and the sort need not
/// be stable, PyTorch's kernel runs, because the order of equal elements follows from its algorithm.
fn sorted<T: Element>(
    call: &Call<'_>,
    outputs: &Outputs,
    [dim, descending]: [usize; 2],
    is_stable: bool,
) -> Option<Kernel> {
    let x = contiguous(call, 0, T::MEM).filter(|x| !x.sizes.is_empty() && !x.sizes.contains(&0))?;
    let dim = dimension(call, dim, x.sizes.len())?;
    let [rows, n, 1] = split(&x.sizes, dim) else { return None };
    let descending = int(call, descending)? != 0;
    if !is_stable && rows * n > SMALL {
        return None;
    }
    let (values, positions) = (made(outputs, 0, T::MEM)?, made(outputs, 1, Mem::I64)?);
    let windows = (read::<T>(x), written::<T>(values), written::<i64>(positions));
    Kernel::of_rows(Division { rows, n, cost: 32 }, windows, smallvec![], move |_, (x, values, positions)| {
        let Some(mut pairs) = room::<(T, u32)>(n) else { return false };
        let outs = values.chunks_exact_mut(n).zip(positions.chunks_exact_mut(n));
        for (x, (values, positions)) in x.chunks_exact(n).zip(outs) {
            pairs.clear();
            pairs.extend(x.iter().copied().zip(0u32..));
            // Pairs are distinct by position, so the order is that of a stable sort.
            pairs.sort_unstable_by(|a, b| {
                let order = if descending { b.0.order(&a.0) } else { a.0.order(&b.0) };
                order.then(a.1.cmp(&b.1))
            });
            if !is_stable && pairs.windows(2).any(|pair| pair[0].0.order(&pair[1].0).is_eq()) {
                return false;
            }
            for (((value, at), to), position) in pairs.iter().zip(values).zip(positions) {
                (*to, *position) = (*value, i64::from(*at));
            }
        }
        true
    })
}

/// The largest or smallest elements of rows, with their positions. If equal elements matter, PyTorch's kernel runs,
/// because its choice among them follows from its algorithm.
fn top<T: Element>(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let x = contiguous(call, 0, T::MEM).filter(|x| !x.sizes.is_empty() && !x.sizes.contains(&0))?;
    let [rows, n, 1] = split(&x.sizes, dimension(call, 2, x.sizes.len())?) else { return None };
    let (largest, is_sorted) = (int(call, 3)? != 0, int(call, 4)? != 0);
    let (values, positions) = (made(outputs, 0, T::MEM)?, made(outputs, 1, Mem::I64)?);
    let k = usize::try_from(*values.sizes.last()?).ok()?;
    if k == 0 || k > n || rows * n > SMALL || (!is_sorted && k > 1) || count(&values.sizes) != rows * k {
        return None;
    }
    let windows = (read::<T>(x), written::<T>(values), written::<i64>(positions));
    Kernel::of_rows(Division { rows, n, cost: 8 }, windows, smallvec![], move |_, (x, values, positions)| {
        let Some(mut pairs) = room::<(T, u32)>(n) else { return false };
        let order = |a: &(T, u32), b: &(T, u32)| if largest { b.0.order(&a.0) } else { a.0.order(&b.0) };
        let outs = values.chunks_exact_mut(k).zip(positions.chunks_exact_mut(k));
        for (x, (values, positions)) in x.chunks_exact(n).zip(outs) {
            pairs.clear();
            pairs.extend(x.iter().copied().zip(0u32..));
            // The element after the last one that is returned must differ from it too.
            let seen = (k + 1).min(n);
            if seen < n {
                pairs.select_nth_unstable_by(seen - 1, order);
            }
            pairs[..seen].sort_unstable_by(order);
            if pairs[..seen].windows(2).any(|pair| order(&pair[0], &pair[1]).is_eq()) {
                return false;
            }
            for (((value, at), to), position) in pairs.iter().zip(values).zip(positions) {
                (*to, *position) = (*value, i64::from(*at));
            }
        }
        true
    })
}

/// `topk(self, k, dim, largest, sorted)` along a last dimension.
pub fn topk(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    top::<f32>(call, outputs).or_else(|| top::<i64>(call, outputs))
}

/// `sort(self, dim, descending)` along a last dimension.
pub fn sort(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    sorted::<f32>(call, outputs, [1, 2], false).or_else(|| sorted::<i64>(call, outputs, [1, 2], false))
}

/// `sort.stable(self, stable, dim, descending)` along a last dimension.
pub fn sort_stable(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let is_stable = matches!(call.args.get(1), Some(Arg::Bool(true)));
    sorted::<f32>(call, outputs, [2, 3], is_stable)
        .or_else(|| sorted::<i64>(call, outputs, [2, 3], is_stable))
}
