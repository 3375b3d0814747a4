//! How a call will be cut: blocks, tasks, workspace. Public tier three.

use std::fmt;
use std::marker::PhantomData;

use crate::blocks::{Blocks, Path};
use crate::mask::VisibleKeys;
use crate::merge::{PartialSizes, Partials};
use crate::output::OutputRows;
use crate::score_pass::{CallPass, CustomPass, ScorePass};
use crate::task::Call;
use crate::workspace::ScratchSizes;
use crate::{
    Accumulator, AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, AttentionShape, Element,
    InstructionSet, KvPadding, ScoreModifier, Workspace, schedule,
};

/// Calls of fewer floating-point operations (`2 * (head_dim + value_dim)` for every visible score) run on the calling
/// thread: they take some 10 us. [measured, AVX-512, 8 heads of 16 tokens and 128 features, just above, medians] 10.0 us alone, 7.1 us on two threads
/// that are awake, as between the layers of a model, and some 20 us on those that have to be woken.
pub const SERIAL_BELOW_FLOPS: u64 = 1 << 19;

/// Tasks for each thread to even out their different weights, while a task keeps at least one panel.
const TASKS_PER_THREAD: usize = 4;

/// A checked and planned call, to be run on any tensors of its shape: once for all layers of a model, say.
///
/// ```
/// use fused_attention::*;
/// let shape = AttentionShape {
///     batch: 1, num_heads: 4, num_kv_heads: 2, q_len: 10, kv_len: 10, head_dim: 8, value_dim: 8,
/// };
/// let plan = AttentionPlan::new(&shape, &AttentionConfig::causal())?;
/// let mut workspace = Workspace::for_plan(&plan)?;
/// let (q, kv, mut out) = (vec![0.5f32; 4 * 10 * 8], vec![0.25f32; 2 * 10 * 8], vec![0.0; 4 * 10 * 8]);
/// for _layer in 0..2 {
///     let kv = TensorView::from_bhsd(&kv, [1, 2, 10, 8])?;
///     let inputs = AttentionInputs::new(TensorView::from_bhsd(&q, [1, 4, 10, 8])?, kv, kv);
///     let mut outputs = AttentionOutputs::new(TensorViewMut::from_bhsd(&mut out, [1, 4, 10, 8])?);
///     plan.run(&inputs, &mut outputs, &mut workspace)?;
/// }
/// println!("{plan}");
/// # Ok::<(), AttentionError>(())
/// ```
///
/// Scores and output are accumulated in `A`: `f32` where the tensors are of `f32` or 16 bits, which is what [`new`](Self::new) plans, `f64`
/// where they are of `f64`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionPlan<A = f32> {
    pub(crate) shape: AttentionShape,
    pub(crate) visible: VisibleKeys,
    pub(crate) kv_padding: KvPadding,
    pub(crate) softmax_scale: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) instruction_set: InstructionSet,
    pub(crate) blocks: Blocks,
    threads: usize,
    scratch: ScratchSizes,
    partials: PartialSizes,
    /// Of a task's scratch, and of all partial results.
    scratch_bytes: usize,
    partial_bytes: usize,
    accumulator: PhantomData<A>,
}

/// Floating-point operations of a call: those of its visible scores.
pub(crate) fn score_flops(shape: &AttentionShape, visible: &VisibleKeys) -> u128 {
    let per_score = 2 * (shape.head_dim as u128 + shape.value_dim as u128);
    let heads = (shape.batch as u128).saturating_mul(shape.num_heads as u128);
    visible.visible_scores().saturating_mul(per_score).saturating_mul(heads)
}

/// Whether a call would be small even if every key were visible: nobody needs to count them then.
fn is_small(shape: &AttentionShape) -> bool {
    let AttentionShape { batch, num_heads, q_len, kv_len, head_dim, value_dim, .. } = *shape;
    let factors = [batch, num_heads, q_len, kv_len, 2, head_dim.saturating_add(value_dim)];
    let flops = factors.into_iter().try_fold(1usize, usize::checked_mul);
    flops.is_some_and(|flops| (flops as u64) < SERIAL_BELOW_FLOPS)
}

