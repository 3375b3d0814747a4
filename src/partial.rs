//! Merging attention over disjoint sets of keys: [`PartialAttention`].
//!
//! Attention over some of the keys gives an output `o_i` and a log-sum-exp `l_i` for each row. Over all of them together:
//!
//! ```text
//! m = max_i l_i      w_i = e^(l_i - m)      out = sum_i w_i o_i / sum_i w_i      logsumexp = m + ln(sum_i w_i)
//! ```
//! All of it is computed in f64 and rounded once, and by plain loops: it reads and writes each number once, next to the `kv_len`
//! products for each that made it.

use crate::attention::new_output;
use crate::kernels::lane::Lane;
use crate::tensor::Layout;
use crate::{AttentionError, AttentionOutputs, AttentionShape, Element, TensorView, TensorViewMut};

/// Attention over a part of the keys: what a call with `logsumexp` wrote, to be merged with the results for the other keys.
///
/// Keys may be split in any way and each part computed by any call, as long as every visible key is in exactly one of
/// them: a prefix that many sequences share, the blocks that travel round a ring of machines, a cache in pieces. The scale must
/// be the same in all.
///
/// ```
/// use fused_attention::*;
/// let (heads, q_len, kv_len, dim) = (2, 3, 10, 8);
/// let q: Vec<f32> = (0..heads * q_len * dim).map(|i| (i as f32).sin()).collect();
/// let kv: Vec<f32> = (0..heads * kv_len * dim).map(|i| (i as f32 / 3.0).cos()).collect();
/// let q = TensorView::from_bhsd(&q, [1, heads, q_len, dim])?;
/// let kv = TensorView::from_bhsd(&kv, [1, heads, kv_len, dim])?;
///
/// // Two calls, each over some of the keys.
/// let out_shape = [1, heads, q_len, dim];
/// let mut outs = [(); 2].map(|()| vec![0.0; heads * q_len * dim]);
/// let mut lses = [(); 2].map(|()| vec![0.0; heads * q_len]);
/// for (keys, (out, lse)) in [0..4, 4..kv_len].into_iter().zip(outs.iter_mut().zip(&mut lses)) {
///     let inputs = AttentionInputs::new(q, kv.seq_range(keys.clone())?, kv.seq_range(keys)?);
///     let mut outputs = AttentionOutputs::new(TensorViewMut::from_bhsd(out, out_shape)?).with_logsumexp(lse);
///     attention_into(&inputs, &mut outputs, &AttentionConfig::full())?;
/// }
///
/// let first = PartialAttention::new(TensorView::from_bhsd(&outs[0], out_shape)?, &lses[0])?;
/// let second = PartialAttention::new(TensorView::from_bhsd(&outs[1], out_shape)?, &lses[1])?;
/// let merged = PartialAttention::merge(&[first, second])?.out;
///
/// let whole = attention(&AttentionInputs::new(q, kv, kv), &AttentionConfig::full())?;
/// assert!(merged.iter().zip(&whole).all(|(merged, whole)| (merged - whole).abs() < 1e-6));
/// # Ok::<(), AttentionError>(())
/// ```
///
/// # Semantics, row by row
/// | case | result |
/// |---|---|
/// | `logsumexp` of -inf: no key was visible | weighs nothing; its `out` is not looked at, and may hold anything |
/// | all of them are | zeros, `logsumexp` of -inf |
/// | all but one are | that one, to the bit (but a -0 becomes 0) |
/// | a `logsumexp` of NaN or +inf | the whole row is NaN, with its `logsumexp` |
/// | NaN or infinity in an `out` | stays in that element: NaN, or NaN or infinity |
///
/// The order and the grouping in which results are merged change the result by roundings only, and not at all what is NaN
/// (unless weights underflow to 0).
///
/// # Precision
/// A merge of any number of results rounds the output once. What is lost is lost in its inputs: an `out` of 16 bits has been
/// rounded to that type, so let Q (to which the type of `out` belongs) be f32 where results are merged over and over (K and V may stay
/// of 16 bits); and a `logsumexp` of size `l` in f32 is off by up to `l * 2^-24`, which is a relative error of the weights.
#[derive(Debug, Clone, Copy)]
pub struct PartialAttention<'a, T: Element> {
    out: TensorView<'a, T>,
    /// `[batch, heads, q_len, 1]`
    logsumexp: TensorView<'a, T::Acc>,
}

