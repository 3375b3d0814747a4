//! Numbers as tensors hold them, a vector of accumulators at a time.

#![allow(unsafe_code)]

use half::{bf16, f16};
use pulp::Simd;

use super::MAX_LANES;
use super::convert::{
    narrow_bf16, narrow_bf16_scalar, narrow_f16, narrow_f16_scalar, widen_bf16, widen_bf16_scalar, widen_f16,
    widen_f16_scalar,
};
use super::lane::Lane;

/// A number that tensors hold and that is converted to and from the accumulator `A` where it is loaded and stored.
pub(crate) trait Stored<A: Lane>: Copy + Send + Sync + 'static {
    /// Whether it is `A`: the kernels can then work in the tensor's own memory.
    const IS_ACCUMULATOR: bool;
    const ZERO: Self;

    /// The same value.
    fn widen_one(self) -> A;
    /// The nearest value of this type, ties to even.
    fn narrow_one(value: A) -> Self;

    /// # Safety
    /// `from` must be valid for reading as many elements as a vector of `A` has lanes; it need not be aligned.
    unsafe fn widen<S: Simd>(simd: S, from: *const Self) -> A::Vector<S>;

    /// # Safety
    /// `to` must be valid for writing as many elements as a vector of `A` has lanes; it need not be aligned.
    unsafe fn narrow<S: Simd>(simd: S, to: *mut Self, value: A::Vector<S>);

    /// All of `from`, which are fewer than a vector has lanes, filled up with 0.
    #[inline(always)]
    fn widen_partial<S: Simd>(simd: S, from: &[Self]) -> A::Vector<S> {
        let mut padded = [Self::ZERO; MAX_LANES];
        padded[..from.len()].copy_from_slice(from);
        // SAFETY: no vector has more than MAX_LANES lanes.
        unsafe { Self::widen(simd, padded.as_ptr()) }
    }

    /// As many of the first lanes as `to` holds, which are fewer than all.
    #[inline(always)]
    fn narrow_partial<S: Simd>(simd: S, to: &mut [Self], value: A::Vector<S>) {
        let mut padded = [Self::ZERO; MAX_LANES];
        // SAFETY: no vector has more than MAX_LANES lanes.
        unsafe { Self::narrow(simd, padded.as_mut_ptr(), value) };
        to.copy_from_slice(&padded[..to.len()]);
    }
}

impl<A: Lane> Stored<A> for A {
    const IS_ACCUMULATOR: bool = true;
    const ZERO: A = A::ZERO;

    #[inline(always)]
    fn widen_one(self) -> A {
        self
    }
    #[inline(always)]
    fn narrow_one(value: A) -> A {
        value
    }
    #[inline(always)]
    unsafe fn widen<S: Simd>(_: S, from: *const A) -> A::Vector<S> {
        // SAFETY: the same contract.
        unsafe { <A as Lane>::load::<S>(from) }
    }
    #[inline(always)]
    unsafe fn narrow<S: Simd>(_: S, to: *mut A, value: A::Vector<S>) {
        // SAFETY: the same contract.
        unsafe { <A as Lane>::store::<S>(to, value) }
    }
    #[inline(always)]
    fn widen_partial<S: Simd>(simd: S, from: &[A]) -> A::Vector<S> {
        <A as Lane>::load_partial(simd, from)
    }
    #[inline(always)]
    fn narrow_partial<S: Simd>(simd: S, to: &mut [A], value: A::Vector<S>) {
        <A as Lane>::store_partial(simd, to, value)
    }
}

impl Stored<f32> for f16 {
    const IS_ACCUMULATOR: bool = false;
    const ZERO: f16 = f16::ZERO;

    #[inline(always)]
    fn widen_one(self) -> f32 {
        widen_f16_scalar(self)
    }
    #[inline(always)]
    fn narrow_one(value: f32) -> f16 {
        narrow_f16_scalar(value)
    }
    #[inline(always)]
    unsafe fn widen<S: Simd>(simd: S, from: *const f16) -> S::f32s {
        // SAFETY: the same contract.
        unsafe { widen_f16(simd, from) }
    }
    #[inline(always)]
    unsafe fn narrow<S: Simd>(simd: S, to: *mut f16, value: S::f32s) {
        // SAFETY: the same contract.
        unsafe { narrow_f16(simd, value, to) }
    }
}

impl Stored<f32> for bf16 {
    const IS_ACCUMULATOR: bool = false;
    const ZERO: bf16 = bf16::ZERO;

    #[inline(always)]
    fn widen_one(self) -> f32 {
        widen_bf16_scalar(self)
    }
    #[inline(always)]
    fn narrow_one(value: f32) -> bf16 {
        narrow_bf16_scalar(value)
    }
    #[inline(always)]
    unsafe fn widen<S: Simd>(simd: S, from: *const bf16) -> S::f32s {
        // SAFETY: the same contract.
        unsafe { widen_bf16(simd, from) }
    }
    #[inline(always)]
    unsafe fn narrow<S: Simd>(simd: S, to: *mut bf16, value: S::f32s) {
        // SAFETY: the same contract.
        unsafe { narrow_bf16(simd, value, to) }
    }
}
