//! The vector operations that the kernels need of an accumulator type, over any `pulp::Simd`.

#![allow(unsafe_code)]

use core::any::TypeId;

use pulp::{Scalar128b, Scalar256b, Scalar512b, Simd};

use super::transpose::SIDE;

/// A number that fills SIMD lanes. The kernels are written over this, so that one text serves every accumulator.
///
/// Where an operand is NaN: arithmetic gives NaN, `less_than` false, and `max` either operand.
pub(crate) trait Lane: Copy + PartialOrd + Send + Sync + 'static {
    type Vector<S: Simd>: Copy;
    type Mask<S: Simd>: Copy;

    const ZERO: Self;
    const NEG_INFINITY: Self;
    /// The least finite number.
    const LOWEST: Self;

    fn from_f64(value: f64) -> Self;
    /// Exact for the block-relative key indices it is used on (below 2^24).
    fn from_index(index: usize) -> Self;
    fn mul_scalar(self, other: Self) -> Self;
    fn add_scalar(self, other: Self) -> Self;
    fn sub_scalar(self, other: Self) -> Self;
    /// 1 / self.
    fn reciprocal(self) -> Self;
    /// False for NaN.
    fn is_zero(self) -> bool;
    /// `max + ln(sum)`, NaN where the sum is 0: every visible score was -inf, which has no softmax.
    fn logsumexp(max: Self, sum: Self) -> Self;

    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    fn add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn sub<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn mul<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a * b + c`, fused wherever the set has it.
    fn mul_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;
    fn max<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn div<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn abs<S: Simd>(simd: S, a: Self::Vector<S>) -> Self::Vector<S>;
    /// The sums of the lanes of several vectors, each in the same order.
    #[inline(always)]
    fn reduce_sums<S: Simd, const N: usize>(simd: S, vectors: [Self::Vector<S>; N]) -> [Self; N] {
        let mut sums = [Self::ZERO; N];
        for i in 0..N {
            sums[i] = Self::reduce_sum(simd, vectors[i]);
        }
        sums
    }
    /// The largest lane of several vectors.
    #[inline(always)]
    fn reduce_maxima<S: Simd, const N: usize>(simd: S, vectors: [Self::Vector<S>; N]) -> [Self; N] {
        let mut maxima = [Self::ZERO; N];
        for i in 0..N {
            maxima[i] = Self::reduce_max(simd, vectors[i]);
        }
        maxima
    }
    /// The sum of all lanes, always in the same order.
    fn reduce_sum<S: Simd>(simd: S, a: Self::Vector<S>) -> Self;
    fn reduce_max<S: Simd>(simd: S, a: Self::Vector<S>) -> Self;
    /// The first elements, filled up with 0 where there are fewer than lanes.
    fn load_partial<S: Simd>(simd: S, from: &[Self]) -> Self::Vector<S>;
    /// As many of the first lanes as `to` holds.
    fn store_partial<S: Simd>(simd: S, to: &mut [Self], value: Self::Vector<S>);
    fn less_than<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Mask<S>;
    fn select<S: Simd>(simd: S, mask: Self::Mask<S>, yes: Self::Vector<S>, no: Self::Vector<S>) -> Self::Vector<S>;
    /// e^x, see [`crate::kernels::exp`].
    fn exp<S: Simd>(simd: S, x: Self::Vector<S>) -> Self::Vector<S>;
    /// tanh(x), see [`crate::kernels::tanh`].
    fn tanh<S: Simd>(simd: S, x: Self::Vector<S>) -> Self::Vector<S>;

    /// See [`transpose`](super::transpose::transpose).
    ///
    /// # Safety
    /// Each of `from` must be valid for reading 8 elements, each of `to` (at most 8) for writing 8.
    unsafe fn transpose<S: Simd>(simd: S, from: [*const Self; SIDE], to: &[*mut Self]);

    #[inline(always)]
    fn lanes<S: Simd>() -> usize {
        size_of::<Self::Vector<S>>() / size_of::<Self>()
    }

    #[inline(always)]
    fn load_slice<S: Simd>(from: &[Self]) -> Self::Vector<S> {
        assert!(from.len() >= Self::lanes::<S>());
        // SAFETY: long enough (asserted).
        unsafe { Self::load::<S>(from.as_ptr()) }
    }

    #[inline(always)]
    fn store_slice<S: Simd>(to: &mut [Self], value: Self::Vector<S>) {
        assert!(to.len() >= Self::lanes::<S>());
        // SAFETY: long enough (asserted).
        unsafe { Self::store::<S>(to.as_mut_ptr(), value) }
    }

    #[inline(always)]
    fn first_lane<S: Simd>(vector: Self::Vector<S>) -> Self {
        // SAFETY: a vector is an array of `Self` in memory, of at least one.
        unsafe { core::mem::transmute_copy(&vector) }
    }

    /// # Safety
    /// `from` must be valid for reading one vector; it need not be aligned.
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> Self::Vector<S> {
        // SAFETY: valid by the caller's promise; vectors are plain numbers, any bits are a value.
        unsafe { from.cast::<Self::Vector<S>>().read_unaligned() }
    }

    /// # Safety
    /// `to` must be valid for writing one vector; it need not be aligned.
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, value: Self::Vector<S>) {
        // SAFETY: valid by the caller's promise.
        unsafe { to.cast::<Self::Vector<S>>().write_unaligned(value) }
    }
}

/// The vectors of a scratch array, `ROW_VECTORS` to a row.
#[inline(always)]
pub(crate) fn as_rows<S: Simd, A: Lane, const ROW_VECTORS: usize>(
    array: &mut [A],
) -> &mut [[A::Vector<S>; ROW_VECTORS]] {
    let len = array.len() / (ROW_VECTORS * A::lanes::<S>());
    assert!(array.as_ptr().cast::<A::Vector<S>>().is_aligned());
    // SAFETY: aligned (asserted), `len` whole rows, and a vector is an array of `A` in memory.
    unsafe { std::slice::from_raw_parts_mut(array.as_mut_ptr().cast(), len) }
}

/// Whether a fused multiply-add is an instruction of the set. On pulp's portable sets it is a call of libm for each
/// lane, some 100 times slower than a multiplication and an addition.
#[inline(always)]
pub(crate) fn has_fma<S: Simd>() -> bool {
    let set = TypeId::of::<S>();
    ![TypeId::of::<Scalar128b>(), TypeId::of::<Scalar256b>(), TypeId::of::<Scalar512b>()].contains(&set)
}

/// `x`, or `least` where `x` is less. NaN stays.
#[inline(always)]
pub(crate) fn at_least<S: Simd, A: Lane>(simd: S, x: A::Vector<S>, least: A) -> A::Vector<S> {
    let least = A::splat(simd, least);
    if has_fma::<S>() {
        A::max(simd, least, x) // NaN in the second operand survives: x86 returns that operand, NEON any NaN
    } else {
        A::select(simd, A::less_than(simd, x, least), least, x) // the portable maximum would drop NaN
    }
}

impl Lane for f32 {
    type Vector<S: Simd> = S::f32s;
    type Mask<S: Simd> = S::m32s;

    const ZERO: f32 = 0.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    const LOWEST: f32 = f32::MIN;

    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
    #[inline(always)]
    fn from_index(index: usize) -> f32 {
        index as f32
    }
    #[inline(always)]
    fn mul_scalar(self, other: f32) -> f32 {
        self * other
    }
    #[inline(always)]
    fn add_scalar(self, other: f32) -> f32 {
        self + other
    }
    #[inline(always)]
    fn sub_scalar(self, other: f32) -> f32 {
        self - other
    }
    #[inline(always)]
    fn reciprocal(self) -> f32 {
        1.0 / self
    }
    #[inline(always)]
    fn is_zero(self) -> bool {
        self == 0.0
    }
    #[inline(always)]
    fn logsumexp(max: f32, sum: f32) -> f32 {
        if sum == 0.0 {
            return f32::NAN;
        }
        max + sum.ln()
    }
    #[inline(always)]
    fn splat<S: Simd>(simd: S, value: f32) -> S::f32s {
        simd.splat_f32s(value)
    }
    #[inline(always)]
    fn add<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
        simd.add_f32s(a, b)
    }
    #[inline(always)]
    fn sub<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
        simd.sub_f32s(a, b)
    }
    #[inline(always)]
    fn mul<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
        simd.mul_f32s(a, b)
    }
    #[inline(always)]
    fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
        if has_fma::<S>() { simd.mul_add_f32s(a, b, c) } else { simd.add_f32s(simd.mul_f32s(a, b), c) }
    }
    #[inline(always)]
    fn max<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
        simd.max_f32s(a, b)
    }
    #[inline(always)]
    fn div<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
        simd.div_f32s(a, b)
    }
    #[inline(always)]
    fn abs<S: Simd>(simd: S, a: S::f32s) -> S::f32s {
        simd.abs_f32s(a)
    }
    #[inline(always)]
    fn reduce_sums<S: Simd, const N: usize>(simd: S, vectors: [S::f32s; N]) -> [f32; N] {
        super::reduce::sums(simd, vectors)
    }
    #[inline(always)]
    fn reduce_sum<S: Simd>(simd: S, a: S::f32s) -> f32 {
        simd.reduce_sum_f32s(a)
    }
    #[inline(always)]
    fn reduce_max<S: Simd>(simd: S, a: S::f32s) -> f32 {
        simd.reduce_max_f32s(a)
    }
    #[inline(always)]
    fn load_partial<S: Simd>(simd: S, from: &[f32]) -> S::f32s {
        simd.partial_load_f32s(from)
    }
    #[inline(always)]
    fn store_partial<S: Simd>(simd: S, to: &mut [f32], value: S::f32s) {
        simd.partial_store_f32s(to, value);
    }
    #[inline(always)]
    fn less_than<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::m32s {
        simd.less_than_f32s(a, b)
    }
    #[inline(always)]
    fn select<S: Simd>(simd: S, mask: S::m32s, yes: S::f32s, no: S::f32s) -> S::f32s {
        simd.select_f32s(mask, yes, no)
    }
    #[inline(always)]
    unsafe fn transpose<S: Simd>(simd: S, from: [*const f32; SIDE], to: &[*mut f32]) {
        // SAFETY: the same contract.
        unsafe { super::transpose::transpose(simd, from, to) }
    }
    #[inline(always)]
    fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        super::exp::exp_f32(simd, x)
    }
    #[inline(always)]
    fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        super::tanh::tanh_f32(simd, x)
    }
}
