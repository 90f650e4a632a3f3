//! Gathers and scatters: elements are taken from, put to or added at positions along a dimension. A tensor of indices
//! names the positions.
//!
//! Additions to one element happen in the order of the indices, as in PyTorch's kernels. For indices out of range,
//! PyTorch's kernel runs and raises the error.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::kernels::index::Numbers;
use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::{MIDDLE, contiguous, count, dimension, each_row, output, tensor};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::arguments::Reduce;
use tandem_executor::ops::express::{Operand, Param, TensorGeometry, operand};

/// Minimum number of adjacent columns that a thread handles together, and number of parts that more columns are split
/// into.
const COLUMNS: usize = 128;
const PARTS: usize = 8;

/// Maximum number of elements of the written tensor if each element of the source has an index: a quarter of a
/// second-level cache of 1 MiB. For larger tensors, PyTorch's kernels are faster.
const NEAR: usize = 1 << 16;

/// Cost of an index, in units of an element that is copied (2 ns and 0.1 ns on a Xeon with AVX-512).
const INDEX: usize = 16;

/// The shape of a scatter or gather: `[outer, slots, inner]` elements on the side that is indexed, and
/// `[outer, n, inner]` on the other side.
#[derive(Clone, Copy)]
struct Shape {
    outer: usize,
    slots: usize,
    n: usize,
    inner: usize,
    /// Strides of the indices along these dimensions; 0 where the indices are the same.
    strides: [usize; 3],
}

impl Shape {
    /// Whether there are more than [`MIDDLE`] indices, one for each element of the other side. In this case PyTorch's
    /// kernels are faster.
    fn is_long_column(&self) -> bool {
        self.inner == 1 && self.outer * self.n > MIDDLE
    }

    /// Cost of `n` adjacent elements.
    fn cost(&self, n: usize) -> usize {
        if self.strides[2] == 0 { n + INDEX } else { n * INDEX }
    }

    /// Calls `body` with a position on the indexed side, a position on the other side, and a number of elements. Calls
    /// for one position of the indexed side are in the order of the indices. Different threads get different positions
    /// on both sides.
    #[inline(always)]
    fn each(&self, host: &dyn HostKernels, index: &[i64], body: impl Fn(usize, usize, usize) + Sync) {
        let Shape { outer, slots, n, inner, strides: [so, sn, si] } = *self;
        let width = COLUMNS.max(inner.div_ceil(PARTS));
        let groups = inner.div_ceil(width);
        each_row(host, outer * groups, n * self.cost(inner.min(width)), &|begin, end| {
            for item in begin..end {
                let (o, first) = (item / groups, item % groups * width);
                if inner == 1 {
                    for (i, slot) in index[o * so..][..n].iter().enumerate() {
                        body(o * slots + wrapped(*slot, slots), o * n + i, 1);
                    }
                    continue;
                }
                let columns = first..inner.min(first + width);
                for i in 0..n {
                    let (row, at) = (o * so + i * sn, (o * n + i) * inner);
                    if si == 0 {
                        let slot = wrapped(index[row], slots);
                        body((o * slots + slot) * inner + first, at + first, columns.len());
                    } else {
                        for (column, slot) in columns.clone().zip(&index[row + first..]) {
                            body((o * slots + wrapped(*slot, slots)) * inner + column, at + column, 1);
                        }
                    }
                }
            }
        });
    }

    /// Copies the elements of `from` that the indices name.
    ///
    /// # Safety
    /// - `from` has the elements of the indexed side and `to` the elements of the other side, each of the size of a
    ///   `T`.
    /// - `from` and `to` do not overlap.
    /// - During the call, nobody writes `from`, and nobody else uses `to`.
    unsafe fn gather<T: Copy>(
        &self,
        host: &dyn HostKernels,
        index: &[i64],
        from: SendPtr<u8>,
        to: SendPtr<u8>,
    ) {
        let Shape { outer, slots, n, inner, strides: [so, sn, si] } = *self;
        let (from, to) = (SendPtr(from.get().cast::<T>()), SendPtr(to.get().cast::<T>()));
        each_row(host, outer * n, self.cost(inner), &|begin, end| {
            for o in begin / n..end.div_ceil(n) {
                for item in begin.max(o * n)..end.min((o + 1) * n) {
                    let row = o * so + (item - o * n) * sn;
                    // SAFETY: the indices are those of slots, and one thread alone writes an item.
                    unsafe {
                        let (from, to) = (from.at(o * slots * inner), to.at(item * inner));
                        if inner == 1 {
                            to.copy_from(from.add(index[row] as usize), 1);
                        } else if si == 0 {
                            std::ptr::copy_nonoverlapping(from.add(index[row] as usize * inner), to, inner);
                        } else {
                            for (column, slot) in index[row..row + inner].iter().enumerate() {
                                to.add(column).copy_from(from.add(*slot as usize * inner + column), 1);
                            }
                        }
                    }
                }
            }
        });
    }
}

