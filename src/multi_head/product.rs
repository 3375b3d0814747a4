//! Tokens times weights, by `gemm`.
//!
//! ```text
//! to[token][output] = bias[output] + sum over input of x[token][input] * weight[input][output]
//! ```
//!
//! Tasks are blocks of outputs, cut so that the weights of a block stay in L2; where threads are many, blocks of tokens too. Each is a product that `gemm` computes on
//! the thread of the task, from the weights as [`Source`] says: where they lie, or from scratch of the worker.

// gemm takes raw pointers.
#![allow(unsafe_code)]

use std::ops::Range;

use super::projection::{Threads, WeightStorage};
use crate::kernels::factors::Accumulators;
use crate::packing::{PackKeys, TransposeRows};
use crate::workspace::ALIGN_BYTES;
use crate::{AttentionError, Element, Parallelism, Workspace, schedule};

/// Tokens of the same number of features, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) count: usize,
    pub(super) stride: usize,
}

impl<'a> Rows<'a> {
    /// Some of them, of this many features.
    fn part(self, rows: Range<usize>, features: usize) -> Self {
        let (start, count) = (rows.start * self.stride, rows.len());
        Self { data: &self.data[start..][..(count - 1) * self.stride + features], count, ..self }
    }
}

/// The same, to be written.
pub(super) struct RowsMut<'a> {
    pub(super) data: &'a mut [f32],
    pub(super) count: usize,
    pub(super) stride: usize,
}

/// A part of a projection: outputs from `first_output` on, as many as asked for.
pub(super) struct Product<'a, T> {
    pub(super) weight: &'a [T],
    pub(super) storage: WeightStorage,
    /// `[in, out]` of all weights.
    pub(super) shape: [usize; 2],
    /// Of the outputs of the part.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) first_output: usize,
}

/// Outputs of a block are a multiple of this, the widest vector of gemm's micro-tiles.
const BLOCK_STEP: usize = 16;

/// Weights of a block: 1 MiB as `f32`, as much as L2 holds. Blocks of [in, out] 1024 x 256 are as fast as one product of all, or faster, with `f32` too
/// (benches/results/log.md).
const BLOCK_WEIGHTS: usize = 1 << 18;

/// Where threads are many, outputs are cut no further than this (two micro-tiles of AVX-512), nor tokens.
const FEWEST_OUTPUTS: usize = 96;
const FEWEST_TOKENS: usize = 128;

/// Up to so many tokens are multiplied one by one where weights are stored `[out, in]`, which reads them in order each time, from L2 after the first.
const FEW_TOKENS: usize = 4;

/// What a block of weights is multiplied from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Where it lies.
    Stored,
    /// Widened into scratch, in the order in which it is stored.
    Widened,
    /// `[out, in]` weights of many tokens: transposed (and widened) into scratch, a copy that `gemm` would make too, but slower.
    Transposed,
}

impl Source {
    fn new<T: Element<Acc = f32>>(storage: WeightStorage, tokens: usize) -> Self {
        match (storage, T::as_acc(&[])) {
            (WeightStorage::OutIn, _) if tokens > FEW_TOKENS => Self::Transposed,
            (_, Some(_)) => Self::Stored,
            (_, None) => Self::Widened,
        }
    }

    /// Elements from an input to the next in the scratch of a transposed block, and a cache line more, lest all fall into the same cache sets.
    fn transposed_stride(outputs: usize) -> usize {
        outputs.next_multiple_of(BLOCK_STEP) + BLOCK_STEP
    }

    fn scratch_len(self, [inputs, outputs]: [usize; 2]) -> usize {
        let numbers = match self {
            Self::Stored => 0,
            Self::Widened => inputs * outputs,
            Self::Transposed => inputs * Self::transposed_stride(outputs),
        };
        (numbers * size_of::<f32>()).next_multiple_of(ALIGN_BYTES)
    }
}

/// Products of fewer floating-point operations run on the calling thread: those of a single token wait for the weights' memory, not for
/// arithmetic.
const SERIAL_PRODUCT_BELOW_FLOPS: u128 = 1 << 21;

/// How a product is cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    source: Source,
    /// Outputs of a task, and blocks of them.
    outputs: usize,
    output_blocks: usize,
    /// Tokens of a task, and blocks of them.
    tokens: usize,
    token_blocks: usize,
    workers: usize,
    /// Bytes of scratch of a worker.
    scratch_len: usize,
}

