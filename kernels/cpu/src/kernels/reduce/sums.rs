//! Sums and means over dimensions.
//!
//! Elements are added in blocks of a fixed size, in the order of [`float_sum`]. Then the sums of the blocks are added.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::kernels::accumulate::{self, float_sum};
use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::rows::divided;
use crate::kernels::short_rows::{LONG, ROWS, Tile, by_length, each_lane, each_range, store_each};
use crate::kernels::softmax::at;
use crate::kernels::{contiguous, count, each_row, is_contiguous, output};
use crate::widest::widest;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::express::{Operand, Param, TensorGeometry, new_geometry, operand};
use tandem_executor::plan::{RowShape, RowSums};

/// Number of elements of a block.
pub const BLOCK: usize = 4096;
/// Number of elements from which a row is added by SIMD code.
const SHORT: usize = 16;
/// Number of columns, and of rows of them, that are added at a time.
const COLUMNS: usize = 256;
const COLUMN_ROWS: usize = 4;

/// Largest number of columns of a narrow matrix, whose rows fill few vectors, and smallest number of its rows.
const NARROW: usize = 64;
const FEW_ROWS: usize = 64;
/// Number of elements of a narrow matrix that are added at a time: half of a second-level cache.
const NARROW_BLOCK: usize = 1 << 16;

/// Sizes as `[outer, summed, inner]`; `None` if the summed dimensions are not adjacent.
pub(in crate::kernels) fn split(sizes: &[i64], dims: &[usize]) -> Option<[usize; 3]> {
    let summed = |d: &usize| dims.contains(d);
    let Some(first) = (0..sizes.len()).find(summed) else { return Some([count(sizes), 1, 1]) };
    let last = (0..sizes.len()).rev().find(summed)?;
    let between = (first..=last).all(|d| summed(&d) || sizes[d] == 1);
    between.then(|| [count(&sizes[..first]), count(&sizes[first..=last]), count(&sizes[last + 1..])])
}

/// The dimensions that a call sums over, which are all if it names none.
pub(in crate::kernels) fn dims(call: &Call<'_>, ndim: usize) -> Option<Vec<usize>> {
    let Some(Arg::Ints(dims)) = call.args.get(1) else { return Some((0..ndim).collect()) };
    if dims.is_empty() {
        return Some((0..ndim).collect());
    }
    let front = |d: &i64| if *d < 0 { *d + ndim as i64 } else { *d };
    dims.iter().map(|d| usize::try_from(front(d)).ok()).collect()
}

/// The input, the output, `[outer, summed, inner]`, and the factor that sums are multiplied by.
fn parts(
    call: &Call<'_>,
    outputs: &Outputs,
    mean: bool,
) -> Option<(TensorGeometry, TensorGeometry, [usize; 3], f64)> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    if y.mem != Mem::F32 || x.sizes.contains(&0) {
        return None;
    }
    let shape @ [outer, summed, inner] = split(&x.sizes, &dims(call, x.sizes.len())?)?;
    let by = if mean { 1.0 / summed as f64 } else { 1.0 };
    (count(&y.sizes) == outer * inner).then_some((x, y, shape, by))
}

/// The sum as a sum over rows, with which a group can end; `None` for a sum over other dimensions.
fn of_rows(call: &Call<'_>, outputs: &Outputs, mean: bool) -> Option<RowSums> {
    let (from, to, [rows, n, inner], by) = parts(call, outputs, mean)?;
    (inner == 1).then_some(RowSums { from, times: None, to, rows: RowShape { rows, n, by } })
}

/// `sum` as sums over rows.
pub fn of_row_sums(call: &Call<'_>, outputs: &Outputs) -> Option<RowSums> {
    of_rows(call, outputs, false)
}

/// `mean` as sums over rows.
pub fn of_row_means(call: &Call<'_>, outputs: &Outputs) -> Option<RowSums> {
    of_rows(call, outputs, true)
}

