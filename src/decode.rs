//! A few rows of one KV head against one block of keys. Features lie in the lanes; K and V are read once for four rows, as
//! they are stored, and while one of them is in use the other is fetched: what such a task waits for is memory.
//!
//! Scratch as in `prefill` with panels of one row: out_acc `[row][value_dim]`, and scores `[row][kv_block + MAX_LANES]`. Q is
//! read where it lies, unscaled; the scores are scaled instead.

#![allow(unsafe_code)]

use std::ops::Range;
use std::{mem, ptr};

use pulp::Simd;

use crate::kernels::fetch::{Fetch, Rows};
use crate::kernels::finite::all_finite;
use crate::kernels::lane::Lane;
use crate::kernels::row::{ValueRows, pack_rows, packed_len, score_rows, value_rows};
use crate::kernels::stored::Stored;
use crate::kernels::{MAX_DECODE_ROWS, WithTiles};
use crate::online_softmax::{softmax_row, softmax_rows};
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
    /// Of the block in hand: what the old accumulators of each row are to be multiplied with, and whether the pass hid keys.
    rescale: [A; MAX_DECODE_ROWS],
    hides_keys: bool,
}

impl<A: Lane> DecodeRows<A> {
    /// Each row of Q that the task has must be valid for reading `head_dim` elements.
    pub(crate) fn new(q: [*const A; MAX_DECODE_ROWS], scale: A) -> Self {
        let (rescale, is_packed) = ([A::ZERO; MAX_DECODE_ROWS], [false; MAX_DECODE_ROWS]);
        Self { q, scale, is_first: true, is_packed, rescale, hides_keys: false }
    }

    /// Of no task.
    pub(crate) fn none() -> Self {
        Self::new([ptr::null(); MAX_DECODE_ROWS], A::ZERO)
    }
}

/// The rows of one KV head against one block of keys.
pub(crate) struct DecodeHead<'t, 's, A, K> {
    pub(crate) task: &'t RowBlock,
    /// Valid for reading as many rows of `head_dim` elements as the block has keys.
    pub(crate) k: Rows<K>,
    /// Valid for reading as many rows of `value_dim` elements.
    pub(crate) v: Rows<K>,
    pub(crate) rows: &'t mut DecodeRows<A>,
    pub(crate) scratch: &'t mut Scratch<'s, A>,
}

/// A block of keys, the same for each of some heads of one sequence: they see the same keys of it.
#[derive(Clone, Copy)]
pub(crate) struct DecodeBlock<'t, A, K> {
    pub(crate) first_key: usize,
    pub(crate) keys: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// Elements of the scratch's scores from a row to the next: at least `keys` and a vector.
    pub(crate) scores_stride: usize,
    /// Elements from the first head's to the end of the last one's, of a key and of a value.
    pub(crate) spans: [usize; 2],
    /// K of the next block, to be fetched.
    pub(crate) next_k: Option<Rows<K>>,
    /// What happens to scores, if anything. It scales them, too.
    pub(crate) pass: Option<&'t dyn ScorePass<A>>,
}

/// Some heads against a block of keys. K is read for all of them, then V: in token-major memory that is one stretch, which is
/// fetched from its first byte to the last.
pub(crate) struct DecodeHeads<'h, 't, 's, A, K> {
    pub(crate) block: DecodeBlock<'h, A, K>,
    pub(crate) heads: &'h mut [DecodeHead<'t, 's, A, K>],
}

impl<A: Lane, K: Stored<A>> WithTiles for DecodeHeads<'_, '_, '_, A, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { block, heads } = self;
        // Sets with 32 registers have tiles of 24 vectors.
        let many_registers = TILE * ROW_VECTORS >= 24;
        let rows = heads[0].task.rows;
        // Rows of a short call meet so few keys that what they have in common is little.
        let together = heads[0].task.keys().len() > FEW_KEYS;
        let mut row = 0;
        while together && row + 4 <= rows {
            if many_registers {
                block.run_rows::<S, 4, 4, 4>(simd, heads, row);
            } else {
                block.run_rows::<S, 2, 2, 4>(simd, heads, row);
            }
            row += 4;
        }
        while together && row + 2 <= rows {
            block.run_rows::<S, 4, 4, 2>(simd, heads, row);
            row += 2;
        }
        while row < rows {
            block.run_rows::<S, 4, 8, 1>(simd, heads, row);
            row += 1;
        }
        for head in heads {
            head.rows.is_first = false;
        }
    }
}

/// The same for the portable set, a row at a time: K and V are accumulators then. Its registers would not hold a tile of rows, and its code
/// for one takes the compiler a minute.
pub(crate) struct PortableDecodeHeads<'h, 't, 's, A>(pub(crate) DecodeHeads<'h, 't, 's, A, A>);

impl<A: Lane> WithTiles for PortableDecodeHeads<'_, '_, '_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let DecodeHeads { block, heads } = self.0;
        for row in 0..heads[0].task.rows {
            block.run_rows::<S, 2, 4, 1>(simd, heads, row);
        }
        for head in heads {
            head.rows.is_first = false;
        }
    }
}

