//! Softcap, ALiBi, sinks and functions of a user's own.

use crate::common::{
    Expected, Layout, Number, Operands, Problem, Tensor, bits, by_cost, by_profile, for_each_pair, instruction_sets,
    one_head, run_on,
};
use fused_attention::{
    AttentionConfig, AttentionError, AttentionOutputs, AttentionPlan, AttentionShape, CausalAlignment, InstructionSet,
    ScoreContext, ScoreModifier, ScoreVector, Workspace, alibi_slopes, attention, attention_into_with_modifier,
    attention_with_modifier,
};

/// For prefill and for decode, with groups of heads, some of them split into chunks.
fn shapes<T: Number, K: Number>() -> Vec<AttentionShape> {
    let base = AttentionShape { batch: 2, num_heads: 6, num_kv_heads: 2, ..one_head(41, 83, 19, 13) };
    let shapes = [
        base,
        AttentionShape { q_len: 2, ..base },
        AttentionShape { batch: 1, q_len: 1, kv_len: 2100, head_dim: 8, value_dim: 8, ..base },
        AttentionShape { batch: 1, q_len: 6, kv_len: 1700, head_dim: 8, value_dim: 8, ..base },
        AttentionShape { q_len: 4, kv_len: 3, ..base },
    ];
    let small = AttentionShape { batch: 1, q_len: 23, kv_len: 49, ..base };
    let few = [small, AttentionShape { q_len: 2, ..small }];
    by_cost::<T, K, _>(shapes.to_vec(), |is_slow| if is_slow { few.to_vec() } else { shapes[..3].to_vec() })
}

fn assert_right<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, config: &AttentionConfig) {
    let expected = Expected::new(problem, config);
    for set in instruction_sets() {
        expected.assert_met_by(&run_on(set, problem, config), &(set, problem.shape(), config));
    }
}

#[test]
fn every_combination_of_modifiers_matches_the_reference() {
    for_each_pair!(every_combination_of_modifiers_matches_the_reference_for);
}

fn every_combination_of_modifiers_matches_the_reference_for<T: Number, K: Number<Real = T::Real>>() {
    for shape in shapes::<T, K>() {
        let mut problem = Problem::<T, K>::normal(&shape, 1);
        let Operands { bias, alibi_slopes, sinks, .. } = Operands::all(&shape, 1, [true, false, false, false]);
        for choice in by_profile((1..16).collect(), vec![15]) {
            problem.operands = Operands {
                alibi_slopes: alibi_slopes.clone().filter(|_| choice & 1 != 0),
                sinks: sinks.clone().filter(|_| choice & 2 != 0),
                bias: bias.clone().filter(|_| choice & 4 != 0),
                ..Operands::default()
            };
            let mut config = AttentionConfig::causal();
            if choice & 8 != 0 {
                config = config.with_softcap(1.5);
            }
            assert_right(&problem, &config);
        }
    }
}

#[test]
fn softcap_is_exact_near_zero_and_bounds_large_scores() {
    for rise in [1e-3, 30.0, 1000.0] {
        for shape in [one_head(33, 70, 8, 8), one_head(2, 70, 8, 8)] {
            let problem: Problem = Problem::ascending(&shape, 2, rise, None);
            for softcap in [1e-3, 1.0, 30.0, 50.0, 1e30] {
                assert_right(&problem, &AttentionConfig::full().with_softcap(softcap));
            }
        }
    }
}

#[test]
fn infinite_scores_are_capped_and_nan_is_kept() {
    for shape in [one_head(20, 40, 1, 2), one_head(2, 40, 1, 2)] {
        let mut problem: Problem = Problem::normal(&shape, 3);
        problem.q = Tensor::from_fn(problem.q.shape, Layout::Bhsd, |_| 1.0);
        for (score, is_nan) in [(f32::INFINITY, false), (f32::NEG_INFINITY, false), (f32::NAN, true)] {
            problem.k.set([0, 0, 5, 0], score);
            for set in instruction_sets() {
                let answer = run_on(set, &problem, &AttentionConfig::full().with_softcap(2.0));
                for query in 0..shape.q_len {
                    let (out, logsumexp) = answer.row([0, 0, query]);
                    assert!(out.iter().all(|x| x.is_nan() == is_nan) && logsumexp.is_nan() == is_nan, "{set} {score}");
                }
            }
        }
    }
}

