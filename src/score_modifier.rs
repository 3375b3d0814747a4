//! Functions of a score and its place, written once for whatever lies in the lanes: [`ScoreModifier`], and those that the crate has.

use std::ops::{Add, Div, Mul, Neg, Sub};

use pulp::Simd;

use crate::kernels::lane::Lane;

/// A function of each score `s[query, key]`, applied after scale, softcap and ALiBi, before bias and mask. Runs inside the kernels, compiled for each instruction set.
///
/// [`modify`](Self::modify) gets a vector of scores. In prefill they belong to one key and many queries (of several heads), when decoding to one
/// query and many keys; it is written without knowing which. Mark it `#[inline(always)]`: otherwise it still gives the same
/// result, but is compiled without the vector instructions.
///
/// It cannot hide keys: a score of negative infinity is visible, only that it weighs nothing beside finite ones, and a row of nothing else
/// is NaN. Use a [mask](crate::AttentionInputs::with_mask) for that.
///
/// ```
/// use fused_attention::*;
///
/// /// T5's idea in the simplest form: keys far away weigh less, by a factor for each head, but never less than at distance 8.
/// struct Near<'a> { factors: &'a [f64] }
///
/// impl ScoreModifier for Near<'_> {
///     const PARAMETERS: usize = 1;
///
///     fn parameter(&self, _index: usize, _batch: usize, head: usize) -> f64 {
///         self.factors[head]
///     }
///
///     #[inline(always)]
///     fn modify<V: ScoreVector>(&self, score: V, at: &ScoreContext<'_, V>) -> V {
///         let distance = at.distance.abs().min(score.splat(8.0));
///         score - at.parameters[0] * distance
///     }
/// }
///
/// let x: Vec<f32> = (0..2 * 6 * 4).map(|i| (i as f32).sin()).collect();
/// let view = TensorView::from_bhsd(&x, [1, 2, 6, 4])?;
/// let inputs = AttentionInputs::new(view, view, view);
/// let near = Near { factors: &[0.5, 0.25] };
/// let out = attention_with_modifier(&inputs, &AttentionConfig::causal(), &near)?;
/// // Within 8 keys that is ALiBi.
/// let alibi = attention(&inputs.with_alibi_slopes(&[0.5, 0.25]), &AttentionConfig::causal())?;
/// assert!(out.iter().zip(&alibi).all(|(a, b)| (a - b).abs() < 1e-6));
/// # Ok::<(), AttentionError>(())
/// ```
pub trait ScoreModifier: Sync {
    /// How many numbers depend on the head (and batch entry): at most [`MAX_PARAMETERS`] in all.
    const PARAMETERS: usize = 0;

    /// Number `index` below [`PARAMETERS`](Self::PARAMETERS) of a query head; [`ScoreContext::parameters`] holds it.
    fn parameter(&self, index: usize, batch: usize, head: usize) -> f64 {
        let _ = (index, batch, head);
        0.0
    }

    /// The new scores.
    fn modify<V: ScoreVector>(&self, score: V, at: &ScoreContext<'_, V>) -> V;
}

/// Most [parameters](ScoreModifier::PARAMETERS) of a modifier.
pub const MAX_PARAMETERS: usize = 8;

/// Where the scores of a vector lie. What is not used costs nothing.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ScoreContext<'a, V> {
    /// The query's number in the call. As a number of the accumulator's type: exact below 2^24 in f32.
    pub query: V,
    /// The key's number, from the start of the tensor. Exact below 2^24 in f32.
    pub key: V,
    /// The query's position less the key's: 0 on the causal diagonal, positive before it. With a full mask the diagonal is that
    /// of [`CausalAlignment::BottomRight`](crate::CausalAlignment::BottomRight). Exact as long as it is below 2^24.
    pub distance: V,
    /// What [`ScoreModifier::parameter`] gives for the heads of these scores.
    pub parameters: &'a [V],
}

/// A vector of scores, or of what belongs to them, in the type of the accumulator. Sealed.
pub trait ScoreVector:
    Copy
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + sealed::Sealed
{
    /// The same number in every lane.
    fn splat(self, value: f64) -> Self;
    /// `self * factor + summand`, fused wherever the instruction set has it.
    fn mul_add(self, factor: Self, summand: Self) -> Self;
    /// Without the sign.
    fn abs(self) -> Self;
    /// The larger of the two; either where one is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller of the two; either where one is NaN.
    fn min(self, other: Self) -> Self;
    /// Hyperbolic tangent, relatively exact near 0; NaN for NaN.
    fn tanh(self) -> Self;
    /// `yes` in the lanes where `self < bound`, `no` in the others.
    fn if_less(self, bound: Self, yes: Self, no: Self) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

/// The vectors of an instruction set with the operators of numbers.
pub(crate) struct Lanes<S: Simd, A: Lane> {
    simd: S,
    pub(crate) vector: A::Vector<S>,
}

impl<S: Simd, A: Lane> Lanes<S, A> {
    #[inline(always)]
    pub(crate) fn new(simd: S, vector: A::Vector<S>) -> Self {
        Self { simd, vector }
    }
}

impl<S: Simd, A: Lane> Clone for Lanes<S, A> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd, A: Lane> Copy for Lanes<S, A> {}

impl<S: Simd, A: Lane> sealed::Sealed for Lanes<S, A> {}

macro_rules! operator {
    ($operator:ident, $method:ident) => {
        impl<S: Simd, A: Lane> $operator for Lanes<S, A> {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Self { vector: A::$method(self.simd, self.vector, other.vector), ..self }
            }
        }
    };
}

