//! Double precision in the lanes. (Single precision is in `lane`.)

#![allow(unsafe_code)]

use pulp::Simd;

use super::lane::{Lane, has_fma};
use super::transpose::SIDE;

impl Lane for f64 {
    type Vector<S: Simd> = S::f64s;
    type Mask<S: Simd> = S::m64s;

    const ZERO: f64 = 0.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    const LOWEST: f64 = f64::MIN;

    #[inline(always)]
    fn from_f64(value: f64) -> f64 {
        value
    }
    #[inline(always)]
    fn from_index(index: usize) -> f64 {
        index as f64
    }
    #[inline(always)]
    fn mul_scalar(self, other: f64) -> f64 {
        self * other
    }
    #[inline(always)]
    fn add_scalar(self, other: f64) -> f64 {
        self + other
    }
    #[inline(always)]
    fn sub_scalar(self, other: f64) -> f64 {
        self - other
    }
    #[inline(always)]
    fn reciprocal(self) -> f64 {
        1.0 / self
    }
    #[inline(always)]
    fn is_zero(self) -> bool {
        self == 0.0
    }
    #[inline(always)]
    fn logsumexp(max: f64, sum: f64) -> f64 {
        if sum == 0.0 {
            return f64::NAN;
        }
        max + sum.ln()
    }
    #[inline(always)]
    fn splat<S: Simd>(simd: S, value: f64) -> S::f64s {
        simd.splat_f64s(value)
    }
    #[inline(always)]
    fn add<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::f64s {
        simd.add_f64s(a, b)
    }
    #[inline(always)]
    fn sub<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::f64s {
        simd.sub_f64s(a, b)
    }
    #[inline(always)]
    fn mul<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::f64s {
        simd.mul_f64s(a, b)
    }
    #[inline(always)]
    fn mul_add<S: Simd>(simd: S, a: S::f64s, b: S::f64s, c: S::f64s) -> S::f64s {
        if has_fma::<S>() { simd.mul_add_f64s(a, b, c) } else { simd.add_f64s(simd.mul_f64s(a, b), c) }
    }
    #[inline(always)]
    fn max<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::f64s {
        simd.max_f64s(a, b)
    }
    #[inline(always)]
    fn div<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::f64s {
        simd.div_f64s(a, b)
    }
    #[inline(always)]
    fn abs<S: Simd>(simd: S, a: S::f64s) -> S::f64s {
        simd.abs_f64s(a)
    }
    #[inline(always)]
    fn reduce_sum<S: Simd>(simd: S, a: S::f64s) -> f64 {
        simd.reduce_sum_f64s(a)
    }
    #[inline(always)]
    fn reduce_max<S: Simd>(simd: S, a: S::f64s) -> f64 {
        simd.reduce_max_f64s(a)
    }
    #[inline(always)]
    fn load_partial<S: Simd>(simd: S, from: &[f64]) -> S::f64s {
        simd.partial_load_f64s(from)
    }
    #[inline(always)]
    fn store_partial<S: Simd>(simd: S, to: &mut [f64], value: S::f64s) {
        simd.partial_store_f64s(to, value);
    }
    #[inline(always)]
    fn less_than<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::m64s {
        simd.less_than_f64s(a, b)
    }
    #[inline(always)]
    fn select<S: Simd>(simd: S, mask: S::m64s, yes: S::f64s, no: S::f64s) -> S::f64s {
        simd.select_f64s(mask, yes, no)
    }
    #[inline(always)]
    unsafe fn transpose<S: Simd>(simd: S, from: [*const f64; SIDE], to: &[*mut f64]) {
        // SAFETY: the same contract.
        unsafe { super::transpose::transpose_f64(simd, from, to) }
    }
    #[inline(always)]
    fn exp<S: Simd>(simd: S, x: S::f64s) -> S::f64s {
        super::exp_f64::exp_f64(simd, x)
    }
    #[inline(always)]
    fn tanh<S: Simd>(simd: S, x: S::f64s) -> S::f64s {
        super::tanh::tanh_f64(simd, x)
    }
}
