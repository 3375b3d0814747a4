//! Windows, prefixes, offsets, boolean masks and biases: what a row sees, what it costs, and what hidden keys cannot do.

use crate::common::{
    BoolTensor, Expected, Layout, Number, Operands, Problem, Tensor, by_cost, by_profile, by_types, for_each_pair,
    instruction_sets, one_head, run_on,
};
use fused_attention::{
    AttentionConfig, AttentionError, AttentionPlan, AttentionShape, CausalAlignment, KvPadding, attention,
};

/// Keys around which a window may go wrong: tiles, panels, blocks of keys, and their neighbours.
const EDGES: [usize; 13] = [1, 2, 3, 6, 7, 12, 16, 17, 64, 65, 191, 192, 193];

/// Some configs, that each show another part of a small problem.
fn some_configs() -> Vec<AttentionConfig> {
    use CausalAlignment::{Offset, TopLeft};
    let (causal, full) = (AttentionConfig::causal(), AttentionConfig::full());
    vec![
        AttentionConfig::sliding_window(1),
        AttentionConfig::sliding_window(5),
        AttentionConfig::sliding_window(40).with_causal_alignment(TopLeft),
        full.with_window(Some(3), Some(9)),
        full.with_window(None, Some(20)),
        full.with_window(Some(20), None),
        causal.with_causal_alignment(Offset(7)),
        causal.with_causal_alignment(Offset(-9)),
        causal.with_prefix_len(11),
        AttentionConfig::sliding_window(4).with_prefix_len(3),
        full.with_window(Some(2), Some(1)).with_prefix_len(50),
        causal.with_causal_alignment(TopLeft).with_window(Some(6), None).with_prefix_len(1),
    ]
}

/// For prefill and for decode, with groups of heads.
fn shapes<T: Number, K: Number>() -> Vec<AttentionShape> {
    let base = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(41, 83, 19, 13) };
    let shapes = [
        base,
        AttentionShape { q_len: 3, ..base },
        AttentionShape { q_len: 70, kv_len: 30, ..base },
        AttentionShape { q_len: 1, kv_len: 300, ..base },
        AttentionShape { q_len: 5, kv_len: 2, num_kv_heads: 4, ..base },
    ];
    let small = AttentionShape { batch: 1, q_len: 23, kv_len: 49, ..base };
    let few = [small, AttentionShape { q_len: 2, ..small }];
    by_cost::<T, K, _>(shapes.to_vec(), |is_slow| if is_slow { few.to_vec() } else { shapes[..2].to_vec() })
}

fn assert_right<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, config: &AttentionConfig) {
    let expected = Expected::new(problem, config);
    for set in instruction_sets() {
        let answer = run_on(set, problem, config);
        expected.assert_met_by(&answer, &(set, problem.shape(), config));
    }
}

#[test]
fn windows_prefixes_and_offsets_match_the_reference() {
    for_each_pair!(windows_prefixes_and_offsets_match_the_reference_for);
}

fn windows_prefixes_and_offsets_match_the_reference_for<T: Number, K: Number<Real = T::Real>>() {
    let configs: Vec<_> = some_configs().into_iter().step_by(by_profile(1, 3)).collect();
    for (shape, config) in shapes::<T, K>().iter().flat_map(|shape| configs.iter().map(move |config| (shape, config))) {
        assert_right(&Problem::<T, K>::normal(shape, 1), config);
    }
}

#[test]
fn windows_of_every_size_match_the_reference() {
    let shapes = [one_head(40, 40, 8, 8), one_head(30, 230, 8, 8), one_head(2, 230, 8, 8), one_head(230, 30, 4, 4)];
    for shape in by_profile(shapes.to_vec(), shapes[1..3].to_vec()) {
        let problem: Problem = Problem::normal(&shape, 2);
        for window in EDGES.into_iter().chain([shape.kv_len - 1, shape.kv_len, shape.kv_len + 1, usize::MAX]) {
            assert_right(&problem, &AttentionConfig::sliding_window(window));
            assert_right(&problem, &AttentionConfig::full().with_window(Some(window), Some(window / 2)));
            assert_right(&problem, &AttentionConfig::sliding_window(window).with_prefix_len(window / 3 + 1));
            assert_right(&problem, &AttentionConfig::causal().with_prefix_len(window));
        }
    }
}

