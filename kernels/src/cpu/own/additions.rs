//! Sums of many floats, in 64 bits: no result is farther away than the rounding at its end, however long a sum is.
//!
//! A product of two floats has no rounding at all in 64 bits. The order follows from the number of values alone, not from
//! the CPU's units.

/// Sums that are kept beside one another,
const LANES: usize = 32;
/// and those of them that what is left of the last lanes goes to, if it is so much.
const HALF: usize = LANES / 2;

/// A sum that values are added to.
#[derive(Clone, Copy)]
pub struct Sum {
    lanes: [f64; LANES],
    /// The sum of values that fill no lanes; apart from them, so that they stay in registers.
    rest: f64,
}

impl Sum {
    /// Of nothing.
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

    /// Adds the products of `n` pairs.
    #[inline(always)]
    pub fn add_products(&mut self, n: usize, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) {
        self.add_all(n, |i| f64::from(a(i)) * f64::from(b(i)));
    }

    /// What has been added, lanes in halves.
    #[inline(always)]
    pub fn total(&self) -> f64 {
        let half: [f64; HALF] = halved(&self.lanes);
        let [a, b, c, d] = halved::<4>(&halved::<8>(&half));
        (a + c) + (b + d) + self.rest
    }
}

/// The sums of the halves' elements.
#[inline(always)]
fn halved<const N: usize>(lanes: &[f64]) -> [f64; N] {
    let mut sums = [0.0; N];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = lanes[i] + lanes[i + N];
    }
    sums
}

/// The sum of `value(0)` to `value(n - 1)`.
#[inline(always)]
pub fn sum(n: usize, value: impl Fn(usize) -> f32) -> f64 {
    let mut sum = Sum::new();
    sum.add(n, value);
    sum.total()
}

/// The sum of the products of `n` pairs.
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
