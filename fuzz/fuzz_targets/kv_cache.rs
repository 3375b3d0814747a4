//! A cache under arbitrary operations against a model of it: each does what the model says, or fails where the model says so and
//! changes nothing. Absurd sizes give an error.

#![no_main]

use arbitrary::Arbitrary;
use fused_attention::{AttentionError, Capacity, Element, KvCache, KvCacheShape, TensorView, bf16, f16};
use fused_attention_fuzz::{Memory, Number, Size, offsets, reach};
use libfuzzer_sys::fuzz_target;
use std::any::TypeId;
use std::ops::Range;

/// Bytes of one buffer that are really allocated.
const MOST_BYTES: usize = 1 << 20;
/// From here on the allocator refuses (AddressSanitizer has 1 TiB to give). Between the two nothing is tried.
const ABSURD_BYTES: usize = 1 << 41;
/// Tokens of one append that the model follows.
const MOST_TOKENS: usize = 64;

#[derive(Debug, Arbitrary)]
struct Case {
    types: u8,
    num_layers: Size,
    batch: Size,
    num_kv_heads: Size,
    head_dim: Size,
    value_dim: Size,
    capacity: Size,
    is_growing: bool,
    operations: Vec<Operation>,
}

#[derive(Debug, Arbitrary)]
enum Operation {
    Append(Append),
    AppendTo(u8, Append),
    Truncate(Length),
    TruncateSequence(u8, Length),
    Clear,
}

#[derive(Debug, Arbitrary)]
struct Append {
    layer: u8,
    tokens: Size,
    k: Memory,
    v: Memory,
    /// Tensor, axis, and another size for it.
    change: Option<(bool, u8, Size)>,
    seed: u64,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Length {
    Within(u8),
    Any(Size),
}

fuzz_target!(|case: Case| {
    match case.types % 10 {
        0 => run::<f32, f32>(&case),
        1 => run::<f16, f16>(&case),
        2 => run::<bf16, bf16>(&case),
        3 => run::<f64, f64>(&case),
        4 => run::<f16, f32>(&case),
        5 => run::<bf16, f32>(&case),
        6 => run::<f32, f16>(&case),
        7 => run::<f32, bf16>(&case),
        8 => run::<f16, bf16>(&case),
        _ => run::<bf16, f16>(&case),
    };
});

/// One sequence of one layer.
#[derive(Clone, Default)]
struct Sequence<T> {
    len: usize,
    /// Keys and values, `[len][num_kv_heads][dim]`.
    data: [Vec<T>; 2],
}

struct Model<T> {
    shape: KvCacheShape,
    is_growing: bool,
    /// Before the last operation, by layer.
    capacities: Vec<usize>,
    /// `[num_layers][batch]`
    sequences: Vec<Vec<Sequence<T>>>,
}

/// Bytes of the two buffers of a layer, each head from a cache line on; `None` where they, or the elements of a head, exceed `usize`.
fn buffer_bytes<T>(shape: &KvCacheShape, capacity: usize) -> [Option<usize>; 2] {
    [shape.head_dim, shape.value_dim].map(|dim| {
        let stream = capacity.checked_mul(dim)?.checked_next_multiple_of(64 / size_of::<T>())?;
        stream.checked_mul(shape.num_kv_heads)?.checked_mul(shape.batch)?.checked_mul(size_of::<T>())
    })
}

fn are_small([k, v]: [Option<usize>; 2]) -> bool {
    [k, v].iter().all(|bytes| bytes.is_some_and(|bytes| bytes <= MOST_BYTES))
}

/// Whether so much may be asked for: little, or so much that it must be refused.
fn may_be_tried([k, v]: [Option<usize>; 2]) -> bool {
    let is_absurd = |bytes: Option<usize>| bytes.is_none_or(|bytes| bytes >= ABSURD_BYTES);
    are_small([k, v]) || is_absurd(k) || are_small([k, k]) && is_absurd(v)
}

/// `T` in the cache, `S` in what is appended.
fn run<T: Number, S: Number + Element<Acc = T::Acc>>(case: &Case) -> Option<()> {
    let [num_layers, batch, num_kv_heads, head_dim, value_dim, capacity] =
        [case.num_layers, case.batch, case.num_kv_heads, case.head_dim, case.value_dim, case.capacity].map(Size::get);
    let shape = KvCacheShape { num_layers, batch, num_kv_heads, head_dim, value_dim };
    let layer_bytes = buffer_bytes::<T>(&shape, capacity);
    let lists = [Some(num_layers.saturating_mul(batch.max(16)).saturating_mul(16)); 2];
    if !may_be_tried(layer_bytes) || !may_be_tried(lists) {
        return None;
    }
    if are_small(layer_bytes) && num_layers > 16 && layer_bytes.iter().flatten().sum::<usize>() > 0 {
        return None;
    }
    let kind = if case.is_growing { Capacity::Growing(capacity) } else { Capacity::Fixed(capacity) };
    let mut cache = match KvCache::<T>::new(&shape, kind) {
        Ok(cache) => cache,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            let is_small = are_small(layer_bytes) && are_small(lists);
            assert!(head_dim == 0 || !is_small, "{error}: {shape:?}");
            return None;
        }
    };
    assert!(head_dim > 0 && cache.shape() == &shape);
    if num_layers.max(batch) > 1 << 12 {
        // Lists longer than the model's: of nothing, or nearly.
        cache.clear();
        let _ = (cache.truncate(0), cache.k(0), cache.v(num_layers - num_layers.min(1)), cache.len(0, batch / 2));
        return None;
    }
    let mut model = Model {
        shape,
        is_growing: case.is_growing,
        capacities: vec![capacity; num_layers],
        sequences: vec![vec![Sequence { len: 0, data: [Vec::new(), Vec::new()] }; batch]; num_layers],
    };
    model.check(&cache);
    for operation in case.operations.iter().take(16) {
        model.apply::<S>(&mut cache, operation)?;
        model.check(&cache);
    }
    assert!(!format!("{cache:?}").is_empty());
    Some(())
}