/// Threads for a call of so many operations.
pub(crate) fn threads_for(flops: u128, config: &AttentionConfig) -> usize {
    if flops < u128::from(SERIAL_BELOW_FLOPS) { 1 } else { schedule::max_threads(config.parallelism) }
}

/// Tasks to share among so many threads.
pub(crate) fn tasks_wanted(threads: usize) -> usize {
    if threads > 1 { TASKS_PER_THREAD * threads } else { 1 }
}

impl AttentionPlan {
    /// Plans calls of this shape that accumulate in `f32`: on tensors of `f32`, `f16` and `bf16`.
    ///
    /// # Errors
    /// See [`with_accumulator`](Self::with_accumulator).
    pub fn new(shape: &AttentionShape, config: &AttentionConfig) -> Result<Self, AttentionError> {
        Self::with_accumulator(shape, config)
    }
}

impl<A: Accumulator> AttentionPlan<A> {
    /// Plans calls of this shape that accumulate in `A`.
    ///
    /// ```
    /// use fused_attention::*;
    /// let shape = AttentionShape {
    ///     batch: 1, num_heads: 1, num_kv_heads: 1, q_len: 3, kv_len: 3, head_dim: 2, value_dim: 2,
    /// };
    /// let plan = AttentionPlan::<f64>::with_accumulator(&shape, &AttentionConfig::causal())?;
    /// let mut workspace = Workspace::for_plan(&plan)?;
    /// let (x, mut out) = ([0.5f64; 6], [0.0; 6]);
    /// let view = TensorView::from_bhsd(&x, [1, 1, 3, 2])?;
    /// let mut outputs = AttentionOutputs::new(TensorViewMut::from_bhsd(&mut out, [1, 1, 3, 2])?);
    /// plan.run(&AttentionInputs::new(view, view, view), &mut outputs, &mut workspace)?;
    /// assert_eq!(out, x);
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// [`AttentionError::HeadsNotDivisible`], [`AttentionError::ZeroHeadDim`], [`AttentionError::InvalidSoftmaxScale`],
    /// [`AttentionError::InvalidSoftcap`], [`AttentionError::PlanOverflow`] where the workspace or the number of tasks exceeds the address space, and the two
    /// about instruction sets where the environment asks for one that is not there.
    pub fn with_accumulator(shape: &AttentionShape, config: &AttentionConfig) -> Result<Self, AttentionError> {
        let visible = VisibleKeys::new(config, shape);
        let threads = if is_small(shape) { 1 } else { threads_for(score_flops(shape, &visible), config) };
        Self::in_tasks(shape, config, visible, threads, tasks_wanted(threads))
    }

