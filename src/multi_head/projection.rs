//! A matrix of weights with its bias: [`Projection`].

use std::borrow::Cow;

use crate::{AttentionError, Element};

/// How a matrix of weights lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightStorage {
    /// `[out, in]`: the weights of one output are neighbours, `y = x W^T + b`. PyTorch's `nn.Linear`.
    OutIn,
    /// `[in, out]`: `y = x W + b`, as textbooks write it. GPT-2's `Conv1D`, Flax, Keras.
    InOut,
}

/// A linear map of tokens, `y = x W + b`: weights of `f32`, `f16` or `bf16`, and a bias or none.
#[derive(Debug, Clone)]
pub struct Projection<'a, T: Clone = f32> {
    weight: Cow<'a, [T]>,
    storage: WeightStorage,
    /// `[in, out]`, however they are stored.
    shape: [usize; 2],
    bias: Option<Vec<f32>>,
}

impl<'a, T: Element<Acc = f32>> Projection<'a, T> {
    /// Weights stored `[out, in]`, as PyTorch's `nn.Linear` does; `shape` is given in that order. Takes a `Vec` or a slice.
    ///
    /// # Errors
    /// [`AttentionError::WeightLenMismatch`].
    pub fn from_out_in(weight: impl Into<Cow<'a, [T]>>, [out, input]: [usize; 2]) -> Result<Self, AttentionError> {
        Self::stored(weight.into(), WeightStorage::OutIn, [out, input])
    }

    /// Weights stored `[in, out]`, as textbooks write them; `shape` is given in that order. Takes a `Vec` or a slice.
    ///
    /// # Errors
    /// [`AttentionError::WeightLenMismatch`].
    pub fn from_in_out(weight: impl Into<Cow<'a, [T]>>, [input, out]: [usize; 2]) -> Result<Self, AttentionError> {
        Self::stored(weight.into(), WeightStorage::InOut, [input, out])
    }

    /// Weights stored this way; `shape` is given in the order of the storage.
    ///
    /// # Errors
    /// [`AttentionError::WeightLenMismatch`].
    pub fn stored(weight: Cow<'a, [T]>, storage: WeightStorage, shape: [usize; 2]) -> Result<Self, AttentionError> {
        let len = weight.len();
        if shape[0].checked_mul(shape[1]) != Some(len) {
            return Err(AttentionError::WeightLenMismatch { shape, len });
        }
        let [first, second] = shape;
        let shape = match storage {
            WeightStorage::OutIn => [second, first],
            WeightStorage::InOut => [first, second],
        };
        Ok(Self { weight, storage, shape, bias: None })
    }

    /// Adds a number to each output. Kept as `f32`, whatever its type.
    ///
    /// # Errors
    /// [`AttentionError::BiasLenMismatch`].
    pub fn with_bias<B: Element<Acc = f32>>(mut self, bias: &[B]) -> Result<Self, AttentionError> {
        let expected = self.out_features();
        if bias.len() != expected {
            return Err(AttentionError::BiasLenMismatch { expected, found: bias.len() });
        }
        self.bias = Some(bias.iter().map(|&bias| bias.to_acc()).collect());
        Ok(self)
    }

    /// Features of what it reads.
    pub fn in_features(&self) -> usize {
        self.shape[0]
    }

    /// Features of what it gives.
    pub fn out_features(&self) -> usize {
        self.shape[1]
    }

    /// `[in, out]` features must be these.
    pub(super) fn check_shape(&self, projection: &'static str, expected: [usize; 2]) -> Result<(), AttentionError> {
        if self.shape != expected {
            return Err(AttentionError::ProjectionShapeMismatch { projection, expected, found: self.shape });
        }
        Ok(())
    }
}
