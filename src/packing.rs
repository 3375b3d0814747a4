//! Moving rows between the tensors' memory and the kernels' layouts.

#![allow(unsafe_code)]

use pulp::Simd;

use crate::Element;
use crate::kernels::lane::{Lane, as_rows};
use crate::kernels::transpose::SIDE;
use crate::kernels::{MAX_PANEL_ROWS, WithTiles};
use crate::row_block::RowBlock;
use crate::tensor::Layout;

/// Copies `keys` rows of `dim` elements to contiguous accumulators; the rows of `to` lie `to.len() / keys` apart.
pub(crate) fn pack_keys<T: Element>(
    from: &[T],
    [key_stride, dim_stride]: [usize; 2],
    [keys, dim]: [usize; 2],
    to: &mut [T::Acc],
) {
    let to_stride = to.len() / keys;
    for (key, to) in to.chunks_exact_mut(to_stride).enumerate() {
        let from = &from[key * key_stride..];
        if dim_stride == 1 {
            for (to, from) in to[..dim].iter_mut().zip(from) {
                *to = from.to_acc();
            }
        } else {
            for (i, to) in to[..dim].iter_mut().enumerate() {
                *to = from[i * dim_stride].to_acc();
            }
        }
    }
}

/// Packs the rows of Q of a task into panels `[head_dim][panel_rows]`, scaled. Lanes past the
/// last row hold copies of it or zeros; nobody reads their results.
pub(crate) struct PackQ<'a, A> {
    pub(crate) task: &'a RowBlock,
    /// Valid for reading at every index inside the layout; unit last stride.
    pub(crate) q: *const A,
    pub(crate) layout: Layout,
    pub(crate) scale: A,
    /// `[panels][head_dim][panel_rows]`
    pub(crate) q_panels: &'a mut [A],
}

impl<A: Lane> WithTiles for PackQ<'_, A> {
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
            for lane in (0..panel_rows).step_by(SIDE) {
                if first_row + lane >= task.rows {
                    // Nobody reads the results of these lanes; zeros keep them from turning into subnormals, which are slow.
                    for q in q_panel[lane..].chunks_mut(panel_rows) {
                        q[..SIDE].fill(A::ZERO);
                    }
                    continue;
                }
                // SAFETY: the index is inside the layout, where `q` is valid.
                let from: [*const A; SIDE] = core::array::from_fn(|i| unsafe {
                    q.add(layout.offset(task.index((first_row + lane + i).min(task.rows - 1))))
                });
                let mut p = 0;
                while p + SIDE <= head_dim {
                    let to = q_panel[p * panel_rows + lane..][..(SIDE - 1) * panel_rows + SIDE].as_mut_ptr();
                    let to: [*mut A; SIDE] = core::array::from_fn(|i| to.wrapping_add(i * panel_rows));
                    // SAFETY: `p + SIDE <= head_dim`, the length of a row; `to` has just been cut to its 8 rows.
                    unsafe { A::transpose(simd, from.map(|row| row.add(p)), &to) };
                    p += SIDE;
                }
                while p < head_dim {
                    for (to, from) in q_panel[p * panel_rows + lane..][..SIDE].iter_mut().zip(from) {
                        // SAFETY: `p < head_dim`, the length of a row.
                        *to = unsafe { *from.add(p) };
                    }
                    p += 1;
                }
            }
            for q in as_rows::<S, A, ROW_VECTORS>(q_panel).as_flattened_mut() {
                *q = A::mul(simd, *q, scale);
            }
        }
    }
}

/// Divides the accumulators of a task by the running sums and writes them to the rows of the output.
pub(crate) struct UnpackOut<'a, A> {
    pub(crate) task: &'a RowBlock,
    /// `[panels][value_dim][panel_rows]`
    pub(crate) out_acc: &'a mut [A],
    /// `[panels][panel_rows]`
    pub(crate) running_sum: &'a [A],
    /// Valid for writing at every index of the task's rows inside the layout; unit last stride.
    pub(crate) out: *mut A,
    pub(crate) layout: Layout,
}

impl<A: Lane> WithTiles for UnpackOut<'_, A> {
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
                let mut d = 0;
                while d + SIDE <= value_dim {
                    let from: [*const A; SIDE] =
                        core::array::from_fn(|i| out_acc[(d + i) * panel_rows + lane..][..SIDE].as_ptr());
                    // SAFETY: `from` has just been cut to size; `d + SIDE <= value_dim`, the length of a row.
                    unsafe { A::transpose(simd, from, &to.map(|row| row.wrapping_add(d))[..rows]) };
                    d += SIDE;
                }
                while d < value_dim {
                    for (from, &to) in out_acc[d * panel_rows + lane..].iter().zip(&to[..rows]) {
                        // SAFETY: `d < value_dim`, the length of a row.
                        unsafe { to.add(d).write(*from) };
                    }
                    d += 1;
                }
            }
        }
    }
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
    for acc in as_rows::<S, A, ROW_VECTORS>(out_acc) {
        for (acc, factor) in acc.iter_mut().zip(factors) {
            *acc = A::add(simd, A::mul(simd, *acc, factor), A::splat(simd, A::ZERO)); // fused, a product that underflows would stay -0
        }
    }
}

/// Whether all elements of `keys` rows of `dim` elements at `stride` are finite.
///
/// # Safety
/// `from` must be valid for reading them.
#[inline(always)]
pub(crate) unsafe fn all_finite<S: Simd, A: Lane>(
    simd: S,
    from: *const A,
    stride: usize,
    [keys, dim]: [usize; 2],
) -> bool {
    let lanes = A::lanes::<S>();
    let zero = A::splat(simd, A::ZERO);
    // x * 0 is 0 for finite x and NaN for all others, and a NaN stays in the sum. Four sums, to hide their latency.
    const SUMS: usize = 4;
    let mut vectors = [zero; SUMS];
    let mut tail = A::ZERO;
    for key in 0..keys {
        // SAFETY: `i + SUMS * lanes <= dim`, `i + lanes <= dim` and `i < dim`: inside the rows by the caller's promise.
        unsafe {
            let row = from.add(key * stride);
            let mut i = 0;
            while i + SUMS * lanes <= dim {
                for sum in 0..SUMS {
                    vectors[sum] = A::mul_add(simd, A::load::<S>(row.add(i + sum * lanes)), zero, vectors[sum]);
                }
                i += SUMS * lanes;
            }
            while i + lanes <= dim {
                vectors[0] = A::mul_add(simd, A::load::<S>(row.add(i)), zero, vectors[0]);
                i += lanes;
            }
            while i < dim {
                tail = tail.add_scalar((*row.add(i)).mul_scalar(A::ZERO));
                i += 1;
            }
        }
    }
    let vectors = A::add(simd, A::add(simd, vectors[0], vectors[1]), A::add(simd, vectors[2], vectors[3]));
    let mut sums = [A::ZERO; crate::kernels::MAX_PANEL_ROWS];
    // SAFETY: no vector has more lanes than MAX_PANEL_ROWS (asserted in kernels.rs, and a test there compares the lanes).
    unsafe { A::store::<S>(sums.as_mut_ptr(), vectors) };
    sums.iter().fold(tail, |sum, &x| sum.add_scalar(x)).is_zero()
}
