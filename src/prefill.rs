//! All panels of a task against one block of keys: scores -> hide (edge blocks) -> softmax step -> values.
//! Rows lie in the lanes; see `kernels`.

#![allow(unsafe_code)]

use pulp::Simd;

use crate::kernels::lane::{Lane, as_rows};
use crate::kernels::score_tile::{ScoreBlock, score_block};
use crate::kernels::value_tile::{ValueBlock, value_block, value_block_selected};
use crate::kernels::{MAX_PANEL_ROWS, WithTiles};
use crate::mask::hide_keys;
use crate::online_softmax::{RowState, softmax_step};
use crate::packing;
use crate::row_block::KeyBlock;

/// All panels of a task against one block of keys.
pub(crate) struct PrefillBlock<'t, 's, A>(pub(crate) KeyBlock<'t, 's, A>);

impl<A: Lane> WithTiles for PrefillBlock<'_, '_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let mut block = self.0;
        let panel_rows = block.task.panel_rows;
        assert_eq!(panel_rows, ROW_VECTORS * A::lanes::<S>());
        let mut values_finite = None;
        for first_row in (0..block.task.rows).step_by(panel_rows) {
            block.run_panel::<S, TILE, SHORT, ROW_VECTORS>(simd, first_row, &mut values_finite);
        }
    }
}

/// Which rows of a panel meet which keys of the block. Keys count from the start of the block.
#[derive(Clone, Copy)]
struct Span {
    rows: Vectors,
    first_key: usize,
    /// Half-open.
    end: usize,
    /// Whether P V multiplies the old accumulators first: the first span of each row does.
    rescales: bool,
}

/// Vectors of a panel.
#[derive(Clone, Copy, PartialEq)]
enum Vectors {
    All,
    LowerHalf,
    UpperHalf,
}

