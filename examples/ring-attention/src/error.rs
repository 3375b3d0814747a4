//! What can be wrong with a call on several ranks: [`RingError`].

use fused_attention::AttentionError;

/// Why a call was refused. Every rank returns one, and no tensor has travelled or been written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// Ranks were given different calls.
    #[error("rank {rank} was called with {field} {found}, rank 0 with {expected}")]
    Disagreement {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// In what.
        field: &'static str,
        /// What rank 0 has.
        expected: u64,
        /// What `rank` has.
        found: u64,
    },
    /// A tensor of a rank is not that of its share.
    #[error("{tensor} of rank {rank} holds {found} elements, its share of {positions} positions has {expected}")]
    ShareLenMismatch {
        /// The first such rank.
        rank: usize,
        /// `"q"`, `"k"`, `"v"`, `"out"` or `"logsumexp"`.
        tensor: &'static str,
        /// Positions of the rank's share.
        positions: usize,
        /// Elements that they have.
        expected: u64,
        /// Elements given.
        found: u64,
    },
    /// Keys or values of a rank's part of a cache have a shape of their own.
    #[error("{tensor} of rank {rank} has shape {found:?}, its part of the cache has {expected:?}")]
    ShardShapeMismatch {
        /// The first such rank.
        rank: usize,
        /// `"k"` or `"v"`.
        tensor: &'static str,
        /// `[batch, num_kv_heads, positions, head_dim or value_dim]`.
        expected: [usize; 4],
        /// Shape of the tensor.
        found: [usize; 4],
    },
    /// Another rank found its own call to be wrong.
    #[error("rank {rank} refused its call; its own error says why")]
    Refused {
        /// The first such rank.
        rank: usize,
    },
    /// The sequence was cut for another number of ranks.
    #[error("the shares are those of {shares} ranks, there are {ranks}")]
    RanksMismatch {
        /// Ranks of the shares.
        shares: usize,
        /// Ranks of the communicator.
        ranks: usize,
    },
    /// A size that must not be 0 is.
    #[error("{field} is 0, it must be at least 1")]
    Zero {
        /// The size.
        field: &'static str,
    },
    /// More than a message of MPI may count.
    #[error("a message would have {elements} elements, MPI counts up to {}", i32::MAX)]
    MessageTooLong {
        /// Elements.
        elements: usize,
    },
    /// A mask that this program does not know.
    #[error("mask {mask} is not known here")]
    UnknownMask {
        /// As it prints.
        mask: String,
    },
    /// What the library says.
    #[error(transparent)]
    Attention(#[from] AttentionError),
}

/// Silence for longer than the time limit. There is nobody to return this to: it is printed, and the job ends (`MPI_Abort`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} has waited {seconds} s for {what}: a rank is stuck, or the time limit too short")]
pub(crate) struct Silence {
    pub(crate) rank: usize,
    pub(crate) seconds: u64,
    pub(crate) what: String,
}
