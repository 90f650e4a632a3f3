//! Elementary functions for `f32` that a compiler can turn into SIMD code.
//!
//! A call into libm prevents loop vectorization. Each function here is straight-line arithmetic: no branches, no
//! tables, no calls. Choices are selects between values that are already computed. A loop over a slice or a
//! `[f32; 16]` that calls them becomes vector code if fused multiply-add is enabled in the caller (`fma` on x86,
//! always on aarch64). Without it, `mul_add` is a slow library call with the same result.
//!
//! All operations are correctly rounded IEEE operations in a fixed order, so results do not depend on the vector
//! width. Error bounds are in units in the last place (ulp) of the exact result. They were measured against `f64`
//! functions, for functions of one argument over all 2^32 inputs. NaN inputs return NaN, and `-0.0` keeps its sign
//! as in C99.

#![allow(clippy::excessive_precision)]

/// Adding this to `|v| < 2^22` leaves `round(v)`, ties to even, in the low mantissa bits.
const MAGIC: f32 = 12_582_912.0;
/// Equivalent of `MAGIC` for `f64`, valid for `|v| < 2^51`.
pub(super) const MAGIC_F64: f64 = 6_755_399_441_055_744.0;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// Error of the rounded `LOG2_E`.
const LOG2_E_LO: f32 = 1.925963e-8;
const LOG10_E: f32 = std::f32::consts::LOG10_E;
/// Error of the rounded `LOG10_E`.
const LOG10_E_LO: f32 = -1.010305e-8;
const LN_2: f32 = std::f32::consts::LN_2;
/// Error of the rounded `LN_2`.
const LN_2_LO: f32 = -1.9046542e-9;
/// `log10(2)` truncated to 13 bits, so that its product with an exponent is exact, and the remainder.
const LOG10_2_HI: f32 = 0.301025390625;
const LOG10_2_LO: f32 = 4.605039e-6;

/// Inputs above which `exp` overflows, and below which it is zero.
const EXP_MAX: f32 = 89.0;
const EXP_MIN: f32 = -104.0;

/// `(e^r - 1 - r) / r^2` on `|r| <= ln(2)/2`.
const EXP_POLY: [f32; 5] = [0.49999994, 0.1666652, 0.04166824, 0.008368827, 0.001382324];
/// `(2^r - 1) / r` on `|r| <= 1/2`.
const EXP2_POLY: [f32; 6] = [LN_2, 0.24022645, 0.055503584, 0.009618832, 0.001339152, 0.00015242558];
/// `(log(1+f) - f + f^2/2) / f^3` on `|f| <= 1/3`.
const LOG_POLY: [f32; 8] =
    [0.33333215, -0.24999797, 0.20010446, -0.16680504, 0.14005306, -0.121840045, 0.13986897, -0.12892863];
/// `(tanh(x) - x) / x^3` in `x^2`, for `|x| <= TANH_SPLIT`.
const TANH_POLY: [f32; 5] = [-0.3333328, 0.13331416, -0.05373794, 0.020634118, -0.005700092];
/// `erf(x)/x - 1` in `x^2`, for `|x| <= ERF_SPLIT`.
const ERF_POLY: [f32; 7] =
    [0.12837917, -0.37612632, 0.11283676, -0.026858533, 0.005199148, -0.0008123187, 8.293013e-5];
/// `-log(erfc(x))/x` on `ERF_SPLIT <= x <= ERF_MAX`.
const ERF_TAIL_POLY: [f32; 7] =
    [1.1286371, 0.63519806, 0.106158964, -0.023694443, 0.0036102547, -0.00031482815, 1.042912e-5];