    /// The same for this many threads, in at least `tasks_wanted` tasks where there are rows enough.
    pub(crate) fn in_tasks(
        shape: &AttentionShape,
        config: &AttentionConfig,
        visible: VisibleKeys,
        threads: usize,
        tasks_wanted: usize,
    ) -> Result<Self, AttentionError> {
        shape.check()?;
        let softmax_scale = config.softmax_scale.unwrap_or(1.0 / (shape.head_dim as f64).sqrt());
        if !A::from_f64(softmax_scale).to_f64().is_finite() {
            return Err(AttentionError::InvalidSoftmaxScale { value: softmax_scale });
        }
        if let Some(value) = config.softcap {
            let [softcap, inverse] = [value, 2.0 / value].map(|x| A::from_f64(x).to_f64());
            if !(softcap > 0.0 && softcap.is_finite() && inverse.is_finite()) {
                return Err(AttentionError::InvalidSoftcap { value });
            }
        }
        let instruction_set = InstructionSet::resolve(config.instruction_set)?;
        let planned = || {
            let blocks = Blocks::new::<A>(shape, A::tile_sizes(instruction_set), threads, tasks_wanted)?;
            let row_blocks = blocks.row_blocks * shape.batch * shape.num_kv_heads;
            let threads = threads.min(row_blocks * blocks.chunks).max(1);
            let scratch = ScratchSizes::new(shape, &blocks)?;
            let partials = PartialSizes::new(row_blocks, blocks.chunks, blocks.task_rows, shape.value_dim);
            let (scratch_bytes, partial_bytes) = (scratch.bytes::<A>()?, partials.bytes::<A>()?);
            let thread_bytes = scratch_bytes.checked_mul(blocks.heads_together)?;
            let bytes = thread_bytes.checked_mul(threads)?.checked_add(partial_bytes)?;
            isize::try_from(bytes).ok()?;
            Some((blocks, threads, scratch, partials, [scratch_bytes, partial_bytes]))
        };
        let (blocks, threads, scratch, partials, [scratch_bytes, partial_bytes]) =
            planned().ok_or(AttentionError::PlanOverflow { shape: *shape })?;
        Ok(Self {
            shape: *shape,
            visible,
            kv_padding: config.kv_padding,
            softmax_scale,
            softcap: config.softcap,
            instruction_set,
            blocks,
            threads,
            scratch,
            partials,
            scratch_bytes,
            partial_bytes,
            accumulator: PhantomData,
        })
    }

    /// Bytes of workspace that [`run`](Self::run) needs.
    ///
    /// ```text
    /// threads * heads * size * (rows * (head_dim + value_dim + 2) + scores + panel_rows
    ///                           + kv_block * (round_up(head_dim, 16) + round_up(value_dim, 16) + 32))
    /// + batch * kv_heads * row_blocks * (chunks * size * rows * (value_dim + 2) + 4)       where there are several chunks
    /// ```
    /// with `size` the bytes of an accumulator, 4 or 8, and each of the eight arrays, each chunk and the last summand rounded up to 64 bytes. At most 512 `rows`, and such that Q and
    /// output take at most 1 MiB or one panel. In prefill a `kv_block` is at most 192 keys and `scores` is `panel_rows *
    /// kv_block`, a panel having 8 to 32 rows; in decode (up to 8 rows a KV head, panels of one row) it is at most 32 keys,
    /// `scores` is `rows * (kv_block + 16)`, and there are another `rows * round_up(head_dim, 16)`. `heads` is 1 in prefill, and in decode the
    /// KV heads that a thread may take together, at most 8 (it does where the memory is token-major).
    ///
    /// There are several chunks only where at most 256 rows of a KV head meet more than 1024 keys (8 rows) or 1536 keys (more
    /// rows): at most 64, or 16. So the workspace grows with neither `q_len` nor `kv_len` beyond those numbers, and without chunks it is below
    /// 2 MiB a thread for `head_dim + value_dim <= 512`. 0 where there is nothing to compute.
    pub fn workspace_len(&self) -> usize {
        if self.tasks() == 0 { 0 } else { self.thread_bytes() * self.threads + self.partial_bytes }
    }

    /// Sizes of a thread's scratch, and of the partial results.
    pub(crate) fn scratch(&self) -> (ScratchSizes, PartialSizes) {
        (self.scratch, self.partials)
    }

    /// Bytes of scratch of a task.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// Of the tasks that a thread may have in hand at once; fits, as was checked when the plan was made.
    fn thread_bytes(&self) -> usize {
        self.scratch_bytes * self.blocks.heads_together
    }

    /// Tasks of a call; fits, as was checked when the plan was made.
    pub(crate) fn tasks(&self) -> usize {
        self.blocks.row_blocks * self.shape.batch * self.shape.num_kv_heads * self.blocks.chunks
    }

