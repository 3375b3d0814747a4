//! Partial results of the chunks into which the keys of a few rows were split, and their merge.
//!
//! Every chunk leaves its accumulators, running maximum and running sum in a slot of the workspace. Whoever finishes the last
//! chunk of a block of rows merges them, always from the first chunk to the last: the bits do not depend on who computed
//! what when.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use pulp::Simd;

use crate::kernels::lane::Lane;
use crate::kernels::{MAX_PANEL_ROWS, WithTiles};
use crate::workspace::{ALIGN_BYTES, Scratch};

/// Sizes of the partial results of a call: `blocks` of rows times `chunks` of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartialSizes {
    blocks: usize,
    chunks: usize,
    task_rows: usize,
    value_dim: usize,
}

impl PartialSizes {
    pub(crate) fn new(blocks: usize, chunks: usize, task_rows: usize, value_dim: usize) -> Self {
        Self { blocks, chunks, task_rows, value_dim }
    }

    /// Accumulators of a slot: `[task_rows][value_dim]`, running maxima, running sums.
    fn slot_len(&self) -> Option<usize> {
        self.task_rows.checked_mul(self.value_dim.checked_add(2)?)
    }

    fn slot_bytes<A>(&self) -> Option<usize> {
        self.slot_len()?.checked_mul(size_of::<A>())?.checked_next_multiple_of(ALIGN_BYTES)
    }

    fn counter_bytes(&self) -> Option<usize> {
        self.blocks.checked_mul(size_of::<AtomicU32>())?.checked_next_multiple_of(ALIGN_BYTES)
    }

    /// Bytes of all slots and of the counters; 0 where nothing is split, `None` where it exceeds `usize`.
    pub(crate) fn bytes<A>(&self) -> Option<usize> {
        if self.chunks <= 1 {
            return Some(0);
        }
        let slots = self.blocks.checked_mul(self.chunks)?.checked_mul(self.slot_bytes::<A>()?)?;
        slots.checked_add(self.counter_bytes()?)
    }
}

/// The partial results of one call, in its workspace.
pub(crate) struct Partials<'a, A> {
    sizes: PartialSizes,
    counters: &'a [AtomicU32],
    slots: *mut u8,
    slot_bytes: usize,
    memory: PhantomData<&'a mut [A]>,
}

// SAFETY: a slot is written by the one task that computes its chunk, and read by the task that saw through the counter (a
// release of each writer, acquired by the reader) that all chunks are written.
unsafe impl<A: Lane> Sync for Partials<'_, A> {}

impl<'a, A: Lane> Partials<'a, A> {
    /// `None` where nothing is split.
    ///
    /// # Panics
    /// If `bytes` is not aligned to 64 or shorter than [`PartialSizes::bytes`].
    pub(crate) fn new(sizes: PartialSizes, bytes: &'a mut [u8]) -> Option<Self> {
        if sizes.chunks <= 1 {
            return None;
        }
        assert!(bytes.as_ptr().addr().is_multiple_of(ALIGN_BYTES));
        assert!(Some(bytes.len()) >= sizes.bytes::<A>());
        bytes[..sizes.counter_bytes()?].fill(0);
        // SAFETY: aligned and long enough (asserted), borrowed for `'a`; the counters are 0.
        unsafe { Self::attach(sizes, bytes.as_mut_ptr()) }
    }

    /// The same where the counters are set already.
    ///
    /// # Safety
    /// `start` is aligned to 64 and valid for [`PartialSizes::bytes`] as long as `'a`, during which only partial results of
    /// the same sizes reach those bytes.
    unsafe fn attach(sizes: PartialSizes, start: *mut u8) -> Option<Self> {
        if sizes.chunks <= 1 {
            return None;
        }
        // SAFETY: as the caller promises; any bits are an AtomicU32.
        let counters = unsafe { std::slice::from_raw_parts(start.cast(), sizes.blocks) };
        let slots = start.wrapping_add(sizes.counter_bytes()?);
        Some(Self { sizes, counters, slots, slot_bytes: sizes.slot_bytes::<A>()?, memory: PhantomData })
    }

    /// Accumulators, running maxima and running sums of a slot.
    fn slot(&self, block: usize, chunk: usize) -> [*mut A; 3] {
        assert!(block < self.sizes.blocks && chunk < self.sizes.chunks);
        let index = block * self.sizes.chunks + chunk;
        let acc: *mut A = self.slots.wrapping_add(index * self.slot_bytes).cast();
        let max = acc.wrapping_add(self.sizes.task_rows * self.sizes.value_dim);
        [acc, max, max.wrapping_add(self.sizes.task_rows)]
    }

    /// Stores the state of a chunk. True for the last one of its block: all are there now.
    pub(crate) fn store(&self, block: usize, chunk: usize, scratch: &Scratch<'_, A>) -> bool {
        let PartialSizes { task_rows, value_dim, chunks, .. } = self.sizes;
        let arrays: [(&[A], usize); 3] = [
            (&*scratch.out_acc, task_rows * value_dim),
            (&*scratch.running_max, task_rows),
            (&*scratch.running_sum, task_rows),
        ];
        for (to, (from, len)) in self.slot(block, chunk).into_iter().zip(arrays) {
            // SAFETY: a slot has room for each of them, and this chunk's is written by this task alone.
            unsafe { to.copy_from_nonoverlapping(from[..len].as_ptr(), len) };
        }
        self.counters[block].fetch_add(1, Ordering::AcqRel) as usize + 1 == chunks
    }

