//! Step by step over a cache, a layer gives what one causal pass over the whole sequence gives.

use crate::common::layer::{Form, TextbookLayer, TextbookRotary, as_f32, normal_tokens};
use crate::common::{BoolTensor, Number, by_profile, instruction_sets};
use fused_attention::{
    AttentionConfig, AttentionError, Capacity, CausalAlignment, KvCache, KvPadding, MultiHeadAttention,
    MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace, Parallelism, RotaryPairing, TensorView, alibi_slopes, bf16,
    f16,
};

const SHAPE: MultiHeadShape =
    MultiHeadShape { d_model: 24, d_source: 24, num_heads: 6, num_kv_heads: 2, head_dim: 8, value_dim: 5 };
const D_MODEL: usize = SHAPE.d_model;

fn textbook() -> TextbookLayer {
    let mut textbook = TextbookLayer::normal::<f32>(SHAPE, [true, false, true, true], 1);
    textbook.rotary = Some(TextbookRotary { dim: 6, pairing: RotaryPairing::HalfSplit, base: 100.0 });
    textbook
}

fn causal_configs() -> Vec<AttentionConfig> {
    let configs =
        [AttentionConfig::causal(), AttentionConfig::sliding_window(5), AttentionConfig::causal().with_softcap(3.0)];
    configs
        .into_iter()
        .flat_map(|config| instruction_sets().into_iter().map(move |set| config.with_instruction_set(set)))
        .collect()
}