/// `(1 + ERFC_D*x) * e^(x^2) * erfc(x)` in `q = (x - ERFC_K)/(x + ERFC_K)`, for `0 <= x <= ERFC_MAX`: this is
/// `ERFC_LEAD + q * ERFC_POLY`.
const ERFC_POLY: [f32; 9] = [
    -0.22943676,
    0.06016209,
    0.029077008,
    -0.04053188,
    0.019398168,
    -0.0024512315,
    -0.0019013771,
    0.00058349286,
    0.0002561815,
];
const ERFC_LEAD: f32 = 0.79963076;
/// `e^r` on `|r| <= ln(2)/2`: the Taylor series.
const EXP_F64_POLY: [f64; 10] = [
    1.0,
    1.0,
    1.0 / 2.0,
    1.0 / 6.0,
    1.0 / 24.0,
    1.0 / 120.0,
    1.0 / 720.0,
    1.0 / 5040.0,
    1.0 / 40320.0,
    1.0 / 362_880.0,
];
/// `log2(1+f)/f` on `|f| <= 1/3`, with an error of 2^-35.
pub(super) const POW_LOG2_POLY: [f64; 13] = [
    1.4426950408923298,
    -0.7213475195693065,
    0.4808983439612795,
    -0.3606739786163034,
    0.2885394417769144,
    -0.24043366032194535,
    0.20607597175672834,
    -0.18080606639078498,
    0.16089125762093903,
    -0.13746107443153938,
    0.12356257640863753,
    -0.16610538470035405,
    0.15754246699620247,
];

/// Input from which `tanh` is computed with `exp` instead of its polynomial.
const TANH_SPLIT: f32 = 0.6;
/// Input from which `tanh` rounds to 1.
const TANH_MAX: f32 = 10.0;
/// Input from which `erf` is computed with `exp` instead of its polynomial.
const ERF_SPLIT: f32 = 0.92;
/// Input from which `erf` rounds to 1.
const ERF_MAX: f32 = 4.0;
/// Input from which `erfc` rounds to 0.
const ERFC_MAX: f32 = 10.2;
/// Chosen so that `ERFC_LEAD` is almost exactly an `f32`.
const ERFC_K: f32 = 2.58984375;
/// Near `2/sqrt(pi)`, so that the fit is flat at 0, where an error of `q` has the largest effect.
const ERFC_D: f32 = 1.125;

const TWO_THIRDS_BITS: u32 = 0x3f2a_aaab;

/// Horner's rule, lowest coefficient first.
#[inline(always)]
fn horner<const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let mut acc = c[N - 1];
    for i in (0..N - 1).rev() {
        acc = acc.mul_add(x, c[i]);
    }
    acc
}

/// Horner's rule in `f64`, lowest coefficient first.
#[inline(always)]
pub(super) fn horner_f64<const N: usize>(x: f64, c: [f64; N]) -> f64 {
    let mut acc = c[N - 1];
    for i in (0..N - 1).rev() {
        acc = acc.mul_add(x, c[i]);
    }
    acc
}

/// `2^n` for `-127 < n <= 127`; meaningless for other `n`.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `v * 2^n` with at most one rounding, even if `2^n` is not a normal number.
#[inline(always)]
fn scale(v: f32, n: i32) -> f32 {
    let half = n >> 1;
    v * pow2(half) * pow2(n.wrapping_sub(half))
}

/// The integer `n` of a sum `n + MAGIC`.
#[inline(always)]
fn magic_int(t: f32) -> i32 {
    (t.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32)
}

/// `(r, n)` with `x = n*ln(2) + r` and `|r| <= ln(2)/2`.
#[inline(always)]
fn reduce_ln2(x: f32) -> (f32, i32) {
    let t = x.mul_add(LOG2_E, MAGIC);
    let n = t - MAGIC;
    (n.mul_add(-LN_2_LO, n.mul_add(-LN_2, x)), magic_int(t))
}

/// `e^r - 1` for reduced `r`.
#[inline(always)]
fn expm1_reduced(r: f32) -> f32 {
    horner(r, EXP_POLY).mul_add(r * r, r)
}

/// `e^x`. Error at most 1.02 ulp.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let (r, n) = reduce_ln2(x.clamp(EXP_MIN, EXP_MAX));
    scale(expm1_reduced(r) + 1.0, n)
}

/// `2^x`. Error at most 0.88 ulp.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let x = x.clamp(-151.0, 129.0);
    let t = x + MAGIC;
    let r = x - (t - MAGIC);
    scale(horner(r, EXP2_POLY).mul_add(r, 1.0), magic_int(t))
}

/// `e^x - 1`. Error at most 1.25 ulp.
#[inline(always)]
pub fn expm1(x: f32) -> f32 {
    let (r, n) = reduce_ln2(x.clamp(-25.0, EXP_MAX));
    let quadratic = horner(r, EXP_POLY) * (r * r);
    // Half of 2^n is finite for every n. The sum of the two large terms keeps its rounding error.
    let s = pow2(n.wrapping_sub(1));
    let a = s - 0.5;
    let b = s * r;
    let h = a + b;
    let low = b - (h - a);
    let y = 2.0 * (h + s.mul_add(quadratic, low));
    // Halving would round a denormal, and the sum would lose the sign of zero.
    if x.abs() < 1.0e-8 { x } else { y }
}

