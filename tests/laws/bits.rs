//! The same numbers give the same bits, however they lie in memory, whatever runs beside them, on any threads.

use crate::common::{
    Answer, BoolTensor, Generator, Layout, Number, Operands, Problem, Tensor, by_profile, by_types, for_each_pair,
    instruction_sets, masks_for, one_head, run, run_into, run_on,
};
use fused_attention::{
    AttentionConfig, AttentionOutputs, AttentionShape, CausalAlignment, InstructionSet, KvPadding, Parallelism,
    attention, attention_into,
};

/// Odd in every axis, two blocks of keys at least; with two panels of rows at least, and with a few rows, which another
/// kernel computes.
fn shapes<T: Number, K: Number>() -> [AttentionShape; 2] {
    let default =
        AttentionShape { batch: 2, num_heads: 6, num_kv_heads: 2, q_len: 37, kv_len: 203, head_dim: 19, value_dim: 13 };
    let small = AttentionShape { num_heads: 4, q_len: 19, head_dim: 9, value_dim: 7, ..default };
    let many = by_types::<T, K, _>(default, small);
    [many, AttentionShape { q_len: 2, ..many }]
}

fn serial(config: AttentionConfig, set: InstructionSet) -> AttentionConfig {
    config.with_instruction_set(set).with_parallelism(Parallelism::Serial)
}

/// Calls `check` with problems of [`shapes`], changed by `reshape`, on every instruction set under every mask.
fn for_each_problem<T: Number, K: Number<Real = T::Real>>(
    seed: u64,
    reshape: impl Fn(AttentionShape) -> AttentionShape,
    mut check: impl FnMut(&Problem<T, K>, AttentionConfig),
) {
    for shape in shapes::<T, K>() {
        let problem = Problem::normal(&reshape(shape), seed);
        for_each_config::<T, K>(|config| check(&problem, config));
    }
}

/// Calls `check` with every instruction set under [`masks_for`] these types.
fn for_each_config<T: Number, K: Number>(mut check: impl FnMut(AttentionConfig)) {
    for set in instruction_sets() {
        for config in masks_for::<T, K>() {
            check(config.with_instruction_set(set));
        }
    }
}

#[test]
fn strided_input_matches_contiguous() {
    for_each_pair!(strided_input_matches_contiguous_for);
}

fn strided_input_matches_contiguous_for<T: Number, K: Number<Real = T::Real>>() {
    for_each_problem::<T, K>(
        1,
        |shape| shape,
        |problem, config| {
            let expected = run(problem, &config).bits();
            for layout in Layout::DISTINCT {
                let q = Problem { q: problem.q.in_layout(layout), ..problem.clone() };
                assert_eq!(run(&q, &config).bits(), expected, "q {layout:?} {config:?}");
                let k = Problem { k: problem.k.in_layout(layout), ..problem.clone() };
                assert_eq!(run(&k, &config).bits(), expected, "k {layout:?} {config:?}");
                let v = Problem { v: problem.v.in_layout(layout), ..problem.clone() };
                assert_eq!(run(&v, &config).bits(), expected, "v {layout:?} {config:?}");
            }
        },
    );
}

#[test]
fn strided_output_matches_contiguous() {
    for_each_pair!(strided_output_matches_contiguous_for);
}

fn strided_output_matches_contiguous_for<T: Number, K: Number<Real = T::Real>>() {
    for_each_problem::<T, K>(
        2,
        |shape| shape,
        |problem, config| {
            let expected = run(problem, &config).bits();
            for layout in Layout::DISTINCT {
                assert_eq!(run_into(problem, &config, layout).bits(), expected, "{layout:?} {config:?}");
            }
        },
    );
}

#[test]
fn broadcast_keys_and_values_match_their_copies() {
    for_each_pair!(broadcast_keys_and_values_match_their_copies_for);
}

fn broadcast_keys_and_values_match_their_copies_for<T: Number, K: Number<Real = T::Real>>() {
    for_each_problem::<T, K>(
        3,
        |shape| shape,
        |problem, config| {
            for layout in [Layout::BroadcastSeq, Layout::BroadcastHeads, Layout::BroadcastBatch] {
                let k = problem.k.in_layout(layout);
                let v = problem.v.in_layout(layout);
                let copied = Problem { k: k.in_layout(Layout::Bhsd), v: v.in_layout(Layout::Bhsd), ..problem.clone() };
                let expected = run(&copied, &config).bits();
                assert_eq!(
                    run(&Problem { k, v, ..problem.clone() }, &config).bits(),
                    expected,
                    "{layout:?} {config:?}"
                );
            }
        },
    );
}

