//! What does not fit together is refused by a layer, with the numbers, before anything is written.

use crate::common::layer::{Form, TextbookLayer};
use fused_attention::{
    AttentionConfig, AttentionError, Capacity, KvCache, KvCacheShape, MultiHeadAttention, MultiHeadInputs,
    MultiHeadShape, MultiHeadWorkspace, Projection, TensorView,
};

/// Sizes that may be confused all differ.
const SHAPE: MultiHeadShape =
    MultiHeadShape { d_model: 12, d_source: 10, num_heads: 6, num_kv_heads: 2, head_dim: 8, value_dim: 5 };

fn layer(shape: MultiHeadShape) -> MultiHeadAttention<'static> {
    TextbookLayer::normal::<f32>(shape, [false; 4], 1).layer(Form::ALL[0]).unwrap()
}

fn self_attention() -> MultiHeadShape {
    MultiHeadShape { d_source: 12, ..SHAPE }
}

fn projection(input: usize, out: usize) -> Projection<'static> {
    Projection::from_out_in(vec![0.0; input * out], [out, input]).unwrap()
}

#[track_caller]
fn assert_message(error: AttentionError, message: &str) {
    assert_eq!(error.to_string(), message);
}

#[test]
fn sizes_that_are_no_layer_are_refused() {
    let error = MultiHeadShape::new(10, 4).unwrap_err();
    assert_eq!(error, AttentionError::ModelNotDivisible { d_model: 10, num_heads: 4 });
    assert_eq!(
        MultiHeadShape::new(10, 0).unwrap_err(),
        AttentionError::ModelNotDivisible { d_model: 10, num_heads: 0 }
    );
    let refused = |shape: MultiHeadShape| {
        MultiHeadAttention::new(shape, projection(1, 1), projection(1, 1), projection(1, 1), projection(1, 1))
            .unwrap_err()
    };
    let error = refused(MultiHeadShape { num_kv_heads: 4, ..SHAPE });
    assert_eq!(error, AttentionError::HeadsNotDivisible { num_heads: 6, num_kv_heads: 4 });
    for (num_heads, num_kv_heads) in [(0, 2), (6, 0), (0, 0)] {
        let error = refused(MultiHeadShape { num_heads, num_kv_heads, ..SHAPE });
        assert_eq!(error, AttentionError::HeadsNotDivisible { num_heads, num_kv_heads });
    }
    assert!(matches!(refused(MultiHeadShape { head_dim: 0, ..SHAPE }), AttentionError::ZeroHeadDim { .. }));
    for huge in [
        MultiHeadShape { head_dim: usize::MAX / 3, ..SHAPE },
        MultiHeadShape { value_dim: usize::MAX / 3, ..SHAPE },
        MultiHeadShape { head_dim: usize::MAX, value_dim: usize::MAX, ..SHAPE },
    ] {
        assert!(matches!(refused(huge), AttentionError::SizeOverflow { .. }));
    }
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    let error = Projection::from_out_in(vec![0.0f32; 12], [4, 5]).unwrap_err();
    assert_eq!(error, AttentionError::WeightLenMismatch { shape: [4, 5], len: 12 });
    assert_message(error, "the weights are 12 numbers, shape [4, 5] has 20 of them");
    assert!(Projection::from_in_out(&[0.0f32; 12][..], [4, 2]).is_err());
    assert!(Projection::<f32>::from_in_out(vec![], [usize::MAX, 2]).is_err());
    let error = projection(4, 5).with_bias(&[0.0f32; 4]).unwrap_err();
    assert_eq!(error, AttentionError::BiasLenMismatch { expected: 5, found: 4 });

    let features = [("q", [12, 48]), ("k", [10, 16]), ("v", [10, 10]), ("out", [30, 12])];
    for (wrong, (name, expected)) in features.into_iter().enumerate() {
        for axis in 0..2 {
            let mut found = expected;
            found[axis] += 1;
            let [q, k, v, out] = [0, 1, 2, 3].map(|i| {
                let [input, out] = if i == wrong { found } else { features[i].1 };
                projection(input, out)
            });
            let error = MultiHeadAttention::new(SHAPE, q, k, v, out).unwrap_err();
            assert_eq!(error, AttentionError::ProjectionShapeMismatch { projection: name, expected, found });
        }
    }
    let fused = |shape, qkv, out| MultiHeadAttention::from_fused_qkv(shape, qkv, out).unwrap_err();
    let error = fused(SHAPE, projection(12, 74), projection(30, 12));
    assert_eq!(error, AttentionError::FusedSourceMismatch { d_model: 12, d_source: 10 });
    let error = fused(self_attention(), projection(12, 73), projection(30, 12));
    assert_message(error, "projection qkv maps 12 features to 73, the layer needs 12 to 74");
    let error = fused(self_attention(), projection(12, 74), projection(12, 30));
    assert_message(error, "projection out maps 12 features to 30, the layer needs 30 to 12");
}

