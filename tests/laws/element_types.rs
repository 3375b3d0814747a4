//! The element types: 16-bit numbers are f32 numbers of few digits, and everything is accumulated in f32.

use crate::bf16_pairs::{multiplies_pairs, with_exchanged_neighbours};
use crate::common::{
    Layout, Number, Operands, Problem, Tensor, by_profile, for_each_pair, instruction_sets, masks, normal_problem,
    one_head, pattern, run_into, run_on, wide,
};
use fused_attention::{AttentionConfig, AttentionShape, bf16, f16, reference};

/// Calls a law for each 16-bit type.
macro_rules! for_each_16_bit_type {
    ($law:ident) => {
        $law::<f16>();
        $law::<bf16>();
    };
}

/// `T::nearest` and `T::exactly`, which all of these tests trust, against the conversions of `half` and of the language.
#[test]
fn rounding_by_definition_is_what_others_do() {
    fn there_and_back<T: Number>() {
        assert!((0..=0xffff).map(T::from_bits).all(|x| x.value().is_nan() || T::exactly(x.value()).bits() == x.bits()));
    }
    for_each_16_bit_type!(there_and_back);
    // Every 16-bit half of an f32 with some others: both types' ties, overflows and subnormals among them.
    for high in 0..=0xffffu32 {
        for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let x = f32::from_bits(high << 16 | low);
            if !x.is_nan() {
                assert_eq!(f16::nearest(x.into()).to_bits(), f16::from_f32_const(x).to_bits(), "{x:e}");
                assert_eq!(bf16::nearest(x.into()).to_bits(), bf16::from_f32_const(x).to_bits(), "{x:e}");
                assert_eq!(f32::exactly(x.into()).to_bits(), x.to_bits());
                let between = f64::from(x) * (1.0 + 2f64.powi(-24)) * (1.0 + 2f64.powi(-40));
                assert_eq!(f32::nearest(between).to_bits(), (between as f32).to_bits(), "{between:e}");
            }
        }
    }
    assert_eq!((f16::largest(), bf16::largest()), (f16::MAX.to_f64(), bf16::MAX.to_f64()));
    assert_eq!((f32::largest(), f32::epsilon()), (f32::MAX.into(), f32::EPSILON.into()));
}

/// The references in f64 and in twice its precision agree, so that one can be the yardstick of the other.
#[test]
fn both_references_agree() {
    let shape = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(9, 7, 12, 5) };
    for (problem, bound) in [(normal_problem(&shape, 1), 1e-14), (Problem::ascending(&shape, 2, 300.0, None), 1e-12)] {
        for config in masks() {
            let expected = reference::attention(&problem.inputs(), &config).unwrap();
            let wide = wide::attention(&problem.inputs(), &config);
            for (found, expected) in [(wide.out, expected.out), (wide.logsumexp, expected.logsumexp)] {
                assert!(crate::common::max_abs_error(&found, &expected) <= bound, "{config:?}");
            }
        }
    }
}

/// A call on narrow types is the call on the same numbers in the accumulator's type, whose output is rounded once: bit for
/// bit, on every path. Where pairs of bf16 are multiplied, the features of each change places in their sums.
#[test]
fn narrow_types_give_the_bits_of_their_widened_copies() {
    for_each_pair!(bits_of_widened_copies);
}

