//! The streaming softmax: running maximum, running sum, rescaling.
//!
//! For one block of scores of a row, with m the running maximum and s the running sum:
//!
//! ```text
//! m' = max(m, max_j score[j])      reference m'' = m' but 0 where m' = -inf, so that -inf - -inf never occurs
//! prob[j] = e^(score[j] - m'')     0 for hidden keys, whose score is -inf
//! s' = s * e^(m - m'') + (sum_j prob[j])        the block is summed on its own: a sequential f32 sum over 64k keys
//!                                               loses 1e-5
//! ```
//! NaN: `max` may keep or drop it, but e^(NaN - m'') is NaN and enters sum and product, so the row is NaN either way.

use pulp::Simd;

use crate::kernels::MAX_LANES;
use crate::kernels::lane::Lane;

/// State of one panel's rows, `[ROW_VECTORS]` vectors each, and the old maximum on entry in `rescale`.
pub(crate) struct RowState<'a, V> {
    pub(crate) running_max: &'a mut [V],
    pub(crate) running_sum: &'a mut [V],
    /// On entry the maximum before this block; then what the old `out_acc` must be multiplied with.
    pub(crate) rescale: &'a mut [V],
}

/// Turns a block of scores `[keys][ROW_VECTORS]` into unnormalised probabilities and updates the rows' state. Where
/// `max_is_known`, `running_max` contains the maximum of the block already. Only the first `vectors` of rows take part.
#[inline(always)]
pub(crate) fn softmax_step<S: Simd, A: Lane, const ROW_VECTORS: usize>(
    simd: S,
    scores: &mut [[A::Vector<S>; ROW_VECTORS]],
    state: RowState<'_, A::Vector<S>>,
    vectors: usize,
    max_is_known: bool,
) {
    // One vector of rows at a time: its state and the constants of exp then stay in 16 registers. Interleaving two
    // vectors reloads the constants in every step (25 instead of 20 instructions a vector on AVX2).
    for vector in 0..ROW_VECTORS {
        if vector >= vectors {
            break;
        }
        let old_max = state.rescale[vector];
        let mut max = state.running_max[vector];
        if !max_is_known {
            for scores in scores.iter() {
                max = A::max(simd, scores[vector], max);
            }
        }
        let is_finite = A::less_than(simd, A::splat(simd, A::NEG_INFINITY), max);
        let reference = A::select(simd, is_finite, max, A::splat(simd, A::ZERO));
        let mut block_sum = A::splat(simd, A::ZERO);
        for scores in scores.iter_mut() {
            let prob = A::exp(simd, A::sub(simd, scores[vector], reference));
            block_sum = A::add(simd, block_sum, prob);
            scores[vector] = prob;
        }
        let rescale = A::exp(simd, A::sub(simd, old_max, reference));
        state.rescale[vector] = rescale;
        state.running_sum[vector] = A::mul_add(simd, state.running_sum[vector], rescale, block_sum);
        state.running_max[vector] = max;
    }
}

/// The same for one row whose keys lie in the lanes. `scores` are not scaled yet, and a whole number of vectors: what
/// lies behind the first `keys` is padding, which gets a weight of 0. Gives the rescale of the old `out_acc`.
#[inline(always)]
pub(crate) fn softmax_row<S: Simd, A: Lane>(
    simd: S,
    (scores, keys): (&mut [A], usize),
    scale: A,
    is_first_block: bool,
    running_max: &mut A,
    running_sum: &mut A,
) -> A {
    let lanes = A::lanes::<S>();
    let old_max = *running_max;
    if keys <= KEYS_IN_REGISTERS && is_first_block {
        (*running_max, *running_sum) = softmax_of_few(simd, &mut scores[..keys], scale);
        return A::ZERO;
    }
    let scale = A::splat(simd, scale);
    let mut max = A::splat(simd, old_max);
    for scores in scores[..keys.next_multiple_of(lanes)].chunks_exact_mut(lanes) {
        let scaled = A::mul(simd, A::load_slice::<S>(scores), scale);
        A::store_slice::<S>(scores, scaled);
    }
    scores[keys..].fill(A::NEG_INFINITY);
    for scores in scores.chunks_exact(lanes) {
        max = A::max(simd, A::load_slice::<S>(scores), max);
    }
    let max = A::reduce_max(simd, max);
    let reference = A::splat(simd, if max > A::NEG_INFINITY { max } else { A::ZERO });
    let mut block_sum = A::splat(simd, A::ZERO);
    for scores in scores.chunks_exact_mut(lanes) {
        let prob = A::exp(simd, A::sub(simd, A::load_slice::<S>(scores), reference));
        block_sum = A::add(simd, block_sum, prob);
        A::store_slice::<S>(scores, prob);
    }
    let block_sum = A::reduce_sum(simd, block_sum);
    let rescale = A::first_lane::<S>(A::exp(simd, A::sub(simd, A::splat(simd, old_max), reference)));
    *running_sum = running_sum.mul_scalar(rescale).add_scalar(block_sum);
    *running_max = max;
    rescale
}

