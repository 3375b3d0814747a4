//! What decides over scores: which keys a config shows, and the numbers of each head.

use arbitrary::Arbitrary;
use fused_attention::{AttentionConfig, CausalAlignment};

/// What the config hides.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub struct Visible {
    kind: u8,
    offset: i16,
    left: Option<u16>,
    right: Option<u16>,
    prefix: Option<u16>,
}

const SLOPES: [f32; 8] = [0.5, 0.0625, 0.003_906_25, 0.0, 1.0, -0.01, 100.0, 0.3];
const SINKS: [f32; 8] = [0.0, -1.0, 2.0, f32::NEG_INFINITY, 60.0, -60.0, 500.0, -500.0];

/// A limit that is mostly near the sizes of the call.
fn limit(n: u16) -> usize {
    match n {
        0xffff => usize::MAX,
        0xfffe => isize::MAX as usize,
        n if n & 1 == 0 => usize::from(n >> 1) % 20,
        n => usize::from(n >> 1) % 400,
    }
}

impl Visible {
    pub fn config(self) -> AttentionConfig {
        let offset = match self.offset {
            i16::MAX => isize::MAX,
            i16::MIN => isize::MIN,
            offset => isize::from(offset % 300),
        };
        let causal = AttentionConfig::causal();
        let config = match self.kind % 4 {
            0 => AttentionConfig::full(),
            1 => causal,
            2 => causal.with_causal_alignment(CausalAlignment::TopLeft),
            _ => causal.with_causal_alignment(CausalAlignment::Offset(offset)),
        };
        config.with_window(self.left.map(limit), self.right.map(limit)).with_prefix_len(self.prefix.map_or(0, limit))
    }
}

/// ALiBi slopes for each head.
pub fn slopes(choice: [u8; 2], num_heads: usize) -> Vec<f32> {
    per_head(SLOPES, choice, num_heads)
}

/// Sinks for each head.
pub fn sinks(choice: [u8; 2], num_heads: usize) -> Vec<f32> {
    per_head(SINKS, choice, num_heads)
}

fn per_head(numbers: [f32; 8], choice: [u8; 2], num_heads: usize) -> Vec<f32> {
    (0..num_heads).map(|head| numbers[usize::from(choice[head % 2] % 8)] * (1.0 + head as f32 / 4.0)).collect()
}
