//! The entry points: validate, plan, run.

use std::cell::RefCell;

use crate::kernels::lane::Lane;
use crate::{
    AttentionConfig, AttentionError, AttentionPlan, AttentionShape, Element, TensorView, TensorViewMut, Workspace,
};

/// What attention reads. Q has element type `T`, K and V have `K`; both accumulate in the same type.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AttentionInputs<'a, T, K = T> {
    /// Queries `[batch, num_heads, q_len, head_dim]`.
    pub q: TensorView<'a, T>,
    /// Keys `[batch, num_kv_heads, kv_len, head_dim]`.
    pub k: TensorView<'a, K>,
    /// Values `[batch, num_kv_heads, kv_len, value_dim]`. May be a view into the memory of `k`.
    pub v: TensorView<'a, K>,
    /// Keys of each sequence of the batch, where they are fewer than `kv_len`. `None`: all have `kv_len`.
    pub kv_lens: Option<&'a [usize]>,
}

/// What attention writes.
#[derive(Debug)]
#[non_exhaustive]
pub struct AttentionOutputs<'a, T: Element> {
    /// `[batch, num_heads, q_len, value_dim]`.
    pub out: TensorViewMut<'a, T>,
    /// Natural logarithm of each row's sum of exponentials, contiguous `[batch, num_heads, q_len]`; negative infinity
    /// for a row that sees no key.
    pub logsumexp: Option<&'a mut [T::Acc]>,
}

impl<'a, T, K> AttentionInputs<'a, T, K> {
    /// Queries, keys and values.
    pub fn new(q: TensorView<'a, T>, k: TensorView<'a, K>, v: TensorView<'a, K>) -> Self {
        Self { q, k, v, kv_lens: None }
    }

    /// Gives each sequence of the batch its own number of keys, at most `kv_len` (FlashAttention's `cache_seqlens`). What
    /// lies beyond is padding: it is never looked at, and may hold anything. On which side it lies says
    /// [`AttentionConfig::kv_padding`]; a causal mask ends with each sequence's own last key.
    ///
    /// ```
    /// use fused_attention::*;
    /// // A cache with room for 4 keys; the two sequences have 3 and 1 so far.
    /// let (q, k) = (vec![0.5f32; 2 * 8], vec![0.25f32; 2 * 4 * 8]);
    /// let v: Vec<f32> = (0..2 * 4 * 8).map(|i| (i / 8) as f32).collect(); // the values of key j are all j
    /// let (k, v) = (TensorView::from_bhsd(&k, [2, 1, 4, 8])?, TensorView::from_bhsd(&v, [2, 1, 4, 8])?);
    /// let inputs = AttentionInputs::new(TensorView::from_bhsd(&q, [2, 1, 1, 8])?, k, v).with_kv_lens(&[3, 1]);
    /// let out = attention(&inputs, &AttentionConfig::causal())?;
    /// assert_eq!([out[0], out[8]], [1.0, 4.0]); // the mean of 0, 1, 2; and key 4 alone
    /// # Ok::<(), AttentionError>(())
    /// ```
    pub fn with_kv_lens(mut self, kv_lens: &'a [usize]) -> Self {
        self.kv_lens = Some(kv_lens);
        self
    }
}

impl<'a, T: Element> AttentionOutputs<'a, T> {
    /// The output alone.
    pub fn new(out: TensorViewMut<'a, T>) -> Self {
        Self { out, logsumexp: None }
    }

    /// Also writes each row's log-sum-exp, contiguous `[batch, num_heads, q_len]`.
    pub fn with_logsumexp(mut self, logsumexp: &'a mut [T::Acc]) -> Self {
        self.logsumexp = Some(logsumexp);
        self
    }
}

