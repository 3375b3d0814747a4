//! Which instructions the kernels run with: detection, names, forcing, and the only dispatch.

use std::sync::OnceLock;

#[cfg(target_arch = "aarch64")]
use pulp::aarch64::Neon;
#[cfg(target_arch = "x86_64")]
use pulp::x86::{V3, V4};
use pulp::{NullaryFnOnce, Scalar128b, Scalar256b, Scalar512b, Simd};

use crate::AttentionError;
use crate::kernels::factors::{Bf16Pairs, Factors};
use crate::kernels::lane::Lane;
use crate::kernels::{TileSizes, WithTiles};

/// A set of vector instructions that this CPU has.
///
/// A value carries the proof that the CPU supports it: there is no way to make one that would end in an illegal
/// instruction. Results are bit-identical for one instruction set; two sets agree within rounding.
///
/// `"avx512-bf16"` (AMD since Zen 4, Intel since Cooper Lake and Sapphire Rapids) is `"avx512"` with one difference: with more than 8 rows, that is queries
/// times heads of a group, whose Q and K both are bf16, `Q K^T` multiplies two features at once with `vdpbf16ps`. [measured, causal, T = 512
/// to 4096] On Zen 5 that is 1.2 to 1.3 times as fast; on an Intel Emerald Rapids, which takes four times as long for it as for an FMA, 0.71 to 0.74 times. So it is
/// what [`detect`](Self::detect) chooses on CPUs of AMD, and elsewhere one that can be asked for. The products are exact and added in f32 as elsewhere, in another order, and the sum is multiplied with
/// `softmax_scale` (elsewhere Q is): so it must be in the range of f32 before. Numbers, products and sums of magnitudes below 2^-126 count as 0 there.
///
/// ```
/// use fused_attention::InstructionSet;
/// println!("would run on {}", InstructionSet::detect().name());
/// for set in InstructionSet::available() {
///     println!("could run on {}", set.name());
/// }
/// ```
#[derive(Clone, Copy)]
pub struct InstructionSet(Kind);

#[derive(Clone, Copy)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512(V4),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512_bf16::Avx512Bf16),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    Portable(Scalar128b),
    Portable256(Scalar256b),
    Portable512(Scalar512b),
}

/// What `"avx2"` means: pulp's V3 (AVX2, FMA and what is older), and F16C besides, which converts f16. Every CPU with AVX2 has it; one
/// without would run the portable set.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    #![allow(unsafe_code)] // pulp's macro

    pulp::simd_type! {
        pub(super) struct Avx2 {
            sse: "sse",
            sse2: "sse2",
            fxsr: "fxsr",
            sse3: "sse3",
            ssse3: "ssse3",
            sse4_1: "sse4.1",
            sse4_2: "sse4.2",
            popcnt: "popcnt",
            avx: "avx",
            avx2: "avx2",
            bmi1: "bmi1",
            bmi2: "bmi2",
            fma: "fma",
            lzcnt: "lzcnt",
            f16c: "f16c",
        }
    }

    impl Avx2 {
        /// Without F16C.
        #[inline(always)]
        pub(super) fn v3(self) -> pulp::x86::V3 {
            let Self { sse, sse2, fxsr, sse3, ssse3, sse4_1, sse4_2, .. } = self;
            let Self { popcnt, avx, avx2, bmi1, bmi2, fma, lzcnt, .. } = self;
            pulp::x86::V3 { sse, sse2, fxsr, sse3, ssse3, sse4_1, sse4_2, popcnt, avx, avx2, bmi1, bmi2, fma, lzcnt }
        }
    }
}

/// What `"avx512-bf16"` means: pulp's V4, and AVX512-BF16 besides. The code is that of `"avx512"` but for one thing, see [`Bf16Pairs`].
#[cfg(target_arch = "x86_64")]
mod avx512_bf16 {
    #![allow(unsafe_code)] // pulp's macro, and CPUID

