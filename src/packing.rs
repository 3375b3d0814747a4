//! Moving rows between the tensors' memory and the kernels' layouts, and elements between the tensors' types and the accumulator.
//!
//! Elements that are no accumulators, or are no neighbours in memory, pass through a few KiB of stack: a row at a time is converted,
//! so that what follows (or comes before) is the same for every type and stride.

#![allow(unsafe_code)]

use half::{bf16, f16};
use pulp::Simd;

use crate::InstructionSet;
use crate::decode::{DecodeHeads, PortableDecodeHeads};
use crate::kernels::lane::{Lane, as_rows};
use crate::kernels::stored::Stored;
use crate::kernels::transpose::SIDE;
use crate::kernels::{MAX_LANES, MAX_PANEL_ROWS, WithTiles};
use crate::row_block::RowBlock;
use crate::score_modifier::Unmodified;
use crate::score_pass::{RowOp, TileOp};
use crate::tensor::Layout;

/// The vector code of a task that moves elements, for one element type and its accumulator. Not generic, for the same reason as
/// [`TaskKernels`](crate::task::TaskKernels).
pub(crate) trait Packing<A: Lane>: Stored<A> {
    fn pack_q(set: InstructionSet, op: PackQ<'_, Self, A>);
    fn pack_keys(set: InstructionSet, op: PackKeys<'_, Self, A>);
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
            fn pack_q(set: InstructionSet, op: PackQ<'_, $element, $accumulator>) {
                set.$run(op);
            }
            fn pack_keys(set: InstructionSet, op: PackKeys<'_, $element, $accumulator>) {
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
const CHUNK: usize = 64;

/// Copies a block of keys (or values) to contiguous accumulators.
pub(crate) struct PackKeys<'a, T, A> {
    pub(crate) from: &'a [T],
    pub(crate) key_stride: usize,
    pub(crate) dim_stride: usize,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    /// `[keys][to_stride]`
    pub(crate) to: &'a mut [A],
    pub(crate) to_stride: usize,
}

impl<T: Stored<A>, A: Lane> WithTiles for PackKeys<'_, T, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { from, key_stride, dim_stride, keys, dim, to, to_stride } = self;
        for (key, to) in to.chunks_exact_mut(to_stride).take(keys).enumerate() {
            let from = &from[key * key_stride..][..(dim - 1) * dim_stride + 1];
            // SAFETY: `from` has just been cut to `dim` elements at `dim_stride`.
            unsafe { widen_row::<S, T, A>(simd, from.as_ptr(), dim_stride, &mut to[..dim]) };
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
            unsafe { pack_rows::<S, T, A>(simd, from, 1, to, to_stride) };
        }
    }
}

/// Packs the rows of Q of a task into panels `[head_dim][panel_rows]`, scaled. Lanes past the
/// last row hold copies of it, zeros, or in a half without rows what was there; nobody reads their results.
pub(crate) struct PackQ<'a, T, A> {
    pub(crate) task: &'a RowBlock,
    /// Valid for reading at every index inside the layout.
    pub(crate) q: *const T,
    pub(crate) layout: Layout,
    pub(crate) scale: A,
    /// `[panels][head_dim][panel_rows]`
    pub(crate) q_panels: &'a mut [A],
}

