//! What both fuzz targets draw: memory layouts, masks, instruction sets.

use arbitrary::Arbitrary;
use fused_attention::{AttentionConfig, CausalAlignment, InstructionSet};

/// Bits of a NaN that no computation makes: marks memory that must, or must not, be written.
pub const CANARY: u32 = 0xffed_cafe;

/// How a tensor lies in memory.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub struct Memory {
    order: u8,
    gaps: [u8; 4],
    repeated: u8,
}

impl Memory {
    /// Strides of distinct elements for `shape`: some order of the axes, with gaps of up to 3 elements at each. `None`
    /// where a product overflows.
    pub fn strides(&self, shape: [usize; 4]) -> Option<[usize; 4]> {
        let mut axes = vec![0, 1, 2, 3];
        let mut order = usize::from(self.order % 24);
        let mut strides = [0; 4];
        let mut reach = 1usize;
        for choices in (1..=4).rev() {
            // Mostly unit stride within a row, which has a path of its own.
            let axis = axes.remove(if self.order & 0x80 == 0 { choices - 1 } else { order % choices });
            order /= choices;
            strides[axis] = reach.checked_add(usize::from(self.gaps[axis] % 4))?;
            reach = shape[axis].saturating_sub(1).checked_mul(strides[axis])?.checked_add(reach)?;
        }
        Some(strides)
    }

    /// The same for a tensor that is only read: some axes may repeat their elements.
    pub fn input_strides(&self, shape: [usize; 4]) -> Option<[usize; 4]> {
        let mut strides = self.strides(shape)?;
        for (axis, stride) in strides.iter_mut().enumerate() {
            if self.repeated & (0x11 << axis) == 0x11 << axis {
                *stride = 0;
            }
        }
        Some(strides)
    }
}

/// Elements that a slice must have for this shape and these strides; `None` where that overflows.
pub fn reach(shape: [usize; 4], strides: [usize; 4]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().zip(strides).try_fold(1usize, |n, (size, stride)| n.checked_add((size - 1).checked_mul(stride)?))
}

/// Offsets of all elements.
pub fn offsets(shape: [usize; 4], strides: [usize; 4]) -> impl Iterator<Item = usize> {
    let [batch, heads, len, dims] = shape;
    let elements = if shape.contains(&0) { 0 } else { batch * heads * len * dims };
    (0..elements).map(move |i| {
        let index = [i / dims / len / heads, i / dims / len % heads, i / dims % len, i % dims];
        index.iter().zip(strides).map(|(i, stride)| i * stride).sum()
    })
}

/// Which keys are visible.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub enum Masked {
    Full,
    BottomRight,
    TopLeft,
}

impl Masked {
    pub fn config(self) -> AttentionConfig {
        match self {
            Self::Full => AttentionConfig::full(),
            Self::BottomRight => AttentionConfig::causal(),
            Self::TopLeft => AttentionConfig::causal().with_causal_alignment(CausalAlignment::TopLeft),
        }
    }
}

/// Every set that can run here, the wide portable ones included.
pub fn instruction_sets() -> Vec<InstructionSet> {
    InstructionSet::available().chain([InstructionSet::portable_256(), InstructionSet::portable_512()]).collect()
}