/// The result of [`PartialAttention::merge`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MergedAttention<A> {
    /// Contiguous `[batch, num_heads, q_len, value_dim]`.
    pub out: Vec<A>,
    /// Contiguous `[batch, num_heads, q_len]`, natural logarithm.
    pub logsumexp: Vec<A>,
}

impl<'a, T: Element> PartialAttention<'a, T> {
    /// An output `[batch, num_heads, q_len, value_dim]` and its `logsumexp`, contiguous `[batch, num_heads, q_len]`.
    ///
    /// # Errors
    /// [`AttentionError::LogsumexpLenMismatch`]; [`AttentionError::SizeOverflow`] where there is no row, but the number of heads and queries exceeds `usize`.
    pub fn new(out: TensorView<'a, T>, logsumexp: &'a [T::Acc]) -> Result<Self, AttentionError> {
        let [batch, num_heads, q_len, _] = out.shape();
        let expected = batch.saturating_mul(num_heads).saturating_mul(q_len);
        if logsumexp.len() != expected {
            return Err(AttentionError::LogsumexpLenMismatch { expected, found: logsumexp.len() });
        }
        let logsumexp = TensorView::from_bhsd(logsumexp, [batch, num_heads, q_len, 1])?;
        Ok(Self { out, logsumexp })
    }

    /// The same with a `logsumexp` of any strides, as a tensor `[batch, num_heads, q_len, 1]`.
    ///
    /// Where sequences share a prefix, one call computes the queries of all of them against it, as one long sequence; its results are
    /// then seen as a batch:
    ///
    /// ```
    /// use fused_attention::*;
    /// let (batch, heads, dim, prefix_len, own_len) = (3, 2, 4, 6, 5);
    /// // One new query for each sequence, `[batch, heads, 1, dim]`. As one sequence: its positions are `heads * dim` apart.
    /// let q: Vec<f32> = (0..batch * heads * dim).map(|i| (i as f32).sin()).collect();
    /// let queries = TensorView::from_bhsd(&q, [batch, heads, 1, dim])?;
    /// let as_one = TensorView::with_strides(&q, [1, heads, batch, dim], [0, dim, heads * dim, 1])?;
    /// let prefix: Vec<f32> = (0..heads * prefix_len * dim).map(|i| (i as f32).cos()).collect();
    /// let prefix = TensorView::from_bhsd(&prefix, [1, heads, prefix_len, dim])?;
    /// let own: Vec<f32> = (0..batch * heads * own_len * dim).map(|i| (i as f32 / 7.0).cos()).collect();
    /// let own = TensorView::from_bhsd(&own, [batch, heads, own_len, dim])?;
    ///
    /// // The prefix is read once for all sequences.
    /// let (mut prefix_out, mut prefix_lse) = (vec![0.0; q.len()], vec![0.0; heads * batch]);
    /// let view = TensorViewMut::from_bhsd(&mut prefix_out, [1, heads, batch, dim])?;
    /// let mut outputs = AttentionOutputs::new(view).with_logsumexp(&mut prefix_lse);
    /// attention_into(&AttentionInputs::new(as_one, prefix, prefix), &mut outputs, &AttentionConfig::full())?;
    ///
    /// let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; batch * heads]);
    /// let view = TensorViewMut::from_bhsd(&mut out, [batch, heads, 1, dim])?;
    /// let mut outputs = AttentionOutputs::new(view).with_logsumexp(&mut lse);
    /// attention_into(&AttentionInputs::new(queries, own, own), &mut outputs, &AttentionConfig::causal())?;
    ///
    /// // Both are `[heads, batch, ..]` in memory.
    /// PartialAttention::with_logsumexp_view(
    ///     TensorView::with_strides(&prefix_out, [batch, heads, 1, dim], [dim, batch * dim, 0, 1])?,
    ///     TensorView::with_strides(&prefix_lse, [batch, heads, 1, 1], [1, batch, 0, 0])?,
    /// )?
    /// .add_to(&mut outputs)?;
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// [`AttentionError::PartialShapeMismatch`].
    pub fn with_logsumexp_view(
        out: TensorView<'a, T>,
        logsumexp: TensorView<'a, T::Acc>,
    ) -> Result<Self, AttentionError> {
        let [batch, num_heads, q_len, _] = out.shape();
        let (expected, found) = ([batch, num_heads, q_len, 1], logsumexp.shape());
        if found != expected {
            return Err(AttentionError::PartialShapeMismatch { tensor: "logsumexp", index: 0, expected, found });
        }
        Ok(Self { out, logsumexp })
    }

