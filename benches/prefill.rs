//! Prefill across sequence lengths, by instruction set, the unfused baseline beside it: `prefill/h8_kv8_d64/q512_kv512/avx2`.
//! Causal, f32, one thread; at some lengths other element types on the set that the library chooses (or
//! FUSED_ATTENTION_INSTRUCTION_SET): `q2048_kv2048/avx2/f16`, and `f32_f16` for f16 in K and V alone. Elements are floating-point operations of visible scores, so that Gelem/s means GFLOP/s.
//!
//! `cargo bench --bench prefill -- 'd128/.*/(avx2|unfused)'`. The sweep example is the finer instrument: it interleaves what
//! it compares and measures the machine's peak.

mod common;
#[path = "../examples/sweep/threads.rs"]
#[allow(dead_code)]
mod threads;
#[path = "../examples/sweep/unfused.rs"]
mod unfused;
#[path = "../examples/sweep/vectors.rs"]
#[allow(dead_code)]
mod vectors;

use std::cell::LazyCell;

use common::args::{Layout, MaskKind};
use common::memory::Pages;
use common::number::Number;
// The sweep's modules find one another at the root.
use common::{Case, Result, args, bench_checked, dtypes, inputs, memory, number, runner, self_attention};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use fused_attention::{AttentionConfig, AttentionPlan, AttentionShape, Element, InstructionSet, bf16, f16};
use threads::Threads;
use unfused::Unfused;

/// `[num_heads, num_kv_heads, head_dim]`, and sequence lengths.
const SHAPES: [([usize; 3], &[usize]); 3] =
    [([8, 8, 64], &[128, 512, 2048, 4096]), ([8, 8, 128], &[128, 512, 2048, 4096]), ([8, 2, 128], &[2048])];

/// Where the other element types are measured: the sizes of `SHAPES[1]` and, of its lengths, these.
const TYPED_LENS: [usize; 2] = [128, 2048];

/// The slow set would take most of the time to say the same at every length.
const LONGEST_PORTABLE: usize = 512;

static SERIAL: Threads = Threads::Serial;

fn main() {
    let mut criterion = common::criterion();
    for (sizes, lens) in SHAPES {
        for &len in lens {
            bench_shape(&mut criterion, &self_attention(sizes, len));
        }
    }
    for len in TYPED_LENS {
        let shape = self_attention(SHAPES[1].0, len);
        bench_types::<f16, f16>(&mut criterion, &shape);
        bench_types::<bf16, bf16>(&mut criterion, &shape);
        bench_types::<f32, f16>(&mut criterion, &shape);
        bench_types::<f32, bf16>(&mut criterion, &shape);
    }
    criterion.final_summary();
}

fn bench_shape(criterion: &mut Criterion, shape: &AttentionShape) {
    let mut group = group(criterion, shape);
    let case = LazyCell::new(|| Case::<f32>::new(shape, Pages::Plain));
    for set in InstructionSet::available() {
        if set.name() == "portable" && shape.q_len > LONGEST_PORTABLE {
            continue;
        }
        let config = AttentionConfig::causal().with_instruction_set(set);
        bench_checked(&mut group, &id(shape, set.name()), &case, |case| runner(case, shape, &config));
    }
    bench_checked(&mut group, &id(shape, "unfused"), &case, |case| {
        let mut unfused = Unfused::new(shape, MaskKind::Causal, InstructionSet::detect(), &SERIAL)
            .expect("scores small enough for memory");
        let inputs = case.tensors.inputs().expect("tensors of one shape");
        move |out| unfused.run(&inputs, out, Layout::Bhsd).expect("made for this output")
    });
}

fn bench_types<T, K>(criterion: &mut Criterion, shape: &AttentionShape)
where
    T: Element<Acc = f32> + Number,
    K: Element<Acc = f32> + Number,
{
    let mut group = group(criterion, shape);
    let config = AttentionConfig::causal();
    let set = AttentionPlan::new(shape, &config).expect("a valid shape").instruction_set().name();
    let case = LazyCell::new(|| Case::<T, K>::new(shape, Pages::Plain));
    let id = id(shape, &format!("{set}/{}", dtypes::<T, K>()));
    bench_checked(&mut group, &id, &case, |case| runner(case, shape, &config));
}

fn group<'a>(criterion: &'a mut Criterion, shape: &AttentionShape) -> BenchmarkGroup<'a, WallTime> {
    let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = *shape;
    let mut group = criterion.benchmark_group(format!("prefill/h{num_heads}_kv{num_kv_heads}_d{head_dim}"));
    group.throughput(Throughput::Elements(MaskKind::Causal.visible_flops(shape)));
    group
}

fn id(shape: &AttentionShape, contender: &str) -> String {
    format!("q{}_kv{}/{contender}", shape.q_len, shape.kv_len)
}
