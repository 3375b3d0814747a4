//! One task: a block of rows of one KV head against the blocks of keys that they see.
//!
//! Pack Q, then for every block of keys up to the last one that any row sees: pack K and V where they do not lie as the
//! kernels read them, and run the rows against it ([`PrefillBlock`] or [`DecodeBlock`]). Then divide and write.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::{mem, ptr};

use crate::decode::{DecodeBlock, DecodeRows};
use crate::kernels::fetch::{FetchRows, Rows};
use crate::kernels::lane::Lane;
use crate::kernels::{MAX_DECODE_ROWS, TileSizes, WithTiles};
use crate::merge::{MergeChunks, Partials};
use crate::packing::{PackKeys, PackQ, Packing, UnpackOut, UnpackRows};
use crate::plan::Path;
use crate::prefill::PrefillBlock;
use crate::row_block::{KeyBlock, RowBlock};
use crate::score_pass::ScorePass;
use crate::tensor::Layout;
use crate::workspace::Scratch;
use crate::{AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, Element, InstructionSet, TensorView};

/// The vector code of a task, for one accumulator type. Not generic, so that it is compiled once and in this crate, with
/// this crate's optimisation level, however many element types (and crates) call it.
pub(crate) trait TaskKernels: Lane {
    /// Tile sizes of a set for this accumulator.
    fn tile_sizes(set: InstructionSet) -> TileSizes;
    fn prefill(set: InstructionSet, op: PrefillBlock<'_, '_, Self>);
    fn merge(set: InstructionSet, op: MergeChunks<'_, '_, Self>);
    /// Runs code that depends on no number of lanes. Generic, for what only the caller's crate knows.
    fn run<Op: WithTiles>(set: InstructionSet, op: Op) -> Op::Output;
}

impl TaskKernels for f32 {
    fn tile_sizes(set: InstructionSet) -> TileSizes {
        set.tile_sizes()
    }
    fn prefill(set: InstructionSet, op: PrefillBlock<'_, '_, f32>) {
        set.run(op);
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
    fn prefill(set: InstructionSet, op: PrefillBlock<'_, '_, f64>) {
        set.run_f64(op);
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
    plan: &'a AttentionPlan<T::Acc>,
    inputs: &'a AttentionInputs<'a, T, K>,
    outputs: OutputRows<'a, T>,
    partials: Option<Partials<'a, T::Acc>>,
    /// What happens to scores, if anything.
    pass: Option<&'a dyn ScorePass<T::Acc>>,
}

/// Where the rows of a call go: the outputs, or one sequence of packed ones.
#[derive(Clone, Copy)]
pub(crate) struct OutputRows<'a, T: Element> {
    out: *mut T,
    layout: Layout,
    logsumexp: Option<*mut T::Acc>,
    /// Elements of `logsumexp` from a head to the next.
    logsumexp_stride: usize,
    outputs: PhantomData<&'a mut T>,
}

// SAFETY: `out` and `logsumexp` come from exclusive borrows that last as long as `'a`. Tasks write only the rows of their
// own (batch or sequence, KV head, row block), which are disjoint: the schedule hands out each task once, and a mutable view
// has no two elements at one place.
unsafe impl<T: Element> Sync for OutputRows<'_, T> {}

impl<'a, T: Element> OutputRows<'a, T> {
    /// All rows. The caller has checked that the slice for `logsumexp` holds one element for each.
    pub(crate) fn new(outputs: &'a mut AttentionOutputs<'_, T>) -> Self {
        let layout = outputs.out.layout();
        let logsumexp = outputs.logsumexp.as_mut().map(|logsumexp| logsumexp.as_mut_ptr());
        let logsumexp_stride = layout.shape[2];
        Self { out: outputs.out.as_mut_ptr(), layout, logsumexp, logsumexp_stride, outputs: PhantomData }
    }