    /// The merged output and `logsumexp`, in the type of the accumulator.
    ///
    /// # Errors
    /// [`AttentionError::NoPartials`], [`AttentionError::PartialShapeMismatch`], [`AttentionError::AllocationFailed`];
    /// [`AttentionError::SizeOverflow`] and [`AttentionError::PlanOverflow`] where there is no element, but other sizes together exceed `usize`.
    pub fn merge(partials: &[Self]) -> Result<MergedAttention<T::Acc>, AttentionError> {
        let Some(first) = partials.first() else {
            return Err(AttentionError::NoPartials);
        };
        let [batch, num_heads, q_len, value_dim] = first.out.shape();
        let shape =
            AttentionShape { batch, num_heads, num_kv_heads: num_heads, q_len, kv_len: 0, head_dim: 1, value_dim };
        let mut out = new_output::<T::Acc>(&shape)?;
        let mut logsumexp = new_output::<T::Acc>(&AttentionShape { value_dim: 1, ..shape })?;
        let view = TensorViewMut::from_bhsd(&mut out, first.out.shape())?;
        Self::merge_into(partials, &mut AttentionOutputs::new(view).with_logsumexp(&mut logsumexp))?;
        Ok(MergedAttention { out, logsumexp })
    }

    /// The same into memory of the caller, of any element type with the same accumulator. No partial results at all are
    /// merged to rows that see no key. Allocates nothing.
    ///
    /// # Errors
    /// [`AttentionError::PartialShapeMismatch`], [`AttentionError::LogsumexpLenMismatch`]; nothing is written then.
    pub fn merge_into<U: Element<Acc = T::Acc>>(
        partials: &[Self],
        outputs: &mut AttentionOutputs<'_, U>,
    ) -> Result<(), AttentionError> {
        check(partials, outputs)?;
        merge_rows(partials, outputs, false);
        Ok(())
    }

    /// Merges this result into one that is already in `outputs`, which begins as one that saw no key: with a `logsumexp` of -inf
    /// everywhere, whatever `out` holds. For results that come in one after another. Allocates nothing.
    ///
    /// ```
    /// use fused_attention::*;
    /// let (mut out, mut logsumexp) = ([f32::NAN; 2], [f32::NEG_INFINITY]);
    /// let mut sum = AttentionOutputs::new(TensorViewMut::from_bhsd(&mut out, [1, 1, 1, 2])?).with_logsumexp(&mut logsumexp);
    /// // Twice the same weight: the mean.
    /// for (out, logsumexp) in [([1.0f32, 4.0], 0.5), ([3.0, 8.0], 0.5)] {
    ///     PartialAttention::new(TensorView::from_bhsd(&out, [1, 1, 1, 2])?, &[logsumexp])?.add_to(&mut sum)?;
    /// }
    /// assert_eq!(out, [2.0, 6.0]);
    /// assert_eq!(logsumexp, [0.5 + 2f32.ln()]);
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// [`AttentionError::MissingLogsumexp`] where `outputs` has none, and as [`merge_into`](Self::merge_into); nothing is
    /// written then.
    pub fn add_to<U: Element<Acc = T::Acc>>(
        &self,
        outputs: &mut AttentionOutputs<'_, U>,
    ) -> Result<(), AttentionError> {
        if outputs.logsumexp.is_none() {
            return Err(AttentionError::MissingLogsumexp { shape: outputs.out.shape() });
        }
        let partials = std::slice::from_ref(self);
        check(partials, outputs)?;
        merge_rows(partials, outputs, true);
        Ok(())
    }

    /// Log-sum-exp of a row, `None` where it saw no key.
    fn weight(&self, row: [usize; 3]) -> Option<f64> {
        let offset = self.logsumexp.layout().offset(row);
        Some(self.logsumexp.data()[offset].to_f64()).filter(|&weight| weight != f64::NEG_INFINITY)
    }
}