/// The same for a few rows that see the same keys, a whole number of vectors: what is done once for a row is done once for all of
/// them. Row `r` begins with element `r * stride` of `scores`.
#[inline(always)]
pub(crate) fn softmax_rows<S: Simd, A: Lane, const ROWS: usize>(
    simd: S,
    (scores, stride, keys): (&mut [A], usize, usize),
    scale: A,
    running_max: &mut [A],
    running_sum: &mut [A],
) -> [A; ROWS] {
    let lanes = A::lanes::<S>();
    let scale = A::splat(simd, scale);
    let mut maxima = [A::splat(simd, A::NEG_INFINITY); ROWS];
    for row in 0..ROWS {
        for scores in scores[row * stride..][..keys].chunks_exact_mut(lanes) {
            let scaled = A::mul(simd, A::load_slice::<S>(scores), scale);
            maxima[row] = A::max(simd, scaled, maxima[row]);
            A::store_slice::<S>(scores, scaled);
        }
    }
    let maxima = A::reduce_maxima(simd, maxima);
    // One exponential for all rows: their differences, a lane each.
    let (mut references, mut differences) = ([A::ZERO; ROWS], [A::ZERO; MAX_LANES]);
    for row in 0..ROWS {
        let old_max = running_max[row];
        let max = if maxima[row] > old_max { maxima[row] } else { old_max };
        references[row] = if max > A::NEG_INFINITY { max } else { A::ZERO };
        differences[row] = old_max.sub_scalar(references[row]);
        running_max[row] = max;
    }
    let mut factors = [A::ZERO; MAX_LANES];
    let mut row = 0;
    while row < ROWS {
        A::store_slice::<S>(&mut factors[row..], A::exp(simd, A::load_slice::<S>(&differences[row..])));
        row += lanes;
    }
    let mut sums = [A::splat(simd, A::ZERO); ROWS];
    for row in 0..ROWS {
        let reference = A::splat(simd, references[row]);
        for scores in scores[row * stride..][..keys].chunks_exact_mut(lanes) {
            let prob = A::exp(simd, A::sub(simd, A::load_slice::<S>(scores), reference));
            sums[row] = A::add(simd, sums[row], prob);
            A::store_slice::<S>(scores, prob);
        }
    }
    let sums = A::reduce_sums(simd, sums);
    let mut rescale = [A::ZERO; ROWS];
    for row in 0..ROWS {
        rescale[row] = factors[row];
        running_sum[row] = running_sum[row].mul_scalar(rescale[row]).add_scalar(sums[row]);
    }
    rescale
}

/// Up to this many keys a row's scores stay in registers: as a vector they would go through memory, where a load that
/// spans several stores waits for them. [measured, 8 heads of T = 2, AVX2] 801 ns through memory, 642 ns this way.
const KEYS_IN_REGISTERS: usize = 4;

/// Unscaled scores to probabilities, for the first and only keys of a row. Gives maximum and sum.
#[inline(always)]
fn softmax_of_few<S: Simd, A: Lane>(simd: S, scores: &mut [A], scale: A) -> (A, A) {
    if let [score] = scores
        && score.mul_scalar(scale) > A::NEG_INFINITY
    {
        // One key has all the weight, however small its score; NaN where the score is infinite. (One of -inf has the weight 0, beside a sink.)
        let max = score.mul_scalar(scale);
        *score = max.mul_scalar(A::ZERO).add_scalar(A::from_index(1));
        return (max, *score);
    }
    let mut max = A::NEG_INFINITY;
    for score in scores.iter_mut() {
        *score = score.mul_scalar(scale);
        if *score > max {
            max = *score; // NaN never is: it shows in the sum
        }
    }
    let reference = if max > A::NEG_INFINITY { max } else { A::ZERO };
    let mut sum = A::ZERO;
    for score in scores.iter_mut() {
        let difference = A::sub(simd, A::splat(simd, *score), A::splat(simd, reference));
        *score = A::first_lane::<S>(A::exp(simd, difference));
        sum = sum.add_scalar(*score);
    }
    (max, sum)
}