    /// The rows of these queries alone, in a batch of one. Sequences that have no query in common write to disjoint places.
    pub(crate) fn of_queries(&self, queries: Range<usize>) -> Self {
        let [batch, _, q_len, _] = self.layout.shape;
        assert!(batch == 1 && queries.start <= queries.end && queries.end <= q_len);
        let first = queries.start;
        Self {
            // Wraps where there is no element: nothing is written then.
            out: self.out.wrapping_add(first.wrapping_mul(self.layout.strides[2])),
            layout: self.layout.with_seq(queries.len()),
            logsumexp: self.logsumexp.map(|logsumexp| logsumexp.wrapping_add(first)),
            ..*self
        }
    }
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
        let plan = self.plan;
        let task = RowBlock::new(plan, task, self.inputs.kv_lens);
        let scale = T::Acc::from_f64(plan.softmax_scale);
        let mut rows = DecodeRows::new(self.start(&task, scale, scratch), scale);
        self.run_part(&task, &mut rows, scratch);
        if let Some(task) = task.second_part() {
            self.run_part(&task, &mut rows, scratch);
        }
        if let Some(partials) = &self.partials {
            if !partials.store(task.block, task.chunk, scratch) {
                return;
            }
            T::Acc::merge(plan.instruction_set, partials.merge(task.block, task.panel_rows, scratch));
        }
        self.finish(&task, scratch);
    }

    #[inline]
    fn run_part(&self, task: &RowBlock, rows: &mut DecodeRows<T::Acc>, scratch: &mut Scratch<'_, T::Acc>) {
        match self.plan.blocks.path {
            Path::Prefill => self.prefill(task, scratch),
            Path::Decode => self.decode(task, rows, scratch),
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
        let mut left = task.keys();
        while let Some(keys) = self.next_keys(&mut left) {
            let [k_scratch_stride, v_scratch_stride] = scratch.strides;
            let (k, k_stride) =
                self.read_block(&self.inputs.k, task, keys.clone(), (&mut *scratch.k_block, k_scratch_stride));
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
                fetch_values,
                fetch_keys,
                pass,
                scratch,
            };
            T::Acc::prefill(self.plan.instruction_set, PrefillBlock(block));
        }
    }

    fn decode(&self, task: &RowBlock, rows: &mut DecodeRows<T::Acc>, scratch: &mut Scratch<'_, T::Acc>) {
        let AttentionShape { head_dim, value_dim, .. } = self.plan.shape;
        let (set, mut left) = (self.plan.instruction_set, task.keys());
        let tensors = [&self.inputs.k, &self.inputs.v];
        let in_place = (K::IS_ACCUMULATOR || set.has_fma())
            && tensors.iter().all(|tensor| tensor.layout().strides[3] == 1 || tensor.layout().shape[3] <= 1);
        while let Some(keys) = self.next_keys(&mut left) {
            if self.pass.is_some_and(|pass| pass.shown(task, 0..task.rows, keys.clone()).is_empty()) {
                continue;
            }
            let next_keys = left.len().min(self.plan.blocks.kv_block);
            let (first_key, len) = (keys.start, keys.len());
            let (rows, pass) = (&mut *rows, self.pass);
            if in_place {
                let [k, v] = tensors.map(|tensor| self.rows_of(tensor, task, keys.clone()));
                let scratch = &mut *scratch;
                let block = DecodeBlock {
                    task,
                    first_key,
                    keys: len,
                    k,
                    v,
                    next_keys,
                    head_dim,
                    value_dim,
                    rows,
                    pass,
                    scratch,
                };
                K::decode(set, block);
            } else {
                let [k_stride, v_stride] = scratch.strides;
                for (tensor, stride, packed) in
                    [(tensors[0], k_stride, &mut *scratch.k_block), (tensors[1], v_stride, &mut *scratch.v_block)]
                {
                    if tensor.layout().shape[3] > 0 {
                        self.pack_block(tensor, task, keys.clone(), (packed, stride));
                    }
                }
                let k = Rows { start: scratch.k_block.as_ptr(), stride: k_stride };
                let v = Rows { start: scratch.v_block.as_ptr(), stride: v_stride };
                let (next_keys, scratch) = (0, &mut *scratch);
                let block = DecodeBlock {
                    task,
                    first_key,
                    keys: len,
                    k,
                    v,
                    next_keys,
                    head_dim,
                    value_dim,
                    rows,
                    pass,
                    scratch,
                };
                <T::Acc as Packing<T::Acc>>::decode(set, block);
            }
        }
    }

