//! What a call may be given besides Q, K and V, whether it fits or not.

use arbitrary::Arbitrary;
use fused_attention::{AttentionInputs, TensorView};
use fused_attention_fuzz::Size;

use crate::tensors::{Description, Tensor};

/// Lengths of the sequences.
#[derive(Debug, Arbitrary)]
pub struct KvLens {
    /// Lengths more or fewer than sequences.
    count_change: Option<i8>,
    lens: [Length; 3],
    pub left: bool,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Length {
    Within(u16),
    Whole,
    Any(Size),
}

impl KvLens {
    pub fn get(&self, batch: usize, kv_len: usize) -> Vec<usize> {
        let length = |i: usize| match self.lens[i % 3] {
            Length::Within(n) => usize::from(n) % kv_len.saturating_add(1).max(1),
            Length::Whole => kv_len,
            Length::Any(size) => size.get(),
        };
        (0..changed(batch, self.count_change)).map(length).collect()
    }
}

/// Mask or bias.
#[derive(Debug, Arbitrary)]
pub struct Operand {
    tensor: Tensor,
    /// The axes of size 1.
    broadcast: u8,
    pattern: u8,
}

impl Operand {
    pub fn description(&self, scores: [usize; 4]) -> Description<'_> {
        let shape = [0, 1, 2, 3].map(|axis| if self.broadcast & (1 << axis) == 0 { scores[axis] } else { 1 });
        Description::new(&self.tensor, shape, false)
    }

    pub fn mask(&self, len: usize) -> Box<[bool]> {
        let period = 1 + usize::from(self.pattern % 64);
        (0..len).map(|i| (i % period == 0) == (self.pattern < 0xa0)).collect()
    }

    pub fn bias(&self, len: usize) -> Box<[f32]> {
        let rare = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, f32::MIN, f32::MAX, 0.5, -80.0, 1e-40];
        let period = 1 + usize::from(self.pattern >> 3);
        let value = |i: usize| if i % period == 0 { rare[usize::from(self.pattern % 8)] } else { (i % 7) as f32 };
        (0..len).map(value).collect()
    }
}

/// A number for each query head, or more or fewer of them.
#[derive(Debug, Arbitrary)]
pub struct HeadNumbers {
    count_change: Option<i8>,
    numbers: [f32; 2],
}

impl HeadNumbers {
    pub fn get(&self, num_heads: usize) -> Vec<f32> {
        // One NaN, so that no other of its bits can come out as a canary.
        let number = |i: usize| Some(self.numbers[i % 2]).filter(|x| !x.is_nan()).unwrap_or(f32::NAN);
        (0..changed(num_heads, self.count_change)).map(number).collect()
    }
}

fn changed(count: usize, change: Option<i8>) -> usize {
    count.min(1 << 10).saturating_add_signed(isize::from(change.unwrap_or(0)))
}

/// Whether all that comes with Q, K and V has the sizes that it must have.
pub fn fit(inputs: &AttentionInputs<'_, f32>) -> bool {
    let [batch, num_heads, q_len, _] = inputs.q.shape();
    let kv_len = inputs.k.shape()[2];
    let broadcasts = |shape: [usize; 4]| {
        shape.iter().zip([batch, num_heads, q_len, kv_len]).all(|(&size, scores)| size == scores || size == 1)
    };
    inputs.kv_lens.is_none_or(|lens| lens.len() == batch && lens.iter().all(|&len| len <= kv_len))
        && inputs.mask.is_none_or(|mask| broadcasts(mask.shape()))
        && inputs.bias.is_none_or(|bias| broadcasts(bias.shape()))
        && [inputs.alibi_slopes, inputs.sinks].iter().flatten().all(|numbers| numbers.len() == num_heads)
}

/// Whether a mask shows a score.
pub fn shows(mask: &TensorView<'_, bool>, mut index: [usize; 4]) -> bool {
    for (index, size) in index.iter_mut().zip(mask.shape()) {
        *index = (*index).min(size - 1);
    }
    mask.get(index).expect("inside")
}
