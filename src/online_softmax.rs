//! The streaming softmax: running maximum, running sum, rescaling, and the end of a row. In base 2: scores come in
//! multiplied by log2(e).
//!
//! For one block of scores of a row, with m the running maximum and s the running sum:
//!
//! ```text
//! m' = max(m, max_j score[j])      reference m'' = m' but 0 where m' = -inf, so that -inf - -inf never occurs
//! prob[j] = 2^(score[j] - m'')     0 for hidden keys, whose score is -inf
//! s' = s * 2^(m - m'') + (sum_j prob[j])        the block is summed on its own: a sequential f32 sum over 64k keys
//!                                               loses 1e-5
//! ```
//! NaN: `max` may keep or drop it, but 2^(NaN - m'') is NaN and enters sum and product, so the row is NaN either way.

use pulp::Simd;

use crate::kernels::lane::Lane;

/// State of one panel's rows, `[ROW_VECTORS]` vectors each.
pub(crate) struct RowState<'a, V> {
    pub(crate) running_max: &'a mut [V],
    pub(crate) running_sum: &'a mut [V],
    /// Written by every step: what the old `out_acc` must be multiplied with.
    pub(crate) rescale: &'a mut [V],
}

/// Turns a block of scores `[keys][ROW_VECTORS]` into unnormalised probabilities and updates the rows' state.
#[inline(always)]
pub(crate) fn softmax_step<S: Simd, A: Lane, const ROW_VECTORS: usize>(
    simd: S,
    scores: &mut [[A::Vector<S>; ROW_VECTORS]],
    state: RowState<'_, A::Vector<S>>,
) {
    let negative_infinity = A::splat(simd, A::NEG_INFINITY);
    let old_max: [_; ROW_VECTORS] = core::array::from_fn(|vector| state.running_max[vector]);
    let mut max = old_max;
    for scores in scores.iter() {
        for vector in 0..ROW_VECTORS {
            max[vector] = A::max(simd, scores[vector], max[vector]);
        }
    }
    let reference: [_; ROW_VECTORS] = core::array::from_fn(|vector| {
        let is_finite_or_nan = A::less_than(simd, negative_infinity, max[vector]);
        A::select(simd, is_finite_or_nan, max[vector], A::splat(simd, A::ZERO))
    });
    let mut block_sum = [A::splat(simd, A::ZERO); ROW_VECTORS];
    for scores in scores.iter_mut() {
        for vector in 0..ROW_VECTORS {
            let prob = A::exp2(simd, A::sub(simd, scores[vector], reference[vector]));
            block_sum[vector] = A::add(simd, block_sum[vector], prob);
            scores[vector] = prob;
        }
    }
    for vector in 0..ROW_VECTORS {
        let rescale = A::exp2(simd, A::sub(simd, old_max[vector], reference[vector]));
        state.rescale[vector] = rescale;
        state.running_sum[vector] = A::mul_add(simd, state.running_sum[vector], rescale, block_sum[vector]);
        state.running_max[vector] = max[vector];
    }
}
