//! Moving rows from the tensors' memory to the kernels' layouts, and elements from the tensors' types to the accumulator; and what is
//! compiled per element type.
//!
//! Elements that are no accumulators, or are no neighbours in memory, pass through a few KiB of stack: a row at a time is converted,
//! so that what follows is the same for every type and stride.

#![allow(unsafe_code)]

use half::{bf16, f16};
use pulp::Simd;

use crate::InstructionSet;
use crate::decode::{DecodeHeads, PortableDecodeHeads};
use crate::kernels::WithTiles;
use crate::kernels::factors::{Accumulators, Bf16Pairs, Factors};
use crate::kernels::lane::{Lane, as_rows};
use crate::kernels::stored::Stored;
use crate::kernels::transpose::SIDE;
use crate::row_block::RowBlock;
use crate::score_modifier::Unmodified;
use crate::score_pass::{RowOp, TileOp};
use crate::tensor::Layout;
use crate::unpacking::{UnpackOut, UnpackRows};

/// The vector code of a task that moves elements, for one element type and its accumulator. Not generic, for the same reason as
/// [`TaskKernels`](crate::task::TaskKernels).
pub(crate) trait Packing<A: Lane>: Stored<A> {
    fn pack_q(set: InstructionSet, op: PackQ<'_, Self, A, Accumulators>);
    fn pack_keys(set: InstructionSet, op: PackKeys<'_, Self, A, Accumulators>);
    fn unpack_out(set: InstructionSet, op: UnpackOut<'_, Self, A>);
    fn unpack_rows(set: InstructionSet, op: UnpackRows<'_, Self, A>);
    #[cfg(feature = "multi-head")]
    fn transpose_rows(set: InstructionSet, op: TransposeRows<'_, Self, A>);
    /// A few rows against keys and values of this type.
    fn decode(set: InstructionSet, op: DecodeHeads<'_, '_, '_, A, Self>);
    /// Modifies scores, with a bias of this type.
    fn modify_tile(set: InstructionSet, op: TileOp<'_, '_, Self, A, Unmodified>) -> bool;
    fn modify_row(set: InstructionSet, op: RowOp<'_, '_, Self, A, Unmodified>) -> bool;
}

macro_rules! packing {
    ($element:ty => $accumulator:ty, $run:ident, $decode_portable:expr) => {
        impl Packing<$accumulator> for $element {
            fn pack_q(set: InstructionSet, op: PackQ<'_, $element, $accumulator, Accumulators>) {
                set.$run(op);
            }
            fn pack_keys(set: InstructionSet, op: PackKeys<'_, $element, $accumulator, Accumulators>) {
                set.narrow().$run(op);
            }
            fn unpack_out(set: InstructionSet, op: UnpackOut<'_, $element, $accumulator>) {
                set.$run(op);
            }
            fn unpack_rows(set: InstructionSet, op: UnpackRows<'_, $element, $accumulator>) {
                set.narrow().$run(op);
            }
            #[cfg(feature = "multi-head")]
            fn transpose_rows(set: InstructionSet, op: TransposeRows<'_, $element, $accumulator>) {
                set.narrow().$run(op);
            }
            fn decode(set: InstructionSet, op: DecodeHeads<'_, '_, '_, $accumulator, $element>) {
                if set.has_fma() {
                    return set.run_with_fma(op);
                }
                let decode: fn(InstructionSet, DecodeHeads<'_, '_, '_, $accumulator, $element>) = $decode_portable;
                decode(set, op);
            }
            fn modify_tile(set: InstructionSet, op: TileOp<'_, '_, $element, $accumulator, Unmodified>) -> bool {
                set.narrow().$run(op)
            }
            fn modify_row(set: InstructionSet, op: RowOp<'_, '_, $element, $accumulator, Unmodified>) -> bool {
                set.narrow().$run(op)
            }
        }
    };
}

packing!(f32 => f32, run, |set, op| set.run_portable(PortableDecodeHeads(op)));
packing!(f16 => f32, run, |_, _| unreachable!("such keys are packed before"));
packing!(bf16 => f32, run, |_, _| unreachable!("such keys are packed before"));
packing!(f64 => f64, run_f64, |set, op| set.run_portable(PortableDecodeHeads(op)));

/// Dims of `SIDE` rows that pass through the stack at a time: 2 KiB in f32.
pub(crate) const CHUNK: usize = 64;

/// How rows of `T` become the steps of [`Factors`].
///
/// # Safety
/// Where [`is_row`](Self::is_row) says so, `T` must be `A` and a step an element.
pub(crate) unsafe trait PackedFrom<T: Stored<A>, A: Lane>: Factors<A> {
    /// Whether the steps of a row with this stride are the row itself.
    fn is_row(self, stride: usize) -> bool;

    /// # Safety
    /// `from` must be valid for reading `dims` elements at `stride`, of which `to` must hold the steps.
    unsafe fn pack_row<S: Simd>(self, simd: S, from: *const T, stride: usize, dims: usize, to: &mut [A]);
}

// SAFETY: `IS_ACCUMULATOR` says that `T` is `A`, and a step of this is an element.
unsafe impl<T: Stored<A>, A: Lane> PackedFrom<T, A> for Accumulators {
    #[inline(always)]
    fn is_row(self, stride: usize) -> bool {
        T::IS_ACCUMULATOR && stride == 1
    }

    #[inline(always)]
    unsafe fn pack_row<S: Simd>(self, simd: S, from: *const T, stride: usize, dims: usize, to: &mut [A]) {
        // SAFETY: the same contract, a step an element.
        unsafe { widen_row::<S, T, A>(simd, from, stride, &mut to[..dims]) };
    }
}

// SAFETY: a row is never said to be its steps.
unsafe impl PackedFrom<bf16, f32> for Bf16Pairs {
    #[inline(always)]
    fn is_row(self, _: usize) -> bool {
        false // elements of 16 bits may lie where no f32 can
    }

    #[inline(always)]
    unsafe fn pack_row<S: Simd>(self, _: S, from: *const bf16, stride: usize, dims: usize, to: &mut [f32]) {
        let to = &mut to[..dims.div_ceil(2)];
        if let Some(last) = to.last_mut() {
            *last = 0.0;
        }
        let to: *mut bf16 = to.as_mut_ptr().cast();
        // SAFETY: `from` is valid for `dims` elements at `stride` by the caller's promise; `to` holds as many of half its size, or one more, and
        // is exclusively borrowed, so they do not overlap. Any bits are a value of both types.
        unsafe {
            if stride == 1 {
                return core::ptr::copy_nonoverlapping(from, to, dims);
            }
            for i in 0..dims {
                to.add(i).write(*from.add(i * stride));
            }
        }
    }
}

/// Copies a block of keys (or values) to contiguous steps.
pub(crate) struct PackKeys<'a, T, A, F> {
    pub(crate) from: &'a [T],
    pub(crate) key_stride: usize,
    pub(crate) dim_stride: usize,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    /// `[keys][to_stride]`
    pub(crate) to: &'a mut [A],
    pub(crate) to_stride: usize,
    pub(crate) factors: F,
}

impl<T: Stored<A>, A: Lane, F: PackedFrom<T, A>> WithTiles for PackKeys<'_, T, A, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { from, key_stride, dim_stride, keys, dim, to, to_stride, factors } = self;
        for (key, to) in to.chunks_exact_mut(to_stride).take(keys).enumerate() {
            let from = &from[key * key_stride..][..(dim - 1) * dim_stride + 1];
            // SAFETY: `from` has just been cut to `dim` elements at `dim_stride`.
            unsafe { factors.pack_row(simd, from.as_ptr(), dim_stride, dim, to) };
        }
    }
}

/// Copies contiguous rows to columns of accumulators.
#[cfg(feature = "multi-head")]
pub(crate) struct TransposeRows<'a, T, A> {
    /// `[rows][row_len]`, at least one row and one element.
    pub(crate) from: &'a [T],
    pub(crate) row_len: usize,
    /// `[row_len][to_stride]`; the columns behind the last row, up to a multiple of `SIDE`, become copies of it.
    pub(crate) to: &'a mut [A],
    pub(crate) to_stride: usize,
}

#[cfg(feature = "multi-head")]
impl<T: Stored<A>, A: Lane> WithTiles for TransposeRows<'_, T, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { from, row_len, to, to_stride } = self;
        let rows = from.len() / row_len;
        for first in (0..rows).step_by(SIDE) {
            let row = |i: usize| from[(first + i).min(rows - 1) * row_len..][..row_len].as_ptr();
            let from: [*const T; SIDE] = core::array::from_fn(row);
            let to = &mut to[first..][..(row_len - 1) * to_stride + SIDE];
            // SAFETY: each row has just been cut to `row_len` elements, of which `to` has as many rows.
            unsafe { pack_rows::<S, T, A, _>(simd, Accumulators, from, (1, row_len), to, to_stride) };
        }
    }
}

/// Packs the rows of Q of a task into panels `[steps][panel_rows]`, scaled unless the scores will be. Lanes past the
/// last row hold copies of it, zeros, or in a half without rows what was there; nobody reads their results.
pub(crate) struct PackQ<'a, T, A, F> {
    pub(crate) task: &'a RowBlock,
    /// Valid for reading at every index inside the layout.
    pub(crate) q: *const T,
    pub(crate) layout: Layout,
    pub(crate) scale: A,
    /// `[panels][steps][panel_rows]`
    pub(crate) q_panels: &'a mut [A],
    pub(crate) factors: F,
}

