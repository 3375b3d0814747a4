//! Compiles what is measured beside the library with the same instructions as the library.

use std::any::TypeId;

use fused_attention::InstructionSet;
use pulp::{Scalar128b, Scalar256b, Scalar512b, Simd, WithSimd};

/// Runs `op` with the target features of `set`.
pub fn run_with<Op: WithSimd>(set: InstructionSet, op: Op) -> Op::Output {
    const DETECTED: &str = "an instruction set exists only where the CPU has it";
    match set.name() {
        #[cfg(target_arch = "x86_64")]
        "avx512" => Simd::vectorize(pulp::x86::V4::try_new().expect(DETECTED), op),
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
