//! Packed sequences get what separate calls on them give, to the bit, and nothing else is written.

use crate::common::{
    Answer, Generator, Layout, Number, Problem, Tensor, bits, by_profile, by_types, for_each_pair, instruction_sets,
    masks, masks_for,
};
use fused_attention::{
    AttentionConfig, AttentionError, AttentionOutputs, AttentionShape, CuSeqlens, Parallelism, SERIAL_BELOW_FLOPS,
    TensorView, VarlenPlan, Workspace, attention_varlen, attention_varlen_into,
};
use proptest::prelude::*;

/// Packed tensors, with `spare` rows behind the last sequence.
#[derive(Debug, Clone)]
struct Packed<T = f32, K = T> {
    problem: Problem<T, K>,
    cu_q: Vec<usize>,
    cu_k: Vec<usize>,
}

#[derive(Debug, Clone, Copy)]
struct Heads {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

const SMALL: Heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 9, value_dim: 7 };

fn cumulative(lens: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut offsets = vec![0];
    lens.for_each(|len| offsets.push(offsets.last().unwrap() + len));
    offsets
}

impl<T: Number, K: Number<Real = T::Real>> Packed<T, K> {
    /// Sequences of these numbers of queries and keys.
    fn new(heads: Heads, lens: &[[usize; 2]], spare: usize, seed: u64) -> Self {
        let [cu_q, cu_k] = [0, 1].map(|i| cumulative(lens.iter().map(|lens| lens[i])));
        let Heads { num_heads, num_kv_heads, head_dim, value_dim } = heads;
        let shape = AttentionShape {
            batch: 1,
            num_heads,
            num_kv_heads,
            q_len: cu_q[lens.len()] + spare,
            kv_len: cu_k[lens.len()] + spare,
            head_dim,
            value_dim,
        };
        Self { problem: Problem::normal(&shape, seed), cu_q, cu_k }
    }

    fn in_layout(&self, layout: Layout) -> Self {
        Self { problem: self.problem.in_layout(layout), ..self.clone() }
    }

    fn cu_seqlens(&self) -> CuSeqlens<'_> {
        CuSeqlens::new(&self.cu_q, &self.cu_k)
    }

    fn run(&self, config: &AttentionConfig, layout: Layout) -> Answer<T> {
        let mut answer = self.unwritten(layout);
        let mut outputs = AttentionOutputs::new(answer.out.view_mut()).with_logsumexp(&mut answer.logsumexp);
        attention_varlen_into(&self.problem.inputs(), &mut outputs, self.cu_seqlens(), config).unwrap();
        answer.out.assert_gaps_untouched();
        answer
    }

    fn unwritten(&self, layout: Layout) -> Answer<T> {
        let shape = self.problem.out_shape();
        Answer { out: Tensor::unwritten(shape, layout), logsumexp: vec![T::Real::CANARY; shape[1] * shape[2]] }
    }

    /// What separate calls on copies of the sequences give; canaries elsewhere.
    fn one_by_one(&self, config: &AttentionConfig) -> Answer<T> {
        let mut expected = self.unwritten(Layout::Bhsd);
        let [_, num_heads, total_q, value_dim] = expected.out.shape;
        for (q, k) in self.cu_q.windows(2).zip(self.cu_k.windows(2)) {
            let part = |tensor: &Tensor<K>| tensor.part(2, k[0]..k[1]);
            let problem =
                Problem::<T, K>::new(self.problem.q.part(2, q[0]..q[1]), part(&self.problem.k), part(&self.problem.v));
            let answer = crate::common::run(&problem, config);
            for head in 0..num_heads {
                for query in 0..q[1] - q[0] {
                    let (out, logsumexp) = answer.row([0, head, query]);
                    (0..value_dim).for_each(|d| expected.out.set([0, head, q[0] + query, d], out[d]));
                    expected.logsumexp[head * total_q + q[0] + query] = logsumexp;
                }
            }
        }
        expected
    }
}

