//! What a layer reads: [`MultiHeadInputs`].

use super::MultiHeadShape;
use super::product::{Rows, RowsMut};
use crate::{AttentionError, TensorView};

/// What [`MultiHeadAttention`](crate::MultiHeadAttention) reads besides its weights.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct MultiHeadInputs<'a> {
    /// What Q is projected from, contiguous `[batch, q_len, d_model]`.
    pub x: &'a [f32],
    /// `[batch, q_len, d_model]`.
    pub x_shape: [usize; 3],
    /// What K and V are projected from, contiguous `[batch, kv_len, d_source]`, and that shape. `None`: `x`.
    pub source: Option<(&'a [f32], [usize; 3])>,
    /// Tokens of each sequence, where they are fewer than `kv_len`. See [`with_lens`](Self::with_lens).
    pub lens: Option<&'a [usize]>,
    /// Added to the positions of a [`Rotary`](crate::Rotary). See [`with_first_position`](Self::with_first_position).
    pub first_position: usize,
    /// As [`AttentionInputs::mask`](crate::AttentionInputs::mask).
    pub mask: Option<TensorView<'a, bool>>,
    /// As [`AttentionInputs::bias`](crate::AttentionInputs::bias).
    pub bias: Option<TensorView<'a, f32>>,
    /// As [`AttentionInputs::alibi_slopes`](crate::AttentionInputs::alibi_slopes).
    pub alibi_slopes: Option<&'a [f32]>,
    /// As [`AttentionInputs::sinks`](crate::AttentionInputs::sinks).
    pub sinks: Option<&'a [f32]>,
}

impl<'a> MultiHeadInputs<'a> {
    /// Tokens of `shape` `[batch, q_len, d_model]`, one row of `d_model` features behind the other, for self-attention.
    pub fn new(x: &'a [f32], shape: [usize; 3]) -> Self {
        Self {
            x,
            x_shape: shape,
            source: None,
            lens: None,
            first_position: 0,
            mask: None,
            bias: None,
            alibi_slopes: None,
            sinks: None,
        }
    }

    /// Cross-attention: keys and values come from these tokens, `[batch, kv_len, d_source]`. A rotary embedding counts their positions from 0.
    pub fn with_source(mut self, source: &'a [f32], shape: [usize; 3]) -> Self {
        self.source = Some((source, shape));
        self
    }

    /// Gives each sequence of the batch its own number of tokens; what lies beyond is padding, on the side that
    /// [`AttentionConfig::kv_padding`](crate::AttentionConfig::kv_padding) says, and may hold anything.
    ///
    /// In self-attention they are the tokens of `x`: each sequence gets what it would get alone, and the rows of its padding are zeros in the output. A
    /// [step](crate::MultiHeadAttention::step) appends no more of each sequence to the cache. In cross-attention they are the tokens of the
    /// source, and every row of `x` counts.
    pub fn with_lens(mut self, lens: &'a [usize]) -> Self {
        self.lens = Some(lens);
        self
    }

    /// Where the first token of each sequence stands, for a [`Rotary`](crate::Rotary): token `i` is turned by position `first_position + i`, in a
    /// [step](crate::MultiHeadAttention::step) by as many more as the cache holds. Default: 0.
    pub fn with_first_position(mut self, first_position: usize) -> Self {
        self.first_position = first_position;
        self
    }

    /// Hides keys, as [`AttentionInputs::with_mask`](crate::AttentionInputs::with_mask).
    pub fn with_mask(mut self, mask: TensorView<'a, bool>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Adds to the scores, as [`AttentionInputs::with_bias`](crate::AttentionInputs::with_bias).
    pub fn with_bias(mut self, bias: TensorView<'a, f32>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// ALiBi, as [`AttentionInputs::with_alibi_slopes`](crate::AttentionInputs::with_alibi_slopes).
    pub fn with_alibi_slopes(mut self, slopes: &'a [f32]) -> Self {
        self.alibi_slopes = Some(slopes);
        self
    }

    /// Attention sinks, as [`AttentionInputs::with_sinks`](crate::AttentionInputs::with_sinks).
    pub fn with_sinks(mut self, sinks: &'a [f32]) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// The rules between the tokens and a layer.
    pub(super) fn check(&self, shape: &MultiHeadShape) -> Result<(), AttentionError> {
        self.check_x(shape.d_model)?;
        let (source, source_shape) = self.source();
        check_features("source", source, source_shape, shape.d_source)?;
        let ([batch, ..], [found, kv_len, _]) = (self.x_shape, source_shape);
        if found != batch {
            return Err(AttentionError::BatchMismatch { tensor: "source", expected: batch, found });
        }
        if let Some(lens) = self.lens {
            if lens.len() != batch {
                return Err(AttentionError::KvLensLenMismatch { expected: batch, found: lens.len() });
            }
            if let Some((index, &found)) = lens.iter().enumerate().find(|&(_, &len)| len > kv_len) {
                return Err(AttentionError::KvLenTooLong { index, found, kv_len });
            }
        }
        Ok(())
    }

    pub(super) fn check_x(&self, d_model: usize) -> Result<(), AttentionError> {
        check_features("x", self.x, self.x_shape, d_model)
    }

    /// What K and V are projected from, with its shape.
    pub(super) fn source(&self) -> (&'a [f32], [usize; 3]) {
        self.source.unwrap_or((self.x, self.x_shape))
    }

    /// Once the sizes are checked.
    pub(super) fn x_rows(&self) -> Rows<'a> {
        rows(self.x, self.x_shape)
    }

    pub(super) fn source_rows(&self) -> Rows<'a> {
        let (source, shape) = self.source();
        rows(source, shape)
    }

    /// An output of as many tokens and features as `x`.
    pub(super) fn out_rows<'o>(&self, out: &'o mut [f32]) -> RowsMut<'o> {
        let [batch, q_len, d_model] = self.x_shape;
        RowsMut { data: out, count: batch * q_len, stride: d_model }
    }
}

fn rows(data: &[f32], [batch, len, features]: [usize; 3]) -> Rows<'_> {
    Rows { data, count: batch * len, stride: features }
}

fn check_features(
    tensor: &'static str,
    data: &[f32],
    shape: [usize; 3],
    features: usize,
) -> Result<(), AttentionError> {
    if shape[2] != features {
        return Err(AttentionError::FeaturesMismatch { tensor, expected: features, found: shape[2] });
    }
    check_features_len(tensor, data, shape)
}

/// The slice must be as long as its shape says.
pub(super) fn check_features_len(tensor: &'static str, data: &[f32], shape: [usize; 3]) -> Result<(), AttentionError> {
    if shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size)) != Some(data.len()) {
        return Err(AttentionError::FeaturesLenMismatch { tensor, shape, len: data.len() });
    }
    Ok(())
}
