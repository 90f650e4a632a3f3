//! Tensors put together from pieces, and zeros with a piece in them.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use super::{Kernel, contiguous, count, dimension, int, is_contiguous, output, tensor};
use crate::executor::HostKernels;
use crate::express::{Operand, Window, fresh_window, operand};
use crate::shapes::Dims;

/// Elements above which PyTorch's own, which shares them among threads, is used.
pub const MANY: usize = 1 << 18;

/// Undefined contents: nothing is done.
pub fn empty(_: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let [OutSpec::Fresh { storage, meta, offset }] = &outputs.outs[..] else { return None };
    let to = fresh_window(*storage, meta, *offset)?;
    Some(Kernel { windows: smallvec![to], params: smallvec![], work: Box::new(|_, _, _| true) })
}

/// `cat` and `stack`: the tensors of a list side by side along a dimension, which they have or, where each is one place of
/// it, have not.
pub fn join(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let dim = dimension(call, 1, to.sizes.len())?;
    let Some(Arg::Tensors(n)) = call.args.first() else { return None };
    let piece = |i: usize| match operand(call, 0, i)?.0 {
        Operand::Window(w) if w.mem == to.mem && is_contiguous(&w) => Some(w),
        _ => None,
    };
    let pieces: Option<SmallVec<[Window; 4]>> = (0..*n as usize).map(piece).collect();
    let mut windows = pieces?;
    // The sizes of a piece with the dimension.
    let sizes = |w: &Window| {
        let mut sizes = w.sizes.clone();
        if sizes.len() + 1 == to.sizes.len() {
            sizes.insert(dim, 1);
        }
        sizes
    };
    let all: Vec<Dims> = windows.iter().map(sizes).collect();
    let fits = |sizes: &Dims| {
        sizes.len() == to.sizes.len()
            && sizes.iter().zip(&to.sizes).enumerate().all(|(d, (a, b))| d == dim || a == b)
    };
    if !all.iter().all(fits) || count(&to.sizes) > MANY {
        return None;
    }
    let along: i64 = all.iter().map(|sizes| sizes[dim]).sum();
    if along != to.sizes[dim] {
        return None;
    }
    let inner = count(&to.sizes[dim + 1..]) * to.mem.size() as usize;
    let widths: SmallVec<[usize; 8]> = all.iter().map(|sizes| sizes[dim] as usize * inner).collect();
    let (outer, width) = (count(&to.sizes[..dim]), to.sizes[dim] as usize * inner);
    let work = move |_: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        let to = data[widths.len()];
        let mut at = 0;
        for (from, n) in data.iter().zip(&widths) {
            for i in 0..outer {
                // SAFETY: the caller's promise: a row of a piece, and its place.
                unsafe { std::ptr::copy_nonoverlapping(from.add(i * n), to.add(i * width + at), *n) };
            }
            at += n;
        }
        true
    };
    windows.push(to);
    Some(Kernel { windows, params: smallvec![], work: Box::new(work) })
}

/// Zeros, with the gradient where its elements were taken from: from the `start`-th on, every `step`-th.
fn within(grad: Window, to: Window, dim: usize, [start, step, n]: [usize; 3]) -> Option<Kernel> {
    let inner = count(&to.sizes[dim + 1..]) * to.mem.size() as usize;
    let (outer, size) = (count(&to.sizes[..dim]), to.sizes[dim] as usize);
    let last = start + n.saturating_sub(1) * step;
    let bytes = outer * size * inner;
    if grad.mem != to.mem || count(&grad.sizes) != outer * n * count(&to.sizes[dim + 1..]) {
        return None;
    }
    if n == 0 || last >= size || count(&to.sizes) > MANY {
        return None;
    }
    let work = move |_: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        let (from, to) = (data[0], data[1]);
        // SAFETY: the caller's promise; the bounds were checked above.
        unsafe {
            to.write_bytes(0, bytes);
            for o in 0..outer {
                if step == 1 {
                    let to = to.add((o * size + start) * inner);
                    std::ptr::copy_nonoverlapping(from.add(o * n * inner), to, n * inner);
                    continue;
                }
                for i in 0..n {
                    let to = to.add((o * size + start + i * step) * inner);
                    std::ptr::copy_nonoverlapping(from.add((o * n + i) * inner), to, inner);
                }
            }
        }
        true
    };
    Some(Kernel { windows: smallvec![grad, to], params: smallvec![], work: Box::new(work) })
}

/// `select_backward(grad, sizes, dim, index)`.
pub fn select_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let grad = contiguous(call, 0, to.mem)?;
    let dim = dimension(call, 2, to.sizes.len())?;
    let index = dimension(call, 3, to.sizes[dim] as usize)?;
    within(grad, to, dim, [index, 1, 1])
}

/// `slice_backward(grad, sizes, dim, start, end, step)`.
pub fn slice_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let grad = tensor(call, 0).filter(|g| g.mem == to.mem && is_contiguous(g))?;
    let dim = dimension(call, 2, to.sizes.len())?;
    let size = to.sizes[dim];
    let start = int(call, 3)?;
    let start = (if start < 0 { start + size } else { start }).clamp(0, size);
    let step = usize::try_from(int(call, 5)?).ok().filter(|step| *step > 0)?;
    let n = *grad.sizes.get(dim)? as usize;
    within(grad, to, dim, [start as usize, step, n])
}
