//! Loops compiled for several widths of SIMD units. The version for the widest units of the CPU runs.

/// SIMD units of a CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
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

/// Defines a function that calls `$body`, an `#[inline(always)]` function, compiled for the widest units. The function
/// is unsafe if it is declared so, and then has the requirements of `$body`.
macro_rules! widest {
    ($(#[$doc:meta])* $visible:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) => $body:path) => {
        $(#[$doc])*
        $visible fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) {
                $body($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*);
            }
            match $crate::widest::units() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `units` detected the features that this version is compiled for.
                $crate::widest::Units::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `units` detected the features that this version is compiled for.
                $crate::widest::Units::Avx2 => unsafe { avx2($($arg),*) },
                _ => $body($($arg),*),
            }
        }
    };
    ($(#[$doc:meta])* $visible:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) => $body:path) => {
        $(#[$doc])*
        $visible unsafe fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: `$name` has the requirements of `$body` and passes its arguments on.
                unsafe { $body($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: `$name` has the requirements of `$body` and passes its arguments on.
                unsafe { $body($($arg),*) }
            }
            // SAFETY: the requirements of `$body` are those of this function, and `units` detected the features that
            // the chosen version is compiled for.
            unsafe {
                match $crate::widest::units() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::widest::Units::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::widest::Units::Avx2 => avx2($($arg),*),
                    _ => $body($($arg),*),
                }
            }
        }
    };
}
pub(crate) use widest;