impl<T: Stored<A>, A: Lane> WithTiles for PackQ<'_, T, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { task, q, layout, .. } = self;
        let (panel_rows, head_dim) = (task.panel_rows, layout.shape[3]);
        assert_eq!(panel_rows, ROW_VECTORS * A::lanes::<S>());
        let scale = A::splat(simd, self.scale);
        for (panel, q_panel) in self.q_panels.chunks_exact_mut(panel_rows * head_dim).enumerate() {
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
                unsafe { pack_rows::<S, T, A>(simd, from, layout.strides[3], &mut q_panel[lane..], panel_rows) };
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

/// `SIDE` rows into as many lanes of a panel that starts with the first of them; its rows end at the panel's end.
///
/// # Safety
/// Each of `from` must be valid for reading as many elements at `stride` as `panel` has (begun) rows of `panel_rows`.
#[inline(always)]
unsafe fn pack_rows<S: Simd, T: Stored<A>, A: Lane>(
    simd: S,
    from: [*const T; SIDE],
    stride: usize,
    panel: &mut [A],
    panel_rows: usize,
) {
    let head_dim = panel.len().div_ceil(panel_rows);
    if T::IS_ACCUMULATOR && stride == 1 {
        // SAFETY: valid for `head_dim` accumulators, as `T` is `A`.
        return unsafe { transpose_rows::<S, A>(simd, from.map(|row| row.cast()), panel, panel_rows) };
    }
    let mut chunk = [[A::ZERO; CHUNK]; SIDE];
    for first_dim in (0..head_dim).step_by(CHUNK) {
        let dims = CHUNK.min(head_dim - first_dim);
        let panel = &mut panel[first_dim * panel_rows..];
        for (chunk, row) in chunk.iter_mut().zip(from) {
            // SAFETY: `first_dim + dims <= head_dim`.
            unsafe { widen_row::<S, T, A>(simd, row.wrapping_add(first_dim * stride), stride, &mut chunk[..dims]) };
        }
        let end = panel.len().min((dims - 1) * panel_rows + SIDE);
        let mut rows = [core::ptr::null(); SIDE];
        for (row, chunk) in rows.iter_mut().zip(&chunk) {
            *row = chunk.as_ptr();
        }
        // SAFETY: `dims` elements of each row of the chunk, and as many begun rows of the panel.
        unsafe { transpose_rows::<S, A>(simd, rows, &mut panel[..end], panel_rows) };
    }
}

/// As [`pack_rows`] for contiguous accumulators.
///
/// # Safety
/// As [`pack_rows`].
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

/// Divides the accumulators of a task by the running sums and writes them to the rows of the output.
pub(crate) struct UnpackOut<'a, T, A> {
    pub(crate) task: &'a RowBlock,
    /// `[panels][value_dim][panel_rows]`
    pub(crate) out_acc: &'a mut [A],
    /// `[panels][panel_rows]`
    pub(crate) running_sum: &'a [A],
    /// Valid for writing at every index of the task's rows inside the layout.
    pub(crate) out: *mut T,
    pub(crate) layout: Layout,
}

impl<T: Stored<A>, A: Lane> WithTiles for UnpackOut<'_, T, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { task, out, layout, .. } = self;
        let (panel_rows, value_dim) = (task.panel_rows, layout.shape[3]);
        assert_eq!(panel_rows, ROW_VECTORS * A::lanes::<S>());
        for first_row in (0..task.rows).step_by(panel_rows) {
            let out_acc = &mut self.out_acc[first_row * value_dim..][..panel_rows * value_dim];
            divide_by_sum::<S, A, ROW_VECTORS>(simd, task, first_row, self.running_sum, out_acc);
            for lane in (0..panel_rows.min(task.rows - first_row)).step_by(SIDE) {
                let rows = SIDE.min(task.rows - first_row - lane);
                let mut to = [core::ptr::null_mut(); SIDE];
                for (i, to) in to[..rows].iter_mut().enumerate() {
                    // SAFETY: the index is inside the layout, where `out` is valid.
                    *to = unsafe { out.add(layout.offset(task.index(first_row + lane + i))) };
                }
                // SAFETY: rows of `value_dim` elements at the layout's last stride are valid.
                unsafe { unpack_rows(simd, &out_acc[lane..], panel_rows, &to[..rows], layout.strides[3]) };
            }
        }
    }
}

/// The same for the rows of decode.
pub(crate) struct UnpackRows<'a, T, A> {
    pub(crate) task: &'a RowBlock,
    /// `[rows][value_dim]`
    pub(crate) out_acc: &'a mut [A],
    pub(crate) running_sum: &'a [A],
    /// Valid for writing at every index of the task's rows inside the layout.
    pub(crate) out: *mut T,
    pub(crate) layout: Layout,
}

