//! The yardstick: unfused attention in the accumulator's type with libm's exp, and the bound that is derived from its
//! error.

use fused_attention::reference::{self, ReferenceOutput};
use fused_attention::{AttentionConfig, AttentionShape, CausalAlignment, Mask, Window};

use super::operands::{modified, visible};
use super::tensor::indices;
use super::{Answer, Number, Problem, Real, Tensor, wide};

/// Contiguous `[batch, num_heads, q_len, value_dim]` and `[batch, num_heads, q_len]`.
#[derive(Debug, Clone, Default)]
struct Unfused<A> {
    out: Vec<A>,
    logsumexp: Vec<A>,
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

/// `a . b` in their type.
fn dot<A: Real>(a: &[A], b: &[A], order: Order) -> A {
    let zero = A::exactly(0.0);
    let products = a.iter().zip(b).map(|(&a, &b)| a * b);
    match order {
        Order::Ascending => products.fold(zero, |sum, product| sum + product),
        Order::Descending => products.rev().fold(zero, |sum, product| sum + product),
        Order::Strided => {
            let mut sums = [zero; 8];
            products.enumerate().for_each(|(i, product)| sums[i % 8] += product);
            sums.into_iter().fold(zero, |sum, partial| sum + partial)
        }
    }
}

/// How many keys, counted from the first, query `query` sees.
pub fn visible_keys(config: &AttentionConfig, shape: &AttentionShape, query: usize) -> usize {
    let (q_len, kv_len) = (shape.q_len, shape.kv_len);
    assert!(config.prefix_len == 0 && config.window == Window::default(), "not the first keys alone");
    if config.mask == Mask::Full {
        kv_len
    } else if config.mask == Mask::Causal(CausalAlignment::TopLeft) {
        kv_len.min(query + 1)
    } else {
        assert_eq!(config.mask, Mask::Causal(CausalAlignment::BottomRight), "a mask that this file does not know");
        (query + 1 + kv_len).saturating_sub(q_len)
    }
}

/// One head, contiguous.
fn gather<A: Real>(tensor: &Tensor<A>, batch: usize, head: usize) -> Vec<A> {
    let [_, _, seq, dim] = tensor.shape;
    (0..seq).flat_map(|s| (0..dim).map(move |d| tensor.get([batch, head, s, d]))).collect()
}

/// Scores, softmax and weighted sum, one after the other, all in the type of the problem in plain loops.
fn unfused<A: Real>(problem: &Problem<A>, config: &AttentionConfig, variant: Variant) -> Unfused<A> {
    let (shape, inputs) = (problem.shape(), problem.inputs());
    let AttentionShape { head_dim, value_dim, .. } = shape;
    let [zero, one] = [0.0, 1.0].map(A::exactly);
    let softmax_scale = A::nearest(config.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt()));
    let (q_scale, score_scale) = if variant.scales_q { (softmax_scale, one) } else { (one, softmax_scale) };
    let mut answer = Unfused { out: Vec::new(), logsumexp: Vec::new() };
    for (batch, head) in (0..shape.batch).flat_map(|b| (0..shape.num_heads).map(move |h| (b, h))) {
        let kv_head = head / shape.group_size();
        let mut q = gather(&problem.q, batch, head);
        let (k, v) = (gather(&problem.k, batch, kv_head), gather(&problem.v, batch, kv_head));
        q.iter_mut().for_each(|q| *q = *q * q_scale);
        for query in 0..shape.q_len {
            let q = &q[query * head_dim..][..head_dim];
            let row = [batch, head, query];
            let visible = visible(&inputs, config, row);
            let score = |key: usize| dot(q, &k[key * head_dim..][..head_dim], variant.order) * score_scale;
            let mut weights: Vec<A> =
                visible.iter().map(|&key| modified(&inputs, config, row, key, score(key))).collect();
            let sink = A::nearest(inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[head].into()));
            let max = weights.iter().fold(sink, |max, &x| if x > max { x } else { max });
            let mut sum = if sink.value() == f64::NEG_INFINITY { zero } else { (sink - max).exp() };
            for weight in &mut weights {
                *weight = (*weight - max).exp();
                sum += *weight;
            }
            let mut out = vec![zero; value_dim];
            for (&key, &weight) in visible.iter().zip(&weights) {
                for (out, &v) in out.iter_mut().zip(&v[key * value_dim..]) {
                    *out += weight / sum * v;
                }
            }
            answer.out.extend(out);
            answer.logsumexp.push(max + sum.ln());
        }
    }
    answer
}

