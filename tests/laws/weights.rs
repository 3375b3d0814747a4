//! Attention weights: what the f64 reference gives, and what must hold of any weights at all.

use crate::common::operands::visible;
use crate::common::{
    BoolTensor, Expected, KV_BLOCKS, Layout, Number, Operands, Problem, Tensor, by_types, for_each_pair,
    instruction_sets, one_head, run_on,
};
use crate::proptest_reference::{Case, batches_and_head_groups, case, dim, length, many_rows, proptest_config};
use crate::real_model;
use fused_attention::{
    AttentionConfig, AttentionError, AttentionShape, CausalAlignment, InstructionSet, KvPadding, attention,
    attention_weights,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

/// Weights are what comes out where the values are the identity, `[kv_len, kv_len]`.
fn with_identity_values<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>) -> Problem<T, K> {
    let [batch, kv_heads, kv_len, _] = problem.k.shape;
    let one = |[_, _, key, d]: [usize; 4]| K::exactly(if key == d { 1.0 } else { 0.0 });
    Problem {
        v: Tensor::from_fn([batch, kv_heads, kv_len, kv_len], Layout::Bhsd, one),
        v_lies_in_k: false,
        ..problem.clone()
    }
}

/// All heads and all queries of a shape.
fn everything(shape: &AttentionShape) -> (Vec<usize>, Vec<usize>) {
    ((0..shape.num_heads).collect(), (0..shape.q_len).collect())
}

/// Weights of all heads and rows, as f64.
fn all_weights<T: Number, K: Number<Real = T::Real>>(
    set: InstructionSet,
    problem: &Problem<T, K>,
    config: &AttentionConfig,
) -> Vec<f64> {
    let (heads, rows) = everything(&problem.shape());
    let weights = attention_weights(&problem.inputs(), &config.with_instruction_set(set), &heads, &rows).unwrap();
    weights.into_iter().map(Number::value).collect()
}

/// The laws of all weights, for some of the heads and rows of a case.
pub fn check_case<T: Number, K: Number<Real = T::Real>>(case: &Case) -> TestCaseResult {
    // In falling order and in rising, with gaps, one of them twice.
    let bit = |index: usize| case.seed >> (index % 61) & 1 == 1;
    let heads: Vec<usize> = (0..case.shape.num_heads).rev().filter(|&head| head == 0 || bit(head)).collect();
    let rows = (0..case.shape.q_len).filter(|&row| row % 16 < 8 || bit(row));
    let rows: Vec<usize> = rows.chain((0..case.shape.q_len).take(1)).collect();
    check(&case.problem::<T, K>(), &case.config, &heads, &rows)
}

fn check<T: Number, K: Number<Real = T::Real>>(
    problem: &Problem<T, K>,
    config: &AttentionConfig,
    heads: &[usize],
    rows: &[usize],
) -> TestCaseResult {
    let (shape, inputs) = (problem.shape(), problem.inputs());
    let AttentionShape { batch, num_heads, q_len, kv_len, .. } = shape;
    let expected = Expected::new(&with_identity_values(problem), config);
    // That of the output, whose values are at most 1, and what a weight has from the log-sum-exp.
    let [out_bound, logsumexp_bound] = expected.bounds();
    let bound = out_bound + logsumexp_bound;
    for set in instruction_sets() {
        let weights = attention_weights(&inputs, &config.with_instruction_set(set), heads, rows).unwrap();
        prop_assert_eq!(weights.len(), batch * heads.len() * rows.len() * kv_len);
        let heads = (0..batch).flat_map(|batch| heads.iter().map(move |&head| (batch, head)));
        let of_rows = heads.flat_map(|(batch, head)| rows.iter().map(move |&query| [batch, head, query]));
        for (row, weights) in of_rows.zip(weights.chunks_exact(kv_len.max(1))) {
            let index = (row[0] * num_heads + row[1]) * q_len + row[2];
            let (right, visible) = (&expected.reference.out[index * kv_len..][..kv_len], visible(&inputs, config, row));
            let mut is_visible = vec![false; kv_len];
            visible.iter().for_each(|&key| is_visible[key] = true);
            for (key, weight) in weights.iter().enumerate() {
                let (found, right) = (weight.value(), right[key]);
                let what = format!("{set}: weight of key {key} for {row:?} is {found:e}, not {right:e} +- {bound:e}");
                prop_assert!(is_visible[key] || weight.bits() == 0, "{what}, hidden");
                prop_assert!((found - right).abs() <= bound, "{what}");
                prop_assert!(right < 1e-30 || (found / right - 1.0).abs() < 0.1, "{what}");
            }
            let sum: f64 = weights.iter().map(|weight| weight.value()).sum();
            let sink = inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[row[1]].into());
            let expected = match visible.is_empty() {
                true => 0.0,
                false => 1.0 - (sink - expected.reference.logsumexp[index]).exp(),
            };
            let bound = 2.0 * logsumexp_bound + 2.0 * out_bound;
            prop_assert!((sum - expected).abs() <= bound, "{set}: weights of {row:?} sum to {sum}, not {expected}");
        }
    }
    Ok(())
}

