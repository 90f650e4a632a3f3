//! Running logarithms of sums of exponentials along a dimension.
//!
//! **Why.** PyTorch's kernel takes an exponential and a logarithm of one element after another, in `f64`.
//! **Strategy.** The same in vectors: neighbouring columns, or as many rows, are accumulated side by side. Each has its
//! largest element so far, and the sum of the exponentials of all elements minus the largest one, so no exponential
//! overflows.

use smallvec::smallvec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::rows::{Division, read, written};
use crate::kernels::softmax::larger;
use crate::kernels::{contiguous, count, dimension, each_row, output};
use crate::tiles::math::{exp_f64, log_f64};
use crate::widest::widest;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;

/// Number of columns or rows of a [`Running`].
const SIDE: usize = 16;
/// Largest number of columns that a thread accumulates side by side.
const COLUMNS: usize = 4 * SIDE;
/// Number of rows, or of columns, below which PyTorch's kernel is faster.
const FEW: usize = 8;
/// Cost of an element, in additions.
const COST: usize = 24;

/// The state of columns, or of rows, after some elements of each.
#[derive(Clone, Copy)]
struct Running {
    largest: [f32; SIDE],
    /// Sums of the exponentials of all elements minus the largest one.
    sum: [f64; SIDE],
}

impl Running {
    const EMPTY: Running = Running { largest: [f32::NEG_INFINITY; SIDE], sum: [0.0; SIDE] };

    /// Adds an element to each column, and returns the logarithms.
    #[inline(always)]
    fn add(&mut self, elements: &[f32; SIDE]) -> [f32; SIDE] {
        let mut logarithms = [0.0; SIDE];
        for i in 0..SIDE {
            let (x, old, sum) = (elements[i], self.largest[i], self.sum[i]);
            let distance = (f64::from(x) - f64::from(old)).abs();
            // Equal elements may be infinite.
            let ratio = if x == old { 1.0 } else { exp_f64(-distance) };
            self.sum[i] = if x > old { sum * ratio + 1.0 } else { sum + ratio };
            self.largest[i] = larger(old, x);
            logarithms[i] = (f64::from(self.largest[i]) + log_f64(self.sum[i])) as f32;
        }
        logarithms
    }
}

widest! {
    /// Adds a row of at most [`COLUMNS`] elements to the states of its columns.
    fn add_row(states: &mut [Running], x: &[f32], y: &mut [f32]) => run_add_row
}

#[inline(always)]
fn run_add_row(states: &mut [Running], x: &[f32], y: &mut [f32]) {
    for ((state, x), y) in states.iter_mut().zip(x.chunks(SIDE)).zip(y.chunks_mut(SIDE)) {
        if let (Ok(x), Ok(y)) = (x.try_into(), <&mut [f32; SIDE]>::try_from(&mut *y)) {
            *y = state.add(x);
        } else {
            let mut elements = [0.0; SIDE];
            elements[..x.len()].copy_from_slice(x);
            y.copy_from_slice(&state.add(&elements)[..y.len()]);
        }
    }
}

widest! {
    /// Computes rows of `n` elements.
    fn scan_rows(x: &[f32], n: usize, y: &mut [f32]) => run_scan_rows
}

#[inline(always)]
fn run_scan_rows(x: &[f32], n: usize, y: &mut [f32]) {
    for (x, y) in x.chunks(SIDE * n).zip(y.chunks_mut(SIDE * n)) {
        let mut state = Running::EMPTY;
        for at in (0..n).step_by(SIDE) {
            // Elements of all rows, transposed, so that a row is read and written in pieces.
            let (mut tile, width) = ([[0.0; SIDE]; SIDE], SIDE.min(n - at));
            for (r, row) in x.chunks_exact(n).enumerate() {
                for (elements, x) in tile.iter_mut().zip(&row[at..at + width]) {
                    elements[r] = *x;
                }
            }
            for elements in &mut tile[..width] {
                *elements = state.add(elements);
            }
            for (r, row) in y.chunks_exact_mut(n).enumerate() {
                for (y, logarithms) in row[at..at + width].iter_mut().zip(&tile) {
                    *y = logarithms[r];
                }
            }
        }
    }
}

/// `logcumsumexp(self, dim)`.
pub fn logcumsumexp(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    if y.mem != Mem::F32 || y.sizes != x.sizes || x.sizes.is_empty() || x.sizes.contains(&0) {
        return None;
    }
    let dim = dimension(call, 1, x.sizes.len())?;
    let [outer, n, inner] = [count(&x.sizes[..dim]), x.sizes[dim] as usize, count(&x.sizes[dim + 1..])];
    let beside = if inner == 1 { outer } else { inner };
    if beside < FEW {
        return None;
    }
    if inner == 1 {
        let by = Division { rows: outer, n, cost: COST };
        return Kernel::of_rows(by, (read::<f32>(x), written::<f32>(y)), smallvec![], move |_, (x, y)| {
            scan_rows(x, n, y);
            true
        });
    }
    let groups = inner.div_ceil(COLUMNS);
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let [x, y] = [0, 1].map(|w| data.of::<f32>(w));
        each_row(host, outer * groups, n * inner.min(COLUMNS) * COST, &|begin, end| {
            for item in begin..end {
                let (row, column) = (item / groups, item % groups * COLUMNS);
                let width = COLUMNS.min(inner - column);
                let mut states = [Running::EMPTY; COLUMNS / SIDE];
                for i in 0..n {
                    let at = (row * n + i) * inner + column;
                    // SAFETY: both windows have `outer * n * inner` elements; one thread alone writes these columns.
                    let (x, y) = unsafe { (x.read(at, width), y.slice(at, width)) };
                    add_row(&mut states, x, y);
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![x, y], smallvec![], work))
}
