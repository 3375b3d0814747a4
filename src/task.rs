//! One task: a block of rows of one KV head against the blocks of keys that they see.
//!
//! Pack Q, then for every block of keys up to the last one that any row sees: pack K and V where they do not lie as the
//! kernels read them, and run the rows against it ([`PrefillBlock`] or [`DecodeBlock`]). Then divide and write.

use std::ops::Range;
use std::{mem, ptr};

use half::bf16;

use crate::blocks::{Blocks, MAX_HEADS_TOGETHER, Path};
use crate::decode::{DecodeBlock, DecodeHead, DecodeHeads, DecodeRows};
use crate::few_keys::FewKeys;
use crate::kernels::factors::{Accumulators, Bf16Pairs};
use crate::kernels::fetch::{FetchRows, Rows};
use crate::kernels::lane::Lane;
use crate::kernels::{MAX_DECODE_ROWS, TileSizes, WithTiles};
use crate::key_blocks::Pairs;
use crate::merge::{MergeChunks, Partials};
use crate::output::OutputRows;
use crate::packing::{PackKeys, PackQ, Packing};
use crate::prefill::PrefillBlock;
use crate::row_block::{KeyBlock, RowBlock};
use crate::score_pass::ScorePass;
use crate::tensor::Layout;
use crate::workspace::{Scratch, WrittenHalves};
use crate::{AttentionInputs, AttentionPlan, AttentionShape, Element, InstructionSet};

/// The vector code of a task, for one accumulator type. Not generic, so that it is compiled once and in this crate, with
/// this crate's optimisation level, however many element types (and crates) call it.
pub(crate) trait TaskKernels: Lane {
    /// Tile sizes of a set for this accumulator.
    fn tile_sizes(set: InstructionSet) -> TileSizes;
    fn prefill(set: InstructionSet, op: PrefillBlock<'_, '_, Self, Accumulators>);
    fn prefill_pairs(set: InstructionSet, op: PrefillBlock<'_, '_, Self, Bf16Pairs>);
    fn pack_q_pairs(set: InstructionSet, op: PackQ<'_, bf16, Self, Bf16Pairs>);
    fn pack_key_pairs(set: InstructionSet, op: PackKeys<'_, bf16, Self, Bf16Pairs>);
    fn few_keys(set: InstructionSet, op: FewKeys<Self>);
    fn merge(set: InstructionSet, op: MergeChunks<'_, '_, Self>);
    /// Runs code that depends on no number of lanes. Generic, for what only the caller's crate knows.
    fn run<Op: WithTiles>(set: InstructionSet, op: Op) -> Op::Output;
}

impl TaskKernels for f32 {
    fn tile_sizes(set: InstructionSet) -> TileSizes {
        set.tile_sizes()
    }
    fn prefill(set: InstructionSet, op: PrefillBlock<'_, '_, f32, Accumulators>) {
        set.run(op);
    }
    fn prefill_pairs(set: InstructionSet, op: PrefillBlock<'_, '_, f32, Bf16Pairs>) {
        set.run_bf16_pairs(op);
    }
    fn pack_q_pairs(set: InstructionSet, op: PackQ<'_, bf16, f32, Bf16Pairs>) {
        set.run_bf16_pairs(op);
    }
    fn pack_key_pairs(set: InstructionSet, op: PackKeys<'_, bf16, f32, Bf16Pairs>) {
        set.run_bf16_pairs(op);
    }
    fn few_keys(set: InstructionSet, op: FewKeys<f32>) {
        set.run_with_fma(op);
    }
    fn merge(set: InstructionSet, op: MergeChunks<'_, '_, f32>) {
        set.narrow().run(op);
    }
    fn run<Op: WithTiles>(set: InstructionSet, op: Op) -> Op::Output {
        set.narrow().run(op)
    }
}

impl TaskKernels for f64 {
    fn tile_sizes(set: InstructionSet) -> TileSizes {
        set.tile_sizes_f64()
    }
    fn prefill(set: InstructionSet, op: PrefillBlock<'_, '_, f64, Accumulators>) {
        set.run_f64(op);
    }
    fn prefill_pairs(_: InstructionSet, _: PrefillBlock<'_, '_, f64, Bf16Pairs>) {
        unreachable!("bf16 accumulates in f32")
    }
    fn pack_q_pairs(_: InstructionSet, _: PackQ<'_, bf16, f64, Bf16Pairs>) {
        unreachable!("bf16 accumulates in f32")
    }
    fn pack_key_pairs(_: InstructionSet, _: PackKeys<'_, bf16, f64, Bf16Pairs>) {
        unreachable!("bf16 accumulates in f32")
    }
    fn few_keys(set: InstructionSet, op: FewKeys<f64>) {
        set.run_with_fma(op);
    }
    fn merge(set: InstructionSet, op: MergeChunks<'_, '_, f64>) {
        set.narrow().run_f64(op);
    }
    fn run<Op: WithTiles>(set: InstructionSet, op: Op) -> Op::Output {
        set.narrow().run_f64(op)
    }
}

/// A planned call on tensors that were checked against the plan.
pub(crate) struct Call<'a, T: Element, K> {
    pub(crate) plan: &'a AttentionPlan<T::Acc>,
    pub(crate) inputs: &'a AttentionInputs<'a, T, K>,
    pub(crate) outputs: OutputRows<'a, T>,
    partials: Option<Partials<'a, T::Acc>>,
    /// What happens to scores, if anything.
    pub(crate) pass: Option<&'a dyn ScorePass<T::Acc>>,
}

impl<'a, T: Element, K: Element<Acc = T::Acc>> Call<'a, T, K> {
    /// The caller has checked that the tensors have the plan's shape.
    pub(crate) fn new(
        plan: &'a AttentionPlan<T::Acc>,
        inputs: &'a AttentionInputs<'a, T, K>,
        outputs: OutputRows<'a, T>,
        partials: Option<Partials<'a, T::Acc>>,
        pass: Option<&'a dyn ScorePass<T::Acc>>,
    ) -> Self {
        Self { plan, inputs, outputs, partials, pass }
    }