impl Cut {
    pub(super) fn new<T: Element<Acc = f32>>(
        [inputs, outputs]: [usize; 2],
        storage: WeightStorage,
        tokens: usize,
        parallelism: Parallelism,
    ) -> Self {
        let flops = [2, tokens, inputs, outputs].into_iter().fold(1u128, |flops, n| flops.saturating_mul(n as u128));
        let threads = if flops < SERIAL_PRODUCT_BELOW_FLOPS { 1 } else { schedule::max_threads(parallelism) };
        let most = (outputs / FEWEST_OUTPUTS).max(1);
        let for_cache = outputs.saturating_mul(inputs).div_ceil(BLOCK_WEIGHTS).max(1);
        let for_threads = for_cache.next_multiple_of(threads.min(most)); // each thread the same number
        let block = outputs.div_ceil(for_threads).next_multiple_of(BLOCK_STEP);
        let output_blocks = outputs.div_ceil(block.max(1)).max(1);
        let token_blocks = threads.div_ceil(output_blocks).min(tokens / FEWEST_TOKENS).max(1);
        let token_block = tokens.div_ceil(token_blocks);
        let token_blocks = tokens.div_ceil(token_block.max(1)).max(1);
        let source = Source::new::<T>(storage, tokens);
        let scratch_len = source.scratch_len([inputs, block]);
        let workers = threads.min(output_blocks * token_blocks);
        Self { source, outputs: block, output_blocks, tokens: token_block, token_blocks, workers, scratch_len }
    }

    /// Bytes of scratch of all workers.
    pub(super) fn all_scratch_len(&self) -> usize {
        self.workers * self.scratch_len
    }
}

/// `f32` weights of some outputs.
struct Weights<'a> {
    data: &'a [f32],
    input_stride: usize,
    output_stride: usize,
}

/// Where the rows of the result lie, for several workers, each of which writes outputs of its own.
#[derive(Clone, Copy)]
struct Target {
    data: *mut f32,
    stride: usize,
}

impl Target {
    /// From this row on, which must be one.
    fn from(self, row: usize) -> Self {
        Self { data: self.data.wrapping_add(row * self.stride), ..self }
    }
}

// SAFETY: a worker writes the outputs of its own tasks alone, and every task is run once.
unsafe impl Sync for Target {}