impl<A: Lane> KeyBlock<'_, '_, A> {
    #[inline(always)]
    fn run_panel<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
        &mut self,
        simd: S,
        first_row: usize,
        values_finite: &mut Option<bool>,
    ) {
        let Self { task, first_key, keys: block_keys, value_dim, .. } = *self;
        let panel_rows = task.panel_rows;
        let row_end = |row: usize| {
            let row = first_row + row.min(task.rows - first_row - 1);
            task.row_end(row).saturating_sub(first_key).min(block_keys)
        };
        // Every row of the panel sees keys below `full_end`, none sees keys from `keys` on.
        let (full_end, keys) = (row_end(0), row_end(panel_rows - 1));
        if keys == 0 {
            return;
        }
        let is_edge = full_end < keys;
        // The rows of the lower half see no key from `half_end` on: the corner of the diagonal costs half. A half that
        // sees no key of the block keeps its accumulators as they are, its rescale would be 1.
        let half_end = row_end(panel_rows / 2 - 1);
        let span = |rows, first_key, end| Some(Span { rows, first_key, end, rescales: first_key == 0 });
        let spans = if task.rows - first_row <= panel_rows / 2 {
            [span(Vectors::LowerHalf, 0, keys), None]
        } else if half_end == keys {
            [span(Vectors::All, 0, keys), None]
        } else if half_end == 0 {
            [None, span(Vectors::UpperHalf, 0, keys)]
        } else {
            [span(Vectors::All, 0, half_end), span(Vectors::UpperHalf, half_end, keys)]
        };

        let running_max = &mut self.scratch.running_max[first_row..][..panel_rows];
        self.scratch.rescale[..panel_rows].copy_from_slice(running_max);
        // Full blocks find the maximum while the scores are in registers, edge blocks once the hidden ones are gone.
        let max = (!is_edge).then_some(running_max.as_mut_ptr());
        for span in spans.into_iter().flatten() {
            self.scores::<S, TILE, SHORT, ROW_VECTORS>(simd, first_row, span, max);
        }
        let mut row_ends = [A::ZERO; MAX_PANEL_ROWS];
        let scores = as_rows::<S, A, ROW_VECTORS>(&mut self.scratch.scores[..keys * panel_rows]);
        if is_edge {
            for (row, end) in row_ends[..panel_rows].iter_mut().enumerate() {
                *end = A::from_index(row_end(row));
            }
            // SAFETY: `panel_rows` ends are there: ROW_VECTORS vectors.
            let row_ends =
                core::array::from_fn(|vector| unsafe { A::load::<S>(row_ends.as_ptr().add(vector * A::lanes::<S>())) });
            hide_keys::<S, A, ROW_VECTORS>(simd, &mut scores[full_end..], full_end, &row_ends);
        }
        let state = RowState {
            running_max: &mut as_rows::<S, A, ROW_VECTORS>(&mut self.scratch.running_max[first_row..][..panel_rows])[0],
            running_sum: &mut as_rows::<S, A, ROW_VECTORS>(&mut self.scratch.running_sum[first_row..][..panel_rows])[0],
            rescale: &mut as_rows::<S, A, ROW_VECTORS>(&mut self.scratch.rescale[..panel_rows])[0],
        };
        softmax_step::<S, A, ROW_VECTORS>(simd, scores, state, !is_edge);

        // (No closure, as in `get_or_insert_with`: it would be compiled without the target features.)
        let hidden_values_are_finite = match *values_finite {
            _ if !is_edge => true,
            Some(known) => known,
            None => {
                // SAFETY: `v` is valid for `self.keys` rows (see the field).
                let found = unsafe { packing::all_finite(simd, self.v, self.v_stride, [self.keys, value_dim]) };
                *values_finite = Some(found);
                found
            }
        };
        if hidden_values_are_finite {
            for span in spans.into_iter().flatten() {
                self.values::<S, TILE, SHORT, ROW_VECTORS>(simd, first_row, span);
            }
        } else {
            let seen_by_all = Span { rows: Vectors::All, first_key: 0, end: full_end, rescales: true };
            self.values::<S, TILE, SHORT, ROW_VECTORS>(simd, first_row, seen_by_all);
            let rest = Span { first_key: full_end, end: keys, rescales: false, ..seen_by_all };
            let block = self.value_operands(first_row, rest);
            // SAFETY: `value_operands` gives what the kernel reads and writes; `panel_rows` ends are there.
            unsafe { value_block_selected::<S, A, ROW_VECTORS>(simd, block, full_end, row_ends.as_ptr()) };
        }
    }

    /// Q K^T of a span, into `scratch.scores`; `max` as in [`ScoreBlock`], for the whole panel.
    #[inline(always)]
    fn scores<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
        &mut self,
        simd: S,
        first_row: usize,
        span: Span,
        max: Option<*mut A>,
    ) {
        let Self { k, k_stride, head_dim, .. } = *self;
        let panel_rows = self.task.panel_rows;
        let first_lane = first_lane(span.rows, panel_rows);
        let keys = span.end - span.first_key;
        let q_panel = &self.scratch.q_panels[first_row * head_dim..][..head_dim * panel_rows];
        let scores = &mut self.scratch.scores[span.first_key * panel_rows..][..keys * panel_rows];
        let block = ScoreBlock {
            k: k.wrapping_add(span.first_key * k_stride),
            k_stride,
            keys,
            head_dim,
            q_panel: q_panel[first_lane..].as_ptr(),
            scores: scores.as_mut_ptr().wrapping_add(first_lane),
            max: max.map(|max| max.wrapping_add(first_lane)),
            panel_rows,
        };
        // SAFETY: `k` is valid for `self.keys >= span.end` rows (see the field); `q_panel` and `scores` have just been
        // cut to size, `max` has `panel_rows`, and a half starts half a row in and is half as wide.
        unsafe {
            match (span.rows, ROW_VECTORS) {
                (Vectors::All, _) => score_block::<S, A, TILE, SHORT, ROW_VECTORS>(simd, block),
                (_, 2) => score_block::<S, A, HALF_TILE, HALF_SHORT, 1>(simd, block),
                (_, 4) if TILE == 2 => score_block::<S, A, 4, 4, 2>(simd, block),
                (_, 4) => score_block::<S, A, HALF_TILE, HALF_SHORT, 2>(simd, block),
                _ => unreachable!("panels have 2 or 4 vectors"),
            }
        }
    }

    /// P V of a span, into `scratch.out_acc`.
    #[inline(always)]
    fn values<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
        &mut self,
        simd: S,
        first_row: usize,
        span: Span,
    ) {
        let block = self.value_operands(first_row, span);
        // SAFETY: `value_operands` gives what the kernels read and write.
        unsafe {
            match (span.rows, ROW_VECTORS) {
                (Vectors::All, _) => value_block::<S, A, TILE, SHORT, ROW_VECTORS>(simd, block),
                (_, 2) => value_block::<S, A, HALF_TILE, HALF_SHORT, 1>(simd, block),
                (_, 4) if TILE == 2 => value_block::<S, A, 4, 4, 2>(simd, block),
                (_, 4) => value_block::<S, A, HALF_TILE, HALF_SHORT, 2>(simd, block),
                _ => unreachable!("panels have 2 or 4 vectors"),
            }
        }
    }

    /// Operands of P V: `v` valid for the span's keys, scratch arrays cut to size, starting at the span's first lane.
    #[inline(always)]
    fn value_operands(&mut self, first_row: usize, span: Span) -> ValueBlock<A> {
        let Self { v, v_stride, value_dim, .. } = *self;
        let panel_rows = self.task.panel_rows;
        let first_lane = first_lane(span.rows, panel_rows);
        let keys = span.end - span.first_key;
        let probs = &self.scratch.scores[span.first_key * panel_rows..][..keys * panel_rows];
        let out_acc = &mut self.scratch.out_acc[first_row * value_dim..][..value_dim * panel_rows];
        let rescale = &self.scratch.rescale[first_lane..panel_rows];
        ValueBlock {
            v: v.wrapping_add(span.first_key * v_stride),
            v_stride,
            keys,
            value_dim,
            probs: probs.as_ptr().wrapping_add(first_lane),
            rescale: span.rescales.then_some(rescale.as_ptr()),
            out_acc: out_acc.as_mut_ptr().wrapping_add(first_lane),
            panel_rows,
        }
    }
}

/// Tiles of half a panel: half as many vectors, so twice as many keys or dims keep the FMA units busy. (Portable f64, whose tile is
/// 2 x 4, has 4 x 2.)
const HALF_TILE: usize = 12;
const HALF_SHORT: usize = 8;

#[inline(always)]
fn first_lane(rows: Vectors, panel_rows: usize) -> usize {
    if rows == Vectors::UpperHalf { panel_rows / 2 } else { 0 }
}
