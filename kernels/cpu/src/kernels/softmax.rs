//! Softmax, log-softmax and logsumexp over the last dimension, and the gradients of the first two.

use std::hint::black_box;

use smallvec::smallvec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::kernels::accumulate::total;
use crate::kernels::kernel::Kernel;
use crate::kernels::long_rows::{self, LANES, load, store, vectors};
use crate::kernels::rows::{Division, read, written};
use crate::kernels::short_rows::{LONG, ROWS, Tile, by_length, each_lane, store_each};
use crate::kernels::{contiguous, count, dimension, output};
use crate::tiles::math::{exp, log};
use crate::widest::widest;
use tandem_executor::ir::Mem;

/// Number of rows and their length, if `dim` is the last dimension of more than one element.
fn shape(sizes: &[i64], dim: usize) -> Option<[usize; 2]> {
    let last = count(&sizes[dim + 1..]) == 1;
    (last && !sizes.contains(&0)).then(|| [count(&sizes[..dim]), sizes[dim] as usize])
}

/// Kernel of rows of `n` elements, in two versions: for long rows and for short ones.
#[derive(Clone, Copy)]
struct Rows {
    long: fn(&[f32], usize, &mut [f32]),
    short: fn(&[f32], usize, &mut [f32]),
}

impl Rows {
    /// Computes some rows of `x` into as many rows of `y`.
    fn run(self, x: &[f32], n: usize, y: &mut [f32]) {
        if n < LONG { (self.short)(x, n, y) } else { (self.long)(x, n, y) }
    }
}

fn forward(call: &Call<'_>, outputs: &Outputs, of: Rows) -> Option<Kernel> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    if x.sizes.is_empty() || y.mem != Mem::F32 || y.sizes != x.sizes {
        return None;
    }
    let [rows, n] = shape(&x.sizes, dimension(call, 1, x.sizes.len())?)?;
    let by = Division { rows, n, cost: COST };
    Kernel::of_rows(by, (read::<f32>(x), written::<f32>(y)), smallvec![], move |_, (x, y)| {
        of.run(x, n, y);
        true
    })
}

/// Cost of an exponential, in additions.
const COST: usize = 8;

pub fn softmax(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, Rows { long: softmax_long, short: softmax_short })
}

/// A softmax that returns zeros for a row of `-inf` alone.
pub fn safe_softmax(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, Rows { long: safe_softmax_long, short: safe_softmax_short })
}

pub fn log_softmax(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    forward(call, outputs, Rows { long: log_softmax_long, short: log_softmax_short })
}

/// `logsumexp(self, dim, keepdim)` over one dimension.
pub fn logsumexp(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    let Some(Arg::Ints([dim])) = call.args.get(1) else { return None };
    let ndim = x.sizes.len() as i64;
    let dim =
        usize::try_from(if *dim < 0 { dim + ndim } else { *dim }).ok().filter(|dim| *dim < x.sizes.len())?;
    let [rows, n] = shape(&x.sizes, dim)?;
    if y.mem != Mem::F32 || count(&y.sizes) != rows {
        return None;
    }
    let by = Division { rows, n, cost: COST };
    Kernel::of_rows(by, (read::<f32>(x), written::<f32>(y)), smallvec![], move |_, (x, y)| {
        Rows { long: logsumexp_long, short: logsumexp_short }.run(x, n, y);
        true
    })
}

/// Kernel of the gradients of rows of `n` elements: for long rows and for short ones.
#[derive(Clone, Copy)]
struct Backward {
    long: fn(&[f32], &[f32], usize, &mut [f32]),
    short: fn(&[f32], &[f32], usize, &mut [f32]),
}

fn backward(call: &Call<'_>, outputs: &Outputs, of: Backward) -> Option<Kernel> {
    let (grad, y, to) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?, output(outputs)?);
    if y.sizes.is_empty() || grad.sizes != y.sizes || to.mem != Mem::F32 || to.sizes != y.sizes {
        return None;
    }
    let [rows, n] = shape(&y.sizes, dimension(call, 2, y.sizes.len())?)?;
    let windows = (read::<f32>(grad), read::<f32>(y), written::<f32>(to));
    Kernel::of_rows(Division { rows, n, cost: COST }, windows, smallvec![], move |_, (grad, y, to)| {
        if n < LONG {
            (of.short)(grad, y, n, to)
        } else {
            (of.long)(grad, y, n, to)
        }
        true
    })
}

