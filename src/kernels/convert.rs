//! f16 and bf16 to f32 and back, one vector of f32 at a time.
//!
//! Widening is exact. Narrowing rounds to nearest, ties to even; beyond the largest finite number by half a unit or more it gives
//! infinity. Subnormals are kept both ways, and a NaN stays a NaN of its sign, whatever its payload.
//!
//! | set | f16 | bf16 |
//! |---|---|---|
//! | AVX2 | F16C: one instruction each way | the upper half of an f32: a shuffle, and integer arithmetic that rounds |
//! | AVX-512 | one instruction each way | a shift, and the same |
//! | NEON | `fcvtl`, `fcvtn` by inline assembly (their intrinsics are not stable) | the same |
//! | portable | widening by a multiplication with 2^112, narrowing as `half` has it | the same |
//!
//! The `Simd` trait has no conversions, so here too are intrinsics of each set.

#![allow(unsafe_code)]

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use core::any::TypeId;

use half::{bf16, f16};
use pulp::Simd;

#[cfg(target_arch = "aarch64")]
use pulp::aarch64::Neon;
#[cfg(target_arch = "x86_64")]
use pulp::x86::{V3, V4};

/// The same value, without asking at run time what the CPU has, as `half` does.
#[inline(always)]
pub(crate) fn widen_f16_scalar(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let sign = (bits & 0x8000) << 16;
    // With exponent and significand where f32 has them, the number is 2^-112 times too small: exactly, subnormals included.
    let scaled = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    // Infinity and NaN came out as finite numbers of that exponent.
    let non_finite = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | non_finite | sign)
}

/// The nearest value, ties to even.
#[inline(always)]
pub(crate) fn narrow_f16_scalar(value: f32) -> f16 {
    f16::from_f32_const(value)
}

/// The same value.
#[inline(always)]
pub(crate) fn widen_bf16_scalar(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// The nearest value, ties to even.
#[inline(always)]
pub(crate) fn narrow_bf16_scalar(value: f32) -> bf16 {
    let bits = value.to_bits();
    // Half a unit of the upper half, less one bit where that is even; what carries over rounds up, into infinity at the end. The sum
    // overflows for NaNs alone, which keep their upper half and become quiet, lest they lose their last bit and turn into infinity.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

/// # Safety
/// `from` must be valid for reading as many elements as `S` has lanes of f32; it need not be aligned.
#[inline(always)]
pub(crate) unsafe fn widen_f16<S: Simd>(_simd: S, from: *const f16) -> S::f32s {
    // SAFETY: reads what the caller allowed; the token proves that the set's instructions exist (V3 runs with F16C, see
    // `InstructionSet`); vectors of the same set and width are transmuted.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            use core::arch::x86_64::*;
            if is::<S, V4>() {
                return transmute(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())));
            }
            if is::<S, V3>() {
                return transmute(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())));
            }
        }
        #[cfg(target_arch = "aarch64")]
        if is::<S, Neon>() {
            let narrow = core::arch::aarch64::vld1_u16(from.cast());
            let wide: core::arch::aarch64::float32x4_t;
            core::arch::asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) narrow,
                options(pure, nomem, nostack, preserves_flags));
            return transmute(wide);
        }
        widen_elements::<S, f16>(from, widen_f16_scalar)
    }
}

/// For `vpshufb` of eight words, which each half of a vector has whole: each of them becomes the upper half of a number of 32 bits. 0x80 gives 0.
#[cfg(target_arch = "x86_64")]
const UPPER_HALVES: [u8; 32] = {
    let mut bytes = [0x80; 32];
    let mut number = 0;
    while number < 8 {
        bytes[4 * number + 2] = 2 * number as u8;
        bytes[4 * number + 3] = 2 * number as u8 + 1;
        number += 1;
    }
    bytes
};

