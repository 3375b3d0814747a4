//! This crate, as the sweep calls it: `attention_into` in a loop, its workspace warm from the second call on.

use fused_attention::{AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, attention_into};

use super::Scalar;
use crate::Result;
use crate::args::Layout;
use crate::contender::Call;
use crate::inputs::{Tensors, view, view_mut};
use crate::number::Number;

pub struct Ours<'a, T> {
    inputs: AttentionInputs<'a, T>,
    config: AttentionConfig,
    layout: Layout,
    shape: [usize; 4],
    out: Vec<T>,
}

impl<'a, T: Scalar> Ours<'a, T> {
    /// `tensors` are in this layout.
    pub fn new(tensors: &'a Tensors<T>, layout: Layout, config: AttentionConfig) -> Result<Self> {
        let (inputs, shape, out) = (tensors.inputs()?, tensors.output_shape(), tensors.new_output()?);
        Ok(Self { inputs, config, layout, shape, out })
    }

    /// Which instructions run, and how many bytes of scratch all threads have.
    pub fn path(&self) -> Result<(&'static str, usize)> {
        let shape = fused_attention::AttentionShape::of(&self.inputs)?;
        let plan = AttentionPlan::<f32>::with_accumulator(&shape, &self.config)?;
        Ok((plan.instruction_set().name(), plan.workspace_len()))
    }
}

impl<T: Scalar> Call for Ours<'_, T> {
    fn call(&mut self) -> Result<()> {
        let mut outputs = AttentionOutputs::new(view_mut(self.layout, &mut self.out, self.shape)?);
        Ok(attention_into(&self.inputs, &mut outputs, &self.config)?)
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let view = view(self.layout, &self.out, self.shape)?;
        let [batch, heads, queries, features] = self.shape;
        let mut out = Vec::with_capacity(self.out.len());
        for b in 0..batch {
            for h in 0..heads {
                for i in 0..queries {
                    let row =
                        (0..features).map(|d| view.get([b, h, i, d]).map_or(f32::NAN, |x| Number::to_f64(x) as f32));
                    out.extend(row);
                }
            }
        }
        Ok(out)
    }
}
