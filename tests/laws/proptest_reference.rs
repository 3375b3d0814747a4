//! The kernels agree with the f64 reference on whatever shape, layout, mask, scale and instruction set.

use crate::common::{
    Expected, KV_BLOCKS, Layout, Number, Operands, PANELS, Problem, TILES, Tensor, by_profile, for_each_pair,
    instruction_sets, masks, run_into,
};
use fused_attention::{AttentionConfig, AttentionShape, CausalAlignment, KvPadding, reference};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngSeed, TestCaseResult};

/// How Q, K and V are filled.
#[derive(Debug, Clone, Copy)]
enum Fill {
    Normal,
    /// Scores rise by this much from the first key to the last.
    Ascending(f64),
}

/// Element types, of Q and the output and of K and V, and the laws for them.
#[derive(Clone, Copy)]
pub struct Types {
    names: [&'static str; 2],
    check: fn(&Case) -> TestCaseResult,
    pub check_weights: fn(&Case) -> TestCaseResult,
}

impl std::fmt::Debug for Types {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.names)
    }
}

impl Types {
    fn of<T: Number, K: Number<Real = T::Real>>() -> Self {
        let check_weights = crate::weights::check_case::<T, K>;
        Self { names: [T::NAME, K::NAME], check: check_types::<T, K>, check_weights }
    }

    fn all() -> Vec<Self> {
        fn push<T: Number, K: Number<Real = T::Real>>(list: &mut Vec<Types>) {
            list.push(Types::of::<T, K>());
        }
        let mut list = Vec::new();
        for_each_pair!(push, &mut list);
        list
    }
}

/// Everything that a call depends on.
#[derive(Debug, Clone)]
pub struct Case {
    pub types: Types,
    pub shape: AttentionShape,
    pub config: AttentionConfig,
    fill: Fill,
    pub seed: u64,
    /// Of Q, K, V and the output.
    layouts: [Layout; 4],
    /// V is a view into the memory of K (if it is no wider).
    v_lies_in_k: bool,
    /// Which operands there are: mask, bias, slopes, sinks, lengths.
    has: [bool; 5],
    /// Axes along which mask and bias have size 1.
    broadcast: [bool; 4],
}

impl Case {
    pub fn problem<T: Number, K: Number<Real = T::Real>>(&self) -> Problem<T, K> {
        let contiguous = match self.fill {
            Fill::Normal => Problem::<T, K>::normal(&self.shape, self.seed),
            Fill::Ascending(rise) => Problem::ascending(&self.shape, self.seed, rise, self.config.softmax_scale),
        };
        Problem {
            q: contiguous.q.in_layout(self.layouts[0]),
            k: contiguous.k.in_layout(self.layouts[1]),
            v: contiguous.v.in_layout(self.layouts[2]),
            v_lies_in_k: self.v_lies_in_k && self.shape.value_dim <= self.shape.head_dim,
            operands: self.operands(),
        }
    }
}

impl Case {
    fn operands<T: Number>(&self) -> Operands<T> {
        let Operands { mask, bias, alibi_slopes, sinks, .. } = Operands::all(&self.shape, self.seed, self.broadcast);
        let [has_mask, has_bias, has_slopes, has_sinks, has_lens] = self.has;
        let len = |index: usize| (self.seed as usize >> (8 * index)) % (self.shape.kv_len + 1);
        Operands {
            kv_lens: has_lens.then(|| (0..self.shape.batch).map(len).collect()),
            mask: mask.filter(|_| has_mask),
            bias: bias.filter(|_| has_bias),
            alibi_slopes: alibi_slopes.filter(|_| has_slopes),
            sinks: sinks.filter(|_| has_sinks),
        }
    }
}