#[test]
fn alibi_follows_the_causal_alignment() {
    let shape = AttentionShape { batch: 1, num_heads: 5, num_kv_heads: 5, ..one_head(30, 50, 8, 8) };
    for shape in [shape, AttentionShape { q_len: 3, ..shape }] {
        let mut problem: Problem = Problem::normal(&shape, 4);
        problem.operands.alibi_slopes = Some(alibi_slopes(5));
        for config in
            [AttentionConfig::causal(), AttentionConfig::full(), AttentionConfig::full().with_window(Some(4), None)]
        {
            assert_right(&problem, &config);
        }
        for alignment in [CausalAlignment::TopLeft, CausalAlignment::Offset(11), CausalAlignment::Offset(-3)] {
            assert_right(&problem, &AttentionConfig::causal().with_causal_alignment(alignment).with_prefix_len(5));
        }
    }
}

#[test]
fn alibi_slopes_are_those_of_the_paper() {
    assert_eq!(alibi_slopes(0), [0.0f32; 0]);
    assert_eq!(alibi_slopes(1), [2f32.powi(-8)]);
    assert_eq!(alibi_slopes(8), [1, 2, 3, 4, 5, 6, 7, 8].map(|i| 2f32.powi(-i)));
    let of_16: Vec<f32> = (1..=16).map(|i| 2f32.powf(-0.5 * i as f32)).collect();
    assert!(alibi_slopes(16).iter().zip(&of_16).all(|(a, b)| (a / b - 1.0).abs() < 1e-6));
    // The authors' code for 12 heads: those of 8, then the 1st, 3rd, 5th and 7th of 16.
    let of_12 = alibi_slopes(12);
    assert_eq!(of_12[..8], alibi_slopes(8));
    assert!(of_12[8..].iter().zip([0, 2, 4, 6]).all(|(a, i)| (a / of_16[i] - 1.0).abs() < 1e-6));
}

#[test]
fn sinks_take_weight_and_nothing_else() {
    // Equal scores of 0 and values of 1: the output is the part of the weight that the keys have.
    for (q_len, kv_len) in [(20, 37), (1, 37), (1, 3000), (3, 1)] {
        let mut problem: Problem =
            Problem::normal(&AttentionShape { num_heads: 4, ..one_head(q_len, kv_len, 4, 2) }, 5);
        problem.q = Tensor::from_fn(problem.q.shape, Layout::Bhsd, |_| 0.0);
        problem.v = Tensor::from_fn(problem.v.shape, Layout::Bhsd, |_| 1.0);
        let sinks = [f32::NEG_INFINITY, 0.0, 3.0, 200.0];
        problem.operands.sinks = Some(sinks.to_vec());
        for set in instruction_sets() {
            let answer = run_on(set, &problem, &AttentionConfig::full());
            for (head, sink) in sinks.into_iter().enumerate() {
                let keys = kv_len as f64;
                let sum = keys + f64::from(sink).exp();
                for query in 0..q_len {
                    let (out, logsumexp) = answer.row_values([0, head, query]);
                    assert!((out[0] - keys / sum).abs() < 1e-6, "{set}: {out:?}, not {}", keys / sum);
                    assert!((logsumexp - sum.ln()).abs() < 1e-5 * sum.ln().max(1.0), "{set}: {logsumexp}");
                }
            }
        }
    }
}

