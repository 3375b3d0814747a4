//! Attention over parts of the keys, merged, is attention over all of them.

use crate::common::{
    Answer, Expected, Generator, Layout, Number, Problem, Tensor, bits, by_profile, for_each_pair, instruction_sets,
    max_abs_error, one_head, run, run_into,
};
use fused_attention::{
    AttentionConfig, AttentionError, AttentionOutputs, AttentionShape, MergedAttention, PartialAttention, TensorView,
    TensorViewMut, f16,
};
use proptest::prelude::*;

fn partial<T: Number>(answer: &Answer<T>) -> PartialAttention<'_, T> {
    PartialAttention::new(answer.out.view(), &answer.logsumexp).unwrap()
}

/// Merged into outputs of this layout, in the type of the accumulator.
fn merged<T: Number>(parts: &[Answer<T>], layout: Layout) -> Answer<T::Real> {
    let partials: Vec<_> = parts.iter().map(partial).collect();
    let mut answer = unwritten(parts[0].out.shape, layout);
    let mut outputs = AttentionOutputs::new(answer.out.view_mut()).with_logsumexp(&mut answer.logsumexp);
    PartialAttention::merge_into(&partials, &mut outputs).unwrap();
    answer.out.assert_written();
    answer.out.assert_gaps_untouched();
    answer
}

fn unwritten<T: Number>(shape: [usize; 4], layout: Layout) -> Answer<T> {
    Answer { out: Tensor::unwritten(shape, layout), logsumexp: vec![T::Real::CANARY; shape[0] * shape[1] * shape[2]] }
}

/// A result that saw no key.
fn empty<T: Number>(shape: [usize; 4], out: T) -> Answer<T> {
    let logsumexp = vec![T::Real::exactly(f64::NEG_INFINITY); shape[0] * shape[1] * shape[2]];
    Answer { out: Tensor::from_fn(shape, Layout::Bhsd, |_| out), logsumexp }
}

/// One after the other into one result in the type of the accumulator.
fn added<T: Number>(parts: &[Answer<T>], layout: Layout) -> Answer<T::Real> {
    let mut sum = empty(parts[0].out.shape, <T::Real as Number>::CANARY);
    sum.out = sum.out.in_layout(layout);
    for part in parts {
        let mut outputs = AttentionOutputs::new(sum.out.view_mut()).with_logsumexp(&mut sum.logsumexp);
        partial(part).add_to(&mut outputs).unwrap();
    }
    sum
}

/// What merging adds to the bounds of a call: an error of the log-sum-exps is one of the weights, and an `out` of 16 bits has been
/// rounded. `roundings`: of the merged output itself.
fn assert_is_whole<T: Number>(found: &Answer<T::Real>, whole: &Expected, max_v: f64, roundings: f64, what: &str) {
    let eps = T::Real::epsilon();
    let finite = whole.reference.logsumexp.iter().map(|x| x.abs()).filter(|x| x.is_finite());
    let largest = finite.fold(1.0, f64::max);
    let [out, logsumexp] = whole.bounds();
    let narrow = if T::NAME == T::Real::NAME { 0.0 } else { T::ulp(max_v) / 2.0 };
    let out_bound = out + 2.0 * max_v * (logsumexp + largest * eps) + narrow + roundings * eps * max_v;
    let error = max_abs_error(&found.out.values(), &whole.reference.out);
    assert!(error <= out_bound, "{what}: out is off by {error:e}, bound {out_bound:e}");
    let error = max_abs_error(&found.logsumexp, &whole.reference.logsumexp);
    let bound = logsumexp + (1.0 + roundings) * largest * eps;
    assert!(error <= bound, "{what}: logsumexp is off by {error:e}, bound {bound:e}");
}

fn largest<T: Number>(tensor: &Tensor<T>) -> f64 {
    tensor.values().iter().map(|x| x.value().abs()).fold(0.0, f64::max)
}

#[test]
fn merging_any_split_equals_the_whole() {
    for_each_pair!(merging_any_split_equals_the_whole_for);
}

