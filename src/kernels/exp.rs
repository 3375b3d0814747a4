//! 2^x for x <= 0.
//!
//! `x = n + f` with `n` the nearest integer and `f` in [-1/2, 1/2]; `2^x = 2^(n-1) * p(f)`, `p(f)` close to `2 * 2^f`.
//! 1. Adding 1.5 * 2^23 rounds `x` to an integer in the low bits of the sum. 126 added to that constant makes them the
//!    exponent field of `2^(n-1)`, so that one shift builds it.
//! 2. `p` has degree 5 with `p(0) = 2` exactly: equal scores give a weight of exactly 1, and a block that does not
//!    raise the maximum rescales by exactly 1. Largest relative error 1.95e-7 (1.6e-7 where multiply-add is fused; degree
//!    6: 0.7e-7 for one more FMA).
//! 3. `2^(n-1)` is multiplied in. Adding `n` to the exponent bits of `p` instead would turn some NaNs into numbers.
//! 4. `x` is first raised to -126 at least, whose field is 0, so that everything up to -125.5 gives exactly 0, -inf
//!    included, and nothing gives a subnormal. This one instruction is why the factor 2 sits in `p`: with a field of
//!    `2^n` the results between -126.5 and -126 would be subnormal, and a comparison and selection cost three
//!    instructions of 24 a vector.

use pulp::Simd;

use super::lane::{Lane, has_fma};

/// Up to this 2^x is taken as 0.
#[cfg(test)]
const UNDERFLOW: f32 = -125.5;

/// Coefficients of f^0..f^5: minimax for the relative error on [-1/2, 1/2] with the constant term fixed at 2.
#[allow(clippy::excessive_precision)] // these decimals are the exact bits of the fit
const COEFFICIENTS: [f32; 6] = [2.0, 1.386293888, 0.480444788, 0.1110147088, 0.0193430204, 0.00265294546];

/// 2^x for `x` in [-inf, 127] or NaN; exactly 0 up to -125.5, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2_f32<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const ROUND: f32 = 12_582_912.0 + 126.0; // 1.5 * 2^23 + the exponent bias - 1
    let least = simd.splat_f32s(-126.0);
    let x = if has_fma::<S>() {
        simd.max_f32s(least, x) // NaN in the second operand survives: x86 returns that operand, NEON any NaN
    } else {
        simd.select_f32s(simd.less_than_f32s(x, least), least, x) // the portable maximum would drop NaN
    };
    let round = simd.splat_f32s(ROUND);
    let shifted = simd.add_f32s(x, round);
    let fraction = simd.sub_f32s(x, simd.sub_f32s(shifted, round));
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

    /// As stated at the top of the file.
    const LARGEST_ERROR: f64 = 1.95e-7;

    struct Exp2<'a>(&'a [f32], &'a mut [f32]);

    impl WithTiles for Exp2<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            for (x, y) in self.0.chunks(S::F32_LANES).zip(self.1.chunks_mut(S::F32_LANES)) {
                simd.partial_store_f32s(y, exp2_f32(simd, simd.partial_load_f32s(x)));
            }
        }
    }

    fn sets() -> impl Iterator<Item = InstructionSet> {
        InstructionSet::available().chain([InstructionSet::portable_256(), InstructionSet::portable_512()])
    }

    fn exp2(set: InstructionSet, x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len()];
        set.run(Exp2(x, &mut y));
        y
    }

    /// Largest relative error over the given inputs, for all sets.
    fn largest_error(x: &[f32]) -> f64 {
        let mut largest = 0f64;
        for set in sets() {
            for (&x, y) in x.iter().zip(exp2(set, x)) {
                largest = largest.max((f64::from(y) / f64::from(x).exp2() - 1.0).abs());
            }
        }
        largest
    }

    #[test]
    fn exp2_is_as_exact_as_stated() {
        // Prime steps through the bit patterns of (-125.5, -0].
        let x: Vec<f32> = (0x8000_0000u32..UNDERFLOW.to_bits()).step_by(100_003).map(f32::from_bits).collect();
        let fine: Vec<f32> = (0..200_000).map(|i| i as f32 * -1.7e-5).collect();
        let error = largest_error(&x).max(largest_error(&fine));
        assert!(error <= LARGEST_ERROR, "{error:e}");
        assert!(error >= 0.9 * LARGEST_ERROR, "{error:e}: state the smaller error");
    }

    #[test]
    #[ignore = "every f32 in (-125.5, 0]: minutes"]
    fn exp2_is_as_exact_as_stated_everywhere() {
        let (first, last) = (0x8000_0000u32, UNDERFLOW.to_bits() - 1);
        let mut largest = 0f64;
        for start in (first..=last).step_by(1 << 20) {
            let x: Vec<f32> = (start..last.min(start + (1 << 20)) + 1).map(f32::from_bits).collect();
            largest = largest.max(largest_error(&x));
        }
        println!("largest relative error {largest:e}");
        assert!(largest <= LARGEST_ERROR, "{largest:e}");
    }

    #[test]
    fn exp2_of_zero_is_one_and_of_integers_exact() {
        let x: Vec<f32> = (-125..=8).map(|n| n as f32).chain([-0.0]).collect();
        let exact: Vec<f32> = x.iter().map(|x| x.exp2()).collect();
        for set in sets() {
            assert_eq!(exp2(set, &x), exact, "{set}");
        }
    }

    #[test]
    fn exp2_below_the_cut_is_exactly_zero() {
        let above = f32::from_bits(UNDERFLOW.to_bits() - 1);
        for set in sets() {
            let y = exp2(set, &[UNDERFLOW, -126.0, -126.5, -127.0, -150.0, -1e9, f32::MIN, f32::NEG_INFINITY]);
            assert!(y.iter().all(|y| y.to_bits() == 0), "{set}: {y:?}");
            assert!(exp2(set, &[above])[0].is_normal(), "{set}");
        }
    }

    #[test]
    fn exp2_of_nan_is_nan_whatever_the_payload() {
        let payloads = [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0xffff_ffff, 0x7fa5_5a5a];
        let x: Vec<f32> = (0..23).map(|bit| f32::from_bits(0x7f80_0000 | 1 << bit)).collect();
        let x: Vec<f32> = payloads.map(f32::from_bits).into_iter().chain(x).collect();
        for set in sets() {
            assert!(exp2(set, &x).iter().all(|y| y.is_nan()), "{set}");
        }
    }
}
