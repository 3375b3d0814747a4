//! The baseline: what one writes with a good matrix product and without fusing. The scores of one head at a time are
//! materialised, in memory allocated beforehand.
//!
//! ```text
//! scores = softmax_scale * Q K^T          gemm
//! probs  = softmax(visible scores)        hidden ones become 0, no exponential is spent on them
//! out    = probs V                        gemm
//! ```
//!
//! With as many heads as threads each thread takes whole heads, else all threads share the products and the rows of one
//! head. gemm spans the whole rectangle of a causal head: it knows no triangles.

// gemm takes raw pointers, and heads interleaved in memory (bshd) are written from several threads.
#![allow(unsafe_code)]

use std::ops::Range;

use fused_attention::{AttentionError, AttentionInputs, AttentionShape, InstructionSet};
use pulp::{Simd, WithSimd};

use crate::args::{Layout, MaskKind};
use crate::inputs::view_mut;
use crate::memory::filled;
use crate::threads::Threads;
use crate::vectors::run_with;

/// A baseline ready to run, with its scores allocated.
pub struct Unfused<'a> {
    shape: AttentionShape,
    mask: MaskKind,
    instruction_set: InstructionSet,
    threads: &'a Threads,
    /// `q_len x kv_len` for each head in flight.
    scores: Vec<Vec<f32>>,
}

impl<'a> Unfused<'a> {
    pub fn new(
        shape: &AttentionShape,
        mask: MaskKind,
        instruction_set: InstructionSet,
        threads: &'a Threads,
    ) -> crate::Result<Self> {
        let in_flight = if shape.batch * shape.num_heads < threads.count() { 1 } else { threads.count() };
        let scores = (0..in_flight).map(|_| filled([shape.q_len, shape.kv_len], 0.0)).collect::<crate::Result<_>>()?;
        Ok(Self { shape: *shape, mask, instruction_set, threads, scores })
    }

    /// Computes attention into `out`, which is contiguous in `layout`.
    ///
    /// # Errors
    /// If `out` is too short.
    ///
    /// # Panics
    /// If the inputs are not of the shape that it was made for, or their last stride is not 1.
    pub fn run(
        &mut self,
        inputs: &AttentionInputs<'_, f32>,
        out: &mut [f32],
        layout: Layout,
    ) -> Result<(), AttentionError> {
        let AttentionShape { batch, num_heads, q_len, value_dim, .. } = self.shape;
        assert_eq!(AttentionShape::of(inputs).as_ref(), Ok(&self.shape));
        assert!([inputs.q.strides(), inputs.k.strides(), inputs.v.strides()].iter().all(|strides| strides[3] == 1));
        let out_strides = view_mut(layout, out, [batch, num_heads, q_len, value_dim])?.strides();

        let heads = Heads {
            shape: self.shape,
            mask: self.mask,
            instruction_set: self.instruction_set,
            inputs,
            out_strides,
            out: out.as_mut_ptr(),
        };
        let (threads, in_flight, units) = (self.threads, self.scores.len(), batch * num_heads);
        if in_flight == threads.count() {
            threads.for_each_chunk(&mut self.scores, 1, |first, scores| {
                for unit in (first..units).step_by(in_flight) {
                    // SAFETY: `run` checked shapes and strides, `unit < units`, and every unit belongs to one `first`.
                    unsafe { heads.run_head(unit, &mut scores[0], &Threads::Serial) };
                }
            });
        } else {
            for unit in 0..units {
                // SAFETY: `run` checked shapes and strides, `unit < units`, and this is the only thread that writes.
                unsafe { heads.run_head(unit, &mut self.scores[0], threads) };
            }
        }
        Ok(())
    }
}

/// The heads of one call, shared by its threads.
struct Heads<'a> {
    shape: AttentionShape,
    mask: MaskKind,
    instruction_set: InstructionSet,
    inputs: &'a AttentionInputs<'a, f32>,
    out: *mut f32,
    out_strides: [usize; 4],
}

// SAFETY: `out` is the only member that is not Sync by itself; it is written through `run_head` alone, whose contract
// gives each head, and so each element, to one thread.
unsafe impl Sync for Heads<'_> {}

