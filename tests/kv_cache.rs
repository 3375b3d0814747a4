//! A cache holds what was appended, and attention over its views is attention over a copy.

mod common;

use common::{Generator, Layout, Tensor, by_profile, instruction_sets, masks};
use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, Capacity, Element, InstructionSet, KvCache, KvCacheShape,
    TensorView, attention, bf16, f16,
};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngSeed, TestCaseResult};

/// Two layers, three sequences, two heads, five features of keys and three of values: all sizes that may be confused differ.
const SHAPE: KvCacheShape = KvCacheShape { num_layers: 2, batch: 3, num_kv_heads: 2, head_dim: 5, value_dim: 3 };

/// Storage types, and how an f32 gets into them by `half`'s own conversions.
trait Stored: Element<Acc = f32> + PartialEq {
    fn round(value: f32) -> Self;
    fn bits(self) -> u32;
}

impl Stored for f32 {
    fn round(value: f32) -> f32 {
        value
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Stored for f16 {
    fn round(value: f32) -> f16 {
        f16::from_f32_const(value)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Stored for bf16 {
    fn round(value: f32) -> bf16 {
        bf16::from_f32_const(value)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

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

/// New keys and values for a batch of this size.
fn new_tokens(shape: &KvCacheShape, batch: usize, tokens: usize, layouts: [Layout; 2], seed: u64) -> [Tensor; 2] {
    let mut generator = Generator::new(seed);
    let mut new = |dim, layout| generator.normal_tensor([batch, shape.num_kv_heads, tokens, dim], layout);
    [new(shape.head_dim, layouts[0]), new(shape.value_dim, layouts[1])]
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
    let nans = common::NAN_PAYLOADS.map(f32::from_bits);
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

/// A contiguous copy of a view.
fn copied<T: Stored>(view: &TensorView<'_, T>) -> Vec<T> {
    let [batch, heads, seq, dim] = view.shape();
    let indices =
        (0..batch * heads * seq * dim).map(|i| [i / dim / seq / heads, i / dim / seq % heads, i / dim % seq, i % dim]);
    indices.map(|index| view.get(index).unwrap()).collect()
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
            let q = Generator::new(4).normal_tensor([2, 6, q_len, 20], Layout::Bhsd);
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
        let q = Generator::new(4).normal_tensor([1, 4, 2, 8], Layout::Bhsd);
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

/// All that can be seen of a cache.
fn snapshot<T: Stored>(cache: &KvCache<T>) -> Vec<(usize, Vec<usize>, [Vec<u32>; 2])> {
    let layers = 0..cache.shape().num_layers;
    let seen = layers.map(|layer| {
        let views = [cache.k(layer).unwrap(), cache.v(layer).unwrap()];
        let bits = views.map(|view| copied(&view).into_iter().map(T::bits).collect());
        (cache.capacity(layer).unwrap(), cache.lens(layer).unwrap().to_vec(), bits)
    });
    seen.collect()
}

/// The error of `operation` on a cache of [`SHAPE`] with 4, 5 and 4 tokens in layer 0 and 3, 3 and 3 in layer 1; asserts that it
/// changes nothing and that the message holds these words.
fn refused(
    capacity: Capacity,
    words: &[&str],
    operation: impl Fn(&mut KvCache<f16>) -> Result<(), AttentionError>,
) -> AttentionError {
    let mut cache = KvCache::<f16>::new(&SHAPE, capacity).unwrap();
    for (layer, tokens) in [(0, 4), (1, 3)] {
        let [k, v] = new_tokens(&SHAPE, 3, tokens, [Layout::Bhsd; 2], 1);
        cache.append(layer, &k.view(), &v.view()).unwrap();
    }
    let [k, v] = new_tokens(&SHAPE, 1, 1, [Layout::Bhsd; 2], 2);
    cache.append_to(0, 1, &k.view(), &v.view()).unwrap();
    let before = snapshot(&cache);
    let error = operation(&mut cache).unwrap_err();
    assert_eq!(snapshot(&cache), before, "{error}");
    let message = error.to_string();
    let is_named = |word: &&str| message.split(|c: char| !c.is_alphanumeric()).any(|found| found == *word);
    assert!(words.iter().all(is_named), "{message:?} does not name all of {words:?}");
    error
}

/// Appends tensors of these shapes, all ones, to a layer, or to one sequence of it.
fn append_shapes<T: Stored>(
    cache: &mut KvCache<T>,
    layer: usize,
    sequence: Option<usize>,
    [k, v]: [[usize; 4]; 2],
) -> Result<(), AttentionError> {
    let [k, v] = [k, v].map(|shape| TensorView::with_strides(&[1.0f32], shape, [0; 4]).unwrap());
    match sequence {
        None => cache.append(layer, &k, &v),
        Some(sequence) => cache.append_to(layer, sequence, &k, &v),
    }
}

#[test]
fn appends_that_do_not_fit_are_refused() {
    use AttentionError::{AppendShapeMismatch, CacheFull, KvLenMismatch};
    let fixed = Capacity::Fixed(6);
    let append = |shapes| move |cache: &mut KvCache<f16>| append_shapes(cache, 0, None, shapes);
    for (k, v, tensor, expected) in [
        ([2, 2, 1, 5], [3, 2, 1, 3], "k", [3, 2, 1, 5]),
        ([3, 4, 1, 5], [3, 2, 1, 3], "k", [3, 2, 1, 5]),
        ([3, 2, 1, 7], [3, 2, 1, 3], "k", [3, 2, 1, 5]),
        ([3, 2, 1, 5], [1, 2, 1, 3], "v", [3, 2, 1, 3]),
        ([3, 2, 1, 5], [3, 1, 1, 3], "v", [3, 2, 1, 3]),
        ([3, 2, 1, 5], [3, 2, 1, 4], "v", [3, 2, 1, 3]),
    ] {
        let found = if tensor == "k" { k } else { v };
        let numbers = [expected, found].concat().iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let words: Vec<&str> = numbers.iter().map(|n| &n[..]).chain([tensor]).collect();
        assert_eq!(refused(fixed, &words, append([k, v])), AppendShapeMismatch { tensor, expected, found });
    }
    let error = refused(fixed, &["3", "5"], |cache| append_shapes(cache, 0, Some(2), [[3, 2, 1, 5], [1, 2, 1, 3]]));
    assert_eq!(error, AppendShapeMismatch { tensor: "k", expected: [1, 2, 1, 5], found: [3, 2, 1, 5] });
    let error = refused(fixed, &["1", "2"], append([[3, 2, 1, 5], [3, 2, 2, 3]]));
    assert_eq!(error, KvLenMismatch { k: 1, v: 2 });

    let error = refused(fixed, &["6", "5", "2"], append([[3, 2, 2, 5], [3, 2, 2, 3]]));
    assert_eq!(error, CacheFull { layer: 0, sequence: 1, len: 5, tokens: 2, capacity: 6 }, "the fullest is named");
    let error =
        refused(fixed, &["6", "3", "4"], |cache| append_shapes(cache, 1, Some(2), [[1, 2, 4, 5], [1, 2, 4, 3]]));
    assert_eq!(error, CacheFull { layer: 1, sequence: 2, len: 3, tokens: 4, capacity: 6 });
}

#[test]
fn layers_and_sequences_that_do_not_exist_are_refused() {
    use AttentionError::{LayerOutOfRange, SequenceOutOfRange, TruncateBeyondLen};
    let one = [[3, 2, 1, 5], [3, 2, 1, 3]];
    let one_of_one = [[1, 2, 1, 5], [1, 2, 1, 3]];
    for layer in [2, usize::MAX] {
        let words = [&layer.to_string()[..], "2"];
        let no_layer = |operation: &dyn Fn(&mut KvCache<f16>) -> Result<(), AttentionError>| {
            assert_eq!(refused(Capacity::Fixed(6), &words, operation), LayerOutOfRange { layer, num_layers: 2 });
        };
        no_layer(&|cache| append_shapes(cache, layer, None, one));
        no_layer(&|cache| append_shapes(cache, layer, Some(0), one_of_one));
        no_layer(&|cache| cache.capacity(layer).map(drop));
        no_layer(&|cache| cache.len(layer, 0).map(drop));
        no_layer(&|cache| cache.lens(layer).map(drop));
        no_layer(&|cache| cache.k(layer).map(drop));
        no_layer(&|cache| cache.v(layer).map(drop));
        no_layer(&|cache| cache.k_of(layer, 0).map(drop));
        no_layer(&|cache| cache.v_of(layer, 0).map(drop));
    }
    for sequence in [3, usize::MAX] {
        let words = [&sequence.to_string()[..], "3"];
        let no_sequence = |operation: &dyn Fn(&mut KvCache<f16>) -> Result<(), AttentionError>| {
            assert_eq!(refused(Capacity::Fixed(6), &words, operation), SequenceOutOfRange { sequence, batch: 3 });
        };
        no_sequence(&|cache| append_shapes(cache, 0, Some(sequence), one_of_one));
        no_sequence(&|cache| cache.len(0, sequence).map(drop));
        no_sequence(&|cache| cache.k_of(0, sequence).map(drop));
        no_sequence(&|cache| cache.v_of(0, sequence).map(drop));
        no_sequence(&|cache| cache.truncate_sequence(sequence, 0));
    }
    let error = refused(Capacity::Fixed(6), &["4", "3", "1"], |cache| cache.truncate(4));
    assert_eq!(error, TruncateBeyondLen { layer: 1, sequence: 0, len: 3, new_len: 4 });
    let error = refused(Capacity::Fixed(6), &["5", "4"], |cache| cache.truncate_sequence(2, 5));
    assert_eq!(error, TruncateBeyondLen { layer: 0, sequence: 2, len: 4, new_len: 5 });
}

#[cfg(target_pointer_width = "64")]
#[test]
fn what_memory_cannot_hold_is_refused() {
    use AttentionError::{AllocationFailed, CacheFull, SizeOverflow, ZeroHeadDim};
    let new = |shape, tokens| KvCache::<f32>::new(&shape, Capacity::Fixed(tokens)).map(drop).unwrap_err();
    assert_eq!(new(KvCacheShape { head_dim: 0, ..SHAPE }, 9), ZeroHeadDim { shape: [3, 2, 9, 0] });
    assert_eq!(new(SHAPE, 1 << 50), AllocationFailed { bytes: 3 * 2 * 5 * 4 << 50 }, "the streams are multiples of 64");
    for (batch, num_layers) in [(usize::MAX, 2), (3, usize::MAX), (0, usize::MAX)] {
        let error = new(KvCacheShape { batch, num_layers, num_kv_heads: 0, ..SHAPE }, 9);
        assert_eq!(error, AllocationFailed { bytes: usize::MAX });
    }
    let max = usize::MAX;
    for shape in [[3, 2, max, 5], [3, 2, max / 5, 5], [3, max, 9, 5], [1 << 58, 1, 1, 16], [1, 1, 1, max]] {
        let [batch, num_kv_heads, tokens, head_dim] = shape;
        // A single layer of few sequences, so that lengths can be had.
        let error = new(KvCacheShape { num_layers: 1, batch, num_kv_heads, head_dim, value_dim: 1 }, tokens);
        let is_expected = match error {
            SizeOverflow { shape: found, .. } => found == shape,
            AllocationFailed { .. } => batch > 3, // the lengths alone
            _ => false,
        };
        assert!(is_expected, "{error}");
    }

    // Growth: the layer keeps its memory and its tokens.
    let growing = Capacity::Growing(6);
    let append = |tokens| {
        move |cache: &mut KvCache<f16>| append_shapes(cache, 1, Some(0), [[1, 2, tokens, 5], [1, 2, tokens, 3]])
    };
    let error = refused(growing, &[], append(1 << 50));
    assert!(matches!(error, AllocationFailed { bytes } if bytes >= 3 * 2 * 5 * 2 << 50), "{error}");
    let error = refused(growing, &[&((1usize << 60) + 3).to_string()], append(1 << 60));
    assert!(matches!(error, SizeOverflow { shape: [3, 2, _, 5], .. }), "{error}");
    // Keys that fit, values that do not.
    let shape = KvCacheShape { num_layers: 1, batch: 1, num_kv_heads: 1, head_dim: 1, value_dim: 1 << 54 };
    let mut cache = KvCache::<f32>::new(&shape, Capacity::Growing(0)).unwrap();
    let error = append_shapes(&mut cache, 0, None, [[1, 1, 1, 1], [1, 1, 1, 1 << 54]]).unwrap_err();
    assert_eq!((error, cache.capacity(0), cache.len(0, 0)), (AllocationFailed { bytes: 1 << 56 }, Ok(0), Ok(0)));
    // Without heads tokens take no memory, but their number is limited.
    let shape = KvCacheShape { num_kv_heads: 0, head_dim: 1, value_dim: 0, ..shape };
    let mut cache = KvCache::<f32>::new(&shape, Capacity::Growing(0)).unwrap();
    let half = [[1, 0, 1 << 63, 1], [1, 0, 1 << 63, 0]];
    append_shapes(&mut cache, 0, None, half).unwrap();
    assert_eq!(cache.k(0).unwrap().shape(), [1, 0, 1 << 63, 1]);
    let error = append_shapes(&mut cache, 0, None, half).unwrap_err();
    assert_eq!(error, CacheFull { layer: 0, sequence: 0, len: 1 << 63, tokens: 1 << 63, capacity: 1 << 63 });
}
