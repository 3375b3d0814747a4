//! Inputs that once broke something, each kept as the law that it broke.

use crate::common::{CANARY, Expected, Problem, Tensor, instruction_sets, one_head, run_on};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, CausalAlignment, TensorView, TensorViewMut,
    attention, attention_into, reference,
};

/// An axis of one element may have any stride, the largest included.
#[test]
fn strides_of_single_elements_are_never_used() {
    let data: Vec<f32> = (0..64).map(|i| (i as f32).sin()).collect();
    for set in instruction_sets() {
        let config = AttentionConfig::full().with_instruction_set(set);
        for (q_len, head_dim) in [(1, 4), (16, 4), (40, 1)] {
            let q = TensorView::with_strides(&data, [1, 1, q_len, head_dim], [usize::MAX, usize::MAX, 1, 1]).unwrap();
            let plain = TensorView::from_bhsd(&data, [1, 1, 1, head_dim]).unwrap();
            let huge = TensorView::with_strides(&data, [1, 1, 1, head_dim], [usize::MAX, 5, usize::MAX, 1]).unwrap();
            let expected = attention(&AttentionInputs::new(q, plain, plain), &config);
            assert_eq!(attention(&AttentionInputs::new(q, huge, huge), &config), expected, "{set}");
        }
    }
}

/// A feature repeated by a stride of 0 is the same as the feature written out.
#[test]
fn repeated_features_are_features() {
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set);
        for rows in [3, 50] {
            let column: Vec<f32> = (0..rows).map(|i| (i as f32).cos()).collect();
            let written: Vec<f32> = column.iter().flat_map(|&x| [x; 19]).collect();
            let repeated = TensorView::with_strides(&column, [1, 1, rows, 19], [0, 0, 1, 0]).unwrap();
            let written = TensorView::from_bhsd(&written, [1, 1, rows, 19]).unwrap();
            let expected = attention(&AttentionInputs::new(written, written, written), &config).unwrap();
            assert_eq!(attention(&AttentionInputs::new(repeated, repeated, repeated), &config), Ok(expected), "{set}");
        }
    }
}

/// Folding log2(e) into Q lost up to 16 times the bound here: small integers make every score exact.
#[test]
fn exact_scores_of_any_size_keep_the_bound() {
    for (largest, seed) in [(2i64, 1u64), (4, 2), (8, 3), (16, 4), (100, 5)] {
        let integer = |salt: u64| {
            move |[_, _, s, d]: [usize; 4]| {
                let hash = (s as u64 * 64 + d as u64 + seed * 1000 + salt).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
                (hash as i64 % (2 * largest + 1) - largest) as f32
            }
        };
        let tensor = |salt| Tensor::from_fn([1, 1, 50, 64], crate::common::Layout::Bhsd, integer(salt));
        let problem = Problem::new(tensor(1), tensor(2), tensor(3));
        for config in [AttentionConfig::full(), AttentionConfig::causal()] {
            let expected = Expected::new(&problem, &config);
            for set in instruction_sets() {
                let answer = crate::common::run(&problem, &config.with_instruction_set(set));
                expected.assert_met_by(&answer, &(set, largest));
            }
        }
    }
}

/// All visible scores -inf: no softmax exists, and the log-sum-exp does not pretend that the row saw no key.
#[test]
fn only_infinitely_small_scores_give_nan_everywhere() {
    for (q_len, kv_len) in [(1, 1), (1, 2), (1, 300), (40, 1), (40, 40)] {
        let shape = one_head(q_len, kv_len, 1, 1);
        let (q, k, v) = (vec![1.0f32; q_len], vec![f32::NEG_INFINITY; kv_len], vec![1.0f32; kv_len]);
        let view = |data, len| TensorView::from_bhsd(data, [1, 1, len, 1]).unwrap();
        let inputs = AttentionInputs::new(view(&q, q_len), view(&k, kv_len), view(&v, kv_len));
        assert!(reference::attention(&inputs, &AttentionConfig::full()).unwrap().logsumexp.iter().all(|x| x.is_nan()));
        for set in instruction_sets() {
            let (mut out, mut logsumexp) = (vec![CANARY; q_len], vec![CANARY; q_len]);
            let out_view = TensorViewMut::from_bhsd(&mut out, [1, 1, q_len, 1]).unwrap();
            let mut outputs = AttentionOutputs::new(out_view).with_logsumexp(&mut logsumexp);
            attention_into(&inputs, &mut outputs, &AttentionConfig::full().with_instruction_set(set)).unwrap();
            assert!(out.iter().chain(&logsumexp).all(|x| x.is_nan()), "{set} {shape:?}");
        }
    }
}