fn bits_of_widened_copies<T: Number, K: Number<Real = T::Real>>() {
    if T::NAME == T::Real::NAME && K::NAME == K::Real::NAME {
        return; // nothing is narrow
    }
    // Output and log-sum-exp of the widened copy.
    let widened = |problem: &Problem<T, K>, config: &AttentionConfig, pairs: bool| {
        let mut widened = problem.widened();
        if pairs {
            widened = with_exchanged_neighbours(&widened);
        }
        let answer = crate::common::run(&widened, config);
        let rounded: Vec<T> = answer.out.values().iter().map(|x| T::nearest(x.value())).collect();
        (crate::common::bits(&rounded), crate::common::bits(&answer.logsumexp))
    };
    let all_rows = by_profile((1..=40).collect(), vec![1, 2, 7, 8, 9, 16, 17, 33]);
    for rows in all_rows {
        // A group of two where the rows are even; two blocks of keys where they are divisible by 3.
        let group_size = 2 - rows % 2;
        let kv_len = if rows % 3 == 0 { 200 } else { 3 + rows };
        let (head_dim, value_dim) = match rows % 5 {
            0 => (64, 48),
            1 => (131, 21), // longer than what is packed at once
            _ => (19, 21),
        };
        let shape = AttentionShape {
            num_heads: 2 * group_size,
            num_kv_heads: 2,
            ..one_head(rows / group_size, kv_len, head_dim, value_dim)
        };
        let problem = Problem::<T, K>::normal(&shape, rows as u64);
        for set in instruction_sets() {
            for config in [AttentionConfig::causal(), AttentionConfig::full()] {
                let pairs = multiplies_pairs::<T, K>(set, rows);
                // Whether Q or the scores are multiplied does not matter where no bit is lost.
                let config = config.with_instruction_set(set).with_softmax_scale(if pairs { 0.5 } else { 0.7 });
                let expected = widened(&problem, &config, pairs);
                let layout = Layout::DISTINCT[rows % Layout::DISTINCT.len()];
                let what = (shape, layout, config);
                assert_eq!(run_into(&problem, &config, layout).bits(), expected, "out in {what:?}");
                assert_eq!(run_into(&problem.in_layout(layout), &config, Layout::Bhsd).bits(), expected, "in {what:?}");
                // One layout for each tensor, none of them another's.
                let mixed = Problem {
                    q: problem.q.in_layout(Layout::Interleaved),
                    k: problem.k.in_layout(Layout::BroadcastSeq),
                    v: problem.v.in_layout(Layout::Transposed),
                    v_lies_in_k: false,
                    operands: Operands::default(),
                };
                let expected = widened(&mixed, &config, pairs);
                assert_eq!(run_into(&mixed, &config, Layout::Bshd).bits(), expected, "mixed {what:?}");
            }
        }
    }
}

/// Numbers in a tensor `[1, heads, seq, dim]`, as many of `numbers` as fill whole heads.
fn filled<T: Number>(numbers: &[T], [seq, dim]: [usize; 2]) -> Tensor<T> {
    let heads = numbers.len() / (seq * dim);
    assert!(heads > 0);
    Tensor::from_fn([1, heads, seq, dim], Layout::Bhsd, |[_, h, s, d]| numbers[(h * seq + s) * dim + d])
}

fn ones<T: Number>(shape: [usize; 4]) -> Tensor<T> {
    Tensor::from_fn(shape, Layout::Bhsd, |_| T::exactly(1.0))
}

/// Row `i` is 1 in feature `i` and 0 in all others.
fn unit_rows<T: Number>(shape: [usize; 4]) -> Tensor<T> {
    Tensor::from_fn(shape, Layout::Bhsd, |[_, _, row, d]| T::exactly(if row == d { 1.0 } else { 0.0 }))
}

/// Numbers of rows for each kernel.
const ROWS: [usize; 2] = [2, 9];

/// Every number, or some of each kind in the quick profile.
fn sampled<T: Number>(numbers: impl Iterator<Item = T>) -> Vec<T> {
    numbers.step_by(by_profile(1, 13)).collect()
}

/// A row that sees one key gives its value. 256 features, so that whole vectors are converted, and 251 with a tail.
fn assert_values_come_out<T: Number, K: Number<Real = T::Real>>(values: &[K]) {
    for (q_len, value_dim) in ROWS.into_iter().zip([251, 256]) {
        let v = filled(values, [1, value_dim]);
        let heads = v.shape[1];
        let problem = Problem::<T, K>::new(ones([1, heads, q_len, 1]), ones([1, heads, 1, 1]), v);
        let strided = Problem { v: problem.v.in_layout(Layout::Interleaved), ..problem.clone() };
        for (problem, layout) in [(&problem, Layout::Bhsd), (&strided, Layout::Interleaved)] {
            for set in instruction_sets() {
                let config = AttentionConfig::full().with_instruction_set(set);
                let answer = run_into(problem, &config, layout);
                for (head, d) in (0..heads).flat_map(|head| (0..value_dim).map(move |d| (head, d))) {
                    let value = problem.v.get([0, head, 0, d]);
                    let expected = T::nearest(value.value());
                    for query in [0, q_len - 1] {
                        let found = answer.out.get([0, head, query, d]);
                        let same = found == expected || (found.value().is_nan() && value.value().is_nan());
                        assert!(
                            same,
                            "{set}: {} {value:e} came out as {} {found}",
                            K::NAME,
                            T::NAME,
                            value = value.value()
                        );
                    }
                }
            }
        }
    }
}

