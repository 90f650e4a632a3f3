//! Whether all or any elements are true, of a whole tensor or along a dimension whose elements are adjacent.

use smallvec::smallvec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::Kernel;
use crate::kernels::reduce::sums;
use crate::kernels::rows::{Division, Element, read, written};
use crate::kernels::{count, dimension, is_contiguous, output, tensor};
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::TensorGeometry;

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
    let by = Division { rows, n, cost: 1 };
    match x.mem {
        Mem::Bool => of_rows::<u8>(by, x, y, any),
        Mem::F32 => of_rows::<f32>(by, x, y, any),
        Mem::I64 => of_rows::<i64>(by, x, y, any),
        _ => None,
    }
}

fn of_rows<T: Element + PartialEq + Default>(
    by: Division,
    x: TensorGeometry,
    y: TensorGeometry,
    any: bool,
) -> Option<Kernel> {
    Kernel::of_each_row(by, (read::<T>(x), written::<u8>(y)), smallvec![], move |_, (x, y)| {
        y[0] = u8::from(row(x, any));
    })
}

/// `all(self)`, `all.dim(self, dim, keepdim)` and `_is_all_true(self)`.
pub fn all(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    reduced(call, outputs, false)
}

/// `any(self)`, `any.dim(self, dim, keepdim)` and `_is_any_true(self)`.
pub fn any(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    reduced(call, outputs, true)
}
