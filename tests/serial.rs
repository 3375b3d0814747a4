//! `Parallelism::Serial` touches no thread pool, and neither does a call too small to share. A binary of its own: once
//! rayon's global pool exists it cannot be told who made it.
#![cfg(feature = "rayon")]

mod common;

use common::{instruction_sets, normal_problem, one_head};
use fused_attention::{AttentionConfig, AttentionPlan, Parallelism, SERIAL_BELOW_FLOPS};

#[test]
fn serial_calls_start_no_pool() {
    let (small, large) = (one_head(8, 8, 16, 16), one_head(300, 300, 64, 64));
    for set in instruction_sets() {
        let serial = AttentionConfig::causal().with_parallelism(Parallelism::Serial).with_instruction_set(set);
        common::run(&normal_problem(&large, 1), &serial);
    }
    #[cfg(feature = "multi-head")]
    serial_layers_start_no_pool();
    // Fails if a pool was made before.
    rayon::ThreadPoolBuilder::new().num_threads(3).build_global().unwrap();

    let shared = AttentionConfig::causal().with_parallelism(Parallelism::Rayon);
    assert_eq!(AttentionPlan::new(&small, &shared).unwrap().threads(), 1);
    assert_eq!(AttentionPlan::new(&large, &shared).unwrap().threads(), 3);
}

#[test]
fn the_threshold_counts_visible_scores() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let threads = |kv_len, config: AttentionConfig| {
        let shape = one_head(64, kv_len, 32, 32);
        pool.install(|| AttentionPlan::new(&shape, &config).unwrap().threads())
    };
    // Full: 64 * kv_len scores of 128 operations each.
    let kv_len = SERIAL_BELOW_FLOPS as usize / (64 * 128);
    assert_eq!(threads(kv_len - 1, AttentionConfig::full()), 1);
    assert_eq!(threads(kv_len, AttentionConfig::full()), 2);
    // Causal, bottom-right: 64 * 63 / 2 scores less.
    assert_eq!(threads(kv_len + 31, AttentionConfig::causal()), 1);
    assert_eq!(threads(kv_len + 32, AttentionConfig::causal()), 2);
}

/// Enough tokens for `gemm`, rotary embedding and attention to be shared, if they were to be.
#[cfg(feature = "multi-head")]
fn serial_layers_start_no_pool() {
    use common::layer::{Form, TextbookLayer, TextbookRotary, as_f32, normal_tokens};
    use fused_attention::{MultiHeadAttention, MultiHeadInputs, MultiHeadShape, RotaryPairing, bf16};

    let mut textbook = TextbookLayer::normal::<bf16>(MultiHeadShape::new(128, 4).unwrap(), [true; 4], 1);
    textbook.rotary = Some(TextbookRotary { dim: 32, pairing: RotaryPairing::HalfSplit, base: 1e4 });
    let x = as_f32(&normal_tokens(600 * 128, 2));
    let serial = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
    let inputs = MultiHeadInputs::new(&x, [1, 600, 128]);
    let (wide, narrow): (MultiHeadAttention, MultiHeadAttention<bf16>) =
        (textbook.layer(Form::ALL[0]).unwrap(), textbook.layer(Form::ALL[0]).unwrap());
    wide.forward(&inputs, &serial).unwrap();
    narrow.forward(&inputs, &serial).unwrap();
}