fn merging_any_split_equals_the_whole_for<T: Number, K: Number<Real = T::Real>>() {
    let group = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(11, 230, 24, 20) };
    let cuts: [&[usize]; 6] = [&[], &[115], &[0, 0, 230], &[1, 2, 229], &[64, 128, 192], &[7, 100, 100, 101, 200]];
    for (shape, seed) in [(group, 1), (AttentionShape { q_len: 1, ..group }, 2)] {
        let problem = Problem::<T, K>::normal(&shape, seed);
        let whole = Expected::new(&problem, &AttentionConfig::full());
        for set in instruction_sets() {
            let config = AttentionConfig::full().with_instruction_set(set);
            for cuts in cuts {
                let ends = [&[0], cuts, &[shape.kv_len]].concat();
                let parts: Vec<_> = ends
                    .windows(2)
                    .map(|range| {
                        let [k, v] = [&problem.k, &problem.v].map(|tensor| tensor.part(2, range[0]..range[1]));
                        run(&Problem::new(problem.q.clone(), k, v), &config)
                    })
                    .collect();
                let max_v = largest(&problem.v);
                let what = format!("{set} {cuts:?}");
                assert_is_whole::<T>(&merged(&parts, Layout::Bhsd), &whole, max_v, 1.0, &what);
                let roundings = 2.0 * parts.len() as f64;
                assert_is_whole::<T>(&added(&parts, Layout::Bhsd), &whole, max_v, roundings, &what);
            }
        }
    }
}

/// As on a ring of machines: each block of queries against its own keys (causal), against those before (full), none behind.
#[test]
fn causal_blocks_merged_equal_causal_attention() {
    let shape = AttentionShape { num_heads: 2, ..one_head(90, 90, 16, 12) };
    let problem = Problem::<f32>::normal(&shape, 3);
    let whole = run(&problem, &AttentionConfig::causal());
    for starts in [[0, 30, 60, 90], [0, 1, 45, 90], [0, 40, 40, 90]] {
        for (block, range) in starts.windows(2).enumerate() {
            let q = problem.q.part(2, range[0]..range[1]);
            let parts: Vec<_> = (0..=block)
                .map(|other| {
                    let [k, v] =
                        [&problem.k, &problem.v].map(|tensor| tensor.part(2, starts[other]..starts[other + 1]));
                    let config = if other == block { AttentionConfig::causal() } else { AttentionConfig::full() };
                    run(&Problem::new(q.clone(), k, v), &config)
                })
                .collect();
            let found = added(&parts, Layout::Bhsd);
            for (head, query) in (0..2).flat_map(|h| (0..range[1] - range[0]).map(move |q| (h, q))) {
                let (out, logsumexp) = found.row_values([0, head, query]);
                let (expected, lse) = whole.row_values([0, head, range[0] + query]);
                assert!(max_abs_error(&out, &expected) <= 4e-6 && (logsumexp - lse).abs() <= 4e-6);
            }
        }
    }
}

#[test]
fn order_and_grouping_change_roundings_only() {
    let parts: Vec<Answer> = (0..6).map(|seed| random_part([2, 3, 4, 5], 8.0, seed)).collect();
    let expected = merged(&parts, Layout::Bhsd);
    let reversed: Vec<_> = parts.iter().rev().cloned().collect();
    let tree: Vec<_> = parts.chunks(2).map(|pair| merged(pair, Layout::Bhsd)).collect();
    let left = added(&parts, Layout::Bhsd);
    for found in [merged(&reversed, Layout::Bhsd), merged(&tree, Layout::Bhsd), added(&reversed, Layout::Bhsd), left] {
        let values = |answer: &Answer| answer.out.values().iter().map(|x| x.value()).collect::<Vec<_>>();
        assert!(max_abs_error(&found.out.values(), &values(&expected)) <= 2e-5);
        let expected: Vec<f64> = expected.logsumexp.iter().map(|&x| x.into()).collect();
        assert!(max_abs_error(&found.logsumexp, &expected) <= 1e-5);
    }
}

/// Outputs of N(0, 1) and log-sum-exps of up to about `spread`.
fn random_part<T: Number>(shape: [usize; 4], spread: f64, seed: u64) -> Answer<T> {
    let mut generator = Generator::new(seed);
    let out = generator.normal_tensor(shape);
    let rows = shape[0] * shape[1] * shape[2];
    Answer { out, logsumexp: (0..rows).map(|_| T::Real::nearest(spread * generator.normal() / 3.0)).collect() }
}