/// An index that may count from the end.
fn wrapped(index: i64, slots: usize) -> usize {
    if index < 0 { (index + slots as i64) as usize } else { index as usize }
}

/// The indices of a call.
struct Indices {
    window: TensorGeometry,
    numbers: Numbers,
    /// Range of indices that are accepted.
    range: std::ops::Range<i64>,
}

impl Indices {
    /// The indices of a gather or scatter along dimension `dim` of a tensor with these sizes, and the shape.
    fn along(index: TensorGeometry, sizes: &[i64], dim: usize) -> Option<(Indices, Shape)> {
        let equal = |d: usize| d == dim || index.sizes[d] == sizes[d];
        if index.sizes.len() != sizes.len() || sizes.contains(&0) || !(0..sizes.len()).all(equal) {
            return None;
        }
        let [outer, inner] = [count(&sizes[..dim]), count(&sizes[dim + 1..])];
        let (slots, n) = (sizes[dim] as usize, index.sizes[dim] as usize);
        // Indices that are expanded over the inner dimensions are read once.
        let is_expanded = (dim + 1..sizes.len()).all(|d| index.strides[d] == 0 || index.sizes[d] == 1);
        let mut window = index;
        if is_expanded {
            window.sizes.truncate(dim + 1);
            window.strides.truncate(dim + 1);
        }
        let strides = if is_expanded { [n, 1, 0] } else { [n * inner, inner, 1] };
        let numbers = Numbers::of(&window)?;
        let indices = Indices { window, numbers, range: 0..slots as i64 };
        (n > 0).then_some((indices, Shape { outer, slots, n, inner, strides }))
    }

    /// Indices of rows, one for each row of the other side.
    fn of_rows(
        index: TensorGeometry,
        sizes: &[i64],
        dim: usize,
        is_wrapped: bool,
    ) -> Option<(Indices, Shape)> {
        let numbers = Numbers::of(&index)?;
        let [outer, inner] = [count(&sizes[..dim]), count(&sizes[dim + 1..])];
        let (slots, n) = (sizes[dim] as usize, count(&index.sizes));
        let range = if is_wrapped { -(slots as i64)..slots as i64 } else { 0..slots as i64 };
        let shape = Shape { outer, slots, n, inner, strides: [0, 1, 0] };
        (n > 0 && !sizes.contains(&0)).then_some((Indices { window: index, numbers, range }, shape))
    }
}

/// `gather(self, dim, index, sparse_grad)`.
pub fn gather(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (from, to) = (tensor(call, 0)?, output(outputs)?);
    let from = contiguous(call, 0, from.mem).filter(|w| w.mem == to.mem)?;
    let dim = dimension(call, 1, from.sizes.len())?;
    let index = tensor(call, 2).filter(|index| index.sizes == to.sizes)?;
    let (Indices { window, numbers, range }, shape) = Indices::along(index, &from.sizes, dim)?;
    if shape.is_long_column() {
        return None;
    }
    let bytes = from.mem.size() as usize;
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (from, to) = (data.of::<u8>(0), data.of::<u8>(2));
        // SAFETY: window 1 is the one that `numbers` was made from, and nobody writes it while the kernel runs.
        let Some(index) = (unsafe { numbers.read(data.of(1), range.clone()) }) else { return false };
        // SAFETY: the windows have elements of this size and the sizes of the shape, and do not overlap.
        unsafe {
            match bytes {
                1 => shape.gather::<u8>(host, &index, from, to),
                2 => shape.gather::<u16>(host, &index, from, to),
                4 => shape.gather::<u32>(host, &index, from, to),
                8 => shape.gather::<u64>(host, &index, from, to),
                _ => shape.gather::<[u64; 2]>(host, &index, from, to),
            }
        }
        true
    };
    Some(Kernel::new(smallvec![from, window, to], smallvec![], work))
}

/// The elements that are put to the positions.
enum Source {
    /// Elements of a contiguous window.
    TensorGeometry(TensorGeometry),
    /// A number of the call.
    Number(Param),
}