#[test]
fn weights_of_batches_and_head_groups_match_the_reference() {
    let cases = case(batches_and_head_groups());
    proptest!(proptest_config(800, 12), |(case in cases)| (case.types.check_weights)(&case)?);
}

#[test]
fn weights_of_many_rows_match_the_reference() {
    proptest!(proptest_config(600, 6), |(case in case(many_rows()))| (case.types.check_weights)(&case)?);
}

#[test]
fn weights_of_many_keys_match_the_reference() {
    let shape =
        (1..=2usize, 1..=20usize, length(&KV_BLOCKS), dim(&[8])).prop_map(|(num_heads, q_len, kv_len, head_dim)| {
            AttentionShape { num_heads, ..one_head(q_len, kv_len, head_dim, 1) }
        });
    proptest!(proptest_config(120, 4), |(case in case(shape))| (case.types.check_weights)(&case)?);
}

/// One query and a few against keys of several chunks; more rows than one run of the pass has.
#[test]
fn weights_of_long_inputs_match_the_reference() {
    let shapes = [one_head(1, 2100, 8, 1), one_head(20, 1700, 4, 1), one_head(1100, 37, 4, 1)];
    for (shape, config) in shapes.into_iter().flat_map(|shape| {
        let sliding = AttentionConfig::sliding_window(30).with_prefix_len(3);
        [AttentionConfig::causal(), sliding].map(|config| (shape, config))
    }) {
        let (heads, rows) = everything(&shape);
        let mut problem = Problem::<f32>::normal(&shape, 3);
        problem.operands.alibi_slopes = Some(vec![0.01]);
        check(&problem, &config, &heads, &rows).unwrap();
    }
}

#[test]
fn weights_times_values_are_the_output() {
    for_each_pair!(weights_times_values_are_the_output_for);
}

fn weights_times_values_are_the_output_for<T: Number, K: Number<Real = T::Real>>() {
    let base = AttentionShape { batch: 2, num_heads: 6, num_kv_heads: 2, ..one_head(41, 83, 19, 13) };
    let shapes = [base, AttentionShape { q_len: 2, ..base }, AttentionShape { q_len: 1, kv_len: 1500, ..base }];
    for shape in by_types::<T, K, _>(shapes.to_vec(), shapes[..2].to_vec()) {
        let mut problem = Problem::<T, K>::normal(&shape, 1);
        problem.operands = Operands::all(&shape, 1, [true, false, false, false]);
        problem.operands.kv_lens = Some(vec![shape.kv_len - 5, shape.kv_len / 2]);
        let config = AttentionConfig::causal().with_softcap(3.0).with_prefix_len(2).with_window(Some(40), None);
        let config = config.with_kv_padding(KvPadding::Left);
        for set in instruction_sets() {
            let answer = run_on(set, &problem, &config);
            let weights = all_weights(set, &problem, &config);
            let rows = weights.chunks_exact(shape.kv_len);
            for (row, weights) in rows.enumerate() {
                let [query, head] = [row % shape.q_len, row / shape.q_len % shape.num_heads];
                let batch = row / shape.q_len / shape.num_heads;
                let (out, _) = answer.row_values([batch, head, query]);
                for (d, out) in out.into_iter().enumerate() {
                    let value = |key| problem.v.get([batch, head / shape.group_size(), key, d]).value();
                    let sum: f64 = weights.iter().enumerate().map(|(key, weight)| weight * value(key)).sum();
                    let tolerance = 40.0 * T::Real::epsilon() + T::epsilon() * sum.abs();
                    assert!((out - sum).abs() <= tolerance, "{set}: {out} in {batch}, {head}, {query}, not {sum}");
                }
            }
        }
    }
}

