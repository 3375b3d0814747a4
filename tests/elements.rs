//! Every pair of element types, on every instruction set: the answer is that of the reference on the same inputs, the memory between
//! the elements of the output stays as it was.

#[path = "common/mod.rs"]
mod common;

use common::{by_profile, instruction_sets};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, Element, InstructionSet, TensorView, TensorViewMut,
    attention_into, bf16, f16, reference,
};

trait FromF64: Element + PartialEq {
    /// Half of the distance between 1 and the next number.
    const HALF_ULP: f64;
    fn from_f64(value: f64) -> Self;
}

impl FromF64 for f32 {
    const HALF_ULP: f64 = f32::EPSILON as f64 / 2.0;
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
}

impl FromF64 for f64 {
    const HALF_ULP: f64 = f64::EPSILON / 2.0;
    fn from_f64(value: f64) -> f64 {
        value
    }
}

impl FromF64 for f16 {
    const HALF_ULP: f64 = 1.0 / 2048.0;
    fn from_f64(value: f64) -> f16 {
        f16::from_f64(value)
    }
}

impl FromF64 for bf16 {
    const HALF_ULP: f64 = 1.0 / 256.0;
    fn from_f64(value: f64) -> bf16 {
        bf16::from_f64(value)
    }
}

/// What lies in the output's memory before the call.
const CANARY: f64 = -777.0;

/// How `[1, heads, seq, dim]` lies in memory.
#[derive(Debug, Clone, Copy)]
enum Layout {
    Bhsd,
    Bshd,
    /// Elements of a row three apart, rows with a gap.
    Strided,
}

fn strides([_, heads, seq, dim]: [usize; 4], layout: Layout) -> [usize; 4] {
    match layout {
        Layout::Bhsd => [heads * seq * dim, seq * dim, dim, 1],
        Layout::Bshd => [heads * seq * dim, dim, heads * dim, 1],
        Layout::Strided => [heads * seq * (3 * dim + 5), seq * (3 * dim + 5), 3 * dim + 5, 3],
    }
}

fn memory_len(shape: [usize; 4], layout: Layout) -> usize {
    1 + shape.iter().zip(strides(shape, layout)).map(|(size, stride)| (size - 1) * stride).sum::<usize>()
}

/// Pseudo-random numbers in [-2, 2), rounded to `T`.
fn values<T: FromF64>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 51) as f64 - 2.0
    };
    (0..len).map(|_| T::from_f64(next())).collect()
}

fn check<T: FromF64, K: FromF64<Acc = T::Acc>>(
    set: InstructionSet,
    [heads, kv_heads, q_len, kv_len, head_dim, value_dim]: [usize; 6],
    layout: Layout,
) {
    let (q_shape, out_shape) = ([1, heads, q_len, head_dim], [1, heads, q_len, value_dim]);
    let (k_shape, v_shape) = ([1, kv_heads, kv_len, head_dim], [1, kv_heads, kv_len, value_dim]);
    let q = values::<T>(1, memory_len(q_shape, layout));
    let k = values::<K>(2, memory_len(k_shape, layout));
    let v = values::<K>(3, memory_len(v_shape, layout));
    let inputs = AttentionInputs::new(
        TensorView::with_strides(&q, q_shape, strides(q_shape, layout)).unwrap(),
        TensorView::with_strides(&k, k_shape, strides(k_shape, layout)).unwrap(),
        TensorView::with_strides(&v, v_shape, strides(v_shape, layout)).unwrap(),
    );
    let config = AttentionConfig::causal().with_instruction_set(set);
    let expected = reference::attention(&inputs, &config).unwrap();

    let mut out = vec![T::from_f64(CANARY); memory_len(out_shape, layout)];
    let mut logsumexp = vec![T::Acc::from_acc(T::from_f64(CANARY).to_acc()); heads * q_len];
    let view = TensorViewMut::with_strides(&mut out, out_shape, strides(out_shape, layout)).unwrap();
    attention_into(&inputs, &mut AttentionOutputs::new(view).with_logsumexp(&mut logsumexp), &config).unwrap();

    let accumulator_epsilon = if size_of::<T::Acc>() == 8 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    let context = format!(
        "{set}, {} with {}, {layout:?}, {q_len} x {kv_len}, {head_dim} to {value_dim}",
        std::any::type_name::<T>(),
        std::any::type_name::<K>()
    );
    let view = TensorView::with_strides(&out, out_shape, strides(out_shape, layout)).unwrap();
    let mut written = 0;
    for (i, &expected) in expected.out.iter().enumerate() {
        let (row, d) = (i / value_dim, i % value_dim);
        let found = view.get([0, row / q_len, row % q_len, d]).unwrap().to_f64();
        let allowed = expected.abs() * T::HALF_ULP + 40.0 * accumulator_epsilon;
        assert!((found - expected).abs() <= allowed, "{context}: row {row} dim {d}: {found}, not {expected}");
        written += 1;
    }
    for (found, expected) in logsumexp.iter().zip(&expected.logsumexp) {
        let error = (found.to_f64() - expected).abs();
        assert!(error <= 20.0 * accumulator_epsilon * (1.0 + expected.abs()), "{context}: {found:?}, not {expected}");
    }
    let untouched = out.iter().filter(|&&x| x == T::from_f64(CANARY)).count();
    assert_eq!(untouched, out.len() - written, "{context}: elements between the rows were written");
}

fn check_pair<T: FromF64, K: FromF64<Acc = T::Acc>>() {
    // Around a vector, a panel and a tile, one chunk of conversion and more, several blocks of keys; and decode.
    let shapes: &[[usize; 6]] = &[
        [2, 1, 1, 9, 5, 3],
        [2, 2, 2, 40, 17, 20],
        [4, 2, 4, 300, 64, 64],
        [1, 1, 9, 9, 1, 1],
        [2, 1, 20, 33, 7, 9],
        [2, 2, 33, 33, 64, 65],
        [2, 2, 70, 70, 72, 129],
        [4, 2, 50, 300, 80, 31],
    ];
    for set in instruction_sets() {
        for &shape in &shapes[..by_profile(shapes.len(), 7)] {
            for layout in [Layout::Bhsd, Layout::Bshd, Layout::Strided] {
                check::<T, K>(set, shape, layout);
            }
        }
    }
}

#[test]
fn f32_matches_the_reference() {
    check_pair::<f32, f32>();
}

#[test]
fn f64_matches_the_reference() {
    check_pair::<f64, f64>();
}

#[test]
fn f16_matches_the_reference() {
    check_pair::<f16, f16>();
}

#[test]
fn bf16_matches_the_reference() {
    check_pair::<bf16, bf16>();
}

#[test]
fn f32_with_16_bit_keys_and_values_matches_the_reference() {
    check_pair::<f32, f16>();
    check_pair::<f32, bf16>();
}

#[test]
fn sixteen_bits_with_other_keys_and_values_match_the_reference() {
    check_pair::<f16, f32>();
    check_pair::<bf16, f32>();
    check_pair::<f16, bf16>();
    check_pair::<bf16, f16>();
}
