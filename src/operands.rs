//! The operands that lie like the scores, `[batch, num_heads, q_len, kv_len]`: boolean mask and additive bias. They are read in place,
//! with stride 0 along axes of size 1; the kernels see what hides a key and what is added to a score as one number, the bias, which is -inf
//! for hidden keys.

#![allow(unsafe_code)]

use std::ops::Range;

use pulp::Simd;

use crate::kernels::lane::Lane;
use crate::kernels::stored::Stored;
use crate::kernels::transpose::SIDE;
use crate::kernels::{MAX_LANES, MAX_PANEL_ROWS};
use crate::row_block::RowBlock;
use crate::{AttentionInputs, TensorView};

/// One of them.
#[derive(Clone, Copy)]
struct Operand<'a, T> {
    data: &'a [T],
    strides: [usize; 4],
}

impl<'a, T: Copy> Operand<'a, T> {
    /// The view has the shape of the scores, or 1 along an axis (checked with the other shapes).
    fn new(view: &TensorView<'a, T>) -> Self {
        let mut strides = view.strides();
        for (stride, size) in strides.iter_mut().zip(view.shape()) {
            if size == 1 {
                *stride = 0;
            }
        }
        Self { data: view.data(), strides }
    }

    /// Where the row of `[batch, head, query]` begins. Inside `data` for every index inside the shape of the scores.
    #[inline(always)]
    fn row(&self, [batch, head, query]: [usize; 3]) -> usize {
        batch * self.strides[0] + head * self.strides[1] + query * self.strides[2]
    }

    fn key_stride(&self) -> usize {
        self.strides[3]
    }

    fn get(&self, index: [usize; 3], key: usize) -> T {
        self.data[self.row(index) + key * self.key_stride()]
    }
}

/// Mask and bias of a call; a bias of element type `T`.
pub(crate) struct Operands<'a, T> {
    mask: Option<Operand<'a, bool>>,
    bias: Option<Operand<'a, T>>,
}

impl<'a, T: Copy> Operands<'a, T> {
    /// The inputs are checked.
    pub(crate) fn new<K>(inputs: &AttentionInputs<'a, T, K>) -> Self {
        Self { mask: inputs.mask.as_ref().map(Operand::new), bias: inputs.bias.as_ref().map(Operand::new) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.mask.is_none() && self.bias.is_none()
    }

    /// From the first to the last of these keys that the mask shows to any of these rows of a task.
    pub(crate) fn shown(&self, task: &RowBlock, rows: Range<usize>, keys: Range<usize>) -> Range<usize> {
        let Some(mask) = &self.mask else { return keys };
        let len = keys.len();
        let (mut first, mut end) = (len, 0);
        let mut before = None;
        for row in rows {
            let start = mask.row(task.index(row)) + keys.start * mask.key_stride();
            if before == Some(start) {
                continue; // broadcast: the same row again
            }
            before = Some(start);
            // Only what the rows before do not reach.
            match mask.key_stride() {
                1 => {
                    let shown = &mask.data[start..][..len];
                    first = first_true(&shown[..first]).unwrap_or(first);
                    end = last_true(&shown[end..]).map_or(end, |last| end + last + 1);
                }
                stride => {
                    let shows = |key: &usize| mask.data[start + key * stride];
                    first = (0..first).find(shows).unwrap_or(first);
                    end = (end..len).rev().find(shows).map_or(end, |last| last + 1);
                }
            }
        }
        if first < end { keys.start + first..keys.start + end } else { keys.start..keys.start }
    }
}

fn first_true(shown: &[bool]) -> Option<usize> {
    // Eight at a time, without a branch an element.
    let (eights, _) = shown.as_chunks::<8>();
    let skipped = 8 * eights.iter().position(any).unwrap_or(eights.len());
    shown[skipped..].iter().position(|&shown| shown).map(|key| skipped + key)
}

fn last_true(shown: &[bool]) -> Option<usize> {
    let (_, eights) = shown.as_rchunks::<8>();
    let skipped = 8 * eights.iter().rev().position(any).unwrap_or(eights.len());
    shown[..shown.len() - skipped].iter().rposition(|&shown| shown)
}

#[inline(always)]
fn any(eight: &[bool; 8]) -> bool {
    eight.iter().fold(false, |any, &shown| any | shown)
}

impl<T: Copy> Operands<'_, T> {
    /// Whether mask or bias hide this key from `[batch, head, query]`.
    pub(crate) fn hides<A: Lane>(&self, index: [usize; 3], key: usize) -> bool
    where
        T: Stored<A>,
    {
        self.mask.as_ref().is_some_and(|mask| !mask.get(index, key))
            || self.bias.as_ref().is_some_and(|bias| bias.get(index, key).widen_one() == A::NEG_INFINITY)
    }
}

