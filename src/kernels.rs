//! What a micro-tile is, and the contract that all kernels share.
//!
//! Rows (queries times the heads of a group) lie in the lanes. A *panel* is `row_vectors * LANES` rows. Both products
//! are micro-tiles of `TILE` keys (or value dims) by `ROW_VECTORS` vectors of rows, held in registers:
//!
//! ```text
//! scores^T[key, row]  = sum_p  K[key, p] (broadcast)  *  Q^T[p, row lanes]         score_tile
//! acc^T[dim, row]    += sum_j  V[j, dim] (broadcast)  *  P^T[j, row lanes]         value_tile
//! ```
//!
//! Layouts, all in the accumulator type `A`, `rows = ROW_VECTORS * LANES`:
//! - Q panel `[steps][rows]`, scaled by `softmax_scale`; lanes past the last row hold anything, their results
//!   are not read. A step is a feature, or a pair of them (`factors`), which is not scaled.
//! - K (in steps, as Q) and V: row-major, unit stride within a key, any stride between keys.
//! - scores / probs `[key][rows]`; out_acc `[value_dim][rows]`; running_max, running_sum, rescale `[rows]`.
//!
//! Every sum of a tile runs over its whole range in ascending order with one fused multiply-add (or, on the portable sets,
//! one multiply and one add; of a pair two, the second feature first) a step, whatever the tile: a row's bits depend neither on the tile that computed it nor on
//! its neighbours. (`row`, for tasks of a few rows, sums in the lanes; which rows share a tile there depends on their number alone.)

pub(crate) mod broadcast;
pub(crate) mod convert;
pub(crate) mod exp;
pub(crate) mod exp_f64;
pub(crate) mod factors;
pub(crate) mod fetch;
pub(crate) mod finite;
pub(crate) mod lane;
pub(crate) mod lane_f64;
#[cfg(feature = "__panel")]
pub mod panel;
pub(crate) mod reduce;
pub(crate) mod row;
pub(crate) mod score_tile;
pub(crate) mod stored;
pub(crate) mod tanh;
pub(crate) mod transpose;
pub(crate) mod value_tile;

use pulp::Simd;

/// Register and cache blocking of one instruction set, for one accumulator.
///
/// | set | registers | tile | accumulators | loads per FMA | why |
/// |---|---|---|---|---|---|
/// | AVX2 | 16 x 8 lanes | 6 x 2 | 12 | 8 / 12 | 12 accumulators + 2 of Q + 1 broadcast fit; 4 x 3 spills, 12 x 1 is load-bound |
/// | AVX-512 | 32 x 16 | 12 x 2 | 24 | 14 / 24 | 24 + 2 + 1 fit; a panel of 32 rows; embedded broadcasts, 26 loads, are 9 % slower |
/// | NEON | 32 x 4 | 6 x 4 | 24 | 10 / 24, of values 6 / 24 | 24 + 4 + 2 fit; one load brings up to 4 values, FMAs take them by element |
/// | portable | 16 x 4 (SSE2) | 4 x 2 | 8 | 6 / 8 | without FMA every product needs a register of its own |
///
/// A step of the score tile may be a pair of bf16 (AVX512-BF16), with the same registers and loads, and half of the steps.
///
/// In f64 a vector has half as many lanes, and a tile the same registers and the same reasons; but rows are packed and unpacked by eights
/// (`transpose::SIDE`), so on the portable set, of 2 lanes, a tile is 2 x 4.
///
/// `short` is the second tile height: with it every even length from 4 on is covered without a tail of ones and
/// twos where a tile has 6, every multiple of 4 from 8 on where it has 12. It keeps at
/// least 8 accumulators, which is what two FMA units of latency 4 need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TileSizes {
    /// Keys (score tile) or value dims (value tile) of the full tile.
    pub(crate) tile: usize,
    /// The same of the short tile.
    pub(crate) short: usize,
    /// Vectors of rows in a tile and in a panel.
    pub(crate) row_vectors: usize,
    /// Lanes of a vector of accumulators.
    pub(crate) lanes: usize,
}

#[rustfmt::skip]
#[allow(dead_code)] // each target compiles the sets that it has
impl TileSizes {
    pub(crate) const AVX512: Self = Self { tile: 12, short: 8, row_vectors: 2, lanes: 16 };
    pub(crate) const AVX2: Self = Self { tile: 6, short: 4, row_vectors: 2, lanes: 8 };
    pub(crate) const NEON: Self = Self { tile: 6, short: 4, row_vectors: 4, lanes: 4 };
    pub(crate) const PORTABLE: Self = Self { tile: 4, short: 4, row_vectors: 2, lanes: 4 };
    pub(crate) const PORTABLE_256: Self = Self { tile: 6, short: 4, row_vectors: 2, lanes: 8 };
    pub(crate) const PORTABLE_512: Self = Self { tile: 12, short: 8, row_vectors: 2, lanes: 16 };