impl<T: Number> Model<T> {
    /// Does it to both. `None`: not to be tried.
    fn apply<S: Number + Element<Acc = T::Acc>>(
        &mut self,
        cache: &mut KvCache<T>,
        operation: &Operation,
    ) -> Option<()> {
        let KvCacheShape { num_layers, batch, .. } = self.shape;
        // One past the last is an error.
        let sequence = |choice: u8| usize::from(choice) % batch.min(200).saturating_add(1);
        match operation {
            Operation::Append(append) => self.append::<S>(cache, append, 0..batch, None),
            Operation::AppendTo(choice, append) => {
                let sequence = sequence(*choice);
                self.append::<S>(cache, append, sequence..sequence + 1, Some(sequence))
            }
            Operation::Truncate(len) => {
                let len = self.length(*len, 0..batch);
                let result = cache.truncate(len);
                self.truncate(result, 0..batch, len);
                Some(())
            }
            Operation::TruncateSequence(choice, len) => {
                let sequence = sequence(*choice);
                let len = self.length(*len, 0..batch);
                let result = cache.truncate_sequence(sequence, len);
                if sequence >= batch {
                    assert_eq!(result, Err(AttentionError::SequenceOutOfRange { sequence, batch }));
                } else {
                    self.truncate(result, sequence..sequence + 1, len);
                }
                Some(())
            }
            Operation::Clear => {
                cache.clear();
                (0..num_layers).for_each(|layer| self.cut(layer, 0..batch, 0));
                Some(())
            }
        }
    }

