//! e^x for x <= 0.
//!
//! `x * log2(e) = n + f` with `n` the nearest integer and `f` in [-1/2, 1/2]; `e^x = 2^(n-1) * p(f)`, `p(f)` close to `2 * 2^f`.
//! 1. log2(e) is multiplied in here, after the maximum was subtracted, and in the same FMA that splits off `n`: it then
//!    costs nothing and loses nothing. Folding it into Q would be one multiplication less still, but rounds each score to
//!    |score| * 2^-24 (weights of scores around 30 would be ten times less exact than those of a plain f32 softmax).
//! 2. Adding 1.5 * 2^23 rounds to an integer in the low bits of the sum. 126 added to that constant makes them the
//!    exponent field of `2^(n-1)`, so that one shift builds it.
//! 3. `p` has degree 5 with `p(0) = 2` exactly: equal scores give a weight of exactly 1, and a block that does not
//!    raise the maximum rescales by exactly 1. Largest relative error 1.71e-7 + 1.4e-8 |x| (degree 6: 0.7e-7 for one more
//!    FMA); where multiply-add is not fused 2.1e-7 + 8e-8 |x|.
//! 4. `2^(n-1)` is multiplied in. Adding `n` to the exponent bits of `p` instead would turn some NaNs into numbers.
//! 5. `x` is first raised to -87.3 at least, whose field is 0, so that everything up to -87 gives exactly 0, -inf
//!    included, and nothing gives a subnormal. This one instruction is why the factor 2 sits in `p`: with a field of
//!    `2^n` the last results would be subnormal, and a comparison and selection cost three instructions of 25 a vector.

use core::f32::consts::LOG2_E;

use pulp::Simd;

use super::lane::{Lane, at_least};

/// Up to this e^x is taken as 0: -125.5 / log2(e), rounded down.
#[cfg(test)]
const UNDERFLOW: f32 = -86.99;

/// Coefficients of f^0..f^5: minimax for the relative error on [-1/2, 1/2] with the constant term fixed at 2.
#[allow(clippy::excessive_precision)] // these decimals are the exact bits of the fit
const COEFFICIENTS: [f32; 6] = [2.0, 1.386293888, 0.480444788, 0.1110147088, 0.0193430204, 0.00265294546];

/// e^x for `x` in [-inf, 88] or NaN; exactly 0 up to -86.99, NaN for NaN.
#[inline(always)]
pub(crate) fn exp_f32<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const ROUND: f32 = 12_582_912.0 + 126.0; // 1.5 * 2^23 + the exponent bias - 1
    let x = at_least(simd, x, -87.3f32); // times log2(e): -125.9, which rounds to -126
    let (round, log2e) = (simd.splat_f32s(ROUND), simd.splat_f32s(LOG2_E));
    let shifted = <f32 as Lane>::mul_add(simd, x, log2e, round);
    let fraction = <f32 as Lane>::mul_add(simd, x, log2e, simd.sub_f32s(round, shifted));
    let mut p = simd.splat_f32s(COEFFICIENTS[5]);
    for c in COEFFICIENTS[..5].iter().rev() {
        p = <f32 as Lane>::mul_add(simd, p, fraction, simd.splat_f32s(*c));
    }
    let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    simd.mul_f32s(p, simd.transmute_f32s_u32s(power))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InstructionSet;
    use crate::kernels::WithTiles;

    struct Exp<'a>(&'a [f32], &'a mut [f32]);

    impl WithTiles for Exp<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            for (x, y) in self.0.chunks(S::F32_LANES).zip(self.1.chunks_mut(S::F32_LANES)) {
                simd.partial_store_f32s(y, exp_f32(simd, simd.partial_load_f32s(x)));
            }
        }
    }

    fn sets() -> impl Iterator<Item = InstructionSet> {
        InstructionSet::available().chain([InstructionSet::portable_256(), InstructionSet::portable_512()])
    }

    fn exp(set: InstructionSet, x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len()];
        set.run(Exp(x, &mut y));
        y
    }

    /// As stated at the top of the file: absolute and per |x|.
    fn stated_error(set: InstructionSet) -> (f64, f64) {
        if set.name().starts_with("portable") { (2.1e-7, 8e-8) } else { (1.71e-7, 1.4e-8) }
    }

    /// Largest relative error, as a fraction of the stated one, over the given inputs.
    fn largest_error(set: InstructionSet, x: &[f32]) -> f64 {
        let (constant, slope) = stated_error(set);
        x.iter().zip(exp(set, x)).fold(0f64, |largest, (&x, y)| {
            let error = (f64::from(y) / f64::from(x).exp() - 1.0).abs();
            largest.max(error / (constant + slope * f64::from(x).abs()))
        })
    }

    #[test]
    fn exp_is_as_exact_as_stated() {
        // Prime steps through the bit patterns of (-86.98, -0].
        let x: Vec<f32> = (0x8000_0000u32..(-86.98f32).to_bits()).step_by(100_003).map(f32::from_bits).collect();
        let fine: Vec<f32> = (0..200_000).map(|i| i as f32 * -1.7e-5).collect();
        for set in sets() {
            let error = largest_error(set, &x).max(largest_error(set, &fine));
            assert!(error <= 1.0, "{set}: {error} of the stated error");
            assert!(error >= 0.8, "{set}: {error} of the stated error, state a smaller one");
        }
    }

    #[test]
    #[ignore = "every f32 in (-86.98, 0]: minutes"]
    fn exp_is_as_exact_as_stated_everywhere() {
        let (first, last) = (0x8000_0000u32, (-86.98f32).to_bits());
        for set in sets() {
            for start in (first..=last).step_by(1 << 20) {
                let x: Vec<f32> = (start..last.min(start + (1 << 20)) + 1).map(f32::from_bits).collect();
                let error = largest_error(set, &x);
                assert!(error <= 1.0, "{set}: {error} of the stated error from {} on", x[0]);
            }
        }
    }

    #[test]
    fn exp_of_zero_is_exactly_one() {
        for set in sets() {
            assert_eq!(exp(set, &[0.0, -0.0]), [1.0, 1.0], "{set}");
        }
    }

    #[test]
    fn exp_below_the_cut_is_exactly_zero_and_above_it_normal() {
        for set in sets() {
            let y = exp(set, &[UNDERFLOW, -87.0, -87.3, -88.0, -104.0, -1e9, f32::MIN, f32::NEG_INFINITY]);
            assert!(y.iter().all(|y| y.to_bits() == 0), "{set}: {y:?}");
            let last = (-86.98f32).to_bits();
            let x: Vec<f32> = (last - 5000..=last).map(f32::from_bits).collect();
            assert!(exp(set, &x).iter().all(|y| y.is_normal()), "{set}");
        }
    }

    #[test]
    fn exp_of_nan_is_nan_whatever_the_payload() {
        let payloads = [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0xffff_ffff, 0x7fa5_5a5a];
        let x: Vec<f32> = (0..23).map(|bit| f32::from_bits(0x7f80_0000 | 1 << bit)).collect();
        let x: Vec<f32> = payloads.map(f32::from_bits).into_iter().chain(x).collect();
        for set in sets() {
            assert!(exp(set, &x).iter().all(|y| y.is_nan()), "{set}");
        }
    }
}