    /// Clears the rows' state and prepares Q: scaled panels for prefill; for decode the rows it gives, unscaled.
    fn start(
        &self,
        task: &RowBlock,
        scale: T::Acc,
        scratch: &mut Scratch<'_, T::Acc>,
    ) -> [*const T::Acc; MAX_DECODE_ROWS] {
        scratch.running_max.fill(T::Acc::NEG_INFINITY);
        scratch.running_sum.fill(T::Acc::ZERO);
        let mut q_rows = [ptr::null(); MAX_DECODE_ROWS];
        let is_decode = self.plan.blocks.path == Path::Decode;
        // Decode writes them with the first block of keys, unless a row sees none of it.
        let (keys, kv_block) = (task.keys(), self.plan.blocks.kv_block);
        let several_blocks = keys.end.div_ceil(kv_block) > keys.start / kv_block + 1 || task.second_part().is_some();
        if !is_decode || self.partials.is_some() || self.pass.is_some() || several_blocks {
            scratch.out_acc.fill(T::Acc::ZERO);
        }
        let layout = self.inputs.q.layout();
        let head_dim = layout.shape[3];
        let q = self.inputs.q.data();
        if !is_decode {
            let op = PackQ { task, q: q.as_ptr(), layout, scale, q_panels: &mut *scratch.q_panels };
            T::pack_q(self.plan.instruction_set, op);
            return q_rows;
        }
        if let Some(q) = T::as_acc(q)
            && (layout.strides[3] == 1 || head_dim == 1)
        {
            for (row, q_row) in q_rows[..task.rows].iter_mut().enumerate() {
                *q_row = q[layout.offset(task.index(row))..].as_ptr();
            }
            return q_rows;
        }
        for (row, to) in scratch.q_panels.chunks_exact_mut(head_dim).take(task.rows).enumerate() {
            let from = layout.offset(task.index(row));
            q_rows[row] = to.as_ptr();
            let (from, dim_stride) = (&q[from..], layout.strides[3]);
            let op = PackKeys { from, key_stride: 0, dim_stride, keys: 1, dim: head_dim, to, to_stride: head_dim };
            T::pack_keys(self.plan.instruction_set, op);
        }
        q_rows
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
        self.pack_block(tensor, task, keys, (&mut *scratch, scratch_stride));
        (scratch.as_ptr(), scratch_stride)
    }

    /// A block of keys (or values) as it lies in memory.
    fn rows_of(&self, tensor: &TensorView<'_, K>, task: &RowBlock, keys: Range<usize>) -> Rows<K> {
        let layout = tensor.layout();
        let stride = layout.strides[2];
        if layout.shape[3] == 0 {
            return Rows { start: tensor.data().as_ptr(), stride: 0 }; // nothing will be read
        }
        let start = tensor.data()[layout.offset([task.batch, task.kv_head, keys.start])..].as_ptr();
        Rows { start, stride }
    }

    /// Copies a block of keys (or values) of at least one feature to accumulators.
    fn pack_block(
        &self,
        tensor: &TensorView<'_, K>,
        task: &RowBlock,
        keys: Range<usize>,
        (packed, stride): (&mut [T::Acc], usize),
    ) {
        let layout = tensor.layout();
        let [.., key_stride, dim_stride] = layout.strides;
        let from = &tensor.data()[layout.offset([task.batch, task.kv_head, keys.start])..];
        let op = PackKeys {
            from,
            key_stride,
            dim_stride,
            keys: keys.len(),
            dim: layout.shape[3],
            to: &mut packed[..keys.len() * stride],
            to_stride: stride,
        };
        K::pack_keys(self.plan.instruction_set, op);
    }

