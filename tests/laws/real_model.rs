//! Real input: a layer of a real model on a real text, and worked examples to check by hand.

use std::sync::OnceLock;

use crate::common::{Answer, Layout, Number, Problem, Tensor, instruction_sets, quick, run_into, run_on};
use fused_attention::{AttentionConfig, bf16, f16};
use safetensors::SafeTensors;
use serde_json::Value;

const MODEL: &[u8] = include_bytes!("../data/minilm_layer2_attention.safetensors");
const TOKENS: &str = include_str!("../data/minilm_tokens.json");
const EXAMPLES: &str = include_str!("../data/worked_examples.json");

const NUM_HEADS: usize = 12;
pub const HEAD_DIM: usize = 32;
pub const D_MODEL: usize = NUM_HEADS * HEAD_DIM;
pub const LEN: usize = 320;

/// f32 against f64 differs by at most 2e-6 here (data/README); the projections of the model itself were f32 too.
const TOLERANCE: f32 = 5e-6;

pub fn model(name: &str) -> Vec<f32> {
    let tensors = SafeTensors::deserialize(MODEL).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32);
    tensor.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// The heads that are checked: all, or three of them in the quick profile.
pub fn heads() -> Vec<usize> {
    if quick() { vec![0, 5, 11] } else { (0..NUM_HEADS).collect() }
}

/// `x W^T + b` in f64 for the checked heads, as `[1, heads, LEN, HEAD_DIM]` in FlashAttention's memory order.
fn project(weights: &str, bias: &str) -> Tensor {
    let (x, weights, bias) = (model("x"), model(weights), model(bias));
    let heads = heads();
    let mut projected = Tensor::unwritten([1, heads.len(), LEN, HEAD_DIM], Layout::Bshd);
    for (index, head) in heads.into_iter().enumerate() {
        let feature = |d: usize| head * HEAD_DIM + d;
        // Input-major, so that one input meets all features of the head at once.
        let columns: Vec<[f64; HEAD_DIM]> =
            (0..D_MODEL).map(|p| std::array::from_fn(|d| f64::from(weights[feature(d) * D_MODEL + p]))).collect();
        for token in 0..LEN {
            let mut sums: [f64; HEAD_DIM] = std::array::from_fn(|d| f64::from(bias[feature(d)]));
            for (&x, column) in x[token * D_MODEL..][..D_MODEL].iter().zip(&columns) {
                sums.iter_mut().zip(column).for_each(|(sum, weight)| *sum += f64::from(x) * weight);
            }
            for (d, sum) in sums.into_iter().enumerate() {
                projected.set([0, index, token, d], sum as f32);
            }
        }
    }
    projected
}

pub fn layer() -> &'static Problem {
    static LAYER: OnceLock<Problem> = OnceLock::new();
    LAYER.get_or_init(|| Problem::new(project("w_q", "b_q"), project("w_k", "b_k"), project("w_v", "b_v")))
}