impl<T: Stored<A>, A: Lane, F: PackedFrom<T, A>> WithTiles for PackQ<'_, T, A, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { task, q, layout, factors, .. } = self;
        let (panel_rows, head_dim) = (task.panel_rows, layout.shape[3]);
        let steps = F::steps(head_dim);
        assert_eq!(panel_rows, ROW_VECTORS * A::lanes::<S>());
        let scale = A::splat(simd, self.scale);
        for (panel, q_panel) in self.q_panels.chunks_exact_mut(panel_rows * steps).enumerate() {
            let first_row = panel * panel_rows;
            if first_row >= task.rows {
                break;
            }
            // Where the rows are in the lower half, the upper one is not looked at.
            let vectors = task.vectors_in_use::<ROW_VECTORS>(first_row);
            for lane in (0..vectors * A::lanes::<S>()).step_by(SIDE) {
                if first_row + lane >= task.rows {
                    // Nobody reads the results of these lanes; zeros keep them from turning into subnormals, which are slow.
                    for q in q_panel[lane..].chunks_mut(panel_rows) {
                        q[..SIDE].fill(A::ZERO);
                    }
                    continue;
                }
                // SAFETY: the index is inside the layout, where `q` is valid.
                let from: [*const T; SIDE] = core::array::from_fn(|i| unsafe {
                    q.add(layout.offset(task.index((first_row + lane + i).min(task.rows - 1))))
                });
                // SAFETY: rows of `head_dim` elements at the layout's last stride are valid.
                unsafe {
                    let row = (layout.strides[3], head_dim);
                    pack_rows::<S, T, A, F>(simd, factors, from, row, &mut q_panel[lane..], panel_rows);
                }
            }
            if F::SCALES_SCORES {
                continue;
            }
            for q in as_rows::<S, A, ROW_VECTORS>(q_panel) {
                for vector in 0..ROW_VECTORS {
                    if vector < vectors {
                        q[vector] = A::mul(simd, q[vector], scale);
                    }
                }
            }
        }
    }
}