    fn length(&self, length: Length, sequences: Range<usize>) -> usize {
        let longest =
            self.sequences.iter().flat_map(|layer| &layer[sequences.clone()]).map(|s| s.len).max().unwrap_or(0);
        match length {
            Length::Within(n) => usize::from(n) % longest.saturating_add(1).max(1),
            Length::Any(size) => size.get(),
        }
    }

    fn truncate(&mut self, result: Result<(), AttentionError>, sequences: Range<usize>, new_len: usize) {
        let mut all = self.sequences.iter().flat_map(|layer| &layer[sequences.clone()]);
        let is_possible = all.all(|sequence| sequence.len >= new_len);
        assert_eq!(result.is_ok(), is_possible, "{result:?}");
        if is_possible {
            (0..self.shape.num_layers).for_each(|layer| self.cut(layer, sequences.clone(), new_len));
        }
    }

    fn cut(&mut self, layer: usize, sequences: Range<usize>, new_len: usize) {
        let KvCacheShape { num_kv_heads, head_dim, value_dim, .. } = self.shape;
        for sequence in &mut self.sequences[layer][sequences] {
            sequence.len = new_len;
            for (data, dim) in sequence.data.iter_mut().zip([head_dim, value_dim]) {
                data.truncate(new_len.saturating_mul(num_kv_heads).saturating_mul(dim));
            }
        }
    }

    fn append<S: Number + Element<Acc = T::Acc>>(
        &mut self,
        cache: &mut KvCache<T>,
        append: &Append,
        sequences: Range<usize>,
        sequence: Option<usize>,
    ) -> Option<()> {
        let KvCacheShape { num_layers, batch, num_kv_heads, head_dim, value_dim } = self.shape;
        let layer = usize::from(append.layer) % num_layers.min(200).saturating_add(1);
        let tokens = append.tokens.get();
        let mut shapes =
            [[sequences.len(), num_kv_heads, tokens, head_dim], [sequences.len(), num_kv_heads, tokens, value_dim]];
        if let Some((which, axis, size)) = append.change {
            shapes[usize::from(which)][usize::from(axis % 4)] = size.get();
        }
        let mut state = append.seed | 1;
        let mut data = [Vec::new(), Vec::new()];
        let mut strides = [[0; 4]; 2];
        for which in 0..2 {
            strides[which] = [append.k, append.v][which].input_strides(shapes[which])?;
            let len = reach(shapes[which], strides[which]).filter(|&len| len <= MOST_BYTES / 16)?;
            if !shapes[which].contains(&0) && shapes[which][2] > MOST_TOKENS {
                return None;
            }
            data[which] = (0..len).map(|_| random(&mut state)).collect();
        }
        let view = |which: usize| TensorView::<S>::with_strides(&data[which], shapes[which], strides[which]);
        let (k, v) = (view(0).expect("long enough"), view(1).expect("long enough"));

        let is_inside = layer < num_layers && sequences.end <= batch;
        let fits_together = shapes
            == [
                [sequences.len(), num_kv_heads, shapes[0][2], head_dim],
                [sequences.len(), num_kv_heads, shapes[0][2], value_dim],
            ];
        let mut is_full = false;
        let mut grows_to = None;
        if is_inside && fits_together {
            let longest = self.sequences[layer][sequences.clone()].iter().map(|s| s.len).max();
            if let Some(len) = longest {
                let needed = len.checked_add(shapes[0][2]);
                is_full = needed.is_none_or(|needed| needed > self.capacities[layer]);
                grows_to = needed.map(|needed| needed.max(self.capacities[layer].saturating_mul(2)));
            }
        }
        let bytes = grows_to.map_or([None; 2], |capacity| buffer_bytes::<T>(&self.shape, capacity));
        if is_full && self.is_growing && !may_be_tried(bytes) {
            return None;
        }
        let result = match sequence {
            None => cache.append(layer, &k, &v),
            Some(sequence) => cache.append_to(layer, sequence, &k, &v),
        };
        if let Err(error) = &result {
            assert!(!error.to_string().is_empty());
        }
        let can_grow = self.is_growing && are_small(bytes);
        let expected = is_inside && fits_together && (!is_full || can_grow);
        assert_eq!(result.is_ok(), expected, "{result:?}: {:?} {shapes:?}", self.shape);
        if is_full && !self.is_growing {
            assert!(matches!(result, Err(AttentionError::CacheFull { .. })), "{result:?}");
        }
        if !expected {
            return Some(());
        }
        if is_full {
            self.capacities[layer] = grows_to?;
        }
        for (from, sequence) in self.sequences[layer][sequences].iter_mut().enumerate() {
            sequence.len += shapes[0][2];
            for which in 0..2 {
                // Token-major here, head-major there.
                let [_, heads, tokens, dim] = shapes[which];
                let [batch_stride, head_stride, token_stride, dim_stride] = strides[which];
                if dim == 0 || heads == 0 {
                    continue;
                }
                let token_order = offsets([1, tokens, heads, dim], [0, token_stride, head_stride, dim_stride]);
                let elements = token_order.map(|offset| stored::<T, S>(data[which][from * batch_stride + offset]));
                sequence.data[which].extend(elements);
            }
        }
        Some(())
    }

