//! Every variant of `AttentionError` can be had from outside, so that none is dead. What each says is tested where its rule is.

use std::collections::BTreeSet;

use crate::common::{Problem, one_head};
use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, Capacity,
    CuSeqlens, InstructionSet, KvCache, KvCacheShape, PartialAttention, Rotary, RotaryPairing, TensorView,
    TensorViewMut, Workspace, attention, attention_into, attention_varlen, attention_weights,
};

/// Its name, as `Debug` prints it.
fn name(error: &AttentionError) -> String {
    format!("{error:?}").split([' ', '{', '(']).next().unwrap().into()
}

/// As the source declares them.
fn declared() -> BTreeSet<String> {
    let source = include_str!("../../src/error.rs");
    let variants = source.lines().filter_map(|line| line.strip_prefix("    ")).filter_map(|line| {
        let name = line.strip_suffix(" {").or(line.strip_suffix(","))?;
        let is_name = name.starts_with(|c: char| c.is_ascii_uppercase()) && name.chars().all(|c| c.is_alphanumeric());
        is_name.then(|| name.to_owned())
    });
    variants.filter(|name| cfg!(feature = "multi-head") || !OF_LAYERS.contains(&&name[..])).collect()
}

/// Those that only a layer returns.
const OF_LAYERS: [&str; 8] = [
    "ModelNotDivisible",
    "WeightLenMismatch",
    "BiasLenMismatch",
    "ProjectionShapeMismatch",
    "FusedSourceMismatch",
    "FeaturesMismatch",
    "FeaturesLenMismatch",
    "NotWithCache",
];

/// Those that only a file gives: with the feature `safetensors`, `multi_head_model` gets them.
const OF_FILES: [&str; 3] = ["TensorMissing", "TensorShapeMismatch", "TensorTypeMismatch"];

const ONE: AttentionShape =
    AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, q_len: 3, kv_len: 5, head_dim: 4, value_dim: 6 };

const OUT: [usize; 4] = [2, 4, 3, 6];

/// A view of one repeated number.
fn view(shape: [usize; 4]) -> TensorView<'static, f32> {
    TensorView::with_strides(&[0.5], shape, [0; 4]).unwrap()
}

fn inputs(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> AttentionInputs<'static, f32> {
    AttentionInputs::new(view(q), view(k), view(v))
}

fn good() -> AttentionInputs<'static, f32> {
    inputs([2, 4, 3, 4], [2, 2, 5, 4], [2, 2, 5, 6])
}

fn of_inputs() -> Vec<AttentionError> {
    let causal = AttentionConfig::causal();
    let refused = |inputs: AttentionInputs<'_, f32>| attention(&inputs, &causal).unwrap_err();
    let plan = |config| AttentionPlan::new(&ONE, &config).unwrap_err();
    let huge = AttentionShape { q_len: usize::MAX, head_dim: usize::MAX, ..ONE };
    vec![
        TensorView::from_bhsd(&[0.5f32; 3], [1, 1, 2, 2]).unwrap_err(),
        TensorView::from_bhsd(&[0.5f32; 3], [usize::MAX, 2, 2, 2]).unwrap_err(),
        TensorViewMut::with_strides(&mut [0.5f32; 9], [1, 1, 2, 2], [0; 4]).unwrap_err(),
        view([1, 1, 3, 2]).seq_range(2..4).unwrap_err(),
        refused(inputs([2, 4, 3, 4], [1, 2, 5, 4], [2, 2, 5, 6])),
        refused(inputs([2, 4, 3, 4], [2, 2, 5, 4], [2, 1, 5, 6])),
        refused(inputs([2, 5, 3, 4], [2, 2, 5, 4], [2, 2, 5, 6])),
        refused(inputs([2, 4, 3, 4], [2, 2, 5, 4], [2, 2, 6, 6])),
        refused(inputs([2, 4, 3, 4], [2, 2, 5, 3], [2, 2, 5, 6])),
        refused(inputs([2, 4, 3, 0], [2, 2, 5, 0], [2, 2, 5, 6])),
        refused(good().with_kv_lens(&[1])),
        refused(good().with_kv_lens(&[1, 6])),
        refused(good().with_bias(view([2, 3, 3, 5]))),
        refused(good().with_sinks(&[0.5])),
        plan(causal.with_softmax_scale(f64::NAN)),
        plan(causal.with_softcap(0.0)),
        AttentionPlan::new(&huge, &causal).unwrap_err(),
        attention_weights(&good(), &causal, &[4], &[0]).unwrap_err(),
        attention_weights(&good(), &causal, &[0], &[3]).unwrap_err(),
        InstructionSet::from_name("none").unwrap_err(),
        InstructionSet::from_name(if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" }).unwrap_err(),
    ]
}

fn of_outputs() -> Vec<AttentionError> {
    let causal = AttentionConfig::causal();
    let refused = |shape: [usize; 4], logsumexp: usize| {
        let (mut out, mut logsumexp) = (vec![0.0f32; shape.iter().product()], vec![0.0; logsumexp]);
        let out = TensorViewMut::from_bhsd(&mut out, shape).unwrap();
        attention_into(&good(), &mut AttentionOutputs::new(out).with_logsumexp(&mut logsumexp), &causal).unwrap_err()
    };
    let plan = |shape| AttentionPlan::new(&shape, &causal).unwrap();
    let run = |plan: &AttentionPlan| {
        let mut out = [0.0f32; 2 * 4 * 3 * 6];
        let mut outputs = AttentionOutputs::new(TensorViewMut::from_bhsd(&mut out, OUT).unwrap());
        plan.run(&good(), &mut outputs, &mut Workspace::new()).unwrap_err()
    };
    vec![
        refused([2, 3, 3, 6], 24),
        refused([2, 4, 2, 6], 24),
        refused([2, 4, 3, 5], 24),
        refused(OUT, 23),
        run(&plan(ONE)),
        run(&plan(AttentionShape { q_len: 9, ..ONE })),
        Workspace::new().reserve_len(isize::MAX as usize - 63).unwrap_err(),
    ]
}

fn of_packed_sequences() -> Vec<AttentionError> {
    let problem = Problem::<f32>::normal(&one_head(4, 4, 2, 2), 1);
    let refused = |inputs: AttentionInputs<'_, f32>, q: &[usize], k: &[usize]| {
        attention_varlen(&inputs, CuSeqlens::new(q, k), &AttentionConfig::causal()).unwrap_err()
    };
    let good = problem.inputs();
    vec![
        refused(self::good(), &[0], &[0]),
        refused(good.with_kv_lens(&[4]), &[0, 4], &[0, 4]),
        refused(good, &[], &[0]),
        refused(good, &[1, 4], &[0, 4]),
        refused(good, &[0, 3, 2], &[0, 4, 4]),
        refused(good, &[0, 5], &[0, 4]),
        refused(good, &[0, 4], &[0, 2, 4]),
    ]
}