#[test]
fn results_without_keys_change_no_bit() {
    fn check<T: Number>() {
        let part = random_part::<T>([1, 2, 3, 130], 30.0, 1);
        let widened = Answer { out: part.out.map(T::widened), logsumexp: part.logsumexp.clone() };
        for nothing in [0.0, f64::NAN, f64::INFINITY] {
            let nothing = empty(part.out.shape, T::exactly(nothing));
            for parts in [
                vec![part.clone()],
                vec![part.clone(), nothing.clone()],
                vec![nothing.clone(), nothing.clone(), part.clone(), nothing.clone()],
            ] {
                assert_eq!(merged(&parts, Layout::Bhsd).bits(), widened.bits());
                assert_eq!(added(&parts, Layout::Bhsd).bits(), widened.bits());
            }
            // Rows that saw no key, in all parts or in some.
            let none = merged(&[nothing.clone(), nothing.clone()], Layout::Bhsd);
            assert_eq!(none.bits(), empty(part.out.shape, T::Real::exactly(0.0)).bits());
            let mut some = part.clone();
            some.logsumexp[2] = T::Real::exactly(f64::NEG_INFINITY);
            let mixed = merged(&[some, nothing], Layout::Bhsd);
            assert_eq!(mixed.row_bits([0, 0, 2]), none.row_bits([0, 0, 2]));
            assert_eq!(mixed.row_bits([0, 1, 0]), widened.row_bits([0, 1, 0]));
        }
    }
    check::<f32>();
    check::<f64>();
    check::<f16>();
    check::<fused_attention::bf16>();
}

#[test]
fn no_results_are_rows_that_see_no_key() {
    let mut answer = unwritten::<f32>([1, 2, 3, 4], Layout::PaddedRows);
    let mut outputs = AttentionOutputs::new(answer.out.view_mut()).with_logsumexp(&mut answer.logsumexp);
    PartialAttention::<f32>::merge_into(&[], &mut outputs).unwrap();
    assert_eq!(answer.bits(), empty([1, 2, 3, 4], 0.0f32).bits());
    assert_eq!(PartialAttention::<f32>::merge(&[]).unwrap_err(), AttentionError::NoPartials);
}

#[test]
fn nan_and_infinity_stay_where_they_are() {
    let clean = random_part::<f32>([1, 2, 3, 5], 3.0, 1);
    let other = random_part::<f32>([1, 2, 3, 5], 3.0, 2);
    let expected = merged(&[clean.clone(), other.clone()], Layout::Bhsd);
    let check = |spoiled: &Answer, is_spoiled: &dyn Fn([usize; 4]) -> bool, logsumexp_is_nan: bool| {
        let both = [
            merged(&[spoiled.clone(), other.clone()], Layout::Bhsd),
            merged(&[other.clone(), spoiled.clone()], Layout::Bhsd),
        ];
        for found in both.iter().chain(&[added(&[other.clone(), spoiled.clone()], Layout::Bhsd)]) {
            for (head, query, d) in (0..2).flat_map(|h| (0..3).flat_map(move |q| (0..5).map(move |d| (h, q, d)))) {
                let index = [0, head, query, d];
                let (found, expected) = (found.out.get(index), expected.out.get(index));
                if is_spoiled(index) {
                    assert!(!found.is_finite(), "{index:?} {found}");
                } else {
                    assert!((found - expected).abs() <= 1e-6, "{index:?} {found} {expected}");
                }
            }
            assert_eq!(found.logsumexp[3 + 1].is_nan(), logsumexp_is_nan);
            assert!(found.logsumexp.iter().enumerate().all(|(row, x)| row == 4 || x.is_finite()));
        }
    };
    for value in f32::nans().into_iter().chain([f32::INFINITY]) {
        let mut spoiled = clean.clone();
        spoiled.logsumexp[3 + 1] = value;
        check(&spoiled, &|[_, head, query, _]| (head, query) == (1, 1), true);
        let mut spoiled = clean.clone();
        spoiled.out.set([0, 1, 1, 3], value);
        check(&spoiled, &|index| index == [0, 1, 1, 3], false);
    }
    let mut spoiled = clean.clone();
    spoiled.out.set([0, 0, 2, 0], f32::NEG_INFINITY);
    let found = merged(&[other.clone(), spoiled], Layout::Bhsd);
    assert_eq!(found.out.get([0, 0, 2, 0]), f32::NEG_INFINITY);
}

