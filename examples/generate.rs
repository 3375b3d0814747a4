//! A toy generation loop: a prompt, then one token at a time over a [`KvCache`]. Then one causal pass over the whole sequence,
//! and the output of every step must be that of its row.
//!
//! `cargo run --release --example generate`
//!
//! The model is a table: query, key and value of a token are random numbers fixed by the layer, the token and its position, where
//! a real model would project the output of the layer before.

use std::time::Instant;

use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, Capacity, KvCache, KvCacheShape, TensorView, attention,
};

const LAYERS: usize = 4;
const HEADS: usize = 8;
const KV_HEADS: usize = 2; // four query heads share each
const HEAD_DIM: usize = 64;
const VOCABULARY: usize = 1000;
const PROMPT: usize = 200;
const STEPS: usize = 16;
/// Values lie in [-1, 1], and so do outputs. A step adds in another order than the full pass: a few roundings of 6e-8.
const TOLERANCE: f32 = 2e-6;

/// Of one layer and consecutive tokens, each `[heads, tokens, head_dim]`.
struct Projected {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    tokens: usize,
}

impl Projected {
    fn new(layer: usize, tokens: &[usize], first_position: usize) -> Self {
        let project = |which: usize, heads: usize| {
            let mut rows = Vec::with_capacity(heads * tokens.len() * HEAD_DIM);
            for head in 0..heads {
                for (i, token) in tokens.iter().enumerate() {
                    let row = [which, layer, head, first_position + i, *token].iter().fold(0, |seed, &x| mix(seed, x));
                    rows.extend((0..HEAD_DIM).map(|d| (mix(row, d) >> 40) as f32 / (1 << 23) as f32 - 1.0));
                }
            }
            rows
        };
        Self { q: project(1, HEADS), k: project(2, KV_HEADS), v: project(3, KV_HEADS), tokens: tokens.len() }
    }

    fn q(&self) -> Result<TensorView<'_, f32>, AttentionError> {
        TensorView::from_bhsd(&self.q, [1, HEADS, self.tokens, HEAD_DIM])
    }

    fn k(&self) -> Result<TensorView<'_, f32>, AttentionError> {
        TensorView::from_bhsd(&self.k, [1, KV_HEADS, self.tokens, HEAD_DIM])
    }

    fn v(&self) -> Result<TensorView<'_, f32>, AttentionError> {
        TensorView::from_bhsd(&self.v, [1, KV_HEADS, self.tokens, HEAD_DIM])
    }
}

/// Random bits for a number and the bits before (splitmix64).
fn mix(before: u64, x: usize) -> u64 {
    let x = (before ^ x as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Row `position` of every head of `[heads, tokens, head_dim]`, one after the other.
fn row(out: &[f32], tokens: usize, position: usize) -> Vec<f32> {
    (0..HEADS).flat_map(|head| out[(head * tokens + position) * HEAD_DIM..][..HEAD_DIM].to_vec()).collect()
}

/// Runs new tokens through all layers; gives the output of the last of them in each layer.
fn step(cache: &mut KvCache<f32>, tokens: &[usize]) -> Result<Vec<Vec<f32>>, AttentionError> {
    let first_position = cache.len(0, 0)?;
    let mut outputs = Vec::new();
    for layer in 0..LAYERS {
        let new = Projected::new(layer, tokens, first_position);
        cache.append(layer, &new.k()?, &new.v()?)?;
        let inputs = AttentionInputs::new(new.q()?, cache.k(layer)?, cache.v(layer)?);
        // Causal, aligned to the end: the last new token sees all keys, the one before it all but one.
        let out = attention(&inputs, &AttentionConfig::causal())?;
        outputs.push(row(&out, new.tokens, new.tokens - 1));
    }
    Ok(outputs)
}

fn main() -> Result<(), AttentionError> {
    let shape =
        KvCacheShape { num_layers: LAYERS, batch: 1, num_kv_heads: KV_HEADS, head_dim: HEAD_DIM, value_dim: HEAD_DIM };
    let mut cache = KvCache::new(&shape, Capacity::Fixed(PROMPT + STEPS))?;

    let mut tokens: Vec<usize> = (0..PROMPT).map(|i| mix(0, i) as usize % VOCABULARY).collect();
    let started = Instant::now();
    let mut steps = vec![step(&mut cache, &tokens)?];
    println!("prefill: {PROMPT} tokens, {LAYERS} layers in {:.1?}", started.elapsed());
    for _ in 0..STEPS {
        // The "logits" are the last layer's output: the largest feature names the next token.
        let logits = &steps[steps.len() - 1][LAYERS - 1];
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0);
        tokens.push(best % VOCABULARY);
        let started = Instant::now();
        steps.push(step(&mut cache, &tokens[tokens.len() - 1..])?);
        println!("decode: token {best:3}, {} in the cache, {:.1?}", cache.len(0, 0)?, started.elapsed());
    }

    // The whole sequence at once, without a cache.
    let mut worst = 0f32;
    for layer in 0..LAYERS {
        let all = Projected::new(layer, &tokens, 0);
        let out = attention(&AttentionInputs::new(all.q()?, all.k()?, all.v()?), &AttentionConfig::causal())?;
        for (step, outputs) in steps.iter().enumerate() {
            let expected = row(&out, tokens.len(), PROMPT - 1 + step);
            let error = outputs[layer].iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(error <= TOLERANCE, "layer {layer}, step {step}: differs by {error:e} from the full pass");
            worst = worst.max(error);
        }
    }
    println!("all {} steps agree with one causal pass: largest difference {worst:.1e} of {TOLERANCE:.0e}", steps.len());
    Ok(())
}
