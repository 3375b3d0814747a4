//! What Q and K hold where their products are taken: accumulators, or pairs of bf16 that one instruction multiplies and adds.

#![allow(unsafe_code)]

use pulp::Simd;

#[cfg(target_arch = "x86_64")]
use super::convert::{is, transmute};
use super::lane::Lane;
use crate::InstructionSet;

/// The factors of `Q K^T`, a step of the sum in the place of an accumulator.
pub(crate) trait Factors<A: Lane>: Copy {
    /// Elements of a row that make a step.
    const ELEMENTS: usize;
    /// Whether scores are multiplied with `softmax_scale`; else Q already is.
    const SCALES_SCORES: bool;

    /// `k * q + sum`, over the elements of a step.
    fn mul_add<S: Simd>(self, simd: S, k: A::Vector<S>, q: A::Vector<S>, sum: A::Vector<S>) -> A::Vector<S>;

    /// Steps of a row.
    #[inline(always)]
    fn steps(head_dim: usize) -> usize {
        head_dim.div_ceil(Self::ELEMENTS)
    }
}

/// Accumulators, one a step.
#[derive(Clone, Copy)]
pub(crate) struct Accumulators;

impl<A: Lane> Factors<A> for Accumulators {
    const ELEMENTS: usize = 1;
    const SCALES_SCORES: bool = false;

    #[inline(always)]
    fn mul_add<S: Simd>(self, simd: S, k: A::Vector<S>, q: A::Vector<S>, sum: A::Vector<S>) -> A::Vector<S> {
        A::mul_add(simd, k, q, sum)
    }
}

/// Two neighbours of bf16 a step, the first in the low half; behind an odd last one a zero. (AVX512-BF16: twice the products of
/// an FMA in the same time.) Products are exact in f32 and added in f32, to nearest, the second before the first; but factors, products and
/// sums below 2^-126 count as 0, whatever the mode of the CPU says.
///
/// A value is the proof that the CPU multiplies them: [`new`](Self::new) alone makes one.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Pairs(());

impl Bf16Pairs {
    /// For a set that multiplies them.
    pub(crate) fn new(set: InstructionSet) -> Option<Self> {
        set.has_bf16_pairs().then_some(Self(()))
    }
}

impl Factors<f32> for Bf16Pairs {
    const ELEMENTS: usize = 2;
    // Scaled Q would have to be rounded to bf16.
    const SCALES_SCORES: bool = true;

    #[inline(always)]
    fn mul_add<S: Simd>(self, _simd: S, k: S::f32s, q: S::f32s, sum: S::f32s) -> S::f32s {
        #[cfg(target_arch = "x86_64")]
        if is::<S, pulp::x86::V4>() {
            // SAFETY: `self` exists, so the CPU has AVX512-BF16 (see `new`); vectors of V4 are 512 bits in memory, and any bits are a value.
            return unsafe {
                transmute(core::arch::x86_64::_mm512_dpbf16_ps(transmute(sum), transmute(k), transmute(q)))
            };
        }
        let _ = (k, q, sum);
        unreachable!("`InstructionSet::run_bf16_pairs` has no other vectors")
    }
}