operator!(Add, add);
operator!(Sub, sub);
operator!(Mul, mul);
operator!(Div, div);

impl<S: Simd, A: Lane> Neg for Lanes<S, A> {
    type Output = Self;
    #[inline(always)]
    fn neg(self) -> Self {
        self.splat(-0.0) - self
    }
}

impl<S: Simd, A: Lane> ScoreVector for Lanes<S, A> {
    #[inline(always)]
    fn splat(self, value: f64) -> Self {
        Self { vector: A::splat(self.simd, A::from_f64(value)), ..self }
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, summand: Self) -> Self {
        Self { vector: A::mul_add(self.simd, self.vector, factor.vector, summand.vector), ..self }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self { vector: A::abs(self.simd, self.vector), ..self }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self { vector: A::max(self.simd, self.vector, other.vector), ..self }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.if_less(other, self, other)
    }
    #[inline(always)]
    fn tanh(self) -> Self {
        Self { vector: A::tanh(self.simd, self.vector), ..self }
    }
    #[inline(always)]
    fn if_less(self, bound: Self, yes: Self, no: Self) -> Self {
        let less = A::less_than(self.simd, self.vector, bound.vector);
        Self { vector: A::select(self.simd, less, yes.vector, no.vector), ..self }
    }
}

/// Leaves scores as they are.
pub(crate) struct Unmodified;

impl ScoreModifier for Unmodified {
    #[inline(always)]
    fn modify<V: ScoreVector>(&self, score: V, _: &ScoreContext<'_, V>) -> V {
        score
    }
}

/// `softcap * tanh(score / softcap)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Softcap(pub(crate) f64);

impl ScoreModifier for Softcap {
    #[inline(always)]
    fn modify<V: ScoreVector>(&self, score: V, _: &ScoreContext<'_, V>) -> V {
        let softcap = score.splat(self.0);
        softcap * (score / softcap).tanh() // a factor 1 / softcap would round once more, and scores of 50 show it
    }
}

/// `score - slope * |distance|`, with a slope for each head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Alibi<'a>(pub(crate) &'a [f32]);

impl ScoreModifier for Alibi<'_> {
    const PARAMETERS: usize = 1;

    fn parameter(&self, _: usize, _: usize, head: usize) -> f64 {
        -f64::from(self.0[head])
    }

    #[inline(always)]
    fn modify<V: ScoreVector>(&self, score: V, at: &ScoreContext<'_, V>) -> V {
        at.distance.abs().mul_add(at.parameters[0], score)
    }
}

impl<M: ScoreModifier> ScoreModifier for &M {
    const PARAMETERS: usize = M::PARAMETERS;

    fn parameter(&self, index: usize, batch: usize, head: usize) -> f64 {
        (**self).parameter(index, batch, head)
    }

    #[inline(always)]
    fn modify<V: ScoreVector>(&self, score: V, at: &ScoreContext<'_, V>) -> V {
        (**self).modify(score, at)
    }
}

/// One after the other.
impl<M: ScoreModifier, N: ScoreModifier> ScoreModifier for (M, N) {
    const PARAMETERS: usize = M::PARAMETERS + N::PARAMETERS;

    fn parameter(&self, index: usize, batch: usize, head: usize) -> f64 {
        match index.checked_sub(M::PARAMETERS) {
            None => self.0.parameter(index, batch, head),
            Some(index) => self.1.parameter(index, batch, head),
        }
    }

    #[inline(always)]
    fn modify<V: ScoreVector>(&self, score: V, at: &ScoreContext<'_, V>) -> V {
        let (first, second) = at.parameters.split_at(M::PARAMETERS);
        let score = self.0.modify(score, &ScoreContext { parameters: first, ..*at });
        self.1.modify(score, &ScoreContext { parameters: second, ..*at })
    }
}

/// The standard slopes of ALiBi, for [`with_alibi_slopes`](crate::AttentionInputs::with_alibi_slopes): for a power of two `n` of heads
/// `2^(-8 (h + 1) / n)`; for other numbers those of the next lower power of two, then every other one of the next higher.
///
/// Source: Press, Smith and Lewis, *Train Short, Test Long* (2021, <https://arxiv.org/abs/2108.12409>), and the authors' code.
///
/// ```
/// use fused_attention::alibi_slopes;
/// assert_eq!(alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
/// assert_eq!(alibi_slopes(6)[..4], alibi_slopes(4));
/// assert_eq!(alibi_slopes(6)[4..], [0.5, 0.125]); // of 8: 1/2, (1/4), 1/8
/// ```
///
/// # Panics
/// Where so many numbers do not fit the address space, as `vec!` does.
pub fn alibi_slopes(num_heads: usize) -> Vec<f32> {
    let slope = |heads: usize, head: usize| (-8.0 * (head + 1) as f64 / heads as f64).exp2() as f32;
    let power = num_heads.checked_ilog2().map_or(0, |log| 1 << log);
    let rest = num_heads - power;
    let first = (0..power).map(|head| slope(power, head));
    first.chain((0..rest).map(|head| slope(2 * power, 2 * head))).collect()
}