    /// Divides by the running sums and writes the rows.
    fn finish(&self, task: &RowBlock, scratch: &mut Scratch<'_, T::Acc>) {
        let OutputRows { out, layout, .. } = self.outputs;
        let may_hide = self.pass.is_some_and(|pass| pass.may_hide());
        if may_hide || self.inputs.sinks.is_some() {
            self.settle(task, scratch, may_hide);
        } else if self.outputs.logsumexp.is_some() {
            for row in 0..task.rows {
                let value = match task.row_sees_keys(row) {
                    false => T::Acc::NEG_INFINITY,
                    true => T::Acc::logsumexp(scratch.running_max[row], scratch.running_sum[row]),
                };
                self.write_logsumexp(task.index(row), value);
            }
        }
        if layout.shape[3] == 0 {
            return;
        }
        let (out_acc, running_sum) = (&mut *scratch.out_acc, &*scratch.running_sum);
        match self.plan.blocks.path {
            Path::Prefill => {
                let op = UnpackOut { task, out_acc, running_sum, out, layout };
                T::unpack_out(self.plan.instruction_set, op);
            }
            Path::Decode => {
                let op = UnpackRows { task, out_acc, running_sum, out, layout };
                T::unpack_rows(self.plan.instruction_set, op);
            }
        }
    }

    /// What mask, bias and sinks leave to be done once all keys are in: rows that see none of them, and the sink in the sum. Writes
    /// log-sum-exps, and makes the running sum what the accumulators are to be divided by.
    fn settle(&self, task: &RowBlock, scratch: &mut Scratch<'_, T::Acc>, may_hide: bool) {
        for row in 0..task.rows {
            let index = task.index(row);
            let sum = scratch.running_sum[row];
            // A sum is 0 where all scores are -inf: hidden, or visible with that score. A visible finite one makes it 1 at least.
            let sees_keys = task.row_sees_keys(row) && !(may_hide && sum.is_zero() && self.hides_row(task, row));
            // No sink is one of no weight.
            let sink = self.inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[index[1]]));
            let (sum, logsumexp) = match sees_keys {
                true => with_sink(scratch.running_max[row], sum, sink),
                false => (T::Acc::from_f64(f64::INFINITY), T::Acc::from_f64(sink)), // the accumulators are 0
            };
            scratch.running_sum[row] = sum;
            self.write_logsumexp(index, logsumexp);
        }
    }

    /// Whether mask and bias hide every key that the config shows to a row. Asked only where all of its scores were -inf.
    fn hides_row(&self, task: &RowBlock, row: usize) -> bool {
        let index = task.index(row);
        let second_part = task.second_part();
        let mut keys = task.row_keys(row).chain(second_part.map_or(0..0, |part| part.row_keys(row)));
        keys.all(|key| self.pass.is_some_and(|pass| pass.hides(index, key)))
    }

    /// Of a row of the task in hand, where it is wanted.
    fn write_logsumexp(&self, [batch, head, query]: [usize; 3], value: T::Acc) {
        let (num_heads, stride) = (self.outputs.layout.shape[1], self.outputs.logsumexp_stride);
        if let Some(logsumexp) = self.outputs.logsumexp {
            // SAFETY: the slice holds batch * num_heads * q_len elements (checked by the plan) and this one is this
            // task's alone.
            unsafe { logsumexp.add((batch * num_heads + head) * stride + query).write(value) };
        }
    }
}

/// The sum of a row with its sink, in units of its running maximum as the accumulators are, and the log-sum-exp.
fn with_sink<A: Element<Acc = A> + Lane>(max: A, sum: A, sink: f64) -> (A, A) {
    if sink == f64::NEG_INFINITY {
        return (sum, A::logsumexp(max, sum));
    }
    let (max, sum) = (Element::to_f64(max), Element::to_f64(sum));
    let (sum, logsumexp) = if sink == f64::INFINITY {
        (f64::NAN, f64::NAN) // as for any score of +inf
    } else if max == f64::NEG_INFINITY {
        // Visible scores of -inf alone weigh nothing beside a sink; the sum is 0 then, or NaN as one of them is.
        (f64::INFINITY + sum + sink, sum + sink)
    } else {
        let larger = if sink > max { sink } else { max };
        (sum + (sink - max).exp(), larger + (sum * (max - larger).exp() + (sink - larger).exp()).ln())
    };
    (A::from_f64(sum), A::from_f64(logsumexp))
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

/// Panels of a task up to which K and V are fetched ahead. Measured in benches/results/log.md.
const FEW_PANELS: usize = 2;
