//! Packed sequences of random lengths beside as many of equal length: `varlen/h8_kv2_d128/64_random_of_256/avx2`. Causal, f32, on the
//! current rayon pool, `[tokens, heads, head_dim]`. Elements are floating-point operations of visible scores, so that Gelem/s means
//! GFLOP/s; random lengths should reach 0.9 of the rate of equal ones.
//!
//! `separate_calls` computes the random ones one call after the other, to the same bits (asserted).

use std::time::Duration;

use criterion::{Criterion, Throughput};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, CuSeqlens, TensorView, TensorViewMut,
    VarlenPlan, Workspace, attention_into, attention_varlen_into,
};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 128;
const SEQUENCES: usize = 64;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    for mean in [64, 256, 512] {
        bench_lengths(&mut criterion, &format!("{SEQUENCES}_equal_of_{mean}"), &[mean; SEQUENCES], mean);
        bench_lengths(&mut criterion, &format!("{SEQUENCES}_random_of_{mean}"), &random_lens(mean), mean);
    }
    criterion.final_summary();
}

/// Uniform from 1 to twice the mean, so that they have this mean; always the same.
fn random_lens(mean: usize) -> Vec<usize> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        1 + (state >> 33) as usize % (2 * mean)
    };
    (0..SEQUENCES).map(|_| next()).collect()
}

/// Any numbers of about N(0, 1) / 2.
fn values(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 % 1_000_003) as f32 * 0.7).sin()).collect()
}

fn bench_lengths(criterion: &mut Criterion, name: &str, lens: &[usize], mean: usize) {
    let mut offsets = vec![0];
    lens.iter().for_each(|len| offsets.push(offsets.last().unwrap() + len));
    let tokens = offsets[lens.len()];
    let visible: usize = lens.iter().map(|len| len * (len + 1) / 2).sum();
    let (q, k, v) = (values(tokens * HEADS * DIM), values(tokens * KV_HEADS * DIM), values(tokens * KV_HEADS * DIM));
    let q = TensorView::from_bshd(&q, [1, tokens, HEADS, DIM]).unwrap();
    let [k, v] = [&k, &v].map(|kv| TensorView::from_bshd(kv, [1, tokens, KV_HEADS, DIM]).unwrap());
    let inputs = AttentionInputs::new(q, k, v);
    let config = AttentionConfig::causal();
    let mut out = vec![0.0f32; tokens * HEADS * DIM];

    let plan = VarlenPlan::new(&AttentionShape::of(&inputs).unwrap(), CuSeqlens::same(&offsets), &config).unwrap();
    let set = plan.instruction_set().name();
    let mut group = criterion.benchmark_group(format!("varlen/h{HEADS}_kv{KV_HEADS}_d{DIM}"));
    group.throughput(Throughput::Elements((visible * 4 * DIM * HEADS) as u64));

    let separate = |out: &mut [f32]| {
        for ends in offsets.windows(2) {
            let (range, len) = (ends[0]..ends[1], ends[1] - ends[0]);
            let [q, k, v] = [q, k, v].map(|tensor| tensor.seq_range(range.clone()).unwrap());
            let out = &mut out[ends[0] * HEADS * DIM..ends[1] * HEADS * DIM];
            let out = TensorViewMut::from_bshd(out, [1, len, HEADS, DIM]).unwrap();
            attention_into(&AttentionInputs::new(q, k, v), &mut AttentionOutputs::new(out), &config).unwrap();
        }
    };
    let packed = |out: &mut [f32]| {
        let out = TensorViewMut::from_bshd(out, [1, tokens, HEADS, DIM]).unwrap();
        attention_varlen_into(&inputs, &mut AttentionOutputs::new(out), CuSeqlens::same(&offsets), &config).unwrap();
    };
    let mut expected = out.clone();
    separate(&mut expected);
    packed(&mut out);
    assert!(expected.iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits()), "{mean}: packed differs from separate");

    group.bench_function(format!("{name}/{set}"), |bencher| bencher.iter(|| packed(&mut out)));
    group.bench_function(format!("{name}/{set}/separate_calls"), |bencher| bencher.iter(|| separate(&mut out)));
    let mut workspace = Workspace::new();
    workspace.reserve_len(plan.workspace_len()).unwrap();
    group.bench_function(format!("{name}/{set}/plan_run"), |bencher| {
        bencher.iter(|| {
            let out = TensorViewMut::from_bshd(&mut out, [1, tokens, HEADS, DIM]).unwrap();
            plan.run(&inputs, &mut AttentionOutputs::new(out), &mut workspace).unwrap();
        });
    });
}
