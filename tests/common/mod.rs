//! What the integration tests share: which instruction sets and profile to run, tensors whose gaps hold canaries,
//! inputs, running, and the yardstick of the error bound.

#![allow(dead_code, unused_imports)] // every test binary uses its own part

pub mod cache;
mod executed;
mod inputs;
#[cfg(feature = "multi-head")]
pub mod layer;
mod number;
pub mod operands;
mod tensor;
pub mod wide;
mod yardstick;

use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, CausalAlignment, InstructionSet, TensorView,
    attention_into,
};

pub use inputs::{Generator, normal_problem, pattern};
pub(crate) use number::for_each_pair;
pub use number::{Number, Real};
pub use operands::{BoolTensor, Operands};
pub use tensor::{Layout, Tensor};
pub use yardstick::{Expected, max_abs_error, visible_keys};

/// That of f32.
pub const CANARY: f32 = <f32 as Number>::CANARY;

/// Tile heights (keys, value dims) of the instruction sets.
pub const TILES: [usize; 4] = [4, 6, 8, 12];

/// Rows of a panel of the instruction sets.
pub const PANELS: [usize; 3] = [8, 16, 32];

/// Keys that a KV block may have.
pub const KV_BLOCKS: [usize; 3] = [96, 128, 192];

/// Whether the quick profile is on: `FUSED_ATTENTION_TEST_PROFILE=quick`.
pub fn quick() -> bool {
    match std::env::var("FUSED_ATTENTION_TEST_PROFILE") {
        Ok(profile) => {
            assert_eq!(profile, "quick", "FUSED_ATTENTION_TEST_PROFILE knows one profile");
            true
        }
        Err(_) => false,
    }
}

/// `default`, or `quick_one` in the quick profile.
pub fn by_profile<T>(default: T, quick_one: T) -> T {
    if quick() { quick_one } else { default }
}

/// `all` for f32 alone, in the default profile; else `few`: what a type does not change need not be repeated for each.
pub fn by_types<T: Number, K: Number, U>(all: U, few: U) -> U {
    by_cost::<T, K, U>(all, |_| few)
}

/// The same with a choice among the few: with `true`, of other types than f32 in the quick profile, which runs under emulators.
pub fn by_cost<T: Number, K: Number, U>(all: U, few: impl FnOnce(bool) -> U) -> U {
    match (T::NAME == "f32" && K::NAME == "f32", quick()) {
        (true, false) => all,
        (is_f32, quick) => few(quick && !is_f32),
    }
}

/// The sets that every law is checked on: all that this CPU has and the wide portable ones, or the one named by
/// `FUSED_ATTENTION_TEST_ONLY`.
///
/// # Panics
/// If that one is not available: a set that was asked for and cannot run is a failure.
pub fn instruction_sets() -> Vec<InstructionSet> {
    match std::env::var("FUSED_ATTENTION_TEST_ONLY") {
        Ok(name) => vec![InstructionSet::from_name(&name).expect("FUSED_ATTENTION_TEST_ONLY names a set of this CPU")],
        Err(_) => {
            let wide = [InstructionSet::portable_256(), InstructionSet::portable_512()];
            InstructionSet::available().chain(wide).collect()
        }
    }
}

/// Those of the sets that multiply pairs of bf16.
pub fn pair_sets() -> Vec<InstructionSet> {
    instruction_sets().into_iter().filter(|set| set.name() == "avx512-bf16").collect()
}

/// The three masks there are.
pub fn masks() -> [AttentionConfig; 3] {
    [AttentionConfig::full(), AttentionConfig::causal(), top_left()]
}

/// Every mask for f32; for the other types one, under which there are full, edge and hidden blocks.
pub fn masks_for<T: Number, K: Number>() -> Vec<AttentionConfig> {
    let is_f32 = T::NAME == "f32" && K::NAME == "f32";
    if is_f32 { masks().to_vec() } else { vec![AttentionConfig::causal()] }
}

/// Causal, aligned top-left.
pub fn top_left() -> AttentionConfig {
    AttentionConfig::causal().with_causal_alignment(CausalAlignment::TopLeft)
}

/// A shape with `num_heads = num_kv_heads = batch = 1`.
pub fn one_head(q_len: usize, kv_len: usize, head_dim: usize, value_dim: usize) -> AttentionShape {
    AttentionShape { batch: 1, num_heads: 1, num_kv_heads: 1, q_len, kv_len, head_dim, value_dim }
}

/// Inputs of one call.
#[derive(Debug, Clone)]
pub struct Problem<T = f32, K = T> {
    pub q: Tensor<T>,
    pub k: Tensor<K>,
    /// Ignored but for its shape where `v_lies_in_k`.
    pub v: Tensor<K>,
    /// V is the first `value_dim` features of K, in the memory of K.
    pub v_lies_in_k: bool,
    pub operands: Operands<T>,
}

