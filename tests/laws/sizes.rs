//! Sizes at the ends of what a `usize` holds, and axes of size 0 beside them, through every entry point: done or refused at once, without
//! arithmetic that overflows, loops that do not end or memory that nobody has.

use std::time::{Duration, Instant};

use crate::common::{CANARY, instruction_sets};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, Capacity, CausalAlignment,
    CuSeqlens, KvCache, KvCacheShape, KvPadding, PartialAttention, Rotary, RotaryPairing, TensorView, TensorViewMut,
    VarlenPlan, alibi_slopes, attention, attention_into, attention_varlen, attention_weights,
};

const MAX: usize = usize::MAX;
const HALF: usize = isize::MAX as usize;

/// Nothing that is refused, or has nothing to do, takes longer.
fn at_once<R>(what: impl std::fmt::Debug, run: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = run();
    assert!(start.elapsed() < Duration::from_secs(20), "{what:?} took {:?}", start.elapsed());
    result
}

/// Every combination of these sizes of seven axes would be many; each pair of axes takes all of them, the others are 1 or 0.
fn shapes() -> impl Iterator<Item = AttentionShape> {
    let sizes = [0, 1, 3, HALF, MAX / 2 + 1, MAX - 1, MAX];
    let pairs = (0..7usize).flat_map(|a| (0..a).map(move |b| [a, b]));
    pairs.flat_map(move |[a, b]| {
        sizes.into_iter().flat_map(move |first| {
            sizes.into_iter().flat_map(move |second| {
                [0, 1].map(|other| {
                    let mut axes = [other; 7];
                    (axes[a], axes[b]) = (first, second);
                    let [batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim] = axes;
                    AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim }
                })
            })
        })
    })
}

/// A view of no element, or of one that is repeated.
fn view(shape: [usize; 4]) -> Option<TensorView<'static, f32>> {
    TensorView::with_strides(&[0.5], shape, [0; 4]).ok()
}

fn views(shape: &AttentionShape) -> Option<AttentionInputs<'static, f32>> {
    let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
    let q = view([batch, num_heads, q_len, head_dim])?;
    let k = view([batch, num_kv_heads, kv_len, head_dim])?;
    Some(AttentionInputs::new(q, k, view([batch, num_kv_heads, kv_len, value_dim])?))
}

/// Whether a call would really compute: so many scores and outputs that no test waits for them.
fn computes(shape: &AttentionShape) -> bool {
    let AttentionShape { batch, num_heads, q_len, kv_len, head_dim, value_dim, .. } = *shape;
    let rows = [batch, num_heads, q_len].into_iter().fold(1usize, usize::saturating_mul);
    rows > 0 && rows.saturating_mul(kv_len.max(1)).saturating_mul(head_dim.saturating_add(value_dim)) > 1 << 20
}

#[test]
fn plans_of_any_size_are_made_or_refused() {
    for shape in shapes() {
        for config in [AttentionConfig::full(), AttentionConfig::causal().with_window(Some(MAX), None)] {
            let config = config.with_prefix_len(MAX).with_causal_alignment(CausalAlignment::Offset(isize::MIN));
            at_once(shape, || {
                for set in instruction_sets() {
                    let config = config.with_instruction_set(set);
                    let plan = AttentionPlan::new(&shape, &config);
                    let of_f64 = AttentionPlan::<f64>::with_accumulator(&shape, &config);
                    assert!(plan.is_ok() || of_f64.is_err(), "{shape:?}");
                    for error in [plan.map(drop), of_f64.map(drop)].into_iter().filter_map(Result::err) {
                        assert!(!error.to_string().is_empty());
                    }
                }
                for offsets in [&[0][..], &[0, shape.q_len], &[0, 1, MAX]] {
                    let _ = VarlenPlan::new(&shape, CuSeqlens::same(offsets), &config);
                }
            });
        }
    }
}

/// All that needs no memory, or is refused. Where a call would compute, it is not made.
#[test]
fn calls_of_any_size_are_done_or_refused() {
    for shape in shapes() {
        let Some(inputs) = views(&shape).filter(|_| !computes(&shape)) else { continue };
        at_once(shape, || {
            let AttentionShape { batch, num_heads, q_len, value_dim, .. } = shape;
            for config in [AttentionConfig::full(), AttentionConfig::causal().with_kv_padding(KvPadding::Left)] {
                let whole = attention(&inputs, &config);
                let _ = attention_varlen(&inputs, CuSeqlens::same(&[0, 1]), &config);
                let _ = attention_varlen(&inputs, CuSeqlens::same(&[0, 0]), &config);
                for (heads, rows) in [(&[0][..], &[0][..]), (&[], &[]), (&[MAX], &[MAX])] {
                    let _ = attention_weights(&inputs, &config, heads, rows);
                }
                let out_shape = [batch, num_heads, q_len, value_dim];
                let mut out = vec![CANARY; whole.as_ref().map_or(0, Vec::len)];
                let Ok(out) = TensorViewMut::from_bhsd(&mut out, out_shape) else { continue };
                let result = attention_into(&inputs, &mut AttentionOutputs::new(out), &config);
                assert_eq!(result.is_ok(), whole.is_ok(), "{shape:?}");
            }
        });
    }
}