impl Heads<'_> {
    /// One head, by its number `batch * num_heads + head`.
    ///
    /// # Safety
    /// The tensors have the shape `self.shape` and a last stride of 1, `unit < batch * num_heads`, and no other thread
    /// runs the same unit.
    unsafe fn run_head(&self, unit: usize, scores: &mut [f32], threads: &Threads) {
        let AttentionShape { num_heads, q_len, kv_len, head_dim, value_dim, .. } = self.shape;
        let (batch, head) = (unit / num_heads, unit % num_heads);
        let kv_head = head / self.shape.group_size();
        let AttentionInputs { q, k, v, .. } = self.inputs;
        let offset = |strides: [usize; 4], head: usize| batch * strides[0] + head * strides[1];

        let query = Matrix::rows_of(&q.data()[offset(q.strides(), head)..], q_len, head_dim, q.strides()[2]);
        let key = Matrix::rows_of(&k.data()[offset(k.strides(), kv_head)..], kv_len, head_dim, k.strides()[2]);
        let value = Matrix::rows_of(&v.data()[offset(v.strides(), kv_head)..], kv_len, value_dim, v.strides()[2]);
        let softmax_scale = 1.0 / (head_dim as f32).sqrt();
        assert_eq!(scores.len(), q_len * kv_len);
        // SAFETY: `scores` holds `q_len` rows of `kv_len` and is borrowed mutably.
        unsafe { multiply(scores.as_mut_ptr(), kv_len, softmax_scale, &query, &key.transposed(), threads) };

        // One chunk of rows for each thread.
        let chunk_rows = q_len.div_ceil(threads.count());
        threads.for_each_chunk(scores, chunk_rows * kv_len, |chunk, scores| {
            let first_query = chunk * chunk_rows;
            let softmax = Softmax { shape: &self.shape, mask: self.mask, first_query, scores };
            run_with(self.instruction_set, softmax);
        });

        let probs = Matrix::rows_of(scores, q_len, kv_len, kv_len);
        // SAFETY: the output view was checked to hold `[batch, num_heads, q_len, value_dim]` with these strides, and
        // the caller says that this head's rows are nobody else's.
        unsafe {
            let out = self.out.add(offset(self.out_strides, head));
            multiply(out, self.out_strides[2], 1.0, &probs, &value, threads);
        }
    }
}

/// A matrix to be read, inside its slice by construction.
struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    fn rows_of(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(rows == 0 || cols == 0 || (rows - 1) * row_stride + cols <= data.len());
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    fn transposed(&self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = *self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

/// `dst = scale * lhs * rhs`.
///
/// # Safety
/// `dst` points to `lhs.rows` rows of `rhs.cols` elements, `dst_row_stride` apart, which nobody else reads or writes.
unsafe fn multiply(
    dst: *mut f32,
    dst_row_stride: usize,
    scale: f32,
    lhs: &Matrix<'_>,
    rhs: &Matrix<'_>,
    threads: &Threads,
) {
    assert_eq!(lhs.cols, rhs.rows);
    // gemm computes dst = alpha * dst + beta * lhs * rhs, the reverse of BLAS, and reads dst only if told to.
    let (alpha, beta, read_dst) = (0.0, scale, false);
    // SAFETY: both matrices lie inside their slices (`Matrix::rows_of`), `dst` is the caller's promise. Strides of
    // memory that exists fit `isize`.
    unsafe {
        gemm::gemm(
            lhs.rows,
            rhs.cols,
            lhs.cols,
            dst,
            1,
            dst_row_stride as isize,
            read_dst,
            lhs.data.as_ptr(),
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            rhs.data.as_ptr(),
            rhs.col_stride as isize,
            rhs.row_stride as isize,
            alpha,
            beta,
            false,
            false,
            false,
            threads.gemm_parallelism(),
        );
    }
}

/// Softmax of rows of scores, in place. Plain loops: what the compiler vectorises, it vectorises for the instruction
/// set; libm's `exp` it cannot, so that has a loop of its own.
struct Softmax<'a> {
    shape: &'a AttentionShape,
    mask: MaskKind,
    first_query: usize,
    scores: &'a mut [f32],
}

impl WithSimd for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (row, scores) in self.scores.chunks_exact_mut(self.shape.kv_len).enumerate() {
            let Range { start, end } = self.mask.visible_keys(self.shape, self.first_query + row);
            scores[..start].fill(0.0);
            scores[end..].fill(0.0);
            let visible = &mut scores[start..end];
            let max = fold_lanes(visible, f32::NEG_INFINITY, |max, x| if x > max { x } else { max });
            for x in visible.iter_mut() {
                *x = (*x - max).exp();
            }
            let inverse = 1.0 / fold_lanes(visible, 0.0, |sum, x| sum + x);
            for x in visible.iter_mut() {
                *x *= inverse;
            }
        }
    }
}

/// Folds in 32 independent lanes, which is what lets the compiler use vectors: it may not reorder a plain sum.
#[inline(always)]
fn fold_lanes(row: &[f32], start: f32, op: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; 32];
    let (blocks, rest) = row.as_chunks::<32>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = op(*lane, x);
        }
    }
    let mut folded = start;
    for &x in lanes.iter().chain(rest) {
        folded = op(folded, x);
    }
    folded
}
