//! A layer in plain loops in f64, and how far from it roundings may bring each of its numbers.

use std::ops::Range;

use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionShape, Element, MultiHeadAttention, MultiHeadInputs, MultiHeadShape,
    Projection, TensorView, WeightStorage, reference,
};

use crate::bounds::Bounds;
use crate::{Number, agree, normal};

const EPS: f64 = f32::EPSILON as f64;

/// Rotary embedding with these frequencies.
#[derive(Debug, Clone)]
pub struct Turn {
    pub frequencies: Vec<f64>,
    pub is_interleaved: bool,
}

/// Weights rounded to `T`, stored `[in][out]`, of Q, K, V and the output.
pub struct Layer<T> {
    pub shape: MultiHeadShape,
    weights: [Vec<T>; 4],
    biases: [Option<Vec<f32>>; 4],
    turn: Option<Turn>,
}

/// Tokens of some features, each with the most that roundings may do to it.
pub struct Rows {
    heads: usize,
    dim: usize,
    values: Vec<f64>,
    errors: Vec<f64>,
}

/// Which queries and keys of a call are those of one sequence.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub index: usize,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

/// The heads of one sequence, and what the call says of its scores.
pub struct Attended<'a, K> {
    pub config: AttentionConfig,
    pub q: Rows,
    pub k: TensorView<'a, K>,
    pub v: TensorView<'a, K>,
    pub inputs: &'a MultiHeadInputs<'a>,
    pub of: Sequence,
}

impl<T: Number + Element<Acc = f32>> Layer<T> {
    /// Weights that keep numbers of N(0, 1) about as large. `has_bias` has a bit for each projection.
    pub fn normal(shape: MultiHeadShape, has_bias: u8, turn: Option<Turn>, state: &mut u64) -> Self {
        let features = features(&shape);
        let weights = features.map(|[input, out]| {
            let size = 1.0 / (input.max(1) as f64).sqrt();
            (0..input * out).map(|_| T::rounded(normal(state) * size)).collect()
        });
        let biases = [0, 1, 2, 3]
            .map(|i| (has_bias >> i & 1 == 1).then(|| (0..features[i][1]).map(|_| normal(state) as f32).collect()));
        Self { shape, weights, biases, turn }
    }