/// Up to this many keys each row is computed by itself.
pub(crate) const FEW_KEYS: usize = 16;

/// The keys of a block that a tile of rows sees.
struct TileKeys<const ROWS: usize> {
    each: [Range<usize>; ROWS],
    any: Range<usize>,
    all: Range<usize>,
}

impl<A: Lane, K: Stored<A>> DecodeBlock<'_, A, K> {
    /// `ROWS` rows of each head, from `first` on.
    #[inline(always)]
    fn run_rows<S: Simd, const KEYS: usize, const VECTORS: usize, const ROWS: usize>(
        &self,
        simd: S,
        heads: &mut [DecodeHead<'_, '_, A, K>],
        first: usize,
    ) {
        let mut each: [Range<usize>; ROWS] = core::array::from_fn(|_| 0..0);
        for (row, keys) in each.iter_mut().enumerate() {
            let range = heads[0].task.row_keys(first + row);
            let clamp = |key: usize| key.saturating_sub(self.first_key).min(self.keys);
            *keys = clamp(range.start)..clamp(range.end);
        }
        let (any, all) = (each[0].start..each[ROWS - 1].end, each[ROWS - 1].start..each[0].end);
        if any.is_empty() {
            return;
        }
        let keys = TileKeys { each, any, all };
        // Only the first rows fetch: the others find the block in the cache.
        let in_cache = heads[0].rows.q[first];
        let fetch =
            |rows: Option<Rows<K>>, span| Fetch::new(rows.filter(|_| first == 0).map(|rows| (rows, span)), in_cache);
        let [k_span, v_span] = self.spans;
        let mut ahead = fetch(Some(heads[0].v.from(keys.any.start)), v_span);
        for head in heads.iter_mut() {
            head.score::<S, KEYS, ROWS>(simd, self, first, keys.any.clone(), &mut ahead);
        }
        let mut ahead = fetch(self.next_k, k_span);
        for head in heads.iter_mut() {
            head.softmax::<S, ROWS>(simd, self, first, &keys);
        }
        for head in heads.iter_mut() {
            head.multiply::<S, VECTORS, ROWS>(simd, self, first, &keys, &mut ahead);
        }
    }
}

impl<A: Lane, K: Stored<A>> DecodeHead<'_, '_, A, K> {
    /// Q K^T for `ROWS` rows from `first` on and some keys of the block.
    #[inline(always)]
    fn score<S: Simd, const KEYS: usize, const ROWS: usize>(
        &mut self,
        simd: S,
        block: &DecodeBlock<'_, A, K>,
        first: usize,
        keys: Range<usize>,
        ahead: &mut Fetch,
    ) {
        let (stride, head_dim) = (block.scores_stride, block.head_dim);
        let mut q = self.rows.q[first];
        if ROWS > 1 {
            // Behind the rows of Q that had to be converted, if any.
            let padded_dim = packed_len::<S, A>(1, head_dim);
            let packed = &mut self.scratch.q_panels[self.task.rows * head_dim + first * padded_dim..];
            if !mem::replace(&mut self.rows.is_packed[first], true) {
                let mut rows = [q; ROWS];
                rows.copy_from_slice(&self.rows.q[first..first + ROWS]);
                // SAFETY: rows of Q are valid for `head_dim` elements (see `DecodeRows::new`).
                unsafe { pack_rows::<S, A, ROWS>(rows, head_dim, packed) };
            }
            q = packed[..ROWS * padded_dim].as_ptr();
        }
        let scores = self.scratch.scores[first * stride..(first + ROWS) * stride].as_mut_ptr();
        // SAFETY: `k` is valid for what is read (see the field) and so is Q, one row or several packed; `keys` lie inside the
        // block, and `scores` has just been cut to `ROWS` rows of `stride >= block.keys` elements.
        unsafe {
            let scores = (scores.add(keys.start), stride);
            score_rows::<S, A, K, KEYS, ROWS>(simd, q, self.k.from(keys.start), (keys.len(), head_dim), scores, ahead);
        }
    }