/// All 65536 patterns: subnormals, infinities and NaNs too.
#[test]
fn every_pattern_comes_out_of_the_values() {
    fn every_pattern<K: Number<Real = f32>>() {
        // The canary, a NaN like others, would look like an output that was not written; so would what becomes quiet as it.
        let quiet = 1 << (K::PRECISION - 2);
        let is_not_canary = |&pattern: &u64| pattern | quiet != K::CANARY.bits();
        let mut patterns = sampled((0..=0xffff).filter(is_not_canary).map(K::from_bits));
        patterns.extend(K::nans());
        patterns.resize(patterns.len().next_multiple_of(256), K::exactly(f64::INFINITY));
        assert_values_come_out::<f32, K>(&patterns);
        assert_values_come_out::<K, K>(&patterns);
    }
    for_each_16_bit_type!(every_pattern);
}

/// Each number of the type, the middle to the next one, and the f32 on either side of the middle; beyond the largest
/// number the middle is where infinity begins.
#[test]
fn outputs_are_rounded_to_nearest_even() {
    fn around_every_number<T: Number<Real = f32>>() {
        let mut values = Vec::new();
        for number in sampled(T::all_numbers().filter(|x| x.value().is_finite())) {
            let middle = (number.value() + (T::ulp(number.value()) / 2.0).copysign(number.value())) as f32;
            values.extend([number.widened(), middle.next_down(), middle, middle.next_up()]);
        }
        values.extend([f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(1), 0.0, -0.0]);
        values.resize(values.len().next_multiple_of(256), f32::NAN);
        assert_values_come_out::<T, f32>(&values);
    }
    for_each_16_bit_type!(around_every_number);
}

/// Keys of every number against queries of ones and zeros: each score is one number, and the log-sum-exp of one score
/// is that score.
#[test]
fn every_number_counts_exactly_in_the_keys() {
    fn every_key<K: Number<Real = f32>>() {
        let numbers = sampled(K::all_numbers().filter(|x| x.value().is_finite()));
        for rows in ROWS {
            let k = filled(&numbers, [1, rows]);
            let heads = k.shape[1];
            let problem = Problem::<f32, K>::new(unit_rows([1, heads, rows, rows]), k, ones([1, heads, 1, 1]));
            let strided = Problem { k: problem.k.in_layout(Layout::Interleaved), ..problem.clone() };
            for (problem, set) in
                [&problem, &strided].into_iter().flat_map(|p| instruction_sets().into_iter().map(move |s| (p, s)))
            {
                let answer = run_on(set, problem, &AttentionConfig::full().with_softmax_scale(1.0));
                for (number, score) in problem.k.values().iter().zip(&answer.logsumexp) {
                    assert_eq!(number.value(), f64::from(*score), "{set}, {rows} rows, {}", K::NAME);
                }
            }
        }
    }
    for_each_16_bit_type!(every_key);
}