impl<T: Element<Acc = f32>> Product<'_, T> {
    pub(super) fn run(
        &self,
        outputs: usize,
        x: Rows<'_>,
        to: RowsMut<'_>,
        widened: &mut Workspace,
        threads: Threads,
    ) -> Result<(), AttentionError> {
        let inputs = self.shape[0];
        let tokens = x.count;
        if tokens == 0 || outputs == 0 {
            return Ok(());
        }
        let reach = |stride: usize, features: usize| (tokens - 1) * stride + features;
        assert!(to.count == tokens && outputs <= to.stride && self.first_output + outputs <= self.shape[1]);
        assert!(reach(x.stride, inputs) <= x.data.len() && reach(to.stride, outputs) <= to.data.len());
        let to = Target { data: to.data.as_mut_ptr(), stride: to.stride };
        let cut = Cut::new::<T>([inputs, outputs], self.storage, tokens, threads.parallelism);
        widened.reserve_len(cut.all_scratch_len())?;
        let scratch = &mut widened.as_mut_slice()[..cut.all_scratch_len()];
        let work = |tasks: &mut dyn Iterator<Item = usize>, scratch: &mut [u8]| {
            for task in tasks {
                // Neighbours in the order of tasks share their weights.
                let (output_block, token_block) = (task / cut.token_blocks, task % cut.token_blocks);
                let outputs = output_block * cut.outputs..outputs.min((output_block + 1) * cut.outputs);
                let tokens = token_block * cut.tokens..tokens.min((token_block + 1) * cut.tokens);
                let weights = match (cut.source, T::as_acc(self.weight)) {
                    (Source::Transposed, _) => self.transpose(outputs.clone(), as_f32(scratch), threads),
                    (_, Some(weights)) => self.part(weights, outputs.clone()),
                    (_, None) => self.widen(outputs.clone(), as_f32(scratch), threads),
                };
                // SAFETY: `to` holds all rows, asserted above, and no other task has these outputs of these.
                unsafe { self.multiply(outputs, &weights, x.part(tokens.clone(), inputs), to.from(tokens.start)) };
            }
        };
        schedule::for_each_worker(cut.workers, cut.output_blocks * cut.token_blocks, scratch, cut.scratch_len, &work);
        Ok(())
    }

    /// These outputs of the part, where they lie.
    fn part<'w>(&self, weights: &'w [f32], outputs: Range<usize>) -> Weights<'w> {
        let [inputs, all_outputs] = self.shape;
        let first = self.first_output + outputs.start;
        match self.storage {
            WeightStorage::OutIn => Weights {
                data: &weights[first * inputs..][..outputs.len() * inputs],
                input_stride: 1,
                output_stride: inputs,
            },
            // No element, no offset: `first` may be past the end.
            WeightStorage::InOut if inputs == 0 => Weights { data: &[], input_stride: 0, output_stride: 1 },
            WeightStorage::InOut => Weights {
                data: &weights[first..][..(inputs - 1) * all_outputs + outputs.len()],
                input_stride: all_outputs,
                output_stride: 1,
            },
        }
    }

    /// These outputs of the part, widened into `scratch`.
    fn widen<'w>(&self, outputs: Range<usize>, scratch: &'w mut [f32], threads: Threads) -> Weights<'w> {
        let [inputs, all_outputs] = self.shape;
        let first = self.first_output + outputs.start;
        let count = outputs.len();
        let (rows, row_len, row_stride, start) = match self.storage {
            WeightStorage::OutIn => (count, inputs, inputs, first * inputs),
            WeightStorage::InOut => (inputs, count, all_outputs, first),
        };
        if inputs > 0 {
            let block = PackKeys {
                from: &self.weight[start..],
                key_stride: row_stride,
                dim_stride: 1,
                keys: rows,
                dim: row_len,
                to: scratch,
                to_stride: row_len,
                factors: Accumulators,
            };
            T::pack_keys(threads.instruction_set, block);
        }
        let (input_stride, output_stride) = match self.storage {
            WeightStorage::OutIn => (1, inputs),
            WeightStorage::InOut => (count, 1),
        };
        Weights { data: &scratch[..count * inputs], input_stride, output_stride }
    }

    /// These outputs of the part, transposed and widened into `scratch`.
    fn transpose<'w>(&self, outputs: Range<usize>, scratch: &'w mut [f32], threads: Threads) -> Weights<'w> {
        let [inputs, _] = self.shape;
        let first = self.first_output + outputs.start;
        let stride = Source::transposed_stride(outputs.len());
        let scratch = &mut scratch[..inputs * stride];
        if inputs > 0 {
            let from = &self.weight[first * inputs..][..outputs.len() * inputs];
            let rows = TransposeRows { from, row_len: inputs, to: scratch, to_stride: stride };
            T::transpose_rows(threads.instruction_set, rows);
        }
        Weights { data: scratch, input_stride: stride, output_stride: 1 }
    }

    /// Computes these outputs of all tokens.
    ///
    /// # Safety
    /// `to` must be valid for writing these outputs of as many rows as `x` has, and nothing else may use them meanwhile.
    unsafe fn multiply(&self, outputs: Range<usize>, weights: &Weights<'_>, x: Rows<'_>, to: Target) {
        let inputs = self.shape[0];
        let count = outputs.len();
        let Weights { data, input_stride, output_stride } = *weights;
        let x_stride = x.stride;
        assert!(inputs == 0 || (inputs - 1) * input_stride + (count - 1) * output_stride < data.len());
        if let Some(bias) = self.bias {
            for token in 0..x.count {
                // SAFETY: the caller allows this row's outputs.
                let row =
                    unsafe { std::slice::from_raw_parts_mut(to.data.add(token * to.stride + outputs.start), count) };
                row.copy_from_slice(&bias[outputs.clone()]);
            }
        }
        // Few tokens by weights stored [out, in] one by one: for several, gemm would first copy the weights.
        let together = if input_stride == 1 && x.count <= FEW_TOKENS { 1 } else { x.count.max(1) };
        for first in (0..x.count).step_by(together) {
            let x = &x.data[first * x.stride..][..(together - 1) * x.stride + inputs];
            // gemm computes dst = alpha * dst + beta * lhs * rhs, the reverse of BLAS, and reads dst only if told to.
            // SAFETY: dst as the caller allows; `x` holds its rows (asserted by `run`) and `data` the weights (asserted above). No stride
            // exceeds isize, as all lie inside slices.
            unsafe {
                gemm::gemm(
                    together,
                    count,
                    inputs,
                    to.data.add(first * to.stride + outputs.start),
                    1,
                    to.stride as isize,
                    self.bias.is_some(),
                    x.as_ptr(),
                    1,
                    x_stride as isize,
                    data.as_ptr(),
                    output_stride as isize,
                    input_stride as isize,
                    1.0,
                    1.0,
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                );
            }
        }
    }
}

/// Scratch as numbers.
fn as_f32(scratch: &mut [u8]) -> &mut [f32] {
    // SAFETY: any bits are an f32, and the scratch is initialised.
    let (before, numbers, after) = unsafe { scratch.align_to_mut::<f32>() };
    assert!(before.is_empty() && after.is_empty(), "scratch is aligned to 64 bytes, and so are its parts");
    numbers
}