    /// Runs the plan. Allocates nothing when serial or inside a rayon pool.
    ///
    /// # Errors
    /// [`AttentionError::PlanShapeMismatch`] and [`AttentionError::WorkspaceTooSmall`], and what
    /// [`attention`](crate::attention()) says of tensors that do not fit together; nothing is written then.
    pub fn run<T: Element<Acc = A>, K: Element<Acc = A>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &mut AttentionOutputs<'_, T>,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        if self.check(inputs, outputs, workspace)? {
            self.run_built_in(inputs, outputs, workspace);
        }
        Ok(())
    }

    /// As [`run`](Self::run) where nothing can be wrong: the plan was made for the shape of these inputs, the outputs were checked against
    /// it, and the workspace is as large as it says.
    pub(crate) fn run_own<T: Element<Acc = A>, K: Element<Acc = A>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &mut AttentionOutputs<'_, T>,
        workspace: &mut Workspace,
    ) {
        if self.tasks() != 0 {
            self.run_built_in(inputs, outputs, workspace);
        }
    }

    fn run_built_in<T: Element<Acc = A>, K: Element<Acc = A>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &mut AttentionOutputs<'_, T>,
        workspace: &mut Workspace,
    ) {
        let pass = CallPass::built_in(self, inputs);
        self.run_checked(inputs, outputs, workspace, pass.as_ref().map(|pass| pass as &dyn ScorePass<A>));
    }

    /// As [`run`](Self::run), with a function of your own applied to each score. See [`ScoreModifier`].
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with_modifier<T: Element<Acc = A>, K: Element<Acc = A>, M: ScoreModifier>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &mut AttentionOutputs<'_, T>,
        workspace: &mut Workspace,
        modifier: &M,
    ) -> Result<(), AttentionError> {
        if self.check(inputs, outputs, workspace)? {
            self.run_checked(inputs, outputs, workspace, Some(&CustomPass::new(self, inputs, modifier)));
        }
        Ok(())
    }

    /// As [`run`](Self::run), with `pass` doing to the scores what the inputs ask for, and perhaps more.
    pub(crate) fn run_with_pass<T: Element<Acc = A>, K: Element<Acc = A>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &mut AttentionOutputs<'_, T>,
        workspace: &mut Workspace,
        pass: &dyn ScorePass<A>,
    ) -> Result<(), AttentionError> {
        if self.check(inputs, outputs, workspace)? {
            self.run_checked(inputs, outputs, workspace, Some(pass));
        }
        Ok(())
    }

    /// Whether there is anything to do, if nothing is wrong.
    fn check<T: Element<Acc = A>, K: Element<Acc = A>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &AttentionOutputs<'_, T>,
        workspace: &Workspace,
    ) -> Result<bool, AttentionError> {
        let found = AttentionShape::of(inputs)?;
        if found != self.shape {
            return Err(AttentionError::PlanShapeMismatch { planned: self.shape, found });
        }
        self.shape.check_outputs(outputs)?;
        let (needed, len) = (self.workspace_len(), workspace.len());
        if len < needed {
            return Err(AttentionError::WorkspaceTooSmall { needed, len });
        }
        Ok(self.tasks() != 0)
    }

    fn run_checked<T: Element<Acc = A>, K: Element<Acc = A>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &mut AttentionOutputs<'_, T>,
        workspace: &mut Workspace,
        pass: Option<&dyn ScorePass<A>>,
    ) {
        let needed = self.workspace_len();
        let (scratch, partials) = workspace.as_mut_slice()[..needed].split_at_mut(self.thread_bytes() * self.threads);
        let call = Call::new(self, inputs, OutputRows::new(outputs), Partials::new(self.partials, partials), pass);
        if call.run_few_keys() {
            return;
        }
        let heads_together = call.heads_together();
        let tasks = match heads_together {
            1 => self.tasks(),
            together => self.shape.batch * self.shape.num_kv_heads.div_ceil(together) * self.blocks.chunks,
        };
        schedule::for_each_worker(
            self.threads,
            tasks,
            scratch,
            self.thread_bytes(),
            &|tasks: &mut dyn Iterator<Item = usize>, scratch: &mut [u8]| {
                if heads_together > 1 {
                    return tasks.for_each(|group| call.run_heads(group, scratch));
                }
                let mut scratch = self.scratch.carve(scratch);
                tasks.for_each(|task| call.run_task(task, &mut scratch));
            },
        );
    }

    /// The shape it was made for.
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

