//! Rows taken by their numbers, and put back.

use smallvec::smallvec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use super::pieces::MANY;
use super::{Kernel, Shared, contiguous, count, dimension, each_row, int, is_contiguous, output, tensor};
use crate::executor::HostKernels;
use crate::express::{Operand, Window, operand};
use crate::ir::Mem;

/// Takes rows of `from` to `to`; negative numbers count from the end where they may. Numbers out of range are
/// PyTorch's to refuse.
fn take(from: Window, index: Window, to: Window, negative: bool) -> Option<Kernel> {
    let rows = *from.sizes.first()?;
    let (n, each) = (count(&index.sizes), count(&from.sizes[1..]));
    if from.mem != to.mem || count(&to.sizes) != n * each || !is_contiguous(&from) || from.sizes.contains(&0)
    {
        return None;
    }
    let bytes = each * from.mem.size() as usize;
    let lowest = if negative { -rows } else { 0 };
    let work = move |host: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        let (from, to) = (Shared(data[0]), Shared(data[2]));
        // SAFETY: the caller's promise.
        let index: &[i64] = unsafe { Shared(data[1].cast::<i64>()).slice(0, n) };
        if !index.iter().all(|i| (lowest..rows).contains(i)) {
            return false;
        }
        each_row(host, n, each, &|begin, end| {
            for (at, row) in (begin..end).zip(&index[begin..end]) {
                let row = if *row < 0 { row + rows } else { *row } as usize;
                // SAFETY: as above, and the number is in range.
                unsafe { std::ptr::copy_nonoverlapping(from.at(row * bytes), to.at(at * bytes), bytes) };
            }
        });
        true
    };
    Some(Kernel { windows: smallvec![from, index, to], params: smallvec![], work: Box::new(work) })
}

/// `embedding(weight, indices, ...)`.
pub fn embedding(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let index = contiguous(call, 1, Mem::I64)?;
    take(tensor(call, 0).filter(|w| w.sizes.len() == 2)?, index, output(outputs)?, false)
}

/// `index_select(self, dim, index)` of the first dimension.
pub fn index_select(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let from = tensor(call, 0)?;
    let index = contiguous(call, 2, Mem::I64)?;
    (dimension(call, 1, from.sizes.len())? == 0).then_some(())?;
    take(from, index, output(outputs)?, false)
}

/// `tensor[index]` with one tensor of numbers.
pub fn index(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let Some(Arg::Tensors(1)) = call.args.get(1) else { return None };
    let index = match operand(call, 1, 0)?.0 {
        Operand::Window(w) if w.mem == Mem::I64 && is_contiguous(&w) => w,
        _ => return None,
    };
    take(tensor(call, 0)?, index, output(outputs)?, true)
}

/// `embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)`.
pub fn embedding_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let (grad, index) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::I64)?);
    let [rows, each] = <[i64; 2]>::try_from(&to.sizes[..]).ok()?;
    let (n, width) = (count(&index.sizes), each as usize);
    let padding = int(call, 3)?;
    if int(call, 4)? != 0 || count(&to.sizes) > MANY || to.mem != Mem::F32 || count(&grad.sizes) != n * width
    {
        return None;
    }
    let work = move |_: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        // SAFETY: the caller's promise.
        let (grad, index, to) = unsafe {
            let index: &[i64] = Shared(data[1].cast::<i64>()).slice(0, n);
            let grad: &[f32] = Shared(data[0].cast::<f32>()).slice(0, n * width);
            (grad, index, Shared(data[2].cast::<f32>()).slice(0, rows as usize * width))
        };
        if !index.iter().all(|i| (0..rows).contains(i)) {
            return false;
        }
        to.fill(0.0);
        for (i, row) in index.iter().enumerate().filter(|(_, row)| **row != padding) {
            let to = &mut to[*row as usize * width..][..width];
            for (to, grad) in to.iter_mut().zip(&grad[i * width..]) {
                *to += grad;
            }
        }
        true
    };
    Some(Kernel { windows: smallvec![grad, index, to], params: smallvec![], work: Box::new(work) })
}
