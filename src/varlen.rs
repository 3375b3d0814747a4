//! Sequences of different lengths behind one another in one tensor: `attention_varlen`.
//!
//! Every sequence is planned and run as a call of its own, on the views of its own rows, which is why it gets the bits of one.
//! What the sequences share is the pool: the tasks of all of them are handed out from one list, heaviest first.

use std::cmp::Reverse;
use std::fmt;
use std::ops::Range;

use crate::attention::{new_output, with_thread_workspace};
use crate::mask::VisibleKeys;
use crate::merge::{ManyPartials, PartialPlace};
use crate::output::OutputRows;
use crate::plan::{score_flops, tasks_wanted, threads_for};
use crate::row_block::RowBlock;
use crate::score_pass::{CallPass, ScorePass};
use crate::task::Call;
use crate::{
    Accumulator, AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape,
    Element, InstructionSet, TensorViewMut, Workspace, schedule,
};

/// Where packed sequences begin and end, by FlashAttention's convention: sequence `i` has the queries `q[i]..q[i + 1]` and the
/// keys `k[i]..k[i + 1]`. Both lists hold one offset more than there are sequences, begin with 0 and never fall; a
/// sequence may have no queries or no keys. Rows behind the last offset belong to no sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CuSeqlens<'a> {
    /// Cumulative lengths of the queries, `cu_seqlens_q`.
    pub q: &'a [usize],
    /// Cumulative lengths of the keys and values, `cu_seqlens_k`.
    pub k: &'a [usize],
}

impl<'a> CuSeqlens<'a> {
    /// Offsets of the queries and of the keys.
    pub fn new(q: &'a [usize], k: &'a [usize]) -> Self {
        Self { q, k }
    }

    /// The same offsets for both: every sequence attends to itself.
    pub fn same(offsets: &'a [usize]) -> Self {
        Self { q: offsets, k: offsets }
    }

    fn check(&self, total_q: usize, total_k: usize) -> Result<(), AttentionError> {
        for (name, offsets, total) in [("cu_seqlens_q", self.q, total_q), ("cu_seqlens_k", self.k, total_k)] {
            let Some((&first, &last)) = offsets.first().zip(offsets.last()) else {
                return Err(AttentionError::CuSeqlensEmpty { name });
            };
            if first != 0 {
                return Err(AttentionError::CuSeqlensStart { name, found: first });
            }
            if let Some(index) = (1..offsets.len()).find(|&index| offsets[index] < offsets[index - 1]) {
                let (found, previous) = (offsets[index], offsets[index - 1]);
                return Err(AttentionError::CuSeqlensFall { name, index, found, previous });
            }
            if last > total {
                let index = offsets.len() - 1;
                return Err(AttentionError::CuSeqlensTooLong { name, index, found: last, total });
            }
        }
        if self.q.len() != self.k.len() {
            return Err(AttentionError::CuSeqlensLenMismatch { q: self.q.len(), k: self.k.len() });
        }
        Ok(())
    }
}