    /// Scores to probabilities.
    #[inline(always)]
    fn softmax<S: Simd, const ROWS: usize>(
        &mut self,
        simd: S,
        block: &DecodeBlock<'_, A, K>,
        first: usize,
        keys: &TileKeys<ROWS>,
    ) {
        self.rows.hides_keys = false;
        let rescale = &mut self.rows.rescale[first..first + ROWS];
        let stride = block.scores_stride;
        let TileKeys { each, any, all } = keys;
        if ROWS > 1 && block.pass.is_none() && any == all && any.len().is_multiple_of(A::lanes::<S>()) {
            rescale.copy_from_slice(&softmax_rows::<S, A, ROWS>(
                simd,
                (&mut self.scratch.scores[first * stride + any.start..], stride, any.len()),
                self.rows.scale,
                &mut self.scratch.running_max[first..first + ROWS],
                &mut self.scratch.running_sum[first..first + ROWS],
            ));
            return;
        }
        for (row, keys) in each.iter().enumerate() {
            if keys.is_empty() {
                rescale[row] = A::from_index(1);
                continue;
            }
            let lanes = A::lanes::<S>();
            let scores = &mut self.scratch.scores[(first + row) * stride..][..stride];
            let scores = &mut scores[keys.start..][..keys.len().next_multiple_of(lanes)];
            let (mut scale, mut is_first) = (self.rows.scale, self.rows.is_first);
            if let Some(pass) = block.pass {
                let (row, first_key) = (first + row, block.first_key + keys.start);
                let (task, keys) = (self.task, keys.len());
                self.rows.hides_keys |=
                    pass.modify_row(ScoreRow { task, row, first_key, keys, scores: &mut *scores, scale });
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

    /// P V for `ROWS` rows from `first` on and all keys of the block.
    #[inline(always)]
    fn multiply<S: Simd, const VECTORS: usize, const ROWS: usize>(
        &mut self,
        simd: S,
        block: &DecodeBlock<'_, A, K>,
        first: usize,
        keys: &TileKeys<ROWS>,
        ahead: &mut Fetch,
    ) {
        let value_dim = block.value_dim;
        let TileKeys { each, any, all } = keys;
        let mut rescale = [A::ZERO; ROWS];
        rescale.copy_from_slice(&self.rows.rescale[first..first + ROWS]);
        let v = self.v.from(any.start);
        // SAFETY: `v` is valid for the rows of the block, inside which `any` lies.
        if self.rows.hides_keys && unsafe { !all_finite(simd, v.start, v.stride, [any.len(), value_dim]) } {
            return self.values_by_key::<S, ROWS>(simd, block, first, each, rescale, ahead);
        }
        if ROWS == 1 {
            let rescale = (!self.rows.is_first).then_some(rescale);
            return self.values::<S, VECTORS, ROWS>(simd, block, first, any.clone(), rescale, ahead);
        }
        // Keys that every row sees are multiplied together; before and after them each row is by itself.
        let (left, right) = if all.is_empty() { (any.end, any.end) } else { (all.start, all.end) };
        // Whether the accumulators of a row hold nothing yet: they are written then, not read.
        let mut is_new = [self.rows.is_first; ROWS];
        for (from, to) in [(any.start, left), (left, right), (right, any.end)] {
            if from >= to {
                continue;
            }
            if (from, to) == (left, right) {
                let all_new = is_new.iter().all(|&is_new| is_new);
                for row in 0..ROWS {
                    if is_new[row] && !all_new {
                        self.scratch.out_acc[(first + row) * value_dim..][..value_dim].fill(A::ZERO);
                    }
                }
                let rescale_rows = (!all_new).then_some(rescale);
                self.values::<S, VECTORS, ROWS>(simd, block, first, from..to, rescale_rows, ahead);
                (is_new, rescale) = ([false; ROWS], [A::from_index(1); ROWS]);
                continue;
            }
            for row in 0..ROWS {
                let edge = each[row].start.max(from)..each[row].end.min(to);
                if !edge.is_empty() {
                    let rescale_row = (!is_new[row]).then_some([rescale[row]]);
                    self.values::<S, 4, 1>(simd, block, first + row, edge, rescale_row, ahead);
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
        block: &DecodeBlock<'_, A, K>,
        first: usize,
        keys: &[Range<usize>; ROWS],
        rescale: [A; ROWS],
        ahead: &mut Fetch,
    ) {
        let value_dim = block.value_dim;
        for (row, keys) in keys.iter().enumerate().filter(|(_, keys)| !keys.is_empty()) {
            let index = self.task.index(first + row);
            let acc = &mut self.scratch.out_acc[(first + row) * value_dim..][..value_dim];
            for acc in acc {
                *acc = if self.rows.is_first { A::ZERO } else { acc.mul_scalar(rescale[row]) };
            }
            for key in keys.clone() {
                if !block.pass.is_some_and(|pass| pass.hides(index, block.first_key + key)) {
                    let one = Some([A::from_index(1)]);
                    self.values::<S, 4, 1>(simd, block, first + row, key..key + 1, one, ahead);
                }
            }
        }
    }

    /// P V for `ROWS` rows from `first` on and these keys of the block.
    #[inline(always)]
    fn values<S: Simd, const VECTORS: usize, const ROWS: usize>(
        &mut self,
        simd: S,
        block: &DecodeBlock<'_, A, K>,
        first: usize,
        keys: Range<usize>,
        rescale: Option<[A; ROWS]>,
        ahead: &mut Fetch,
    ) {
        let (stride, value_dim) = (block.scores_stride, block.value_dim);
        let acc = &mut self.scratch.out_acc[first * value_dim..][..ROWS * value_dim];
        let probs = &self.scratch.scores[first * stride..][..ROWS * stride];
        let op = ValueRows {
            v: self.v.from(keys.start),
            keys: keys.len(),
            value_dim,
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
