//! All panels of a task against one block of keys: scores -> hide (edge blocks) -> softmax step -> values.
//! Rows lie in the lanes; see `kernels`.

#![allow(unsafe_code)]

use std::ops::Range;

use pulp::Simd;

use crate::kernels::factors::Factors;
use crate::kernels::fetch::FetchRows;
use crate::kernels::finite::all_finite;
use crate::kernels::lane::{Lane, as_rows};
use crate::kernels::score_tile::{ScoreBlock, score_block};
use crate::kernels::value_tile::{Before, ValueBlock, value_block, value_block_selected};
use crate::kernels::{MAX_PANEL_ROWS, WithTiles};
use crate::mask::RowBounds;
use crate::online_softmax::{RowState, softmax_step};
use crate::row_block::{KeyBlock, fit_in_half};
use crate::score_pass::ScoreTile;

/// All panels of a task against one block of keys.
pub(crate) struct PrefillBlock<'t, 's, A, F> {
    block: KeyBlock<'t, 's, A>,
    factors: F,
}

impl<'t, 's, A, F> PrefillBlock<'t, 's, A, F> {
    pub(crate) fn new(factors: F, block: KeyBlock<'t, 's, A>) -> Self {
        Self { block, factors }
    }
}

impl<A: Lane, F: Factors<A>> WithTiles for PrefillBlock<'_, '_, A, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { mut block, factors } = self;
        let panel_rows = block.task.panel_rows;
        assert_eq!(panel_rows, ROW_VECTORS * A::lanes::<S>());
        let mut values_finite = None;
        for first_row in (0..block.task.rows).step_by(panel_rows) {
            block.run_panel::<S, F, TILE, SHORT, ROW_VECTORS>(simd, factors, first_row, &mut values_finite);
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
}

/// Vectors of a panel.
#[derive(Clone, Copy, PartialEq)]
enum Vectors {
    All,
    LowerHalf,
    UpperHalf,
}

impl Vectors {
    /// Whether the lower and the upper half take part.
    fn halves(self) -> [bool; 2] {
        [self != Self::UpperHalf, self != Self::LowerHalf]
    }
}

/// The keys of a block that the rows of a panel see, counted from the start of the block. Rows are in order, so their
/// ranges are too: each bound is that of one row.
#[derive(Clone, Copy)]
struct PanelKeys {
    /// From the first key that any row sees to the last.
    any: (usize, usize),
    /// The keys that every row sees; `(end, start)` may cross, then there are none.
    all: (usize, usize),
    /// Where the keys of the lower half of the rows end, and those of the upper half start.
    halves: (usize, usize),
}

impl PanelKeys {
    /// Without the keys before `first` and from `last` on.
    fn trimmed(self, first: usize, last: usize) -> Self {
        let Self { all, halves: (lower_end, upper_start), .. } = self;
        Self {
            any: (first, last),
            all: (all.0.max(first), all.1.min(last)),
            halves: (lower_end.clamp(first, last), upper_start.clamp(first, last)),
        }
    }

    fn is_edge(&self) -> bool {
        self.any != self.all
    }

    /// The spans of a panel of `panel_rows` of which the first `rows` are in use. A half is left out where it sees nothing:
    /// the corners of an edge cost half. A half that sees no key of the block keeps its accumulators as they are, its rescale would
    /// be 1.
    fn spans(&self, rows: usize, panel_rows: usize) -> [Option<Span>; 3] {
        let Self { any: (first, last), halves: (lower_end, upper_start), .. } = *self;
        let span = |rows, first_key: usize, end: usize| (first_key < end).then_some(Span { rows, first_key, end });
        if fit_in_half(rows, panel_rows) {
            return [span(Vectors::LowerHalf, first, last), None, None];
        }
        if upper_start >= lower_end {
            // The halves have no key in common.
            return [span(Vectors::LowerHalf, first, lower_end), None, span(Vectors::UpperHalf, upper_start, last)];
        }
        [
            span(Vectors::LowerHalf, first, upper_start),
            span(Vectors::All, upper_start, lower_end),
            span(Vectors::UpperHalf, lower_end, last),
        ]
    }
}

