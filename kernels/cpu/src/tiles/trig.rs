//! Circular and hyperbolic functions, their inverses, and the remainder of a division, for `f32`.
//!
//! As in [`math`](super::math), each function is straight-line arithmetic that a compiler can turn into SIMD code. The
//! functions compute in `f64`, whose additional bits take the place of the compensated sums that `f32` would need, so
//! results are rounded once and errors stay below 0.51 ulp. Bounds were measured against `f64` functions. NaN inputs
//! return NaN, and `-0.0` keeps its sign as in C99.
//!
//! [`sin`], [`cos`] and [`tan`] reduce their argument by a multiple of pi/2 and are right below [`REDUCED`] only;
//! [`fmod`] is right for quotients that [`divides`] accepts. The `_any` variants cover all inputs with the same
//! results, but prevent vectorization.

use std::f64::consts::{FRAC_2_PI, FRAC_PI_2, LN_2, PI};

use crate::tiles::math::{MAGIC_F64, POW_LOG2_POLY, horner_f64};

/// Magnitude from which the reduction by pi/2 is not exact enough.
pub const REDUCED: f32 = 1_073_741_824.0;

/// Error of the rounded `FRAC_PI_2`.
const FRAC_PI_2_LO: f64 = 6.123233995736766e-17;
/// Error of the rounded `LN_2`.
const LN_2_LO: f64 = 2.3190468138462996e-17;

/// Magnitude below which an odd function with the cubic term `x^3/3` or less rounds to its argument.
const TINY: f32 = 1.0e-4;
/// Magnitude below which two terms of the series of `asinh` and `atanh` suffice.
const SMALL: f64 = 5.0e-4;

/// `(sin(r)/r - 1) / r^2` in `r^2`, for `|r| <= pi/4`, with an error of 2^-45.
const SIN_POLY: [f64; 5] = [
    -0.1666666666666387,
    0.00833333333107021,
    -0.00019841266908224796,
    2.7555988280021416e-06,
    -2.4805390945766067e-08,
];
/// `(cos(r) - 1 + r^2/2) / r^4` in `r^2`, for `|r| <= pi/4`, with an error of 2^-38.
const COS_POLY: [f64; 4] =
    [0.041666666664311826, -0.0013888887668370663, 2.480059840835012e-05, -2.730070403808665e-07];
/// `(asin(x)/x - 1) / x^2` in `x^2`, for `|x| <= 1/2`, with an error of 2^-35.
const ASIN_POLY: [f64; 8] = [
    0.1666666666549084,
    0.07500000600759216,
    0.04464235707939134,
    0.030397671953511674,
    0.022131964555376638,
    0.0193093461897726,
    0.005433409887231671,
    0.02931732560480542,
];
/// `atan(x)/x` in `x^2`, for `|x| <= 1`, with an error of 2^-36.
const ATAN_POLY: [f64; 13] = [
    0.9999999999887381,
    -0.3333333295165722,
    0.19999978336217084,
    -0.1428522560816021,
    0.11105306732424464,
    -0.09049179093720577,
    0.07495262378099696,
    -0.06022196387937433,
    0.04364658944281667,
    -0.02600599597760862,
    0.011427633277375594,
    -0.0031954252407363944,
    0.00041922786011272897,
];
/// `(e^r - 1 - r) / r^2` on `|r| <= ln(2)/2`, with an error of 2^-40.
const EXP_POLY: [f64; 8] = [
    0.49999999999954975,
    0.16666666666662575,
    0.04166666678652787,
    0.008333333344226802,
    0.0013888839037847843,
    0.0001984122453356812,
    2.4867918601290165e-05,
    2.7617608788569917e-06,
];
/// `sinh(x)/x` in `x^2`, for `|x| <= 1`: its Maclaurin series.
const SINH_POLY: [f64; 6] = [1.0, 1.0 / 6.0, 1.0 / 120.0, 1.0 / 5040.0, 1.0 / 362_880.0, 1.0 / 39_916_800.0];

const TWO_THIRDS_BITS: u64 = 0x3fe5_5555_5555_5555;

