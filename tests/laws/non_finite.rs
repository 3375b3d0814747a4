//! NaN and infinity: hidden ones change no bit, visible ones reach exactly the rows that see them.

use crate::common::{
    Answer, Layout, Number, Problem, Real, Tensor, by_types, for_each_pair, instruction_sets, masks_for, one_head,
    run_on, top_left, visible_keys,
};
use fused_attention::{AttentionConfig, AttentionShape, InstructionSet, reference};

/// What happens to a row that sees the poison.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Effect {
    /// Everything is NaN.
    AllNan,
    /// This feature of the output has this value (NaN for NaN), all else keeps its bits.
    OneDim(usize, f64),
    /// As in the reference, which is NaN or finite.
    AsReference,
}

/// Asserts that the rows that `sees` get the effect and all others keep their bits.
fn assert_effect<T: Number>(
    what: &dyn std::fmt::Debug,
    clean: &Answer<T>,
    poisoned: &Answer<T>,
    effect: &dyn Fn([usize; 3]) -> Option<Effect>,
    reference: &dyn Fn([usize; 3]) -> (Vec<f64>, f64),
) {
    let [batch, heads, q_len, _] = clean.out.shape;
    for row in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..q_len).map(move |i| [b, h, i]))) {
        let (out, logsumexp) = poisoned.row_values(row);
        match effect(row) {
            None => assert_eq!(poisoned.row_bits(row), clean.row_bits(row), "{row:?} does not see {what:?}"),
            Some(Effect::AllNan) => {
                assert!(out.iter().all(|x| x.is_nan()) && logsumexp.is_nan(), "{row:?} sees {what:?}: {out:?}");
            }
            Some(Effect::OneDim(poisoned_dim, value)) => {
                let (mut expected, expected_logsumexp) = clean.row_bits(row);
                let found = out[poisoned_dim];
                assert!(found == value || (found.is_nan() && value.is_nan()), "{row:?} sees {what:?}: {found}");
                expected[poisoned_dim] = poisoned.row(row).0[poisoned_dim].bits();
                assert_eq!(poisoned.row_bits(row), (expected, expected_logsumexp), "{row:?} sees {what:?}");
            }
            Some(Effect::AsReference) => {
                for (found, expected) in out.iter().zip(reference(row).0) {
                    let tolerance = 1e-5 + T::ulp(expected) / 2.0;
                    let same = if expected.is_nan() { found.is_nan() } else { (found - expected).abs() < tolerance };
                    assert!(same, "{row:?} sees {what:?}: {found}, not {expected}");
                }
            }
        }
    }
}

/// Where the poison is put, in batch 0, KV head 1.
#[derive(Debug, Clone, Copy)]
enum Target {
    KeyFeature(usize),
    WholeKey,
    ValueFeature(usize),
}

fn poison<T: Number, K: Number<Real = T::Real>>(
    problem: &Problem<T, K>,
    target: Target,
    key: usize,
    value: K,
) -> Problem<T, K> {
    let mut poisoned = problem.clone();
    match target {
        Target::KeyFeature(p) => poisoned.k.set([0, 1, key, p], value),
        Target::WholeKey => poisoned.k.fill_row([0, 1, key], value),
        Target::ValueFeature(d) => poisoned.v.set([0, 1, key, d], value),
    }
    poisoned
}

/// Two of a batch, 6 heads on 2: poison in one KV head must not reach the other's rows, which share its panel or not.
fn grouped<T: Number, K: Number<Real = T::Real>>(q_len: usize, kv_len: usize) -> Problem<T, K> {
    let shape = AttentionShape { batch: 2, num_heads: 6, num_kv_heads: 2, q_len, kv_len, head_dim: 7, value_dim: 9 };
    Problem::normal(&shape, 77)
}

/// Checks one poison on one set, under one mask.
fn check_poison<T: Number, K: Number<Real = T::Real>>(
    set: InstructionSet,
    config: &AttentionConfig,
    (problem, clean): (&Problem<T, K>, &Answer<T>),
    (target, key, value): (Target, usize, K),
) {
    let poisoned_problem = poison(problem, target, key, value);
    let poisoned = run_on(set, &poisoned_problem, config);
    let shape = problem.shape();
    let effect = |[batch, head, query]: [usize; 3]| {
        let sees = batch == 0 && head / shape.group_size() == 1 && key < visible_keys(config, &shape, query);
        sees.then_some(match target {
            Target::ValueFeature(d) => Effect::OneDim(d, value.value()),
            _ if value.value().is_nan() => Effect::AllNan,
            _ => Effect::AsReference,
        })
    };
    let reference = |row| reference::attention_row(&poisoned_problem.inputs(), config, row).unwrap();
    let what = (set, config, target, key, value, value.bits());
    assert_effect(&what, clean, &poisoned, &effect, &reference);
}

