//! Which numbers tensors may hold, and which type their products are accumulated in.

use half::{bf16, f16};

use crate::InstructionSet;
use crate::decode::DecodeBlock;
use crate::task::TaskKernels;

/// A number that Q, K, V and the output may hold. Sealed: implemented for `f32`, [`f16`](half::f16) and [`bf16`](half::bf16).
///
/// Every element type names the type in which scores, softmax and output are accumulated. All tensors of one
/// call share that accumulator.
pub trait Element: Copy + Send + Sync + core::fmt::Debug + sealed::Sealed + 'static {
    /// The type in which scores and outputs are accumulated, and the type of `logsumexp`.
    type Acc: Accumulator;

    /// The value in the accumulator type (exact).
    #[doc(hidden)]
    fn to_acc(self) -> Self::Acc;

    /// The nearest value of this type.
    #[doc(hidden)]
    fn from_acc(value: Self::Acc) -> Self;

    /// The same memory as accumulators, where the element type is one.
    #[doc(hidden)]
    fn as_acc(elements: &[Self]) -> Option<&[Self::Acc]>;

    /// As [`as_acc`](Self::as_acc), for writing.
    #[doc(hidden)]
    fn as_acc_mut(elements: *mut Self) -> Option<*mut Self::Acc>;

    /// A few rows against a block of keys and values of this type.
    #[doc(hidden)]
    #[allow(private_interfaces)] // the kernels are no part of the public interface
    fn decode(set: InstructionSet, block: DecodeBlock<'_, '_, Self::Acc, Self>);

    /// The value in double precision (exact), for the reference.
    #[doc(hidden)]
    fn to_f64(self) -> f64;
}

/// An element type that accumulates in itself. Sealed: `f32`.
#[allow(private_bounds)] // the vector operations are no part of the public interface
pub trait Accumulator: Element<Acc = Self> + TaskKernels {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

impl Element for f32 {
    type Acc = f32;

    #[inline(always)]
    fn to_acc(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_acc(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn as_acc(elements: &[f32]) -> Option<&[f32]> {
        Some(elements)
    }

    #[inline(always)]
    fn as_acc_mut(elements: *mut f32) -> Option<*mut f32> {
        Some(elements)
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    #[allow(private_interfaces)]
    fn decode(set: InstructionSet, block: DecodeBlock<'_, '_, f32, f32>) {
        set.run(block);
    }
}

impl Accumulator for f32 {}

impl Element for f16 {
    type Acc = f32;

    #[inline(always)]
    fn to_acc(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn from_acc(value: f32) -> f16 {
        f16::from_f32(value)
    }

    #[inline(always)]
    fn as_acc(_: &[f16]) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn as_acc_mut(_: *mut f16) -> Option<*mut f32> {
        None
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f16::to_f64(self)
    }

    #[allow(private_interfaces)]
    fn decode(set: InstructionSet, block: DecodeBlock<'_, '_, f32, f16>) {
        set.run(block);
    }
}

impl Element for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn to_acc(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn from_acc(value: f32) -> bf16 {
        bf16::from_f32(value)
    }

    #[inline(always)]
    fn as_acc(_: &[bf16]) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn as_acc_mut(_: *mut bf16) -> Option<*mut f32> {
        None
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }

    #[allow(private_interfaces)]
    fn decode(set: InstructionSet, block: DecodeBlock<'_, '_, f32, bf16>) {
        set.run(block);
    }
}
