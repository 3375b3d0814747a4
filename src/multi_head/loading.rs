//! Weights from safetensors files.

use safetensors::SafeTensors;

use super::{MultiHeadAttention, MultiHeadShape, WeightStorage};
use crate::{AttentionError, Element};

/// The names of a projection's tensors in a safetensors file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProjectionNames<'a> {
    /// The matrix.
    pub weight: &'a str,
    /// Its bias, if it has one.
    pub bias: Option<&'a str>,
}

impl<'a> From<&'a str> for ProjectionNames<'a> {
    /// Without a bias.
    fn from(weight: &'a str) -> Self {
        Self { weight, bias: None }
    }
}

impl<'a> From<(&'a str, &'a str)> for ProjectionNames<'a> {
    /// Weight and bias.
    fn from((weight, bias): (&'a str, &'a str)) -> Self {
        Self { weight, bias: Some(bias) }
    }
}

impl<T: Element<Acc = f32>> MultiHeadAttention<'static, T> {
    /// Copies a layer's weights out of a safetensors file: those of Q, K, V and the output. The weights must be of type `T`; biases may be of any of the
    /// three.
    ///
    /// # Errors
    /// [`AttentionError::TensorMissing`], [`AttentionError::TensorShapeMismatch`], [`AttentionError::TensorTypeMismatch`], and as
    /// [`new`](Self::new).
    pub fn from_safetensors<'n>(
        tensors: &SafeTensors<'_>,
        shape: MultiHeadShape,
        storage: WeightStorage,
        names: [impl Into<ProjectionNames<'n>>; 4],
    ) -> Result<Self, AttentionError> {
        let _ = (tensors, shape, storage, names.map(Into::into));
        todo!()
    }

    /// As [`from_safetensors`](Self::from_safetensors), for a fused QKV weight and the output. See [`from_fused_qkv`](Self::from_fused_qkv).
    ///
    /// # Errors
    /// As [`from_safetensors`](Self::from_safetensors) and [`from_fused_qkv`](Self::from_fused_qkv).
    pub fn fused_from_safetensors<'n>(
        tensors: &SafeTensors<'_>,
        shape: MultiHeadShape,
        storage: WeightStorage,
        names: [impl Into<ProjectionNames<'n>>; 2],
    ) -> Result<Self, AttentionError> {
        let _ = (tensors, shape, storage, names.map(Into::into));
        todo!()
    }
}
