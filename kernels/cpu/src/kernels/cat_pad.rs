//! Tensors assembled from pieces: concatenations, and a window surrounded by a constant.

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::strided::Copy;
use crate::kernels::{count, dimension, each_row, int, output, tensor};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::express::{Operand, Param, TensorGeometry, new_geometry, operand};
use tandem_executor::shapes::Dims;

/// Outputs with undefined contents, for which nothing is computed.
pub fn empty(_: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let [OutSpec::NewStorage { storage, meta, offset }] = &outputs.outs[..] else { return None };
    let to = new_geometry(*storage, meta, *offset)?;
    Some(Kernel::new(smallvec![to], smallvec![], |_, _, _| true))
}

/// Cost of copying an element if neighbours are not adjacent in memory, in additions.
const STRIDED: usize = 4;

/// A piece of an output: how it is copied, and its offset in the output in bytes.
struct Piece {
    copy: Copy,
    at: usize,
}

impl Piece {
    /// A piece with these sizes and strides. It is copied to `to` from element `at` on, with the strides `steps`.
    fn of(sizes: &[i64], strides: &[i64], to: &TensorGeometry, at: i64, steps: &[i64]) -> Piece {
        let bytes = i64::from(to.mem.size());
        Piece { copy: Copy::of(sizes, strides, steps, bytes), at: (at * bytes) as usize }
    }

    /// Copies the piece.
    ///
    /// # Safety
    /// - `from` points to the piece, and `to` to the output.
    /// - During the call, nobody else writes the piece or uses its part of the output.
    unsafe fn put(&self, host: &dyn HostKernels, from: SendPtr<u8>, to: SendPtr<u8>) {
        each_row(host, self.copy.runs(), (self.copy.run() / 4).max(STRIDED), &|begin, end| {
            // SAFETY: the runs are within the piece and its part of the output, and each is used by one thread alone.
            unsafe { self.copy.carry_out(from.get(), to.at(self.at), begin, end) };
        });
    }
}

/// Returns the sizes and strides of a part, with the dimensions of the whole. The part may lack `dim`. In the other
/// dimensions, it must have the sizes of the whole.
fn along_dimension(part: &TensorGeometry, whole: &TensorGeometry, dim: usize) -> Option<(Dims, Dims)> {
    let (mut sizes, mut strides) = (part.sizes.clone(), part.strides.clone());
    if sizes.len() + 1 == whole.sizes.len() {
        sizes.insert(dim, 1);
        strides.insert(dim, 0);
    }
    let fits = sizes.len() == whole.sizes.len()
        && sizes.iter().zip(&whole.sizes).enumerate().all(|(d, (a, b))| d == dim || a == b);
    fits.then_some((sizes, strides))
}

/// `cat` and `stack`: joins the tensors of a list along a dimension, which is a new one for `stack`.
pub fn join(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let dim = dimension(call, 1, to.sizes.len())?;
    let Some(Arg::Tensors(n)) = call.args.first() else { return None };
    let window = |i: usize| match operand(call, 0, i)?.0 {
        Operand::TensorGeometry(w) if w.mem == to.mem => Some(w),
        _ => None,
    };
    let windows: Option<SmallVec<[TensorGeometry; 4]>> = (0..*n as usize).map(window).collect();
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
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        for (i, piece) in pieces.iter().enumerate() {
            // SAFETY: the pieces are the windows of the inputs, and `join` checked that they fit in the output.
            unsafe { piece.put(host, data.of(i), data.of(pieces.len())) };
        }
        true
    };
    windows.push(to);
    Some(Kernel::new(windows, smallvec![], work))
}

/// Number of bytes that are the unit of a thread's share of a fill.
const LINE: usize = 64;

/// A window in an output that is filled with zeros or with a number first.
fn among(window: TensorGeometry, to: TensorGeometry, piece: Piece, value: Option<Param>) -> Option<Kernel> {
    if window.mem != to.mem || (value.is_some() && to.mem != Mem::F32) {
        return None;
    }
    let bytes = count(&to.sizes) * to.mem.size() as usize;
    let given = value.is_some();
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let value = if given { f64::from_bits(params[0]) as f32 } else { 0.0 };
        let to = data.of::<u8>(1);
        each_row(host, bytes.div_ceil(LINE), LINE / 4, &|begin, end| {
            let (begin, end) = (begin * LINE, (end * LINE).min(bytes));
            // SAFETY: `to` is the window of the output, which has `bytes` bytes; one thread alone uses each byte.
            unsafe {
                match value.to_bits() {
                    0 => to.at(begin).write_bytes(0, end - begin),
                    _ => SendPtr(to.at(begin).cast::<f32>()).slice(0, (end - begin) / 4).fill(value),
                }
            }
        });
        // SAFETY: the piece is the first window and fits in the output; the threads that filled the output have
        // ended.
        unsafe { piece.put(host, data.of(0), to) };
        true
    };
    let params = value.into_iter().collect();
    Some(Kernel::new(smallvec![window, to], params, work))
}

/// The kernel that writes zeros, and the gradient at every `step`-th position of a dimension from `start` on.
fn within(grad: TensorGeometry, to: TensorGeometry, dim: usize, start: i64, step: i64) -> Option<Kernel> {
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

/// `constant_pad_nd(self, pad, value)`: `pad` has the number of elements before and after, last dimension first.
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
