//! Attention of a shared sequence to itself: [`RingPlan`].

use std::time::{Duration, Instant};

use fused_attention::{AttentionConfig, AttentionError, AttentionPlan, AttentionShape};

use crate::agree::{config_fields, shape_fields, shares_fields};
use crate::compute::{Block, Compute, Rows};
use crate::itinerary::{Itinerary, Visit};
use crate::route::Route;
use crate::visible::Visible;
use crate::wait::Messages;
use crate::{Ring, RingError, Shares, Wire};

/// Keys of a block that travels, of one KV head. At head_dim 128 in f32 it is 4 MiB: long against a message's latency, and a row is
/// merged once for 4096 products. Buffers hold two blocks, whatever the length of the sequence.
pub const DEFAULT_BLOCK_KEYS: usize = 4096;

/// Sizes of the tensors, but for their lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingShape {
    /// Independent sequences, all shared in the same way.
    pub batch: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Features of Q and K.
    pub head_dim: usize,
    /// Features of V and the output, at least 1 here.
    pub value_dim: usize,
}

impl RingShape {
    /// Query heads for each KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Of a call with these lengths.
    pub(crate) fn with_lens(&self, q_len: usize, kv_len: usize) -> AttentionShape {
        let Self { batch, num_heads, num_kv_heads, head_dim, value_dim } = *self;
        AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim }
    }

    pub(crate) fn check(&self) -> Result<(), RingError> {
        for (field, size) in [
            ("batch", self.batch),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("value_dim", self.value_dim),
        ] {
            if size == 0 {
                return Err(RingError::Zero { field });
            }
        }
        Ok(())
    }
}

/// What one rank did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Sent to the next rank.
    pub bytes_sent: u64,
    /// In so many messages: one for K and one for V of each part of a block, its own and those passed on.
    pub messages_sent: u64,
    /// In calls of the library, merging, and letting MPI work in between.
    pub computing: Duration,
    /// Waiting for messages with nothing to compute: what communication costs.
    pub waiting: Duration,
}

/// One rank's tensors, contiguous, of the positions of its share in ascending order.
#[derive(Debug, Clone, Copy)]
pub struct Share<'a, K> {
    /// `[batch, num_heads, len, head_dim]`
    pub q: &'a [f32],
    /// `[batch, num_kv_heads, len, head_dim]`
    pub k: &'a [K],
    /// `[batch, num_kv_heads, len, value_dim]`
    pub v: &'a [K],
}

/// A call that all ranks agree on, and this rank's buffers for it. Good for any number of layers.
pub struct RingPlan<K> {
    itinerary: Itinerary,
    compute: Compute,
    /// Blocks in turn: one is computed with and passed on while the other is received.
    slots: [Vec<K>; 2],
}

impl<K: Wire> RingPlan<K> {
    /// Plans and allocates. All ranks must call this, with the same arguments, and get an error if one of them got another. `block_keys`:
    /// see [`DEFAULT_BLOCK_KEYS`].
    ///
    /// Mask, window, prefix, softcap and scale of the config are those of the whole sequence; parallelism is that of a rank.
    ///
    /// # Errors
    /// [`RingError`], on all ranks.
    pub fn new(
        ring: &Ring,
        shape: &RingShape,
        shares: &Shares,
        config: &AttentionConfig,
        block_keys: usize,
    ) -> Result<Self, RingError> {
        let planned = Self::plan(ring, shape, shares, config, block_keys);
        let mut same = vec![CALL_PLAN];
        same.extend(shape_fields::<K>(shape));
        same.extend(shares_fields(shares));
        same.extend(config_fields(config));
        same.push(("block_keys", block_keys as u64));
        ring.agree(&same, &[], planned.as_ref().err().cloned())?;
        planned
    }

    fn plan(
        ring: &Ring,
        shape: &RingShape,
        shares: &Shares,
        config: &AttentionConfig,
        block_keys: usize,
    ) -> Result<Self, RingError> {
        shape.check()?;
        if block_keys == 0 {
            return Err(RingError::Zero { field: "block_keys" });
        }
        if shares.ranks() != ring.ranks() {
            return Err(RingError::RanksMismatch { shares: shares.ranks(), ranks: ring.ranks() });
        }
        let q_len = shares.len_of(ring.rank());
        // Every call will be like this one: what is wrong with it is found here.
        AttentionPlan::new(&shape.with_lens(q_len, q_len), config)?;
        let visible = Visible::new(config, shares.seq_len())?;
        let route = Route::new(shares.clone(), visible, block_keys);
        let elements = route.most_keys().saturating_mul(shape.head_dim.saturating_add(shape.value_dim));
        if elements > i32::MAX as usize {
            return Err(RingError::MessageTooLong { elements });
        }
        let compute = Compute::new(shape, visible, config, q_len);
        let slots = [(); 2].map(|()| vec![K::nearest(0.0); elements]);
        Ok(Self { itinerary: Itinerary::new(route, shape, ring.rank()), compute, slots })
    }

