//! What to compute and where: [`AttentionConfig`].

use crate::InstructionSet;

/// Everything about a call that is not a tensor. Start from [`causal`](Self::causal) or [`full`](Self::full) and
/// change what differs.
///
/// ```
/// use fused_attention::{AttentionConfig, CausalAlignment, Parallelism};
/// let config = AttentionConfig::causal()
///     .with_softmax_scale(0.125)
///     .with_causal_alignment(CausalAlignment::TopLeft)
///     .with_parallelism(Parallelism::Serial);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct AttentionConfig {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor on Q K^T. `None` (default) is `1 / sqrt(head_dim)`. Any value that is finite in the accumulator's type
    /// (f32, or f64 for tensors of f64) is legal, 0 and negative ones included.
    pub softmax_scale: Option<f64>,
    /// On which side of a shorter sequence the padding lies, where the inputs give
    /// [lengths](crate::AttentionInputs::with_kv_lens). Default: [`KvPadding::Right`].
    pub kv_padding: KvPadding,
    /// Where the work runs. Default: [`Parallelism::Rayon`] with the feature `rayon`, else [`Parallelism::Serial`].
    pub parallelism: Parallelism,
    /// Which instructions to use. `None` (default): the environment variable `FUSED_ATTENTION_INSTRUCTION_SET` if
    /// set, else the best that the CPU has.
    pub instruction_set: Option<InstructionSet>,
}

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mask {
    /// Every query sees every key.
    Full,
    /// A query sees the keys up to its own position, see [`CausalAlignment`].
    Causal(CausalAlignment),
}

/// Where the causal diagonal lies when `q_len != kv_len`. With equal lengths both are the same.
///
/// ```text
/// q_len 2, kv_len 5        BottomRight     TopLeft       (x: visible)
///                          x x x x .       x . . . .
///                          x x x x x       x x . . .
///
/// q_len 5, kv_len 2        BottomRight     TopLeft
///                          . .             x .
///                          . .             x x
///                          . .             x x
///                          x .             x x
///                          x x             x x
/// ```
/// A query that sees no key gives zeros and a `logsumexp` of negative infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CausalAlignment {
    /// The last query sees every key: query `i` sees keys `j <= i + kv_len - q_len`. What a cache wants, and what
    /// FlashAttention does since 2.1.
    #[default]
    BottomRight,
    /// The first query sees the first key only: query `i` sees keys `j <= i`. What PyTorch's `is_causal` does.
    TopLeft,
}

/// On which side of a sequence that is shorter than its tensor the padding lies.
///
/// ```text
/// kv_len 5, a sequence of 3       Right         Left          (x: a key of the sequence)
///                                 x x x . .     . . x x x
/// ```
/// A causal mask is aligned to the sequence itself: with [`CausalAlignment::BottomRight`] the last query sees up to the
/// last `x`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KvPadding {
    /// Keys first, padding behind them: what a cache with room to grow has.
    #[default]
    Right,
    /// Padding first: batches of prompts that end together.
    Left,
}

/// Where the work runs. The result has the same bits either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Parallelism {
    /// On the calling thread alone; no thread pool is touched.
    Serial,
    /// On the current rayon pool (the global one, or the one of an enclosing `ThreadPool::install`). A call of fewer
    /// than [`SERIAL_BELOW_FLOPS`](crate::SERIAL_BELOW_FLOPS) operations stays on the calling thread, where it is
    /// faster.
    #[cfg(feature = "rayon")]
    Rayon,
}

#[allow(clippy::derivable_impls)] // `derive` would need a variant that exists without the feature
impl Default for Parallelism {
    fn default() -> Self {
        #[cfg(feature = "rayon")]
        return Self::Rayon;
        #[cfg(not(feature = "rayon"))]
        return Self::Serial;
    }
}

impl AttentionConfig {
    /// Causal self-attention, aligned bottom-right.
    pub fn causal() -> Self {
        Self { mask: Mask::Causal(CausalAlignment::default()), ..Self::full() }
    }

    /// Every query sees every key.
    pub fn full() -> Self {
        Self {
            mask: Mask::Full,
            softmax_scale: None,
            kv_padding: KvPadding::default(),
            parallelism: Parallelism::default(),
            instruction_set: None,
        }
    }

    /// Sets the factor on Q K^T.
    pub fn with_softmax_scale(mut self, softmax_scale: f64) -> Self {
        self.softmax_scale = Some(softmax_scale);
        self
    }

    /// Makes the mask causal with this alignment.
    pub fn with_causal_alignment(mut self, alignment: CausalAlignment) -> Self {
        self.mask = Mask::Causal(alignment);
        self
    }

    /// Sets on which side shorter sequences are padded.
    pub fn with_kv_padding(mut self, kv_padding: KvPadding) -> Self {
        self.kv_padding = kv_padding;
        self
    }

    /// Sets where the work runs.
    pub fn with_parallelism(mut self, parallelism: Parallelism) -> Self {
        self.parallelism = parallelism;
        self
    }

    /// Forces an instruction set.
    pub fn with_instruction_set(mut self, instruction_set: InstructionSet) -> Self {
        self.instruction_set = Some(instruction_set);
        self
    }
}

impl Default for AttentionConfig {
    /// [`AttentionConfig::causal`].
    fn default() -> Self {
        Self::causal()
    }
}