#[test]
fn a_window_that_reaches_every_key_is_none() {
    let shape = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(41, 83, 19, 13) };
    for shape in [shape, AttentionShape { q_len: 2, ..shape }] {
        let problem: Problem = Problem::normal(&shape, 3);
        for set in instruction_sets() {
            let causal = run_on(set, &problem, &AttentionConfig::causal()).bits();
            for window in [83, 84, 1000, usize::MAX] {
                assert_eq!(run_on(set, &problem, &AttentionConfig::sliding_window(window)).bits(), causal, "{set}");
            }
            let full = run_on(set, &problem, &AttentionConfig::full()).bits();
            let prefix = AttentionConfig::causal().with_prefix_len(usize::MAX);
            assert_eq!(run_on(set, &problem, &prefix).bits(), full, "{set}");
            let offset = AttentionConfig::causal().with_causal_alignment(CausalAlignment::Offset(isize::MAX));
            assert_eq!(run_on(set, &problem, &offset).bits(), full, "{set}");
        }
    }
}

#[test]
fn chunks_of_a_prompt_match_the_whole() {
    let tokens = by_profile(100, 40);
    let whole: Problem = Problem::normal(&one_head(tokens, tokens, 16, 16), 4);
    for set in instruction_sets() {
        let expected = run_on(set, &whole, &AttentionConfig::causal());
        for (start, end) in [(0, 1), (3, 24), (tokens - 17, tokens)] {
            // Later keys are in the cache already.
            let chunk = Problem { q: whole.q.part(2, start..end), ..whole.clone() };
            let config = AttentionConfig::causal().with_causal_alignment(CausalAlignment::Offset(start as isize));
            let answer = run_on(set, &chunk, &config);
            for query in start..end {
                let (found, expected) =
                    (answer.row_values([0, 0, query - start]).0, expected.row_values([0, 0, query]).0);
                assert!(crate::common::max_abs_error(&found, &expected) < 1e-5, "{set} {query}");
            }
        }
    }
}

#[test]
fn lengths_move_windows_and_prefixes() {
    let shape = AttentionShape { batch: 3, num_heads: 2, num_kv_heads: 1, ..one_head(20, 90, 8, 8) };
    for (q_len, padding) in
        [20, 2].into_iter().flat_map(|q_len| [KvPadding::Left, KvPadding::Right].map(|p| (q_len, p)))
    {
        let mut problem: Problem = Problem::normal(&AttentionShape { q_len, ..shape }, 5);
        problem.operands = Operands::all(&problem.shape(), 5, [false; 4]);
        problem.operands.kv_lens = Some(vec![90, 0, 31]);
        for config in some_configs() {
            assert_right(&problem, &config.with_kv_padding(padding).with_softcap(2.0));
        }
    }
}

#[test]
fn boolean_masks_and_biases_match_the_reference_however_they_are_broadcast() {
    for_each_pair!(boolean_masks_and_biases_match_the_reference_for);
}

fn boolean_masks_and_biases_match_the_reference_for<T: Number, K: Number<Real = T::Real>>() {
    let all = (0..16).map(|bits| [0, 1, 2, 3].map(|axis| bits >> axis & 1 == 1)).collect();
    let few = by_profile(
        vec![[false; 4], [true, true, false, false], [false, false, true, false]],
        vec![[true, true, false, false]],
    );
    for broadcast in by_profile(by_types::<T, K, _>(all, few.clone()), few) {
        for shape in shapes::<T, K>() {
            let mut problem = Problem::<T, K>::normal(&shape, 6);
            let Operands { mask, bias, .. } = Operands::all(&shape, 6, broadcast);
            for (mask, bias) in [(mask.clone(), None), (None, bias.clone()), (mask, bias)] {
                problem.operands = Operands { mask, bias, ..Operands::default() };
                assert_right(&problem, &AttentionConfig::causal());
                assert_right(&problem, &AttentionConfig::full());
            }
        }
    }
}

