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
    /// Which keys a query sees, before [`window`](Self::window) and [`prefix_len`](Self::prefix_len).
    pub mask: Mask,
    /// How far from its own position a query sees. Default: any distance. See [`with_window`](Self::with_window).
    pub window: Window,
    /// This many first keys are visible to every query, whatever mask and window hide. Default: 0. See
    /// [`with_prefix_len`](Self::with_prefix_len).
    pub prefix_len: usize,
    /// Bounds the scores to `-softcap..softcap`. Default: `None`. See [`with_softcap`](Self::with_softcap).
    pub softcap: Option<f64>,
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

/// How far from its own position a query sees: keys `position - left ..= position + right`, where the position of query `i` is
/// `i + kv_len - q_len`, or what the [`CausalAlignment`] says. `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Window {
    /// Keys before the query's own position.
    pub left: Option<usize>,
    /// Keys after it. A causal mask allows none.
    pub right: Option<usize>,
}

/// Where the causal diagonal lies when `q_len != kv_len`. With equal lengths the first two are the same.
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
    /// The first query stands at this key: query `i` sees keys `j <= i + offset`. For a chunk of a prompt against a cache that
    /// already holds later keys. Signed, because the keys may themselves be a later part of a sequence (ring attention): of
    /// keys that begin at position `s`, queries that begin at `t` see those of offset `t - s`, none where all come after them.
    ///
    /// ```text
    /// q_len 3, kv_len 6        Offset(2)        Offset(-1)
    ///                          x x x . . .      . . . . . .
    ///                          x x x x . .      x . . . . .
    ///                          x x x x x .      x x . . . .
    /// ```
    Offset(isize),
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
            window: Window::default(),
            prefix_len: 0,
            softcap: None,
            softmax_scale: None,
            kv_padding: KvPadding::default(),
            parallelism: Parallelism::default(),
            instruction_set: None,
        }
    }

    /// Causal, and each query sees the last `keys` keys alone, its own included: the sliding window of Mistral, Gemma and gpt-oss. 0
    /// is taken as 1.
    ///
    /// ```text
    /// sliding_window(3), q_len 5, kv_len 5      (x: visible)
    /// x . . . .
    /// x x . . .
    /// x x x . .
    /// . x x x .
    /// . . x x x
    /// ```
    ///
    /// ```
    /// use fused_attention::{AttentionConfig, AttentionInputs, TensorView, attention};
    /// let (q, v) = ([0.0f32; 5], [10.0f32, 20.0, 30.0, 40.0, 50.0]); // equal scores: each row is the mean of what it sees
    /// let (q, v) = (TensorView::from_bhsd(&q, [1, 1, 5, 1])?, TensorView::from_bhsd(&v, [1, 1, 5, 1])?);
    /// let out = attention(&AttentionInputs::new(q, q, v), &AttentionConfig::sliding_window(3))?;
    /// assert!([10.0, 15.0, 20.0, 30.0, 40.0].iter().zip(out).all(|(mean, out)| (mean - out).abs() < 1e-5));
    /// # Ok::<(), fused_attention::AttentionError>(())
    /// ```
    pub fn sliding_window(keys: usize) -> Self {
        Self::causal().with_window(Some(keys.saturating_sub(1)), None)
    }

    /// Limits how far from its own position a query sees, as FlashAttention's `window_size` does (`None` is its -1): keys
    /// `position - left ..= position + right`. A causal mask sees nothing behind the position, whatever `right` says. The
    /// position of query `i` is `i + kv_len - q_len`, or what the [`CausalAlignment`] of a causal mask says. Keys outside the window cost nothing.
    ///
    /// ```text
    /// full, window(Some(1), Some(2)), q_len 4, kv_len 4      full, window(Some(1), Some(0)), q_len 2, kv_len 5
    /// x x x .                                                . . x x .
    /// x x x x                                                . . . x x
    /// . x x x
    /// . . x x
    /// ```
    ///
    /// ```
    /// use fused_attention::{AttentionConfig, AttentionInputs, TensorView, attention};
    /// let (q, v) = ([0.0f32; 4], [12.0f32, 24.0, 36.0, 48.0]);
    /// let (q, v) = (TensorView::from_bhsd(&q, [1, 1, 4, 1])?, TensorView::from_bhsd(&v, [1, 1, 4, 1])?);
    /// let out = attention(&AttentionInputs::new(q, q, v), &AttentionConfig::full().with_window(Some(1), Some(2)))?;
    /// assert!([24.0, 30.0, 36.0, 42.0].iter().zip(out).all(|(mean, out)| (mean - out).abs() < 1e-5));
    /// # Ok::<(), fused_attention::AttentionError>(())
    /// ```
    pub fn with_window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.window = Window { left, right };
        self
    }

    /// Makes the first `prefix_len` keys visible to every query besides what mask and window show: a prefix-LM, whose prompt sees
    /// itself in both directions; with a window, keys that stay in sight (attention sinks in StreamingLLM's sense). Keys behind a
    /// sequence's [length](crate::AttentionInputs::with_kv_lens) stay hidden.
    ///
    /// ```text
    /// causal, prefix 2       sliding_window(2), prefix 1       q_len 5, kv_len 5
    /// x x . . .              x . . . .
    /// x x . . .              x x . . .
    /// x x x . .              x x x . .
    /// x x x x .              x . x x .
    /// x x x x x              x . . x x
    /// ```
    ///
    /// ```
    /// use fused_attention::{AttentionConfig, AttentionInputs, TensorView, attention};
    /// let (q, v) = ([0.0f32; 5], [12.0f32, 24.0, 36.0, 48.0, 60.0]);
    /// let (q, v) = (TensorView::from_bhsd(&q, [1, 1, 5, 1])?, TensorView::from_bhsd(&v, [1, 1, 5, 1])?);
    /// let inputs = AttentionInputs::new(q, q, v);
    /// let is = |out: Vec<f32>, means: [f32; 5]| means.iter().zip(out).all(|(mean, out)| (mean - out).abs() < 1e-5);
    /// let prefix_lm = attention(&inputs, &AttentionConfig::causal().with_prefix_len(2))?;
    /// assert!(is(prefix_lm, [18.0, 18.0, 24.0, 30.0, 36.0]));
    /// let streaming = attention(&inputs, &AttentionConfig::sliding_window(2).with_prefix_len(1))?;
    /// assert!(is(streaming, [12.0, 18.0, 24.0, 32.0, 40.0]));
    /// # Ok::<(), fused_attention::AttentionError>(())
    /// ```
    pub fn with_prefix_len(mut self, prefix_len: usize) -> Self {
        self.prefix_len = prefix_len;
        self
    }

    /// Replaces every score `s` by `softcap * tanh(s / softcap)` (Gemma 2), after the scale and before ALiBi, bias and mask. Must
    /// be above 0 and finite, and `2 / softcap` too.
    pub fn with_softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
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