/// Attention within each of several packed sequences, into a new contiguous `[total_q, num_heads, value_dim]`; 0 in rows that
/// belong to no sequence.
///
/// The tensors have a batch of 1 and all sequences behind one another along their sequence axis: in FlashAttention's
/// layout Q is `[total_q, num_heads, head_dim]`, K `[total_k, num_kv_heads, head_dim]` and V `[total_k, num_kv_heads, value_dim]`, which
/// [`TensorView::from_bshd`](crate::TensorView::from_bshd) takes with a 1 in front. Any other strides are as good. The
/// mask is that of each sequence on its own.
///
/// Each sequence gets the very bits of a separate call on it, whatever stands beside it, and on any number of threads.
///
/// ```
/// use fused_attention::*;
/// // Two sequences, of 3 and 2 tokens, 2 heads of 4 features.
/// let cu_seqlens = [0, 3, 5];
/// let x: Vec<f32> = (0..5 * 2 * 4).map(|i| (i as f32).sin()).collect();
/// let view = TensorView::from_bshd(&x, [1, 5, 2, 4])?;
/// let inputs = AttentionInputs::new(view, view, view);
/// let out = attention_varlen(&inputs, CuSeqlens::same(&cu_seqlens), &AttentionConfig::causal())?;
/// // The first token of a sequence sees itself alone: tokens 0 and 3.
/// assert_eq!(out[..2 * 4], x[..2 * 4]);
/// assert_eq!(out[3 * 2 * 4..][..2 * 4], x[3 * 2 * 4..][..2 * 4]);
/// # Ok::<(), AttentionError>(())
/// ```
///
/// # Errors
/// As [`attention`](crate::attention()), and the variants of [`AttentionError`] on `cu_seqlens`, which name the list, the index and the
/// values.
pub fn attention_varlen<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    cu_seqlens: CuSeqlens<'_>,
    config: &AttentionConfig,
) -> Result<Vec<T>, AttentionError> {
    let plan = VarlenPlan::<T::Acc>::with_accumulator(&AttentionShape::of(inputs)?, cu_seqlens, config)?;
    let AttentionShape { num_heads, q_len, value_dim, .. } = plan.shape;
    let mut out = new_output(&plan.shape)?;
    let view = TensorViewMut::from_bshd(&mut out, [1, q_len, num_heads, value_dim])?;
    with_thread_workspace(plan.workspace_len(), |workspace| {
        plan.run(inputs, &mut AttentionOutputs::new(view), workspace)
    })?;
    Ok(out)
}

/// The same into memory of the caller, `[1, num_heads, total_q, value_dim]` of any strides. Rows that belong to no sequence
/// are left as they are.
///
/// `logsumexp` is `[num_heads, total_q]`, as FlashAttention's. Allocates a [`VarlenPlan`]; scratch is kept by the
/// calling thread, as [`attention_into`](crate::attention_into) does.
///
/// ```
/// use fused_attention::*;
/// // One new query against 3 keys, and 2 against 2; one head.
/// let (q, kv) = ([1.0f32; 3 * 4], [0.5f32; 5 * 4]);
/// let kv = TensorView::from_bshd(&kv, [1, 5, 1, 4])?;
/// let inputs = AttentionInputs::new(TensorView::from_bshd(&q, [1, 3, 1, 4])?, kv, kv);
/// let (mut out, mut lse) = ([0.0; 3 * 4], [0.0; 3]);
/// let out_view = TensorViewMut::from_bshd(&mut out, [1, 3, 1, 4])?;
/// let mut outputs = AttentionOutputs::new(out_view).with_logsumexp(&mut lse);
/// attention_varlen_into(&inputs, &mut outputs, CuSeqlens::new(&[0, 1, 3], &[0, 3, 5]), &AttentionConfig::causal())?;
/// // Every score is 4 * 0.5 / sqrt(4) = 1; the queries see 3, 1 and 2 keys.
/// for (lse, keys) in lse.into_iter().zip([3.0f32, 1.0, 2.0]) {
///     assert!((lse - (keys.ln() + 1.0)).abs() < 1e-6);
/// }
/// # Ok::<(), AttentionError>(())
/// ```
///
/// # Errors
/// As [`attention_varlen`]; nothing is written then.
pub fn attention_varlen_into<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    outputs: &mut AttentionOutputs<'_, T>,
    cu_seqlens: CuSeqlens<'_>,
    config: &AttentionConfig,
) -> Result<(), AttentionError> {
    let plan = VarlenPlan::<T::Acc>::with_accumulator(&AttentionShape::of(inputs)?, cu_seqlens, config)?;
    with_thread_workspace(plan.workspace_len(), |workspace| plan.run(inputs, outputs, workspace))
}

