//! The channels-last layout: contents of a storage in another order than its tensor's strides say.
//!
//! **Why.** Convolutions compute on channels-last memory. If they reordered row-major operands and results in each call,
//! that would take a quarter to half of their time.
//! **Strategy.** Convolutions leave the contents of storages channels last. Other kernels with a form for it compute on
//! such contents, with the same bits as in row-major order. All other accesses bring the contents back to row-major
//! order first (see [`CpuDevice`](crate::device::CpuDevice)).

use crate::shared::SendPtr;
use crate::vector::{MAX_LANES, Vector, with_vectors};
use tandem_executor::host::HostKernels;
use tandem_executor::plan::Slot;
use tandem_executor::shapes::{channels_last, is_contiguous};

/// Sizes of a contiguous float tensor `[images, channels, ..]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Planes {
    /// Number of images.
    pub images: usize,
    /// Number of channels of an image.
    pub channels: usize,
    /// Number of pixels of a channel of an image.
    pub pixels: usize,
}

/// Order of elements in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// `[images, channels, pixels]`.
    RowMajor,
    /// `[images, pixels, channels]`.
    ChannelsLast,
}

impl Order {
    /// The order that is not this one.
    pub fn other(self) -> Order {
        match self {
            Order::RowMajor => Order::ChannelsLast,
            Order::ChannelsLast => Order::RowMajor,
        }
    }

    /// The order of the elements of a dense tensor; `None` if the tensor has neither order. A tensor with one channel
    /// or one pixel is row-major.
    pub fn of(sizes: &[i64], strides: &[i64]) -> Option<Order> {
        if is_contiguous(sizes, strides) {
            return Some(Order::RowMajor);
        }
        if sizes.len() <= 2 {
            return None;
        }
        let expected = channels_last(sizes);
        let fits = |d: usize| sizes[d] == 1 || strides[d] == expected[d];
        (0..sizes.len()).all(fits).then_some(Order::ChannelsLast)
    }
}

/// The form of a computation for channels-last contents. `W` is the code.
#[derive(Debug)]
pub struct OnChannelsLast<W> {
    /// For each slot, the sizes of its tensor if that is channels last.
    pub planes: Box<[Option<Planes>]>,
    /// Whether the form is used even if more bytes have to be reordered for it.
    pub preferred: bool,
    /// Code of the computation.
    pub work: W,
}

impl Planes {
    /// The sizes of a tensor with images, channels and at least one dimension of pixels; `None` if both orders are the
    /// same or the tensor is empty.
    pub fn of(sizes: &[i64]) -> Option<Planes> {
        let [images, channels, size @ ..] = sizes else { return None };
        let pixels = size.iter().product::<i64>() as usize;
        let (images, channels) = (*images as usize, *channels as usize);
        (images > 0 && channels > 1 && pixels > 1).then_some(Planes { images, channels, pixels })
    }

    /// Number of elements of the tensor.
    pub fn len(self) -> usize {
        self.images * self.channels * self.pixels
    }

    /// Number of bytes of the tensor.
    pub fn bytes(self) -> u64 {
        (self.len() * size_of::<f32>()) as u64
    }

    /// Copies a tensor to memory in which its elements are in the other order, `to_order`.
    ///
    /// # Safety
    /// - `from` and `to` point to as many floats as the tensor has.
    /// - The floats at `from` and at `to` do not overlap.
    /// - During the call, nobody else writes the floats at `from` or uses the floats at `to`.
    pub unsafe fn reorder(self, host: &dyn HostKernels, from: *const f32, to: *mut f32, to_order: Order) {
        let Planes { images, channels, pixels } = self;
        let [rows, columns] = match to_order {
            Order::ChannelsLast => [channels, pixels],
            Order::RowMajor => [pixels, channels],
        };
        let (from, to) = (SendPtr(from.cast_mut()), SendPtr(to));
        let bands = columns.div_ceil(BAND);
        let grain = (GRAIN / (rows * BAND.min(columns))) as f64;
        let body = |begin: usize, end: usize| {
            for band in begin..end {
                let (image, first) = (band / bands, band % bands * BAND);
                let at = image * rows * columns;
                // SAFETY: `image` and the columns from `first` on exist. Bands have different columns, so threads write
                // different elements.
                unsafe {
                    let width = BAND.min(columns - first);
                    transpose(from.at(at + first), to.at(at + first * rows), [rows, columns, width]);
                }
            }
        };
        if (images * bands) as f64 <= grain {
            body(0, images * bands)
        } else {
            host.parallel(images * bands, grain, &body)
        }
    }
}

