//! Arbitrary shapes, strides, slice lengths and configurations: `Ok` or an `AttentionError`, never a panic, never an
//! access out of bounds.

#![no_main]

use arbitrary::Arbitrary;
use fused_attention::{
    AttentionError, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, KvPadding, Parallelism,
    TensorView, TensorViewMut, Workspace, attention, attention_into,
};
use fused_attention_fuzz::{CANARY, Masked, Memory, Size, instruction_sets, offsets, reach};
use libfuzzer_sys::fuzz_target;

/// Multiply-adds of one input; beyond, it is only checked and planned.
const MAX_WORK: u128 = 1 << 20;
/// Elements of one slice.
const MAX_SLICE: usize = 1 << 16;

#[derive(Debug, Arbitrary)]
struct Case {
    kv_lens: Option<KvLens>,
    sizes: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Option<i8>,
    masked: Masked,
    softmax_scale: Option<f64>,
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

/// Lengths of the sequences.
#[derive(Debug, Arbitrary)]
struct KvLens {
    /// Lengths more or fewer than sequences.
    count_change: Option<i8>,
    lens: [Length; 3],
    left: bool,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Length {
    Within(u16),
    Whole,
    Any(Size),
}

impl KvLens {
    fn get(&self, batch: usize, kv_len: usize) -> Vec<usize> {
        let count = batch.min(1 << 10).saturating_add_signed(isize::from(self.count_change.unwrap_or(0)));
        let length = |i: usize| match self.lens[i % 3] {
            Length::Within(n) => usize::from(n) % kv_len.saturating_add(1).max(1),
            Length::Whole => kv_len,
            Length::Any(size) => size.get(),
        };
        (0..count).map(length).collect()
    }
}

#[derive(Debug, Arbitrary)]
struct Tensor {
    layout: Layout,
    /// Another size for one axis.
    change: Option<(u8, Size)>,
    /// Elements more or fewer than the view reaches.
    slice_change: Option<i8>,
}

#[derive(Debug, Arbitrary)]
enum Layout {
    Bhsd,
    Bshd,
    Strided(Memory),
    AnyStrides([Size; 4]),
}

/// A tensor before it becomes a view.
struct Description<'c> {
    shape: [usize; 4],
    strides: Option<[usize; 4]>,
    tensor: &'c Tensor,
    len: usize,
}

impl<'c> Description<'c> {
    fn new(tensor: &'c Tensor, mut shape: [usize; 4], is_output: bool) -> Self {
        if let Some((axis, size)) = tensor.change {
            shape[usize::from(axis % 4)] = size.get();
        }
        let [_, heads, len, dim] = shape;
        let strides = match &tensor.layout {
            Layout::Bhsd => row_major([heads, len, dim]),
            Layout::Bshd => row_major([len, heads, dim]).map(|[batch, len, heads, dim]| [batch, heads, len, dim]),
            Layout::Strided(memory) if is_output => memory.strides(shape),
            Layout::Strided(memory) => memory.input_strides(shape),
            Layout::AnyStrides(strides) => Some(strides.map(Size::get)),
        };
        // Where the reach is too large for a slice, the view must be refused whatever the slice.
        let exact = strides.and_then(|strides| reach(shape, strides)).filter(|&n| n <= MAX_SLICE).unwrap_or(64);
        let len = exact.saturating_add_signed(isize::from(tensor.slice_change.unwrap_or(0)));
        Self { shape, strides, tensor, len }
    }

