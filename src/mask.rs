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

use std::ops::Range;

use pulp::Simd;

use crate::kernels::lane::Lane;
use crate::{AttentionShape, CausalAlignment, KvPadding, Mask};

/// The keys that each query of one sequence sees: always one range, neither of whose ends ever falls from a query to the
/// next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VisibleKeys {
    mask: Mask,
    q_len: usize,
    /// Where the sequence begins.
    first_key: usize,
    /// Keys of the sequence.
    kv_len: usize,
}

impl VisibleKeys {
    /// For a sequence that fills the tensor.
    pub(crate) fn new(mask: Mask, shape: &AttentionShape) -> Self {
        Self { mask, q_len: shape.q_len, first_key: 0, kv_len: shape.kv_len }
    }

    /// For a sequence of `kv_len` keys in the same tensor, padded on one side.
    pub(crate) fn of_sequence(self, kv_len: usize, padding: KvPadding) -> Self {
        let first_key = match padding {
            KvPadding::Right => 0,
            KvPadding::Left => self.kv_len - kv_len,
        };
        Self { first_key, kv_len, ..self }
    }

    /// The keys that `query < q_len` sees, counted from the start of the tensor.
    #[inline(always)]
    pub(crate) fn range(&self, query: usize) -> Range<usize> {
        let Self { q_len, kv_len, .. } = *self;
        let end = match self.mask {
            Mask::Full => kv_len,
            Mask::Causal(CausalAlignment::TopLeft) => kv_len.min(query + 1),
            // query + 1 <= q_len, so neither branch overflows
            Mask::Causal(CausalAlignment::BottomRight) if kv_len >= q_len => query + 1 + (kv_len - q_len),
            Mask::Causal(CausalAlignment::BottomRight) => (query + 1).saturating_sub(q_len - kv_len),
        };
        self.first_key..self.first_key + end
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

/// For each row of a panel, the keys of a block that it sees: `starts[row] <= key < ends[row]`, counted from the start of
/// the block, as numbers of the accumulator type.
pub(crate) struct RowBounds<V, const ROW_VECTORS: usize> {
    pub(crate) starts: [V; ROW_VECTORS],
    pub(crate) ends: [V; ROW_VECTORS],
}

impl<V: Copy, const ROW_VECTORS: usize> RowBounds<V, ROW_VECTORS> {
    /// Sets the scores of keys before a row's first to -inf, by select, whatever the score is. `scores[0]` belongs to
    /// `first_key`.
    #[inline(always)]
    pub(crate) fn hide_before<S: Simd, A: Lane<Vector<S> = V>>(
        &self,
        simd: S,
        scores: &mut [[V; ROW_VECTORS]],
        first_key: usize,
    ) {
        let hidden = A::splat(simd, A::NEG_INFINITY);
        for (key, scores) in scores.iter_mut().enumerate() {
            let key = A::splat(simd, A::from_index(first_key + key));
            for vector in 0..ROW_VECTORS {
                let before = A::less_than(simd, key, self.starts[vector]);
                scores[vector] = A::select(simd, before, hidden, scores[vector]);
            }
        }
    }

    /// The same for the keys after a row's last.
    #[inline(always)]
    pub(crate) fn hide_after<S: Simd, A: Lane<Vector<S> = V>>(
        &self,
        simd: S,
        scores: &mut [[V; ROW_VECTORS]],
        first_key: usize,
    ) {
        let hidden = A::splat(simd, A::NEG_INFINITY);
        for (key, scores) in scores.iter_mut().enumerate() {
            let key = A::splat(simd, A::from_index(first_key + key));
            for vector in 0..ROW_VECTORS {
                let sees = A::less_than(simd, key, self.ends[vector]);
                scores[vector] = A::select(simd, sees, scores[vector], hidden);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_scores_is_the_sum_of_the_ranges() {
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
                let sum: usize = (0..q_len).map(|query| visible.range(query).len()).sum();
                assert_eq!(visible.visible_scores(), sum as u128, "{mask:?} {q_len} {kv_len}");
            }
        }
    }
}
