//! The entry points: validate, plan, run.

use std::cell::RefCell;

use crate::kernels::lane::Lane;
use crate::{
    AttentionConfig, AttentionError, AttentionPlan, AttentionShape, Element, ScoreModifier, TensorView, TensorViewMut,
    Workspace,
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
    /// Which scores count, `[batch, num_heads, q_len, kv_len]`, true for those that do. See [`with_mask`](Self::with_mask).
    pub mask: Option<TensorView<'a, bool>>,
    /// Added to the scores, `[batch, num_heads, q_len, kv_len]`. See [`with_bias`](Self::with_bias).
    pub bias: Option<TensorView<'a, T>>,
    /// A slope for each query head. See [`with_alibi_slopes`](Self::with_alibi_slopes).
    pub alibi_slopes: Option<&'a [f32]>,
    /// A score for each query head that has no value. See [`with_sinks`](Self::with_sinks).
    pub sinks: Option<&'a [f32]>,
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
        Self { q, k, v, kv_lens: None, mask: None, bias: None, alibi_slopes: None, sinks: None }
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

    /// Hides every key of which the mask says false, besides those that the config hides: **true = may attend**. `[batch, num_heads,
    /// q_len, kv_len]`; along an axis of size 1 (or of stride 0) it is broadcast, without being copied. Blocks of keys that are false for
    /// a few dozen queries together are skipped.
    ///
    /// Keys are counted from the start of the tensor, padding included.
    ///
    /// ```text
    /// key padding [1, 1, 1, kv_len]      documents packed into one sequence, with a causal config
    /// x x . x                            x . . . .
    /// x x . x                            x x . . .
    /// x x . x                            . . x . .
    /// x x . x                            . . x x .
    ///                                    . . x x x
    /// ```
    ///
    /// ```
    /// use fused_attention::*;
    /// let (q, v) = ([0.0f32; 4], [12.0f32, 24.0, 36.0, 48.0]);
    /// let (q, v) = (TensorView::from_bhsd(&q, [1, 1, 4, 1])?, TensorView::from_bhsd(&v, [1, 1, 4, 1])?);
    /// let padding = [true, true, false, true];
    /// let inputs = AttentionInputs::new(q, q, v).with_mask(TensorView::from_bhsd(&padding, [1, 1, 1, 4])?);
    /// let out = attention(&inputs, &AttentionConfig::causal())?;
    /// assert!([12.0, 18.0, 18.0, 28.0].iter().zip(out).all(|(mean, out)| (mean - out).abs() < 1e-5));
    ///
    /// let document = [0, 0, 1, 1];
    /// let same: Vec<bool> = (0..16).map(|i| document[i / 4] == document[i % 4]).collect();
    /// let inputs = AttentionInputs::new(q, q, v).with_mask(TensorView::from_bhsd(&same, [1, 1, 4, 4])?);
    /// let out = attention(&inputs, &AttentionConfig::causal())?;
    /// assert!([12.0, 18.0, 36.0, 42.0].iter().zip(out).all(|(mean, out)| (mean - out).abs() < 1e-5));
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// A row that sees no key gives zeros and a `logsumexp` of negative infinity (but see [`with_sinks`](Self::with_sinks)).
    ///
    /// # Errors
    /// Of the call: [`AttentionError::ScoreShapeMismatch`].
    pub fn with_mask(mut self, mask: TensorView<'a, bool>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Adds this to the scaled scores (after softcap): `[batch, num_heads, q_len, kv_len]`, broadcast like a [mask](Self::with_mask), of
    /// Q's element type. Negative infinity hides a key as a mask does, whatever its score; finite numbers of any
    /// size are added as they are, so that a row whose biases are all `f32::MIN` is the mean of its values; NaN makes the row NaN.
    ///
    /// ```
    /// use fused_attention::*;
    /// let (q, v) = ([0.0f32; 2], [1.0f32, 5.0]);
    /// let (q, v) = (TensorView::from_bhsd(&q, [1, 1, 2, 1])?, TensorView::from_bhsd(&v, [1, 1, 2, 1])?);
    /// let bias = [f32::NEG_INFINITY, 0.0, 3f32.ln(), 0.0];
    /// let inputs = AttentionInputs::new(q, q, v).with_bias(TensorView::from_bhsd(&bias, [1, 1, 2, 2])?);
    /// let out = attention(&inputs, &AttentionConfig::full())?;
    /// assert!((out[0] - 5.0).abs() < 1e-6); // the second key alone
    /// assert!((out[1] - 2.0).abs() < 1e-6); // weights 3/4 and 1/4
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// Of the call: [`AttentionError::ScoreShapeMismatch`].
    pub fn with_bias(mut self, bias: TensorView<'a, T>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// ALiBi: subtracts `slope[head] * |position - key|` from the scores (after softcap), where the position of query `i` is `i + kv_len -
    /// q_len`, or what the [`CausalAlignment`](crate::CausalAlignment) of a causal mask says, as FlashAttention does. One slope for each
    /// query head; [`alibi_slopes`](crate::alibi_slopes) computes the standard ones.
    ///
    /// ```
    /// use fused_attention::*;
    /// let (q, v) = ([0.0f32; 2], [1.0f32, 5.0]);
    /// let (q, v) = (TensorView::from_bhsd(&q, [1, 1, 2, 1])?, TensorView::from_bhsd(&v, [1, 1, 2, 1])?);
    /// let slopes = [3f32.ln()];
    /// let out = attention(&AttentionInputs::new(q, q, v).with_alibi_slopes(&slopes), &AttentionConfig::causal())?;
    /// assert!((out[1] - 4.0).abs() < 1e-6); // the key before weighs a third of its own: 1/4 and 3/4
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// Of the call: [`AttentionError::HeadNumbersMismatch`].
    pub fn with_alibi_slopes(mut self, slopes: &'a [f32]) -> Self {
        self.alibi_slopes = Some(slopes);
        self
    }

    /// Attention sinks (gpt-oss): one more score for each query head, which takes part in the softmax but has no value,
    /// `weight[j] = exp(s[j]) / (exp(sink) + sum_k exp(s[k]))`. Nothing else applies to it: no scale, softcap, bias or mask. Negative infinity is no sink.
    ///
    /// `logsumexp` includes it, so that it stays the logarithm of what the output was divided by: `out = sum_j exp(s[j] - logsumexp) v[j]`,
    /// as in FlashAttention, and as the backward pass wants it. So to merge the results of parts of the keys, give the sink to one
    /// part alone. A row that sees no key gives zeros still, and the sink itself as `logsumexp`.
    ///
    /// ```
    /// use fused_attention::*;
    /// let (q, v) = ([0.0f32; 1], [6.0f32]);
    /// let (q, v) = (TensorView::from_bhsd(&q, [1, 1, 1, 1])?, TensorView::from_bhsd(&v, [1, 1, 1, 1])?);
    /// let sinks = [2f32.ln()];
    /// let out = attention(&AttentionInputs::new(q, q, v).with_sinks(&sinks), &AttentionConfig::causal())?;
    /// assert!((out[0] - 2.0).abs() < 1e-6); // 6 * 1 / (1 + 2)
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// Of the call: [`AttentionError::HeadNumbersMismatch`].
    pub fn with_sinks(mut self, sinks: &'a [f32]) -> Self {
        self.sinks = Some(sinks);
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
    allocate_and_run(inputs, config, |plan, outputs, workspace| plan.run(inputs, outputs, workspace))
}

/// As [`attention()`], with a function of your own applied to each score. See [`ScoreModifier`].
///
/// # Errors
/// See [`AttentionError`]; each names the numbers that disagree.
pub fn attention_with_modifier<T: Element, K: Element<Acc = T::Acc>, M: ScoreModifier>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    modifier: &M,
) -> Result<Vec<T>, AttentionError> {
    allocate_and_run(inputs, config, |plan, outputs, workspace| {
        plan.run_with_modifier(inputs, outputs, workspace, modifier)
    })
}

fn allocate_and_run<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    run: impl FnOnce(&AttentionPlan<T::Acc>, &mut AttentionOutputs<'_, T>, &mut Workspace) -> Result<(), AttentionError>,
) -> Result<Vec<T>, AttentionError> {
    let plan = AttentionPlan::<T::Acc>::with_accumulator(&AttentionShape::of(inputs)?, config)?;
    let AttentionShape { batch, num_heads, q_len, value_dim, .. } = *plan.shape();
    let mut out = new_output(plan.shape())?;
    let view = TensorViewMut::from_bhsd(&mut out, [batch, num_heads, q_len, value_dim])?;
    with_thread_workspace(plan.workspace_len(), |workspace| run(&plan, &mut AttentionOutputs::new(view), workspace))?;
    Ok(out)
}

/// Zeros for the output of a call of this shape.
pub(crate) fn new_output<T: Element>(shape: &AttentionShape) -> Result<Vec<T>, AttentionError> {
    let AttentionShape { batch, num_heads, q_len, value_dim, .. } = *shape;
    zeros([batch, num_heads, q_len, value_dim], shape)
}

/// Zeros for a tensor of these sizes that a call of this shape gives.
pub(crate) fn zeros<T: Element>(sizes: [usize; 4], shape: &AttentionShape) -> Result<Vec<T>, AttentionError> {
    let overflow = AttentionError::PlanOverflow { shape: *shape };
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
    with_thread_workspace(plan.workspace_len(), |workspace| {
        plan.run_own(inputs, outputs, workspace);
        Ok(())
    })
}

/// As [`attention_into`], with a function of your own applied to each score. See [`ScoreModifier`].
///
/// # Errors
/// See [`AttentionError`]; nothing is written then.
pub fn attention_into_with_modifier<T: Element, K: Element<Acc = T::Acc>, M: ScoreModifier>(
    inputs: &AttentionInputs<'_, T, K>,
    outputs: &mut AttentionOutputs<'_, T>,
    config: &AttentionConfig,
    modifier: &M,
) -> Result<(), AttentionError> {
    let plan = AttentionPlan::<T::Acc>::with_accumulator(&AttentionShape::of(inputs)?, config)?;
    plan.shape().check_outputs(outputs)?;
    with_thread_workspace(plan.workspace_len(), |workspace| {
        plan.run_with_modifier(inputs, outputs, workspace, modifier)
    })
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
