//! Sums of many floats, accumulated in `f64`: the error of a result is that of its final rounding, however long the
//! sum.
//!
//! A product of two floats is exact in `f64`. The order of the additions depends on the number of values alone, not
//! on the CPU's SIMD units.

/// Number of partial sums that are kept side by side.
const LANES: usize = 32;
/// Number of partial sums that take half a vector of remaining values.
const HALF: usize = LANES / 2;

/// An accumulator for floats.
#[derive(Clone, Copy)]
struct Sum {
    lanes: [f64; LANES],
    /// Sum of the values that do not fill `HALF` lanes, kept apart so that the lanes stay in registers.
    rest: f64,
}

impl Sum {
    /// Returns an empty sum.
    #[inline(always)]
    pub fn new() -> Sum {
        Sum { lanes: [0.0; LANES], rest: 0.0 }
    }

    /// Adds `value(0)` to `value(n - 1)`.
    #[inline(always)]
    fn add_all(&mut self, n: usize, value: impl Fn(usize) -> f64) {
        let (whole, halves) = (n / LANES * LANES, n / HALF * HALF);
        let mut at = 0;
        while at < whole {
            for (i, lane) in self.lanes.iter_mut().enumerate() {
                *lane += value(at + i);
            }
            at += LANES;
        }
        if whole < halves {
            for (i, lane) in self.lanes[..HALF].iter_mut().enumerate() {
                *lane += value(whole + i);
            }
        }
        for i in halves..n {
            self.rest += value(i);
        }
    }

    /// Adds `value(0)` to `value(n - 1)`.
    #[inline(always)]
    pub fn add(&mut self, n: usize, value: impl Fn(usize) -> f32) {
        self.add_all(n, |i| f64::from(value(i)));
    }

    /// Adds `a(i) * b(i)` for `i` below `n`.
    #[inline(always)]
    pub fn add_products(&mut self, n: usize, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) {
        self.add_all(n, |i| f64::from(a(i)) * f64::from(b(i)));
    }

    /// Returns the sum of the lanes, added pairwise in halves, and the rest.
    #[inline(always)]
    pub fn total(&self) -> f64 {
        let half: [f64; HALF] = halved(&self.lanes);
        let [a, b, c, d] = halved::<4>(&halved::<8>(&half));
        (a + c) + (b + d) + self.rest
    }
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

/// Returns the sum of `value(0)` to `value(n - 1)`.
#[inline(always)]
pub fn sum(n: usize, value: impl Fn(usize) -> f32) -> f64 {
    let mut sum = Sum::new();
    sum.add(n, value);
    sum.total()
}

/// Returns the sum of `value(0)` to `value(n - 1)`, which are no floats.
#[inline(always)]
pub fn wide_sum(n: usize, value: impl Fn(usize) -> f64) -> f64 {
    let mut sum = Sum::new();
    sum.add_all(n, value);
    sum.total()
}

/// Returns the sum of `a(i) * b(i)` for `i` below `n`.
#[inline(always)]
pub fn products(n: usize, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) -> f64 {
    let mut sum = Sum::new();
    sum.add_products(n, a, b);
    sum.total()
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
            let pairs = || a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (exact, all) = (pairs().sum::<f64>(), pairs().map(f64::abs).sum());
            prop_assert!((products(n, |i| a[i], |i| b[i]) - exact).abs() <= bound(all));
        }
    }
}
