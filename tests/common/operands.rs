//! What a call may have besides Q, K and V, and what it does to a row by definition.

use fused_attention::{AttentionConfig, AttentionInputs, AttentionShape, CausalAlignment, KvPadding, Mask, TensorView};

use super::{Generator, Layout, Number, Real, Tensor};

/// Owned; none of them by default.
#[derive(Debug, Clone)]
pub struct Operands<T> {
    pub kv_lens: Option<Vec<usize>>,
    pub mask: Option<BoolTensor>,
    pub bias: Option<Tensor<T>>,
    pub alibi_slopes: Option<Vec<f32>>,
    pub sinks: Option<Vec<f32>>,
}

impl<T> Default for Operands<T> {
    fn default() -> Self {
        Self { kv_lens: None, mask: None, bias: None, alibi_slopes: None, sinks: None }
    }
}

/// A strided boolean tensor.
#[derive(Debug, Clone)]
pub struct BoolTensor {
    pub data: Vec<bool>,
    pub shape: [usize; 4],
    pub strides: [usize; 4],
}

impl BoolTensor {
    pub fn from_fn(shape: [usize; 4], value: impl Fn([usize; 4]) -> bool) -> Self {
        let data = super::tensor::indices(shape).map(value).collect();
        Self { data, shape, strides: Layout::Bhsd.strides(shape) }
    }

    /// Every other byte, and gaps; what is between them is the opposite of what is beside it.
    pub fn in_layout(&self, layout: Layout) -> Self {
        let strides = layout.strides(self.shape);
        let offset = |index: [usize; 4], strides: [usize; 4]| -> usize {
            index.iter().zip(strides).map(|(i, stride)| i * stride).sum()
        };
        let len = super::tensor::indices(self.shape).map(|index| offset(index, strides) + 1).max().unwrap_or(0);
        let mut data: Vec<bool> = (0..len).map(|i| i % 2 == 0).collect();
        for index in super::tensor::indices(self.shape) {
            data[offset(index, strides)] = self.data[offset(index, self.strides)];
        }
        Self { data, shape: self.shape, strides }
    }

    pub fn view(&self) -> TensorView<'_, bool> {
        TensorView::with_strides(&self.data, self.shape, self.strides).unwrap()
    }
}

impl<T: Number> Operands<T> {
    pub fn attach<'a, K>(&'a self, mut inputs: AttentionInputs<'a, T, K>) -> AttentionInputs<'a, T, K> {
        inputs.kv_lens = self.kv_lens.as_deref();
        inputs.mask = self.mask.as_ref().map(BoolTensor::view);
        inputs.bias = self.bias.as_ref().map(Tensor::view);
        inputs.alibi_slopes = self.alibi_slopes.as_deref();
        inputs.sinks = self.sinks.as_deref();
        inputs
    }

    /// The same numbers in the type of the accumulator.
    pub fn widened(&self) -> Operands<T::Real> {
        let Self { kv_lens, mask, bias, alibi_slopes, sinks } = self.clone();
        Operands { kv_lens, mask, bias: bias.map(|bias| bias.map(T::widened)), alibi_slopes, sinks }
    }

    /// All of them: a mask that shows three quarters of the keys, but none to some rows, a bias of which every ninth is -inf.
    /// `broadcast` says along which axes mask and bias have size 1.
    pub fn all(shape: &AttentionShape, seed: u64, broadcast: [bool; 4]) -> Self {
        let mut generator = Generator::new(seed ^ 0xb1a5);
        let full = [shape.batch, shape.num_heads, shape.q_len, shape.kv_len];
        let size = [0, 1, 2, 3].map(|axis| if broadcast[axis] { 1 } else { full[axis] });
        let mix = move |[b, h, i, j]: [usize; 4]| (b * 131 + h * 71 + i * 31 + j * 17) % 251;
        Self {
            kv_lens: None,
            mask: Some(BoolTensor::from_fn(size, |index| index[2] % 11 != 7 && mix(index) % 4 != 1)),
            bias: Some(Tensor::from_fn(size, Layout::Bhsd, |index| {
                let bias = generator.normal();
                T::nearest(if mix(index) % 9 == 5 { f64::NEG_INFINITY } else { bias })
            })),
            alibi_slopes: Some(fused_attention::alibi_slopes(shape.num_heads)),
            sinks: Some((0..shape.num_heads).map(|head| head as f32 * 0.7 - 1.0).collect()),
        }
    }
}

/// The keys that a row `[batch, head, query]` sees, by definition.
pub fn visible<T: Number, K: Number<Real = T::Real>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    [batch, head, query]: [usize; 3],
) -> Vec<usize> {
    let kv_len = inputs.k.shape()[2];
    let (first, end) = sequence(inputs, config, batch);
    let position = position(inputs, config, [batch, head, query]);
    let mut visible = Vec::new();
    for key in first..end {
        let distance = key as i128 - position; // positive: behind the diagonal
        let mut shown = match config.mask {
            Mask::Full => config.window.right.is_none_or(|right| distance <= right as i128),
            _ => distance <= 0,
        };
        shown &= config.window.left.is_none_or(|left| -distance <= left as i128);
        shown |= key - first < config.prefix_len;
        shown &= inputs.mask.is_none_or(|mask| broadcast(&mask, [batch, head, query, key]));
        shown &= inputs.bias.is_none_or(|bias| {
            let bias: f64 = broadcast(&bias, [batch, head, query, key]).into();
            bias != f64::NEG_INFINITY
        });
        assert!(key < kv_len);
        if shown {
            visible.push(key);
        }
    }
    visible
}

fn sequence<T: Number, K: Number<Real = T::Real>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    batch: usize,
) -> (usize, usize) {
    let room = inputs.k.shape()[2];
    let len = inputs.kv_lens.map_or(room, |lens| lens[batch]);
    if config.kv_padding == KvPadding::Left { (room - len, room) } else { (0, len) }
}

/// The key at which a query stands.
pub fn position<T: Number, K: Number<Real = T::Real>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    [batch, _, query]: [usize; 3],
) -> i128 {
    let (first, end) = sequence(inputs, config, batch);
    let start = match config.mask {
        Mask::Causal(CausalAlignment::TopLeft) => first as i128,
        Mask::Causal(CausalAlignment::Offset(offset)) => first as i128 + offset as i128,
        _ => end as i128 - inputs.q.shape()[2] as i128,
    };
    start + query as i128
}

/// The element of a tensor whose axes of size 1 are broadcast.
pub fn broadcast<T: Copy>(view: &TensorView<'_, T>, index: [usize; 4]) -> T {
    let shape = view.shape();
    view.get([0, 1, 2, 3].map(|axis| if shape[axis] == 1 { 0 } else { index[axis] })).unwrap()
}

/// Softcap, ALiBi and bias of one score in the accumulator's type.
pub fn modified<T: Real>(
    inputs: &AttentionInputs<'_, T>,
    config: &AttentionConfig,
    row: [usize; 3],
    key: usize,
    score: T,
) -> T {
    let mut score = score;
    if let Some(softcap) = config.softcap {
        let softcap = T::nearest(softcap);
        score = softcap * (score / softcap).tanh();
    }
    if let Some(slopes) = inputs.alibi_slopes {
        let distance = (position(inputs, config, row) - key as i128).abs() as f64;
        score = score - T::nearest(slopes[row[1]].into()) * T::nearest(distance);
    }
    if let Some(bias) = &inputs.bias {
        let [batch, head, query] = row;
        score += broadcast(bias, [batch, head, query, key]);
    }
    score
}
