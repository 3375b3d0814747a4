//! Attention over a sequence that is shared among processes: ring attention over MPI (Liu et al., 2023, <https://arxiv.org/abs/2310.01889>),
//! with zig-zag shares under a causal mask.
//!
//! Every rank owns some positions of the sequence and holds Q, K and V of them. Blocks of K and V travel round the ring, each rank
//! computes its queries against the block that it has while it sends that on and receives the next, and merges the result
//! into those of the blocks before. Nothing here knows how attention is computed: [`fused_attention::attention_into`] with a `logsumexp`
//! and [`fused_attention::PartialAttention`] are all that it takes.
//!
//! ```text
//! shares   who owns which positions                 agree     ranks compare their calls, and find the same error
//! visible  the mask, between any two of them        wait      messages under way, with a time limit
//! route    how far which keys travel                wire      f32 and bf16
//! itinerary  a rank's part in it, step by step      decode    one query against keys on all ranks
//! compute  a rank's queries against a block         plan      a step: send, receive, compute, merge
//! ```
//!
//! # Bits
//! Blocks are merged in the order of the ring, which does not depend on when they come: the same call on as many ranks with as many
//! threads each gives the same bits, however long anything took. On other numbers of them it differs by roundings.
//!
//! # Errors
//! What ranks were called with is compared before anything travels, so a wrong shape on one rank is an error on all. A rank that dies ends
//! the job, which `mpirun` sees to; one that is stuck ends it by the [time limit](Ring::with_time_limit) of the others.

mod agree;
mod compute;
mod decode;
mod error;
mod itinerary;
mod plan;
mod route;
mod shares;
mod visible;
mod wait;
mod wire;

pub use decode::{CacheShard, DecodeShape};
pub use error::RingError;
pub use plan::{DEFAULT_BLOCK_KEYS, Report, RingPlan, RingShape, Share};
pub use shares::Shares;
pub use wait::{DEFAULT_TIME_LIMIT, Ring};
pub use wire::Wire;
