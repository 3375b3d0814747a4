//! Transposes of 8 x 8 tiles: rows of Q into lanes, lanes of the accumulators into rows of the output.
//!
//! The `Simd` trait has no transpose, hence intrinsics of each set. [measured, 8 heads of
//! T = 128, head_dim 64, AVX2] 0.60 of FMA peak with Q and the output moved element by element, 0.67 by tiles.

#![allow(unsafe_code)]

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use core::any::TypeId;

use pulp::Simd;

/// Rows and columns of a tile.
pub(crate) const SIDE: usize = 8;

/// `to[j][i] = from[i][j]` for 8 rows `from` of 8 elements, and as many rows `to` as there are, at most 8.
///
/// # Safety
/// Each of `from` must be valid for reading 8 elements, each of `to` for writing 8.
#[inline(always)]
pub(crate) unsafe fn transpose<S: Simd>(_simd: S, from: [*const f32; SIDE], to: &[*mut f32]) {
    // SAFETY: reads and writes are those that the caller allowed; the token proves that the set's instructions exist.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if is_avx::<S>() {
            use core::arch::x86_64::*;
            let mut tile = [_mm256_setzero_ps(); SIDE];
            for i in 0..SIDE {
                tile[i] = _mm256_loadu_ps(from[i]);
            }
            let tile = avx::transpose(tile);
            if to.len() == SIDE {
                for i in 0..SIDE {
                    _mm256_storeu_ps(to[i], tile[i]);
                }
            } else {
                for i in 0..to.len() {
                    _mm256_storeu_ps(to[i], tile[i]);
                }
            }
            return;
        }
        #[cfg(target_arch = "aarch64")]
        if TypeId::of::<S>() == TypeId::of::<pulp::aarch64::Neon>() {
            use core::arch::aarch64::*;
            for row in [0, 4] {
                for column in [0, 4] {
                    let mut tile = [vdupq_n_f32(0.0); 4];
                    for i in 0..4 {
                        tile[i] = vld1q_f32(from[row + i].add(column));
                    }
                    let tile = neon::transpose(tile);
                    for i in 0..4.min(to.len().saturating_sub(column)) {
                        vst1q_f32(to[column + i].add(row), tile[i]);
                    }
                }
            }
            return;
        }
        transpose_elements(from, to);
    }
}

/// As [`transpose`], in double precision.
///
/// # Safety
/// As [`transpose`].
#[inline(always)]
pub(crate) unsafe fn transpose_f64<S: Simd>(_simd: S, from: [*const f64; SIDE], to: &[*mut f64]) {
    // SAFETY: reads and writes are those that the caller allowed; the token proves that the set's instructions exist.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if is_avx::<S>() {
            use core::arch::x86_64::*;
            for column in [0, 4] {
                for row in [0, 4] {
                    let mut tile = [_mm256_setzero_pd(); 4];
                    for i in 0..4 {
                        tile[i] = _mm256_loadu_pd(from[row + i].add(column));
                    }
                    let tile = avx::transpose_f64(tile);
                    for i in 0..4.min(to.len().saturating_sub(column)) {
                        _mm256_storeu_pd(to[column + i].add(row), tile[i]);
                    }
                }
            }
            return;
        }
        #[cfg(target_arch = "aarch64")]
        if TypeId::of::<S>() == TypeId::of::<pulp::aarch64::Neon>() {
            use core::arch::aarch64::*;
            for column in [0, 2, 4, 6] {
                for row in [0, 2, 4, 6] {
                    let (a, b) = (vld1q_f64(from[row].add(column)), vld1q_f64(from[row + 1].add(column)));
                    let tile = [vtrn1q_f64(a, b), vtrn2q_f64(a, b)];
                    for i in 0..2.min(to.len().saturating_sub(column)) {
                        vst1q_f64(to[column + i].add(row), tile[i]);
                    }
                }
            }
            return;
        }
        transpose_elements(from, to);
    }
}