/// `(e, f, y)` with `x = 2^e * (1+f)`, `|f| <= 1/3` and `log(1+f) = f + y`, for positive finite `x`.
#[inline(always)]
fn log_parts(x: f32) -> (f32, f32, f32) {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits();
    let e = (bits.wrapping_sub(TWO_THIRDS_BITS) as i32) >> 23;
    let f = f32::from_bits(bits.wrapping_sub((e as u32) << 23)) - 1.0;
    let e = e as f32 - if tiny { 23.0 } else { 0.0 };
    (e, f, log_rest(f))
}

/// `log(1+f) - f` for `|f| <= 1/3`.
#[inline(always)]
fn log_rest(f: f32) -> f32 {
    let z = f * f;
    z.mul_add(-0.5, z * f * horner(f, LOG_POLY))
}

/// Returns the logarithm `y` of `x`, or the special value if `x` is not positive and finite.
#[inline(always)]
fn log_special(x: f32, y: f32) -> f32 {
    let edge = if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    let edge = if x == f32::INFINITY { x } else { edge };
    if x > 0.0 && x < f32::INFINITY { y } else { edge }
}

/// `log(1+f) * c` as an unevaluated sum, for `f + y = log(1+f)` and `c = hi + lo`.
#[inline(always)]
fn log_times(f: f32, y: f32, hi: f32, lo: f32) -> (f32, f32) {
    let u = f + y;
    let u_low = (f - u) + y;
    let p = u * hi;
    (p, u.mul_add(hi, -p) + u_low.mul_add(hi, u * lo))
}

/// Natural logarithm. Error at most 0.88 ulp.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    let (e, f, y) = log_parts(x);
    log_special(x, e.mul_add(LN_2, f + e.mul_add(LN_2_LO, y)))
}

/// Base 2 logarithm. Error at most 0.92 ulp, exact for powers of two.
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    let (e, f, y) = log_parts(x);
    let (p, p_low) = log_times(f, y, LOG2_E, LOG2_E_LO);
    let s = e + p;
    log_special(x, s + ((p - (s - e)) + p_low))
}

/// Base 10 logarithm. Error at most 0.88 ulp.
#[inline(always)]
pub fn log10(x: f32) -> f32 {
    let (e, f, y) = log_parts(x);
    let (p, p_low) = log_times(f, y, LOG10_E, LOG10_E_LO);
    let a = e * LOG10_2_HI;
    let s = a + p;
    log_special(x, s + ((p - (s - a)) + e.mul_add(LOG10_2_LO, p_low)))
}

/// `log(1+x)`. Error at most 1.63 ulp.
#[inline(always)]
pub fn log1p(x: f32) -> f32 {
    let u = 1.0 + x;
    let bits = u.to_bits();
    let e = (bits.wrapping_sub(TWO_THIRDS_BITS) as i32) >> 23;
    // Scaling x itself, not the rounded 1+x, leaves one rounding. 2^-e is not normal for the largest x,
    // where 1+x is x anyway.
    let s = pow2(e.wrapping_neg());
    let m = f32::from_bits(bits.wrapping_sub((e as u32) << 23));
    let f = if x < 1.0e9 { s.mul_add(x, s - 1.0) } else { m - 1.0 };
    let e = e as f32;
    let y = e.mul_add(LN_2, f + e.mul_add(LN_2_LO, log_rest(f)));
    let edge = if x == -1.0 { f32::NEG_INFINITY } else { f32::NAN };
    let edge = if x == f32::INFINITY || x == 0.0 { x } else { edge };
    if x > -1.0 && x < f32::INFINITY && x != 0.0 { y } else { edge }
}

/// Hyperbolic tangent. Error at most 1.34 ulp.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let small = (a * z).mul_add(horner(z, TANH_POLY), a);
    let (r, n) = reduce_ln2(2.0 * a.clamp(0.0, TANH_MAX));
    let s = pow2(n);
    let large = 1.0 - 2.0 / (s.mul_add(expm1_reduced(r), s) + 1.0);
    (if a < TANH_SPLIT { small } else { large }).copysign(x)
}

