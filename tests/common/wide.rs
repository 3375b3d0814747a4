//! Attention in twice the precision of f64, against which f64 itself is measured: textbook loops on unevaluated sums
//! of two f64 (Dekker 1971; Knuth, TAOCP 4.2.2), relative error about 2^-93.

use std::ops::{Add, Div, Mul, Neg, Sub};

use fused_attention::reference::ReferenceOutput;
use fused_attention::{AttentionConfig, AttentionInputs, AttentionShape};

use super::Number;
use super::operands::{broadcast, position, visible};

/// `high + low`, with `|low|` at most half a unit in the last place of `high`.
#[derive(Debug, Clone, Copy)]
struct Wide {
    high: f64,
    low: f64,
}

/// ln 2 to 107 bits.
const LN_2: Wide = Wide { high: std::f64::consts::LN_2, low: 2.319_046_813_846_299_6e-17 };

impl Wide {
    const ZERO: Self = Self { high: 0.0, low: 0.0 };

    fn from(value: f64) -> Self {
        Self { high: value, low: 0.0 }
    }

    /// The sum, exactly.
    fn sum(a: f64, b: f64) -> Self {
        let high = a + b;
        let b_part = high - a;
        Self { high, low: (a - (high - b_part)) + (b - b_part) }
    }

    /// The product, exactly.
    fn product(a: f64, b: f64) -> Self {
        let high = a * b;
        Self { high, low: a.mul_add(b, -high) }
    }

    /// e to this power: `2^n * exp(r)` with `|r| <= ln(2) / 2^9`, the latter by its series and eight squarings.
    fn exp(self) -> Self {
        const SQUARINGS: i32 = 8;
        if self.high < -745.0 {
            return Self::ZERO;
        }
        let n = (self.high / LN_2.high).round();
        let r = (self - LN_2 * Self::from(n)) * Self::from(0.5f64.powi(SQUARINGS));
        let series =
            (1..=12).rev().fold(Self::from(1.0), |rest, i| Self::from(1.0) + r * rest / Self::from(f64::from(i)));
        let power = (0..SQUARINGS).fold(series, |power, _| power * power);
        let half = 2f64.powi(n as i32 / 2); // in two steps: 2^n may be subnormal
        power * Self::from(half) * Self::from(2f64.powi(n as i32 - n as i32 / 2))
    }

    /// The natural logarithm: f64's, and one step of Newton on `exp(y) = x`.
    fn ln(self) -> Self {
        let y = Self::from(self.high.ln());
        y + self * (-y).exp() - Self::from(1.0)
    }
}

impl Add for Wide {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let high = Self::sum(self.high, other.high);
        let low = Self::sum(self.low, other.low);
        let sum = Self::sum(high.high, high.low + low.high);
        Self::sum(sum.high, sum.low + low.low)
    }
}

impl Mul for Wide {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let product = Self::product(self.high, other.high);
        Self::sum(product.high, product.low + (self.high * other.low + self.low * other.high))
    }
}

impl Div for Wide {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        let first = self.high / other.high;
        let rest = self - other * Self::from(first);
        Self::from(first) + Self::from((rest.high + rest.low) / other.high)
    }
}

impl Neg for Wide {
    type Output = Self;

    fn neg(self) -> Self {
        Self { high: -self.high, low: -self.low }
    }
}

impl Sub for Wide {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

/// All rows, rounded to f64 at the very end. For finite inputs whose scores stay finite.
pub fn attention<T: Number, K: Number<Real = T::Real>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
) -> ReferenceOutput {
    let shape = AttentionShape::of(inputs).unwrap();
    let mut result = ReferenceOutput { out: Vec::new(), logsumexp: Vec::new() };
    for (batch, head) in (0..shape.batch).flat_map(|b| (0..shape.num_heads).map(move |h| (b, h))) {
        for query in 0..shape.q_len {
            let (out, logsumexp) = attention_row(inputs, config, [batch, head, query]);
            result.out.extend(out);
            result.logsumexp.push(logsumexp);
        }
    }
    result
}