fn of_partial_results() -> Vec<AttentionError> {
    let mut out = [0.0f32];
    let mut outputs = AttentionOutputs::new(TensorViewMut::from_bhsd(&mut out, [1; 4]).unwrap());
    let partial = PartialAttention::new(view([1; 4]), &[0.5]).unwrap();
    vec![
        PartialAttention::<f32>::merge(&[]).unwrap_err(),
        partial.add_to(&mut outputs).unwrap_err(),
        PartialAttention::with_logsumexp_view(view([1; 4]), view([1, 1, 2, 1])).unwrap_err(),
    ]
}

fn of_caches() -> Vec<AttentionError> {
    let shape = KvCacheShape { num_layers: 1, batch: 1, num_kv_heads: 1, head_dim: 2, value_dim: 2 };
    let mut cache = KvCache::<f32>::new(&shape, Capacity::Fixed(1)).unwrap();
    let (one, two) = (view([1, 1, 1, 2]), view([1, 1, 2, 2]));
    vec![
        cache.k(1).unwrap_err(),
        cache.k_of(0, 1).unwrap_err(),
        cache.append(0, &view([1, 1, 1, 3]), &one).unwrap_err(),
        cache.append(0, &two, &two).unwrap_err(),
        cache.truncate(1).unwrap_err(),
    ]
}

fn of_rotary_embeddings() -> Vec<AttentionError> {
    let rotary = |dim| Rotary::new(dim, RotaryPairing::HalfSplit);
    let mut q = [0.0f32; 2];
    vec![
        rotary(3).unwrap_err(),
        rotary(2).unwrap().with_base(0.0).unwrap_err(),
        rotary(4).unwrap().apply(&mut TensorViewMut::from_bhsd(&mut q, [1, 1, 1, 2]).unwrap(), 0).unwrap_err(),
    ]
}

#[cfg(feature = "multi-head")]
fn of_layers() -> Vec<AttentionError> {
    use fused_attention::{MultiHeadAttention, MultiHeadInputs, MultiHeadShape, Projection};
    let shape = MultiHeadShape::new(4, 2).unwrap();
    let projection = |input, out| Projection::from_out_in(vec![0.5f32; input * out], [out, input]).unwrap();
    let square = || projection(4, 4);
    let layer = MultiHeadAttention::new(shape, square(), square(), square(), square()).unwrap();
    let mut cache = KvCache::<f32>::new(&shape.kv_cache_shape(1, 1), Capacity::Fixed(4)).unwrap();
    let causal = AttentionConfig::causal();
    let (x, source) = ([0.5; 8], MultiHeadShape { d_source: 6, ..shape });
    let tokens = MultiHeadInputs::new(&x, [1, 2, 4]);
    vec![
        MultiHeadShape::new(4, 3).unwrap_err(),
        Projection::from_out_in(vec![0.5f32; 5], [2, 2]).unwrap_err(),
        square().with_bias(&[0.5f32; 3]).unwrap_err(),
        MultiHeadAttention::new(shape, square(), square(), square(), projection(4, 5)).unwrap_err(),
        MultiHeadAttention::from_fused_qkv(source, projection(4, 12), square()).unwrap_err(),
        layer.forward(&MultiHeadInputs::new(&x, [1, 4, 2]), &causal).unwrap_err(),
        layer.forward(&MultiHeadInputs::new(&x, [1, 3, 4]), &causal).unwrap_err(),
        layer.step(&tokens.with_source(&x, [1, 2, 4]), &mut cache, 0, &causal).unwrap_err(),
    ]
}

#[cfg(not(feature = "multi-head"))]
fn of_layers() -> Vec<AttentionError> {
    Vec::new()
}

#[test]
fn every_variant_can_be_had() {
    let errors = [
        of_inputs(),
        of_outputs(),
        of_packed_sequences(),
        of_partial_results(),
        of_caches(),
        of_rotary_embeddings(),
        of_layers(),
    ]
    .concat();
    let found: BTreeSet<String> = errors.iter().map(name).chain(OF_FILES.map(str::to_owned)).collect();
    assert_eq!(found, declared());
    assert!(errors.iter().all(|error| error.to_string().contains(|c: char| c.is_ascii_digit()) || is_of_words(error)));
}

/// Those whose rule has no numbers.
fn is_of_words(error: &AttentionError) -> bool {
    type E = AttentionError;
    matches!(
        error,
        E::NotWithCuSeqlens { .. }
            | E::NotWithCache { .. }
            | E::UnknownInstructionSet { .. }
            | E::UnavailableInstructionSet { .. }
    )
}