#[test]
fn weights_do_not_look_at_values_or_hidden_keys() {
    for q_len in [40, 3] {
        let shape = AttentionShape { num_heads: 2, num_kv_heads: 1, ..one_head(q_len, 60, 8, 8) };
        let mut problem: Problem = Problem::normal(&shape, 2);
        let shows = |[_, _, _, key]: [usize; 4]| key % 7 != 4;
        problem.operands.mask = Some(BoolTensor::from_fn([1, 1, 1, 60], shows));
        let config = AttentionConfig::causal();
        for set in instruction_sets() {
            let weights = all_weights(set, &problem, &config);
            let mut spoilt = problem.clone();
            for key in 0..60 {
                spoilt.v.fill_row([0, 0, key], f32::NAN);
            }
            for (key, value) in [(4, f32::NAN), (11, f32::INFINITY), (18, f32::NEG_INFINITY)] {
                spoilt.k.fill_row([0, 0, key], value);
            }
            assert_eq!(all_weights(set, &spoilt, &config), weights, "{set}");

            // A visible NaN makes the rows that see it NaN where they see keys, and leaves the others and what they hide.
            spoilt.k.fill_row([0, 0, 59], f32::NAN); // seen by the last query alone
            let found = all_weights(set, &spoilt, &config);
            for (index, (found, weight)) in found.iter().zip(&weights).enumerate() {
                let (row, key) = (index / 60 % q_len, index % 60);
                let is_nan = row == q_len - 1 && key % 7 != 4;
                assert!(if is_nan { found.is_nan() } else { found == weight }, "{set}: {found} at {row}, {key}");
            }
        }
    }
}

#[test]
fn rows_that_see_nothing_have_weights_of_zero() {
    for (q_len, sinks) in [(30, None), (30, Some(vec![1.5])), (2, None), (2, Some(vec![-2.0]))] {
        let mut problem: Problem = Problem::normal(&one_head(q_len, 20, 4, 4), 4);
        problem.operands.mask = Some(BoolTensor::from_fn([1, 1, q_len, 20], |[_, _, query, _]| query % 2 == 1));
        problem.operands.sinks = sinks;
        for set in instruction_sets() {
            let weights = all_weights(set, &problem, &AttentionConfig::full());
            for (query, weights) in weights.chunks_exact(20).enumerate() {
                let zeros = weights.iter().all(|weight| weight.to_bits() == 0);
                assert_eq!(zeros, query % 2 == 0, "{set}: {weights:?}");
                assert!(weights.iter().all(|weight| *weight > 0.0) || zeros, "{set}: {weights:?}");
            }
            problem.operands.kv_lens = Some(vec![0]);
            let weights = all_weights(set, &problem, &AttentionConfig::causal());
            assert!(weights.iter().all(|weight| weight.to_bits() == 0), "{set}: {weights:?}");
            problem.operands.kv_lens = None;
        }
    }
}

/// Where the rows of a call are not its last ones, the diagonal must not move.
#[test]
fn a_row_has_the_same_weights_alone_as_among_all() {
    let shape = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(33, 50, 8, 1) };
    let mut problem: Problem = Problem::normal(&shape, 5);
    problem.operands = Operands::all(&shape, 5, [false, true, false, false]);
    problem.operands.kv_lens = Some(vec![50, 41]);
    let configs = [CausalAlignment::BottomRight, CausalAlignment::TopLeft, CausalAlignment::Offset(7)]
        .map(|alignment| AttentionConfig::causal().with_causal_alignment(alignment));
    let windowed = AttentionConfig::full().with_window(Some(9), Some(4)).with_prefix_len(2);
    for config in configs.into_iter().chain([windowed, windowed.with_kv_padding(KvPadding::Left)]) {
        let (heads, rows) = everything(&shape);
        let all = attention_weights(&problem.inputs(), &config, &heads, &rows).unwrap();
        for [head, row] in [[0, 0], [1, 1], [2, 17], [3, 31], [3, 32]] {
            let found = attention_weights(&problem.inputs(), &config, &[head], &[row]).unwrap();
            for (batch, found) in found.chunks_exact(50).enumerate() {
                let expected = &all[((batch * 4 + head) * 33 + row) * 50..][..50];
                for (found, expected) in found.iter().zip(expected) {
                    let close = (found - expected).abs() <= 2e-6 && (*found == 0.0) == (*expected == 0.0);
                    assert!(close, "{config:?}: {found} instead of {expected} in row {row} of head {head}");
                }
            }
        }
    }
}

#[test]
fn heads_and_rows_out_of_range_are_refused_with_both_numbers() {
    let shape = AttentionShape { num_heads: 6, num_kv_heads: 3, ..one_head(5, 7, 4, 4) };
    let problem: Problem = Problem::normal(&shape, 6);
    let refused = |heads: &[usize], rows: &[usize]| {
        attention_weights(&problem.inputs(), &AttentionConfig::causal(), heads, rows).unwrap_err()
    };
    let error = refused(&[5, 6], &[0]);
    assert_eq!(error, AttentionError::HeadOutOfRange { head: 6, num_heads: 6 });
    assert_eq!(error.to_string(), "head 6 does not exist, q has 6");
    assert_eq!(refused(&[usize::MAX], &[]), AttentionError::HeadOutOfRange { head: usize::MAX, num_heads: 6 });
    let error = refused(&[0], &[4, 9]);
    assert_eq!(error, AttentionError::QueryRowOutOfRange { row: 9, q_len: 5 });
    assert_eq!(error.to_string(), "query row 9 does not exist, q has 5");
    assert_eq!(refused(&[], &[usize::MAX]), AttentionError::QueryRowOutOfRange { row: usize::MAX, q_len: 5 });

    // What attention itself refuses, even where nothing is asked for.
    let config = AttentionConfig::causal().with_softcap(-1.0);
    for rows in [&[][..], &[0]] {
        let error = attention_weights(&problem.inputs(), &config, &[0], rows).unwrap_err();
        assert_eq!(error, attention(&problem.inputs(), &config).unwrap_err());
    }
    let mut bad = problem.clone();
    bad.operands.sinks = Some(vec![0.0; 5]);
    let error = attention_weights(&bad.inputs(), &AttentionConfig::causal(), &[0], &[0]).unwrap_err();
    assert_eq!(error, attention(&bad.inputs(), &AttentionConfig::causal()).unwrap_err());
}

