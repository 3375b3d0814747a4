//! Bad input gets an error that names both numbers, and nothing is written.

use crate::common::{
    CANARY, Layout, Number, Problem, Tensor, for_each_pair, instruction_sets, normal_problem, pattern,
};
use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, InstructionSet,
    KvCache, Mask, TensorView, TensorViewMut, Workspace, attention, attention_into,
};

/// Two of a batch, 6 query heads on 3 KV heads, 5 queries, 7 keys, 11 features, 13 value features: all different.
const SHAPE: AttentionShape =
    AttentionShape { batch: 2, num_heads: 6, num_kv_heads: 3, q_len: 5, kv_len: 7, head_dim: 11, value_dim: 13 };

const OUT_SHAPE: [usize; 4] = [2, 6, 5, 13];

/// A message must hold these texts, each where no digit follows or precedes it.
fn assert_names(error: &AttentionError, numbers: &[&str]) {
    let message = error.to_string();
    for number in numbers {
        let is_digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
        let stands_alone = message.match_indices(number).any(|(at, _)| {
            !is_digit(message[..at].chars().next_back()) && !is_digit(message[at + number.len()..].chars().next())
        });
        assert!(stands_alone, "{message:?} does not name {number}");
    }
}

fn tensor<T: Number>(shape: [usize; 4]) -> Tensor<T> {
    Tensor::from_fn(shape, Layout::Bhsd, pattern)
}

/// Calls with outputs of these sizes on every instruction set; asserts that they fail alike and write nothing.
fn refused_with<T: Number, K: Number<Real = T::Real>>(
    problem: &Problem<T, K>,
    out_shape: [usize; 4],
    logsumexp_len: usize,
    config: AttentionConfig,
) -> AttentionError {
    let mut errors = Vec::new();
    for set in instruction_sets() {
        let mut out = Tensor::<T>::unwritten(out_shape, Layout::PaddedRows);
        let mut logsumexp = vec![T::Real::CANARY; logsumexp_len];
        let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
        let error = attention_into(&problem.inputs(), &mut outputs, &config.with_instruction_set(set)).unwrap_err();
        out.assert_untouched();
        assert!(logsumexp.iter().all(|x| x.bits() == T::Real::CANARY.bits()), "logsumexp was written: {error}");
        errors.push(error);
    }
    assert!(errors.windows(2).all(|pair| pair[0].to_string() == pair[1].to_string()), "{errors:?}");
    errors.pop().unwrap()
}

/// Inputs that no output could fit; `attention` and the reference refuse them with the same error.
fn refused<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>) -> AttentionError {
    let error = refused_with(problem, OUT_SHAPE, 2 * 6 * 5, AttentionConfig::causal());
    assert_eq!(attention(&problem.inputs(), &AttentionConfig::causal()).unwrap_err(), error);
    let by_reference = fused_attention::reference::attention(&problem.inputs(), &AttentionConfig::causal());
    assert_eq!(by_reference.unwrap_err(), error);
    error
}

/// Good inputs, outputs of the wrong size.
fn refused_outputs(out_shape: [usize; 4], logsumexp_len: usize) -> AttentionError {
    refused_with(&normal_problem(&SHAPE, 1), out_shape, logsumexp_len, AttentionConfig::causal())
}

#[test]
fn good_input_is_accepted() {
    // What the other tests change one number of.
    let problem = normal_problem(&SHAPE, 1);
    crate::common::run(&problem, &AttentionConfig::causal());
    assert_eq!(problem.out_shape(), OUT_SHAPE);
    assert_eq!(*AttentionPlan::new(&SHAPE, &AttentionConfig::causal()).unwrap().shape(), SHAPE);
}

