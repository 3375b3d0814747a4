//! e^x for x <= 0 in double precision.
//!
//! `x = n ln(2) + r` with `n` the nearest integer to `x log2(e)`; `e^x = 2^(n-1) * p(r)`, `p(r)` close to `2 e^r`. As
//! [`exp`](super::exp), which says why there is a factor of 2 and why NaN is safe, but:
//! 1. `n ln(2)` is subtracted in two parts. The first has 33 bits, so that `n` times it is exact even where multiply-add is not
//!    fused; what is lost of `r` is its last rounding.
//! 2. `p` has degree 11, with `p(0) = 2` and `p'(0) = 2` exactly: relative error 1.1e-17 as rounded. Largest error of e^x: 0.94 ULP,
//!    1.20 where multiply-add is not fused.
//! 3. The `Simd` trait shifts 32-bit lanes alone. `n + 1.5 * 2^20` has its integer in the low bits of its upper half and zeros in its
//!    lower one, so shifting both halves by 20 builds the exponent field.
//! 4. Up to -708.05 the result is exactly 0, and nothing gives a subnormal.

use core::f64::consts::LOG2_E;

use pulp::{Simd, bytemuck};

use super::lane::{Lane, at_least};

/// Up to this e^x is taken as 0: -1021.5 * ln(2), rounded down.
#[cfg(test)]
const UNDERFLOW: f64 = -708.0499;

/// Coefficients of r^0..r^11: minimax for the relative error on [-ln(2)/2, ln(2)/2] with the first two fixed at 2.
#[allow(clippy::excessive_precision)] // these decimals are the exact bits of the fit
pub(super) const COEFFICIENTS: [f64; 12] = [
    2.0,
    2.0,
    1.00000000000000222e+00,
    3.33333333333328263e-01,
    8.33333333330605330e-02,
    1.66666666669886658e-02,
    2.77777778871954447e-03,
    3.96825390135589263e-04,
    4.96029862723199348e-05,
    5.51151725330318050e-06,
    5.52604678588443676e-07,
    5.00001445629250908e-08,
];

/// The first 33 bits of ln(2), and the rest.
const LN_2: [f64; 2] = [f64::from_bits(0x3fe6_2e42_fee0_0000), f64::from_bits(0x3dea_39ef_3579_3c76)];

/// `x = n ln(2) + r`: the integer `n`, as a number, and `r`.
#[inline(always)]
pub(super) fn split<S: Simd>(simd: S, x: S::f64s) -> (S::f64s, S::f64s) {
    let round = simd.splat_f64s(6_755_399_441_055_744.0); // 1.5 * 2^52
    let n = simd.sub_f64s(<f64 as Lane>::mul_add(simd, x, simd.splat_f64s(LOG2_E), round), round);
    let mut r = x;
    for ln_2 in LN_2 {
        r = <f64 as Lane>::mul_add(simd, n, simd.splat_f64s(-ln_2), r);
    }
    (n, r)
}

/// The number whose exponent field is `n + bias`: 2^n where that is 1023.
#[inline(always)]
pub(super) fn power<S: Simd>(simd: S, n: S::f64s, bias: f64) -> S::f64s {
    let field: S::u32s = bytemuck::cast(simd.add_f64s(n, simd.splat_f64s(1_572_864.0 + bias))); // 1.5 * 2^20
    bytemuck::cast(simd.wrapping_dyn_shl_u32s(field, simd.splat_u32s(20)))
}