#[test]
fn values_inside_the_keys_match_their_copy() {
    for_each_pair!(values_inside_the_keys_match_their_copy_for);
}

fn values_inside_the_keys_match_their_copy_for<T: Number, K: Number<Real = T::Real>>() {
    for_each_problem::<T, K>(
        4,
        |shape| shape,
        |problem, config| {
            for layout in Layout::DISTINCT {
                let k = problem.k.in_layout(layout);
                let inside = Problem { k, v_lies_in_k: true, ..problem.clone() };
                let copy = Tensor::from_fn(problem.v.shape, Layout::Bhsd, |index| problem.k.get(index));
                let copied = Problem { v: copy, ..problem.clone() };
                assert_eq!(run(&inside, &config).bits(), run(&copied, &config).bits(), "{layout:?} {config:?}");
            }
        },
    );
}

#[test]
fn a_batch_entry_alone_matches_itself_in_the_batch() {
    for_each_pair!(a_batch_entry_alone_matches_itself_in_the_batch_for);
}

fn a_batch_entry_alone_matches_itself_in_the_batch_for<T: Number, K: Number<Real = T::Real>>() {
    for_each_problem::<T, K>(
        5,
        |shape| AttentionShape { batch: 3, ..shape },
        |problem, config| {
            let together = run(problem, &config);
            for batch in 0..3 {
                let entry = batch..batch + 1;
                let q = problem.q.part(0, entry.clone());
                let [k, v] = [&problem.k, &problem.v].map(|tensor| tensor.part(0, entry.clone()));
                assert_same_rows(&run(&Problem::new(q, k, v), &config), &together, [batch, 0], &config);
            }
        },
    );
}

#[test]
fn a_kv_group_alone_matches_itself_among_others() {
    for_each_pair!(a_kv_group_alone_matches_itself_among_others_for);
}

fn a_kv_group_alone_matches_itself_among_others_for<T: Number, K: Number<Real = T::Real>>() {
    for_each_problem::<T, K>(
        6,
        |shape| AttentionShape { num_heads: 9, num_kv_heads: 3, ..shape },
        |problem, config| {
            let together = run(problem, &config);
            for kv_head in 0..3 {
                let q = problem.q.part(1, 3 * kv_head..3 * kv_head + 3);
                let [k, v] = [&problem.k, &problem.v].map(|tensor| tensor.part(1, kv_head..kv_head + 1));
                assert_same_rows(&run(&Problem::new(q, k, v), &config), &together, [0, 3 * kv_head], &config);
            }
        },
    );
}

/// Every row of `alone` has the bits of the row `offset` further on in `together`.
fn assert_same_rows<T: Number>(alone: &Answer<T>, together: &Answer<T>, offset: [usize; 2], config: &AttentionConfig) {
    let [batch, heads, q_len, _] = alone.out.shape;
    for row in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..q_len).map(move |i| [b, h, i]))) {
        let there = [row[0] + offset[0], row[1] + offset[1], row[2]];
        assert_eq!(alone.row_bits(row), together.row_bits(there), "{there:?} {config:?}");
    }
}

/// The rows of a panel share vectors; what one holds must not reach another.
#[test]
fn other_queries_do_not_change_a_row() {
    for_each_pair!(other_queries_do_not_change_a_row_for);
}

fn other_queries_do_not_change_a_row_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, seed) in [(40, 7), (5, 8)] {
        let problem = Problem::<T, K>::normal(&one_head(q_len, 230, 12, 10), seed);
        for_each_config::<T, K>(|config| {
            let expected = run(&problem, &config);
            for query in [0, 3, 7, 8, 15, 16, 31, q_len - 1].into_iter().filter(|&query| query < q_len) {
                let mut others = problem.clone();
                let mut generator = Generator::new(query as u64);
                for i in (0..q_len).filter(|&i| i != query) {
                    // Scores so large that their maxima rise all the time.
                    (0..12).for_each(|p| others.q.set([0, 0, i, p], T::nearest(30.0 * generator.normal())));
                }
                let answer = run(&others, &config);
                assert_eq!(answer.row_bits([0, 0, query]), expected.row_bits([0, 0, query]), "{config:?}");
            }
        });
    }
}

/// As [`other_queries_do_not_change_a_row`], for a hidden key: finite ones too.
#[test]
fn hidden_keys_do_not_change_output() {
    for_each_pair!(hidden_keys_do_not_change_output_for);
}

