//! The same for everything else that a call reads: masks, biases, lengths, packed sequences, caches, weights and tokens of a layer.

use crate::common::cache::new_tokens;
use crate::common::{
    BoolTensor, Layout, Number, Operands, Problem, Tensor, bits, by_types, for_each_pair, instruction_sets, one_head,
    run,
};
use crate::guarded::{Guard, Guarded, now_running, one_at_a_time};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, Capacity, CuSeqlens, KvCache, KvCacheShape,
    KvPadding, Parallelism, PartialAttention, TensorView, TensorViewMut, attention_into, attention_varlen_into,
    attention_weights, bf16, f16,
};

fn serial(config: AttentionConfig) -> AttentionConfig {
    config.with_parallelism(Parallelism::Serial)
}

/// A tensor at a guard.
struct GuardedTensor<T> {
    data: Guarded<T>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<T: Number> GuardedTensor<T> {
    fn new(tensor: &Tensor<T>, guard: Guard) -> Self {
        Self { data: Guarded::new(&tensor.data, guard), shape: tensor.shape, strides: tensor.strides }
    }

    fn view_mut(&mut self) -> TensorViewMut<'_, T> {
        TensorViewMut::with_strides(self.data.as_mut_slice(), self.shape, self.strides).unwrap()
    }
}

impl<T: Copy> GuardedTensor<T> {
    fn of_view(view: &TensorView<'_, T>, guard: Guard) -> Self {
        Self { data: Guarded::new(view.data(), guard), shape: view.shape(), strides: view.strides() }
    }

    fn view(&self) -> TensorView<'_, T> {
        TensorView::with_strides(self.data.as_slice(), self.shape, self.strides).unwrap()
    }
}

/// Runs with every slice of the problem at a guard; the result must be that on ordinary memory.
fn check<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, config: &AttentionConfig) {
    let expected = run(problem, config);
    let all = problem.inputs();
    for guard in Guard::BOTH {
        now_running(format_args!("{guard:?} {:?} {config:?} {:?}", problem.shape(), problem.q.strides));
        let q = GuardedTensor::of_view(&all.q, guard);
        let [k, v] = [&all.k, &all.v].map(|view| GuardedTensor::of_view(view, guard));
        let mask = all.mask.as_ref().map(|mask| GuardedTensor::of_view(mask, guard));
        let bias = all.bias.as_ref().map(|bias| GuardedTensor::of_view(bias, guard));
        let [slopes, sinks] = [all.alibi_slopes, all.sinks].map(|x| x.map(|x| Guarded::new(x, guard)));
        let kv_lens = all.kv_lens.map(|lens| Guarded::new(lens, guard));
        let mut inputs = AttentionInputs::new(q.view(), k.view(), v.view());
        inputs.mask = mask.as_ref().map(GuardedTensor::view);
        inputs.bias = bias.as_ref().map(GuardedTensor::view);
        inputs.alibi_slopes = slopes.as_ref().map(Guarded::as_slice);
        inputs.sinks = sinks.as_ref().map(Guarded::as_slice);
        inputs.kv_lens = kv_lens.as_ref().map(Guarded::as_slice);
        let mut out = GuardedTensor::new(&Tensor::<T>::unwritten(problem.out_shape(), Layout::Bhsd), guard);
        let mut logsumexp = Guarded::new(&vec![T::Real::CANARY; expected.logsumexp.len()], guard);
        let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(logsumexp.as_mut_slice());
        attention_into(&inputs, &mut outputs, config).unwrap();
        assert_eq!(bits(out.data.as_slice()), bits(&expected.out.data));
        assert_eq!(bits(logsumexp.as_slice()), bits(&expected.logsumexp));
        let q_len = problem.shape().q_len;
        let weights = attention_weights(&inputs, config, &[0], &[0, q_len - 1]).unwrap();
        assert_eq!(weights.len(), problem.shape().batch * 2 * problem.shape().kv_len);
    }
}

