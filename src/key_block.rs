//! All panels of a task against one block of keys: scores -> hide (edge blocks) -> softmax step -> values.

#![allow(unsafe_code)]

use pulp::Simd;

use crate::kernels::lane::{Lane, as_rows};
use crate::kernels::score_tile::{ScoreBlock, score_block};
use crate::kernels::value_tile::{ValueBlock, value_block, value_block_selected};
use crate::kernels::{MAX_PANEL_ROWS, WithTiles};
use crate::mask::hide_keys;
use crate::online_softmax::{RowState, softmax_step};
use crate::packing;
use crate::row_block::RowBlock;
use crate::workspace::Scratch;

/// All panels of a task against one block of keys.
pub(crate) struct KeyBlock<'t, 's, A> {
    pub(crate) task: &'t RowBlock,
    pub(crate) first_key: usize,
    pub(crate) keys: usize,
    pub(crate) k: *const A,
    pub(crate) k_stride: usize,
    pub(crate) v: *const A,
    pub(crate) v_stride: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) scratch: &'t mut Scratch<'s, A>,
}

impl<A: Lane> WithTiles for KeyBlock<'_, '_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(mut self, simd: S) {
        let panel_rows = self.task.panel_rows;
        assert_eq!(panel_rows, ROW_VECTORS * A::lanes::<S>());
        let mut values_finite = None;
        for first_row in (0..self.task.rows).step_by(panel_rows) {
            self.run_panel::<S, TILE, SHORT, ROW_VECTORS>(simd, first_row, &mut values_finite);
        }
    }
}

impl<A: Lane> KeyBlock<'_, '_, A> {
    #[inline(always)]
    fn run_panel<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
        &mut self,
        simd: S,
        first_row: usize,
        values_finite: &mut Option<bool>,
    ) {
        let Self { task, first_key, head_dim, value_dim, .. } = *self;
        let panel_rows = task.panel_rows;
        let last_row = (first_row + panel_rows).min(task.rows) - 1;
        let relative_end = |row| task.row_end(row).saturating_sub(first_key).min(self.keys);
        // Every row of the panel sees keys below `full_end`, none sees keys from `keys` on.
        let (full_end, keys) = (relative_end(first_row), relative_end(last_row));
        if keys == 0 {
            return;
        }
        let scratch = &mut *self.scratch;
        let panel = first_row / panel_rows;
        let q_panel = &scratch.q_panels[panel * head_dim * panel_rows..][..head_dim * panel_rows];
        let out_acc = &mut scratch.out_acc[panel * value_dim * panel_rows..][..value_dim * panel_rows];
        let scores = &mut scratch.scores[..keys * panel_rows];
        // SAFETY: `block` gave `keys` rows of K, `q_panel` and `scores` have just been cut to size.
        unsafe {
            score_block::<S, A, TILE, SHORT, ROW_VECTORS>(
                simd,
                ScoreBlock {
                    k: self.k,
                    k_stride: self.k_stride,
                    keys,
                    head_dim,
                    q_panel: q_panel.as_ptr(),
                    scores: scores.as_mut_ptr(),
                    panel_rows,
                },
            );
        }
        let score_rows = as_rows::<S, A, ROW_VECTORS>(scores);
        let mut row_ends = [A::ZERO; MAX_PANEL_ROWS];
        if full_end < keys {
            for (lane, row_end) in row_ends[..panel_rows].iter_mut().enumerate() {
                *row_end = A::from_index(relative_end((first_row + lane).min(task.rows - 1)));
            }
            // SAFETY: `panel_rows` ends are there: ROW_VECTORS vectors.
            let row_ends =
                core::array::from_fn(|vector| unsafe { A::load::<S>(row_ends.as_ptr().add(vector * A::lanes::<S>())) });
            hide_keys::<S, A, ROW_VECTORS>(simd, &mut score_rows[full_end..], full_end, &row_ends);
        }
        let rescale = &mut scratch.rescale[..panel_rows];
        let state = RowState {
            running_max: &mut as_rows::<S, A, ROW_VECTORS>(&mut scratch.running_max[first_row..][..panel_rows])[0],
            running_sum: &mut as_rows::<S, A, ROW_VECTORS>(&mut scratch.running_sum[first_row..][..panel_rows])[0],
            rescale: &mut as_rows::<S, A, ROW_VECTORS>(rescale)[0],
        };
        softmax_step::<S, A, ROW_VECTORS>(simd, score_rows, state);
        let mut values = ValueBlock {
            v: self.v,
            v_stride: self.v_stride,
            keys,
            value_dim,
            probs: scores.as_ptr(),
            rescale: rescale.as_ptr(),
            out_acc: out_acc.as_mut_ptr(),
            panel_rows,
        };
        let mut selected = None;
        // SAFETY: `block` gave `keys` rows of V; `scores`, `rescale` and `out_acc` have just been cut to size, and
        // `selected` continues where `values` stops.
        unsafe {
            if full_end < keys {
                let finite = *values_finite
                    .get_or_insert_with(|| packing::all_finite(simd, self.v, self.v_stride, [self.keys, value_dim]));
                if !finite {
                    values.keys = full_end;
                    selected = Some(ValueBlock {
                        v: self.v.wrapping_add(full_end * self.v_stride),
                        keys: keys - full_end,
                        probs: scores[full_end * panel_rows..].as_ptr(),
                        ..values
                    });
                }
            }
            value_block::<S, A, TILE, SHORT, ROW_VECTORS>(simd, values);
            if let Some(selected) = selected {
                value_block_selected::<S, A, ROW_VECTORS>(simd, selected, full_end, row_ends.as_ptr());
            }
        }
    }
}