#[test]
fn sizes_of_the_weights_do_not_matter() {
    // Weights e^+-1000 are neither of f32 nor of f64.
    let parts = [([1.0f32, 5.0], 1000.0f32), ([3.0, 7.0], 1000.0), ([1e30, -1e30], -1000.0)].map(|(out, lse)| Answer {
        out: Tensor { data: out.to_vec(), shape: [1, 1, 1, 2], strides: [2, 2, 2, 1] },
        logsumexp: vec![lse],
    });
    let found = merged(&parts, Layout::Bhsd);
    assert_eq!(found.out.data, [2.0, 6.0]);
    assert_eq!(found.logsumexp, [1000.0 + 2f32.ln()]);
    // Values near the largest number do not overflow on the way.
    let large = parts.clone().map(|part| Answer { out: part.out.map(|_| f32::MAX), ..part });
    assert_eq!(merged(&large, Layout::Bhsd).out.data, [f32::MAX, f32::MAX]);
}

#[test]
fn any_layout_gives_the_same_bits() {
    let parts: Vec<Answer> = (0..3).map(|seed| random_part([2, 2, 3, 140], 5.0, seed)).collect();
    let expected = merged(&parts, Layout::Bhsd);
    let sum = added(&parts, Layout::Bhsd);
    for layout in Layout::DISTINCT {
        assert_eq!(merged(&parts, layout).bits(), expected.bits());
        assert_eq!(added(&parts, layout).bits(), sum.bits());
        let strided: Vec<_> =
            parts.iter().map(|part| Answer { out: part.out.in_layout(layout), ..part.clone() }).collect();
        assert_eq!(merged(&strided, Layout::Bhsd).bits(), expected.bits());
    }
    let MergedAttention { out, logsumexp, .. } =
        PartialAttention::merge(&[partial(&parts[0]), partial(&parts[1]), partial(&parts[2])]).unwrap();
    assert_eq!((bits(&out), bits(&logsumexp)), expected.bits());
}

#[test]
fn outputs_of_16_bits_are_rounded_once() {
    let parts: Vec<Answer> = (0..3).map(|seed| random_part([1, 2, 3, 9], 5.0, seed)).collect();
    let partials: Vec<_> = parts.iter().map(partial).collect();
    let mut narrow = unwritten::<f16>(parts[0].out.shape, Layout::PaddedRows);
    PartialAttention::merge_into(&partials, &mut AttentionOutputs::new(narrow.out.view_mut())).unwrap();
    narrow.out.assert_gaps_untouched();
    let expected = merged(&parts, Layout::Bhsd).out.map(|x| f16::nearest(x.into()));
    assert_eq!(bits(&narrow.out.values()), bits(&expected.values()));
}