    /// The merge of a block's chunks, to be run once [`store`](Self::store) has said so.
    pub(crate) fn merge<'p, 's>(
        &'p self,
        block: usize,
        panel_rows: usize,
        scratch: &'p mut Scratch<'s, A>,
    ) -> MergeChunks<'p, 's, A> {
        MergeChunks { partials: self, block, panel_rows, scratch }
    }
}

/// The partial results of several calls that run at once, one call's bytes behind the other's.
pub(crate) struct ManyPartials<'a, A> {
    start: *mut u8,
    places: &'a [PartialPlace],
    memory: PhantomData<&'a mut [A]>,
}

/// Where the partial results of one of several calls lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartialPlace {
    pub(crate) sizes: PartialSizes,
    /// Bytes before it: those of the calls before it.
    pub(crate) start: usize,
}

// SAFETY: see `Partials`; calls do not share bytes (asserted by `new`).
unsafe impl<A: Lane> Sync for ManyPartials<'_, A> {}

impl<'a, A: Lane> ManyPartials<'a, A> {
    /// # Panics
    /// If `bytes` is not aligned to 64, a place begins before the end of the one before it, or the last ends outside.
    pub(crate) fn new(places: &'a [PartialPlace], bytes: &'a mut [u8]) -> Self {
        assert!(bytes.as_ptr().addr().is_multiple_of(ALIGN_BYTES));
        let mut end = 0;
        for place in places {
            assert!(place.start >= end && place.start.is_multiple_of(ALIGN_BYTES));
            let len = place.sizes.bytes::<A>().expect("checked when the plan was made");
            end = place.start + len;
            let _zeroes_its_counters = Partials::<A>::new(place.sizes, &mut bytes[place.start..end]);
        }
        Self { start: bytes.as_mut_ptr(), places, memory: PhantomData }
    }

    /// Those of one call; `None` where nothing is split.
    pub(crate) fn of(&self, call: usize) -> Option<Partials<'_, A>> {
        let PartialPlace { sizes, start } = self.places[call];
        // SAFETY: `new` has checked that the place is aligned, inside the bytes that are borrowed for `'a` and apart from
        // all others, and has set its counters.
        unsafe { Partials::attach(sizes, self.start.wrapping_add(start)) }
    }
}

/// Merges the chunks of a block of rows into the scratch of the task:
///
/// ```text
/// m = max_c m_c       w_c = e^(m_c - m)       s = sum_c w_c s_c       acc = sum_c w_c acc_c
/// ```
pub(crate) struct MergeChunks<'p, 's, A> {
    partials: &'p Partials<'p, A>,
    block: usize,
    panel_rows: usize,
    scratch: &'p mut Scratch<'s, A>,
}

impl<A: Lane> WithTiles for MergeChunks<'_, '_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let Self { partials, block, panel_rows, scratch } = self;
        let PartialSizes { task_rows, value_dim, chunks, .. } = partials.sizes;
        for first_row in (0..task_rows).step_by(panel_rows) {
            let max = &mut scratch.running_max[first_row..][..panel_rows];
            let sum = &mut scratch.running_sum[first_row..][..panel_rows];
            let acc = &mut scratch.out_acc[first_row * value_dim..][..panel_rows * value_dim];
            max.fill(A::NEG_INFINITY);
            sum.fill(A::ZERO);
            acc.fill(A::ZERO);
            for chunk in 0..chunks {
                let [_, chunk_max, _] = partials.slot(block, chunk);
                for (lane, max) in max.iter_mut().enumerate() {
                    // SAFETY: `first_row + lane < task_rows`; all chunks are written.
                    let chunk_max = unsafe { chunk_max.add(first_row + lane).read() };
                    if chunk_max > *max {
                        *max = chunk_max; // NaN never is: it shows in the sum
                    }
                }
            }
            for chunk in 0..chunks {
                let [chunk_acc, chunk_max, chunk_sum] = partials.slot(block, chunk);
                let mut weights = [A::ZERO; MAX_PANEL_ROWS];
                for lane in 0..panel_rows {
                    let reference = if max[lane] > A::NEG_INFINITY { max[lane] } else { A::ZERO };
                    // SAFETY: `first_row + lane < task_rows`; all chunks are written.
                    unsafe {
                        let chunk_max = A::splat(simd, chunk_max.add(first_row + lane).read());
                        let weight = A::exp(simd, A::sub(simd, chunk_max, A::splat(simd, reference)));
                        weights[lane] = A::first_lane::<S>(weight);
                        let weighted = chunk_sum.add(first_row + lane).read().mul_scalar(weights[lane]);
                        sum[lane] = sum[lane].add_scalar(weighted);
                    }
                }
                // SAFETY: as long as `acc`; all chunks are written, and nobody writes to them any more.
                let chunk_acc =
                    unsafe { std::slice::from_raw_parts(chunk_acc.add(first_row * value_dim), panel_rows * value_dim) };
                let weights = &weights[..panel_rows];
                if panel_rows == 1 {
                    for (acc, &chunk_acc) in acc.iter_mut().zip(chunk_acc) {
                        *acc = acc.add_scalar(chunk_acc.mul_scalar(weights[0]));
                    }
                } else {
                    for (acc, chunk_acc) in acc.chunks_exact_mut(panel_rows).zip(chunk_acc.chunks_exact(panel_rows)) {
                        for ((acc, &chunk_acc), &weight) in acc.iter_mut().zip(chunk_acc).zip(weights) {
                            *acc = acc.add_scalar(chunk_acc.mul_scalar(weight));
                        }
                    }
                }
            }
        }
    }
}
