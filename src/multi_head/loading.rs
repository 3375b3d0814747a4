//! Weights from safetensors files.

use std::any::Any;

use safetensors::{Dtype, SafeTensors};

use super::{MultiHeadAttention, MultiHeadShape, Projection, WeightStorage};
use crate::{AttentionError, Element, bf16, f16};

/// The names of a projection's tensors in a safetensors file: made from a name, or from those of weight and bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProjectionNames<'n> {
    /// The matrix.
    pub weight: &'n str,
    /// Its bias, if it has one.
    pub bias: Option<&'n str>,
}

impl<'n> From<&'n str> for ProjectionNames<'n> {
    /// Without a bias.
    fn from(weight: &'n str) -> Self {
        Self { weight, bias: None }
    }
}

impl<'n> From<(&'n str, &'n str)> for ProjectionNames<'n> {
    /// Weight and bias.
    fn from((weight, bias): (&'n str, &'n str)) -> Self {
        Self { weight, bias: Some(bias) }
    }
}

impl<T: Element<Acc = f32>> MultiHeadAttention<'static, T> {
    /// Copies a layer's weights out of a safetensors file: those of Q, K, V and the output. The weights must be of type `T`; biases may be of any of the
    /// three.
    ///
    /// ```
    /// use fused_attention::{AttentionError, MultiHeadAttention, MultiHeadShape, WeightStorage};
    /// use safetensors::SafeTensors;
    ///
    /// fn load(file: &[u8]) -> Result<MultiHeadAttention<'static>, Box<dyn std::error::Error>> {
    ///     let tensors = SafeTensors::deserialize(file)?;
    ///     let names = [("w_q", "b_q"), ("w_k", "b_k"), ("w_v", "b_v"), ("w_o", "b_o")];
    ///     Ok(MultiHeadAttention::from_safetensors(&tensors, MultiHeadShape::new(384, 12)?, WeightStorage::OutIn, names)?)
    /// }
    /// ```
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
        shape.check()?;
        let [q, k, v, out] = names.map(Into::into);
        Self::new(
            shape,
            load(tensors, storage, q, shape.q())?,
            load(tensors, storage, k, shape.k())?,
            load(tensors, storage, v, shape.v())?,
            load(tensors, storage, out, shape.out())?,
        )
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
        shape.check()?;
        let [qkv, out] = names.map(Into::into);
        let qkv = load(tensors, storage, qkv, shape.qkv()?)?;
        Self::from_fused_qkv(shape, qkv, load(tensors, storage, out, shape.out())?)
    }
}

/// A projection of `[in, out]` features.
fn load<T: Element<Acc = f32>>(
    tensors: &SafeTensors<'_>,
    storage: WeightStorage,
    names: ProjectionNames<'_>,
    [inputs, outputs]: [usize; 2],
) -> Result<Projection<'static, T>, AttentionError> {
    let shape = match storage {
        WeightStorage::OutIn => [outputs, inputs],
        WeightStorage::InOut => [inputs, outputs],
    };
    let projection = Projection::stored(numbers::<T>(tensors, names.weight, &shape)?, storage, shape)?;
    let Some(bias) = names.bias else { return Ok(projection) };
    match tensors.tensor(bias).map(|tensor| tensor.dtype()) {
        Ok(Dtype::F16) => projection.with_bias(&numbers::<f16>(tensors, bias, &[outputs])?),
        Ok(Dtype::BF16) => projection.with_bias(&numbers::<bf16>(tensors, bias, &[outputs])?),
        _ => projection.with_bias(&numbers::<f32>(tensors, bias, &[outputs])?),
    }
}

/// The numbers of a tensor of this shape.
fn numbers<T: Element<Acc = f32>>(
    tensors: &SafeTensors<'_>,
    name: &str,
    expected: &[usize],
) -> Result<Vec<T>, AttentionError> {
    let Ok(tensor) = tensors.tensor(name) else {
        return Err(AttentionError::TensorMissing { tensor: name.into() });
    };
    if tensor.shape() != expected {
        let (expected, found) = (expected.into(), tensor.shape().into());
        return Err(AttentionError::TensorShapeMismatch { tensor: name.into(), expected, found });
    }
    // The file is little-endian, and its tensors are not aligned.
    let (pairs, _) = tensor.data().as_chunks();
    let (fours, _) = tensor.data().as_chunks();
    let mut numbers: Box<dyn Any> = match tensor.dtype() {
        Dtype::F32 => Box::new(fours.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect::<Vec<_>>()),
        Dtype::F16 => Box::new(pairs.iter().map(|&bytes| f16::from_le_bytes(bytes)).collect::<Vec<_>>()),
        Dtype::BF16 => Box::new(pairs.iter().map(|&bytes| bf16::from_le_bytes(bytes)).collect::<Vec<_>>()),
        _ => Box::new(()),
    };
    match numbers.downcast_mut::<Vec<T>>() {
        Some(numbers) => Ok(std::mem::take(numbers)),
        None => {
            let found = format!("{:?}", tensor.dtype());
            Err(AttentionError::TensorTypeMismatch { tensor: name.into(), expected: type_name::<T>(), found })
        }
    }
}

/// As safetensors calls it.
fn type_name<T: Element<Acc = f32>>() -> &'static str {
    match &T::from_acc(0.0) as &dyn Any {
        zero if zero.is::<f16>() => "F16",
        zero if zero.is::<bf16>() => "BF16",
        _ => "F32",
    }
}
