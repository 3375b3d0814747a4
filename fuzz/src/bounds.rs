//! What roundings may do to a row with masks and score modifiers, worked out in f64 for each score: an error `e` of a score changes its
//! weight by a factor of up to `exp(e)`, and whatever they are, an output lies between the values that it is a mean of.

use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionShape, CausalAlignment, Element, KvPadding, Mask, TensorView,
};

use crate::{Number, Real};

/// How far a row may be from the reference.
pub struct Bounds {
    pub out: Vec<f64>,
    pub logsumexp: f64,
}

/// A visible score, the most that roundings can do to it, and its value's place.
struct Score {
    value: f64,
    error: f64,
    key: usize,
}

impl Bounds {
    /// `logsumexp` is that of the reference.
    pub fn new<T: Number, K: Number + Element<Acc = T::Acc>>(
        inputs: &AttentionInputs<'_, T, K>,
        config: &AttentionConfig,
        shape: &AttentionShape,
        row: [usize; 3],
        logsumexp: f64,
    ) -> Self {
        Self::with_q_errors(inputs, config, shape, row, logsumexp, &|_| 0.0)
    }

    /// The same where each element of Q may be off by so much.
    pub fn with_q_errors<T: Number, K: Number + Element<Acc = T::Acc>>(
        inputs: &AttentionInputs<'_, T, K>,
        config: &AttentionConfig,
        shape: &AttentionShape,
        row: [usize; 3],
        logsumexp: f64,
        q_error: &dyn Fn([usize; 4]) -> f64,
    ) -> Self {
        let [batch, head, _] = row;
        let scores = scores(inputs, config, shape, row, q_error);
        let v = |key, d| inputs.v.get([batch, head / shape.group_size(), key, d]).expect("inside").to_f64();
        // The reference makes the errors of f64 as well.
        let eps = T::Acc::EPSILON * if T::Acc::EPSILON == f64::EPSILON { 2.0 } else { 1.0 };
        // Of each weight: what it is, and by how much it may be off.
        let weights: Vec<[f64; 2]> = scores
            .iter()
            .map(|score| {
                let distance = score.value - logsumexp;
                let error = score.error + eps * (6.0 + distance.abs());
                // Where the error is large, the weight may still be nothing.
                let off = if error < 1.0 { distance.exp() * error.exp_m1() } else { (distance + error).exp() };
                [distance.exp(), off + 1e-37]
            })
            .collect();
        let off: f64 = weights.iter().map(|weight| weight[1]).sum();
        let sums = eps * (scores.len() + 8) as f64;
        let out = (0..shape.value_dim).map(|d| {
            let (mut partial, mut error, mut max_v) = (0.0f64, 0.0f64, 0.0f64);
            for (score, weight) in scores.iter().zip(&weights) {
                let v = v(score.key, d).abs();
                partial += weight[0] * v;
                error += weight[1] * 2.0 * v.max(partial) + eps * partial;
                if v.is_finite() {
                    max_v = max_v.max(v);
                }
            }
            let error = (error + sums * partial + partial * off) / (1.0 - off).max(0.0) + 8.0 * eps * max_v;
            // Both are means of the values.
            if error.is_nan() { error } else { error.min(max_v * (2.0 + sums)) }
        });
        Self { out: out.collect(), logsumexp: off / (1.0 - off).max(0.0) + sums + 4.0 * eps * logsumexp.abs().max(1.0) }
    }
}

fn scores<T: Number, K: Number + Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    shape: &AttentionShape,
    [batch, head, query]: [usize; 3],
    q_error: &dyn Fn([usize; 4]) -> f64,
) -> Vec<Score> {
    let eps = T::Acc::EPSILON * if T::Acc::EPSILON == f64::EPSILON { 2.0 } else { 1.0 };
    let AttentionShape { q_len, kv_len: room, head_dim, .. } = *shape;
    let kv_len = inputs.kv_lens.map_or(room, |kv_lens| kv_lens[batch]);
    let first = if config.kv_padding == KvPadding::Left { room - kv_len } else { 0 };
    let offset = match config.mask {
        Mask::Causal(CausalAlignment::TopLeft) => 0,
        Mask::Causal(CausalAlignment::Offset(offset)) => offset as i128,
        _ => kv_len as i128 - q_len as i128,
    };
    let position = query as i128 + offset;
    let [left, right] = [config.window.left, config.window.right].map(|n| n.map_or(i128::MAX, |n| n as i128));
    let right = if config.mask == Mask::Full { right } else { 0 };
    let scale = config.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt());
    let clamped = |shape: [usize; 4], key| {
        let index = [batch, head, query, key];
        [0, 1, 2, 3].map(|axis| index[axis].min(shape[axis] - 1))
    };
    let mut scores = Vec::new();
    for j in 0..kv_len {
        let (ahead, key) = (j as i128 - position, first + j);
        let is_shown = j < config.prefix_len || (-left..=right).contains(&ahead);
        let is_masked = |mask: TensorView<'_, bool>| mask.get(clamped(mask.shape(), key)) == Some(false);
        if !is_shown || inputs.mask.is_some_and(is_masked) {
            continue;
        }
        let bias = inputs.bias.map(|bias| bias.get(clamped(bias.shape(), key)).expect("inside").to_f64());
        if bias == Some(f64::NEG_INFINITY) {
            continue;
        }
        // Each addition rounds its partial sum, and every q * k has the roundings of the scaled q in it.
        let (mut value, mut roundings, mut of_q) = (0.0f64, 0.0f64, 0.0f64);
        for p in 0..head_dim {
            let q = inputs.q.get([batch, head, query, p]).expect("inside").to_f64();
            let k = inputs.k.get([batch, head / shape.group_size(), key, p]).expect("inside").to_f64();
            value += q * k;
            roundings += value.abs() + 3.0 * (q * k).abs();
            of_q += q_error([batch, head, query, p]) * k.abs();
        }
        value *= scale;
        let mut error = (eps * roundings + of_q) * scale.abs();
        if !error.is_finite() {
            error = 0.0; // an infinite score has no error
        }
        if let Some(softcap) = config.softcap {
            value = softcap * (value / softcap).tanh();
            error += 8.0 * eps * value.abs();
        }
        if let Some(slopes) = inputs.alibi_slopes {
            let slope = f64::from(slopes[head]);
            value -= slope * ahead.abs() as f64;
            error += 4.0 * eps * (slope.abs() * (position.abs() + key as i128 + first as i128) as f64 + value.abs());
        }
        if let Some(bias) = bias {
            value += bias;
            error += 2.0 * eps * value.abs();
        }
        scores.push(Score { value, error, key });
    }
    scores
}
