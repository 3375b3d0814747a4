//! What the integration tests share: which instruction sets and profile to run, tensors whose gaps hold canaries,
//! inputs, running, and the yardstick of the error bound.

#![allow(dead_code, unused_imports)] // every test binary uses its own part

pub mod cache;
mod executed;
mod inputs;
mod tensor;
mod yardstick;

use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, CausalAlignment, InstructionSet, TensorView,
    attention_into,
};

pub use inputs::{Generator, ascending_problem, normal_problem, pattern};
pub use tensor::{CANARY, Layout, Tensor};
pub use yardstick::{Expected, max_abs_error, visible_keys};

/// Tile heights (keys, value dims) of the instruction sets.
pub const TILES: [usize; 4] = [4, 6, 8, 12];

/// Rows of a panel of the instruction sets.
pub const PANELS: [usize; 3] = [8, 16, 32];

/// Keys that a KV block may have.
pub const KV_BLOCKS: [usize; 3] = [96, 128, 192];

/// NaNs of every kind: quiet and signalling, both signs, payloads with the lowest, the highest and all bits set.
pub const NAN_PAYLOADS: [u32; 10] = [
    0x7fc0_0000,
    0xffc0_0000,
    0x7fc0_0001,
    0xffff_ffff,
    0x7fff_ffff,
    0x7f80_0001,
    0xff80_0001,
    0x7fa0_0000,
    0xffbf_ffff,
    0x7f80_ffff,
];

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

/// The three masks there are.
pub fn masks() -> [AttentionConfig; 3] {
    [AttentionConfig::full(), AttentionConfig::causal(), top_left()]
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
pub struct Problem {
    pub q: Tensor,
    pub k: Tensor,
    /// Ignored but for its shape where `v_lies_in_k`.
    pub v: Tensor,
    /// V is the first `value_dim` features of K, in the memory of K.
    pub v_lies_in_k: bool,
}

impl Problem {
    pub fn new(q: Tensor, k: Tensor, v: Tensor) -> Self {
        Self { q, k, v, v_lies_in_k: false }
    }

    pub fn inputs(&self) -> AttentionInputs<'_, f32> {
        let v = if self.v_lies_in_k {
            TensorView::with_strides(&self.k.data, self.v.shape, self.k.strides).unwrap()
        } else {
            self.v.view()
        };
        AttentionInputs::new(self.q.view(), self.k.view(), v)
    }

    pub fn shape(&self) -> AttentionShape {
        AttentionShape::of(&self.inputs()).unwrap()
    }

    /// Shape of the output.
    pub fn out_shape(&self) -> [usize; 4] {
        let [batch, heads, q_len, _] = self.q.shape;
        [batch, heads, q_len, self.v.shape[3]]
    }
}

/// Outputs of one call.
#[derive(Debug, Clone)]
pub struct Answer {
    pub out: Tensor,
    pub logsumexp: Vec<f32>,
}

impl Answer {
    /// Bits of the output in logical order.
    pub fn out_bits(&self) -> Vec<u32> {
        self.out.values().iter().map(|x| x.to_bits()).collect()
    }

    /// All that was computed, as bits: for comparisons that must be exact.
    pub fn bits(&self) -> (Vec<u32>, Vec<u32>) {
        (self.out_bits(), self.logsumexp.iter().map(|x| x.to_bits()).collect())
    }

    /// Output and log-sum-exp of one row.
    pub fn row(&self, [batch, head, query]: [usize; 3]) -> (Vec<f32>, f32) {
        let [_, heads, q_len, value_dim] = self.out.shape;
        let out = (0..value_dim).map(|d| self.out.get([batch, head, query, d])).collect();
        (out, self.logsumexp[(batch * heads + head) * q_len + query])
    }

    /// As [`row`](Self::row), as bits.
    pub fn row_bits(&self, row: [usize; 3]) -> (Vec<u32>, u32) {
        let (out, logsumexp) = self.row(row);
        (out.iter().map(|x| x.to_bits()).collect(), logsumexp.to_bits())
    }
}

/// Runs `attention_into` with log-sum-exp on contiguous outputs.
pub fn run(problem: &Problem, config: &AttentionConfig) -> Answer {
    run_into(problem, config, Layout::Bhsd)
}

/// Runs `attention_into` on outputs of this layout that start as canaries; checks that it wrote every element of the
/// output and nothing between them.
pub fn run_into(problem: &Problem, config: &AttentionConfig, layout: Layout) -> Answer {
    let mut out = Tensor::unwritten(problem.out_shape(), layout);
    let [batch, heads, q_len, _] = problem.out_shape();
    let mut logsumexp = vec![CANARY; batch * heads * q_len];
    let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
    attention_into(&problem.inputs(), &mut outputs, config).unwrap();
    out.assert_written();
    out.assert_gaps_untouched();
    Answer { out, logsumexp }
}

/// Runs it on this instruction set.
pub fn run_on(set: InstructionSet, problem: &Problem, config: &AttentionConfig) -> Answer {
    run(problem, &config.with_instruction_set(set))
}
