//! Several horizontal sums at once, which costs little more than one.
//!
//! On one set the order of additions is the same for each, wherever it stands and however many there are: a score does not
//! depend on which of its neighbours were computed with it.

#![allow(unsafe_code)]

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use core::{any::TypeId, mem::transmute_copy};

use pulp::Simd;

/// The sums of the lanes of `N` vectors.
#[inline(always)]
pub(crate) fn sums<S: Simd, const N: usize>(simd: S, vectors: [S::f32s; N]) -> [f32; N] {
    #[cfg(target_arch = "x86_64")]
    if N == 16 && TypeId::of::<S>() == TypeId::of::<pulp::x86::V4>() {
        // SAFETY: S is V4, whose token proves AVX-512 and whose vector is an __m512; N is 16.
        return unsafe { transmute_copy(&avx512::sums_of_sixteen(transmute_copy(&vectors))) };
    }
    let mut sums = [0.0; N];
    let mut first = 0;
    while first < N {
        let mut four = [simd.splat_f32s(0.0); 4];
        for i in 0..4 {
            if first + i < N {
                four[i] = vectors[first + i];
            }
        }
        let four = sums_of_four(simd, four);
        for i in 0..4 {
            if first + i < N {
                sums[first + i] = four[i];
            }
        }
        first += 4;
    }
    sums
}

#[inline(always)]
fn sums_of_four<S: Simd>(simd: S, vectors: [S::f32s; 4]) -> [f32; 4] {
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<S>() == TypeId::of::<pulp::x86::V4>() {
        // SAFETY: S is V4, whose token proves AVX-512 and whose vector is an __m512.
        return unsafe { transmute_copy(&avx512::sums_of_four(transmute_copy(&vectors))) };
    } else if TypeId::of::<S>() == TypeId::of::<pulp::x86::V3>() {
        use core::arch::x86_64::*;
        // SAFETY: S is V3, whose token proves AVX and whose vector is an __m256.
        unsafe {
            let [a, b, c, d]: [__m256; 4] = transmute_copy(&vectors);
            let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
            return transmute_copy(&sums);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if TypeId::of::<S>() == TypeId::of::<pulp::aarch64::Neon>() {
        use core::arch::aarch64::*;
        // SAFETY: S is Neon, whose vector is a float32x4_t.
        unsafe {
            let [a, b, c, d]: [float32x4_t; 4] = transmute_copy(&vectors);
            return transmute_copy(&vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
        }
    }
    let mut sums = [0.0; 4];
    for i in 0..4 {
        sums[i] = simd.reduce_sum_f32s(vectors[i]);
    }
    sums
}

/// Both fold the upper half onto the lower one until a quarter is left, lanes 0..4, and then add (0 + 2) + (1 + 3).
#[cfg(target_arch = "x86_64")]
mod avx512 {
    use core::arch::x86_64::*;

    /// Three instructions for two vectors: `(a, b)` at each level of the folding share one.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F.
    #[inline(always)]
    pub(super) unsafe fn sums_of_sixteen(v: [__m512; 16]) -> __m512 {
        // SAFETY: the caller says that AVX-512 exists.
        unsafe {
            let mut quarters = [_mm512_setzero_ps(); 4];
            for i in 0..4 {
                // Quarters 0 and 1 of the folded v[i], then those of v[i + 4]; and the same of v[i + 8] and v[i + 12].
                let mut halves = [_mm512_setzero_ps(); 2];
                for half in 0..2 {
                    let (a, b) = (v[i + 8 * half], v[i + 8 * half + 4]);
                    let (low, high) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                    halves[half] = _mm512_add_ps(low, high);
                }
                let [a, b] = halves;
                let (low, high) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
                quarters[i] = _mm512_add_ps(low, high);
            }
            let [a, b, c, d] = quarters;
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (low, high) = (_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd));
            _mm512_add_ps(low, high)
        }
    }

    /// # Safety
    /// The CPU must have AVX-512 F and DQ.
    #[inline(always)]
    pub(super) unsafe fn sums_of_four(v: [__m512; 4]) -> __m128 {
        // SAFETY: the caller says that AVX-512 exists.
        unsafe {
            let mut quarters = [_mm_setzero_ps(); 4];
            for i in 0..4 {
                let half = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps::<1>(v[i]));
                quarters[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
            }
            let [a, b, c, d] = quarters;
            let ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
            let cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
            _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InstructionSet;
    use crate::kernels::WithTiles;
    use crate::kernels::lane::Lane;

    struct Sums<'a, const N: usize>(&'a [[f32; 16]; N]);

    impl<const N: usize> WithTiles for Sums<'_, N> {
        type Output = [f32; N];
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) -> [f32; N] {
            let mut vectors = [simd.splat_f32s(0.0); N];
            for i in 0..N {
                vectors[i] = <f32 as Lane>::load_slice::<S>(&self.0[i]);
            }
            sums::<S, N>(simd, vectors)
        }
    }

    #[test]
    fn each_sum_is_right_and_the_same_wherever_it_stands() {
        // Numbers whose sum depends on the order, in lanes of their own so that a swap shows.
        let row: [f32; 16] =
            core::array::from_fn(|i| (1.0 + i as f32 * 0.37).powi(7) * if i % 3 == 0 { -1.0 } else { 1.0 });
        let wide = [InstructionSet::portable_256(), InstructionSet::portable_512()];
        for set in InstructionSet::available().chain(wide) {
            let lanes = set.tile_sizes().lanes;
            let [alone] = set.run(Sums(&[row]));
            let exact: f64 = row[..lanes].iter().map(|&x| f64::from(x)).sum();
            assert!((f64::from(alone) - exact).abs() < 1e-5 * exact.abs(), "{set}: {alone} {exact}");
            for at in 0..16 {
                let mut rows: [[f32; 16]; 16] = core::array::from_fn(|i| [i as f32; 16]);
                rows[at] = row;
                let found = set.run(Sums(&rows));
                for (i, &sum) in found.iter().enumerate() {
                    let expected = if i == at { alone } else { (i * lanes) as f32 };
                    assert_eq!(sum.to_bits(), expected.to_bits(), "{set}: {i} of 16, odd one at {at}");
                }
            }
            assert_eq!(set.run(Sums(&[[1.0; 16], row, [3.0; 16]]))[1].to_bits(), alone.to_bits(), "{set}");
        }
    }
}
