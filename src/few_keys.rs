//! A call of few queries on few keys, the first steps of a prompt, at once: its products are so short that what surrounds them decides. The
//! operations of `decode` and their order, hence its bits, without tasks, blocks and scratch. [measured, 8 heads of 64, one token, AVX-512]
//! 590 ns in tasks, 240 ns this way.

#![allow(unsafe_code)]

use pulp::Simd;

use crate::blocks::Path;
use crate::decode::FEW_KEYS;
use crate::kernels::fetch::{Fetch, Rows};
use crate::kernels::lane::Lane;
use crate::kernels::row::{ValueRows, score_rows, value_rows};
use crate::kernels::stored::Stored;
use crate::kernels::{MAX_LANES, WithTiles};
use crate::mask::KeyRanges;
use crate::online_softmax::softmax_row;
use crate::task::{Call, TaskKernels};
use crate::tensor::Layout;
use crate::{AttentionShape, Element};

/// All rows of a call. What rows see is one range of at most `FEW_KEYS` keys; nothing happens to scores.
pub(crate) struct FewKeys<A> {
    shape: AttentionShape,
    visible: KeyRanges,
    scale: A,
    /// Each valid at every index inside its layout, features being neighbours.
    q: (*const A, Layout),
    k: (*const A, Layout),
    v: (*const A, Layout),
    out: (*mut A, Layout),
    /// Valid for writing `batch * num_heads` times as many elements as the second says, a row's by its number.
    logsumexp: Option<(*mut A, usize)>,
}

impl<T: Element, K: Element<Acc = T::Acc>> Call<'_, T, K> {
    /// Runs the call at once if it is one of few keys. Else gives `false`, and nothing has happened.
    #[inline]
    pub(crate) fn run_few_keys(&self) -> bool {
        let plan = self.plan;
        let AttentionShape { kv_len, value_dim, .. } = plan.shape;
        let is_short = plan.blocks.path == Path::Decode && (1..=FEW_KEYS).contains(&kv_len) && plan.threads() == 1;
        if !is_short || !<T as Stored<T::Acc>>::IS_ACCUMULATOR || !<K as Stored<T::Acc>>::IS_ACCUMULATOR {
            return false;
        }
        let (inputs, visible) = (self.inputs, plan.visible.whole());
        let is_plain = self.pass.is_none()
            && inputs.sinks.is_none()
            && inputs.kv_lens.is_none()
            && visible.second_part().is_none();
        let (out, out_layout) = self.outputs.rows();
        let layouts = [inputs.q.layout(), inputs.k.layout(), inputs.v.layout(), out_layout];
        let are_neighbours = layouts.iter().all(Layout::has_neighbours);
        // (The portable set's decode has tiles of its own.)
        if !is_plain || value_dim == 0 || !are_neighbours || !plan.instruction_set.has_fma() {
            return false;
        }
        let [q_layout, k_layout, v_layout, _] = layouts;
        // Elements are accumulators, as was asked above.
        let op = FewKeys {
            shape: plan.shape,
            visible,
            scale: T::Acc::from_f64(plan.softmax_scale),
            q: (inputs.q.data().as_ptr().cast(), q_layout),
            k: (inputs.k.data().as_ptr().cast(), k_layout),
            v: (inputs.v.data().as_ptr().cast(), v_layout),
            out: (out.cast(), out_layout),
            logsumexp: self.outputs.logsumexp(),
        };
        T::Acc::few_keys(plan.instruction_set, op);
        true
    }
}

impl<A: TaskKernels> WithTiles for FewKeys<A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) {
        let AttentionShape { batch, num_kv_heads, q_len, .. } = self.shape;
        let group_size = self.shape.group_size();
        for batch in 0..batch {
            for kv_head in 0..num_kv_heads {
                for query in 0..q_len {
                    for head in kv_head * group_size..(kv_head + 1) * group_size {
                        self.row::<S>(simd, [batch, head, query], kv_head);
                    }
                }
            }
        }
    }
}

impl<A: Lane> FewKeys<A> {
    #[inline(always)]
    fn row<S: Simd>(&self, simd: S, [batch, head, query]: [usize; 3], kv_head: usize) {
        let (lanes, zero) = (A::lanes::<S>(), A::splat(simd, A::ZERO));
        let AttentionShape { head_dim, value_dim, .. } = self.shape;
        let keys = self.visible.range(query);
        let first_key = [batch, kv_head, keys.start.min(self.shape.kv_len - 1)];
        let [(q, q_layout), (k, k_layout), (v, v_layout)] = [self.q, self.k, self.v];
        let (out, out_layout) = self.out;
        let write_logsumexp = |value| {
            if let Some((logsumexp, stride)) = self.logsumexp {
                // SAFETY: the row is one of the `batch * num_heads` times `stride`.
                unsafe { logsumexp.add((batch * self.shape.num_heads + head) * stride + query).write(value) };
            }
        };
        // SAFETY: the indices are inside the layouts, where the pointers are valid; a row has `head_dim` or `value_dim` neighbours, and K
        // and V have a row for each of `keys`. `scores` has room for them in whole vectors. No row of the output is written twice.
        unsafe {
            let out = out.add(out_layout.offset([batch, head, query]));
            if keys.is_empty() {
                write_logsumexp(A::NEG_INFINITY);
                return core::slice::from_raw_parts_mut(out, value_dim).fill(A::ZERO);
            }
            let q = q.add(q_layout.offset([batch, head, query]));
            let k = Rows { start: k.add(k_layout.offset(first_key)), stride: k_layout.strides[2] };
            let v = Rows { start: v.add(v_layout.offset(first_key)), stride: v_layout.strides[2] };
            let mut ahead = Fetch::new::<A, A>(None, q);
            let mut scores = [A::ZERO; FEW_KEYS + MAX_LANES];
            let shape = (keys.len(), head_dim);
            score_rows::<S, A, A, 4, 1>(simd, q, k, shape, (scores.as_mut_ptr(), 0), &mut ahead);
            let (mut max, mut sum) = (A::NEG_INFINITY, A::ZERO);
            let scores = &mut scores[..keys.len().next_multiple_of(lanes)];
            softmax_row(simd, (scores, keys.len()), self.scale, true, &mut max, &mut sum);
            write_logsumexp(A::logsumexp(max, sum));
            let op = ValueRows {
                v,
                keys: keys.len(),
                value_dim,
                probs: scores.as_ptr(),
                probs_stride: 0,
                rescale: None,
                acc: out,
            };
            value_rows::<S, A, A, 8, 1>(simd, op, &mut ahead);
            let factor = A::splat(simd, sum.reciprocal());
            let quotient = |acc| A::add(simd, A::mul(simd, acc, factor), zero); // never -0, as in `packing`
            let mut d = 0;
            while d + lanes <= value_dim {
                A::store::<S>(out.add(d), quotient(A::load::<S>(out.add(d))));
                d += lanes;
            }
            if d < value_dim {
                let rest = core::slice::from_raw_parts_mut(out.add(d), value_dim - d);
                let quotients = quotient(A::load_partial(simd, rest));
                A::store_partial(simd, rest, quotients);
            }
        }
    }
}
