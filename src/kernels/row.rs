//! Both products for a few rows, features in the lanes: for tasks of so few rows that a row per lane would leave most lanes
//! empty. What bounds them is the memory of K and V, so every vector that is loaded (and, from 16 bits, converted) serves all
//! rows of the tile.
//!
//! ```text
//! scores[row][key]   = sum_p  q[row][p lanes] * K[key, p lanes]                  one horizontal sum a score
//! acc[row][d lanes]  = acc[row][d lanes] * rescale[row] + sum_j  probs[row][j] (broadcast) * V[j, d lanes]
//! ```

#![allow(unsafe_code)]

use pulp::Simd;

use super::fetch::{Fetch, Rows};
use super::lane::Lane;
use super::score_tile::{GROUP, opaque};
use super::stored::Stored;

/// Length of [`pack_rows`]' result.
#[inline(always)]
pub(crate) fn packed_len<S: Simd, A: Lane>(rows: usize, head_dim: usize) -> usize {
    rows * head_dim.next_multiple_of(A::lanes::<S>())
}

/// Rows of Q as [`score_rows`] takes several: `[vectors of head_dim][ROWS][lanes]`, filled up with 0.
///
/// # Safety
/// Each of `q` must be valid for reading `head_dim` elements.
#[inline(always)]
pub(crate) unsafe fn pack_rows<S: Simd, A: Lane, const ROWS: usize>(
    q: [*const A; ROWS],
    head_dim: usize,
    to: &mut [A],
) {
    let lanes = A::lanes::<S>();
    for (vector, to) in to[..packed_len::<S, A>(ROWS, head_dim)].chunks_exact_mut(ROWS * lanes).enumerate() {
        for (row, to) in to.chunks_exact_mut(lanes).enumerate() {
            for (lane, to) in to.iter_mut().enumerate() {
                let p = vector * lanes + lane;
                // SAFETY: `p < head_dim`, the length of a row.
                *to = if p < head_dim { unsafe { *q[row].add(p) } } else { A::ZERO };
            }
        }
    }
}

/// `scores[row][key] = q[row] . k[key]` for `ROWS` rows and `keys` keys, `scores_stride` apart.
///
/// # Safety
/// `k` must be valid for reading `keys` rows of `head_dim` elements; `q` for reading `head_dim`, or what [`pack_rows`] made of several
/// rows; and `scores` for writing `keys` elements in each of `ROWS` rows.
#[inline(always)]
pub(crate) unsafe fn score_rows<S: Simd, A: Lane, K: Stored<A>, const KEYS: usize, const ROWS: usize>(
    simd: S,
    q: *const A,
    k: Rows<K>,
    (keys, head_dim): (usize, usize),
    (scores, scores_stride): (*mut A, usize),
    ahead: &mut Fetch,
) {
    let mut key = 0;
    // SAFETY: `key + KEYS <= keys`, or `key < keys`.
    unsafe {
        while key + KEYS <= keys {
            let sums = dots::<S, A, K, KEYS, ROWS>(simd, q, k.from(key), head_dim, ahead);
            for row in 0..ROWS {
                scores.add(row * scores_stride + key).cast::<[A; KEYS]>().write_unaligned(sums[row]);
            }
            key += KEYS;
        }
        while key < keys {
            let sums = dots::<S, A, K, 1, ROWS>(simd, q, k.from(key), head_dim, ahead);
            for (row, &[sum]) in sums.iter().enumerate() {
                scores.add(row * scores_stride + key).write(sum);
            }
            key += 1;
        }
    }
}

