//! The element types as the tests know them: their format, rounding from the definition, their NaNs.

use std::fmt::{Debug, Display};
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, Element,
    Workspace, bf16, f16,
};

/// An element type. What is said of its format says all of a binary floating-point format of IEEE 754.
pub trait Number: Element<Acc = <Self as Number>::Real> + Debug + Display + PartialEq + PartialOrd + Into<f64> {
    /// The type of its accumulator.
    type Real: Real;

    /// A plan of calls on it.
    type Plan;

    const NAME: &'static str;

    const BITS: u32;

    /// Bits of the significand, the hidden one included.
    const PRECISION: u32;

    /// Exponent of the smallest normal number.
    const MIN_EXPONENT: i32;

    /// A NaN that no arithmetic and no conversion makes: marks outputs before they are written, and gaps between strided
    /// rows.
    const CANARY: Self;

    fn from_bits(bits: u64) -> Self;

    fn bits(self) -> u64;

    /// The value, exactly.
    fn value(self) -> f64 {
        self.into()
    }

    /// The value in the type of its accumulator, exactly.
    fn widened(self) -> Self::Real {
        Self::Real::nearest(self.value())
    }

    /// Rounded to nearest, ties to even, by the definition: to a whole number of units in the last place; infinite
    /// from half a unit above the largest number on.
    fn nearest(value: f64) -> Self {
        if !value.is_finite() || value == 0.0 {
            return Self::exactly(value);
        }
        let ulp = Self::ulp(value);
        let rounded = (value / ulp).round_ties_even() * ulp;
        let is_finite = rounded.abs() <= Self::largest();
        Self::exactly(if is_finite { rounded } else { f64::INFINITY.copysign(value) })
    }

    /// A value that this type has.
    fn exactly(value: f64) -> Self {
        let sign = u64::from(value.is_sign_negative()) << (Self::BITS - 1);
        let fraction_bits = Self::PRECISION - 1;
        let exponent_mask = (1 << (Self::BITS - Self::PRECISION)) - 1u64;
        if value == 0.0 {
            return Self::from_bits(sign);
        }
        if !value.is_finite() {
            let quiet = if value.is_nan() { 1 << (fraction_bits - 1) } else { 0 };
            return Self::from_bits(sign | (exponent_mask << fraction_bits) | quiet);
        }
        let ulp = Self::ulp(value);
        let units = (value / ulp).abs() as u64; // with the hidden bit where the number is normal
        assert_eq!(units as f64 * ulp, value.abs(), "{value:e} is no {}", Self::NAME);
        let biased = i64::from(exponent(ulp)) + i64::from(fraction_bits) - i64::from(Self::MIN_EXPONENT);
        Self::from_bits(sign | (((biased as u64) << fraction_bits) + units))
    }

    /// Unit in the last place of numbers of this size.
    fn ulp(value: f64) -> f64 {
        let exponent = if value == 0.0 { Self::MIN_EXPONENT } else { exponent(value).max(Self::MIN_EXPONENT) };
        power_of_two(exponent - (Self::PRECISION as i32 - 1))
    }

    /// The largest number.
    fn largest() -> f64 {
        let max_exponent = 1 - Self::MIN_EXPONENT;
        (2.0 - power_of_two(1 - Self::PRECISION as i32)) * power_of_two(max_exponent)
    }

    /// Distance of 1 from the next number.
    fn epsilon() -> f64 {
        power_of_two(1 - Self::PRECISION as i32)
    }

    /// NaNs of every kind: quiet and signalling, both signs, payloads with the lowest, the highest and all bits set.
    fn nans() -> [Self; 10] {
        let fraction_bits = Self::PRECISION - 1;
        let sign = 1u64 << (Self::BITS - 1);
        let infinity = Self::exactly(f64::INFINITY).bits();
        let (all, quiet) = ((1u64 << fraction_bits) - 1, 1u64 << (fraction_bits - 1));
        let some = (1u64 << (fraction_bits * 2 / 3)) - 1;
        [quiet, sign | quiet, quiet | 1, sign | all, all, 1, sign | 1, quiet >> 1, sign | (quiet - 1), some]
            .map(|payload| Self::from_bits(infinity | payload))
    }

    /// Every number of a 16-bit type, NaNs left out.
    fn all_numbers() -> impl Iterator<Item = Self> {
        assert_eq!(Self::BITS, 16);
        (0..=0xffff).map(Self::from_bits).filter(|x| !x.value().is_nan())
    }

    fn plan(shape: &AttentionShape, config: &AttentionConfig) -> Result<Self::Plan, AttentionError>;

    fn threads(plan: &Self::Plan) -> usize;

    fn workspace(plan: &Self::Plan) -> Workspace;