    pulp::simd_type! {
        pub(super) struct Avx512Bf16 {
            sse: "sse",
            sse2: "sse2",
            fxsr: "fxsr",
            sse3: "sse3",
            ssse3: "ssse3",
            sse4_1: "sse4.1",
            sse4_2: "sse4.2",
            popcnt: "popcnt",
            avx: "avx",
            avx2: "avx2",
            bmi1: "bmi1",
            bmi2: "bmi2",
            fma: "fma",
            lzcnt: "lzcnt",
            avx512f: "avx512f",
            avx512bw: "avx512bw",
            avx512cd: "avx512cd",
            avx512dq: "avx512dq",
            avx512vl: "avx512vl",
            avx512bf16: "avx512bf16",
        }
    }

    /// Whether the set is worth choosing: AMD's CPUs multiply pairs as fast as they multiply and add one number (Zen 5 measured, Zen 4 by AMD's
    /// tables). No flag says so, the vendor must stand for it.
    pub(super) fn is_fast(_: Avx512Bf16) -> bool {
        use core::arch::x86_64::__cpuid;
        #[allow(unused_unsafe)] // newer compilers call it safe
        // SAFETY: every CPU with AVX-512 has the instruction, with leaf 0.
        let vendor = unsafe { __cpuid(0) };
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        name.as_flattened() == b"AuthenticAMD"
    }

    impl Avx512Bf16 {
        /// Without AVX512-BF16.
        #[inline(always)]
        pub(super) fn v4(self) -> pulp::x86::V4 {
            let Self { sse, sse2, fxsr, sse3, ssse3, sse4_1, sse4_2, popcnt, avx, avx2, .. } = self;
            let Self { bmi1, bmi2, fma, lzcnt, avx512f, avx512bw, avx512cd, avx512dq, avx512vl, .. } = self;
            pulp::x86::V4 {
                sse,
                sse2,
                fxsr,
                sse3,
                ssse3,
                sse4_1,
                sse4_2,
                popcnt,
                avx,
                avx2,
                bmi1,
                bmi2,
                fma,
                lzcnt,
                avx512f,
                avx512bw,
                avx512cd,
                avx512dq,
                avx512vl,
            }
        }
    }
}

/// Names of all sets on all machines, in the order of preference of most.
const ALL_NAMES: [&str; 7] = ["avx512-bf16", "avx512", "avx2", "neon", "portable", "portable-256", "portable-512"];

/// The environment variable that chooses the set of a whole process.
const VARIABLE: &str = "FUSED_ATTENTION_INSTRUCTION_SET";

/// Gives `op` the vectors and tile sizes of one set, the sizes as constants.
struct Tiled<S, Op, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(S, Op);

impl<S: Simd, Op: WithTiles, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize> NullaryFnOnce
    for Tiled<S, Op, TILE, SHORT, ROW_VECTORS>
{
    type Output = Op::Output;
    #[inline(always)]
    fn call(self) -> Op::Output {
        self.1.run::<S, TILE, SHORT, ROW_VECTORS>(self.0)
    }
}

macro_rules! tiled {
    ($simd:expr, $set:ident, $sizes:expr, $op:expr) => {
        Tiled::<$set, _, { $sizes.tile }, { $sizes.short }, { $sizes.row_vectors }>($simd, $op)
    };
}

macro_rules! dispatch {
    ($simd:expr, $set:ident, $sizes:expr, $op:expr) => {
        Simd::vectorize($simd, tiled!($simd, $set, $sizes, $op))
    };
}

