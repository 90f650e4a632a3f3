//! Whether all or any elements are true, of a whole tensor or along a dimension whose elements are adjacent.

use smallvec::smallvec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::reduce::sums;
use crate::kernels::{count, dimension, each_row, is_contiguous, output, tensor};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;

/// Maximum number of elements of a row. One thread looks at all of them.
const LONGEST: usize = 1 << 16;
/// Number of elements between two decisions to stop.
const PIECE: usize = 256;

/// Whether `any` element of a row is true, or all are.
fn row<T: Copy + PartialEq + Default>(x: &[T], any: bool) -> bool {
    let decides = |piece: &[T]| piece.iter().fold(false, |found, x| found | ((*x != T::default()) == any));
    x.chunks(PIECE).any(decides) == any
}

fn reduced(call: &Call<'_>, outputs: &Outputs, any: bool) -> Option<Kernel> {
    let (x, y) = (tensor(call, 0).filter(is_contiguous)?, output(outputs)?);
    let dims = match call.args.get(1) {
        None => (0..x.sizes.len()).collect(),
        Some(Arg::Int(_)) => vec![dimension(call, 1, x.sizes.len())?],
        _ => return None,
    };
    let [rows, n, 1] = sums::split(&x.sizes, &dims)? else { return None };
    if y.mem != Mem::Bool || count(&y.sizes) != rows || x.sizes.contains(&0) || n > LONGEST {
        return None;
    }
    let mem = x.mem;
    if !matches!(mem, Mem::Bool | Mem::F32 | Mem::I64) {
        return None;
    }
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        each_row(host, rows, n, &|begin, end| {
            for i in begin..end {
                // SAFETY: the input has `rows` rows of `n` elements of this format, which nobody writes, and the output
                // a byte for each row, which one thread alone writes.
                unsafe {
                    let result = match mem {
                        Mem::F32 => row(data.of::<f32>(0).read(i * n, n), any),
                        Mem::I64 => row(data.of::<i64>(0).read(i * n, n), any),
                        _ => row(data.of::<u8>(0).read(i * n, n), any),
                    };
                    *data.of::<u8>(1).at(i) = u8::from(result);
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![x, y], smallvec![], work))
}

/// `all(self)`, `all.dim(self, dim, keepdim)` and `_is_all_true(self)`.
pub fn all(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    reduced(call, outputs, false)
}

/// `any(self)`, `any.dim(self, dim, keepdim)` and `_is_any_true(self)`.
pub fn any(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    reduced(call, outputs, true)
}