impl<T: Stored<A>, A: Lane> WithTiles for UnpackRows<'_, T, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { task, out, layout, .. } = self;
        let lanes = A::lanes::<S>();
        let zero = A::splat(simd, A::ZERO);
        let value_dim = layout.shape[3];
        for row in 0..task.rows {
            let acc = &mut self.out_acc[row * value_dim..][..value_dim];
            // SAFETY: the index is inside the layout, where `out` is valid.
            let out = unsafe { out.add(layout.offset(task.index(row))) };
            let mut factor = A::splat(simd, self.running_sum[row].reciprocal());
            if !task.row_sees_keys(row) {
                acc.fill(A::ZERO); // no block of keys has written them
                factor = zero;
            }
            let quotient = |acc| A::add(simd, A::mul(simd, acc, factor), zero); // never -0, as below
            if layout.strides[3] != 1 || value_dim < lanes {
                for acc in acc.chunks_mut(lanes) {
                    let quotients = quotient(load_up_to::<S, A>(simd, acc));
                    A::store_partial(simd, acc, quotients);
                }
                // SAFETY: a row of the output has as many elements as `acc`.
                unsafe { narrow_row::<S, T, A>(simd, acc, out, layout.strides[3]) };
                continue;
            }
            let (acc, mut d) = (acc.as_ptr(), 0);
            // SAFETY: `d + lanes <= value_dim`, the length of `acc` and of a row of the output.
            unsafe {
                while d + lanes <= value_dim {
                    T::narrow(simd, out.add(d), quotient(A::load::<S>(acc.add(d))));
                    d += lanes;
                }
                if d < value_dim {
                    d = value_dim - lanes; // some of them again
                    T::narrow(simd, out.add(d), quotient(A::load::<S>(acc.add(d))));
                }
            }
        }
    }
}

/// As many lanes of a panel as there are rows, at most `SIDE`; the panel starts with the first of them.
///
/// # Safety
/// Each of `to` must be valid for writing as many elements at `stride` as `panel` has (begun) rows of `panel_rows`, of which each must
/// have `SIDE` lanes.
#[inline(always)]
unsafe fn unpack_rows<S: Simd, T: Stored<A>, A: Lane>(
    simd: S,
    panel: &[A],
    panel_rows: usize,
    to: &[*mut T],
    stride: usize,
) {
    let value_dim = panel.len().div_ceil(panel_rows);
    let rows = to.len();
    let mut pointers = [core::ptr::null_mut(); SIDE];
    if T::IS_ACCUMULATOR && stride == 1 {
        for (pointer, &to) in pointers.iter_mut().zip(to) {
            *pointer = to.cast();
        }
        // SAFETY: valid for `value_dim` accumulators, as `T` is `A`.
        return unsafe { transpose_panel::<S, A>(simd, panel, panel_rows, (pointers, rows)) };
    }
    let mut chunk = [[A::ZERO; CHUNK]; SIDE];
    for first_dim in (0..value_dim).step_by(CHUNK) {
        let dims = CHUNK.min(value_dim - first_dim);
        let panel = &panel[first_dim * panel_rows..];
        let end = panel.len().min((dims - 1) * panel_rows + SIDE);
        for (pointer, chunk) in pointers.iter_mut().zip(&mut chunk) {
            *pointer = chunk.as_mut_ptr();
        }
        // SAFETY: each row of the chunk has room for `dims` elements.
        unsafe { transpose_panel::<S, A>(simd, &panel[..end], panel_rows, (pointers, rows)) };
        for (chunk, &to) in chunk.iter().zip(to) {
            // SAFETY: `first_dim + dims <= value_dim`.
            unsafe { narrow_row::<S, T, A>(simd, &chunk[..dims], to.wrapping_add(first_dim * stride), stride) };
        }
    }
}

