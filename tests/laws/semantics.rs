//! The semantics table of DESIGN.md, row by row, but for NaN and infinity (see `non_finite.rs`) and errors.

use crate::common::{
    Answer, Expected, Layout, Number, Problem, Tensor, by_types, for_each_pair, instruction_sets, masks, one_head,
    pattern, run_into, run_on, top_left, visible_keys,
};
use fused_attention::{AttentionConfig, AttentionError, AttentionOutputs, AttentionShape, attention, attention_into};

/// All scores equal and V the identity: each row of the output is its row of weights, `1 / visible` or 0.
fn uniform_weights<T: Number, K: Number<Real = T::Real>>(
    q_len: usize,
    kv_len: usize,
    group_size: usize,
) -> Problem<T, K> {
    Problem::new(
        Tensor::from_fn([1, group_size, q_len, 2], Layout::Bhsd, |_| T::exactly(0.0)),
        Tensor::from_fn([1, 1, kv_len, 2], Layout::Bhsd, pattern),
        Tensor::from_fn([1, 1, kv_len, kv_len], Layout::Bhsd, |[_, _, j, d]| {
            K::exactly(if j == d { 1.0 } else { 0.0 })
        }),
    )
}

/// As far as an output of this type and size may be from the right value: some units of the accumulator, and the rounding
/// to the type itself.
fn tolerance<T: Number>(size: f64) -> f64 {
    let rounding = if T::NAME == T::Real::NAME { 0.0 } else { T::ulp(size) / 2.0 };
    8.0 * T::Real::epsilon() * size + rounding
}

/// Asserts that row `query` of every head gives weight to the first `visible(query)` keys and no other.
fn assert_sees<T: Number, K: Number<Real = T::Real>>(
    problem: &Problem<T, K>,
    config: &AttentionConfig,
    visible: impl Fn(usize) -> usize,
) {
    let AttentionShape { num_heads, q_len, kv_len, .. } = problem.shape();
    for set in instruction_sets() {
        let answer = run_on(set, problem, config);
        for (head, query) in (0..num_heads).flat_map(|h| (0..q_len).map(move |i| (h, i))) {
            let (weights, logsumexp) = answer.row_values([0, head, query]);
            let visible = visible(query);
            for (key, &weight) in weights.iter().enumerate() {
                let expected = if key < visible { 1.0 / visible as f64 } else { 0.0 };
                assert!(
                    (key < visible || weight == 0.0) && (weight - expected).abs() <= tolerance::<T>(expected),
                    "{set} {q_len} x {kv_len}: query {query} of head {head} gives key {key} {weight}, not {expected}"
                );
            }
            let expected = (visible as f64).ln();
            assert!(
                logsumexp == expected || (logsumexp - expected).abs() < 16.0 * T::Real::epsilon(),
                "{set} {q_len} x {kv_len}: logsumexp of query {query} is {logsumexp}, not {expected}"
            );
        }
    }
}

/// (q_len, kv_len): the edge at every place of a tile, panel and block, and both longer.
fn mask_sizes<T: Number, K: Number>() -> Vec<(usize, usize)> {
    let small = [(1, 1), (1, 16), (2, 5), (5, 2), (16, 1), (7, 9), (17, 17), (33, 31), (31, 34)];
    let large = [(70, 200), (100, 97), (97, 130), (193, 193), (200, 70), (40, 390)];
    small.into_iter().chain(large.into_iter().take(by_types::<T, K, _>(6, 1))).collect()
}

#[test]
fn causal_is_aligned_bottom_right_by_default() {
    for_each_pair!(causal_is_aligned_bottom_right_by_default_for);
}

fn causal_is_aligned_bottom_right_by_default_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, kv_len) in mask_sizes::<T, K>() {
        for group_size in [1, 3] {
            let problem = uniform_weights::<T, K>(q_len, kv_len, group_size);
            let (q_len, kv_len) = (q_len as isize, kv_len as isize);
            // Query i sees the keys j <= i + kv_len - q_len.
            assert_sees(&problem, &AttentionConfig::causal(), |i| (i as isize + kv_len - q_len + 1).max(0) as usize);
        }
    }
}

#[test]
fn causal_is_aligned_top_left_on_request() {
    for_each_pair!(causal_is_aligned_top_left_on_request_for);
}

