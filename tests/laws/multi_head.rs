//! The layer is what the textbook says: projections, heads, softmax, output projection, in separate f64 code.

use crate::common::layer::{Form, TextbookLayer, TextbookRotary, as_f32, normal_tokens};
use crate::common::{BoolTensor, Number, by_profile, instruction_sets, quick};
use fused_attention::{
    AttentionConfig, AttentionInputs, CausalAlignment, KvPadding, Mask, MultiHeadAttention, MultiHeadInputs,
    MultiHeadShape, MultiHeadWorkspace, Parallelism, Projection, RotaryPairing, TensorView, attention, bf16, f16,
};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::RngSeed;
use serde_json::Value;

/// Sizes that may be confused all differ.
const SHAPE: MultiHeadShape =
    MultiHeadShape { d_model: 20, d_source: 20, num_heads: 6, num_kv_heads: 2, head_dim: 8, value_dim: 5 };

/// Whether `config`, one of those below, shows a key to a query.
fn sees(config: &AttentionConfig, q_len: usize, kv_len: usize) -> impl Fn(usize, usize) -> bool + use<> {
    let (mask, window) = (config.mask, config.window);
    move |query, key| {
        let offset = match mask {
            Mask::Causal(CausalAlignment::TopLeft) => 0,
            _ => kv_len as isize - q_len as isize,
        };
        let position = query as isize + offset;
        let key = key as isize;
        (mask == Mask::Full || key <= position)
            && window.left.is_none_or(|left| key >= position - left as isize)
            && window.right.is_none_or(|right| key <= position + right as isize)
    }
}

fn some_configs() -> [AttentionConfig; 5] {
    [
        AttentionConfig::full(),
        AttentionConfig::causal(),
        AttentionConfig::causal().with_causal_alignment(CausalAlignment::TopLeft),
        AttentionConfig::sliding_window(3),
        AttentionConfig::full().with_window(Some(2), Some(4)),
    ]
}

/// What one case of the law below depends on.
#[derive(Debug, Clone)]
struct Case {
    shape: MultiHeadShape,
    form: Form,
    has_bias: [bool; 4],
    dtype: &'static str,
    rotary: Option<TextbookRotary>,
    config: AttentionConfig,
    batch: usize,
    q_len: usize,
    /// Cross-attention to so many tokens.
    source_len: Option<usize>,
    has_lens: bool,
    seed: u64,
}

impl Case {
    fn check<T: Number<Real = f32>>(&self) {
        let Self { shape, batch, q_len, config, seed, .. } = *self;
        let mut textbook = TextbookLayer::normal::<T>(shape, self.has_bias, seed);
        textbook.rotary = self.rotary;
        let layer: MultiHeadAttention<'_, T> = textbook.layer(self.form).unwrap();
        let kv_len = self.source_len.unwrap_or(q_len);
        let mut x = normal_tokens(batch * q_len * shape.d_model, seed + 1);
        let mut source = self.source_len.map(|len| normal_tokens(batch * len * shape.d_source, seed + 2));
        let lens: Vec<usize> = (0..batch).map(|b| (seed as usize >> (8 * b)) % (kv_len + 1)).collect();
        let len = |b: usize| if self.has_lens { lens[b] } else { kv_len };
        let tokens = |b: usize| match config.kv_padding {
            KvPadding::Left => kv_len - len(b)..kv_len,
            _ => 0..len(b),
        };
        // Whatever lies in the padding: it must not be looked at.
        let (padded, features) = match &mut source {
            Some(source) => (source, shape.d_source),
            None => (&mut x, shape.d_model),
        };
        for (index, token) in padded.chunks_exact_mut(features).enumerate() {
            if !tokens(index / kv_len).contains(&(index % kv_len)) {
                token.fill(f64::NAN);
            }
        }
        let (x32, source32) = (as_f32(&x), source.as_deref().map(as_f32));
        let mut inputs = MultiHeadInputs::new(&x32, [batch, q_len, shape.d_model]);
        if let Some(source) = &source32 {
            inputs = inputs.with_source(source, [batch, kv_len, shape.d_source]);
        }
        if self.has_lens {
            inputs = inputs.with_lens(&lens);
        }
        let out = layer.forward(&inputs, &config).unwrap();
        for b in 0..batch {
            let row = |token: usize| (b * q_len + token) * shape.d_model;
            let queries = if source.is_some() { 0..q_len } else { tokens(b) };
            let found = &out[row(queries.start)..row(queries.end)];
            let keys = source.as_ref().map(|source| {
                let row = |token: usize| (b * kv_len + token) * shape.d_source;
                &source[row(tokens(b).start)..row(tokens(b).end)]
            });
            let sees = sees(&config, queries.len(), len(b));
            textbook.assert_near(found, (&x[row(queries.start)..row(queries.end)], keys), &sees, &(self, b));
            let padding = (0..q_len).filter(|token| !queries.contains(token));
            assert!(padding.flat_map(|token| &out[row(token)..row(token + 1)]).all(|&x| x == 0.0), "{self:?}");
        }
    }
}

