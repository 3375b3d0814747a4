//! What a call writes, and how it is compared with the reference.

use std::sync::LazyLock;

use fused_attention::reference::ReferenceOutput;
use fused_attention::{AttentionOutputs, Element, InstructionSet, TensorViewMut};

use crate::{Number, Tensor, agree, offsets};

/// More than one, and no power of two.
pub const POOL_THREADS: usize = 3;

/// Where calls that are large enough are shared among threads.
pub static POOL: LazyLock<rayon::ThreadPool> =
    LazyLock::new(|| rayon::ThreadPoolBuilder::new().num_threads(POOL_THREADS).build().expect("threads"));

/// Calls a function with the element type of Q and the output, and that of K and V: all ten pairs.
#[macro_export]
macro_rules! for_types {
    ($types:expr, $run:ident, $case:expr) => {{
        use fused_attention::{bf16, f16};
        match $types % 10 {
            0 => $run::<f32, f32>($case),
            1 => $run::<f32, f16>($case),
            2 => $run::<f32, bf16>($case),
            3 => $run::<f16, f16>($case),
            4 => $run::<bf16, bf16>($case),
            5 => $run::<f16, f32>($case),
            6 => $run::<bf16, f32>($case),
            7 => $run::<f16, bf16>($case),
            8 => $run::<bf16, f16>($case),
            _ => $run::<f64, f64>($case),
        }
    }};
}

pub fn outputs<'a, T: Number>(out: &'a mut Tensor<T>, logsumexp: &'a mut [T::Acc]) -> AttentionOutputs<'a, T> {
    let view = TensorViewMut::with_strides(&mut out.data, out.shape, out.strides).expect("distinct elements");
    AttentionOutputs::new(view).with_logsumexp(logsumexp)
}

/// Every element within its bound, by its number in the output without gaps, which rounding to `T` widens; every row's `logsumexp` within its
/// own; and no gap written.
pub fn assert_right<T: Number>(
    set: InstructionSet,
    out: &Tensor<T>,
    logsumexp: &[T::Acc],
    reference: &ReferenceOutput,
    out_bound: impl Fn(usize) -> f64,
    logsumexp_bound: impl Fn(usize) -> f64,
) {
    let mut is_gap = vec![true; out.data.len()];
    for (i, offset) in offsets(out.shape, out.strides).enumerate() {
        is_gap[offset] = false;
        let (found, expected) = (out.data[offset].to_f64(), reference.out[i]);
        let bound = out_bound(i);
        let bound = bound + (expected.abs() + bound) * T::ROUNDING + T::SMALLEST_ROUNDING;
        // An infinite value whose weight is 0 in f32 but not in f64 gives NaN.
        let lost_weight = expected.is_infinite() && found.is_nan();
        assert!(
            agree(found, expected, bound) || lost_weight,
            "{set}: out[{i}] is {found}, expected {expected} +- {bound:e}"
        );
    }
    for (offset, x) in out.data.iter().enumerate() {
        assert!(!is_gap[offset] || x.bits() == T::CANARY.bits(), "{set}: the gap at {offset} was written");
    }
    for (i, (found, &expected)) in logsumexp.iter().zip(&reference.logsumexp).enumerate() {
        let (found, bound) = (found.to_f64(), logsumexp_bound(i));
        assert!(agree(found, expected, bound), "{set}: logsumexp[{i}] is {found}, expected {expected} +- {bound:e}");
    }
}