    /// The layer of the library, but for its rotary embedding. `storages` has a bit for each projection.
    pub fn build(&self, is_fused: bool, storages: u8) -> MultiHeadAttention<'static, T> {
        let features = features(&self.shape);
        let projection = |weights: &dyn Fn(usize, usize) -> T, bias: Option<Vec<f32>>, [input, out]: [usize; 2], i| {
            let projection = if storages >> i & 1 == 0 {
                let stored: Vec<T> = (0..input * out).map(|n| weights(n / out, n % out)).collect();
                Projection::stored(stored, WeightStorage::InOut, [input, out])
            } else {
                let stored: Vec<T> = (0..input * out).map(|n| weights(n % input, n / input)).collect();
                Projection::stored(stored, WeightStorage::OutIn, [out, input])
            };
            let projection = projection.expect("as many weights as the shape says");
            bias.map_or(Ok(projection.clone()), |bias| projection.with_bias(&bias)).expect("as many as outputs")
        };
        let at = |i: usize| move |input: usize, out: usize| self.weights[i][input * features[i][1] + out];
        let of = |i: usize| projection(&at(i), self.biases[i].clone(), features[i], i);
        let layer = if is_fused {
            let outs = [0, 1, 2].map(|i| features[i][1]);
            let joined = move |input: usize, out: usize| match out {
                out if out < outs[0] => at(0)(input, out),
                out if out < outs[0] + outs[1] => at(1)(input, out - outs[0]),
                out => at(2)(input, out - outs[0] - outs[1]),
            };
            let bias = |i: usize| self.biases[i].clone().unwrap_or_else(|| vec![0.0; outs[i]]);
            let biases = self.biases[..3].iter().any(Option::is_some).then(|| (0..3).flat_map(bias).collect());
            let joined = projection(&joined, biases, [features[0][0], outs.iter().sum()], 0);
            MultiHeadAttention::from_fused_qkv(self.shape, joined, of(3))
        } else {
            MultiHeadAttention::new(self.shape, of(0), of(1), of(2), of(3))
        };
        layer.expect("the sizes agree")
    }

    /// `count` tokens through the projection of Q, K or V (0, 1, 2), then turned, the first by this position.
    pub fn project(&self, index: usize, tokens: &[f32], count: usize, first_position: usize) -> Rows {
        let MultiHeadShape { num_heads, num_kv_heads, head_dim, value_dim, .. } = self.shape;
        let (heads, dim) = [(num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, value_dim)][index];
        let tokens: Vec<f64> = tokens.iter().map(|&x| x.into()).collect();
        let mut rows = self.product(index, &tokens, &vec![0.0; tokens.len()], count);
        (rows.heads, rows.dim) = (heads, dim);
        if let Some(turn) = self.turn.as_ref().filter(|_| index < 2) {
            for head in 0..count * heads {
                turn.turn(&mut rows, head * dim, first_position + head / heads);
            }
        }
        rows
    }

    /// What the call gives for the queries of a sequence.
    pub fn output<K: Number + Element<Acc = f32>>(&self, attended: &Attended<'_, K>) -> Rows {
        let Attended { config, q: rows, k, v, inputs: all, of } = attended;
        let MultiHeadShape { num_heads, head_dim, value_dim, .. } = self.shape;
        let q_len = of.queries.len();
        let place = |[_, head, query, p]: [usize; 4]| (query * num_heads + head) * head_dim + p;
        let q: Vec<f32> = (0..num_heads * q_len * head_dim)
            .map(|i| [0, i / head_dim / q_len, i / head_dim % q_len, i % head_dim])
            .map(|index| rows.values[place(index)] as f32)
            .collect();
        let q = TensorView::from_bhsd(&q, [1, num_heads, q_len, head_dim]).expect("as long");
        let mut inputs = AttentionInputs::new(q, *k, *v);
        inputs.mask = all.mask.map(|mask| of.scores_of(&mask));
        inputs.bias = all.bias.map(|bias| of.scores_of(&bias));
        (inputs.alibi_slopes, inputs.sinks) = (all.alibi_slopes, all.sinks);
        let shape = AttentionShape::of(&inputs).expect("the sizes agree");
        let answer = reference::attention(&inputs, config).expect("a valid call");
        let q_error = |index: [usize; 4]| rows.errors[place(index)] + EPS * rows.values[place(index)].abs();
        let (mut context, mut errors) = (Vec::new(), Vec::new());
        for (query, head) in (0..q_len).flat_map(|query| (0..num_heads).map(move |head| (query, head))) {
            let row = head * q_len + query;
            let bounds =
                Bounds::with_q_errors(&inputs, config, &shape, [0, head, query], answer.logsumexp[row], &q_error);
            context.extend_from_slice(&answer.out[row * value_dim..][..value_dim]);
            errors.extend(bounds.out);
        }
        self.product(3, &context, &errors, q_len)
    }

    /// `count` tokens with errors through a projection, whose sums are rounded in any order.
    fn product(&self, index: usize, tokens: &[f64], errors: &[f64], count: usize) -> Rows {
        let [input, out] = features(&self.shape)[index];
        assert_eq!(tokens.len(), count * input);
        let mut rows = Rows { heads: 1, dim: out, values: Vec::new(), errors: Vec::new() };
        for token in 0..count {
            for o in 0..out {
                let bias = self.biases[index].as_ref().map_or(0.0, |bias| f64::from(bias[o]));
                let (mut value, mut error, mut size) = (bias, 0.0, bias.abs());
                for i in 0..input {
                    let (x, x_error) = (tokens[token * input + i], errors[token * input + i]);
                    let weight = self.weights[index][i * out + o].to_f64();
                    value += x * weight;
                    error += x_error * weight.abs();
                    size += (x.abs() + x_error) * weight.abs();
                }
                rows.values.push(value);
                rows.errors.push(error + EPS * (input + 2) as f64 * size + 1e-37);
            }
        }
        rows
    }
}