/// e^x for `x` in [-inf, 708] or NaN; exactly 0 up to -708.05, NaN for NaN.
#[inline(always)]
pub(crate) fn exp_f64<S: Simd>(simd: S, x: S::f64s) -> S::f64s {
    // -708.4 times log2(e) is -1022.0, whose field is 0.
    let (n, r) = split(simd, at_least(simd, x, -708.4f64));
    let mut p = simd.splat_f64s(COEFFICIENTS[11]);
    for c in COEFFICIENTS[..11].iter().rev() {
        p = <f64 as Lane>::mul_add(simd, p, r, simd.splat_f64s(*c));
    }
    simd.mul_f64s(p, power(simd, n, 1022.0)) // one less than the bias: p has a factor of 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InstructionSet;
    use crate::kernels::WithTiles;

    struct Exp<'a>(&'a [f64], &'a mut [f64]);

    impl WithTiles for Exp<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            for (x, y) in self.0.chunks(S::F64_LANES).zip(self.1.chunks_mut(S::F64_LANES)) {
                simd.partial_store_f64s(y, exp_f64(simd, simd.partial_load_f64s(x)));
            }
        }
    }

    fn sets() -> impl Iterator<Item = InstructionSet> {
        InstructionSet::available().chain([InstructionSet::portable_256(), InstructionSet::portable_512()])
    }

    fn exp(set: InstructionSet, x: &[f64]) -> Vec<f64> {
        let mut y = vec![f64::NAN; x.len()];
        set.run_f64(Exp(x, &mut y));
        y
    }

    /// As stated at the top of the file.
    fn stated_ulp(set: InstructionSet) -> f64 {
        if set.name().starts_with("portable") { 1.20 } else { 0.94 }
    }

    /// A number as the sum of two: some 100 bits.
    #[derive(Clone, Copy)]
    struct Double(f64, f64);

    impl Double {
        fn sum(a: f64, b: f64) -> Double {
            let sum = a + b;
            let b_in_sum = sum - a;
            Double(sum, (a - (sum - b_in_sum)) + (b - b_in_sum))
        }

        fn mul(self, other: Double) -> Double {
            let product = self.0 * other.0;
            let rest = self.0.mul_add(other.0, -product) + (self.0 * other.1 + self.1 * other.0);
            Double::sum(product, rest)
        }

        fn add(self, other: Double) -> Double {
            let Double(sum, rest) = Double::sum(self.0, other.0);
            Double::sum(sum, rest + self.1 + other.1)
        }
    }

    /// Distance of `y` from e^x in units of the last place of e^x, by the Taylor series in twice the precision.
    fn error_ulp(x: f64, y: f64) -> f64 {
        // ln(2) in three parts, of which the products with an integer below 1024 are exact.
        const PARTS: [u64; 3] = [0x3fe6_2e42_fee0_0000, 0x3dea_39ef_3579_0000, 0x3b7e_3b39_803f_2f6b];
        let n = (x * LOG2_E).round_ties_even();
        let mut r = Double(x, 0.0);
        for part in PARTS {
            r = r.add(Double(-n * f64::from_bits(part), 0.0));
        }
        let mut sum = Double(1.0, 0.0);
        for i in (1..=24).rev() {
            // 1 + r / i * sum, with the quotient in twice the precision
            let i = f64::from(i);
            let quotient = r.0 / i;
            let rest = ((-quotient).mul_add(i, r.0) + r.1) / i;
            sum = Double(1.0, 0.0).add(Double::sum(quotient, rest).mul(sum));
        }
        // Both divided by 2^n, exactly.
        let scale = |y: f64| y * 2f64.powi((-n / 2.0).floor() as i32) * 2f64.powi((-n - (-n / 2.0).floor()) as i32);
        let ulp = if sum.0 < 1.0 { f64::EPSILON / 2.0 } else { f64::EPSILON };
        ((scale(y) - sum.0) - sum.1).abs() / ulp
    }

    fn largest_error(set: InstructionSet, x: &[f64]) -> f64 {
        x.iter().zip(exp(set, x)).fold(0f64, |largest, (&x, y)| largest.max(error_ulp(x, y)))
    }

    #[test]
    fn exp_is_as_exact_as_stated() {
        // Evenly from 0 to the underflow, and densely near 0 in every binade.
        let mut x: Vec<f64> = (0..50_000).map(|i| f64::from(i) * -1.416_084_9e-2).collect();
        x.extend((0..30_000).map(|i| f64::from(i) * -5.7e-5));
        x.extend((0..20_000).map(|i| -(f64::from(i) * -3e-3).exp2()));
        for set in sets() {
            let error = largest_error(set, &x);
            let stated = stated_ulp(set);
            assert!(error <= stated, "{set}: {error} ULP, stated {stated}");
            assert!(error >= 0.9 * stated, "{set}: {error} ULP, state less than {stated}");
        }
    }

    #[test]
    #[ignore = "30 million numbers: a minute"]
    fn exp_is_as_exact_as_stated_densely() {
        for first in 0..300u32 {
            let x: Vec<f64> = (0..100_000).map(|i| f64::from(i) * -7.080_3e-3 - f64::from(first) * 2.3e-5).collect();
            for set in sets() {
                let error = largest_error(set, &x);
                assert!(error <= stated_ulp(set), "{set}: {error} ULP from {} on", x[0]);
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
            let x = [UNDERFLOW, -708.1, -708.3, -708.4, -708.5, -709.0, -745.0, -1e300, f64::MIN, f64::NEG_INFINITY];
            let y = exp(set, &x);
            assert!(y.iter().all(|y| y.to_bits() == 0), "{set}: {y:?}");
            let last = (-708.04f64).to_bits();
            let x: Vec<f64> = (last - 5000..=last).map(f64::from_bits).collect();
            assert!(exp(set, &x).iter().all(|y| y.is_normal()), "{set}");
        }
    }

    #[test]
    fn exp_of_nan_is_nan_whatever_the_payload() {
        let x: Vec<f64> = (0..52)
            .flat_map(|bit| [1 << bit, u64::MAX >> (63 - bit)])
            .flat_map(|payload| [0x7ff0 << 48 | payload, 0xfff0 << 48 | payload])
            .map(f64::from_bits)
            .collect();
        for set in sets() {
            assert!(x.iter().all(|x| x.is_nan()) && exp(set, &x).iter().all(|y| y.is_nan()), "{set}");
        }
    }
}
