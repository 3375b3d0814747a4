//! `scores^T = K Q^T` for one panel of rows, a register tile of keys at a time.

#![allow(unsafe_code)]

use pulp::Simd;

use super::lane::Lane;
use super::split_tiles;

/// Operands of [`score_block`].
#[derive(Clone, Copy)]
pub(crate) struct ScoreBlock<A> {
    /// First key, `head_dim` contiguous elements.
    pub(crate) k: *const A,
    /// Elements from a key to the next.
    pub(crate) k_stride: usize,
    /// How many keys.
    pub(crate) keys: usize,
    pub(crate) head_dim: usize,
    /// `[head_dim][panel_rows]`.
    pub(crate) q_panel: *const A,
    /// `[keys][panel_rows]`, written; may be uninitialised.
    pub(crate) scores: *mut A,
    /// Elements between neighbouring keys of `scores` and dims of `q_panel`.
    pub(crate) panel_rows: usize,
}

/// Scores of all `keys` for `ROW_VECTORS` vectors of rows.
///
/// # Safety
/// `k` must be valid for reading `keys` rows of `head_dim` elements at `k_stride`, `q_panel` for reading `head_dim`
/// and `scores` for writing `keys` rows of `ROW_VECTORS` vectors at `panel_rows`.
#[inline(always)]
pub(crate) unsafe fn score_block<S: Simd, A: Lane, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
    simd: S,
    block: ScoreBlock<A>,
) {
    let (full, short, rest) = split_tiles::<TILE, SHORT>(block.keys);
    let mut next = block;
    // SAFETY: the tiles cover the block's keys exactly, so each stays inside what the caller promised.
    unsafe {
        for _ in 0..full {
            score_tile::<S, A, TILE, ROW_VECTORS>(simd, &mut next);
        }
        for _ in 0..short {
            score_tile::<S, A, SHORT, ROW_VECTORS>(simd, &mut next);
        }
        let mut rest = rest;
        while rest >= 4 {
            score_tile::<S, A, 4, ROW_VECTORS>(simd, &mut next);
            rest -= 4;
        }
        if rest >= 2 {
            score_tile::<S, A, 2, ROW_VECTORS>(simd, &mut next);
            rest -= 2;
        }
        if rest == 1 {
            score_tile::<S, A, 1, ROW_VECTORS>(simd, &mut next);
        }
    }
}

/// Scores of `KEYS` keys; moves `block` past them.
///
/// # Safety
/// As [`score_block`], for `KEYS` keys.
#[inline(always)]
unsafe fn score_tile<S: Simd, A: Lane, const KEYS: usize, const ROW_VECTORS: usize>(
    simd: S,
    block: &mut ScoreBlock<A>,
) {
    let ScoreBlock { k, k_stride, head_dim, panel_rows, .. } = *block;
    let lanes = A::lanes::<S>();
    let mut acc = [[A::splat(simd, A::ZERO); ROW_VECTORS]; KEYS];
    let mut q_row = block.q_panel;
    // SAFETY: `p < head_dim`, `key < KEYS` and `vector < ROW_VECTORS`: inside the operands by the caller's promise.
    unsafe {
        for p in 0..head_dim {
            let q: [A::Vector<S>; ROW_VECTORS] = core::array::from_fn(|vector| A::load::<S>(q_row.add(vector * lanes)));
            for key in 0..KEYS {
                let k = A::splat(simd, *k.add(key * k_stride + p));
                for vector in 0..ROW_VECTORS {
                    acc[key][vector] = A::mul_add(simd, k, q[vector], acc[key][vector]);
                }
            }
            q_row = q_row.add(panel_rows);
        }
        for (key, acc) in acc.iter().enumerate() {
            for (vector, &acc) in acc.iter().enumerate() {
                A::store::<S>(block.scores.add(key * panel_rows + vector * lanes), acc);
            }
        }
        block.k = k.wrapping_add(KEYS * k_stride); // past the last key there is perhaps no memory
        block.scores = block.scores.add(KEYS * panel_rows);
    }
}