fn any_shape() -> impl Strategy<Value = MultiHeadShape> {
    (1usize..40, 1usize..40, 1usize..4, 1usize..4, 1usize..20, 0usize..20).prop_map(
        |(d_model, d_source, num_kv_heads, group, head_dim, value_dim)| {
            let num_heads = num_kv_heads * group;
            MultiHeadShape { d_model, d_source, num_heads, num_kv_heads, head_dim, value_dim }
        },
    )
}

fn any_config() -> impl Strategy<Value = AttentionConfig> {
    let padding = select(vec![KvPadding::Right, KvPadding::Left]);
    let parallelism = select(vec![Parallelism::Serial, Parallelism::default()]);
    (select(some_configs().to_vec()), padding, parallelism, select(instruction_sets())).prop_map(
        |(config, padding, parallelism, set)| {
            config.with_kv_padding(padding).with_parallelism(parallelism).with_instruction_set(set)
        },
    )
}

fn any_rotary() -> impl Strategy<Value = Option<(usize, RotaryPairing, f64)>> {
    let pairing = select(vec![RotaryPairing::HalfSplit, RotaryPairing::Interleaved]);
    proptest::option::of((0usize..20, pairing, select(vec![10_000.0, 5e5, 2.0])))
}

prop_compose! {
    fn any_case()(
        shape in any_shape(),
        form in select(Form::ALL.to_vec()),
        has_bias in any::<[bool; 4]>(),
        dtype in select(vec!["f32", "f16", "bf16"]),
        rotary in any_rotary(),
        config in any_config(),
        batch in 1usize..4,
        q_len in select(vec![1, 2, 3, 7, 20, 33]),
        source_len in proptest::option::of(select(vec![0, 1, 5, 40])),
        has_lens in any::<bool>(),
        seed in any::<u32>(),
    ) -> Case {
        let mut shape = shape;
        if form.is_fused || source_len.is_none() {
            shape.d_source = shape.d_model;
        }
        let rotary = rotary.map(|(dim, pairing, base)| TextbookRotary { dim: dim.min(shape.head_dim) / 2 * 2, pairing, base });
        let rotary = rotary.filter(|rotary| rotary.dim > 0);
        let seed = seed.into();
        Case { shape, form, has_bias, dtype, rotary, config, batch, q_len, source_len, has_lens, seed }
    }
}

#[test]
fn the_layer_is_the_textbooks() {
    let config = ProptestConfig {
        cases: by_profile(600, 60),
        rng_seed: RngSeed::Fixed(8),
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(case in any_case())| {
        match case.dtype {
            "f16" => case.check::<f16>(),
            "bf16" => case.check::<bf16>(),
            _ => case.check::<f32>(),
        }
    });
}

/// Wide enough that weights of 16 bits are widened in several blocks, and that threads share them.
#[test]
fn wide_layers_are_the_textbooks() {
    fn check<T: Number<Real = f32>>(forms_of_lengths: &[(Form, usize)]) {
        let shape =
            MultiHeadShape { num_kv_heads: 2, head_dim: 60, ..MultiHeadShape::new(by_profile(1024, 640), 8).unwrap() };
        let textbook = TextbookLayer::normal::<T>(shape, [true, false, true, false], 5);
        for &(form, q_len) in forms_of_lengths {
            let x = normal_tokens(q_len * shape.d_model, 6);
            let layer: MultiHeadAttention<'_, T> = textbook.layer(form).unwrap();
            let inputs = as_f32(&x);
            let inputs = MultiHeadInputs::new(&inputs, [1, q_len, shape.d_model]);
            let config = AttentionConfig::causal();
            let [serial, shared] = [Parallelism::Serial, Parallelism::default()]
                .map(|parallelism| layer.forward(&inputs, &config.with_parallelism(parallelism)).unwrap());
            let sees = sees(&config, q_len, q_len);
            textbook.assert_all_near(&[&serial, &shared], (&x, None), &sees, &(T::NAME, form));
        }
    }
    let [out_in, in_out, fused_out_in, fused_in_out] = Form::ALL;
    let all = [(out_in, 1), (fused_in_out, 1), (in_out, 5), (fused_out_in, 20)];
    check::<f32>(by_profile(&all, &[(out_in, 1), (fused_out_in, 5)]));
    check::<bf16>(by_profile(&all, &[(fused_in_out, 1), (in_out, 5)]));
    if !quick() {
        check::<f16>(&all);
    }
}

