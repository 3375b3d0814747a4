//! Scaled dot-product attention on CPUs in one fused, cache-blocked pass, the way FlashAttention does it on GPUs:
//! an online softmax, so that the `q_len x kv_len` score matrix never exists in memory.
//!
//! ```text
//! out = softmax(softmax_scale * Q K^T + mask) V          softmax_scale defaults to 1 / sqrt(head_dim)
//! ```
//!
//! ```
//! use fused_attention::{AttentionConfig, AttentionInputs, TensorView, attention};
//!
//! // 8 query heads share 2 KV heads (grouped-query attention); 5 queries, 7 keys, 64 features.
//! let q = vec![0.1f32; 8 * 5 * 64];
//! let (k, v) = (vec![0.2f32; 2 * 7 * 64], vec![0.3f32; 2 * 7 * 64]);
//! let inputs = AttentionInputs::new(
//!     TensorView::from_bhsd(&q, [1, 8, 5, 64])?,
//!     TensorView::from_bhsd(&k, [1, 2, 7, 64])?,
//!     TensorView::from_bhsd(&v, [1, 2, 7, 64])?,
//! );
//! let out = attention(&inputs, &AttentionConfig::causal())?;
//! assert_eq!(out.len(), 8 * 5 * 64);
//! # Ok::<(), fused_attention::AttentionError>(())
//! ```
//!
//! The [`guide`] has an example for each task, questions and answers, what is what in candle, burn and PyTorch, and the algorithm at length.
//!
//! # Element types
//! Q and the output have one type, K and V one, of `f32`, [`f16`](struct@f16) and [`bf16`] in any pair, all accumulated in `f32`; or all
//! are of `f64`. See [`Element`].
//!
//! # Three tiers
//! - [`attention()`] allocates its output.
//! - [`attention_into`] writes to yours, of any strides, and keeps its scratch per thread.
//! - [`AttentionPlan`] separates checking and planning from running, with a [`Workspace`] that you own: nothing is
//!   allocated when serial or inside a rayon pool.
//!
//! [`attention_varlen`] computes sequences of different lengths that lie behind one another, on all threads at once.
//! [`PartialAttention`] merges results over disjoint sets of keys: for a prefix that sequences share, or keys spread over machines.
//!
//! [`attention_weights`] computes the weights of some heads and rows, to look at them.
//!
//! For generation, [`KvCache`] keeps the keys and values of past tokens where decoding reads them fastest.
//!
//! # The algorithm
//! Queries are cut into blocks of rows, keys into blocks that fit the L2 cache. For every block of rows, over the
//! key blocks that its mask lets it see (hidden ones are skipped):
//!
//! ```text
//! scores      = Q K^T                                  one micro-tile at a time, into L1
//! new_max     = max(running_max, rowwise max scores)
//! rescale     = exp(running_max - new_max)
//! probs       = exp(scores - new_max)                  at most 1, so nothing overflows
//! running_sum = running_sum * rescale + rowsum probs
//! out_acc     = out_acc * rescale + probs V
//! ```
//! and at the end `out = out_acc / running_sum`, `logsumexp = running_max + ln(running_sum)`. Rows lie in the SIMD
//! lanes, so that maximum, sum, exponential and the causal edge are all vertical vector operations. Memory beyond the
//! inputs and outputs is a fixed workspace for each thread, whatever `q_len` and `kv_len`.
//!
//! Sources: Milakov and Gimelshein, *Online normalizer calculation for softmax* (2018, <https://arxiv.org/abs/1805.02867>);
//! Dao et al., *FlashAttention* (2022, <https://arxiv.org/abs/2205.14135>), *FlashAttention-2* (2023,
//! <https://arxiv.org/abs/2307.08691>).
//!
//! # Module map
//! `attention` (validate) -> `plan` (tasks, workspace; `blocks`) -> `schedule` (threads) -> `task` (a block of
//! rows, `row_block`; a short call is run at once, `few_keys`) -> `prefill` or `decode` (one block of keys) -> `packing`, `mask`, `score_pass`, `online_softmax` -> `kernels`
//! (micro-tiles). `varlen` stands beside `attention`: it plans every sequence and puts their tasks into one list. `partial`
//! merges what calls have returned, and needs none of the others. `weights` runs parts of a call and records the scores on their way. [`mod@reference`] is the specification in f64. `kv_cache` stands beside them: what it holds, it gives out
//! as views, so no kernel knows of it.

#[cfg(all(doctest, feature = "multi-head"))] // of which some examples are
#[doc = include_str!("../README.md")]
struct Readme;

mod attention;
mod blocks;
mod config;
mod decode;
mod element;
mod error;
mod few_keys;
#[cfg(any(doc, doctest))]
pub mod guide;
mod instruction_set;
mod kernels;
mod key_blocks;
mod kv_cache;
mod mask;
mod merge;
#[cfg(feature = "multi-head")]
mod multi_head;
mod online_softmax;
mod operands;
mod output;
mod packing;
mod partial;
mod plan;
mod prefill;
pub mod reference;
mod rotary;
mod row_block;
mod schedule;
mod score_modifier;
mod score_pass;
mod shape;
mod task;
mod tensor;
mod unpacking;
mod varlen;
mod weights;
mod workspace;

pub use attention::{
    AttentionInputs, AttentionOutputs, attention, attention_into, attention_into_with_modifier, attention_with_modifier,
};
pub use config::{AttentionConfig, CausalAlignment, KvPadding, Mask, Parallelism, Window};
pub use element::{Accumulator, Element};
pub use error::AttentionError;
pub use half::{bf16, f16};
pub use instruction_set::InstructionSet;
#[doc(hidden)]
pub use instruction_set::executed_instruction_set;
#[cfg(feature = "__panel")]
#[doc(hidden)]
pub use kernels::panel;
pub use kv_cache::{Capacity, KvCache, KvCacheShape};
#[cfg(feature = "safetensors")]
pub use multi_head::ProjectionNames;
#[cfg(feature = "multi-head")]
pub use multi_head::{
    MultiHeadAttention, MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace, Projection, WeightStorage,
};
pub use partial::{MergedAttention, PartialAttention};
pub use plan::{AttentionPlan, SERIAL_BELOW_FLOPS};
pub use rotary::{Rotary, RotaryPairing, RotaryScaling};
pub use score_modifier::{MAX_PARAMETERS, ScoreContext, ScoreModifier, ScoreVector, alibi_slopes};
pub use shape::AttentionShape;
pub use tensor::{TensorView, TensorViewMut};
pub use varlen::{CuSeqlens, VarlenPlan, attention_varlen, attention_varlen_into};
pub use weights::attention_weights;
pub use workspace::Workspace;