/// Error function. Error at most 0.98 ulp.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let a = x.abs().clamp(0.0, ERF_MAX);
    let small = horner(a * a, ERF_POLY).mul_add(a, a);
    let (r, n) = reduce_ln2(-a * horner(a, ERF_TAIL_POLY));
    let s = pow2(n);
    let large = (1.0 - s) - s * expm1_reduced(r);
    (if a < ERF_SPLIT { small } else { large }).copysign(x)
}

/// Complementary error function `1 - erf(x)`. Error at most 1.32 ulp.
#[inline(always)]
pub fn erfc(x: f32) -> f32 {
    let a = x.abs().clamp(0.0, ERFC_MAX);
    let q = (a - ERFC_K) / (a + ERFC_K);
    let t = q * horner(q, ERFC_POLY);
    let p = ERFC_LEAD + t;
    let p_low = t - (p - ERFC_LEAD);
    // The quotient p / (1 + ERFC_D*a) is ratio + ratio_low.
    let d = a.mul_add(ERFC_D, 1.0);
    let d_low = a.mul_add(ERFC_D, 1.0 - d);
    let inv = 1.0 / d;
    let ratio = p * inv;
    let ratio_low = (ratio.mul_add(-d, p) + ratio.mul_add(-d_low, p_low)) * inv;
    // The rounding error of the square matters, because exp magnifies it.
    let square = a * a;
    let square_low = a.mul_add(a, -square);
    let (r, n) = reduce_ln2(-square);
    let r = r - square_low;
    // The exponential is h + low.
    let h = 1.0 + r;
    let low = horner(r, EXP_POLY).mul_add(r * r, r - (h - 1.0));
    let y = scale(h.mul_add(ratio, low.mul_add(ratio, h * ratio_low)), n);
    if x < 0.0 { 2.0 - y } else { y }
}

/// `x^y`, with the special cases of C99 `pow`. The largest error measured is 0.94 ulp, over 2.6e8 random pairs and
/// all pairs of special values.
#[inline(always)]
pub fn pow(x: f32, y: f32) -> f32 {
    let a = x.abs();
    // Only the logarithm and its product with y need a higher precision than f32.
    let tiny = a < f32::MIN_POSITIVE;
    let scaled = if tiny { a * 8_388_608.0 } else { a };
    let bits = scaled.to_bits();
    let e = (bits.wrapping_sub(TWO_THIRDS_BITS) as i32) >> 23;
    let f = f64::from(f32::from_bits(bits.wrapping_sub((e as u32) << 23)) - 1.0);
    let e = f64::from(e as f32 - if tiny { 23.0 } else { 0.0 });
    let log = f.mul_add(horner_f64(f, POW_LOG2_POLY), e);
    let t = (f64::from(y) * log).clamp(-151.0, 129.0);
    let n = (t + MAGIC_F64) - MAGIC_F64;
    let r = (t - n) as f32;
    let v = scale(horner(r, EXP2_POLY).mul_add(r, 1.0), magic_int(n as f32 + MAGIC));

    // Zero, infinity and infinite y bypass the logarithm: `up` is whether |x|^y is infinite for them, not zero.
    let up = (a > 1.0) == (y > 0.0);
    let extreme = if up { f32::INFINITY } else { 0.0 };
    let v = if a == 0.0 || a == f32::INFINITY || y.abs() == f32::INFINITY { extreme } else { v };
    let v = if x.is_nan() || y.is_nan() { f32::NAN } else { v };

    let integer = y.floor() == y;
    let half = 0.5 * y;
    let odd = integer && half.floor() != half;
    let signed = if odd { v.copysign(x) } else { v };
    let signed = if x < 0.0 && x > f32::NEG_INFINITY && !integer { f32::NAN } else { signed };
    let one = x == 1.0 || y == 0.0 || (a == 1.0 && y.abs() == f32::INFINITY);
    if one { 1.0 } else { signed }
}

