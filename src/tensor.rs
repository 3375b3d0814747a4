//! 4-D strided views, checked when they are made.
//!
//! The logical axes are always `[batch, heads, seq, head_dim]`, whatever the order in memory. A view that exists is
//! valid: every index inside its shape lies inside its slice, and no two elements of a mutable view coincide.

use std::ops::Range;

use crate::AttentionError;

/// A read-only tensor `[batch, heads, seq, head_dim]` over a slice. Any strides are legal, 0 (broadcast) and a
/// non-unit last stride included.
///
/// ```
/// use fused_attention::TensorView;
/// let data: Vec<f32> = (0..24).map(|x| x as f32).collect();
/// // Memory order [batch, seq, heads, head_dim] = [1, 3, 2, 4]:
/// let view = TensorView::from_bshd(&data, [1, 3, 2, 4])?;
/// assert_eq!(view.shape(), [1, 2, 3, 4]);
/// assert_eq!(view.get([0, 1, 2, 3]), Some(23.0));
/// # Ok::<(), fused_attention::AttentionError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a, T> {
    data: &'a [T],
    layout: Layout,
}

/// A tensor `[batch, heads, seq, head_dim]` to be written. Any strides are legal as long as no two elements coincide.
#[derive(Debug)]
pub struct TensorViewMut<'a, T> {
    data: &'a mut [T],
    layout: Layout,
}

/// Shape and strides of a view, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: [usize; 4],
    pub(crate) strides: [usize; 4],
}

impl Layout {
    fn from_bhsd(shape: [usize; 4]) -> Result<Self, AttentionError> {
        let [_, heads, seq, dim] = shape;
        Self::contiguous(shape, [0, 1, 2, 3], [heads, seq, dim])
    }

    fn from_bshd([batch, seq, heads, dim]: [usize; 4]) -> Result<Self, AttentionError> {
        Self::contiguous([batch, heads, seq, dim], [0, 2, 1, 3], [seq, heads, dim])
    }

    /// Strides of contiguous memory whose axis order (slowest first) is `order` and whose inner sizes are `inner`.
    fn contiguous(shape: [usize; 4], order: [usize; 4], inner: [usize; 3]) -> Result<Self, AttentionError> {
        let mut strides = [1; 4];
        let mut stride = 1usize;
        for (&axis, size) in order[..3].iter().zip(inner).rev() {
            stride = stride.checked_mul(size).ok_or(AttentionError::SizeOverflow { shape, strides })?;
            strides[axis] = stride;
        }
        Ok(Self { shape, strides })
    }

    /// One past the largest element offset; 0 where the view has no elements.
    fn reach(&self) -> Result<usize, AttentionError> {
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let overflow = AttentionError::SizeOverflow { shape: self.shape, strides: self.strides };
        let mut last = 0usize;
        for (size, stride) in self.shape.iter().zip(self.strides) {
            let step = (size - 1).checked_mul(stride).ok_or_else(|| overflow.clone())?;
            last = last.checked_add(step).ok_or_else(|| overflow.clone())?;
        }
        // Broadcasting makes the number of elements larger than the memory: bound it too.
        self.shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size)).ok_or_else(|| overflow.clone())?;
        last.checked_add(1).filter(|&n| n <= isize::MAX as usize).ok_or(overflow)
    }

    fn check_len(&self, len: usize) -> Result<(), AttentionError> {
        let needed = self.reach()?;
        if needed > len {
            return Err(AttentionError::SliceTooShort { needed, len, shape: self.shape, strides: self.strides });
        }
        Ok(())
    }

    /// Sufficient for all elements to be distinct: taking the axes of more than one element by growing stride,
    /// each stride exceeds the largest offset that the axes before it can reach.
    fn check_distinct(&self) -> Result<(), AttentionError> {
        if self.shape.contains(&0) {
            return Ok(());
        }
        let mut axes = [0, 1, 2, 3];
        axes.sort_unstable_by_key(|&axis| self.strides[axis]);
        let mut reached = 0usize;
        for axis in axes {
            if self.shape[axis] < 2 {
                continue;
            }
            if self.strides[axis] <= reached {
                return Err(AttentionError::OverlappingOutput { shape: self.shape, strides: self.strides });
            }
            reached += (self.shape[axis] - 1) * self.strides[axis]; // cannot overflow: `reach` was checked
        }
        Ok(())
    }

    /// Whether the features of a position are neighbours in memory.
    pub(crate) fn has_neighbours(&self) -> bool {
        self.strides[3] == 1 || self.shape[3] <= 1
    }

    /// Element offset of an index inside the shape.
    #[inline(always)]
    pub(crate) fn offset(&self, [batch, head, position]: [usize; 3]) -> usize {
        debug_assert!(batch < self.shape[0] && head < self.shape[1] && position < self.shape[2]);
        batch * self.strides[0] + head * self.strides[1] + position * self.strides[2]
    }

    /// The same with another number of positions.
    pub(crate) fn with_seq(self, seq: usize) -> Self {
        let [batch, heads, _, dim] = self.shape;
        Self { shape: [batch, heads, seq, dim], ..self }
    }

    fn element(&self, index: [usize; 4]) -> Option<usize> {
        let inside = index.iter().zip(self.shape).all(|(&i, size)| i < size);
        inside.then(|| self.offset([index[0], index[1], index[2]]) + index[3] * self.strides[3])
    }
}

impl<'a, T> TensorView<'a, T> {
    /// Contiguous memory in PyTorch's order `[batch, heads, seq, head_dim]`.
    ///
    /// # Errors
    /// [`AttentionError::SliceTooShort`], [`AttentionError::SizeOverflow`].
    pub fn from_bhsd(data: &'a [T], shape: [usize; 4]) -> Result<Self, AttentionError> {
        Self::checked(data, Layout::from_bhsd(shape)?)
    }