#[test]
fn weights_of_16_bits_give_what_their_f32_copies_give() {
    fn check<T: Number<Real = f32>>() {
        let textbook = TextbookLayer::normal::<T>(SHAPE, [true; 4], 3);
        let x = as_f32(&normal_tokens(9 * 20, 4));
        for form in Form::ALL {
            let inputs = MultiHeadInputs::new(&x, [1, 9, 20]);
            let config = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
            let narrow = textbook.layer::<T>(form).unwrap().forward(&inputs, &config).unwrap();
            let wide = textbook.layer::<f32>(form).unwrap().forward(&inputs, &config).unwrap();
            assert_eq!(narrow, wide, "{} {form:?}", T::NAME);
        }
    }
    check::<f16>();
    check::<bf16>();
}

#[test]
fn a_batch_gives_each_sequence_what_it_gets_alone() {
    let textbook = TextbookLayer::normal::<f32>(SHAPE, [true; 4], 1);
    let layer: MultiHeadAttention = textbook.layer(Form::ALL[0]).unwrap();
    let (batch, len) = (4, 30);
    let x = as_f32(&normal_tokens(batch * len * 20, 2));
    let lens = [30, 0, 11, 1];
    for config in some_configs() {
        let out = layer.forward(&MultiHeadInputs::new(&x, [batch, len, 20]).with_lens(&lens), &config).unwrap();
        for (b, &own) in lens.iter().enumerate() {
            let row = |token: usize| (b * len + token) * 20;
            let alone = layer.forward(&MultiHeadInputs::new(&x[row(0)..row(own)], [1, own, 20]), &config).unwrap();
            let close = alone.iter().zip(&out[row(0)..row(own)]).all(|(alone, out)| (alone - out).abs() < 1e-5);
            assert!(close, "{config:?}, sequence {b}");
        }
    }
}

#[test]
fn masks_biases_slopes_and_sinks_reach_the_scores() {
    let textbook = TextbookLayer::normal::<f32>(SHAPE, [true; 4], 7);
    let layer: MultiHeadAttention = textbook.layer(Form::ALL[1]).unwrap();
    let (batch, len) = (2, 12);
    let x = as_f32(&normal_tokens(batch * len * 20, 8));
    let mask = BoolTensor::from_fn([1, 1, len, len], |[_, _, query, key]| (query * 5 + key) % 3 != 0 || query == key);
    let bias: Vec<f32> = (0..6 * len).map(|i| (i as f32 * 0.7).sin()).collect();
    let bias = TensorView::from_bhsd(&bias, [1, 6, 1, len]).unwrap();
    let slopes = fused_attention::alibi_slopes(6);
    let sinks = [0.5, -1.0, 0.0, 2.0, -3.0, 1.0];
    let inputs = MultiHeadInputs::new(&x, [batch, len, 20])
        .with_mask(mask.view())
        .with_bias(bias)
        .with_alibi_slopes(&slopes)
        .with_sinks(&sinks);
    let config = AttentionConfig::causal().with_softcap(5.0).with_softmax_scale(0.3);
    let mut workspace = MultiHeadWorkspace::new();
    let heads = layer.project(&MultiHeadInputs::new(&x, [batch, len, 20]), &config, &mut workspace).unwrap();
    let direct = AttentionInputs::new(heads.q, heads.k, heads.v)
        .with_mask(mask.view())
        .with_bias(bias)
        .with_alibi_slopes(&slopes)
        .with_sinks(&sinks);
    let context = attention(&direct, &config).unwrap(); // [batch, heads, len, value_dim]
    let tokens: Vec<f32> = (0..batch * len)
        .flat_map(|token| (0..30).map(move |feature| (token, feature)))
        .map(|(token, feature)| context[((token / len * 6 + feature / 5) * len + token % len) * 5 + feature % 5])
        .collect();
    let expected = textbook.project::<f64>(3, &tokens.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), batch * len);
    let out = layer.forward(&inputs, &config).unwrap();
    assert!(out.iter().zip(&expected).all(|(out, expected)| (f64::from(*out) - expected).abs() < 1e-5));
    // Each of them counts.
    let bare = MultiHeadInputs::new(&x, [batch, len, 20]);
    for without in [
        bare.with_bias(bias).with_alibi_slopes(&slopes).with_sinks(&sinks),
        bare.with_mask(mask.view()).with_alibi_slopes(&slopes).with_sinks(&sinks),
        bare.with_mask(mask.view()).with_bias(bias).with_sinks(&sinks),
        bare.with_mask(mask.view()).with_bias(bias).with_alibi_slopes(&slopes),
    ] {
        let other = layer.forward(&without, &config).unwrap();
        assert!(out.iter().zip(&other).any(|(out, other)| (out - other).abs() > 1e-3));
    }
    // With lengths, every sequence has its own part of them.
    let lens = [12, 7];
    let padded = layer.forward(&inputs.with_lens(&lens), &config).unwrap();
    for (b, &own) in lens.iter().enumerate() {
        for (padded, out) in padded[b * len * 20..][..own * 20].iter().zip(&out[b * len * 20..]) {
            assert!((padded - out).abs() < 1e-5, "a causal row sees what it saw in the longer sequence");
        }
    }
}