#[test]
fn slice_too_short() {
    let data = vec![CANARY; 41];
    let short = |shape| TensorView::from_bhsd(&data, shape).unwrap_err();
    let expected = |strides| AttentionError::SliceTooShort { needed: 42, len: 41, shape: [1, 2, 3, 7], strides };
    assert_eq!(short([1, 2, 3, 7]), expected([42, 21, 7, 1]));
    assert_names(&short([1, 2, 3, 7]), &["41", "42"]);
    assert_eq!(TensorView::from_bshd(&data, [1, 3, 2, 7]).unwrap_err(), expected([42, 7, 14, 1]));
    assert_eq!(TensorView::with_strides(&data, [1, 2, 3, 7], [0, 1, 2, 6]).unwrap_err(), expected([0, 1, 2, 6]));
    assert!(TensorView::with_strides(&data, [1, 2, 3, 7], [0, 0, 2, 6]).is_ok(), "reaches 41");

    let mut data = vec![CANARY; 41];
    assert_eq!(TensorViewMut::from_bhsd(&mut data, [1, 2, 3, 7]).unwrap_err(), expected([42, 21, 7, 1]));
    assert_eq!(TensorViewMut::from_bshd(&mut data, [1, 3, 2, 7]).unwrap_err(), expected([42, 7, 14, 1]));
    let strided = TensorViewMut::with_strides(&mut data, [1, 1, 2, 2], [0, 0, 41, 1]).unwrap_err();
    assert_names(&strided, &["41", "43"]);
    assert!(TensorViewMut::with_strides(&mut data, [1, 1, 2, 2], [0, 0, 39, 1]).is_ok(), "reaches 41");
}

#[test]
fn size_overflow() {
    let mut data = vec![CANARY; 4];
    let half = usize::MAX / 2;
    for (shape, strides) in [
        ([2, 1, 1, 1], [usize::MAX, 1, 1, 1]),
        ([2, 2, 1, 1], [half, half + 2, 1, 1]),
        ([1, 1, usize::MAX, 2], [1, 1, 1, 1]),
        ([1, half, 3, 1], [0, 0, 0, 0]),
        ([1, 1, 3, 1], [1, 1, half, 1]),
    ] {
        let expected = AttentionError::SizeOverflow { shape, strides };
        assert_eq!(TensorView::with_strides(&data, shape, strides).unwrap_err(), expected);
        assert_names(&expected, &[&shape[2].to_string(), &strides[0].to_string()]);
        assert_eq!(TensorViewMut::with_strides(&mut data, shape, strides).unwrap_err(), expected);
    }
    for constructor in [TensorView::from_bhsd, TensorView::from_bshd] {
        // The second has no elements, and strides past every address.
        for shape in [[2, 2, half, 2], [1, 0, half - 68, 593]] {
            let error = constructor(&data, shape).unwrap_err();
            assert!(matches!(error, AttentionError::SizeOverflow { .. }), "{error}");
        }
    }
}

#[cfg(target_pointer_width = "64")]
#[test]
fn output_too_large_to_allocate() {
    // Broadcast queries of no memory: the output of `attention` would not fit the address space.
    let one = [1.0f32; 4];
    let q = TensorView::with_strides(&one, [1, 1, 1 << 40, 1], [0; 4]).unwrap();
    let k = TensorView::with_strides(&one, [1, 1, 1, 1], [0; 4]).unwrap();
    for (value_dim, overflows) in [(1 << 22, true), (1 << 15, false)] {
        let v = TensorView::with_strides(&one, [1, 1, 1, value_dim], [0; 4]).unwrap();
        let error = attention(&AttentionInputs::new(q, k, v), &AttentionConfig::full()).unwrap_err();
        if overflows {
            assert!(matches!(error, AttentionError::PlanOverflow { .. }), "{error}");
            assert_names(&error, &[&(1u64 << 40).to_string(), &value_dim.to_string()]);
        } else {
            assert_eq!(error, AttentionError::AllocationFailed { bytes: 1 << 57 });
            assert_names(&error, &[&(1u64 << 57).to_string()]);
        }
    }
}

/// Features broadcast from one element take no memory, the workspace for them does.
#[cfg(target_pointer_width = "64")]
#[test]
fn workspace_too_large_to_allocate() {
    let one = [1.0f32];
    let features = TensorView::with_strides(&one, [1, 1, 1, 1 << 45], [0; 4]).unwrap();
    let v = TensorView::with_strides(&one, [1, 1, 1, 1], [0; 4]).unwrap();
    let mut out = [CANARY];
    let inputs = AttentionInputs::new(features, features, v);
    let mut outputs = AttentionOutputs::new(TensorViewMut::from_bhsd(&mut out, [1, 1, 1, 1]).unwrap());
    let error = attention_into(&inputs, &mut outputs, &AttentionConfig::full()).unwrap_err();
    assert!(matches!(error, AttentionError::AllocationFailed { bytes } if bytes > 1 << 45), "{error}");
    let plan = AttentionPlan::new(&AttentionShape::of(&inputs).unwrap(), &AttentionConfig::full()).unwrap();
    assert_eq!(Workspace::for_plan(&plan).unwrap_err(), error);
    assert_eq!(out[0].to_bits(), CANARY.to_bits());

    // Nothing to compute needs nothing.
    let none = TensorView::with_strides(&one, [1, 1, 0, 1 << 45], [0; 4]).unwrap();
    assert_eq!(attention(&AttentionInputs::new(none, features, v), &AttentionConfig::full()), Ok(vec![]));
}

