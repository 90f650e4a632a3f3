//! Layer norm: rows are normalized to mean 0 and variance 1.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::kernels::accumulate::{products, sum};
use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::rows::{Division, divided, read, whole, written};
use crate::kernels::scratch::filled;
use crate::kernels::softmax::at;
use crate::kernels::{SMALL, contiguous, count, new_storage};
use crate::widest::widest;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::arguments::is_absent;
use tandem_executor::ops::express::{Param, TensorGeometry};

/// Number of rows that are added at a time.
const GROUP: usize = 4;
/// Smallest number of rows per partial sum of the weights' gradients, and largest number of partial sums.
const ROWS: usize = 32;
const PARTS: usize = 64;

/// The `number`-th output, if it is new, contiguous and of 32-bit floats; `None` otherwise.
pub fn output(outputs: &Outputs, number: usize) -> Option<TensorGeometry> {
    new_storage(outputs, number, Mem::F32)
}

/// An output that the call's output mask may exclude: `Some(None)` if it is undefined.
pub fn wanted(outputs: &Outputs, number: usize) -> Option<Option<TensorGeometry>> {
    match outputs.outs.get(number)? {
        OutSpec::Undefined => Some(None),
        _ => output(outputs, number).map(Some),
    }
}

/// An optional contiguous float argument of `n` elements: `Some(None)` if it is absent.
pub fn weights(call: &Call<'_>, arg: usize, n: usize) -> Option<Option<TensorGeometry>> {
    if is_absent(call, arg) {
        return Some(None);
    }
    contiguous(call, arg, Mem::F32).filter(|w| count(&w.sizes) == n).map(Some)
}

/// The windows of a kernel while it is put together.
#[derive(Default)]
pub struct Windows(pub SmallVec<[TensorGeometry; 4]>);

impl Windows {
    /// Appends a window and returns its index.
    pub fn add(&mut self, window: TensorGeometry) -> usize {
        self.0.push(window);
        self.0.len() - 1
    }

    /// Appends a window, if there is one, and returns its index.
    pub fn maybe(&mut self, window: Option<TensorGeometry>) -> Option<usize> {
        window.map(|w| self.add(w))
    }
}

/// Returns elements `at..at + n` of a window, or `None` if the window is absent.
///
/// # Safety
/// - The window has these elements.
/// - Nobody writes the elements while the slice is in use.
unsafe fn part<'a>(data: Addresses<'_>, window: Option<usize>, at: usize, n: usize) -> Option<&'a [f32]> {
    // SAFETY: window `w` has these elements, and they are not written, which this function requires.
    window.map(|w| unsafe { data.of(w).read(at, n) })
}

/// Smallest number of elements of a row that is normalized faster than by PyTorch's kernel. The calls and divisions of a
/// row take 25 ns.
const LEAST: usize = 20;

/// Whether rows of `n` elements, `all` elements together, are left to PyTorch's kernel.
fn is_left(n: usize, all: usize) -> bool {
    n < LEAST && all > SMALL
}

/// `native_layer_norm(input, normalized_shape, weight, bias, eps)`.
pub fn layer_norm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let Some(Arg::Ints(shape)) = call.args.get(1) else { return None };
    let n = count(shape);
    let x = contiguous(call, 0, Mem::F32)?;
    let all = count(&x.sizes);
    if all == 0 || is_left(n, all) {
        return None;
    }
    let windows = (
        read::<f32>(x),
        written::<f32>(output(outputs, 0)?),
        written::<f32>(output(outputs, 1)?),
        written::<f32>(output(outputs, 2)?),
        weights(call, 2, n)?.map(whole::<f32>),
        weights(call, 3, n)?.map(whole::<f32>),
    );
    let (by, params) = (Division { rows: all / n, n, cost: 4 }, smallvec![Param::Number(4, 0, Ty::F64)]);
    Kernel::of_each_row(by, windows, params, |params, (x, y, mean, scale, weight, bias)| {
        let stats = (&mut mean[0], &mut scale[0]);
        normalize(x, y, (weight, bias), f64::from_bits(params[0]), stats);
    })
}

