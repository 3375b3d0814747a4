//! A few rows of one KV head against one block of keys. Features lie in the lanes; K and V are read once for four rows, as
//! they are stored, and while one of them is in use the other is fetched: what such a task waits for is memory.
//!
//! Scratch as in `prefill` with panels of one row: out_acc `[row][value_dim]`, and scores `[row][kv_block + MAX_LANES]`. Q is
//! read where it lies, unscaled; the scores are scaled instead.

#![allow(unsafe_code)]

use std::mem;
use std::ops::Range;

use pulp::Simd;

use crate::kernels::fetch::{Fetch, Rows};
use crate::kernels::lane::Lane;
use crate::kernels::row::{ValueRows, pack_rows, packed_len, score_rows, value_rows};
use crate::kernels::stored::Stored;
use crate::kernels::{MAX_DECODE_ROWS, WithTiles};
use crate::online_softmax::{softmax_row, softmax_rows};
use crate::packing;
use crate::row_block::RowBlock;
use crate::score_pass::{ScorePass, ScoreRow};
use crate::workspace::Scratch;

/// What a task knows of its rows from one block of keys to the next, beside their accumulators.
pub(crate) struct DecodeRows<A> {
    /// Rows of Q, unscaled, each valid for reading `head_dim` elements.
    q: [*const A; MAX_DECODE_ROWS],
    scale: A,
    /// No block was run yet: accumulators are written, not read.
    is_first: bool,
    /// Tiles of several rows, by their first row, whose Q was packed. Not all of them have a part in the first block.
    is_packed: [bool; MAX_DECODE_ROWS],
}

impl<A> DecodeRows<A> {
    /// Each row of Q that the task has must be valid for reading `head_dim` elements.
    pub(crate) fn new(q: [*const A; MAX_DECODE_ROWS], scale: A) -> Self {
        Self { q, scale, is_first: true, is_packed: [false; MAX_DECODE_ROWS] }
    }
}

/// All rows of a task against one block of keys.
pub(crate) struct DecodeBlock<'t, 's, A, K> {
    pub(crate) task: &'t RowBlock,
    pub(crate) first_key: usize,
    pub(crate) keys: usize,
    /// Valid for reading `keys` rows of `head_dim` elements.
    pub(crate) k: Rows<K>,
    /// Valid for reading `keys` rows of `value_dim` elements.
    pub(crate) v: Rows<K>,
    /// Keys of the next block, to be fetched.
    pub(crate) next_keys: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) rows: &'t mut DecodeRows<A>,
    /// What happens to scores, if anything. It scales them, too.
    pub(crate) pass: Option<&'t dyn ScorePass<A>>,
    pub(crate) scratch: &'t mut Scratch<'s, A>,
}

impl<A: Lane, K: Stored<A>> WithTiles for DecodeBlock<'_, '_, A, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(mut self, simd: S) {
        // Sets with 32 registers have tiles of 24 vectors.
        let many_registers = TILE * ROW_VECTORS >= 24;
        let rows = self.task.rows;
        // Rows of a short call meet so few keys that what they have in common is little.
        let together = self.task.keys().len() > FEW_KEYS;
        let mut row = 0;
        while together && row + 4 <= rows {
            if many_registers {
                self.run_rows::<S, 4, 4, 4>(simd, row);
            } else {
                self.run_rows::<S, 2, 2, 4>(simd, row);
            }
            row += 4;
        }
        while together && row + 2 <= rows {
            self.run_rows::<S, 4, 4, 2>(simd, row);
            row += 2;
        }
        while row < rows {
            self.run_rows::<S, 4, 8, 1>(simd, row);
            row += 1;
        }
        self.rows.is_first = false;
    }
}

/// The same for the portable set, a row at a time: K and V are accumulators then. Its registers would not hold a tile of rows, and its code
/// for one takes the compiler a minute.
pub(crate) struct PortableDecodeBlock<'t, 's, A>(pub(crate) DecodeBlock<'t, 's, A, A>);

impl<A: Lane> WithTiles for PortableDecodeBlock<'_, '_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(mut self, simd: S) {
        for row in 0..self.0.task.rows {
            self.0.run_rows::<S, 2, 4, 1>(simd, row);
        }
        self.0.rows.is_first = false;
    }
}