    fn view<'a>(&self, data: &'a [f32]) -> Option<Result<TensorView<'a, f32>, AttentionError>> {
        let [batch, heads, len, dim] = self.shape;
        Some(match self.tensor.layout {
            Layout::Bhsd => TensorView::from_bhsd(data, self.shape),
            Layout::Bshd => TensorView::from_bshd(data, [batch, len, heads, dim]),
            _ => TensorView::with_strides(data, self.shape, self.strides?),
        })
    }

    fn view_mut<'a>(&self, data: &'a mut [f32]) -> Option<Result<TensorViewMut<'a, f32>, AttentionError>> {
        let [batch, heads, len, dim] = self.shape;
        Some(match self.tensor.layout {
            Layout::Bhsd => TensorViewMut::from_bhsd(data, self.shape),
            Layout::Bshd => TensorViewMut::from_bshd(data, [batch, len, heads, dim]),
            _ => TensorViewMut::with_strides(data, self.shape, self.strides?),
        })
    }
}

/// Strides of contiguous memory with these inner sizes.
fn row_major([a, b, c]: [usize; 3]) -> Option<[usize; 4]> {
    let bc = b.checked_mul(c)?;
    Some([a.checked_mul(bc)?, bc, c, 1])
}

fn filled(len: usize) -> Box<[f32]> {
    (0..len).map(|i| (i % 13) as f32 / 8.0 - 0.75).collect()
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

    let mut config = case.masked.config();
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
    }

    let q = Description::new(&case.q, [batch, num_heads, q_len, head_dim], false);
    let k = Description::new(&case.k, [batch, num_kv_heads, kv_len, head_dim], false);
    let v = Description::new(&case.v, [batch, num_kv_heads, kv_len, value_dim], false);
    let out = Description::new(&case.out, [batch, num_heads, q_len, value_dim], true);
    let (q_data, k_data, v_data) = (filled(q.len), filled(k.len), filled(v.len));
    let mut out_data = vec![f32::from_bits(CANARY); out.len].into_boxed_slice();

    let q_view = q.view(&q_data)?.ok()?;
    let k_view = k.view(&k_data)?.ok()?;
    let v_view = v.view(&v_data)?.ok()?;
    let (out_shape, out_strides) = {
        let view = out.view_mut(&mut out_data)?.ok()?;
        (view.shape(), view.strides())
    };
    for view in [&q_view, &k_view, &v_view] {
        let past = view.shape();
        assert_eq!(view.get(past), None);
        assert_eq!(view.get(past.map(|size| size.wrapping_sub(1))).is_some(), !past.contains(&0));
    }

    let mut inputs = AttentionInputs::new(q_view, k_view, v_view);
    let kv_len = k_view.shape()[2];
    let kv_lens = case.kv_lens.as_ref().map(|kv_lens| kv_lens.get(q_view.shape()[0], kv_len));
    if let Some(kv_lens) = &kv_lens {
        inputs = inputs.with_kv_lens(kv_lens);
    }
    let shape = AttentionShape::of(&inputs);
    if let (Ok(shape), Some(kv_lens)) = (&shape, &kv_lens) {
        assert!(kv_lens.len() == shape.batch && kv_lens.iter().all(|&len| len <= kv_len), "lengths that do not fit");
    }
    if let Ok(shape) = shape {
        let sizes =
            [shape.batch, shape.num_heads, shape.q_len, shape.kv_len, shape.head_dim.saturating_add(shape.value_dim)];
        let work = sizes.iter().fold(1u128, |n, &size| n.saturating_mul(size.max(1) as u128));
        if work > MAX_WORK {
            let _ = AttentionPlan::new(&shape, &config);
            return None;
        }
        if shape.head_dim.max(shape.value_dim) > MAX_SLICE {
            return None; // repeated elements: the workspace would be large
        }
    }
    let rows = out_shape[..3].iter().fold(1usize, |n, &size| n.saturating_mul(size)).min(MAX_SLICE);
    let lse_len = case.logsumexp.map(|change| rows.saturating_add_signed(change.into()));
    let mut lse_data = vec![f32::from_bits(CANARY); lse_len.unwrap_or(0)].into_boxed_slice();

    let result = {
        let mut outputs = AttentionOutputs::new(out.view_mut(&mut out_data)?.ok()?);
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
    let mut outputs = AttentionOutputs::new(out.view_mut(&mut out_data)?.ok()?);
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
