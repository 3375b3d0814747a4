//! 2^x for x <= 0.
//!
//! `x = n + f` with `n` the nearest integer and `f` in [-1/2, 1/2]; `2^x = 2^n * p(f)`.
//! 1. Adding 1.5 * 2^23 rounds `x` to an integer in the low bits of the sum. 127 added to that constant makes them the
//!    exponent field of `2^n`, so that one shift builds it.
//! 2. `p` has degree 5 with `p(0) = 1` exactly: equal scores give a weight of exactly 1, and a block that does not
//!    raise the maximum rescales by exactly 1. Largest relative error 1.7e-7 (degree 6: 7e-8 for one more FMA).
//! 3. `2^n` is multiplied in. Adding `n` to the exponent bits of `p` instead would turn some NaNs into numbers.
//! 4. Below -126 the result is exactly 0, by a comparison that is false for NaN, so that NaN stays NaN.

use pulp::Simd;

use super::lane::Lane;

/// Below this, 2^x would be subnormal: the result is 0.
pub(crate) const UNDERFLOW: f32 = -126.0;

/// Coefficients of f^1..f^5: minimax for the relative error on [-1/2, 1/2] with the constant term fixed at 1.
#[allow(clippy::excessive_precision)] // these decimals are the exact bits of the fit
const COEFFICIENTS: [f32; 5] = [0.693146944, 0.240222394, 0.0555073544, 0.0096715102, 0.00132647273];

/// 2^x for `x` in [-inf, 127] or NaN; exactly 0 below -126, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2_f32<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const ROUND: f32 = 12_582_912.0 + 127.0; // 1.5 * 2^23 + the exponent bias
    let round = simd.splat_f32s(ROUND);
    let shifted = simd.add_f32s(x, round);
    let fraction = simd.sub_f32s(x, simd.sub_f32s(shifted, round));
    let mut p = simd.splat_f32s(COEFFICIENTS[4]);
    for c in COEFFICIENTS[..4].iter().rev() {
        p = <f32 as Lane>::mul_add(simd, p, fraction, simd.splat_f32s(*c));
    }
    p = <f32 as Lane>::mul_add(simd, p, fraction, simd.splat_f32s(1.0));
    let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let result = simd.mul_f32s(p, simd.transmute_f32s_u32s(power));
    let underflows = simd.less_than_f32s(x, simd.splat_f32s(UNDERFLOW));
    simd.select_f32s(underflows, simd.splat_f32s(0.0), result)
}