pub fn softmax_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    backward(call, outputs, Backward { long: softmax_backward_long, short: softmax_backward_short })
}

pub fn log_softmax_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    backward(call, outputs, Backward { long: log_softmax_backward_long, short: log_softmax_backward_short })
}

/// Returns an element without a bounds check, which would keep a loop from being vectorized.
///
/// # Safety
/// `i < x.len()`.
#[inline(always)]
pub unsafe fn at(x: &[f32], i: usize) -> f32 {
    // SAFETY: `i` is below the length, which this function requires.
    unsafe { *x.get_unchecked(i) }
}

/// Returns the larger number, or NaN if one of them is NaN.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a > b || a.is_nan() { a } else { b }
}

/// Returns `exp(x)` for `x <= 0`, or 0 if the result would be subnormal. CPUs compute with subnormal numbers a
/// hundred times slower, and masks fill whole rows with them; next to the row's largest weight, which is 1, they
/// make no difference.
#[inline(always)]
pub(super) fn weight(x: f32) -> f32 {
    const LEAST: f32 = -87.0;
    let e = exp(if x < LEAST { LEAST } else { x });
    if x < LEAST { 0.0 } else { e }
}

/// Returns the largest value, or NaN if there is one.
#[inline(always)]
pub(super) fn largest(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, *x);
    }
    folded(lanes, larger)
}

/// Folds the lanes by `better`. The compiler does not see their order, as in [`total`].
#[inline(always)]
fn folded(lanes: [f32; LANES], better: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = *black_box(&lanes);
    let mut n = LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            lanes[i] = better(lanes[i], lanes[i + n]);
        }
    }
    lanes[0]
}

widest! {
    fn softmax_long(x: &[f32], n: usize, y: &mut [f32]) => run_softmax_long
}

#[inline(always)]
fn run_softmax_long(x: &[f32], n: usize, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
        run_softmax(x, y);
    }
}

#[inline(always)]
fn run_softmax(x: &[f32], y: &mut [f32]) {
    let (most, mut sums) = (bound(x), [0.0; LANES]);
    for (at, new) in vectors(x.len()) {
        let mut weights = load(x, at);
        for x in &mut weights {
            *x = weight(*x - most);
        }
        store(y, at, &weights);
        long_rows::add(&mut sums, &weights, new);
    }
    // The sum is between 1 and the row's length, so its inverse is normal. Multiplying is faster than dividing.
    let share = (1.0 / total(&sums)) as f32;
    for (at, new) in vectors(y.len()) {
        let mut weights = load(y, at);
        for (lane, weight) in weights.iter_mut().enumerate() {
            *weight *= new.or(lane, share, 1.0);
        }
        store(y, at, &weights);
    }
}

/// Returns the largest number of a long row. If there is a NaN, the result is any of its elements: the sum of the
/// exponentials is then NaN, and so are all results.
#[inline(always)]
fn bound(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for (at, _) in vectors(x.len()) {
        for (lane, x) in lanes.iter_mut().zip(load(x, at)) {
            *lane = if *lane > x { *lane } else { x };
        }
    }
    folded(lanes, |a, b| if a > b { a } else { b })
}

widest! {
    fn softmax_short(x: &[f32], n: usize, y: &mut [f32]) => run_softmax_short
}

#[inline(always)]
fn run_softmax_short(x: &[f32], n: usize, y: &mut [f32]) {
    by_length!(n, softmax_of(x, y));
}

#[inline(always)]
fn softmax_of<const N: usize>(x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks(N * ROWS).zip(y.chunks_mut(N * ROWS)) {
        let mut tile = Tile::<N>::load(x);
        let most = tile.folded(larger);
        tile.update(|x, r| weight(x - most[r]));
        let share = each_lane(&tile.sums(|x, _| f64::from(x)), |sum, _| (1.0 / sum) as f32);
        tile.update(|x, r| x * share[r]);
        tile.store(y);
    }
}

widest! {
    fn safe_softmax_long(x: &[f32], n: usize, y: &mut [f32]) => run_safe_softmax_long
}

#[inline(always)]
fn run_safe_softmax_long(x: &[f32], n: usize, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
        run_safe_softmax(x, y);
    }
}

#[inline(always)]
fn run_safe_softmax(x: &[f32], y: &mut [f32]) {
    if x.iter().all(|x| *x == f32::NEG_INFINITY) {
        y.fill(0.0);
    } else {
        run_softmax(x, y);
    }
}

