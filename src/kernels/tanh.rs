//! tanh, for softcap.
//!
//! With `y = -2|x| = n ln(2) + r`, `n` the nearest integer to `y log2(e)`:
//!
//! ```text
//! tanh|x| = (1 - e^y) / (1 + e^y)        e^y -+ 1 = 2^n (e^r - 1) + (2^n -+ 1)        e^r - 1 = r + r^2 q(r)
//! ```
//! 1. Near 0, where `n = 0`, nothing is subtracted: the result is relatively exact down to the subnormals. Elsewhere `2^n - 1` is at most
//!    -1/2, and what is added to it smaller.
//! 2. `y` is raised to -40 at least (f64: -80), where tanh is 1 as rounded. A NaN comes through, as in [`exp`](super::exp).
//! 3. f32: `q` has degree 4, error 1.7e-8 of `e^r - 1`. f64: `q` is that of [`super::exp_f64`].
//!
//! Largest error: f32 1.75e-7, f64 5e-16, relative; up to 1.6 times that where multiply-add is not fused.

use core::f32::consts::LOG2_E;

use pulp::Simd;

use super::exp_f64;
use super::lane::{Lane, at_least};

/// Coefficients of `q`: minimax for the relative error of `e^r - 1` on [-ln(2)/2, ln(2)/2].
#[allow(clippy::excessive_precision)] // these decimals are the exact bits of the fit
const COEFFICIENTS: [f32; 5] = [0.4999999702, 0.1666654199, 0.04166720435, 0.008366647176, 0.001388249802];

/// ln(2) in two parts, of which the first has 10 bits.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// tanh of any number; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh_f32<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const ROUND: f32 = 12_582_912.0 + 127.0; // 1.5 * 2^23 + the exponent bias
    let y = simd.mul_f32s(simd.abs_f32s(x), simd.splat_f32s(-2.0));
    let y = at_least(simd, y, -40.0f32);
    let round = simd.splat_f32s(ROUND);
    let shifted = <f32 as Lane>::mul_add(simd, y, simd.splat_f32s(LOG2_E), round);
    let n = simd.sub_f32s(shifted, round);
    let mut r = y;
    for ln_2 in LN_2 {
        r = <f32 as Lane>::mul_add(simd, n, simd.splat_f32s(-ln_2), r);
    }
    let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let mut q = simd.splat_f32s(COEFFICIENTS[4]);
    for c in COEFFICIENTS[..4].iter().rev() {
        q = <f32 as Lane>::mul_add(simd, q, r, simd.splat_f32s(*c));
    }
    finish::<S, f32>(simd, x, r, q, simd.transmute_f32s_u32s(power))
}

/// tanh of any number; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh_f64<S: Simd>(simd: S, x: S::f64s) -> S::f64s {
    let y = simd.mul_f64s(simd.abs_f64s(x), simd.splat_f64s(-2.0));
    let (n, r) = exp_f64::split(simd, at_least(simd, y, -80.0f64));
    // Those are coefficients of 2 e^r.
    let mut q = simd.splat_f64s(exp_f64::COEFFICIENTS[11] / 2.0);
    for c in exp_f64::COEFFICIENTS[2..11].iter().rev() {
        q = <f64 as Lane>::mul_add(simd, q, r, simd.splat_f64s(*c / 2.0));
    }
    finish::<S, f64>(simd, x, r, q, exp_f64::power(simd, n, 1023.0))
}

