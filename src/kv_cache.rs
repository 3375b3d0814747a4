//! Keys and values of the tokens so far, for generation: [`KvCache`].

mod head_streams;
mod huge_buffer;

use std::fmt;
use std::ops::Range;

use crate::{AttentionError, Element, TensorView};
use head_streams::HeadStreams;

/// The keys and values of past tokens, for one layer or all layers of a model, stored as `T`: f32, or f16 or bf16 for half
/// the memory and, since decoding waits for memory, up to twice the speed.
///
/// Every sequence of every layer has a length of its own. [`append`](Self::append) adds the new tokens of a step to one layer,
/// before or between the attention calls of the step; [`k`](Self::k) and [`v`](Self::v) are views of that layer for
/// [`attention`](crate::attention()), without a copy. Sequences may be of different lengths (a ragged batch): then the
/// views are padded on the right, and [`lens`](Self::lens) says by how much.
///
/// ```
/// use fused_attention::*;
/// let (batch, heads, kv_heads, dim) = (1, 8, 2, 64);
/// let shape = KvCacheShape { num_layers: 1, batch, num_kv_heads: kv_heads, head_dim: dim, value_dim: dim };
/// let mut cache = KvCache::<f16>::new(&shape, Capacity::Fixed(1024))?;
///
/// // A prompt of 5 tokens, then one token at a time. New tokens may be of another type than the cache.
/// for new_tokens in [5, 1, 1] {
///     let q = vec![0.1f32; batch * heads * new_tokens * dim];
///     let kv = vec![0.2f32; batch * kv_heads * new_tokens * dim];
///     let new = TensorView::from_bhsd(&kv, [batch, kv_heads, new_tokens, dim])?;
///     cache.append(0, &new, &new)?;
///
///     let q = TensorView::from_bhsd(&q, [batch, heads, new_tokens, dim])?;
///     let inputs = AttentionInputs::new(q, cache.k(0)?, cache.v(0)?);
///     let out = attention(&inputs, &AttentionConfig::causal())?; // the last query sees every key
///     assert_eq!(out.len(), batch * heads * new_tokens * dim);
/// }
/// assert_eq!(cache.len(0, 0)?, 7);
/// cache.truncate(6)?; // the last token was rejected
/// # Ok::<(), AttentionError>(())
/// ```
///
/// # Memory
/// Each layer has a buffer for its keys, `[batch, num_kv_heads, capacity, head_dim]` in memory order, and one for its values,
/// `[batch, num_kv_heads, capacity, value_dim]`: what a KV head has seen is one contiguous stream, which begins at a multiple of
/// 64 bytes. Buffers from 2 MiB on are aligned to 2 MiB and, on Linux, advised to lie on huge pages (`madvise`; the setting
/// `/sys/kernel/mm/transparent_hugepage/enabled` decides whether that is heard). The system provides pages as tokens come in, so a large
/// capacity that is not used costs address space only. Appending to a cache with room allocates nothing.
///
/// # Errors
/// Where an operation returns an error, it has changed nothing.
pub struct KvCache<T: Element> {
    shape: KvCacheShape,
    capacity: Capacity,
    layers: Vec<Layer<T>>,
    /// Tokens held, `[num_layers, batch]`.
    lens: Vec<usize>,
}

/// The sizes of a [`KvCache`], but for its capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvCacheShape {
    /// Attention layers; 1 for a cache of one layer.
    pub num_layers: usize,
    /// Independent sequences.
    pub batch: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Features of the keys, at least 1.
    pub head_dim: usize,
    /// Features of the values. May be 0, for values that are a part of the keys (multi-head latent attention).
    pub value_dim: usize,
}

/// How many tokens a [`KvCache`] holds for each sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capacity {
    /// So many; more are an error.
    Fixed(usize),
    /// So many at first. A layer that has no room left doubles its capacity (or more, if an append needs more), which copies its
    /// tokens to new memory; while it does, the layer is held twice.
    Growing(usize),
}

struct Layer<T> {
    k: HeadStreams<T>,
    v: HeadStreams<T>,
    /// Tokens for each sequence.
    capacity: usize,
}

