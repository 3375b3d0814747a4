//! The sizes of a layer: [`MultiHeadShape`].

use crate::{AttentionError, KvCacheShape};

/// The sizes of a [`MultiHeadAttention`](crate::MultiHeadAttention). Start from [`new`](Self::new) and change what differs:
///
/// ```
/// use fused_attention::MultiHeadShape;
/// // Llama 3 8B: 32 query heads of 128 on 8 KV heads.
/// let shape = MultiHeadShape { num_kv_heads: 8, ..MultiHeadShape::new(4096, 32)? };
/// assert_eq!((shape.head_dim, shape.value_dim), (128, 128));
/// # Ok::<(), fused_attention::AttentionError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MultiHeadShape {
    /// Features of a token, of the input and of the output.
    pub d_model: usize,
    /// Features of what K and V are projected from: `d_model`, unless another model makes the source of cross-attention.
    pub d_source: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Features of a head of Q and K, at least 1.
    pub head_dim: usize,
    /// Features of a head of V.
    pub value_dim: usize,
}

impl MultiHeadShape {
    /// The textbook's: as many KV heads as query heads, of `d_model / num_heads` features.
    ///
    /// # Errors
    /// [`AttentionError::ModelNotDivisible`].
    pub fn new(d_model: usize, num_heads: usize) -> Result<Self, AttentionError> {
        if num_heads == 0 || !d_model.is_multiple_of(num_heads) {
            return Err(AttentionError::ModelNotDivisible { d_model, num_heads });
        }
        let dim = d_model / num_heads;
        let num_kv_heads = num_heads;
        Ok(Self { d_model, d_source: d_model, num_heads, num_kv_heads, head_dim: dim, value_dim: dim })
    }

    /// The cache that [`step`](crate::MultiHeadAttention::step) wants, for so many such layers and sequences.
    pub fn kv_cache_shape(&self, num_layers: usize, batch: usize) -> KvCacheShape {
        let Self { num_kv_heads, head_dim, value_dim, .. } = *self;
        KvCacheShape { num_layers, batch, num_kv_heads, head_dim, value_dim }
    }

    /// `[in, out]` features of each projection; fit, once [`check`](Self::check) was asked.
    pub(super) fn q(&self) -> [usize; 2] {
        [self.d_model, self.num_heads * self.head_dim]
    }

    pub(super) fn k(&self) -> [usize; 2] {
        [self.d_source, self.num_kv_heads * self.head_dim]
    }

    pub(super) fn v(&self) -> [usize; 2] {
        [self.d_source, self.num_kv_heads * self.value_dim]
    }

    pub(super) fn out(&self) -> [usize; 2] {
        [self.num_heads * self.value_dim, self.d_model]
    }

    /// The three projections to heads in one.
    pub(super) fn qkv(&self) -> Result<[usize; 2], AttentionError> {
        let Self { d_model, d_source, .. } = *self;
        if d_source != d_model {
            return Err(AttentionError::FusedSourceMismatch { d_model, d_source });
        }
        Ok([d_model, self.q()[1] + self.k()[1] + self.v()[1]])
    }

    /// The rules within a shape.
    pub(super) fn check(&self) -> Result<(), AttentionError> {
        let Self { num_heads, num_kv_heads, head_dim, value_dim, .. } = *self;
        if num_heads == 0 || num_kv_heads == 0 || num_heads % num_kv_heads != 0 {
            return Err(AttentionError::HeadsNotDivisible { num_heads, num_kv_heads });
        }
        if head_dim == 0 {
            return Err(AttentionError::ZeroHeadDim { shape: [0, num_heads, 0, 0] });
        }
        // All outputs together; no projection has more.
        let outputs = num_heads.checked_mul(head_dim).and_then(|q| {
            let kv = num_kv_heads.checked_mul(head_dim.checked_add(value_dim)?)?;
            q.checked_add(kv)?.checked_add(num_heads.checked_mul(value_dim)?)
        });
        match outputs {
            Some(_) => Ok(()),
            None => {
                Err(AttentionError::SizeOverflow { shape: [1, num_heads, 1, head_dim], strides: [0, head_dim, 0, 1] })
            }
        }
    }
}