#[test]
fn no_heads_rows_keys_or_sequences_are_no_weights() {
    let shape = AttentionShape { num_heads: 2, num_kv_heads: 2, ..one_head(3, 4, 5, 6) };
    let weights = |shape: &AttentionShape, heads: &[usize], rows: &[usize]| {
        let problem: Problem = Problem::normal(shape, 7);
        attention_weights(&problem.inputs(), &AttentionConfig::causal(), heads, rows).unwrap().len()
    };
    assert_eq!(weights(&shape, &[], &[0, 1]), 0);
    assert_eq!(weights(&shape, &[1], &[]), 0);
    assert_eq!(weights(&AttentionShape { kv_len: 0, ..shape }, &[1], &[2]), 0);
    assert_eq!(weights(&AttentionShape { batch: 0, ..shape }, &[1], &[2]), 0);
    assert_eq!(weights(&AttentionShape { value_dim: 0, ..shape }, &[1], &[2]), 4);
}

#[test]
fn worked_examples_have_their_weights() {
    for name in ["identity_projection", "pronoun"] {
        let example = real_model::example(name);
        let tolerance = example["tolerance"].as_f64().unwrap() as f32;
        let mut config = AttentionConfig::full();
        config.softmax_scale = example["softmax_scale"].as_f64();
        let [q, k, v] = ["q", "k", "v"].map(|tensor| real_model::matrix(&example[tensor]));
        let problem = Problem::new(q, k, v);
        let row = example["row"].as_u64().unwrap() as usize;
        for set in instruction_sets() {
            let config = config.with_instruction_set(set);
            let weights = attention_weights(&problem.inputs(), &config, &[0], &[row]).unwrap();
            real_model::assert_close(&weights, &real_model::numbers(&example["weights"]), tolerance, name);
        }
    }
}

#[test]
fn causal_weights_are_lower_triangular_and_the_first_row_is_exact() {
    let shape = AttentionShape { num_heads: 2, num_kv_heads: 2, ..one_head(4, 4, 4, 4) };
    let problem: Problem = Problem::normal(&shape, 8);
    for set in instruction_sets() {
        let weights = all_weights(set, &problem, &AttentionConfig::causal());
        for (row, weights) in weights.chunks_exact(4).enumerate() {
            let query = row % 4;
            assert!(weights[query + 1..].iter().all(|&weight| weight == 0.0), "{set}: {weights:?}");
            assert!(weights[..=query].iter().all(|&weight| weight > 0.0), "{set}: {weights:?}");
            assert!(query > 0 || weights == [1.0, 0.0, 0.0, 0.0], "{set}: {weights:?}");
        }
    }
}

#[test]
fn weights_of_a_real_layer_times_its_values_are_its_context() {
    let (layer, heads) = (real_model::layer(), real_model::heads());
    for (config, context) in [(AttentionConfig::full(), "model_context"), (AttentionConfig::causal(), "causal_context")]
    {
        let context = real_model::model(context);
        let rows = [0, 1, 100, 101, 319];
        let chosen: Vec<usize> = (0..heads.len()).collect();
        let weights = attention_weights(&layer.inputs(), &config, &chosen, &rows).unwrap();
        let weights = weights.chunks_exact(real_model::LEN);
        let of_rows = chosen.iter().flat_map(|&index| rows.map(|row| (index, row)));
        for ((index, row), weights) in of_rows.zip(weights) {
            for d in 0..real_model::HEAD_DIM {
                let value = |key| layer.v.get([0, index, key, d]);
                let sum: f32 = weights.iter().enumerate().map(|(key, weight)| weight * value(key)).sum();
                let expected = context[row * real_model::D_MODEL + heads[index] * real_model::HEAD_DIM + d];
                assert!((sum - expected).abs() <= 5e-6, "head {index}, row {row}: {sum}, not {expected}");
            }
        }
    }
}
