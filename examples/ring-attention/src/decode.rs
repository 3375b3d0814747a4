//! A few queries against a cache whose keys lie on all ranks.
//!
//! The queries are broadcast, every rank attends to the keys that it has, and the results are merged by a binomial tree, whose form depends
//! on the number of ranks alone: what was merged first stays first whoever is late.
//!
//! ```text
//! rank  0   1   2   3   4
//!       0 <-1   2 <-3   4
//!       0 <---- 2       4
//!       0 <------------ 4       then broadcast
//! ```

use std::ops::Range;

use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, Mask, TensorView, TensorViewMut, attention_into,
};
use mpi::Rank;
use mpi::traits::{Communicator, Root};

use crate::agree::{config_fields, shape_fields};
use crate::compute::{Sum, is_parallel};
use crate::visible::Visible;
use crate::wait::Messages;
use crate::{Ring, RingError, RingShape, Wire};

/// Sizes of a decode call, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeShape {
    /// Heads and features.
    pub ring: RingShape,
    /// New queries: one, or a few.
    pub q_len: usize,
    /// Where in the sequence the first of them stands: its keys are those up to there, under a causal mask.
    pub position: usize,
}

/// The keys and values that one rank has, of any layout: those of a `KvCache`, say.
#[derive(Debug, Clone, Copy)]
pub struct CacheShard<'a, K> {
    /// `[batch, num_kv_heads, len, head_dim]`
    pub k: TensorView<'a, K>,
    /// `[batch, num_kv_heads, len, value_dim]`
    pub v: TensorView<'a, K>,
    /// Where in the sequence they are, in the same order: ascending.
    pub positions: &'a [Range<usize>],
}

impl Ring {
    /// Attention of `q`, `[batch, num_heads, q_len, head_dim]` on rank `root` (ignored on the others), to the keys of all ranks: the
    /// output `[batch, num_heads, q_len, value_dim]`, on all of them. All ranks must call this.
    ///
    /// # Errors
    /// [`RingError`], on all ranks. What goes wrong later ends the job, with a message.
    pub fn decode<K: Wire>(
        &self,
        shape: &DecodeShape,
        config: &AttentionConfig,
        (root, q): (usize, &[f32]),
        shard: &CacheShard<'_, K>,
    ) -> Result<Vec<f32>, RingError> {
        let visible = self.agree_on_decode(shape, config, (root, q.len()), shard)?;
        let RingShape { batch, num_heads, head_dim, value_dim, .. } = shape.ring;
        let rows = batch * num_heads * shape.q_len;
        let mut queries = vec![0.0; rows * head_dim];
        if self.rank() == root {
            queries.copy_from_slice(q);
        }
        self.broadcast(root, &mut queries, "the queries");

        // Output and logsumexp in one buffer: one message.
        let mut state = vec![0.0; rows * (value_dim + 1)];
        let (out, logsumexp) = state.split_at_mut(rows * value_dim);
        logsumexp.fill(f32::NEG_INFINITY);
        let sum = Sum { out, logsumexp, len: shape.q_len, value_dim };
        if let Err(error) = add_shard(shape, config, &visible, &queries, shard, sum) {
            self.abort(&format!("rank {}: {error}", self.rank()));
        }
        self.merge_to(root, &mut state, shape, is_parallel(config));
        let out = &mut state[..rows * value_dim];
        self.broadcast(root, out, "the result");
        state.truncate(rows * value_dim);
        Ok(state)
    }

    fn agree_on_decode<K: Wire>(
        &self,
        shape: &DecodeShape,
        config: &AttentionConfig,
        (root, q_elements): (usize, usize),
        shard: &CacheShard<'_, K>,
    ) -> Result<Visible, RingError> {
        let RingShape { batch, num_heads, num_kv_heads, head_dim, value_dim } = shape.ring;
        let positions: usize = shard.positions.iter().map(ExactSizeIterator::len).sum();
        let checked = || {
            shape.ring.check()?;
            if shape.q_len == 0 {
                return Err(RingError::Zero { field: "q_len" });
            }
            AttentionPlan::new(&shape.ring.with_lens(shape.q_len, positions), config)?;
            for (tensor, found, dim) in [("k", shard.k.shape(), head_dim), ("v", shard.v.shape(), value_dim)] {
                let expected = [batch, num_kv_heads, positions, dim];
                if found != expected {
                    return Err(RingError::ShardShapeMismatch { rank: self.rank(), tensor, expected, found });
                }
            }
            let expected = batch * num_heads * shape.q_len * head_dim;
            if self.rank() == root && q_elements != expected {
                let (expected, found) = (expected as u64, q_elements as u64);
                return Err(RingError::ShareLenMismatch {
                    rank: root,
                    tensor: "q",
                    positions: shape.q_len,
                    expected,
                    found,
                });
            }
            if expected.max(batch * num_heads * shape.q_len * (value_dim + 1)) > i32::MAX as usize {
                return Err(RingError::MessageTooLong { elements: expected });
            }
            Visible::new(config, shape.position + shape.q_len)
        };
        let checked = checked();
        let mut same = vec![("the call (1 plan, 2 run, 3 decode)", 3), ("root", root as u64)];
        same.extend(shape_fields::<K>(&shape.ring));
        same.extend([("q_len", shape.q_len as u64), ("position", shape.position as u64)]);
        same.extend(config_fields(config));
        self.agree(&same, &[], checked.as_ref().err().cloned())?;
        checked
    }