    pub(crate) fn run_task(&self, task: usize, scratch: &mut Scratch<'_, T::Acc>) {
        let task = RowBlock::new(self.plan, task, self.inputs.kv_lens);
        let mut rows = self.start(&task, scratch);
        self.run_part(&task, &mut rows, scratch);
        if let Some(task) = task.second_part() {
            self.run_part(&task, &mut rows, scratch);
        }
        self.end(&task, scratch);
    }

    #[inline]
    fn run_part(&self, task: &RowBlock, rows: &mut DecodeRows<T::Acc>, scratch: &mut Scratch<'_, T::Acc>) {
        match self.plan.blocks.path {
            Path::Prefill => self.prefill(task, scratch),
            Path::Decode => self.decode(task, rows, scratch),
        }
    }

    /// Once all keys of the task are in: its rows are written, or laid down until those of the other chunks are there.
    fn end(&self, task: &RowBlock, scratch: &mut Scratch<'_, T::Acc>) {
        if self.plan.blocks.path == Path::Prefill {
            scratch.clear_unwritten(task.rows, task.panel_rows, self.plan.shape.value_dim);
        }
        if let Some(partials) = &self.partials {
            if !partials.store(task.block, task.chunk, scratch) {
                return;
            }
            T::Acc::merge(self.plan.instruction_set, partials.merge(task.block, task.panel_rows, scratch));
        }
        self.finish(task, scratch);
    }

    /// KV heads whose tasks a worker takes together, see [`run_heads`](Self::run_heads).
    pub(crate) fn heads_together(&self) -> usize {
        let is_token_major = |layout: Layout| layout.strides[1] < layout.strides[2];
        let together = is_token_major(self.inputs.k.layout()) || is_token_major(self.inputs.v.layout());
        if together && self.decodes_in_place() { self.plan.blocks.heads_together } else { 1 }
    }

