//! Looking for NaN and infinities in keys or values.

#![allow(unsafe_code)]

use pulp::Simd;

use super::MAX_PANEL_ROWS;
use super::lane::Lane;
use super::stored::Stored;

/// Whether all elements of `keys` rows of `dim` elements at `stride` are finite.
///
/// # Safety
/// `from` must be valid for reading them.
#[inline(always)]
pub(crate) unsafe fn all_finite<S: Simd, A: Lane, K: Stored<A>>(
    simd: S,
    from: *const K,
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
                    vectors[sum] = A::mul_add(simd, K::widen::<S>(simd, row.add(i + sum * lanes)), zero, vectors[sum]);
                }
                i += SUMS * lanes;
            }
            while i + lanes <= dim {
                vectors[0] = A::mul_add(simd, K::widen::<S>(simd, row.add(i)), zero, vectors[0]);
                i += lanes;
            }
            while i < dim {
                tail = tail.add_scalar((*row.add(i)).widen_one().mul_scalar(A::ZERO));
                i += 1;
            }
        }
    }
    let vectors = A::add(simd, A::add(simd, vectors[0], vectors[1]), A::add(simd, vectors[2], vectors[3]));
    let mut sums = [A::ZERO; MAX_PANEL_ROWS];
    // SAFETY: no vector has more lanes than MAX_PANEL_ROWS (asserted in kernels.rs, and a test there compares the lanes).
    unsafe { A::store::<S>(sums.as_mut_ptr(), vectors) };
    sums.iter().fold(tail, |sum, &x| sum.add_scalar(x)).is_zero()
}
