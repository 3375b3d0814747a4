//! One rank's queries against a block of keys, a slice of queries at a time, merged into what they have seen so far.

use std::ops::Range;

use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, Parallelism, PartialAttention, TensorView,
    TensorViewMut, attention_into,
};
use rayon::prelude::*;

use crate::visible::Visible;
use crate::{RingShape, Wire};

/// Rows (query and head) of a slice for each thread: what the library gives a thread at a time. Between two slices MPI is let work,
/// every few milliseconds at 4096 keys.
const SLICE_ROWS: usize = 512;

/// Rows that a thread merges at a time.
const MERGE_ROWS: usize = 64;

/// A rank's queries, and results over the keys so far.
pub(crate) struct Rows<'a> {
    /// `[batch, num_heads, len, head_dim]`
    pub(crate) q: &'a [f32],
    /// `[batch, num_heads, len, value_dim]`
    pub(crate) out: &'a mut [f32],
    /// `[batch, num_heads, len]`; -inf where no key was seen.
    pub(crate) logsumexp: &'a mut [f32],
    /// Where in the sequence they are, ascending.
    pub(crate) positions: &'a [Range<usize>],
    pub(crate) len: usize,
}

/// Keys of one KV head, as they lie in memory.
pub(crate) struct Block<'a, K> {
    /// `[keys, head_dim]`
    pub(crate) k: &'a [K],
    /// `[keys, value_dim]`
    pub(crate) v: &'a [K],
    /// Where in the sequence they are.
    pub(crate) parts: &'a [Range<usize>],
}

/// What does not change from block to block, and the result of one call.
pub(crate) struct Compute {
    shape: RingShape,
    visible: Visible,
    config: AttentionConfig,
    /// Queries of a slice.
    slice: usize,
    /// `[group_size, slice, value_dim]`
    out: Vec<f32>,
    /// `[group_size, slice]`
    logsumexp: Vec<f32>,
}

impl Compute {
    /// For a rank with so many queries.
    pub(crate) fn new(shape: &RingShape, visible: Visible, config: &AttentionConfig, q_len: usize) -> Self {
        let threads = if is_parallel(config) { rayon::current_num_threads() } else { 1 };
        let group_size = shape.group_size();
        let slice = (SLICE_ROWS * threads).div_ceil(group_size).min(q_len);
        let rows = group_size * slice;
        let (out, logsumexp) = (vec![0.0; rows * shape.value_dim], vec![0.0; rows]);
        Self { shape: *shape, visible, config: *config, slice, out, logsumexp }
    }

    /// Bytes of its buffers.
    pub(crate) fn bytes(&self) -> usize {
        (self.out.len() + self.logsumexp.len()) * size_of::<f32>()
    }

    /// Adds a block of KV head `lane` (of `batch * num_kv_heads`), and calls `between` after every call of the library.
    pub(crate) fn add_block<K: Wire>(
        &mut self,
        rows: &mut Rows<'_>,
        lane: usize,
        block: &Block<'_, K>,
        between: &mut dyn FnMut(),
    ) -> Result<(), AttentionError> {
        let RingShape { head_dim, value_dim, .. } = self.shape;
        let (group_size, len) = (self.shape.group_size(), rows.len);
        // The heads of a group lie one behind the other, and so do groups.
        let first_row = lane * group_size * len;
        let q = &rows.q[first_row * head_dim..][..group_size * len * head_dim];
        let mut first = 0;
        for range in rows.positions {
            for start in (0..range.len()).step_by(self.slice) {
                let slice = self.slice.min(range.len() - start);
                let queries = range.start + start..range.start + start + slice;
                let at = first + start;
                let shape = [1, group_size, slice, head_dim];
                let q = TensorView::with_strides(&q[at * head_dim..], shape, [0, len * head_dim, head_dim, 1])?;
                for call in self.visible.calls(&self.config, &queries, block.parts) {
                    let shape = |dim| [1, 1, call.keys.len(), dim];
                    let k = TensorView::from_bhsd(&block.k[call.keys.start * head_dim..], shape(head_dim))?;
                    let v = TensorView::from_bhsd(&block.v[call.keys.start * value_dim..], shape(value_dim))?;
                    let out = &mut self.out[..group_size * slice * value_dim];
                    let logsumexp = &mut self.logsumexp[..group_size * slice];
                    let view = TensorViewMut::from_bhsd(out, [1, group_size, slice, value_dim])?;
                    let mut outputs = AttentionOutputs::new(view).with_logsumexp(logsumexp);
                    attention_into(&AttentionInputs::new(q, k, v), &mut outputs, &call.config)?;
                    let all = first_row..first_row + group_size * len;
                    let sum = Sum {
                        out: &mut rows.out[all.start * value_dim..all.end * value_dim],
                        logsumexp: &mut rows.logsumexp[all],
                        len,
                        value_dim,
                    };
                    sum.add(out, logsumexp, at..at + slice, is_parallel(&self.config))?;
                    between();
                }
            }
            first += range.len();
        }
        Ok(())
    }
}

pub(crate) fn is_parallel(config: &AttentionConfig) -> bool {
    matches!(config.parallelism, Parallelism::Rayon)
}

/// Results of some heads, `[heads, len, value_dim]` and `[heads, len]`.
pub(crate) struct Sum<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) logsumexp: &'a mut [f32],
    pub(crate) len: usize,
    pub(crate) value_dim: usize,
}

impl Sum<'_> {
    /// Merges results of the same heads for `queries` alone, contiguous. Rows are independent: threads change no bits.
    pub(crate) fn add(
        self,
        out: &[f32],
        logsumexp: &[f32],
        queries: Range<usize>,
        is_parallel: bool,
    ) -> Result<(), AttentionError> {
        let Self { len, value_dim, .. } = self;
        let sums = self.out.chunks_exact_mut(len * value_dim).zip(self.logsumexp.chunks_exact_mut(len));
        let partials = out.chunks_exact(queries.len() * value_dim).zip(logsumexp.chunks_exact(queries.len()));
        let pieces = sums.zip(partials).flat_map(|((sum_out, sum_lse), (out, lse))| {
            let sum_out = &mut sum_out[queries.start * value_dim..queries.end * value_dim];
            let sums = sum_out.chunks_mut(MERGE_ROWS * value_dim).zip(sum_lse[queries.clone()].chunks_mut(MERGE_ROWS));
            let partials = out.chunks(MERGE_ROWS * value_dim).zip(lse.chunks(MERGE_ROWS));
            sums.zip(partials).map(|(sum, partial)| Piece { sum, partial })
        });
        let add = |piece: Piece<'_>| {
            let ((sum_out, sum_lse), (out, lse)) = (piece.sum, piece.partial);
            let shape = [1, 1, lse.len(), value_dim];
            let view = TensorViewMut::from_bhsd(sum_out, shape)?;
            let mut sum = AttentionOutputs::new(view).with_logsumexp(sum_lse);
            PartialAttention::new(TensorView::from_bhsd(out, shape)?, lse)?.add_to(&mut sum)
        };
        if is_parallel {
            pieces.collect::<Vec<_>>().into_par_iter().try_for_each(add)
        } else {
            pieces.into_iter().try_for_each(add)
        }
    }
}

/// A few rows of one head, output and logsumexp.
struct Piece<'a> {
    sum: (&'a mut [f32], &'a mut [f32]),
    partial: (&'a [f32], &'a [f32]),
}
