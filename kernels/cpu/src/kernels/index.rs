//! Lookups of rows by index, and the gradient of an embedding.

use std::borrow::Cow;
use std::ops::Range;

use smallvec::smallvec;
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::scratch::room;
use crate::kernels::{contiguous, count, dimension, each_row, int, is_contiguous, output, tensor};
use crate::widest::widest;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::{Operand, TensorGeometry, operand};

/// The indices in a window, with any strides.
pub(super) struct Numbers {
    n: usize,
    /// Offset of each index in elements from the first one; `None` if the window is contiguous.
    offsets: Option<Vec<isize>>,
}

impl Numbers {
    /// The indices in a window of 64-bit integers.
    pub(super) fn of(window: &TensorGeometry) -> Option<Numbers> {
        if window.mem != Mem::I64 {
            return None;
        }
        let n = count(&window.sizes);
        if is_contiguous(window) {
            return Some(Numbers { n, offsets: None });
        }
        let mut offsets = vec![0];
        for (size, stride) in window.sizes.iter().zip(&window.strides) {
            let along = |offset: isize| (0..*size).map(move |i| offset + (i * stride) as isize);
            offsets = offsets.into_iter().flat_map(along).collect();
        }
        Some(Numbers { n, offsets: Some(offsets) })
    }

    /// Reads the indices; `None` if an index is out of range or there is no memory for them.
    ///
    /// # Safety
    /// - `first` points to the window.
    /// - Nobody writes the window while the indices are in use.
    pub(super) unsafe fn read<'a>(&self, first: SendPtr<i64>, range: Range<i64>) -> Option<Cow<'a, [i64]>> {
        let numbers: Cow<'a, [i64]> = match &self.offsets {
            // SAFETY: the window is contiguous and has `n` elements, which nobody writes.
            None => Cow::Borrowed(unsafe { first.read(0, self.n) }),
            Some(offsets) => {
                let mut numbers = room(self.n)?;
                // SAFETY: the offsets are those of the window's elements.
                numbers.extend(offsets.iter().map(|offset| unsafe { first.get().offset(*offset).read() }));
                Cow::Owned(numbers)
            }
        };
        let mut found = true;
        check(&numbers, &range, &mut found);
        found.then_some(numbers)
    }
}

widest! {
    /// Sets `inside` to whether all indices are in the range.
    fn check(numbers: &[i64], range: &Range<i64>, inside: &mut bool) => run_check
}

#[inline(always)]
fn run_check(numbers: &[i64], range: &Range<i64>, inside: &mut bool) {
    // Without a branch for each index, the loop is vectorized.
    *inside = numbers.iter().fold(true, |all, i| all & (*i >= range.start) & (*i < range.end));
}

