//! The rules that tie the tensors of a call together.

use crate::{AttentionError, AttentionInputs, AttentionOutputs, Element, TensorView};

/// The sizes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Queries per sequence.
    pub q_len: usize,
    /// Keys per sequence.
    pub kv_len: usize,
    /// Features of Q and K, at least 1.
    pub head_dim: usize,
    /// Features of V and the output.
    pub value_dim: usize,
}

impl AttentionShape {
    /// The sizes of these inputs.
    ///
    /// # Errors
    /// One of the `*Mismatch` variants, [`AttentionError::HeadsNotDivisible`], [`AttentionError::ZeroHeadDim`],
    /// [`AttentionError::KvLenTooLong`].
    pub fn of<T: Element, K: Element<Acc = T::Acc>>(
        inputs: &AttentionInputs<'_, T, K>,
    ) -> Result<Self, AttentionError> {
        let [batch, num_heads, q_len, head_dim] = inputs.q.shape();
        let [k_batch, num_kv_heads, kv_len, k_head_dim] = inputs.k.shape();
        let [v_batch, v_heads, v_kv_len, value_dim] = inputs.v.shape();
        for (tensor, found) in [("k", k_batch), ("v", v_batch)] {
            if found != batch {
                return Err(AttentionError::BatchMismatch { tensor, expected: batch, found });
            }
        }
        if v_heads != num_kv_heads {
            return Err(AttentionError::NumKvHeadsMismatch { k: num_kv_heads, v: v_heads });
        }
        if k_head_dim != head_dim {
            return Err(AttentionError::HeadDimMismatch { q: head_dim, k: k_head_dim });
        }
        if v_kv_len != kv_len {
            return Err(AttentionError::KvLenMismatch { k: kv_len, v: v_kv_len });
        }
        let shape = Self { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim };
        shape.check()?;
        if let Some(kv_lens) = inputs.kv_lens {
            if kv_lens.len() != batch {
                return Err(AttentionError::KvLensLenMismatch { expected: batch, found: kv_lens.len() });
            }
            if let Some((index, &found)) = kv_lens.iter().enumerate().find(|&(_, &len)| len > kv_len) {
                return Err(AttentionError::KvLenTooLong { index, found, kv_len });
            }
        }
        let scores = [batch, num_heads, q_len, kv_len];
        let operands =
            [("mask", inputs.mask.map(|mask| mask.shape())), ("bias", inputs.bias.as_ref().map(TensorView::shape))];
        for (operand, found) in operands {
            let Some(found) = found else { continue };
            if found.iter().zip(scores).any(|(&found, expected)| found != expected && found != 1) {
                return Err(AttentionError::ScoreShapeMismatch { operand, expected: scores, found });
            }
        }
        for (operand, numbers) in [("alibi_slopes", inputs.alibi_slopes), ("sinks", inputs.sinks)] {
            if let Some(numbers) = numbers
                && numbers.len() != num_heads
            {
                let (expected, found) = (num_heads, numbers.len());
                return Err(AttentionError::HeadNumbersMismatch { operand, expected, found });
            }
        }
        Ok(shape)
    }

    /// The rules within a shape.
    pub(crate) fn check(&self) -> Result<(), AttentionError> {
        let Self { num_heads, num_kv_heads, .. } = *self;
        if num_heads != 0 && (num_kv_heads == 0 || num_heads % num_kv_heads != 0) {
            return Err(AttentionError::HeadsNotDivisible { num_heads, num_kv_heads });
        }
        if self.head_dim == 0 {
            return Err(AttentionError::ZeroHeadDim { shape: [self.batch, num_heads, self.q_len, 0] });
        }
        Ok(())
    }

    /// The rules between a shape and the outputs.
    pub(crate) fn check_outputs<T: Element>(&self, outputs: &AttentionOutputs<'_, T>) -> Result<(), AttentionError> {
        let [batch, num_heads, q_len, value_dim] = outputs.out.shape();
        if batch != self.batch {
            return Err(AttentionError::BatchMismatch { tensor: "out", expected: self.batch, found: batch });
        }
        if num_heads != self.num_heads {
            return Err(AttentionError::NumHeadsMismatch { q: self.num_heads, out: num_heads });
        }
        if q_len != self.q_len {
            return Err(AttentionError::QLenMismatch { q: self.q_len, out: q_len });
        }
        if value_dim != self.value_dim {
            return Err(AttentionError::ValueDimMismatch { v: self.value_dim, out: value_dim });
        }
        if let Some(logsumexp) = &outputs.logsumexp {
            let expected = batch.saturating_mul(num_heads).saturating_mul(q_len);
            if logsumexp.len() != expected {
                return Err(AttentionError::LogsumexpLenMismatch { expected, found: logsumexp.len() });
            }
        }
        Ok(())
    }

    /// Query heads that share one KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads.checked_div(self.num_kv_heads).unwrap_or(0)
    }
}
