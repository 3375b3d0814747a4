//! Tokens times weights, by `gemm`.
//!
//! ```text
//! to[token][output] = bias[output] + sum over input of x[token][input] * weight[input][output]
//! ```
//!
//! The outputs are cut into blocks, which are tasks: weights of 16 bits are widened a block at a time, into scratch of the worker, and few
//! tokens, which `gemm` multiplies on one thread, are shared by the threads in blocks of weights. Where weights are `f32` and tokens are
//! many, there is one block and `gemm` uses the threads.

// gemm takes raw pointers.
#![allow(unsafe_code)]

use std::ops::Range;

use super::projection::{Threads, WeightStorage};
use crate::packing::PackKeys;
use crate::workspace::ALIGN_BYTES;
use crate::{AttentionError, Element, Parallelism, SERIAL_BELOW_FLOPS, Workspace, schedule};

/// Tokens of the same number of features, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) count: usize,
    pub(super) stride: usize,
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

/// Outputs of a block are a multiple of this, which the rows of all of gemm's micro-tiles divide (48 with AVX-512, 24 with AVX2).
const BLOCK_STEP: usize = 48;

/// Widened weights of a block: 1 MiB, within L2, unless 48 outputs take more.
const WIDENED_LEN: usize = 1 << 18;

/// Up to so many tokens gemm runs on one thread.
const FEW_TOKENS: usize = 1;

/// How the outputs of a product are cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    /// Outputs of a task.
    block: usize,
    blocks: usize,
    workers: usize,
    /// Bytes of widened weights of a worker.
    scratch_len: usize,
}

impl Cut {
    pub(super) fn new<T: Element<Acc = f32>>(
        [inputs, outputs]: [usize; 2],
        tokens: usize,
        parallelism: Parallelism,
    ) -> Self {
        let flops = [2, tokens, inputs, outputs].into_iter().fold(1u128, |flops, n| flops.saturating_mul(n as u128));
        let threads = if flops < SERIAL_BELOW_FLOPS.into() { 1 } else { schedule::max_threads(parallelism) };
        let is_f32 = T::as_acc(&[]).is_some();
        let shared = outputs.div_ceil(threads).next_multiple_of(BLOCK_STEP);
        let block = match is_f32 {
            true if tokens > FEW_TOKENS => outputs,
            true => shared,
            false => shared.min((WIDENED_LEN / inputs.max(1) / BLOCK_STEP).max(1) * BLOCK_STEP),
        };
        let blocks = outputs.div_ceil(block.max(1));
        let scratch_len = if is_f32 { 0 } else { (block * inputs * size_of::<f32>()).next_multiple_of(ALIGN_BYTES) };
        Self { block, blocks, workers: threads.min(blocks), scratch_len }
    }

    /// Bytes of widened weights of all workers.
    pub(super) fn widened_len(&self) -> usize {
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
        let Cut { block, blocks, workers, scratch_len, .. } =
            Cut::new::<T>([inputs, outputs], tokens, threads.parallelism);
        let weights = T::as_acc(self.weight);
        if let (Some(weights), 1) = (weights, blocks) {
            let parallelism = gemm_parallelism(threads.parallelism);
            // SAFETY: `to` holds the rows, asserted above, and is written by this call alone.
            unsafe { self.multiply(0..outputs, &self.part(weights, 0..outputs), x, to, parallelism) };
            return Ok(());
        }
        widened.reserve_len(workers * scratch_len)?;
        let scratch = &mut widened.as_mut_slice()[..workers * scratch_len];
        schedule::for_each_worker(
            workers,
            blocks,
            scratch,
            scratch_len,
            &|tasks: &mut dyn Iterator<Item = usize>, scratch: &mut [u8]| {
                for task in tasks {
                    let outputs = task * block..outputs.min((task + 1) * block);
                    let weights = match weights {
                        Some(weights) => self.part(weights, outputs.clone()),
                        None => self.widen(outputs.clone(), as_f32(scratch), threads),
                    };
                    // SAFETY: `to` holds the rows, asserted above, and no other task has these outputs.
                    unsafe { self.multiply(outputs, &weights, x, to, gemm::Parallelism::None) };
                }
            },
        );
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
            };
            T::pack_keys(threads.instruction_set, block);
        }
        let (input_stride, output_stride) = match self.storage {
            WeightStorage::OutIn => (1, inputs),
            WeightStorage::InOut => (count, 1),
        };
        Weights { data: &scratch[..count * inputs], input_stride, output_stride }
    }

    /// Computes these outputs of all tokens.
    ///
    /// # Safety
    /// `to` must be valid for writing these outputs of as many rows as `x` has, and nothing else may use them meanwhile.
    unsafe fn multiply(
        &self,
        outputs: Range<usize>,
        weights: &Weights<'_>,
        x: Rows<'_>,
        to: Target,
        parallelism: gemm::Parallelism,
    ) {
        let inputs = self.shape[0];
        let count = outputs.len();
        let Weights { data, input_stride, output_stride } = *weights;
        assert!(inputs == 0 || (inputs - 1) * input_stride + (count - 1) * output_stride < data.len());
        if let Some(bias) = self.bias {
            for token in 0..x.count {
                // SAFETY: the caller allows this row's outputs.
                let row =
                    unsafe { std::slice::from_raw_parts_mut(to.data.add(token * to.stride + outputs.start), count) };
                row.copy_from_slice(&bias[outputs.clone()]);
            }
        }
        // gemm computes dst = alpha * dst + beta * lhs * rhs, the reverse of BLAS, and reads dst only if told to.
        // SAFETY: dst as the caller allows; `x` holds its rows (asserted by `run`) and `data` the weights (asserted above). No stride
        // exceeds isize, as all lie inside slices.
        unsafe {
            gemm::gemm(
                x.count,
                count,
                inputs,
                to.data.add(outputs.start),
                1,
                to.stride as isize,
                self.bias.is_some(),
                x.data.as_ptr(),
                1,
                x.stride as isize,
                data.as_ptr(),
                output_stride as isize,
                input_stride as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

/// gemm runs small products on one thread, by a threshold of its own.
fn gemm_parallelism(parallelism: Parallelism) -> gemm::Parallelism {
    match parallelism {
        Parallelism::Serial => gemm::Parallelism::None,
        #[cfg(feature = "rayon")]
        Parallelism::Rayon => gemm::Parallelism::Rayon(schedule::max_threads(parallelism)),
    }
}

/// Scratch as numbers.
fn as_f32(scratch: &mut [u8]) -> &mut [f32] {
    // SAFETY: any bits are an f32, and the scratch is initialised.
    let (before, numbers, after) = unsafe { scratch.align_to_mut::<f32>() };
    assert!(before.is_empty() && after.is_empty(), "scratch is aligned to 64 bytes, and so are its parts");
    numbers
}