#[test]
fn sinks_of_every_kind_match_the_reference_and_rows_without_keys_stay_zero() {
    let shape = AttentionShape { num_heads: 5, num_kv_heads: 1, ..one_head(9, 4, 3, 2) };
    for shape in [shape, AttentionShape { q_len: 1, ..shape }, AttentionShape { q_len: 1, kv_len: 0, ..shape }] {
        let mut problem: Problem = Problem::normal(&shape, 6);
        problem.operands.sinks = Some(vec![f32::NEG_INFINITY, -1e30, 1e30, f32::NAN, f32::INFINITY]);
        for (set, all_infinite) in instruction_sets().into_iter().flat_map(|set| [(set, false), (set, true)]) {
            if all_infinite {
                problem.q = Tensor::from_fn(problem.q.shape, Layout::Bhsd, |_| f32::NEG_INFINITY);
                problem.k = Tensor::from_fn(problem.k.shape, Layout::Bhsd, |_| 1.0);
            }
            let config = AttentionConfig::causal();
            let expected = fused_attention::reference::attention(&problem.inputs(), &config).unwrap();
            let answer = run_on(set, &problem, &config);
            let same = |found: f32, expected: f64| {
                let found = f64::from(found);
                (found - expected).abs() <= 1e-5 * expected.abs().max(1.0)
                    || found == f64::from(expected as f32)
                    || (found.is_nan() && expected.is_nan())
            };
            let found = answer.out.values();
            assert!(found.iter().zip(&expected.out).all(|(&a, &b)| same(a, b)), "{set}: {found:?} {:?}", expected.out);
            let (found, expected) = (answer.logsumexp, expected.logsumexp);
            assert!(found.iter().zip(&expected).all(|(&a, &b)| same(a, b)), "{set}: {found:?}, not {expected:?}");
        }
    }
}

/// What ALiBi does, softcap, and a term that tells batch entries, heads, queries and keys apart.
struct Everything<'a> {
    slopes: &'a [f32],
    softcap: f64,
}

impl ScoreModifier for Everything<'_> {
    const PARAMETERS: usize = 2;

    fn parameter(&self, index: usize, batch: usize, head: usize) -> f64 {
        if index == 0 { self.slopes[head].into() } else { (batch * 3 + head) as f64 / 8.0 }
    }

    #[inline(always)]
    fn modify<V: ScoreVector>(&self, score: V, at: &ScoreContext<'_, V>) -> V {
        let softcap = score.splat(self.softcap);
        let capped = softcap * (score / softcap).tanh();
        let bias = at.query * score.splat(0.25) - at.key * score.splat(0.125) + at.parameters[1];
        capped - at.parameters[0] * at.distance.abs() + bias.max(score.splat(-2.0)).min(score.splat(2.0))
    }
}

#[test]
fn a_modifier_of_ones_own_sees_the_right_places() {
    for_each_pair!(a_modifier_of_ones_own_sees_the_right_places_for);
}

fn a_modifier_of_ones_own_sees_the_right_places_for<T: Number, K: Number<Real = T::Real>>() {
    for shape in shapes::<T, K>() {
        let mut problem = Problem::<T, K>::normal(&shape, 7);
        let slopes = alibi_slopes(shape.num_heads);
        let AttentionShape { batch, num_heads, q_len, kv_len, .. } = shape;
        let bias = |[batch, head, query, key]: [usize; 4]| {
            let bias = query as f64 * 0.25 - key as f64 * 0.125 + (batch * 3 + head) as f64 / 8.0;
            T::nearest(bias.clamp(-2.0, 2.0)) // multiples of 1/8: exact
        };
        problem.operands.bias = Some(Tensor::from_fn([batch, num_heads, q_len, kv_len], Layout::Bhsd, bias));
        problem.operands.alibi_slopes = Some(slopes.clone());
        let expected = Expected::new(&problem, &AttentionConfig::causal().with_softcap(2.0));
        problem.operands = Operands::default();
        let modifier = Everything { slopes: &slopes, softcap: 2.0 };
        for set in instruction_sets() {
            let answer = run_with(set, &problem, &modifier);
            expected.assert_met_by(&answer, &(set, shape));
        }
    }
}

fn run_with<T: Number, K: Number<Real = T::Real>>(
    set: InstructionSet,
    problem: &Problem<T, K>,
    modifier: &impl ScoreModifier,
) -> crate::common::Answer<T> {
    let mut out = Tensor::unwritten(problem.out_shape(), Layout::Bhsd);
    let mut logsumexp = vec![T::Real::CANARY; out.shape[..3].iter().product()];
    let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
    let config = AttentionConfig::causal().with_instruction_set(set);
    attention_into_with_modifier(&problem.inputs(), &mut outputs, &config, modifier).unwrap();
    crate::common::Answer { out, logsumexp }
}

/// A rotation of the score by nothing at all.
struct Nothing;