/// Empty sequences among others, a single token, decode steps, chunks of keys for few rows, several blocks of rows.
fn various<T: Number, K: Number>() -> Vec<[usize; 2]> {
    let all =
        vec![[0, 0], [5, 5], [1, 2600], [0, 7], [3, 0], [300, 300], [1, 1], [30, 3100], [2, 90], [0, 0], [17, 60]];
    let few = vec![[0, 3], [5, 5], [1, 1300], [3, 0], [21, 40]];
    by_types::<T, K, _>(all, few)
}

/// 1 to `most` queries and as many keys, pseudo-random.
fn random_lens(count: usize, most: usize, seed: u64) -> Vec<[usize; 2]> {
    let mut generator = Generator::new(seed);
    let mut len = || 1 + (generator.normal().abs() * most as f64 / 2.0) as usize % most;
    (0..count).map(|_| [len(); 2]).collect()
}

#[test]
fn packed_sequences_match_separate_calls() {
    for_each_pair!(packed_sequences_match_separate_calls_for);
}

fn packed_sequences_match_separate_calls_for<T: Number, K: Number<Real = T::Real>>() {
    let packed = Packed::<T, K>::new(SMALL, &various::<T, K>(), 2, 1);
    for set in instruction_sets() {
        for config in masks_for::<T, K>() {
            let config = config.with_instruction_set(set);
            let expected = packed.one_by_one(&config).bits();
            assert!(packed.run(&config, Layout::Bhsd).bits() == expected, "{config:?}");
        }
    }
}

#[test]
fn strided_packed_tensors_match_contiguous_ones() {
    let packed = Packed::<f32>::new(SMALL, &[[40, 40], [0, 5], [1, 300], [9, 11]], 3, 2);
    for config in masks() {
        let expected = packed.run(&config, Layout::Bhsd).bits();
        for layout in Layout::DISTINCT {
            assert!(packed.in_layout(layout).run(&config, Layout::Bhsd).bits() == expected, "in {layout:?} {config:?}");
            assert!(packed.run(&config, layout).bits() == expected, "out {layout:?} {config:?}");
        }
    }
}

#[test]
fn sixty_four_random_lengths_match_separate_calls() {
    let heads = Heads { num_heads: 4, num_kv_heads: 1, head_dim: 24, value_dim: 20 };
    let packed = Packed::<f32>::new(heads, &random_lens(64, by_profile(400, 60), 3), 0, 3);
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set);
        assert!(packed.run(&config, Layout::Bshd).bits() == packed.one_by_one(&config).bits(), "{set}");
    }
}

#[cfg(feature = "rayon")]
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 32, value_dim: 32 };
    let mut lens = random_lens(20, by_profile(200, 40), 4);
    lens.extend([[0, 4], [1, 3000], [by_profile(1200, 400); 2]]);
    let packed = Packed::<f32>::new(heads, &lens, 1, 4);
    for config in masks() {
        let expected = packed.run(&config.with_parallelism(Parallelism::Serial), Layout::Bshd).bits();
        for threads in 1..=8 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let plan = pool.install(|| packed_plan(&packed, &config));
            assert_eq!(plan.threads(), threads);
            let found = pool.install(|| packed.run(&config, Layout::Bshd)).bits();
            assert!(found == expected, "{threads} threads {config:?}");
            // A plan made in one pool, run in another.
            let mut answer = packed.unwritten(Layout::Bshd);
            let mut workspace = Workspace::new();
            workspace.reserve_len(plan.workspace_len()).unwrap();
            let mut outputs = AttentionOutputs::new(answer.out.view_mut()).with_logsumexp(&mut answer.logsumexp);
            plan.run(&packed.problem.inputs(), &mut outputs, &mut workspace).unwrap();
            assert!(answer.bits() == expected, "{threads} threads {config:?}");
        }
    }
}

fn packed_plan(packed: &Packed, config: &AttentionConfig) -> VarlenPlan {
    VarlenPlan::new(&packed.problem.shape(), packed.cu_seqlens(), config).unwrap()
}