/// A checked and planned call on packed sequences, to be run on any tensors of its shape: once for all layers of a step.
///
/// It holds some 400 bytes for each sequence and 24 for each block of rows, of which a sequence has at least one, and one for
/// every 512 rows (queries times heads of a group) or less.
///
/// ```
/// use fused_attention::*;
/// let (heads, kv_heads, dim, tokens) = (4, 2, 8, 10);
/// let cu_seqlens = [0, 7, 10];
/// // The packed shape: one batch entry, all tokens.
/// let shape = AttentionShape {
///     batch: 1, num_heads: heads, num_kv_heads: kv_heads, q_len: tokens, kv_len: tokens, head_dim: dim, value_dim: dim,
/// };
/// let plan = VarlenPlan::new(&shape, CuSeqlens::same(&cu_seqlens), &AttentionConfig::causal())?;
/// let mut workspace = Workspace::new();
/// workspace.reserve_len(plan.workspace_len())?;
/// let (q, kv) = (vec![0.5f32; tokens * heads * dim], vec![0.25f32; tokens * kv_heads * dim]);
/// let mut out = vec![0.0; tokens * heads * dim];
/// for _layer in 0..2 {
///     let kv = TensorView::from_bshd(&kv, [1, tokens, kv_heads, dim])?;
///     let inputs = AttentionInputs::new(TensorView::from_bshd(&q, [1, tokens, heads, dim])?, kv, kv);
///     let mut outputs = AttentionOutputs::new(TensorViewMut::from_bshd(&mut out, [1, tokens, heads, dim])?);
///     plan.run(&inputs, &mut outputs, &mut workspace)?; // allocates nothing when serial or inside a rayon pool
/// }
/// println!("{plan}");
/// # Ok::<(), AttentionError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct VarlenPlan<A = f32> {
    shape: AttentionShape,
    sequences: Vec<Sequence<A>>,
    /// For each sequence.
    partials: Vec<PartialPlace>,
    /// The heaviest first.
    shares: Vec<Share>,
    instruction_set: InstructionSet,
    tasks: usize,
    threads: usize,
    thread_bytes: usize,
    partial_bytes: usize,
}

#[derive(Debug, Clone, PartialEq)]
struct Sequence<A> {
    plan: AttentionPlan<A>,
    queries: Range<usize>,
    keys: Range<usize>,
}

/// Tasks of one sequence that weigh the same: one block of rows, of every KV head, against every chunk of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Share {
    sequence: usize,
    /// The first of them in the plan of the sequence.
    first_task: usize,
    /// While shares are sorted, what one of its tasks costs; then the number of its first task among all.
    weight_or_start: usize,
}

/// Rows below which a task waits for its keys, not for its products. At head_dim 128 a key is 1 KiB, 100 ns from memory, and
/// about as much for 16 rows' 2 * 16 * 256 operations.
const ROWS_WORTH_READING: usize = 16;

impl VarlenPlan {
    /// Plans calls that accumulate in `f32`: on tensors of `f32`, `f16` and `bf16`.
    ///
    /// # Errors
    /// See [`with_accumulator`](Self::with_accumulator).
    pub fn new(
        shape: &AttentionShape,
        cu_seqlens: CuSeqlens<'_>,
        config: &AttentionConfig,
    ) -> Result<Self, AttentionError> {
        Self::with_accumulator(shape, cu_seqlens, config)
    }
}