/// The error of a call, which must not have written to its output.
fn refused(shape: MultiHeadShape, inputs: MultiHeadInputs<'_>, out_len: usize) -> AttentionError {
    let mut out = vec![7.0; out_len];
    let mut workspace = MultiHeadWorkspace::new();
    let error = layer(shape).forward_into(&inputs, &mut out, &AttentionConfig::causal(), &mut workspace).unwrap_err();
    assert!(out.iter().all(|&x| x == 7.0), "{error}");
    error
}

#[test]
fn tokens_that_do_not_fit_are_refused() {
    let tokens = vec![0.0; 1000];
    let x = |shape: [usize; 3]| MultiHeadInputs::new(&tokens[..shape.iter().product()], shape);
    let source = |inputs: MultiHeadInputs<'static>, shape: [usize; 3]| {
        inputs.with_source(&[0.0; 1000][..shape.iter().product()], shape)
    };
    let own = self_attention();
    let error = refused(own, x([2, 3, 11]), 72);
    assert_eq!(error, AttentionError::FeaturesMismatch { tensor: "x", expected: 12, found: 11 });
    for (len, shape) in [(71, [2, 3, 12]), (73, [2, 3, 12]), (72, [usize::MAX, 3, 12])] {
        let error = refused(own, MultiHeadInputs::new(&tokens[..len], shape), 72);
        assert!(matches!(error, AttentionError::FeaturesLenMismatch { .. }), "{error}");
        let error =
            layer(own).forward(&MultiHeadInputs::new(&tokens[..len], shape), &AttentionConfig::full()).unwrap_err();
        assert_eq!(error, AttentionError::FeaturesLenMismatch { tensor: "x", shape, len });
    }
    let error = refused(own, x([2, 3, 12]), 71);
    assert_eq!(error, AttentionError::FeaturesLenMismatch { tensor: "out", shape: [2, 3, 12], len: 71 });
    // Self-attention of a layer that reads another source.
    let error = refused(SHAPE, x([2, 3, 12]), 72);
    assert_eq!(error, AttentionError::FeaturesMismatch { tensor: "source", expected: 10, found: 12 });
    let zeros: &'static [f32] = &[0.0; 72];
    let x = MultiHeadInputs::new(zeros, [2, 3, 12]);
    let error = refused(SHAPE, source(x, [2, 4, 9]), 72);
    assert_eq!(error, AttentionError::FeaturesMismatch { tensor: "source", expected: 10, found: 9 });
    let error = refused(SHAPE, source(x, [3, 4, 10]), 72);
    assert_eq!(error, AttentionError::BatchMismatch { tensor: "source", expected: 2, found: 3 });
    let error = refused(SHAPE, x.with_source(&zeros[..50], [2, 4, 10]), 72);
    assert_eq!(error, AttentionError::FeaturesLenMismatch { tensor: "source", shape: [2, 4, 10], len: 50 });
}

#[test]
fn lengths_and_operands_that_do_not_fit_are_refused() {
    let zeros = vec![0.0; 80];
    let x = MultiHeadInputs::new(&zeros[..72], [2, 3, 12]);
    let own = self_attention();
    let error = refused(own, x.with_lens(&[1]), 72);
    assert_eq!(error, AttentionError::KvLensLenMismatch { expected: 2, found: 1 });
    let error = refused(own, x.with_lens(&[3, 4]), 72);
    assert_eq!(error, AttentionError::KvLenTooLong { index: 1, found: 4, kv_len: 3 });
    let cross = x.with_source(&zeros, [2, 4, 10]);
    assert_eq!(
        refused(SHAPE, cross.with_lens(&[5, 4]), 72),
        AttentionError::KvLenTooLong { index: 0, found: 5, kv_len: 4 }
    );
    for lens in [None, Some([3, 2])] {
        let with_lens = |inputs: MultiHeadInputs<'static>| match lens {
            Some(lens) => inputs.with_lens(if lens == [3, 2] { &[3, 2] } else { &[] }),
            None => inputs,
        };
        let x = with_lens(MultiHeadInputs::new(&[0.0; 72], [2, 3, 12]));
        let mask = [true; 4 * 3];
        let mask = TensorView::from_bhsd(&mask, [1, 1, 3, 4]).unwrap();
        let error = refused(own, x.with_mask(mask), 72);
        let expected =
            AttentionError::ScoreShapeMismatch { operand: "mask", expected: [2, 6, 3, 3], found: [1, 1, 3, 4] };
        assert_eq!(error, expected);
        let bias = [0.0; 6];
        let bias = TensorView::from_bhsd(&bias, [1, 2, 1, 3]).unwrap();
        let error = refused(own, x.with_bias(bias), 72);
        assert!(matches!(error, AttentionError::ScoreShapeMismatch { operand: "bias", .. }), "{error}");
        let error = refused(own, x.with_alibi_slopes(&[1.0; 5]), 72);
        assert_eq!(error, AttentionError::HeadNumbersMismatch { operand: "alibi_slopes", expected: 6, found: 5 });
    }
}