#[test]
fn plan_overflow() {
    for shape in [
        AttentionShape { q_len: usize::MAX, ..SHAPE },
        AttentionShape { head_dim: usize::MAX, ..SHAPE },
        AttentionShape { value_dim: usize::MAX / 4, ..SHAPE },
        AttentionShape { batch: usize::MAX, ..SHAPE },
        AttentionShape { kv_len: usize::MAX, batch: usize::MAX / 2, ..SHAPE },
    ] {
        match AttentionPlan::new(&shape, &AttentionConfig::causal()) {
            Err(error) => {
                assert_eq!(error, AttentionError::PlanOverflow { shape });
                assert_names(&error, &[&shape.q_len.to_string(), &shape.head_dim.to_string()]);
            }
            Ok(plan) => assert!(plan.workspace_len() < 1 << 30, "{shape:?}"),
        }
    }
}

#[test]
fn overlapping_output() {
    let mut data = vec![CANARY; 1000];
    for (shape, strides) in [
        ([1, 1, 2, 3], [6, 6, 0, 1]),   // both rows at the same place
        ([1, 1, 2, 3], [6, 6, 2, 1]),   // rows that share one element
        ([1, 2, 2, 3], [12, 5, 3, 1]),  // heads that do
        ([2, 1, 1, 2], [1, 1, 1, 1]),   // a batch that does
        ([1, 1, 4, 4], [16, 16, 3, 5]), // distinct or not, the stated rule does not show it
    ] {
        let expected = AttentionError::OverlappingOutput { shape, strides };
        assert_eq!(TensorViewMut::with_strides(&mut data, shape, strides).unwrap_err(), expected);
        assert_names(&expected, &[&format!("{shape:?}"), &format!("{strides:?}")]);
        assert!(TensorView::with_strides(&data, shape, strides).is_ok(), "inputs may overlap");
    }
    // The strides of axes with one element do not count.
    assert!(TensorViewMut::with_strides(&mut data, [1, 1, 2, 3], [0, 0, 3, 1]).is_ok());
    assert!(data.iter().all(|x| x.to_bits() == CANARY.to_bits()));
}

#[test]
fn batch_mismatch() {
    let good = normal_problem(&SHAPE, 1);
    let k = Problem { k: tensor([3, 3, 7, 11]), ..good.clone() };
    let error = refused(&k);
    assert_eq!(error, AttentionError::BatchMismatch { tensor: "k", expected: 2, found: 3 });
    assert_names(&error, &["k", "2", "3"]);
    let v = Problem { v: tensor([4, 3, 7, 13]), ..good };
    let error = refused(&v);
    assert_eq!(error, AttentionError::BatchMismatch { tensor: "v", expected: 2, found: 4 });
    assert_names(&error, &["v", "2", "4"]);
    let error = refused_outputs([1, 6, 5, 13], 30);
    assert_eq!(error, AttentionError::BatchMismatch { tensor: "out", expected: 2, found: 1 });
    assert_names(&error, &["out", "2", "1"]);
}

#[test]
fn num_kv_heads_mismatch() {
    for v_heads in [1, 2, 4, 6] {
        let error = refused(&Problem { v: tensor([2, v_heads, 7, 13]), ..normal_problem(&SHAPE, 1) });
        assert_eq!(error, AttentionError::NumKvHeadsMismatch { k: 3, v: v_heads });
        assert_names(&error, &["3", &v_heads.to_string()]);
    }
}

#[test]
fn num_heads_mismatch() {
    for out_heads in [0, 3, 5, 7] {
        let error = refused_outputs([2, out_heads, 5, 13], 2 * 6 * 5);
        assert_eq!(error, AttentionError::NumHeadsMismatch { q: 6, out: out_heads });
        assert_names(&error, &["6", &out_heads.to_string()]);
    }
}

#[test]
fn heads_not_divisible() {
    for num_heads in [1, 2, 4, 5, 7] {
        let error = refused(&Problem { q: tensor([2, num_heads, 5, 11]), ..normal_problem(&SHAPE, 1) });
        assert_eq!(error, AttentionError::HeadsNotDivisible { num_heads, num_kv_heads: 3 });
        assert_names(&error, &["3", &num_heads.to_string()]);
    }
    let none = AttentionShape { num_kv_heads: 0, ..SHAPE };
    let expected = AttentionError::HeadsNotDivisible { num_heads: 6, num_kv_heads: 0 };
    assert_eq!(AttentionPlan::new(&none, &AttentionConfig::causal()).unwrap_err(), expected);
}

