//! Running sums and products along a dimension.
//!
//! As in PyTorch's kernels, floats are accumulated in `f64`, one element after the other, so the bits are PyTorch's.

use smallvec::smallvec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::{SMALL, contiguous, count, dimension, each_row, output};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;

/// Largest number of columns that are accumulated side by side, so that rows are read in long pieces, and smallest number
/// for large tensors.
const COLUMNS: usize = 256;
const FEW: usize = 32;

/// Elements that can be scanned.
trait Element: Copy + Send + Sync + 'static {
    /// Type of the accumulator.
    type Sum: Copy;
    fn add(sum: Self::Sum, x: Self) -> Self::Sum;
    fn multiply(product: Self::Sum, x: Self) -> Self::Sum;
    fn stored(sum: Self::Sum) -> Self;
}

impl Element for f32 {
    type Sum = f64;
    fn add(sum: f64, x: f32) -> f64 {
        sum + f64::from(x)
    }
    fn multiply(product: f64, x: f32) -> f64 {
        product * f64::from(x)
    }
    fn stored(sum: f64) -> f32 {
        sum as f32
    }
}

impl Element for f64 {
    type Sum = f64;
    fn add(sum: f64, x: f64) -> f64 {
        sum + x
    }
    fn multiply(product: f64, x: f64) -> f64 {
        product * x
    }
    fn stored(sum: f64) -> f64 {
        sum
    }
}

impl Element for i64 {
    type Sum = i64;
    fn add(sum: i64, x: i64) -> i64 {
        sum.wrapping_add(x)
    }
    fn multiply(product: i64, x: i64) -> i64 {
        product.wrapping_mul(x)
    }
    fn stored(sum: i64) -> i64 {
        sum
    }
}

fn scan<T: Element>(
    call: &Call<'_>,
    outputs: &Outputs,
    mem: Mem,
    first: T::Sum,
    next: impl Fn(T::Sum, T) -> T::Sum + Send + Sync + 'static,
) -> Option<Kernel>
where
    T::Sum: Send + Sync + 'static,
{
    let (x, y) = (contiguous(call, 0, mem)?, output(outputs)?);
    if y.mem != mem || y.sizes != x.sizes || x.sizes.is_empty() || x.sizes.contains(&0) {
        return None;
    }
    let dim = dimension(call, 1, x.sizes.len())?;
    let [outer, n, inner] = [count(&x.sizes[..dim]), x.sizes[dim] as usize, count(&x.sizes[dim + 1..])];
    if inner < FEW && count(&x.sizes) > SMALL {
        return None;
    }
    let groups = inner.div_ceil(COLUMNS);
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let [x, y] = [0, 1].map(|w| data.of::<T>(w));
        each_row(host, outer * groups, n * inner.min(COLUMNS) * 4, &|begin, end| {
            for item in begin..end {
                let (row, column) = (item / groups, item % groups * COLUMNS);
                let width = COLUMNS.min(inner - column);
                let mut sums = [first; COLUMNS];
                for i in 0..n {
                    let at = (row * n + i) * inner + column;
                    // SAFETY: both windows have `outer * n * inner` elements; one thread alone writes these columns.
                    let (x, y) = unsafe { (x.read(at, width), y.slice(at, width)) };
                    for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
                        *sum = next(*sum, *x);
                        *y = T::stored(*sum);
                    }
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![x, y], smallvec![], work))
}

/// `cumsum(self, dim, dtype)`.
pub fn cumsum(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    scan::<f32>(call, outputs, Mem::F32, 0.0, Element::add)
        .or_else(|| scan::<f64>(call, outputs, Mem::F64, 0.0, Element::add))
        .or_else(|| scan::<i64>(call, outputs, Mem::I64, 0, Element::add))
}

/// `cumprod(self, dim, dtype)`.
pub fn cumprod(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    scan::<f32>(call, outputs, Mem::F32, 1.0, Element::multiply)
        .or_else(|| scan::<f64>(call, outputs, Mem::F64, 1.0, Element::multiply))
        .or_else(|| scan::<i64>(call, outputs, Mem::I64, 1, Element::multiply))
}