impl InstructionSet {
    /// The best set that this CPU has.
    pub fn detect() -> Self {
        static BEST: OnceLock<InstructionSet> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().next().unwrap_or(Self(Kind::Portable(Scalar128b))))
    }

    /// All sets that this CPU has, the best first, the portable one last. (Which of `"avx512"` and `"avx512-bf16"` is the better one depends on
    /// the CPU's vendor.)
    pub fn available() -> impl Iterator<Item = Self> {
        let names = ALL_NAMES;
        #[cfg(target_arch = "x86_64")]
        let names = {
            let mut names = names;
            if avx512_bf16::Avx512Bf16::try_new().is_some_and(|set| !avx512_bf16::is_fast(set)) {
                names.swap(0, 1);
            }
            names
        };
        names.into_iter().filter(|name| !name.starts_with("portable-")).filter_map(Self::by_name)
    }

    /// The portable code with 8 lanes, made for tests and comparisons: it shows on any CPU what 8 lanes do at edges.
    pub fn portable_256() -> Self {
        Self(Kind::Portable256(Scalar256b))
    }

    /// The portable code with 16 lanes, made for tests and comparisons: it shows on any CPU what 16 lanes do at edges.
    pub fn portable_512() -> Self {
        Self(Kind::Portable512(Scalar512b))
    }

    /// The set with this [`name`](Self::name).
    ///
    /// # Errors
    /// [`AttentionError::UnknownInstructionSet`]; [`AttentionError::UnavailableInstructionSet`] where it exists but
    /// not on this CPU. Both list what there is.
    pub fn from_name(name: &str) -> Result<Self, AttentionError> {
        Self::by_name(name).ok_or_else(|| {
            let available: Vec<_> = ALL_NAMES.iter().copied().filter(|name| Self::by_name(name).is_some()).collect();
            let (name, available) = (name.to_owned(), available.join(", "));
            if ALL_NAMES.contains(&name.as_str()) {
                AttentionError::UnavailableInstructionSet { name, available }
            } else {
                AttentionError::UnknownInstructionSet { name, available }
            }
        })
    }

    fn by_name(name: &str) -> Option<Self> {
        Some(Self(match name {
            #[cfg(target_arch = "x86_64")]
            "avx512-bf16" => Kind::Avx512Bf16(avx512_bf16::Avx512Bf16::try_new()?),
            #[cfg(target_arch = "x86_64")]
            "avx512" => Kind::Avx512(V4::try_new()?),
            #[cfg(target_arch = "x86_64")]
            "avx2" => Kind::Avx2(avx2::Avx2::try_new()?),
            #[cfg(target_arch = "aarch64")]
            "neon" => Kind::Neon(Neon::try_new()?),
            "portable" => Kind::Portable(Scalar128b),
            "portable-256" => Kind::Portable256(Scalar256b),
            "portable-512" => Kind::Portable512(Scalar512b),
            _ => return None,
        }))
    }

    /// `"avx512-bf16"`, `"avx512"`, `"avx2"`, `"neon"`, `"portable"`, `"portable-256"` or `"portable-512"`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(_) => "neon",
            Kind::Portable(_) => "portable",
            Kind::Portable256(_) => "portable-256",
            Kind::Portable512(_) => "portable-512",
        }
    }

    /// Whether it is one of a CPU's own, not one of the portable ones.
    pub(crate) fn has_fma(self) -> bool {
        !matches!(self.0, Kind::Portable(_) | Kind::Portable256(_) | Kind::Portable512(_))
    }

    /// What a call runs with: the config's choice, else the environment's (read once), else the best.
    pub(crate) fn resolve(chosen: Option<Self>) -> Result<Self, AttentionError> {
        static FROM_ENVIRONMENT: OnceLock<Result<InstructionSet, AttentionError>> = OnceLock::new();
        match chosen {
            Some(set) => Ok(set),
            None => FROM_ENVIRONMENT
                .get_or_init(|| match std::env::var_os(VARIABLE) {
                    Some(name) => Self::from_name(&name.to_string_lossy()),
                    None => Ok(Self::detect()),
                })
                .clone(),
        }
    }

    /// Tile sizes of this set in f32, the same that [`run`](Self::run) hands to the kernels.
    pub(crate) fn tile_sizes(self) -> TileSizes {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) | Kind::Avx512Bf16(_) => TileSizes::AVX512,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => TileSizes::AVX2,
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(_) => TileSizes::NEON,
            Kind::Portable(_) => TileSizes::PORTABLE,
            Kind::Portable256(_) => TileSizes::PORTABLE_256,
            Kind::Portable512(_) => TileSizes::PORTABLE_512,
        }
    }

    /// Tile sizes of this set in f64, the same that [`run_f64`](Self::run_f64) hands to the kernels.
    pub(crate) fn tile_sizes_f64(self) -> TileSizes {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) | Kind::Avx512Bf16(_) => TileSizes::AVX512_F64,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => TileSizes::AVX2_F64,
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(_) => TileSizes::NEON_F64,
            Kind::Portable(_) => TileSizes::PORTABLE_F64,
            Kind::Portable256(_) => TileSizes::PORTABLE_256_F64,
            Kind::Portable512(_) => TileSizes::PORTABLE_512_F64,
        }
    }

    /// Runs `op` with this set's vectors and tile sizes for f32, compiled with its target features.
    #[inline]
    pub(crate) fn run<Op: WithTiles>(self, op: Op) -> Op::Output {
        use TileSizes as T;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(simd) => dispatch!(simd, V4, T::AVX512, op),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(simd) => dispatch!(simd.v4(), V4, T::AVX512, op),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(simd) => simd.vectorize(tiled!(simd.v3(), V3, T::AVX2, op)),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(simd) => dispatch!(simd, Neon, T::NEON, op),
            Kind::Portable(simd) => dispatch!(simd, Scalar128b, T::PORTABLE, op),
            Kind::Portable256(simd) => dispatch!(simd, Scalar256b, T::PORTABLE_256, op),
            Kind::Portable512(simd) => dispatch!(simd, Scalar512b, T::PORTABLE_512, op),
        }
    }

    /// The set whose code serves this one outside prefill's tiles: for the wide portable sets, which are there to show what panels of their
    /// width do, the narrow one. Their code takes longest to compile.
    pub(crate) fn narrow(self) -> Self {
        match self.0 {
            Kind::Portable256(_) | Kind::Portable512(_) => Self(Kind::Portable(Scalar128b)),
            _ => self,
        }
    }

    /// As [`run`](Self::run) for one of the CPU's own sets ([`has_fma`](Self::has_fma)): `op` is compiled for no other.
    pub(crate) fn run_with_fma<Op: WithTiles>(self, op: Op) -> Op::Output {
        #[allow(unused_imports)] // where no set has FMA
        use TileSizes as T;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(simd) => dispatch!(simd, V4, T::AVX512, op),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(simd) => dispatch!(simd.v4(), V4, T::AVX512, op),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(simd) => simd.vectorize(tiled!(simd.v3(), V3, T::AVX2, op)),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(simd) => dispatch!(simd, Neon, T::NEON, op),
            Kind::Portable(_) | Kind::Portable256(_) | Kind::Portable512(_) => {
                drop(op);
                unreachable!("the caller has asked `has_fma`")
            }
        }
    }

    /// Whether it multiplies [`Bf16Pairs`].
    pub(crate) fn has_bf16_pairs(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => true,
            _ => false,
        }
    }

    /// As [`run`](Self::run) for a set that [has such pairs](Self::has_bf16_pairs), with the instruction that multiplies them: `op` is
    /// compiled for no other.
    pub(crate) fn run_bf16_pairs<Op: WithTiles>(self, op: Op) -> Op::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(simd) => simd.vectorize(tiled!(simd.v4(), V4, TileSizes::AVX512, op)),
            _ => {
                drop(op);
                unreachable!("the caller has asked `has_bf16_pairs`")
            }
        }
    }

    /// Runs `op` with the narrow portable set, whatever this set is: `op` is compiled for no other.
    pub(crate) fn run_portable<Op: WithTiles>(self, op: Op) -> Op::Output {
        dispatch!(Scalar128b, Scalar128b, TileSizes::PORTABLE, op)
    }

    /// As [`run`](Self::run), with the tile sizes for f64.
    #[inline]
    pub(crate) fn run_f64<Op: WithTiles>(self, op: Op) -> Op::Output {
        use TileSizes as T;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(simd) => dispatch!(simd, V4, T::AVX512_F64, op),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(simd) => dispatch!(simd.v4(), V4, T::AVX512_F64, op),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(simd) => simd.vectorize(tiled!(simd.v3(), V3, T::AVX2_F64, op)),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(simd) => dispatch!(simd, Neon, T::NEON_F64, op),
            Kind::Portable(simd) => dispatch!(simd, Scalar128b, T::PORTABLE_F64, op),
            Kind::Portable256(simd) => dispatch!(simd, Scalar256b, T::PORTABLE_256_F64, op),
            Kind::Portable512(simd) => dispatch!(simd, Scalar512b, T::PORTABLE_512_F64, op),
        }
    }
}