fn summing(call: &Call<'_>, outputs: &Outputs, mean: bool) -> Option<Kernel> {
    let (x, y, [outer, summed, inner], by) = parts(call, outputs, mean)?;
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (from, to) = (data.of::<f32>(0), data.of::<f32>(1));
        if inner == 1 {
            // SAFETY: `to` is the window of the output, which has `outer` elements that only this call uses.
            let result = unsafe { to.slice(0, outer) };
            sum_rows(host, result, &RowShape { rows: outer, n: summed, by }, &|at, n, with| {
                // SAFETY: `sum_rows` asks for ranges of the input's `outer * summed` elements, which are not written.
                with(unsafe { from.read(at, n) });
            });
        } else {
            // SAFETY: `parts` checked that the windows are contiguous and have these sizes.
            unsafe { columns(host, from, to, [outer, summed, inner], by) };
        }
        true
    };
    Some(Kernel::new(smallvec![x, y], smallvec![], work))
}

/// Returns the sum of a block.
pub fn sum(x: &[f32]) -> f64 {
    let mut sum = 0.0;
    sum_of(x, &mut sum);
    sum
}

/// Returns the sum of the products of two blocks' elements.
pub fn products(a: &[f32], b: &[f32]) -> f64 {
    let mut sum = 0.0;
    dot_of(a, b, &mut sum);
    sum
}

pub fn summed(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    summing(call, outputs, false)
}

pub fn mean(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    summing(call, outputs, true)
}

/// The dot product of two vectors as a sum over rows, with which a group can end.
pub fn of_products(call: &Call<'_>, outputs: &Outputs) -> Option<RowSums> {
    let (from, times) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let (to, n) = (output(outputs)?, count(&from.sizes));
    let fits = to.mem == Mem::F32 && n > 0 && from.sizes == times.sizes;
    fits.then(|| RowSums { from, times: Some(times), to, rows: RowShape { rows: 1, n, by: 1.0 } })
}

/// The dot product of two vectors.
pub fn dot(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let RowSums { from, times, to, rows } = of_products(call, outputs)?;
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let [a, b, to] = [0, 1, 2].map(|i| data.of::<f32>(i));
        let sum = blocks(host, rows.n, &|at, n| {
            // SAFETY: `blocks` asks for ranges of the `n` elements of each vector, which are not written.
            let (a, b) = unsafe { (a.read(at, n), b.read(at, n)) };
            products(a, b)
        });
        // SAFETY: the window of the output has one element, which only this call uses.
        unsafe { *to.get() = sum as f32 };
        true
    };
    Some(Kernel::new(smallvec![from, times?, to], smallvec![], work))
}

/// `_foreach_norm(self, ord, dtype)`: Euclidean norms of tensors. PyTorch's kernel computes norms of other orders.
pub fn norms(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (Some(Arg::Tensors(n)), Some(Arg::None)) = (call.args.first(), call.args.get(2)) else { return None };
    let n = *n as usize;
    let [OutSpec::List(m), outs @ ..] = &outputs.outs[..] else { return None };
    let window = |i: usize| match operand(call, 0, i)?.0 {
        Operand::TensorGeometry(w) if w.mem == Mem::F32 && is_contiguous(&w) => Some(w),
        _ => None,
    };
    let out = |out: &OutSpec| match out {
        OutSpec::NewStorage { storage, meta, offset } => {
            new_geometry(*storage, meta, *offset).filter(|w| w.mem == Mem::F32 && count(&w.sizes) == 1)
        }
        _ => None,
    };
    let windows: Option<SmallVec<[TensorGeometry; 4]>> =
        (0..n).map(window).chain(outs.iter().map(out)).collect();
    let windows = windows.filter(|windows| *m as usize == n && windows.len() == 2 * n)?;
    let sizes: Vec<usize> = windows[..n].iter().map(|w| count(&w.sizes)).collect();
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        if f64::from_bits(params[0]) != 2.0 {
            return false;
        }
        for (i, n) in sizes.iter().enumerate() {
            let x = data.of::<f32>(i);
            let square = blocks(host, *n, &|at, n| {
                // SAFETY: `blocks` asks for ranges of the tensor's `n` elements, which are not written.
                let x = unsafe { x.read(at, n) };
                products(x, x)
            });
            // SAFETY: the window of each output has one element, which only this call uses.
            unsafe { *data.of::<f32>(sizes.len() + i).get() = square.sqrt() as f32 };
        }
        true
    };
    Some(Kernel::new(windows, smallvec![Param::Number(1, 0, Ty::F64)], work))
}