fn safe_softmax_short(x: &[f32], n: usize, y: &mut [f32]) {
    softmax_short(x, n, y);
    for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
        if x.iter().all(|x| *x == f32::NEG_INFINITY) {
            y.fill(0.0);
        }
    }
}

widest! {
    fn log_softmax_long(x: &[f32], n: usize, y: &mut [f32]) => run_log_softmax_long
}

#[inline(always)]
fn run_log_softmax_long(x: &[f32], n: usize, y: &mut [f32]) {
    let at_a_time = n * rows_at_a_time(n);
    for (x, y) in x.chunks(at_a_time).zip(y.chunks_mut(at_a_time)) {
        let (mut most, mut sums) = ([0.0; ROWS], [1.0; ROWS]);
        for (r, x) in x.chunks_exact(n).enumerate() {
            most[r] = bound(x);
            sums[r] = sum_of_weights(x, most[r]);
        }
        let logs = each_lane(&sums, |sum: f64, _| log(sum as f32));
        for (r, (x, y)) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)).enumerate() {
            for (at, _) in vectors(n) {
                let mut values = load(x, at);
                for x in &mut values {
                    *x = *x - most[r] - logs[r];
                }
                store(y, at, &values);
            }
        }
    }
}

/// Returns the sum of the weights of a long row's elements.
#[inline(always)]
fn sum_of_weights(x: &[f32], most: f32) -> f64 {
    let mut sums = [0.0; LANES];
    for (at, new) in vectors(x.len()) {
        let mut weights = load(x, at);
        for x in &mut weights {
            *x = weight(*x - most);
        }
        long_rows::add(&mut sums, &weights, new);
    }
    total(&sums)
}

/// Number of long rows whose logarithms are computed together: [`ROWS`] logarithms take as long as one. A row is read
/// again after its logarithm, so rows that would have left the cache by then are computed alone.
#[inline(always)]
fn rows_at_a_time(n: usize) -> usize {
    if n <= 1024 { ROWS } else { 1 }
}

widest! {
    fn log_softmax_short(x: &[f32], n: usize, y: &mut [f32]) => run_log_softmax_short
}

#[inline(always)]
fn run_log_softmax_short(x: &[f32], n: usize, y: &mut [f32]) {
    by_length!(n, log_softmax_of(x, y));
}

#[inline(always)]
fn log_softmax_of<const N: usize>(x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks(N * ROWS).zip(y.chunks_mut(N * ROWS)) {
        let mut tile = Tile::<N>::load(x);
        let most = tile.folded(larger);
        let sums = tile.sums(|x, r| f64::from(weight(x - most[r])));
        let logs = each_lane(&sums, |sum, _| log(sum as f32));
        tile.update(|x, r| x - most[r] - logs[r]);
        tile.store(y);
    }
}

widest! {
    fn logsumexp_long(x: &[f32], n: usize, y: &mut [f32]) => run_logsumexp_long
}

#[inline(always)]
fn run_logsumexp_long(x: &[f32], n: usize, y: &mut [f32]) {
    for (x, y) in x.chunks(n * ROWS).zip(y.chunks_mut(ROWS)) {
        let (mut most, mut sums) = ([0.0; ROWS], [1.0; ROWS]);
        for (r, x) in x.chunks_exact(n).enumerate() {
            most[r] = finite(bound(x));
            sums[r] = sum_of_weights(x, most[r]);
        }
        let values = each_lane(&sums, |sum: f64, r| log(sum as f32) + most[r]);
        store_each(&values, y);
    }
}

/// Returns the number, or 0 if it is infinite: as in PyTorch, infinite maxima are not subtracted.
#[inline(always)]
fn finite(most: f32) -> f32 {
    if most.abs() == f32::INFINITY { 0.0 } else { most }
}

widest! {
    fn logsumexp_short(x: &[f32], n: usize, y: &mut [f32]) => run_logsumexp_short
}

#[inline(always)]
fn run_logsumexp_short(x: &[f32], n: usize, y: &mut [f32]) {
    by_length!(n, logsumexp_of(x, y));
}

#[inline(always)]
fn logsumexp_of<const N: usize>(x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks(N * ROWS).zip(y.chunks_mut(ROWS)) {
        let tile = Tile::<N>::load(x);
        let most = each_lane(&tile.folded(larger), |most, _| finite(most));
        let sums = tile.sums(|x, r| f64::from(exp(x - most[r])));
        let values = each_lane(&sums, |sum, r| log(sum as f32) + most[r]);
        store_each(&values, y);
    }
}

