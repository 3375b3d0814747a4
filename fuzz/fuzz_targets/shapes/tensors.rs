//! Tensors of any shape, strides and slice length.

use arbitrary::Arbitrary;
use fused_attention::{AttentionError, TensorView, TensorViewMut};
use fused_attention_fuzz::{Memory, Size, reach};

/// Elements of one slice.
pub const MAX_SLICE: usize = 1 << 16;

#[derive(Debug, Arbitrary)]
pub struct Tensor {
    layout: Layout,
    /// Another size for one axis.
    change: Option<(u8, Size)>,
    /// Elements more or fewer than the view reaches.
    slice_change: Option<i8>,
}

#[derive(Debug, Arbitrary)]
enum Layout {
    Bhsd,
    Bshd,
    Strided(Memory),
    AnyStrides([Size; 4]),
}

/// A tensor before it becomes a view.
pub struct Description<'c> {
    shape: [usize; 4],
    strides: Option<[usize; 4]>,
    tensor: &'c Tensor,
    /// Elements of its slice.
    pub len: usize,
}

impl<'c> Description<'c> {
    pub fn new(tensor: &'c Tensor, mut shape: [usize; 4], is_output: bool) -> Self {
        if let Some((axis, size)) = tensor.change {
            shape[usize::from(axis % 4)] = size.get();
        }
        let [_, heads, len, dim] = shape;
        let strides = match &tensor.layout {
            Layout::Bhsd => row_major([heads, len, dim]),
            Layout::Bshd => row_major([len, heads, dim]).map(|[batch, len, heads, dim]| [batch, heads, len, dim]),
            Layout::Strided(memory) if is_output => memory.strides(shape),
            Layout::Strided(memory) => memory.input_strides(shape),
            Layout::AnyStrides(strides) => Some(strides.map(Size::get)),
        };
        // Where the reach is too large for a slice, the view must be refused whatever the slice.
        let exact = strides.and_then(|strides| reach(shape, strides)).filter(|&n| n <= MAX_SLICE).unwrap_or(64);
        let len = exact.saturating_add_signed(isize::from(tensor.slice_change.unwrap_or(0)));
        Self { shape, strides, tensor, len }
    }

    /// Whether the slice holds every element, and they can be counted.
    fn fits(&self) -> bool {
        let reach = self.strides.and_then(|strides| reach(self.shape, strides));
        let elements = self.shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        reach.is_some_and(|n| n <= self.len) && (elements.is_some() || self.shape.contains(&0))
    }

    /// `None` where it was refused, as it must be, or has no strides.
    pub fn view<'a, T: Copy>(&self, data: &'a [T]) -> Option<TensorView<'a, T>> {
        let [batch, heads, len, dim] = self.shape;
        let view = match self.tensor.layout {
            Layout::Bhsd => TensorView::from_bhsd(data, self.shape),
            Layout::Bshd => TensorView::from_bshd(data, [batch, len, heads, dim]),
            _ => TensorView::with_strides(data, self.shape, self.strides?),
        };
        assert_eq!(view.is_ok(), self.fits(), "{:?} {:?}, {} elements", self.shape, self.strides, self.len);
        view.ok()
    }

    pub fn view_mut<'a>(&self, data: &'a mut [f32]) -> Option<TensorViewMut<'a, f32>> {
        let [batch, heads, len, dim] = self.shape;
        let view = match self.tensor.layout {
            Layout::Bhsd => TensorViewMut::from_bhsd(data, self.shape),
            Layout::Bshd => TensorViewMut::from_bshd(data, [batch, len, heads, dim]),
            _ => TensorViewMut::with_strides(data, self.shape, self.strides?),
        };
        match &view {
            Ok(_) => assert!(self.fits(), "{:?} {:?}, {} elements", self.shape, self.strides, self.len),
            Err(AttentionError::OverlappingOutput { .. }) => {}
            Err(error) => assert!(!self.fits(), "{error}"),
        }
        view.ok()
    }
}

/// Strides of contiguous memory with these inner sizes.
fn row_major([a, b, c]: [usize; 3]) -> Option<[usize; 4]> {
    let bc = b.checked_mul(c)?;
    Some([a.checked_mul(bc)?, bc, c, 1])
}

pub fn filled(len: usize) -> Box<[f32]> {
    (0..len).map(|i| (i % 13) as f32 / 8.0 - 0.75).collect()
}

/// The positions asked for where there are such, else the whole view.
pub fn in_range<'a>(view: TensorView<'a, f32>, range: Option<[Size; 2]>) -> TensorView<'a, f32> {
    let Some([start, end]) = range.map(|range| range.map(Size::get)) else { return view };
    let [batch, heads, seq, dim] = view.shape();
    let part = match view.seq_range(start..end) {
        Ok(part) => part,
        Err(error) => {
            assert!(start > end || end > seq, "{error}");
            return view;
        }
    };
    assert!(start <= end && end <= seq, "{start}..{end} of {seq}");
    assert_eq!((part.shape(), part.strides()), ([batch, heads, end - start, dim], view.strides()));
    if !part.shape().contains(&0) {
        let last = part.shape().map(|size| size - 1);
        for [batch, heads, position, dim] in [[0; 4], last] {
            let whole = view.get([batch, heads, start + position, dim]);
            assert_eq!(part.get([batch, heads, position, dim]), Some(whole.expect("inside")));
        }
    }
    part
}