/// Copies the rows of `from` that `index` names to `to`. Negative indices count from the end if `negative`. For
/// indices out of range, PyTorch's kernel runs and raises the error.
fn look_up(
    from: TensorGeometry,
    index: TensorGeometry,
    to: TensorGeometry,
    negative: bool,
) -> Option<Kernel> {
    let rows = *from.sizes.first()?;
    let numbers = Numbers::of(&index)?;
    let (n, each) = (numbers.n, count(&from.sizes[1..]));
    if from.mem != to.mem || count(&to.sizes) != n * each || !is_contiguous(&from) || from.sizes.contains(&0)
    {
        return None;
    }
    let bytes = each * from.mem.size() as usize;
    let lowest = if negative { -rows } else { 0 };
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (from, to) = (data.of::<u8>(0), data.of::<u8>(2));
        // SAFETY: window 1 is the one that `numbers` was made from, and nobody writes it while the kernel runs.
        let Some(index) = (unsafe { numbers.read(data.of(1), lowest..rows) }) else { return false };
        each_row(host, n, each, &|begin, end| {
            // SAFETY: all indices are those of rows of `from`, and `to` has a row per index. The windows do not overlap,
            // and one thread alone uses each row of the output.
            unsafe {
                let (index, to) = (&index[begin..end], to.at(begin * bytes));
                match bytes {
                    4 => copy_rows::<4>(from.get(), index, rows, to, bytes),
                    8 => copy_rows::<8>(from.get(), index, rows, to, bytes),
                    16 => copy_rows::<16>(from.get(), index, rows, to, bytes),
                    32 => copy_rows::<32>(from.get(), index, rows, to, bytes),
                    64 => copy_rows::<64>(from.get(), index, rows, to, bytes),
                    128 => copy_rows::<128>(from.get(), index, rows, to, bytes),
                    256 => copy_rows::<256>(from.get(), index, rows, to, bytes),
                    _ => copy_rows::<0>(from.get(), index, rows, to, bytes),
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![from, index, to], smallvec![], work))
}

/// Copies rows of `bytes` bytes. `BYTES` is this number, or 0 if it is not known at compile time. Negative indices
/// count from row `rows`.
///
/// # Safety
/// - `from` has the rows that `index` names, and `to` has a row per index.
/// - `from` and `to` do not overlap.
/// - Nobody else uses `to`.
#[inline(always)]
unsafe fn copy_rows<const BYTES: usize>(
    from: *const u8,
    index: &[i64],
    rows: i64,
    to: *mut u8,
    bytes: usize,
) {
    let bytes = if BYTES == 0 { bytes } else { BYTES };
    for (at, row) in index.iter().enumerate() {
        let row = if *row < 0 { row + rows } else { *row } as usize;
        // SAFETY: both rows exist, which this function requires.
        unsafe { std::ptr::copy_nonoverlapping(from.add(row * bytes), to.add(at * bytes), bytes) };
    }
}

/// `embedding(weight, indices, ...)`.
pub fn embedding(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    look_up(tensor(call, 0).filter(|w| w.sizes.len() == 2)?, tensor(call, 1)?, output(outputs)?, false)
}

/// `index_select(self, dim, index)` for the first dimension.
pub fn index_select(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let from = tensor(call, 0)?;
    let index = tensor(call, 2)?;
    (dimension(call, 1, from.sizes.len())? == 0).then_some(())?;
    look_up(from, index, output(outputs)?, false)
}

/// `take(self, index)`: elements by their row-major numbers, which count from the end if they are negative.
pub fn take(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let mut from = tensor(call, 0).filter(is_contiguous)?;
    (from.sizes, from.strides) = (smallvec![count(&from.sizes) as i64], smallvec![1]);
    look_up(from, tensor(call, 1)?, output(outputs)?, true)
}

/// `tensor[index]` with one tensor of indices.
pub fn index(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let Some(Arg::Tensors(1)) = call.args.get(1) else { return None };
    let index = match operand(call, 1, 0)?.0 {
        Operand::TensorGeometry(w) => w,
        _ => return None,
    };
    look_up(tensor(call, 0)?, index, output(outputs)?, true)
}

/// `embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)`.
pub fn embedding_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let to = output(outputs)?;
    let (grad, index) = (contiguous(call, 0, Mem::F32)?, tensor(call, 1)?);
    let [rows, each] = <[i64; 2]>::try_from(&to.sizes[..]).ok()?;
    let numbers = Numbers::of(&index)?;
    let (n, width) = (numbers.n, each as usize);
    let padding = int(call, 3)?;
    if int(call, 4)? != 0 || to.mem != Mem::F32 || count(&grad.sizes) != n * width {
        return None;
    }
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        // SAFETY: window 1 is the one that `numbers` was made from, and nobody writes it while the kernel runs.
        let Some(index) = (unsafe { numbers.read(data.of(1), 0..rows) }) else { return false };
        let (grad, to) = (data.of::<f32>(0), data.of::<f32>(2));
        each_row(host, rows as usize, width, &|begin, end| {
            // SAFETY: `to` has `rows` rows and `grad` one per index; one thread alone uses each row of `to`.
            unsafe {
                to.slice(begin * width, (end - begin) * width).fill(0.0);
                for (i, row) in index.iter().enumerate() {
                    if *row != padding && (begin..end).contains(&(*row as usize)) {
                        let to = to.slice(*row as usize * width, width);
                        to.iter_mut().zip(grad.read(i * width, width)).for_each(|(to, grad)| *to += grad);
                    }
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![grad, index, to], smallvec![], work))
}
