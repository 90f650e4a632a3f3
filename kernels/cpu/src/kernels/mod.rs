//! Operators that are not element-wise expressions: matrix products, reductions, normalization, copies.
//!
//! A [`MakeKernel`] returns a kernel for a call's metadata, or `None`, in which case PyTorch's kernel runs. What a
//! kernel does, including the order of its additions, depends on metadata alone. Results are therefore bitwise the
//! same for any number of threads.

mod accumulate;
pub(crate) mod attention;
pub(crate) mod cat_pad;
pub(crate) mod cells;
pub(crate) mod channel_norms;
pub(crate) mod conv;
pub(crate) mod flip_roll_repeat;
pub(crate) mod index;
mod kernel;
pub(crate) mod log_scan;
mod long_rows;
pub(crate) mod loss;
pub(crate) mod matmul;
pub(crate) mod nll_loss;
pub(crate) mod norm;
mod permuted;
pub(crate) mod pooling;
pub(crate) mod reduce;
pub(crate) mod roi_align;
mod rows;
pub(crate) mod scan;
pub(crate) mod scatter;
pub(crate) mod scratch;
pub(crate) mod short_rows;
pub(crate) mod softmax;
pub(crate) mod sort;
mod strided;

use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::{Operand, TensorGeometry, new_geometry, operand};
use tandem_executor::shapes;

pub use self::kernel::{Kernel, SendPtr, Work};

/// Function that returns a kernel for a call and the metadata of its outputs.
pub type MakeKernel = fn(&Call<'_>, &Outputs) -> Option<Kernel>;

/// The window of a tensor argument.
fn tensor(call: &Call<'_>, arg: usize) -> Option<TensorGeometry> {
    match operand(call, arg, 0)?.0 {
        Operand::TensorGeometry(window) => Some(window),
        _ => None,
    }
}

/// The window of a contiguous tensor argument with this element type.
fn contiguous(call: &Call<'_>, arg: usize, mem: Mem) -> Option<TensorGeometry> {
    tensor(call, arg).filter(|w| w.mem == mem && is_contiguous(w))
}

fn is_contiguous(window: &TensorGeometry) -> bool {
    shapes::is_contiguous(&window.sizes, &window.strides)
}

/// The window of the only output, if it is new and contiguous.
fn output(outputs: &Outputs) -> Option<TensorGeometry> {
    match &outputs.outs[..] {
        [OutSpec::NewStorage { storage, meta, offset }] if outputs.resized.is_empty() => {
            new_geometry(*storage, meta, *offset).filter(is_contiguous)
        }
        _ => None,
    }
}

/// The window of an output that is new, contiguous and of this type.
fn new_storage(outputs: &Outputs, number: usize, mem: Mem) -> Option<TensorGeometry> {
    match outputs.outs.get(number)? {
        OutSpec::NewStorage { storage, meta, offset } => {
            new_geometry(*storage, meta, *offset).filter(|w| w.mem == mem && is_contiguous(w))
        }
        _ => None,
    }
}

/// An integer argument.
fn int(call: &Call<'_>, arg: usize) -> Option<i64> {
    match call.args.get(arg)? {
        Arg::Int(i) => Some(*i),
        Arg::Bool(b) => Some(i64::from(*b)),
        _ => None,
    }
}

/// A dimension argument, as a non-negative index.
fn dimension(call: &Call<'_>, arg: usize, ndim: usize) -> Option<usize> {
    let d = int(call, arg)?;
    let d = if d < 0 { d + ndim as i64 } else { d };
    (0..ndim as i64).contains(&d).then_some(d as usize)
}

/// Number of elements.
fn count(sizes: &[i64]) -> usize {
    sizes.iter().product::<i64>() as usize
}

/// Maximum number of elements for kernels whose loops are slower than PyTorch's. They are faster on small tensors, where
/// PyTorch's dispatcher and checks cost more than the loop.
const SMALL: usize = 256;
/// Maximum number of elements for kernels that move rows and leave large tensors to PyTorch.
const MIDDLE: usize = 1 << 14;

/// Number of elements from which another thread is worth waking.
const GRAIN: f64 = (1 << 17) as f64;

/// Calls `body` with ranges of rows, on several threads if there are enough elements. `each` is the number of
/// elements of a row.
fn each_row(host: &dyn HostKernels, rows: usize, each: usize, body: &(dyn Fn(usize, usize) + Sync)) {
    let grain = GRAIN / each.max(1) as f64;
    if rows < 2 || rows as f64 <= grain { body(0, rows) } else { host.parallel(rows, grain, body) }
}
