//! Rotary position embedding: [`Rotary`].

use std::ops::Range;

use crate::{AttentionError, TensorViewMut};

/// Pairs whose angles are computed together, on the stack.
const PAIRS: usize = 64;

/// Every so many positions, sine and cosine are computed anew; between them the turns of single positions are multiplied in f64, which makes an error
/// of at most `ANCHOR * 2^-52`, far below what rounding to f32 does. From the position alone, so that a token is always turned alike.
const ANCHOR: usize = 32;

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
    /// [`AttentionError::InvalidRotaryDim`] where it is 0 or odd; [`AttentionError::AllocationFailed`].
    pub fn new(rotary_dim: usize, pairing: RotaryPairing) -> Result<Self, AttentionError> {
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(AttentionError::InvalidRotaryDim { rotary_dim });
        }
        Self { rotary_dim, pairing, base: 10_000.0, scaling: RotaryScaling::None, frequencies: Vec::new() }.scaled()
    }

    /// Sets the base: 10000 in RoFormer and Llama 2, 500000 in Llama 3.
    ///
    /// # Errors
    /// [`AttentionError::InvalidRotaryNumber`] where it is not above 0 and finite, or so near 0 that angles overflow.
    pub fn with_base(mut self, base: f64) -> Result<Self, AttentionError> {
        self.base = base;
        self.scaled()
    }

    /// Sets the scaling.
    ///
    /// # Errors
    /// [`AttentionError::InvalidRotaryNumber`] where one of its numbers is not above 0 and finite, or so near 0 that angles overflow, or
    /// `high_freq_factor` is not above `low_freq_factor`.
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
    /// ```
    /// use fused_attention::*;
    /// let rotary = Rotary::new(2, RotaryPairing::HalfSplit)?; // one pair, of one radian a position
    /// let mut q = [1.0f32, 0.0, 1.0, 0.0, 1.0, 0.0]; // three tokens of one head
    /// rotary.apply(&mut TensorViewMut::from_bhsd(&mut q, [1, 1, 3, 2])?, 0)?;
    /// assert_eq!(q, [1.0, 0.0, 1f32.cos(), 1f32.sin(), 2f32.cos(), 2f32.sin()]);
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// [`AttentionError::RotaryDimTooLarge`] where it turns more features than a head has.
    pub fn apply(&self, tensor: &mut TensorViewMut<'_, f32>, first_position: usize) -> Result<(), AttentionError> {
        let layout = tensor.layout();
        let [batch, heads, seq, head_dim] = layout.shape;
        self.check_head_dim(head_dim)?;
        if layout.shape.contains(&0) {
            return Ok(()); // offsets of a view without elements may lie outside its slice
        }
        let data = tensor.data_mut();
        self.for_each_angle(seq, first_position, |token, pairs, turns| {
            for (batch, head) in (0..batch).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
                self.turn_row(
                    &mut data[layout.offset([batch, head, token])..],
                    layout.strides[3],
                    pairs.clone(),
                    turns,
                );
            }
        });
        Ok(())
    }

    /// Turns all heads of consecutive tokens, which lie behind one another in rows of `stride` that begin with the heads.
    #[cfg_attr(not(feature = "multi-head"), allow(dead_code))]
    pub(crate) fn turn_tokens(
        &self,
        rows: &mut [f32],
        stride: usize,
        [heads, head_dim]: [usize; 2],
        first_position: usize,
    ) {
        self.for_each_angle(rows.len().div_ceil(stride), first_position, |token, pairs, turns| {
            for head in rows[token * stride..][..heads * head_dim].chunks_exact_mut(head_dim) {
                self.turn_row(head, 1, pairs.clone(), turns);
            }
        });
    }

    /// Calls `turn` with each of `tokens` tokens, a range of pairs, and cosine and sine of their angles.
    fn for_each_angle(
        &self,
        tokens: usize,
        first_position: usize,
        mut turn: impl FnMut(usize, Range<usize>, &[[f32; PAIRS]; 2]),
    ) {
        for first_pair in (0..self.frequencies.len()).step_by(PAIRS) {
            let frequencies = &self.frequencies[first_pair..self.frequencies.len().min(first_pair + PAIRS)];
            let pairs = first_pair..first_pair + frequencies.len();
            // The turn of one position, the turn of the token, and that rounded.
            let mut step = [[0.0f64; 2]; PAIRS];
            let mut turns = [[0.0f64; 2]; PAIRS];
            let mut rounded = [[0.0f32; PAIRS]; 2];
            for (step, frequency) in step.iter_mut().zip(frequencies) {
                *step = [frequency.cos(), frequency.sin()];
            }
            for token in 0..tokens {
                let position = first_position.saturating_add(token);
                let is_anchor = position.is_multiple_of(ANCHOR);
                if token == 0 || is_anchor {
                    let anchor = position / ANCHOR * ANCHOR;
                    for (turn, frequency) in turns.iter_mut().zip(frequencies) {
                        let angle = anchor as f64 * frequency;
                        *turn = [angle.cos(), angle.sin()];
                    }
                    for _ in anchor..position {
                        turns.iter_mut().zip(&step).for_each(advance);
                    }
                } else {
                    turns.iter_mut().zip(&step).for_each(advance);
                }
                for (pair, turn) in turns.iter().enumerate() {
                    rounded[0][pair] = turn[0] as f32;
                    rounded[1][pair] = turn[1] as f32;
                }
                turn(token, pairs.clone(), &rounded);
            }
        }
    }

    /// Turns these pairs of one row.
    fn turn_row(&self, row: &mut [f32], stride: usize, pairs: Range<usize>, [cos, sin]: &[[f32; PAIRS]; 2]) {
        let half = self.rotary_dim / 2;
        let turned = |[a, b]: [f32; 2], pair: usize| [a * cos[pair] - b * sin[pair], a * sin[pair] + b * cos[pair]];
        match self.pairing {
            RotaryPairing::HalfSplit if stride == 1 => {
                let (first, second) = row[..self.rotary_dim].split_at_mut(half);
                let (first, second) = (&mut first[pairs.clone()], &mut second[pairs]);
                for (pair, (a, b)) in first.iter_mut().zip(second).enumerate() {
                    [*a, *b] = turned([*a, *b], pair);
                }
            }
            RotaryPairing::Interleaved if stride == 1 => {
                let (both, _) = row[2 * pairs.start..2 * pairs.end].as_chunks_mut::<2>();
                for (pair, both) in both.iter_mut().enumerate() {
                    *both = turned(*both, pair);
                }
            }
            pairing => {
                for (pair, i) in pairs.enumerate() {
                    let [a, b] = match pairing {
                        RotaryPairing::HalfSplit => [i, i + half],
                        RotaryPairing::Interleaved => [2 * i, 2 * i + 1],
                    };
                    [row[a * stride], row[b * stride]] = turned([row[a * stride], row[b * stride]], pair);
                }
            }
        }
    }

    /// A head must have the features that are turned.
    pub(crate) fn check_head_dim(&self, head_dim: usize) -> Result<(), AttentionError> {
        let rotary_dim = self.rotary_dim;
        if rotary_dim > head_dim {
            return Err(AttentionError::RotaryDimTooLarge { rotary_dim, head_dim });
        }
        Ok(())
    }

    /// With the frequencies that base and scaling give.
    fn scaled(mut self) -> Result<Self, AttentionError> {
        let above = |name: &'static str, value: f64, above: f64| match value > above && value.is_finite() {
            true => Ok(value),
            false => Err(AttentionError::InvalidRotaryNumber { name, value, above }),
        };
        let mut base = above("base", self.base, 0.0)?;
        let dim = self.rotary_dim as f64;
        if let RotaryScaling::Ntk { factor } = self.scaling {
            // One pair has frequency 1 with any base.
            let exponent = if self.rotary_dim > 2 { dim / (dim - 2.0) } else { 0.0 };
            base = above("base", base * above("factor", factor, 0.0)?.powf(exponent), 0.0)?;
        }
        let pairs = self.rotary_dim / 2;
        let bytes = pairs.saturating_mul(size_of::<f64>());
        let mut frequencies = Vec::new();
        frequencies.try_reserve_exact(pairs).map_err(|_| AttentionError::AllocationFailed { bytes })?;
        frequencies.extend((0..pairs).map(|pair| base.powf(-2.0 * pair as f64 / dim)));
        match self.scaling {
            RotaryScaling::None | RotaryScaling::Ntk { .. } => {}
            RotaryScaling::Linear { factor } => {
                let factor = above("factor", factor, 0.0)?;
                frequencies.iter_mut().for_each(|frequency| *frequency /= factor);
            }
            RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                let factor = above("factor", factor, 0.0)?;
                let low = above("low_freq_factor", low_freq_factor, 0.0)?;
                let high = above("high_freq_factor", high_freq_factor, low)?;
                let len = above("original_len", original_len as f64, 0.0)?;
                for frequency in &mut frequencies {
                    let turns = len * *frequency / std::f64::consts::TAU;
                    // 0 up to `low` turns, 1 from `high` on.
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    *frequency *= kept + (1.0 - kept) / factor;
                }
            }
        }
        self.frequencies = frequencies;
        // A base or a factor near 0 gives angles that no number holds.
        for frequency in &self.frequencies {
            let value = frequency * 2f64.powi(64);
            if !value.is_finite() {
                return Err(AttentionError::InvalidRotaryNumber {
                    name: "the angle of position 2^64",
                    value,
                    above: 0.0,
                });
            }
        }
        Ok(self)
    }
}

/// By one more position.
fn advance(([cos, sin], [step_cos, step_sin]): (&mut [f64; 2], &[f64; 2])) {
    [*cos, *sin] = [*cos * step_cos - *sin * step_sin, *sin * step_cos + *cos * step_sin];
}
