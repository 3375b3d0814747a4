//! Packed sequences beside separate calls.

use fused_attention::{AttentionConfig, AttentionInputs, CuSeqlens, Element, attention_into, attention_varlen_into};

use crate::answer::outputs;
use crate::{Number, Real, Tensor};

/// Each sequence has the bits of a call of its own, and nothing else is written.
pub fn assert_separate<T: Number, K: Number + Element<Acc = T::Acc>>(
    all: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    [cu_q, cu_k]: [&[usize]; 2],
) {
    let ([_, heads, total_q, _], [.., value_dim]) = (all.q.shape(), all.v.shape());
    let new = |q_len: usize| -> (Tensor<T>, Vec<T::Acc>) {
        let strides = [heads * q_len * value_dim, value_dim, heads * value_dim, 1];
        let out = Tensor::new([1, heads, q_len, value_dim], Some(strides), T::CANARY, |_| T::CANARY);
        (out.expect("small"), vec![T::Acc::real(-0.0); heads * q_len])
    };
    let (mut out, mut logsumexp) = new(total_q);
    let offsets = CuSeqlens::new(cu_q, cu_k);
    attention_varlen_into(all, &mut outputs(&mut out, &mut logsumexp), offsets, config).expect("a valid call");

    let (mut expected, mut expected_logsumexp) = new(total_q);
    for (queries, keys) in cu_q.windows(2).zip(cu_k.windows(2)) {
        let mut one = *all;
        one.q = all.q.seq_range(queries[0]..queries[1]).expect("inside");
        one.k = all.k.seq_range(keys[0]..keys[1]).expect("inside");
        one.v = all.v.seq_range(keys[0]..keys[1]).expect("inside");
        let q_len = queries[1] - queries[0];
        let (mut own, mut own_logsumexp) = new(q_len);
        attention_into(&one, &mut outputs(&mut own, &mut own_logsumexp), config).expect("a valid call");
        let row = heads * value_dim;
        expected.data[queries[0] * row..queries[1] * row].copy_from_slice(&own.data);
        for head in 0..heads {
            expected_logsumexp[head * total_q..][queries[0]..queries[1]]
                .copy_from_slice(&own_logsumexp[head * q_len..][..q_len]);
        }
    }
    let bits = |data: &[T]| -> Vec<u64> { data.iter().map(|x| x.bits()).collect() };
    assert_eq!(bits(&out.data), bits(&expected.data), "packed {cu_q:?} {cu_k:?} {config:?}");
    let bits = |data: &[T::Acc]| -> Vec<u64> { data.iter().map(|x| x.to_f64().to_bits()).collect() };
    assert_eq!(bits(&logsumexp), bits(&expected_logsumexp), "packed {cu_q:?} {cu_k:?} {config:?}");
}
