//! One task: a block of rows of one KV head against the blocks of keys that they see.
//!
//! Pack Q, then for every block of keys up to the last one that any row sees: pack K and V where they do not lie as the
//! kernels read them, and run all panels ([`KeyBlock`]). Then divide and write.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use crate::kernels::lane::Lane;
use crate::key_block::KeyBlock;
use crate::packing::{PackQ, UnpackOut, pack_keys};
use crate::row_block::RowBlock;
use crate::tensor::Layout;
use crate::workspace::Scratch;
use crate::{AttentionInputs, AttentionOutputs, AttentionPlan, Element, InstructionSet, TensorView};

/// The vector code of a task, for one accumulator type. Not generic, so that it is compiled once and in this crate, with
/// this crate's optimisation level, however many element types (and crates) call it.
pub(crate) trait TaskKernels: Lane {
    fn pack_q(set: InstructionSet, op: PackQ<'_, Self>);
    fn key_block(set: InstructionSet, op: KeyBlock<'_, '_, Self>);
    fn unpack_out(set: InstructionSet, op: UnpackOut<'_, Self>);
}

impl TaskKernels for f32 {
    fn pack_q(set: InstructionSet, op: PackQ<'_, f32>) {
        set.run(op);
    }
    fn key_block(set: InstructionSet, op: KeyBlock<'_, '_, f32>) {
        set.run(op);
    }
    fn unpack_out(set: InstructionSet, op: UnpackOut<'_, f32>) {
        set.run(op);
    }
}

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

    pub(crate) fn run_task(&self, task: usize, mut scratch: Scratch<'_, T::Acc>) {
        let plan = self.plan;
        let task = RowBlock::new(plan, task);
        self.start(&task, &mut scratch);
        let kv_end = task.row_end(task.rows - 1);
        for first_key in (0..kv_end).step_by(plan.blocks.kv_block) {
            let keys = first_key..(first_key + plan.blocks.kv_block).min(kv_end);
            let [k_scratch_stride, v_scratch_stride] = scratch.strides;
            let (k, k_stride) =
                self.read_block(&self.inputs.k, &task, keys.clone(), (&mut *scratch.k_block, k_scratch_stride));
            let (v, v_stride) =
                self.read_block(&self.inputs.v, &task, keys.clone(), (&mut *scratch.v_block, v_scratch_stride));
            T::Acc::key_block(
                plan.instruction_set,
                KeyBlock {
                    task: &task,
                    first_key,
                    keys: keys.len(),
                    k,
                    k_stride,
                    v,
                    v_stride,
                    head_dim: plan.shape.head_dim,
                    value_dim: plan.shape.value_dim,
                    scratch: &mut scratch,
                },
            );
        }
        self.finish(&task, scratch);
    }

    /// Packs Q and clears the rows' state.
    fn start(&self, task: &RowBlock, scratch: &mut Scratch<'_, T::Acc>) {
        scratch.out_acc.fill(T::Acc::ZERO);
        scratch.running_max.fill(T::Acc::NEG_INFINITY);
        scratch.running_sum.fill(T::Acc::ZERO);
        let scale = T::Acc::from_f64(self.plan.softmax_scale * std::f64::consts::LOG2_E);
        let layout = self.inputs.q.layout();
        let q = self.inputs.q.data();
        if let Some(q) = T::as_acc(q)
            && layout.strides[3] == 1
        {
            let op = PackQ { task, q: q.as_ptr(), layout, scale, q_panels: &mut *scratch.q_panels };
            return T::Acc::pack_q(self.plan.instruction_set, op);
        }
        let head_dim = self.plan.shape.head_dim;
        for row in 0..task.rows.next_multiple_of(task.panel_rows) {
            let (panel, lane) = (row / task.panel_rows, row % task.panel_rows);
            let from = layout.offset(task.index(row.min(task.rows - 1)));
            let to = &mut scratch.q_panels[panel * task.panel_rows * head_dim..][..task.panel_rows * head_dim];
            for p in 0..head_dim {
                to[p * task.panel_rows + lane] = q[from + p * layout.strides[3]].to_acc().mul_scalar(scale);
            }
        }
    }

    /// A block of keys (or values) as the kernels read it, with its stride: in place, or packed into `scratch`.
    fn read_block(
        &self,
        tensor: &TensorView<'_, K>,
        task: &RowBlock,
        keys: Range<usize>,
        (scratch, scratch_stride): (&mut [T::Acc], usize),
    ) -> (*const T::Acc, usize) {
        let layout = tensor.layout();
        let [.., key_stride, dim_stride] = layout.strides;
        let dim = layout.shape[3];
        if dim == 0 {
            return (scratch.as_ptr(), 0); // nothing will be read
        }
        let from = &tensor.data()[layout.offset([task.batch, task.kv_head, keys.start])..];
        if let Some(from) = K::as_acc(from)
            && (dim_stride == 1 || dim == 1)
            && !worth_packing(task, key_stride, dim)
        {
            return (from.as_ptr(), key_stride);
        }
        let packed = &mut scratch[..keys.len() * scratch_stride];
        pack_keys(from, [key_stride, dim_stride], [keys.len(), dim], packed);
        (packed.as_ptr(), scratch_stride)
    }

    /// Divides by the running sums and writes the rows.
    fn finish(&self, task: &RowBlock, scratch: Scratch<'_, T::Acc>) {
        if let Some(logsumexp) = self.logsumexp {
            self.write_logsumexp(task, &scratch, logsumexp);
        }
        let layout = self.out_layout;
        if layout.shape[3] == 0 {
            return;
        }
        if let Some(out) = T::as_acc_mut(self.out)
            && layout.strides[3] == 1
        {
            let Scratch { out_acc, running_sum, .. } = scratch;
            return T::Acc::unpack_out(
                self.plan.instruction_set,
                UnpackOut { task, out_acc, running_sum, out, layout },
            );
        }
        for row in 0..task.rows {
            let (panel, lane) = (row / task.panel_rows, row % task.panel_rows);
            let from = &scratch.out_acc[panel * task.panel_rows * layout.shape[3]..];
            let sees_nothing = task.row_end(row) == 0;
            let factor = if sees_nothing { T::Acc::ZERO } else { scratch.running_sum[row].reciprocal() };
            for d in 0..layout.shape[3] {
                let value = from[d * task.panel_rows + lane].mul_scalar(factor).add_scalar(T::Acc::ZERO);
                // SAFETY: the index is inside the shape of out (checked by the plan), whose view reaches no element
                // outside its slice, and the row is this task's alone.
                unsafe {
                    self.out.add(layout.offset(task.index(row)) + d * layout.strides[3]).write(T::from_acc(value))
                };
            }
        }
    }

    fn write_logsumexp(&self, task: &RowBlock, scratch: &Scratch<'_, T::Acc>, logsumexp: *mut T::Acc) {
        let [_, num_heads, q_len, _] = self.out_layout.shape;
        for row in 0..task.rows {
            let value = match task.row_end(row) {
                0 => T::Acc::NEG_INFINITY,
                _ => T::Acc::logsumexp(scratch.running_max[row], scratch.running_sum[row]),
            };
            let [batch, head, query] = task.index(row);
            // SAFETY: the slice holds batch * num_heads * q_len elements (checked by the plan) and this one is this
            // task's alone.
            unsafe { logsumexp.add((batch * num_heads + head) * q_len + query).write(value) };
        }
    }
}

/// Whether to copy a block whose keys the kernels could read where they lie. Where keys are not neighbours (token-major
/// memory), every key is a page of its own, and strides of a power of two fall into few cache sets: [measured, 8
/// heads of 128 in `[batch, seq, heads, head_dim]`, T = 2048, AVX2] 0.72 of FMA peak in place, 0.87 packed. The copy costs
/// 0.5-1 % of a task of 8 panels and more; a task of few panels does not earn it back.
fn worth_packing(task: &RowBlock, key_stride: usize, dim: usize) -> bool {
    const FEWEST_PANELS: usize = 4;
    key_stride != dim && task.rows > (FEWEST_PANELS - 1) * task.panel_rows
}