impl<A: Lane> KeyBlock<'_, '_, A> {
    fn panel_keys(&self, first_row: usize) -> PanelKeys {
        let task = self.task;
        let rows = task.rows - first_row;
        let row = |row: usize| {
            let keys = task.row_keys(first_row + row.min(rows - 1));
            let clamp = |key: usize| key.saturating_sub(self.first_key).min(self.keys);
            (clamp(keys.start), clamp(keys.end))
        };
        let panel_rows = task.panel_rows;
        let (first, last) = (row(0), row(panel_rows - 1));
        PanelKeys {
            any: (first.0, last.1),
            all: (last.0, first.1),
            halves: (row(panel_rows / 2 - 1).1, row(panel_rows / 2).0),
        }
    }

    /// What each row of the panel sees of the block.
    #[inline(always)]
    fn row_bounds<S: Simd, const ROW_VECTORS: usize>(&self, first_row: usize) -> RowBounds<A::Vector<S>, ROW_VECTORS> {
        let task = self.task;
        let mut bounds = [[A::ZERO; MAX_PANEL_ROWS]; 2];
        // Lanes behind the last row see nothing.
        for row in 0..task.panel_rows.min(task.rows - first_row) {
            let keys = task.row_keys(first_row + row);
            bounds[0][row] = A::from_index(keys.start.saturating_sub(self.first_key).min(self.keys));
            bounds[1][row] = A::from_index(keys.end.saturating_sub(self.first_key).min(self.keys));
        }
        let mut vectors = [[A::load_slice::<S>(&bounds[0]); ROW_VECTORS]; 2];
        for bound in 0..2 {
            for vector in 0..ROW_VECTORS {
                vectors[bound][vector] = A::load_slice::<S>(&bounds[bound][vector * A::lanes::<S>()..]);
            }
        }
        let [starts, ends] = vectors;
        RowBounds { starts, ends }
    }

