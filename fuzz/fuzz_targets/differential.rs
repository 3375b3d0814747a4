//! Small calls on every instruction set against the reference in f64.
//!
//! The bound is that of the test suite, `2 * err(unfused f32) + 8 * eps * max|V|`, plus the roundings that each sum may make (half an
//! ulp of every partial sum): a fuzzer finds the inputs on which the unfused version happens to make no error at all,
//! and those where all errors point the same way.

#![no_main]

use arbitrary::Arbitrary;
use fused_attention::reference;
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, CausalAlignment, Mask, TensorView,
    TensorViewMut, attention_into,
};
use fused_attention_fuzz::{CANARY, Masked, Memory, instruction_sets, offsets, reach};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Case {
    batch: u8,
    num_kv_heads: u8,
    group_size: u8,
    q_len: u8,
    kv_len: u16,
    head_dim: u8,
    value_dim: u8,
    memory: [Memory; 4],
    masked: Masked,
    scale: Option<u8>,
    seed: u64,
    /// Whether scores rise from key to key, so that every block rescales.
    ascending: bool,
    specials: [Option<Special>; 4],
}

/// A value that is not a plain number, somewhere.
#[derive(Debug, Clone, Copy, Arbitrary)]
struct Special {
    tensor: u8,
    place: u32,
    kind: u8,
    payload: u32,
}

impl Special {
    fn value(self) -> f32 {
        match self.kind % 4 {
            0 => f32::INFINITY,
            1 => f32::NEG_INFINITY,
            2 => 0.0,
            // Any NaN: exponent all ones, some bit below it. Not the canary.
            _ => f32::from_bits(((self.payload | 0x7f80_0000) & !CANARY) | 0x7f80_0001),
        }
    }
}

const SCALES: [f64; 8] = [0.0, 0.125, 0.5, 1.0, 2.5, -0.125, -1.0, 1e-3];

/// A tensor over its own memory, of which nothing lies past the last element.
struct Tensor {
    data: Box<[f32]>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Tensor {
    fn new(shape: [usize; 4], strides: Option<[usize; 4]>, mut value: impl FnMut([usize; 4]) -> f32) -> Option<Self> {
        let strides = strides?;
        let mut data = vec![f32::from_bits(CANARY); reach(shape, strides)?].into_boxed_slice();
        let [_, heads, len, dims] = shape;
        for (i, offset) in offsets(shape, strides).enumerate() {
            data[offset] = value([i / dims / len / heads, i / dims / len % heads, i / dims % len, i % dims]);
        }
        Some(Self { data, shape, strides })
    }

    /// Contiguous, in logical order.
    fn values(&self) -> Vec<f32> {
        offsets(self.shape, self.strides).map(|offset| self.data[offset]).collect()
    }

    fn view(&self) -> TensorView<'_, f32> {
        TensorView::with_strides(&self.data, self.shape, self.strides).expect("large enough by construction")
    }
}

/// xorshift64*, to about N(0, 1) in steps of 1/64: the sum of four uniform numbers.
fn normal(state: &mut u64) -> f32 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    let bytes = state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes();
    (bytes[..4].iter().map(|&byte| i32::from(byte)).sum::<i32>() - 510) as f32 / 148.0
}

fuzz_target!(|case: Case| {
    run(&case);
});

fn run(case: &Case) -> Option<()> {
    let batch = usize::from(case.batch % 3);
    let num_kv_heads = usize::from(case.num_kv_heads % 3);
    let num_heads = num_kv_heads * usize::from(1 + case.group_size % 5);
    // Mostly small dims, so that long sequences stay cheap; every tile height and tail occurs.
    let head_dim = usize::from(1 + case.head_dim % if case.head_dim & 0x80 == 0 { 20 } else { 100 });
    let value_dim = usize::from(case.value_dim % if case.value_dim & 0x80 == 0 { 20 } else { 100 });
    let mut q_len = usize::from(case.q_len % 80);
    let mut kv_len = usize::from(case.kv_len % 500);
    while batch * num_heads * q_len * kv_len * (head_dim + value_dim) > 1 << 16 {
        if q_len > 4 { q_len /= 2 } else { kv_len /= 2 }
    }

    let mut config = case.masked.config();
    if let Some(choice) = case.scale {
        config = config.with_softmax_scale(SCALES[usize::from(choice) % SCALES.len()]);
    }
    let mut state = case.seed | 1;
    let mut tensor = |which: usize, shape: [usize; 4]| {
        let strides = case.memory[which].input_strides(shape);
        let mut tensor = Tensor::new(shape, strides, |[_, _, position, dim]| match (case.ascending, which, dim) {
            (true, 0, 0) => 1.0,
            (true, 1, 0) => position as f32 / 4.0,
            _ => normal(&mut state),
        })?;
        for special in case.specials.iter().flatten().filter(|special| usize::from(special.tensor % 3) == which) {
            let len = tensor.data.len();
            if len > 0 {
                tensor.data[special.place as usize % len] = special.value();
            }
        }
        Some(tensor)
    };
    let q = tensor(0, [batch, num_heads, q_len, head_dim])?;
    let k = tensor(1, [batch, num_kv_heads, kv_len, head_dim])?;
    let v = tensor(2, [batch, num_kv_heads, kv_len, value_dim])?;
    let inputs = AttentionInputs::new(q.view(), k.view(), v.view());
    let shape = AttentionShape::of(&inputs).expect("the sizes agree");

    let reference = reference::attention(&inputs, &config).expect("a valid call");
    let contiguous = [&q, &k, &v].map(Tensor::values);
    let rows: Vec<Row> =
        (0..batch * num_heads * q_len).map(|row| Row::new(&contiguous, &config, &shape, row)).collect();

    let out_shape = [batch, num_heads, q_len, value_dim];
    let strides = case.memory[3].strides(out_shape);
    for set in instruction_sets() {
        let mut out = Tensor::new(out_shape, strides, |_| f32::from_bits(CANARY))?;
        let mut logsumexp = vec![f32::from_bits(CANARY); batch * num_heads * q_len];
        let view = TensorViewMut::with_strides(&mut out.data, out_shape, out.strides).expect("distinct elements");
        let mut outputs = AttentionOutputs::new(view).with_logsumexp(&mut logsumexp);
        attention_into(&inputs, &mut outputs, &config.with_instruction_set(set)).expect("a valid call");

        let mut is_gap = vec![true; out.data.len()];
        for (i, offset) in offsets(out_shape, out.strides).enumerate() {
            is_gap[offset] = false;
            let row = &rows[i / value_dim];
            let (found, expected) = (f64::from(out.data[offset]), reference.out[i]);
            let unfused_error = (f64::from(row.unfused[i % value_dim]) - expected).abs();
            let bound = 2.0 * unfused_error + row.roundings[i % value_dim];
            // An infinite value whose weight is 0 in f32 but not in f64 gives NaN.
            let lost_weight = expected.is_infinite() && found.is_nan();
            assert!(
                agree(found, expected, bound) || lost_weight,
                "{set}: out[{i}] is {found}, expected {expected} +- {bound:e}"
            );
        }
        for (offset, x) in out.data.iter().enumerate() {
            assert!(!is_gap[offset] || x.to_bits() == CANARY, "{set}: the gap at {offset} was written");
        }
        for (i, (found, expected)) in logsumexp.iter().zip(&reference.logsumexp).enumerate() {
            let bound = rows[i].logsumexp_roundings * expected.abs().max(1.0);
            let found = f64::from(*found);
            assert!(
                agree(found, *expected, bound),
                "{set}: logsumexp[{i}] is {found}, expected {expected} +- {bound:e}"
            );
        }
    }
    Some(())
}