    fn broadcast(&self, root: usize, elements: &mut [f32], what: &str) {
        mpi::request::scope(|scope| {
            let request = self.comm.process_at_rank(root as Rank).immediate_broadcast_into(scope, elements);
            self.finish(request, &format!("{what} from rank {root}"));
        });
    }

    /// Merges everybody's state into that of `root`.
    fn merge_to(&self, root: usize, state: &mut [f32], shape: &DecodeShape, is_parallel: bool) {
        let (ranks, value_dim) = (self.ranks(), shape.ring.value_dim);
        let place = (self.rank() + ranks - root) % ranks; // in the tree, whose root is place 0
        let rank_at = |place: usize| (place + root) % ranks;
        let out_len = state.len() / (value_dim + 1) * value_dim;
        let mut received = vec![0.0; if place + 1 < ranks { state.len() } else { 0 }];
        let mut distance = 1;
        while distance < ranks {
            if place & distance != 0 {
                let (to, state): (_, &[f32]) = (rank_at(place - distance), state);
                return self.exchange(|messages| messages.send(to, state));
            }
            if place + distance < ranks {
                let (from, into) = (rank_at(place + distance), &mut received[..]);
                self.exchange(|messages| messages.receive(from, into));
                let (out, logsumexp) = state.split_at_mut(out_len);
                let sum = Sum { out, logsumexp, len: shape.q_len, value_dim };
                let (out, logsumexp) = received.split_at(out_len);
                if let Err(error) = sum.add(out, logsumexp, 0..shape.q_len, is_parallel) {
                    self.abort(&format!("rank {}: {error}", self.rank()));
                }
            }
            distance *= 2;
        }
    }

    fn exchange<'a>(&self, begin: impl FnOnce(&mut Messages<'a, '_, f32>)) {
        mpi::request::scope(|scope| {
            let mut messages = Messages::new(self, scope);
            begin(&mut messages);
            messages.finish(|| "merging results".to_owned());
        });
    }
}

/// Adds attention to the keys of one rank to `sum`, of all heads.
fn add_shard<K: Wire>(
    shape: &DecodeShape,
    config: &AttentionConfig,
    visible: &Visible,
    q: &[f32],
    shard: &CacheShard<'_, K>,
    sum: Sum<'_>,
) -> Result<(), fused_attention::AttentionError> {
    let RingShape { batch, num_heads, head_dim, .. } = shape.ring;
    let q = TensorView::from_bhsd(q, [batch, num_heads, shape.q_len, head_dim])?;
    let mut full = config.with_window(None, None).with_prefix_len(0);
    full.mask = Mask::Full;
    let heads = batch * num_heads;
    let Sum { out: sum_out, logsumexp: sum_logsumexp, len, value_dim } = sum;
    let (mut out, mut logsumexp) = (vec![0.0; heads * len * value_dim], vec![0.0; heads * len]);
    // Queries that see the same keys of this rank are one call: most often all of them.
    let seen = |query: usize| seen(visible, shape.position + query, shard.positions);
    let mut first = 0;
    while first < shape.q_len {
        let ranges = seen(first);
        let alike = (first..shape.q_len).take_while(|&query| seen(query) == ranges).count();
        let queries = first..first + alike;
        let (out, logsumexp) = (&mut out[..heads * alike * value_dim], &mut logsumexp[..heads * alike]);
        for keys in ranges.into_iter().filter(|keys| !keys.is_empty()) {
            let view = TensorViewMut::from_bhsd(out, [batch, num_heads, alike, value_dim])?;
            let mut outputs = AttentionOutputs::new(view).with_logsumexp(logsumexp);
            let (k, v) = (shard.k.seq_range(keys.clone())?, shard.v.seq_range(keys)?);
            attention_into(&AttentionInputs::new(q.seq_range(queries.clone())?, k, v), &mut outputs, &full)?;
            let sum = Sum { out: &mut *sum_out, logsumexp: &mut *sum_logsumexp, len, value_dim };
            sum.add(out, logsumexp, queries.clone(), is_parallel(config))?;
        }
        first = queries.end;
    }
    Ok(())
}

/// The keys of a rank that a query sees, by their number there: those of the prefix, and those of its window.
fn seen(visible: &Visible, position: usize, owned: &[Range<usize>]) -> [Range<usize>; 2] {
    let keys_before = |position: usize| -> usize {
        owned.iter().map(|range| position.clamp(range.start, range.end) - range.start).sum()
    };
    let prefix = keys_before(visible.prefix_len());
    let window = visible.window_of(position);
    let (start, end) = (keys_before(window.start), keys_before(window.end));
    if start <= prefix { [0..end.max(prefix), 0..0] } else { [0..prefix, start..end.max(start)] }
}