/// Prefill and decode, in one chunk and several, with groups of heads.
fn shapes<T: Number, K: Number>() -> Vec<AttentionShape> {
    let group = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(19, 37, 7, 9) };
    let decode = AttentionShape { q_len: 1, kv_len: 29, head_dim: 17, ..group };
    let few = AttentionShape { q_len: 3, kv_len: 45, head_dim: 8, value_dim: 16, ..group };
    let chunks = AttentionShape { batch: 1, q_len: 2, kv_len: 1601, head_dim: 5, value_dim: 3, ..group };
    by_types::<T, K, _>(vec![group, decode, few, chunks], vec![group, decode])
}

#[test]
fn masks_and_biases_stay_inside_the_slices() {
    let _one = one_at_a_time();
    for_each_pair!(masks_and_biases_stay_inside_the_slices_for);
}

fn masks_and_biases_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for shape in shapes::<T, K>() {
        let broadcasts =
            [[false; 4], [true, true, false, false], [true, true, true, false], [false, true, false, true]];
        for broadcast in by_types::<T, K, _>(broadcasts.to_vec(), broadcasts[..2].to_vec()) {
            for layout in [Layout::Bhsd, Layout::PaddedRows, Layout::Transposed] {
                let mut problem = Problem::<T, K>::normal(&shape, 1);
                problem.operands = Operands::all(&shape, 1, broadcast);
                problem.operands.mask = problem.operands.mask.map(|mask| ends_with_last(&mask.in_layout(layout)));
                problem.operands.bias = problem.operands.bias.map(|bias| bias.in_layout(layout));
                for set in instruction_sets() {
                    check(&problem, &serial(AttentionConfig::causal().with_softcap(3.0)).with_instruction_set(set));
                }
            }
        }
    }
}

/// Nothing lies behind the last element.
fn ends_with_last(mask: &BoolTensor) -> BoolTensor {
    let last: usize = mask.shape.iter().zip(mask.strides).map(|(size, stride)| (size - 1) * stride).sum();
    assert_eq!(mask.data.len(), last + 1);
    mask.clone()
}

#[test]
fn lengths_windows_and_few_rows_stay_inside_the_slices() {
    let _one = one_at_a_time();
    for_each_pair!(lengths_windows_and_few_rows_stay_inside_the_slices_for);
}

fn lengths_windows_and_few_rows_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for shape in shapes::<T, K>() {
        for lens in [[shape.kv_len, 0], [1, shape.kv_len - 1], [shape.kv_len / 2, shape.kv_len]] {
            for (layout, kv_padding) in [(Layout::Bhsd, KvPadding::Left), (Layout::Bshd, KvPadding::Right)] {
                let mut problem = Problem::<T, K>::normal(&shape, 1).in_layout(layout);
                problem.operands.kv_lens = Some(lens[..shape.batch].to_vec());
                for set in instruction_sets() {
                    let window = AttentionConfig::causal().with_window(Some(11), None).with_prefix_len(3);
                    for config in by_types::<T, K, _>(vec![AttentionConfig::full(), window], vec![window]) {
                        check(&problem, &serial(config).with_kv_padding(kv_padding).with_instruction_set(set));
                    }
                }
            }
        }
    }
}

#[test]
fn packed_sequences_stay_inside_the_slices() {
    let _one = one_at_a_time();
    for_each_pair!(packed_sequences_stay_inside_the_slices_for);
}