    #[inline(always)]
    fn run_panel<S: Simd, F: Factors<A>, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
        &mut self,
        simd: S,
        factors: F,
        first_row: usize,
        values_finite: &mut Option<bool>,
    ) {
        let Self { task, value_dim, .. } = *self;
        let panel_rows = task.panel_rows;
        let mut panel = self.panel_keys(first_row);
        if let Some(pass) = self.pass {
            let rows = first_row..task.rows.min(first_row + panel_rows);
            let shown = pass.shown(task, rows, self.first_key + panel.any.0..self.first_key + panel.any.1);
            panel = panel.trimmed(shown.start - self.first_key, shown.end - self.first_key);
        }
        let (first, last) = panel.any;
        if first >= last {
            return;
        }
        let is_edge = panel.is_edge();
        let spans = panel.spans(task.rows - first_row, panel_rows);

        let running_max = &mut self.scratch.running_max[first_row..][..panel_rows];
        self.scratch.rescale[..panel_rows].copy_from_slice(running_max);
        // Full blocks find the maximum while the scores are in registers, or while they are modified; edge blocks once the
        // hidden ones are gone.
        let max = (!is_edge && self.pass.is_none()).then_some(running_max.as_mut_ptr());
        for index in 0..3 {
            let Some(span) = spans[index] else { continue };
            self.scores::<S, F, TILE, SHORT, ROW_VECTORS>(simd, factors, first_row, span, max);
        }
        let hides_keys = match self.pass {
            None => false,
            Some(pass) => pass.modify_tile(ScoreTile {
                task,
                first_row,
                first_key: self.first_key + first,
                keys: last - first,
                scores: &mut self.scratch.scores[first * panel_rows..last * panel_rows],
                max: (!is_edge).then_some(&mut self.scratch.running_max[first_row..][..panel_rows]),
            }),
        };
        // Between the edges every row sees every key. A window narrower than the panel has no such keys.
        let (left, right) = if panel.all.0 < panel.all.1 { panel.all } else { (last, first) };
        if is_edge {
            let bounds = self.row_bounds::<S, ROW_VECTORS>(first_row);
            let scores = as_rows::<S, A, ROW_VECTORS>(self.scratch.scores);
            bounds.hide_before::<S, A>(simd, &mut scores[first..left], first);
            bounds.hide_after::<S, A>(simd, &mut scores[right..last], right);
        }
        let scores = as_rows::<S, A, ROW_VECTORS>(&mut self.scratch.scores[first * panel_rows..last * panel_rows]);
        let state = RowState {
            running_max: &mut as_rows::<S, A, ROW_VECTORS>(&mut self.scratch.running_max[first_row..][..panel_rows])[0],
            running_sum: &mut as_rows::<S, A, ROW_VECTORS>(&mut self.scratch.running_sum[first_row..][..panel_rows])[0],
            rescale: &mut as_rows::<S, A, ROW_VECTORS>(&mut self.scratch.rescale[..panel_rows])[0],
        };
        let vectors = task.vectors_in_use::<ROW_VECTORS>(first_row);
        softmax_step::<S, A, ROW_VECTORS>(simd, scores, state, vectors, !is_edge);

        // (No closure, as in `get_or_insert_with`: it would be compiled without the target features.)
        let hidden_values_are_finite = match *values_finite {
            _ if !is_edge && !hides_keys => true,
            Some(known) => known,
            None => {
                // SAFETY: `v` is valid for `self.keys` rows (see the field).
                let found = unsafe { all_finite::<S, A, A>(simd, self.v, self.v_stride, [self.keys, value_dim]) };
                *values_finite = Some(found);
                found
            }
        };
        // Where hidden values are not finite: tiles where every row sees every key, and key by key at the edges.
        let (mut parts, mut by_key) = (spans, [false; 3]);
        if !hidden_values_are_finite {
            self.mark_hidden(first_row, first..last);
            let (left, right) = if hides_keys { (last, last) } else { (left, right.max(left)) };
            let part = |first_key, end| (first_key < end).then_some(Span { rows: Vectors::All, first_key, end });
            (parts, by_key) = ([part(first, left), part(left, right), part(right, last)], [true, false, true]);
        }
        // The accumulators are multiplied by the first part of each half.
        let mut rescaled = [false; 2];
        for index in 0..3 {
            let Some(span) = parts[index] else { continue };
            let takes_part = span.rows.halves();
            if takes_part == [true, true] && rescaled == [true, false] {
                self.scratch.rescale[..panel_rows / 2].fill(A::from_index(1)); // this half had its turn
            }
            let rescales = (takes_part[0] && !rescaled[0]) || (takes_part[1] && !rescaled[1]);
            rescaled = [rescaled[0] || takes_part[0], rescaled[1] || takes_part[1]];
            if by_key[index] {
                let block = self.value_operands(first_row, span, rescales);
                // SAFETY: `value_operands` gives what the kernel reads and writes.
                unsafe { value_block_selected::<S, A, ROW_VECTORS>(simd, block) };
            } else {
                self.values::<S, TILE, SHORT, ROW_VECTORS>(simd, first_row, span, rescales);
            }
        }
    }

    /// Gives hidden keys of the block a weight of -1, for `value_block_selected`.
    fn mark_hidden(&mut self, first_row: usize, keys: Range<usize>) {
        let Self { task, first_key, pass, .. } = *self;
        let pass = pass.filter(|pass| pass.may_hide());
        for lane in 0..task.panel_rows {
            let row = (first_row + lane).min(task.rows - 1);
            let (visible, index) = (task.row_keys(row), task.index(row));
            for key in keys.clone() {
                let in_tensor = first_key + key;
                if !visible.contains(&in_tensor) || pass.is_some_and(|pass| pass.hides(index, in_tensor)) {
                    self.scratch.scores[key * task.panel_rows + lane] = A::from_f64(-1.0);
                }
            }
        }
    }

    /// Q K^T of a span, into `scratch.scores`; `max` as in [`ScoreBlock`], for the whole panel.
    #[inline(always)]
    fn scores<S: Simd, F: Factors<A>, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
        &mut self,
        simd: S,
        factors: F,
        first_row: usize,
        span: Span,
        max: Option<*mut A>,
    ) {
        let Self { k, k_stride, score_scale: scale, .. } = *self;
        let steps = F::steps(self.head_dim);
        let panel_rows = self.task.panel_rows;
        let first_lane = first_lane(span.rows, panel_rows);
        let keys = span.end - span.first_key;
        let q_panel = &self.scratch.q_panels[first_row * steps..][..steps * panel_rows];
        let scores = &mut self.scratch.scores[span.first_key * panel_rows..][..keys * panel_rows];
        let block = ScoreBlock {
            k: k.wrapping_add(span.first_key * k_stride),
            k_stride,
            keys,
            steps,
            scale,
            q_panel: q_panel[first_lane..].as_ptr(),
            scores: scores.as_mut_ptr().wrapping_add(first_lane),
            max: max.map(|max| max.wrapping_add(first_lane)),
            panel_rows,
            ahead: if first_row == 0 { self.fetch_values } else { FetchRows::NOTHING },
        };
        // SAFETY: `k` is valid for `self.keys >= span.end` rows (see the field); `q_panel` and `scores` have just been
        // cut to size, `max` has `panel_rows`, and a half starts half a row in and is half as wide.
        unsafe {
            match (span.rows, ROW_VECTORS) {
                (Vectors::All, _) => score_block::<S, A, F, TILE, SHORT, ROW_VECTORS>(simd, factors, block),
                (_, 2) => score_block::<S, A, F, HALF_TILE, HALF_SHORT, 1>(simd, factors, block),
                (_, 4) if TILE == 2 => score_block::<S, A, F, 4, 4, 2>(simd, factors, block),
                (_, 4) => score_block::<S, A, F, HALF_TILE, HALF_SHORT, 2>(simd, factors, block),
                _ => unreachable!("panels have 2 or 4 vectors"),
            }
        }
    }

    /// P V of a span, into `scratch.out_acc`, whose old contents are multiplied first where it `rescales`.
    #[inline(always)]
    fn values<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(
        &mut self,
        simd: S,
        first_row: usize,
        span: Span,
        rescales: bool,
    ) {
        let block = self.value_operands(first_row, span, rescales);
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
    fn value_operands(&mut self, first_row: usize, span: Span, rescales: bool) -> ValueBlock<A> {
        let Self { v, v_stride, value_dim, .. } = *self;
        let panel_rows = self.task.panel_rows;
        let (panel, takes_part) = (first_row / panel_rows, span.rows.halves());
        let holds_sums = self.scratch.written.add(panel, takes_part);
        for half in 0..2 {
            if takes_part[half] && holds_sums != [false; 2] && !holds_sums[half] {
                self.scratch.clear_half(2 * panel + half, panel_rows, value_dim);
            }
        }
        let first_lane = first_lane(span.rows, panel_rows);
        let keys = span.end - span.first_key;
        let probs = &self.scratch.scores[span.first_key * panel_rows..][..keys * panel_rows];
        let out_acc = &mut self.scratch.out_acc[first_row * value_dim..][..value_dim * panel_rows];
        let rescale = &self.scratch.rescale[first_lane..panel_rows];
        let before = match holds_sums {
            [false, false] => Before::Nothing,
            _ if rescales => Before::SumsToRescale(rescale.as_ptr()),
            _ => Before::Sums,
        };
        ValueBlock {
            v: v.wrapping_add(span.first_key * v_stride),
            v_stride,
            keys,
            value_dim,
            probs: probs.as_ptr().wrapping_add(first_lane),
            out_acc: out_acc.as_mut_ptr().wrapping_add(first_lane),
            before,
            panel_rows,
            ahead: if first_row == 0 { self.fetch_keys } else { FetchRows::NOTHING },
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