/// Rows of no features, or no rows of any number of features.
#[test]
fn partial_results_of_any_size_are_merged_or_refused() {
    for shape in [[MAX, 0, MAX, MAX], [0, MAX, MAX, 1], [MAX, MAX, 0, MAX], [2, 3, 5, 0], [MAX, 1, 1, 0]] {
        at_once(shape, || {
            let out = view(shape).unwrap();
            let [batch, heads, q_len, _] = shape;
            let rows = view([batch, heads, q_len, 1]);
            let Some(rows) = rows.filter(|_| batch.saturating_mul(heads).saturating_mul(q_len) < 100) else { return };
            let partial = PartialAttention::with_logsumexp_view(out, rows).unwrap();
            let merged = PartialAttention::merge(&[partial, partial]);
            assert!(merged.is_ok() || batch.max(heads).max(q_len) == MAX, "{shape:?}");
            let mut nothing = [];
            let Ok(to) = TensorViewMut::with_strides(&mut nothing, shape, [0; 4]) else { return };
            PartialAttention::merge_into(&[partial], &mut AttentionOutputs::<f32>::new(to)).unwrap();
        });
    }
    // More rows than memory holds, repeated.
    let shape = [1, 1, HALF / 2, 1];
    let (out, logsumexp) = (view(shape).unwrap(), view(shape).unwrap());
    let partial = PartialAttention::with_logsumexp_view(out, logsumexp).unwrap();
    assert!(PartialAttention::merge(&[partial]).is_err());
    assert!(PartialAttention::new(out, &[0.5; 3]).is_err());
}

#[test]
fn caches_of_any_size_are_made_or_refused() {
    let sizes = [0, 1, HALF, MAX];
    let combinations = (0..1024usize).map(|i| [0, 1, 2, 3, 4].map(|axis| sizes[i >> (2 * axis) & 3]));
    for [batch, num_kv_heads, head_dim, value_dim, tokens] in combinations {
        let shape = KvCacheShape { num_layers: 1, batch, num_kv_heads, head_dim, value_dim };
        at_once((shape, tokens), || {
            for capacity in [Capacity::Fixed(tokens), Capacity::Growing(tokens)] {
                let Ok(mut cache) = KvCache::<f32>::new(&shape, capacity) else { continue };
                for new in sizes {
                    let k = view([batch, num_kv_heads, new, head_dim]);
                    let v = view([batch, num_kv_heads, new, value_dim]);
                    let (Some(k), Some(v)) = (k, v) else { continue };
                    // Tokens of no memory at all may be any number; others that would be written are few.
                    let is_nothing = batch == 0 || num_kv_heads == 0;
                    if is_nothing || new < 2 {
                        let _ = cache.append(0, &k, &v);
                    }
                    let _ = cache.append_to(0, 0, &k, &v).is_ok_and(|()| batch != 1);
                }
                let _ = (cache.truncate(MAX), cache.truncate_sequence(MAX, 0), cache.k(0), cache.v(MAX));
                cache.clear();
            }
        });
    }
}

#[test]
fn rotary_embeddings_of_any_size_turn_or_are_refused() {
    let rotary = Rotary::new(2, RotaryPairing::Interleaved).unwrap();
    for shape in [[0, MAX, MAX, MAX], [MAX, 0, MAX, 2], [MAX, MAX, 0, 3], [1, 1, MAX, 0], [MAX, MAX, MAX, 0]] {
        let mut nothing = [];
        let Ok(mut view) = TensorViewMut::from_bhsd(&mut nothing, shape) else { continue };
        let result = at_once(shape, || rotary.apply(&mut view, MAX));
        assert_eq!(result.is_ok(), shape[3] >= 2, "{shape:?}");
    }
    let mut row = [1.0f32, 0.0, 1.0, 0.0];
    rotary.apply(&mut TensorViewMut::from_bhsd(&mut row, [1, 1, 2, 2]).unwrap(), MAX).unwrap();
    assert!(row.iter().all(|x| x.is_finite()));
}

#[test]
fn slopes_of_any_number_of_heads_are_positive() {
    for num_heads in [0, 1, 2, 3, 100, 1000] {
        let slopes = alibi_slopes(num_heads);
        assert!(slopes.len() == num_heads && slopes.iter().all(|slope| (0.0..=1.0).contains(slope)), "{num_heads}");
    }
}

/// Each slice that a call takes, one element short.
#[test]
fn slices_one_element_short_are_refused() {
    let (data, mut out) = ([0.5f32; 60], [CANARY; 60]);
    let shape = [1, 3, 4, 5];
    for len in [0, 59] {
        let needed_and_len = |error: fused_attention::AttentionError| {
            let message = error.to_string();
            assert!(message.contains("60") && message.contains(&len.to_string()), "{message}");
        };
        needed_and_len(TensorView::from_bhsd(&data[..len], shape).unwrap_err());
        needed_and_len(TensorView::from_bshd(&data[..len], shape).unwrap_err());
        needed_and_len(TensorView::with_strides(&data[..len], shape, [0, 20, 1, 4]).unwrap_err());
        needed_and_len(TensorView::from_bhsd(&[true; 60][..len], shape).unwrap_err());
        needed_and_len(TensorViewMut::from_bhsd(&mut out[..len], shape).unwrap_err());
        needed_and_len(TensorViewMut::from_bshd(&mut out[..len], shape).unwrap_err());
        let rows = TensorView::from_bhsd(&data, [1, 60, 1, 1]).unwrap();
        needed_and_len(PartialAttention::new(rows, &data[..len]).unwrap_err());
    }
    assert!(out.iter().all(|x| x.to_bits() == CANARY.to_bits()));
}