impl<A: Accumulator> VarlenPlan<A> {
    /// Plans calls on tensors of this packed shape (batch 1, `q_len` all queries, `kv_len` all keys) that accumulate in `A`.
    ///
    /// # Errors
    /// As [`AttentionPlan::with_accumulator`]; [`AttentionError::PackedBatch`], the variants on `cu_seqlens`, and
    /// [`AttentionError::AllocationFailed`].
    pub fn with_accumulator(
        shape: &AttentionShape,
        cu_seqlens: CuSeqlens<'_>,
        config: &AttentionConfig,
    ) -> Result<Self, AttentionError> {
        if shape.batch != 1 {
            return Err(AttentionError::PackedBatch { found: shape.batch });
        }
        shape.check()?;
        cu_seqlens.check(shape.q_len, shape.kv_len)?;
        let instruction_set = InstructionSet::resolve(config.instruction_set)?;
        let config = &config.with_instruction_set(instruction_set);
        let ranges = || cu_seqlens.q.windows(2).map(|q| q[0]..q[1]).zip(cu_seqlens.k.windows(2).map(|k| k[0]..k[1]));
        let shape_of = |(queries, keys): &(Range<usize>, Range<usize>)| AttentionShape {
            q_len: queries.len(),
            kv_len: keys.len(),
            ..*shape
        };
        let flops_of = |shape: &AttentionShape| {
            let visible = VisibleKeys::new(config, shape);
            (score_flops(shape, &visible), visible)
        };
        let flops = ranges().fold(0u128, |sum, range| sum.saturating_add(flops_of(&shape_of(&range)).0));
        let threads = threads_for(flops, config);

        let (mut sequences, mut partials) = (Vec::new(), Vec::new());
        let overflow = || AttentionError::PlanOverflow { shape: *shape };
        let (mut shares_len, mut tasks, mut thread_bytes, mut partial_bytes) = (0usize, 0usize, 0, 0usize);
        reserve(&mut sequences, cu_seqlens.q.len() - 1)?;
        reserve(&mut partials, cu_seqlens.q.len() - 1)?;
        for range in ranges() {
            let shape = shape_of(&range);
            // Its part of the tasks that all sequences should have together.
            let (own_flops, visible) = flops_of(&shape);
            let part = (tasks_wanted(threads) as u128).saturating_mul(own_flops).div_ceil(flops.max(1));
            let plan = AttentionPlan::<A>::in_tasks(&shape, config, visible, threads, (part as usize).max(1))?;
            let (_, sizes) = plan.scratch();
            partials.push(PartialPlace { sizes, start: partial_bytes });
            if plan.tasks() > 0 {
                let bytes = sizes.bytes::<A>().ok_or_else(overflow)?;
                partial_bytes = partial_bytes.checked_add(bytes).ok_or_else(overflow)?;
                thread_bytes = plan.scratch_bytes().max(thread_bytes);
                tasks = tasks.checked_add(plan.tasks()).ok_or_else(overflow)?;
                shares_len += plan.blocks.row_blocks; // at most `tasks`
            }
            sequences.push(Sequence { plan, queries: range.0, keys: range.1 });
        }
        let threads = threads.min(tasks).max(1);
        let bytes = thread_bytes.checked_mul(threads).and_then(|bytes| bytes.checked_add(partial_bytes));
        bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(overflow)?;
        let mut shares = Vec::new();
        reserve(&mut shares, shares_len)?;
        share_out(&sequences, &mut shares);
        let shape = *shape;
        Ok(Self { shape, sequences, partials, shares, instruction_set, tasks, threads, thread_bytes, partial_bytes })
    }

    /// Bytes of workspace that [`run`](Self::run) needs: for each thread as much as the sequence that needs most
    /// ([`AttentionPlan::workspace_len`], first summand), and the second summand of each sequence.
    pub fn workspace_len(&self) -> usize {
        self.thread_bytes * self.threads + self.partial_bytes
    }