fn causal_is_aligned_top_left_on_request_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, kv_len) in mask_sizes::<T, K>() {
        for group_size in [1, 3] {
            let problem = uniform_weights::<T, K>(q_len, kv_len, group_size);
            assert_sees(&problem, &top_left(), |i| (i + 1).min(kv_len));
        }
    }
}

#[test]
fn full_attention_sees_every_key() {
    for_each_pair!(full_attention_sees_every_key_for);
}

fn full_attention_sees_every_key_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, kv_len) in mask_sizes::<T, K>() {
        assert_sees(&uniform_weights::<T, K>(q_len, kv_len, 2), &AttentionConfig::full(), |_| kv_len);
    }
}

#[test]
fn alignments_agree_on_square_shapes() {
    for_each_pair!(alignments_agree_on_square_shapes_for);
}

fn alignments_agree_on_square_shapes_for<T: Number, K: Number<Real = T::Real>>() {
    for len in [1, 5, 16, 40, 100] {
        let problem = Problem::<T, K>::normal(&one_head(len, len, 9, 9), 3);
        for set in instruction_sets() {
            let bottom_right = run_on(set, &problem, &AttentionConfig::causal());
            assert_eq!(bottom_right.bits(), run_on(set, &problem, &top_left()).bits(), "{set} {len}");
        }
    }
}

#[test]
fn a_row_that_sees_no_key_is_zero_with_negative_infinite_logsumexp() {
    for_each_pair!(a_row_that_sees_no_key_is_zero_with_negative_infinite_logsumexp_for);
}

fn a_row_that_sees_no_key_is_zero_with_negative_infinite_logsumexp_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, kv_len) in [(5, 2), (16, 1), (40, 7), (9, 0), (100, 33), (300, 100)] {
        let shape = AttentionShape { num_heads: 3, ..one_head(q_len, kv_len, 5, 6) };
        let problem = Problem::<T, K>::normal(&shape, 11);
        for set in instruction_sets() {
            let answer = run_on(set, &problem, &AttentionConfig::causal());
            for (head, query) in (0..3).flat_map(|h| (0..q_len).map(move |i| (h, i))) {
                let (out, logsumexp) = answer.row_values([0, head, query]);
                if query < q_len - kv_len {
                    assert!(out.iter().all(|&x| x == 0.0), "{set}: {out:?}");
                    assert_eq!(logsumexp, f64::NEG_INFINITY, "{set}");
                } else {
                    assert!(out.iter().all(|&x| x != 0.0 && x.is_finite()) && logsumexp.is_finite(), "{set}: {out:?}");
                }
            }
        }
    }
}

const SHAPE: AttentionShape =
    AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, q_len: 5, kv_len: 7, head_dim: 6, value_dim: 3 };

#[test]
fn an_empty_output_is_ok_and_nothing_is_written() {
    for_each_pair!(an_empty_output_is_ok_and_nothing_is_written_for);
}

fn an_empty_output_is_ok_and_nothing_is_written_for<T: Number, K: Number<Real = T::Real>>() {
    for empty in [
        AttentionShape { batch: 0, ..SHAPE },
        AttentionShape { num_heads: 0, ..SHAPE },
        AttentionShape { num_heads: 0, num_kv_heads: 0, ..SHAPE },
        AttentionShape { q_len: 0, ..SHAPE },
        AttentionShape { value_dim: 0, ..SHAPE },
        AttentionShape { batch: 0, num_heads: 0, num_kv_heads: 0, q_len: 0, kv_len: 0, value_dim: 0, ..SHAPE },
    ] {
        let problem = Problem::<T, K>::normal(&empty, 1);
        for set in instruction_sets() {
            for config in masks().map(|config| config.with_instruction_set(set)) {
                assert_eq!(attention(&problem.inputs(), &config), Ok(vec![]), "{empty:?}");
                // An output that has memory but no elements.
                let mut memory = [T::CANARY; 8];
                let out =
                    fused_attention::TensorViewMut::with_strides(&mut memory, problem.out_shape(), [1; 4]).unwrap();
                assert_eq!(attention_into(&problem.inputs(), &mut AttentionOutputs::new(out), &config), Ok(()));
                assert!(memory.iter().all(|x| x.bits() == T::CANARY.bits()), "{empty:?}");
            }
        }
    }
}

