//! A layer's step over a cache, again and again.

use super::*;
use common::layer::{Form, TextbookLayer, TextbookRotary, as_f32, features, normal_tokens};
use fused_attention::{
    MultiHeadAttention, MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace, RotaryPairing, TensorView, WeightStorage,
};

const SHAPE: MultiHeadShape =
    MultiHeadShape { d_model: 96, d_source: 96, num_heads: 6, num_kv_heads: 2, head_dim: 16, value_dim: 24 };
const BATCH: usize = 2;

/// What `gemm` allocates for products of these sizes, in a layer's order. Of weights stored `[out, in]` a layer multiplies up to four tokens one by one, and
/// transposes those of more.
fn allocations_of_gemm(form: Form, tokens: usize) -> usize {
    let mut sizes = features(&SHAPE).to_vec();
    if form.is_fused {
        let outputs = sizes[..3].iter().map(|[_, out]| out).sum();
        sizes.splice(..3, [[SHAPE.d_model, outputs]]);
    }
    let is_transposed = form.storage == WeightStorage::OutIn && tokens > 4;
    let (calls, tokens) =
        if form.storage == WeightStorage::OutIn && !is_transposed { (tokens, 1) } else { (1, tokens) };
    let run = |[input, out]: [usize; 2]| {
        let (x, weight, mut to) = (vec![0.5f32; tokens * input], vec![0.5f32; input * out], vec![0f32; tokens * out]);
        let (input_stride, output_stride) = match form.storage {
            WeightStorage::OutIn if !is_transposed => (1, input),
            _ => (out, 1),
        };
        let mut multiply = || {
            // SAFETY: contiguous matrices of these sizes.
            unsafe {
                gemm::gemm(
                    tokens,
                    out,
                    input,
                    to.as_mut_ptr(),
                    1,
                    out as isize,
                    false,
                    x.as_ptr(),
                    1,
                    input as isize,
                    weight.as_ptr(),
                    output_stride as isize,
                    input_stride as isize,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                );
            }
        };
        multiply(); // what `gemm` finds out about the machine
        allocations_of(multiply)
    };
    calls * sizes.into_iter().map(run).sum::<usize>()
}

#[test]
fn a_step_allocates_what_gemm_does() {
    fn check<T: Number<Real = f32>, K: Number<Real = f32>>(tokens: usize) {
        let mut textbook = TextbookLayer::normal::<T>(SHAPE, [true; 4], 1);
        textbook.rotary = Some(TextbookRotary { dim: 16, pairing: RotaryPairing::Interleaved, base: 1e4 });
        let capacity = 1500; // several chunks of keys
        for (form, set) in
            Form::ALL.into_iter().flat_map(|form| instruction_sets().into_iter().map(move |set| (form, set)))
        {
            let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Serial);
            let layer: MultiHeadAttention<'_, T> = textbook.layer(form).unwrap();
            let shape = SHAPE.kv_cache_shape(1, BATCH);
            let mut cache = KvCache::<K>::new(&shape, Capacity::Fixed(capacity)).unwrap();
            let mut workspace = MultiHeadWorkspace::new();
            layer.reserve_steps(&mut workspace, [BATCH, tokens, capacity], &config).unwrap();
            let x = as_f32(&normal_tokens(BATCH * tokens * SHAPE.d_model, 2));
            let mut out = vec![0.0; x.len()];
            let inputs = MultiHeadInputs::new(&x, [BATCH, tokens, SHAPE.d_model]);
            let of_gemm = allocations_of_gemm(form, BATCH * tokens);
            let prompt_len = 1400;
            let prompt = vec![K::from_acc(0.5); BATCH * shape.num_kv_heads * prompt_len * shape.value_dim];
            let prompt = [shape.head_dim, shape.value_dim].map(|dim| {
                let sizes = [BATCH, shape.num_kv_heads, prompt_len, dim];
                TensorView::from_bhsd(&prompt[..sizes.iter().product()], sizes).unwrap()
            });
            for round in 0..4 {
                if round == 2 {
                    cache.append(0, &prompt[0], &prompt[1]).unwrap();
                }
                let mut step = || layer.step_into(&inputs, &mut out, &mut cache, 0, &config, &mut workspace).unwrap();
                if round == 0 {
                    step(); // gemm's own scratch of this thread
                    continue;
                }
                let allocations = allocations_of(step);
                assert_eq!(allocations, of_gemm, "{set} {form:?}, {tokens} tokens, round {round}");
            }
        }
    }
    for tokens in [1, 3] {
        check::<f32, f32>(tokens);
        check::<f16, bf16>(tokens);
    }
}

/// Of one sequence, `gemm` multiplies a single token without allocating, so nothing does.
#[test]
fn a_token_of_one_sequence_costs_no_allocation() {
    let textbook = TextbookLayer::normal::<f32>(SHAPE, [true; 4], 1);
    for form in Form::ALL {
        let config = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
        let layer: MultiHeadAttention = textbook.layer(form).unwrap();
        let mut cache = KvCache::<f32>::new(&SHAPE.kv_cache_shape(1, 1), Capacity::Fixed(50)).unwrap();
        let mut workspace = MultiHeadWorkspace::new();
        layer.reserve_steps(&mut workspace, [1, 1, 50], &config).unwrap();
        let x = as_f32(&normal_tokens(SHAPE.d_model, 2));
        let mut out = vec![0.0; SHAPE.d_model];
        for step in 0..50 {
            let inputs = MultiHeadInputs::new(&x, [1, 1, SHAPE.d_model]);
            let allocations = allocations_of(|| {
                layer.step_into(&inputs, &mut out, &mut cache, 0, &config, &mut workspace).unwrap();
            });
            assert!(allocations == 0 || step == 0, "{form:?}, step {step}: {allocations}");
        }
    }
}