fn packed_sequences_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    let (q_ends, k_ends) = ([0, 13, 13, 14, 33], [0, 17, 20, 66, 69]);
    let shape = AttentionShape { num_heads: 4, num_kv_heads: 2, ..one_head(33, 69, 7, 9) };
    for layout in [Layout::Bhsd, Layout::Bshd, Layout::Transposed] {
        let problem = Problem::<T, K>::normal(&shape, 1).in_layout(layout);
        for (set, guard) in instruction_sets().into_iter().flat_map(|set| Guard::BOTH.map(|guard| (set, guard))) {
            let config = serial(AttentionConfig::causal()).with_instruction_set(set);
            now_running(format_args!("packed, {guard:?} {layout:?} {config:?}"));
            let q = GuardedTensor::new(&problem.q, guard);
            let [k, v] = [&problem.k, &problem.v].map(|tensor| GuardedTensor::new(tensor, guard));
            let inputs = AttentionInputs::new(q.view(), k.view(), v.view());
            let [cu_q, cu_k] = [q_ends, k_ends].map(|ends| Guarded::new(&ends, guard));
            let mut out = GuardedTensor::new(&Tensor::<T>::unwritten(problem.out_shape(), layout), guard);
            let offsets = CuSeqlens::new(cu_q.as_slice(), cu_k.as_slice());
            attention_varlen_into(&inputs, &mut AttentionOutputs::new(out.view_mut()), offsets, &config).unwrap();

            let mut plain = Tensor::<T>::unwritten(problem.out_shape(), layout);
            let offsets = CuSeqlens::new(&q_ends, &k_ends);
            let mut outputs = AttentionOutputs::new(plain.view_mut());
            attention_varlen_into(&problem.inputs(), &mut outputs, offsets, &config).unwrap();
            assert_eq!(bits(out.data.as_slice()), bits(&plain.data));
        }
    }
}

/// Merging reads outputs and log-sum-exps of any strides.
#[test]
fn merging_stays_inside_the_slices() {
    let _one = one_at_a_time();
    for_each_pair!(merging_stays_inside_the_slices_for);
}

fn merging_stays_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for value_dim in [1, 5, 127, 128, 129] {
        let shape = AttentionShape { num_heads: 2, num_kv_heads: 2, ..one_head(5, 4, 4, value_dim) };
        let answer = run(&Problem::<T, K>::normal(&shape, 1), &AttentionConfig::full());
        for (layout, guard) in LAYOUTS.into_iter().flat_map(|layout| Guard::BOTH.map(|guard| (layout, guard))) {
            now_running(format_args!("merging {value_dim}, {guard:?} {layout:?}"));
            let out = GuardedTensor::new(&answer.out.in_layout(layout), guard);
            let logsumexp = Guarded::new(&answer.logsumexp, guard);
            let partial = PartialAttention::new(out.view(), logsumexp.as_slice()).unwrap();
            let mut sum = GuardedTensor::new(&Tensor::<T>::unwritten(answer.out.shape, layout), guard);
            let mut sum_lse = Guarded::new(&vec![T::Real::exactly(f64::NEG_INFINITY); answer.logsumexp.len()], guard);
            let mut outputs = AttentionOutputs::new(sum.view_mut()).with_logsumexp(sum_lse.as_mut_slice());
            partial.add_to(&mut outputs).unwrap();
            PartialAttention::merge_into(&[partial, partial], &mut outputs).unwrap();
            assert!(sum_lse.as_slice().iter().all(|x| x.value().is_finite()));
        }
    }
}

const LAYOUTS: [Layout; 3] = [Layout::Bhsd, Layout::Bshd, Layout::Transposed];

/// Tokens at a guard go into a cache, and what it holds is attended to from memory that ends where its view ends.
#[test]
fn caches_stay_inside_the_slices() {
    let _one = one_at_a_time();
    cache_of::<f32, f32>();
    cache_of::<f16, f32>();
    cache_of::<bf16, f32>();
    cache_of::<f16, f16>();
    cache_of::<bf16, f16>();
}