/// # Safety
/// As [`transpose`].
#[inline(always)]
unsafe fn transpose_elements<A: Copy>(from: [*const A; SIDE], to: &[*mut A]) {
    for (column, &to) in to.iter().enumerate() {
        for (row, &from) in from.iter().enumerate() {
            // SAFETY: `row < SIDE`, and `column < to.len() <= SIDE`.
            unsafe { to.add(row).write(*from.add(column)) };
        }
    }
}

/// Whether the set contains AVX. The 16 lanes of AVX-512 are filled by two tiles.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn is_avx<S: Simd>() -> bool {
    let set = TypeId::of::<S>();
    set == TypeId::of::<pulp::x86::V3>() || set == TypeId::of::<pulp::x86::V4>()
}

#[cfg(target_arch = "x86_64")]
mod avx {
    use core::arch::x86_64::*;

    /// # Safety
    /// The CPU must have AVX.
    #[inline(always)]
    pub(super) unsafe fn transpose(rows: [__m256; 8]) -> [__m256; 8] {
        // SAFETY: the caller says that AVX exists.
        unsafe {
            // Pairs of rows, then quads, then halves: 24 shuffles.
            let mut quads = [[_mm256_setzero_ps(); 4]; 2];
            for half in 0..2 {
                let [a, b, c, d] = [rows[4 * half], rows[4 * half + 1], rows[4 * half + 2], rows[4 * half + 3]];
                let (low_ab, high_ab) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (low_cd, high_cd) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                quads[half] = [
                    _mm256_shuffle_ps::<0b01_00_01_00>(low_ab, low_cd),
                    _mm256_shuffle_ps::<0b11_10_11_10>(low_ab, low_cd),
                    _mm256_shuffle_ps::<0b01_00_01_00>(high_ab, high_cd),
                    _mm256_shuffle_ps::<0b11_10_11_10>(high_ab, high_cd),
                ];
            }
            let mut columns = [_mm256_setzero_ps(); 8];
            for column in 0..4 {
                columns[column] = _mm256_permute2f128_ps::<0x20>(quads[0][column], quads[1][column]);
                columns[column + 4] = _mm256_permute2f128_ps::<0x31>(quads[0][column], quads[1][column]);
            }
            columns
        }
    }

    /// # Safety
    /// The CPU must have AVX.
    #[inline(always)]
    pub(super) unsafe fn transpose_f64([a, b, c, d]: [__m256d; 4]) -> [__m256d; 4] {
        // SAFETY: the caller says that AVX exists.
        unsafe {
            let (low_ab, high_ab) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
            let (low_cd, high_cd) = (_mm256_unpacklo_pd(c, d), _mm256_unpackhi_pd(c, d));
            [
                _mm256_permute2f128_pd::<0x20>(low_ab, low_cd),
                _mm256_permute2f128_pd::<0x20>(high_ab, high_cd),
                _mm256_permute2f128_pd::<0x31>(low_ab, low_cd),
                _mm256_permute2f128_pd::<0x31>(high_ab, high_cd),
            ]
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use core::arch::aarch64::*;

    /// # Safety
    /// The CPU must have NEON.
    #[inline(always)]
    pub(super) unsafe fn transpose([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: the caller says that NEON exists.
        unsafe {
            let (ab_even, ab_odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
            let (cd_even, cd_odd) = (vtrn1q_f32(c, d), vtrn2q_f32(c, d));
            let (as_f64, as_f32) = (vreinterpretq_f64_f32, vreinterpretq_f32_f64);
            [
                as_f32(vtrn1q_f64(as_f64(ab_even), as_f64(cd_even))),
                as_f32(vtrn1q_f64(as_f64(ab_odd), as_f64(cd_odd))),
                as_f32(vtrn2q_f64(as_f64(ab_even), as_f64(cd_even))),
                as_f32(vtrn2q_f64(as_f64(ab_odd), as_f64(cd_odd))),
            ]
        }
    }
}