#[test]
fn q_len_mismatch() {
    for out_q_len in [0, 4, 6] {
        let error = refused_outputs([2, 6, out_q_len, 13], 2 * 6 * 5);
        assert_eq!(error, AttentionError::QLenMismatch { q: 5, out: out_q_len });
        assert_names(&error, &["5", &out_q_len.to_string()]);
    }
}

#[test]
fn kv_len_mismatch() {
    for v_kv_len in [0, 6, 8] {
        let error = refused(&Problem { v: tensor([2, 3, v_kv_len, 13]), ..normal_problem(&SHAPE, 1) });
        assert_eq!(error, AttentionError::KvLenMismatch { k: 7, v: v_kv_len });
        assert_names(&error, &["7", &v_kv_len.to_string()]);
    }
}

#[test]
fn head_dim_mismatch() {
    for k_head_dim in [0, 10, 12, 13] {
        let error = refused(&Problem { k: tensor([2, 3, 7, k_head_dim]), ..normal_problem(&SHAPE, 1) });
        assert_eq!(error, AttentionError::HeadDimMismatch { q: 11, k: k_head_dim });
        assert_names(&error, &["11", &k_head_dim.to_string()]);
    }
}

#[test]
fn value_dim_mismatch() {
    for out_value_dim in [0, 11, 12, 14] {
        let error = refused_outputs([2, 6, 5, out_value_dim], 2 * 6 * 5);
        assert_eq!(error, AttentionError::ValueDimMismatch { v: 13, out: out_value_dim });
        assert_names(&error, &["13", &out_value_dim.to_string()]);
    }
}

#[test]
fn zero_head_dim() {
    let error = refused(&Problem { q: tensor([2, 6, 5, 0]), k: tensor([2, 3, 7, 0]), ..normal_problem(&SHAPE, 1) });
    assert_eq!(error, AttentionError::ZeroHeadDim { shape: [2, 6, 5, 0] });
    assert_names(&error, &["[2, 6, 5, 0]", "1"]);
    let shape = AttentionShape { head_dim: 0, ..SHAPE };
    assert_eq!(AttentionPlan::new(&shape, &AttentionConfig::causal()).unwrap_err(), error);
}

#[test]
fn logsumexp_len_mismatch() {
    for found in [0, 59, 61] {
        let error = refused_outputs(OUT_SHAPE, found);
        assert_eq!(error, AttentionError::LogsumexpLenMismatch { expected: 60, found });
        assert_names(&error, &["60", &found.to_string()]);
    }
}

#[test]
fn invalid_softmax_scale() {
    let problem = normal_problem(&SHAPE, 1);
    for value in [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e39, -f64::MAX] {
        let config = AttentionConfig::causal().with_softmax_scale(value);
        let error = refused_with(&problem, OUT_SHAPE, 60, config);
        assert!(
            matches!(error, AttentionError::InvalidSoftmaxScale { value: found } if found.to_bits() == value.to_bits()),
            "{error}"
        );
        assert_names(&error, &[&value.to_string()]);
        assert!(AttentionPlan::new(&SHAPE, &config).is_err());
        assert!(attention(&problem.inputs(), &config).is_err());
    }
}

/// Runs a plan that was made for another shape, or with a workspace of another plan.
fn refused_by_plan(planned: &AttentionShape, workspace: &mut Workspace) -> AttentionError {
    let problem = normal_problem(&SHAPE, 1);
    let plan = AttentionPlan::new(planned, &AttentionConfig::causal()).unwrap();
    let mut out = Tensor::<f32>::unwritten(OUT_SHAPE, Layout::Bhsd);
    let mut logsumexp = vec![CANARY; 60];
    let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
    let error = plan.run(&problem.inputs(), &mut outputs, workspace).unwrap_err();
    out.assert_untouched();
    assert!(logsumexp.iter().all(|x| x.to_bits() == CANARY.to_bits()));
    error
}