/// As [`unpack_rows`] for contiguous accumulators, into the first `rows` of `to`.
///
/// # Safety
/// As [`unpack_rows`].
#[inline(always)]
unsafe fn transpose_panel<S: Simd, A: Lane>(
    simd: S,
    panel: &[A],
    panel_rows: usize,
    (to, rows): ([*mut A; SIDE], usize),
) {
    let value_dim = panel.len().div_ceil(panel_rows);
    let mut d = 0;
    while d + SIDE <= value_dim {
        let from = panel[d * panel_rows..][..(SIDE - 1) * panel_rows + SIDE].as_ptr();
        let from: [*const A; SIDE] = core::array::from_fn(|i| from.wrapping_add(i * panel_rows));
        // SAFETY: `from` has just been cut to its 8 rows; `d + SIDE <= value_dim`, the length of a row.
        unsafe { A::transpose(simd, from, &to.map(|row| row.wrapping_add(d))[..rows]) };
        d += SIDE;
    }
    while d < value_dim {
        for (from, &to) in panel[d * panel_rows..].iter().zip(&to[..rows]) {
            // SAFETY: `d < value_dim`, the length of a row.
            unsafe { to.add(d).write(*from) };
        }
        d += 1;
    }
}

/// Accumulators to elements.
///
/// # Safety
/// `to` must be valid for writing as many elements at `stride` as `from` has.
#[inline(always)]
unsafe fn narrow_row<S: Simd, T: Stored<A>, A: Lane>(simd: S, from: &[A], to: *mut T, stride: usize) {
    let (lanes, len) = (A::lanes::<S>(), from.len());
    // SAFETY: every access is below `len`; no vector has more than MAX_LANES lanes.
    unsafe {
        if stride != 1 {
            let mut narrow = [T::ZERO; MAX_LANES];
            for (i, from) in from.chunks(lanes).enumerate() {
                T::narrow(simd, narrow.as_mut_ptr(), load_up_to::<S, A>(simd, from));
                for (lane, &value) in narrow[..from.len()].iter().enumerate() {
                    to.add((i * lanes + lane) * stride).write(value);
                }
            }
            return;
        }
        let mut i = 0;
        while i + lanes <= len {
            T::narrow(simd, to.add(i), A::load_slice::<S>(&from[i..]));
            i += lanes;
        }
        if i < len && len >= lanes {
            i = len - lanes; // some of them again
            T::narrow(simd, to.add(i), A::load_slice::<S>(&from[i..]));
        } else if i < len {
            let to = core::slice::from_raw_parts_mut(to, len);
            T::narrow_partial(simd, to, A::load_partial(simd, from));
        }
    }
}

/// The first elements, filled up with 0 where there are fewer than lanes.
#[inline(always)]
fn load_up_to<S: Simd, A: Lane>(simd: S, from: &[A]) -> A::Vector<S> {
    if from.len() >= A::lanes::<S>() { A::load_slice::<S>(from) } else { A::load_partial(simd, from) }
}

/// `out_acc / running_sum` of one panel, in place; 0 where a row sees no key. Never -0, which a hidden value's sign could
/// otherwise decide.
#[inline(always)]
pub(crate) fn divide_by_sum<S: Simd, A: Lane, const ROW_VECTORS: usize>(
    simd: S,
    task: &RowBlock,
    first_row: usize,
    running_sum: &[A],
    out_acc: &mut [A],
) {
    let panel_rows = task.panel_rows;
    let mut factors = [A::ZERO; MAX_PANEL_ROWS];
    for (lane, factor) in factors[..panel_rows].iter_mut().enumerate() {
        let row = first_row + lane;
        if row < task.rows && task.row_sees_keys(row) {
            *factor = running_sum[row].reciprocal();
        }
    }
    let factors: [_; ROW_VECTORS] = core::array::from_fn(|vector| {
        // SAFETY: `panel_rows` factors are there: ROW_VECTORS vectors.
        unsafe { A::load::<S>(factors.as_ptr().add(vector * A::lanes::<S>())) }
    });
    let vectors = task.vectors_in_use::<ROW_VECTORS>(first_row);
    for acc in as_rows::<S, A, ROW_VECTORS>(out_acc) {
        for vector in 0..ROW_VECTORS {
            if vector < vectors {
                let quotient = A::mul(simd, acc[vector], factors[vector]);
                acc[vector] = A::add(simd, quotient, A::splat(simd, A::ZERO)); // fused, a product that underflows would stay -0
            }
        }
    }
}