impl<T: Element> Layer<T> {
    fn new(shape: &KvCacheShape, capacity: usize) -> Result<Self, AttentionError> {
        let KvCacheShape { batch, num_kv_heads, head_dim, value_dim, .. } = *shape;
        let k = HeadStreams::new([batch, num_kv_heads, capacity, head_dim])?;
        let v = HeadStreams::new([batch, num_kv_heads, capacity, value_dim])?;
        Ok(Self { k, v, capacity })
    }
}

impl<T: Element> KvCache<T> {
    /// An empty cache.
    ///
    /// # Errors
    /// [`AttentionError::ZeroHeadDim`], [`AttentionError::SizeOverflow`], [`AttentionError::AllocationFailed`].
    pub fn new(shape: &KvCacheShape, capacity: Capacity) -> Result<Self, AttentionError> {
        let KvCacheShape { num_layers, batch, num_kv_heads, head_dim, .. } = *shape;
        let (Capacity::Fixed(tokens) | Capacity::Growing(tokens)) = capacity;
        if head_dim == 0 {
            return Err(AttentionError::ZeroHeadDim { shape: [batch, num_kv_heads, tokens, 0] });
        }
        let lens_len = num_layers.saturating_mul(batch); // where it saturates, no memory is to be had either
        let mut lens = try_vec(lens_len)?;
        lens.resize(lens_len, 0);
        let mut layers = try_vec(num_layers)?;
        for _ in 0..num_layers {
            layers.push(Layer::new(shape, tokens)?);
        }
        Ok(Self { shape: *shape, capacity, layers, lens })
    }

    /// The sizes that it was made with.
    pub fn shape(&self) -> &KvCacheShape {
        &self.shape
    }

    /// Tokens that each sequence of this layer has memory for. Layers of a growing cache grow one by one.
    ///
    /// # Errors
    /// [`AttentionError::LayerOutOfRange`].
    pub fn capacity(&self, layer: usize) -> Result<usize, AttentionError> {
        self.check_layer(layer)?;
        Ok(self.layers[layer].capacity)
    }

    /// Tokens that this layer holds of this sequence.
    ///
    /// # Errors
    /// [`AttentionError::LayerOutOfRange`], [`AttentionError::SequenceOutOfRange`].
    pub fn len(&self, layer: usize, sequence: usize) -> Result<usize, AttentionError> {
        let lens = self.lens(layer)?;
        self.check_sequence(sequence)?;
        Ok(lens[sequence])
    }

    /// Tokens that this layer holds of each sequence, `[batch]`: the lengths of the keys in [`k`](Self::k) and
    /// [`v`](Self::v), which are padded on the right to the longest.
    ///
    /// # Errors
    /// [`AttentionError::LayerOutOfRange`].
    pub fn lens(&self, layer: usize) -> Result<&[usize], AttentionError> {
        self.check_layer(layer)?;
        Ok(&self.lens[self.lens_of(layer)])
    }