/// The name of the set whose code really runs when `set` is asked for, told from inside the dispatched code. For tests.
#[doc(hidden)]
pub fn executed_instruction_set(set: InstructionSet) -> &'static str {
    struct Executed;
    impl WithTiles for Executed {
        type Output = &'static str;
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, _: S) -> &'static str {
            #[allow(unused_variables)] // where there is one set
            let set = std::any::TypeId::of::<S>();
            #[cfg(target_arch = "x86_64")]
            if set == std::any::TypeId::of::<V4>() {
                return "avx512";
            } else if set == std::any::TypeId::of::<V3>() {
                return "avx2";
            }
            #[cfg(target_arch = "aarch64")]
            if set == std::any::TypeId::of::<Neon>() {
                return "neon";
            }
            match S::F32_LANES {
                _ if crate::kernels::lane::has_fma::<S>() => "unknown",
                4 => "portable",
                8 => "portable-256",
                _ => "portable-512",
            }
        }
    }
    /// Multiplies a pair: 1 * 2 + 3 * 4, and says whether that came out.
    struct MultipliesPairs(Bf16Pairs);
    impl WithTiles for MultipliesPairs {
        type Output = bool;
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) -> bool {
            let pair = |low: f32, high: f32| f32::from_bits(high.to_bits() | low.to_bits() >> 16);
            let [k, q, zero] =
                [pair(1.0, 3.0), pair(2.0, 4.0), 0.0].map(|value| f32::splat(simd, std::hint::black_box(value)));
            f32::first_lane::<S>(self.0.mul_add(simd, k, q, zero)) == 14.0
        }
    }
    let executed = set.run(Executed);
    match Bf16Pairs::new(set) {
        Some(pairs) if executed == "avx512" && set.run_bf16_pairs(MultipliesPairs(pairs)) => "avx512-bf16",
        _ => executed,
    }
}

impl PartialEq for InstructionSet {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for InstructionSet {}

impl std::fmt::Debug for InstructionSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "InstructionSet({})", self.name())
    }
}

impl std::fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for InstructionSet {
    type Err = AttentionError;
    fn from_str(name: &str) -> Result<Self, AttentionError> {
        Self::from_name(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_the_named_set_is_the_one_that_executes() {
        let mut sets: Vec<_> = InstructionSet::available().collect();
        assert_eq!(sets[0], InstructionSet::detect());
        assert_eq!(sets.last().map(|set| set.name()), Some("portable"));
        sets.extend([InstructionSet::portable_256(), InstructionSet::portable_512()]);
        for set in sets {
            assert_eq!(InstructionSet::from_name(set.name()), Ok(set));
            assert_eq!(executed_instruction_set(set), set.name());
        }
    }

    #[test]
    fn unknown_and_unavailable_names_are_told_apart() {
        assert!(matches!(InstructionSet::from_name("sse9"), Err(AttentionError::UnknownInstructionSet { .. })));
        let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
        let error = InstructionSet::from_name(foreign).unwrap_err();
        assert!(matches!(&error, AttentionError::UnavailableInstructionSet { .. }));
        assert!(error.to_string().contains("portable"), "{error}");
    }
}
