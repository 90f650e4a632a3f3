//! Sums of many floats, accumulated in `f64`: the error of a result is that of its final rounding, however long the
//! sum. For sums that are results by themselves, few values are added as floats first, which takes half the time.
//!
//! A product of two floats is exact in `f64`. The order of the additions depends on the number of values alone, not
//! on the CPU's SIMD units.

use std::hint::black_box;

use crate::kernels::long_rows::{self, New};

/// Number of partial sums that are kept side by side.
const LANES: usize = 2 * HALF;
/// Number of partial sums that take half a vector of remaining values.
const HALF: usize = long_rows::LANES;

/// Returns the sum of `value(0)` to `value(n - 1)`, which are no floats. Fewer than `HALF` values are added in order.
#[inline(always)]
pub fn wide_sum(n: usize, value: impl Fn(usize) -> f64) -> f64 {
    if n < HALF {
        return (0..n).fold(0.0, |sum, i| sum + value(i));
    }
    // Each array is used as a whole, so that it stays in registers.
    let (mut low, mut high) = ([0.0; HALF], [0.0; HALF]);
    let mut at = 0;
    while n - at >= LANES {
        for (i, (low, high)) in low.iter_mut().zip(&mut high).enumerate() {
            *low += value(at + i);
            *high += value(at + HALF + i);
        }
        at += LANES;
    }
    if n - at >= HALF {
        for (i, low) in low.iter_mut().enumerate() {
            *low += value(at + i);
        }
        at += HALF;
    }
    if at < n {
        let new = New::after(HALF - (n - at));
        for (i, high) in high.iter_mut().enumerate() {
            *high += new.or_zero(i, value(n - HALF + i));
        }
    }
    for (low, high) in low.iter_mut().zip(high) {
        *low += high;
    }
    total(&low)
}

/// Returns the sum of `value(0)` to `value(n - 1)`.
#[inline(always)]
pub fn sum(n: usize, value: impl Fn(usize) -> f32) -> f64 {
    wide_sum(n, |i| f64::from(value(i)))
}

/// Returns the sum of `a(i) * b(i)` for `i` below `n`.
#[inline(always)]
pub fn products(n: usize, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) -> f64 {
    wide_sum(n, |i| f64::from(a(i)) * f64::from(b(i)))
}

/// Number of vectors of floats that are added before the sums are added in `f64`.
const VECTORS: usize = 8;

/// Returns the sum of `value(0)` to `value(n - 1)`, of which eight at a time are added as floats, if there are at least
/// 128. The error is below three roundings of the sum of the magnitudes, and far below in longer sums.
#[inline(always)]
pub fn float_sum(n: usize, value: impl Fn(usize) -> f32) -> f64 {
    if n < HALF {
        return sum(n, value);
    }
    let mut lanes = [0.0f64; HALF];
    let mut at = 0;
    while n - at >= VECTORS * HALF {
        for (i, lane) in lanes.iter_mut().enumerate() {
            let x = |vector: usize| value(at + vector * HALF + i);
            *lane += f64::from(((x(0) + x(1)) + (x(2) + x(3))) + ((x(4) + x(5)) + (x(6) + x(7))));
        }
        at += VECTORS * HALF;
    }
    while n - at >= HALF {
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane += f64::from(value(at + i));
        }
        at += HALF;
    }
    if at < n {
        let new = New::after(HALF - (n - at));
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane += f64::from(new.or(i, value(n - HALF + i), 0.0));
        }
    }
    total(&lanes)
}

/// Returns the sum of the lanes, added pairwise in halves.
///
/// The compiler does not see which lanes are added to which. Otherwise it keeps them in pairs in the loop before, too,
/// and adds two at a time.
#[inline(always)]
pub fn total(lanes: &[f64; HALF]) -> f64 {
    let lanes = *lanes;
    let [a, b, c, d] = halved::<4>(&halved::<8>(black_box(&lanes)));
    (a + c) + (b + d)
}

/// Adds the second half of the lanes to the first.
#[inline(always)]
fn halved<const N: usize>(lanes: &[f64]) -> [f64; N] {
    let mut sums = [0.0; N];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = lanes[i] + lanes[i + N];
    }
    sums
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sums_are_those_of_float64(
            n in prop_oneof![0usize..200, 1000usize..100_000],
            (mean, spread) in prop_oneof![Just((0.0, 1.0)), Just((1e4, 1.0)), Just((1.0, 1e-3)), Just((0.0, 1e6))],
            seed: u32,
        ) {
            let number = |i: usize, salt: u32| {
                let bits = (i as u32 ^ seed).wrapping_mul(2_654_435_761).wrapping_add(salt).wrapping_mul(2_246_822_519);
                f64::from(bits ^ bits >> 15) / f64::from(u32::MAX) * 2.0 - 1.0
            };
            let a: Vec<f32> = (0..n).map(|i| (mean + spread * number(i, 1)) as f32).collect();
            let b: Vec<f32> = (0..n).map(|i| number(i, 2) as f32).collect();
            let bound = |all: f64| n as f64 * f64::EPSILON * all;
            let exact: f64 = a.iter().map(|x| f64::from(*x)).sum();
            let all: f64 = a.iter().map(|x| f64::from(x.abs())).sum();
            prop_assert!((sum(n, |i| a[i]) - exact).abs() <= bound(all));
            let rounding = f64::from(f32::EPSILON) / 2.0;
            prop_assert!((float_sum(n, |i| a[i]) - exact).abs() <= 3.1 * rounding * all);
            let pairs = || a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (exact, all) = (pairs().sum::<f64>(), pairs().map(f64::abs).sum());
            prop_assert!((products(n, |i| a[i], |i| b[i]) - exact).abs() <= bound(all));
        }
    }
}
