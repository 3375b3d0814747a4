//! The blocks of K and V that the tasks of a call read: where they lie, or packed first.

use std::ops::Range;

use half::bf16;

use crate::kernels::factors::{Accumulators, Bf16Pairs};
use crate::kernels::fetch::Rows;
use crate::packing::PackKeys;
use crate::row_block::RowBlock;
use crate::task::{Call, TaskKernels};
use crate::tensor::Layout;
use crate::{Element, TensorView};

impl<T: Element, K: Element<Acc = T::Acc>> Call<'_, T, K> {
    /// Q and K where prefill multiplies them as pairs: where both are bf16, on a set that does so, whatever their shape and strides.
    pub(crate) fn pairs(&self) -> Option<Pairs<'_>> {
        let factors = Bf16Pairs::new(self.plan.instruction_set)?;
        Some(Pairs { factors, q: T::as_bf16(self.inputs.q.data())?, k: K::as_bf16(self.inputs.k.data())? })
    }

    /// A block of keys (or values) as the kernels read it, with its stride: in place, or packed into `scratch`.
    pub(crate) fn read_block(
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
        self.pack_block(tensor, task, keys, (&mut *scratch, scratch_stride));
        (scratch.as_ptr(), scratch_stride)
    }

    /// A block of keys (or values) as it lies in memory.
    pub(crate) fn rows_of(&self, tensor: &TensorView<'_, K>, task: &RowBlock, keys: Range<usize>) -> Rows<K> {
        let layout = tensor.layout();
        let stride = layout.strides[2];
        if layout.shape[3] == 0 {
            return Rows { start: tensor.data().as_ptr(), stride: 0 }; // nothing will be read
        }
        let start = tensor.data()[layout.offset([task.batch, task.kv_head, keys.start])..].as_ptr();
        Rows { start, stride }
    }

    /// Copies a block of keys (or values) of at least one feature to accumulators.
    pub(crate) fn pack_block(
        &self,
        tensor: &TensorView<'_, K>,
        task: &RowBlock,
        keys: Range<usize>,
        (packed, stride): (&mut [T::Acc], usize),
    ) {
        let op = packed_block(Accumulators, tensor.data(), tensor.layout(), task, keys, (packed, stride));
        K::pack_keys(self.plan.instruction_set, op);
    }

    /// The same for the pairs of K. The packed block, with its stride.
    pub(crate) fn pack_pairs(
        &self,
        pairs: Pairs<'_>,
        task: &RowBlock,
        keys: Range<usize>,
        (packed, stride): (&mut [T::Acc], usize),
    ) -> (*const T::Acc, usize) {
        let Pairs { factors, k, .. } = pairs;
        let op = packed_block(factors, k, self.inputs.k.layout(), task, keys, (&mut *packed, stride));
        T::Acc::pack_key_pairs(self.plan.instruction_set, op);
        (packed.as_ptr(), stride)
    }
}

/// Q and K that are multiplied as pairs.
#[derive(Clone, Copy)]
pub(crate) struct Pairs<'a> {
    pub(crate) factors: Bf16Pairs,
    pub(crate) q: &'a [bf16],
    k: &'a [bf16],
}

/// What packs a block of keys of at least one feature from `data`.
fn packed_block<'a, E, A, F>(
    factors: F,
    data: &'a [E],
    layout: Layout,
    task: &RowBlock,
    keys: Range<usize>,
    (packed, to_stride): (&'a mut [A], usize),
) -> PackKeys<'a, E, A, F> {
    let [.., key_stride, dim_stride] = layout.strides;
    let from = &data[layout.offset([task.batch, task.kv_head, keys.start])..];
    let to = &mut packed[..keys.len() * to_stride];
    let (keys, dim) = (keys.len(), layout.shape[3]);
    PackKeys { from, key_stride, dim_stride, keys, dim, to, to_stride, factors }
}

/// Whether to copy a block whose keys the kernels could read where they lie. Where keys are not neighbours (token-major
/// memory), every key is a page of its own, and strides of a power of two fall into few cache sets: [measured, 8
/// heads of 128 in `[batch, seq, heads, head_dim]`, T = 2048, AVX2] 0.72 of FMA peak in place, 0.87 packed. Where
/// it is not needed the copy costs 0.5-1 % at T = 512 and more, 3 % at T = 128 (8 panels); a task of few panels does not earn
/// it back.
fn worth_packing(task: &RowBlock, key_stride: usize, dim: usize) -> bool {
    const FEWEST_PANELS: usize = 4;
    key_stride != dim && task.rows > (FEWEST_PANELS - 1) * task.panel_rows
}