/// Rows of a batch `[batch, len, D_MODEL]`.
fn rows(x: &[f32], len: usize, batch: usize, tokens: std::ops::Range<usize>) -> Vec<f32> {
    (0..batch).flat_map(|b| x[(b * len + tokens.start) * D_MODEL..(b * len + tokens.end) * D_MODEL].to_vec()).collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Steps of these sizes over a cache of type `K` differ from the full pass by at most `tolerance`.
fn check_steps<K: Number<Real = f32>>(sizes: &[usize], tolerance: f32) {
    let (batch, len) = (2, sizes.iter().sum());
    let x = as_f32(&normal_tokens(batch * len * D_MODEL, 2));
    let slopes = alibi_slopes(6);
    for (form, config) in Form::ALL.into_iter().cycle().zip(causal_configs()) {
        let layer: MultiHeadAttention = textbook().layer(form).unwrap();
        let inputs = MultiHeadInputs::new(&x, [batch, len, D_MODEL]).with_alibi_slopes(&slopes);
        let full = layer.forward(&inputs, &config).unwrap();
        let mut cache = KvCache::<K>::new(&SHAPE.kv_cache_shape(2, batch), Capacity::Growing(1)).unwrap();
        let mut first = 0;
        for &tokens in sizes {
            let new = rows(&x, len, batch, first..first + tokens);
            let inputs = MultiHeadInputs::new(&new, [batch, tokens, D_MODEL]).with_alibi_slopes(&slopes);
            let out = layer.step(&inputs, &mut cache, 1, &config).unwrap();
            let difference = largest_difference(&out, &rows(&full, len, batch, first..first + tokens));
            assert!(difference <= tolerance, "{config:?}, tokens {first}..{}: {difference:e}", first + tokens);
            first += tokens;
        }
        assert_eq!((cache.lens(1).unwrap(), cache.lens(0).unwrap()), (&[len; 2][..], &[0; 2][..]));
    }
}

#[test]
fn steps_give_the_full_causal_pass() {
    check_steps::<f32>(&[7, 1, 1, 3, 1, 20, 1], 1e-5);
    check_steps::<f32>(by_profile(&[1; 40], &[1; 12]), 1e-5);
}

#[test]
fn a_cache_of_16_bits_costs_its_rounding() {
    check_steps::<f16>(&[7, 1, 3, 1], 30.0 * f16::epsilon() as f32);
    check_steps::<bf16>(&[7, 1, 3, 1], 30.0 * bf16::epsilon() as f32);
}

/// A ragged batch: prompts of different lengths, then tokens for all, then for some.
#[test]
fn each_sequence_of_a_ragged_batch_goes_its_own_way() {
    let layer: MultiHeadAttention = textbook().layer(Form::ALL[2]).unwrap();
    let len = 20;
    let x = as_f32(&normal_tokens(3 * len * D_MODEL, 3));
    for config in causal_configs() {
        for padding in [KvPadding::Right, KvPadding::Left] {
            let config = config.with_kv_padding(padding);
            let mut cache = KvCache::<f32>::new(&SHAPE.kv_cache_shape(1, 3), Capacity::Fixed(len)).unwrap();
            let mut held = [0; 3];
            for (new_tokens, lens) in [(9, Some([9, 2, 5])), (1, None), (4, Some([0, 4, 1])), (2, None)] {
                let mut new = vec![f32::NAN; 3 * new_tokens * D_MODEL];
                let own = lens.unwrap_or([new_tokens; 3]);
                let start = |b: usize| if padding == KvPadding::Left { new_tokens - own[b] } else { 0 };
                for b in 0..3 {
                    let from = &x[(b * len + held[b]) * D_MODEL..][..own[b] * D_MODEL];
                    new[(b * new_tokens + start(b)) * D_MODEL..][..own[b] * D_MODEL].copy_from_slice(from);
                }
                let inputs = MultiHeadInputs::new(&new, [3, new_tokens, D_MODEL]);
                let inputs = match &lens {
                    Some(lens) => inputs.with_lens(lens),
                    None => inputs,
                };
                let out = layer.step(&inputs, &mut cache, 0, &config).unwrap();
                for b in 0..3 {
                    let end = held[b] + own[b];
                    let alone = MultiHeadInputs::new(&x[b * len * D_MODEL..][..end * D_MODEL], [1, end, D_MODEL]);
                    let alone = layer.forward(&alone, &config).unwrap();
                    let found = &out[(b * new_tokens + start(b)) * D_MODEL..][..own[b] * D_MODEL];
                    let difference = largest_difference(found, &alone[held[b] * D_MODEL..]);
                    assert!(difference <= 1e-5, "{config:?}, sequence {b} from {}: {difference:e}", held[b]);
                    held[b] = end;
                }
                assert_eq!(cache.lens(0).unwrap(), held);
                let zeros = out.iter().filter(|&&x| x == 0.0).count();
                assert_eq!(
                    zeros,
                    (3 * new_tokens - own.iter().sum::<usize>()) * D_MODEL,
                    "padding is zeros, nothing else"
                );
            }
        }
    }
}

#[test]
fn after_truncation_steps_go_on_from_there() {
    let layer: MultiHeadAttention = textbook().layer(Form::ALL[0]).unwrap();
    let config = AttentionConfig::causal();
    let x = as_f32(&normal_tokens(8 * D_MODEL, 4));
    let mut cache = KvCache::<f32>::new(&SHAPE.kv_cache_shape(1, 1), Capacity::Fixed(8)).unwrap();
    let step = |cache: &mut KvCache<f32>, x: &[f32]| {
        layer.step(&MultiHeadInputs::new(x, [1, x.len() / D_MODEL, D_MODEL]), cache, 0, &config).unwrap()
    };
    step(&mut cache, &x[..5 * D_MODEL]);
    step(&mut cache, &vec![9.0; 3 * D_MODEL]); // rejected
    cache.truncate(5).unwrap();
    let out = step(&mut cache, &x[5 * D_MODEL..]);
    let full = layer.forward(&MultiHeadInputs::new(&x, [1, 8, D_MODEL]), &config).unwrap();
    assert!(largest_difference(&out, &full[5 * D_MODEL..]) <= 1e-5);
}

/// Wherever the causal diagonal lies in one call over all tokens, it lies there in steps, whose own first token is not the sequence's.
#[test]
fn steps_count_from_where_the_sequence_begins() {
    let layer: MultiHeadAttention = textbook().layer(Form::ALL[3]).unwrap();
    let len = 14;
    let x = as_f32(&normal_tokens(2 * len * D_MODEL, 7));
    let alignments =
        [CausalAlignment::TopLeft, CausalAlignment::Offset(0), CausalAlignment::Offset(3), CausalAlignment::Offset(-4)];
    for (alignment, window) in
        alignments.into_iter().flat_map(|alignment| [None, Some(3)].map(|left| (alignment, left)))
    {
        let config = AttentionConfig::causal().with_causal_alignment(alignment).with_window(window, None);
        // Together, one sequence in front of the other, and with lengths that say the same.
        for (prompts, with_lens) in [([6, 6], false), ([6, 2], false), ([6, 2], true)] {
            let mut cache = KvCache::<f32>::new(&SHAPE.kv_cache_shape(1, 2), Capacity::Fixed(len)).unwrap();
            let mut held = prompts;
            let longest = rows(&x, len, 2, 0..6);
            let prompt = MultiHeadInputs::new(&longest, [2, 6, D_MODEL]);
            layer.step(&prompt.with_lens(&prompts), &mut cache, 0, &config).unwrap();
            for new in [1, 3, 1] {
                let tokens: Vec<f32> =
                    (0..2).flat_map(|b| x[(b * len + held[b]) * D_MODEL..][..new * D_MODEL].to_vec()).collect();
                let lens = [new; 2];
                let mut inputs = MultiHeadInputs::new(&tokens, [2, new, D_MODEL]);
                if with_lens {
                    inputs = inputs.with_lens(&lens);
                }
                let out = layer.step(&inputs, &mut cache, 0, &config).unwrap();
                for b in 0..2 {
                    let all = &x[b * len * D_MODEL..][..len * D_MODEL];
                    // Keys behind a token that a positive offset shows must be there already.
                    let end = held[b] + new;
                    let full = layer.forward(&MultiHeadInputs::new(&all[..end * D_MODEL], [1, end, D_MODEL]), &config);
                    let full = &full.unwrap()[held[b] * D_MODEL..];
                    let found = &out[b * new * D_MODEL..][..new * D_MODEL];
                    let difference = largest_difference(found, full);
                    assert!(difference <= 1e-5, "{config:?}, sequence {b} from {}: {difference:e}", held[b]);
                }
                held = held.map(|held| held + new);
            }
        }
    }
}

/// What was reserved for the longest is enough for all that are shorter, on any number of threads.
#[test]
fn reserved_workspaces_need_not_grow() {
    let shapes = [SHAPE, MultiHeadShape { num_heads: 8, num_kv_heads: 8, head_dim: 64, value_dim: 64, ..SHAPE }];
    for (shape, threads) in shapes
        .into_iter()
        .flat_map(|shape| by_profile(vec![1, 2, 3, 4], vec![1, 3]).into_iter().map(move |threads| (shape, threads)))
    {
        let layer: MultiHeadAttention = TextbookLayer::normal::<f32>(shape, [false; 4], 1).layer(Form::ALL[0]).unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let config = AttentionConfig::causal();
        let capacity = by_profile(4000, 1700);
        for new in by_profile(vec![1, 3, 20], vec![1, 20]) {
            pool.install(|| {
                let mut workspace = MultiHeadWorkspace::new();
                layer.reserve_steps(&mut workspace, [2, new, capacity], &config).unwrap();
                let reserved = workspace.len();
                let x = as_f32(&normal_tokens(2 * new * D_MODEL, 8));
                let mut out = vec![0.0; x.len()];
                let mut cache = KvCache::<f32>::new(&shape.kv_cache_shape(1, 2), Capacity::Fixed(capacity)).unwrap();
                let mut held = 0;
                while held + 2 * new <= capacity {
                    for lens in [None, Some([new, 1])] {
                        let mut inputs = MultiHeadInputs::new(&x, [2, new, D_MODEL]);
                        if let Some(lens) = &lens {
                            inputs = inputs.with_lens(lens);
                        }
                        layer.step_into(&inputs, &mut out, &mut cache, 0, &config, &mut workspace).unwrap();
                    }
                    assert_eq!(workspace.len(), reserved, "{threads} threads, {new} tokens behind {held}, {shape:?}");
                    // On to a longer cache, by keys of which nothing matters but their number.
                    cache.truncate(held).unwrap();
                    let more = (held / by_profile(3, 2)).clamp(1, by_profile(200, 300)).min(capacity - held);
                    let [k, v] =
                        [shape.head_dim, shape.value_dim].map(|dim| vec![0.5f32; 2 * shape.num_kv_heads * more * dim]);
                    let k = TensorView::from_bhsd(&k, [2, shape.num_kv_heads, more, shape.head_dim]).unwrap();
                    let v = TensorView::from_bhsd(&v, [2, shape.num_kv_heads, more, shape.value_dim]).unwrap();
                    cache.append(0, &k, &v).unwrap();
                    held += more;
                }
                // The same of calls without a cache.
                let q_len = 60;
                let mut workspace = MultiHeadWorkspace::new();
                layer.reserve(&mut workspace, [2, q_len, q_len], &config).unwrap();
                let reserved = workspace.len();
                let x = as_f32(&normal_tokens(2 * q_len * D_MODEL, 9));
                let mut out = vec![0.0; x.len()];
                for len in 0..=q_len {
                    let inputs = MultiHeadInputs::new(&x, [2, q_len, D_MODEL]);
                    layer.forward_into(&inputs.with_lens(&[len, 1]), &mut out, &config, &mut workspace).unwrap();
                    assert_eq!(workspace.len(), reserved, "{threads} threads, {len} of {q_len}, {shape:?}");
                }
            });
        }
    }
}

/// Masks and biases of a step are over all keys that the cache holds then.
#[test]
fn operands_of_a_step_span_the_cache() {
    let layer: MultiHeadAttention = textbook().layer(Form::ALL[1]).unwrap();
    let config = AttentionConfig::causal();
    let (batch, len, prompt) = (2, 10, 6);
    let x = as_f32(&normal_tokens(batch * len * D_MODEL, 5));
    let shows = |[_, _, query, key]: [usize; 4]| (query + 2 * key) % 4 != 1 || query == key;
    let bias: Vec<f32> = (0..len * len).map(|i| (i as f32).sin()).collect();
    let full_bias = TensorView::from_bhsd(&bias, [1, 1, len, len]).unwrap();
    let mask = BoolTensor::from_fn([1, 1, len, len], shows);
    let inputs = MultiHeadInputs::new(&x, [batch, len, D_MODEL]).with_mask(mask.view()).with_bias(full_bias);
    let full = layer.forward(&inputs, &config).unwrap();
    for lens in [None, Some([4, 4])] {
        let mut cache = KvCache::<f32>::new(&SHAPE.kv_cache_shape(1, batch), Capacity::Fixed(len)).unwrap();
        let first = rows(&x, len, batch, 0..prompt);
        layer.step(&MultiHeadInputs::new(&first, [batch, prompt, D_MODEL]), &mut cache, 0, &config).unwrap();
        let mask = BoolTensor::from_fn([1, 1, 4, len], |[b, h, query, key]| shows([b, h, query + prompt, key]));
        let bias = TensorView::from_bhsd(&bias[prompt * len..], [1, 1, 4, len]).unwrap();
        let new = rows(&x, len, batch, prompt..len);
        let mut inputs = MultiHeadInputs::new(&new, [batch, 4, D_MODEL]).with_mask(mask.view()).with_bias(bias);
        if let Some(lens) = &lens {
            inputs = inputs.with_lens(lens);
        }
        let out = layer.step(&inputs, &mut cache, 0, &config).unwrap();
        assert!(largest_difference(&out, &rows(&full, len, batch, prompt..len)) <= 1e-5);
    }
}

/// One workspace serves calls of all sizes, and layers of all shapes.
#[test]
fn a_workspace_serves_any_call() {
    let small = TextbookLayer::normal::<bf16>(MultiHeadShape::new(8, 2).unwrap(), [true; 4], 1);
    let (small, large): (MultiHeadAttention<bf16>, MultiHeadAttention) =
        (small.layer(Form::ALL[1]).unwrap(), textbook().layer(Form::ALL[2]).unwrap());
    let config = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
    let mut workspace = MultiHeadWorkspace::new();
    assert!(workspace.is_empty());
    for tokens in [1, 50, 3, 0, 12] {
        let (x, y) = (as_f32(&normal_tokens(tokens * 8, 1)), as_f32(&normal_tokens(tokens * D_MODEL, 2)));
        let [mut out, mut expected] = [vec![7.0; tokens * 8], vec![7.0; tokens * D_MODEL]];
        let (x, y) = (MultiHeadInputs::new(&x, [1, tokens, 8]), MultiHeadInputs::new(&y, [1, tokens, D_MODEL]));
        small.forward_into(&x, &mut out, &config, &mut workspace).unwrap();
        large.forward_into(&y, &mut expected, &config, &mut workspace).unwrap();
        assert_eq!(out, small.forward(&x, &config).unwrap());
        assert_eq!(expected, large.forward(&y, &config).unwrap());
    }
    assert!(!workspace.is_empty() && format!("{workspace:?}").contains(&workspace.len().to_string()));
}

/// A step that is refused leaves the cache and the output as they were.
#[test]
fn a_refused_step_changes_nothing() {
    let layer: MultiHeadAttention = textbook().layer(Form::ALL[0]).unwrap();
    let mut cache = KvCache::<f32>::new(&SHAPE.kv_cache_shape(1, 2), Capacity::Fixed(4)).unwrap();
    let config = AttentionConfig::causal();
    let x = as_f32(&normal_tokens(2 * 3 * D_MODEL, 6));
    let inputs = MultiHeadInputs::new(&x, [2, 3, D_MODEL]);
    layer.step(&inputs.with_lens(&[3, 1]), &mut cache, 0, &config).unwrap();
    let keys: Vec<f32> = cache.k(0).unwrap().data().to_vec();
    let mut refused = |inputs: MultiHeadInputs<'_>, config: &AttentionConfig| {
        let mut out = vec![7.0; 2 * 3 * D_MODEL];
        let error =
            layer.step_into(&inputs, &mut out, &mut cache, 0, config, &mut MultiHeadWorkspace::new()).unwrap_err();
        assert!(out.iter().all(|&x| x == 7.0), "{error}");
        assert_eq!(cache.lens(0).unwrap(), [3, 1], "{error}");
        for (sequence, len) in [(0, 3), (1, 1)] {
            let seen = cache.k_of(0, sequence).unwrap();
            for (head, token, d) in (0..2).flat_map(|h| (0..len).flat_map(move |t| (0..8).map(move |d| (h, t, d)))) {
                let offset = sequence * cache.k(0).unwrap().strides()[0] + head * seen.strides()[1] + token * 8 + d;
                assert_eq!(seen.get([0, head, token, d]), Some(keys[offset]));
            }
        }
        error
    };
    // Without room for all, and without room for the first of them, found after the second was appended, or not at all.
    assert!(matches!(refused(inputs, &config), AttentionError::CacheFull { sequence: 0, len: 3, tokens: 3, .. }));
    let (swapped, lens) = (inputs.with_lens(&[2, 1]), inputs.with_lens(&[1, 3]));
    assert!(matches!(refused(swapped, &config), AttentionError::CacheFull { sequence: 0, tokens: 2, .. }));
    // Appended, and then refused by attention.
    let error = refused(lens, &config.with_softcap(-1.0));
    assert!(matches!(error, AttentionError::InvalidSoftcap { .. }));
    let mask = BoolTensor::from_fn([1, 1, 3, 9], |_| true);
    let error = refused(lens.with_mask(mask.view()), &config);
    assert!(
        matches!(error, AttentionError::ScoreShapeMismatch { operand: "mask", found: [1, 1, 3, 9], .. }),
        "{error}"
    );
    let error = refused(inputs.with_lens(&[1, 1]).with_sinks(&[0.0; 5]), &config);
    assert!(matches!(error, AttentionError::HeadNumbersMismatch { operand: "sinks", .. }), "{error}");
    // The second sequence has no room, the first was appended.
    let mut cache = KvCache::<f32>::new(&SHAPE.kv_cache_shape(1, 2), Capacity::Fixed(4)).unwrap();
    layer.step(&inputs.with_lens(&[1, 3]), &mut cache, 0, &config).unwrap();
    let error = layer.step(&inputs.with_lens(&[2, 2]), &mut cache, 0, &config).unwrap_err();
    assert!(matches!(error, AttentionError::CacheFull { sequence: 1, tokens: 2, .. }));
    assert_eq!(cache.lens(0).unwrap(), [1, 3]);
}