/// Splits adjacent channels into as few strips of `widest`, 16, 8, 4 or 1 channels as possible. Returns the first
/// channel and the number of channels of each strip.
pub fn strips(channels: usize, widest: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let (first, left) = (next, channels - next);
        let width = [widest, 16, 8, 4, 1].into_iter().find(|width| *width <= left.min(widest))?;
        next += width;
        Some((first, width))
    })
}

/// Number of columns that are transposed together, and number of elements from which another thread is worth waking.
const BAND: usize = 64;
const GRAIN: usize = 1 << 16;
with_vectors! {
    /// Transposes `width` columns of a matrix: `[rows, width]` with `columns` elements from row to row becomes `[width,
    /// rows]`.
    ///
    /// # Safety
    /// - `from` points to the first of these columns.
    /// - `to` points to `width * rows` elements, which nobody else uses.
    unsafe fn transpose(from: *const f32, to: *mut f32, sizes: [usize; 3]) => run_transpose
}

/// # Safety
/// The requirements are those of [`transpose`], and the CPU has vectors of type `T`.
#[inline(always)]
unsafe fn run_transpose<T: Vector>(from: *const f32, to: *mut f32, [rows, columns, width]: [usize; 3]) {
    let [whole, wide] = [rows, width].map(|n| n / T::LANES * T::LANES);
    for column in (0..wide).step_by(T::LANES) {
        for row in (0..whole).step_by(T::LANES) {
            // SAFETY: the block is inside the matrix and the transposed matrix.
            unsafe {
                let mut block = [T::splat(0.0); MAX_LANES];
                for (i, line) in block.iter_mut().enumerate().take(T::LANES) {
                    *line = T::load(from.add((row + i) * columns + column));
                }
                T::transpose(&mut block);
                for (i, line) in block.iter().enumerate().take(T::LANES) {
                    line.store(to.add((column + i) * rows + row));
                }
            }
        }
    }
    for column in 0..width {
        let first = if column < wide { whole } else { 0 };
        for row in first..rows {
            // SAFETY: the element is inside both matrices.
            unsafe { *to.add(column * rows + row) = *from.add(row * columns + column) };
        }
    }
}

impl<W> OnChannelsLast<W> {
    /// The sizes of the channels-last tensor in a storage of the group.
    pub fn planes_of(&self, slots: &[Slot], place: u32) -> Option<Planes> {
        let of = slots.iter().zip(&self.planes);
        of.filter(|(slot, _)| matches!(slot, Slot::Storage(p, _) if *p == place))
            .find_map(|(_, planes)| *planes)
    }

    /// Whether no storage has both a tensor that is channels last and one that is not.
    pub fn is_consistent(&self, slots: &[Slot]) -> bool {
        let all = || slots.iter().zip(&self.planes);
        all().all(|(slot, planes)| match (slot, planes) {
            (Slot::Host(_), Some(_)) => false,
            (Slot::Storage(_, at), Some(_)) if *at != 0 => false,
            (Slot::Storage(place, _), _) => all().all(|(other, theirs)| {
                !matches!(other, Slot::Storage(p, _) if p == place) || theirs == planes
            }),
            (Slot::Host(_), None) => true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_any_window_is_found() {
        for dims in 0..=5 {
            let sizes: Vec<i64> = (2..2 + dims).collect();
            let row_major: Vec<i64> = (0..sizes.len()).map(|d| sizes[d + 1..].iter().product()).collect();
            assert_eq!(Order::of(&sizes, &row_major), Some(Order::RowMajor));
            let strided: Vec<i64> = row_major.iter().map(|stride| 2 * stride).collect();
            assert_eq!(Order::of(&sizes, &strided), (dims == 0).then_some(Order::RowMajor));
            if dims > 2 {
                assert_eq!(Order::of(&sizes, &channels_last(&sizes)), Some(Order::ChannelsLast));
            }
        }
    }

    #[test]
    fn blocks_and_their_borders_are_transposed() {
        for [rows, columns] in [[1, 5], [16, 16], [17, 33], [64, 15], [3, 200], [40, 48]] {
            let from: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
            let mut to = vec![-1.0; rows * columns];
            // SAFETY: both vectors have `rows * columns` elements.
            unsafe { transpose(from.as_ptr(), to.as_mut_ptr(), [rows, columns, columns]) };
            for (at, value) in to.iter().enumerate() {
                assert_eq!(*value, from[at % rows * columns + at / rows], "{rows}x{columns}, element {at}");
            }
        }
    }
}
