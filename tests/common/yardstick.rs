//! The yardstick: unfused attention in f32 with libm's exp, and the bound that is derived from its error.

use fused_attention::reference::{self, ReferenceOutput};
use fused_attention::{AttentionConfig, AttentionInputs, AttentionShape, CausalAlignment, Mask, TensorView};

use super::{Answer, Problem};

/// Contiguous `[batch, num_heads, q_len, value_dim]` and `[batch, num_heads, q_len]`.
#[derive(Debug, Clone, Default)]
struct Unfused {
    out: Vec<f32>,
    logsumexp: Vec<f32>,
}

/// Choices that the formula leaves to an unfused implementation. Where only a few rows count, one choice may by luck
/// make no error at all: the yardstick is the largest error of all of [`VARIANTS`].
#[derive(Debug, Clone, Copy)]
struct Variant {
    order: Order,
    /// The scale multiplies Q, not the scores.
    scales_q: bool,
}

/// In which order the products of a score are summed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    Ascending,
    Descending,
    /// Eight partial sums, as with a vector.
    Strided,
}

const VARIANTS: [Variant; 6] = [
    Variant { order: Order::Ascending, scales_q: false },
    Variant { order: Order::Ascending, scales_q: true },
    Variant { order: Order::Descending, scales_q: false },
    Variant { order: Order::Descending, scales_q: true },
    Variant { order: Order::Strided, scales_q: false },
    Variant { order: Order::Strided, scales_q: true },
];

/// `a . b` in f32.
fn dot(a: &[f32], b: &[f32], order: Order) -> f32 {
    let products = a.iter().zip(b).map(|(a, b)| a * b);
    match order {
        Order::Ascending => products.fold(0.0, |sum, product| sum + product),
        Order::Descending => products.rev().fold(0.0, |sum, product| sum + product),
        Order::Strided => {
            let mut sums = [0.0f32; 8];
            products.enumerate().for_each(|(i, product)| sums[i % 8] += product);
            sums.into_iter().fold(0.0, |sum, partial| sum + partial)
        }
    }
}

/// How many keys, counted from the first, query `query` sees.
pub fn visible_keys(config: &AttentionConfig, shape: &AttentionShape, query: usize) -> usize {
    let (q_len, kv_len) = (shape.q_len, shape.kv_len);
    if config.mask == Mask::Full {
        kv_len
    } else if config.mask == Mask::Causal(CausalAlignment::TopLeft) {
        kv_len.min(query + 1)
    } else {
        assert_eq!(config.mask, Mask::Causal(CausalAlignment::BottomRight), "a mask that this file does not know");
        (query + 1 + kv_len).saturating_sub(q_len)
    }
}

/// One head of a view, contiguous.
fn gather(view: &TensorView<'_, f32>, batch: usize, head: usize) -> Vec<f32> {
    let [_, _, seq, dim] = view.shape();
    (0..seq).flat_map(|s| (0..dim).map(move |d| view.get([batch, head, s, d]).unwrap())).collect()
}

/// Scores, softmax and weighted sum, one after the other, all in f32 in plain loops.
fn unfused_f32(inputs: &AttentionInputs<'_, f32>, config: &AttentionConfig, variant: Variant) -> Unfused {
    let shape = AttentionShape::of(inputs).unwrap();
    let AttentionShape { head_dim, value_dim, .. } = shape;
    let softmax_scale = config.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt()) as f32;
    let (q_scale, score_scale) = if variant.scales_q { (softmax_scale, 1.0) } else { (1.0, softmax_scale) };
    let mut answer = Unfused::default();
    for (batch, head) in (0..shape.batch).flat_map(|b| (0..shape.num_heads).map(move |h| (b, h))) {
        let kv_head = head / shape.group_size();
        let mut q = gather(&inputs.q, batch, head);
        let (k, v) = (gather(&inputs.k, batch, kv_head), gather(&inputs.v, batch, kv_head));
        q.iter_mut().for_each(|q| *q *= q_scale);
        for query in 0..shape.q_len {
            let q = &q[query * head_dim..][..head_dim];
            let mut weights: Vec<f32> = (0..visible_keys(config, &shape, query))
                .map(|key| dot(q, &k[key * head_dim..][..head_dim], variant.order) * score_scale)
                .collect();
            let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0f32;
            for weight in &mut weights {
                *weight = (*weight - max).exp();
                sum += *weight;
            }
            let mut out = vec![0.0f32; value_dim];
            for (key, weight) in weights.iter().enumerate() {
                for (out, v) in out.iter_mut().zip(&v[key * value_dim..]) {
                    *out += weight / sum * v;
                }
            }
            answer.out.extend(out);
            answer.logsumexp.push(max + sum.ln());
        }
    }
    answer
}

