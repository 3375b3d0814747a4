//! Which keys a query sees, and hiding the rest of an edge block.
//!
//! With the keys cut into blocks, a block of a causal mask is for a panel of rows *full* (every row sees every key,
//! nothing to do), *edge* (the diagonal crosses it) or *hidden* (skipped):
//!
//! ```text
//!           block 0   block 1   block 2
//! panel 0   edge      hidden    hidden
//! panel 1   full      edge      hidden
//! panel 2   full      full      edge
//! ```

use pulp::Simd;

use crate::kernels::lane::Lane;
use crate::{AttentionShape, CausalAlignment, Mask};

/// The keys that each query sees: always the half-open range `[0, end(query))`, and `end` never falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VisibleKeys {
    mask: Mask,
    q_len: usize,
    kv_len: usize,
}

impl VisibleKeys {
    pub(crate) fn new(mask: Mask, shape: &AttentionShape) -> Self {
        Self { mask, q_len: shape.q_len, kv_len: shape.kv_len }
    }

    /// One past the last key that `query < q_len` sees.
    #[inline(always)]
    pub(crate) fn end(&self, query: usize) -> usize {
        let Self { q_len, kv_len, .. } = *self;
        match self.mask {
            Mask::Full => kv_len,
            Mask::Causal(CausalAlignment::TopLeft) => kv_len.min(query + 1),
            // query + 1 <= q_len, so neither branch overflows
            Mask::Causal(CausalAlignment::BottomRight) if kv_len >= q_len => query + 1 + (kv_len - q_len),
            Mask::Causal(CausalAlignment::BottomRight) => (query + 1).saturating_sub(q_len - kv_len),
        }
    }

    /// Scores that all queries of one head see together.
    pub(crate) fn visible_scores(&self) -> u128 {
        let (q_len, kv_len) = (self.q_len as u128, self.kv_len as u128);
        match self.mask {
            Mask::Full => q_len * kv_len,
            Mask::Causal(_) => {
                // A triangle of min(q_len, kv_len) rows, and the rows or columns that one of them has more.
                let side = q_len.min(kv_len);
                let triangle = side * (side + 1) / 2;
                let bottom_right = self.mask == Mask::Causal(CausalAlignment::BottomRight);
                let rectangle = if bottom_right { q_len * (kv_len - side) } else { (q_len - side) * kv_len };
                triangle + rectangle
            }
        }
    }
}

/// Sets the scores of hidden keys to -inf, by select, whatever the score is: row `r` sees `key < row_ends[r]`.
/// `scores[0]` belongs to `first_key`.
#[inline(always)]
pub(crate) fn hide_keys<S: Simd, A: Lane, const ROW_VECTORS: usize>(
    simd: S,
    scores: &mut [[A::Vector<S>; ROW_VECTORS]],
    first_key: usize,
    row_ends: &[A::Vector<S>; ROW_VECTORS],
) {
    let hidden = A::splat(simd, A::NEG_INFINITY);
    for (key, scores) in scores.iter_mut().enumerate() {
        let key = A::splat(simd, A::from_index(first_key + key));
        for vector in 0..ROW_VECTORS {
            let sees = A::less_than(simd, key, row_ends[vector]);
            scores[vector] = A::select(simd, sees, scores[vector], hidden);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_scores_is_the_sum_of_the_ends() {
        for (q_len, kv_len) in [(0, 0), (0, 3), (3, 0), (1, 16), (16, 1), (2, 5), (5, 2), (7, 7)] {
            for mask in [Mask::Full, Mask::Causal(CausalAlignment::TopLeft), Mask::Causal(CausalAlignment::BottomRight)]
            {
                let shape = AttentionShape {
                    batch: 1,
                    num_heads: 1,
                    num_kv_heads: 1,
                    q_len,
                    kv_len,
                    head_dim: 1,
                    value_dim: 1,
                };
                let visible = VisibleKeys::new(mask, &shape);
                let sum: usize = (0..q_len).map(|query| visible.end(query)).sum();
                assert_eq!(visible.visible_scores(), sum as u128, "{mask:?} {q_len} {kv_len}");
            }
        }
    }
}
