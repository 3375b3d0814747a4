//! Attention with pencil and paper: one query, three keys, and every step from scores to output. Beside it what the crate computes, and why
//! scores are divided by the root of the head dimension.
//!
//! `cargo run --example walkthrough`

use std::error::Error;

use fused_attention::{AttentionConfig, AttentionInputs, TensorView, attention, attention_weights};
use serde_json::Value;

const EXAMPLES: &str = include_str!("../tests/data/worked_examples.json");

fn softmax(scores: &[f32]) -> Vec<f32> {
    // Less the largest, which changes nothing but keeps exp from overflowing.
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f32 = exps.iter().sum();
    exps.iter().map(|exp| exp / sum).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A line of the table, numbers with so many decimals.
fn line(what: &str, how: &str, numbers: &[f32], decimals: usize) {
    let numbers: Vec<String> = numbers.iter().map(|number| format!("{number:.decimals$}")).collect();
    println!("  {what:<12}{how:<30}{}", numbers.join(" "));
}

fn matrix(value: &Value) -> serde_json::Result<Vec<Vec<f32>>> {
    serde_json::from_value(value.clone())
}

/// Who is "it"? One query against the keys of three words before it.
fn pronoun(example: &Value) -> Result<(), Box<dyn Error>> {
    let (q, k, v) = (matrix(&example["q"])?, matrix(&example["k"])?, matrix(&example["v"])?);
    let (query, head_dim) = (&q[0], q[0].len());

    let scores: Vec<f32> = k.iter().map(|key| dot(query, key)).collect();
    let scaled: Vec<f32> = scores.iter().map(|score| score / (head_dim as f32).sqrt()).collect();
    let weights = softmax(&scaled);
    let out: Vec<f32> =
        (0..v[0].len()).map(|d| weights.iter().zip(&v).map(|(weight, value)| weight * value[d]).sum()).collect();

    println!("One query, three keys and values of {head_dim} features:\n");
    line("1 scores", "query . key", &scores, 1);
    line("2 scaled", &format!("scores / sqrt({head_dim})"), &scaled, 2);
    line("3 weights", "softmax of them, sum 1", &weights, 2);
    line("4 out", "weights . values", &out, 2);

    // The crate never holds scores or weights; `attention_weights` computes some for people to look at.
    let (q, k, v) = (q.concat(), k.concat(), v.concat());
    let inputs = AttentionInputs::new(
        TensorView::from_bhsd(&q, [1, 1, 1, head_dim])?, // [batch, heads, queries, features]
        TensorView::from_bhsd(&k, [1, 1, 3, head_dim])?,
        TensorView::from_bhsd(&v, [1, 1, 3, 2])?,
    );
    let config = AttentionConfig::full();
    let (fused_weights, fused_out) = (attention_weights(&inputs, &config, &[0], &[0])?, attention(&inputs, &config)?);
    println!("\nThe same from the crate:\n");
    line("  weights", "attention_weights(..)", &fused_weights, 2);
    line("  out", "attention(..)", &fused_out, 2);

    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(close(&weights, &fused_weights) && close(&out, &fused_out), "the crate computes something else");
    Ok(())
}

/// What the softmax makes of scores that were not divided.
fn saturation(example: &Value) -> Result<(), Box<dyn Error>> {
    let scores: Vec<f32> = serde_json::from_value(example["scores"].clone())?;
    let scaled: Vec<f32> = scores.iter().map(|score| score / 8.0).collect();
    println!(
        "\nWhy 1 / sqrt(head_dim)? A score is a sum of head_dim products. If the features of query and key vary by 1,"
    );
    println!("scores vary by sqrt(head_dim), which is 8 for 64 features, and the softmax sees one key alone:\n");
    line("scores", "as they are", &scores, 0);
    line("weights", "softmax", &softmax(&scores), 7);
    line("scaled", "scores / sqrt(64)", &scaled, 3);
    line("weights", "softmax", &softmax(&scaled), 4);
    // The slope of a weight in its own score: what training has to work with.
    let slope = |weights: Vec<f32>| weights[0] * (1.0 - weights[0]);
    println!("\nThe slope of the first weight, w (1 - w), which is what training goes by, is");
    println!("{:.6} without the division and {:.2} with it.", slope(softmax(&scores)), slope(softmax(&scaled)));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let examples: Value = serde_json::from_str(EXAMPLES)?;
    pronoun(&examples["pronoun"])?;
    saturation(&examples["saturation"])
}
