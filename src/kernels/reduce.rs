//! Four horizontal sums at once, which costs little more than one.
//!
//! The order of additions is the same for each of the four, wherever it stands: a score does not depend on which of its
//! neighbours were computed with it. [measured] in benches/results/log.md.

#![allow(unsafe_code)]

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use core::{any::TypeId, mem::transmute_copy};

use pulp::Simd;

/// The sums of the lanes of four vectors.
#[inline(always)]
pub(crate) fn sums_of_four<S: Simd>(simd: S, vectors: [S::f32s; 4]) -> [f32; 4] {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::*;
        let set = TypeId::of::<S>();
        let mut halves = None;
        if set == TypeId::of::<pulp::x86::V4>() {
            // SAFETY: S is V4, whose token proves AVX-512, and whose vector is this type.
            unsafe {
                let mut folded = [_mm256_setzero_ps(); 4];
                for i in 0..4 {
                    let vector: __m512 = transmute_copy(&vectors[i]);
                    let upper = _mm512_extractf32x8_ps::<1>(vector);
                    folded[i] = _mm256_add_ps(_mm512_castps512_ps256(vector), upper);
                }
                halves = Some(folded);
            }
        } else if set == TypeId::of::<pulp::x86::V3>() {
            // SAFETY: S is V3, whose vector is this type.
            halves = Some(unsafe { transmute_copy::<[S::f32s; 4], [__m256; 4]>(&vectors) });
        }
        if let Some([a, b, c, d]) = halves {
            // SAFETY: both sets contain AVX; the result is an array of four f32.
            unsafe {
                let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
                let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
                return transmute_copy(&sums);
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    if TypeId::of::<S>() == TypeId::of::<pulp::aarch64::Neon>() {
        use core::arch::aarch64::*;
        // SAFETY: S is Neon, whose vector is this type; the result is an array of four f32.
        unsafe {
            let [a, b, c, d] = transmute_copy::<[S::f32s; 4], [float32x4_t; 4]>(&vectors);
            return transmute_copy(&vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
        }
    }
    let mut sums = [0.0; 4];
    for i in 0..4 {
        sums[i] = simd.reduce_sum_f32s(vectors[i]);
    }
    sums
}
