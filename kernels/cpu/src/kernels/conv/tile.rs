//! The product that all convolutions are made of: a tile of sums over several ranges, kept in registers.
//!
//! An element of row `i` and lane `l` is `sum(a[i, k] * b[k, l]) + start[i][l]` for all `k` of all segments. Rows and
//! lanes are pixels and channels, or channels and filters. The lanes are contiguous in `b`; rows may be anywhere. A sum
//! is computed in the order of the segments and of `k`, whatever the size of the tile.

use crate::vector::Vector;
use crate::widest::{Units, units};

/// Largest number of rows of a tile, for any CPU.
pub(super) const MAX_ROWS: usize = 14;
/// Largest number of lanes of a tile, for any CPU.
pub(super) const MAX_LANES: usize = 32;
/// Number of bytes of the operands that consecutive tiles read: a part of a second-level cache.
pub(super) const NEAR: usize = 1 << 18;
/// Number of multiplications that cost as much as an element of a simple loop.
pub(super) const PRODUCTS: usize = 16;
/// Offsets of rows that all have the same address.
pub(super) static SAME: [usize; MAX_ROWS] = [0; MAX_ROWS];

/// The shape of the tiles that fill the registers of a CPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    units: Units,
    /// Number of floats in a vector.
    vector: usize,
    /// Largest number of rows.
    pub(super) rows: usize,
}

/// The rows of a tile's left operand.
pub(super) enum Rows<'t> {
    /// The address of each row, either the same rows for all segments or other rows for each segment. Values for
    /// successive `k` are adjacent.
    Anywhere(&'t [*const f32]),
    /// The address of the first row. Values of successive rows are adjacent; `k` has this stride.
    Adjacent(*const f32, usize),
}