/// A row's own keys, the first key, and keys around tiles, panels and blocks.
fn poisoned_keys(kv_len: usize) -> Vec<usize> {
    let mut keys: Vec<usize> =
        [0, 1, 5, 8, 15, 30, 95, 96, 127, 128, 191, 192].into_iter().filter(|&key| key < kv_len).collect();
    keys.push(kv_len - 1);
    keys
}

#[test]
fn poison_reaches_exactly_the_rows_that_see_it() {
    for_each_pair!(poison_reaches_exactly_the_rows_that_see_it_for);
}

fn poison_reaches_exactly_the_rows_that_see_it_for<T: Number, K: Number<Real = T::Real>>() {
    let sizes = by_types::<T, K, _>(
        vec![(37, 45), (45, 37), (20, 230), (230, 50), (2, 230)],
        vec![(12, 29), (29, 12), (2, 21)],
    );
    let targets = [Target::KeyFeature(3), Target::ValueFeature(8), Target::WholeKey, Target::ValueFeature(0)];
    let targets = &targets[..by_types::<T, K, _>(4, 2)];
    for (q_len, kv_len) in sizes {
        let problem = grouped::<T, K>(q_len, kv_len);
        for set in instruction_sets() {
            for config in masks_for::<T, K>() {
                let clean = run_on(set, &problem, &config);
                for key in poisoned_keys(kv_len) {
                    for &target in targets {
                        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(K::exactly) {
                            check_poison(set, &config, (&problem, &clean), (target, key, value));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_nan_payload_reaches_exactly_the_rows_that_see_it() {
    for_each_pair!(every_nan_payload_reaches_exactly_the_rows_that_see_it_for);
}

fn every_nan_payload_reaches_exactly_the_rows_that_see_it_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, kv_len) in by_types::<T, K, _>(vec![(19, 21), (2, 30)], vec![(9, 10), (2, 10)]) {
        let problem = grouped::<T, K>(q_len, kv_len);
        for set in instruction_sets() {
            for config in masks_for::<T, K>() {
                let clean = run_on(set, &problem, &config);
                for value in K::nans() {
                    for key in [0, 7, kv_len - 1] {
                        for target in [Target::KeyFeature(0), Target::WholeKey, Target::ValueFeature(4)] {
                            check_poison(set, &config, (&problem, &clean), (target, key, value));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn nan_in_a_query_reaches_its_row_alone() {
    for_each_pair!(nan_in_a_query_reaches_its_row_alone_for);
}

fn nan_in_a_query_reaches_its_row_alone_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, kv_len) in [(37, 40), (40, 7), (2, 30)] {
        let problem = grouped::<T, K>(q_len, kv_len);
        for set in instruction_sets() {
            for config in masks_for::<T, K>() {
                let clean = run_on(set, &problem, &config);
                for (nan, query) in T::nans().into_iter().zip([0, 1, 4, 7, 8, 15, 16, 30, 36, 2].map(|i| i % q_len)) {
                    let mut poisoned = problem.clone();
                    poisoned.q.set([1, 4, query, 6], nan);
                    let sees_keys = visible_keys(&config, &problem.shape(), query) > 0;
                    let effect = |row| (row == [1, 4, query] && sees_keys).then_some(Effect::AllNan);
                    let answer = run_on(set, &poisoned, &config);
                    let what = (set, config, query, nan.bits());
                    assert_effect(&what, &clean, &answer, &effect, &|_| unreachable!());
                }
            }
        }
    }
}

/// NaN and infinity in everything that the last query does not see, at once: whole tail blocks of K and V.
#[test]
fn an_unwritten_cache_tail_changes_nothing() {
    for_each_pair!(an_unwritten_cache_tail_changes_nothing_for);
}

fn an_unwritten_cache_tail_changes_nothing_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, kv_len) in [(1, 16), (5, 40), (17, 200), (40, 400)] {
        let problem = Problem::<T, K>::normal(&one_head(q_len, kv_len, 8, 8), 5);
        for set in instruction_sets() {
            let clean = run_on(set, &problem, &top_left());
            for garbage in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, K::largest()].map(K::exactly) {
                let mut poisoned = problem.clone();
                for key in q_len..kv_len {
                    poisoned.k.fill_row([0, 0, key], garbage);
                    poisoned.v.fill_row([0, 0, key], garbage);
                }
                assert_eq!(run_on(set, &poisoned, &top_left()).bits(), clean.bits(), "{set} {garbage}");
            }
        }
    }
}

/// One query of one feature (scale 1), so that key `j` scores `scores[j]`; two value features.
///
/// Asked once with one row and once with 40 equal ones, which different kernels compute.
fn outs_of_scores<T: Number, K: Number<Real = T::Real>>(set: InstructionSet, scores: &[f64]) -> [(Vec<f64>, f64); 2] {
    let config = AttentionConfig::full().with_softmax_scale(1.0);
    [1, 40].map(|q_len| run_on(set, &scores_problem::<T, K>(scores, q_len), &config).row_values([0, 0, q_len / 2]))
}

fn scores_problem<T: Number, K: Number<Real = T::Real>>(scores: &[f64], q_len: usize) -> Problem<T, K> {
    Problem::new(
        Tensor::from_fn([1, 1, q_len, 1], Layout::Bhsd, |_| T::exactly(1.0)),
        Tensor::from_fn([1, 1, scores.len(), 1], Layout::Bhsd, |[_, _, j, _]| K::exactly(scores[j])),
        Tensor::from_fn([1, 1, scores.len(), 2], Layout::Bhsd, crate::common::pattern),
    )
}

/// Numbers of keys up to several blocks.
const KV_LENS: [usize; 6] = [1, 2, 13, 100, 200, 400];

#[test]
fn a_visible_score_of_infinity_gives_nan() {
    for_each_pair!(a_visible_score_of_infinity_gives_nan_for);
}

fn a_visible_score_of_infinity_gives_nan_for<T: Number, K: Number<Real = T::Real>>() {
    for kv_len in KV_LENS {
        for place in [0, kv_len / 2, kv_len - 1] {
            let mut scores = vec![0.5; kv_len];
            scores[place] = f64::INFINITY;
            for set in instruction_sets() {
                for (out, _) in outs_of_scores::<T, K>(set, &scores) {
                    assert!(out.iter().all(|x| x.is_nan()), "{set}: {out:?}");
                }
            }
        }
    }
}

#[test]
fn a_score_that_overflows_to_infinity_gives_nan() {
    for set in instruction_sets() {
        let mut problem = crate::common::normal_problem(&one_head(20, 30, 3, 4), 9);
        let clean = run_on(set, &problem, &AttentionConfig::causal());
        problem.q.fill_row([0, 0, 6], 3e30);
        problem.k.fill_row([0, 0, 2], 3e30);
        let answer = run_on(set, &problem, &AttentionConfig::causal());
        let (out, _) = answer.row([0, 0, 6]);
        assert!(out.iter().all(|x| x.is_nan()), "{set}: {out:?}");
        let (out, _) = answer.row([0, 0, 7]);
        assert!(out.iter().all(|x| x.is_finite()), "{set}: {out:?}");
        assert_eq!(clean.out.shape, answer.out.shape);
    }
}

#[test]
fn a_score_of_minus_infinity_takes_no_weight() {
    for_each_pair!(a_score_of_minus_infinity_takes_no_weight_for);
}

fn a_score_of_minus_infinity_takes_no_weight_for<T: Number, K: Number<Real = T::Real>>() {
    for kv_len in KV_LENS.into_iter().skip(1) {
        // All but one, or a whole beginning or end of several blocks.
        for finite in [0..1, kv_len - 1..kv_len, 0..kv_len.div_ceil(2), kv_len / 2..kv_len] {
            let infinite: Vec<f64> =
                (0..kv_len).map(|j| if finite.contains(&j) { 0.0 } else { f64::NEG_INFINITY }).collect();
            for set in instruction_sets() {
                for (out, logsumexp) in outs_of_scores::<T, K>(set, &infinite) {
                    for (d, out) in out.into_iter().enumerate() {
                        let sum: f64 = finite.clone().map(|j| crate::common::pattern::<K>([0, 0, j, d]).value()).sum();
                        let mean = sum / finite.len() as f64;
                        assert!(
                            (out - mean).abs() < 1e-5 + T::ulp(mean) / 2.0,
                            "{set}, {kv_len} keys, {finite:?} finite: {out}, not {mean}"
                        );
                    }
                    assert!((logsumexp - (finite.len() as f64).ln()).abs() < 2e-6, "{set}: {logsumexp}");
                }
            }
        }
    }
}

#[test]
fn only_scores_of_minus_infinity_give_nan_unlike_hidden_ones() {
    for_each_pair!(only_scores_of_minus_infinity_give_nan_unlike_hidden_ones_for);
}

fn only_scores_of_minus_infinity_give_nan_unlike_hidden_ones_for<T: Number, K: Number<Real = T::Real>>() {
    for kv_len in KV_LENS {
        for set in instruction_sets() {
            let mut scores = vec![f64::NEG_INFINITY; kv_len];
            for (out, _) in outs_of_scores::<T, K>(set, &scores) {
                assert!(out.iter().all(|x| x.is_nan()), "{set}: {out:?}");
            }
            // What is hidden does not count: the first rows see minus infinity only, the last one a number.
            scores.push(1.0);
            let answer = run_on(set, &scores_problem::<T, K>(&scores, kv_len + 1), &AttentionConfig::causal());
            for query in 0..kv_len {
                let (out, _) = answer.row_values([0, 0, query]);
                assert!(out.iter().all(|x| x.is_nan()), "{set}, row {query}: {out:?}");
            }
            let (out, _) = answer.row_values([0, 0, kv_len]);
            let value = |d| T::nearest(crate::common::pattern::<K>([0, 0, kv_len, d]).value()).value();
            assert!(out.iter().enumerate().all(|(d, &x)| x == value(d)), "{set}: {out:?}");
        }
    }
}

/// Also where whole blocks hold nothing else, so that their maximum is of no number.
#[test]
fn one_finite_key_among_nan_ones_does_not_hide_them() {
    for_each_pair!(one_finite_key_among_nan_ones_does_not_hide_them_for);
}

fn one_finite_key_among_nan_ones_does_not_hide_them_for<T: Number, K: Number<Real = T::Real>>() {
    for kv_len in [2, 13, 97, 129, 193, 200, 385] {
        for finite in [0, kv_len / 2, kv_len - 1] {
            let scores: Vec<f64> = (0..kv_len).map(|j| if j == finite { 1.0 } else { f64::NAN }).collect();
            for set in instruction_sets() {
                for (out, logsumexp) in outs_of_scores::<T, K>(set, &scores) {
                    let all_nan = out.iter().all(|x| x.is_nan()) && logsumexp.is_nan();
                    assert!(all_nan, "{set}: {kv_len} keys, only {finite} finite: {out:?}, logsumexp {logsumexp}");
                }
            }
        }
    }
}

/// In exact arithmetic no visible key has a weight of 0.
#[test]
fn a_visible_nan_value_shows_even_where_its_weight_underflows() {
    for_each_pair!(a_visible_nan_value_shows_even_where_its_weight_underflows_for);
}

fn a_visible_nan_value_shows_even_where_its_weight_underflows_for<T: Number, K: Number<Real = T::Real>>() {
    for kv_len in [2, 13, 200, 400] {
        for place in [0, kv_len / 2, kv_len - 2] {
            let mut scores = vec![-1000.0; kv_len];
            scores[kv_len - 1] = 0.0;
            for (q_len, set) in
                [3, 40].into_iter().flat_map(|q_len| instruction_sets().into_iter().map(move |s| (q_len, s)))
            {
                let mut problem = scores_problem::<T, K>(&scores, q_len);
                problem.v.set([0, 0, place, 1], K::exactly(f64::NAN));
                for config in [AttentionConfig::full(), AttentionConfig::causal()] {
                    let (out, _) = run_on(set, &problem, &config).row_values([0, 0, q_len - 1]);
                    assert!(out[1].is_nan() && out[0].is_finite(), "{set}, NaN at {place} of {kv_len}: {out:?}");
                }
            }
        }
    }
}

/// A row whose sum underflows to -0 must not show the sign of a hidden value (0 * v), nor whether one is NaN.
#[test]
fn hidden_values_do_not_choose_the_sign_of_zero() {
    for q_len in [8, 16] {
        check_sign_of_zero::<f32>(q_len, 400);
        check_sign_of_zero::<f64>(q_len, 400);
    }
}

fn check_sign_of_zero<A: Real>(q_len: usize, kv_len: usize) {
    let mut scores = vec![0.0; kv_len];
    scores[kv_len - 16] = 80.0; // raises the maximum so far that what came before underflows
    let mut problem = scores_problem::<A, A>(&scores, q_len);
    for key in 0..kv_len {
        let smallest_normal = 2f64.powi(A::MIN_EXPONENT);
        problem.v.fill_row([0, 0, key], A::exactly(if key == 0 { -smallest_normal } else { -0.0 }));
    }
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_softmax_scale(1.0);
        let bits = [1.0, -1.0, f64::NAN].map(A::exactly).map(|hidden| {
            let mut problem = problem.clone();
            problem.v.fill_row([0, 0, kv_len - 1], hidden);
            run_on(set, &problem, &config).row_bits([0, 0, q_len - 2])
        });
        assert!(bits[0] == bits[1] && bits[1] == bits[2], "{set}: {bits:x?}");
    }
}
