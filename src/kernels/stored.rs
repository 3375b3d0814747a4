//! Loading vectors of accumulators from elements as they are stored.

#![allow(unsafe_code)]

use pulp::Simd;

use super::lane::Lane;

/// An element type that the kernels read as accumulators `A`.
pub(crate) trait Stored<A: Lane>: Copy + Send + Sync + 'static {
    /// One vector.
    ///
    /// # Safety
    /// `from` must be valid for reading as many elements as a vector has lanes; it need not be aligned to them.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> A::Vector<S>;

    /// The first elements, filled up with 0 where there are fewer than lanes.
    fn load_partial<S: Simd>(simd: S, from: &[Self]) -> A::Vector<S>;
}

impl Stored<f32> for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(_simd: S, from: *const f32) -> S::f32s {
        // SAFETY: the same contract.
        unsafe { <f32 as Lane>::load::<S>(from) }
    }
    #[inline(always)]
    fn load_partial<S: Simd>(simd: S, from: &[f32]) -> S::f32s {
        <f32 as Lane>::load_partial(simd, from)
    }
}

macro_rules! stored_scalar { ($t:ty) => {
impl Stored<f32> for $t {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const $t) -> S::f32s {
        let mut wide = [0f32; 16];
        // SAFETY: the same contract.
        let from = unsafe { core::slice::from_raw_parts(from, <f32 as Lane>::lanes::<S>()) };
        for (wide, from) in wide.iter_mut().zip(from) { *wide = from.to_f32(); }
        let _ = simd;
        <f32 as Lane>::load_slice::<S>(&wide)
    }
    #[inline(always)]
    fn load_partial<S: Simd>(simd: S, from: &[$t]) -> S::f32s {
        let mut wide = [0f32; 16];
        for (wide, from) in wide.iter_mut().zip(from) { *wide = from.to_f32(); }
        let _ = simd;
        <f32 as Lane>::load_slice::<S>(&wide)
    }
}
}}
stored_scalar!(half::f16);
stored_scalar!(half::bf16);
