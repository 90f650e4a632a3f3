//! Vectors of floats in registers, for loops that the compiler does not keep there by itself.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A vector of floats.
pub trait Vector: Copy {
    /// Number of floats of the vector.
    const LANES: usize;

    /// A vector of `LANES` times the same float.
    ///
    /// # Safety
    /// The CPU has vectors of this type.
    unsafe fn splat(x: f32) -> Self;

    /// Reads a vector.
    ///
    /// # Safety
    /// The CPU has vectors of this type, and `from` points to `LANES` floats.
    unsafe fn load(from: *const f32) -> Self;

    /// Writes a vector.
    ///
    /// # Safety
    /// The CPU has vectors of this type, and `to` points to `LANES` floats, which nobody else uses.
    unsafe fn store(self, to: *mut f32);

    /// Returns `self + other`.
    ///
    /// # Safety
    /// The CPU has vectors of this type.
    unsafe fn plus(self, other: Self) -> Self;

    /// Returns `self * by + to`.
    ///
    /// # Safety
    /// The CPU has vectors of this type.
    unsafe fn times_plus(self, by: Self, to: Self) -> Self;

    /// Transposes the square block of the first `LANES` vectors.
    ///
    /// # Safety
    /// The CPU has vectors of this type.
    unsafe fn transpose(block: &mut [Self; MAX_LANES]);
}

/// Number of lanes of the longest vector.
pub const MAX_LANES: usize = 16;