/// Up to this many keys each row is computed by itself.
const FEW_KEYS: usize = 16;

impl<A: Lane, K: Stored<A>> DecodeBlock<'_, '_, A, K> {
    /// `ROWS` rows from `first` on.
    #[inline(always)]
    fn run_rows<S: Simd, const KEYS: usize, const VECTORS: usize, const ROWS: usize>(&mut self, simd: S, first: usize) {
        let stride = self.scratch.scores.len() / self.task.rows;
        let mut keys: [Range<usize>; ROWS] = core::array::from_fn(|_| 0..0);
        for (row, keys) in keys.iter_mut().enumerate() {
            let range = self.task.row_keys(first + row);
            let clamp = |key: usize| key.saturating_sub(self.first_key).min(self.keys);
            *keys = clamp(range.start)..clamp(range.end);
        }
        let any = keys[0].start..keys[ROWS - 1].end;
        let all = keys[ROWS - 1].start..keys[0].end;
        if any.is_empty() {
            return;
        }
        // Only the first rows fetch: the others find the block in the cache.
        let (v, next_k) = (self.v.from(any.start), self.k.from(self.keys));
        let mut ahead = [
            Fetch::new((first == 0).then_some(v), self.value_dim, self.rows.q[first]),
            Fetch::new((first == 0 && self.next_keys > 0).then_some(next_k), self.head_dim, self.rows.q[first]),
        ];
        let mut q = self.rows.q[first];
        if ROWS > 1 {
            // Behind the rows of Q that had to be converted, if any.
            let padded_dim = packed_len::<S, A>(1, self.head_dim);
            let packed = &mut self.scratch.q_panels[self.task.rows * self.head_dim + first * padded_dim..];
            if !mem::replace(&mut self.rows.is_packed[first], true) {
                let mut rows = [q; ROWS];
                rows.copy_from_slice(&self.rows.q[first..first + ROWS]);
                // SAFETY: rows of Q are valid for `head_dim` elements (see `DecodeRows::new`).
                unsafe { pack_rows::<S, A, ROWS>(rows, self.head_dim, packed) };
            }
            q = packed[..ROWS * padded_dim].as_ptr();
        }
        let scores = self.scratch.scores[first * stride..(first + ROWS) * stride].as_mut_ptr();
        let keys_and_dim = (any.len(), self.head_dim);
        // SAFETY: `k` is valid for what is read (see the field) and so is Q, one row or several packed; `any` lies inside the
        // block, and `scores` has just been cut to `ROWS` rows of `stride >= keys` elements.
        unsafe {
            let scores = (scores.add(any.start), stride);
            score_rows::<S, A, K, KEYS, ROWS>(simd, q, self.k.from(any.start), keys_and_dim, scores, &mut ahead[0]);
        }
        let mut rescale = [A::ZERO; ROWS];
        let mut hides_keys = false;
        if ROWS > 1 && self.pass.is_none() && any == all && any.len().is_multiple_of(A::lanes::<S>()) {
            rescale = softmax_rows::<S, A, ROWS>(
                simd,
                (&mut self.scratch.scores[first * stride + any.start..], stride, any.len()),
                self.rows.scale,
                &mut self.scratch.running_max[first..first + ROWS],
                &mut self.scratch.running_sum[first..first + ROWS],
            );
        } else {
            for (row, keys) in keys.iter().enumerate() {
                if keys.is_empty() {
                    rescale[row] = A::from_index(1);
                    continue;
                }
                let lanes = A::lanes::<S>();
                let scores = &mut self.scratch.scores[(first + row) * stride..][..stride];
                let scores = &mut scores[keys.start..][..keys.len().next_multiple_of(lanes)];
                let (mut scale, mut is_first) = (self.rows.scale, self.rows.is_first);
                if let Some(pass) = self.pass {
                    let (row, first_key) = (first + row, self.first_key + keys.start);
                    let (task, keys) = (self.task, keys.len());
                    hides_keys |= pass.modify_row(ScoreRow { task, row, first_key, keys, scores: &mut *scores, scale });
                    // The short way of a row's only keys takes them all as visible.
                    (scale, is_first) = (A::from_index(1), false);
                }
                rescale[row] = softmax_row(
                    simd,
                    (scores, keys.len()),
                    scale,
                    is_first,
                    &mut self.scratch.running_max[first + row],
                    &mut self.scratch.running_sum[first + row],
                );
            }
        }
        let v = self.v.from(any.start);
        // SAFETY: `v` is valid for the rows of the block, inside which `any` lies.
        if hides_keys && unsafe { !packing::all_finite(simd, v.start, v.stride, [any.len(), self.value_dim]) } {
            return self.values_by_key::<S, ROWS>(simd, first, keys, rescale, &mut ahead[1]);
        }
        // Keys that every row sees are multiplied together; before and after them each row is by itself.
        let (left, right) = if all.is_empty() { (any.end, any.end) } else { (all.start, all.end) };
        // Whether the accumulators of a row hold nothing yet: they are written then, not read.
        let mut is_new = [self.rows.is_first; ROWS];
        for (from, to) in [(any.start, left), (left, right), (right, any.end)] {
            if from >= to {
                continue;
            }
            if ROWS == 1 || (from, to) == (left, right) {
                let all_new = is_new.iter().all(|&is_new| is_new);
                for row in 0..ROWS {
                    if is_new[row] && !all_new {
                        self.scratch.out_acc[(first + row) * self.value_dim..][..self.value_dim].fill(A::ZERO);
                    }
                }
                self.values::<S, VECTORS, ROWS>(simd, first, from..to, (!all_new).then_some(rescale), &mut ahead[1]);
                (is_new, rescale) = ([false; ROWS], [A::from_index(1); ROWS]);
                continue;
            }
            for row in 0..ROWS {
                let edge = keys[row].start.max(from)..keys[row].end.min(to);
                if !edge.is_empty() {
                    let rescale_row = (!is_new[row]).then_some([rescale[row]]);
                    self.values::<S, 4, 1>(simd, first + row, edge, rescale_row, &mut ahead[1]);
                    (is_new[row], rescale[row]) = (false, A::from_index(1));
                }
            }
        }
    }