#[test]
fn logsumexp_does_not_need_values() {
    for_each_pair!(logsumexp_does_not_need_values_for);
}

fn logsumexp_does_not_need_values_for<T: Number, K: Number<Real = T::Real>>() {
    let problem = Problem::<T, K>::normal(&SHAPE, 1);
    let without = Problem { v: Tensor::from_fn([2, 2, 7, 0], Layout::Bhsd, |_| unreachable!()), ..problem.clone() };
    for set in instruction_sets() {
        let config = AttentionConfig::causal();
        assert_eq!(run_on(set, &without, &config).logsumexp, run_on(set, &problem, &config).logsumexp, "{set}");
    }
}

#[test]
fn without_keys_every_row_sees_none() {
    for_each_pair!(without_keys_every_row_sees_none_for);
}

fn without_keys_every_row_sees_none_for<T: Number, K: Number<Real = T::Real>>() {
    let problem = Problem::<T, K>::normal(&AttentionShape { kv_len: 0, ..SHAPE }, 1);
    for set in instruction_sets() {
        for config in masks() {
            for layout in Layout::DISTINCT {
                let answer = run_into(&problem, &config.with_instruction_set(set), layout);
                assert!(answer.out.values().iter().all(|x| x.value() == 0.0), "{set}");
                assert!(answer.logsumexp.iter().all(|x| x.value() == f64::NEG_INFINITY), "{set}");
            }
        }
    }
}

#[test]
fn no_features_is_an_error() {
    for_each_pair!(no_features_is_an_error_for);
}

fn no_features_is_an_error_for<T: Number, K: Number<Real = T::Real>>() {
    for shape in [SHAPE, AttentionShape { q_len: 0, ..SHAPE }, AttentionShape { kv_len: 0, ..SHAPE }] {
        let problem = Problem::<T, K>::normal(&AttentionShape { head_dim: 0, ..SHAPE }, 1);
        let error = attention(&problem.inputs(), &AttentionConfig::causal()).unwrap_err();
        assert!(matches!(error, AttentionError::ZeroHeadDim { .. }), "{shape:?}: {error}");
    }
}

/// Within the stated bound of the reference, on every instruction set.
fn assert_matches_reference<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, config: &AttentionConfig) {
    let expected = Expected::new(problem, config);
    for set in instruction_sets() {
        expected.assert_met_by(&run_on(set, problem, config), &(set, problem.shape(), config));
    }
}

#[test]
fn the_scale_is_one_over_the_root_of_head_dim_by_default() {
    for_each_pair!(the_scale_is_one_over_the_root_of_head_dim_by_default_for);
}

fn the_scale_is_one_over_the_root_of_head_dim_by_default_for<T: Number, K: Number<Real = T::Real>>() {
    for head_dim in [1, 4, 32, 64, 100] {
        let problem = Problem::<T, K>::normal(&one_head(20, 20, head_dim, 8), 5);
        let explicit = AttentionConfig::causal().with_softmax_scale(1.0 / (head_dim as f64).sqrt());
        for set in instruction_sets() {
            let by_default = run_on(set, &problem, &AttentionConfig::causal());
            assert_eq!(by_default.bits(), run_on(set, &problem, &explicit).bits(), "{set} {head_dim}");
        }
        assert_matches_reference(&problem, &AttentionConfig::causal());
    }
}

#[test]
fn a_negative_scale_turns_the_weights_around() {
    for_each_pair!(a_negative_scale_turns_the_weights_around_for);
}

fn a_negative_scale_turns_the_weights_around_for<T: Number, K: Number<Real = T::Real>>() {
    let problem = Problem::<T, K>::normal(&one_head(33, 50, 12, 9), 5);
    let mut mirrored = problem.clone();
    mirrored.q = problem.q.map(|q| T::exactly(-q.value()));
    for config in masks() {
        assert_matches_reference(&problem, &config.with_softmax_scale(-0.7));
        for set in instruction_sets() {
            let negative = run_on(set, &problem, &config.with_softmax_scale(-0.7));
            let positive = run_on(set, &mirrored, &config.with_softmax_scale(0.7));
            assert_eq!(negative.bits(), positive.bits(), "{set}");
        }
    }
}

