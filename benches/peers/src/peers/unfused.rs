//! The baseline of the sweep: gemm, softmax over the visible scores, gemm.

use fused_attention::{AttentionInputs, InstructionSet};

use crate::Result;
use crate::args::Layout;
use crate::case::Case;
use crate::contender::Call;
use crate::inputs::Tensors;
use crate::threads::Threads;
use crate::unfused::Unfused;

pub struct Baseline<'a> {
    inputs: AttentionInputs<'a, f32>,
    unfused: Unfused<'a>,
    out: Vec<f32>,
}

impl<'a> Baseline<'a> {
    /// `tensors` are `[batch, heads, tokens, features]`.
    pub fn new(tensors: &'a Tensors<f32>, case: &Case, threads: &'a Threads) -> Result<Self> {
        let unfused = Unfused::new(&case.shape, case.mask, InstructionSet::detect(), threads)?;
        Ok(Self { inputs: tensors.inputs()?, unfused, out: tensors.new_output()? })
    }
}

impl Call for Baseline<'_> {
    fn call(&mut self) -> Result<()> {
        Ok(self.unfused.run(&self.inputs, &mut self.out, Layout::Bhsd)?)
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.out.clone())
    }
}
