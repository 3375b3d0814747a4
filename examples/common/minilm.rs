//! A real layer on a real text: the self-attention of encoder layer 2 of all-MiniLM-L6-v2 and the 320 tokens that it saw, as `tests/data`
//! holds them.

use std::error::Error;

use fused_attention::{
    AttentionConfig, MultiHeadAttention, MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace, Projection,
    attention_weights,
};
use safetensors::SafeTensors;

const TENSORS: &[u8] = include_bytes!("../../tests/data/minilm_layer2_attention.safetensors");
const TOKENS: &str = include_str!("../../tests/data/minilm_tokens.json");
const D_MODEL: usize = 384;

pub const NUM_HEADS: usize = 12;

pub struct MiniLm {
    pub tokens: Vec<String>,
    /// What the layer reads, `[tokens, d_model]`.
    x: Vec<f32>,
    layer: MultiHeadAttention<'static>,
}

impl MiniLm {
    pub fn load() -> Result<Self, Box<dyn Error>> {
        let tensors = SafeTensors::deserialize(TENSORS)?;
        let numbers = |name: &str| -> Result<Vec<f32>, Box<dyn Error>> {
            let (fours, _) = tensors.tensor(name)?.data().as_chunks::<4>();
            Ok(fours.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
        };
        // PyTorch stores weights [out, in].
        let projection = |name: &str| -> Result<_, Box<dyn Error>> {
            let weight = numbers(&format!("w_{name}"))?;
            Ok(Projection::from_out_in(weight, [D_MODEL, D_MODEL])?.with_bias(&numbers(&format!("b_{name}"))?)?)
        };
        let shape = MultiHeadShape::new(D_MODEL, NUM_HEADS)?;
        let [q, k, v, out] = [projection("q")?, projection("k")?, projection("v")?, projection("o")?];
        let layer = MultiHeadAttention::new(shape, q, k, v, out)?;
        Ok(Self { tokens: serde_json::from_str(TOKENS)?, x: numbers("x")?, layer })
    }

    /// How much these tokens look at all tokens, in these heads: `[heads, rows, tokens]`.
    pub fn weights(
        &self,
        config: &AttentionConfig,
        heads: &[usize],
        rows: &[usize],
    ) -> Result<Vec<f32>, Box<dyn Error>> {
        let inputs = MultiHeadInputs::new(&self.x, [1, self.tokens.len(), D_MODEL]);
        let mut workspace = MultiHeadWorkspace::new();
        let projected = self.layer.project(&inputs, config, &mut workspace)?;
        Ok(attention_weights(&projected, config, heads, rows)?)
    }
}
