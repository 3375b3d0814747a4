//! `scores^T = K Q^T` for one panel of rows, a register tile of keys at a time.

#![allow(unsafe_code)]

use pulp::Simd;

use super::factors::Factors;
use super::fetch::FetchRows;
use super::lane::Lane;
use super::split_tiles;

/// Operands of [`score_block`].
#[derive(Clone, Copy)]
pub(crate) struct ScoreBlock<A> {
    /// First key, `steps` contiguous elements.
    pub(crate) k: *const A,
    /// Elements from a key to the next.
    pub(crate) k_stride: usize,
    /// How many keys.
    pub(crate) keys: usize,
    /// Steps of a sum, see [`Factors`].
    pub(crate) steps: usize,
    /// What scores are multiplied with, where Q is not.
    pub(crate) scale: A,
    /// `[steps][panel_rows]`.
    pub(crate) q_panel: *const A,
    /// `[keys][panel_rows]`, written; may be uninitialised.
    pub(crate) scores: *mut A,
    /// `[panel_rows]`, raised to each row's largest score, where wanted. NaN may count or not.
    pub(crate) max: Option<*mut A>,
    /// Elements between neighbouring keys of `scores` and steps of `q_panel`.
    pub(crate) panel_rows: usize,
    /// What is needed next.
    pub(crate) ahead: FetchRows,
}

/// Scores of all `keys` for `ROW_VECTORS` vectors of rows.
///
/// # Safety
/// `k` must be valid for reading `keys` rows of `steps` elements at `k_stride`, `q_panel` for reading `steps`
/// and `scores` for writing `keys` rows of `ROW_VECTORS` vectors at `panel_rows`, `max` for reading and writing
/// `ROW_VECTORS` vectors.
#[inline(always)]
pub(crate) unsafe fn score_block<
    S: Simd,
    A: Lane,
    F: Factors<A>,
    const TILE: usize,
    const SHORT: usize,
    const ROW_VECTORS: usize,
>(
    simd: S,
    factors: F,
    block: ScoreBlock<A>,
) {
    let (full, short, rest) = split_tiles::<TILE, SHORT>(block.keys);
    let mut next = block;
    // SAFETY: the tiles cover the block's keys exactly, so each stays inside what the caller promised.
    unsafe {
        for tile in 0..full {
            block.ahead.fetch(tile, full);
            score_tile::<S, A, F, TILE, ROW_VECTORS>(simd, factors, &mut next);
        }
        for _ in 0..short {
            score_tile::<S, A, F, SHORT, ROW_VECTORS>(simd, factors, &mut next);
        }
        let mut rest = rest;
        while rest >= 4 {
            score_tile::<S, A, F, 4, ROW_VECTORS>(simd, factors, &mut next);
            rest -= 4;
        }
        if rest >= 2 {
            score_tile::<S, A, F, 2, ROW_VECTORS>(simd, factors, &mut next);
            rest -= 2;
        }
        if rest == 1 {
            score_tile::<S, A, F, 1, ROW_VECTORS>(simd, factors, &mut next);
        }
    }
}

/// Scores of `KEYS` keys; moves `block` past them.
///
/// # Safety
/// As [`score_block`], for `KEYS` keys.
#[inline(always)]
unsafe fn score_tile<S: Simd, A: Lane, F: Factors<A>, const KEYS: usize, const ROW_VECTORS: usize>(
    simd: S,
    factors: F,
    block: &mut ScoreBlock<A>,
) {
    let ScoreBlock { k, k_stride, steps, panel_rows, .. } = *block;
    let lanes = A::lanes::<S>();
    let mut acc = [[A::splat(simd, A::ZERO); ROW_VECTORS]; KEYS];
    // Keys in groups with a pointer each. x86: of three, base, base + stride and base + 2 * stride are addresses that it
    // computes for nothing. aarch64: of one, a load that broadcasts can move its pointer on, but computes nothing else.
    // (Addresses of keys past the tile are not read.)
    let mut groups: [*const A; MAX_KEYS / GROUP] =
        core::array::from_fn(|group| opaque(k.wrapping_add((GROUP * group).wrapping_mul(k_stride))));
    let mut q_row = block.q_panel;
    // SAFETY: the loop runs `steps` times, `key < KEYS` and `vector < ROW_VECTORS`: inside the operands by the caller's
    // promise.
    unsafe {
        for _ in 0..steps {
            let q: [A::Vector<S>; ROW_VECTORS] = core::array::from_fn(|vector| A::load::<S>(q_row.add(vector * lanes)));
            for key in 0..KEYS {
                let k = A::splat(simd, *groups[key / GROUP].add(key % GROUP * k_stride));
                for vector in 0..ROW_VECTORS {
                    acc[key][vector] = factors.mul_add(simd, k, q[vector], acc[key][vector]);
                }
            }
            for group in &mut groups {
                *group = group.wrapping_add(1);
            }
            q_row = q_row.wrapping_add(panel_rows);
        }
        if F::SCALES_SCORES {
            let scale = A::splat(simd, block.scale);
            for key in 0..KEYS {
                for vector in 0..ROW_VECTORS {
                    acc[key][vector] = A::mul(simd, acc[key][vector], scale);
                }
            }
        }
        for (key, acc) in acc.iter().enumerate() {
            for (vector, &acc) in acc.iter().enumerate() {
                A::store::<S>(block.scores.add(key * panel_rows + vector * lanes), acc);
            }
        }
        if let Some(max) = block.max {
            for vector in 0..ROW_VECTORS {
                let max = max.add(vector * lanes);
                let mut largest = A::load::<S>(max);
                for acc in &acc {
                    largest = A::max(simd, acc[vector], largest);
                }
                A::store::<S>(max, largest);
            }
        }
        // Past the last key there is perhaps no memory, and past the last row of a half panel none of this array.
        block.k = k.wrapping_add(KEYS.wrapping_mul(k_stride));
        block.scores = block.scores.wrapping_add(KEYS * panel_rows);
    }
}

/// Keys that share a pointer.
pub(super) const GROUP: usize = if cfg!(target_arch = "aarch64") { 1 } else { 3 };

/// No tile has more keys.
const MAX_KEYS: usize = 12;

/// The same pointer, but the compiler cannot tell where it came from. Otherwise it computes the address of every key from
/// that of the one before, an addition per key and step. [llvm-mca] 6 x 2 on a Haswell, whose front end takes 4 instructions a
/// cycle: 6.0 cycles a step instead of 7.25; 6 x 4 on a Neoverse V1 6.0 instead of 7.7, on an N1 12.0 instead of 14.5.
#[inline(always)]
pub(super) fn opaque<A>(pointer: *const A) -> *const A {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    {
        let mut pointer = pointer;
        // SAFETY: no instruction, and nothing but the register is touched.
        unsafe { core::arch::asm!("/* {0} */", inout(reg) pointer, options(pure, readonly, nostack, preserves_flags)) };
        pointer
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    pointer
}
