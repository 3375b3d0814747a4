//! Small calls on every instruction set against the reference in f64. One in 16 is large enough to be shared among threads, and its bits in a
//! pool are those on one thread.
//!
//! The bound is that of the test suite, `2 * err(unfused) + 8 * eps * max|V|` in the accumulator's type, plus the roundings that each
//! sum may make (half an ulp of every partial sum): a fuzzer finds the inputs on which the unfused version happens to make no error at
//! all, and those where all errors point the same way. An output of 16 bits is rounded once more. In f64 the reference makes the same
//! errors again.

#![no_main]

use arbitrary::Arbitrary;
use fused_attention::reference;
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionPlan, AttentionShape, CausalAlignment, Element, KvPadding, Mask,
    Parallelism, SERIAL_BELOW_FLOPS, attention_into,
};
use fused_attention_fuzz::answer::{POOL, POOL_THREADS, assert_right, outputs};
use fused_attention_fuzz::{
    Masked, Memory, Number, Real, Special, Tensor, for_types, instruction_sets, normal, offsets, put_specials,
};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Case {
    /// Of Q and the output, and of K and V.
    types: u8,
    /// Few rows against so many keys that they are cut into chunks.
    is_long: bool,
    /// One input in 16 is large.
    is_large: u8,
    left_padding: bool,
    kv_lens: Option<[u16; 2]>,
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

/// Multiply-adds of a large input: twice as many operations, which several threads share.
const MOST_LARGE_WORK: usize = 1 << 19;
const _: () = assert!(2 * MOST_LARGE_WORK as u64 >= 2 * SERIAL_BELOW_FLOPS, "no input is shared among threads");

const SCALES: [f64; 8] = [0.0, 0.125, 0.5, 1.0, 2.5, -0.125, -1.0, 1e-3];

/// Contiguous, in logical order.
fn values<T: Number>(tensor: &Tensor<T>) -> Vec<T::Acc> {
    offsets(tensor.shape, tensor.strides).map(|offset| tensor.data[offset].to_acc()).collect()
}

fuzz_target!(|case: Case| {
    for_types!(case.types, run, &case);
});

fn run<T: Number, K: Number + Element<Acc = T::Acc>>(case: &Case) -> Option<()> {
    let batch = usize::from(case.batch % 3);
    let num_kv_heads = usize::from(case.num_kv_heads % 3);
    let num_heads = num_kv_heads * usize::from(1 + case.group_size % 5);
    // Mostly small dims, so that long sequences stay cheap; every tile height and tail occurs.
    let dim = |dim: u8| usize::from(dim % if dim & 0x80 == 0 { 20 } else { 100 });
    let [mut head_dim, mut value_dim] = [1 + dim(case.head_dim), dim(case.value_dim)];
    let mut q_len = usize::from(case.q_len % 80);
    let mut kv_len = usize::from(case.kv_len % 500);
    let mut most_work = 1 << 16;
    if case.is_long {
        (head_dim, value_dim) = (1 + head_dim % 9, value_dim % 9);
        (q_len, kv_len) = (q_len % 33, usize::from(case.kv_len % 2500));
        most_work = 1 << 17;
    }
    let is_large = case.is_large % 16 == 15;
    if is_large {
        most_work = MOST_LARGE_WORK;
    }
    while batch * num_heads * q_len * kv_len * (head_dim + value_dim) > most_work {
        if q_len > if case.is_long { 1 } else { 4 } { q_len /= 2 } else { kv_len /= 2 }
    }
    let kv_lens = case.kv_lens.map(|lens| lens.map(|len| usize::from(len) % (kv_len + 1)));

    let mut config = case.masked.config();
    if let Some(choice) = case.scale {
        config = config.with_softmax_scale(SCALES[usize::from(choice) % SCALES.len()]);
    }
    if case.left_padding {
        config = config.with_kv_padding(KvPadding::Left);
    }
    let mut state = case.seed | 1;
    let q = tensor::<T>(case, &mut state, 0, [batch, num_heads, q_len, head_dim])?;
    let k = tensor::<K>(case, &mut state, 1, [batch, num_kv_heads, kv_len, head_dim])?;
    let v = tensor::<K>(case, &mut state, 2, [batch, num_kv_heads, kv_len, value_dim])?;
    let mut inputs = AttentionInputs::new(q.view(), k.view(), v.view());
    if let Some(kv_lens) = &kv_lens {
        inputs = inputs.with_kv_lens(&kv_lens[..batch]);
    }
    let shape = AttentionShape::of(&inputs).expect("the sizes agree");

    let reference = reference::attention(&inputs, &config).expect("a valid call");
    let contiguous = [values(&q), values(&k), values(&v)];
    let rows: Vec<Row<T::Acc>> =
        (0..batch * num_heads * q_len).map(|row| Row::new(&contiguous, &config, &shape, inputs.kv_lens, row)).collect();

    let plan = POOL.install(|| AttentionPlan::<T::Acc>::with_accumulator(&shape, &config)).expect("a valid call");
    let most_flops = (2 * batch * num_heads * q_len * kv_len * (head_dim + value_dim)) as u64;
    if most_flops < SERIAL_BELOW_FLOPS {
        assert_eq!(plan.threads(), 1, "{plan}");
    } else if config.mask == Mask::Full {
        // Each KV head is a task at least.
        assert!(plan.threads() >= POOL_THREADS.min(batch * num_kv_heads), "{plan}");
    }

    let out_shape = [batch, num_heads, q_len, value_dim];
    let strides = case.memory[3].strides(out_shape);
    for set in instruction_sets() {
        let call = |parallelism| {
            let config = config.with_instruction_set(set).with_parallelism(parallelism);
            let mut out = Tensor::new(out_shape, strides, T::CANARY, |_| T::CANARY)?;
            let mut logsumexp = vec![T::Acc::NAN; batch * num_heads * q_len];
            attention_into(&inputs, &mut outputs(&mut out, &mut logsumexp), &config).expect("a valid call");
            Some((out, logsumexp))
        };
        let (out, logsumexp) = call(Parallelism::Serial)?;
        if is_large {
            // Gaps hold canaries in both.
            let (pooled_out, pooled_logsumexp) = POOL.install(|| call(Parallelism::Rayon))?;
            let bits = |data: &[T]| -> Vec<u64> { data.iter().map(|x| x.bits()).collect() };
            assert!(bits(&out.data) == bits(&pooled_out.data), "{set}: bits change with threads");
            let bits = |data: &[T::Acc]| -> Vec<u64> { data.iter().map(|x| x.to_f64().to_bits()).collect() };
            assert!(bits(&logsumexp) == bits(&pooled_logsumexp), "{set}: bits change with threads");
        }

        let out_bound = |i: usize| {
            let row = &rows[i / value_dim];
            let unfused_error = (row.unfused[i % value_dim].to_f64() - reference.out[i]).abs();
            2.0 * unfused_error + row.roundings[i % value_dim]
        };
        let logsumexp_bound = |i: usize| rows[i].logsumexp_roundings * reference.logsumexp[i].abs().max(1.0);
        assert_right(set, &out, &logsumexp, &reference, out_bound, logsumexp_bound);
    }
    Some(())
}

fn tensor<T: Number>(case: &Case, state: &mut u64, which: usize, shape: [usize; 4]) -> Option<Tensor<T>> {
    let strides = case.memory[which].input_strides(shape);
    let mut tensor = Tensor::new(shape, strides, T::CANARY, |[_, _, position, dim]| {
        T::rounded(match (case.ascending, which, dim) {
            (true, 0, 0) => 1.0,
            (true, 1, 0) => position as f64 / 4.0,
            _ => normal(state),
        })
    })?;
    put_specials(&case.specials, which, &mut tensor.data);
    Some(tensor)
}

/// What the bounds of a row are made of.
struct Row<R> {
    /// The row by textbook attention in the accumulator's type, with libm's exp.
    unfused: Vec<R>,
    /// What roundings may do to each value of the row.
    roundings: Vec<f64>,
    /// The same for the logsumexp, relative to it where it exceeds 1.
    logsumexp_roundings: f64,
}

impl<R: Real> Row<R> {
    fn new(
        [q, k, v]: &[Vec<R>; 3],
        config: &AttentionConfig,
        shape: &AttentionShape,
        kv_lens: Option<&[usize]>,
        row: usize,
    ) -> Self {
        let AttentionShape { num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *shape;
        let (batch, head, query) = (row / q_len / num_heads, row / q_len % num_heads, row % q_len);
        let first_key = (batch * num_kv_heads + head / shape.group_size()) * kv_len;
        let q = &q[row * head_dim..][..head_dim];
        let k = |j: usize| &k[(first_key + j) * head_dim..][..head_dim];
        let v = |j: usize| &v[(first_key + j) * value_dim..][..value_dim];
        let scale = R::real(config.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt()));
        let own_len = kv_lens.map_or(kv_len, |kv_lens| kv_lens[batch]);
        let padding = if config.kv_padding == KvPadding::Left { kv_len - own_len } else { 0 };
        let visible: Vec<usize> = (0..own_len)
            .filter(|&j| match config.mask {
                Mask::Causal(CausalAlignment::TopLeft) => j <= query,
                Mask::Causal(_) => j + q_len <= query + own_len,
                _ => true,
            })
            .map(|j| padding + j)
            .collect();

        // Each addition rounds its partial sum, and every q * k has the roundings of the scaled q in it.
        let zero = R::real(0.0);
        let mut score_error = 0.0f64;
        let mut scores: Vec<R> = Vec::new();
        for &j in &visible {
            let (mut score, mut roundings) = (zero, 0.0f64);
            for (&q, &k) in q.iter().zip(k(j)) {
                score += q * k;
                roundings += score.to_f64().abs() + 2.0 * (q * k).to_f64().abs();
            }
            scores.push(score * scale);
            let error = roundings * scale.to_f64().abs() * R::EPSILON / 2.0;
            if error.is_finite() {
                score_error = score_error.max(error); // an infinite score has no error
            }
        }
        let max_score = scores.iter().copied().fold(R::NEG_INFINITY, |max, x| if x > max { x } else { max });
        let exps: Vec<R> = scores.iter().map(|&score| (score - max_score).exp()).collect();
        let (sum, sum_error) = rounded_sum(exps.iter().copied());
        let values = visible.iter().flat_map(|&j| v(j)).map(|x| x.to_f64().abs());
        let max_v = values.filter(|x| x.is_finite()).fold(0.0f64, f64::max);
        // An error e of all scores changes a weight by a factor of up to exp(2 e).
        let tolerance = 8.0 * R::EPSILON + 2.0 * (2.0 * score_error).exp_m1();
        // The reference makes the errors of f64 as well.
        let both = if R::EPSILON == f64::EPSILON { 2.0 } else { 1.0 };
        let (unfused, roundings) = (0..value_dim)
            .map(|d| {
                let (acc, error) = rounded_sum(visible.iter().zip(&exps).map(|(&j, &exp)| exp * v(j)[d]));
                let out = if visible.is_empty() { zero } else { acc / sum };
                let sums = (error + out.to_f64().abs() * sum_error) / sum.to_f64().max(1.0);
                (out, both * (tolerance * max_v + sums))
            })
            .unzip();
        Self { unfused, roundings, logsumexp_roundings: both * (tolerance + sum_error) }
    }
}

/// The sum, one after the other, and the most by which its roundings can be off.
fn rounded_sum<R: Real>(terms: impl Iterator<Item = R>) -> (R, f64) {
    let (mut sum, mut error) = (R::real(0.0), 0.0f64);
    for term in terms {
        sum += term;
        error += sum.to_f64().abs() * R::EPSILON / 2.0;
    }
    (sum, error)
}
