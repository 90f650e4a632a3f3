//! Rows of few elements. A kernel computes 16 rows at a time, each in a SIMD lane of its own, since code for one row
//! would spend most of its time on calls and on filling vectors.
//!
//! The elements of a row are added in their order, as [`super::accumulate`] adds so few elements. Results are bitwise
//! the same as in a kernel for one row.

use crate::kernels::each_row;
use tandem_executor::host::HostKernels;

/// Smallest number of elements of a row that is not short.
pub const LONG: usize = 16;
/// Number of rows that are computed at a time.
pub const ROWS: usize = 16;

/// An element, or a result, of each row.
pub type Lanes<T = f32> = [T; ROWS];

/// The results of `value(x, r)` for the lanes `x`.
///
/// The standard library's `map` of an array would not do: it is compiled for any CPU of the architecture, and there each
/// fused multiply-add in `value` would be a call of a function of libm.
#[inline(always)]
pub fn each_lane<A: Copy, B: Copy + Default>(lanes: &Lanes<A>, value: impl Fn(A, usize) -> B) -> Lanes<B> {
    let mut results = [B::default(); ROWS];
    for (r, (result, x)) in results.iter_mut().zip(lanes).enumerate() {
        *result = value(*x, r);
    }
    results
}

/// Stores a result of each row, for as many rows as there is room for in `to`.
#[inline(always)]
pub fn store_each(lanes: &Lanes, to: &mut [f32]) {
    // A store of all lanes is one of whole vectors, which the results are then computed in.
    match to.first_chunk_mut::<ROWS>() {
        Some(to) => *to = *lanes,
        None => to.copy_from_slice(&lanes[..to.len()]),
    }
}

/// Calls a function of rows of `n` elements, fewer than [`LONG`], compiled for that number: `f(..)` is `f::<7>(..)` for 7.
/// The compiler transposes rows of a constant length by shuffles.
macro_rules! by_length {
    ($n:expr, $function:ident($($arg:expr),* $(,)?)) => {
        match $n {
            1 => $function::<1>($($arg),*),
            2 => $function::<2>($($arg),*),
            3 => $function::<3>($($arg),*),
            4 => $function::<4>($($arg),*),
            5 => $function::<5>($($arg),*),
            6 => $function::<6>($($arg),*),
            7 => $function::<7>($($arg),*),
            8 => $function::<8>($($arg),*),
            9 => $function::<9>($($arg),*),
            10 => $function::<10>($($arg),*),
            11 => $function::<11>($($arg),*),
            12 => $function::<12>($($arg),*),
            13 => $function::<13>($($arg),*),
            14 => $function::<14>($($arg),*),
            15 => $function::<15>($($arg),*),
            n => unreachable!("rows of {n} elements are not short"),
        }
    };
}
pub(in crate::kernels) use by_length;

/// The elements of up to [`ROWS`] rows of `N` elements, transposed.
pub struct Tile<const N: usize> {
    elements: [Lanes; N],
}

impl<const N: usize> Tile<N> {
    /// Loads up to [`ROWS`] rows. The lanes of missing rows are zero.
    #[inline(always)]
    pub fn load(rows: &[f32]) -> Self {
        let mut elements = [[0.0; ROWS]; N];
        let (rows, _) = rows.as_chunks::<N>();
        if let Some(rows) = rows.first_chunk::<ROWS>() {
            for (i, lanes) in elements.iter_mut().enumerate() {
                for (x, row) in lanes.iter_mut().zip(rows) {
                    *x = row[i];
                }
            }
        } else {
            for (r, row) in rows.iter().enumerate() {
                for (lanes, x) in elements.iter_mut().zip(row) {
                    lanes[r] = *x;
                }
            }
        }
        Tile { elements }
    }

    /// Stores as many rows as there is room for in `rows`.
    #[inline(always)]
    pub fn store(&self, rows: &mut [f32]) {
        let (rows, _) = rows.as_chunks_mut::<N>();
        if let Some(rows) = rows.first_chunk_mut::<ROWS>() {
            // The number of rows is a constant here.
            self.store_rows(rows);
        } else {
            self.store_rows(rows);
        }
    }

    #[inline(always)]
    fn store_rows(&self, rows: &mut [[f32; N]]) {
        for (r, row) in rows.iter_mut().enumerate() {
            for (x, lanes) in row.iter_mut().zip(&self.elements) {
                *x = lanes[r];
            }
        }
    }