impl<T: Number, K: Number<Real = T::Real>> Problem<T, K> {
    pub fn new(q: Tensor<T>, k: Tensor<K>, v: Tensor<K>) -> Self {
        Self { q, k, v, v_lies_in_k: false, operands: Operands::default() }
    }

    pub fn inputs(&self) -> AttentionInputs<'_, T, K> {
        let v = if self.v_lies_in_k {
            TensorView::with_strides(&self.k.data, self.v.shape, self.k.strides).unwrap()
        } else {
            self.v.view()
        };
        self.operands.attach(AttentionInputs::new(self.q.view(), self.k.view(), v))
    }

    pub fn shape(&self) -> AttentionShape {
        AttentionShape::of(&self.inputs()).unwrap()
    }

    /// Shape of the output.
    pub fn out_shape(&self) -> [usize; 4] {
        let [batch, heads, q_len, _] = self.q.shape;
        [batch, heads, q_len, self.v.shape[3]]
    }

    /// All three in this memory order.
    pub fn in_layout(&self, layout: Layout) -> Self {
        let (q, k, v) = (self.q.in_layout(layout), self.k.in_layout(layout), self.v.in_layout(layout));
        Self { operands: self.operands.clone(), ..Self::new(q, k, v) }
    }

    /// The same numbers in the type of the accumulator.
    pub fn widened(&self) -> Problem<T::Real> {
        let (q, k, v) = (self.q.map(T::widened), self.k.map(K::widened), self.v.map(K::widened));
        Problem { operands: self.operands.widened(), ..Problem::new(q, k, v) }
    }
}

/// Outputs of one call.
#[derive(Debug, Clone)]
pub struct Answer<T: Number = f32> {
    pub out: Tensor<T>,
    pub logsumexp: Vec<T::Real>,
}

/// Bits of numbers.
pub fn bits<T: Number>(numbers: &[T]) -> Vec<u64> {
    numbers.iter().map(|x| x.bits()).collect()
}

impl<T: Number> Answer<T> {
    /// Bits of the output in logical order.
    pub fn out_bits(&self) -> Vec<u64> {
        bits(&self.out.values())
    }

    /// All that was computed, as bits: for comparisons that must be exact.
    pub fn bits(&self) -> (Vec<u64>, Vec<u64>) {
        (self.out_bits(), bits(&self.logsumexp))
    }

    /// Output and log-sum-exp of one row.
    pub fn row(&self, [batch, head, query]: [usize; 3]) -> (Vec<T>, T::Real) {
        let [_, heads, q_len, value_dim] = self.out.shape;
        let out = (0..value_dim).map(|d| self.out.get([batch, head, query, d])).collect();
        (out, self.logsumexp[(batch * heads + head) * q_len + query])
    }

    /// As [`row`](Self::row), as f64.
    pub fn row_values(&self, row: [usize; 3]) -> (Vec<f64>, f64) {
        let (out, logsumexp) = self.row(row);
        (out.into_iter().map(Number::value).collect(), logsumexp.value())
    }

    /// As [`row`](Self::row), as bits.
    pub fn row_bits(&self, row: [usize; 3]) -> (Vec<u64>, u64) {
        let (out, logsumexp) = self.row(row);
        (bits(&out), logsumexp.bits())
    }
}

/// Runs `attention_into` with log-sum-exp on contiguous outputs.
pub fn run<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, config: &AttentionConfig) -> Answer<T> {
    run_into(problem, config, Layout::Bhsd)
}

/// Runs `attention_into` on outputs of this layout that start as canaries; checks that it wrote every element of the
/// output and nothing between them.
pub fn run_into<T: Number, K: Number<Real = T::Real>>(
    problem: &Problem<T, K>,
    config: &AttentionConfig,
    layout: Layout,
) -> Answer<T> {
    let mut out = Tensor::unwritten(problem.out_shape(), layout);
    let [batch, heads, q_len, _] = problem.out_shape();
    let mut logsumexp = vec![T::Real::CANARY; batch * heads * q_len];
    let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
    attention_into(&problem.inputs(), &mut outputs, config).unwrap();
    out.assert_written();
    out.assert_gaps_untouched();
    Answer { out, logsumexp }
}

/// Runs it on this instruction set.
pub fn run_on<T: Number, K: Number<Real = T::Real>>(
    set: InstructionSet,
    problem: &Problem<T, K>,
    config: &AttentionConfig,
) -> Answer<T> {
    run(problem, &config.with_instruction_set(set))
}