#[test]
fn rows_of_no_sequence_are_left_alone_and_zero_in_new_memory() {
    let packed = Packed::<f32>::new(SMALL, &[[3, 4], [2, 2]], 4, 5);
    let config = AttentionConfig::causal();
    let answer = packed.run(&config, Layout::Bhsd);
    let out = attention_varlen(&packed.problem.inputs(), packed.cu_seqlens(), &config).unwrap();
    let out = TensorView::from_bshd(&out, [1, 9, SMALL.num_heads, SMALL.value_dim]).unwrap();
    for head in 0..SMALL.num_heads {
        for query in 0..9 {
            let (row, logsumexp) = answer.row([0, head, query]);
            for (d, x) in row.into_iter().enumerate() {
                let in_new_memory = out.get([0, head, query, d]).unwrap();
                if query < 5 {
                    assert_eq!(in_new_memory.to_bits(), x.to_bits());
                } else {
                    assert_eq!([in_new_memory.to_bits(), x.to_bits()], [0, crate::common::CANARY.to_bits()]);
                }
            }
            assert_eq!(logsumexp.to_bits() == crate::common::CANARY.to_bits(), query >= 5);
        }
    }
}

#[test]
fn no_sequences_and_empty_ones_write_nothing() {
    for lens in [&[][..], &[[0, 0]], &[[0, 5], [0, 0]]] {
        let packed = Packed::<f32>::new(SMALL, lens, 3, 6);
        let answer = packed.run(&AttentionConfig::causal(), Layout::PaddedRows);
        answer.out.assert_untouched();
        assert_eq!(bits(&answer.logsumexp), vec![u64::from(crate::common::CANARY.to_bits()); answer.logsumexp.len()]);
        assert_eq!(packed_plan(&packed, &AttentionConfig::causal()).workspace_len(), 0);
    }
}

#[test]
fn neighbours_and_spare_rows_cannot_be_seen() {
    let lens = [[7, 7], [30, 35], [1, 1100]];
    let clean = Packed::<f32>::new(SMALL, &lens, 3, 7);
    for set in instruction_sets() {
        let config = AttentionConfig::full().with_instruction_set(set);
        let expected = clean.run(&config, Layout::Bhsd);
        for spoiled in 0..lens.len() + 1 {
            let mut packed = clean.clone();
            let end = |offsets: &[usize], total| offsets.get(spoiled + 1).copied().unwrap_or(total);
            let queries = packed.cu_q[spoiled]..end(&packed.cu_q, packed.problem.q.shape[2]);
            let keys = packed.cu_k[spoiled]..end(&packed.cu_k, packed.problem.k.shape[2]);
            for head in 0..SMALL.num_kv_heads {
                for key in keys.clone() {
                    packed.problem.k.fill_row([0, head, key], f32::NAN);
                    packed.problem.v.fill_row([0, head, key], f32::INFINITY);
                }
            }
            let answer = packed.run(&config, Layout::Bhsd);
            for head in 0..SMALL.num_heads {
                for query in (0..packed.cu_q[lens.len()]).filter(|query| !queries.contains(query)) {
                    assert_eq!(answer.row_bits([0, head, query]), expected.row_bits([0, head, query]), "{set}");
                }
            }
        }
    }
}

#[test]
fn a_call_of_few_operations_has_one_thread() {
    let heads = Heads { num_heads: 1, num_kv_heads: 1, head_dim: 32, value_dim: 32 };
    let full = AttentionConfig::full();
    // 2 * 64 operations a score, 8 * 128 scores: a quarter of the threshold for each of these.
    assert_eq!(SERIAL_BELOW_FLOPS, 1 << 19);
    let small = Packed::<f32>::new(heads, &[[31, 128]], 0, 8);
    assert_eq!(packed_plan(&small, &full).threads(), 1);
    let large = Packed::<f32>::new(heads, &[[8, 128]; 4], 0, 8);
    #[cfg(feature = "rayon")]
    {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert_eq!(pool.install(|| packed_plan(&large, &full)).threads(), 3);
    }
    assert_eq!(packed_plan(&large, &full.with_parallelism(Parallelism::Serial)).threads(), 1);
}