/// Computes attention into a new contiguous `[batch, num_heads, q_len, value_dim]`.
///
/// ```
/// use fused_attention::{AttentionConfig, AttentionInputs, TensorView, attention};
/// let (batch, heads, seq, dim) = (1, 2, 3, 4);
/// let x: Vec<f32> = (0..batch * heads * seq * dim).map(|i| (i as f32).sin()).collect();
/// let view = TensorView::from_bhsd(&x, [batch, heads, seq, dim])?;
/// let out = attention(&AttentionInputs::new(view, view, view), &AttentionConfig::causal())?;
/// // The first query of a head sees the first key alone, so its output is that key's value.
/// assert_eq!(out[..dim], x[..dim]);
/// # Ok::<(), fused_attention::AttentionError>(())
/// ```
///
/// # Errors
/// See [`AttentionError`]; each names the numbers that disagree.
pub fn attention<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
) -> Result<Vec<T>, AttentionError> {
    let plan = AttentionPlan::<T::Acc>::with_accumulator(&AttentionShape::of(inputs)?, config)?;
    let AttentionShape { batch, num_heads, q_len, value_dim, .. } = *plan.shape();
    let mut out = new_output(plan.shape())?;
    let view = TensorViewMut::from_bhsd(&mut out, [batch, num_heads, q_len, value_dim])?;
    with_thread_workspace(plan.workspace_len(), |workspace| {
        plan.run(inputs, &mut AttentionOutputs::new(view), workspace)
    })?;
    Ok(out)
}

/// Zeros for the output of a call of this shape.
pub(crate) fn new_output<T: Element>(shape: &AttentionShape) -> Result<Vec<T>, AttentionError> {
    let AttentionShape { batch, num_heads, q_len, value_dim, .. } = *shape;
    let overflow = AttentionError::PlanOverflow { shape: *shape };
    let sizes = [batch, num_heads, q_len, value_dim];
    let len = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size)).ok_or(overflow.clone())?;
    let bytes = len.checked_mul(size_of::<T>()).ok_or(overflow)?;
    let mut out = Vec::new();
    out.try_reserve_exact(len).map_err(|_| AttentionError::AllocationFailed { bytes })?;
    out.resize(len, T::from_acc(T::Acc::ZERO));
    Ok(out)
}

thread_local! {
    /// Scratch of this thread's calls, so that a call in a loop neither allocates nor faults pages.
    static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace::new());
}

/// Computes attention into memory of the caller.
///
/// Scratch memory is kept by the calling thread as long as it lives and reused by its next call: at most 2 MiB for each
/// thread of the pool while `head_dim + value_dim <= 512`, see [`AttentionPlan::workspace_len`]. To own it, use
/// [`AttentionPlan::run`].
///
/// ```
/// use fused_attention::*;
/// let x = vec![0.5f32; 2 * 3 * 4];
/// let view = TensorView::from_bhsd(&x, [1, 2, 3, 4])?;
/// let (mut out, mut lse) = (vec![0.0; 2 * 3 * 4], vec![0.0; 2 * 3]);
/// let out_view = TensorViewMut::from_bhsd(&mut out, [1, 2, 3, 4])?;
/// let mut outputs = AttentionOutputs::new(out_view).with_logsumexp(&mut lse);
/// attention_into(&AttentionInputs::new(view, view, view), &mut outputs, &AttentionConfig::full())?;
/// // Every score is 4 * 0.25 / sqrt(4) = 0.5, three keys are visible: ln(3 e^0.5).
/// assert!((lse[0] - (3f32.ln() + 0.5)).abs() < 1e-6);
/// # Ok::<(), AttentionError>(())
/// ```
///
/// # Errors
/// See [`AttentionError`]; nothing is written then.
pub fn attention_into<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    outputs: &mut AttentionOutputs<'_, T>,
    config: &AttentionConfig,
) -> Result<(), AttentionError> {
    let plan = AttentionPlan::<T::Acc>::with_accumulator(&AttentionShape::of(inputs)?, config)?;
    plan.shape().check_outputs(outputs)?;
    with_thread_workspace(plan.workspace_len(), |workspace| plan.run(inputs, outputs, workspace))
}

/// Runs with at least so many bytes of this thread's scratch.
pub(crate) fn with_thread_workspace(
    len: usize,
    run: impl FnOnce(&mut Workspace) -> Result<(), AttentionError>,
) -> Result<(), AttentionError> {
    // Taken out, not borrowed: while this call waits for its pool, the thread may run another one.
    let mut workspace = WORKSPACE.take();
    let result = workspace.reserve_len(len).and_then(|()| run(&mut workspace));
    WORKSPACE.set(workspace);
    result
}
