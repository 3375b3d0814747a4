//! A whole layer on four tokens, small enough to print: which token looks at which, under a causal mask.
//!
//! `cargo run --example causal_weights`

use fused_attention::{
    AttentionConfig, AttentionError, MultiHeadAttention, MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace,
    Projection, attention_weights,
};

const TOKENS: usize = 4;
const D_MODEL: usize = 8;
const HEADS: usize = 2; // of D_MODEL / HEADS = 4 features

/// Numbers in [-1, 1], always the same ones (splitmix64).
struct Random(u64);

impl Random {
    fn numbers(&mut self, len: usize) -> Vec<f32> {
        let mut number = || {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| number()).collect()
    }
}

fn main() -> Result<(), AttentionError> {
    let mut random = Random(7);
    let mut projection = || Projection::from_in_out(random.numbers(D_MODEL * D_MODEL), [D_MODEL, D_MODEL]);
    let [w_q, w_k, w_v, w_o] = [projection()?, projection()?, projection()?, projection()?];
    let layer = MultiHeadAttention::new(MultiHeadShape::new(D_MODEL, HEADS)?, w_q, w_k, w_v, w_o)?;
    let x = random.numbers(TOKENS * D_MODEL);

    // The layer: projections, heads, output projection.
    let inputs = MultiHeadInputs::new(&x, [1, TOKENS, D_MODEL]);
    let config = AttentionConfig::causal();
    let out = layer.forward(&inputs, &config)?;
    println!("x [{TOKENS}, {D_MODEL}] -> out [{}, {D_MODEL}], {HEADS} heads", out.len() / D_MODEL);

    // Its weights: of all heads and all rows here, [heads, rows, keys].
    let mut workspace = MultiHeadWorkspace::new();
    let heads = layer.project(&inputs, &config, &mut workspace)?;
    let weights = attention_weights(&heads, &config, &[0, 1], &[0, 1, 2, 3])?;
    for (head, weights) in weights.chunks(TOKENS * TOKENS).enumerate() {
        println!("\nhead {head}: how much each token (row) looks at each (column)");
        println!("     t0   t1   t2   t3");
        for (token, row) in weights.chunks(TOKENS).enumerate() {
            let row: Vec<String> = row.iter().map(|weight| format!("{weight:.2}")).collect();
            println!("t{token} {}", row.join(" "));
        }
    }
    println!("\nNo token sees a later one: their weights are exactly 0. The first can look at nothing but itself.");

    for (row, weights) in weights.chunks(TOKENS).enumerate() {
        let token = row % TOKENS;
        assert!(weights[token + 1..].iter().all(|&weight| weight == 0.0));
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
    Ok(())
}
