//! Inputs: normally distributed, rising scores, and a pattern in which every swap shows.

use fused_attention::AttentionShape;

use super::{Layout, Number, Problem, Tensor};

/// Deterministic numbers (splitmix64).
#[derive(Debug, Clone)]
pub struct Generator(u64);

impl Generator {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// N(0, 1), by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let (radius, angle) = ((-2.0 * self.uniform().ln()).sqrt(), std::f64::consts::TAU * self.uniform());
        radius * angle.cos()
    }

    /// A contiguous tensor of N(0, 1), rounded to its type.
    pub fn normal_tensor<T: Number>(&mut self, shape: [usize; 4]) -> Tensor<T> {
        Tensor::from_fn(shape, Layout::Bhsd, |_| T::nearest(self.normal()))
    }
}

fn tensor_shapes(shape: &AttentionShape) -> [[usize; 4]; 3] {
    let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
    [
        [batch, num_heads, q_len, head_dim],
        [batch, num_kv_heads, kv_len, head_dim],
        [batch, num_kv_heads, kv_len, value_dim],
    ]
}

/// Q, K, V of N(0, 1), contiguous.
pub fn normal_problem(shape: &AttentionShape, seed: u64) -> Problem {
    Problem::normal(shape, seed)
}

impl<T: Number, K: Number<Real = T::Real>> Problem<T, K> {
    /// Q, K, V of N(0, 1), rounded to their types, contiguous.
    pub fn normal(shape: &AttentionShape, seed: u64) -> Self {
        let mut generator = Generator::new(seed);
        let [q, k, v] = tensor_shapes(shape);
        Self::new(generator.normal_tensor(q), generator.normal_tensor(k), generator.normal_tensor(v))
    }

    /// Scores that rise by `rise` (to 1.5 times that, by row) from the first key to the last, at this scale, on top of
    /// what the other features of N(0, 1) give: nearly every key raises the running maximum.
    pub fn ascending(shape: &AttentionShape, seed: u64, rise: f64, softmax_scale: Option<f64>) -> Self {
        let mut problem = Self::normal(shape, seed);
        let softmax_scale = softmax_scale.filter(|&scale| scale != 0.0).unwrap_or(1.0 / (shape.head_dim as f64).sqrt());
        let step = rise / softmax_scale / shape.kv_len as f64;
        let (q, k) = (problem.q.clone(), problem.k.clone());
        let first = |[_, _, position, dim]: [usize; 4]| (dim == 0).then_some(position);
        problem.q = Tensor::from_fn(q.shape, Layout::Bhsd, |index| match first(index) {
            Some(query) => T::nearest(1.0 + 0.25 * (query % 3) as f64),
            None => q.get(index),
        });
        problem.k = Tensor::from_fn(k.shape, Layout::Bhsd, |index| match first(index) {
            Some(key) => K::nearest(step * key as f64),
            None => k.get(index),
        });
        problem
    }
}

/// A value in [-1, 1] for each index. Its periods along the axes are different primes, so that an index that is
/// swapped, shifted or taken from another head gives another value (in the 16-bit types sometimes only nearly so).
pub fn pattern<T: Number>([batch, head, position, dim]: [usize; 4]) -> T {
    let step = (batch * 131 + head * 71 + position * 31 + dim * 17) % 251;
    T::nearest((step as f64 - 125.0) / 125.0)
}
