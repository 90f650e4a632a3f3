//! Loops compiled for several widths of SIMD units; the widest that the CPU supports runs.

/// SIMD units of a CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Units {
    /// AVX-512 with the F, BW, DQ and VL extensions.
    Avx512,
    /// AVX2 with fused multiply-add.
    Avx2,
    /// The units that all CPUs of the architecture have.
    Any,
}

/// Returns the widest units of the CPU.
#[inline]
pub fn units() -> Units {
    #[cfg(target_arch = "x86_64")]
    {
        let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let wide = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if fma && wide {
            return Units::Avx512;
        }
        if fma {
            return Units::Avx2;
        }
    }
    Units::Any
}

/// Defines an unsafe function that calls `$body`, an `#[inline(always)]` function, compiled for the widest units.
macro_rules! widest {
    ($(#[$doc:meta])* $visible:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) => $body:path) => {
        $(#[$doc])*
        $visible unsafe fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: the caller meets the requirements of `$body`.
                unsafe { $body($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the caller meets the requirements of `$body`.
                unsafe { $body($($arg),*) }
            }
            // SAFETY: the caller meets the requirements of `$body`, and the CPU has the features of the chosen
            // version.
            unsafe {
                match $crate::cpu::widest::units() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::widest::Units::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::widest::Units::Avx2 => avx2($($arg),*),
                    _ => $body($($arg),*),
                }
            }
        }
    };
}
pub(crate) use widest;