/// Compares with a context `[LEN, D_MODEL]` of the model, heads side by side, on every instruction set.
fn assert_context(config: &AttentionConfig, expected: &str) {
    let expected = model(expected);
    assert_eq!(expected.len(), LEN * D_MODEL);
    for set in instruction_sets() {
        let answer = run_into(layer(), &config.with_instruction_set(set), Layout::Bshd);
        for (index, head) in heads().into_iter().enumerate() {
            for (token, d) in (0..LEN).flat_map(|token| (0..HEAD_DIM).map(move |d| (token, d))) {
                let expected = expected[token * D_MODEL + head * HEAD_DIM + d];
                let found = answer.out.get([0, index, token, d]);
                let close = (found - expected).abs() <= TOLERANCE;
                assert!(close, "{set}: head {head}, token {token}, feature {d}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn a_real_encoder_layer_gives_what_the_model_computed() {
    assert_context(&AttentionConfig::full(), "model_context");
}

#[test]
fn a_real_layer_under_a_causal_mask_gives_what_f64_computed() {
    assert_context(&AttentionConfig::causal(), "causal_context");
}

/// Fault 12 of FIELD.md (ik_llama#217) on real numbers: what 16-bit keys and values cost, as a part of the output.
#[test]
fn narrow_keys_and_values_of_a_real_layer_cost_no_more_than_their_rounding() {
    fn relative_error<K: Number<Real = f32>>() {
        let round = |tensor: &Tensor| tensor.map(|x| K::nearest(x.value()));
        let narrow = Problem::<f32, K>::new(layer().q.clone(), round(&layer().k), round(&layer().v));
        for set in instruction_sets() {
            let [exact, found] =
                [run_on(set, layer(), &AttentionConfig::full()), run_on(set, &narrow, &AttentionConfig::full())]
                    .map(|answer| answer.out.values());
            let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
            let error = square(&mut exact.iter().zip(&found).map(|(exact, found)| found - exact));
            let relative = (error / square(&mut exact.iter().copied())).sqrt();
            assert!(relative <= K::epsilon(), "{set} {}: {relative:e}", K::NAME);
            assert!(relative >= 0.02 * K::epsilon(), "{set} {}: {relative:e}, nothing was rounded", K::NAME);
        }
    }
    relative_error::<f16>();
    relative_error::<bf16>();
}

#[test]
fn the_data_is_what_its_note_says() {
    let tokens: Vec<String> = serde_json::from_str(TOKENS).unwrap();
    assert_eq!((tokens.len(), tokens[0].as_str(), tokens[1].as_str()), (LEN, "[CLS]", "apache"));
    // Full and causal differ: the comparison can tell them apart.
    let (full, causal) = (model("model_context"), model("causal_context"));
    assert!(full.iter().zip(causal).any(|(full, causal)| (full - causal).abs() > 1000.0 * TOLERANCE));
}

pub fn example(name: &str) -> Value {
    serde_json::from_str::<Value>(EXAMPLES).unwrap()[name].take()
}

/// A matrix as one head.
pub fn matrix(value: &Value) -> Tensor {
    let rows: Vec<Vec<f32>> = serde_json::from_value(value.clone()).unwrap();
    Tensor::from_fn([1, 1, rows.len(), rows[0].len()], Layout::Bhsd, |[_, _, row, d]| rows[row][d])
}

pub fn numbers(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

pub fn identity(len: usize) -> Tensor {
    Tensor::from_fn([1, 1, len, len], Layout::Bhsd, |[_, _, row, d]| if row == d { 1.0 } else { 0.0 })
}

pub fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len());
    let close = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() <= tolerance);
    assert!(close, "{what}: {found:?}, not {expected:?}");
}

/// Runs an example with `q`, `k`, `v`, `softmax_scale` and the expected weights and output of one row.
fn check_example(name: &str) {
    let example = example(name);
    let tolerance = example["tolerance"].as_f64().unwrap() as f32;
    let row = example["row"].as_u64().unwrap() as usize;
    assert_eq!(example["mask"], "full");
    let mut config = AttentionConfig::full();
    config.softmax_scale = example["softmax_scale"].as_f64();
    let problem = Problem::new(matrix(&example["q"]), matrix(&example["k"]), matrix(&example["v"]));
    let weights = Problem { v: identity(problem.k.shape[2]), ..problem.clone() };
    for set in instruction_sets() {
        let row_of = |answer: Answer| answer.row([0, 0, row]).0;
        assert_close(&row_of(run_on(set, &problem, &config)), &numbers(&example["out"]), tolerance, set.name());
        assert_close(&row_of(run_on(set, &weights, &config)), &numbers(&example["weights"]), tolerance, set.name());
    }
}

#[test]
fn the_identity_projection_example_comes_out() {
    check_example("identity_projection");
}

#[test]
fn the_pronoun_example_comes_out() {
    check_example("pronoun");
}

#[test]
fn causal_weights_are_lower_triangular_and_sum_to_one() {
    let example = example("causal_weights");
    let size = |name: &str| example[name].as_u64().unwrap() as usize;
    let (len, num_heads, head_dim) = (size("num_tokens"), size("num_heads"), size("head_dim"));
    let mut problem = Problem::<f32>::new(
        Tensor::from_fn([1, num_heads, len, head_dim], Layout::Bhsd, crate::common::pattern),
        Tensor::from_fn([1, num_heads, len, head_dim], Layout::Bhsd, |[b, h, i, d]| {
            crate::common::pattern([b, h, i + 3, d])
        }),
        Tensor::from_fn([1, num_heads, len, len], Layout::Bhsd, |[_, _, row, d]| if row == d { 1.0 } else { 0.0 }),
    );
    problem.q.data.iter_mut().for_each(|q| *q *= 3.0);
    for set in instruction_sets() {
        let answer = run_on(set, &problem, &AttentionConfig::causal());
        for (head, query) in (0..num_heads).flat_map(|h| (0..len).map(move |i| (h, i))) {
            let (weights, _) = answer.row([0, head, query]);
            assert!(weights[query + 1..].iter().all(|&weight| weight == 0.0), "{set}: {weights:?}");
            assert!(weights[..=query].iter().all(|&weight| weight > 0.0), "{set}: {weights:?}");
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{set}: {weights:?}");
        }
        assert_eq!(answer.row([0, 0, 0]).0, [1.0, 0.0, 0.0, 0.0], "{set}");
    }
}

#[test]
fn dividing_by_the_root_of_head_dim_keeps_the_softmax_soft() {
    let example = example("saturation");
    let tolerance = example["tolerance"].as_f64().unwrap() as f32;
    let scores = numbers(&example["scores"]);
    // head_dim 64, of which one feature is used: the default scale is 1/8.
    let problem = Problem::new(
        Tensor::from_fn([1, 1, 1, 64], Layout::Bhsd, |[_, _, _, d]| if d == 17 { 1.0 } else { 0.0 }),
        Tensor::from_fn([1, 1, 3, 64], Layout::Bhsd, |[_, _, j, d]| if d == 17 { scores[j] } else { 5.0 }),
        identity(3),
    );
    for set in instruction_sets() {
        let scaled = run_on(set, &problem, &AttentionConfig::full()).row([0, 0, 0]).0;
        assert_close(&scaled, &numbers(&example["softmax_of_scaled"]), tolerance, set.name());
        let unscaled = run_on(set, &problem, &AttentionConfig::full().with_softmax_scale(1.0)).row([0, 0, 0]).0;
        let expected = numbers(&example["softmax"]);
        assert_close(&unscaled, &expected, tolerance, set.name());
        // The small weights, to the three digits that are given.
        for (found, expected) in unscaled.iter().zip(&expected) {
            assert!((found / expected - 1.0).abs() < 2e-3, "{set}: {unscaled:?}, not {expected:?}");
        }
    }
}