fn check<T: Element, U: Element<Acc = T::Acc>>(
    partials: &[PartialAttention<'_, T>],
    outputs: &AttentionOutputs<'_, U>,
) -> Result<(), AttentionError> {
    let expected = outputs.out.shape();
    if let Some(logsumexp) = &outputs.logsumexp {
        let [batch, num_heads, q_len, _] = expected;
        let (expected, found) = (batch.saturating_mul(num_heads).saturating_mul(q_len), logsumexp.len());
        if found != expected {
            return Err(AttentionError::LogsumexpLenMismatch { expected, found });
        }
    }
    match partials.iter().map(|partial| partial.out.shape()).enumerate().find(|&(_, found)| found != expected) {
        Some((index, found)) => Err(AttentionError::PartialShapeMismatch { tensor: "out", index, expected, found }),
        None => Ok(()),
    }
}

/// Features of a row that are summed at a time, on the stack: 1 KiB.
const FEATURES: usize = 128;

/// All rows. Where it `adds`, what the outputs hold is one of the partial results.
fn merge_rows<T: Element, U: Element<Acc = T::Acc>>(
    partials: &[PartialAttention<'_, T>],
    outputs: &mut AttentionOutputs<'_, U>,
    adds: bool,
) {
    let layout = outputs.out.layout();
    let [batch, num_heads, q_len, value_dim] = layout.shape;
    // Then nothing bounds the sizes of the other axes: loops over them might not end.
    if [batch, num_heads, q_len].contains(&0) || (value_dim == 0 && outputs.logsumexp.is_none()) {
        return;
    }
    let mut logsumexp = outputs.logsumexp.as_deref_mut();
    let out = outputs.out.data_mut();
    for batch in 0..batch {
        for head in 0..num_heads {
            for query in 0..q_len {
                let row = [batch, head, query];
                let index = (batch * num_heads + head) * q_len + query;
                let mine = match (adds, &logsumexp) {
                    (true, Some(logsumexp)) => Some(logsumexp[index].to_f64()).filter(|&x| x != f64::NEG_INFINITY),
                    _ => None,
                };
                let weights = Weights::new(mine.into_iter().chain(partials.iter().filter_map(|p| p.weight(row))));
                merge_row(partials, (&mut *out, layout), row, mine, &weights);
                if let Some(logsumexp) = &mut logsumexp {
                    logsumexp[index] = T::Acc::from_f64(weights.logsumexp());
                }
            }
        }
    }
}

fn merge_row<T: Element, U: Element<Acc = T::Acc>>(
    partials: &[PartialAttention<'_, T>],
    (out, layout): (&mut [U], Layout),
    row: [usize; 3],
    mine: Option<f64>,
    weights: &Weights,
) {
    let (value_dim, stride) = (layout.shape[3], layout.strides[3]);
    for first in (0..value_dim).step_by(FEATURES) {
        let features = FEATURES.min(value_dim - first);
        let mut sums = [0.0; FEATURES];
        let sums = &mut sums[..features];
        let offset = layout.offset(row) + first * stride;
        if let Some(mine) = mine {
            add_weighted(sums, &out[offset..], stride, weights.of(mine));
        }
        for partial in partials {
            if let Some(weight) = partial.weight(row) {
                let from = partial.out.layout();
                let values = &partial.out.data()[from.offset(row) + first * from.strides[3]..];
                add_weighted(sums, values, from.strides[3], weights.of(weight));
            }
        }
        let rounded = sums.iter().map(|&sum| U::from_acc(T::Acc::from_f64(sum)));
        if stride == 1 {
            out[offset..][..features].iter_mut().zip(rounded).for_each(|(out, sum)| *out = sum);
        } else {
            rounded.enumerate().for_each(|(d, sum)| out[offset + d * stride] = sum);
        }
    }
}

fn add_weighted<T: Element>(sums: &mut [f64], values: &[T], stride: usize, weight: f64) {
    if stride == 1 {
        // A loop of its own, over slices of one length: it is vectorised.
        for (sum, &value) in sums.iter_mut().zip(values) {
            *sum += weight * Element::to_f64(value.to_acc());
        }
    } else {
        for (d, sum) in sums.iter_mut().enumerate() {
            *sum += weight * Element::to_f64(values[d * stride].to_acc());
        }
    }
}

/// How much each of several log-sum-exps weighs.
struct Weights {
    /// 0 where there is none larger than -inf.
    max: f64,
    /// Of e^(log-sum-exp - max); 0 where there is none.
    sum: f64,
}

impl Weights {
    fn new(logsumexps: impl Iterator<Item = f64> + Clone) -> Self {
        // NaN is never the larger one: it shows in the sum.
        let max = logsumexps.clone().fold(f64::NEG_INFINITY, |max, x| if x > max { x } else { max });
        let max = if max > f64::NEG_INFINITY { max } else { 0.0 };
        Self { max, sum: logsumexps.map(|x| (x - max).exp()).sum() }
    }

    fn of(&self, logsumexp: f64) -> f64 {
        (logsumexp - self.max).exp() / self.sum
    }

    fn logsumexp(&self) -> f64 {
        if self.sum == 0.0 { f64::NEG_INFINITY } else { self.max + self.sum.ln() }
    }
}