    /// Bytes of the buffers beyond Q, K, V and the output: they grow with `block_keys` and the threads, not with the sequence. (The
    /// library's scratch comes to at most 2 MiB a thread besides, see `AttentionPlan::workspace_len`.)
    pub fn buffer_bytes(&self) -> usize {
        self.compute.bytes() + 2 * size_of_val(&self.slots[0][..])
    }

    /// Attention of this rank's positions to all, into `out` `[batch, num_heads, len, value_dim]` and `logsumexp` `[batch, num_heads,
    /// len]`. All ranks must call this.
    ///
    /// # Errors
    /// [`RingError::ShareLenMismatch`] on all ranks. What goes wrong later ends the job, with a message.
    pub fn run(
        &mut self,
        ring: &Ring,
        share: &Share<'_, K>,
        out: &mut [f32],
        logsumexp: &mut [f32],
    ) -> Result<Report, RingError> {
        let Self { itinerary, compute, slots } = self;
        let lens = [share.q.len(), share.k.len(), share.v.len(), out.len(), logsumexp.len()];
        check_lens(ring, itinerary, lens)?;
        let (rank, ranks) = (ring.rank(), ring.ranks());
        let (before, behind) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
        out.fill(0.0);
        logsumexp.fill(f32::NEG_INFINITY);
        let (positions, len) = (itinerary.own_positions(), itinerary.own_len());
        let mut rows = Rows { q: share.q, out, logsumexp, positions, len };
        let mut report = Report::default();
        let [current, incoming] = slots;
        // First with all of this rank's own keys, then with what has come; while it computes, the next block comes.
        let mut visit = None;
        loop {
            let next = itinerary.next(visit);
            let sent = itinerary.sent(visit, current, [share.k, share.v]);
            let received = next.map_or(Vec::new(), |next| itinerary.received(next, incoming));
            report.bytes_sent += sent.iter().map(|segment| size_of_val(*segment) as u64).sum::<u64>();
            report.messages_sent += sent.len() as u64;
            mpi::request::scope(|scope| {
                let mut messages = Messages::new(ring, scope);
                received.into_iter().for_each(|segment| messages.receive(before, K::words_mut(segment)));
                sent.into_iter().for_each(|segment| messages.send(behind, K::words(segment)));
                let started = Instant::now();
                let between = &mut || messages.progress();
                let computed = match visit {
                    None => add_own(itinerary, compute, share, &mut rows, between),
                    Some(visit) => add_visitor(itinerary, compute, (visit, &current[..]), &mut rows, between),
                };
                if let Err(error) = computed {
                    ring.abort(&format!("rank {rank}: {error}"));
                }
                report.computing += started.elapsed();
                report.waiting += messages.finish(|| itinerary.name(visit));
            });
            std::mem::swap(current, incoming);
            visit = next;
            if visit.is_none() {
                return Ok(report);
            }
        }
    }
}

const CALL_PLAN: (&str, u64) = ("the call (1 plan, 2 run, 3 decode)", 1);
const CALL_RUN: (&str, u64) = (CALL_PLAN.0, 2);

/// Compares everybody's tensors with their shares.
fn check_lens(ring: &Ring, itinerary: &Itinerary, lens: [usize; 5]) -> Result<(), RingError> {
    let all = ring.agree(&[CALL_RUN], &lens.map(|len| len as u64), None)?;
    for (rank, lens) in all.into_iter().enumerate() {
        let (positions, expected) = itinerary.lens_of(rank);
        for ((tensor, expected), found) in ["q", "k", "v", "out", "logsumexp"].into_iter().zip(expected).zip(lens) {
            if found != expected as u64 {
                return Err(RingError::ShareLenMismatch { rank, tensor, positions, expected: expected as u64, found });
            }
        }
    }
    Ok(())
}

fn add_own<K: Wire>(
    itinerary: &Itinerary,
    compute: &mut Compute,
    share: &Share<'_, K>,
    rows: &mut Rows<'_>,
    between: &mut dyn FnMut(),
) -> Result<(), AttentionError> {
    for lane in 0..itinerary.lanes() {
        let [k, v] = itinerary.own_lane([share.k, share.v], lane);
        compute.add_block(rows, lane, &Block { k, v, parts: itinerary.own_positions() }, between)?;
    }
    Ok(())
}

fn add_visitor<K: Wire>(
    itinerary: &Itinerary,
    compute: &mut Compute,
    (visit, slot): (Visit, &[K]),
    rows: &mut Rows<'_>,
    between: &mut dyn FnMut(),
) -> Result<(), AttentionError> {
    let (parts, [k, v]) = itinerary.visitor(visit, slot);
    compute.add_block(rows, itinerary.lane(visit), &Block { k, v, parts: &parts }, between)
}
