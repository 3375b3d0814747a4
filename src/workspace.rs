//! Scratch memory, aligned and owned by the caller.

#![allow(unsafe_code)]

use std::fmt;

use aligned_vec::{AVec, ConstAlign};

use crate::blocks::{Blocks, MAX_TASK_ROWS, Path};
use crate::kernels::MAX_LANES;
use crate::kernels::lane::Lane;
use crate::kernels::transpose::SIDE;
use crate::{Accumulator, AttentionError, AttentionPlan, AttentionShape};

/// One cache line, and one AVX-512 vector.
pub(crate) const ALIGN_BYTES: usize = 64;

/// Scratch memory for [`AttentionPlan::run`]. One workspace serves any number of plans, one after the other.
#[derive(Clone)]
pub struct Workspace {
    bytes: AVec<u8, ConstAlign<ALIGN_BYTES>>,
}

impl Workspace {
    /// An empty workspace; [`reserve`](Self::reserve) makes it large enough.
    pub fn new() -> Self {
        Self { bytes: AVec::new(ALIGN_BYTES) }
    }

    /// A workspace for this plan.
    ///
    /// # Errors
    /// [`AttentionError::AllocationFailed`].
    pub fn for_plan<A: Accumulator>(plan: &AttentionPlan<A>) -> Result<Self, AttentionError> {
        let mut workspace = Self::new();
        workspace.reserve(plan)?;
        Ok(workspace)
    }

    /// Grows to what this plan needs; never shrinks.
    ///
    /// # Errors
    /// [`AttentionError::AllocationFailed`]; the workspace is empty then.
    pub fn reserve<A: Accumulator>(&mut self, plan: &AttentionPlan<A>) -> Result<(), AttentionError> {
        self.reserve_len(plan.workspace_len())
    }

    /// Grows to this many bytes, those of a [`VarlenPlan::workspace_len`](crate::VarlenPlan::workspace_len), say; never
    /// shrinks.
    ///
    /// # Errors
    /// [`AttentionError::AllocationFailed`]; the workspace is empty then.
    pub fn reserve_len(&mut self, needed: usize) -> Result<(), AttentionError> {
        if self.bytes.len() < needed {
            // The old contents are of no use: free them first, so that the peak is one buffer.
            self.bytes = AVec::new(ALIGN_BYTES);
            self.bytes.try_reserve_exact(needed).map_err(|_| AttentionError::AllocationFailed { bytes: needed })?;
            self.bytes.resize(needed, 0);
        }
        Ok(())
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace").field("len", &self.len()).finish()
    }
}

impl Default for Workspace {
    fn default() -> Self {
        Self::new()
    }
}

/// Sizes of a task's scratch arrays, in accumulators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScratchSizes {
    lens: [usize; 8],
    /// Elements from a key to the next in `k_block` and `v_block`.
    pub(crate) strides: [usize; 2],
}

/// Scratch of a task. Every array starts on a 64-byte boundary. Contents are whatever the last task left.
pub(crate) struct Scratch<'a, A> {
    /// Prefill: `[panels][steps][panel_rows]`, at most `head_dim` steps. Decode: `[rows][head_dim]`, and behind them the rows packed in fours and twos.
    pub(crate) q_panels: &'a mut [A],
    /// `[panels][value_dim][panel_rows]`
    pub(crate) out_acc: &'a mut [A],
    /// `[panels][panel_rows]`
    pub(crate) running_max: &'a mut [A],
    /// `[panels][panel_rows]`
    pub(crate) running_sum: &'a mut [A],
    /// `[panel_rows]`
    pub(crate) rescale: &'a mut [A],
    /// Prefill: `[kv_block][panel_rows]`. Decode: `[rows][scores_stride]`.
    pub(crate) scores: &'a mut [A],
    /// `[kv_block][strides[0]]`, a packed block of K, in steps
    pub(crate) k_block: &'a mut [A],
    /// `[kv_block][strides[1]]`, a packed block of V
    pub(crate) v_block: &'a mut [A],
    /// Elements from a key to the next in `k_block` and `v_block`.
    pub(crate) strides: [usize; 2],
    /// Prefill: what of `out_acc` is this task's.
    pub(crate) written: WrittenHalves,
}

/// The halves of a task's panels whose accumulators were written: what the others hold is an earlier task's. (To clear them all costs
/// 5 % of a call of 16 tokens.)
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WrittenHalves(u128);

const _: () = assert!(2 * MAX_TASK_ROWS / SIDE <= u128::BITS as usize); // a panel has at least SIDE rows