/// The error for these offsets, on every tier; 9 queries, 12 keys.
fn refused(q: &[usize], k: &[usize]) -> AttentionError {
    let packed = Packed::<f32>::new(SMALL, &[[9, 12]], 0, 9);
    let (inputs, config) = (packed.problem.inputs(), AttentionConfig::causal());
    let offsets = CuSeqlens::new(q, k);
    let mut answer = packed.unwritten(Layout::PaddedRows);
    let mut outputs = AttentionOutputs::new(answer.out.view_mut()).with_logsumexp(&mut answer.logsumexp);
    let error = attention_varlen_into(&inputs, &mut outputs, offsets, &config).unwrap_err();
    answer.out.assert_untouched();
    assert!(answer.logsumexp.iter().all(|x| x.to_bits() == crate::common::CANARY.to_bits()));
    assert_eq!(attention_varlen(&inputs, offsets, &config).unwrap_err(), error);
    assert_eq!(VarlenPlan::new(&packed.problem.shape(), offsets, &config).unwrap_err(), error);
    error
}

#[test]
fn bad_offsets_are_errors_that_name_index_and_values() {
    let cases: [(&[usize], &[usize], &str); 12] = [
        (&[], &[0], "cu_seqlens_q is empty, it must hold at least its first offset, 0"),
        (&[0], &[], "cu_seqlens_k is empty, it must hold at least its first offset, 0"),
        (&[2, 9], &[0, 12], "cu_seqlens_q[0] is 2, it must be 0"),
        (&[0, 9], &[3, 12], "cu_seqlens_k[0] is 3, it must be 0"),
        (&[0, 5, 4, 9], &[0, 5, 6, 12], "cu_seqlens_q[2] is 4, less than the 5 before it"),
        (&[0, 5, 6, 9], &[0, 7, 12, 8], "cu_seqlens_k[3] is 8, less than the 12 before it"),
        (&[0, usize::MAX, 9], &[0, 0, 0], &format!("cu_seqlens_q[2] is 9, less than the {} before it", usize::MAX)),
        (&[0, 5, 10], &[0, 5, 12], "cu_seqlens_q[2] is 10, the tensor has 9 positions"),
        (&[0, 5], &[0, usize::MAX], &format!("cu_seqlens_k[1] is {}, the tensor has 12 positions", usize::MAX)),
        (&[0, 5, 9], &[0, 13, 14], "cu_seqlens_k[2] is 14, the tensor has 12 positions"),
        (&[0, 5, 9], &[0, 12], "cu_seqlens_q holds 3 offsets, cu_seqlens_k holds 2"),
        (&[0], &[0, 12], "cu_seqlens_q holds 1 offsets, cu_seqlens_k holds 2"),
    ];
    for (q, k, message) in cases {
        assert_eq!(refused(q, k).to_string(), message);
    }
}