    pub(crate) const AVX512_F64: Self = Self { tile: 12, short: 8, row_vectors: 2, lanes: 8 };
    pub(crate) const AVX2_F64: Self = Self { tile: 6, short: 4, row_vectors: 2, lanes: 4 };
    pub(crate) const NEON_F64: Self = Self { tile: 6, short: 4, row_vectors: 4, lanes: 2 };
    pub(crate) const PORTABLE_F64: Self = Self { tile: 2, short: 2, row_vectors: 4, lanes: 2 };
    pub(crate) const PORTABLE_256_F64: Self = Self { tile: 6, short: 4, row_vectors: 2, lanes: 4 };
    pub(crate) const PORTABLE_512_F64: Self = Self { tile: 12, short: 8, row_vectors: 2, lanes: 8 };

    /// Rows of a panel.
    pub(crate) const fn panel_rows(&self) -> usize {
        self.row_vectors * self.lanes
    }
}

/// Up to this many rows a horizontal sum per score costs less than lanes that stay empty. [measured, 8 heads of T = 8,
/// head_dim 64, AVX-512] 3.3 us against 5.4 us.
pub(crate) const MAX_DECODE_ROWS: usize = 8;

/// No set has more lanes than this.
pub(crate) const MAX_LANES: usize = 16;

/// No set's panel has more rows than this.
pub(crate) const MAX_PANEL_ROWS: usize = 32;

const _: () = {
    use transpose::SIDE;
    type T = TileSizes;
    let sets = [T::AVX512, T::AVX2, T::NEON, T::PORTABLE, T::PORTABLE_256, T::PORTABLE_512];
    let sets_f64 = [T::AVX512_F64, T::AVX2_F64, T::NEON_F64, T::PORTABLE_F64, T::PORTABLE_256_F64, T::PORTABLE_512_F64];
    let mut set = 0;
    while set < sets.len() {
        assert!(sets[set].panel_rows() <= MAX_PANEL_ROWS && sets[set].lanes <= MAX_LANES);
        assert!(sets_f64[set].panel_rows() <= MAX_PANEL_ROWS && 2 * sets_f64[set].lanes == sets[set].lanes);
        assert!(sets[set].panel_rows().is_multiple_of(SIDE) && sets_f64[set].panel_rows().is_multiple_of(SIDE));
        set += 1;
    }
};

/// Code that is generic over the vectors and the tile sizes of an instruction set.
pub(crate) trait WithTiles {
    type Output;
    /// Must be `#[inline(always)]`, or it is compiled without the target features.
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) -> Self::Output;
}

/// How many full and short tiles cover `len` keys or dims, and what is left for tiles of 2 and 1.
#[inline(always)]
pub(crate) fn split_tiles<const TILE: usize, const SHORT: usize>(len: usize) -> (usize, usize, usize) {
    let (mut full, mut rest) = (len / TILE, len % TILE);
    // One full tile less where that leaves exactly two short ones: 64 = 10 * 6 + 4, but 62 = 9 * 6 + 2 * 4.
    if full > 0 && TILE < 2 * SHORT && rest + TILE == 2 * SHORT {
        full -= 1;
        rest += TILE;
    }
    (full, rest / SHORT, rest % SHORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_length_exactly() {
        fn check<const TILE: usize, const SHORT: usize>() {
            for len in 0..200 {
                let (full, short, rest) = split_tiles::<TILE, SHORT>(len);
                assert_eq!(full * TILE + short * SHORT + rest, len);
                assert!(rest < SHORT, "{len}: rest {rest}");
            }
        }
        check::<6, 4>();
        check::<12, 8>();
        check::<4, 4>();
        check::<2, 2>();
        assert_eq!(split_tiles::<6, 4>(64), (10, 1, 0));
        assert_eq!(split_tiles::<6, 4>(128), (20, 2, 0));
        assert_eq!(split_tiles::<12, 8>(64), (4, 2, 0));
        assert_eq!(split_tiles::<12, 8>(128), (10, 1, 0));
    }

    #[test]
    fn lanes_are_those_of_the_vectors() {
        struct Lanes;
        impl WithTiles for Lanes {
            type Output = [usize; 5];
            fn run<S: Simd, const T: usize, const H: usize, const V: usize>(self, _: S) -> Self::Output {
                [T, H, V, S::F32_LANES, S::F64_LANES]
            }
        }
        for name in ["avx512-bf16", "avx512", "avx2", "neon", "portable", "portable-256", "portable-512"] {
            let Ok(set) = crate::InstructionSet::from_name(name) else { continue };
            let TileSizes { tile, short, row_vectors, lanes } = set.tile_sizes();
            assert_eq!(set.run(Lanes), [tile, short, row_vectors, lanes, lanes / 2], "{name}");
            if set.has_bf16_pairs() {
                assert_eq!(set.run_bf16_pairs(Lanes), [tile, short, row_vectors, lanes, lanes / 2], "{name}, pairs");
            }
            let TileSizes { tile, short, row_vectors, lanes } = set.tile_sizes_f64();
            assert_eq!(set.run_f64(Lanes), [tile, short, row_vectors, 2 * lanes, lanes], "{name}");
        }
    }
}