    /// The keys of this layer, `[batch, num_kv_heads, longest of lens, head_dim]`. Beyond the length of a shorter sequence lie
    /// zeros or tokens that were truncated.
    ///
    /// # Errors
    /// [`AttentionError::LayerOutOfRange`].
    pub fn k(&self, layer: usize) -> Result<TensorView<'_, T>, AttentionError> {
        let longest = self.longest(layer)?;
        self.layers[layer].k.view(0..self.shape.batch, longest)
    }

    /// The values of this layer, `[batch, num_kv_heads, longest of lens, value_dim]`, padded as [`k`](Self::k).
    ///
    /// # Errors
    /// [`AttentionError::LayerOutOfRange`].
    pub fn v(&self, layer: usize) -> Result<TensorView<'_, T>, AttentionError> {
        let longest = self.longest(layer)?;
        self.layers[layer].v.view(0..self.shape.batch, longest)
    }

    /// The keys of one sequence in this layer, `[1, num_kv_heads, len, head_dim]`: no padding.
    ///
    /// # Errors
    /// [`AttentionError::LayerOutOfRange`], [`AttentionError::SequenceOutOfRange`].
    pub fn k_of(&self, layer: usize, sequence: usize) -> Result<TensorView<'_, T>, AttentionError> {
        let len = self.len(layer, sequence)?;
        self.layers[layer].k.view(sequence..sequence + 1, len)
    }

    /// The values of one sequence in this layer, `[1, num_kv_heads, len, value_dim]`: no padding.
    ///
    /// # Errors
    /// [`AttentionError::LayerOutOfRange`], [`AttentionError::SequenceOutOfRange`].
    pub fn v_of(&self, layer: usize, sequence: usize) -> Result<TensorView<'_, T>, AttentionError> {
        let len = self.len(layer, sequence)?;
        self.layers[layer].v.view(sequence..sequence + 1, len)
    }

    /// Adds the same number of tokens to every sequence of this layer, each behind its last one: `k` is `[batch,
    /// num_kv_heads, tokens, head_dim]`, `v` `[batch, num_kv_heads, tokens, value_dim]`, of any strides. Each element is
    /// rounded to the nearest `T`.
    ///
    /// # Errors
    /// [`AttentionError::LayerOutOfRange`], [`AttentionError::AppendShapeMismatch`], [`AttentionError::KvLenMismatch`];
    /// [`AttentionError::CacheFull`] where the capacity is fixed, else [`AttentionError::SizeOverflow`] and
    /// [`AttentionError::AllocationFailed`].
    pub fn append<S: Element<Acc = T::Acc>>(
        &mut self,
        layer: usize,
        k: &TensorView<'_, S>,
        v: &TensorView<'_, S>,
    ) -> Result<(), AttentionError> {
        self.append_range(layer, 0..self.shape.batch, k, v)
    }

    /// Adds tokens to one sequence of this layer: `k` is `[1, num_kv_heads, tokens, head_dim]`, `v` `[1, num_kv_heads, tokens,
    /// value_dim]`. For prompts of different lengths, and sequences that start while others go on.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`AttentionError::SequenceOutOfRange`].
    pub fn append_to<S: Element<Acc = T::Acc>>(
        &mut self,
        layer: usize,
        sequence: usize,
        k: &TensorView<'_, S>,
        v: &TensorView<'_, S>,
    ) -> Result<(), AttentionError> {
        self.check_layer(layer)?;
        self.check_sequence(sequence)?;
        self.append_range(layer, sequence..sequence + 1, k, v)
    }

    /// Forgets all but the first `new_len` tokens of every sequence, in all layers.
    ///
    /// # Errors
    /// [`AttentionError::TruncateBeyondLen`] where a sequence holds fewer in some layer.
    pub fn truncate(&mut self, new_len: usize) -> Result<(), AttentionError> {
        self.truncate_range(0..self.shape.batch, new_len)
    }

    /// Forgets all but the first `new_len` tokens of one sequence, in all layers; with 0, its place is free for another.
    ///
    /// # Errors
    /// [`AttentionError::SequenceOutOfRange`]; [`AttentionError::TruncateBeyondLen`] where it holds fewer in some layer.
    pub fn truncate_sequence(&mut self, sequence: usize, new_len: usize) -> Result<(), AttentionError> {
        self.check_sequence(sequence)?;
        self.truncate_range(sequence..sequence + 1, new_len)
    }

    /// Forgets all tokens; keeps the memory.
    pub fn clear(&mut self) {
        self.lens.fill(0);
    }

    /// Forgets the last tokens of a sequence in one layer, which the caller has just appended.
    #[cfg(feature = "multi-head")]
    pub(crate) fn retract(&mut self, layer: usize, sequence: usize, tokens: usize) {
        self.lens[layer * self.shape.batch + sequence] -= tokens;
    }

    fn append_range<S: Element<Acc = T::Acc>>(
        &mut self,
        layer: usize,
        sequences: Range<usize>,
        k: &TensorView<'_, S>,
        v: &TensorView<'_, S>,
    ) -> Result<(), AttentionError> {
        self.check_layer(layer)?;
        let KvCacheShape { num_kv_heads, head_dim, value_dim, .. } = self.shape;
        let tokens = k.shape()[2];
        for (tensor, found, dim) in [("k", k.shape(), head_dim), ("v", v.shape(), value_dim)] {
            let expected = [sequences.len(), num_kv_heads, found[2], dim];
            if found != expected {
                return Err(AttentionError::AppendShapeMismatch { tensor, expected, found });
            }
        }
        if v.shape()[2] != tokens {
            return Err(AttentionError::KvLenMismatch { k: tokens, v: v.shape()[2] });
        }
        self.make_room(layer, sequences.clone(), tokens)?;
        let first = sequences.start;
        for sequence in sequences {
            let len = &mut self.lens[layer * self.shape.batch + sequence];
            self.layers[layer].k.write(sequence, *len, k, sequence - first);
            self.layers[layer].v.write(sequence, *len, v, sequence - first);
            *len += tokens; // fits: `make_room` compared the sum with the capacity
        }
        Ok(())
    }

    /// Sees to it that so many tokens fit behind the last one of each of these sequences.
    fn make_room(&mut self, layer: usize, sequences: Range<usize>, tokens: usize) -> Result<(), AttentionError> {
        let capacity = self.layers[layer].capacity;
        let lens = &self.lens[self.lens_of(layer)];
        let Some(fullest) = sequences.max_by_key(|&sequence| lens[sequence]) else {
            return Ok(()); // an empty batch
        };
        let len = lens[fullest];
        let needed = len.checked_add(tokens);
        if needed.is_some_and(|needed| needed <= capacity) {
            return Ok(());
        }
        match (self.capacity, needed) {
            (Capacity::Growing(_), Some(needed)) => self.grow(layer, needed.max(capacity.saturating_mul(2))),
            _ => Err(AttentionError::CacheFull { layer, sequence: fullest, len, tokens, capacity }),
        }
    }

    /// Moves a layer's tokens to larger memory.
    fn grow(&mut self, layer: usize, capacity: usize) -> Result<(), AttentionError> {
        let mut grown = Layer::new(&self.shape, capacity)?;
        let old = &self.layers[layer];
        for (sequence, &len) in self.lens[self.lens_of(layer)].iter().enumerate() {
            grown.k.copy_sequence(&old.k, sequence, len);
            grown.v.copy_sequence(&old.v, sequence, len);
        }
        self.layers[layer] = grown;
        Ok(())
    }

    fn truncate_range(&mut self, sequences: Range<usize>, new_len: usize) -> Result<(), AttentionError> {
        for layer in 0..self.shape.num_layers {
            for sequence in sequences.clone() {
                let len = self.lens[layer * self.shape.batch + sequence];
                if new_len > len {
                    return Err(AttentionError::TruncateBeyondLen { layer, sequence, len, new_len });
                }
            }
        }
        for layer in 0..self.shape.num_layers {
            let of_layer = self.lens_of(layer);
            self.lens[of_layer][sequences.clone()].fill(new_len);
        }
        Ok(())
    }

    fn longest(&self, layer: usize) -> Result<usize, AttentionError> {
        Ok(self.lens(layer)?.iter().copied().max().unwrap_or(0))
    }

    /// Where in `lens` this layer's are.
    fn lens_of(&self, layer: usize) -> Range<usize> {
        let batch = self.shape.batch;
        layer * batch..(layer + 1) * batch
    }

    fn check_layer(&self, layer: usize) -> Result<(), AttentionError> {
        let num_layers = self.shape.num_layers;
        if layer < num_layers { Ok(()) } else { Err(AttentionError::LayerOutOfRange { layer, num_layers }) }
    }

    fn check_sequence(&self, sequence: usize) -> Result<(), AttentionError> {
        let batch = self.shape.batch;
        if sequence < batch { Ok(()) } else { Err(AttentionError::SequenceOutOfRange { sequence, batch }) }
    }
}

impl<T: Element> fmt::Debug for KvCache<T> {
    /// Sizes and lengths, not the tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KvCache { shape, capacity, lens, .. } = self;
        f.debug_struct("KvCache")
            .field("shape", shape)
            .field("capacity", capacity)
            .field("lens", lens)
            .finish_non_exhaustive()
    }
}

/// An empty vector with room for `len`.
fn try_vec<E>(len: usize) -> Result<Vec<E>, AttentionError> {
    let mut vec = Vec::new();
    let bytes = len.saturating_mul(size_of::<E>());
    vec.try_reserve_exact(len).map_err(|_| AttentionError::AllocationFailed { bytes })?;
    Ok(vec)
}
