//! Compiles what is measured beside the library with the same instructions as the library.

use std::any::TypeId;

use fused_attention::InstructionSet;
use pulp::{Scalar128b, Scalar256b, Scalar512b, Simd, WithSimd};

/// Runs `op` with the target features of `set`.
pub fn run_with<Op: WithSimd>(set: InstructionSet, op: Op) -> Op::Output {
    const DETECTED: &str = "an instruction set exists only where the CPU has it";
    match set.name() {
        #[cfg(target_arch = "x86_64")]
        "avx512" | "avx512-bf16" => Simd::vectorize(pulp::x86::V4::try_new().expect(DETECTED), op),
        #[cfg(target_arch = "x86_64")]
        "avx2" => Simd::vectorize(pulp::x86::V3::try_new().expect(DETECTED), op),
        #[cfg(target_arch = "aarch64")]
        "neon" => Simd::vectorize(pulp::aarch64::Neon::try_new().expect(DETECTED), op),
        "portable" => Scalar128b.vectorize(op),
        "portable-256" => Scalar256b.vectorize(op),
        "portable-512" => Scalar512b.vectorize(op),
        other => panic!("the sweep has no code for the instruction set {other:?}"),
    }
}

/// Whether a multiply-add is one instruction. On pulp's portable sets even its "efficient" one is a call of libm for
/// each lane, which the library avoids: a multiplication and an addition there.
#[inline(always)]
pub fn has_fma<S: Simd>() -> bool {
    let set = TypeId::of::<S>();
    ![TypeId::of::<Scalar128b>(), TypeId::of::<Scalar256b>(), TypeId::of::<Scalar512b>()].contains(&set)
}

/// The vectors of a type that attention accumulates in.
pub trait Vectors: Copy + Send + Sync + 'static {
    type Vector<S: Simd>: Copy;

    fn lanes<S: Simd>() -> usize;
    fn splat<S: Simd>(simd: S, value: f32) -> Self::Vector<S>;
    fn add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a * b + c`, in one instruction where [`has_fma`].
    fn multiply_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;
}

impl Vectors for f32 {
    type Vector<S: Simd> = S::f32s;

    #[inline(always)]
    fn lanes<S: Simd>() -> usize {
        S::F32_LANES
    }

    #[inline(always)]
    fn splat<S: Simd>(simd: S, value: f32) -> S::f32s {
        simd.splat_f32s(value)
    }

    #[inline(always)]
    fn add<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
        simd.add_f32s(a, b)
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
        if has_fma::<S>() { simd.mul_add_f32s(a, b, c) } else { simd.add_f32s(simd.mul_f32s(a, b), c) }
    }
}

impl Vectors for f64 {
    type Vector<S: Simd> = S::f64s;

    #[inline(always)]
    fn lanes<S: Simd>() -> usize {
        S::F64_LANES
    }

    #[inline(always)]
    fn splat<S: Simd>(simd: S, value: f32) -> S::f64s {
        simd.splat_f64s(f64::from(value))
    }

    #[inline(always)]
    fn add<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::f64s {
        simd.add_f64s(a, b)
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(simd: S, a: S::f64s, b: S::f64s, c: S::f64s) -> S::f64s {
        if has_fma::<S>() { simd.mul_add_f64s(a, b, c) } else { simd.add_f64s(simd.mul_f64s(a, b), c) }
    }
}
