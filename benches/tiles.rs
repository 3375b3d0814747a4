//! The kernels alone, on one panel whose operands lie in L1: `tiles/score/d64_k24/avx2` is Q K^T, `value` is P V, `softmax` the step between.
//! Elements are floating-point operations of the products, and scores of the softmax step.
//!
//! `cargo bench --bench tiles --features __panel`

use std::time::Duration;

use aligned_vec::{AVec, ConstAlign, avec};
use criterion::{Criterion, Throughput};
use fused_attention::{InstructionSet, panel};

/// K and V 6 or 12 KiB, Q and the accumulators 2 to 16 KiB, scores 1 to 3 KiB.
const KEYS: usize = 24;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    for head_dim in [64, 128] {
        for set in InstructionSet::available() {
            bench_panel(&mut criterion, set, head_dim);
        }
    }
    criterion.final_summary();
}

fn bench_panel(criterion: &mut Criterion, set: InstructionSet, head_dim: usize) {
    let rows = panel::rows(set);
    let (k, q_panel) = (pattern(KEYS * head_dim), pattern(head_dim * rows));
    let mut scores = pattern(KEYS * rows);
    let mut state: [_; 3] = std::array::from_fn(|_| pattern(rows));
    let mut out_acc = pattern(head_dim * rows);
    let id = |kernel: &str| format!("{kernel}/d{head_dim}_k{KEYS}/{set}");
    let mut group = criterion.benchmark_group("tiles");

    let product = Throughput::Elements((2 * KEYS * head_dim * rows) as u64);
    panel::score_tiles(set, KEYS, &k, &q_panel, &mut scores);
    for (i, score) in scores.iter().enumerate() {
        let (key, row) = (i / rows, i % rows);
        assert_near(*score, (0..head_dim).map(|p| (k[key * head_dim + p], q_panel[p * rows + row])));
    }
    group.throughput(product.clone());
    group.bench_function(id("score"), |bencher| {
        bencher.iter(|| panel::score_tiles(set, KEYS, &k, &q_panel, &mut scores))
    });

    let scaled = pattern(KEYS * rows);
    let mut probs = scaled.clone();
    let [running_max, running_sum, rescale] = &mut state;
    running_max.fill(f32::NEG_INFINITY);
    panel::softmax(set, &mut probs, [running_max, running_sum, rescale]);
    for (i, prob) in probs.iter().enumerate() {
        let max = (0..KEYS).map(|key| scaled[key * rows + i % rows]).fold(f32::NEG_INFINITY, f32::max);
        assert_near(*prob, [(1.0, (scaled[i] - max).exp())]);
    }
    group.throughput(Throughput::Elements((KEYS * rows) as u64));
    group.bench_function(id("softmax"), |bencher| {
        bencher.iter(|| panel::softmax(set, &mut probs, [running_max, running_sum, rescale]))
    });

    let before = out_acc.clone();
    rescale.fill(0.5);
    panel::value_tiles(set, &k, &scaled, rescale, &mut out_acc);
    for (i, acc) in out_acc.iter().enumerate() {
        let (dim, row) = (i / rows, i % rows);
        let terms = (0..KEYS).map(|key| (k[key * head_dim + dim], scaled[key * rows + row]));
        assert_near(*acc, terms.chain([(0.5, before[i])]));
    }
    group.throughput(product);
    group.bench_function(id("value"), |bencher| {
        bencher.iter(|| panel::value_tiles(set, &k, &scaled, rescale, &mut out_acc))
    });
}

/// Numbers in [-1, 1) with a period that is prime, so that no two rows are alike.
fn pattern(len: usize) -> AVec<f32, ConstAlign<64>> {
    let mut values = avec![[64]| 0.0; len];
    for (i, value) in values.iter_mut().enumerate() {
        *value = (i * 37 % 251) as f32 / 125.5 - 1.0;
    }
    values
}

/// Against the sum of products in f64.
fn assert_near(found: f32, terms: impl IntoIterator<Item = (f32, f32)>) {
    let (mut sum, mut size) = (0.0f64, 0.0f64);
    for (a, b) in terms {
        sum += f64::from(a) * f64::from(b);
        size += (f64::from(a) * f64::from(b)).abs();
    }
    assert!((f64::from(found) - sum).abs() <= 1e-5 * size, "{found} instead of {sum}");
}
