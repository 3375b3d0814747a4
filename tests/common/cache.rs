//! Tokens for a `KvCache`, and what is seen of them.

use fused_attention::{Element, KvCacheShape, TensorView, bf16, f16};

use super::{Generator, Layout, Tensor};

/// Storage types, and how an f32 gets into them by `half`'s own conversions.
pub trait Stored: Element<Acc = f32> + PartialEq {
    fn round(value: f32) -> Self;
    fn bits(self) -> u32;
}

impl Stored for f32 {
    fn round(value: f32) -> f32 {
        value
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Stored for f16 {
    fn round(value: f32) -> f16 {
        f16::from_f32_const(value)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Stored for bf16 {
    fn round(value: f32) -> bf16 {
        bf16::from_f32_const(value)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

/// New keys and values for a batch of this size.
pub fn new_tokens(shape: &KvCacheShape, batch: usize, tokens: usize, layouts: [Layout; 2], seed: u64) -> [Tensor; 2] {
    let mut generator = Generator::new(seed);
    let mut new = |dim, layout| generator.normal_tensor([batch, shape.num_kv_heads, tokens, dim]).in_layout(layout);
    [new(shape.head_dim, layouts[0]), new(shape.value_dim, layouts[1])]
}

/// A contiguous copy of a view.
pub fn copied<T: Stored>(view: &TensorView<'_, T>) -> Vec<T> {
    let [batch, heads, seq, dim] = view.shape();
    let indices =
        (0..batch * heads * seq * dim).map(|i| [i / dim / seq / heads, i / dim / seq % heads, i / dim % seq, i % dim]);
    indices.map(|index| view.get(index).unwrap()).collect()
}