/// The queries of all sequences against a shared prefix, as one sequence; their results seen as a batch.
#[test]
fn a_shared_prefix_can_be_computed_once() {
    let shape = AttentionShape { batch: 3, num_heads: 4, num_kv_heads: 2, ..one_head(2, 150, 16, 12) };
    let prefix_len = 90;
    let mut problem = Problem::<f32>::normal(&shape, 5);
    for tensor in [&mut problem.k, &mut problem.v] {
        let shared = tensor.clone();
        *tensor = Tensor::from_fn(shared.shape, Layout::Bhsd, |[batch, head, key, d]| {
            shared.get([if key < prefix_len { 0 } else { batch }, head, key, d])
        });
    }
    let whole = Expected::new(&problem, &AttentionConfig::causal());
    let own = Problem::new(
        problem.q.clone(),
        problem.k.part(2, prefix_len..shape.kv_len),
        problem.v.part(2, prefix_len..shape.kv_len),
    );
    let own = run(&own, &AttentionConfig::causal());

    let [batch, heads, q_len, value_dim] = problem.out_shape();
    let as_one = Tensor::from_fn([1, heads, batch * q_len, shape.head_dim], Layout::Bhsd, |[_, head, query, d]| {
        problem.q.get([query / q_len, head, query % q_len, d])
    });
    let prefix = |tensor: &Tensor| tensor.part(0, 0..1).part(2, 0..prefix_len);
    let prefix = Problem::new(as_one, prefix(&problem.k), prefix(&problem.v));
    let prefix = run_into(&prefix, &AttentionConfig::full(), Layout::Bshd);
    let out_strides = prefix.out.strides;
    let partials = [
        PartialAttention::with_logsumexp_view(
            TensorView::with_strides(
                &prefix.out.data,
                problem.out_shape(),
                [q_len * out_strides[2], out_strides[1], out_strides[2], 1],
            )
            .unwrap(),
            TensorView::with_strides(&prefix.logsumexp, [batch, heads, q_len, 1], [q_len, batch * q_len, 1, 0])
                .unwrap(),
        )
        .unwrap(),
        partial(&own),
    ];
    let MergedAttention { out, logsumexp, .. } = PartialAttention::merge(&partials).unwrap();
    let out = Tensor { data: out, shape: problem.out_shape(), strides: Layout::Bhsd.strides(problem.out_shape()) };
    assert_eq!(out.shape[3], value_dim);
    assert_is_whole::<f32>(&Answer { out, logsumexp }, &whole, largest(&problem.v), 1.0, "prefix");
}

#[test]
fn shapes_that_do_not_fit_are_errors_and_nothing_is_written() {
    let parts = [random_part::<f32>([1, 2, 3, 4], 1.0, 1), random_part([1, 2, 3, 5], 1.0, 2)];
    let mut answer = unwritten::<f32>([1, 2, 3, 4], Layout::Bhsd);
    let mut outputs = AttentionOutputs::new(answer.out.view_mut()).with_logsumexp(&mut answer.logsumexp);
    let error = PartialAttention::merge_into(&[partial(&parts[0]), partial(&parts[1])], &mut outputs).unwrap_err();
    assert_eq!(error.to_string(), "out of partial result 1 has shape [1, 2, 3, 5], expected [1, 2, 3, 4]");
    assert_eq!(PartialAttention::merge(&[partial(&parts[0]), partial(&parts[1])]).unwrap_err(), error);
    let error = partial(&parts[1]).add_to(&mut outputs).unwrap_err();
    assert_eq!(error.to_string(), "out of partial result 0 has shape [1, 2, 3, 5], expected [1, 2, 3, 4]");

    let mut short = vec![0.0; 5];
    let mut outputs = AttentionOutputs::new(answer.out.view_mut()).with_logsumexp(&mut short);
    let error = PartialAttention::merge_into(&[partial(&parts[0])], &mut outputs).unwrap_err();
    assert_eq!(error, AttentionError::LogsumexpLenMismatch { expected: 6, found: 5 });
    let error = partial(&parts[0]).add_to(&mut AttentionOutputs::new(answer.out.view_mut())).unwrap_err();
    assert_eq!(error, AttentionError::MissingLogsumexp { shape: [1, 2, 3, 4] });
    let error = PartialAttention::new(parts[0].out.view(), &parts[0].logsumexp[1..]).unwrap_err();
    assert_eq!(error, AttentionError::LogsumexpLenMismatch { expected: 6, found: 5 });
    let logsumexp = TensorView::from_bhsd(&parts[0].logsumexp, [1, 3, 2, 1]).unwrap();
    let error = PartialAttention::with_logsumexp_view(parts[0].out.view(), logsumexp).unwrap_err();
    let message = "logsumexp of partial result 0 has shape [1, 3, 2, 1], expected [1, 2, 3, 1]";
    assert_eq!(error.to_string(), message);
    answer.out.assert_untouched();
    assert!(answer.logsumexp.iter().all(|x| x.to_bits() == crate::common::CANARY.to_bits()));
}