fn hidden_keys_do_not_change_output_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, seed) in [(40, 9), (5, 10)] {
        let problem = Problem::<T, K>::normal(&one_head(q_len, 230, 12, 10), seed);
        for_each_config::<T, K>(|config| {
            let expected = run(&problem, &config);
            for key in [0, 20, 191, 192, 200, 226, 229] {
                let mut other = problem.clone();
                other.k.fill_row([0, 0, key], K::nearest(K::largest().sqrt()));
                other.v.fill_row([0, 0, key], K::nearest(-K::largest().sqrt()));
                let answer = run(&other, &config);
                let sees = |query| key < crate::common::visible_keys(&config, &problem.shape(), query);
                for query in (0..q_len).filter(|&query| !sees(query)) {
                    assert_eq!(answer.row_bits([0, 0, query]), expected.row_bits([0, 0, query]), "{key} {config:?}");
                }
            }
        });
    }
}

#[test]
fn the_three_tiers_agree() {
    for_each_pair!(the_three_tiers_agree_for);
}

fn the_three_tiers_agree_for<T: Number, K: Number<Real = T::Real>>() {
    for_each_problem::<T, K>(
        9,
        |shape| shape,
        |problem, config| {
            let into = run(problem, &config);
            let allocated = attention(&problem.inputs(), &config).unwrap();
            assert_eq!(crate::common::bits(&allocated), into.out_bits(), "{config:?}");

            let plan = T::plan(&problem.shape(), &config).unwrap();
            let mut workspace = T::workspace(&plan);
            let mut run_plan = |problem: &Problem<T, K>| {
                let mut out = Tensor::unwritten(problem.out_shape(), Layout::Bhsd);
                let mut logsumexp = vec![T::Real::CANARY; problem.out_shape()[..3].iter().product()];
                let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
                T::run_plan(&plan, &problem.inputs(), &mut outputs, &mut workspace);
                Answer { out, logsumexp }.bits()
            };
            assert_eq!(run_plan(problem), into.bits(), "{config:?}");
            // A plan serves every layer, and what another one left in the workspace does not matter.
            let mut poisoned = problem.clone();
            poisoned.k.data.fill(K::exactly(f64::NAN));
            poisoned.v.data.fill(K::exactly(f64::INFINITY));
            run_plan(&poisoned);
            assert_eq!(run_plan(problem), into.bits(), "used workspace {config:?}");
        },
    );
}

#[test]
fn logsumexp_is_optional() {
    for_each_pair!(logsumexp_is_optional_for);
}

fn logsumexp_is_optional_for<T: Number, K: Number<Real = T::Real>>() {
    for_each_problem::<T, K>(
        11,
        |shape| shape,
        |problem, config| {
            let mut out = Tensor::<T>::unwritten(problem.out_shape(), Layout::Bhsd);
            attention_into(&problem.inputs(), &mut AttentionOutputs::new(out.view_mut()), &config).unwrap();
            assert_eq!(Answer { out, logsumexp: vec![] }.out_bits(), run(problem, &config).out_bits(), "{config:?}");
        },
    );
}

/// Large enough to be worth several threads: many heads, one head with many rows, a group, few rows and many keys.
#[cfg(feature = "rayon")]
fn parallel_shapes<T: Number, K: Number>() -> Vec<AttentionShape> {
    let (len, one) = by_types::<T, K, _>((300, 600), (96, 260));
    let keys = by_types::<T, K, _>(1500, 1000);
    let heads = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 4, ..one_head(len, len + 5, 33, 31) };
    let group = AttentionShape { num_heads: 6, num_kv_heads: 2, ..one_head(len, len, 40, 24) };
    let few_rows = AttentionShape { num_heads: 16, num_kv_heads: 16, ..one_head(1, keys, 64, 64) };
    vec![heads, one_head(one, one, 32, 32), group, few_rows]
}

#[cfg(feature = "rayon")]
fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

#[cfg(feature = "rayon")]
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for_each_pair!(any_number_of_threads_gives_the_same_bits_for);
}

