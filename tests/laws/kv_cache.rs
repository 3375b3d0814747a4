//! A cache holds what was appended, and attention over its views is attention over a copy.

use crate::common::cache::{Stored, copied, new_tokens};
use crate::common::{Generator, Layout, Tensor, by_profile, instruction_sets, masks};
use fused_attention::{
    AttentionConfig, AttentionInputs, Capacity, InstructionSet, KvCache, KvCacheShape, TensorView, attention, bf16, f16,
};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngSeed, TestCaseResult};

/// Two layers, three sequences, two heads, five features of keys and three of values: all sizes that may be confused differ.
const SHAPE: KvCacheShape = KvCacheShape { num_layers: 2, batch: 3, num_kv_heads: 2, head_dim: 5, value_dim: 3 };

/// What a test does to a cache. Indices may lie outside of it.
#[derive(Debug, Clone)]
enum Operation {
    Append { layer: usize, tokens: usize, layouts: [Layout; 2], seed: u64 },
    AppendTo { layer: usize, sequence: usize, tokens: usize, layouts: [Layout; 2], seed: u64 },
    Truncate(usize),
    TruncateSequence(usize, usize),
    Clear,
}

/// Keys and values of one token, `[num_kv_heads][dim]`.
type Token = [Vec<Vec<f32>>; 2];

/// The cache that a test expects: tokens by layer and sequence.
struct Model {
    shape: KvCacheShape,
    fixed: Option<usize>,
    tokens: Vec<Vec<Vec<Token>>>,
}

impl Model {
    fn new(shape: KvCacheShape, fixed: Option<usize>) -> Self {
        Self { shape, fixed, tokens: vec![vec![Vec::new(); shape.batch]; shape.num_layers] }
    }

    /// Does the same to both; they must agree on whether it is possible.
    fn apply<T: Stored>(&mut self, operation: &Operation, cache: &mut KvCache<T>) -> TestCaseResult {
        let KvCacheShape { num_layers, batch, .. } = self.shape;
        let (expected, found) = match *operation {
            Operation::Append { layer, tokens, layouts, seed } => {
                let [k, v] = new_tokens(&self.shape, batch, tokens, layouts, seed);
                let expected = self.append(layer, 0..batch, &k, &v);
                (expected, cache.append(layer, &k.view(), &v.view()))
            }
            Operation::AppendTo { layer, sequence, tokens, layouts, seed } => {
                let [k, v] = new_tokens(&self.shape, 1, tokens, layouts, seed);
                let expected = self.append(layer, sequence..sequence + 1, &k, &v);
                (expected, cache.append_to(layer, sequence, &k.view(), &v.view()))
            }
            Operation::Truncate(len) => (self.truncate(0..batch, len), cache.truncate(len)),
            Operation::TruncateSequence(sequence, len) => {
                (self.truncate(sequence..sequence + 1, len), cache.truncate_sequence(sequence, len))
            }
            Operation::Clear => {
                self.tokens = vec![vec![Vec::new(); batch]; num_layers];
                cache.clear();
                (true, Ok(()))
            }
        };
        prop_assert_eq!(expected, found.is_ok(), "{:?}", found);
        Ok(())
    }

    fn append(&mut self, layer: usize, sequences: std::ops::Range<usize>, k: &Tensor, v: &Tensor) -> bool {
        let KvCacheShape { num_layers, batch, num_kv_heads, .. } = self.shape;
        let new = k.shape[2];
        if layer >= num_layers || sequences.end > batch {
            return false;
        }
        let is_full = |tokens: &Vec<Token>| self.fixed.is_some_and(|capacity| tokens.len() + new > capacity);
        if self.tokens[layer][sequences.clone()].iter().any(is_full) {
            return false;
        }
        for (from, tokens) in self.tokens[layer][sequences].iter_mut().enumerate() {
            for position in 0..new {
                tokens.push([k, v].map(|tensor| {
                    let row = |head| (0..tensor.shape[3]).map(|d| tensor.get([from, head, position, d])).collect();
                    (0..num_kv_heads).map(row).collect()
                }));
            }
        }
        true
    }

    fn truncate(&mut self, sequences: std::ops::Range<usize>, len: usize) -> bool {
        let is_possible = sequences.end <= self.shape.batch
            && self.tokens.iter().all(|layer| layer[sequences.clone()].iter().all(|tokens| tokens.len() >= len));
        if is_possible {
            self.tokens.iter_mut().for_each(|layer| layer[sequences.clone()].iter_mut().for_each(|s| s.truncate(len)));
        }
        is_possible
    }

