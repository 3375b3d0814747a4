//! A few rows against many keys: the decode kernel, keys split into chunks, sequences of their own lengths.

use crate::common::{
    Answer, CANARY, Expected, Layout, Problem, Tensor, by_profile, instruction_sets, masks, normal_problem, run,
    run_on, top_left,
};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, KvPadding, Workspace,
    attention_into, reference,
};

/// Keys of a chunk of up to 8 rows, and of more (see `blocks.rs`; checked below).
const CHUNKS: [usize; 2] = [1024, 1536];

fn shape(q_len: usize, kv_len: usize, group_size: usize) -> AttentionShape {
    let head_dim = by_profile(20, 5);
    AttentionShape {
        batch: 1,
        num_heads: group_size,
        num_kv_heads: 1,
        q_len,
        kv_len,
        head_dim,
        value_dim: head_dim + 3,
    }
}

fn chunks_of(shape: &AttentionShape) -> usize {
    let plan = AttentionPlan::new(shape, &AttentionConfig::causal()).unwrap().to_string();
    let (_, rest) = plan.split_once('(').unwrap().1.split_once('(').unwrap();
    rest.split_once(' ').unwrap().0.parse().unwrap()
}

#[test]
fn chunks_are_where_the_tests_expect_them() {
    for (q_len, chunk) in [(1, CHUNKS[0]), (8, CHUNKS[0]), (9, CHUNKS[1]), (256, CHUNKS[1])] {
        for (kv_len, chunks) in [(1, 1), (chunk, 1), (chunk + 1, 2), (2 * chunk, 2), (2 * chunk + 1, 3)] {
            assert_eq!(chunks_of(&shape(q_len, kv_len, 1)), chunks, "{q_len} rows, {kv_len} keys");
        }
    }
    assert_eq!(chunks_of(&shape(257, 4 * CHUNKS[1], 1)), 1);
    assert_eq!(chunks_of(&shape(1, 1 << 20, 1)), 64);
    assert_eq!(chunks_of(&shape(16, 1 << 20, 1)), 16);
}

/// Groups and queries of 1 to 16, so that every number of rows that a tile may have occurs, on both kernels.
#[test]
fn every_group_size_and_few_queries_match_the_reference() {
    let kv_lens = by_profile(vec![1, 16, 17, 64, 65, 131], vec![17, 67]);
    for set in instruction_sets() {
        for group_size in 1..=16 {
            for q_len in by_profile((1..=16).collect(), vec![1, 2, 3]) {
                let kv_len = kv_lens[(group_size + q_len) % kv_lens.len()];
                let problem = normal_problem(&shape(q_len, kv_len, group_size), 1);
                let config = masks()[(group_size + q_len) % 3];
                let what = (set, group_size, q_len, kv_len, config.mask);
                Expected::new(&problem, &config).assert_met_by(&run_on(set, &problem, &config), &what);
            }
        }
    }
}

#[test]
fn rows_around_the_edges_of_chunks_match_the_reference() {
    for (rows, chunk) in [(1, CHUNKS[0]), (3, CHUNKS[0]), (8, CHUNKS[0]), (9, CHUNKS[1]), (37, CHUNKS[1])] {
        let kv_lens = [chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3 * chunk + 70];
        for kv_len in by_profile(kv_lens.to_vec(), vec![chunk + 1]) {
            let problem = normal_problem(&shape(rows, kv_len, 1), 2);
            for config in [AttentionConfig::full(), AttentionConfig::causal(), top_left()] {
                let expected = Expected::new(&problem, &config);
                for set in instruction_sets() {
                    let what = (set, rows, kv_len, config.mask);
                    expected.assert_met_by(&run_on(set, &problem, &config), &what);
                }
            }
        }
    }
}