impl WrittenHalves {
    /// Adds the lower half, the upper half or both, and gives those of them that were there before.
    #[inline(always)]
    pub(crate) fn add(&mut self, panel: usize, halves: [bool; 2]) -> [bool; 2] {
        let before = [0, 1].map(|half| halves[half] && self.contains(2 * panel + half));
        for half in 0..2 {
            self.0 |= u128::from(halves[half]) << (2 * panel + half);
        }
        before
    }

    #[inline(always)]
    fn contains(self, half: usize) -> bool {
        self.0 >> half & 1 == 1
    }
}

impl<A: Lane> Scratch<'_, A> {
    /// Sets the accumulators of a half of a panel to 0.
    pub(crate) fn clear_half(&mut self, half: usize, panel_rows: usize, value_dim: usize) {
        let (panel, lanes) = (half / 2, panel_rows / 2);
        let out_acc = &mut self.out_acc[panel * panel_rows * value_dim..][..panel_rows * value_dim];
        for out_acc in out_acc.chunks_exact_mut(panel_rows) {
            out_acc[half % 2 * lanes..][..lanes].fill(A::ZERO);
        }
    }

    /// The same for those halves of the first `rows` that no block of keys has written.
    pub(crate) fn clear_unwritten(&mut self, rows: usize, panel_rows: usize, value_dim: usize) {
        let written = self.written;
        for half in (0..rows.div_ceil(panel_rows / 2)).filter(|&half| !written.contains(half)) {
            self.clear_half(half, panel_rows, value_dim);
        }
    }
}

impl<A> Scratch<'_, A> {
    /// Of no task.
    pub(crate) fn empty() -> Self {
        Self {
            q_panels: &mut [],
            out_acc: &mut [],
            running_max: &mut [],
            running_sum: &mut [],
            rescale: &mut [],
            scores: &mut [],
            k_block: &mut [],
            v_block: &mut [],
            strides: [0; 2],
            written: WrittenHalves::default(),
        }
    }
}

impl ScratchSizes {
    /// `None` where a size exceeds `usize`.
    pub(crate) fn new(shape: &AttentionShape, blocks: &Blocks) -> Option<Self> {
        let Blocks { path, panel_rows, task_rows, kv_block, .. } = *blocks;
        // A cache line more than needed, so that rows a power of two long do not all fall into the same cache sets.
        let stride = |dim: usize| dim.checked_next_multiple_of(16)?.checked_add(16);
        let strides = [stride(shape.head_dim)?, stride(shape.value_dim)?];
        let (q_panels, scores) = match path {
            Path::Prefill => (shape.head_dim, panel_rows.checked_mul(kv_block)?),
            Path::Decode => {
                let padded_dim = shape.head_dim.checked_next_multiple_of(MAX_LANES)?;
                (shape.head_dim.checked_add(padded_dim)?, task_rows.checked_mul(blocks.scores_stride())?)
            }
        };
        let lens = [
            task_rows.checked_mul(q_panels)?,
            task_rows.checked_mul(shape.value_dim)?,
            task_rows,
            task_rows,
            panel_rows,
            scores,
            strides[0].checked_mul(kv_block)?,
            strides[1].checked_mul(kv_block)?,
        ];
        Some(Self { lens, strides })
    }

    /// Bytes of all arrays; `None` where that exceeds `usize`.
    pub(crate) fn bytes<A>(&self) -> Option<usize> {
        self.lens.iter().try_fold(0usize, |sum, len| {
            sum.checked_add(len.checked_mul(size_of::<A>())?.checked_next_multiple_of(ALIGN_BYTES)?)
        })
    }

    /// Cuts these bytes into its arrays.
    ///
    /// # Panics
    /// If `bytes` is not aligned to 64 or shorter than [`bytes`](Self::bytes).
    pub(crate) fn carve<'a, A: Lane>(&self, bytes: &'a mut [u8]) -> Scratch<'a, A> {
        assert!(bytes.as_ptr().addr().is_multiple_of(ALIGN_BYTES));
        let mut rest = bytes;
        let mut next = |index: usize| {
            let len = self.lens[index];
            let bytes = (len * size_of::<A>()).next_multiple_of(ALIGN_BYTES);
            let (array, after) = std::mem::take(&mut rest).split_at_mut(bytes);
            rest = after;
            // SAFETY: `array` holds at least `len` of `A`, starts on a multiple of 64 (asserted above, and every size
            // is rounded to it), was initialised by `Workspace::reserve`, and `A` is a plain number: any bits are a value.
            unsafe { std::slice::from_raw_parts_mut(array.as_mut_ptr().cast::<A>(), len) }
        };
        Scratch {
            q_panels: next(0),
            out_acc: next(1),
            running_max: next(2),
            running_sum: next(3),
            rescale: next(4),
            scores: next(5),
            k_block: next(6),
            v_block: next(7),
            strides: self.strides,
            written: WrittenHalves::default(),
        }
    }
}