    /// The elements of all rows, one place of the rows after the other.
    #[inline(always)]
    pub fn places(&self) -> &[Lanes; N] {
        &self.elements
    }

    /// Replaces each element `x` of lane `r` by `value(x, r)`.
    #[inline(always)]
    pub fn update(&mut self, value: impl Fn(f32, usize) -> f32) {
        for lanes in &mut self.elements {
            for (r, x) in lanes.iter_mut().enumerate() {
                *x = value(*x, r);
            }
        }
    }

    /// Replaces each element `x` of lane `r` by `value(x, y, r)`, where `y` is the other tile's element.
    #[inline(always)]
    pub fn combine(&mut self, other: &Self, value: impl Fn(f32, f32, usize) -> f32) {
        for (lanes, others) in self.elements.iter_mut().zip(other.places()) {
            for (r, (x, y)) in lanes.iter_mut().zip(others).enumerate() {
                *x = value(*x, *y, r);
            }
        }
    }

    /// Sums of `value(x, r)` over the elements `x` of each row `r`.
    #[inline(always)]
    pub fn sums(&self, value: impl Fn(f32, usize) -> f64) -> Lanes<f64> {
        let mut sums = [0.0; ROWS];
        for lanes in self.places() {
            for (r, (sum, x)) in sums.iter_mut().zip(lanes).enumerate() {
                *sum += value(*x, r);
            }
        }
        sums
    }

    /// Sums of the products of both tiles' elements.
    #[inline(always)]
    pub fn products(&self, other: &Self) -> Lanes<f64> {
        let mut sums = [0.0; ROWS];
        for (a, b) in self.places().iter().zip(other.places()) {
            for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
                *sum += f64::from(*a) * f64::from(*b);
            }
        }
        sums
    }

    /// Folds the elements of each row by `better`, in order.
    #[inline(always)]
    pub fn folded(&self, better: impl Fn(f32, f32) -> f32) -> Lanes {
        let mut best = self.elements[0];
        for lanes in &self.elements[1..] {
            for (best, x) in best.iter_mut().zip(lanes) {
                *best = better(*best, *x);
            }
        }
        best
    }
}

/// Calls `body` with ranges of `rows` rows of `n` elements, on several threads if there are enough. Ranges of short rows
/// begin at multiples of [`ROWS`]. `cost` is the number of additions that an element takes.
pub fn each_range(
    host: &dyn HostKernels,
    [rows, n]: [usize; 2],
    cost: usize,
    is_short: bool,
    body: &(dyn Fn(usize, usize) + Sync),
) {
    let at_a_time = if is_short { ROWS } else { 1 };
    let ranges = rows.div_ceil(at_a_time);
    each_row(host, ranges, n * cost * at_a_time, &|begin, end| {
        body(begin * at_a_time, rows.min(end * at_a_time))
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::accumulate;

    fn values() -> impl Strategy<Value = (usize, Vec<f32>)> {
        let element = prop_oneof![
            8 => -1e3f32..1e3,
            1 => Just(-0.0),
            1 => Just(f32::INFINITY),
            1 => Just(f32::NEG_INFINITY),
            1 => Just(f32::NAN)
        ];
        (1..LONG, 1..=ROWS)
            .prop_flat_map(move |(n, rows)| (Just(n), proptest::collection::vec(element.clone(), n * rows)))
    }

    fn store<const N: usize>(x: &[f32], y: &mut [f32]) {
        Tile::<N>::load(x).store(y);
    }

    fn sums<const N: usize>(x: &[f32]) -> [Lanes<f64>; 2] {
        let tile = Tile::<N>::load(x);
        [tile.sums(|x, _| f64::from(x)), tile.products(&tile)]
    }

    proptest! {
        #[test]
        fn rows_are_stored_as_they_were_loaded((n, x) in values()) {
            let mut y = vec![1.0; x.len()];
            by_length!(n, store(&x, &mut y));
            prop_assert_eq!(
                x.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                y.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
            );
        }

        #[test]
        fn sums_have_the_bits_of_sums_of_single_rows((n, x) in values()) {
            let [sums, products] = by_length!(n, sums(&x));
            for (r, row) in x.chunks_exact(n).enumerate() {
                let bits = |sum: f64| if sum.is_nan() { f64::NAN.to_bits() } else { sum.to_bits() };
                prop_assert_eq!(bits(sums[r]), bits(accumulate::sum(n, |i| row[i])));
                prop_assert_eq!(bits(products[r]), bits(accumulate::products(n, |i| row[i], |i| row[i])));
            }
        }
    }
}