/// Finite scores up to the largest f32 are scores; a sum of weights is not rescaled by an infinite factor.
#[test]
fn scores_near_the_largest_number_are_ordinary() {
    let (q, k, v) = ([1.8e19f32], [1.7e19f32, 1.6e19, -1.7e19], [1.0f32, 2.0, 3.0]);
    let view = |data, len| TensorView::from_bhsd(data, [1, 1, len, 1]).unwrap();
    let inputs = AttentionInputs::new(view(&q, 1), view(&k, 3), view(&v, 3));
    let rows = vec![1.8e19f32; 40];
    let many = AttentionInputs::new(view(&rows, 40), view(&k, 3), view(&v, 3));
    for set in instruction_sets() {
        let config = AttentionConfig::full().with_softmax_scale(1.0).with_instruction_set(set);
        assert_eq!(attention(&inputs, &config), Ok(vec![1.0]), "{set}");
        assert_eq!(attention(&many, &config), Ok(vec![1.0; 40]), "{set}");
    }
}

/// The sign of a zero that underflowed does not depend on the output's strides.
#[test]
fn results_that_underflow_have_the_same_bits_at_any_stride() {
    for set in instruction_sets() {
        let config = AttentionConfig::full().with_instruction_set(set);
        for q_len in [2, 16] {
            let (zeros, v) = (vec![0.0f32; q_len], [-1e-45f32, 0.0, 0.0]);
            let q = TensorView::from_bhsd(&zeros, [1, 1, q_len, 1]).unwrap();
            let k = TensorView::with_strides(&zeros, [1, 1, 3, 1], [0; 4]).unwrap();
            let v = TensorView::from_bhsd(&v, [1, 1, 3, 1]).unwrap();
            let (mut plain, mut strided) = (vec![CANARY; q_len], vec![CANARY; 2 * q_len]);
            let plain_view = TensorViewMut::from_bhsd(&mut plain, [1, 1, q_len, 1]).unwrap();
            let strided_view = TensorViewMut::with_strides(&mut strided, [1, 1, q_len, 1], [1, 1, 2, 2]).unwrap();
            let inputs = AttentionInputs::new(q, k, v);
            attention_into(&inputs, &mut AttentionOutputs::new(plain_view), &config).unwrap();
            attention_into(&inputs, &mut AttentionOutputs::new(strided_view), &config).unwrap();
            for (plain, strided) in plain.iter().zip(strided.iter().step_by(2)) {
                assert_eq!((plain.to_bits(), strided.to_bits()), (0, 0), "{set}");
            }
        }
    }
}

/// Decode read a Q that nobody had packed, where the first keys of a task gave a tile of rows nothing to do: a prefix so short that its rows
/// are computed one by one, with a window behind it; and a window that begins in a later block for the later rows.
#[test]
fn rows_that_have_no_part_in_the_first_block_find_their_q() {
    let group = |num_heads, shape| AttentionShape { num_heads, ..shape };
    let prefix = AttentionConfig::full().with_window(Some(16), Some(49)).with_prefix_len(1);
    let cases = [
        (group(2, one_head(1, 25, 1, 3)), prefix),
        (group(4, one_head(1, 95, 20, 3)), AttentionConfig::full().with_window(Some(16), None).with_prefix_len(8)),
        // Query i of 8 sees the key 28 + i alone, the next block begins with key 32.
        (
            one_head(8, 60, 20, 3),
            AttentionConfig::causal().with_causal_alignment(CausalAlignment::Offset(28)).with_window(Some(0), None),
        ),
        (
            one_head(8, 80, 20, 3),
            AttentionConfig::causal().with_causal_alignment(CausalAlignment::Offset(58)).with_window(Some(30), None),
        ),
    ];
    for (shape, config) in cases {
        let problem: Problem = Problem::normal(&shape, 11);
        // What an earlier call left in the scratch must not be what makes it right.
        let other: Problem = Problem::normal(&AttentionShape { kv_len: 70, ..shape }, 12);
        let expected = Expected::new(&problem, &config);
        for set in instruction_sets() {
            run_on(set, &other, &AttentionConfig::full());
            expected.assert_met_by(&run_on(set, &problem, &config), &(set, shape, config));
        }
    }
}

/// Heads that decode takes together multiplied the stride of V's heads, which may be anything where V has no features.
#[test]
fn strides_of_values_without_features_are_never_used() {
    let (q, k) = (vec![0.5f32; 3 * 4], vec![0.25f32; 3 * 40 * 4]);
    let k = TensorView::from_bshd(&k, [1, 40, 3, 4]).unwrap();
    let v: TensorView<f32> = TensorView::with_strides(&[], [1, 3, 40, 0], [usize::MAX; 4]).unwrap();
    for set in instruction_sets() {
        let mut logsumexp = [0.0f32; 3];
        let out = TensorViewMut::from_bhsd(&mut [], [1, 3, 1, 0]).unwrap();
        let mut outputs = AttentionOutputs::new(out).with_logsumexp(&mut logsumexp);
        let inputs = AttentionInputs::new(TensorView::from_bhsd(&q, [1, 3, 1, 4]).unwrap(), k, v);
        attention_into(&inputs, &mut outputs, &AttentionConfig::full().with_instruction_set(set)).unwrap();
        // 40 scores of 4 * 0.125 / 2.
        assert!(logsumexp.iter().all(|found| (found - (40f32.ln() + 0.25)).abs() < 1e-5), "{set}: {logsumexp:?}");
    }
}