    /// Runs the plan. Allocates nothing when serial or inside a rayon pool.
    ///
    /// # Errors
    /// As [`AttentionPlan::run`], and [`AttentionError::NotWithCuSeqlens`]; nothing is written then.
    pub fn run<T: Element<Acc = A>, K: Element<Acc = A>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &mut AttentionOutputs<'_, T>,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        let found = AttentionShape::of(inputs)?;
        if found != self.shape {
            return Err(AttentionError::PlanShapeMismatch { planned: self.shape, found });
        }
        let unfit =
            [("kv_lens", inputs.kv_lens.is_some()), ("mask", inputs.mask.is_some()), ("bias", inputs.bias.is_some())];
        if let Some((operand, _)) = unfit.into_iter().find(|(_, is_given)| *is_given) {
            return Err(AttentionError::NotWithCuSeqlens { operand });
        }
        self.shape.check_outputs(outputs)?;
        let (needed, len) = (self.workspace_len(), workspace.len());
        if len < needed {
            return Err(AttentionError::WorkspaceTooSmall { needed, len });
        }
        if self.tasks == 0 {
            return Ok(());
        }
        let (scratch, partials) = workspace.as_mut_slice()[..needed].split_at_mut(self.thread_bytes * self.threads);
        let partials = ManyPartials::new(&self.partials, partials);
        let outputs = OutputRows::new(outputs);
        schedule::for_each_worker(
            self.threads,
            self.tasks,
            scratch,
            self.thread_bytes,
            &|tasks: &mut dyn Iterator<Item = usize>, scratch: &mut [u8]| {
                tasks.for_each(|task| {
                    let (index, task) = self.locate(task);
                    let Sequence { plan, queries, keys } = &self.sequences[index];
                    let inputs = &AttentionInputs {
                        q: inputs.q.positions(queries.clone()),
                        k: inputs.k.positions(keys.clone()),
                        v: inputs.v.positions(keys.clone()),
                        ..*inputs
                    };
                    let pass = CallPass::built_in(plan, inputs);
                    let pass = pass.as_ref().map(|pass| pass as &dyn ScorePass<A>);
                    let call = Call::new(plan, inputs, outputs.of_queries(queries.clone()), partials.of(index), pass);
                    call.run_task(task, &mut plan.scratch().0.carve(scratch));
                });
            },
        );
        Ok(())
    }

    /// The sequence of a task, and its number in the plan of that sequence.
    fn locate(&self, task: usize) -> (usize, usize) {
        let after = self.shares.partition_point(|share| share.weight_or_start <= task);
        let Share { sequence, first_task, weight_or_start: start } = self.shares[after - 1];
        (sequence, first_task + task - start)
    }

    /// The packed shape it was made for.
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// The instruction set it runs with.
    pub fn instruction_set(&self) -> InstructionSet {
        self.instruction_set
    }

    /// The most threads it uses, and has workspace for: at most those of the rayon pool in which the plan was made.
    pub fn threads(&self) -> usize {
        self.threads
    }
}

/// The shares of all sequences, the heaviest first, numbered.
fn share_out<A: Accumulator>(sequences: &[Sequence<A>], shares: &mut Vec<Share>) {
    for (sequence, Sequence { plan, .. }) in sequences.iter().enumerate() {
        for first_task in (0..plan.tasks()).step_by(tasks_of_share(plan)) {
            let task = RowBlock::new(plan, first_task, None);
            let weight = task.rows.max(ROWS_WORTH_READING).saturating_mul(task.keys().len());
            shares.push(Share { sequence, first_task, weight_or_start: weight });
        }
    }
    // Of equal weight, those that read the same keys stay together.
    shares.sort_unstable_by_key(|share| (Reverse(share.weight_or_start), share.sequence, share.first_task));
    let mut start = 0;
    for share in shares {
        share.weight_or_start = start;
        start += tasks_of_share(&sequences[share.sequence].plan);
    }
}

/// At least 1.
fn tasks_of_share<A: Accumulator>(plan: &AttentionPlan<A>) -> usize {
    (plan.shape.num_kv_heads * plan.blocks.chunks).max(1)
}

fn reserve<T>(list: &mut Vec<T>, len: usize) -> Result<(), AttentionError> {
    let bytes = len.saturating_mul(size_of::<T>());
    list.try_reserve_exact(len).map_err(|_| AttentionError::AllocationFailed { bytes })
}

impl<A: Accumulator> fmt::Display for VarlenPlan<A> {
    /// One line: sequences, instruction set, tasks, threads, workspace.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} packed sequences on {}: {} tasks, {} threads, {} KiB workspace",
            self.sequences.len(),
            self.instruction_set.name(),
            self.tasks,
            self.threads,
            self.workspace_len().div_ceil(1024),
        )
    }
}