/// Returns the sum of `block(at, count)` over all blocks of `n` elements.
pub fn blocks(host: &dyn HostKernels, n: usize, block: &(dyn Fn(usize, usize) -> f64 + Sync)) -> f64 {
    if n <= BLOCK {
        return block(0, n);
    }
    let mut sums: SmallVec<[f64; 64]> = SmallVec::from_elem(0.0, n.div_ceil(BLOCK));
    let count = sums.len();
    divided(host, &mut sums, count, BLOCK, &|range, sums| {
        for (i, sum) in range.zip(sums) {
            *sum = block(i * BLOCK, BLOCK.min(n - i * BLOCK));
        }
    });
    sums.iter().sum()
}

/// Function that is given elements.
pub type Consumer<'c> = dyn FnMut(&[f32]) + 'c;

/// Computes the sum of each row. `elements(at, count, with)` calls `with` with `count` elements from element `at` on, at
/// most [`BLOCK`]: of a block of a row, or of whole rows.
pub fn sum_rows(
    host: &dyn HostKernels,
    to: &mut [f32],
    &RowShape { rows, n, by }: &RowShape,
    elements: &(dyn Fn(usize, usize, &mut Consumer<'_>) + Sync),
) {
    let block = |at: usize, n: usize| {
        let mut sum_of_block = 0.0;
        elements(at, n, &mut |x| sum_of_block = sum(x));
        sum_of_block
    };
    if rows == 1 {
        to[0] = (blocks(host, n, &block) * by) as f32;
        return;
    }
    let sums = SendPtr(to.as_mut_ptr());
    each_range(host, [rows, n], 1, n < LONG, &|begin, end| {
        // SAFETY: `begin..end` is within the rows, of which `to` has a sum each; ranges of different threads are disjoint.
        let sums = unsafe { sums.slice(begin, end - begin) };
        if n <= BLOCK {
            let at_a_time = BLOCK / n;
            for (i, sums) in sums.chunks_mut(at_a_time).enumerate() {
                let at = (begin + i * at_a_time) * n;
                elements(at, sums.len() * n, &mut |x| row_sums(x, n, by, sums));
            }
        } else {
            for (row, sum) in (begin..end).zip(sums) {
                let each = (0..n).step_by(BLOCK).map(|at| block(row * n + at, BLOCK.min(n - at)));
                *sum = (each.sum::<f64>() * by) as f32;
            }
        }
    });
}

widest! {
    /// Computes sums of rows of `n` elements, times `by`.
    fn row_sums(x: &[f32], n: usize, by: f64, to: &mut [f32]) => run_row_sums
}

#[inline(always)]
fn run_row_sums(x: &[f32], n: usize, by: f64, to: &mut [f32]) {
    if n < LONG {
        by_length!(n, short_row_sums(x, by, to));
    } else {
        for (x, to) in x.chunks_exact(n).zip(to) {
            // SAFETY: `i < x.len()`.
            *to = (float_sum(n, |i| unsafe { at(x, i) }) * by) as f32;
        }
    }
}

#[inline(always)]
fn short_row_sums<const N: usize>(x: &[f32], by: f64, to: &mut [f32]) {
    for (x, to) in x.chunks(N * ROWS).zip(to.chunks_mut(ROWS)) {
        let sums = Tile::<N>::load(x).sums(|x, _| f64::from(x));
        let sums = each_lane(&sums, |sum, _| (sum * by) as f32);
        store_each(&sums, to);
    }
}

/// Computes sums over the middle one of three dimensions, times `by`.
///
/// # Safety
/// `from` points to `[outer, summed, inner]` elements, which nobody writes during the call, and `to` to
/// `[outer, inner]`, which nobody else uses.
pub(in crate::kernels) unsafe fn columns(
    host: &dyn HostKernels,
    from: SendPtr<f32>,
    to: SendPtr<f32>,
    [outer, summed, inner]: [usize; 3],
    by: f64,
) {
    if inner <= NARROW && summed >= FEW_ROWS {
        // SAFETY: the requirements are those of this function.
        return unsafe { narrow_columns(host, from, to, [outer, summed, inner], by) };
    }
    let pieces = inner.div_ceil(COLUMNS);
    each_row(host, outer * pieces, summed * COLUMNS.min(inner), &|begin, end| {
        for piece in begin..end {
            let (o, at) = (piece / pieces, piece % pieces * COLUMNS);
            let width = COLUMNS.min(inner - at);
            // SAFETY: columns `at..at + width` are below `inner`, and `o` is below `outer`. Each piece of `to` is one
            // thread's.
            unsafe {
                let to = to.slice(o * inner + at, width);
                column_sums(from.at(o * summed * inner + at), summed, inner, by, to);
            }
        }
    });
}

/// Computes the sums of narrow matrices over their rows, block by block.
///
/// # Safety
/// The requirements are those of [`columns`].
unsafe fn narrow_columns(
    host: &dyn HostKernels,
    from: SendPtr<f32>,
    to: SendPtr<f32>,
    [outer, summed, inner]: [usize; 3],
    by: f64,
) {
    let rows = (NARROW_BLOCK / inner).min(summed);
    let blocks = summed.div_ceil(rows);
    let mut sums: Vec<[f64; NARROW]> = vec![[0.0; NARROW]; outer * blocks];
    divided(host, &mut sums, outer * blocks, rows * inner, &|range, parts| {
        for (part, sums) in range.zip(parts) {
            let (o, first) = (part / blocks, part % blocks * rows);
            let n = rows.min(summed - first) * inner;
            // SAFETY: rows `first..first + rows` of matrix `o` are among the input's elements, which are not written.
            let x = unsafe { from.read((o * summed + first) * inner, n) };
            narrow_sums(x, inner, sums);
        }
    });
    for (o, parts) in sums.chunks_exact(blocks).enumerate() {
        for column in 0..inner {
            let sum: f64 = parts.iter().map(|part| part[column]).sum();
            // SAFETY: the output has `outer * inner` elements, which nobody else uses.
            unsafe { *to.at(o * inner + column) = (sum * by) as f32 };
        }
    }
}

widest! {
    /// Adds the rows of a matrix of `width` columns.
    fn narrow_sums(x: &[f32], width: usize, sums: &mut [f64; NARROW]) => run_narrow_sums
}

/// Adds several rows at a time, as a wider matrix whose rows fill vectors.
#[inline(always)]
fn run_narrow_sums(x: &[f32], width: usize, sums: &mut [f64; NARROW]) {
    let wide = COLUMNS / width * width;
    let mut lanes = [0.0f64; COLUMNS];
    let chunks = x.chunks_exact(wide);
    let rest = chunks.remainder();
    // SAFETY: row `i` begins at `i * wide` and has `wide` elements, for each of the chunks.
    unsafe { add_rows(x.as_ptr(), chunks.len(), wide, &mut lanes[..wide]) };
    for row in lanes[..wide].chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    for row in rest.chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
}

/// Computes sums over the first and the last of three dimensions.
///
/// # Safety
/// `from` points to `[outer, channels, n]` elements, which nobody writes during the call, and `to` to `channels`
/// elements, which nobody else uses.
pub(in crate::kernels) unsafe fn channel_sums(
    host: &dyn HostKernels,
    from: SendPtr<f32>,
    to: SendPtr<f32>,
    [outer, channels, n]: [usize; 3],
) {
    each_row(host, channels, outer * n, &|begin, end| {
        for channel in begin..end {
            let block = |i: usize, at: usize| {
                // SAFETY: the range is a part of row `i * channels + channel`, which has `n` elements and is not
                // written.
                let row = unsafe { from.read((i * channels + channel) * n + at, BLOCK.min(n - at)) };
                match n {
                    SHORT.. => {
                        let mut sum = 0.0;
                        wide_sum_of(row, &mut sum);
                        sum
                    }
                    _ => row.iter().map(|x| f64::from(*x)).sum(),
                }
            };
            let sums = (0..outer).map(|i| (0..n).step_by(BLOCK).map(|at| block(i, at)).sum::<f64>());
            // SAFETY: `to` has an element per channel, and one thread alone uses each channel.
            unsafe { *to.at(channel) = sums.sum::<f64>() as f32 };
        }
    });
}

widest! {
    fn sum_of(x: &[f32], sum: &mut f64) => run_sum
}

#[inline(always)]
fn run_sum(x: &[f32], sum: &mut f64) {
    // SAFETY: `i < x.len()`.
    *sum = float_sum(x.len(), |i| unsafe { at(x, i) });
}

widest! {
    fn wide_sum_of(x: &[f32], sum: &mut f64) => run_wide_sum
}

#[inline(always)]
fn run_wide_sum(x: &[f32], sum: &mut f64) {
    // SAFETY: `i < x.len()`.
    *sum = accumulate::sum(x.len(), |i| unsafe { at(x, i) });
}

widest! {
    fn dot_of(a: &[f32], b: &[f32], sum: &mut f64) => run_dot
}

#[inline(always)]
fn run_dot(a: &[f32], b: &[f32], sum: &mut f64) {
    let n = a.len().min(b.len());
    // SAFETY: `i < n`, the smaller of both lengths.
    *sum = accumulate::products(n, |i| unsafe { at(a, i) }, |i| unsafe { at(b, i) });
}

widest! {
    /// Adds `rows` rows, each `stride` elements after the one before it, element by element, and multiplies by `by`.
    ///
    /// # Safety
    /// Each row has as many elements from `from` on as `to`, and nobody writes them during the call.
    unsafe fn column_sums(from: *const f32, rows: usize, stride: usize, by: f64, to: &mut [f32]) => run_columns
}

/// # Safety
/// The requirements are those of [`column_sums`].
#[inline(always)]
unsafe fn run_columns(from: *const f32, rows: usize, stride: usize, by: f64, to: &mut [f32]) {
    let mut sums = [0.0f64; COLUMNS];
    let sums = &mut sums[..to.len()];
    // SAFETY: the requirements are those of this function.
    unsafe { add_rows(from, rows, stride, sums) };
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = (*sum * by) as f32);
}

/// Adds `rows` rows, each `stride` elements after the one before it, to the sums.
///
/// # Safety
/// Each row has as many elements from `from` on as `sums`, and nobody writes them during the call.
#[inline(always)]
unsafe fn add_rows(from: *const f32, rows: usize, stride: usize, sums: &mut [f64]) {
    let n = sums.len();
    // SAFETY: `i` is below `rows`, and row `i` begins at `i * stride` and has `n` elements.
    let row = |i: usize| unsafe { std::slice::from_raw_parts(from.add(i * stride), n) };
    let whole = rows / COLUMN_ROWS * COLUMN_ROWS;
    for first in (0..whole).step_by(COLUMN_ROWS) {
        let rows: [&[f32]; COLUMN_ROWS] = std::array::from_fn(|i| row(first + i));
        for (i, sum) in sums.iter_mut().enumerate() {
            let [a, b, c, d] = rows.map(|row| row[i]);
            *sum += f64::from(a + b) + f64::from(c + d);
        }
    }
    for i in whole..rows {
        sums.iter_mut().zip(row(i)).for_each(|(sum, x)| *sum += f64::from(*x));
    }
}
