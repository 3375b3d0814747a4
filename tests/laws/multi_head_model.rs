//! The layer on real weights and a real text.

use std::sync::OnceLock;

use crate::common::{instruction_sets, quick};
use fused_attention::{
    AttentionConfig, Capacity, KvCache, MultiHeadAttention, MultiHeadInputs, MultiHeadShape, Parallelism, Projection,
};
use safetensors::SafeTensors;

const MODEL: &[u8] = include_bytes!("../data/minilm_layer2_attention.safetensors");
const D_MODEL: usize = 384;
const LEN: usize = 320;

/// f32 against f64 differs by at most 2e-6 here (data/README).
const TOLERANCE: f32 = 1e-5;

fn model(name: &str) -> Vec<f32> {
    let tensors = SafeTensors::deserialize(MODEL).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32);
    tensor.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn shape() -> MultiHeadShape {
    MultiHeadShape::new(D_MODEL, 12).unwrap()
}

fn layer() -> &'static MultiHeadAttention<'static> {
    static LAYER: OnceLock<MultiHeadAttention<'static>> = OnceLock::new();
    LAYER.get_or_init(|| {
        let projection = |weight: &str, bias: &str| {
            Projection::from_out_in(model(weight), [D_MODEL, D_MODEL]).unwrap().with_bias(&model(bias)).unwrap()
        };
        let [q, k, v] = [projection("w_q", "b_q"), projection("w_k", "b_k"), projection("w_v", "b_v")];
        MultiHeadAttention::new(shape(), q, k, v, projection("w_o", "b_o")).unwrap()
    })
}

/// The same with one weight for Q, K and V.
fn fused_layer() -> MultiHeadAttention<'static> {
    let joined = |names: [&str; 3]| names.map(model).concat();
    let qkv = Projection::from_out_in(joined(["w_q", "w_k", "w_v"]), [3 * D_MODEL, D_MODEL]).unwrap();
    let qkv = qkv.with_bias(&joined(["b_q", "b_k", "b_v"])).unwrap();
    let out = Projection::from_out_in(model("w_o"), [D_MODEL, D_MODEL]).unwrap().with_bias(&model("b_o")).unwrap();
    MultiHeadAttention::from_fused_qkv(shape(), qkv, out).unwrap()
}

fn assert_close(found: &[f32], expected: &[f32], what: &dyn std::fmt::Debug) {
    assert_eq!(found.len(), expected.len(), "{what:?}");
    let largest = found.iter().zip(expected).map(|(found, expected)| (found - expected).abs()).fold(0.0, f32::max);
    assert!(largest <= TOLERANCE, "{what:?}: differs by {largest:e}");
}

#[test]
fn a_real_layer_gives_what_the_model_computed_and_f64_under_a_causal_mask() {
    let x = model("x");
    let inputs = MultiHeadInputs::new(&x, [1, LEN, D_MODEL]);
    for (config, expected) in [(AttentionConfig::full(), "model_out"), (AttentionConfig::causal(), "causal_out")] {
        let expected = model(expected);
        for set in instruction_sets() {
            let config = config.with_instruction_set(set);
            assert_close(&layer().forward(&inputs, &config).unwrap(), &expected, &set);
            assert_close(&fused_layer().forward(&inputs, &config).unwrap(), &expected, &(set, "fused"));
        }
    }
    // The comparison can tell the two apart.
    let differs = |(full, causal): (f32, f32)| (full - causal).abs() > 1000.0 * TOLERANCE;
    assert!(model("model_out").into_iter().zip(model("causal_out")).any(differs));
}

#[test]
fn several_lengths_of_a_real_text_in_a_batch() {
    let x = model("x");
    let lens = [LEN, 1, 100, 0, 17];
    let batch: Vec<f32> = lens.iter().flat_map(|_| x.iter().copied()).collect();
    let inputs = MultiHeadInputs::new(&batch, [lens.len(), LEN, D_MODEL]).with_lens(&lens);
    let causal = layer().forward(&inputs, &AttentionConfig::causal()).unwrap();
    let full = layer().forward(&inputs, &AttentionConfig::full()).unwrap();
    for (b, &len) in lens.iter().enumerate() {
        let rows = |out: &[f32]| out[b * LEN * D_MODEL..][..LEN * D_MODEL].to_vec();
        // What a token sees under a causal mask does not depend on how many follow.
        assert_close(&rows(&causal)[..len * D_MODEL], &model("causal_out")[..len * D_MODEL], &(b, "causal"));
        let alone = MultiHeadInputs::new(&x[..len * D_MODEL], [1, len, D_MODEL]);
        let alone = layer().forward(&alone, &AttentionConfig::full()).unwrap();
        assert_close(&rows(&full)[..len * D_MODEL], &alone, &(b, "full"));
        assert!(rows(&full)[len * D_MODEL..].iter().all(|&x| x == 0.0), "padding is zeros");
    }
    assert_close(&full[..LEN * D_MODEL], &model("model_out"), &"the whole text");
}