/// The largest of the errors, each in units of its bound; infinite where one is NaN or infinite and the other is not the
/// same.
fn max_error<T: Copy + Into<f64>>(found: &[T], expected: &[f64], bound: impl Fn(f64) -> f64) -> f64 {
    assert_eq!(found.len(), expected.len());
    let mut largest = 0.0f64;
    for (&found, &expected) in found.iter().zip(expected) {
        let found: f64 = found.into();
        let same = found == expected || (found.is_nan() && expected.is_nan());
        let error = if same { 0.0 } else { (found - expected).abs() / bound(expected) };
        largest = if error.is_nan() { f64::INFINITY } else { largest.max(error) };
    }
    largest
}

/// The largest error; infinite where one is NaN or infinite and the other is not the same.
pub fn max_abs_error<T: Copy + Into<f64>>(found: &[T], expected: &[f64]) -> f64 {
    max_error(found, expected, |_| 1.0)
}

/// The right answer to a problem, and how far a fused one may be from it.
#[derive(Debug)]
pub struct Expected {
    pub reference: ReferenceOutput,
    out_bound: f64,
    logsumexp_bound: f64,
}

impl Expected {
    /// The accuracy that DESIGN.md states: `err <= 2 * err(unfused in the accumulator's type) + 8 * eps * max|V|`, and for
    /// logsumexp the same with its own largest value (at least 1) in place of V's.
    ///
    /// The right answer is that of the reference in f64 on the inputs as their types hold them; for an accumulator of
    /// f64, one of twice its precision.
    pub fn new<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, config: &AttentionConfig) -> Self {
        let inputs = problem.inputs();
        let in_f64 = reference::attention(&inputs, config).unwrap();
        let is_f64 = T::Real::PRECISION == 53;
        let right = if is_f64 { wide::attention(&inputs, config) } else { in_f64.clone() };
        let (mut out_error, mut logsumexp_error) = (0.0f64, 0.0f64);
        let mut widened = problem.widened();
        if problem.v_lies_in_k {
            widened.v = Tensor::from_fn(problem.v.shape, super::Layout::Bhsd, |index| problem.k.get(index).widened());
        }
        for variant in VARIANTS {
            let unfused = unfused(&widened, config, variant);
            out_error = out_error.max(max_abs_error(&unfused.out, &right.out));
            logsumexp_error = logsumexp_error.max(max_abs_error(&unfused.logsumexp, &right.logsumexp));
        }
        assert!(out_error.is_finite() && logsumexp_error.is_finite(), "no bound: {out_error} {logsumexp_error}");
        let eps = T::Real::epsilon();
        let values = indices(widened.v.shape).map(|index| widened.v.get(index).value().abs());
        let finite = right.logsumexp.iter().map(|x| x.abs()).filter(|x| x.is_finite());
        let expected = Self {
            out_bound: 2.0 * out_error + 8.0 * eps * values.fold(0.0, f64::max),
            logsumexp_bound: 2.0 * logsumexp_error + 8.0 * eps * finite.fold(1.0, f64::max),
            reference: right,
        };
        if is_f64 {
            let (out, logsumexp) = (&expected.reference.out, &expected.reference.logsumexp);
            let is_right = max_abs_error(&in_f64.out, out) <= expected.out_bound
                && max_abs_error(&in_f64.logsumexp, logsumexp) <= expected.logsumexp_bound;
            assert!(is_right, "the reference itself is wrong for {:?} {config:?}", problem.shape());
        }
        expected
    }

    /// How far the output and the log-sum-exp may be from it, before the output is rounded to a narrower type.
    pub fn bounds(&self) -> [f64; 2] {
        [self.out_bound, self.logsumexp_bound]
    }

    /// Error of the output and of the log-sum-exp, as parts of what they may be. An output of a type narrower than the
    /// accumulator may be off by half a unit in its last place more.
    pub fn error_ratios<T: Number>(&self, answer: &Answer<T>) -> [f64; 2] {
        let rounding = |value: f64| if T::NAME == T::Real::NAME { 0.0 } else { T::ulp(value) / 2.0 };
        // What is rounded lies within the bound of the right value, which may be across a power of two.
        let out_bound = |right: f64| self.out_bound + rounding(right.abs() + self.out_bound);
        [
            max_error(&answer.out.values(), &self.reference.out, out_bound),
            max_error(&answer.logsumexp, &self.reference.logsumexp, |_| self.logsumexp_bound),
        ]
    }

    pub fn assert_met_by<T: Number>(&self, answer: &Answer<T>, what: &dyn std::fmt::Debug) {
        let [out, logsumexp] = self.error_ratios(answer);
        assert!(out <= 1.0, "out: error is {out} of the bound {:e} for {what:?}", self.out_bound);
        assert!(
            logsumexp <= 1.0,
            "logsumexp: error is {logsumexp} of the bound {:e} for {what:?}",
            self.logsumexp_bound
        );
    }
}