/// The kernel that writes `source` at positions of a tensor: argument 0 in place, or a copy of it. `combine` gets the
/// old element, the new element, and the number `by`, if there is one. If `start` is given, it first replaces the old
/// elements at these positions.
fn put<T: Copy + Send + Sync + 'static>(
    (call, outputs): (&Call<'_>, &Outputs),
    mem: Mem,
    (Indices { window: index, numbers, range }, shape): (Indices, Shape),
    source: Source,
    (by, number): (Option<Param>, fn(u64) -> T),
    start: Option<T>,
    combine: impl Fn(T, T, T) -> T + Send + Sync + 'static,
) -> Option<Kernel> {
    let mut windows: SmallVec<[TensorGeometry; 4]> = smallvec![index];
    let mut params: SmallVec<[Param; 2]> = smallvec![];
    let (to, before) = match &outputs.outs[..] {
        [OutSpec::Same(0)] => (contiguous(call, 0, mem)?, None),
        _ => (output(outputs)?, Some(contiguous(call, 0, mem)?)),
    };
    if to.mem != mem || before.as_ref().is_some_and(|before| before.sizes != to.sizes) {
        return None;
    }
    let all = count(&to.sizes);
    windows.push(to);
    let has_source = matches!(source, Source::TensorGeometry(_));
    match source {
        Source::TensorGeometry(window) if window.mem == mem => windows.push(window),
        Source::TensorGeometry(_) => return None,
        Source::Number(param) => params.push(param),
    }
    let before = before.map(|before| {
        windows.push(before);
        windows.len() - 1
    });
    let factor = by.map(|by| {
        params.push(by);
        params.len() - 1
    });
    // PyTorch's kernels look at a column at a time, which is faster if the slots do not fit a cache.
    if shape.strides[2] != 0 && shape.slots * shape.inner > NEAR {
        return None;
    }
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        // SAFETY: window 0 is the one that `numbers` was made from, and nobody writes it while the kernel runs.
        let Some(index) = (unsafe { numbers.read(data.of(0), range.clone()) }) else { return false };
        let to: SendPtr<T> = data.of(1);
        if let Some(before) = before {
            let before: SendPtr<T> = data.of(before);
            each_row(host, all, 1, &|begin, end| {
                // SAFETY: both windows have `all` elements and do not overlap; one thread alone writes an element.
                unsafe { to.slice(begin, end - begin).copy_from_slice(before.read(begin, end - begin)) };
            });
        }
        let value = number(params.first().copied().unwrap_or_default());
        let factor = factor.map_or(value, |i| number(params[i]));
        if let Some(start) = start {
            shape.each(host, &index, |slot, _, n| {
                // SAFETY: the position is inside the window; one thread alone writes it.
                unsafe { to.slice(slot, n) }.fill(start);
            });
        }
        let source: SendPtr<T> = if has_source { data.of(2) } else { SendPtr(std::ptr::null_mut()) };
        shape.each(host, &index, |slot, at, n| {
            // SAFETY: both positions are inside the windows, which do not overlap; one thread alone writes each.
            let to = unsafe { to.slice(slot, n) };
            if has_source {
                // SAFETY: the source has an element for each index, which nobody writes.
                let source = unsafe { source.read(at, n) };
                to.iter_mut().zip(source).for_each(|(to, x)| *to = combine(*to, *x, factor));
            } else {
                to.iter_mut().for_each(|to| *to = combine(*to, value, factor));
            }
        });
        true
    };
    Some(Kernel::new(windows, params, work))
}

fn float(bits: u64) -> f32 {
    f64::from_bits(bits) as f32
}

fn int(bits: u64) -> i64 {
    bits as i64
}

/// Type in which a kernel for these elements gets its numbers.
fn number_type(mem: Mem) -> Ty {
    if mem == Mem::I64 { Ty::I64 } else { Ty::F64 }
}

fn scattered(call: &Call<'_>, outputs: &Outputs, is_sum: bool) -> Option<Kernel> {
    let to = tensor(call, 0)?;
    let dim = dimension(call, 1, to.sizes.len())?;
    let index = tensor(call, 2)?;
    let sizes = index.sizes.clone();
    let indices = Indices::along(index, &to.sizes, dim)?;
    let is_long = indices.1.is_long_column();
    let source = match operand(call, 3, 0)?.0 {
        Operand::TensorGeometry(_) => {
            Source::TensorGeometry(contiguous(call, 3, to.mem).filter(|w| w.sizes == sizes && !is_long)?)
        }
        Operand::Number(arg, item) => Source::Number(Param::Number(arg, item, number_type(to.mem))),
        Operand::Host(_) => return None,
    };
    let is_float = matches!(call.args.get(3), Some(Arg::Float(_)));
    let both = (call, outputs);
    match to.mem {
        Mem::F32 if is_sum => put(both, to.mem, indices, source, (None, float), None, |a, b, _| a + b),
        Mem::F32 => put(both, to.mem, indices, source, (None, float), None, |_, b, _| b),
        Mem::I64 if is_sum => {
            put(both, to.mem, indices, source, (None, int), None, |a, b, _| a.wrapping_add(b))
        }
        Mem::I64 if !is_float => put(both, to.mem, indices, source, (None, int), None, |_, b, _| b),
        _ => None,
    }
}