widest! {
    fn softmax_backward_long(grad: &[f32], y: &[f32], n: usize, to: &mut [f32]) => run_softmax_backward_long
}

#[inline(always)]
fn run_softmax_backward_long(grad: &[f32], y: &[f32], n: usize, to: &mut [f32]) {
    for ((grad, y), to) in grad.chunks_exact(n).zip(y.chunks_exact(n)).zip(to.chunks_exact_mut(n)) {
        run_softmax_backward(grad, y, to);
    }
}

#[inline(always)]
fn run_softmax_backward(grad: &[f32], y: &[f32], to: &mut [f32]) {
    let mut sums = [0.0; LANES];
    for (at, new) in vectors(grad.len()) {
        for (lane, (sum, (grad, y))) in
            sums.iter_mut().zip(load(grad, at).iter().zip(load(y, at))).enumerate()
        {
            *sum += new.or_zero(lane, f64::from(*grad) * f64::from(y));
        }
    }
    let sum = total(&sums) as f32;
    for (at, _) in vectors(grad.len()) {
        let mut results = load(grad, at);
        for (result, y) in results.iter_mut().zip(load(y, at)) {
            *result = (*result - sum) * y;
        }
        store(to, at, &results);
    }
}

widest! {
    fn softmax_backward_short(grad: &[f32], y: &[f32], n: usize, to: &mut [f32]) => run_softmax_backward_short
}

#[inline(always)]
fn run_softmax_backward_short(grad: &[f32], y: &[f32], n: usize, to: &mut [f32]) {
    by_length!(n, softmax_backward_of(grad, y, to));
}

#[inline(always)]
fn softmax_backward_of<const N: usize>(grad: &[f32], y: &[f32], to: &mut [f32]) {
    let rows = grad.chunks(N * ROWS).zip(y.chunks(N * ROWS)).zip(to.chunks_mut(N * ROWS));
    for ((grad, y), to) in rows {
        let (mut grad, y) = (Tile::<N>::load(grad), Tile::<N>::load(y));
        let sums = each_lane(&grad.products(&y), |sum, _| sum as f32);
        grad.combine(&y, |grad, y, r| (grad - sums[r]) * y);
        grad.store(to);
    }
}

widest! {
    fn log_softmax_backward_long(grad: &[f32], y: &[f32], n: usize, to: &mut [f32]) => run_log_softmax_backward_long
}

#[inline(always)]
fn run_log_softmax_backward_long(grad: &[f32], y: &[f32], n: usize, to: &mut [f32]) {
    for ((grad, y), to) in grad.chunks_exact(n).zip(y.chunks_exact(n)).zip(to.chunks_exact_mut(n)) {
        run_log_softmax_backward(grad, y, to);
    }
}

#[inline(always)]
fn run_log_softmax_backward(grad: &[f32], y: &[f32], to: &mut [f32]) {
    let mut sums = [0.0; LANES];
    for (at, new) in vectors(grad.len()) {
        long_rows::add(&mut sums, &load(grad, at), new);
    }
    let sum = total(&sums) as f32;
    for (at, _) in vectors(grad.len()) {
        let mut results = load(grad, at);
        for (result, y) in results.iter_mut().zip(load(y, at)) {
            *result -= exp(y) * sum;
        }
        store(to, at, &results);
    }
}

widest! {
    fn log_softmax_backward_short(grad: &[f32], y: &[f32], n: usize, to: &mut [f32]) => run_log_softmax_backward_short
}

#[inline(always)]
fn run_log_softmax_backward_short(grad: &[f32], y: &[f32], n: usize, to: &mut [f32]) {
    by_length!(n, log_softmax_backward_of(grad, y, to));
}

#[inline(always)]
fn log_softmax_backward_of<const N: usize>(grad: &[f32], y: &[f32], to: &mut [f32]) {
    let rows = grad.chunks(N * ROWS).zip(y.chunks(N * ROWS)).zip(to.chunks_mut(N * ROWS));
    for ((grad, y), to) in rows {
        let (mut grad, y) = (Tile::<N>::load(grad), Tile::<N>::load(y));
        let sums = each_lane(&grad.sums(|x, _| f64::from(x)), |sum, _| sum as f32);
        grad.combine(&y, |grad, y, r| grad - exp(y) * sums[r]);
        grad.store(to);
    }
}
