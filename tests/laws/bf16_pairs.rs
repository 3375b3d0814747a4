//! `avx512-bf16`: where prefill multiplies pairs of bf16 and adds them in f32. That the sums are those of f32 with neighbours
//! exchanged is part of `element_types`.

use crate::common::{Layout, Number, Problem, Tensor, by_profile, one_head, pair_sets, run_on};
use fused_attention::{AttentionConfig, AttentionOutputs, AttentionPlan, InstructionSet, Workspace, bf16};

/// Whether a call with so many rows (queries times heads of a group) multiplies pairs.
pub fn multiplies_pairs<T: Number, K: Number>(set: InstructionSet, rows: usize) -> bool {
    pair_sets().contains(&set) && T::NAME == "bf16" && K::NAME == "bf16" && rows > 8
}

/// Q and K with the features 2i and 2i + 1 exchanged: the order in which the instruction adds their products. An odd last one stays.
pub fn with_exchanged_neighbours<T: Number>(problem: &Problem<T>) -> Problem<T> {
    let exchanged = |tensor: &Tensor<T>| {
        let last = tensor.shape[3] - 1;
        Tensor::from_fn(tensor.shape, Layout::Bhsd, |[b, h, s, d]| {
            tensor.get([b, h, s, if d ^ 1 > last { d } else { d ^ 1 }])
        })
    };
    Problem { q: exchanged(&problem.q), k: exchanged(&problem.k), ..problem.clone() }
}

/// Pairs are slower than f32 on a CPU of Intel that was measured. (The operating system says whose the CPU is.)
#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn only_the_cpus_of_amd_choose_pairs_by_themselves() {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let is_amd = cpu.lines().any(|line| line.starts_with("vendor_id") && line.ends_with("AuthenticAMD"));
    let names: Vec<_> = InstructionSet::available().map(InstructionSet::name).collect();
    let [pairs, no_pairs] = ["avx512-bf16", "avx512"].map(|name| names.iter().position(|&n| n == name));
    if let (Some(pairs), Some(no_pairs)) = (pairs, no_pairs) {
        assert_eq!(pairs < no_pairs, is_amd, "{names:?}");
        assert_eq!([pairs.min(no_pairs), pairs.max(no_pairs)], [0, 1], "{names:?}");
    }
}

/// Rows of one number and zeros against rows of a 1 and zeros: each score is a number, in Q or in K, first or second of a pair.
/// Those below the normal range count as 0, as the documentation of the set says.
#[test]
fn every_normal_number_counts_exactly_and_smaller_ones_as_zero() {
    const ROWS: usize = 9;
    let step = by_profile(1, 13);
    let mut numbers: Vec<bf16> = bf16::all_numbers().filter(|x| x.value().is_finite()).step_by(step).collect();
    numbers.resize(numbers.len().next_multiple_of(ROWS), bf16::ONE); // whole heads
    let counted = |x: bf16| if x.value().abs() < 2f64.powi(-126) { 0.0 } else { x.value() };
    let heads = numbers.len() / ROWS;
    let config = AttentionConfig::full().with_softmax_scale(1.0);
    // Row i of the numbers is in feature i alone; so a key of ones finds it, and a number in a key is found by row i.
    let ones = Tensor::from_fn([1, heads, 1, ROWS], Layout::Bhsd, |_| bf16::ONE);
    let values = Tensor::from_fn([1, heads, 1, 1], Layout::Bhsd, |_| bf16::ONE);
    let diagonal = |number: &dyn Fn(usize, usize) -> bf16| {
        Tensor::from_fn(
            [1, heads, ROWS, ROWS],
            Layout::Bhsd,
            |[_, h, row, d]| if row == d { number(h, row) } else { bf16::ZERO },
        )
    };
    let number = |h: usize, row: usize| numbers[h * ROWS + row];
    let in_keys = Tensor::from_fn([1, heads, 1, ROWS], Layout::Bhsd, |[_, h, _, d]| number(h, d));
    for set in pair_sets() {
        for (q, k) in [(diagonal(&number), ones.clone()), (diagonal(&|_, _| bf16::ONE), in_keys.clone())] {
            let answer = run_on(set, &Problem::<bf16>::new(q, k, values.clone()), &config);
            for (&x, &score) in numbers.iter().zip(&answer.logsumexp) {
                assert_eq!(f64::from(score), counted(x), "{x:e}");
            }
        }
    }
}

