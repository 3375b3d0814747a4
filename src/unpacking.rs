//! Moving results from the accumulators' layouts to the output's rows, divided by the running sums. The counterpart of `packing`.

#![allow(unsafe_code)]

use pulp::Simd;

use crate::kernels::lane::{Lane, as_rows};
use crate::kernels::stored::Stored;
use crate::kernels::transpose::SIDE;
use crate::kernels::{MAX_LANES, MAX_PANEL_ROWS, WithTiles};
use crate::packing::CHUNK;
use crate::row_block::RowBlock;
use crate::tensor::Layout;

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
