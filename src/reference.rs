//! Textbook attention in f64: the specification that the kernels are tested against. No SIMD, no blocks, no code
//! shared with them; O(kv_len) memory, one row at a time. Slow, and meant to be read.
//!
//! For query `i` of head `h`, with `g = h / group_size`, `visible(i)` the keys that config, mask and bias show to it and
//! `position(i)` where it stands among them:
//!
//! ```text
//! capped[j] = cap(softmax_scale * sum_p q[h, i, p] * k[g, j, p])        j in visible(i); cap(s) = softcap * tanh(s / softcap)
//! score[j]  = capped[j] - slope[h] * |position(i) - j| + bias[h, i, j]
//! weight[j] = exp(score[j] - max score) / sum                           sum = sum_j exp(score[j] - max score) + exp(sink[h] - max score)
//! out[h, i] = sum_j weight[j] * v[g, j]                                 0 if nothing is visible
//! logsumexp = ln(sum_j exp(score[j]) + exp(sink[h]))                    -inf if there is nothing to sum
//! ```

use crate::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionShape, CausalAlignment, Element, KvPadding, Mask,
    TensorView,
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
    let lengths = [shape.q_len, kv_len];
    let bias = |j| inputs.bias.map_or(0.0, |bias| get_broadcast(&bias, [batch, head, query, j]).to_f64());
    let is_shown = |j| inputs.mask.is_none_or(|mask| get_broadcast(&mask, [batch, head, query, j]));
    let visible: Vec<usize> = (0..kv_len)
        .filter(|&j| is_visible(config, lengths, query, j))
        .map(|j| first + j)
        .filter(|&j| is_shown(j) && bias(j) != f64::NEG_INFINITY)
        .collect();

    let position = first as i128 + position(config.mask, lengths, query);
    let score = |j: usize| {
        let mut score = softmax_scale * (0..shape.head_dim).map(|p| q(p) * k(j, p)).sum::<f64>();
        if let Some(softcap) = config.softcap {
            score = softcap * (score / softcap).tanh();
        }
        if let Some(slopes) = inputs.alibi_slopes {
            score -= f64::from(slopes[head]) * (position - j as i128).abs() as f64;
        }
        if inputs.bias.is_some() {
            score += bias(j);
        }
        score
    };
    let scores: Vec<f64> = visible.iter().map(|&j| score(j)).collect();
    // No sink is one of no weight.
    let sink = inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
    if visible.is_empty() {
        return Ok((vec![0.0; shape.value_dim], sink));
    }
    let max = scores.iter().copied().fold(sink, f64::max);
    let exps: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum = exps.iter().sum::<f64>() + if sink == f64::NEG_INFINITY { 0.0 } else { (sink - max).exp() };
    let mut out = vec![0.0; shape.value_dim];
    for (&j, exp) in visible.iter().zip(&exps) {
        for (d, out) in out.iter_mut().enumerate() {
            *out += exp / sum * v(j, d);
        }
    }
    Ok((out, max + sum.ln()))
}

/// The key at whose position query `i` stands, counted like the keys of the sequence. Perhaps there is no such key.
fn position(mask: Mask, [q_len, kv_len]: [usize; 2], i: usize) -> i128 {
    let offset = match mask {
        Mask::Full | Mask::Causal(CausalAlignment::BottomRight) => kv_len as i128 - q_len as i128,
        Mask::Causal(CausalAlignment::TopLeft) => 0,
        Mask::Causal(CausalAlignment::Offset(offset)) => offset as i128,
    };
    i as i128 + offset
}

/// Whether the config shows key `j` of the sequence to query `i`.
fn is_visible(config: &AttentionConfig, lengths: [usize; 2], i: usize, j: usize) -> bool {
    let distance = position(config.mask, lengths, i) - j as i128;
    let in_prefix = j < config.prefix_len;
    let causal = config.mask == Mask::Full || distance >= 0;
    let in_window = config.window.left.is_none_or(|left| distance <= left as i128)
        && config.window.right.is_none_or(|right| -distance <= right as i128);
    in_prefix || (causal && in_window)
}

/// The element at an index of the scores; axes of size 1 have the same one everywhere.
fn get_broadcast<T: Copy>(view: &TensorView<'_, T>, mut index: [usize; 4]) -> T {
    for (index, size) in index.iter_mut().zip(view.shape()) {
        *index = (*index).min(size - 1);
    }
    view.get(index).expect("index of the scores")
}