    /// The tasks of several KV heads in decode, with a part of `scratch` for each: in token-major memory the heads of a token are
    /// neighbours, and a head alone would jump to another page with each key. [measured, 8 KV heads of 128, 16384 keys in f32, AVX-512]
    /// 5.1 ms together, 6.1 ms one after the other (3.7 ms in head-major memory).
    pub(crate) fn run_heads(&self, group: usize, scratch: &mut [u8]) {
        let plan = self.plan;
        let (num_kv_heads, Blocks { chunks, heads_together, .. }) = (plan.shape.num_kv_heads, plan.blocks);
        let groups = num_kv_heads.div_ceil(heads_together);
        let (batch, first) = (group / chunks / groups, group / chunks % groups * heads_together);
        let heads = heads_together.min(num_kv_heads - first);
        let first_task = (batch * num_kv_heads + first) * chunks + group % chunks;
        let first_task = RowBlock::new(plan, first_task, self.inputs.kv_lens);
        let (sizes, _) = plan.scratch();
        let mut parts = scratch.chunks_exact_mut(plan.scratch_bytes());
        // Those behind the last head stand for nothing.
        let mut states: [_; MAX_HEADS_TOGETHER] = core::array::from_fn(|head| {
            let Some(bytes) = parts.next().filter(|_| head < heads) else {
                return (DecodeRows::none(), first_task.clone(), Scratch::empty());
            };
            let (task, mut scratch) = (first_task.with_head(head), sizes.carve(bytes));
            (self.start(&task, &mut scratch), task, scratch)
        });
        let spans = [&self.inputs.k, &self.inputs.v].map(|tensor| match tensor.layout() {
            Layout { shape: [.., 0], .. } => 0, // its strides may be anything
            Layout { shape: [.., dim], strides: [_, head_stride, ..] } => (heads - 1) * head_stride + dim,
        });
        for part in [Some(&first_task), first_task.second_part().as_ref()].into_iter().flatten() {
            for (head, (_, task, _)) in states[..heads].iter_mut().enumerate() {
                *task = part.with_head(head);
            }
            let mut left = part.keys();
            while let Some(keys) = self.next_keys(&mut left) {
                let mut heads_of =
                    states.each_mut().map(|(rows, task, scratch)| self.decode_head(task, keys.clone(), rows, scratch));
                self.decode_heads(part, &mut heads_of[..heads], keys, self.peek(&left), spans);
            }
        }
        for (head, (.., scratch)) in states[..heads].iter_mut().enumerate() {
            self.end(&first_task.with_head(head), scratch);
        }
    }

    /// The next of the blocks of keys that the task sees, which begin at multiples of `kv_block`. `left` are the keys that it sees and were not
    /// in one yet.
    #[inline]
    fn next_keys(&self, left: &mut Range<usize>) -> Option<Range<usize>> {
        if left.start >= left.end {
            return None;
        }
        let kv_block = self.plan.blocks.kv_block;
        let end = ((left.start / kv_block + 1) * kv_block).min(left.end);
        Some(mem::replace(&mut left.start, end)..end)
    }

    fn prefill(&self, task: &RowBlock, scratch: &mut Scratch<'_, T::Acc>) {
        let AttentionShape { head_dim, value_dim, .. } = self.plan.shape;
        let (pairs, score_scale) = (self.pairs(), self.scale());
        let mut left = task.keys();
        while let Some(keys) = self.next_keys(&mut left) {
            let [k_scratch_stride, v_scratch_stride] = scratch.strides;
            let k_scratch = (&mut *scratch.k_block, k_scratch_stride);
            let (k, k_stride) = match pairs {
                Some(pairs) => self.pack_pairs(pairs, task, keys.clone(), k_scratch),
                None => self.read_block(&self.inputs.k, task, keys.clone(), k_scratch),
            };
            let (v, v_stride) =
                self.read_block(&self.inputs.v, task, keys.clone(), (&mut *scratch.v_block, v_scratch_stride));
            let next = keys.end..(keys.end + self.plan.blocks.kv_block).min(left.end);
            let (first_key, keys) = (keys.start, keys.len());
            // What was packed is in the cache, and more rows take so long that waiting for memory does not show.
            let fetches = task.rows <= FEW_PANELS * task.panel_rows;
            let is_packed = |block: *const T::Acc, scratch: &[T::Acc]| block == scratch.as_ptr();
            let (mut fetch_values, mut fetch_keys) = (FetchRows::NOTHING, FetchRows::NOTHING);
            if fetches && value_dim > 0 && !is_packed(v, scratch.v_block) {
                fetch_values = FetchRows::new(Rows { start: v, stride: v_stride }, keys, value_dim);
            }
            if fetches && !next.is_empty() && !is_packed(k, scratch.k_block) {
                fetch_keys = FetchRows::new(Rows { start: k, stride: k_stride }.from(keys), next.len(), head_dim);
            }
            let scratch = &mut *scratch;
            let pass = self.pass;
            let block = KeyBlock {
                task,
                first_key,
                keys,
                k,
                k_stride,
                v,
                v_stride,
                head_dim,
                value_dim,
                score_scale,
                fetch_values,
                fetch_keys,
                pass,
                scratch,
            };
            match pairs {
                Some(pairs) => {
                    T::Acc::prefill_pairs(self.plan.instruction_set, PrefillBlock::new(pairs.factors, block))
                }
                None => T::Acc::prefill(self.plan.instruction_set, PrefillBlock::new(Accumulators, block)),
            }
        }
    }

