//! Operators that are no expressions of elements: products of matrices, sums, rows, pieces.
//!
//! A rule looks at a call and at what it gives, and makes a kernel for that metadata, or refuses: then the call stays
//! PyTorch's. All that a kernel does, the order of its additions included, follows from metadata. So bits do not depend
//! on the number of threads that it runs on, nor on when it is used.

mod additions;
pub(crate) mod batch_norm;
pub(crate) mod conv;
mod gather;
mod loss;
pub(crate) mod matmul;
mod norm;
mod pieces;
mod roi_align;
mod rows;
mod scratch;
mod strided;
pub(crate) mod sums;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::host::HostKernels;
use crate::ir::Mem;
use crate::ops::express::{Operand, Param, Window, fresh_window, operand};
use crate::plan::RowSums;
use crate::shapes;

/// Computes, given the first elements of a kernel's windows and its parameters' bits. False, and nothing that matters
/// done, where PyTorch's kernel has to say what is wrong, or where there is no memory for what is kept meanwhile.
///
/// The caller promises that all windows lie in live memory and that nobody else reads or writes what is written.
pub type Work = Box<dyn Fn(&dyn HostKernels, &[*mut u8], &[u64]) -> bool + Send + Sync>;

/// An operator's kernel for a call's metadata.
pub struct Kernel {
    /// What it reads and writes, by number.
    pub windows: SmallVec<[Window; 4]>,
    /// Numbers that come with the call, by number.
    pub params: SmallVec<[Param; 2]>,
    /// What it does.
    pub work: Work,
}

/// Makes a kernel for a call and what it gives.
pub type Rule = fn(&Call<'_>, &Outputs) -> Option<Kernel>;

/// The rule of an operator, by its name, without `aten::`.
pub fn find(name: &str) -> Option<Rule> {
    Some(match name {
        "mm" => matmul::mm,
        "addmm" => matmul::addmm,
        "bmm" => matmul::bmm,
        "convolution" => conv::forward,
        "convolution_backward" => conv::backward,
        "dot" => sums::dot,
        "sum" | "sum.dim_IntList" => sums::summed,
        "mean" | "mean.dim" => sums::mean,
        "_softmax" => rows::softmax,
        "_safe_softmax" => rows::safe_softmax,
        "_log_softmax" => rows::log_softmax,
        "_softmax_backward_data" => rows::softmax_backward,
        "_log_softmax_backward_data" => rows::log_softmax_backward,
        "native_layer_norm" => norm::layer_norm,
        "native_layer_norm_backward" => norm::layer_norm_backward,
        "native_group_norm" => norm::group_norm,
        "native_group_norm_backward" => norm::group_norm_backward,
        "native_batch_norm" => batch_norm::forward,
        "native_batch_norm_backward" => batch_norm::backward,
        "empty" | "empty_strided" | "new_empty" | "new_empty_strided" | "empty_like" => pieces::empty,
        "cat" | "stack" => pieces::join,
        "select_backward" => pieces::select_backward,
        "slice_backward" => pieces::slice_backward,
        "constant_pad_nd" => pieces::constant_pad,
        "embedding" => gather::embedding,
        "embedding_dense_backward" => gather::embedding_backward,
        "index_select" => gather::index_select,
        "index.Tensor" => gather::index,
        "nll_loss_forward" => loss::forward,
        "nll_loss_backward" => loss::backward,
        "_foreach_norm.Scalar" => sums::norms,
        "torchvision::roi_align" => roi_align::forward,
        "torchvision::_roi_align_backward" => roi_align::backward,
        _ => return None,
    })
}

/// An operator as a sum over rows, by its name, without `aten::`.
pub fn row_sums(name: &str, call: &Call<'_>, outputs: &Outputs) -> Option<RowSums> {
    match name {
        "sum" | "sum.dim_IntList" => sums::of_rows(call, outputs, false),
        "mean" | "mean.dim" => sums::of_rows(call, outputs, true),
        "dot" => sums::of_products(call, outputs),
        _ => None,
    }
}

/// Whether an operator writes what its schema does not say, so that only one kernel may run.
pub fn is_impure(name: &str) -> bool {
    name == "native_batch_norm"
}

/// A tensor argument.
fn tensor(call: &Call<'_>, arg: usize) -> Option<Window> {
    match operand(call, arg, 0)?.0 {
        Operand::Window(window) => Some(window),
        _ => None,
    }
}

/// A tensor argument without gaps, in row-major order, of this element type.
fn contiguous(call: &Call<'_>, arg: usize, mem: Mem) -> Option<Window> {
    tensor(call, arg).filter(|w| w.mem == mem && is_contiguous(w))
}

fn is_contiguous(window: &Window) -> bool {
    shapes::is_contiguous(&window.sizes, &window.strides)
}

/// The only output, in row-major order.
fn output(outputs: &Outputs) -> Option<Window> {
    match &outputs.outs[..] {
        [OutSpec::Fresh { storage, meta, offset }] if outputs.resized.is_empty() => {
            fresh_window(*storage, meta, *offset).filter(is_contiguous)
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

/// A dimension argument, counted from the front.
fn dimension(call: &Call<'_>, arg: usize, ndim: usize) -> Option<usize> {
    let d = int(call, arg)?;
    let d = if d < 0 { d + ndim as i64 } else { d };
    (0..ndim as i64).contains(&d).then_some(d as usize)
}

/// Number of elements.
fn count(sizes: &[i64]) -> usize {
    sizes.iter().product::<i64>() as usize
}

/// An address that threads share; each uses other parts of what is there.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: see above.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: see above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The first element's address.
    fn get(self) -> *mut T {
        self.0
    }

    /// The `at`-th element's address.
    ///
    /// # Safety
    /// It lies in the same allocation.
    unsafe fn at(self, at: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(at) }
    }

    /// Elements from the `at`-th on.
    ///
    /// # Safety
    /// They are there, and nobody else uses them.
    unsafe fn slice<'a>(self, at: usize, n: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), n) }
    }
}

/// Elements below which a thread is not worth waking.
const GRAIN: f64 = (1 << 17) as f64;

/// Calls `body` with ranges of rows that have so many elements each.
fn each_row(host: &dyn HostKernels, rows: usize, each: usize, body: &(dyn Fn(usize, usize) + Sync)) {
    let grain = GRAIN / each.max(1) as f64;
    if rows < 2 || rows as f64 <= grain { body(0, rows) } else { host.parallel(rows, grain, body) }
}