#[test]
fn plan_shape_mismatch() {
    for planned in [
        AttentionShape { batch: 3, ..SHAPE },
        AttentionShape { num_heads: 9, ..SHAPE },
        AttentionShape { num_kv_heads: 6, ..SHAPE },
        AttentionShape { q_len: 4, ..SHAPE },
        AttentionShape { kv_len: 17, ..SHAPE },
        AttentionShape { head_dim: 10, ..SHAPE },
        AttentionShape { value_dim: 12, ..SHAPE },
    ] {
        let plan = AttentionPlan::new(&planned, &AttentionConfig::causal()).unwrap();
        let error = refused_by_plan(&planned, &mut Workspace::for_plan(&plan).unwrap());
        assert_eq!(error, AttentionError::PlanShapeMismatch { planned, found: SHAPE });
        assert_names(&error, &[&format!("{planned:?}"), &format!("{SHAPE:?}")]);
    }
}

#[test]
fn workspace_too_small() {
    let needed = AttentionPlan::new(&SHAPE, &AttentionConfig::causal()).unwrap().workspace_len();
    assert!(needed > 0);
    let error = refused_by_plan(&SHAPE, &mut Workspace::new());
    assert_eq!(error, AttentionError::WorkspaceTooSmall { needed, len: 0 });
    assert_names(&error, &["0", &needed.to_string()]);
}

#[test]
fn unknown_instruction_set() {
    for name in ["", "avx9", "AVX2", "avx2 ", "scalar"] {
        let error = InstructionSet::from_name(name).unwrap_err();
        assert!(
            matches!(&error, AttentionError::UnknownInstructionSet { name: found, .. } if found == name),
            "{error}"
        );
        assert_names(&error, &[&format!("{name:?}"), InstructionSet::detect().name(), "portable"]);
        assert_eq!(name.parse::<InstructionSet>().unwrap_err(), error);
    }
}

#[test]
fn unavailable_instruction_set() {
    let elsewhere = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
    let error = InstructionSet::from_name(elsewhere).unwrap_err();
    assert!(matches!(&error, AttentionError::UnavailableInstructionSet { name, .. } if name == elsewhere), "{error}");
    assert_names(&error, &[elsewhere, InstructionSet::detect().name(), "portable"]);
}

#[test]
fn every_listed_set_can_be_named() {
    for set in instruction_sets().into_iter().chain(InstructionSet::available()) {
        assert_eq!(InstructionSet::from_name(set.name()).unwrap(), set);
        assert_eq!(set.to_string(), set.name());
    }
    assert_eq!(InstructionSet::available().next(), Some(InstructionSet::detect()), "the best comes first");
    assert_eq!(InstructionSet::available().last().unwrap().name(), "portable");
}

/// Errors are about sizes, which say nothing of the types: the same ones for every pair, on untouched outputs.
#[test]
fn every_pair_of_types_gets_the_same_errors() {
    for_each_pair!(same_errors_for);
}

fn same_errors_for<T: Number, K: Number<Real = T::Real>>() {
    let shapes = |q: [usize; 4], k: [usize; 4], v: [usize; 4]| {
        let of_types = refused(&Problem::<T, K>::new(tensor(q), tensor(k), tensor(v)));
        let of_f32 = refused(&Problem::<f32>::new(tensor(q), tensor(k), tensor(v)));
        assert_eq!(of_types, of_f32);
        of_types
    };
    let [q, k, v] = [[2, 6, 5, 11], [2, 3, 7, 11], [2, 3, 7, 13]];
    type E = AttentionError;
    assert!(matches!(shapes(q, [1, 3, 7, 11], v), E::BatchMismatch { tensor: "k", expected: 2, found: 1 }));
    assert!(matches!(shapes(q, k, [3, 3, 7, 13]), E::BatchMismatch { tensor: "v", expected: 2, found: 3 }));
    assert!(matches!(shapes(q, k, [2, 2, 7, 13]), E::NumKvHeadsMismatch { k: 3, v: 2 }));
    assert!(matches!(shapes([2, 5, 5, 11], k, v), E::HeadsNotDivisible { num_heads: 5, num_kv_heads: 3 }));
    assert!(matches!(shapes(q, k, [2, 3, 6, 13]), E::KvLenMismatch { k: 7, v: 6 }));
    assert!(matches!(shapes(q, [2, 3, 7, 10], v), E::HeadDimMismatch { q: 11, k: 10 }));
    assert!(matches!(shapes([2, 6, 5, 0], [2, 3, 7, 0], v), E::ZeroHeadDim { shape: [2, 6, 5, 0] }));

    let good = Problem::<T, K>::normal(&SHAPE, 1);
    let outputs = |out_shape, logsumexp_len| {
        let of_types = refused_with(&good, out_shape, logsumexp_len, AttentionConfig::causal());
        assert_eq!(of_types, refused_outputs(out_shape, logsumexp_len));
        of_types
    };
    assert!(matches!(outputs([1, 6, 5, 13], 30), E::BatchMismatch { tensor: "out", expected: 2, found: 1 }));
    assert!(matches!(outputs([2, 3, 5, 13], 60), E::NumHeadsMismatch { q: 6, out: 3 }));
    assert!(matches!(outputs([2, 6, 4, 13], 60), E::QLenMismatch { q: 5, out: 4 }));
    assert!(matches!(outputs([2, 6, 5, 11], 60), E::ValueDimMismatch { v: 13, out: 11 }));
    assert!(matches!(outputs(OUT_SHAPE, 59), E::LogsumexpLenMismatch { expected: 60, found: 59 }));
    let not_a_scale = AttentionConfig::causal().with_softmax_scale(f64::NAN);
    assert!(matches!(refused_with(&good, OUT_SHAPE, 60, not_a_scale), E::InvalidSoftmaxScale { .. }));
}