impl ScoreModifier for Nothing {
    #[inline(always)]
    fn modify<V: ScoreVector>(&self, score: V, _: &ScoreContext<'_, V>) -> V {
        score
    }
}

struct Negated;

impl ScoreModifier for Negated {
    #[inline(always)]
    fn modify<V: ScoreVector>(&self, score: V, _: &ScoreContext<'_, V>) -> V {
        -score
    }
}

/// Negating scores is scaling them by a negative number, in every bit.
#[test]
fn borrowed_and_combined_modifiers_do_what_they_hold() {
    let slopes = [0.5, 0.25, 0.125, 0.0625];
    let everything = Everything { slopes: &slopes, softcap: 3.0 };
    let shape = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(30, 60, 8, 8) };
    for shape in [shape, AttentionShape { q_len: 2, ..shape }] {
        let problem: Problem = Problem::normal(&shape, 9);
        let inputs = problem.inputs();
        for set in instruction_sets() {
            let config = AttentionConfig::causal().with_softmax_scale(0.4).with_instruction_set(set);
            let negative = config.with_softmax_scale(-0.4);
            let expected = attention_with_modifier(&inputs, &config, &everything).unwrap();
            let found = attention_with_modifier(&inputs, &negative, &(Negated, &everything)).unwrap();
            assert_eq!(bits(&found), bits(&expected), "{set} {shape:?}");
            let expected = attention_with_modifier(&inputs, &negative, &Nothing).unwrap();
            let found = attention_with_modifier(&inputs, &config, &&Negated).unwrap();
            assert_eq!(bits(&found), bits(&expected), "{set} {shape:?}");
        }
    }
}

#[test]
fn modifiers_come_between_alibi_and_bias_on_every_tier() {
    let shape = AttentionShape { batch: 1, num_heads: 4, num_kv_heads: 2, ..one_head(30, 60, 8, 8) };
    for shape in [shape, AttentionShape { q_len: 2, ..shape }] {
        let mut problem: Problem = Problem::normal(&shape, 8);
        problem.operands = Operands::all(&shape, 8, [false; 4]);
        let config = AttentionConfig::causal().with_softcap(3.0);
        let expected = attention(&problem.inputs(), &config).unwrap();
        assert_eq!(attention_with_modifier(&problem.inputs(), &config, &Nothing).unwrap(), expected);
        let plan = AttentionPlan::new(&shape, &config).unwrap();
        let mut out = Tensor::unwritten(problem.out_shape(), Layout::Bhsd);
        let mut workspace = Workspace::for_plan(&plan).unwrap();
        let mut outputs = AttentionOutputs::new(out.view_mut());
        plan.run_with_modifier(&problem.inputs(), &mut outputs, &mut workspace, &Nothing).unwrap();
        assert_eq!(out.data, expected);
    }
}

#[test]
fn softcaps_that_are_none_are_refused() {
    let shape = one_head(3, 3, 4, 4);
    for value in [0.0, -0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-42, 1e39] {
        let error = AttentionPlan::new(&shape, &AttentionConfig::causal().with_softcap(value)).unwrap_err();
        assert!(matches!(error, AttentionError::InvalidSoftcap { value: found } if found.to_bits() == value.to_bits()));
        assert!(error.to_string().contains(&value.to_string()), "{error}");
    }
    for value in [1e-42, 1e39] {
        AttentionPlan::<f64>::with_accumulator(&shape, &AttentionConfig::causal().with_softcap(value)).unwrap();
    }
}

#[test]
fn a_number_for_each_head_is_asked_for() {
    let mut problem: Problem = Problem::normal(&AttentionShape { num_heads: 4, ..one_head(3, 3, 4, 4) }, 9);
    for found in [0, 3, 5] {
        for operand in ["alibi_slopes", "sinks"] {
            let numbers = Some(vec![0.0; found]);
            problem.operands = match operand {
                "sinks" => Operands { sinks: numbers, ..Operands::default() },
                _ => Operands { alibi_slopes: numbers, ..Operands::default() },
            };
            let error = attention(&problem.inputs(), &AttentionConfig::causal()).unwrap_err();
            assert_eq!(error, AttentionError::HeadNumbersMismatch { operand, expected: 4, found });
            assert!(error.to_string().contains(&found.to_string()), "{error}");
        }
    }
}
