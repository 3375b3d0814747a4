//! One of several neighbours in memory, in all lanes of a vector: a value dim of a key.
//!
//! In general that is a load. NEON multiplies by an element of a register, so there one load brings four neighbours (the compiler
//! sees that they share it), and the copy becomes a part of the multiply-adds that use it. [llvm-mca, value tile 6 x 4]
//! neoverse-n1 12.0 cycles a key instead of 12.5, neoverse-v1 6.0 instead of 6.9, apple-m1 8.0 instead of 11.0.

#![allow(unsafe_code)]

use pulp::Simd;

use super::lane::Lane;

/// `from[i]` of `N` neighbours in all lanes. Meant for a loop over `i` that is unrolled.
///
/// # Safety
/// `from` must be valid for reading `N` elements, and `i` less than `N`.
#[inline(always)]
pub(crate) unsafe fn broadcast<S: Simd, A: Lane, const N: usize>(simd: S, from: *const A, i: usize) -> A::Vector<S> {
    #[cfg(target_arch = "aarch64")]
    if is_f32_on_neon::<S, A>() {
        use core::arch::aarch64::*;
        use core::mem::transmute_copy;
        let (quad, pair) = (i / 4 * 4, i / 2 * 2);
        // SAFETY: 4 or 2 elements are read only where all are among the `N`. The token proves that NEON exists, and its f32
        // vectors are 4 numbers in memory, as those of the intrinsics are.
        unsafe {
            if quad + 4 <= N {
                let four = vld1q_f32(from.add(quad).cast());
                return transmute_copy(&match i - quad {
                    0 => vdupq_laneq_f32::<0>(four),
                    1 => vdupq_laneq_f32::<1>(four),
                    2 => vdupq_laneq_f32::<2>(four),
                    _ => vdupq_laneq_f32::<3>(four),
                });
            }
            if pair + 2 <= N {
                let two = vld1_f32(from.add(pair).cast());
                return transmute_copy(&match i - pair {
                    0 => vdupq_lane_f32::<0>(two),
                    _ => vdupq_lane_f32::<1>(two),
                });
            }
        }
    }
    // SAFETY: `i < N`.
    A::splat(simd, unsafe { *from.add(i) })
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn is_f32_on_neon<S: Simd, A: Lane>() -> bool {
    use core::any::TypeId;
    TypeId::of::<S>() == TypeId::of::<pulp::aarch64::Neon>() && TypeId::of::<A>() == TypeId::of::<f32>()
}