#[test]
fn shapes_without_elements_do_nothing() {
    let many = usize::MAX;
    for shape in [[many, 1, 0, 1], [1, many, 0, 4], [many, 0, many, 0], [1, 2, many / 4, 0], [0, many, 1, 1]] {
        let Ok(out) = TensorViewMut::<f32>::with_strides(&mut [], shape, [0; 4]) else { continue };
        PartialAttention::<f32>::merge_into(&[], &mut AttentionOutputs::new(out)).unwrap();
    }
    let mut logsumexp = [0.0; 3];
    let out = TensorViewMut::<f32>::from_bhsd(&mut [], [1, 1, 3, 0]).unwrap();
    let mut outputs = AttentionOutputs::new(out).with_logsumexp(&mut logsumexp);
    PartialAttention::<f32>::merge_into(&[], &mut outputs).unwrap();
    assert_eq!(logsumexp, [f32::NEG_INFINITY; 3]);
}

#[test]
fn positions_of_a_view() {
    let tensor = Tensor::<f32>::from_fn([2, 2, 5, 3], Layout::Transposed, crate::common::pattern);
    for (start, end) in [(0, 5), (1, 3), (4, 5), (5, 5), (0, 0), (3, 3)] {
        let view = tensor.view().seq_range(start..end).unwrap();
        assert_eq!(view.shape(), [2, 2, end - start, 3]);
        assert!(start == end || view.get([1, 1, end - start - 1, 2]) == Some(tensor.get([1, 1, end - 1, 2])));
        assert_eq!(view.get([0, 0, end - start, 0]), None);
    }
    let error = |start, end| tensor.view().seq_range(start..end).unwrap_err();
    assert_eq!(error(2, 6).to_string(), "positions 2..6 of a tensor that has 5");
    assert_eq!(error(3, 2), AttentionError::SeqRangeOutOfBounds { start: 3, end: 2, seq: 5 });
    let none = TensorView::<f32>::from_bhsd(&[], [0, 2, usize::MAX, 3]).or(TensorView::with_strides(
        &[],
        [0, 2, 9, 3],
        [9; 4],
    ));
    assert_eq!(none.unwrap().seq_range(4..7).unwrap().shape(), [0, 2, 3, 3]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: by_profile(500, 40), failure_persistence: None, ..ProptestConfig::default() })]

    /// The formula in f64, and one rounding.
    #[test]
    fn merges_are_rounded_once(
        logsumexps in prop::collection::vec(prop_oneof![
            6 => -40.0f32..40.0, 1 => Just(f32::NEG_INFINITY), 1 => -1e4f32..1e4,
        ], 0..7),
        value_dim in prop_oneof![0..=9usize, 125..=131usize],
        seed in any::<u64>(),
    ) {
        let shape = [1, 1, 1, value_dim];
        let parts: Vec<Answer> = logsumexps.iter().enumerate().map(|(i, &logsumexp)| {
            Answer { logsumexp: vec![logsumexp], ..random_part(shape, 1.0, seed.wrapping_add(i as u64)) }
        }).collect();
        let mut found = unwritten::<f32>(shape, Layout::Bhsd);
        let mut outputs = AttentionOutputs::new(found.out.view_mut()).with_logsumexp(&mut found.logsumexp);
        PartialAttention::merge_into(&parts.iter().map(partial).collect::<Vec<_>>(), &mut outputs).unwrap();
        let max = logsumexps.iter().map(|&x| f64::from(x)).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logsumexps.iter().map(|&x| if max == f64::NEG_INFINITY { 0.0 } else { (f64::from(x) - max).exp() }).collect();
        let total: f64 = weights.iter().sum();
        let half_ulp = |x: f64| f32::ulp(x) * 0.5000001;
        for d in 0..value_dim {
            let sum: f64 = parts.iter().zip(&weights).map(|(part, w)| w * part.out.get([0, 0, 0, d]).value()).sum();
            let expected = if total > 0.0 { sum / total } else { 0.0 };
            prop_assert!((found.out.get([0, 0, 0, d]).value() - expected).abs() <= half_ulp(expected) + 1e-14);
        }
        let expected = if total > 0.0 { max + total.ln() } else { f64::NEG_INFINITY };
        let logsumexp = found.logsumexp[0].value();
        prop_assert!(logsumexp == expected || (logsumexp - expected).abs() <= half_ulp(expected));
    }
}