/// `native_layer_norm_backward(grad, input, normalized_shape, mean, rstd, weight, bias, output_mask)`.
pub fn layer_norm_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let Some(Arg::Ints(shape)) = call.args.get(2) else { return None };
    let n = count(shape);
    let (grad, x) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let all = count(&x.sizes);
    if all == 0 || grad.sizes != x.sizes || is_left(n, all) {
        return None;
    }
    let given = |number: usize| wanted(outputs, number);
    let (to, to_weight, to_bias) = (given(0)?, given(1)?, given(2)?);
    let mut windows = Windows::default();
    let weight = weights(call, 5, n)?;
    let (mean, scale) = (contiguous(call, 3, Mem::F32)?, contiguous(call, 4, Mem::F32)?);
    let (grad, x) = (windows.add(grad), windows.add(x));
    let (mean, scale) = (windows.add(mean), windows.add(scale));
    let weight = windows.maybe(weight);
    let (to, to_weight, to_bias) = (windows.maybe(to), windows.maybe(to_weight), windows.maybe(to_bias));
    let rows = all / n;
    let each = ROWS.max(rows.div_ceil(PARTS)).next_multiple_of(GROUP);
    let parts = rows.div_ceil(each);
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let summed = to_weight.is_some() || to_bias.is_some();
        let Some(mut sums) = filled(if summed { parts * n * 2 } else { 0 }, 0.0f64) else { return false };
        divided(host, &mut sums, parts, each * n * 4, &|range, sums| {
            for (i, part_) in range.enumerate() {
                // SAFETY: rows below `rows` exist in all windows, and a weight is one row; one thread alone uses a
                // part's rows of the output.
                unsafe {
                    let at = |w: usize, at: usize, n: usize| data.of::<f32>(w).read(at, n);
                    let sums = if summed { &mut sums[i * n * 2..][..n * 2] } else { &mut sums[..0] };
                    let end = rows.min((part_ + 1) * each);
                    for row in (part_ * each..end).step_by(GROUP) {
                        let few = GROUP.min(end - row);
                        let (grad, x) = (at(grad, row * n, few * n), at(x, row * n, few * n));
                        let (mean, scale) = (at(mean, row, few), at(scale, row, few));
                        for (to, i) in to.into_iter().flat_map(|to| (0..few).map(move |i| (to, i))) {
                            let (own, to) = (i * n..(i + 1) * n, data.of(to).slice((row + i) * n, n));
                            let weight = part(data, weight, 0, n);
                            backward(&grad[own.clone()], &x[own], weight, [mean[i], scale[i]], to);
                        }
                        if summed {
                            add_up(grad, x, mean, scale, sums);
                        }
                    }
                }
            }
        });
        for (to, first) in [(to_weight, 0), (to_bias, n)] {
            let Some(to) = to else { continue };
            // SAFETY: the gradients of weight and bias have `n` elements, and all threads have ended.
            let to = unsafe { data.of::<f32>(to).slice(0, n) };
            let (total, others) = sums[first..].split_at_mut(n);
            for part in others.chunks(n).skip(1).step_by(2) {
                total.iter_mut().zip(part).for_each(|(total, sum)| *total += sum);
            }
            to.iter_mut().zip(total).for_each(|(to, total)| *to = *total as f32);
        }
        true
    };
    Some(Kernel::new(windows.0, smallvec![], work))
}

type Affine<'a> = (Option<&'a [f32]>, Option<&'a [f32]>);

/// Returns the mean as a float, and the remainder that was lost by rounding it, so that differences from the mean are
/// accurate. The sum is taken over differences from the first value, which loses no precision if all values are close
/// together and far from 0.
#[inline(always)]
fn mean(x: &[f32]) -> [f32; 2] {
    let first = x[0];
    // SAFETY: `sum` calls the closure with `i < x.len()`.
    let mean = f64::from(first) + sum(x.len(), |i| unsafe { at(x, i) } - first) / x.len() as f64;
    let near = mean as f32;
    [near, (mean - f64::from(near)) as f32]
}

/// Returns a row's [`mean`], in its two parts, and the inverse of its standard deviation.
#[inline(always)]
fn moments(x: &[f32], eps: f64) -> [f32; 3] {
    let [near, off] = mean(x);
    // SAFETY: `products` calls the closure with `i < x.len()`.
    let distance = |i: usize| unsafe { at(x, i) } - near - off;
    let variance = products(x.len(), distance, distance) / x.len() as f64;
    [near, off, (1.0 / (variance + eps).sqrt()) as f32]
}