/// # Safety
/// As [`widen_f16`].
#[inline(always)]
pub(crate) unsafe fn widen_bf16<S: Simd>(_simd: S, from: *const bf16) -> S::f32s {
    // SAFETY: as in `widen_f16`.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            use core::arch::x86_64::*;
            if is::<S, V4>() {
                // Not one `vpermw`: decoding bf16 with that ran at 0.96 to 0.99 of the speed on Emerald Rapids.
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                return transmute(_mm512_slli_epi32::<16>(bits));
            }
            if is::<S, V3>() {
                // The load copies for nothing; a shift, which takes a port of FMAs, is saved. [measured, decode, AVX2 on Emerald Rapids, best of 6, seven
                // pairs of runs] 1.01 to 1.12 times as fast as widening to 32 bits and a shift.
                let narrow = _mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast()));
                return transmute(_mm256_shuffle_epi8(narrow, transmute(UPPER_HALVES)));
            }
        }
        #[cfg(target_arch = "aarch64")]
        if is::<S, Neon>() {
            use core::arch::aarch64::*;
            return transmute(vshll_n_u16::<16>(vld1_u16(from.cast())));
        }
        widen_elements::<S, bf16>(from, widen_bf16_scalar)
    }
}

/// # Safety
/// `to` must be valid for writing as many elements as `S` has lanes of f32; it need not be aligned.
#[inline(always)]
pub(crate) unsafe fn narrow_f16<S: Simd>(_simd: S, value: S::f32s, to: *mut f16) {
    // SAFETY: writes what the caller allowed; otherwise as in `widen_f16`.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            use core::arch::x86_64::*;
            if is::<S, V4>() {
                let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(transmute(value));
                return _mm256_storeu_si256(to.cast(), narrow);
            }
            if is::<S, V3>() {
                let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(transmute(value));
                return _mm_storeu_si128(to.cast(), narrow);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if is::<S, Neon>() {
            let wide: core::arch::aarch64::float32x4_t = transmute(value);
            let narrow: core::arch::aarch64::uint16x4_t;
            core::arch::asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) narrow, in(vreg) wide,
                options(pure, nomem, nostack, preserves_flags));
            return core::arch::aarch64::vst1_u16(to.cast(), narrow);
        }
        narrow_elements::<S, f16>(value, to, narrow_f16_scalar);
    }
}

/// # Safety
/// As [`narrow_f16`].
#[inline(always)]
pub(crate) unsafe fn narrow_bf16<S: Simd>(_simd: S, value: S::f32s, to: *mut bf16) {
    // The arithmetic of `narrow_bf16_scalar`.
    // SAFETY: as in `narrow_f16`.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            use core::arch::x86_64::*;
            if is::<S, V4>() {
                let bits: __m512i = transmute(value);
                let upper = _mm512_srli_epi32::<16>(bits);
                let is_odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
                let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
                let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
                let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(transmute(value), transmute(value));
                let narrow = _mm512_mask_blend_epi32(is_nan, _mm512_srli_epi32::<16>(rounded), quiet);
                return _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(narrow));
            }
            if is::<S, V3>() {
                let bits: __m256i = transmute(value);
                let upper = _mm256_srli_epi32::<16>(bits);
                let is_odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
                let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd);
                let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
                let is_nan: __m256i = transmute(_mm256_cmp_ps::<_CMP_UNORD_Q>(transmute(value), transmute(value)));
                let narrow = _mm256_blendv_epi8(_mm256_srli_epi32::<16>(rounded), quiet, is_nan);
                let narrow = _mm_packus_epi32(_mm256_castsi256_si128(narrow), _mm256_extracti128_si256::<1>(narrow));
                return _mm_storeu_si128(to.cast(), narrow);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if is::<S, Neon>() {
            use core::arch::aarch64::*;
            let bits: uint32x4_t = transmute(value);
            let upper = vshrq_n_u32::<16>(bits);
            let is_odd = vandq_u32(upper, vdupq_n_u32(1));
            let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), is_odd);
            let quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
            let is_number = vceqq_f32(transmute(value), transmute(value));
            let narrow = vbslq_u32(is_number, vshrq_n_u32::<16>(rounded), quiet);
            return vst1_u16(to.cast(), vmovn_u32(narrow));
        }
        narrow_elements::<S, bf16>(value, to, narrow_bf16_scalar);
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
pub(super) fn is<S: 'static, Set: 'static>() -> bool {
    TypeId::of::<S>() == TypeId::of::<Set>()
}

