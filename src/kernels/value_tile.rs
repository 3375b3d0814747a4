//! `out_acc^T = out_acc^T * rescale + V^T P^T` for one panel of rows, a register tile of value dims at a time.

#![allow(unsafe_code)]

use pulp::Simd;

use super::broadcast::broadcast;
use super::fetch::FetchRows;
use super::lane::Lane;
use super::split_tiles;

/// Operands of [`value_block`].
#[derive(Clone, Copy)]
pub(crate) struct ValueBlock<A> {
    /// First key's value, `value_dim` contiguous elements.
    pub(crate) v: *const A,
    /// Elements from a key's value to the next.
    pub(crate) v_stride: usize,
    /// How many keys.
    pub(crate) keys: usize,
    pub(crate) value_dim: usize,
    /// `[keys][panel_rows]`.
    pub(crate) probs: *const A,
    /// `[value_dim][panel_rows]`, written.
    pub(crate) out_acc: *mut A,
    /// What `out_acc` holds.
    pub(crate) before: Before<A>,
    /// Elements between neighbouring keys of `probs` and dims of `out_acc`.
    pub(crate) panel_rows: usize,
    /// What is needed next.
    pub(crate) ahead: FetchRows,
}

/// What the accumulators hold before a block of keys.
#[derive(Clone, Copy)]
pub(crate) enum Before<A> {
    /// Nothing yet: they are not read.
    Nothing,
    /// Sums that stay as they are.
    Sums,
    /// Sums to be multiplied with these, `[panel_rows]`.
    SumsToRescale(*const A),
}

/// All value dims for `ROW_VECTORS` vectors of rows.
///
/// # Safety
/// `v` must be valid for reading `keys` rows of `value_dim` elements at `v_stride`, `probs` for reading `keys` rows
/// of `ROW_VECTORS` vectors at `panel_rows`, the factors of `before` for reading `ROW_VECTORS` vectors, and `out_acc` for
/// reading and writing `value_dim` rows of `ROW_VECTORS` vectors at `panel_rows`.
#[inline(always)]
pub(crate) unsafe fn value_block<S: Simd, A: Lane, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
    simd: S,
    block: ValueBlock<A>,
) {
    let (full, short, rest) = split_tiles::<TILE, SHORT>(block.value_dim);
    let mut next = block;
    // SAFETY: the tiles cover the block's dims exactly, so each stays inside what the caller promised.
    unsafe {
        for tile in 0..full {
            block.ahead.fetch(tile, full);
            value_tile::<S, A, TILE, ROW_VECTORS>(simd, &mut next);
        }
        for _ in 0..short {
            value_tile::<S, A, SHORT, ROW_VECTORS>(simd, &mut next);
        }
        let mut rest = rest;
        while rest >= 4 {
            value_tile::<S, A, 4, ROW_VECTORS>(simd, &mut next);
            rest -= 4;
        }
        if rest >= 2 {
            value_tile::<S, A, 2, ROW_VECTORS>(simd, &mut next);
            rest -= 2;
        }
        if rest == 1 {
            value_tile::<S, A, 1, ROW_VECTORS>(simd, &mut next);
        }
    }
}

/// `DIMS` value dims; moves `block` past them.
///
/// # Safety
/// As [`value_block`], for `DIMS` dims.
#[inline(always)]
unsafe fn value_tile<S: Simd, A: Lane, const DIMS: usize, const ROW_VECTORS: usize>(
    simd: S,
    block: &mut ValueBlock<A>,
) {
    let ValueBlock { v_stride, keys, panel_rows, before, out_acc, .. } = *block;
    let lanes = A::lanes::<S>();
    // SAFETY: `dim < DIMS`, `vector < ROW_VECTORS` and the loop runs `keys` times: inside the operands by the
    // caller's promise.
    unsafe {
        let mut acc = [[A::splat(simd, A::ZERO); ROW_VECTORS]; DIMS];
        if !matches!(before, Before::Nothing) {
            for dim in 0..DIMS {
                for vector in 0..ROW_VECTORS {
                    acc[dim][vector] = A::load::<S>(out_acc.add(dim * panel_rows + vector * lanes));
                }
            }
        }
        if let Before::SumsToRescale(rescale) = before {
            for vector in 0..ROW_VECTORS {
                let rescale = A::load::<S>(rescale.add(vector * lanes));
                for acc in &mut acc {
                    acc[vector] = A::mul(simd, acc[vector], rescale);
                }
            }
        }
        let (mut v, mut probs) = (block.v, block.probs);
        for _ in 0..keys {
            let p: [A::Vector<S>; ROW_VECTORS] = core::array::from_fn(|vector| A::load::<S>(probs.add(vector * lanes)));
            for dim in 0..DIMS {
                let value = broadcast::<S, A, DIMS>(simd, v, dim);
                for vector in 0..ROW_VECTORS {
                    acc[dim][vector] = A::mul_add(simd, value, p[vector], acc[dim][vector]);
                }
            }
            v = v.wrapping_add(v_stride); // past the last key there is perhaps no memory
            probs = probs.wrapping_add(panel_rows);
        }
        for (dim, acc) in acc.iter().enumerate() {
            for (vector, &acc) in acc.iter().enumerate() {
                A::store::<S>(out_acc.add(dim * panel_rows + vector * lanes), acc);
            }
        }
        block.v = block.v.wrapping_add(DIMS);
        block.out_acc = out_acc.wrapping_add(DIMS * panel_rows);
    }
}

/// As [`value_block`], but a row takes only the keys whose weight is not negative: for blocks whose hidden values, which are
/// marked so, are not all finite, where multiplying by a weight of 0 would still give NaN. Rare, so it is not tiled. Same order of
/// additions and same roundings as the tiles.
///
/// # Safety
/// As [`value_block`].
#[inline(always)]
pub(crate) unsafe fn value_block_selected<S: Simd, A: Lane, const ROW_VECTORS: usize>(simd: S, block: ValueBlock<A>) {
    let lanes = A::lanes::<S>();
    let zero = A::splat(simd, A::ZERO);
    // SAFETY: `dim < value_dim`, `key < keys`, `vector < ROW_VECTORS`: inside the operands by the caller's promise.
    unsafe {
        for dim in 0..block.value_dim {
            for vector in 0..ROW_VECTORS {
                let out_acc = block.out_acc.add(dim * block.panel_rows + vector * lanes);
                let mut acc = match block.before {
                    Before::Nothing => zero,
                    Before::Sums => A::load::<S>(out_acc),
                    Before::SumsToRescale(rescale) => {
                        A::mul(simd, A::load::<S>(out_acc), A::load::<S>(rescale.add(vector * lanes)))
                    }
                };
                for key in 0..block.keys {
                    let value = A::splat(simd, *block.v.add(key * block.v_stride + dim));
                    let p = A::load::<S>(block.probs.add(key * block.panel_rows + vector * lanes));
                    let sum = A::mul_add(simd, value, p, acc);
                    acc = A::select(simd, A::less_than(simd, p, zero), acc, sum);
                }
                A::store::<S>(out_acc, acc);
            }
        }
    }
}