impl<A: Accumulator> fmt::Display for AttentionPlan<A> {
    /// One line: the path, the instruction set, the blocks, the threads, the workspace.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Blocks { path, panel_rows, task_rows, kv_block, chunks, .. } = self.blocks;
        let path = if path == Path::Decode { "decode" } else { "prefill" };
        write!(
            f,
            "{path} on {}: {} tasks of {task_rows} rows (panels of {panel_rows}) x blocks of {kv_block} keys \
             ({chunks} chunks of keys), {} threads, {} KiB workspace",
            self.instruction_set.name(),
            self.tasks(),
            self.threads,
            self.workspace_len().div_ceil(1024),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{KV_BLOCK, MAX_ROW_BYTES, MAX_TASK_ROWS, MOST_SPLIT_ROWS};

    #[test]
    fn workspace_len_follows_the_documented_formula() {
        fn check<A: Accumulator>() {
            let sizes = [
                (1, 1, 1, 1),
                (3, 500, 20, 20),
                (40, 40, 65, 65),
                (700, 900, 64, 128),
                (5000, 7, 256, 256),
                (1, 70_000, 64, 70),
                (4, 5000, 128, 128),
                (100, 5000, 64, 64),
            ];
            let sizes = sizes.into_iter().flat_map(|sizes| [1, 3, 11].map(|num_kv_heads| (num_kv_heads, sizes)));
            for (num_kv_heads, (q_len, kv_len, head_dim, value_dim)) in sizes {
                let num_heads = 2 * num_kv_heads;
                let shape = AttentionShape { batch: 1, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim };
                let plan = AttentionPlan::<A>::with_accumulator(&shape, &AttentionConfig::causal()).unwrap();
                let Blocks { path, panel_rows, task_rows: rows, kv_block, chunks, row_blocks, heads_together, .. } =
                    plan.blocks;
                let scores = if path == Path::Decode { rows * (kv_block + 16) } else { panel_rows * kv_block };
                let [k, v] = [head_dim, value_dim].map(|dim| dim.next_multiple_of(16) + 16);
                let padded_dim = head_dim.next_multiple_of(16);
                let q_panels = if path == Path::Decode { head_dim + padded_dim } else { head_dim };
                let arrays =
                    [rows * q_panels, rows * value_dim, rows, rows, panel_rows, scores, kv_block * k, kv_block * v];
                let size = size_of::<A>();
                let bytes: usize = arrays.iter().map(|len| (size * len).next_multiple_of(64)).sum();
                let partials = match chunks {
                    1 => 0,
                    _ => {
                        let chunk = (size * rows * (value_dim + 2)).next_multiple_of(64);
                        let row_blocks = num_kv_heads * row_blocks;
                        row_blocks * chunks * chunk + (row_blocks * 4).next_multiple_of(64)
                    }
                };
                assert_eq!(plan.workspace_len(), plan.threads() * heads_together * bytes + partials, "{shape:?}");
                assert!(bytes <= 2 << 20, "{shape:?}");
                assert!(chunks <= 64 && (chunks == 1 || 2 * q_len <= MOST_SPLIT_ROWS));
                assert!(rows <= MAX_TASK_ROWS && kv_block <= KV_BLOCK);
                assert!(size * rows * (head_dim + value_dim) <= MAX_ROW_BYTES || rows <= panel_rows);
            }
        }
        check::<f32>();
        check::<f64>();
    }
}