/// The queries of a step are the last rows of the whole sequence.
#[test]
fn decode_matches_the_last_rows_of_prefill() {
    let (tokens, group_size) = (by_profile(300, 80), 3);
    let whole = normal_problem(&shape(tokens, tokens, group_size), 3);
    for set in instruction_sets() {
        let expected = run_on(set, &whole, &AttentionConfig::causal());
        for q_len in [1, 2, 5] {
            let step = Problem { q: whole.q.part(2, tokens - q_len..tokens), ..whole.clone() };
            let answer = run_on(set, &step, &AttentionConfig::causal());
            for (head, query) in (0..group_size).flat_map(|head| (0..q_len).map(move |query| (head, query))) {
                let (found, found_logsumexp) = answer.row([0, head, query]);
                let (out, logsumexp) = expected.row([0, head, tokens - q_len + query]);
                for (found, expected) in found.iter().zip(&out) {
                    assert!((found - expected).abs() < 2e-5, "{set} {q_len}: {found} {expected}");
                }
                assert!((found_logsumexp - logsumexp).abs() < 2e-5, "{set} {q_len}");
            }
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn split_keys_give_the_same_bits_on_any_number_of_threads() {
    for (q_len, group_size) in [(1, 1), (1, 4), (2, 4), (5, 5), (40, 2)] {
        let shape = AttentionShape { batch: 2, ..shape(q_len, by_profile(7000, 3200), group_size) };
        let problem = normal_problem(&shape, 4);
        for set in instruction_sets().into_iter().take(by_profile(usize::MAX, 1)) {
            let config = AttentionConfig::causal().with_instruction_set(set);
            let expected = run(&problem, &config.with_parallelism(fused_attention::Parallelism::Serial)).bits();
            for threads in [1, 2, 3, 8] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let found = pool.install(|| run(&problem, &config)).bits();
                assert!(found == expected, "{set} {shape:?} {threads} threads");
            }
        }
    }
}

/// The keys of a row's own chunk decide about that row, whatever the others see.
#[test]
fn a_row_that_sees_nothing_in_a_chunk_is_right() {
    // Top-left: the first queries see keys of the first chunk alone.
    for rows in [2, 7, 20] {
        let problem = normal_problem(&shape(rows, 2 * CHUNKS[1] + 5, 1), 5);
        let expected = Expected::new(&problem, &top_left());
        for set in instruction_sets() {
            expected.assert_met_by(&run_on(set, &problem, &top_left()), &(set, rows));
        }
    }
}

/// The merge subtracts the largest maximum of all chunks: relative to another one, the weight of such a chunk is infinite.
#[test]
fn a_chunk_of_far_larger_scores_takes_all_the_weight() {
    for (rows, chunk) in [(1, CHUNKS[0]), (4, CHUNKS[0]), (20, CHUNKS[1])] {
        for heaviest in 0..3 {
            let by_chunk =
                |heavy, light| move |[_, _, key, _]: [usize; 4]| if key / chunk == heaviest { heavy } else { light };
            let problem = Problem::new(
                Tensor::from_fn([1, 1, rows, 1], Layout::Bhsd, |_| 1.0f32),
                Tensor::from_fn([1, 1, 3 * chunk, 1], Layout::Bhsd, by_chunk(1000.0f32, 0.0)),
                Tensor::from_fn([1, 1, 3 * chunk, 1], Layout::Bhsd, by_chunk(2.0, -7.0)),
            );
            for set in instruction_sets() {
                let answer = run_on(set, &problem, &AttentionConfig::full());
                for row in 0..rows {
                    let (out, logsumexp) = answer.row_values([0, 0, row]);
                    let expected = 1000.0 + (chunk as f64).ln();
                    assert!((out[0] - 2.0).abs() < 1e-5, "{set} {rows} {heaviest}: {}", out[0]);
                    assert!((logsumexp - expected).abs() < 1e-3, "{set} {rows} {heaviest}: {logsumexp} {expected}");
                }
            }
        }
    }
}

/// Wherever it stands in a block, and also where it alone of its block is seen, and by the last row only.
#[test]
fn a_key_of_far_larger_score_takes_all_the_weight_of_the_rows_that_see_it() {
    for (rows, kv_len) in [(2, 64), (2, 65), (3, 66), (4, 65), (4, 67), (7, 97), (8, 70)] {
        let column = |number: &dyn Fn(usize) -> f32| {
            Tensor::from_fn([1, 1, kv_len, 1], Layout::Bhsd, |[_, _, key, _]: [usize; 4]| number(key))
        };
        for heaviest in (0..kv_len).rev().step_by(by_profile(1, 3)) {
            let problem = Problem::new(
                Tensor::from_fn([1, 1, rows, 1], Layout::Bhsd, |_| 1.0f32),
                column(&|key| if key == heaviest { 1000.0 } else { 0.0 }),
                column(&|key| key as f32),
            );
            for set in instruction_sets() {
                let answer = run_on(set, &problem, &AttentionConfig::causal());
                for row in 0..rows {
                    let visible = kv_len - rows + row + 1;
                    let (expected, expected_logsumexp) = match heaviest < visible {
                        true => (heaviest as f64, 1000.0),
                        false => ((visible - 1) as f64 / 2.0, (visible as f64).ln()),
                    };
                    let (out, logsumexp) = answer.row_values([0, 0, row]);
                    let what = (set, rows, kv_len, heaviest, row);
                    assert!((out[0] - expected).abs() < 1e-4, "{what:?}: {} {expected}", out[0]);
                    assert!((logsumexp - expected_logsumexp).abs() < 1e-4, "{what:?}: {logsumexp}");
                }
            }
        }
    }
}

fn run_with_lens(problem: &Problem, kv_lens: &[usize], config: &AttentionConfig) -> Answer {
    let mut out = Tensor::unwritten(problem.out_shape(), Layout::Bhsd);
    let [batch, heads, q_len, _] = problem.out_shape();
    let mut logsumexp = vec![CANARY; batch * heads * q_len];
    let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
    attention_into(&problem.inputs().with_kv_lens(kv_lens), &mut outputs, config).unwrap();
    out.assert_written();
    Answer { out, logsumexp }
}

/// Lengths of 0, of less and more than q_len, across a block, and the whole.
fn ragged(q_len: usize) -> (AttentionShape, Vec<usize>) {
    let kv_lens = vec![0, 1, 3, 65, 193, 230];
    (AttentionShape { batch: kv_lens.len(), kv_len: 230, ..shape(q_len, 230, 3) }, kv_lens)
}

#[test]
fn each_sequence_has_its_own_length() {
    for q_len in [1, 2, 7, 25] {
        let (shape, kv_lens) = ragged(q_len);
        let problem = normal_problem(&shape, 6);
        for padding in [KvPadding::Right, KvPadding::Left] {
            for config in masks() {
                for set in instruction_sets() {
                    let config = config.with_kv_padding(padding).with_instruction_set(set);
                    let found = run_with_lens(&problem, &kv_lens, &config);
                    for (index, &kv_len) in kv_lens.iter().enumerate() {
                        // The sequence alone, without padding.
                        let first = if padding == KvPadding::Left { shape.kv_len - kv_len } else { 0 };
                        let part = |tensor: &Tensor| tensor.part(0, index..index + 1);
                        let keys = |tensor: &Tensor| part(tensor).part(2, first..first + kv_len);
                        let alone = Problem::new(part(&problem.q), keys(&problem.k), keys(&problem.v));
                        let answer = Answer {
                            out: part(&found.out),
                            logsumexp: found.logsumexp[index * 3 * q_len..][..3 * q_len].to_vec(),
                        };
                        let what = (set, padding, config.mask, q_len, kv_len);
                        Expected::new(&alone, &config).assert_met_by(&answer, &what);
                        if padding == KvPadding::Right {
                            assert_eq!(answer.bits(), run(&alone, &config).bits(), "{what:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_reference_knows_lengths() {
    let (shape, kv_lens) = ragged(4);
    let problem = normal_problem(&shape, 7);
    for padding in [KvPadding::Right, KvPadding::Left] {
        for config in masks() {
            let config = config.with_kv_padding(padding);
            let inputs = problem.inputs();
            let expected = reference::attention(&inputs.with_kv_lens(&kv_lens), &config).unwrap();
            let found = run_with_lens(&problem, &kv_lens, &config);
            for (found, expected) in found.out.values().iter().zip(&expected.out) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "{padding:?} {config:?}");
            }
        }
    }
}

/// What lies in the padding cannot be seen in any bit, on either path.
#[test]
fn padding_may_hold_anything() {
    for q_len in [1, 3, 20] {
        let (shape, kv_lens) = ragged(q_len);
        let problem = normal_problem(&shape, 8);
        for padding in [KvPadding::Right, KvPadding::Left] {
            for (set, config) in instruction_sets().into_iter().flat_map(|set| masks().map(|config| (set, config))) {
                let config = config.with_kv_padding(padding).with_instruction_set(set);
                let expected = run_with_lens(&problem, &kv_lens, &config).bits();
                for garbage in [f32::from_bits(0xffff_ffff), f32::INFINITY] {
                    let mut spoilt = problem.clone();
                    for tensor in [&mut spoilt.k, &mut spoilt.v] {
                        *tensor = Tensor::from_fn(tensor.shape, Layout::Bhsd, |index| {
                            let [sequence, _, key, _] = index;
                            let key = if padding == KvPadding::Left { shape.kv_len - 1 - key } else { key };
                            if key < kv_lens[sequence] { tensor.get(index) } else { garbage }
                        });
                    }
                    let found = run_with_lens(&spoilt, &kv_lens, &config).bits();
                    assert!(found == expected, "{set} {padding:?} {:?} {q_len} {garbage}", config.mask);
                }
            }
        }
    }
}

/// A NaN in K or V of a split row shows in the rows that see it and in no other.
#[test]
fn nan_in_a_chunk_reaches_exactly_the_rows_that_see_it() {
    let rows = 4;
    let kv_len = 2 * CHUNKS[0] + 100;
    let clean = normal_problem(&shape(rows, kv_len, 1), 9);
    // With bottom-right alignment row r sees keys up to kv_len - rows + r.
    for key in [0, CHUNKS[0] - 1, CHUNKS[0], kv_len - 3, kv_len - 1] {
        for (set, in_values) in instruction_sets().into_iter().flat_map(|set| [(set, false), (set, true)]) {
            let mut problem = clean.clone();
            let tensor = if in_values { &mut problem.v } else { &mut problem.k };
            tensor.set([0, 0, key, 1], f32::NAN);
            let (expected, found) =
                (run_on(set, &clean, &AttentionConfig::causal()), run_on(set, &problem, &AttentionConfig::causal()));
            for row in 0..rows {
                let sees = key <= kv_len - rows + row;
                let (out, logsumexp) = found.row([0, 0, row]);
                if !sees {
                    assert_eq!(found.row_bits([0, 0, row]), expected.row_bits([0, 0, row]), "{set} {key} {row}");
                } else if in_values {
                    assert!(out[1].is_nan() && !out[0].is_nan() && !logsumexp.is_nan(), "{set} {key} {row}");
                } else {
                    assert!(out.iter().all(|x| x.is_nan()) && logsumexp.is_nan(), "{set} {key} {row}");
                }
            }
        }
    }
}

/// One head still keeps every thread busy (FIELD.md 18): there are more tasks than threads, and they run.
#[cfg(feature = "rayon")]
#[test]
fn one_head_of_many_keys_has_a_task_for_every_thread() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(8).build().unwrap();
    let plan = pool.install(|| {
        let shape = AttentionShape { head_dim: 64, value_dim: 64, ..shape(1, 32 * 1024, 1) };
        AttentionPlan::new(&shape, &AttentionConfig::causal()).unwrap()
    });
    assert_eq!(plan.threads(), 8);
}

#[test]
fn one_plan_serves_all_lengths() {
    let (shape, _) = ragged(2);
    let problem = normal_problem(&shape, 10);
    let plan = AttentionPlan::new(&shape, &AttentionConfig::causal()).unwrap();
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    for kv_lens in [[0, 1, 2, 3, 4, 5], [230, 229, 100, 7, 64, 65]] {
        let mut out = Tensor::unwritten(problem.out_shape(), Layout::Bhsd);
        let inputs: AttentionInputs<'_, f32> = problem.inputs().with_kv_lens(&kv_lens);
        plan.run(&inputs, &mut AttentionOutputs::new(out.view_mut()), &mut workspace).unwrap();
        let expected = run_with_lens(&problem, &kv_lens, &AttentionConfig::causal());
        let bits = |tensor: &Tensor| tensor.values().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&out), bits(&expected.out));
    }
}
