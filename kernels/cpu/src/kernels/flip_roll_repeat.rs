//! Tensors with the elements of another tensor at other positions: flips, rolls, repetitions and triangles.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::strided::Copy;
use crate::kernels::{MIDDLE, SMALL, contiguous, count, each_row, int, output, tensor};
use tandem_executor::host::HostKernels;
use tandem_executor::ops::arguments::{dimension, ints};
use tandem_executor::ops::express::TensorGeometry;
use tandem_executor::shapes::Dims;

/// Smallest number of bytes of a run that is copied faster by itself than by PyTorch's loop over elements.
const SHORT_RUN: usize = 32;
/// Maximum number of boxes that a rolled tensor consists of.
const MAX_BOXES: usize = 8;

/// A box of elements that is copied, with the offsets in bytes at which it begins in the input and in the output.
struct Part {
    copy: Copy,
    from: isize,
    to: isize,
}

/// The kernel that copies boxes of a tensor to its output.
fn rearranged(from: TensorGeometry, to: TensorGeometry, parts: SmallVec<[Part; 2]>) -> Kernel {
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let [from, to] = [0, 1].map(|w| data.of::<u8>(w));
        for part in &parts {
            let (from, to) =
                (SendPtr(from.get().wrapping_offset(part.from)), SendPtr(to.get().wrapping_offset(part.to)));
            each_row(host, part.copy.runs(), (part.copy.run() / 4).max(4), &|begin, end| {
                // SAFETY: the parts are inside both windows, which do not overlap; one thread alone copies each run.
                unsafe { part.copy.carry_out(from.get(), to.get(), begin, end) };
            });
        }
        true
    };
    Kernel::new(smallvec![from, to], smallvec![], work)
}

/// The input and the output, if they have the same number of dimensions and elements.
fn ends(call: &Call<'_>, outputs: &Outputs) -> Option<(TensorGeometry, TensorGeometry)> {
    let (from, to) = (tensor(call, 0)?, output(outputs)?);
    (from.mem == to.mem && from.sizes == to.sizes && !to.sizes.contains(&0)).then_some((from, to))
}

/// `flip(self, dims)`.
pub fn flip(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (from, to) = ends(call, outputs)?;
    let bytes = i64::from(from.mem.size());
    let (mut strides, mut first) = (from.strides.clone(), 0);
    for d in ints(call, 1)? {
        let d = dimension(*d, from.sizes.len())?;
        first += (from.sizes[d] - 1) * from.strides[d];
        strides[d] = -from.strides[d];
    }
    if strides.last().is_some_and(|stride| *stride < 0) && count(&to.sizes) > SMALL {
        return None;
    }
    let copy = Copy::of(&to.sizes, &strides, &to.strides, bytes);
    if copy.run() < SHORT_RUN && count(&to.sizes) > SMALL {
        return None;
    }
    let part = Part { copy, from: (first * bytes) as isize, to: 0 };
    Some(rearranged(from, to, smallvec![part]))
}