/// Implements [`Vector`] with a CPU's instructions.
#[cfg(target_arch = "x86_64")]
macro_rules! vector {
    ($type:ty, $lanes:literal, $splat:ident, $load:ident, $store:ident, $plus:ident, $times_plus:ident, $transpose:ident) => {
        impl Vector for $type {
            const LANES: usize = $lanes;

            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: the CPU has the instruction.
                unsafe { $splat(x) }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self {
                // SAFETY: the CPU has the instruction, and `from` points to `LANES` floats.
                unsafe { $load(from) }
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut f32) {
                // SAFETY: the CPU has the instruction, and `to` points to `LANES` floats.
                unsafe { $store(to, self) }
            }

            #[inline(always)]
            unsafe fn plus(self, other: Self) -> Self {
                // SAFETY: the CPU has the instruction.
                unsafe { $plus(self, other) }
            }

            #[inline(always)]
            unsafe fn times_plus(self, by: Self, to: Self) -> Self {
                // SAFETY: the CPU has the instruction.
                unsafe { $times_plus(self, by, to) }
            }

            #[inline(always)]
            unsafe fn transpose(block: &mut [Self; MAX_LANES]) {
                // SAFETY: the CPU has the instructions.
                unsafe { $transpose(block) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vector!(
    __m512,
    16,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_add_ps,
    _mm512_fmadd_ps,
    transpose_512
);
#[cfg(target_arch = "x86_64")]
vector!(
    __m256,
    8,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_add_ps,
    _mm256_fmadd_ps,
    transpose_256
);

/// Transposes each block of 4x4 elements of the vectors: four rows in one 128-bit part. Afterwards, part `p` of row `4
/// * i + j` has the elements `4 * p + j` of the rows `4 * i..4 * i + 4`.
#[cfg(target_arch = "x86_64")]
macro_rules! transpose_parts {
    ($rows:ident, $lanes:literal, $low:ident, $high:ident, $low2:ident, $high2:ident, $wide:ident, $narrow:ident) => {
        for i in (0..$lanes).step_by(4) {
            let [a, b, c, d] = [$rows[i], $rows[i + 1], $rows[i + 2], $rows[i + 3]];
            let (low, high) = ($wide($low(a, b)), $wide($high(a, b)));
            let (low2, high2) = ($wide($low(c, d)), $wide($high(c, d)));
            $rows[i] = $narrow($low2(low, low2));
            $rows[i + 1] = $narrow($high2(low, low2));
            $rows[i + 2] = $narrow($low2(high, high2));
            $rows[i + 3] = $narrow($high2(high, high2));
        }
    };
}

/// # Safety
/// The CPU has AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_512(rows: &mut [__m512; MAX_LANES]) {
    const EVEN: i32 = 0b10_00_10_00;
    const ODD: i32 = 0b11_01_11_01;
    // SAFETY: the CPU has the instructions.
    unsafe {
        transpose_parts!(
            rows,
            16,
            _mm512_unpacklo_ps,
            _mm512_unpackhi_ps,
            _mm512_unpacklo_pd,
            _mm512_unpackhi_pd,
            _mm512_castps_pd,
            _mm512_castpd_ps
        );
        for j in 0..4 {
            let [a, b, c, d] = [rows[j], rows[4 + j], rows[8 + j], rows[12 + j]];
            let even = [_mm512_shuffle_f32x4::<EVEN>(a, b), _mm512_shuffle_f32x4::<EVEN>(c, d)];
            let odd = [_mm512_shuffle_f32x4::<ODD>(a, b), _mm512_shuffle_f32x4::<ODD>(c, d)];
            rows[j] = _mm512_shuffle_f32x4::<EVEN>(even[0], even[1]);
            rows[4 + j] = _mm512_shuffle_f32x4::<EVEN>(odd[0], odd[1]);
            rows[8 + j] = _mm512_shuffle_f32x4::<ODD>(even[0], even[1]);
            rows[12 + j] = _mm512_shuffle_f32x4::<ODD>(odd[0], odd[1]);
        }
    }
}

/// # Safety
/// The CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_256(rows: &mut [__m256; MAX_LANES]) {
    // SAFETY: the CPU has the instructions.
    unsafe {
        transpose_parts!(
            rows,
            8,
            _mm256_unpacklo_ps,
            _mm256_unpackhi_ps,
            _mm256_unpacklo_pd,
            _mm256_unpackhi_pd,
            _mm256_castps_pd,
            _mm256_castpd_ps
        );
        for j in 0..4 {
            let (a, b) = (rows[j], rows[4 + j]);
            rows[j] = _mm256_permute2f128_ps::<0x20>(a, b);
            rows[4 + j] = _mm256_permute2f128_ps::<0x31>(a, b);
        }
    }
}

/// A vector that every CPU has.
impl Vector for [f32; 4] {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; 4]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: `from` points to `LANES` floats.
        unsafe { from.cast::<Self>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: `to` points to `LANES` floats.
        unsafe { to.cast::<Self>().write_unaligned(self) }
    }

    #[inline(always)]
    unsafe fn plus(self, mut other: Self) -> Self {
        for lane in 0..4 {
            other[lane] += self[lane];
        }
        other
    }

    #[inline(always)]
    unsafe fn times_plus(self, by: Self, mut to: Self) -> Self {
        for lane in 0..4 {
            to[lane] += self[lane] * by[lane];
        }
        to
    }

    #[inline(always)]
    unsafe fn transpose(block: &mut [Self; MAX_LANES]) {
        let [a, b, c, d, ..] = *block;
        for (lane, line) in block.iter_mut().enumerate().take(4) {
            *line = [a[lane], b[lane], c[lane], d[lane]];
        }
    }
}

/// Defines a function that calls `$body`, a generic `#[inline(always)]` function, with the longest vectors of the CPU.
macro_rules! with_vectors {
    ($(#[$doc:meta])* $visible:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) => $body:ident) => {
        $(#[$doc])*
        $visible unsafe fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: `$name` has the requirements of `$body` and passes its arguments on.
                unsafe { $body::<std::arch::x86_64::__m512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: `$name` has the requirements of `$body` and passes its arguments on.
                unsafe { $body::<std::arch::x86_64::__m256>($($arg),*) }
            }
            // SAFETY: the requirements of `$body` are those of this function, and `units` detected the features that
            // the chosen version is compiled for.
            unsafe {
                match $crate::widest::units() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::widest::Units::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::widest::Units::Avx2 => avx2($($arg),*),
                    _ => $body::<[f32; 4]>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use with_vectors;

#[cfg(test)]
mod tests {
    use super::*;

    with_vectors! {
        unsafe fn transpose(from: &[f32], lanes: &mut usize, to: &mut [f32]) => run_transpose
    }

    #[inline(always)]
    unsafe fn run_transpose<T: Vector>(from: &[f32], lanes: &mut usize, to: &mut [f32]) {
        // SAFETY: `with_vectors` chose vectors that the CPU has, and there are `LANES * LANES` elements.
        unsafe {
            let mut block = [T::splat(0.0); MAX_LANES];
            for i in 0..T::LANES {
                block[i] = T::load(from[i * T::LANES..][..T::LANES].as_ptr());
            }
            T::transpose(&mut block);
            for i in 0..T::LANES {
                block[i].store(to[i * T::LANES..][..T::LANES].as_mut_ptr());
            }
        }
        *lanes = T::LANES;
    }

    #[test]
    fn a_block_is_transposed() {
        let from: Vec<f32> = (0..MAX_LANES * MAX_LANES).map(|i| i as f32).collect();
        let (mut lanes, mut to) = (0, from.clone());
        // SAFETY: `from` and `to` have the elements of a block of the longest vectors.
        unsafe { transpose(&from, &mut lanes, &mut to) };
        for at in 0..lanes * lanes {
            assert_eq!(to[at], from[at % lanes * lanes + at / lanes], "element {at} of {lanes}x{lanes}");
        }
    }
}