/// Why scores are divided by the root of `head_dim`: those of N(0, 1) features have its size as variance.
#[test]
fn scores_of_normal_features_have_variance_one_after_scaling() {
    let head_dim = 64;
    let shape = MultiHeadShape { head_dim, value_dim: 1, ..MultiHeadShape::new(256, 4).unwrap() };
    let textbook = TextbookLayer::normal::<f32>(shape, [false; 4], 11);
    let layer: MultiHeadAttention = textbook.layer(Form::ALL[0]).unwrap();
    let len = by_profile(200, 60);
    let x = as_f32(&normal_tokens(len * 256, 12));
    let mut workspace = MultiHeadWorkspace::new();
    let inputs = MultiHeadInputs::new(&x, [1, len, 256]);
    let heads = layer.project(&inputs, &AttentionConfig::full(), &mut workspace).unwrap();
    let mut variances = Vec::new();
    for head in 0..4 {
        let score = |query: usize, key: usize| -> f64 {
            let product =
                |d: usize| heads.q.get([0, head, query, d]).unwrap() * heads.k.get([0, head, key, d]).unwrap();
            (0..head_dim).map(|d| f64::from(product(d))).sum()
        };
        let pairs =
            (0..len).flat_map(|query| (0..len).map(move |key| (query, key))).filter(|(query, key)| query != key);
        let squares: Vec<f64> = pairs.map(|(query, key)| score(query, key).powi(2)).collect();
        variances.push(squares.iter().sum::<f64>() / squares.len() as f64);
    }
    let mean = variances.iter().sum::<f64>() / 4.0;
    assert!((mean / head_dim as f64 - 1.0).abs() < 0.1, "{variances:?} without scaling");
}

fn example(name: &str) -> Value {
    serde_json::from_str::<Value>(include_str!("../data/worked_examples.json")).unwrap()[name].take()
}

fn matrix(value: &Value) -> Vec<Vec<f32>> {
    serde_json::from_value(value.clone()).unwrap()
}

/// `[inputs, outputs]` weights that pick these inputs.
fn picks(inputs: usize, picked: impl IntoIterator<Item = usize>) -> Projection<'static> {
    let picked: Vec<usize> = picked.into_iter().collect();
    let weights: Vec<f32> = (0..inputs)
        .flat_map(|i| picked.iter().map(move |&p| if p == i { 1.0 } else { 0.0 }).collect::<Vec<_>>())
        .collect();
    Projection::from_in_out(weights, [inputs, picked.len()]).unwrap()
}

/// An example's Q as `x`, its K and V side by side as source.
#[test]
fn worked_examples_come_out_of_a_layer() {
    for name in ["identity_projection", "pronoun"] {
        let example = example(name);
        let [q, k, v] = ["q", "k", "v"].map(|tensor| matrix(&example[tensor]));
        let source: Vec<f32> = k.iter().zip(&v).flat_map(|(k, v)| [&k[..], &v[..]].concat()).collect();
        let shape = MultiHeadShape { d_source: 4, ..MultiHeadShape::new(2, 1).unwrap() };
        let layer =
            MultiHeadAttention::new(shape, picks(2, 0..2), picks(4, 0..2), picks(4, 2..4), picks(2, 0..2)).unwrap();
        let mut config = AttentionConfig::full();
        config.softmax_scale = example["softmax_scale"].as_f64();
        let x = q.concat();
        for set in instruction_sets() {
            let inputs = MultiHeadInputs::new(&x, [1, q.len(), 2]).with_source(&source, [1, k.len(), 4]);
            let out = layer.forward(&inputs, &config.with_instruction_set(set)).unwrap();
            let row = example["row"].as_u64().unwrap() as usize;
            let expected: Vec<f32> = serde_json::from_value(example["out"].clone()).unwrap();
            let tolerance = example["tolerance"].as_f64().unwrap() as f32;
            for (out, expected) in out[2 * row..].iter().zip(expected) {
                assert!((out - expected).abs() <= tolerance, "{set} {name}: {out}, not {expected}");
            }
        }
    }
}