/// Slices are measured in elements, whatever their size in bytes.
#[test]
fn a_slice_of_any_type_may_be_too_short() {
    fn short<T: Number, K: Number<Real = T::Real>>() {
        let (q, k) = (vec![T::CANARY; 41], vec![K::CANARY; 41]);
        let expected =
            AttentionError::SliceTooShort { needed: 42, len: 41, shape: [1, 2, 3, 7], strides: [42, 21, 7, 1] };
        assert_eq!(TensorView::from_bhsd(&q, [1, 2, 3, 7]).unwrap_err(), expected);
        assert_eq!(TensorView::from_bhsd(&k, [1, 2, 3, 7]).unwrap_err(), expected);
        let (mut q, mut k) = (q, k);
        assert_eq!(TensorViewMut::from_bhsd(&mut q, [1, 2, 3, 7]).unwrap_err(), expected);
        assert_eq!(TensorViewMut::from_bhsd(&mut k, [1, 2, 3, 7]).unwrap_err(), expected);
    }
    for_each_pair!(short);
}

#[test]
fn views_plans_configs_and_errors_are_send_and_sync() {
    fn send_sync<T: Send + Sync>() {}
    fn of_types<T: Number, K: Number<Real = T::Real>>() {
        send_sync::<TensorView<'_, K>>();
        send_sync::<TensorViewMut<'_, T>>();
        send_sync::<AttentionInputs<'_, T, K>>();
        send_sync::<AttentionOutputs<'_, T>>();
    }
    for_each_pair!(of_types);
    send_sync::<AttentionPlan>();
    send_sync::<AttentionConfig>();
    send_sync::<AttentionError>();
    send_sync::<AttentionShape>();
    send_sync::<InstructionSet>();
    send_sync::<Mask>();
    send_sync::<Workspace>();
    send_sync::<KvCache<f32>>();
    fn error<T: std::error::Error + Clone + 'static>() {}
    error::<AttentionError>();
    fn copy<T: Copy>() {}
    copy::<AttentionConfig>();
    copy::<InstructionSet>();
}

/// Good tensors with these lengths, batch of 2.
fn refused_lens(kv_lens: &[usize]) -> AttentionError {
    let problem = normal_problem(&SHAPE, 1);
    let inputs = problem.inputs().with_kv_lens(kv_lens);
    let mut out = Tensor::unwritten(OUT_SHAPE, Layout::PaddedRows);
    let mut outputs = AttentionOutputs::new(out.view_mut());
    let error = attention_into(&inputs, &mut outputs, &AttentionConfig::causal()).unwrap_err();
    out.assert_untouched();
    assert_eq!(fused_attention::reference::attention(&inputs, &AttentionConfig::causal()).unwrap_err(), error);
    error
}

#[test]
fn kv_lens_len_mismatch() {
    for kv_lens in [&[][..], &[1], &[1, 2, 3]] {
        let error = refused_lens(kv_lens);
        assert_eq!(error, AttentionError::KvLensLenMismatch { expected: 2, found: kv_lens.len() });
        assert_names(&error, &["2", &kv_lens.len().to_string()]);
    }
}

#[test]
fn kv_len_too_long() {
    for long in [8, usize::MAX] {
        let error = refused_lens(&[7, long]);
        assert_eq!(error, AttentionError::KvLenTooLong { index: 1, found: long, kv_len: 7 });
        assert_names(&error, &["1", "7", &long.to_string()]);
    }
}