/// `(sin(r), cos(r), n)` with `x = n*pi/2 + r` and `|r| <= pi/4`, for `|x| < REDUCED`. Only the low bits of `n` are
/// meaningful.
#[inline(always)]
fn reduced(x: f32) -> (f64, f64, u64) {
    let x = f64::from(x);
    let t = x.mul_add(FRAC_2_PI, MAGIC_F64);
    let n = t - MAGIC_F64;
    let r = n.mul_add(-FRAC_PI_2_LO, n.mul_add(-FRAC_PI_2, x));
    let z = r * r;
    let sin = (r * z).mul_add(horner_f64(z, SIN_POLY), r);
    let cos = (z * z).mul_add(horner_f64(z, COS_POLY), z.mul_add(-0.5, 1.0));
    (sin, cos, t.to_bits())
}

/// Sine, for `|x| < REDUCED`.
#[inline(always)]
pub fn sin(x: f32) -> f32 {
    let (sin, cos, n) = reduced(x);
    let y = if n & 1 == 0 { sin } else { cos };
    let y = if n & 2 == 0 { y } else { -y };
    if x.abs() < TINY { x } else { y as f32 }
}

/// Cosine, for `|x| < REDUCED`.
#[inline(always)]
pub fn cos(x: f32) -> f32 {
    let (sin, cos, n) = reduced(x);
    let y = if n & 1 == 0 { cos } else { sin };
    let negative = n.wrapping_add(1) & 2 != 0;
    (if negative { -y } else { y }) as f32
}

/// Tangent, for `|x| < REDUCED`.
#[inline(always)]
pub fn tan(x: f32) -> f32 {
    let (sin, cos, n) = reduced(x);
    let (up, down) = if n & 1 == 0 { (sin, cos) } else { (-cos, sin) };
    if x.abs() < TINY { x } else { (up / down) as f32 }
}

/// Sine.
pub fn sin_any(x: f32) -> f32 {
    if x.abs() < REDUCED { sin(x) } else { f64::from(x).sin() as f32 }
}

/// Cosine.
pub fn cos_any(x: f32) -> f32 {
    if x.abs() < REDUCED { cos(x) } else { f64::from(x).cos() as f32 }
}

/// Tangent.
pub fn tan_any(x: f32) -> f32 {
    if x.abs() < REDUCED { tan(x) } else { f64::from(x).tan() as f32 }
}

/// `(p, s)` with `asin(a) = p` if `!s`, else `asin(a) = pi/2 - 2*p`, for `a = |x|`.
#[inline(always)]
fn asin_part(x: f32) -> (f64, bool) {
    let a = f64::from(x.abs());
    let large = a > 0.5;
    let z = if large { (1.0 - a) * 0.5 } else { a * a };
    let s = if large { z.sqrt() } else { a };
    ((s * z).mul_add(horner_f64(z, ASIN_POLY), s), large)
}

/// Arc sine.
#[inline(always)]
pub fn asin(x: f32) -> f32 {
    let (p, large) = asin_part(x);
    ((if large { FRAC_PI_2 - 2.0 * p } else { p }) as f32).copysign(x)
}

/// Arc cosine.
#[inline(always)]
pub fn acos(x: f32) -> f32 {
    let (p, large) = asin_part(x);
    let twice = if x < 0.0 { PI - 2.0 * p } else { 2.0 * p };
    let once = FRAC_PI_2 - p.copysign(f64::from(x));
    (if large { twice } else { once }) as f32
}

/// `atan(q)` for `0 <= q <= 1`.
#[inline(always)]
fn atan_unit(q: f64) -> f64 {
    q * horner_f64(q * q, ATAN_POLY)
}

/// Arc tangent.
#[inline(always)]
pub fn atan(x: f32) -> f32 {
    let a = f64::from(x.abs());
    let p = atan_unit(if a > 1.0 { 1.0 / a } else { a });
    ((if a > 1.0 { FRAC_PI_2 - p } else { p }) as f32).copysign(x)
}

/// Angle of the point `(x, y)`, with the special cases of C99 `atan2`.
#[inline(always)]
pub fn atan2(y: f32, x: f32) -> f32 {
    let (b, a) = (f64::from(y.abs()), f64::from(x.abs()));
    let steep = b > a;
    let (up, down) = if steep { (a, b) } else { (b, a) };
    // The quotients 0/0 and inf/inf stand for the angles 0 and pi/4 to the nearest axis.
    let q = if up == down { 1.0 } else { up / down };
    let p = atan_unit(if up == 0.0 { 0.0 } else { q });
    let p = if steep { FRAC_PI_2 - p } else { p };
    let p = if x.is_sign_negative() { PI - p } else { p };
    let p = (p as f32).copysign(y);
    if x.is_nan() || y.is_nan() { f32::NAN } else { p }
}