/// Infinities and NaN of either operand are in the score, in whichever place of the pair.
#[test]
fn infinities_and_nan_come_through() {
    const ROWS: usize = 12;
    const SPECIAL: [f64; 3] = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    for set in pair_sets() {
        for head_dim in [1, 2, 5, 6] {
            for place in 0..head_dim {
                for (special, in_q) in SPECIAL.into_iter().flat_map(|x| [(x, true), (x, false)]) {
                    let mut problem = Problem::<bf16>::normal(&one_head(ROWS, 1, head_dim, 3), 1);
                    problem.q = Tensor::from_fn(problem.q.shape, Layout::Bhsd, |_| bf16::ONE);
                    problem.k = Tensor::from_fn(problem.k.shape, Layout::Bhsd, |_| bf16::ONE);
                    let tensor = if in_q { &mut problem.q } else { &mut problem.k };
                    tensor.set([0, 0, 0, place], bf16::nearest(special));
                    let config = AttentionConfig::full();
                    let scores = run_on(set, &problem, &config).logsumexp;
                    let widened = run_on(set, &problem.widened(), &config).logsumexp;
                    for (row, (score, widened)) in scores.iter().zip(&widened).enumerate() {
                        let what = format!("{special} in place {place} of {head_dim}, row {row}: {score}");
                        assert_eq!(!score.is_finite(), row == 0 || !in_q, "{what}");
                        assert_eq!(score.is_nan(), widened.is_nan(), "{what}, not {widened}");
                    }
                }
            }
        }
    }
}

/// The score of a query and a key, unscaled, where 9 rows are all the same.
fn score(set: InstructionSet, q: &[f64], k: &[f64]) -> f64 {
    let row =
        |row: &[f64], rows| Tensor::from_fn([1, 1, rows, row.len()], Layout::Bhsd, |[.., d]| bf16::exactly(row[d]));
    let problem = Problem::<bf16>::new(row(q, 9), row(k, 1), row(&[1.0], 1));
    f64::from(run_on(set, &problem, &AttentionConfig::full().with_softmax_scale(1.0)).logsumexp[8])
}

/// What the documentation of the set says of its arithmetic, and an infinity where a product is none.
#[test]
fn what_is_small_counts_as_zero_and_what_is_large_overflows_before_it_is_scaled() {
    let two = |exponent| 2f64.powi(exponent);
    for set in pair_sets() {
        // Products.
        assert_eq!(score(set, &[two(-63)], &[two(-63)]), two(-126));
        assert_eq!(score(set, &[two(-63)], &[two(-64)]), 0.0);
        assert_eq!(score(set, &[two(-100), two(-1)], &[two(-100), two(-2)]), two(-3));
        // Sums: 1.5 * 2^-126 - 2^-126, in a pair and in two.
        assert_eq!(score(set, &[1.0, 1.0], &[1.5 * two(-126), -two(-126)]), 0.0);
        assert_eq!(score(set, &[1.0, 0.0, 1.0], &[1.5 * two(-126), 0.0, -two(-126)]), 0.0);
        // Infinity times 0, and less another.
        assert!(score(set, &[f64::INFINITY, 1.0], &[0.0, 1.0]).is_nan());
        assert!(score(set, &[f64::INFINITY, f64::INFINITY], &[1.0, -1.0]).is_nan());
        // 2^130 exceeds f32 before it is halved often enough.
        let large = |_: [usize; 4]| bf16::exactly(two(65));
        let problem = Problem::<bf16>::new(
            Tensor::from_fn([1, 1, 9, 1], Layout::Bhsd, large),
            Tensor::from_fn([1, 1, 1, 1], Layout::Bhsd, large),
            Tensor::from_fn([1, 1, 1, 1], Layout::Bhsd, |_| bf16::ONE),
        );
        let config = AttentionConfig::full().with_softmax_scale(two(-100));
        assert!(!run_on(set, &problem, &config).logsumexp[0].is_finite(), "{set}");
    }
}

/// A call after another of infinite keys and queries, in the same workspace: nothing of them is in the half pairs behind odd rows.
#[test]
fn half_a_pair_holds_nothing_of_an_earlier_call() {
    for set in pair_sets() {
        for head_dim in [1, 19, 129, 131] {
            let config = AttentionConfig::causal().with_instruction_set(set);
            let shape = one_head(40, 40, head_dim, 5);
            let problem = Problem::<bf16>::normal(&shape, 3);
            let mut infinite = Problem::<bf16>::normal(&one_head(40, 40, head_dim + 1, 5), 4);
            for tensor in [&mut infinite.q, &mut infinite.k] {
                *tensor = tensor.map(|_| bf16::INFINITY);
            }
            let mut workspace = Workspace::new();
            let mut run = |problem: &Problem<bf16>| {
                let plan = AttentionPlan::new(&problem.shape(), &config).unwrap();
                workspace.reserve(&plan).unwrap();
                let mut out = Tensor::<bf16>::unwritten(problem.out_shape(), Layout::Bhsd);
                plan.run(&problem.inputs(), &mut AttentionOutputs::new(out.view_mut()), &mut workspace).unwrap();
                crate::common::bits(&out.values())
            };
            run(&infinite);
            let after = run(&problem);
            assert_eq!(after, crate::common::bits(&run_on(set, &problem, &config).out.values()), "{set}, {head_dim}");
        }
    }
}
