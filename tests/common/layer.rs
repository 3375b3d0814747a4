//! Multi-head attention as a textbook has it, in plain loops, and the same weights as a layer of the library.

use fused_attention::{
    AttentionError, MultiHeadAttention, MultiHeadShape, Projection, Rotary, RotaryPairing, WeightStorage,
};

use super::{Generator, Number, Real};

/// How a layer is given its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    pub storage: WeightStorage,
    pub is_fused: bool,
}

impl Form {
    pub const ALL: [Self; 4] = [
        Self { storage: WeightStorage::OutIn, is_fused: false },
        Self { storage: WeightStorage::InOut, is_fused: false },
        Self { storage: WeightStorage::OutIn, is_fused: true },
        Self { storage: WeightStorage::InOut, is_fused: true },
    ];
}

/// Rotary embedding by its definition.
#[derive(Debug, Clone, Copy)]
pub struct TextbookRotary {
    pub dim: usize,
    pub pairing: RotaryPairing,
    pub base: f64,
}

impl TextbookRotary {
    /// Turns one head's features.
    pub fn turn(&self, features: &mut [f64], position: usize) {
        for pair in 0..self.dim / 2 {
            let angle = position as f64 * self.base.powf(-2.0 * pair as f64 / self.dim as f64);
            let [a, b] = match self.pairing {
                RotaryPairing::HalfSplit => [pair, pair + self.dim / 2],
                _ => [2 * pair, 2 * pair + 1],
            };
            let [x, y] = [features[a], features[b]];
            features[a] = x * angle.cos() - y * angle.sin();
            features[b] = x * angle.sin() + y * angle.cos();
        }
    }

    pub fn rotary(&self) -> Rotary {
        Rotary::new(self.dim, self.pairing).unwrap().with_base(self.base).unwrap()
    }
}

/// The weights of a layer.
#[derive(Debug, Clone)]
pub struct TextbookLayer {
    pub shape: MultiHeadShape,
    /// Of Q, K, V and the output, each `[in][out]`.
    pub weights: [Vec<f64>; 4],
    pub biases: [Option<Vec<f64>>; 4],
    pub rotary: Option<TextbookRotary>,
}

/// `[in, out]` features of the four projections.
pub fn features(shape: &MultiHeadShape) -> [[usize; 2]; 4] {
    let MultiHeadShape { d_model, d_source, num_heads, num_kv_heads, head_dim, value_dim } = *shape;
    [
        [d_model, num_heads * head_dim],
        [d_source, num_kv_heads * head_dim],
        [d_source, num_kv_heads * value_dim],
        [num_heads * value_dim, d_model],
    ]
}

/// What a row of attention sees: of queries and keys of one sequence.
pub type Sees<'s> = &'s dyn Fn(usize, usize) -> bool;

impl TextbookLayer {
    /// Weights that keep numbers of N(0, 1) about as large, rounded to `T`.
    pub fn normal<T: Number>(shape: MultiHeadShape, has_bias: [bool; 4], seed: u64) -> Self {
        let mut generator = Generator::new(seed);
        let mut numbers = |count: usize, size: f64| -> Vec<f64> {
            (0..count).map(|_| T::nearest(generator.normal() * size).value()).collect()
        };
        let features = features(&shape);
        let weights = features.map(|[input, out]| numbers(input * out, 1.0 / (input.max(1) as f64).sqrt()));
        let biases = [0, 1, 2, 3].map(|i| has_bias[i].then(|| numbers(features[i][1], 1.0)));
        Self { shape, weights, biases, rotary: None }
    }

