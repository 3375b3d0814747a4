//! What the model needs to know, measured on two ranks: `mpirun -np 2 target/release/ring-attention constants`.

use std::time::Instant;

use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, Parallelism, PartialAttention, TensorView, TensorViewMut,
    attention_into, bf16,
};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Destination, Source};
use ring_attention::Wire;

use crate::Result;

/// Rows and keys of a call, as the ring makes them; features.
const ROWS: usize = 512;
const KEYS: usize = 2048;
const DIM: usize = 128;
const LONG_WORDS: usize = 1 << 19; // 2 MiB: K of half a block
const REPEATS: usize = 30;

pub fn run(world: &SimpleCommunicator) -> Result<()> {
    if world.size() != 2 {
        return Err(format!("the constants are measured on 2 ranks, not {}", world.size()).into());
    }
    // Both ranks compute at the same time, as they do in the ring: what they share, they share here too.
    let pair_f32 = seconds_a_pair::<f32>(world)?;
    let pair_bf16 = seconds_a_pair::<bf16>(world)?;
    let row = seconds_a_row(world)?;
    let latency = ping_pong(world, 1, 1000);
    let long = ping_pong(world, LONG_WORDS, 50);
    if world.rank() == 0 {
        println!(
            "# seconds on one core: for a product of a row and a key (head_dim {DIM}), merging a row, a message; bytes a second"
        );
        println!("pair_f32 {pair_f32:e}");
        println!("pair_bf16 {pair_bf16:e}");
        println!("row {row:e}");
        println!("latency {latency:e}");
        println!("bandwidth {:e}", (LONG_WORDS * size_of::<f32>()) as f64 / (long - latency));
    }
    Ok(())
}

/// The fastest of some runs, in seconds.
fn fastest(world: &SimpleCommunicator, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut fastest = f64::INFINITY;
    world.barrier();
    for _ in 0..REPEATS {
        let started = Instant::now();
        run()?;
        fastest = fastest.min(started.elapsed().as_secs_f64());
    }
    Ok(fastest)
}

fn seconds_a_pair<K: Wire>(world: &SimpleCommunicator) -> Result<f64> {
    let q: Vec<f32> = (0..ROWS * DIM).map(|i| (i as f32).sin()).collect();
    let kv: Vec<K> = (0..KEYS * DIM).map(|i| K::nearest((i as f32 / 3.0).cos())).collect();
    let (mut out, mut logsumexp) = (vec![0.0; ROWS * DIM], vec![0.0; ROWS]);
    let q = TensorView::from_bhsd(&q, [1, 1, ROWS, DIM])?;
    let kv = TensorView::from_bhsd(&kv, [1, 1, KEYS, DIM])?;
    let config = AttentionConfig::full().with_parallelism(Parallelism::Serial);
    let seconds = fastest(world, || {
        let view = TensorViewMut::from_bhsd(&mut out, [1, 1, ROWS, DIM])?;
        let mut outputs = AttentionOutputs::new(view).with_logsumexp(&mut logsumexp);
        Ok(attention_into(&AttentionInputs::new(q, kv, kv), &mut outputs, &config)?)
    })?;
    Ok(seconds / (ROWS * KEYS) as f64)
}

fn seconds_a_row(world: &SimpleCommunicator) -> Result<f64> {
    let (out, logsumexp) = (vec![1.0f32; ROWS * DIM], vec![1.0f32; ROWS]);
    let (mut sum, mut sum_lse) = (out.clone(), logsumexp.clone());
    let shape = [1, 1, ROWS, DIM];
    let partial = PartialAttention::new(TensorView::from_bhsd(&out, shape)?, &logsumexp)?;
    let seconds = fastest(world, || {
        let view = TensorViewMut::from_bhsd(&mut sum, shape)?;
        Ok(partial.add_to(&mut AttentionOutputs::new(view).with_logsumexp(&mut sum_lse))?)
    })?;
    Ok(seconds / ROWS as f64)
}

/// Seconds for one way.
fn ping_pong(world: &SimpleCommunicator, words: usize, times: usize) -> f64 {
    let other = world.process_at_rank(1 - world.rank());
    let mut buffer = vec![0.0f32; words];
    let mut fastest = f64::INFINITY;
    for _ in 0..5 {
        world.barrier();
        let started = Instant::now();
        for _ in 0..times {
            if world.rank() == 0 {
                other.send(&buffer[..]);
                other.receive_into(&mut buffer[..]);
            } else {
                other.receive_into(&mut buffer[..]);
                other.send(&buffer[..]);
            }
        }
        fastest = fastest.min(started.elapsed().as_secs_f64() / (2 * times) as f64);
    }
    fastest
}
