//! One task: a block of rows of one KV head against the blocks of keys that they see.
//!
//! A row is (query, head of the group), query-major: row `r` is query `r / group_size`, head `kv_head * group_size +
//! r % group_size`. Neighbouring rows see nearly the same keys, and K and V are read once for the whole group.
//!
//! Loops, outermost first:
//! 1. blocks of keys, up to the last one that any row of the task sees;
//! 2. panels of rows: scores -> hide (edge blocks) -> softmax step -> values.

#![allow(unsafe_code)]

use std::marker::PhantomData;

use pulp::Simd;

use crate::kernels::lane::Lane;
use crate::kernels::score_tile::{ScoreBlock, score_block};
use crate::kernels::value_tile::{ValueBlock, value_block, value_block_selected};
use crate::kernels::{MAX_PANEL_ROWS, WithTiles};
use crate::mask::{VisibleKeys, hide_keys};
use crate::online_softmax::{RowState, softmax_step};
use crate::packing::{self, RowPointer};
use crate::tensor::Layout;
use crate::workspace::Scratch;
use crate::{AttentionInputs, AttentionOutputs, AttentionPlan, Element};

/// A planned call on tensors that were checked against the plan.
pub(crate) struct Prefill<'a, T: Element, K> {
    plan: &'a AttentionPlan,
    inputs: &'a AttentionInputs<'a, T, K>,
    out: *mut T,
    out_layout: Layout,
    logsumexp: Option<*mut T::Acc>,
    outputs: PhantomData<&'a mut T>,
}

// SAFETY: `out` and `logsumexp` come from exclusive borrows that last as long as `'a`. Tasks write only the rows of their
// own (batch, KV head, row block), which are disjoint: the schedule hands out each task once, and a mutable view has
// no two elements at one place.
unsafe impl<T: Element, K: Element> Sync for Prefill<'_, T, K> {}

impl<'a, T: Element, K: Element<Acc = T::Acc>> Prefill<'a, T, K> {
    /// The caller has checked that the tensors have the plan's shape.
    pub(crate) fn new(
        plan: &'a AttentionPlan,
        inputs: &'a AttentionInputs<'a, T, K>,
        outputs: &'a mut AttentionOutputs<'_, T>,
    ) -> Self {
        let out_layout = outputs.out.layout();
        let logsumexp = outputs.logsumexp.as_mut().map(|logsumexp| logsumexp.as_mut_ptr());
        Self { plan, inputs, out: outputs.out.as_mut_ptr(), out_layout, logsumexp, outputs: PhantomData }
    }

    /// Runs task `task`, counted from the heaviest: the last rows of every head come first.
    pub(crate) fn run_task(&self, task: usize, mut scratch: Scratch<'_, T::Acc>) {
        let plan = self.plan;
        let heads = plan.shape.batch * plan.shape.num_kv_heads;
        let (row_block, head) = (plan.blocks.row_blocks - 1 - task / heads, task % heads);
        let first_row = row_block * plan.blocks.task_rows;
        let rows = plan.blocks.task_rows.min(plan.blocks.rows - first_row);
        let task = Task {
            batch: head / plan.shape.num_kv_heads,
            kv_head: head % plan.shape.num_kv_heads,
            group_size: plan.shape.group_size(),
            first_row,
            rows,
            panel_rows: plan.blocks.panel_rows,
            visible: plan.visible,
        };
        self.start(&task, &mut scratch);
        let kv_end = task.row_end(rows - 1);
        for first_key in (0..kv_end).step_by(plan.blocks.kv_block) {
            let keys = plan.blocks.kv_block.min(kv_end - first_key);
            let (k, k_stride) =
                self.block(&self.inputs.k, &task, first_key..first_key + keys, scratch.k_block, scratch.strides[0]);
            let (v, v_stride) =
                self.block(&self.inputs.v, &task, first_key..first_key + keys, scratch.v_block, scratch.strides[1]);
            plan.instruction_set.run(KeyBlock {
                task: &task,
                first_key,
                keys,
                k,
                k_stride,
                v,
                v_stride,
                head_dim: plan.shape.head_dim,
                value_dim: plan.shape.value_dim,
                scratch: &mut scratch,
            });
        }
        self.finish(&task, &scratch);
    }

    /// Packs Q and clears the rows' state.
    fn start(&self, task: &Task, scratch: &mut Scratch<'_, T::Acc>) {
        let head_dim = self.plan.shape.head_dim;
        let layout = self.inputs.q.layout();
        let scale = T::Acc::from_f64(self.plan.softmax_scale * std::f64::consts::LOG2_E);
        scratch.out_acc.fill(T::Acc::ZERO);
        scratch.running_max.fill(T::Acc::NEG_INFINITY);
        scratch.running_sum.fill(T::Acc::ZERO);
        let padded_rows = task.rows.next_multiple_of(task.panel_rows);
        if padded_rows != task.rows {
            let last_panel = padded_rows - task.panel_rows;
            scratch.q_panels[last_panel * head_dim..padded_rows * head_dim].fill(T::Acc::ZERO);
        }
        for row in 0..task.rows {
            let from = RowPointer {
                start: self.inputs.q.data()[layout.offset(task.index(row))..].as_ptr(),
                dim_stride: layout.strides[3],
            };
            let (panel, lane) = (row / task.panel_rows, row % task.panel_rows);
            let to = &mut scratch.q_panels[panel * head_dim * task.panel_rows + lane..]
                [..(head_dim - 1) * task.panel_rows + 1];
            // SAFETY: the index is inside the shape of q, and views reach no element outside their slice; `to` has
            // just been cut to what is written.
            unsafe { packing::pack_q_row(from, head_dim, scale, to.as_mut_ptr(), task.panel_rows) };
        }
    }