/// `SIDE` rows of `head_dim` elements at `stride` into as many lanes of a panel that starts with the first of them; its rows end at the
/// panel's end.
///
/// # Safety
/// Each of `from` must be valid for reading such a row. `panel` must have as many (begun) rows of `panel_rows` as a row has steps.
#[inline(always)]
unsafe fn pack_rows<S: Simd, T: Stored<A>, A: Lane, F: PackedFrom<T, A>>(
    simd: S,
    factors: F,
    from: [*const T; SIDE],
    (stride, head_dim): (usize, usize),
    panel: &mut [A],
    panel_rows: usize,
) {
    if factors.is_row(stride) {
        // SAFETY: valid for `head_dim` accumulators, as `T` is `A` (the trait's contract).
        return unsafe { transpose_rows::<S, A>(simd, from.map(|row| row.cast()), panel, panel_rows) };
    }
    let mut chunk = [[A::ZERO; CHUNK]; SIDE];
    let chunk_dims = CHUNK * F::ELEMENTS;
    for first_dim in (0..head_dim).step_by(chunk_dims) {
        let dims = chunk_dims.min(head_dim - first_dim);
        let panel = &mut panel[first_dim / F::ELEMENTS * panel_rows..];
        for (chunk, row) in chunk.iter_mut().zip(from) {
            // SAFETY: `first_dim + dims <= head_dim`, and the chunk has room for the steps of `chunk_dims`.
            unsafe { factors.pack_row(simd, row.wrapping_add(first_dim * stride), stride, dims, chunk) };
        }
        let end = panel.len().min((F::steps(dims) - 1) * panel_rows + SIDE);
        let mut rows = [core::ptr::null(); SIDE];
        for (row, chunk) in rows.iter_mut().zip(&chunk) {
            *row = chunk.as_ptr();
        }
        // SAFETY: the steps of `dims` elements in each row of the chunk, and as many begun rows of the panel.
        unsafe { transpose_rows::<S, A>(simd, rows, &mut panel[..end], panel_rows) };
    }
}

