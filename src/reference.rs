//! Textbook attention in f64: the specification that the kernels are tested against. No SIMD, no blocks, no code
//! shared with them; O(kv_len) memory, one row at a time. Slow, and meant to be read.
//!
//! For query `i` of head `h`, with `g = h / group_size` and `visible(i)` the keys that the mask shows to it:
//!
//! ```text
//! score[j]  = softmax_scale * sum_p q[h, i, p] * k[g, j, p]            j in visible(i)
//! weight[j] = exp(score[j] - max score) / sum_j exp(score[j] - max score)
//! out[h, i] = sum_j weight[j] * v[g, j]                                 0 if nothing is visible
//! logsumexp = ln(sum_j exp(score[j]))                                   -inf if nothing is visible
//! ```

use crate::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionShape, CausalAlignment, Element, KvPadding, Mask,
};

/// The result of [`attention`].
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceOutput {
    /// Contiguous `[batch, num_heads, q_len, value_dim]`.
    pub out: Vec<f64>,
    /// Contiguous `[batch, num_heads, q_len]`, natural logarithm.
    pub logsumexp: Vec<f64>,
}

/// All rows.
///
/// # Errors
/// As [`AttentionShape::of`]; the configuration is not checked.
pub fn attention<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
) -> Result<ReferenceOutput, AttentionError> {
    let shape = AttentionShape::of(inputs)?;
    let mut result = ReferenceOutput { out: Vec::new(), logsumexp: Vec::new() };
    for batch in 0..shape.batch {
        for head in 0..shape.num_heads {
            for query in 0..shape.q_len {
                let (out, logsumexp) = attention_row(inputs, config, [batch, head, query])?;
                result.out.extend(out);
                result.logsumexp.push(logsumexp);
            }
        }
    }
    Ok(result)
}

/// One row `[batch, head, query]`: its output and its log-sum-exp.
///
/// # Errors
/// As [`AttentionShape::of`].
///
/// # Panics
/// If the row lies outside the shape.
pub fn attention_row<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    [batch, head, query]: [usize; 3],
) -> Result<(Vec<f64>, f64), AttentionError> {
    let shape = AttentionShape::of(inputs)?;
    let kv_head = head / shape.group_size();
    let q = |p| inputs.q.get([batch, head, query, p]).expect("row inside the shape").to_f64();
    let k = |j, p| inputs.k.get([batch, kv_head, j, p]).expect("key inside the shape").to_f64();
    let v = |j, d| inputs.v.get([batch, kv_head, j, d]).expect("key inside the shape").to_f64();
    let softmax_scale = config.softmax_scale.unwrap_or(1.0 / (shape.head_dim as f64).sqrt());

    // Keys of this sequence, and where they begin.
    let kv_len = inputs.kv_lens.map_or(shape.kv_len, |kv_lens| kv_lens[batch]);
    let first = if config.kv_padding == KvPadding::Left { shape.kv_len - kv_len } else { 0 };
    let visible: Vec<usize> =
        (0..kv_len).filter(|&j| is_visible(config.mask, [shape.q_len, kv_len], query, j)).map(|j| first + j).collect();
    if visible.is_empty() {
        return Ok((vec![0.0; shape.value_dim], f64::NEG_INFINITY));
    }
    let scores: Vec<f64> =
        visible.iter().map(|&j| softmax_scale * (0..shape.head_dim).map(|p| q(p) * k(j, p)).sum::<f64>()).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = exps.iter().sum();
    let mut out = vec![0.0; shape.value_dim];
    for (&j, exp) in visible.iter().zip(&exps) {
        for (d, out) in out.iter_mut().enumerate() {
            *out += exp / sum * v(j, d);
        }
    }
    Ok((out, max + sum.ln()))
}

/// Whether the mask shows key `j` of the sequence to query `i`.
fn is_visible(mask: Mask, [q_len, kv_len]: [usize; 2], i: usize, j: usize) -> bool {
    match mask {
        Mask::Full => true,
        Mask::Causal(CausalAlignment::TopLeft) => j <= i,
        Mask::Causal(CausalAlignment::BottomRight) => j + q_len <= i + kv_len,
    }
}
