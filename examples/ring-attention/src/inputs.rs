//! Q, K and V that any rank can make any part of: random numbers fixed by what they belong to.

use fused_attention::TensorView;
use ring_attention::{RingShape, Shares, Wire};

/// Tensors of some positions of the sequence, contiguous `[batch, heads, positions, dim]`.
pub struct Tensors<K> {
    pub q: Vec<f32>,
    pub k: Vec<K>,
    pub v: Vec<K>,
    shape: RingShape,
    len: usize,
}

impl<K: Wire> Tensors<K> {
    /// Those of one rank.
    pub fn of_rank(shape: &RingShape, shares: &Shares, rank: usize) -> Self {
        Self::of_positions(shape, &shares.positions(rank).collect::<Vec<_>>())
    }

    /// Those of the first so many.
    pub fn whole(shape: &RingShape, len: usize) -> Self {
        Self::of_positions(shape, &(0..len).collect::<Vec<_>>())
    }

    pub fn of_positions(shape: &RingShape, positions: &[usize]) -> Self {
        let RingShape { batch, num_heads, num_kv_heads, head_dim, value_dim } = *shape;
        let tensor = |which: usize, heads: usize, dim: usize| {
            let rows = (0..batch * heads).flat_map(|head| positions.iter().map(move |&position| (head, position)));
            rows.flat_map(move |(head, position)| {
                let row = mix(mix(mix(0, which), head), position);
                (0..dim).map(move |d| normal(mix(row, d)))
            })
        };
        Self {
            q: tensor(0, num_heads, head_dim).collect(),
            k: tensor(1, num_kv_heads, head_dim).map(K::nearest).collect(),
            v: tensor(2, num_kv_heads, value_dim).map(K::nearest).collect(),
            shape: *shape,
            len: positions.len(),
        }
    }

    pub fn q(&self) -> TensorView<'_, f32> {
        let RingShape { batch, num_heads, head_dim, .. } = self.shape;
        TensorView::from_bhsd(&self.q, [batch, num_heads, self.len, head_dim]).expect("as long as that")
    }

    pub fn k(&self) -> TensorView<'_, K> {
        let RingShape { batch, num_kv_heads, head_dim, .. } = self.shape;
        TensorView::from_bhsd(&self.k, [batch, num_kv_heads, self.len, head_dim]).expect("as long as that")
    }

    pub fn v(&self) -> TensorView<'_, K> {
        let RingShape { batch, num_kv_heads, value_dim, .. } = self.shape;
        TensorView::from_bhsd(&self.v, [batch, num_kv_heads, self.len, value_dim]).expect("as long as that")
    }
}

/// Random bits for a number and the bits before (splitmix64).
fn mix(before: u64, x: usize) -> u64 {
    let x = (before ^ x as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// About N(0, 1): the sum of four uniform numbers.
fn normal(bits: u64) -> f32 {
    let uniform = |i: u32| ((bits >> (16 * i)) & 0xffff) as f32 / 65536.0 - 0.5;
    (uniform(0) + uniform(1) + uniform(2) + uniform(3)) * 3f32.sqrt()
}