#[test]
fn tensors_that_are_not_packed_are_errors() {
    let packed = Packed::<f32>::new(SMALL, &[[9, 12]], 0, 10);
    let config = AttentionConfig::causal();
    let refused = |inputs, out: [usize; 4], logsumexp: usize| {
        let mut out = Tensor::<f32>::unwritten(out, Layout::Bhsd);
        let mut logsumexp = vec![crate::common::CANARY; logsumexp];
        let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
        let error = attention_varlen_into(&inputs, &mut outputs, packed.cu_seqlens(), &config).unwrap_err();
        out.assert_untouched();
        assert!(logsumexp.iter().all(|x| x.to_bits() == crate::common::CANARY.to_bits()));
        error
    };
    let inputs = || packed.problem.inputs();
    let two = Problem::<f32>::normal(&AttentionShape { batch: 2, ..packed.problem.shape() }, 1);
    assert_eq!(refused(two.inputs(), [2, 4, 9, 7], 72), AttentionError::PackedBatch { found: 2 });
    assert_eq!(
        refused(inputs().with_kv_lens(&[4]), [1, 4, 9, 7], 36),
        AttentionError::NotWithCuSeqlens { operand: "kv_lens" }
    );
    assert_eq!(refused(inputs(), [1, 4, 8, 7], 36), AttentionError::QLenMismatch { q: 9, out: 8 });
    let lse = refused(inputs(), [1, 4, 9, 7], 35);
    assert_eq!(lse, AttentionError::LogsumexpLenMismatch { expected: 36, found: 35 });

    let plan = packed_plan(&packed, &config);
    let mut answer = packed.unwritten(Layout::Bhsd);
    let mut outputs = AttentionOutputs::new(answer.out.view_mut());
    let other = Packed::<f32>::new(SMALL, &[[9, 11]], 0, 10);
    let error = plan.run(&other.problem.inputs(), &mut outputs, &mut Workspace::new()).unwrap_err();
    let shapes = [packed.problem.shape(), other.problem.shape()];
    assert_eq!(error, AttentionError::PlanShapeMismatch { planned: shapes[0], found: shapes[1] });
    let error = plan.run(&inputs(), &mut outputs, &mut Workspace::new()).unwrap_err();
    assert_eq!(error, AttentionError::WorkspaceTooSmall { needed: plan.workspace_len(), len: 0 });
    answer.out.assert_untouched();
}

#[test]
fn absurd_sizes_are_errors() {
    let huge = AttentionShape {
        batch: 1,
        num_heads: usize::MAX / 2,
        num_kv_heads: 1,
        q_len: usize::MAX,
        kv_len: usize::MAX,
        head_dim: usize::MAX / 4,
        value_dim: usize::MAX / 4,
    };
    let offsets = [0, 1, usize::MAX];
    let error = VarlenPlan::new(&huge, CuSeqlens::same(&offsets), &AttentionConfig::causal()).unwrap_err();
    assert!(matches!(error, AttentionError::PlanOverflow { .. }), "{error}");
}

#[test]
fn plans_are_shared_between_threads_and_say_what_they_are() {
    fn assert_shared<T: Send + Sync + Clone>(_: &T) {}
    let packed = Packed::<f32>::new(SMALL, &[[9, 12], [1, 1], [0, 3]], 0, 11);
    let plan = packed_plan(&packed, &AttentionConfig::causal().with_parallelism(Parallelism::Serial));
    assert_shared(&plan);
    assert_eq!(*plan.shape(), packed.problem.shape());
    let expected = format!(
        "3 packed sequences on {}: 4 tasks, 1 threads, {} KiB workspace",
        plan.instruction_set().name(),
        plan.workspace_len().div_ceil(1024)
    );
    assert_eq!(plan.to_string(), expected);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: by_profile(200, 12), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_lengths_match_separate_calls(
        lens in prop::collection::vec([prop_oneof![0..=3usize, 0..=70usize], prop_oneof![0..=3usize, 0..=300usize]], 0..8),
        (num_kv_heads, group_size) in (1..=2usize, 1..=5usize),
        (head_dim, value_dim) in (1..=20usize, 0..=20usize),
        (mask, layouts) in (0..3usize, [0..6usize, 0..6]),
        spare in 0..3usize,
        seed in any::<u64>(),
    ) {
        let heads = Heads { num_heads: num_kv_heads * group_size, num_kv_heads, head_dim, value_dim };
        let packed = Packed::<f32>::new(heads, &lens, spare, seed);
        for set in instruction_sets() {
            let config = masks()[mask].with_instruction_set(set);
            let expected = packed.one_by_one(&config).bits();
            let [inputs, out] = layouts.map(|layout| Layout::DISTINCT[layout]);
            prop_assert!(packed.in_layout(inputs).run(&config, out).bits() == expected, "{}", set);
        }
    }
}