/// Lengths at which something may end or begin, for units of these sizes: 0, 1, B - 1, B, B + 1, 3B + tail.
fn edges(units: &[usize]) -> Vec<usize> {
    let mut lengths: Vec<usize> =
        units.iter().flat_map(|&b| [b - 1, b, b + 1, 2 * b, 3 * b + 1, 3 * b + b / 2]).collect();
    lengths.extend([0, 1, 2, 3]);
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// A length from `edges`, or any up to the largest of them.
pub fn length(units: &[usize]) -> impl Strategy<Value = usize> + use<> {
    let edges = edges(units);
    let largest = *edges.last().unwrap();
    prop_oneof![3 => select(edges), 1 => 0..=largest]
}

/// At least 1, as `head_dim` must be.
pub fn dim(units: &[usize]) -> impl Strategy<Value = usize> + use<> {
    length(units).prop_map(|dim| dim.max(1))
}

/// Factors on the default scale.
fn any_scale() -> impl Strategy<Value = Option<f64>> {
    prop_oneof![3 => Just(None), 1 => (-3.0f64..3.0).prop_map(Some), 1 => Just(Some(0.0))]
}

fn any_layouts() -> impl Strategy<Value = [Layout; 4]> {
    let q = select(Layout::DISTINCT.to_vec());
    let broadcast = || select(vec![Layout::BroadcastSeq, Layout::BroadcastHeads, Layout::BroadcastBatch]);
    let kv = || prop_oneof![4 => select(Layout::DISTINCT.to_vec()), 1 => broadcast()];
    (q.clone(), kv(), kv(), q).prop_map(|(q, k, v, out)| [q, k, v, out])
}

fn any_fill() -> impl Strategy<Value = Fill> {
    prop_oneof![2 => Just(Fill::Normal), 1 => select(vec![3.0, 30.0, 100.0]).prop_map(Fill::Ascending)]
}

/// Every way in which the config can hide keys, and softcap.
fn any_mask() -> impl Strategy<Value = AttentionConfig> {
    let alignments = vec![CausalAlignment::BottomRight, CausalAlignment::TopLeft];
    let offset = (-20isize..200).prop_map(CausalAlignment::Offset);
    let causal = prop_oneof![3 => select(alignments), 1 => offset]
        .prop_map(|alignment| AttentionConfig::causal().with_causal_alignment(alignment));
    let mask = prop_oneof![1 => Just(AttentionConfig::full()), 3 => causal];
    let limit = || prop_oneof![2 => Just(None), 1 => length(&[8, 16, 192]).prop_map(Some)];
    let prefix = prop_oneof![3 => Just(0), 1 => length(&[8, 192])];
    let softcap = prop_oneof![2 => Just(None), 1 => select(vec![0.5, 5.0, 50.0]).prop_map(Some)];
    (mask, limit(), limit(), prefix, softcap, any::<bool>()).prop_map(
        |(mask, left, right, prefix, softcap, is_left)| {
            let padding = if is_left { KvPadding::Left } else { KvPadding::Right };
            let mut config = mask.with_window(left, right).with_prefix_len(prefix).with_kv_padding(padding);
            config.softcap = softcap;
            config
        },
    )
}

/// Plain ones as well: most cases have few of the operands.
fn any_operands() -> impl Strategy<Value = ([bool; 5], [bool; 4])> {
    let few = [false; 5].map(|_| proptest::bool::weighted(0.2));
    (few, any::<[bool; 4]>())
}

pub fn case(shape: impl Strategy<Value = AttentionShape>) -> impl Strategy<Value = Case> {
    let types = prop_oneof![1 => Just(Types::of::<f32, f32>()), 1 => select(Types::all())];
    let config = prop_oneof![1 => select(masks().to_vec()), 2 => any_mask()];
    let config = (config, any_scale(), any_operands());
    (types, shape, config, any_fill(), any::<u64>(), any_layouts(), proptest::bool::weighted(0.2)).prop_map(
        |(types, shape, (mut config, scale, (has, broadcast)), fill, seed, layouts, v_lies_in_k)| {
            config.softmax_scale = scale.map(|scale| scale / (shape.head_dim as f64).sqrt());
            Case { types, shape, config, fill, seed, layouts, v_lies_in_k, has, broadcast }
        },
    )
}

/// Fixed seed, so that a run can be repeated; another one, or more cases, by `PROPTEST_RNG_SEED`, `PROPTEST_CASES`.
pub fn proptest_config(default_cases: u32, quick_cases: u32) -> ProptestConfig {
    let from_environment = ProptestConfig::default();
    let is_set = |name| std::env::var_os(name).is_some();
    ProptestConfig {
        cases: if is_set("PROPTEST_CASES") { from_environment.cases } else { by_profile(default_cases, quick_cases) },
        rng_seed: if is_set("PROPTEST_RNG_SEED") { from_environment.rng_seed } else { RngSeed::Fixed(0x5eed) },
        failure_persistence: None,
        max_shrink_iters: 400,
        ..from_environment
    }
}

/// The law of this file, on every instruction set.
fn check(case: &Case) -> TestCaseResult {
    (case.types.check)(case)
}

fn check_types<T: Number, K: Number<Real = T::Real>>(case: &Case) -> TestCaseResult {
    let problem = case.problem::<T, K>();
    let expected = Expected::new(&problem, &case.config);
    for set in instruction_sets() {
        let answer = run_into(&problem, &case.config.with_instruction_set(set), case.layouts[3]);
        let [out, logsumexp] = expected.error_ratios(&answer);
        prop_assert!(out <= 1.0, "{set}: the output's error is {out} of its bound");
        prop_assert!(logsumexp <= 1.0, "{set}: logsumexp's error is {logsumexp} of its bound");
    }
    Ok(())
}

#[test]
fn many_keys_match_the_reference() {
    let shape = (1..=2usize, 0..=40usize, length(&KV_BLOCKS), dim(&TILES), length(&TILES)).prop_map(
        |(num_heads, q_len, kv_len, head_dim, value_dim)| AttentionShape {
            batch: 1,
            num_heads,
            num_kv_heads: 1,
            q_len,
            kv_len,
            head_dim,
            value_dim,
        },
    );
    proptest!(proptest_config(800, 12), |(case in case(shape))| check(&case)?);
}

/// Up to several blocks of rows, some keys.
pub fn many_rows() -> impl Strategy<Value = AttentionShape> {
    let rows: Vec<usize> = PANELS.iter().flat_map(|panel| [*panel, 4 * panel]).collect();
    (1..=3usize, length(&rows), length(&TILES), dim(&TILES), length(&TILES)).prop_map(
        |(group_size, rows, kv_len, head_dim, value_dim)| AttentionShape {
            batch: 1,
            num_heads: group_size,
            num_kv_heads: 1,
            q_len: rows.div_ceil(group_size),
            kv_len,
            head_dim,
            value_dim,
        },
    )
}

#[test]
fn many_rows_match_the_reference() {
    proptest!(proptest_config(800, 12), |(case in case(many_rows()))| check(&case)?);
}

#[test]
fn square_shapes_match_the_reference() {
    let shape = (1..=2usize, length(&[16, 32, 64, 96]), 0..=2usize, dim(&[8, 12]), length(&[8, 12])).prop_map(
        |(num_heads, len, longer, head_dim, value_dim)| AttentionShape {
            batch: 1,
            num_heads,
            num_kv_heads: num_heads,
            q_len: len,
            kv_len: len + longer,
            head_dim,
            value_dim,
        },
    );
    proptest!(proptest_config(800, 12), |(case in case(shape))| check(&case)?);
}

#[test]
fn wide_heads_match_the_reference() {
    let wide = [40, 64, 96, 128];
    let shape = (length(&[8, 16]), length(&[12, 16]), dim(&wide), length(&wide))
        .prop_map(|(q_len, kv_len, head_dim, value_dim)| crate::common::one_head(q_len, kv_len, head_dim, value_dim));
    proptest!(proptest_config(500, 8), |(case in case(shape))| check(&case)?);
}

pub fn batches_and_head_groups() -> impl Strategy<Value = AttentionShape> {
    (0..=3usize, 0..=3usize, 1..=5usize, length(&[8]), length(&[8, 16]), dim(&TILES), length(&TILES)).prop_map(
        |(batch, num_kv_heads, group_size, q_len, kv_len, head_dim, value_dim)| AttentionShape {
            batch,
            num_heads: num_kv_heads * group_size,
            num_kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
        },
    )
}

#[test]
fn batches_and_head_groups_match_the_reference() {
    proptest!(proptest_config(800, 12), |(case in case(batches_and_head_groups()))| check(&case)?);
}

/// Over the sampled rows, the largest error of the output.
fn sampled_error(problem: &Problem, config: &AttentionConfig, out: &Tensor, stride: usize) -> f64 {
    let q_len = out.shape[2];
    let rows = (0..q_len).step_by(stride).chain(q_len.saturating_sub(2)..q_len);
    let errors = rows.map(|query| {
        let (expected, _) = reference::attention_row(&problem.inputs(), config, [0, 0, query]).unwrap();
        let found: Vec<f32> = (0..out.shape[3]).map(|d| out.get([0, 0, query, d])).collect();
        crate::common::max_abs_error(&found, &expected)
    });
    errors.fold(0.0, f64::max)
}

#[test]
fn normal_inputs_stay_within_the_absolute_bound() {
    // (q_len, kv_len, head_dim, rows between samples)
    let default =
        [(512, 512, 64, 61), (1000, 1000, 128, 199), (4096, 4096, 64, 509), (64, 4096, 128, 13), (40, 2048, 320, 13)];
    let in_quick = [(200, 200, 64, 61), (20, 600, 128, 13)];
    for (q_len, kv_len, dim, stride) in by_profile(default.to_vec(), in_quick.to_vec()) {
        let problem = crate::common::normal_problem(&crate::common::one_head(q_len, kv_len, dim, dim), 7);
        let bound = 2e-6 * (dim as f64 / 128.0).sqrt().max(1.0);
        for config in [AttentionConfig::causal(), AttentionConfig::full()] {
            for set in instruction_sets() {
                let answer = crate::common::run_on(set, &problem, &config);
                let error = sampled_error(&problem, &config, &answer.out, stride);
                assert!(error <= bound, "{set}: error {error:e} > {bound:e} at {q_len} x {kv_len}, head_dim {dim}");
            }
        }
    }
}