widest! {
    fn normalize(x: &[f32], y: &mut [f32], affine: Affine<'_>, eps: f64, stats: (&mut f32, &mut f32)) => run_normalize
}

#[inline(always)]
fn run_normalize(x: &[f32], y: &mut [f32], affine: Affine<'_>, eps: f64, stats: (&mut f32, &mut f32)) {
    let [mean, off, scale] = moments(x, eps);
    (*stats.0, *stats.1) = (mean, scale);
    let y = &mut y[..x.len()];
    match affine {
        (Some(weight), Some(bias)) => {
            let (weight, bias) = (&weight[..x.len()], &bias[..x.len()]);
            for i in 0..x.len() {
                y[i] = (x[i] - mean - off) * scale * weight[i] + bias[i];
            }
        }
        (weight, bias) => {
            for i in 0..x.len() {
                let value = (x[i] - mean - off) * scale;
                let value = weight.map_or(value, |w| value * w[i]);
                y[i] = bias.map_or(value, |b| value + b[i]);
            }
        }
    }
}

widest! {
    fn backward(grad: &[f32], x: &[f32], weight: Option<&[f32]>, stats: [f32; 2], to: &mut [f32]) => run_backward
}

#[inline(always)]
fn run_backward(grad: &[f32], x: &[f32], weight: Option<&[f32]>, stats: [f32; 2], to: &mut [f32]) {
    match weight {
        Some(weight) => {
            let weight = &weight[..grad.len()];
            // SAFETY: `i < grad.len()`, and `weight` was cut to that length.
            row_backward(grad, x, stats, to, |i| unsafe { at(grad, i) * at(weight, i) });
        }
        // SAFETY: `i < grad.len()`.
        None => row_backward(grad, x, stats, to, |i| unsafe { at(grad, i) }),
    }
}

#[inline(always)]
fn row_backward(
    grad: &[f32],
    x: &[f32],
    [mean, scale]: [f32; 2],
    to: &mut [f32],
    weighted: impl Fn(usize) -> f32,
) {
    let n = grad.len();
    let (x, to) = (&x[..n], &mut to[..n]);
    // SAFETY: `products` calls the closure with `i < n`, and `x` was cut to `n` elements.
    let normalized = |i: usize| (unsafe { at(x, i) } - mean) * scale;
    let product = (products(n, &weighted, normalized) / n as f64) as f32;
    let sum = (sum(n, &weighted) / n as f64) as f32;
    for i in 0..n {
        to[i] = scale * ((mean - x[i]) * scale).mul_add(product, weighted(i) - sum);
    }
}

widest! {
    fn add_up(grad: &[f32], x: &[f32], mean: &[f32], scale: &[f32], sums: &mut [f64]) => run_add_up
}

/// Adds the terms of some rows to the gradients of weight and bias.
#[inline(always)]
fn run_add_up(grad: &[f32], x: &[f32], mean: &[f32], scale: &[f32], sums: &mut [f64]) {
    let n = sums.len() / 2;
    let (to_weight, to_bias) = sums.split_at_mut(n);
    if let (&[m0, m1, m2, m3], &[s0, s1, s2, s3]) = (mean, scale) {
        let [g0, g1, g2, g3] = [0, 1, 2, 3].map(|row| &grad[row * n..][..n]);
        let [x0, x1, x2, x3] = [0, 1, 2, 3].map(|row| &x[row * n..][..n]);
        // Unrolled over rows, with a loop per result, because other forms are not vectorized.
        for i in 0..n {
            to_weight[i] = to_weight[i]
                + product(g0[i], x0[i], m0, s0)
                + product(g1[i], x1[i], m1, s1)
                + product(g2[i], x2[i], m2, s2)
                + product(g3[i], x3[i], m3, s3);
        }
        for i in 0..n {
            to_bias[i] =
                to_bias[i] + f64::from(g0[i]) + f64::from(g1[i]) + f64::from(g2[i]) + f64::from(g3[i]);
        }
    } else {
        for (row, (mean, scale)) in mean.iter().zip(scale).enumerate() {
            let (grad, x) = (&grad[row * n..][..n], &x[row * n..][..n]);
            for i in 0..n {
                to_weight[i] += product(grad[i], x[i], *mean, *scale);
            }
            for i in 0..n {
                to_bias[i] += f64::from(grad[i]);
            }
        }
    }
}

/// An element's term of the gradient of its weight.
#[inline(always)]
fn product(grad: f32, x: f32, mean: f32, scale: f32) -> f64 {
    f64::from(grad) * f64::from((x - mean) * scale)
}