/// The rows of both operands that belong to the rows of a panel (`ROWS` of them, or 1 when decoding).
pub(crate) struct OperandRows<'a, T, const ROWS: usize> {
    rows: usize,
    mask: Option<([&'a [bool]; ROWS], usize)>,
    bias: Option<([&'a [T]; ROWS], usize)>,
    /// All rows are one and the same.
    is_one_row: bool,
}

impl<'a, T: Copy, const ROWS: usize> OperandRows<'a, T, ROWS> {
    /// Rows of a task from `first_row` on, from `first_key` on. Where the task has fewer, its last one is repeated.
    #[inline(never)] // plain code, in which arrays of this size take the compiler long once they are a part of the pass
    pub(crate) fn new(
        operands: &Operands<'a, T>,
        task: &RowBlock,
        (first_row, rows): (usize, usize),
        first_key: usize,
    ) -> Self {
        let mut mask = operands.mask.map(|mask| ([mask.data; ROWS], mask.key_stride()));
        let mut bias = operands.bias.map(|bias| ([bias.data; ROWS], bias.key_stride()));
        for row in 0..rows {
            let index = task.index((first_row + row).min(task.rows - 1));
            if let (Some(operand), Some((rows, stride))) = (&operands.mask, &mut mask) {
                rows[row] = &operand.data[operand.row(index) + first_key * *stride..];
            }
            if let (Some(operand), Some((rows, stride))) = (&operands.bias, &mut bias) {
                rows[row] = &operand.data[operand.row(index) + first_key * *stride..];
            }
        }
        let mut is_one_row = true;
        for row in 1..rows {
            is_one_row &= mask.is_none_or(|(rows, _)| core::ptr::eq(rows[row], rows[0]));
            is_one_row &= bias.is_none_or(|(rows, _)| core::ptr::eq(rows[row], rows[0]));
        }
        Self { rows, mask, bias, is_one_row }
    }

    /// The bias of `keys` keys (at most `SIDE`) from `first` on, `[key][row]`; hidden keys have -inf. False where it would be 0 for all.
    #[inline(always)]
    pub(crate) fn tile<S: Simd, A: Lane>(
        &self,
        simd: S,
        (first, keys): (usize, usize),
        tile: &mut [A; SIDE * MAX_PANEL_ROWS],
    ) -> bool
    where
        T: Stored<A>,
    {
        let rows = self.rows;
        let shown = self.mask.as_ref().map_or(Shown::All, |(mask, stride)| {
            let different_rows = if self.is_one_row { 1 } else { rows };
            Shown::of(&mask[..different_rows], *stride, (first, keys))
        });
        if shown == Shown::None {
            tile[..keys * rows].fill(A::NEG_INFINITY);
            return true;
        }
        match &self.bias {
            None if shown == Shown::All => return false,
            None => tile[..keys * rows].fill(A::ZERO),
            Some((bias, stride)) if self.is_one_row => {
                for key in 0..keys {
                    let value = bias[0][(first + key) * stride].widen_one();
                    tile[key * rows..][..rows].fill(value);
                }
            }
            Some((bias, 1)) if keys == SIDE && rows.is_multiple_of(SIDE) => {
                let mut row = 0;
                while row < rows {
                    transpose_rows::<S, T, A>(simd, &bias[row..][..SIDE], first, &mut tile[row..], rows);
                    row += SIDE;
                }
            }
            Some((bias, stride)) => {
                for key in 0..keys {
                    for row in 0..rows {
                        tile[key * rows + row] = bias[row][(first + key) * stride].widen_one();
                    }
                }
            }
        }
        if let (Shown::Some, Some((mask, stride))) = (shown, &self.mask) {
            for row in 0..rows {
                for key in 0..keys {
                    let bias = &mut tile[key * rows + row];
                    *bias = if mask[row][(first + key) * stride] { *bias } else { A::NEG_INFINITY };
                }
            }
        }
        true
    }
}

/// What a mask shows of a few keys to a few rows.
#[derive(Clone, Copy, PartialEq)]
enum Shown {
    All,
    Some,
    None,
}

impl Shown {
    #[inline(always)]
    fn of(rows: &[&[bool]], stride: usize, (first, keys): (usize, usize)) -> Self {
        let (mut any, mut all) = (false, true);
        for row in rows {
            if stride == 1 && keys == SIDE {
                // One comparison each for eight.
                let mut eight = [false; SIDE];
                eight.copy_from_slice(&row[first..][..SIDE]);
                let bytes = u64::from_ne_bytes(eight.map(u8::from));
                any |= bytes != 0;
                all &= bytes == 0x0101_0101_0101_0101;
            } else {
                for key in 0..keys {
                    let shown = row[(first + key) * stride];
                    any |= shown;
                    all &= shown;
                }
            }
        }
        match (any, all) {
            (_, true) => Self::All,
            (true, false) => Self::Some,
            (false, false) => Self::None,
        }
    }
}

/// `SIDE` elements from `first` on of `SIDE` rows into as many lanes of as many rows of a tile, `tile_rows` apart.
#[inline(always)]
fn transpose_rows<S: Simd, T: Stored<A>, A: Lane>(
    simd: S,
    from: &[&[T]],
    first: usize,
    tile: &mut [A],
    tile_rows: usize,
) {
    assert!(from.len() == SIDE && tile.len() >= (SIDE - 1) * tile_rows + SIDE);
    let mut rows = [core::ptr::null(); SIDE];
    let mut widened = [[A::ZERO; SIDE]; SIDE];
    for row in 0..SIDE {
        let from = &from[row][first..][..SIDE];
        if T::IS_ACCUMULATOR {
            rows[row] = from.as_ptr().cast::<A>();
        } else {
            widen_side::<S, T, A>(simd, from, &mut widened[row]);
        }
    }
    if !T::IS_ACCUMULATOR {
        for row in 0..SIDE {
            rows[row] = widened[row].as_ptr();
        }
    }
    let start = tile.as_mut_ptr();
    let mut to = [start; SIDE];
    for key in 0..SIDE {
        to[key] = start.wrapping_add(key * tile_rows);
    }
    // SAFETY: each row has just been cut to 8 elements, of type A or converted to it; the tile has room for 8 in each of its rows
    // (asserted).
    unsafe { A::transpose(simd, rows, &to) };
}

#[inline(always)]
fn widen_side<S: Simd, T: Stored<A>, A: Lane>(simd: S, from: &[T], to: &mut [A; SIDE]) {
    let lanes = A::lanes::<S>();
    if lanes > SIDE {
        return A::store_partial(simd, to, T::widen_partial::<S>(simd, from));
    }
    for first in (0..SIDE).step_by(lanes) {
        // SAFETY: a vector of at most `SIDE` lanes, of which `SIDE` is a multiple: `first + lanes <= SIDE`, the length of both.
        unsafe { A::store::<S>(to.as_mut_ptr().add(first), T::widen::<S>(simd, from[first..].as_ptr())) };
    }
}

impl<T: Copy> OperandRows<'_, T, 1> {
    /// The bias of one row for the keys from `first` on, as many as a vector has lanes or, at the end, `keys`.
    #[inline(always)]
    pub(crate) fn vector<S: Simd, A: Lane>(&self, simd: S, first: usize, keys: usize) -> A::Vector<S>
    where
        T: Stored<A>,
    {
        let lanes = A::lanes::<S>();
        if let (None, Some((bias, 1)), true) = (&self.mask, &self.bias, keys >= lanes) {
            // SAFETY: the slice has just been cut to a vector.
            return unsafe { T::widen::<S>(simd, bias[0][first..][..lanes].as_ptr()) };
        }
        let mut bias_of = [A::ZERO; MAX_LANES];
        for key in 0..keys.min(lanes) {
            if let Some((bias, stride)) = &self.bias {
                bias_of[key] = bias[0][(first + key) * stride].widen_one();
            }
            if let Some((mask, stride)) = &self.mask
                && !mask[0][(first + key) * stride]
            {
                bias_of[key] = A::NEG_INFINITY;
            }
        }
        A::load_slice::<S>(&bias_of)
    }
}
