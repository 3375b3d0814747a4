//! How fast these threads can read given memory at most: wide loads that are only OR-ed together.

use std::hint::black_box;

use fused_attention::InstructionSet;
use pulp::{Simd, WithSimd};

use crate::number::Number;
use crate::rate::rate;
use crate::threads::Threads;
use crate::vectors::run_with;

/// What a thread pulls at a time: long for the prefetchers, short enough that threads finish together.
const PART_BYTES: usize = 256 << 10;
/// Vectors of one step, over all streams.
const STEP_VECTORS: usize = 8;

/// Some memory, cut into what threads pull.
pub struct Bandwidth<'a> {
    threads: &'a Threads,
    instruction_set: InstructionSet,
    parts: Vec<&'a [u8]>,
    samples: usize,
}

impl<'a> Bandwidth<'a> {
    /// Of the bytes of all these. Reads with the best instructions of the CPU, whatever attention uses.
    pub fn new<T: Number>(tensors: impl IntoIterator<Item = &'a [T]>, threads: &'a Threads) -> Self {
        let parts = tensors.into_iter().flat_map(|tensor| bytes_of(tensor).chunks(PART_BYTES));
        Self { threads, instruction_set: InstructionSet::detect(), parts: parts.collect(), samples: 0 }
    }

    /// GB/s of all threads together. Every sample reads everything once, by turns in several ways: which of them is fastest
    /// depends on the CPU and on the cache that the memory fits in.
    pub fn sample(&mut self) -> f64 {
        let ways = [Self::one_way::<1, 0>, Self::one_way::<2, 2048>, Self::one_way::<4, 0>];
        self.samples += 1;
        ways[self.samples % ways.len()](self)
    }

    fn one_way<const STREAMS: usize, const AHEAD_BYTES: usize>(&self) -> f64 {
        let bytes_per_second = rate(self.threads, self.parts.len(), |part| {
            let bytes = self.parts[part];
            run_with(self.instruction_set, Read::<STREAMS, AHEAD_BYTES> { bytes });
            bytes.len() as f64
        });
        bytes_per_second / 1e9
    }
}

#[allow(unsafe_code)]
fn bytes_of<T: Number>(tensor: &[T]) -> &[u8] {
    // SAFETY: numbers are plain bytes without padding. Everything is aligned for a byte, so that this is all of them.
    unsafe { tensor.align_to().1 }
}

/// Reads in `STREAMS` places at once and asks for the lines `AHEAD_BYTES` ahead of each, unless that is 0.
struct Read<'a, const STREAMS: usize, const AHEAD_BYTES: usize> {
    bytes: &'a [u8],
}

impl<const STREAMS: usize, const AHEAD_BYTES: usize> WithSimd for Read<'_, STREAMS, AHEAD_BYTES> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (vectors, rest) = S::as_simd_u8s(self.bytes);
        let step = STEP_VECTORS / STREAMS;
        // Whole steps in every stream; what remains of the vectors is read after them.
        let stream_len = vectors.len() / STEP_VECTORS * step;
        let (in_streams, after) = vectors.split_at(stream_len * STREAMS);
        let mut sums = [simd.splat_u8s(0); STEP_VECTORS];
        for first in (0..stream_len).step_by(step) {
            for stream in 0..STREAMS {
                let here = &in_streams[stream * stream_len + first..][..step];
                if AHEAD_BYTES > 0 {
                    for line in (0..size_of_val(here)).step_by(64) {
                        prefetch(here.as_ptr().wrapping_byte_add(AHEAD_BYTES + line).cast());
                    }
                }
                for (sum, &vector) in sums[stream * step..].iter_mut().zip(here) {
                    *sum = simd.or_u8s(*sum, vector);
                }
            }
        }
        for &vector in after {
            sums[0] = simd.or_u8s(sums[0], vector);
        }
        black_box(sums);
        black_box(rest.iter().fold(0, |sum, byte| sum | byte));
    }
}

/// Asks for a cache line, which need not exist.
#[inline(always)]
#[allow(unused_variables)]
fn prefetch(line: *const i8) {
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    // SAFETY: a prefetch of any address is only a hint, and SSE is part of x86-64.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(line)
    };
}
