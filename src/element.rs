//! Which numbers tensors may hold, and which type their products are accumulated in.

use half::{bf16, f16};

use crate::kernels::stored::Stored;
use crate::packing::Packing;
use crate::task::TaskKernels;

/// A number that Q, K, V and the output may hold. Sealed: implemented for `f32`, `f64`, [`f16`](struct@f16) and
/// [`bf16`].
///
/// Every element type names the type in which scores, softmax and output are accumulated: itself, but `f32` for the two of 16 bits.
/// All tensors of one call share that accumulator, so K and V may be of 16 bits where Q and the output are `f32`, and the other way
/// round. Converting to the accumulator is exact; the output is rounded once, to the nearest value, ties to even.
#[allow(private_bounds)] // the vector operations are no part of the public interface
pub trait Element:
    Copy + Send + Sync + core::fmt::Debug + Packing<<Self as Element>::Acc> + sealed::Sealed + 'static
{
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

    /// The same memory as bf16, where the element type is that.
    #[doc(hidden)]
    fn as_bf16(_: &[Self]) -> Option<&[bf16]> {
        None
    }

    /// As [`as_acc`](Self::as_acc), for writing.
    #[doc(hidden)]
    fn as_acc_mut(elements: *mut Self) -> Option<*mut Self::Acc>;

    /// The value in double precision (exact), for the reference.
    #[doc(hidden)]
    fn to_f64(self) -> f64;
}

/// An element type that accumulates in itself. Sealed: `f32` and `f64`.
#[allow(private_bounds)] // the vector operations are no part of the public interface
pub trait Accumulator: Element<Acc = Self> + TaskKernels {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
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
}

impl Accumulator for f32 {}

impl Element for f64 {
    type Acc = f64;

    #[inline(always)]
    fn to_acc(self) -> f64 {
        self
    }

    #[inline(always)]
    fn from_acc(value: f64) -> f64 {
        value
    }

    #[inline(always)]
    fn as_acc(elements: &[f64]) -> Option<&[f64]> {
        Some(elements)
    }

    #[inline(always)]
    fn as_acc_mut(elements: *mut f64) -> Option<*mut f64> {
        Some(elements)
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
}

impl Accumulator for f64 {}

impl Element for f16 {
    type Acc = f32;

    #[inline(always)]
    fn to_acc(self) -> f32 {
        self.widen_one()
    }

    #[inline(always)]
    fn from_acc(value: f32) -> f16 {
        f16::narrow_one(value)
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
}

impl Element for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn to_acc(self) -> f32 {
        self.widen_one()
    }

    #[inline(always)]
    fn from_acc(value: f32) -> bf16 {
        bf16::narrow_one(value)
    }

    #[inline(always)]
    fn as_acc(_: &[bf16]) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn as_bf16(elements: &[bf16]) -> Option<&[bf16]> {
        Some(elements)
    }

    #[inline(always)]
    fn as_acc_mut(_: *mut bf16) -> Option<*mut f32> {
        None
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
}
