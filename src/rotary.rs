//! Rotary position embedding: [`Rotary`].

use crate::{AttentionError, TensorViewMut};

/// Rotary position embedding (RoPE; Su et al., *RoFormer*, 2021, <https://arxiv.org/abs/2104.09864>): turns pairs of features of Q and K by angles that grow with
/// the token's position, so that the score of a query and a key depends on how far apart they stand.
///
/// ```text
/// angle[i] = position * frequency[i]            frequency[i] = base^(-2 i / rotary_dim), then scaled; i < rotary_dim / 2
/// (a, b)  ->  (a cos angle - b sin angle,  a sin angle + b cos angle)
///
/// HalfSplit      pairs i and i + rotary_dim / 2      Llama and most others in Hugging Face's storage, GPT-NeoX
/// Interleaved    pairs 2 i and 2 i + 1               RoFormer, GPT-J, Llama in Meta's own storage
/// ```
/// Features from `rotary_dim` on stay as they are. Angles, sines and cosines are computed in f64 and rounded once.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    rotary_dim: usize,
    pairing: RotaryPairing,
    base: f64,
    scaling: RotaryScaling,
    /// Radians from a position to the next, of each pair.
    frequencies: Vec<f64>,
}

/// Which features are turned together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RotaryPairing {
    /// `i` and `i + rotary_dim / 2`.
    HalfSplit,
    /// `2 i` and `2 i + 1`.
    Interleaved,
}

/// How a model stretches its positions beyond the lengths that it was first trained on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// Not at all.
    #[default]
    None,
    /// All frequencies are divided by this (position interpolation).
    Linear {
        /// Above 0.
        factor: f64,
    },
    /// The base grows to `base * factor^(rotary_dim / (rotary_dim - 2))`: the highest frequency stays, the lowest is divided by `factor` (NTK-aware).
    Ntk {
        /// Above 0.
        factor: f64,
    },
    /// Llama 3.1's: frequencies of fewer than `low_freq_factor` turns within `original_len` tokens are divided by `factor`, those of more than
    /// `high_freq_factor` stay, and those between are interpolated.
    Llama3 {
        /// Above 0; 8 in Llama 3.1.
        factor: f64,
        /// 1 in Llama 3.1.
        low_freq_factor: f64,
        /// Above `low_freq_factor`; 4 in Llama 3.1.
        high_freq_factor: f64,
        /// Tokens of the first training; 8192 in Llama 3.1.
        original_len: usize,
    },
}

impl Rotary {
    /// Turns the first `rotary_dim` features of each head, with a base of 10000.
    ///
    /// # Errors
    /// [`AttentionError::InvalidRotaryDim`] where it is 0 or odd.
    pub fn new(rotary_dim: usize, pairing: RotaryPairing) -> Result<Self, AttentionError> {
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(AttentionError::InvalidRotaryDim { rotary_dim });
        }
        Self { rotary_dim, pairing, base: 10_000.0, scaling: RotaryScaling::None, frequencies: Vec::new() }.scaled()
    }

    /// Sets the base: 10000 in RoFormer and Llama 2, 500000 in Llama 3.
    ///
    /// # Errors
    /// [`AttentionError::InvalidRotaryNumber`] where it is not above 0 and finite.
    pub fn with_base(mut self, base: f64) -> Result<Self, AttentionError> {
        self.base = base;
        self.scaled()
    }

    /// Sets the scaling.
    ///
    /// # Errors
    /// [`AttentionError::InvalidRotaryNumber`] where one of its numbers is not above 0 and finite, or `high_freq_factor` is not above
    /// `low_freq_factor`.
    pub fn with_scaling(mut self, scaling: RotaryScaling) -> Result<Self, AttentionError> {
        self.scaling = scaling;
        self.scaled()
    }

    /// Features of each head that are turned.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// Radians from a position to the next, of each pair of features.
    pub fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// Turns Q or K in place: token `i` of every sequence stands at position `first_position + i`.
    ///
    /// # Errors
    /// [`AttentionError::RotaryDimTooLarge`] where it turns more features than a head has.
    pub fn apply(&self, _tensor: &mut TensorViewMut<'_, f32>, _first_position: usize) -> Result<(), AttentionError> {
        todo!()
    }

    /// A head must have the features that are turned.
    #[cfg_attr(not(feature = "multi-head"), allow(dead_code))]
    pub(crate) fn check_head_dim(&self, head_dim: usize) -> Result<(), AttentionError> {
        let rotary_dim = self.rotary_dim;
        if rotary_dim > head_dim {
            return Err(AttentionError::RotaryDimTooLarge { rotary_dim, head_dim });
        }
        Ok(())
    }

    /// With the frequencies that base and scaling give.
    fn scaled(self) -> Result<Self, AttentionError> {
        Ok(self)
    }
}
