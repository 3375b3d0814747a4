//! Runs one call of the library a few times, for instructions to be counted: `.ci/instructions` does.
//!
//! `instructions causal/bshd/h8_kv2_d128/q256_kv256/avx2 [CALLS]` runs this shape serially on this instruction set. The
//! calls happen inside `counted` and nothing else does.

use std::error::Error;
use std::hint::black_box;

use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, InstructionSet, Parallelism,
    TensorView, TensorViewMut, Workspace,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let id = arguments.next().ok_or("which call? causal/bshd/h8_kv2_d128/q256_kv256/avx2 [CALLS]")?;
    let calls = arguments.next().map_or(Ok(1), |calls| calls.parse())?;
    let (shape, is_bshd, config) = parse(&id).ok_or(format!("cannot read {id:?}"))?;
    let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim } = shape;

    let q = values(1, batch * num_heads * q_len * head_dim);
    let k = values(2, batch * num_kv_heads * kv_len * head_dim);
    let v = values(3, batch * num_kv_heads * kv_len * value_dim);
    let mut out = vec![f32::NAN; batch * num_heads * q_len * value_dim];
    let inputs = if is_bshd {
        AttentionInputs::new(
            TensorView::from_bshd(&q, [batch, q_len, num_heads, head_dim])?,
            TensorView::from_bshd(&k, [batch, kv_len, num_kv_heads, head_dim])?,
            TensorView::from_bshd(&v, [batch, kv_len, num_kv_heads, value_dim])?,
        )
    } else {
        AttentionInputs::new(
            TensorView::from_bhsd(&q, [batch, num_heads, q_len, head_dim])?,
            TensorView::from_bhsd(&k, [batch, num_kv_heads, kv_len, head_dim])?,
            TensorView::from_bhsd(&v, [batch, num_kv_heads, kv_len, value_dim])?,
        )
    };
    let mut outputs = AttentionOutputs::new(if is_bshd {
        TensorViewMut::from_bshd(&mut out, [batch, q_len, num_heads, value_dim])?
    } else {
        TensorViewMut::from_bhsd(&mut out, [batch, num_heads, q_len, value_dim])?
    });

    let plan = AttentionPlan::new(&shape, &config)?;
    let mut workspace = Workspace::for_plan(&plan)?;
    for _ in 0..calls {
        counted(&plan, &inputs, &mut outputs, &mut workspace);
    }
    println!("{plan}");
    let sum: f64 = out.iter().map(|&x| f64::from(x)).sum();
    if sum.is_nan() { Err("the output has elements that were not written, or NaN".into()) } else { Ok(()) }
}

/// What is counted. Not inlined, so that its name survives.
#[inline(never)]
fn counted(
    plan: &AttentionPlan,
    inputs: &AttentionInputs<'_, f32>,
    outputs: &mut AttentionOutputs<'_, f32>,
    workspace: &mut Workspace,
) {
    black_box(plan.run(black_box(inputs), outputs, workspace)).expect("planned for these tensors");
}

/// Shape, whether the layout is bshd, and configuration.
fn parse(id: &str) -> Option<(AttentionShape, bool, AttentionConfig)> {
    let [mask, layout, heads, lens, set] = id.split('/').collect::<Vec<_>>().try_into().ok()?;
    let config = match mask {
        "causal" => AttentionConfig::causal(),
        "full" => AttentionConfig::full(),
        window => AttentionConfig::sliding_window(window.strip_prefix("window")?.parse().ok()?),
    };
    let is_bshd = match layout {
        "bhsd" => false,
        "bshd" => true,
        _ => return None,
    };
    let [num_heads, num_kv_heads, head_dim] = numbers(heads, ["h", "kv", "d"])?;
    let [q_len, kv_len] = numbers(lens, ["q", "kv"])?;
    let shape = AttentionShape { batch: 1, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim: head_dim };
    let config = config
        .with_parallelism(Parallelism::Serial)
        .with_instruction_set(InstructionSet::from_name(set).map_err(|error| eprintln!("{error}")).ok()?);
    Some((shape, is_bshd, config))
}

/// The numbers behind these names: `h8_kv2` has 8 behind `h` and 2 behind `kv`.
fn numbers<const N: usize>(text: &str, names: [&str; N]) -> Option<[usize; N]> {
    let parts: [&str; N] = text.split('_').collect::<Vec<_>>().try_into().ok()?;
    let numbers: Option<Vec<usize>> =
        parts.iter().zip(names).map(|(part, name)| part.strip_prefix(name)?.parse().ok()).collect();
    numbers?.try_into().ok()
}

/// Uniform in [-1, 1), the same every time (a linear congruential generator of Knuth's).
fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 * (1.0 / (1 << 23) as f32) - 1.0
    };
    (0..len).map(|_| next()).collect()
}