#[test]
fn a_scale_of_zero_weighs_visible_keys_equally() {
    for_each_pair!(a_scale_of_zero_weighs_visible_keys_equally_for);
}

fn a_scale_of_zero_weighs_visible_keys_equally_for<T: Number, K: Number<Real = T::Real>>() {
    let problem = Problem::<T, K>::normal(&one_head(33, 50, 12, 9), 5);
    for config in masks() {
        for set in instruction_sets() {
            let zero = run_on(set, &problem, &config.with_softmax_scale(0.0));
            assert_eq!(zero.bits(), run_on(set, &problem, &config.with_softmax_scale(-0.0)).bits(), "{set}");
            for query in 0..33 {
                let visible = visible_keys(&config, &problem.shape(), query);
                let (out, logsumexp) = zero.row_values([0, 0, query]);
                for (d, out) in out.iter().enumerate() {
                    let mean = (0..visible).map(|j| problem.v.get([0, 0, j, d]).value()).sum::<f64>() / visible as f64;
                    assert!((out - mean).abs() < tolerance::<T>(mean.abs().max(1.0)), "{set}: {out} {mean}");
                }
                assert!((logsumexp - (visible as f64).ln()).abs() < 16.0 * T::Real::epsilon(), "{set}");
            }
        }
    }
}

/// One query; key `j` scores `scores[j]` (scale 1); V is the pattern.
fn with_scores<T: Number, K: Number<Real = T::Real>>(scores: &[f64]) -> Problem<T, K> {
    Problem::new(
        Tensor::from_fn([1, 1, 1, 1], Layout::Bhsd, |_| T::exactly(1.0)),
        Tensor::from_fn([1, 1, scores.len(), 1], Layout::Bhsd, |[_, _, j, _]| K::nearest(scores[j])),
        Tensor::from_fn([1, 1, scores.len(), 5], Layout::Bhsd, |[b, h, j, d]| pattern([b, h, j, d + 1])),
    )
}

fn answers_to_scores<T: Number, K: Number<Real = T::Real>>(scores: &[f64]) -> Vec<Answer<T>> {
    let config = AttentionConfig::full().with_softmax_scale(1.0);
    let problem = with_scores::<T, K>(scores);
    instruction_sets().into_iter().map(|set| run_on(set, &problem, &config)).collect()
}

#[test]
fn one_saturated_score_takes_all_the_weight() {
    for_each_pair!(one_saturated_score_takes_all_the_weight_for);
}

fn one_saturated_score_takes_all_the_weight_for<T: Number, K: Number<Real = T::Real>>() {
    // By less e^-x is still a number of the accumulator.
    let enough = if T::Real::NAME == "f64" { 800.0 } else { 100.0 };
    let largest = K::largest();
    let pairs = [(0.0, enough), (-enough, 0.0), (-largest / 64.0, largest / 64.0), (-largest / 3.0, largest / 3.0)];
    for kv_len in [1, 2, 13, 100, 300] {
        for winner in [0, kv_len / 2, kv_len - 1] {
            for (rest, most) in pairs {
                let scores: Vec<f64> = (0..kv_len).map(|j| if j == winner { most } else { rest }).collect();
                let problem = with_scores::<T, K>(&scores);
                for answer in answers_to_scores::<T, K>(&scores) {
                    let (out, logsumexp) = answer.row_values([0, 0, 0]);
                    for (d, &out) in out.iter().enumerate() {
                        let value = T::nearest(problem.v.get([0, 0, winner, d]).value()).value();
                        assert_eq!(out, value, "{kv_len} keys, {winner} scores {most}");
                    }
                    let most = problem.k.get([0, 0, winner, 0]).value();
                    assert!((logsumexp - most).abs() <= most.abs() * 2.0 * T::Real::epsilon(), "{logsumexp} {most}");
                }
            }
        }
    }
}

#[test]
fn equal_saturated_scores_share_the_weight() {
    for_each_pair!(equal_saturated_scores_share_the_weight_for);
}