#[cfg(feature = "rayon")]
fn any_number_of_threads_gives_the_same_bits_for<T: Number, K: Number<Real = T::Real>>() {
    use crate::common::by_cost;
    let pools = by_cost::<T, K, _>(vec![1, 2, 3, 8], |is_slow| if is_slow { vec![3] } else { vec![1, 2, 3, 8] });
    let pools: Vec<_> = pools.into_iter().map(pool).collect();
    for shape in parallel_shapes::<T, K>() {
        let problem = Problem::<T, K>::normal(&shape, 12);
        for set in instruction_sets() {
            for config in masks_for::<T, K>() {
                let expected = run(&problem, &serial(config, set)).bits();
                let config = config.with_instruction_set(set).with_parallelism(Parallelism::Rayon);
                for pool in &pools {
                    let threads = pool.install(|| T::threads(&T::plan(&shape, &config).unwrap()));
                    let sees_many_keys = shape.q_len > 1 || config.mask != crate::common::top_left().mask;
                    if sees_many_keys {
                        assert_eq!(threads, pool.current_num_threads(), "{shape:?} must use every thread of its pool");
                    }
                    let answer = pool.install(|| run(&problem, &config));
                    assert_eq!(answer.bits(), expected, "{threads} threads, {shape:?} {config:?}");
                }
            }
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn calls_from_inside_parallel_iterators_of_one_pool_give_the_same_bits() {
    use rayon::prelude::*;
    let problem = crate::common::normal_problem(&parallel_shapes::<f32, f32>()[0], 13);
    let pool = pool(3);
    for set in instruction_sets() {
        let expected = run(&problem, &serial(AttentionConfig::causal(), set)).bits();
        let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Rayon);
        let answers: Vec<_> =
            pool.install(|| (0..by_profile(8, 4)).into_par_iter().map(|_| run(&problem, &config).bits()).collect());
        assert!(answers.iter().all(|answer| *answer == expected), "{set}");
    }
}

#[test]
fn four_os_threads_at_once_get_the_same_bits() {
    // Different problems, so that results that land with the wrong caller show.
    let len = by_profile(200, 80);
    let shape = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(len, len, 24, 24) };
    let problems: Vec<Problem> = (0..4).map(|seed| crate::common::normal_problem(&shape, 20 + seed)).collect();
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set); // the default parallelism: one shared pool
        let expected: Vec<_> = problems.iter().map(|problem| run(problem, &serial(config, set)).bits()).collect();
        std::thread::scope(|scope| {
            for (problem, expected) in problems.iter().zip(&expected) {
                scope.spawn(move || {
                    for _ in 0..by_profile(3, 1) {
                        assert_eq!(run_on(set, problem, &config).bits(), *expected, "{set}");
                    }
                });
            }
        });
    }
}

/// Groups of eight heads and of what is left of eleven, in several chunks; behind a prefix a window, which is a second part.
#[test]
fn heads_that_decode_takes_together_give_the_bits_of_each_alone() {
    let shape =
        AttentionShape { batch: 2, num_heads: 22, num_kv_heads: 11, q_len: 2, kv_len: 2100, head_dim: 5, value_dim: 3 };
    let problem: Problem = Problem::normal(&shape, 5);
    let token_major = problem.in_layout(Layout::Bshd);
    let window = AttentionConfig::causal().with_window(Some(700), None).with_prefix_len(40);
    for (set, config) in
        instruction_sets().into_iter().flat_map(|set| [(set, AttentionConfig::causal()), (set, window)])
    {
        let expected = run(&problem, &serial(config, set)).bits();
        assert_eq!(run(&token_major, &serial(config, set)).bits(), expected, "{set} {config:?}");
        #[cfg(feature = "rayon")]
        for threads in [2, 3, 7] {
            let found = pool(threads).install(|| run_on(set, &token_major, &config).bits());
            assert_eq!(found, expected, "{set} {config:?}, {threads} threads");
        }
    }
}

/// The same of every pair of types, with rows longer than a vector, as many of them as decode takes, and all operands at once.
#[test]
fn heads_taken_together_have_their_own_masks_biases_and_lengths() {
    for_each_pair!(heads_taken_together_have_their_own_masks_biases_and_lengths_for);
}

fn heads_taken_together_have_their_own_masks_biases_and_lengths_for<T: Number, K: Number<Real = T::Real>>() {
    let (num_heads, num_kv_heads, kv_len) = by_types::<T, K, _>((10, 5, 1100), (4, 2, 1030));
    let shape = AttentionShape { batch: 2, num_heads, num_kv_heads, q_len: 4, kv_len, head_dim: 37, value_dim: 35 };
    let mut problem = Problem::<T, K>::normal(&shape, 6);
    problem.operands = Operands::all(&shape, 6, [false; 4]);
    problem.operands.kv_lens = Some(vec![kv_len, 700]);
    let token_major = problem.in_layout(Layout::Bshd);
    let config = AttentionConfig::causal().with_window(Some(900), None).with_prefix_len(9).with_softcap(5.0);
    for (set, padding) in
        instruction_sets().into_iter().flat_map(|set| [KvPadding::Left, KvPadding::Right].map(|side| (set, side)))
    {
        let config = config.with_kv_padding(padding);
        let expected = run(&problem, &serial(config, set)).bits();
        assert_eq!(run(&token_major, &serial(config, set)).bits(), expected, "{set} {padding:?}");
        #[cfg(feature = "rayon")]
        assert_eq!(pool(2).install(|| run_on(set, &token_major, &config).bits()), expected, "{set} {padding:?}");
    }
}

