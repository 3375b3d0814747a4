//! `attention_weights` of any heads and rows: what was asked for, or an error.

use arbitrary::Arbitrary;
use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionPlan, AttentionShape, attention_weights,
};
use fused_attention_fuzz::Size;

use crate::MAX_WORK;
use crate::operands::shows;

#[derive(Debug, Arbitrary)]
pub struct Asked {
    heads: Indices,
    rows: Indices,
}

#[derive(Debug, Arbitrary)]
enum Indices {
    List(Vec<Index>),
    /// One after the other, from this one on.
    Neighbours(Index, u16),
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Index {
    Within(u16),
    Any(Size),
}

impl Indices {
    fn get(&self, len: usize) -> Vec<usize> {
        let get = |index: Index| match index {
            Index::Within(n) => usize::from(n) % len.max(1),
            Index::Any(size) => size.get(),
        };
        match self {
            Self::List(list) => list.iter().take(20).map(|&index| get(index)).collect(),
            Self::Neighbours(first, count) => {
                // Mostly up to the last.
                let (first, count) = (get(*first), usize::from(count % 1200));
                let count = if count % 8 == 0 { count } else { count.min(len.saturating_sub(first)) };
                (0..count).map(|i| first.saturating_add(i)).collect()
            }
        }
    }
}

impl Asked {
    pub fn check(
        &self,
        inputs: &AttentionInputs<'_, f32>,
        config: &AttentionConfig,
        shape: &Result<AttentionShape, AttentionError>,
    ) {
        let [batch, num_heads, q_len, head_dim] = inputs.q.shape();
        let kv_len = inputs.k.shape()[2];
        let (heads, rows) = (self.heads.get(num_heads), self.rows.get(q_len));
        let is_right = shape.as_ref().is_ok_and(|shape| AttentionPlan::new(shape, config).is_ok())
            && heads.iter().all(|&head| head < num_heads)
            && rows.iter().all(|&row| row < q_len);
        let sizes = [batch, heads.len(), rows.len(), kv_len, head_dim];
        // What is wrong is refused before there is any work or memory for it.
        if is_right && sizes.iter().fold(1u128, |n, &size| n.saturating_mul(size.max(1) as u128)) > MAX_WORK {
            return;
        }
        let weights = match attention_weights(inputs, config, &heads, &rows) {
            Ok(weights) => weights,
            Err(error) => return assert!(!is_right && !error.to_string().is_empty(), "{error}"),
        };
        assert!(is_right, "taken: heads {heads:?}, rows {rows:?}");
        assert_eq!(weights.len(), batch * heads.len() * rows.len() * kv_len);
        for (i, &weight) in weights.iter().enumerate() {
            let (row, key) = (i / kv_len, i % kv_len);
            let list = row / rows.len();
            let index = [list / heads.len(), heads[list % heads.len()], rows[row % rows.len()], key];
            assert!(weight >= 0.0 || weight.is_nan(), "{index:?} weighs {weight}");
            assert!(weight == 0.0 || inputs.mask.is_none_or(|mask| shows(&mask, index)), "{index:?} weighs {weight}");
        }
    }
}