/// As [`every_number_counts_exactly_in_the_keys`], with the parts exchanged: a batch for each feature.
#[test]
fn every_number_counts_exactly_in_the_queries() {
    fn every_query<T: Number<Real = f32>>() {
        const FEATURES: usize = 11;
        let numbers = sampled(T::all_numbers().filter(|x| x.value().is_finite()));
        for rows in ROWS {
            let all = filled(&numbers, [rows, FEATURES]);
            let heads = all.shape[1];
            let q = Tensor { shape: [FEATURES, heads, rows, FEATURES], ..all.in_layout(Layout::BroadcastBatch) };
            let k = Tensor::from_fn([FEATURES, heads, 1, FEATURES], Layout::BroadcastHeads, |[batch, _, _, d]| {
                if batch == d { 1.0 } else { 0.0 }
            });
            let problem = Problem::<T, f32>::new(q, k, ones([FEATURES, heads, 1, 1]));
            let strided = Problem { q: problem.q.in_layout(Layout::Interleaved), ..problem.clone() };
            for (problem, set) in
                [&problem, &strided].into_iter().flat_map(|p| instruction_sets().into_iter().map(move |s| (p, s)))
            {
                let answer = run_on(set, problem, &AttentionConfig::full().with_softmax_scale(1.0));
                for (i, score) in answer.logsumexp.iter().enumerate() {
                    let (batch, head, query) = (i / rows / heads, i / rows % heads, i % rows);
                    let number = problem.q.get([batch, head, query, batch]);
                    assert_eq!(number.value(), f64::from(*score), "{set}, {rows} rows, {}", T::NAME);
                }
            }
        }
    }
    for_each_16_bit_type!(every_query);
}

/// The output's type alone limits the output: sums of many large values do not overflow before it.
#[test]
fn outputs_beyond_the_range_of_their_type_are_infinite() {
    fn beyond<T: Number<Real = f32>, K: Number<Real = f32>>(values: [f64; 2], expected: f64) {
        for rows in ROWS {
            for kv_len in [2, 300] {
                let v = Tensor::from_fn([1, 1, kv_len, 9], Layout::Bhsd, |[_, _, j, _]| K::nearest(values[j % 2]));
                let q = Tensor::from_fn([1, 1, rows, 3], Layout::Bhsd, |_| T::exactly(0.0));
                let problem = Problem::<T, K>::new(q, ones([1, 1, kv_len, 3]), v);
                for set in instruction_sets() {
                    let answer = run_on(set, &problem, &AttentionConfig::full());
                    let same = answer.out.values().iter().all(|x| x.value() == expected);
                    assert!(same, "{set}: the mean of {values:?} is {:?}", answer.out.values());
                }
            }
        }
    }
    beyond::<f16, f32>([1e5, 1e5], f64::INFINITY);
    beyond::<f16, f32>([-1e5, -1e5], f64::NEG_INFINITY);
    beyond::<f16, bf16>([65536.0, 65536.0], f64::INFINITY);
    beyond::<f16, f32>([65519.0, 65519.0], 65504.0);
    beyond::<f16, bf16>([131072.0, -131072.0], 0.0);
    beyond::<f16, f16>([65504.0, 65504.0], 65504.0);
    // In f32 the sum of 300 of them stays finite; the middle between the largest bf16 and infinity is 3.396e38.
    beyond::<bf16, f32>([1e36, 1e36], bf16::nearest(1e36).value());
    assert_values_come_out::<bf16, f32>(&[3.397e38; 256]);
}

/// Accumulated in f32: in f16 the sum of three such values would be infinite.
#[test]
fn large_values_over_many_keys_stay_finite_and_right() {
    fn large<T: Number<Real = f32>>() {
        let kv_len = by_profile(1 << 16, 1 << 12);
        for q_len in [1, by_profile(24, 9)] {
            let mut problem = Problem::<T, f16>::normal(&one_head(q_len, kv_len, 8, 6), 1);
            problem.v = Tensor::from_fn(problem.v.shape, Layout::Bhsd, |index| match index[3] {
                0 => f16::nearest(30000.0),
                1 => f16::nearest(-30000.0),
                _ => f16::nearest(3e4 * pattern::<f32>(index).value()),
            });
            // The first row sees the fewest keys, the last one all.
            let config = AttentionConfig::causal();
            for query in [0, q_len / 2, q_len - 1] {
                let (right, _) = reference::attention_row(&problem.inputs(), &config, [0, 0, query]).unwrap();
                for set in instruction_sets() {
                    let (out, _) = run_on(set, &problem, &config).row_values([0, 0, query]);
                    for (out, right) in out.iter().zip(&right) {
                        // [measured] 64k terms of one sign, summed one after the other in f32, lose up to 1.2e-5 of the sum.
                        let bound = 2e-5 * 3e4 + if T::NAME == "f32" { 0.0 } else { T::ulp(*right) / 2.0 };
                        assert!(
                            (out - right).abs() <= bound,
                            "{set} {} {q_len} x {kv_len}: {out}, not {right}",
                            T::NAME
                        );
                    }
                }
            }
        }
    }
    large::<f32>();
    large::<f16>();
    large::<bf16>();
}