    fn scale(&self) -> T::Acc {
        T::Acc::from_f64(self.plan.softmax_scale)
    }

    fn decode(&self, task: &RowBlock, rows: &mut DecodeRows<T::Acc>, scratch: &mut Scratch<'_, T::Acc>) {
        let AttentionShape { head_dim, value_dim, .. } = self.plan.shape;
        let in_place = self.decodes_in_place();
        let mut left = task.keys();
        while let Some(keys) = self.next_keys(&mut left) {
            if in_place {
                let head = self.decode_head(task, keys.clone(), rows, scratch);
                self.decode_heads(task, &mut [head], keys, self.peek(&left), [head_dim, value_dim]);
            } else {
                self.decode_packed(task, keys, rows, scratch);
            }
        }
    }

    /// Whether decode reads K and V where and as they are.
    fn decodes_in_place(&self) -> bool {
        (K::IS_ACCUMULATOR || self.plan.instruction_set.has_fma())
            && self.inputs.k.layout().has_neighbours()
            && self.inputs.v.layout().has_neighbours()
    }

    /// The keys that [`next_keys`](Self::next_keys) will give.
    #[inline]
    fn peek(&self, left: &Range<usize>) -> Range<usize> {
        left.start..(left.start + self.plan.blocks.kv_block).min(left.end)
    }

    /// A task with some keys where they lie.
    #[inline]
    fn decode_head<'t, 's>(
        &self,
        task: &'t RowBlock,
        keys: Range<usize>,
        rows: &'t mut DecodeRows<T::Acc>,
        scratch: &'t mut Scratch<'s, T::Acc>,
    ) -> DecodeHead<'t, 's, T::Acc, K> {
        let [k, v] = [&self.inputs.k, &self.inputs.v].map(|tensor| self.rows_of(tensor, task, keys.clone()));
        DecodeHead { task, k, v, rows, scratch }
    }

    /// Runs these heads, whose first task is `task`, with a block of keys. `next` are the keys behind them.
    #[inline]
    fn decode_heads(
        &self,
        task: &RowBlock,
        heads: &mut [DecodeHead<'_, '_, T::Acc, K>],
        keys: Range<usize>,
        next: Range<usize>,
        spans: [usize; 2],
    ) {
        let pass = self.pass;
        let shown = |head: &DecodeHead<'_, '_, T::Acc, K>| {
            pass.is_none_or(|pass| !pass.shown(head.task, 0..head.task.rows, keys.clone()).is_empty())
        };
        if !heads.iter().any(shown) {
            return;
        }
        let next_k = (!next.is_empty()).then(|| self.rows_of(&self.inputs.k, task, next));
        let block = self.decode_block(keys, spans, next_k);
        K::decode(self.plan.instruction_set, DecodeHeads { block, heads });
    }

    #[inline]
    fn decode_block<E>(
        &self,
        keys: Range<usize>,
        spans: [usize; 2],
        next_k: Option<Rows<E>>,
    ) -> DecodeBlock<'_, T::Acc, E> {
        let AttentionShape { head_dim, value_dim, .. } = self.plan.shape;
        let (first_key, keys, scores_stride) = (keys.start, keys.len(), self.plan.blocks.scores_stride());
        DecodeBlock { first_key, keys, head_dim, value_dim, scores_stride, spans, next_k, pass: self.pass }
    }

