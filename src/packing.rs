//! Moving rows between the tensors' memory and the kernels' layouts.

#![allow(unsafe_code)]

use pulp::Simd;

use crate::Element;
use crate::kernels::lane::Lane;

/// Rows of a strided matrix: `row(i)` starts at `start + offset`, elements lie `dim_stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct RowPointer<T> {
    pub(crate) start: *const T,
    pub(crate) dim_stride: usize,
}

/// Copies `keys` rows of `dim` elements to contiguous accumulators `to_stride` apart.
///
/// # Safety
/// `from` must be valid for reading `keys` rows at `key_stride`, `to` for writing them at `to_stride >= dim`.
#[inline(always)]
pub(crate) unsafe fn pack_keys<T: Element>(
    from: RowPointer<T>,
    key_stride: usize,
    [keys, dim]: [usize; 2],
    to: *mut T::Acc,
    to_stride: usize,
) {
    for key in 0..keys {
        // SAFETY: `key < keys` and `i < dim`: inside both operands by the caller's promise.
        unsafe {
            let (from_row, to_row) = (from.start.add(key * key_stride), to.add(key * to_stride));
            if from.dim_stride == 1 {
                for i in 0..dim {
                    to_row.add(i).write((*from_row.add(i)).to_acc());
                }
            } else {
                for i in 0..dim {
                    to_row.add(i).write((*from_row.add(i * from.dim_stride)).to_acc());
                }
            }
        }
    }
}

/// Writes one row of Q, times `scale`, to lane `lane` of a panel `[head_dim][panel_rows]`.
///
/// # Safety
/// `from` must be valid for reading `head_dim` elements, `panel` for writing `head_dim` rows of `panel_rows > lane`.
#[inline(always)]
pub(crate) unsafe fn pack_q_row<T: Element>(
    from: RowPointer<T>,
    head_dim: usize,
    scale: T::Acc,
    panel: *mut T::Acc,
    panel_rows: usize,
) {
    for p in 0..head_dim {
        // SAFETY: `p < head_dim`: inside both operands by the caller's promise.
        unsafe {
            let q = (*from.start.add(p * from.dim_stride)).to_acc();
            panel.add(p * panel_rows).write(q.mul_scalar(scale));
        }
    }
}

/// Writes lane 0 of a panel `[value_dim][panel_rows]`, times `factor`, to a row of the output.
///
/// # Safety
/// `panel` must be valid for reading `value_dim` rows of `panel_rows`, `to` for writing `value_dim` elements at
/// `dim_stride`.
#[inline(always)]
pub(crate) unsafe fn unpack_out_row<T: Element>(
    panel: *const T::Acc,
    panel_rows: usize,
    value_dim: usize,
    factor: T::Acc,
    to: *mut T,
    dim_stride: usize,
) {
    for d in 0..value_dim {
        // SAFETY: `d < value_dim`: inside both operands by the caller's promise.
        unsafe {
            let acc = *panel.add(d * panel_rows);
            to.add(d * dim_stride).write(T::from_acc(acc.mul_scalar(factor)));
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
    // x * 0 is 0 for finite x and NaN for all others, and a NaN stays in the sum.
    let mut vectors = zero;
    let mut tail = A::ZERO;
    for key in 0..keys {
        // SAFETY: `i + lanes <= dim` and `i < dim`: inside the rows by the caller's promise.
        unsafe {
            let row = from.add(key * stride);
            let mut i = 0;
            while i + lanes <= dim {
                vectors = A::mul_add(simd, A::load::<S>(row.add(i)), zero, vectors);
                i += lanes;
            }
            while i < dim {
                tail = tail.add_scalar((*row.add(i)).mul_scalar(A::ZERO));
                i += 1;
            }
        }
    }
    let mut sums = [A::ZERO; crate::kernels::MAX_PANEL_ROWS];
    // SAFETY: no vector has more lanes than MAX_PANEL_ROWS (asserted in kernels.rs).
    unsafe { A::store::<S>(sums.as_mut_ptr(), vectors) };
    sums.iter().fold(tail, |sum, &x| sum.add_scalar(x)).is_zero()
}