/// `[in, out]` features of the four projections.
fn features(shape: &MultiHeadShape) -> [[usize; 2]; 4] {
    let MultiHeadShape { d_model, d_source, num_heads, num_kv_heads, head_dim, value_dim } = *shape;
    [
        [d_model, num_heads * head_dim],
        [d_source, num_kv_heads * head_dim],
        [d_source, num_kv_heads * value_dim],
        [num_heads * value_dim, d_model],
    ]
}

impl Turn {
    /// The features of one head, from `start` on.
    fn turn(&self, rows: &mut Rows, start: usize, position: usize) {
        let pairs = self.frequencies.len();
        for (pair, frequency) in self.frequencies.iter().enumerate() {
            let [a, b] = if self.is_interleaved { [2 * pair, 2 * pair + 1] } else { [pair, pair + pairs] };
            let [a, b] = [start + a, start + b];
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let [x, y] = [rows.values[a], rows.values[b]];
            (rows.values[a], rows.values[b]) = (x * cos - y * sin, x * sin + y * cos);
            // Those before, turned; sine and cosine, the products and their sum rounded.
            let before = rows.errors[a] + rows.errors[b];
            let error = before + 3.0 * EPS * (x.abs() + y.abs() + before) + 1e-37;
            (rows.errors[a], rows.errors[b]) = (error, error);
        }
    }
}

impl Sequence {
    /// The keys, or values, of one sequence.
    pub fn keys_of<'a, K: Copy>(&self, view: &TensorView<'a, K>) -> TensorView<'a, K> {
        let [_, heads, _, dim] = view.shape();
        part(view, [self.index, 0, self.keys.start, 0], [1, heads, self.keys.len(), dim])
    }

    /// Its part of a mask or bias; axes of size 1 stay.
    fn scores_of<'a, E: Copy>(&self, view: &TensorView<'a, E>) -> TensorView<'a, E> {
        let found = view.shape();
        let ranges = [self.index..self.index + 1, 0..found[1], self.queries.clone(), self.keys.clone()];
        let of = |axis: usize| if found[axis] == 1 { 0..1 } else { ranges[axis].clone() };
        part(view, [0, 1, 2, 3].map(|axis| of(axis).start), [0, 1, 2, 3].map(|axis| of(axis).len()))
    }
}

fn part<'a, E: Copy>(view: &TensorView<'a, E>, start: [usize; 4], shape: [usize; 4]) -> TensorView<'a, E> {
    let offset: usize = start.iter().zip(view.strides()).map(|(start, stride)| start * stride).sum();
    let data = if shape.contains(&0) { &[] } else { &view.data()[offset..] };
    TensorView::with_strides(data, shape, view.strides()).expect("a part")
}

/// Asserts that what lies in this view are these heads, with the roundings of its type.
pub fn assert_heads_near<K: Number>(rows: &Rows, view: &TensorView<'_, K>, what: &str) {
    let Rows { heads, dim, .. } = *rows;
    let tokens = view.shape()[2];
    assert_eq!(view.shape(), [1, heads, tokens, dim], "{what}");
    assert_eq!(rows.values.len(), heads * tokens * dim, "{what}");
    for (i, (&value, &error)) in rows.values.iter().zip(&rows.errors).enumerate() {
        let index = [0, i / dim % heads, i / dim / heads, i % dim];
        let found = view.get(index).expect("inside").to_f64();
        let bound = error + (value.abs() + error) * K::ROUNDING + K::SMALLEST_ROUNDING;
        assert!(agree(found, value, bound), "{what} at {index:?}: {found}, expected {value} +- {bound:e}");
    }
}

/// Asserts that these are the tokens.
pub fn assert_near(rows: &Rows, found: &[f32], what: &str) {
    assert_eq!(rows.values.len(), found.len(), "{what}");
    for (i, (&value, &bound)) in rows.values.iter().zip(&rows.errors).enumerate() {
        assert!(agree(found[i].into(), value, bound), "{what}[{i}] is {}, expected {value} +- {bound:e}", found[i]);
    }
}