/// The largest error; infinite where one is NaN or infinite and the other is not the same.
pub fn max_abs_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let mut largest = 0.0f64;
    for (&found, &expected) in found.iter().zip(expected) {
        let found = f64::from(found);
        let same = found == expected || (found.is_nan() && expected.is_nan());
        let error = if same { 0.0 } else { (found - expected).abs() };
        largest = if error.is_nan() { f64::INFINITY } else { largest.max(error) };
    }
    largest
}

/// The right answer to a problem, and how far a fused one may be from it.
#[derive(Debug)]
pub struct Expected {
    pub reference: ReferenceOutput,
    out_bound: f64,
    logsumexp_bound: f64,
}

impl Expected {
    /// The accuracy that DESIGN.md states: `err <= 2 * err(unfused f32) + 8 * eps * max|V|`, and for logsumexp the same
    /// with its own largest value (at least 1) in place of V's.
    pub fn new(problem: &Problem, config: &AttentionConfig) -> Self {
        let inputs = problem.inputs();
        let reference = reference::attention(&inputs, config).unwrap();
        let (mut out_error, mut logsumexp_error) = (0.0f64, 0.0f64);
        for variant in VARIANTS {
            let unfused = unfused_f32(&inputs, config, variant);
            out_error = out_error.max(max_abs_error(&unfused.out, &reference.out));
            logsumexp_error = logsumexp_error.max(max_abs_error(&unfused.logsumexp, &reference.logsumexp));
        }
        assert!(out_error.is_finite() && logsumexp_error.is_finite(), "no bound: {out_error} {logsumexp_error}");
        let eps = f64::from(f32::EPSILON);
        let values =
            super::tensor::indices(inputs.v.shape()).map(|index| f64::from(inputs.v.get(index).unwrap()).abs());
        let finite = reference.logsumexp.iter().map(|x| x.abs()).filter(|x| x.is_finite());
        Self {
            out_bound: 2.0 * out_error + 8.0 * eps * values.fold(0.0, f64::max),
            logsumexp_bound: 2.0 * logsumexp_error + 8.0 * eps * finite.fold(1.0, f64::max),
            reference,
        }
    }

    /// Error of the output and of the log-sum-exp, as parts of what they may be.
    pub fn error_ratios(&self, answer: &Answer) -> [f64; 2] {
        let ratio = |error: f64, bound: f64| if error == 0.0 { 0.0 } else { error / bound };
        [
            ratio(max_abs_error(&answer.out.values(), &self.reference.out), self.out_bound),
            ratio(max_abs_error(&answer.logsumexp, &self.reference.logsumexp), self.logsumexp_bound),
        ]
    }

    pub fn assert_met_by(&self, answer: &Answer, what: &dyn std::fmt::Debug) {
        let [out, logsumexp] = self.error_ratios(answer);
        assert!(out <= 1.0, "out: error is {out} of the bound {:e} for {what:?}", self.out_bound);
        assert!(
            logsumexp <= 1.0,
            "logsumexp: error is {logsumexp} of the bound {:e} for {what:?}",
            self.logsumexp_bound
        );
    }
}
