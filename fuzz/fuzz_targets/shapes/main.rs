//! Arbitrary shapes, strides, slice lengths, operands and configurations: `Ok` or an `AttentionError`, never a panic, never an
//! access out of bounds.

#![no_main]

mod operands;
mod partials;
mod tensors;
mod weights;

use arbitrary::Arbitrary;
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, CausalAlignment, KvPadding,
    Parallelism, Workspace, attention, attention_into,
};
use fused_attention_fuzz::{CANARY, Masked, Size, instruction_sets, offsets};
use libfuzzer_sys::fuzz_target;

use operands::{HeadNumbers, KvLens, Operand};
use partials::Partials;
use tensors::{Description, MAX_SLICE, Tensor, filled, in_range};
use weights::Asked;

/// Multiply-adds of one input; beyond, it is only checked and planned.
const MAX_WORK: u128 = 1 << 20;

#[derive(Debug, Arbitrary)]
struct Case {
    kv_lens: Option<KvLens>,
    sizes: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Option<i8>,
    configured: Configured,
    softmax_scale: Option<f64>,
    mask: Option<Operand>,
    bias: Option<Operand>,
    slopes: Option<HeadNumbers>,
    sinks: Option<HeadNumbers>,
    /// Some of the queries, or of the keys, alone.
    ranges: [Option<[Size; 2]>; 2],
    asked: Option<Asked>,
    partials: Option<Partials>,
    instruction_set: Option<u8>,
    serial: bool,
    workspace_missing: u8,
}

/// Sizes that agree with each other; the tensors' own changes come on top.
#[derive(Debug, Clone, Copy, Arbitrary)]
struct Sizes {
    batch: Size,
    num_kv_heads: Size,
    group_size: Size,
    q_len: Size,
    kv_len: Size,
    head_dim: Size,
    value_dim: Size,
}

/// What the config hides, and does to scores.
#[derive(Debug, Clone, Copy, Arbitrary)]
struct Configured {
    masked: Masked,
    /// Another place for the causal diagonal.
    offset: Option<i64>,
    window: [Option<Size>; 2],
    prefix_len: Option<Size>,
    softcap: Option<Softcap>,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Softcap {
    /// In steps of 1/16.
    Plain(u8),
    Any(f64),
}

impl Configured {
    fn config(&self) -> AttentionConfig {
        let mut config = self.masked.config();
        if let Some(offset) = self.offset {
            config = config.with_causal_alignment(CausalAlignment::Offset(offset as isize));
        }
        let [left, right] = self.window.map(|limit| limit.map(Size::get));
        config = config.with_window(left, right).with_prefix_len(self.prefix_len.map_or(0, Size::get));
        match self.softcap {
            Some(Softcap::Plain(n)) => config.with_softcap(f64::from(n) / 16.0),
            Some(Softcap::Any(softcap)) => config.with_softcap(softcap),
            None => config,
        }
    }
}

fuzz_target!(|case: Case| {
    run(&case);
});

fn run(case: &Case) -> Option<()> {
    let sizes = case.sizes;
    let [batch, num_kv_heads, group_size] = [sizes.batch, sizes.num_kv_heads, sizes.group_size].map(Size::get);
    let [q_len, kv_len, head_dim, value_dim] =
        [sizes.q_len, sizes.kv_len, sizes.head_dim, sizes.value_dim].map(Size::get);
    let num_heads = num_kv_heads.wrapping_mul(group_size);

    let mut config = case.configured.config();
    if let Some(scale) = case.softmax_scale {
        config = config.with_softmax_scale(scale);
    }
    if let Some(choice) = case.instruction_set {
        let sets = instruction_sets();
        config = config.with_instruction_set(sets[usize::from(choice) % sets.len()]);
    }
    if case.kv_lens.as_ref().is_some_and(|kv_lens| kv_lens.left) {
        config = config.with_kv_padding(KvPadding::Left);
    }
    if case.serial {
        config = config.with_parallelism(Parallelism::Serial);
    }

    // A plan needs no tensors, so its sizes need not be those of anything in memory.
    let free = AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim };
    if let Ok(plan) = AttentionPlan::new(&free, &config) {
        assert_eq!(*plan.shape(), free);
        let _ = (plan.workspace_len(), plan.threads(), plan.to_string());
        let is_softcap = |x: f64| x as f32 > 0.0 && (x as f32).is_finite() && ((2.0 / x) as f32).is_finite();
        assert!(config.softcap.is_none_or(is_softcap), "softcap {:?}", config.softcap);
    }

    if let Some(partials) = &case.partials {
        partials.run([batch, num_heads, q_len, value_dim]);
    }

    let q = Description::new(&case.q, [batch, num_heads, q_len, head_dim], false);
    let k = Description::new(&case.k, [batch, num_kv_heads, kv_len, head_dim], false);
    let v = Description::new(&case.v, [batch, num_kv_heads, kv_len, value_dim], false);
    let (q_data, k_data, v_data) = (filled(q.len), filled(k.len), filled(v.len));
    let [q_view, k_view, v_view] = [q.view(&q_data)?, k.view(&k_data)?, v.view(&v_data)?];
    for view in [&q_view, &k_view, &v_view] {
        let past = view.shape();
        assert_eq!(view.get(past), None);
        assert_eq!(view.get(past.map(|size| size.wrapping_sub(1))).is_some(), !past.contains(&0));
    }
    let [queries, keys] = case.ranges;
    let [q_part, k_view, v_view] = [in_range(q_view, queries), in_range(k_view, keys), in_range(v_view, keys)];
    // The output keeps its own length where only that of Q was changed.
    let q_len = if q_part.shape() == q_view.shape() { q_len } else { q_part.shape()[2] };
    let (q_view, kv_len) = (q_part, k_view.shape()[2]);

