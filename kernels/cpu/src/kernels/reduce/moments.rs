//! Variances, standard deviations and vector norms over dimensions whose elements are adjacent.

use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::kernels::accumulate::{products, sum, wide_sum};
use crate::kernels::kernel::Kernel;
use crate::kernels::reduce::sums;
use crate::kernels::rows::{Division, read, written};
use crate::kernels::short_rows::{LONG, Lanes, ROWS, Tile, by_length, each_lane, store_each};
use crate::kernels::softmax::at;
use crate::kernels::{contiguous, count, output};
use crate::widest::widest;
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::express::{Param, TensorGeometry};

/// Maximum number of elements of a row, which one thread adds up.
const LONGEST: usize = 1 << 16;

/// Input and output of a reduction of rows, and the number and length of the rows.
fn parts(
    call: &Call<'_>,
    outputs: &Outputs,
    dims: usize,
) -> Option<(TensorGeometry, TensorGeometry, [usize; 2])> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    let all: Vec<usize> = match call.args.get(dims)? {
        Arg::Ints(list) if !list.is_empty() => {
            let front = |d: &i64| usize::try_from(if *d < 0 { *d + x.sizes.len() as i64 } else { *d }).ok();
            list.iter().map(front).collect::<Option<_>>()?
        }
        _ => (0..x.sizes.len()).collect(),
    };
    let [rows, n, 1] = sums::split(&x.sizes, &all)? else { return None };
    let fits = y.mem == Mem::F32 && count(&y.sizes) == rows && !x.sizes.contains(&0) && n <= LONGEST;
    fits.then_some((x, y, [rows, n]))
}

fn reduced(
    (x, y, [rows, n]): (TensorGeometry, TensorGeometry, [usize; 2]),
    param: Option<Param>,
    is_possible: impl Fn(f64) -> bool + Send + Sync + 'static,
    row: impl Fn(&[f32], f64, &mut f32) + Send + Sync + 'static,
    short: impl Fn(&[f32], usize, f64, &mut [f32]) + Send + Sync + 'static,
) -> Option<Kernel> {
    let (by, windows) = (Division { rows, n, cost: 2 }, (read::<f32>(x), written::<f32>(y)));
    Kernel::of_rows(by, windows, param.into_iter().collect(), move |params, (x, y)| {
        let number = params.first().map_or(1.0, |bits| f64::from_bits(*bits));
        if !is_possible(number) {
            return false;
        }
        if n < LONG {
            short(x, n, number, y);
        } else {
            x.chunks_exact(n).zip(y).for_each(|(x, y)| row(x, number, y));
        }
        true
    })
}

/// `var(self, dim, correction, keepdim)`.
pub fn variance(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    spread(call, outputs, |variance| variance)
}

/// `std(self, dim, correction, keepdim)`.
pub fn deviation(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    spread(call, outputs, f64::sqrt)
}

/// Kernel of a number that `stored` computes from the sum of the squares of a row's distances from its mean, divided by
/// the row's length less the correction.
fn spread(call: &Call<'_>, outputs: &Outputs, stored: fn(f64) -> f64) -> Option<Kernel> {
    let given = !matches!(call.args.get(2)?, Arg::None);
    let correction = given.then_some(Param::Number(2, 0, Ty::F64));
    let of_squares =
        move |squares: f64, n: usize, correction: f64| stored(squares / (n as f64 - correction)) as f32;
    let row = move |x: &[f32], correction: f64, y: &mut f32| {
        let mut squares = 0.0;
        squares_about_mean(x, &mut squares);
        *y = of_squares(squares, x.len(), correction);
    };
    let short = move |x: &[f32], n: usize, correction: f64, y: &mut [f32]| {
        for (x, y) in x.chunks(n * ROWS).zip(y.chunks_mut(ROWS)) {
            let mut squares = [0.0; ROWS];
            short_squares_about_mean(x, n, &mut squares);
            y.iter_mut().zip(squares).for_each(|(y, squares)| *y = of_squares(squares, n, correction));
        }
    };
    let parts = parts(call, outputs, 1)?;
    let n = parts.2[1] as f64;
    // If there are no degrees of freedom, PyTorch's kernel runs, because it warns.
    reduced(parts, correction, move |correction| correction < n, row, short)
}

widest! {
    /// Stores the sum of the squares of the elements' distances from their mean.
    fn squares_about_mean(x: &[f32], to: &mut f64) => run_squares_about_mean
}

#[inline(always)]
fn run_squares_about_mean(x: &[f32], to: &mut f64) {
    // SAFETY: `i < x.len()`.
    let mean = sum(x.len(), |i| unsafe { at(x, i) }) / x.len() as f64;
    *to = wide_sum(x.len(), |i| {
        // SAFETY: `i < x.len()`.
        let distance = f64::from(unsafe { at(x, i) }) - mean;
        distance * distance
    });
}

widest! {
    /// Stores, for each of up to [`ROWS`] rows of `n` elements, the sum of the squares of their distances from the mean.
    fn short_squares_about_mean(x: &[f32], n: usize, to: &mut Lanes<f64>) => run_short_squares_about_mean
}

#[inline(always)]
fn run_short_squares_about_mean(x: &[f32], n: usize, to: &mut Lanes<f64>) {
    by_length!(n, squares_about_mean_of(x, to));
}

#[inline(always)]
fn squares_about_mean_of<const N: usize>(x: &[f32], to: &mut Lanes<f64>) {
    let tile = Tile::<N>::load(x);
    let mean = each_lane(&tile.sums(|x, _| f64::from(x)), |sum, _| sum / N as f64);
    *to = tile.sums(|x, r| {
        let distance = f64::from(x) - mean[r];
        distance * distance
    });
}

/// `linalg_vector_norm(self, ord, dim, keepdim, dtype)` of order 2.
pub fn vector_norm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let order = Some(Param::Number(1, 0, Ty::F64));
    let row = |x: &[f32], _: f64, y: &mut f32| root_of_squares(x, y);
    let short = |x: &[f32], n: usize, _: f64, y: &mut [f32]| short_roots_of_squares(x, n, y);
    reduced(parts(call, outputs, 2)?, order, |order| order == 2.0, row, short)
}

widest! {
    fn root_of_squares(x: &[f32], y: &mut f32) => run_root_of_squares
}

#[inline(always)]
fn run_root_of_squares(x: &[f32], y: &mut f32) {
    // SAFETY: `i < x.len()`.
    let x_at = |i: usize| unsafe { at(x, i) };
    *y = products(x.len(), x_at, x_at).sqrt() as f32;
}

widest! {
    fn short_roots_of_squares(x: &[f32], n: usize, y: &mut [f32]) => run_short_roots_of_squares
}

#[inline(always)]
fn run_short_roots_of_squares(x: &[f32], n: usize, y: &mut [f32]) {
    if n > 1 {
        by_length!(n, roots_of_squares_of(x, y));
    } else {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x.abs();
        }
    }
}

#[inline(always)]
fn roots_of_squares_of<const N: usize>(x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks(N * ROWS).zip(y.chunks_mut(ROWS)) {
        let tile = Tile::<N>::load(x);
        let roots = each_lane(&tile.products(&tile), |squares, _| squares.sqrt() as f32);
        store_each(&roots, y);
    }
}