fn equal_saturated_scores_share_the_weight_for<T: Number, K: Number<Real = T::Real>>() {
    let most = K::largest().sqrt() * 8.0; // 2048 in f16
    for kv_len in [2, 13, 100, 300] {
        let scores: Vec<f64> = (0..kv_len).map(|j| if j == 0 || j == kv_len - 1 { most } else { -most }).collect();
        let problem = with_scores::<T, K>(&scores);
        for answer in answers_to_scores::<T, K>(&scores) {
            for (d, out) in answer.row_values([0, 0, 0]).0.into_iter().enumerate() {
                let [first, last] = [0, kv_len - 1].map(|key| problem.v.get([0, 0, key, d]).value());
                let mean = (first + last) / 2.0;
                assert!((out - mean).abs() <= tolerance::<T>(1.0), "{out} {mean}");
            }
        }
    }
}

#[test]
fn a_large_offset_of_all_scores_changes_no_weight() {
    // 16384 + j/64 and j/64 are exact in f32, and so are their differences.
    for kv_len in [7, 100, 300] {
        let scores: Vec<f64> = (0..kv_len).map(|j| (j % 97) as f64 / 64.0).collect();
        let offset: Vec<f64> = scores.iter().map(|score| score - 16384.0).collect();
        for (plain, offset) in answers_to_scores::<f32, f32>(&scores).iter().zip(answers_to_scores::<f32, f32>(&offset))
        {
            let (plain, offset) = (plain.row([0, 0, 0]), offset.row([0, 0, 0]));
            for (a, b) in plain.0.iter().zip(&offset.0) {
                // Scores of 16384 are rounded to 1/512 in base 2.
                assert!((a - b).abs() < 2e-3, "{a} {b}");
            }
            assert!((plain.1 - 16384.0 - offset.1).abs() < 4e-3);
        }
    }
}

/// However the keys are cut into tiles: a score's rounding depends on the query and the key alone.
#[test]
fn equal_keys_get_equal_weights() {
    for_each_pair!(equal_keys_get_equal_weights_for);
}

fn equal_keys_get_equal_weights_for<T: Number, K: Number<Real = T::Real>>() {
    for q_len in [1, 5, 40] {
        for head_dim in [1, 7, 39, 64, 100] {
            for kv_len in by_types::<T, K, _>(vec![2, 3, 7, 11, 13, 30, 195], vec![7, 30]) {
                let mut problem = Problem::<T, K>::normal(&one_head(q_len, kv_len, head_dim, kv_len), 17);
                problem.q = problem.q.map(|q| T::nearest(20.0 * q.value())); // large scores, so that their rounding matters
                problem.k = problem.k.in_layout(Layout::BroadcastSeq);
                problem.v = uniform_weights::<T, K>(1, kv_len, 1).v;
                for set in instruction_sets() {
                    let answer = run_on(set, &problem, &AttentionConfig::full());
                    for query in 0..q_len {
                        let (weights, _) = answer.row([0, 0, query]);
                        let equal = weights.iter().all(|weight| *weight == weights[0]);
                        assert!(equal, "{set}: {q_len} x {kv_len}, head_dim {head_dim}: {weights:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn head_h_reads_kv_head_h_over_group_size() {
    for_each_pair!(head_h_reads_kv_head_h_over_group_size_for);
}

fn head_h_reads_kv_head_h_over_group_size_for<T: Number, K: Number<Real = T::Real>>() {
    for (num_kv_heads, group_size) in [(1, 1), (1, 5), (2, 3), (3, 2), (4, 1)] {
        let shape = AttentionShape {
            batch: 2,
            num_heads: num_kv_heads * group_size,
            num_kv_heads,
            q_len: 9,
            kv_len: 9,
            head_dim: 4,
            value_dim: 3,
        };
        let mut problem = Problem::<T, K>::normal(&shape, 2);
        // Every value of a KV head tells which one it is.
        problem.v = Tensor::from_fn(problem.v.shape, Layout::Bhsd, |[b, h, _, _]| K::exactly((10 * b + h + 1) as f64));
        for set in instruction_sets() {
            let answer = run_on(set, &problem, &AttentionConfig::causal());
            for (batch, head) in (0..2).flat_map(|b| (0..shape.num_heads).map(move |h| (b, h))) {
                let expected = (10 * batch + head / group_size + 1) as f64;
                for query in 0..9 {
                    let (out, _) = answer.row_values([batch, head, query]);
                    assert!(
                        out.iter().all(|x| (x - expected).abs() <= tolerance::<T>(expected)),
                        "{set}: {out:?}, not {expected}"
                    );
                }
            }
        }
    }
}