/// # Safety
/// `From` and `To` must be vectors of the same size; any bits must be a value of `To`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
pub(super) unsafe fn transmute<From: Copy, To: Copy>(from: From) -> To {
    assert!(size_of::<From>() == size_of::<To>()); // not const: it is compiled for the other sets too, though never run
    // SAFETY: of one size (asserted), the rest by the caller's promise.
    unsafe { core::mem::transmute_copy(&from) }
}

/// # Safety
/// As [`widen_f16`].
#[inline(always)]
unsafe fn widen_elements<S: Simd, T>(from: *const T, widen: impl Fn(T) -> f32) -> S::f32s {
    let mut vector: S::f32s = pulp::bytemuck::Zeroable::zeroed();
    for (lane, to) in pulp::bytemuck::cast_slice_mut(core::slice::from_mut(&mut vector)).iter_mut().enumerate() {
        // SAFETY: `lane` is below the number of lanes.
        *to = widen(unsafe { from.add(lane).read_unaligned() });
    }
    vector
}

/// # Safety
/// As [`narrow_f16`].
#[inline(always)]
unsafe fn narrow_elements<S: Simd, T>(value: S::f32s, to: *mut T, narrow: impl Fn(f32) -> T) {
    for (lane, &from) in pulp::bytemuck::cast_slice::<_, f32>(core::slice::from_ref(&value)).iter().enumerate() {
        // SAFETY: `lane` is below the number of lanes.
        unsafe { to.add(lane).write_unaligned(narrow(from)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InstructionSet;
    use crate::kernels::WithTiles;
    use crate::kernels::stored::Stored;

    fn sets() -> impl Iterator<Item = InstructionSet> {
        InstructionSet::available().chain([InstructionSet::portable_256(), InstructionSet::portable_512()])
    }

    struct Widen<'a, T>(&'a [T], &'a mut [f32]);

    impl<T: Stored<f32>> WithTiles for Widen<'_, T> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            for (from, to) in self.0.chunks(S::F32_LANES).zip(self.1.chunks_mut(S::F32_LANES)) {
                let whole = from.len() == S::F32_LANES;
                // SAFETY: a whole vector.
                let wide = if whole { unsafe { T::widen(simd, from.as_ptr()) } } else { T::widen_partial(simd, from) };
                simd.partial_store_f32s(to, wide);
            }
        }
    }

    struct Narrow<'a, T>(&'a [f32], &'a mut [T]);

    impl<T: Stored<f32>> WithTiles for Narrow<'_, T> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            for (from, to) in self.0.chunks(S::F32_LANES).zip(self.1.chunks_mut(S::F32_LANES)) {
                let wide = simd.partial_load_f32s(from);
                if to.len() == S::F32_LANES {
                    // SAFETY: a whole vector.
                    unsafe { T::narrow(simd, to.as_mut_ptr(), wide) };
                } else {
                    T::narrow_partial(simd, to, wide);
                }
            }
        }
    }

    fn widen<T: Stored<f32>>(set: InstructionSet, from: &[T]) -> Vec<f32> {
        let mut to = vec![-1.0; from.len()];
        set.run(Widen(from, &mut to));
        to
    }

    fn narrow<T: Stored<f32>>(set: InstructionSet, from: &[f32]) -> Vec<T> {
        let mut to = vec![T::ZERO; from.len()];
        set.run(Narrow(from, &mut to));
        to
    }

    /// `T` by its bits, and what `half` says it is.
    trait Half: Stored<f32> {
        fn from_bits(bits: u16) -> Self;
        fn bits(self) -> u16;
        fn expected_wide(self) -> f32;
        fn expected_narrow(wide: f32) -> Self;
        /// Neighbours, from which the ties are made.
        const INFINITY: u16;
    }

    impl Half for f16 {
        const INFINITY: u16 = 0x7c00;
        fn from_bits(bits: u16) -> f16 {
            f16::from_bits(bits)
        }
        fn bits(self) -> u16 {
            self.to_bits()
        }
        fn expected_wide(self) -> f32 {
            self.to_f32_const()
        }
        fn expected_narrow(wide: f32) -> f16 {
            f16::from_f32_const(wide)
        }
    }

    impl Half for bf16 {
        const INFINITY: u16 = 0x7f80;
        fn from_bits(bits: u16) -> bf16 {
            bf16::from_bits(bits)
        }
        fn bits(self) -> u16 {
            self.to_bits()
        }
        fn expected_wide(self) -> f32 {
            self.to_f32_const()
        }
        fn expected_narrow(wide: f32) -> bf16 {
            bf16::from_f32_const(wide)
        }
    }

    fn is_nan<T: Half>(value: T) -> bool {
        value.bits() & 0x7fff > T::INFINITY
    }

    fn assert_wide<T: Half>(from: T, wide: f32, by: &str) {
        let expected = from.expected_wide();
        if is_nan(from) {
            let same_sign = wide.to_bits() >> 31 == u32::from(from.bits() >> 15);
            assert!(wide.is_nan() && same_sign, "{by}: {:#x} gives {:#x}", from.bits(), wide.to_bits());
        } else {
            assert_eq!(wide.to_bits(), expected.to_bits(), "{by}: {:#x}", from.bits());
        }
    }

    fn assert_narrow<T: Half>(from: f32, narrow: T, by: &str) {
        if from.is_nan() {
            let same_sign = from.to_bits() >> 31 == u32::from(narrow.bits() >> 15);
            assert!(is_nan(narrow) && same_sign, "{by}: {:#x} gives {:#x}", from.to_bits(), narrow.bits());
        } else {
            let expected = T::expected_narrow(from).bits();
            assert_eq!(narrow.bits(), expected, "{by}: {from:e} ({:#x})", from.to_bits());
        }
    }

    fn every_pattern_converts_exactly_both_ways<T: Half>() {
        let all: Vec<T> = (0..=u16::MAX).map(T::from_bits).collect();
        for &x in &all {
            assert_wide(x, x.widen_one(), "scalar");
            assert_narrow(x.widen_one(), T::narrow_one(x.widen_one()), "scalar");
        }
        for set in sets() {
            // The second time from one past a multiple of every vector, so that the last are a partial one.
            for all in [&all[..], &all[1..]] {
                let wide = widen(set, all);
                let back = narrow::<T>(set, &wide);
                for ((&x, &wide), &back) in all.iter().zip(&wide).zip(&back) {
                    assert_wide(x, wide, set.name());
                    assert!(
                        is_nan(x) || back.bits() == x.bits(),
                        "{set}: {:#x} came back as {:#x}",
                        x.bits(),
                        back.bits()
                    );
                    assert_narrow(wide, back, set.name());
                }
            }
        }
    }

    #[test]
    fn every_f16_converts_exactly_both_ways() {
        every_pattern_converts_exactly_both_ways::<f16>();
    }

    #[test]
    fn every_bf16_converts_exactly_both_ways() {
        every_pattern_converts_exactly_both_ways::<bf16>();
    }

    fn narrowing_rounds_to_nearest_even<T: Half>() {
        // Half way between neighbours, beyond the last one too, and one f32 to either side.
        let mut wide = Vec::new();
        for bits in 0..T::INFINITY {
            let (below, above) = (T::from_bits(bits).widen_one(), T::from_bits(bits + 1).widen_one());
            // Infinity counts as what would come next: as far as the last step.
            let step = if bits + 1 == T::INFINITY { below - T::from_bits(bits - 1).widen_one() } else { above - below };
            let tie = (below + step / 2.0).to_bits();
            for bits in [tie - 1, tie, tie + 1] {
                wide.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
            }
        }
        // Prime steps through all bit patterns, and the ends.
        wide.extend((0..=u32::MAX).step_by(13_009).map(f32::from_bits));
        wide.extend([0.0, -0.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE]);
        wide.extend([1, 0x7f_ffff, 0x8000_0001, 0x7f80_0001, 0xff80_0001, 0x7fff_ffff, u32::MAX].map(f32::from_bits));
        for &x in &wide {
            assert_narrow(x, T::narrow_one(x), "scalar");
        }
        for set in sets() {
            for (&x, narrow) in wide.iter().zip(narrow::<T>(set, &wide)) {
                assert_narrow(x, narrow, set.name());
            }
        }
    }

    #[test]
    fn narrowing_to_f16_rounds_to_nearest_even() {
        narrowing_rounds_to_nearest_even::<f16>();
    }

    #[test]
    fn narrowing_to_bf16_rounds_to_nearest_even() {
        narrowing_rounds_to_nearest_even::<bf16>();
    }
}
