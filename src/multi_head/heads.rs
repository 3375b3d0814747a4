//! Where Q, K, V and the heads' outputs of a call lie: rows of tokens, which `gemm` writes and the kernels read as they are.

use std::ops::Range;

use super::product::{Rows, RowsMut};
use super::{MultiHeadShape, Qkv};
use crate::{AttentionError, Element, TensorView, TensorViewMut};

/// The heads of some tokens, `[batch, seq, heads, dim]` with `stride` from a token to the next.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenRows {
    pub(super) start: usize,
    pub(super) stride: usize,
    pub(super) batch: usize,
    pub(super) seq: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
}

impl TokenRows {
    /// Some tokens of one sequence.
    pub(super) fn of_sequence(&self, sequence: usize, tokens: Range<usize>) -> Self {
        let start = self.start + (sequence * self.seq + tokens.start) * self.stride;
        Self { start, batch: 1, seq: tokens.len(), ..*self }
    }

    pub(super) fn features(&self) -> usize {
        self.heads * self.dim
    }

    pub(super) fn view<'w>(&self, data: &'w [f32]) -> Result<TensorView<'w, f32>, AttentionError> {
        let data = data.get(self.range()).unwrap_or(&[]);
        TensorView::with_strides(data, self.view_shape(), self.strides())
    }

    pub(super) fn view_mut<'w>(&self, data: &'w mut [f32]) -> Result<TensorViewMut<'w, f32>, AttentionError> {
        let data = data.get_mut(self.range()).unwrap_or(&mut []);
        TensorViewMut::with_strides(data, self.view_shape(), self.strides())
    }

    /// The same memory as tokens of all their features.
    pub(super) fn rows<'w>(&self, data: &'w [f32]) -> Rows<'w> {
        Rows { data: &data[self.range()], count: self.batch * self.seq, stride: self.stride }
    }

    pub(super) fn rows_mut<'w>(&self, data: &'w mut [f32]) -> RowsMut<'w> {
        RowsMut { data: &mut data[self.range()], count: self.batch * self.seq, stride: self.stride }
    }

    /// From the first to the last element.
    pub(super) fn range(&self) -> Range<usize> {
        match self.batch * self.seq {
            0 => 0..0,
            tokens => self.start..self.start + (tokens - 1) * self.stride + self.features(),
        }
    }

    fn view_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq, self.dim]
    }

    fn strides(&self) -> [usize; 4] {
        // Fits but where the batch is empty, and nobody goes from a sequence to the next.
        [self.seq.wrapping_mul(self.stride), self.dim, self.stride, 1]
    }
}

/// All of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub(super) q: TokenRows,
    pub(super) k: TokenRows,
    pub(super) v: TokenRows,
    /// What attention writes; behind the others.
    pub(super) context: TokenRows,
    /// Numbers of all.
    pub(super) len: usize,
}

impl Heads {
    /// For `batch` sequences of `q_len` tokens of `x`, and `kv_len` of the source. Where one product gives several of Q, K and V, their rows are
    /// parts of longer ones.
    pub(super) fn new<T: Element<Acc = f32>>(
        shape: &MultiHeadShape,
        qkv: &Qkv<'_, T>,
        [batch, q_len, kv_len]: [usize; 3],
        is_cross: bool,
    ) -> Result<Self, AttentionError> {
        let MultiHeadShape { num_heads, num_kv_heads, head_dim, value_dim, .. } = *shape;
        let overflow = AttentionError::SizeOverflow {
            shape: [batch, num_heads, q_len.max(kv_len), head_dim.max(value_dim)],
            strides: [0; 4],
        };
        let (q, k, v) = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_dim);
        // Features of the rows of each product, and which of Q, K, V they hold.
        let (q_row, k_row, v_row) = match (qkv, is_cross) {
            (Qkv::Separate(_), _) => (q, k, v),
            (Qkv::Fused(_), false) => (q + k + v, 0, 0),
            (Qkv::Fused(_), true) => (q, k + v, 0),
        };
        let layout = || {
            let tokens = [batch.checked_mul(q_len)?, batch.checked_mul(kv_len)?];
            let mut len = 0usize;
            let mut rows = |features: usize, tokens: usize| {
                let (start, stride) = (len, row_stride(features)?);
                len = len.checked_add(stride.checked_mul(tokens)?)?;
                Some((start, stride))
            };
            let (q_start, q_stride) = rows(q_row, tokens[0])?;
            let (mut k_start, mut k_stride) = rows(k_row, tokens[1])?;
            let (mut v_start, mut v_stride) = rows(v_row, tokens[1])?;
            if k_row == 0 {
                (k_start, k_stride) = (q_start + q, q_stride);
            }
            if v_row == 0 {
                (v_start, v_stride) = (k_start + k, k_stride);
            }
            let (context_start, context_stride) = rows(num_heads * value_dim, tokens[0])?;
            let rows = |start, stride, seq, heads, dim| TokenRows { start, stride, batch, seq, heads, dim };
            let heads = Self {
                q: rows(q_start, q_stride, q_len, num_heads, head_dim),
                k: rows(k_start, k_stride, kv_len, num_kv_heads, head_dim),
                v: rows(v_start, v_stride, kv_len, num_kv_heads, value_dim),
                context: rows(context_start, context_stride, q_len, num_heads, value_dim),
                len,
            };
            isize::try_from(len.checked_mul(size_of::<f32>())?).ok()?;
            Some(heads)
        };
        layout().ok_or(overflow)
    }
}

/// Elements from a token to the next: whole cache lines.
fn row_stride(features: usize) -> Option<usize> {
    features.checked_next_multiple_of(16)
}