/// The operands of a tile, with all offsets and strides in floats.
pub(super) struct Tile<'t> {
    pub(super) a: Rows<'t>,
    /// Address that the offsets of segments in `b` are relative to.
    pub(super) b: *const f32,
    /// Stride of `k` in `b`.
    pub(super) b_step: usize,
    /// Offsets in the rows of `a` and in `b` of each range of `k`.
    pub(super) segments: &'t [[usize; 2]],
    /// Length of each range of `k`.
    pub(super) length: usize,
    /// Address of the values that are added to the sums, and each row's offset in them.
    pub(super) start: (*const f32, &'t [usize]),
    /// Address of the results, and each row's offset in them. The number of rows is the number of these offsets.
    pub(super) to: (*mut f32, &'t [usize]),
}

impl Shape {
    /// The shape for this CPU.
    pub(super) fn of_cpu() -> Shape {
        match units() {
            Units::Avx512 => Shape { units: Units::Avx512, vector: 16, rows: MAX_ROWS },
            Units::Avx2 => Shape { units: Units::Avx2, vector: 8, rows: 6 },
            Units::Any => Shape { units: Units::Any, vector: 4, rows: 6 },
        }
    }

    /// Number of lanes of the tile for the first of `left` channels: two vectors, or one for the last few channels.
    pub(super) fn lanes(self, left: usize) -> usize {
        if left > self.vector { 2 * self.vector } else { self.vector }
    }

    /// Computes a tile with this number of lanes, which [`Shape::lanes`] returned.
    ///
    /// # Safety
    /// - The tile has between 1 and `self.rows` rows, and `start` and `to` have an offset for each row.
    /// - All memory that the tile reads is live, and nobody writes it; `start` and `to` may be the same memory.
    /// - Nobody else uses the results.
    pub(super) unsafe fn compute(self, tile: &Tile<'_>, lanes: usize) {
        let (wide, adjacent) = (lanes > self.vector, matches!(tile.a, Rows::Adjacent(..)));
        // SAFETY: `units` detected the features of the chosen version, and the caller meets the other requirements.
        unsafe {
            match (self.units, wide, adjacent) {
                #[cfg(target_arch = "x86_64")]
                (Units::Avx512, true, false) => avx512::<2, false>(tile),
                #[cfg(target_arch = "x86_64")]
                (Units::Avx512, true, true) => avx512::<2, true>(tile),
                #[cfg(target_arch = "x86_64")]
                (Units::Avx512, false, false) => avx512::<1, false>(tile),
                #[cfg(target_arch = "x86_64")]
                (Units::Avx512, false, true) => avx512::<1, true>(tile),
                #[cfg(target_arch = "x86_64")]
                (Units::Avx2, true, false) => avx2::<2, false>(tile),
                #[cfg(target_arch = "x86_64")]
                (Units::Avx2, true, true) => avx2::<2, true>(tile),
                #[cfg(target_arch = "x86_64")]
                (Units::Avx2, false, false) => avx2::<1, false>(tile),
                #[cfg(target_arch = "x86_64")]
                (Units::Avx2, false, true) => avx2::<1, true>(tile),
                (_, true, false) => few_rows::<[f32; 4], 2, false>(tile),
                (_, true, true) => few_rows::<[f32; 4], 2, true>(tile),
                (_, false, false) => few_rows::<[f32; 4], 1, false>(tile),
                (_, false, true) => few_rows::<[f32; 4], 1, true>(tile),
            }
        }
    }
}

/// Calls [`sum`] with the tile's number of rows as a constant, which is one of `$m`.
macro_rules! by_rows {
    ($tile:ident, $vector:ty, $lanes:ident, $adjacent:ident, $($m:literal)*) => {
        match $tile.to.1.len() {
            // SAFETY: the caller meets the requirements of `Shape::compute`.
            $($m => unsafe { sum::<$vector, $m, $lanes, $adjacent>($tile) },)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}

/// # Safety
/// The requirements are those of [`Shape::compute`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<const V: usize, const ADJACENT: bool>(tile: &Tile<'_>) {
    use std::arch::x86_64::__m512;
    by_rows!(tile, __m512, V, ADJACENT, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

/// # Safety
/// The requirements are those of [`Shape::compute`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const V: usize, const ADJACENT: bool>(tile: &Tile<'_>) {
    // SAFETY: the caller meets the requirements of `Shape::compute`.
    unsafe { few_rows::<std::arch::x86_64::__m256, V, ADJACENT>(tile) }
}

/// # Safety
/// The requirements are those of [`Shape::compute`].
#[inline(always)]
unsafe fn few_rows<T: Vector, const V: usize, const ADJACENT: bool>(tile: &Tile<'_>) {
    by_rows!(tile, T, V, ADJACENT, 1 2 3 4 5 6)
}

/// # Safety
/// The requirements are those of [`Shape::compute`], with `M` rows and `V` vectors of lanes. `ADJACENT` says which kind
/// of rows the tile has, so that the compiler addresses them with few registers.
#[inline(always)]
unsafe fn sum<T: Vector, const M: usize, const V: usize, const ADJACENT: bool>(tile: &Tile<'_>) {
    let ((start, starts), (to, tos)) = (tile.start, tile.to);
    let (anywhere, first, step): (&[*const f32], _, _) = match tile.a {
        Rows::Anywhere(rows) => (rows, std::ptr::null(), 1),
        Rows::Adjacent(first, step) => (&[], first, step),
    };
    let each = if anywhere.len() == M { 0 } else { M };
    assert!(starts.len() == M && tos.len() == M);
    assert!(ADJACENT || anywhere.len() >= tile.segments.len() * each);
    // SAFETY: the rows and segments are inside the operands, and all loads and stores are of whole lanes.
    unsafe {
        let mut sums = [[T::splat(0.0); V]; M];
        for (segment, &[a, b]) in tile.segments.iter().enumerate() {
            let mut rows = [first.wrapping_add(a); M];
            if !ADJACENT {
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = anywhere.get_unchecked(segment * each + i).add(a);
                }
            }
            let mut b = tile.b.add(b);
            for k in 0..tile.length {
                let mut lanes = [T::splat(0.0); V];
                for (v, lane) in lanes.iter_mut().enumerate() {
                    *lane = T::load(b.add(v * T::LANES));
                }
                for i in 0..M {
                    let x = if ADJACENT { *rows[0].add(k * step + i) } else { *rows[i].add(k) };
                    for v in 0..V {
                        sums[i][v] = T::splat(x).times_plus(lanes[v], sums[i][v]);
                    }
                }
                b = b.add(tile.b_step);
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                let start = T::load(start.add(*starts.get_unchecked(i) + v * T::LANES));
                sum.plus(start).store(to.add(*tos.get_unchecked(i) + v * T::LANES));
            }
        }
    }
}