/// `scatter(self, dim, index, src)` and `scatter(self, dim, index, value)`.
pub fn scatter(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    (call.args.len() == 4).then(|| scattered(call, outputs, false))?
}

/// `scatter_add(self, dim, index, src)`.
pub fn scatter_add(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    scattered(call, outputs, true)
}

/// `scatter_reduce(self, dim, index, src, reduce, include_self)`; means are PyTorch's.
pub fn scatter_reduce(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = tensor(call, 0)?;
    let dim = dimension(call, 1, to.sizes.len())?;
    let index = tensor(call, 2)?;
    let source = contiguous(call, 3, Mem::F32).filter(|w| w.sizes == index.sizes)?;
    let indices = Indices::along(index, &to.sizes, dim)?;
    let (Some(Arg::Str(how)), Some(Arg::Bool(includes))) = (call.args.get(4), call.args.get(5)) else {
        return None;
    };
    let (both, source) = ((call, outputs), Source::TensorGeometry(source));
    let number = (None, float as fn(u64) -> f32);
    let start = |identity: f32| (!includes).then_some(identity);
    match Reduce::of(how)? {
        Reduce::Sum => put(both, Mem::F32, indices, source, number, start(0.0), |a, b, _| a + b),
        Reduce::Prod => put(both, Mem::F32, indices, source, number, start(1.0), |a, b, _| a * b),
        // As in PyTorch's kernels, the first of two equal values stays, and NaN wins.
        Reduce::Max => put(both, Mem::F32, indices, source, number, start(f32::NEG_INFINITY), |a, b, _| {
            if a < b || b.is_nan() { b } else { a }
        }),
        Reduce::Min => put(both, Mem::F32, indices, source, number, start(f32::INFINITY), |a, b, _| {
            if b < a || b.is_nan() { b } else { a }
        }),
        Reduce::Mean => None,
    }
}

/// `index_add(self, dim, index, source, alpha)`.
pub fn index_add(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (to, index) = (tensor(call, 0)?, tensor(call, 2).filter(|index| index.sizes.len() == 1)?);
    let dim = dimension(call, 1, to.sizes.len())?;
    let source = contiguous(call, 3, Mem::F32).filter(|source| {
        let size = |d: usize| if d == dim { index.sizes[0] } else { to.sizes[d] };
        source.sizes.len() == to.sizes.len() && (0..to.sizes.len()).all(|d| source.sizes[d] == size(d))
    })?;
    let indices = Indices::of_rows(index, &to.sizes, dim, false)?;
    let alpha = Some(Param::Number(4, 0, Ty::F64));
    put(
        (call, outputs),
        Mem::F32,
        indices,
        Source::TensorGeometry(source),
        (alpha, float),
        None,
        |a, b, alpha| a + alpha * b,
    )
}

/// `index_put(self, indices, values, accumulate)` with one tensor of indices.
pub fn index_put(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let Some(Arg::Tensors(1)) = call.args.get(1) else { return None };
    let Operand::TensorGeometry(index) = operand(call, 1, 0)?.0 else { return None };
    let to = tensor(call, 0).filter(|to| !to.sizes.is_empty())?;
    let Some(Arg::Bool(is_sum)) = call.args.get(3) else { return None };
    let source = contiguous(call, 2, to.mem)
        .filter(|source| source.sizes.iter().eq(index.sizes.iter().chain(&to.sizes[1..])))?;
    let (both, source) = ((call, outputs), Source::TensorGeometry(source));
    let indices = Indices::of_rows(index, &to.sizes, 0, true)?;
    match (to.mem, is_sum) {
        (Mem::F32, true) => put(both, to.mem, indices, source, (None, float), None, |a, b, _| a + b),
        (Mem::F32, false) => put(both, to.mem, indices, source, (None, float), None, |_, b, _| b),
        (Mem::I64, true) => {
            put(both, to.mem, indices, source, (None, int), None, |a, b, _| a.wrapping_add(b))
        }
        (Mem::I64, false) => put(both, to.mem, indices, source, (None, int), None, |_, b, _| b),
        _ => None,
    }
}