    /// P V where keys are hidden inside a row's range and not all values are finite, so that a weight of 0 does not hide them. Rare.
    #[inline(always)]
    fn values_by_key<S: Simd, const ROWS: usize>(
        &mut self,
        simd: S,
        first: usize,
        keys: [Range<usize>; ROWS],
        rescale: [A; ROWS],
        ahead: &mut Fetch,
    ) {
        for (row, keys) in keys.into_iter().enumerate().filter(|(_, keys)| !keys.is_empty()) {
            let index = self.task.index(first + row);
            let acc = &mut self.scratch.out_acc[(first + row) * self.value_dim..][..self.value_dim];
            for acc in acc {
                *acc = if self.rows.is_first { A::ZERO } else { acc.mul_scalar(rescale[row]) };
            }
            for key in keys {
                if !self.pass.is_some_and(|pass| pass.hides(index, self.first_key + key)) {
                    self.values::<S, 4, 1>(simd, first + row, key..key + 1, Some([A::from_index(1)]), ahead);
                }
            }
        }
    }

    /// P V for `ROWS` rows from `first` on and these keys of the block.
    #[inline(always)]
    fn values<S: Simd, const VECTORS: usize, const ROWS: usize>(
        &mut self,
        simd: S,
        first: usize,
        keys: Range<usize>,
        rescale: Option<[A; ROWS]>,
        ahead: &mut Fetch,
    ) {
        let stride = self.scratch.scores.len() / self.task.rows;
        let acc = &mut self.scratch.out_acc[first * self.value_dim..][..ROWS * self.value_dim];
        let probs = &self.scratch.scores[first * stride..][..ROWS * stride];
        let op = ValueRows {
            v: self.v.from(keys.start),
            keys: keys.len(),
            value_dim: self.value_dim,
            probs: probs[keys.start..].as_ptr(),
            probs_stride: stride,
            rescale,
            acc: acc.as_mut_ptr(),
        };
        // SAFETY: `v` is valid for the rows of the block (see the field), inside which `keys` lies; `probs` and `acc` have
        // just been cut to size, and `keys.end <= stride`.
        unsafe { value_rows::<S, A, K, VECTORS, ROWS>(simd, op, ahead) };
    }
}
