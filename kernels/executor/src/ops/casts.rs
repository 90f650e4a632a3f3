//! Conversion of floats to integers, with the results of PyTorch's CPU kernels on this machine.
//!
//! In C++, converting a NaN or a float beyond the integer's range is undefined. PyTorch returns what the processor's
//! conversion instruction returns: on x86 the least integer; on other processors the nearest integer, and 0 for NaN.

/// Conversion of a float to an integer, rounding toward zero.
pub trait ToInteger {
    /// Converts to 32 bits.
    fn to_i32(self) -> i32;
    /// Converts to 64 bits.
    fn to_i64(self) -> i64;
}

macro_rules! to_integer {
    ($float:ty: $($name:ident $int:ty),*) => {
        impl ToInteger for $float {
            $(#[inline(always)]
            fn $name(self) -> $int {
                // `as` saturates, so floats below the range already yield the least integer. The comparison is
                // false for NaN.
                let fits = self < -(<$int>::MIN as $float);
                if fits || cfg!(not(target_arch = "x86_64")) { self as $int } else { <$int>::MIN }
            })*
        }
    };
}

to_integer!(f32: to_i32 i32, to_i64 i64);
to_integer!(f64: to_i32 i32, to_i64 i64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn what_does_not_fit_is_the_least_integer() {
        for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e30, -1e30] {
            assert_eq!((x.to_i32(), x.to_i64()), (i32::MIN, i64::MIN));
            assert_eq!(((x as f32).to_i32(), (x as f32).to_i64()), (i32::MIN, i64::MIN));
        }
        for (x, expected) in [(2147483647.9, i32::MAX), (2147483648.0, i32::MIN), (-2147483648.9, i32::MIN)] {
            assert_eq!(ToInteger::to_i32(x), expected);
        }
        assert_eq!((-1.5f32.to_i32(), -1.5f64.to_i64()), (-1, -1));
    }
}