    /// Lengths, capacities and every element of every view.
    fn check(&self, cache: &KvCache<T>) {
        let KvCacheShape { num_layers, batch, num_kv_heads, head_dim, value_dim } = self.shape;
        for (layer, sequences) in self.sequences.iter().enumerate() {
            assert!(cache.lens(layer).unwrap().iter().eq(sequences.iter().map(|sequence| &sequence.len)));
            assert_eq!(cache.capacity(layer), Ok(self.capacities[layer]));
            let longest = sequences.iter().map(|sequence| sequence.len).max().unwrap_or(0);
            let views = [cache.k(layer).unwrap(), cache.v(layer).unwrap()];
            for (which, dim) in [head_dim, value_dim].into_iter().enumerate() {
                assert_eq!(views[which].shape(), [batch, num_kv_heads, longest, dim]);
                for (index, sequence) in sequences.iter().enumerate() {
                    let alone = [cache.k_of(layer, index).unwrap(), cache.v_of(layer, index).unwrap()][which];
                    assert_eq!(alone.shape(), [1, num_kv_heads, sequence.len, dim]);
                    for (i, expected) in sequence.data[which].iter().enumerate() {
                        let (token, head, d) = (i / dim / num_kv_heads, i / dim % num_kv_heads, i % dim);
                        for found in [views[which].get([index, head, token, d]), alone.get([0, head, token, d])] {
                            let found = found.expect("inside the view");
                            let is_same = found.bits() == expected.bits()
                                || found.to_f64().is_nan() && expected.to_f64().is_nan();
                            assert!(is_same, "layer {layer}, sequence {index}, element {i}: {found:?} {expected:?}");
                        }
                    }
                }
            }
        }
        assert!(cache.k(num_layers).is_err() && cache.v(usize::MAX).is_err());
        assert!(cache.lens(num_layers).is_err() && cache.capacity(num_layers).is_err());
        assert!(cache.len(0, batch).is_err() && cache.k_of(0, batch).is_err() && cache.v_of(0, usize::MAX).is_err());
    }
}

/// Any number: any bits one time in four.
fn random<S: Number>(state: &mut u64) -> S {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
    if bits >> 62 == 0 { S::from_low_bits(bits >> 8) } else { S::rounded((bits >> 20 & 0xffff) as f64 / 256.0 - 128.0) }
}

/// What the cache makes of it: the same bits, or the nearest number. (All types but f64 are exact in f64; f64 never changes its type.)
fn stored<T: Number, S: Number>(value: S) -> T {
    if TypeId::of::<T>() == TypeId::of::<S>() { T::from_low_bits(value.bits()) } else { T::rounded(value.to_f64()) }
}
