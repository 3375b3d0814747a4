//! What a small call takes, overhead included: `small_calls/h8_kv8_d64/q8_kv8/avx2/plan_run`. Causal, f32, head_dim 64, on the
//! instruction set that the library chooses (or FUSED_ATTENTION_INSTRUCTION_SET).
//!
//! - `plan_run`: planned before, with a workspace of its own, serial;
//! - `attention_into`: plans in every call and keeps its workspace per thread, serial;
//! - `attention_into_rayon`: the same with the default parallelism, from outside the pool. Below `SERIAL_BELOW_FLOPS` it
//!   should take as long as the serial one, above it should win.

mod common;

use std::cell::LazyCell;

use common::args::Layout;
use common::inputs::view_mut;
use common::memory::Pages;
// The sweep's modules find one another at the root.
use common::{Case, Result, args, bench_checked, inputs, memory, number, self_attention};
use criterion::Criterion;
use fused_attention::{
    AttentionConfig, AttentionOutputs, AttentionPlan, AttentionShape, Parallelism, Workspace, attention_into,
};

fn main() {
    let mut criterion = common::criterion();
    for heads in [1, 8] {
        for len in [1, 2, 4, 8, 16, 32, 64, 128] {
            bench_shape(&mut criterion, &self_attention([heads, heads, 64], len));
        }
    }
    criterion.final_summary();
}

fn bench_shape(criterion: &mut Criterion, shape: &AttentionShape) {
    let AttentionShape { num_heads, num_kv_heads, q_len, kv_len, head_dim, .. } = *shape;
    let serial = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
    let plan = AttentionPlan::new(shape, &serial).expect("a valid shape");
    let set = plan.instruction_set().name();
    let mut group = criterion.benchmark_group(format!("small_calls/h{num_heads}_kv{num_kv_heads}_d{head_dim}"));
    let id = |way: &str| format!("q{q_len}_kv{kv_len}/{set}/{way}");
    let case = LazyCell::new(|| Case::<f32>::new(shape, Pages::Plain));

    bench_checked(&mut group, &id("plan_run"), &case, |case| {
        let inputs = case.tensors.inputs().expect("tensors of one shape");
        let mut workspace = Workspace::for_plan(&plan).unwrap();
        let plan = &plan;
        move |out| {
            let out = view_mut(Layout::Bhsd, out, case.tensors.output_shape()).expect("made for this output");
            plan.run(&inputs, &mut AttentionOutputs::new(out), &mut workspace).expect("planned for these tensors");
        }
    });
    let ways = [
        ("attention_into", serial),
        #[cfg(feature = "rayon")]
        ("attention_into_rayon", serial.with_parallelism(Parallelism::Rayon)),
    ];
    for (way, config) in ways {
        bench_checked(&mut group, &id(way), &case, |case| {
            let inputs = case.tensors.inputs().expect("tensors of one shape");
            move |out| {
                let out = view_mut(Layout::Bhsd, out, case.tensors.output_shape()).expect("made for this output");
                attention_into(&inputs, &mut AttentionOutputs::new(out), &config).expect("a valid call");
            }
        });
    }
}