/// `e^x` for `0 <= x <= 100`.
#[inline(always)]
fn exp_f64(x: f64) -> f64 {
    let t = x.mul_add(std::f64::consts::LOG2_E, MAGIC_F64);
    let n = t - MAGIC_F64;
    let r = n.mul_add(-LN_2_LO, n.mul_add(-LN_2, x));
    let power = f64::from_bits(t.to_bits().wrapping_sub(MAGIC_F64.to_bits()).wrapping_add(1023) << 52);
    (r * r).mul_add(horner_f64(r, EXP_POLY), r).mul_add(power, power)
}

/// Natural logarithm of `1 + t` for `0 <= t < 2^1000`.
#[inline(always)]
fn log1p_f64(t: f64) -> f64 {
    let bits = (1.0 + t).to_bits();
    let e = bits.wrapping_sub(TWO_THIRDS_BITS) >> 52;
    let f = f64::from_bits(bits.wrapping_sub(e << 52)) - 1.0;
    let e = f64::from_bits(e.wrapping_add(MAGIC_F64.to_bits())) - MAGIC_F64;
    f.mul_add(horner_f64(f, POW_LOG2_POLY), e) * LN_2
}

/// Hyperbolic sine.
#[inline(always)]
pub fn sinh(x: f32) -> f32 {
    let a = f64::from(x.abs());
    let e = exp_f64(a.clamp(0.0, 100.0));
    let large = 0.5 * (e - 1.0 / e);
    let small = a * horner_f64(a * a, SINH_POLY);
    ((if a < 1.0 { small } else { large }) as f32).copysign(x)
}

/// Hyperbolic cosine.
#[inline(always)]
pub fn cosh(x: f32) -> f32 {
    let e = exp_f64(f64::from(x.abs()).clamp(0.0, 100.0));
    (0.5 * (e + 1.0 / e)) as f32
}

/// Inverse hyperbolic sine.
#[inline(always)]
pub fn asinh(x: f32) -> f32 {
    let a = f64::from(x.abs());
    let square = a * a;
    let large = log1p_f64(a + square / (1.0 + (square + 1.0).sqrt()));
    let y = if a < SMALL { (-square / 6.0).mul_add(a, a) } else { large };
    (if a < f64::INFINITY { y as f32 } else { x.abs() }).copysign(x)
}

/// Inverse hyperbolic cosine.
#[inline(always)]
pub fn acosh(x: f32) -> f32 {
    let t = f64::from(x) - 1.0;
    let y = log1p_f64(t + (t * (t + 2.0)).sqrt()) as f32;
    let y = if x == f32::INFINITY { x } else { y };
    if x >= 1.0 { y } else { f32::NAN }
}

/// Inverse hyperbolic tangent.
#[inline(always)]
pub fn atanh(x: f32) -> f32 {
    let a = f64::from(x.abs());
    let large = 0.5 * log1p_f64(2.0 * a / (1.0 - a));
    let y = if a < SMALL { (a * a / 3.0).mul_add(a, a) } else { large };
    let y = if a == 1.0 { f32::INFINITY } else { y as f32 };
    (if a <= 1.0 { y } else { f32::NAN }).copysign(x)
}

/// Whether [`fmod`] is right for the quotient of `x` and `y`: it must be finite, and below 2^52.
#[inline(always)]
pub fn divides(x: f32, y: f32) -> bool {
    f64::from(x.abs()) < f64::from(y.abs()) * 4_503_599_627_370_496.0
}

/// The remainder of `x / y` with the sign of `x`, without rounding, if [`divides`] accepts `x` and `y`.
#[inline(always)]
pub fn fmod(x: f32, y: f32) -> f32 {
    let (a, b) = (f64::from(x.abs()), f64::from(y.abs()));
    let r = (a / b).trunc().mul_add(-b, a);
    // The quotient may have been rounded up to a whole number.
    let r = if r < 0.0 { r + b } else { r };
    let r = if b == f64::INFINITY { a } else { r };
    (r as f32).copysign(x)
}