    /// Every token of every view, and the lengths.
    fn check<T: Stored>(&self, cache: &KvCache<T>) -> TestCaseResult {
        let KvCacheShape { batch, num_kv_heads, head_dim, value_dim, .. } = self.shape;
        for (layer, sequences) in self.tokens.iter().enumerate() {
            let lens: Vec<usize> = sequences.iter().map(Vec::len).collect();
            prop_assert_eq!(cache.lens(layer).unwrap(), &lens[..]);
            let longest = lens.iter().copied().max().unwrap_or(0);
            prop_assert!(cache.capacity(layer).unwrap() >= longest);
            let views = [cache.k(layer).unwrap(), cache.v(layer).unwrap()];
            prop_assert_eq!(views[0].shape(), [batch, num_kv_heads, longest, head_dim]);
            prop_assert_eq!(views[1].shape(), [batch, num_kv_heads, longest, value_dim]);
            for (sequence, tokens) in sequences.iter().enumerate() {
                prop_assert_eq!(cache.len(layer, sequence).unwrap(), tokens.len());
                let alone = [cache.k_of(layer, sequence).unwrap(), cache.v_of(layer, sequence).unwrap()];
                for which in 0..2 {
                    let dim = [head_dim, value_dim][which];
                    prop_assert_eq!(alone[which].shape(), [1, num_kv_heads, tokens.len(), dim]);
                    for (position, token) in tokens.iter().enumerate() {
                        for (head, row) in token[which].iter().enumerate() {
                            for (d, &value) in row.iter().enumerate() {
                                let expected = Some(T::round(value));
                                prop_assert_eq!(views[which].get([sequence, head, position, d]), expected);
                                prop_assert_eq!(alone[which].get([0, head, position, d]), expected);
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

fn operation() -> impl Strategy<Value = Operation> {
    let broadcast = [Layout::BroadcastSeq, Layout::BroadcastHeads, Layout::BroadcastBatch];
    let layout = || select([&Layout::DISTINCT[..], &broadcast].concat());
    let new = || (0..3usize, prop_oneof![3 => Just(1usize), 2 => 0..6usize], [layout(), layout()], any::<u64>());
    prop_oneof![
        8 => new().prop_map(|(layer, tokens, layouts, seed)| Operation::Append { layer, tokens, layouts, seed }),
        4 => (0..4usize, new()).prop_map(|(sequence, (layer, tokens, layouts, seed))| {
            Operation::AppendTo { layer, sequence, tokens, layouts, seed }
        }),
        2 => (0..12usize).prop_map(Operation::Truncate),
        2 => (0..4usize, 0..12usize).prop_map(|(sequence, len)| Operation::TruncateSequence(sequence, len)),
        1 => Just(Operation::Clear),
    ]
}

fn follows_the_model<T: Stored>() {
    let shape = (1..3usize, 0..4usize, 0..3usize, 1..6usize, 0..6usize).prop_map(
        |(num_layers, batch, num_kv_heads, head_dim, value_dim)| KvCacheShape {
            num_layers,
            batch,
            num_kv_heads,
            head_dim,
            value_dim,
        },
    );
    let cases = by_profile(256, 32);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let config = ProptestConfig { rng_seed: RngSeed::Fixed(0x5eed), ..config };
    let operations = proptest::collection::vec(operation(), 0..25);
    proptest!(config, |(shape in shape, tokens in 0..20usize, is_fixed: bool, operations in operations)| {
        let capacity = if is_fixed { Capacity::Fixed(tokens) } else { Capacity::Growing(tokens) };
        let mut cache = KvCache::<T>::new(&shape, capacity).unwrap();
        let mut model = Model::new(shape, is_fixed.then_some(tokens));
        model.check(&cache)?;
        for operation in &operations {
            model.apply(operation, &mut cache)?;
            model.check(&cache)?;
        }
        if is_fixed {
            prop_assert!((0..shape.num_layers).all(|layer| cache.capacity(layer) == Ok(tokens)));
        }
    });
}

#[test]
fn a_cache_of_f32_follows_the_model() {
    follows_the_model::<f32>();
}

#[test]
fn a_cache_of_f16_follows_the_model() {
    follows_the_model::<f16>();
}

#[test]
fn a_cache_of_bf16_follows_the_model() {
    follows_the_model::<bf16>();
}

#[test]
fn a_growing_cache_doubles_layer_by_layer() {
    let mut cache = KvCache::<f32>::new(&SHAPE, Capacity::Growing(4)).unwrap();
    let mut append = |layer, tokens| {
        let [k, v] = new_tokens(&SHAPE, 3, tokens, [Layout::Bhsd; 2], 1);
        cache.append(layer, &k.view(), &v.view()).unwrap();
        [0, 1].map(|layer| cache.capacity(layer).unwrap())
    };
    assert_eq!(append(0, 4), [4, 4]);
    assert_eq!(append(0, 1), [8, 4]);
    assert_eq!(append(1, 4), [8, 4]);
    assert_eq!(append(1, 1), [8, 8]);
    assert_eq!(append(1, 15), [8, 20], "what one append needs, where that is more than double");
    let mut empty = KvCache::<f32>::new(&SHAPE, Capacity::Growing(0)).unwrap();
    let [k, v] = new_tokens(&SHAPE, 1, 1, [Layout::Bhsd; 2], 1);
    empty.append_to(0, 2, &k.view(), &v.view()).unwrap();
    assert_eq!((empty.capacity(0), empty.capacity(1), empty.lens(0).unwrap()), (Ok(1), Ok(0), &[0, 0, 1][..]));
}

#[test]
fn every_head_is_a_contiguous_aligned_stream() {
    let mut cache = KvCache::<f16>::new(&SHAPE, Capacity::Fixed(7)).unwrap();
    let [k, v] = new_tokens(&SHAPE, 3, 6, [Layout::Bshd; 2], 1);
    cache.append(1, &k.view(), &v.view()).unwrap();
    for (view, dim) in [(cache.k(1).unwrap(), 5), (cache.v(1).unwrap(), 3)] {
        let [sequence, head, token, feature] = view.strides();
        assert_eq!((token, feature, sequence), (dim, 1, 2 * head));
        assert!(head >= 7 * dim && head % 32 == 0, "64 bytes: {head}");
        assert!(view.data().as_ptr().addr().is_multiple_of(64));
    }
}

/// The same tokens in the same type keep all bits; other types are converted to the nearest value.
#[test]
fn appended_elements_are_copied_or_rounded() {
    fn store<S: Stored, T: Stored>(values: &[S]) -> Vec<u32> {
        let shape = KvCacheShape { num_layers: 1, batch: 1, num_kv_heads: 1, head_dim: 1, value_dim: 0 };
        let mut cache = KvCache::<T>::new(&shape, Capacity::Fixed(values.len())).unwrap();
        let k = TensorView::from_bhsd(values, [1, 1, values.len(), 1]).unwrap();
        let v = TensorView::from_bhsd(&values[..0], [1, 1, values.len(), 0]).unwrap();
        cache.append(0, &k, &v).unwrap();
        let k = cache.k(0).unwrap();
        (0..values.len()).map(|i| k.get([0, 0, i, 0]).unwrap().bits()).collect()
    }
    fn bits<T: Stored>(values: &[T]) -> Vec<u32> {
        values.iter().map(|x| x.bits()).collect()
    }
    let nans = <f32 as crate::common::Number>::nans();
    assert_eq!(store::<_, f32>(&nans), bits(&nans));
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    assert_eq!(store::<_, f16>(&halves), bits(&halves), "signalling NaNs too");
    let brains: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    assert_eq!(store::<_, bf16>(&brains), bits(&brains));
    // Halfway to the next value and a little more, overflow, underflow.
    let hard = [1.0 + 0.5 / 1024.0, 1.0 + 1.5 / 1024.0, 1.0 + 0.51 / 128.0, 65519.0, 65520.0, 3e-8, -2.9e-8, -1e-45];
    assert_eq!(store::<_, f16>(&hard), hard.map(|x| f16::round(x).bits()));
    assert_eq!(store::<_, bf16>(&hard), hard.map(|x| bf16::round(x).bits()));
    let finite: Vec<f16> = halves.into_iter().filter(|x| !x.is_nan()).collect();
    let widened: Vec<f32> = finite.iter().map(|x| x.to_f32()).collect();
    assert_eq!(store::<_, f32>(&finite), bits(&widened));
    assert_eq!(store::<_, bf16>(&finite), widened.iter().map(|&x| bf16::round(x).bits()).collect::<Vec<_>>());
}

fn out_bits<T: Stored>(
    q: &Tensor,
    [k, v]: [TensorView<'_, T>; 2],
    config: &AttentionConfig,
    set: InstructionSet,
) -> Vec<u32> {
    let inputs = AttentionInputs::new(q.view(), k, v);
    attention(&inputs, &config.with_instruction_set(set)).unwrap().iter().map(|x| x.to_bits()).collect()
}

fn views_feed_attention<T: Stored>() {
    let shape = KvCacheShape { num_layers: 2, batch: 2, num_kv_heads: 2, head_dim: 20, value_dim: 12 };
    let mut cache = KvCache::<T>::new(&shape, Capacity::Growing(100)).unwrap();
    for (tokens, layout) in [(90, Layout::Bhsd), (1, Layout::Bhsd), (40, Layout::Bshd), (2, Layout::Transposed)] {
        let [k, v] = new_tokens(&shape, 2, tokens, [layout; 2], 3);
        cache.append(1, &k.view(), &v.view()).unwrap();
        let views = [cache.k(1).unwrap(), cache.v(1).unwrap()];
        let copies = views.map(|view| copied(&view));
        let contiguous = [0, 1].map(|i| TensorView::from_bhsd(&copies[i], views[i].shape()).unwrap());
        for q_len in [1, 3, 20] {
            let q = Generator::new(4).normal_tensor([2, 6, q_len, 20]);
            for (set, config) in instruction_sets().into_iter().flat_map(|set| masks().map(|config| (set, config))) {
                assert_eq!(out_bits(&q, views, &config, set), out_bits(&q, contiguous, &config, set), "{set} {q_len}");
            }
        }
    }
}

#[test]
fn attention_over_views_is_attention_over_a_copy() {
    views_feed_attention::<f32>();
    views_feed_attention::<f16>();
    views_feed_attention::<bf16>();
}

/// What was truncated (NaN here) and what other sequences hold cannot be seen.
#[test]
fn truncated_tokens_do_not_change_output() {
    let shape = KvCacheShape { num_layers: 1, batch: 2, num_kv_heads: 2, head_dim: 8, value_dim: 8 };
    let mut clean = KvCache::<f32>::new(&shape, Capacity::Fixed(200)).unwrap();
    let mut poisoned = KvCache::<f32>::new(&shape, Capacity::Growing(1)).unwrap();
    let nan = [f32::NAN];
    for tokens in [5, 1, 60, 1] {
        let [k, v] = new_tokens(&shape, 2, tokens, [Layout::Bhsd; 2], tokens as u64);
        clean.append(0, &k.view(), &v.view()).unwrap();
        poisoned.append(0, &k.view(), &v.view()).unwrap();
        let len = clean.len(0, 0).unwrap();
        // The first sequence keeps all that it has, the second half of that.
        clean.truncate_sequence(1, len / 2).unwrap();
        let rejected = TensorView::with_strides(&nan, [2, 2, 50, 8], [0; 4]).unwrap();
        poisoned.append(0, &rejected, &rejected).unwrap();
        poisoned.truncate_sequence(0, len).unwrap();
        poisoned.truncate_sequence(1, len / 2).unwrap();
        let q = Generator::new(4).normal_tensor([1, 4, 2, 8]);
        for sequence in 0..2 {
            let views = |cache| [KvCache::k_of(cache, 0, sequence).unwrap(), cache.v_of(0, sequence).unwrap()];
            assert!(views(&poisoned).iter().all(|view| copied(view).iter().all(|x| !x.is_nan())));
            for set in instruction_sets() {
                let [expected, found] =
                    [&clean, &poisoned].map(|cache| out_bits(&q, views(cache), &AttentionConfig::causal(), set));
                assert_eq!(expected, found, "{set}: sequence {sequence} of {len}");
            }
        }
        clean.truncate(len / 2).unwrap();
        poisoned.truncate(len / 2).unwrap();
        for view in [poisoned.k(0).unwrap(), poisoned.v(0).unwrap()] {
            assert!(copied(&view).iter().all(|x| !x.is_nan()));
            assert_eq!(view.get([0, 0, len / 2, 0]), None);
        }
    }
}