#[test]
fn caches_that_do_not_fit_are_refused() {
    let zeros = vec![0.0; 80];
    let x = MultiHeadInputs::new(&zeros[..72], [2, 3, 12]);
    let own = self_attention();
    let right = own.kv_cache_shape(1, 2);
    assert_eq!(right, KvCacheShape { num_layers: 1, batch: 2, num_kv_heads: 2, head_dim: 8, value_dim: 5 });
    let step = |shape: MultiHeadShape, cache: KvCacheShape, number: usize, inputs: MultiHeadInputs<'_>| {
        let mut cache = KvCache::<f32>::new(&cache, Capacity::Growing(4)).unwrap();
        let error = layer(shape).step(&inputs, &mut cache, number, &AttentionConfig::causal()).unwrap_err();
        assert!(cache.lens(0).unwrap().iter().all(|&len| len == 0));
        error
    };
    let error = step(own, right, 1, x);
    assert_eq!(error, AttentionError::LayerOutOfRange { layer: 1, num_layers: 1 });
    let mismatch = |tensor, expected, found| AttentionError::AppendShapeMismatch { tensor, expected, found };
    let (k, v) = ([2, 2, 3, 8], [2, 2, 3, 5]);
    assert_eq!(step(own, KvCacheShape { batch: 3, ..right }, 0, x), mismatch("k", [3, 2, 3, 8], k));
    assert_eq!(step(own, KvCacheShape { num_kv_heads: 1, ..right }, 0, x), mismatch("k", [2, 1, 3, 8], k));
    assert_eq!(step(own, KvCacheShape { head_dim: 9, ..right }, 0, x), mismatch("k", [2, 2, 3, 9], k));
    assert_eq!(step(own, KvCacheShape { value_dim: 8, ..right }, 0, x), mismatch("v", [2, 2, 3, 8], v));
    let error = step(SHAPE, right, 0, x.with_source(&zeros, [2, 4, 10]));
    assert_eq!(error, AttentionError::NotWithCache { operand: "source" });
}

#[cfg(target_pointer_width = "64")]
#[test]
fn a_workspace_that_cannot_be_had_is_an_error() {
    let (layer, config) = (layer(self_attention()), AttentionConfig::causal());
    let mut workspace = MultiHeadWorkspace::new();
    let error = layer.reserve(&mut workspace, [usize::MAX / 64, 2, 2], &config).unwrap_err();
    assert!(matches!(error, AttentionError::SizeOverflow { .. }), "{error}");
    let error = layer.reserve(&mut workspace, [1, 1 << 50, 1 << 50], &config).unwrap_err();
    assert!(matches!(error, AttentionError::AllocationFailed { .. } | AttentionError::SizeOverflow { .. }), "{error}");
}

/// Without tokens there is nothing to do, whatever the other size, unless a plan of it would overflow.
#[test]
fn calls_without_tokens_are_done_or_refused() {
    let layer = layer(self_attention());
    for config in [AttentionConfig::causal(), AttentionConfig::full()] {
        for (shape, is_done) in [
            ([0, 0, 12], true),
            ([usize::MAX, 0, 12], false),
            ([0, usize::MAX >> 24, 12], true),
            ([0, usize::MAX / 12, 12], true),
            ([0, usize::MAX, 12], false),
        ] {
            let inputs = MultiHeadInputs::new(&[], shape);
            let mut workspace = MultiHeadWorkspace::new();
            layer.project(&inputs, &config, &mut workspace).unwrap();
            let results = [
                layer.forward(&inputs, &config).map(|out| assert!(out.is_empty())),
                layer.reserve(&mut workspace, [shape[0], shape[1], shape[1]], &config),
            ];
            for result in results {
                match result {
                    Ok(()) => assert!(is_done, "{shape:?}"),
                    Err(error) => {
                        assert!(!is_done && matches!(error, AttentionError::PlanOverflow { .. }), "{shape:?}: {error}");
                    }
                }
            }
        }
    }
}