/// `q[row] . k[key]` for the first `KEYS` rows of `k`, each in the same order of additions: equal keys get equal scores.
///
/// # Safety
/// As [`score_rows`], for `KEYS` keys.
#[inline(always)]
unsafe fn dots<S: Simd, A: Lane, K: Stored<A>, const KEYS: usize, const ROWS: usize>(
    simd: S,
    q: *const A,
    k: Rows<K>,
    head_dim: usize,
    ahead: &mut Fetch,
) -> [[A; KEYS]; ROWS] {
    let lanes = A::lanes::<S>();
    let zero = A::splat(simd, A::ZERO);
    // A row alone has two sums a key: they halve the chain of dependent FMAs, which is what a single key waits for.
    let mut acc = [[[zero; 2]; KEYS]; ROWS];
    let mut p = 0;
    let mut q_step = q;
    // Pointers for groups of keys, as in the score tile.
    let mut groups = [k.start; 4];
    for group in 0..4 {
        groups[group] = opaque(k.from(group * GROUP).start);
    }
    // SAFETY: `p + lanes <= head_dim` in the loops; behind them `head_dim - p` elements are left of every row.
    unsafe {
        while ROWS == 1 && p + 2 * lanes <= head_dim {
            ahead.fetch(2 * KEYS * lanes * size_of::<K>());
            for half in 0..2 {
                let q = A::load::<S>(q_step.add(half * lanes));
                for key in 0..KEYS {
                    let k = K::widen::<S>(simd, groups[key / GROUP].add(key % GROUP * k.stride + half * lanes));
                    acc[0][key][half] = A::mul_add(simd, q, k, acc[0][key][half]);
                }
            }
            for group in 0..4 {
                groups[group] = groups[group].wrapping_add(2 * lanes);
            }
            q_step = q_step.wrapping_add(2 * lanes);
            p += 2 * lanes;
        }
        while p + lanes <= head_dim {
            ahead.fetch(KEYS * lanes * size_of::<K>());
            let mut keys = [zero; KEYS];
            for key in 0..KEYS {
                keys[key] = K::widen::<S>(simd, groups[key / GROUP].add(key % GROUP * k.stride));
            }
            for row in 0..ROWS {
                let q = A::load::<S>(q_step.add(row * lanes));
                for key in 0..KEYS {
                    acc[row][key][0] = A::mul_add(simd, q, keys[key], acc[row][key][0]);
                }
            }
            for group in 0..4 {
                groups[group] = groups[group].wrapping_add(lanes);
            }
            q_step = q_step.wrapping_add(ROWS * lanes);
            p += lanes;
        }
        if p < head_dim {
            for key in 0..KEYS {
                let tail = core::slice::from_raw_parts(k.start.add(key * k.stride + p), head_dim - p);
                let k = K::widen_partial::<S>(simd, tail);
                for row in 0..ROWS {
                    let q = match ROWS {
                        1 => A::load_partial(simd, core::slice::from_raw_parts(q_step, head_dim - p)),
                        _ => A::load::<S>(q_step.add(row * lanes)),
                    };
                    acc[row][key][0] = A::mul_add(simd, q, k, acc[row][key][0]);
                }
            }
        }
    }
    let mut sums = [[A::ZERO; KEYS]; ROWS];
    if ROWS * KEYS == 16 {
        let mut vectors = [zero; 16];
        for i in 0..16.min(ROWS * KEYS) {
            vectors[i] = acc[i / KEYS][i % KEYS][0];
        }
        let sixteen = A::reduce_sums(simd, vectors);
        for i in 0..16.min(ROWS * KEYS) {
            sums[i / KEYS][i % KEYS] = sixteen[i];
        }
        return sums;
    }
    let mut index = 0;
    while index < ROWS * KEYS {
        let mut vectors = [zero; 4];
        for i in 0..4 {
            if index + i < ROWS * KEYS {
                let [first, second] = acc[(index + i) / KEYS][(index + i) % KEYS];
                vectors[i] = if ROWS == 1 { A::add(simd, first, second) } else { first };
            }
        }
        let four = A::reduce_sums(simd, vectors);
        for i in 0..4 {
            if index + i < ROWS * KEYS {
                sums[(index + i) / KEYS][(index + i) % KEYS] = four[i];
            }
        }
        index += 4;
    }
    sums
}

/// `acc[row] = acc[row] * rescale[row] + sum_j probs[row][j] * v[j]` for `ROWS` rows; without `rescale` the old `acc` is not
/// read: the first block of keys.
#[derive(Clone, Copy)]
pub(crate) struct ValueRows<A, K, const ROWS: usize> {
    pub(crate) v: Rows<K>,
    pub(crate) keys: usize,
    pub(crate) value_dim: usize,
    /// `keys` elements in each of `ROWS` rows, `probs_stride` apart.
    pub(crate) probs: *const A,
    pub(crate) probs_stride: usize,
    pub(crate) rescale: Option<[A; ROWS]>,
    /// `[ROWS][value_dim]`
    pub(crate) acc: *mut A,
}