/// As [`pack_rows`] for contiguous accumulators.
///
/// # Safety
/// As [`pack_rows`], an element a step.
#[inline(always)]
unsafe fn transpose_rows<S: Simd, A: Lane>(simd: S, from: [*const A; SIDE], panel: &mut [A], panel_rows: usize) {
    let head_dim = panel.len().div_ceil(panel_rows);
    let mut p = 0;
    while p + SIDE <= head_dim {
        let to = panel[p * panel_rows..][..(SIDE - 1) * panel_rows + SIDE].as_mut_ptr();
        let to: [*mut A; SIDE] = core::array::from_fn(|i| to.wrapping_add(i * panel_rows));
        // SAFETY: `p + SIDE <= head_dim`, the length of a row; `to` has just been cut to its 8 rows.
        unsafe { A::transpose(simd, from.map(|row| row.add(p)), &to) };
        p += SIDE;
    }
    while p < head_dim {
        for (to, from) in panel[p * panel_rows..][..SIDE].iter_mut().zip(from) {
            // SAFETY: `p < head_dim`, the length of a row.
            *to = unsafe { *from.add(p) };
        }
        p += 1;
    }
}

/// Elements to accumulators, as many as `to` holds.
///
/// # Safety
/// `from` must be valid for reading as many elements at `stride`.
#[inline(always)]
unsafe fn widen_row<S: Simd, T: Stored<A>, A: Lane>(simd: S, from: *const T, stride: usize, to: &mut [A]) {
    let (lanes, len) = (A::lanes::<S>(), to.len());
    // SAFETY: every access is below `len`.
    unsafe {
        if stride != 1 {
            for (i, to) in to.iter_mut().enumerate() {
                *to = (*from.add(i * stride)).widen_one();
            }
            return;
        }
        let mut i = 0;
        while i + lanes <= len {
            A::store_slice::<S>(&mut to[i..], T::widen(simd, from.add(i)));
            i += lanes;
        }
        if i < len && len >= lanes {
            i = len - lanes; // some of them again
            A::store_slice::<S>(&mut to[i..], T::widen(simd, from.add(i)));
        } else if i < len {
            let from = core::slice::from_raw_parts(from, len);
            A::store_partial(simd, to, T::widen_partial(simd, from));
        }
    }
}
