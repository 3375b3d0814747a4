//! Prefill across sequence lengths, by instruction set, the unfused baseline beside it: `prefill/h8_kv8_d64/q512_kv512/avx2`.
//! Causal, f32, one thread. Elements are floating-point operations of visible scores, so that Gelem/s means GFLOP/s.
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
use common::inputs::view_mut;
// The sweep's modules find one another at the root.
use common::{Case, Result, args, bench_checked, inputs, self_attention};
use criterion::{Criterion, Throughput};
use fused_attention::{
    AttentionConfig, AttentionOutputs, AttentionPlan, AttentionShape, InstructionSet, Parallelism, Workspace,
};
use threads::Threads;
use unfused::Unfused;

/// `[num_heads, num_kv_heads, head_dim]`, and sequence lengths.
const SHAPES: [([usize; 3], &[usize]); 3] =
    [([8, 8, 64], &[128, 512, 2048, 4096]), ([8, 8, 128], &[128, 512, 2048, 4096]), ([8, 2, 128], &[2048])];

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
    criterion.final_summary();
}

fn bench_shape(criterion: &mut Criterion, shape: &AttentionShape) {
    let AttentionShape { num_heads, num_kv_heads, q_len, kv_len, head_dim, .. } = *shape;
    let mut group = criterion.benchmark_group(format!("prefill/h{num_heads}_kv{num_kv_heads}_d{head_dim}"));
    group.throughput(Throughput::Elements(MaskKind::Causal.visible_flops(shape)));
    let id = |contender: &str| format!("q{q_len}_kv{kv_len}/{contender}");
    let case = LazyCell::new(|| Case::new(shape));

    for set in InstructionSet::available() {
        if set.name() == "portable" && q_len > LONGEST_PORTABLE {
            continue;
        }
        bench_checked(&mut group, &id(set.name()), &case, |case| {
            let config = AttentionConfig::causal().with_parallelism(Parallelism::Serial).with_instruction_set(set);
            let plan = AttentionPlan::new(shape, &config).expect("a valid shape");
            let mut workspace = Workspace::for_plan(&plan).unwrap();
            let inputs = case.tensors.inputs().expect("tensors of one shape");
            move |out| {
                let out = view_mut(Layout::Bhsd, out, case.tensors.output_shape()).expect("made for this output");
                plan.run(&inputs, &mut AttentionOutputs::new(out), &mut workspace).expect("planned for these tensors");
            }
        });
    }
    bench_checked(&mut group, &id("unfused"), &case, |case| {
        let mut unfused = Unfused::new(shape, MaskKind::Causal, InstructionSet::detect(), &SERIAL)
            .expect("scores small enough for memory");
        let inputs = case.tensors.inputs().expect("tensors of one shape");
        move |out| unfused.run(&inputs, out, Layout::Bhsd).expect("made for this output")
    });
}