/// NaN where NaN is expected, the same infinity where that is, else within `bound`.
fn agree(found: f64, expected: f64, bound: f64) -> bool {
    if expected.is_finite() {
        found.is_finite() && !((found - expected).abs() > bound) // no bound where the unfused version gave NaN
    } else {
        found == expected || found.is_nan() && expected.is_nan()
    }
}

/// What the bounds of a row are made of.
struct Row {
    /// The row by textbook attention in f32, with libm's exp.
    unfused: Vec<f32>,
    /// What roundings may do to each value of the row.
    roundings: Vec<f64>,
    /// The same for the logsumexp, relative to it where it exceeds 1.
    logsumexp_roundings: f64,
}

impl Row {
    fn new([q, k, v]: &[Vec<f32>; 3], config: &AttentionConfig, shape: &AttentionShape, row: usize) -> Self {
        let AttentionShape { num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *shape;
        let (batch, head, query) = (row / q_len / num_heads, row / q_len % num_heads, row % q_len);
        let first_key = (batch * num_kv_heads + head / shape.group_size()) * kv_len;
        let q = &q[row * head_dim..][..head_dim];
        let k = |j: usize| &k[(first_key + j) * head_dim..][..head_dim];
        let v = |j: usize| &v[(first_key + j) * value_dim..][..value_dim];
        let scale = config.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt()) as f32;
        let visible: Vec<usize> = (0..kv_len)
            .filter(|&j| match config.mask {
                Mask::Causal(CausalAlignment::TopLeft) => j <= query,
                Mask::Causal(_) => j + q_len <= query + kv_len,
                _ => true,
            })
            .collect();

        // Each addition rounds its partial sum, and every q * k has the roundings of the scaled q in it.
        let mut score_error = 0.0f64;
        let mut scores: Vec<f32> = Vec::new();
        for &j in &visible {
            let (mut score, mut roundings) = (0.0f32, 0.0f64);
            for (q, k) in q.iter().zip(k(j)) {
                score += q * k;
                roundings += f64::from(score.abs()) + 2.0 * f64::from((q * k).abs());
            }
            scores.push(score * scale);
            let error = roundings * f64::from(scale.abs()) * f64::from(f32::EPSILON) / 2.0;
            if error.is_finite() {
                score_error = score_error.max(error); // an infinite score has no error
            }
        }
        let max_score = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exps: Vec<f32> = scores.iter().map(|score| (score - max_score).exp()).collect();
        let (sum, sum_error) = rounded_sum(exps.iter().copied());
        let values = visible.iter().flat_map(|&j| v(j)).map(|x| x.abs());
        let max_v = f64::from(values.filter(|x| x.is_finite()).fold(0.0f32, f32::max));
        // An error e of all scores changes a weight by a factor of up to exp(2 e).
        let tolerance = 8.0 * f64::from(f32::EPSILON) + 2.0 * (2.0 * score_error).exp_m1();
        let (unfused, roundings) = (0..value_dim)
            .map(|d| {
                let (acc, error) = rounded_sum(visible.iter().zip(&exps).map(|(&j, exp)| exp * v(j)[d]));
                let out = if visible.is_empty() { 0.0 } else { acc / sum };
                (out, tolerance * max_v + (error + f64::from(out.abs()) * sum_error) / f64::from(sum.max(1.0)))
            })
            .unzip();
        Self { unfused, roundings, logsumexp_roundings: tolerance + sum_error }
    }
}

/// The sum, one after the other, and the most by which its roundings can be off.
fn rounded_sum(terms: impl Iterator<Item = f32>) -> (f32, f64) {
    let (mut sum, mut error) = (0.0f32, 0.0f64);
    for term in terms {
        sum += term;
        error += f64::from(sum.abs()) * f64::from(f32::EPSILON) / 2.0;
    }
    (sum, error)
}
