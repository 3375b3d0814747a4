//! The numbers that tensors may hold, as the sweep needs them: made from f64, and with a known rounding.

use clap::ValueEnum;
use fused_attention::{bf16, f16};
use serde::Serialize;

/// The name of an element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    F64,
}

impl Dtype {
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F64 => "f64",
        }
    }

    /// What scores and outputs are accumulated in; all tensors of a call share it.
    pub fn accumulator(self) -> Self {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => Self::F32,
            Self::F64 => Self::F64,
        }
    }
}

/// A number that tensors may hold.
pub trait Number: Copy + Send + Sync + 'static {
    const DTYPE: Dtype;
    const NAN: Self;
    /// Half a ULP, as a fraction of the power of two below a normal number.
    const HALF_ULP: f64;
    /// Half the distance between subnormal numbers.
    const HALF_LEAST: f64;

    /// The nearest.
    fn from_f64(value: f64) -> Self;

    /// Exact.
    fn to_f64(self) -> f64;

    /// At most what rounding to this type changes in a number of this magnitude.
    fn rounding(magnitude: f64) -> f64 {
        (Self::HALF_ULP * magnitude).max(Self::HALF_LEAST)
    }
}

/// `2^exponent` for a normal result.
const fn exp2(exponent: i64) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

impl Number for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const NAN: Self = f32::NAN;
    const HALF_ULP: f64 = exp2(-24);
    const HALF_LEAST: f64 = exp2(-150);

    fn from_f64(value: f64) -> Self {
        value as f32
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Number for f16 {
    const DTYPE: Dtype = Dtype::F16;
    const NAN: Self = f16::NAN;
    const HALF_ULP: f64 = exp2(-11);
    const HALF_LEAST: f64 = exp2(-25);

    fn from_f64(value: f64) -> Self {
        f16::from_f64(value)
    }

    fn to_f64(self) -> f64 {
        f16::to_f64(self)
    }
}

impl Number for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    const NAN: Self = bf16::NAN;
    const HALF_ULP: f64 = exp2(-8);
    const HALF_LEAST: f64 = exp2(-134);

    fn from_f64(value: f64) -> Self {
        bf16::from_f64(value)
    }

    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
}

impl Number for f64 {
    const DTYPE: Dtype = Dtype::F64;
    const NAN: Self = f64::NAN;
    const HALF_ULP: f64 = exp2(-53);
    const HALF_LEAST: f64 = 0.0; // 2^-1075, which f64 cannot say either

    fn from_f64(value: f64) -> Self {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }
}
