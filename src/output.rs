//! The end of a task: sinks, division by the running sums, and writing the rows where they go.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use crate::blocks::Path;
use crate::kernels::lane::Lane;
use crate::row_block::RowBlock;
use crate::task::Call;
use crate::tensor::Layout;
use crate::unpacking::{UnpackOut, UnpackRows};
use crate::workspace::Scratch;
use crate::{AttentionOutputs, Element};

/// Where the rows of a call go: the outputs, or one sequence of packed ones.
#[derive(Clone, Copy)]
pub(crate) struct OutputRows<'a, T: Element> {
    out: *mut T,
    layout: Layout,
    logsumexp: Option<*mut T::Acc>,
    /// Elements of `logsumexp` from a head to the next.
    logsumexp_stride: usize,
    outputs: PhantomData<&'a mut T>,
}

// SAFETY: `out` and `logsumexp` come from exclusive borrows that last as long as `'a`. Tasks write only the rows of their
// own (batch or sequence, KV head, row block), which are disjoint: the schedule hands out each task once, and a mutable view
// has no two elements at one place.
unsafe impl<T: Element> Sync for OutputRows<'_, T> {}

impl<'a, T: Element> OutputRows<'a, T> {
    /// All rows. The caller has checked that the slice for `logsumexp` holds one element for each.
    pub(crate) fn new(outputs: &'a mut AttentionOutputs<'_, T>) -> Self {
        let layout = outputs.out.layout();
        let logsumexp = outputs.logsumexp.as_mut().map(|logsumexp| logsumexp.as_mut_ptr());
        let logsumexp_stride = layout.shape[2];
        Self { out: outputs.out.as_mut_ptr(), layout, logsumexp, logsumexp_stride, outputs: PhantomData }
    }

    /// Where the output lies: valid for writing at every index inside the layout.
    pub(crate) fn rows(&self) -> (*mut T, Layout) {
        (self.out, self.layout)
    }

    /// Where the rows' logsumexp lies, if it is wanted, and elements from a head to the next.
    pub(crate) fn logsumexp(&self) -> Option<(*mut T::Acc, usize)> {
        self.logsumexp.map(|logsumexp| (logsumexp, self.logsumexp_stride))
    }

    /// The rows of these queries alone, in a batch of one. Sequences that have no query in common write to disjoint places.
    pub(crate) fn of_queries(&self, queries: Range<usize>) -> Self {
        let [batch, _, q_len, _] = self.layout.shape;
        assert!(batch == 1 && queries.start <= queries.end && queries.end <= q_len);
        let first = queries.start;
        Self {
            // Wraps where there is no element: nothing is written then.
            out: self.out.wrapping_add(first.wrapping_mul(self.layout.strides[2])),
            layout: self.layout.with_seq(queries.len()),
            logsumexp: self.logsumexp.map(|logsumexp| logsumexp.wrapping_add(first)),
            ..*self
        }
    }
}

impl<T: Element, K: Element<Acc = T::Acc>> Call<'_, T, K> {
    /// Divides by the running sums and writes the rows.
    pub(crate) fn finish(&self, task: &RowBlock, scratch: &mut Scratch<'_, T::Acc>) {
        let OutputRows { out, layout, .. } = self.outputs;
        let may_hide = self.pass.is_some_and(|pass| pass.may_hide());
        if may_hide || self.inputs.sinks.is_some() {
            self.settle(task, scratch, may_hide);
        } else if self.outputs.logsumexp.is_some() {
            for row in 0..task.rows {
                let value = match task.row_sees_keys(row) {
                    false => T::Acc::NEG_INFINITY,
                    true => T::Acc::logsumexp(scratch.running_max[row], scratch.running_sum[row]),
                };
                self.write_logsumexp(task.index(row), value);
            }
        }
        if layout.shape[3] == 0 {
            return;
        }
        let (out_acc, running_sum) = (&mut *scratch.out_acc, &*scratch.running_sum);
        match self.plan.blocks.path {
            Path::Prefill => {
                let op = UnpackOut { task, out_acc, running_sum, out, layout };
                T::unpack_out(self.plan.instruction_set, op);
            }
            Path::Decode => {
                let op = UnpackRows { task, out_acc, running_sum, out, layout };
                T::unpack_rows(self.plan.instruction_set, op);
            }
        }
    }

    /// What mask, bias and sinks leave to be done once all keys are in: rows that see none of them, and the sink in the sum. Writes
    /// log-sum-exps, and makes the running sum what the accumulators are to be divided by.
    fn settle(&self, task: &RowBlock, scratch: &mut Scratch<'_, T::Acc>, may_hide: bool) {
        for row in 0..task.rows {
            let index = task.index(row);
            let sum = scratch.running_sum[row];
            // A sum is 0 where all scores are -inf: hidden, or visible with that score. A visible finite one makes it 1 at least.
            let sees_keys = task.row_sees_keys(row) && !(may_hide && sum.is_zero() && self.hides_row(task, row));
            // No sink is one of no weight.
            let sink = self.inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[index[1]]));
            let (sum, logsumexp) = match sees_keys {
                true => with_sink(scratch.running_max[row], sum, sink),
                false => (T::Acc::from_f64(f64::INFINITY), T::Acc::from_f64(sink)), // the accumulators are 0
            };
            scratch.running_sum[row] = sum;
            self.write_logsumexp(index, logsumexp);
        }
    }

    /// Whether mask and bias hide every key that the config shows to a row. Asked only where all of its scores were -inf.
    fn hides_row(&self, task: &RowBlock, row: usize) -> bool {
        let index = task.index(row);
        let second_part = task.second_part();
        let mut keys = task.row_keys(row).chain(second_part.map_or(0..0, |part| part.row_keys(row)));
        keys.all(|key| self.pass.is_some_and(|pass| pass.hides(index, key)))
    }

    /// Of a row of the task in hand, where it is wanted.
    fn write_logsumexp(&self, [batch, head, query]: [usize; 3], value: T::Acc) {
        let (num_heads, stride) = (self.outputs.layout.shape[1], self.outputs.logsumexp_stride);
        if let Some(logsumexp) = self.outputs.logsumexp {
            // SAFETY: the slice holds batch * num_heads * q_len elements (checked by the plan) and this one is this
            // task's alone.
            unsafe { logsumexp.add((batch * num_heads + head) * stride + query).write(value) };
        }
    }
}

/// The sum of a row with its sink, in units of its running maximum as the accumulators are, and the log-sum-exp.
fn with_sink<A: Element<Acc = A> + Lane>(max: A, sum: A, sink: f64) -> (A, A) {
    if sink == f64::NEG_INFINITY {
        return (sum, A::logsumexp(max, sum));
    }
    let (max, sum) = (Element::to_f64(max), Element::to_f64(sum));
    let (sum, logsumexp) = if sink == f64::INFINITY {
        (f64::NAN, f64::NAN) // as for any score of +inf
    } else if max == f64::NEG_INFINITY {
        // Visible scores of -inf alone weigh nothing beside a sink; the sum is 0 then, or NaN as one of them is.
        (f64::INFINITY + sum + sink, sum + sink)
    } else {
        let larger = if sink > max { sink } else { max };
        (sum + (sink - max).exp(), larger + (sum * (max - larger).exp() + (sink - larger).exp()).ln())
    };
    (A::from_f64(sum), A::from_f64(logsumexp))
}