/// The remainder of `x / y` with the sign of `x`, without rounding.
pub fn fmod_any(x: f32, y: f32) -> f32 {
    x % y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiles::math::tests::{INF, NAN, STRIDE, same, sweep, ulps};

    const BOUND: f64 = 0.51;

    #[test]
    fn circular() {
        sweep(STRIDE, BOUND, sin_any, f64::sin);
        sweep(STRIDE, BOUND, cos_any, f64::cos);
        sweep(STRIDE, BOUND, tan_any, f64::tan);
        for f in [sin_any, tan_any] {
            same(f, &[(0.0, 0.0), (-0.0, -0.0), (1e-40, 1e-40), (INF, NAN), (-INF, NAN), (NAN, NAN)]);
        }
        same(cos_any, &[(0.0, 1.0), (-0.0, 1.0), (INF, NAN), (NAN, NAN)]);
    }

    /// Multiples of pi/2 have the smallest reduced arguments.
    #[test]
    fn near_multiples_of_half_pi() {
        for n in (1..100_000_u32).chain((100_000..600_000_000).step_by(9973)) {
            let x = (f64::from(n) * FRAC_PI_2) as f32;
            for (f, exact) in [
                (sin_any as fn(f32) -> f32, f64::sin as fn(f64) -> f64),
                (cos_any, f64::cos),
                (tan_any, f64::tan),
            ] {
                let (got, want) = (f(x), exact(f64::from(x)));
                assert!(ulps(got, want) <= BOUND, "f({x:e}) = {got:e}, want {want:e}");
            }
        }
    }

    #[test]
    fn inverse_circular() {
        sweep(STRIDE, BOUND, asin, f64::asin);
        sweep(STRIDE, BOUND, acos, f64::acos);
        sweep(STRIDE, BOUND, atan, f64::atan);
        same(asin, &[(0.0, 0.0), (-0.0, -0.0), (1.5, NAN), (-INF, NAN), (NAN, NAN)]);
        same(acos, &[(1.0, 0.0), (1.5, NAN), (INF, NAN), (NAN, NAN)]);
        same(atan, &[(0.0, 0.0), (-0.0, -0.0), (NAN, NAN)]);
    }

    #[test]
    fn hyperbolic() {
        sweep(STRIDE, BOUND, sinh, f64::sinh);
        sweep(STRIDE, BOUND, cosh, f64::cosh);
        sweep(STRIDE, BOUND, asinh, f64::asinh);
        sweep(STRIDE, BOUND, acosh, f64::acosh);
        sweep(STRIDE, BOUND, atanh, f64::atanh);
        for f in [sinh, asinh] {
            same(f, &[(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (NAN, NAN), (1e-40, 1e-40)]);
        }
        same(cosh, &[(0.0, 1.0), (INF, INF), (-INF, INF), (NAN, NAN)]);
        same(acosh, &[(1.0, 0.0), (INF, INF), (0.5, NAN), (-3.0, NAN), (-INF, NAN), (NAN, NAN)]);
        same(atanh, &[(1.0, INF), (-1.0, -INF), (1.5, NAN), (-0.0, -0.0), (INF, NAN), (NAN, NAN)]);
    }

    /// Pairs of all special values and of random bits.
    fn pairs() -> impl Iterator<Item = (f32, f32)> {
        let special = [0.0, 1e-45, 1e-40, 0.3, 1.0, 1.5, 3.0, 16_777_216.0, 1e30, 3e38, INF, NAN];
        let all = move || special.into_iter().flat_map(|x| [x, -x]);
        let mut state = 88_172_645_463_325_252_u64;
        let random = (0..400_000).map(move |i| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let (low, high) = (state as u32, (state >> 32) as u32);
            if i % 2 == 0 {
                (f32::from_bits(low), f32::from_bits(high))
            } else {
                (low as i32 as f32 * 1e-6, high as i32 as f32 * 1e-8)
            }
        });
        all().flat_map(move |x| all().map(move |y| (x, y))).chain(random)
    }

    #[test]
    fn angles() {
        for (y, x) in pairs() {
            let (got, want) = (atan2(y, x), f64::from(y).atan2(f64::from(x)));
            assert!(ulps(got, want) <= BOUND, "atan2({y:e}, {x:e}) = {got:e}, want {want:e}");
        }
    }

    #[test]
    fn remainders_are_exact() {
        for (x, y) in pairs().filter(|(x, y)| divides(*x, *y)) {
            let (got, want) = (fmod(x, y), x % y);
            assert_eq!(got.to_bits(), want.to_bits(), "fmod({x:e}, {y:e}) = {got:e}, want {want:e}");
        }
    }
}