/// The identity example in one piece: with three identity projections, self-attention of its tokens.
#[test]
fn the_identity_example_is_self_attention() {
    let example = example("identity_projection");
    let x = matrix(&example["q"]).concat();
    let layer = MultiHeadAttention::new(
        MultiHeadShape::new(2, 1).unwrap(),
        picks(2, 0..2),
        picks(2, 0..2),
        picks(2, 0..2),
        picks(2, 0..2),
    );
    let config = AttentionConfig::full().with_softmax_scale(1.0);
    let out = layer.unwrap().forward(&MultiHeadInputs::new(&x, [1, 3, 2]), &config).unwrap();
    assert!((out[2] - 0.577_681_2).abs() < 1e-6 && (out[3] - 0.844_637_6).abs() < 1e-6, "{out:?}");
}

#[test]
fn the_causal_example_keeps_its_shape_and_its_past() {
    let example = example("causal_weights");
    let size = |name: &str| example[name].as_u64().unwrap() as usize;
    let (len, d_model) = (size("num_tokens"), size("d_model"));
    let shape = MultiHeadShape::new(d_model, size("num_heads")).unwrap();
    assert_eq!(shape.head_dim, size("head_dim"));
    let textbook = TextbookLayer::normal::<f32>(shape, [false; 4], 1);
    let layer: MultiHeadAttention = textbook.layer(Form::ALL[1]).unwrap();
    let x = normal_tokens(len * d_model, 2);
    let run = |x: &[f64]| {
        layer.forward(&MultiHeadInputs::new(&as_f32(x), [1, len, d_model]), &AttentionConfig::causal()).unwrap()
    };
    let out = run(&x);
    assert_eq!(out.len(), len * d_model);
    // The first token sees itself alone: its output is its value, projected.
    let value = textbook.project::<f64>(2, &x[..d_model], 1);
    let first = textbook.project::<f64>(3, &value, 1);
    assert!(out.iter().zip(&first).all(|(out, first)| (f64::from(*out) - first).abs() < 1e-5));
    // And none sees those after it.
    for changed in 1..len {
        let mut other = x.clone();
        other[changed * d_model..].fill(100.0);
        let other = run(&other);
        assert_eq!(out[..changed * d_model], other[..changed * d_model]);
        assert_ne!(out[changed * d_model..], other[changed * d_model..]);
    }
}

/// A query of one feature meets keys that hold the scores of the example; the values say which key it was.
#[test]
fn the_saturation_example_comes_out_of_a_layer() {
    let example = example("saturation");
    let scores: Vec<f32> = serde_json::from_value(example["scores"].clone()).unwrap();
    let tolerance = example["tolerance"].as_f64().unwrap() as f32;
    // d_model is 64, and so is head_dim; a source token is its score and three values.
    let shape = MultiHeadShape { d_source: 4, value_dim: 3, ..MultiHeadShape::new(64, 1).unwrap() };
    let key = picks(4, [9, 0].into_iter().chain((2..64).map(|_| 9))); // no input 9: zeros
    let out = Projection::from_in_out(
        (0..3 * 64).map(|i| if i % 64 == i / 64 { 1.0 } else { 0.0 }).collect::<Vec<f32>>(),
        [3, 64],
    );
    let layer = MultiHeadAttention::new(shape, picks(64, 0..64), key, picks(4, 1..4), out.unwrap()).unwrap();
    let x: Vec<f32> = (0..64).map(|d| if d == 1 { 1.0 } else { 0.0 }).collect();
    let source: Vec<f32> =
        (0..3).flat_map(|j| [scores[j], f32::from(j == 0), f32::from(j == 1), f32::from(j == 2)]).collect();
    let inputs = MultiHeadInputs::new(&x, [1, 1, 64]).with_source(&source, [1, 3, 4]);
    for (config, expected) in
        [(AttentionConfig::full(), "softmax_of_scaled"), (AttentionConfig::full().with_softmax_scale(1.0), "softmax")]
    {
        let weights = layer.forward(&inputs, &config).unwrap();
        let expected: Vec<f32> = serde_json::from_value(example[expected].clone()).unwrap();
        assert!(
            expected.iter().zip(&weights).all(|(e, w)| (e - w).abs() <= tolerance),
            "{weights:?}, not {expected:?}"
        );
    }
}