/// `roll(self, shifts, dims)`; without dims the elements are rolled in memory order.
pub fn roll(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (mut from, mut to) = ends(call, outputs)?;
    let (shifts, dims) = (ints(call, 1)?, ints(call, 2)?);
    if count(&to.sizes) > MIDDLE {
        return None;
    }
    if dims.is_empty() {
        from = contiguous(call, 0, from.mem)?;
        let n = count(&from.sizes) as i64;
        (from.sizes, from.strides) = (smallvec![n], smallvec![1]);
        (to.sizes, to.strides) = (smallvec![n], smallvec![1]);
    }
    let dims = if dims.is_empty() { &[0] } else { dims };
    if shifts.len() != dims.len() || 1 << dims.len().min(8) > MAX_BOXES {
        return None;
    }
    // Sizes and first indices of boxes, in the input and in the output. Each shift cuts the boxes in two.
    let zeros: Dims = from.sizes.iter().map(|_| 0).collect();
    let mut boxes = vec![(from.sizes.clone(), zeros.clone(), zeros)];
    for (shift, d) in shifts.iter().zip(dims) {
        let d = dimension(*d, from.sizes.len())?;
        let (size, mut cut) = (from.sizes[d], Vec::new());
        let shift = shift.rem_euclid(size);
        for (sizes, begin, end) in boxes {
            // This dimension has already been cut.
            if sizes[d] != size {
                return None;
            }
            for (n, from, to) in [(size - shift, 0, shift), (shift, size - shift, 0)] {
                let (mut sizes, mut begin, mut end) = (sizes.clone(), begin.clone(), end.clone());
                (sizes[d], begin[d], end[d]) = (n, from, to);
                cut.extend((n > 0).then_some((sizes, begin, end)));
            }
        }
        boxes = cut;
    }
    let bytes = i64::from(from.mem.size());
    let offset = |at: &Dims, strides: &Dims| {
        (at.iter().zip(strides).map(|(i, stride)| i * stride).sum::<i64>() * bytes) as isize
    };
    let part = |(sizes, begin, end): &(Dims, Dims, Dims)| Part {
        copy: Copy::of(sizes, &from.strides, &to.strides, bytes),
        from: offset(begin, &from.strides),
        to: offset(end, &to.strides),
    };
    let parts = boxes.iter().map(part).collect();
    Some(rearranged(from, to, parts))
}

/// `repeat(self, repeats)`.
pub fn repeat(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (from, to) = (tensor(call, 0)?, output(outputs)?);
    let repeats = ints(call, 1)?;
    let new = to.sizes.len().checked_sub(from.sizes.len())?;
    if from.mem != to.mem || repeats.len() != to.sizes.len() || to.sizes.contains(&0) {
        return None;
    }
    let (mut sizes, mut read, mut written) = (Dims::new(), Dims::new(), Dims::new());
    for (d, repeats) in repeats.iter().enumerate() {
        let (size, stride) = d.checked_sub(new).map_or((1, 0), |d| (from.sizes[d], from.strides[d]));
        if size * repeats != to.sizes[d] {
            return None;
        }
        sizes.extend([*repeats, size]);
        read.extend([0, stride]);
        written.extend([size * to.strides[d], to.strides[d]]);
    }
    let copy = Copy::of(&sizes, &read, &written, i64::from(from.mem.size()));
    Some(rearranged(from, to, smallvec![Part { copy, from: 0, to: 0 }]))
}

/// `tril(self, diagonal)`.
pub fn tril(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    triangle(call, outputs, |row, columns, diagonal| (0, (row + diagonal + 1).clamp(0, columns)))
}

/// `triu(self, diagonal)`.
pub fn triu(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    triangle(call, outputs, |row, columns, diagonal| ((row + diagonal).clamp(0, columns), columns))
}

/// The elements of each row in the range that `kept` returns for the row, the number of columns and the diagonal; zeros
/// elsewhere.
fn triangle(call: &Call<'_>, outputs: &Outputs, kept: fn(i64, i64, i64) -> (i64, i64)) -> Option<Kernel> {
    let (_, to) = ends(call, outputs)?;
    let from = contiguous(call, 0, to.mem)?;
    let Some(Arg::Int(_)) = call.args.get(1) else { return None };
    let diagonal = int(call, 1)?.clamp(-(1 << 40), 1 << 40);
    let [.., rows, columns] = from.sizes[..] else { return None };
    let bytes = from.mem.size() as usize;
    let all = count(&from.sizes) / columns as usize;
    let row = columns as usize * bytes;
    if row < SHORT_RUN && count(&from.sizes) > SMALL {
        return None;
    }
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let [from, to] = [0, 1].map(|w| data.of::<u8>(w));
        each_row(host, all, columns as usize, &|begin, end| {
            for i in begin..end {
                let (first, last) = kept(i as i64 % rows, columns, diagonal);
                let (first, last) = (first as usize * bytes, last.max(first) as usize * bytes);
                // SAFETY: both windows have `all` rows of `row` bytes; one thread alone writes each row.
                unsafe {
                    let (x, y) = (from.read(i * row, row), to.slice(i * row, row));
                    y[..first].fill(0);
                    y[first..last].copy_from_slice(&x[first..last]);
                    y[last..].fill(0);
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![from, to], smallvec![], work))
}