    let out = Description::new(&case.out, [batch, num_heads, q_len, value_dim], true);
    let mut out_data = vec![f32::from_bits(CANARY); out.len].into_boxed_slice();
    let (out_shape, out_strides) = {
        let view = out.view_mut(&mut out_data)?;
        (view.shape(), view.strides())
    };

    let mut inputs = AttentionInputs::new(q_view, k_view, v_view);
    let plain_shape = AttentionShape::of(&inputs);
    let kv_lens = case.kv_lens.as_ref().map(|kv_lens| kv_lens.get(q_view.shape()[0], kv_len));
    let [slopes, sinks] =
        [&case.slopes, &case.sinks].map(|numbers| numbers.as_ref().map(|numbers| numbers.get(q_view.shape()[1])));
    let scores = [q_view.shape()[0], q_view.shape()[1], q_view.shape()[2], kv_len];
    let [mask, bias] =
        [&case.mask, &case.bias].map(|operand| operand.as_ref().map(|operand| operand.description(scores)));
    let mask_data = mask.as_ref().zip(case.mask.as_ref()).map(|(description, mask)| mask.mask(description.len));
    let bias_data = bias.as_ref().zip(case.bias.as_ref()).map(|(description, bias)| bias.bias(description.len));
    inputs.kv_lens = kv_lens.as_deref();
    inputs.alibi_slopes = slopes.as_deref();
    inputs.sinks = sinks.as_deref();
    inputs.mask = mask.as_ref().zip(mask_data.as_ref()).and_then(|(description, data)| description.view(data));
    inputs.bias = bias.as_ref().zip(bias_data.as_ref()).and_then(|(description, data)| description.view(data));
    let shape = AttentionShape::of(&inputs);
    assert_eq!(shape.is_ok(), plain_shape.is_ok() && operands::fit(&inputs), "{shape:?}");
    if let Ok(shape) = &shape {
        let sizes =
            [shape.batch, shape.num_heads, shape.q_len, shape.kv_len, shape.head_dim.saturating_add(shape.value_dim)];
        let work = sizes.iter().fold(1u128, |n, &size| n.saturating_mul(size.max(1) as u128));
        if work > MAX_WORK {
            let _ = AttentionPlan::new(shape, &config);
            return None;
        }
        if shape.head_dim.max(shape.value_dim) > MAX_SLICE {
            return None; // repeated elements: the workspace would be large
        }
    }
    if let Some(asked) = &case.asked {
        asked.check(&inputs, &config, &shape);
    }
    let rows = out_shape[..3].iter().fold(1usize, |n, &size| n.saturating_mul(size)).min(MAX_SLICE);
    let lse_len = case.logsumexp.map(|change| rows.saturating_add_signed(change.into()));
    let mut lse_data = vec![f32::from_bits(CANARY); lse_len.unwrap_or(0)].into_boxed_slice();

    let result = {
        let mut outputs = AttentionOutputs::new(out.view_mut(&mut out_data)?);
        if lse_len.is_some() {
            outputs = outputs.with_logsumexp(&mut lse_data);
        }
        attention_into(&inputs, &mut outputs, &config)
    };
    let is_canary = |x: &f32| x.to_bits() == CANARY;
    if let Err(error) = &result {
        assert!(!error.to_string().is_empty());
        assert!(out_data.iter().chain(&lse_data).all(is_canary), "written before {error}");
    } else {
        let written = if out_shape.contains(&0) { 0 } else { out_shape.iter().product::<usize>() };
        assert_eq!(out_data.iter().filter(|x| !is_canary(x)).count(), written, "elements written");
        assert!(offsets(out_shape, out_strides).take(written).all(|offset| !is_canary(&out_data[offset])));
        assert!(!lse_data.iter().any(|x| is_canary(x)), "logsumexp not written");

        // The other two tiers give the same bits.
        let contiguous = attention(&inputs, &config).expect("the same inputs");
        let strided = offsets(out_shape, out_strides).take(written).map(|offset| out_data[offset].to_bits());
        assert!(contiguous.iter().map(|x| x.to_bits()).eq(strided), "the tiers differ");
    }

    // A plan with a workspace that is too small is refused, with a large enough one it is the same call.
    let plan = AttentionPlan::new(&shape.ok()?, &config).ok()?;
    let mut workspace = Workspace::for_plan(&plan).ok()?;
    assert!(workspace.len() >= plan.workspace_len());
    let before: Vec<u32> = out_data.iter().map(|x| x.to_bits()).collect();
    let mut outputs = AttentionOutputs::new(out.view_mut(&mut out_data)?);
    if case.workspace_missing == 1 {
        let planned = plan.run(&inputs, &mut outputs, &mut Workspace::new());
        assert!(planned.is_err() || plan.workspace_len() == 0);
    } else {
        let planned = plan.run(&inputs, &mut outputs, &mut workspace);
        assert!(planned.is_ok() || result.is_err());
    }
    if result.is_ok() {
        assert!(before.iter().copied().eq(out_data.iter().map(|x| x.to_bits())), "the plan gives other bits");
    }
    Some(())
}