    fn run_plan<K: Number<Real = Self::Real>>(
        plan: &Self::Plan,
        inputs: &AttentionInputs<'_, Self, K>,
        outputs: &mut AttentionOutputs<'_, Self>,
        workspace: &mut Workspace,
    );
}

/// A type that is accumulated in.
pub trait Real:
    Number<Real = Self> + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + AddAssign
{
    fn exp(self) -> Self;

    fn ln(self) -> Self;

    fn tanh(self) -> Self;
}

/// `floor(log2(|value|))` of a number that is neither 0 nor infinite.
fn exponent(value: f64) -> i32 {
    match ((value.to_bits() >> 52) & 0x7ff) as i32 {
        0 => exponent(value * power_of_two(64)) - 64,
        biased => biased - 1023,
    }
}

/// `2^exponent`, 0 below the smallest number.
fn power_of_two(exponent: i32) -> f64 {
    match exponent {
        ..-1074 => 0.0,
        -1074..-1022 => f64::from_bits(1 << (exponent + 1074)),
        _ => f64::from_bits(((exponent + 1023) as u64) << 52),
    }
}

macro_rules! number {
    ($type:ty, $bits:ty, accumulator $real:ty, precision $precision:literal, exponents from $min_exponent:literal, canary $canary:literal) => {
        impl Number for $type {
            type Real = $real;
            type Plan = AttentionPlan<$real>;
            const NAME: &'static str = stringify!($type);
            const BITS: u32 = <$bits>::BITS;
            const PRECISION: u32 = $precision;
            const MIN_EXPONENT: i32 = $min_exponent;
            const CANARY: Self = <$type>::from_bits($canary);

            fn from_bits(bits: u64) -> Self {
                <$type>::from_bits(<$bits>::try_from(bits).unwrap())
            }

            fn bits(self) -> u64 {
                self.to_bits().into()
            }

            fn plan(shape: &AttentionShape, config: &AttentionConfig) -> Result<Self::Plan, AttentionError> {
                Self::Plan::with_accumulator(shape, config)
            }

            fn threads(plan: &Self::Plan) -> usize {
                plan.threads()
            }

            fn workspace(plan: &Self::Plan) -> Workspace {
                Workspace::for_plan(plan).unwrap()
            }

            fn run_plan<K: Number<Real = $real>>(
                plan: &Self::Plan,
                inputs: &AttentionInputs<'_, Self, K>,
                outputs: &mut AttentionOutputs<'_, Self>,
                workspace: &mut Workspace,
            ) {
                plan.run(inputs, outputs, workspace).unwrap();
            }
        }
    };
}

macro_rules! real {
    ($type:ty) => {
        impl Real for $type {
            fn exp(self) -> Self {
                self.exp()
            }

            fn ln(self) -> Self {
                self.ln()
            }

            fn tanh(self) -> Self {
                self.tanh()
            }
        }
    };
}

number!(f32, u32, accumulator f32, precision 24, exponents from -126, canary 0x7fc0_dead);
number!(f16, u16, accumulator f32, precision 11, exponents from -14, canary 0x7ead);
number!(bf16, u16, accumulator f32, precision 8, exponents from -126, canary 0x7fde);
number!(f64, u64, accumulator f64, precision 53, exponents from -1022, canary 0x7ff8_0000_dead_beef);
real!(f32);
real!(f64);

/// Calls a function `law::<T, K>(arguments)` for each pair of element types, of Q and the output, and of K and V; in the
/// quick profile for few pairs in which each type comes once on either side, and for bf16 with itself where a set multiplies pairs of
/// that. The pair that ran last is printed.
#[allow(unused_macros)] // every test binary uses its own part
macro_rules! for_each_pair {
    ($law:ident $(, $argument:expr)*) => {
        $crate::common::for_each_pair! { @ $law [$($argument),*]
            few: f32 f32, f16 bf16, bf16 f16, f64 f64;
            multiplied: bf16 bf16;
            more: f16 f16, f32 f16, f32 bf16, f16 f32, bf16 f32;
        }
    };
    (@ $law:ident $arguments:tt few: $($t:ident $k:ident),*; multiplied: $pair_t:ident $pair_k:ident;
        more: $($more_t:ident $more_k:ident),*;) => {
        {
            use fused_attention::{bf16, f16};
            $($crate::common::for_each_pair! { @one $law $t $k $arguments })*
            if !$crate::common::quick() || !$crate::common::pair_sets().is_empty() {
                $crate::common::for_each_pair! { @one $law $pair_t $pair_k $arguments }
            }
            if !$crate::common::quick() {
                $($crate::common::for_each_pair! { @one $law $more_t $more_k $arguments })*
            }
        }
    };
    (@one $law:ident $t:ident $k:ident [$($argument:expr),*]) => {
        println!("Q and out {}, K and V {}", stringify!($t), stringify!($k));
        $law::<$t, $k>($($argument),*);
    };
}

pub(crate) use for_each_pair;