#[test]
fn true_means_may_attend() {
    // Query i sees the keys from i on: the mirror image of causal, so that neither polarity nor axes can be swapped.
    let values = [1.0f32, 10.0, 100.0, 1000.0];
    for q_len in [4, 1] {
        let mut problem: Problem = Problem::new(
            Tensor::from_fn([1, 8, q_len, 4], Layout::Bhsd, |_| 0.0),
            Tensor::from_fn([1, 8, 4, 4], Layout::Bhsd, |_| 0.0),
            Tensor::from_fn([1, 8, 4, 1], Layout::Bhsd, |[_, _, key, _]| values[key]),
        );
        problem.operands.mask = Some(BoolTensor::from_fn([1, 1, q_len, 4], |[_, _, query, key]| key >= query));
        for set in instruction_sets() {
            let answer = run_on(set, &problem, &AttentionConfig::full());
            for (query, expected) in
                [1111.0 / 4.0, 1110.0 / 3.0, 1100.0 / 2.0, 1000.0].into_iter().take(q_len).enumerate()
            {
                let found = answer.row_values([0, 3, query]).0[0];
                assert!((found - expected).abs() < 1e-3, "{set}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn strided_masks_and_biases_match_contiguous_ones() {
    for_each_pair!(strided_masks_and_biases_match_contiguous_ones_for);
}

fn strided_masks_and_biases_match_contiguous_ones_for<T: Number, K: Number<Real = T::Real>>() {
    for shape in shapes::<T, K>() {
        let mut problem = Problem::<T, K>::normal(&shape, 7);
        problem.operands = Operands::all(&shape, 7, [false; 4]);
        for set in instruction_sets() {
            let expected = run_on(set, &problem, &AttentionConfig::causal()).bits();
            for layout in Layout::DISTINCT {
                let mut strided = problem.clone();
                strided.operands.mask = problem.operands.mask.as_ref().map(|mask| mask.in_layout(layout));
                strided.operands.bias = problem.operands.bias.as_ref().map(|bias| bias.in_layout(layout));
                assert_eq!(run_on(set, &strided, &AttentionConfig::causal()).bits(), expected, "{set} {layout:?}");
            }
        }
    }
}

#[test]
fn a_bias_of_minus_infinity_is_a_mask() {
    for_each_pair!(a_bias_of_minus_infinity_is_a_mask_for);
}

fn a_bias_of_minus_infinity_is_a_mask_for<T: Number, K: Number<Real = T::Real>>() {
    for shape in shapes::<T, K>() {
        let mut problem = Problem::<T, K>::normal(&shape, 8);
        let mask = Operands::<T>::all(&shape, 8, [false; 4]).mask.unwrap();
        let bias = Tensor::from_fn(mask.shape, Layout::Bhsd, |index| {
            let shown = crate::common::operands::broadcast(&mask.view(), index);
            T::nearest(if shown { 0.0 } else { f64::NEG_INFINITY })
        });
        for set in instruction_sets() {
            problem.operands = Operands { mask: Some(mask.clone()), ..Operands::default() };
            let expected = run_on(set, &problem, &AttentionConfig::causal()).bits();
            problem.operands = Operands { bias: Some(bias.clone()), ..Operands::default() };
            assert_eq!(run_on(set, &problem, &AttentionConfig::causal()).bits(), expected, "{set}");
        }
    }
}

#[test]
fn a_mask_that_draws_the_causal_triangle_is_causal() {
    for q_len in [37, 2] {
        let shape = AttentionShape { num_heads: 2, ..one_head(q_len, 90, 8, 8) };
        let mut problem: Problem = Problem::normal(&shape, 9);
        for set in instruction_sets() {
            problem.operands.mask = None;
            let expected = run_on(set, &problem, &AttentionConfig::causal());
            problem.operands.mask =
                Some(BoolTensor::from_fn([1, 1, q_len, 90], |[_, _, query, key]| key + q_len <= query + 90));
            let answer = run_on(set, &problem, &AttentionConfig::full());
            let expected: Vec<f64> = expected.out.values().iter().map(|&x| x.into()).collect();
            assert!(crate::common::max_abs_error(&answer.out.values(), &expected) < 1e-6, "{set}");
        }
    }
}

#[test]
fn rows_that_see_nothing_are_zero_however_they_are_hidden() {
    for_each_pair!(rows_that_see_nothing_are_zero_for);
}

fn rows_that_see_nothing_are_zero_for<T: Number, K: Number<Real = T::Real>>() {
    let shape = AttentionShape { batch: 1, num_heads: 2, num_kv_heads: 1, ..one_head(37, 83, 9, 7) };
    for shape in [shape, AttentionShape { q_len: 3, ..shape }, AttentionShape { q_len: 1, kv_len: 2, ..shape }] {
        let scores = [1, 1, shape.q_len, shape.kv_len];
        // NaN keys and values besides: they are hidden.
        let mut problem = Problem::<T, K>::normal(&shape, 10);
        problem.k.fill_row([0, 0, shape.kv_len - 1], K::nearest(f64::NAN));
        problem.v.fill_row([0, 0, shape.kv_len - 1], K::nearest(f64::NAN));
        let hides = |[_, _, query, _]: [usize; 4]| query % 2 == 0;
        let all_but_last = |[_, _, _, key]: [usize; 4]| key + 1 < shape.kv_len;
        let mask = BoolTensor::from_fn(scores, |index| !hides(index) && all_but_last(index));
        let bias = Tensor::from_fn(scores, Layout::Bhsd, |index| {
            T::nearest(if hides(index) || !all_but_last(index) { f64::NEG_INFINITY } else { 0.5 })
        });
        for operands in
            [Operands { mask: Some(mask), ..Operands::default() }, Operands { bias: Some(bias), ..Operands::default() }]
        {
            problem.operands = operands;
            for set in instruction_sets() {
                let answer = run_on(set, &problem, &AttentionConfig::full());
                for (query, head) in (0..shape.q_len).flat_map(|query| [(query, 0), (query, 1)]) {
                    let (out, logsumexp) = answer.row([0, head, query]);
                    if query % 2 == 0 {
                        assert!(out.iter().all(|x| x.bits() == 0), "{set}: {out:?}");
                        assert_eq!(logsumexp.value(), f64::NEG_INFINITY, "{set}");
                    } else {
                        assert!(out.iter().all(|x| x.value().is_finite()), "{set}: {out:?} {query}");
                        assert!(logsumexp.value().is_finite(), "{set}");
                    }
                }
            }
        }
        // By window and offset: no key lies so far before the others.
        problem.operands = Operands::default();
        let far = AttentionConfig::sliding_window(3).with_causal_alignment(CausalAlignment::Offset(1000));
        for set in instruction_sets() {
            let answer = run_on(set, &problem, &far);
            assert!(answer.out.values().iter().all(|x| x.bits() == 0), "{set}");
            assert!(answer.logsumexp.iter().all(|x| x.value() == f64::NEG_INFINITY), "{set}");
        }
    }
}

#[test]
fn visible_scores_of_minus_infinity_alone_are_nan_hidden_ones_are_not() {
    let shape = one_head(20, 40, 1, 2);
    for shape in [shape, AttentionShape { q_len: 2, ..shape }] {
        let mut problem: Problem = Problem::normal(&shape, 11);
        problem.q = Tensor::from_fn(problem.q.shape, Layout::Bhsd, |_| 1.0);
        problem.k = Tensor::from_fn(problem.k.shape, Layout::Bhsd, |_| f32::NEG_INFINITY);
        problem.operands.mask =
            Some(BoolTensor::from_fn([1, 1, shape.q_len, 40], |[_, _, query, key]| query == 1 && key == 7));
        for set in instruction_sets() {
            let answer = run_on(set, &problem, &AttentionConfig::full());
            let (hidden, visible) = (answer.row([0, 0, 0]), answer.row([0, 0, 1]));
            assert!(hidden.0 == [0.0; 2] && hidden.1 == f32::NEG_INFINITY, "{set}: {hidden:?}");
            assert!(visible.0.iter().all(|x| x.is_nan()) && visible.1.is_nan(), "{set}: {visible:?}");
        }
    }
}

#[test]
fn finite_biases_of_any_size_are_arithmetic() {
    for_each_pair!(finite_biases_of_any_size_are_arithmetic_for);
}

fn finite_biases_of_any_size_are_arithmetic_for<T: Number, K: Number<Real = T::Real>>() {
    let shape = AttentionShape { num_heads: 2, ..one_head(19, 70, 8, 5) };
    for shape in [shape, AttentionShape { q_len: 2, ..shape }] {
        let mut problem = Problem::<T, K>::normal(&shape, 12);
        problem.q = Tensor::from_fn(problem.q.shape, Layout::Bhsd, |_| T::nearest(0.0));
        let mean = |d: usize| (0..70).map(|key| problem.v.get([0, 0, key, d]).value()).sum::<f64>() / 70.0;
        let means: Vec<f64> = (0..5).map(mean).collect();
        for bias in [-1e30, -T::largest(), T::largest()] {
            let bias = T::nearest(bias);
            if bias.value().is_infinite() {
                continue; // -1e30 is no f16
            }
            problem.operands.bias = Some(Tensor::from_fn([1, 1, 1, 70], Layout::Bhsd, |_| bias));
            for set in instruction_sets() {
                let answer = run_on(set, &problem, &AttentionConfig::full());
                for query in 0..shape.q_len {
                    let (found, logsumexp) = answer.row_values([0, 1, query]);
                    assert!(
                        crate::common::max_abs_error(&found, &means) < 1e-6 + T::ulp(1.0),
                        "{set} {bias}: {found:?}"
                    );
                    assert!(logsumexp.is_finite(), "{set} {bias}");
                }
            }
        }
    }
}

#[test]
fn a_bias_of_nan_shows_in_exactly_the_rows_that_see_it() {
    for q_len in [37, 3] {
        let shape = AttentionShape { num_heads: 2, ..one_head(q_len, 83, 8, 5) };
        let mut problem: Problem = Problem::normal(&shape, 13);
        for nan in f32::nans() {
            problem.operands.bias = Some(Tensor::from_fn([1, 2, q_len, 83], Layout::Bhsd, |[_, head, query, key]| {
                if (head, query, key) == (1, 1, 70) { nan } else { 0.25 }
            }));
            // Hidden from the other row by the causal edge, or by the mask.
            for (set, hides) in instruction_sets().into_iter().flat_map(|set| [(set, false), (set, true)]) {
                problem.operands.mask =
                    hides.then(|| BoolTensor::from_fn([1, 1, q_len, 83], |[_, _, query, key]| (query, key) != (1, 70)));
                let answer = run_on(set, &problem, &AttentionConfig::full());
                for (head, query) in [0, 1].into_iter().flat_map(|head| (0..q_len).map(move |query| (head, query))) {
                    let is_nan = answer.row([0, head, query]).0.iter().all(|x| x.is_nan());
                    assert_eq!(is_nan, !hides && (head, query) == (1, 1), "{set} {head} {query}");
                }
            }
        }
    }
}

#[test]
fn hidden_keys_and_values_cannot_change_any_bit() {
    for_each_pair!(hidden_keys_and_values_cannot_change_any_bit_for);
}

fn hidden_keys_and_values_cannot_change_any_bit_for<T: Number, K: Number<Real = T::Real>>() {
    for shape in shapes::<T, K>() {
        let scores = [1, 1, 1, shape.kv_len];
        let is_hidden = |key: usize| key % 5 == 2 || (20..30).contains(&key);
        let mask = BoolTensor::from_fn(scores, |[_, _, _, key]| !is_hidden(key));
        let bias = Tensor::from_fn(scores, Layout::Bhsd, |[_, _, _, key]| {
            T::nearest(if is_hidden(key) { f64::NEG_INFINITY } else { 0.25 })
        });
        for operands in
            [Operands { mask: Some(mask), ..Operands::default() }, Operands { bias: Some(bias), ..Operands::default() }]
        {
            let mut clean = Problem::<T, K>::normal(&shape, 14);
            clean.operands = operands;
            let configs = [AttentionConfig::causal(), AttentionConfig::sliding_window(30).with_prefix_len(4)];
            for (set, config) in instruction_sets().into_iter().flat_map(|set| configs.map(|config| (set, config))) {
                let expected = run_on(set, &clean, &config.with_softcap(5.0));
                for garbage in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, K::largest()] {
                    let mut dirty = clean.clone();
                    for (batch, head, key) in (0..shape.batch)
                        .flat_map(|b| (0..shape.num_kv_heads).map(move |h| (b, h)))
                        .flat_map(|(b, h)| (0..shape.kv_len).map(move |key| (b, h, key)))
                        .filter(|&(.., key)| is_hidden(key))
                    {
                        dirty.k.fill_row([batch, head, key], K::nearest(garbage));
                        dirty.v.fill_row([batch, head, key], K::nearest(garbage));
                    }
                    let answer = run_on(set, &dirty, &config.with_softcap(5.0));
                    assert_eq!(answer.bits(), expected.bits(), "{set} {garbage} {shape:?} {config:?}");
                }
            }
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn threads_do_not_change_any_bit() {
    use crate::common::run;
    use fused_attention::Parallelism;
    let shape = AttentionShape { batch: 1, num_heads: 4, num_kv_heads: 2, ..one_head(300, 400, 32, 32) };
    for shape in [shape, AttentionShape { q_len: 2, kv_len: 3000, ..shape }] {
        let mut problem: Problem = Problem::normal(&shape, 15);
        problem.operands = Operands::all(&shape, 15, [true, false, false, false]);
        let config = AttentionConfig::sliding_window(200).with_prefix_len(30).with_softcap(3.0);
        for set in instruction_sets() {
            let config = config.with_instruction_set(set);
            let expected = run(&problem, &config.with_parallelism(Parallelism::Serial)).bits();
            for threads in [2, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let answer = pool.install(|| run(&problem, &config.with_parallelism(Parallelism::Rayon)));
                assert_eq!(answer.bits(), expected, "{set}, {threads} threads");
            }
        }
    }
}

#[test]
fn the_workspace_does_not_know_of_masks() {
    for (q_len, kv_len) in [(2048, 2048), (1, 4096), (100_000, 100_000)] {
        let shape = one_head(q_len, kv_len, 64, 64);
        let plain = AttentionPlan::new(&shape, &AttentionConfig::causal()).unwrap().workspace_len();
        for config in some_configs() {
            let plan = AttentionPlan::new(&shape, &config.with_softcap(10.0)).unwrap();
            assert!(plan.workspace_len() <= plain, "{config:?} at {q_len} x {kv_len}");
        }
    }
}

#[test]
fn operands_of_other_shapes_are_refused_with_both() {
    let shape = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(5, 7, 8, 8) };
    let mut problem: Problem = Problem::normal(&shape, 16);
    let scores = [2, 4, 5, 7];
    for axis in 0..4 {
        for size in [0, scores[axis] - 1, scores[axis] + 1] {
            if size == 1 {
                continue;
            }
            let mut found = scores;
            found[axis] = size;
            for operand in ["mask", "bias"] {
                problem.operands = match operand {
                    "mask" => Operands { mask: Some(BoolTensor::from_fn(found, |_| true)), ..Operands::default() },
                    _ => Operands { bias: Some(Tensor::from_fn(found, Layout::Bhsd, |_| 0.0)), ..Operands::default() },
                };
                let error = attention(&problem.inputs(), &AttentionConfig::causal()).unwrap_err();
                assert_eq!(error, AttentionError::ScoreShapeMismatch { operand, expected: scores, found });
                let message = error.to_string();
                assert!(message.contains(operand) && message.contains(&format!("{found:?}")), "{message}");
            }
        }
    }
}