    /// A block of keys (or values) as the kernels read it: in place, or packed into `scratch`.
    fn block(
        &self,
        tensor: &crate::TensorView<'_, K>,
        task: &Task,
        keys: std::ops::Range<usize>,
        scratch: &mut [T::Acc],
        scratch_stride: usize,
    ) -> (*const T::Acc, usize) {
        let layout = tensor.layout();
        let dim = layout.shape[3];
        if dim == 0 {
            return (scratch.as_ptr(), 0);
        }
        let start = tensor.data()[layout.offset([task.batch, task.kv_head, keys.start])..].as_ptr();
        let (key_stride, dim_stride) = (layout.strides[2], layout.strides[3]);
        if let Some(start) = K::as_acc(start)
            && (dim_stride == 1 || dim == 1)
        {
            return (start, key_stride);
        }
        let packed = &mut scratch[..keys.len() * scratch_stride];
        let from = RowPointer { start, dim_stride };
        // SAFETY: `keys` lies below kv_len, and views reach no element outside their slice; `packed` has just been cut
        // to `keys.len()` rows of `scratch_stride >= dim`.
        unsafe { packing::pack_keys(from, key_stride, [keys.len(), dim], packed.as_mut_ptr(), scratch_stride) };
        (packed.as_ptr(), scratch_stride)
    }

    /// Divides by the running sum and writes the rows.
    fn finish(&self, task: &Task, scratch: &Scratch<'_, T::Acc>) {
        let value_dim = self.plan.shape.value_dim;
        let [_, num_heads, q_len, _] = self.out_layout.shape;
        for row in 0..task.rows {
            let index = task.index(row);
            let (panel, lane) = (row / task.panel_rows, row % task.panel_rows);
            let sees_nothing = task.row_end(row) == 0;
            if value_dim > 0 {
                let from = &scratch.out_acc[panel * value_dim * task.panel_rows + lane..]
                    [..(value_dim - 1) * task.panel_rows + 1];
                let sum = scratch.running_sum[row];
                let factor = if sees_nothing { T::Acc::ZERO } else { sum.reciprocal() };
                // SAFETY: the index is inside the shape of out (checked by the plan), whose view reaches no element
                // outside its slice, and the row is this task's alone; `from` has just been cut to what is read.
                unsafe {
                    let to = self.out.add(self.out_layout.offset(index));
                    packing::unpack_out_row(
                        from.as_ptr(),
                        task.panel_rows,
                        value_dim,
                        factor,
                        to,
                        self.out_layout.strides[3],
                    );
                }
            }
            if let Some(logsumexp) = self.logsumexp {
                let value = if sees_nothing {
                    T::Acc::NEG_INFINITY
                } else {
                    T::Acc::logsumexp(scratch.running_max[row], scratch.running_sum[row])
                };
                let [batch, head, query] = index;
                // SAFETY: the slice holds batch * num_heads * q_len elements (checked by the plan) and this one is
                // this task's alone.
                unsafe { logsumexp.add((batch * num_heads + head) * q_len + query).write(value) };
            }
        }
    }
}

/// Which rows a task computes.
struct Task {
    batch: usize,
    kv_head: usize,
    group_size: usize,
    first_row: usize,
    rows: usize,
    panel_rows: usize,
    visible: VisibleKeys,
}

impl Task {
    /// `[batch, head, query]` of a row of the task.
    #[inline(always)]
    fn index(&self, row: usize) -> [usize; 3] {
        let row = self.first_row + row;
        [self.batch, self.kv_head * self.group_size + row % self.group_size, row / self.group_size]
    }

    /// One past the last key that a row of the task sees.
    #[inline(always)]
    fn row_end(&self, row: usize) -> usize {
        self.visible.end((self.first_row + row) / self.group_size)
    }
}

/// All panels of a task against one block of keys.
struct KeyBlock<'t, 's, A> {
    task: &'t Task,
    first_key: usize,
    keys: usize,
    k: *const A,
    k_stride: usize,
    v: *const A,
    v_stride: usize,
    head_dim: usize,
    value_dim: usize,
    scratch: &'t mut Scratch<'s, A>,
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

/// The vectors of a scratch array, `ROW_VECTORS` to a row.
#[inline(always)]
fn as_rows<S: Simd, A: Lane, const ROW_VECTORS: usize>(array: &mut [A]) -> &mut [[A::Vector<S>; ROW_VECTORS]] {
    let len = array.len() / (ROW_VECTORS * A::lanes::<S>());
    assert!(array.as_ptr().cast::<A::Vector<S>>().is_aligned());
    // SAFETY: aligned (asserted), `len` whole rows, and a vector is an array of `A` in memory.
    unsafe { std::slice::from_raw_parts_mut(array.as_mut_ptr().cast(), len) }
}