/// Runs it, `VECTORS` vectors of features at a time: enough sums to hide their latency, few enough for the registers.
///
/// # Safety
/// `v` must be valid for reading `keys` rows of `value_dim` elements, `probs` and `acc` for what the fields say.
#[inline(always)]
pub(crate) unsafe fn value_rows<S: Simd, A: Lane, K: Stored<A>, const VECTORS: usize, const ROWS: usize>(
    simd: S,
    op: ValueRows<A, K, ROWS>,
    ahead: &mut Fetch,
) {
    let lanes = A::lanes::<S>();
    let mut d = 0;
    // SAFETY: `d + vectors * lanes <= value_dim` in every call, behind them `value_dim - d < lanes` elements are left.
    unsafe {
        while d + VECTORS * lanes <= op.value_dim {
            value_vectors::<S, A, K, VECTORS, ROWS>(simd, &op, d, ahead);
            d += VECTORS * lanes;
        }
        if VECTORS > 4 && d + 4 * lanes <= op.value_dim {
            value_vectors::<S, A, K, 4, ROWS>(simd, &op, d, ahead);
            d += 4 * lanes;
        }
        while d + lanes <= op.value_dim {
            value_vectors::<S, A, K, 1, ROWS>(simd, &op, d, ahead);
            d += lanes;
        }
        if d < op.value_dim {
            value_tail::<S, A, K, ROWS>(simd, &op, d);
        }
    }
}

/// `VECTORS` vectors of features, from feature `d` on.
///
/// # Safety
/// As [`value_rows`]; `d + VECTORS * lanes` must not exceed `value_dim`.
#[inline(always)]
unsafe fn value_vectors<S: Simd, A: Lane, K: Stored<A>, const VECTORS: usize, const ROWS: usize>(
    simd: S,
    op: &ValueRows<A, K, ROWS>,
    d: usize,
    ahead: &mut Fetch,
) {
    let lanes = A::lanes::<S>();
    let mut ahead_here = *ahead; // in registers
    let mut sums = [[A::splat(simd, A::ZERO); VECTORS]; ROWS];
    // SAFETY: `d + VECTORS * lanes <= value_dim`, `row < ROWS`, and the loop runs `keys` times.
    unsafe {
        if let Some(rescale) = op.rescale {
            for row in 0..ROWS {
                let rescale = A::splat(simd, rescale[row]);
                for vector in 0..VECTORS {
                    let acc = A::load::<S>(op.acc.add(row * op.value_dim + d + vector * lanes));
                    sums[row][vector] = A::mul(simd, acc, rescale);
                }
            }
        }
        let mut v = op.v.start.wrapping_add(d);
        for key in 0..op.keys {
            ahead_here.fetch(VECTORS * lanes * size_of::<K>());
            let mut values = [A::splat(simd, A::ZERO); VECTORS];
            for vector in 0..VECTORS {
                values[vector] = K::widen::<S>(simd, v.add(vector * lanes));
            }
            for row in 0..ROWS {
                let prob = A::splat(simd, *op.probs.add(row * op.probs_stride + key));
                for vector in 0..VECTORS {
                    sums[row][vector] = A::mul_add(simd, prob, values[vector], sums[row][vector]);
                }
            }
            v = v.wrapping_add(op.v.stride); // past the last key there is perhaps no memory
        }
        *ahead = ahead_here;
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                A::store::<S>(op.acc.add(row * op.value_dim + d + vector * lanes), sums[row][vector]);
            }
        }
    }
}

/// The features from `d` on, fewer than a vector.
///
/// # Safety
/// As [`value_rows`]; `d` must be less than `value_dim`.
#[inline(always)]
unsafe fn value_tail<S: Simd, A: Lane, K: Stored<A>, const ROWS: usize>(simd: S, op: &ValueRows<A, K, ROWS>, d: usize) {
    let rest = op.value_dim - d;
    let mut sums = [A::splat(simd, A::ZERO); ROWS];
    // SAFETY: `rest` elements are left of every row behind `d`, `row < ROWS` and `key < keys`.
    unsafe {
        if let Some(rescale) = op.rescale {
            for row in 0..ROWS {
                let acc = core::slice::from_raw_parts(op.acc.add(row * op.value_dim + d), rest);
                sums[row] = A::mul(simd, A::load_partial(simd, acc), A::splat(simd, rescale[row]));
            }
        }
        for key in 0..op.keys {
            let v = core::slice::from_raw_parts(op.v.start.add(key * op.v.stride + d), rest);
            let v = K::widen_partial::<S>(simd, v);
            for row in 0..ROWS {
                let prob = A::splat(simd, *op.probs.add(row * op.probs_stride + key));
                sums[row] = A::mul_add(simd, prob, v, sums[row]);
            }
        }
        for row in 0..ROWS {
            let acc = core::slice::from_raw_parts_mut(op.acc.add(row * op.value_dim + d), rest);
            A::store_partial(simd, acc, sums[row]);
        }
    }
}
