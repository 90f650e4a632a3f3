//! Tensors put together from pieces: those of a list, or one among values that are all the same.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::cpu::own::strided::Copy;
use crate::cpu::own::{Kernel, Shared, count, dimension, each_row, int, output, tensor};
use crate::host::HostKernels;
use crate::ir::{Mem, Ty};
use crate::ops::express::{Operand, Param, Window, fresh_window, operand};
use crate::shapes::Dims;

/// Undefined contents: nothing is done.
pub fn empty(_: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let [OutSpec::Fresh { storage, meta, offset }] = &outputs.outs[..] else { return None };
    let to = fresh_window(*storage, meta, *offset)?;
    Some(Kernel { windows: smallvec![to], params: smallvec![], work: Box::new(|_, _, _| true) })
}

/// What moving an element costs, in additions, where neighbours lie apart.
const STRIDED: usize = 4;

/// A piece of a tensor: how it is copied to it, and where it begins there, in bytes.
struct Piece {
    copy: Copy,
    at: usize,
}

impl Piece {
    /// A window of these sizes and strides, which goes to `to` from the `at`-th element on, with these strides there.
    fn of(sizes: &[i64], strides: &[i64], to: &Window, at: i64, steps: &[i64]) -> Piece {
        let bytes = i64::from(to.mem.size());
        Piece { copy: Copy::of(sizes, strides, steps, bytes), at: (at * bytes) as usize }
    }

    /// # Safety
    /// The piece begins at `from`, the tensor at `to`, and nobody else uses them.
    unsafe fn put(&self, host: &dyn HostKernels, from: *mut u8, to: *mut u8) {
        let (from, to) = (Shared(from), Shared(to));
        each_row(host, self.copy.runs(), (self.copy.run() / 4).max(STRIDED), &|begin, end| {
            // SAFETY: the caller's promise; each run is one thread's.
            unsafe { self.copy.carry_out(from.get(), to.at(self.at), begin, end) };
        });
    }
}

/// A part's sizes and strides with the whole's dimensions, of which the part may lack `dim`; the others are the same.
fn along_dimension(part: &Window, whole: &Window, dim: usize) -> Option<(Dims, Dims)> {
    let (mut sizes, mut strides) = (part.sizes.clone(), part.strides.clone());
    if sizes.len() + 1 == whole.sizes.len() {
        sizes.insert(dim, 1);
        strides.insert(dim, 0);
    }
    let fits = sizes.len() == whole.sizes.len()
        && sizes.iter().zip(&whole.sizes).enumerate().all(|(d, (a, b))| d == dim || a == b);
    fits.then_some((sizes, strides))
}

/// `cat` and `stack`: the tensors of a list side by side along a dimension, which they have or, where each is one place of
/// it, have not.
pub fn join(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let dim = dimension(call, 1, to.sizes.len())?;
    let Some(Arg::Tensors(n)) = call.args.first() else { return None };
    let window = |i: usize| match operand(call, 0, i)?.0 {
        Operand::Window(w) if w.mem == to.mem => Some(w),
        _ => None,
    };
    let windows: Option<SmallVec<[Window; 4]>> = (0..*n as usize).map(window).collect();
    let mut windows = windows?;
    let (mut pieces, mut along): (Vec<Piece>, i64) = (Vec::new(), 0);
    for window in &windows {
        let (sizes, strides) = along_dimension(window, &to, dim)?;
        pieces.push(Piece::of(&sizes, &strides, &to, along * to.strides[dim], &to.strides));
        along += sizes[dim];
    }
    if along != to.sizes[dim] {
        return None;
    }
    let work = move |host: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        for (piece, from) in pieces.iter().zip(data) {
            // SAFETY: the caller's promise.
            unsafe { piece.put(host, *from, data[pieces.len()]) };
        }
        true
    };
    windows.push(to);
    Some(Kernel { windows, params: smallvec![], work: Box::new(work) })
}

/// Bytes that are filled at a time.
const LINE: usize = 64;

/// A window among zeros, or among floats that are all the same.
fn among(window: Window, to: Window, piece: Piece, value: Option<Param>) -> Option<Kernel> {
    if window.mem != to.mem || (value.is_some() && to.mem != Mem::F32) {
        return None;
    }
    let bytes = count(&to.sizes) * to.mem.size() as usize;
    let given = value.is_some();
    let work = move |host: &dyn HostKernels, data: &[*mut u8], params: &[u64]| {
        let value = if given { f64::from_bits(params[0]) as f32 } else { 0.0 };
        let to = Shared(data[1]);
        each_row(host, bytes.div_ceil(LINE), LINE / 4, &|begin, end| {
            let (begin, end) = (begin * LINE, (end * LINE).min(bytes));
            // SAFETY: the caller's promise; each byte is one thread's.
            unsafe {
                match value.to_bits() {
                    0 => to.at(begin).write_bytes(0, end - begin),
                    _ => Shared(to.at(begin).cast::<f32>()).slice(0, (end - begin) / 4).fill(value),
                }
            }
        });
        // SAFETY: as above.
        unsafe { piece.put(host, data[0], data[1]) };
        true
    };
    let params = value.into_iter().collect();
    Some(Kernel { windows: smallvec![window, to], params, work: Box::new(work) })
}

/// Zeros, with the gradient where its elements were taken from: from the `start`-th of a dimension on, every `step`-th.
fn within(grad: Window, to: Window, dim: usize, start: i64, step: i64) -> Option<Kernel> {
    let (sizes, strides) = along_dimension(&grad, &to, dim)?;
    if sizes[dim] > 0 && start + (sizes[dim] - 1) * step >= to.sizes[dim] {
        return None;
    }
    let mut steps = to.strides.clone();
    steps[dim] *= step;
    let piece = Piece::of(&sizes, &strides, &to, start * to.strides[dim], &steps);
    among(grad, to, piece, None)
}

/// `select_backward(grad, sizes, dim, index)`.
pub fn select_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let dim = dimension(call, 2, to.sizes.len())?;
    let index = dimension(call, 3, to.sizes[dim] as usize)?;
    within(tensor(call, 0)?, to, dim, index as i64, 1)
}

/// `slice_backward(grad, sizes, dim, start, end, step)`.
pub fn slice_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let grad = tensor(call, 0).filter(|grad| grad.sizes.len() == to.sizes.len())?;
    let dim = dimension(call, 2, to.sizes.len())?;
    let size = to.sizes[dim];
    let start = int(call, 3)?;
    let start = (if start < 0 { start + size } else { start }).clamp(0, size);
    let step = int(call, 5).filter(|step| *step > 0)?;
    within(grad, to, dim, start, step)
}

/// `constant_pad_nd(self, pad, value)`: `pad` has how much comes before and behind, the last dimension first.
pub fn constant_pad(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (from, to) = (tensor(call, 0)?, output(outputs)?);
    let Some(Arg::Ints(pad)) = call.args.get(1) else { return None };
    let ndim = to.sizes.len();
    if from.sizes.len() != ndim || pad.len() > 2 * ndim || pad.iter().any(|n| *n < 0) {
        return None;
    }
    let before = (0..pad.len() / 2).map(|i| pad[2 * i] * to.strides[ndim - 1 - i]).sum();
    let piece = Piece::of(&from.sizes, &from.strides, &to, before, &to.strides);
    among(from, to, piece, Some(Param::Number(2, 0, Ty::F64)))
}