    /// The layer of the library.
    pub fn layer<T: Number<Real = f32>>(&self, form: Form) -> Result<MultiHeadAttention<'static, T>, AttentionError> {
        let features = features(&self.shape);
        let stored = |weights: &[f64], [input, out]: [usize; 2]| -> Vec<T> {
            let at = |i: usize, o: usize| T::exactly(weights[i * out + o]);
            match form.storage {
                WeightStorage::OutIn => (0..out).flat_map(|o| (0..input).map(move |i| at(i, o))).collect(),
                _ => (0..input).flat_map(|i| (0..out).map(move |o| at(i, o))).collect(),
            }
        };
        let projection = |weights: &[f64], bias: &Option<Vec<f64>>, shape: [usize; 2]| {
            let weights = stored(weights, shape);
            let [input, out] = shape;
            let projection = match form.storage {
                WeightStorage::OutIn => Projection::from_out_in(weights, [out, input])?,
                _ => Projection::from_in_out(weights, [input, out])?,
            };
            match bias {
                Some(bias) => projection.with_bias(&bias.iter().map(|&x| T::exactly(x)).collect::<Vec<_>>()),
                None => Ok(projection),
            }
        };
        let of = |i: usize| projection(&self.weights[i], &self.biases[i], features[i]);
        let layer = if form.is_fused {
            let input = self.shape.d_model;
            let row = |i: usize| {
                (0..3).flat_map(move |p| {
                    let out = features[p][1];
                    self.weights[p][i * out..][..out].iter().copied()
                })
            };
            let joined: Vec<f64> = (0..input).flat_map(row).collect();
            let out: usize = features[..3].iter().map(|[_, out]| out).sum();
            let bias = |p: usize| self.biases[p].clone().unwrap_or_else(|| vec![0.0; features[p][1]]);
            let bias = self.biases[..3].iter().any(Option::is_some).then(|| (0..3).flat_map(bias).collect());
            MultiHeadAttention::from_fused_qkv(self.shape, projection(&joined, &bias, [input, out])?, of(3)?)?
        } else {
            MultiHeadAttention::new(self.shape, of(0)?, of(1)?, of(2)?, of(3)?)?
        };
        match self.rotary {
            Some(rotary) => layer.with_rotary(rotary.rotary()),
            None => Ok(layer),
        }
    }

    /// `count` tokens through projection `index`, in the arithmetic of `A`.
    pub fn project<A: Real>(&self, index: usize, tokens: &[A], count: usize) -> Vec<A> {
        let [input, out] = features(&self.shape)[index];
        let weights: Vec<A> = self.weights[index].iter().map(|&w| A::nearest(w)).collect();
        let bias = |o: usize| A::nearest(self.biases[index].as_ref().map_or(0.0, |bias| bias[o]));
        assert_eq!(tokens.len(), count * input);
        let mut projected = Vec::with_capacity(count * out);
        for token in 0..count {
            for o in 0..out {
                let mut sum = bias(o);
                for i in 0..input {
                    sum += tokens[token * input + i] * weights[i * out + o];
                }
                projected.push(sum);
            }
        }
        projected
    }

    /// Turns the heads of consecutive tokens.
    fn turn<A: Real>(&self, projected: &mut [A], first_position: usize, heads: usize) {
        let Some(rotary) = self.rotary else { return };
        let head_dim = self.shape.head_dim;
        for (index, head) in projected.chunks_exact_mut(head_dim).enumerate() {
            let mut features: Vec<f64> = head.iter().map(|x| x.value()).collect();
            rotary.turn(&mut features, first_position + index / heads);
            head.iter_mut().zip(features).for_each(|(x, turned)| *x = A::nearest(turned));
        }
    }

    /// The layer on one sequence, in the arithmetic of `A`: `[tokens, d_model]`. Without a `source`, self-attention.
    pub fn forward<A: Real>(&self, x: &[f64], source: Option<&[f64]>, sees: Sees<'_>, first_position: usize) -> Vec<A> {
        let MultiHeadShape { num_heads, num_kv_heads, head_dim, value_dim, .. } = self.shape;
        let numbers = |x: &[f64]| -> Vec<A> { x.iter().map(|&x| A::nearest(x)).collect() };
        let (x, keys) = (numbers(x), numbers(source.unwrap_or(x)));
        let (q_len, kv_len) = (x.len() / self.shape.d_model, keys.len() / self.shape.d_source);
        let (mut q, mut k) = (self.project(0, &x, q_len), self.project(1, &keys, kv_len));
        let v = self.project(2, &keys, kv_len);
        self.turn(&mut q, first_position, num_heads);
        self.turn(&mut k, if source.is_some() { 0 } else { first_position }, num_kv_heads);
        let scale = A::nearest(1.0 / (head_dim as f64).sqrt());
        let zero = A::exactly(0.0);
        let mut context = vec![zero; q_len * num_heads * value_dim];
        for (query, head) in (0..q_len).flat_map(|query| (0..num_heads).map(move |head| (query, head))) {
            let kv_head = head / (num_heads / num_kv_heads);
            let q = &q[(query * num_heads + head) * head_dim..][..head_dim];
            let score = |key: usize| {
                let k = &k[(key * num_kv_heads + kv_head) * head_dim..][..head_dim];
                q.iter().zip(k).fold(zero, |sum, (&q, &k)| sum + q * k) * scale
            };
            let seen: Vec<(usize, A)> =
                (0..kv_len).filter(|&key| sees(query, key)).map(|key| (key, score(key))).collect();
            let max = seen.iter().fold(A::exactly(f64::NEG_INFINITY), |max, &(_, s)| if s > max { s } else { max });
            let weights: Vec<(usize, A)> = seen.iter().map(|&(key, score)| (key, (score - max).exp())).collect();
            let sum = weights.iter().fold(zero, |sum, &(_, weight)| sum + weight);
            let out = &mut context[(query * num_heads + head) * value_dim..][..value_dim];
            for (key, weight) in weights {
                let v = &v[(key * num_kv_heads + kv_head) * value_dim..][..value_dim];
                out.iter_mut().zip(v).for_each(|(out, &v)| *out += weight / sum * v);
            }
        }
        self.project(3, &context, q_len)
    }

    /// Asserts that `found` is as near to the layer in f64 as the layer in f32 is, by the rule of the crate: at most twice its error and a few
    /// roundings.
    pub fn assert_near(
        &self,
        found: &[f32],
        operands: (&[f64], Option<&[f64]>),
        sees: Sees<'_>,
        what: &dyn std::fmt::Debug,
    ) {
        self.assert_all_near(&[found], operands, sees, what);
    }

    /// The same of several results of one call.
    pub fn assert_all_near(
        &self,
        results: &[&[f32]],
        (x, source): (&[f64], Option<&[f64]>),
        sees: Sees<'_>,
        what: &dyn std::fmt::Debug,
    ) {
        let right = self.forward::<f64>(x, source, sees, 0);
        let plain = self.forward::<f32>(x, source, sees, 0);
        let largest = right.iter().fold(1.0f64, |largest, x| largest.max(x.abs()));
        let error = |found: &[f32]| {
            found.iter().zip(&right).map(|(&found, right)| (f64::from(found) - right).abs()).fold(0.0, f64::max)
        };
        let bound = 2.0 * error(&plain) + 16.0 * largest * f64::from(f32::EPSILON);
        for found in results {
            assert_eq!(found.len(), right.len(), "{what:?}");
            assert!(found.iter().all(|x| x.is_finite()), "{what:?}: {found:?}");
            assert!(error(found) <= bound, "{what:?}: error {:e}, bound {bound:e}", error(found));
        }
    }
}

/// Numbers of N(0, 1) that f32 has.
pub fn normal_tokens(count: usize, seed: u64) -> Vec<f64> {
    let mut generator = Generator::new(seed);
    (0..count).map(|_| f32::nearest(generator.normal()).value()).collect()
}

/// The same numbers as the library takes them.
pub fn as_f32(tokens: &[f64]) -> Vec<f32> {
    tokens.iter().map(|&x| x as f32).collect()
}
