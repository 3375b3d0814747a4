//! Both products for a single row, features in the lanes: for tasks of so few rows that a row per lane would leave most
//! lanes empty.
//!
//! ```text
//! scores[key]  = sum_p  q[p lanes] * K[key, p lanes]                    one horizontal sum a score
//! acc[d lanes] = acc[d lanes] * rescale + sum_j  probs[j] (broadcast) * V[j, d lanes]
//! ```

#![allow(unsafe_code)]

use pulp::Simd;

use super::lane::Lane;

/// Rows of a matrix with unit stride inside a row.
#[derive(Clone, Copy)]
pub(crate) struct Rows<A> {
    pub(crate) start: *const A,
    pub(crate) stride: usize,
}

/// `scores[key] = q . k[key]` for every element of `scores`.
///
/// # Safety
/// `k` must be valid for reading `scores.len()` rows of `q.len()` elements.
#[inline(always)]
pub(crate) unsafe fn score_row<S: Simd, A: Lane>(simd: S, q: &[A], k: Rows<A>, scores: &mut [A]) {
    // Four keys at a time: their sums overlap, and the loads of q are shared.
    const KEYS: usize = 4;
    let mut chunks = scores.chunks_exact_mut(KEYS);
    let mut key = k.start;
    // SAFETY: a row of `k` for each element of `scores`.
    unsafe {
        for scores in &mut chunks {
            scores.copy_from_slice(&dot::<S, A, KEYS>(simd, q, Rows { start: key, ..k }));
            key = key.wrapping_add(KEYS * k.stride); // past the last key there is perhaps no memory
        }
        for score in chunks.into_remainder() {
            [*score] = dot::<S, A, 1>(simd, q, Rows { start: key, ..k });
            key = key.wrapping_add(k.stride);
        }
    }
}

/// `q . k` for the first `KEYS` rows of `k`, each in the same order of additions: equal keys get equal
/// scores.
///
/// # Safety
/// `k` must be valid for reading `KEYS` rows of `q.len()` elements.
#[inline(always)]
unsafe fn dot<S: Simd, A: Lane, const KEYS: usize>(simd: S, q: &[A], k: Rows<A>) -> [A; KEYS] {
    let lanes = A::lanes::<S>();
    let whole = q.len() / lanes * lanes;
    // Two sums a key halve the chain of dependent FMAs, which is what a single key waits for.
    let mut acc = [[A::splat(simd, A::ZERO); 2]; KEYS];
    let mut p = 0;
    // SAFETY: `p + lanes <= q.len()` in the loop; behind it `q.len() - whole` elements are left of every row.
    unsafe {
        while p + 2 * lanes <= whole {
            for half in 0..2 {
                let at = p + half * lanes;
                let q = A::load::<S>(q.as_ptr().add(at));
                for key in 0..KEYS {
                    let k = A::load::<S>(k.start.add(key * k.stride + at));
                    acc[key][half] = A::mul_add(simd, q, k, acc[key][half]);
                }
            }
            p += 2 * lanes;
        }
        if p < whole {
            let q = A::load::<S>(q.as_ptr().add(p));
            for key in 0..KEYS {
                acc[key][0] = A::mul_add(simd, q, A::load::<S>(k.start.add(key * k.stride + p)), acc[key][0]);
            }
        }
        if whole < q.len() {
            let q_tail = A::load_partial(simd, &q[whole..]);
            for key in 0..KEYS {
                let k_tail = core::slice::from_raw_parts(k.start.add(key * k.stride + whole), q.len() - whole);
                acc[key][1] = A::mul_add(simd, q_tail, A::load_partial(simd, k_tail), acc[key][1]);
            }
        }
    }
    let mut sums = [A::ZERO; KEYS];
    for key in 0..KEYS {
        sums[key] = A::reduce_sum(simd, A::add(simd, acc[key][0], acc[key][1]));
    }
    sums
}

/// `acc = acc * rescale + sum_j probs[j] * v[j]`. Without `rescale` the old `acc` is not read: the first block of keys.
///
/// # Safety
/// `v` must be valid for reading `probs.len()` rows of `acc.len()` elements.
#[inline(always)]
pub(crate) unsafe fn value_row<S: Simd, A: Lane>(simd: S, probs: &[A], v: Rows<A>, rescale: Option<A>, acc: &mut [A]) {
    // Eight vectors of features at a time hide the latency of their sums over the keys.
    const VECTORS: usize = 8;
    let lanes = A::lanes::<S>();
    let mut d = 0;
    // SAFETY: `d + VECTORS * lanes <= acc.len()` in every call.
    unsafe {
        while d + VECTORS * lanes <= acc.len() {
            value_vectors::<S, A, VECTORS>(simd, probs, v, rescale, (d, acc));
            d += VECTORS * lanes;
        }
        if d + 4 * lanes <= acc.len() {
            value_vectors::<S, A, 4>(simd, probs, v, rescale, (d, acc));
            d += 4 * lanes;
        }
        while d + lanes <= acc.len() {
            value_vectors::<S, A, 1>(simd, probs, v, rescale, (d, acc));
            d += lanes;
        }
    }
    if d < acc.len() {
        let mut sum = A::splat(simd, A::ZERO);
        if let Some(rescale) = rescale {
            sum = A::mul(simd, A::load_partial(simd, &acc[d..]), A::splat(simd, rescale));
        }
        for (key, &prob) in probs.iter().enumerate() {
            // SAFETY: `key < probs.len()`, and `acc.len() - d` elements are left of its row.
            let v = unsafe { core::slice::from_raw_parts(v.start.add(key * v.stride + d), acc.len() - d) };
            sum = A::mul_add(simd, A::splat(simd, prob), A::load_partial(simd, v), sum);
        }
        A::store_partial(simd, &mut acc[d..], sum);
    }
}

/// `VECTORS` vectors of features, from feature `d` on.
///
/// # Safety
/// As [`value_row`]; `d + VECTORS * lanes` must not exceed `acc.len()`.
#[inline(always)]
unsafe fn value_vectors<S: Simd, A: Lane, const VECTORS: usize>(
    simd: S,
    probs: &[A],
    v: Rows<A>,
    rescale: Option<A>,
    (d, acc): (usize, &mut [A]),
) {
    let lanes = A::lanes::<S>();
    let acc = acc[d..d + VECTORS * lanes].as_mut_ptr();
    let mut sums = [A::splat(simd, A::ZERO); VECTORS];
    // SAFETY: `acc` has just been cut to `VECTORS` vectors, and there is a row of `v` with as many for each probability.
    unsafe {
        if let Some(rescale) = rescale {
            let rescale = A::splat(simd, rescale);
            for (vector, sum) in sums.iter_mut().enumerate() {
                *sum = A::mul(simd, A::load::<S>(acc.add(vector * lanes)), rescale);
            }
        }
        let mut v_row = v.start.wrapping_add(d);
        for &prob in probs {
            let prob = A::splat(simd, prob);
            for (vector, sum) in sums.iter_mut().enumerate() {
                *sum = A::mul_add(simd, prob, A::load::<S>(v_row.add(vector * lanes)), *sum);
            }
            v_row = v_row.wrapping_add(v.stride); // past the last key there is perhaps no memory
        }
        for (vector, sum) in sums.into_iter().enumerate() {
            A::store::<S>(acc.add(vector * lanes), sum);
        }
    }
}
