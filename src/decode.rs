//! The rows of a task, one after the other, against one block of keys: for tasks of a few rows. Features lie in the
//! lanes, and a row computes the keys that it sees and no others, so that nothing needs to be hidden.
//!
//! Scratch as in `prefill` with panels of one row: out_acc `[row][value_dim]`. Q is read where it lies, unscaled; the
//! scores are scaled instead.

#![allow(unsafe_code)]

use pulp::Simd;

use crate::kernels::WithTiles;
use crate::kernels::lane::Lane;
use crate::kernels::row::{Rows, score_row, value_row};
use crate::online_softmax::softmax_row;
use crate::row_block::KeyBlock;

/// All rows of a task against one block of keys.
pub(crate) struct DecodeBlock<'t, 's, A>(pub(crate) KeyBlock<'t, 's, A>);

impl<A: Lane> WithTiles for DecodeBlock<'_, '_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let KeyBlock { task, first_key, head_dim, value_dim, q_rows, scale, scratch, .. } = self.0;
        let k = Rows { start: self.0.k, stride: self.0.k_stride };
        let v = Rows { start: self.0.v, stride: self.0.v_stride };
        for row in 0..task.rows {
            let keys = task.row_end(row).saturating_sub(first_key).min(self.0.keys);
            if keys == 0 {
                continue;
            }
            // SAFETY: valid for `head_dim` elements (see the field).
            let q = unsafe { std::slice::from_raw_parts(q_rows[row], head_dim) };
            let scores = &mut scratch.scores[..keys.next_multiple_of(A::lanes::<S>())];
            // SAFETY: `k` is valid for `self.0.keys >= keys` rows (see the field).
            unsafe { score_row(simd, q, k, &mut scores[..keys]) };
            let rescale = softmax_row(
                simd,
                (&mut *scores, keys),
                scale,
                first_key == 0,
                &mut scratch.running_max[row],
                &mut scratch.running_sum[row],
            );
            let acc = &mut scratch.out_acc[row * value_dim..][..value_dim];
            let rescale = (first_key > 0).then_some(rescale); // the first block finds no accumulators yet
            // SAFETY: `v` is valid for `self.0.keys >= keys` rows of `value_dim` elements (see the field).
            unsafe { value_row(simd, &scores[..keys], v, rescale, acc) };
        }
    }
}