fn cache_of<C: Number<Real = f32>, S: Number<Real = f32>>() {
    let shape = KvCacheShape { num_layers: 1, batch: 2, num_kv_heads: 2, head_dim: 7, value_dim: 9 };
    for (layout, guard) in LAYOUTS.into_iter().flat_map(|layout| Guard::BOTH.map(|guard| (layout, guard))) {
        now_running(format_args!("cache of {} from {}, {guard:?} {layout:?}", C::NAME, S::NAME));
        let mut cache = KvCache::<C>::new(&shape, Capacity::Growing(3)).unwrap();
        for (tokens, seed) in [(5, 1), (1, 2), (12, 3)] {
            let [k, v] = new_tokens(&shape, 2, tokens, [layout; 2], seed)
                .map(|tensor| GuardedTensor::new(&tensor.map(|x| S::nearest(x.value())).in_layout(layout), guard));
            cache.append(0, &k.view(), &v.view()).unwrap();
        }
        cache.truncate(17).unwrap();
        let [k, v] = [cache.k(0).unwrap(), cache.v(0).unwrap()];
        let [k, v] = [k, v].map(|view| GuardedTensor::of_view(&view, guard));
        for (q_len, set) in instruction_sets().into_iter().flat_map(|set| [(1, set), (17, set)]) {
            let q = Tensor::<f32>::from_fn([2, 4, q_len, 7], Layout::Bhsd, crate::common::pattern);
            let q = GuardedTensor::new(&q, guard);
            let mut out = GuardedTensor::new(&Tensor::<f32>::unwritten([2, 4, q_len, 9], Layout::Bhsd), guard);
            let inputs = AttentionInputs::new(q.view(), k.view(), v.view()).with_kv_lens(cache.lens(0).unwrap());
            let config = serial(AttentionConfig::causal()).with_instruction_set(set);
            attention_into(&inputs, &mut AttentionOutputs::new(out.view_mut()), &config).unwrap();
            assert!(out.data.as_slice().iter().all(|x| x.is_finite()));
        }
    }
}

/// Weights, tokens and outputs of a layer.
#[cfg(feature = "multi-head")]
#[test]
fn layers_stay_inside_the_slices() {
    let _one = one_at_a_time();
    layers_of::<f32>();
    layers_of::<f16>();
    layers_of::<bf16>();
}

#[cfg(feature = "multi-head")]
fn layers_of<T: Number<Real = f32>>() {
    use crate::common::layer::{as_f32, features, normal_tokens};
    use fused_attention::{
        MultiHeadAttention, MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace, Projection, WeightStorage,
    };

    let (d_model, d_source) = (13, 11);
    let shape = MultiHeadShape { d_model, d_source, num_heads: 4, num_kv_heads: 2, head_dim: 7, value_dim: 9 };
    let features = features(&shape);
    for (storage, guard) in
        [WeightStorage::OutIn, WeightStorage::InOut].into_iter().flat_map(|s| Guard::BOTH.map(|guard| (s, guard)))
    {
        let weights = features.map(|[input, out]| {
            let numbers: Vec<T> = normal_tokens(input * out, 1).iter().map(|&x| T::nearest(x / 4.0)).collect();
            Guarded::new(&numbers, guard)
        });
        let projection = |i: usize| {
            let [input, out] = features[i];
            let stored = if storage == WeightStorage::OutIn { [out, input] } else { [input, out] };
            Projection::stored(weights[i].as_slice(), storage, stored).unwrap()
        };
        let layer = MultiHeadAttention::new(shape, projection(0), projection(1), projection(2), projection(3)).unwrap();
        for (q_len, kv_len) in [(1, 1), (1, 9), (3, 5), (17, 33), (150, 140)] {
            let x = Guarded::new(&as_f32(&normal_tokens(q_len * d_model, 2)), guard);
            let source = Guarded::new(&as_f32(&normal_tokens(kv_len * d_source, 3)), guard);
            let inputs = MultiHeadInputs::new(x.as_slice(), [1, q_len, d_model])
                .with_source(source.as_slice(), [1, kv_len, d_source]);
            for set in instruction_sets() {
                let config = serial(AttentionConfig::full()).with_instruction_set(set);
                now_running(format_args!("layer of {}, {guard:?} {storage:?} {q_len} x {kv_len} {config:?}", T::NAME));
                let mut out = Guarded::new(&vec![f32::NAN; q_len * d_model], guard);
                layer.forward_into(&inputs, out.as_mut_slice(), &config, &mut MultiHeadWorkspace::new()).unwrap();
                assert!(out.as_slice().iter().all(|x| x.is_finite()));
            }
        }
    }
}