    /// Contiguous memory in FlashAttention's order `[batch, seq, heads, head_dim]`; `shape` is given in that order.
    ///
    /// # Errors
    /// [`AttentionError::SliceTooShort`], [`AttentionError::SizeOverflow`].
    pub fn from_bshd(data: &'a [T], shape: [usize; 4]) -> Result<Self, AttentionError> {
        Self::checked(data, Layout::from_bshd(shape)?)
    }

    /// Any memory: `shape` is `[batch, heads, seq, head_dim]`, `strides` the elements between neighbours along each
    /// axis. A stride of 0 repeats the same elements along that axis.
    ///
    /// # Errors
    /// [`AttentionError::SliceTooShort`], [`AttentionError::SizeOverflow`].
    pub fn with_strides(data: &'a [T], shape: [usize; 4], strides: [usize; 4]) -> Result<Self, AttentionError> {
        Self::checked(data, Layout { shape, strides })
    }

    fn checked(data: &'a [T], layout: Layout) -> Result<Self, AttentionError> {
        layout.check_len(data.len())?;
        Ok(Self { data, layout })
    }

    /// The positions of `range` alone: some of the keys, say, or one of several sequences that lie behind one another.
    ///
    /// ```
    /// use fused_attention::TensorView;
    /// let view = TensorView::from_bhsd(&[0.0, 1.0, 2.0, 3.0], [1, 1, 4, 1])?;
    /// assert_eq!(view.seq_range(2..4)?.get([0, 0, 0, 0]), Some(2.0));
    /// # Ok::<(), fused_attention::AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// [`AttentionError::SeqRangeOutOfBounds`] where the range ends behind the last position or before its own start.
    pub fn seq_range(&self, range: Range<usize>) -> Result<Self, AttentionError> {
        let Range { start, end } = range;
        let seq = self.layout.shape[2];
        if start > end || end > seq {
            return Err(AttentionError::SeqRangeOutOfBounds { start, end, seq });
        }
        Ok(self.positions(range))
    }

    /// The same where the range is known to lie inside.
    pub(crate) fn positions(&self, range: Range<usize>) -> Self {
        debug_assert!(range.start <= range.end && range.end <= self.layout.shape[2]);
        let layout = self.layout.with_seq(range.len());
        // Where there is no element, there may be no memory behind `start` either.
        let offset = if layout.shape.contains(&0) { self.data.len() } else { range.start * layout.strides[2] };
        Self { data: &self.data[offset..], layout }
    }

    /// These indices along each axis; inside the shape.
    pub(crate) fn part(&self, ranges: [Range<usize>; 4]) -> Self {
        let Layout { strides, .. } = self.layout;
        let shape = [0, 1, 2, 3].map(|axis| ranges[axis].len());
        // Where there is no element, there may be no memory behind the offset either.
        let offset = if shape.contains(&0) { 0 } else { (0..4).map(|axis| ranges[axis].start * strides[axis]).sum() };
        Self { data: &self.data[offset..], layout: Layout { shape, strides } }
    }

    /// `[batch, heads, seq, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    /// Elements between neighbours along each axis of [`shape`](Self::shape).
    pub fn strides(&self) -> [usize; 4] {
        self.layout.strides
    }

    /// The slice that the view reads.
    pub fn data(&self) -> &'a [T] {
        self.data
    }

    /// The element at `[batch, head, position, dim]`, or `None` outside the shape.
    pub fn get(&self, index: [usize; 4]) -> Option<T>
    where
        T: Copy,
    {
        self.layout.element(index).map(|offset| self.data[offset])
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }
}

impl<'a, T> TensorViewMut<'a, T> {
    /// Contiguous memory in PyTorch's order `[batch, heads, seq, head_dim]`.
    ///
    /// # Errors
    /// [`AttentionError::SliceTooShort`], [`AttentionError::SizeOverflow`].
    pub fn from_bhsd(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, AttentionError> {
        Self::checked(data, Layout::from_bhsd(shape)?)
    }

    /// Contiguous memory in FlashAttention's order `[batch, seq, heads, head_dim]`; `shape` is given in that order.
    ///
    /// # Errors
    /// [`AttentionError::SliceTooShort`], [`AttentionError::SizeOverflow`].
    pub fn from_bshd(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, AttentionError> {
        Self::checked(data, Layout::from_bshd(shape)?)
    }

    /// Any memory whose elements are distinct by this sufficient rule: taking the axes with more than one element by
    /// growing stride, each stride exceeds the largest offset that the axes before it reach.
    ///
    /// # Errors
    /// [`AttentionError::SliceTooShort`], [`AttentionError::SizeOverflow`], [`AttentionError::OverlappingOutput`].
    pub fn with_strides(data: &'a mut [T], shape: [usize; 4], strides: [usize; 4]) -> Result<Self, AttentionError> {
        Self::checked(data, Layout { shape, strides })
    }

    fn checked(data: &'a mut [T], layout: Layout) -> Result<Self, AttentionError> {
        layout.check_len(data.len())?;
        layout.check_distinct()?;
        Ok(Self { data, layout })
    }

    /// `[batch, heads, seq, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    /// Elements between neighbours along each axis of [`shape`](Self::shape).
    pub fn strides(&self) -> [usize; 4] {
        self.layout.strides
    }

    /// The same tensor, read-only.
    pub fn as_view(&self) -> TensorView<'_, T> {
        TensorView { data: self.data, layout: self.layout }
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    pub(crate) fn data_mut(&mut self) -> &mut [T] {
        self.data
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.data.as_mut_ptr()
    }
}