fn root_mean_square(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    (values.map(|x| x * x).sum::<f64>() / count).sqrt()
}

/// Fault 12 of FIELD.md (ik_llama#217): 16-bit keys and values were judged by the absence of NaN.
#[test]
fn narrow_keys_and_values_cost_no_more_than_their_rounding() {
    fn relative_error<K: Number<Real = f32>>() {
        let len = by_profile(300, 100);
        let shape = AttentionShape { num_heads: 4, num_kv_heads: 2, ..one_head(len, len, 64, 64) };
        let exact = normal_problem(&shape, 3);
        let round = |tensor: &Tensor| tensor.map(|x| K::nearest(x.value()));
        let narrow = Problem::<f32, K>::new(exact.q.clone(), round(&exact.k), round(&exact.v));
        for set in instruction_sets() {
            for config in [AttentionConfig::causal(), AttentionConfig::full()] {
                let [expected, found] =
                    [run_on(set, &exact, &config), run_on(set, &narrow, &config)].map(|a| a.out.values());
                let error = root_mean_square(found.iter().zip(&expected).map(|(x, y)| f64::from(x - y)));
                let relative = error / root_mean_square(expected.iter().map(|x| f64::from(*x)));
                // Of a number rounded to half a unit at most, the mean square is that of a third of a unit or less; a
                // score sums the errors of two such numbers in each feature, weighted by 1 / sqrt(head_dim).
                assert!(relative <= 0.75 * K::epsilon(), "{set} {}: {relative:e}", K::NAME);
                assert!(relative >= 0.05 * K::epsilon(), "{set} {}: {relative:e}, nothing was rounded", K::NAME);
            }
        }
    }
    for_each_16_bit_type!(relative_error);
}

/// What the formula gives when every intermediate tensor is stored in the type of the inputs, as unfused implementations
/// do: scores, scaled scores, weights. Sums inside a product are in f32.
fn unfused_in_half_precision<T: Number<Real = f32>>(problem: &Problem<T>, config: &AttentionConfig) -> Vec<f64> {
    let shape = problem.shape();
    let scale = 1.0 / (shape.head_dim as f64).sqrt();
    let round = |x: f64| T::nearest(x).value();
    let [q, k, v] = [&problem.q, &problem.k, &problem.v].map(|tensor| tensor.map(T::widened));
    let mut out = Vec::new();
    for query in 0..shape.q_len {
        let dot =
            |key| (0..shape.head_dim).fold(0.0f32, |sum, p| sum + q.get([0, 0, query, p]) * k.get([0, 0, key, p]));
        let visible = 0..crate::common::visible_keys(config, &shape, query);
        let scores: Vec<f64> = visible.map(|key| round(round(dot(key).into()) * scale)).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        let weights: Vec<f32> = scores.iter().map(|score| round((score - max).exp() / sum) as f32).collect();
        for d in 0..shape.value_dim {
            let mean = weights.iter().enumerate().fold(0.0f32, |sum, (key, w)| sum + w * v.get([0, 0, key, d]));
            out.push(round(mean.into()));
        }
    }
    out
}