#[test]
fn a_real_text_token_by_token_gives_the_causal_pass() {
    let (x, expected) = (model("x"), model("causal_out"));
    let steps: &[usize] = if quick() { &[300, 1, 1, 8, 10] } else { &[200, 1, 1, 30, 1, 7, 40, 40] };
    assert_eq!(steps.iter().sum::<usize>(), LEN);
    for (layer, set) in [layer(), &fused_layer()]
        .into_iter()
        .flat_map(|layer| instruction_sets().into_iter().map(move |set| (layer, set)))
    {
        let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Serial);
        let mut cache = KvCache::<f32>::new(&shape().kv_cache_shape(1, 1), Capacity::Fixed(LEN)).unwrap();
        let mut first = 0;
        for &tokens in steps {
            let rows = first * D_MODEL..(first + tokens) * D_MODEL;
            let inputs = MultiHeadInputs::new(&x[rows.clone()], [1, tokens, D_MODEL]);
            let out = layer.step(&inputs, &mut cache, 0, &config).unwrap();
            assert_close(&out, &expected[rows], &(set, first, tokens));
            first += tokens;
        }
    }
}

#[cfg(feature = "safetensors")]
mod loading {
    use super::*;
    use fused_attention::{AttentionError, ProjectionNames, WeightStorage, f16};

    const NAMES: [(&str, &str); 4] = [("w_q", "b_q"), ("w_k", "b_k"), ("w_v", "b_v"), ("w_o", "b_o")];

    fn load(shape: MultiHeadShape, names: [(&str, &str); 4]) -> Result<MultiHeadAttention<'static>, AttentionError> {
        let tensors = SafeTensors::deserialize(MODEL).unwrap();
        MultiHeadAttention::from_safetensors(&tensors, shape, WeightStorage::OutIn, names)
    }

    #[test]
    fn a_loaded_layer_is_the_layer() {
        let x = model("x");
        let inputs = MultiHeadInputs::new(&x, [1, LEN, D_MODEL]);
        let loaded = load(shape(), NAMES).unwrap().forward(&inputs, &AttentionConfig::full()).unwrap();
        assert_eq!(loaded, layer().forward(&inputs, &AttentionConfig::full()).unwrap());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let mut names = NAMES;
        names[2].0 = "w_x";
        assert_eq!(load(shape(), names).unwrap_err(), AttentionError::TensorMissing { tensor: "w_x".into() });
        names[2] = ("w_v", "w_v");
        let error = load(shape(), names).unwrap_err();
        assert_eq!(error.to_string(), r#"tensor "w_v" has shape [384, 384], expected [384]"#);
        let wider = MultiHeadShape { num_kv_heads: 6, ..shape() };
        let error = load(wider, NAMES).unwrap_err();
        assert_eq!(error.to_string(), r#"tensor "w_k" has shape [384, 384], expected [192, 384]"#);
        let tensors = SafeTensors::deserialize(MODEL).unwrap();
        let narrow = MultiHeadAttention::<f16>::from_safetensors(&tensors, shape(), WeightStorage::OutIn, NAMES);
        assert_eq!(narrow.unwrap_err().to_string(), r#"tensor "w_q" is of F32, expected F16"#);
    }

    /// Tensors of other types and in the other storage, written to memory here.
    #[test]
    fn other_types_storage_and_a_fused_weight_load() {
        use safetensors::tensor::{Dtype, TensorView};
        let transposed = |name: &str| -> Vec<f32> {
            let (weight, width) = (model(name), D_MODEL);
            (0..width * width).map(|i| weight[i % width * width + i / width]).collect()
        };
        let [q, k, v] = ["w_q", "w_k", "w_v"].map(transposed);
        let row = |i: usize| [&q, &k, &v].map(|w| w[i * D_MODEL..][..D_MODEL].to_vec()).concat();
        let joined: Vec<f32> = (0..D_MODEL).flat_map(row).collect();
        let narrow =
            |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect() };
        let wide = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let (qkv, out) = (narrow(&joined), narrow(&transposed("w_o")));
        let (qkv_bias, out_bias) = (wide(&["b_q", "b_k", "b_v"].map(model).concat()), narrow(&model("b_o")));
        let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
        let file = safetensors::serialize(
            [
                ("qkv", view(Dtype::F16, &[D_MODEL, 3 * D_MODEL], &qkv)),
                ("out", view(Dtype::F16, &[D_MODEL, D_MODEL], &out)),
                ("qkv.bias", view(Dtype::F32, &[3 * D_MODEL], &qkv_bias)),
                ("out.bias", view(Dtype::F16, &[D_MODEL], &out_bias)),
            ],
            None,
        )
        .unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let names = [("qkv", "qkv.bias"), ("out", "out.bias")];
        let layer = MultiHeadAttention::<f16>::fused_from_safetensors(&tensors, shape(), WeightStorage::InOut, names);
        let x = model("x");
        let inputs = MultiHeadInputs::new(&x, [1, LEN, D_MODEL]);
        let found = layer.unwrap().forward(&inputs, &AttentionConfig::full()).unwrap();
        let expected = model("model_out");
        let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // f16 rounds weights by 2^-12 of their size.
        assert!(error > TOLERANCE && error < 2e-3 * largest, "error {error:e} of {largest}");
        assert_eq!(ProjectionNames::from("qkv").bias, None);
    }
}