    /// A task with some keys that are packed first.
    fn decode_packed(
        &self,
        task: &RowBlock,
        keys: Range<usize>,
        rows: &mut DecodeRows<T::Acc>,
        scratch: &mut Scratch<'_, T::Acc>,
    ) {
        if self.pass.is_some_and(|pass| pass.shown(task, 0..task.rows, keys.clone()).is_empty()) {
            return;
        }
        let AttentionShape { head_dim, value_dim, .. } = self.plan.shape;
        let [k_stride, v_stride] = scratch.strides;
        for (tensor, stride, packed) in
            [(&self.inputs.k, k_stride, &mut *scratch.k_block), (&self.inputs.v, v_stride, &mut *scratch.v_block)]
        {
            if tensor.layout().shape[3] > 0 {
                self.pack_block(tensor, task, keys.clone(), (packed, stride));
            }
        }
        let k = Rows { start: scratch.k_block.as_ptr(), stride: k_stride };
        let v = Rows { start: scratch.v_block.as_ptr(), stride: v_stride };
        let block = self.decode_block(keys, [head_dim, value_dim], None);
        let heads = &mut [DecodeHead { task, k, v, rows, scratch }];
        <T::Acc as Packing<T::Acc>>::decode(self.plan.instruction_set, DecodeHeads { block, heads });
    }

    /// Clears the rows' state and prepares Q: scaled panels for prefill; for decode the rows as they are.
    fn start(&self, task: &RowBlock, scratch: &mut Scratch<'_, T::Acc>) -> DecodeRows<T::Acc> {
        let scale = self.scale();
        scratch.running_max.fill(T::Acc::NEG_INFINITY);
        scratch.running_sum.fill(T::Acc::ZERO);
        let mut q_rows = [ptr::null(); MAX_DECODE_ROWS];
        let is_decode = self.plan.blocks.path == Path::Decode;
        // Decode writes them with the first block of keys, unless a row sees none of it.
        let (keys, kv_block) = (task.keys(), self.plan.blocks.kv_block);
        let several_blocks = keys.end.div_ceil(kv_block) > keys.start / kv_block + 1 || task.second_part().is_some();
        scratch.written = WrittenHalves::default();
        if is_decode && (self.partials.is_some() || self.pass.is_some() || several_blocks) {
            scratch.out_acc.fill(T::Acc::ZERO);
        }
        let layout = self.inputs.q.layout();
        let head_dim = layout.shape[3];
        let q = self.inputs.q.data();
        if !is_decode {
            let (set, q_panels) = (self.plan.instruction_set, &mut *scratch.q_panels);
            match self.pairs() {
                Some(Pairs { factors, q, .. }) => {
                    T::Acc::pack_q_pairs(set, PackQ { task, q: q.as_ptr(), layout, scale, q_panels, factors });
                }
                None => {
                    let factors = Accumulators;
                    T::pack_q(set, PackQ { task, q: q.as_ptr(), layout, scale, q_panels, factors });
                }
            }
            return DecodeRows::new(q_rows, scale);
        }
        if let Some(q) = T::as_acc(q)
            && layout.has_neighbours()
        {
            for (row, q_row) in q_rows[..task.rows].iter_mut().enumerate() {
                *q_row = q[layout.offset(task.index(row))..].as_ptr();
            }
            return DecodeRows::new(q_rows, scale);
        }
        for (row, to) in scratch.q_panels.chunks_exact_mut(head_dim).take(task.rows).enumerate() {
            let from = layout.offset(task.index(row));
            q_rows[row] = to.as_ptr();
            let op = PackKeys {
                from: &q[from..],
                key_stride: 0,
                dim_stride: layout.strides[3],
                keys: 1,
                dim: head_dim,
                to,
                to_stride: head_dim,
                factors: Accumulators,
            };
            T::pack_keys(self.plan.instruction_set, op);
        }
        DecodeRows::new(q_rows, scale)
    }
}

/// Panels of a task up to which K and V are fetched ahead. Measured in benches/results/log.md.
const FEW_PANELS: usize = 2;