/// A lone key whose score is -inf made the row NaN where a sink has all the weight.
#[test]
fn a_sink_takes_all_the_weight_from_scores_of_minus_infinity() {
    for set in instruction_sets() {
        for kv_len in [1, 2, 30] {
            let (k, v) = (vec![-1.0f32; kv_len], vec![3.0f32; kv_len]);
            let q = TensorView::from_bhsd(&[f32::INFINITY], [1, 1, 1, 1]).unwrap();
            let [k, v] = [&k, &v].map(|data| TensorView::from_bhsd(data, [1, 1, kv_len, 1]).unwrap());
            let (mut out, mut logsumexp) = ([f32::NAN; 1], [f32::NAN; 1]);
            let view = TensorViewMut::from_bhsd(&mut out, [1, 1, 1, 1]).unwrap();
            let mut outputs = AttentionOutputs::new(view).with_logsumexp(&mut logsumexp);
            let inputs = AttentionInputs::new(q, k, v).with_sinks(&[0.5]);
            attention_into(&inputs, &mut outputs, &AttentionConfig::full().with_instruction_set(set)).unwrap();
            assert_eq!((out, logsumexp), ([0.0], [0.5]), "{set}, {kv_len} keys");
            let out = attention(&AttentionInputs::new(q, k, v), &AttentionConfig::full().with_instruction_set(set));
            assert!(out.unwrap()[0].is_nan(), "{set}, {kv_len} keys without a sink");
        }
    }
}

/// Rows so long that a head's few do not fit into one task were left out where decode takes heads together.
#[test]
fn long_rows_of_several_heads_in_token_major_memory_are_all_written() {
    let (head_dim, q_len) = (32_768, 8);
    let q = vec![0.5f32; 2 * q_len * head_dim];
    let (k, v) = (vec![0.25f32; 2 * head_dim], [1.0f32, 2.0]);
    let q = TensorView::from_bhsd(&q, [1, 2, q_len, head_dim]).unwrap();
    let (k, v) =
        (TensorView::from_bshd(&k, [1, 1, 2, head_dim]).unwrap(), TensorView::from_bshd(&v, [1, 1, 2, 1]).unwrap());
    for set in instruction_sets() {
        let mut out = vec![f32::NAN; 2 * q_len];
        let view = TensorViewMut::from_bhsd(&mut out, [1, 2, q_len, 1]).unwrap();
        let config = AttentionConfig::full().with_instruction_set(set);
        attention_into(&AttentionInputs::new(q, k, v), &mut AttentionOutputs::new(view), &config).unwrap();
        assert_eq!(out, [[1.0f32; 8], [2.0; 8]].concat(), "{set}");
    }
}

/// Sequences without tokens were counted one by one to turn none of them, however many there were.
#[cfg(feature = "multi-head")]
#[test]
fn sequences_without_tokens_are_not_turned_one_by_one() {
    use crate::common::layer::{Form, TextbookLayer, TextbookRotary};
    use fused_attention::{MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace, RotaryPairing};

    let mut textbook = TextbookLayer::normal::<f32>(MultiHeadShape::new(8, 2).unwrap(), [true; 4], 1);
    textbook.rotary = Some(TextbookRotary { dim: 4, pairing: RotaryPairing::HalfSplit, base: 1e4 });
    let layer = textbook.layer::<f32>(Form::ALL[0]).unwrap();
    for batch in [1 << (usize::BITS - 8), usize::MAX] {
        let inputs = MultiHeadInputs::new(&[], [batch, 0, 8]);
        let mut workspace = MultiHeadWorkspace::new();
        layer.project(&inputs, &AttentionConfig::causal(), &mut workspace).unwrap();
        let source = inputs.with_source(&[], [batch, 0, 8]);
        layer.project(&source, &AttentionConfig::causal(), &mut workspace).unwrap();
        let _ = layer.forward(&inputs, &AttentionConfig::causal()); // ends
    }
}

/// A rotary embedding of more pairs than memory holds ended the process.
#[test]
fn rotary_dims_that_memory_cannot_hold_are_an_error() {
    use fused_attention::{AttentionError, Rotary, RotaryPairing};
    for pairs in [usize::MAX / 2, isize::MAX as usize / 4] {
        let error = Rotary::new(2 * pairs, RotaryPairing::HalfSplit).unwrap_err();
        assert_eq!(error, AttentionError::AllocationFailed { bytes: pairs.saturating_mul(8) });
    }
}
