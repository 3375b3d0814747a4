//! The kernels on a single panel, without packing, masks and threads: for `benches/tiles.rs`, which has its operands in
//! L1. Compiled with the feature `__panel` alone.

#![allow(missing_docs, unsafe_code)]

use pulp::Simd;

use super::WithTiles;
use super::factors::Accumulators;
use super::fetch::FetchRows;
use super::lane::as_rows;
use super::score_tile::{ScoreBlock, score_block};
use super::value_tile::{Before, ValueBlock, value_block};
use crate::InstructionSet;
use crate::online_softmax::{RowState, softmax_step};

/// Rows of a panel.
pub fn rows(set: InstructionSet) -> usize {
    set.tile_sizes().panel_rows()
}

/// `scores = K Q^T`: `k` is `[keys][head_dim]`, `q_panel` `[head_dim][rows]`, `scores` `[keys][rows]`.
pub fn score_tiles(set: InstructionSet, keys: usize, k: &[f32], q_panel: &[f32], scores: &mut [f32]) {
    struct Op(ScoreBlock<f32>);
    impl WithTiles for Op {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            // SAFETY: `score_tiles` checked the sizes.
            unsafe { score_block::<S, f32, Accumulators, TILE, SHORT, ROW_VECTORS>(simd, Accumulators, self.0) }
        }
    }
    let (panel_rows, head_dim) = (rows(set), k.len() / keys);
    assert_eq!([k.len(), q_panel.len(), scores.len()], [keys * head_dim, head_dim * panel_rows, keys * panel_rows]);
    let (k, q_panel, scores) = (k.as_ptr(), q_panel.as_ptr(), scores.as_mut_ptr());
    set.run(Op(ScoreBlock {
        k,
        k_stride: head_dim,
        keys,
        steps: head_dim,
        scale: 1.0,
        q_panel,
        scores,
        max: None,
        panel_rows,
        ahead: FetchRows::NOTHING,
    }));
}

/// The softmax step: `scores` `[keys][rows]`, 64-byte aligned like the state, which is running maximum, running sum and
/// rescale `[rows]`.
pub fn softmax(set: InstructionSet, scores: &mut [f32], state: [&mut [f32]; 3]) {
    struct Op<'a>(&'a mut [f32], [&'a mut [f32]; 3]);
    impl WithTiles for Op<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            let [running_max, running_sum, rescale] = self.1.map(|state| &mut as_rows::<S, f32, ROW_VECTORS>(state)[0]);
            let state = RowState { running_max, running_sum, rescale };
            state.rescale.copy_from_slice(state.running_max);
            softmax_step::<S, f32, ROW_VECTORS>(
                simd,
                as_rows::<S, f32, ROW_VECTORS>(self.0),
                state,
                ROW_VECTORS,
                false,
            );
        }
    }
    set.run(Op(scores, state));
}

/// `out_acc = out_acc * rescale + V^T P^T`: `v` is `[keys][value_dim]`, `probs` `[keys][rows]`, `rescale` `[rows]`, `out_acc`
/// `[value_dim][rows]`.
pub fn value_tiles(set: InstructionSet, v: &[f32], probs: &[f32], rescale: &[f32], out_acc: &mut [f32]) {
    struct Op(ValueBlock<f32>);
    impl WithTiles for Op {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
            // SAFETY: `value_tiles` checked the sizes.
            unsafe { value_block::<S, f32, TILE, SHORT, ROW_VECTORS>(simd, self.0) }
        }
    }
    let panel_rows = rows(set);
    let (keys, value_dim) = (probs.len() / panel_rows, out_acc.len() / panel_rows);
    let sizes = [keys * value_dim, keys * panel_rows, panel_rows, value_dim * panel_rows];
    assert_eq!([v.len(), probs.len(), rescale.len(), out_acc.len()], sizes);
    set.run(Op(ValueBlock {
        v: v.as_ptr(),
        v_stride: value_dim,
        keys,
        value_dim,
        probs: probs.as_ptr(),
        out_acc: out_acc.as_mut_ptr(),
        before: Before::SumsToRescale(rescale.as_ptr()),
        panel_rows,
        ahead: FetchRows::NOTHING,
    }));
}
