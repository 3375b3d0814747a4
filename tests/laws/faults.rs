//! Faults that users of other attention kernels reported (FIELD.md), named after what they saw.

use crate::common::{
    Expected, Layout, Number, Problem, Tensor, by_cost, by_profile, by_types, for_each_pair, instruction_sets, masks,
    normal_problem, one_head, run_on, top_left,
};
use fused_attention::{AttentionConfig, AttentionError, AttentionPlan, AttentionShape, Parallelism, attention};

/// Within the stated bound of the reference, on every instruction set.
fn assert_right<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, config: &AttentionConfig) {
    let expected = Expected::new(problem, config);
    for set in instruction_sets() {
        expected.assert_met_by(&run_on(set, problem, config), &(set, problem.shape(), config));
    }
}

/// Fault 1: pytorch#103749, rten#1321, mlx#2608, burn-flex#16, cubecl#1070.
#[test]
fn fully_hidden_rows_came_out_as_nan() {
    for_each_pair!(fully_hidden_rows_came_out_as_nan_for);
}

fn fully_hidden_rows_came_out_as_nan_for<T: Number, K: Number<Real = T::Real>>() {
    for (q_len, kv_len) in [(9, 4), (40, 3), (33, 0), (200, 100)] {
        let problem = Problem::<T, K>::normal(&one_head(q_len, kv_len, 16, 16), 1);
        for set in instruction_sets() {
            let answer = run_on(set, &problem, &AttentionConfig::causal());
            // By their bits, whatever the build makes of comparisons with NaN.
            let sign = 1u64 << (T::BITS - 1);
            for query in 0..q_len - kv_len {
                let wrong = answer.row([0, 0, query]).0.into_iter().filter(|x| x.bits() & !sign != 0);
                assert_eq!(wrong.count(), 0, "{set} {q_len} x {kv_len}, row {query}");
            }
            let nans = answer.out_bits().into_iter().filter(|x| x & !sign > T::exactly(f64::INFINITY).bits()).count();
            assert_eq!(nans, 0, "{set} {q_len} x {kv_len}");
        }
    }
}

/// Fault 3: pytorch#101967.
#[test]
fn nan_in_hidden_values_leaked_as_zero_times_nan() {
    for_each_pair!(nan_in_hidden_values_leaked_as_zero_times_nan_for);
}

fn nan_in_hidden_values_leaked_as_zero_times_nan_for<T: Number, K: Number<Real = T::Real>>() {
    for len in [5, 16, 40, 200] {
        let problem = Problem::<T, K>::normal(&one_head(len, len, 8, 8), 2);
        for set in instruction_sets() {
            let clean = run_on(set, &problem, &AttentionConfig::causal());
            for hidden in [f64::NAN, f64::INFINITY].map(K::exactly) {
                let mut poisoned = problem.clone();
                poisoned.v.fill_row([0, 0, len - 1], hidden);
                let answer = run_on(set, &poisoned, &AttentionConfig::causal());
                for query in 0..len - 1 {
                    assert_eq!(answer.row_bits([0, 0, query]), clean.row_bits([0, 0, query]), "{set} {len} {query}");
                }
                assert!(answer.row_values([0, 0, len - 1]).0.iter().all(|x| !x.is_finite()), "the last row sees it");
            }
        }
    }
}

/// Fault 4: pytorch#193728.
#[test]
fn values_shorter_than_keys_were_read_past_their_end() {
    for (k_len, v_len) in [(10, 9), (10, 0), (200, 1), (9, 10)] {
        let mut problem = normal_problem(&one_head(4, k_len, 8, 8), 3);
        problem.v = Tensor::from_fn([1, 1, v_len, 8], Layout::Bhsd, crate::common::pattern);
        let error = attention(&problem.inputs(), &AttentionConfig::full()).unwrap_err();
        assert_eq!(error, AttentionError::KvLenMismatch { k: k_len, v: v_len });
    }
}

/// Fault 5: pytorch#187506.
#[test]
fn a_non_unit_last_stride_was_silently_wrong() {
    for_each_pair!(a_non_unit_last_stride_was_silently_wrong_for);
}

fn a_non_unit_last_stride_was_silently_wrong_for<T: Number, K: Number<Real = T::Real>>() {
    let shape = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(21, 34, 12, 20) };
    let problem = Problem::<T, K>::normal(&shape, 4);
    let layouts = vec![Layout::Transposed, Layout::Interleaved, Layout::Bshd];
    for layout in
        by_cost::<T, K, _>(layouts.clone(), |is_slow| if is_slow { vec![Layout::Transposed] } else { layouts })
    {
        for config in masks() {
            let strided = problem.in_layout(layout);
            assert_right(&strided, &config);
            let shared = Problem { k: problem.k.in_layout(Layout::BroadcastHeads), ..strided.clone() };
            assert_right(&shared, &config);
            let one_value = Problem { v: problem.v.in_layout(Layout::BroadcastSeq), ..strided };
            assert_right(&one_value, &config);
        }
    }
}