/// `e^x` for `-708 < x <= 0` or NaN, with a relative error of 2^-36. It is 0 for smaller `x`.
#[inline(always)]
pub fn exp_f64(x: f64) -> f64 {
    let t = x.max(-708.0).mul_add(std::f64::consts::LOG2_E, MAGIC_F64);
    let r = (t - MAGIC_F64).mul_add(-std::f64::consts::LN_2, x);
    let n = t.to_bits().wrapping_sub(MAGIC_F64.to_bits());
    let power = f64::from_bits(n.wrapping_add(1023) << 52);
    if x < -708.0 { 0.0 } else { horner_f64(r, EXP_F64_POLY) * power }
}

/// Natural logarithm of a finite `x` from 1 on, with an error of 2^-35 times the result.
#[inline(always)]
pub fn log_f64(x: f64) -> f64 {
    let bits = x.to_bits();
    let e = bits.wrapping_sub((2.0_f64 / 3.0).to_bits()) >> 52;
    let f = f64::from_bits(bits.wrapping_sub(e << 52)) - 1.0;
    std::f64::consts::LN_2 * f.mul_add(horner_f64(f, POW_LOG2_POLY), f64::from(e as i32))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Distance of `got` from `exact` in units in the last place of an `f32` at `exact`.
    pub fn ulps(got: f32, exact: f64) -> f64 {
        if exact.is_nan() || got.is_nan() {
            return if exact.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
        }
        let rounded = exact as f32;
        if rounded.is_infinite() || rounded == 0.0 {
            // Also compares the sign of zero. Next to the overflow threshold the largest number is right too.
            let close = got.abs() == f32::MAX || got.abs() == f32::from_bits(1);
            let same = got.to_bits() == rounded.to_bits() || close && got.signum() == rounded.signum();
            return if same { 0.0 } else { f64::INFINITY };
        }
        let exponent = ((exact.abs().to_bits() >> 52) as i32 - 1023).clamp(-126, 127);
        let ulp = 2f64.powi(exponent - 23);
        let got = if got.is_infinite() { 2f64.powi(128).copysign(f64::from(got)) } else { f64::from(got) };
        (got - exact).abs() / ulp
    }

    /// Checks `f` against `reference` at every `stride`-th bit pattern.
    pub fn sweep(stride: usize, bound: f64, f: impl Fn(f32) -> f32, reference: impl Fn(f64) -> f64) {
        for bits in (0..=u32::MAX).step_by(stride) {
            let x = f32::from_bits(bits);
            let (got, want) = (f(x), reference(f64::from(x)));
            assert!(ulps(got, want) <= bound, "f({x:e}) = {got:e}, want {want:e}");
        }
    }

    pub fn same(f: impl Fn(f32) -> f32, cases: &[(f32, f32)]) {
        for &(x, want) in cases {
            let got = f(x);
            let equal = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(equal, "f({x:e}) = {got:e}, want {want:e}");
        }
    }

    pub const STRIDE: usize = 4099;
    pub const INF: f32 = f32::INFINITY;
    pub const NAN: f32 = f32::NAN;

    #[test]
    fn exponentials() {
        sweep(STRIDE, 1.02, exp, f64::exp);
        sweep(STRIDE, 0.88, exp2, f64::exp2);
        sweep(STRIDE, 1.25, expm1, f64::exp_m1);
        same(
            exp,
            &[(0.0, 1.0), (-0.0, 1.0), (INF, INF), (-INF, 0.0), (NAN, NAN), (88.8, INF), (-104.5, 0.0)],
        );
        same(
            exp2,
            &[(3.0, 8.0), (-149.0, f32::from_bits(1)), (128.0, INF), (INF, INF), (-INF, 0.0), (NAN, NAN)],
        );
        same(expm1, &[(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -1.0), (NAN, NAN), (1e-40, 1e-40)]);
    }

    #[test]
    fn logarithms() {
        sweep(STRIDE, 0.88, log, f64::ln);
        sweep(STRIDE, 0.92, log2, f64::log2);
        sweep(STRIDE, 0.88, log10, f64::log10);
        sweep(STRIDE, 1.63, log1p, f64::ln_1p);
        for f in [log, log2, log10] {
            same(f, &[(0.0, -INF), (-0.0, -INF), (1.0, 0.0), (INF, INF)]);
            same(f, &[(NAN, NAN), (-1.0, NAN), (-1e-45, NAN), (-INF, NAN)]);
        }
        for n in -149..=127 {
            assert_eq!(log2(2f64.powi(n) as f32), n as f32);
        }
        same(
            log1p,
            &[(-1.0, -INF), (0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, NAN), (-1.5, NAN), (NAN, NAN)],
        );
    }

    #[test]
    fn double_precision() {
        for i in 0..100_000 {
            let x = f64::from(i) * -0.00708;
            assert!((exp_f64(x) / x.exp() - 1.0).abs() < 2f64.powi(-36), "{x}");
            let y = 1.0 + f64::from(i) * f64::from(i) * 1e-6;
            assert!((log_f64(y) - y.ln()).abs() <= 2f64.powi(-35) * y.ln(), "{y}");
        }
        assert_eq!([exp_f64(-800.0), exp_f64(f64::NEG_INFINITY), log_f64(1.0)], [0.0; 3]);
        assert!(exp_f64(f64::NAN).is_nan());
    }

    #[test]
    fn hyperbolic_tangent() {
        sweep(STRIDE, 1.34, tanh, f64::tanh);
        same(tanh, &[(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN)]);
    }

    /// `(erf(x), erfc(x))` for `x >= 0`: the Maclaurin series without cancellation, or a continued fraction.
    fn erf_pair(x: f64) -> (f64, f64) {
        let gauss = (-x * x).exp();
        if x < 2.5 {
            let (mut term, mut sum, mut k) = (x, x, 0.0);
            while term > 1e-17 * sum {
                k += 1.0;
                term *= 2.0 * x * x / (2.0 * k + 1.0);
                sum += term;
            }
            let erf = std::f64::consts::FRAC_2_SQRT_PI * gauss * sum;
            return (erf, 1.0 - erf);
        }
        let tail = (1..=60).rev().fold(x, |v, k| x + 0.5 * f64::from(k) / v);
        let erfc = 0.5 * std::f64::consts::FRAC_2_SQRT_PI * gauss / tail;
        (1.0 - erfc, erfc)
    }

    fn erf_reference(x: f64) -> f64 {
        erf_pair(x.abs()).0.copysign(x)
    }

    fn erfc_reference(x: f64) -> f64 {
        if x < 0.0 { 1.0 + erf_pair(-x).0 } else { erf_pair(x).1 }
    }

    #[test]
    fn error_functions() {
        sweep(4 * STRIDE, 0.98, erf, erf_reference);
        sweep(4 * STRIDE, 1.32, erfc, erfc_reference);
        for i in -4000..=10_500 {
            let x = i as f32 * 1e-3;
            assert!(ulps(erf(x), erf_reference(f64::from(x))) <= 0.98, "erf({x})");
            assert!(ulps(erfc(x), erfc_reference(f64::from(x))) <= 1.32, "erfc({x})");
        }
        same(erf, &[(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN)]);
        same(erfc, &[(0.0, 1.0), (-0.0, 1.0), (INF, 0.0), (-INF, 2.0), (NAN, NAN)]);
    }

    fn check_pow(x: f32, y: f32) {
        let (got, want) = (pow(x, y), f64::from(x).powf(f64::from(y)));
        assert!(ulps(got, want) <= 0.95, "pow({x:e}, {y:e}) = {got:e}, want {want:e}");
    }

    #[test]
    fn powers() {
        let mut state = 88_172_645_463_325_252_u64;
        for _ in 0..200_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let (low, high) = (state as u32, (state >> 32) as i32);
            check_pow(f32::from_bits(low), f32::from_bits(high as u32));
            check_pow(low as i32 as f32 * 2f32.powi(-24), (high >> 25) as f32);
            check_pow(1.0 + low as i32 as f32 * 2f32.powi(-33), high as f32 * 2f32.powi(-22));
            // Results over the whole range of exponents.
            let x = f32::from_bits(low >> 1);
            check_pow(x, high as f32 * 2f32.powi(-31) * 150.0 / x.log2());
        }
        let special = [
            0.0,
            1e-45,
            1e-40,
            0.3,
            0.5,
            0.999_999_9,
            1.0,
            1.000_000_1,
            1.5,
            2.0,
            3.0,
            4.0,
            8_388_607.0,
            8_388_607.5,
            16_777_215.0,
            16_777_216.0,
            1e30,
            3e38,
            INF,
            NAN,
        ];
        for a in special {
            for b in special {
                for (x, y) in [(a, b), (a, -b), (-a, b), (-a, -b)] {
                    check_pow(x, y);
                }
            }
        }
    }
}
