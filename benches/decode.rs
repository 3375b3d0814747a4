//! One query against a cache, by element type: `decode/h32_kv8_d128/q1_kv16384/avx2/f16`. Causal, one thread, the set that the
//! library chooses (or FUSED_ATTENTION_INSTRUCTION_SET). Bytes are those of K and V, each counted once; `read` reads the same
//! memory and does nothing else. K and V lie on huge pages where the system offers them.
//!
//! `cargo bench --bench decode -- kv16384`. The sweep example (`--mode decode`) is the finer instrument: it interleaves
//! attention and read.

#[path = "../examples/sweep/bandwidth.rs"]
mod bandwidth;
mod common;
#[path = "../examples/sweep/rate.rs"]
mod rate;
#[path = "../examples/sweep/threads.rs"]
#[allow(dead_code)]
mod threads;
#[path = "../examples/sweep/vectors.rs"]
#[allow(dead_code)]
mod vectors;

use std::cell::LazyCell;

use bandwidth::Bandwidth;
use common::memory::Pages;
use common::number::Number;
// The sweep's modules find one another at the root.
use common::{Case, Result, args, bench_checked, dtypes, inputs, memory, number, runner};
use criterion::{Criterion, Throughput};
use fused_attention::{AttentionConfig, AttentionPlan, AttentionShape, Element, bf16, f16};
use threads::Threads;

static SERIAL: Threads = Threads::Serial;

fn main() {
    let mut criterion = common::criterion();
    for kv_len in [1024, 16384] {
        bench_cache::<f32, f32>(&mut criterion, kv_len);
        bench_cache::<f16, f16>(&mut criterion, kv_len);
        bench_cache::<bf16, bf16>(&mut criterion, kv_len);
    }
    criterion.final_summary();
}

fn bench_cache<T, K>(criterion: &mut Criterion, kv_len: usize)
where
    T: Element<Acc = f32> + Number,
    K: Element<Acc = f32> + Number,
{
    let (num_heads, num_kv_heads, head_dim) = (32, 8, 128);
    let value_dim = head_dim;
    let shape = AttentionShape { batch: 1, num_heads, num_kv_heads, q_len: 1, kv_len, head_dim, value_dim };
    let config = AttentionConfig::causal();
    let set = AttentionPlan::new(&shape, &config).expect("a valid shape").instruction_set().name();
    let case = LazyCell::new(|| Case::<T, K>::new(&shape, Pages::Huge));
    let mut group = criterion.benchmark_group(format!("decode/h{num_heads}_kv{num_kv_heads}_d{head_dim}"));
    let kv_bytes = num_kv_heads * kv_len * (head_dim + value_dim) * size_of::<K>();
    group.throughput(Throughput::Bytes(kv_bytes as u64));
    let id = |contender: &str| format!("q1_kv{kv_len}/{contender}/{}", dtypes::<T, K>());

    bench_checked(&mut group, &id(set), &case, |case| runner(case, &shape, &config));
    let mut bandwidth = None;
    group.bench_function(id("read"), |bencher| {
        let bandwidth = bandwidth.get_or_insert_with(|| Bandwidth::new(case.tensors.keys_and_values(), &SERIAL));
        bencher.iter(|| bandwidth.sample());
    });
}