/// Fault 6: pytorch#141218.
#[test]
fn empty_tensors_divided_by_zero() {
    let shape = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(3, 5, 6, 7) };
    for empty in [
        AttentionShape { batch: 0, ..shape },
        AttentionShape { num_heads: 0, num_kv_heads: 0, ..shape },
        AttentionShape { q_len: 0, ..shape },
        AttentionShape { kv_len: 0, ..shape },
        AttentionShape { value_dim: 0, ..shape },
    ] {
        let problem = normal_problem(&empty, 5);
        for set in instruction_sets() {
            for config in masks() {
                let answer = run_on(set, &problem, &config);
                assert!(answer.out.values().iter().all(|&x| x == 0.0), "{set} {empty:?}");
            }
        }
    }
    let problem = normal_problem(&AttentionShape { head_dim: 0, ..shape }, 5);
    let error = attention(&problem.inputs(), &AttentionConfig::full()).unwrap_err();
    assert_eq!(error, AttentionError::ZeroHeadDim { shape: [2, 4, 3, 0] });
}

/// Fault 7: onnxruntime#29020, executorch#22426, flash-attention#1778.
#[test]
fn causal_alignment_was_mixed_up_when_lengths_differ() {
    // How many keys each query sees.
    let bottom_right: [&[usize]; 4] =
        [&[16], &[4, 5], &[0, 0, 0, 1, 2], &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]];
    let top_left_sees: [&[usize]; 4] = [&[1], &[1, 2], &[1, 2, 2, 2, 2], &[1; 16]];
    for (i, (q_len, kv_len)) in [(1, 16), (2, 5), (5, 2), (16, 1)].into_iter().enumerate() {
        for (config, visible) in [(AttentionConfig::causal(), bottom_right[i]), (top_left(), top_left_sees[i])] {
            assert_eq!(visible.len(), q_len);
            let problem = normal_problem(&one_head(q_len, kv_len, 4, 4), 6);
            for set in instruction_sets() {
                let answer = run_on(set, &problem, &config);
                for (query, &visible) in visible.iter().enumerate() {
                    // The same query against exactly those keys, unmasked.
                    let q = problem.q.part(2, query..query + 1);
                    let [k, v] = [&problem.k, &problem.v].map(|tensor| tensor.part(2, 0..visible));
                    let expected = run_on(set, &Problem::new(q, k, v), &AttentionConfig::full()).row([0, 0, 0]).0;
                    for (found, expected) in answer.row([0, 0, query]).0.into_iter().zip(expected) {
                        assert!((found - expected).abs() < 2e-6, "{set} {q_len} x {kv_len}, row {query}");
                    }
                }
            }
        }
    }
}

/// Fault 8: pytorch#191937, flash-attention#2577.
#[test]
fn odd_sizes_lost_their_tail() {
    for_each_pair!(odd_sizes_lost_their_tail_for);
}

fn odd_sizes_lost_their_tail_for<T: Number, K: Number<Real = T::Real>>() {
    let longest = 2 * crate::common::TILES.iter().max().unwrap() + 1;
    let check = |kv_len: usize, head_dim: usize| {
        let shape = AttentionShape { num_heads: 2, num_kv_heads: 2, ..one_head(3, kv_len, head_dim, head_dim) };
        let problem = Problem::<T, K>::normal(&shape, (100 * kv_len + head_dim) as u64);
        assert_right(&problem, &AttentionConfig::causal());
        let k = problem.k.in_layout(Layout::BroadcastHeads);
        let v = problem.v.in_layout(Layout::BroadcastHeads);
        assert_right(&Problem { k, v, ..problem }, &AttentionConfig::full());
    };
    let is_f32 = T::NAME == "f32" && K::NAME == "f32";
    for (kv_len, head_dim) in (1..=longest).flat_map(|kv_len| (1..=67).map(move |head_dim| (kv_len, head_dim))) {
        let at_the_end = kv_len == longest || head_dim == 67;
        // All for f32; else a part of them; of the last ones all, or a part for the other types.
        let is_in_part = (kv_len + head_dim) % by_profile(8, if is_f32 { 16 } else { 32 }) == 0;
        if by_types::<T, K, _>(true, is_in_part || (at_the_end && is_f32)) {
            check(kv_len, head_dim);
        }
    }
}

