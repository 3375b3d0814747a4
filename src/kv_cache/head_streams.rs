//! The keys, or the values, of one layer: each head of each sequence a contiguous stream of tokens.

use std::any::Any;
use std::ops::Range;

use super::huge_buffer::HugeBuffer;
use crate::workspace::ALIGN_BYTES;
use crate::{AttentionError, Element, TensorView};

/// Memory order `[batch, num_kv_heads, capacity, dim]`, every stream from a cache line on.
pub(super) struct HeadStreams<T> {
    buffer: HugeBuffer<T>,
    num_kv_heads: usize,
    dim: usize,
    /// Elements from a head to the next.
    head_stride: usize,
}

impl<T: Element> HeadStreams<T> {
    /// `shape` is `[batch, num_kv_heads, capacity, dim]`.
    pub(super) fn new(shape: [usize; 4]) -> Result<Self, AttentionError> {
        let [batch, num_kv_heads, capacity, dim] = shape;
        let mut strides = [0, 0, dim, 1];
        let mut len = || {
            strides[1] = capacity.checked_mul(dim)?.checked_next_multiple_of(ALIGN_BYTES / size_of::<T>())?;
            strides[0] = strides[1].checked_mul(num_kv_heads)?;
            let len = strides[0].checked_mul(batch)?;
            len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize).map(|_| len)
        };
        let len = len().ok_or(AttentionError::SizeOverflow { shape, strides })?;
        Ok(Self { buffer: HugeBuffer::zeroed(len)?, num_kv_heads, dim, head_stride: strides[1] })
    }

    /// The first `len` tokens of these sequences.
    pub(super) fn view(&self, sequences: Range<usize>, len: usize) -> Result<TensorView<'_, T>, AttentionError> {
        let sequence_stride = self.num_kv_heads * self.head_stride; // fits: `new` checked it
        let data = &self.buffer[sequences.start * sequence_stride..sequences.end * sequence_stride];
        let shape = [sequences.len(), self.num_kv_heads, len, self.dim];
        TensorView::with_strides(data, shape, [sequence_stride, self.head_stride, self.dim, 1])
    }

    /// Writes the tokens of sequence `from` of `tokens` into `sequence`, the first at `position`. The caller has checked that
    /// heads and features agree and that there is room.
    pub(super) fn write<S: Element<Acc = T::Acc>>(
        &mut self,
        sequence: usize,
        position: usize,
        tokens: &TensorView<'_, S>,
        from: usize,
    ) {
        let [_, heads, count, dim] = tokens.shape();
        let [.., token_stride, dim_stride] = tokens.strides();
        if count == 0 || dim == 0 {
            return; // a view without elements may have offsets outside its slice
        }
        for head in 0..heads {
            let source = &tokens.data()[tokens.layout().offset([from, head, 0])..];
            let stream = self.tokens_mut(sequence, head, position..position + count);
            if dim_stride == 1 && token_stride == dim {
                convert(&source[..count * dim], stream);
                continue;
            }
            for (token, row) in stream.chunks_exact_mut(dim).enumerate() {
                let source = &source[token * token_stride..];
                if dim_stride == 1 {
                    convert(&source[..dim], row);
                } else {
                    for (d, element) in row.iter_mut().enumerate() {
                        *element = converted(source[d * dim_stride]);
                    }
                }
            }
        }
    }

    /// Copies the first `len` tokens of `sequence` from `other`, which differs in its capacity alone.
    pub(super) fn copy_sequence(&mut self, other: &Self, sequence: usize, len: usize) {
        for head in 0..self.num_kv_heads {
            let start = other.start(sequence, head);
            let live = &other.buffer[start..start + len * other.dim];
            self.tokens_mut(sequence, head, 0..len).copy_from_slice(live);
        }
    }

    fn start(&self, sequence: usize, head: usize) -> usize {
        (sequence * self.num_kv_heads + head) * self.head_stride
    }

    fn tokens_mut(&mut self, sequence: usize, head: usize, tokens: Range<usize>) -> &mut [T] {
        let start = self.start(sequence, head);
        &mut self.buffer[start + tokens.start * self.dim..start + tokens.end * self.dim]
    }
}

/// Of equal lengths.
fn convert<S: Element, T: Element<Acc = S::Acc>>(source: &[S], target: &mut [T]) {
    for (target, &source) in target.iter_mut().zip(source) {
        *target = converted(source);
    }
}

/// The nearest value; the very same bits where both types are one. Which case it is, the compiler knows.
#[inline(always)]
fn converted<S: Element, T: Element<Acc = S::Acc>>(value: S) -> T {
    match (&value as &dyn Any).downcast_ref::<T>() {
        Some(&same) => same,
        None => T::from_acc(value.to_acc()),
    }
}