/// Fault 13 of FIELD.md (pytorch#163588): bf16 was compared with f32 or with another bf16 path. The right answer is that in
/// f64 on the same numbers, and the yardstick what half precision without fusing makes of it.
#[test]
fn half_precision_is_closer_to_f64_than_unfused_half_precision() {
    fn closer<T: Number<Real = f32>>() {
        let len = by_profile(200, 70);
        let problem = Problem::<T>::normal(&one_head(len, len, 64, 32), 4);
        for config in [AttentionConfig::causal(), AttentionConfig::full()] {
            let right = reference::attention(&problem.inputs(), &config).unwrap().out;
            let mean_error = |out: &[f64]| root_mean_square(out.iter().zip(&right).map(|(x, y)| x - y));
            let unfused = unfused_in_half_precision(&problem, &config);
            for set in instruction_sets() {
                let found: Vec<f64> = run_on(set, &problem, &config).out.values().iter().map(|x| x.value()).collect();
                let largest = [&found, &unfused].map(|out| crate::common::max_abs_error(out, &right));
                let mean = [&found, &unfused].map(|out| mean_error(out));
                assert!(largest[0] <= largest[1], "{set} {}: largest error {largest:?}", T::NAME);
                assert!(mean[0] <= 0.75 * mean[1], "{set} {}: mean error {mean:?}", T::NAME);
                // No better answer than this one rounded exists.
                let rounded: Vec<f64> = right.iter().map(|&x| T::nearest(x).value()).collect();
                assert!(mean[0] <= 1.01 * mean_error(&rounded), "{set} {}: {mean:?}", T::NAME);
            }
        }
    }
    for_each_16_bit_type!(closer);
}

/// Fault 16 of FIELD.md (llama.cpp#19012), the results: the error does not grow with the context.
#[test]
fn a_long_context_keeps_the_error_bound() {
    fn long<T: Number, K: Number<Real = T::Real>>() {
        let long = by_profile((20, 16384), (12, 700));
        let square = by_profile((700, 700), (250, 250));
        for (q_len, kv_len) in [long, (2, long.1), square] {
            let problem = Problem::<T, K>::normal(&one_head(q_len, kv_len, 64, 32), 5);
            for set in instruction_sets() {
                let answer = run_on(set, &problem, &AttentionConfig::causal());
                for query in [0, 1, q_len / 2, q_len - 1].into_iter().filter(|&query| query < q_len) {
                    let config = AttentionConfig::causal();
                    let (expected, _) = reference::attention_row(&problem.inputs(), &config, [0, 0, query]).unwrap();
                    for (found, expected) in answer.row_values([0, 0, query]).0.into_iter().zip(expected) {
                        let rounding = if T::NAME == T::Real::NAME { 0.0 } else { T::ulp(expected) / 2.0 };
                        let error = (found - expected).abs();
                        assert!(
                            error <= 2e-6 + 1.001 * rounding,
                            "{set}: {error:e} in row {query} of {q_len} x {kv_len}"
                        );
                    }
                }
            }
        }
    }
    long::<f16, f16>();
    long::<bf16, bf16>();
    long::<f32, f16>();
    long::<f32, bf16>();
}

/// Fault 18 of FIELD.md (onnxruntime#28695): one query, a few KV heads, a long cache. Every thread has work, and their
/// number does not show.
#[cfg(feature = "rayon")]
#[test]
fn decoding_a_long_cache_uses_every_thread() {
    fn decode<T: Number, K: Number<Real = T::Real>>() {
        let kv_len = by_profile(8192, 1024);
        let shape = AttentionShape { num_heads: 8, num_kv_heads: 8, ..one_head(1, kv_len, 64, 64) };
        let problem = Problem::<T, K>::normal(&shape, 6);
        let pools = [1, 4].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
        for set in instruction_sets() {
            let config = AttentionConfig::causal()
                .with_instruction_set(set)
                .with_parallelism(fused_attention::Parallelism::Rayon);
            assert_eq!(pools[1].install(|| T::threads(&T::plan(&shape, &config).unwrap())), 4);
            let [one, four] =
                pools.each_ref().map(|pool| pool.install(|| crate::common::run(&problem, &config)).bits());
            assert!(one == four, "{set}: the bits depend on the threads");
        }
    }
    decode::<f32, f32>();
    decode::<f16, f16>();
    decode::<f32, bf16>();
}