/// One row `[batch, head, query]`: its output and its log-sum-exp.
pub fn attention_row<T: Number, K: Number<Real = T::Real>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    [batch, head, query]: [usize; 3],
) -> (Vec<f64>, f64) {
    let shape = AttentionShape::of(inputs).unwrap();
    let kv_head = head / shape.group_size();
    let row = [batch, head, query];
    let visible = visible(inputs, config, row);
    let sink = inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[head].into());
    if visible.is_empty() {
        return (vec![0.0; shape.value_dim], sink);
    }
    let q = |p| inputs.q.get([batch, head, query, p]).unwrap().value();
    let k = |key, p| inputs.k.get([batch, kv_head, key, p]).unwrap().value();
    let v = |key, d| Wide::from(inputs.v.get([batch, kv_head, key, d]).unwrap().value());
    let scale = Wide::from(config.softmax_scale.unwrap_or(1.0 / (shape.head_dim as f64).sqrt()));
    let dot = |key| (0..shape.head_dim).fold(Wide::ZERO, |sum, p| sum + Wide::product(q(p), k(key, p)));
    let score = |key| {
        let mut score = scale * dot(key);
        if let Some(softcap) = config.softcap.map(Wide::from) {
            // tanh(x) = (1 - e^-2x) / (1 + e^-2x), for |x|
            let (size, is_negative) = if score.high < 0.0 { (-score, true) } else { (score, false) };
            let (one, power) = (Wide::from(1.0), (Wide::from(-2.0) * size / softcap).exp());
            let capped = softcap * (one - power) / (one + power);
            score = if is_negative { -capped } else { capped };
        }
        if let Some(slopes) = inputs.alibi_slopes {
            let distance = (position(inputs, config, row) - key as i128).abs() as f64;
            score = score - Wide::product(slopes[head].into(), distance);
        }
        if let Some(bias) = &inputs.bias {
            score = score + Wide::from(broadcast(bias, [batch, head, query, key]).value());
        }
        score
    };
    let scores: Vec<Wide> = visible.iter().map(|&key| score(key)).collect();
    let max = scores.iter().map(|score| score.high).fold(sink, f64::max);
    let exps: Vec<Wide> = scores.iter().map(|&score| (score - Wide::from(max)).exp()).collect();
    let sink = if sink == f64::NEG_INFINITY { Wide::ZERO } else { Wide::sum(sink, -max).exp() };
    let sum = exps.iter().fold(sink, |sum, &exp| sum + exp);
    let mean = |d| visible.iter().zip(&exps).fold(Wide::ZERO, |mean, (&key, &exp)| mean + exp * v(key, d)) / sum;
    ((0..shape.value_dim).map(|d| mean(d).high).collect(), (Wide::from(max) + sum.ln()).high)
}

#[test]
fn wide_arithmetic_is_twice_as_precise_as_f64() {
    let close = |found: Wide, expected: Wide| {
        let error = found - expected;
        assert!(error.high.abs() <= 1e-28 * expected.high.abs(), "{found:?}, not {expected:?}: {error:?}");
    };
    let e = Wide { high: std::f64::consts::E, low: 1.445_646_891_729_250_2e-16 };
    close(Wide::from(1.0).exp(), e);
    close(e.ln(), Wide::from(1.0));
    close(Wide::from(2.0).ln(), LN_2);
    close(LN_2.exp(), Wide::from(2.0));
    close(Wide::from(-600.0).exp() * Wide::from(600.0).exp(), Wide::from(1.0));
    close(Wide::from(1.0) / Wide::from(3.0) * Wide::from(3.0), Wide::from(1.0));
    close(Wide::sum(1.0, 1e-25) - Wide::from(1.0), Wide::from(1e-25));
}