#[test]
fn a_short_call_has_the_bits_of_its_tasks() {
    fn check<T: Number>() {
        // Some see nothing; the last two are no short calls.
        let lens = [(4, 2), (4, 16), (1, 1), (3, 5), (1, 3), (2, 2), (4, 4), (3, 1), (1, 16), (5, 2), (2, 17)];
        let layouts = &Layout::DISTINCT[..by_profile(Layout::DISTINCT.len(), 2)];
        for &(q_len, kv_len) in &lens[..by_profile(lens.len(), 2)] {
            for (head_dim, value_dim) in by_profile(vec![(5, 3), (64, 70), (16, 1), (1, 141)], vec![(5, 3), (17, 141)])
            {
                let shape =
                    AttentionShape { batch: 3, num_heads: 4, num_kv_heads: 2, q_len, kv_len, head_dim, value_dim };
                let mut problem = Problem::<T, T>::normal(&shape, 31);
                problem.k.fill_row([1, 1, kv_len - 1], T::exactly(f64::NAN));
                problem.v.fill_row([2, 0, 0], T::exactly(f64::INFINITY));
                let configs = [
                    AttentionConfig::causal(),
                    AttentionConfig::full(),
                    crate::common::top_left(),
                    AttentionConfig::sliding_window(2),
                    AttentionConfig::full().with_window(Some(1), Some(1)),
                    AttentionConfig::causal().with_causal_alignment(CausalAlignment::Offset(-2)),
                    AttentionConfig::causal().with_causal_alignment(CausalAlignment::Offset(1000)),
                ];
                for (set, config) in instruction_sets().into_iter().flat_map(|set| configs.map(|config| (set, config)))
                {
                    let config = config.with_instruction_set(set);
                    for &layout in layouts {
                        let whole = Operands { kv_lens: Some(vec![kv_len; 3]), ..Operands::default() };
                        // With lengths it is cut into tasks.
                        let tasks = Problem { operands: whole, ..problem.clone() };
                        let [short, tasks] =
                            [&problem, &tasks].map(|problem| run_into(problem, &config, layout).bits());
                        assert_eq!(short, tasks, "{shape:?} {config:?} {layout:?}");
                    }
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn what_an_earlier_call_left_in_the_accumulators_does_not_show() {
    fn check<T: Number>() {
        let causal = AttentionConfig::causal();
        let (top_left, many_keys) = (crate::common::top_left(), by_profile(4000, 1600));
        for (q_len, kv_len, config) in [
            (120, 30, causal),                                                // rows that see nothing
            (40, 40, AttentionConfig::sliding_window(4)),                     // a half has a part before the other
            (70, 400, AttentionConfig::sliding_window(4).with_prefix_len(3)), // two parts
            (150, many_keys, AttentionConfig::sliding_window(40)),            // chunks that some rows do not see
            (150, many_keys, top_left),
        ] {
            let clean = Problem::<T, T>::normal(&one_head(q_len, kv_len, 8, 7), 1);
            // Of query 1, key 7 alone.
            let mask = BoolTensor::from_fn([1, 1, q_len, kv_len], |[_, _, i, j]| (i, j) == (1, 7));
            let masked = Operands { mask: Some(mask), ..Operands::default() };
            let mut spoilt = clean.clone();
            spoilt.q.data.fill(T::exactly(f64::NAN));
            spoilt.v.data.fill(T::exactly(f64::NAN));
            for problem in [Problem { operands: masked, ..clean.clone() }, clean.clone()] {
                for set in instruction_sets() {
                    let run = |problem: &Problem<T, T>, config: AttentionConfig| run_on(set, problem, &config).bits();
                    // A new thread has a new workspace.
                    let fresh = || std::thread::scope(|scope| scope.spawn(|| run(&problem, config)).join());
                    let fresh = fresh().unwrap();
                    run(&spoilt, AttentionConfig::full());
                    assert_eq!(run(&problem, config), fresh, "{set} {config:?}");
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
}