/// Fault 9: pytorch#172225.
#[test]
fn indivisible_heads_were_not_refused() {
    for (num_heads, num_kv_heads) in [(5, 2), (3, 2), (1, 2), (7, 3), (2, 4), (4, 0)] {
        let shape = AttentionShape { num_heads, num_kv_heads, ..one_head(3, 5, 4, 4) };
        let expected = AttentionError::HeadsNotDivisible { num_heads, num_kv_heads };
        assert_eq!(AttentionPlan::new(&shape, &AttentionConfig::causal()).unwrap_err(), expected);
        assert!(expected.to_string().contains(&format!("{num_heads} ")), "{expected}");
        assert!(expected.to_string().contains(&format!("{num_kv_heads} ")), "{expected}");
    }
    for head_dim in [320, 512] {
        let shape = AttentionShape { num_heads: 8, ..one_head(3, 20, head_dim, head_dim) };
        assert_right(&normal_problem(&shape, 7), &AttentionConfig::causal()); // one KV head for all
    }
}

/// Fault 10: vllm#39065, vllm#31968.
#[test]
fn uncommon_head_dims_were_refused_at_run_time() {
    for_each_pair!(uncommon_head_dims_were_refused_at_run_time_for);
}

fn uncommon_head_dims_were_refused_at_run_time_for<T: Number, K: Number<Real = T::Real>>() {
    for head_dim in [1, 8, 40, 72, 80, 96, 112, 160, 192, 256, 320, 512, 576] {
        let (q_len, kv_len) = by_types::<T, K, _>((35, 50), (9, 14));
        let shape = one_head(q_len, kv_len, head_dim, head_dim);
        assert_right(&Problem::<T, K>::normal(&shape, head_dim as u64), &AttentionConfig::causal());
        let narrow = AttentionShape { value_dim: head_dim.div_ceil(3), ..shape };
        assert_right(&Problem::<T, K>::normal(&narrow, head_dim as u64), &AttentionConfig::full());
    }
}

/// Fault 17: burn#5612.
#[cfg(feature = "rayon")]
#[test]
fn a_single_head_used_one_thread_only() {
    let len = by_profile(4096, 512);
    let shape = one_head(len, len, 64, 64);
    let pools = [1, 4].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let problem = normal_problem(&shape, 8);
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Rayon);
        assert_eq!(pools[1].install(|| AttentionPlan::new(&shape, &config).unwrap().threads()), 4);
        let [one, four] = pools.each_ref().map(|pool| pool.install(|| crate::common::run(&problem, &config)).bits());
        assert!(one == four, "{set}: the bits depend on the threads");
        // Whoever waits for one heavy task idles: they must be several to a thread. The plan says how many it made.
        let plan = pools[1].install(|| AttentionPlan::new(&shape, &config).unwrap()).to_string();
        let tasks = plan.split_once(" tasks").and_then(|(before, _)| before.rsplit(' ').next()?.parse::<usize>().ok());
        assert!(tasks.is_some_and(|tasks| tasks >= 8), "{plan}");
    }
}

/// Fault 20: transformers#46960, oneDNN. Measured, not planned, in `allocation.rs`.
#[cfg(target_pointer_width = "64")] // elsewhere there are no tensors so long
#[test]
fn memory_grew_with_the_square_of_the_length() {
    for set in instruction_sets() {
        for config in masks() {
            let config = config.with_instruction_set(set).with_parallelism(Parallelism::Serial);
            let workspace_len = |q_len, kv_len| {
                let shape = AttentionShape { num_heads: 8, num_kv_heads: 2, ..one_head(q_len, kv_len, 128, 128) };
                AttentionPlan::new(&shape, &config).unwrap().workspace_len()
            };
            let long = workspace_len(1 << 14, 1 << 14);
            assert!(long <= 2 << 20, "{set}: {long} bytes");
            for (q_len, kv_len) in [(1 << 20, 1 << 20), (1 << 14, 1 << 30), (1 << 30, 1 << 14)] {
                assert_eq!(workspace_len(q_len, kv_len), long, "{set}: {q_len} x {kv_len}");
            }
        }
    }
}

/// Fault 24: FlashMLA#212, flash-attention#1897. Threads and neighbours in every combination are in `bits.rs`.
#[test]
fn a_row_changed_with_its_batch() {
    let shape = AttentionShape { batch: 8, num_heads: 2, ..one_head(33, 70, 24, 24) };
    let problem = normal_problem(&shape, 9);
    for set in instruction_sets() {
        let together = run_on(set, &problem, &AttentionConfig::causal());
        for batch in 0..8 {
            let [q, k, v] = [&problem.q, &problem.k, &problem.v].map(|tensor| tensor.part(0, batch..batch + 1));
            let alone = run_on(set, &Problem::new(q, k, v), &AttentionConfig::causal());
            for (head, query) in (0..2).flat_map(|h| (0..33).map(move |i| (h, i))) {
                assert_eq!(alone.row_bits([0, head, query]), together.row_bits([batch, head, query]), "{set}");
            }
        }
    }
}