/// From `r`, `q(r)` and `2^n` to the result with the sign of `x`.
#[inline(always)]
fn finish<S: Simd, A: Lane>(
    simd: S,
    x: A::Vector<S>,
    r: A::Vector<S>,
    q: A::Vector<S>,
    power: A::Vector<S>,
) -> A::Vector<S> {
    let (zero, one) = (A::splat(simd, A::ZERO), A::splat(simd, A::from_index(1)));
    let expm1_r = A::mul_add(simd, A::mul(simd, r, r), q, r);
    let expm1 = A::mul_add(simd, power, expm1_r, A::sub(simd, power, one));
    let expp1 = A::mul_add(simd, power, expm1_r, A::add(simd, power, one));
    let minus_tanh = A::div(simd, expm1, expp1);
    A::select(simd, A::less_than(simd, x, zero), minus_tanh, A::sub(simd, zero, minus_tanh))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InstructionSet;
    use crate::kernels::WithTiles;

    struct Tanh<'a, A>(&'a [A], &'a mut [A]);

    impl<A: Lane> WithTiles for Tanh<'_, A> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            let lanes = A::lanes::<S>();
            for (x, y) in self.0.chunks_exact(lanes).zip(self.1.chunks_exact_mut(lanes)) {
                A::store_slice::<S>(y, A::tanh(simd, A::load_slice::<S>(x)));
            }
        }
    }

    fn sets() -> impl Iterator<Item = InstructionSet> {
        InstructionSet::available().chain([InstructionSet::portable_256(), InstructionSet::portable_512()])
    }

    fn tanh_f32(set: InstructionSet, x: &[f32]) -> Vec<f32> {
        let mut padded = x.to_vec();
        padded.resize(x.len().next_multiple_of(16), 0.0);
        let mut y = vec![f32::NAN; padded.len()];
        set.run(Tanh(&padded, &mut y));
        y[..x.len()].to_vec()
    }

    fn tanh_f64(set: InstructionSet, x: &[f64]) -> Vec<f64> {
        let mut padded = x.to_vec();
        padded.resize(x.len().next_multiple_of(16), 0.0);
        let mut y = vec![f64::NAN; padded.len()];
        set.run_f64(Tanh(&padded, &mut y));
        y[..x.len()].to_vec()
    }

    /// Every binade, many numbers in those where something happens, both signs.
    fn inputs() -> Vec<f64> {
        let binades = (-120..=20).flat_map(|e| (0..64).map(move |i| 2f64.powi(e) * (1.0 + f64::from(i) / 64.0)));
        let dense = (0..60_000).map(|i| f64::from(i) * 1.1e-4).chain((0..10_000).map(|i| f64::from(i) * 2.2e-3));
        binades.chain(dense).flat_map(|x| [x, -x]).collect()
    }

    #[test]
    fn tanh_is_relatively_as_exact_as_stated_everywhere() {
        let x = inputs();
        let x_f32: Vec<f32> = x.iter().map(|&x| x as f32).collect();
        for set in sets() {
            let slack = if set.has_fma() { 1.0 } else { 1.6 };
            let error = |y: f64, exact: f64| (y / exact - 1.0).abs();
            let errors = x_f32.iter().zip(tanh_f32(set, &x_f32)).map(|(&x, y)| error(y.into(), f64::from(x).tanh()));
            let largest = errors.filter(|error| !error.is_nan()).fold(0.0, f64::max);
            assert!(largest <= 1.75e-7 * slack && largest >= 1.4e-7, "{set}: {largest:e}");
            let errors = x.iter().zip(tanh_f64(set, &x)).map(|(&x, y)| error(y, x.tanh()));
            let largest = errors.filter(|error| !error.is_nan()).fold(0.0, f64::max);
            assert!(largest <= 5e-16 * slack && largest >= 2.2e-16, "{set}: {largest:e}");
        }
    }

    #[test]
    fn tanh_saturates_keeps_nan_and_is_zero_at_zero() {
        for set in sets() {
            let y =
                tanh_f32(set, &[0.0, 20.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::MIN, f32::NAN, -f32::NAN]);
            assert_eq!(y[..6], [0.0, 1.0, 1.0, 1.0, -1.0, -1.0], "{set}");
            assert!(y[6].is_nan() && y[7].is_nan(), "{set}");
            let y =
                tanh_f64(set, &[0.0, 40.0, f64::MAX, f64::INFINITY, f64::NEG_INFINITY, f64::MIN, f64::NAN, -f64::NAN]);
            assert_eq!(y[..6], [0.0, 1.0, 1.0, 1.0, -1.0, -1.0], "{set}");
            assert!(y[6].is_nan() && y[7].is_nan(), "{set}");
            let payloads: Vec<f32> = (0..23).map(|bit| f32::from_bits(0x7f80_0000 | 1 << bit)).collect();
            assert!(tanh_f32(set, &payloads).iter().all(|y| y.is_nan()), "{set}");
        }
    }
}
