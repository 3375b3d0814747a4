//! Tensors in any layout, with canaries wherever no element lies.

use fused_attention::{TensorView, TensorViewMut};

use super::Number;

/// How a tensor `[batch, heads, seq, dim]` lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Contiguous `[batch, heads, seq, dim]`.
    Bhsd,
    /// Contiguous `[batch, seq, heads, dim]`.
    Bshd,
    /// `[batch, heads, seq, dim]` with gaps after each row, head and batch.
    PaddedRows,
    /// Rows 4 KiB (or a larger power of two) apart.
    PowerOfTwoRows,
    /// `[batch, heads, dim, seq]` with a gap after each: the last stride is not 1.
    Transposed,
    /// Every other element: the last stride is 2.
    Interleaved,
    /// All positions share one row. Inputs only.
    BroadcastSeq,
    /// All heads share one. Inputs only.
    BroadcastHeads,
    /// All of the batch share one. Inputs only.
    BroadcastBatch,
}

impl Layout {
    /// Layouts that outputs may have.
    pub const DISTINCT: [Self; 6] =
        [Self::Bhsd, Self::Bshd, Self::PaddedRows, Self::PowerOfTwoRows, Self::Transposed, Self::Interleaved];

    /// Strides of all-distinct layouts, or 0 along the shared axis.
    pub fn strides(self, [_, heads, seq, dim]: [usize; 4]) -> [usize; 4] {
        let rows = |row: usize, head_gap: usize, batch_gap: usize| {
            let head = seq * row + head_gap;
            [heads * head + batch_gap, head, row, 1]
        };
        match self {
            Self::Bhsd => rows(dim, 0, 0),
            Self::Bshd => [seq * heads * dim, dim, heads * dim, 1],
            Self::PaddedRows => rows(dim + 3, 1, 2),
            Self::PowerOfTwoRows => rows(dim.max(1024).next_power_of_two(), 0, 0),
            Self::Transposed => [heads * dim * (seq + 1), dim * (seq + 1), 1, seq + 1],
            Self::Interleaved => [heads * seq * dim * 2, seq * dim * 2, dim * 2, 2],
            Self::BroadcastSeq => [heads * dim, dim, 0, 1],
            Self::BroadcastHeads => [seq * dim, 0, dim, 1],
            Self::BroadcastBatch => [0, seq * dim, dim, 1],
        }
    }
}

/// A strided tensor that owns its memory, which ends with its last element.
#[derive(Debug, Clone)]
pub struct Tensor<T = f32> {
    pub data: Vec<T>,
    pub shape: [usize; 4],
    pub strides: [usize; 4],
}

impl<T: Number> Tensor<T> {
    /// All canaries.
    pub fn unwritten(shape: [usize; 4], layout: Layout) -> Self {
        let strides = layout.strides(shape);
        let len = if shape.contains(&0) {
            0
        } else {
            1 + shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>()
        };
        Self { data: vec![T::CANARY; len], shape, strides }
    }

    /// `value` of each index, in logical order; a gap, if read, shows as NaN.
    pub fn from_fn(shape: [usize; 4], layout: Layout, mut value: impl FnMut([usize; 4]) -> T) -> Self {
        let mut tensor = Self::unwritten(shape, layout);
        for index in indices(shape) {
            tensor.set(index, value(index));
        }
        tensor
    }

    /// The same values in another memory order.
    pub fn in_layout(&self, layout: Layout) -> Self {
        Self::from_fn(self.shape, layout, |index| self.get(index))
    }

    /// Each value in another type.
    pub fn map<U: Number>(&self, value: impl Fn(T) -> U) -> Tensor<U> {
        Tensor::from_fn(self.shape, Layout::Bhsd, |index| value(self.get(index)))
    }

    /// The part whose index along `axis` lies in `range`, as a tensor of its own.
    pub fn part(&self, axis: usize, range: std::ops::Range<usize>) -> Self {
        let mut shape = self.shape;
        shape[axis] = range.len();
        Self::from_fn(shape, Layout::Bhsd, |mut index| {
            index[axis] += range.start;
            self.get(index)
        })
    }

    fn offset(&self, index: [usize; 4]) -> usize {
        assert!(index.iter().zip(self.shape).all(|(&i, size)| i < size), "{index:?} outside {:?}", self.shape);
        index.iter().zip(self.strides).map(|(i, stride)| i * stride).sum()
    }

    pub fn get(&self, index: [usize; 4]) -> T {
        self.data[self.offset(index)]
    }

    pub fn set(&mut self, index: [usize; 4], value: T) {
        let offset = self.offset(index);
        self.data[offset] = value;
    }

    /// Fills one row `[batch, head, position]`.
    pub fn fill_row(&mut self, [batch, head, position]: [usize; 3], value: T) {
        for d in 0..self.shape[3] {
            self.set([batch, head, position, d], value);
        }
    }

    pub fn view(&self) -> TensorView<'_, T> {
        TensorView::with_strides(&self.data, self.shape, self.strides).unwrap()
    }

    pub fn view_mut(&mut self) -> TensorViewMut<'_, T> {
        TensorViewMut::with_strides(&mut self.data, self.shape, self.strides).unwrap()
    }

    /// All values in logical order `[batch, heads, seq, dim]`.
    pub fn values(&self) -> Vec<T> {
        indices(self.shape).map(|index| self.get(index)).collect()
    }

    /// Every element was written: none is still the canary.
    pub fn assert_written(&self) {
        for index in indices(self.shape) {
            assert_ne!(self.get(index).bits(), T::CANARY.bits(), "{index:?} of {:?} was not written", self.shape);
        }
    }

    /// Nothing but the elements was written.
    pub fn assert_gaps_untouched(&self) {
        let mut is_element = vec![false; self.data.len()];
        for index in indices(self.shape) {
            is_element[self.offset(index)] = true;
        }
        for (offset, (value, is_element)) in self.data.iter().zip(is_element).enumerate() {
            let untouched = is_element || value.bits() == T::CANARY.bits();
            assert!(untouched, "gap at {offset} of {:?} {:?} holds {value}", self.shape, self.strides);
        }
    }

    /// Nothing at all was written.
    pub fn assert_untouched(&self) {
        assert!(self.data.iter().all(|x| x.bits() == T::CANARY.bits()), "output was written");
    }
}

/// All indices of a shape, the last axis fastest.
pub fn indices([batch, heads, seq, dim]: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    // One loop, not four in each other: memcheck takes what the compiler makes of those for uninitialised.
    (0..batch * heads * seq * dim).map(move |i| [i / dim / seq / heads, i / dim / seq % heads, i / dim % seq, i % dim])
}
