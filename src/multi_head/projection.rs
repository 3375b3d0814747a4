//! A matrix of weights with its bias: [`Projection`].

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use super::product::{Cut, Product, Rows, RowsMut};
use crate::{AttentionError, Element, InstructionSet, Parallelism, Workspace};

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
#[derive(Clone)]
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
    pub fn from_out_in(weight: impl Into<Cow<'a, [T]>>, shape: [usize; 2]) -> Result<Self, AttentionError> {
        Self::stored(weight, WeightStorage::OutIn, shape)
    }

    /// Weights stored `[in, out]`, as textbooks write them; `shape` is given in that order. Takes a `Vec` or a slice.
    ///
    /// # Errors
    /// [`AttentionError::WeightLenMismatch`].
    pub fn from_in_out(weight: impl Into<Cow<'a, [T]>>, shape: [usize; 2]) -> Result<Self, AttentionError> {
        Self::stored(weight, WeightStorage::InOut, shape)
    }

    /// Weights stored in this way; `shape` is given in its order.
    ///
    /// # Errors
    /// [`AttentionError::WeightLenMismatch`].
    pub fn stored(
        weight: impl Into<Cow<'a, [T]>>,
        storage: WeightStorage,
        shape: [usize; 2],
    ) -> Result<Self, AttentionError> {
        let weight = weight.into();
        if shape[0].checked_mul(shape[1]) != Some(weight.len()) {
            return Err(AttentionError::WeightLenMismatch { shape, len: weight.len() });
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

    /// Computes some of the outputs of `x` into `to`, whose rows begin with them. `widened` grows as needed.
    pub(super) fn apply(
        &self,
        outputs: Range<usize>,
        x: Rows<'_>,
        to: RowsMut<'_>,
        widened: &mut Workspace,
        threads: Threads,
    ) -> Result<(), AttentionError> {
        let product = Product {
            weight: &self.weight,
            storage: self.storage,
            shape: self.shape,
            bias: self.bias.as_deref().map(|bias| &bias[outputs.clone()]),
            first_output: outputs.start,
        };
        product.run(outputs.len(), x, to, widened, threads)
    }

    /// Bytes that [`apply`](Self::apply) copies weights into.
    pub(super) fn widened_len(&self, tokens: usize, parallelism: Parallelism) -> usize {
        Cut::new::<T>(self.shape, self.storage, tokens, parallelism).all_scratch_len()
    }
}

impl<T: Clone> fmt::Debug for Projection<'_, T> {
    /// Sizes, not the weights.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { storage, shape: [inputs, outputs], bias, .. } = self;
        f.debug_struct("Projection")
            .field("in_features", inputs)
            .field("out_features", outputs)
            .field("storage", storage)
            .field("has_bias", &bias.is_some())
            .finish()
    }
}

/// Where projections run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Threads {
    pub(super) parallelism: Parallelism,
    /// What widens weights.
    pub(super) instruction_set: InstructionSet,
}
