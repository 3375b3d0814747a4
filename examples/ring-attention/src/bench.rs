//! How long one layer takes, and what of that is waiting.

use std::time::Instant;

use clap::ValueEnum;
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, Parallelism, TensorViewMut, attention_into, bf16,
};
use mpi::topology::SimpleCommunicator;
use mpi::traits::CommunicatorCollectives;
use ring_attention::{
    CacheShard, DEFAULT_BLOCK_KEYS, DecodeShape, Report, Ring, RingPlan, RingShape, Share, Shares, Wire,
};

use crate::Result;
use crate::check::{max_of_all, sum_of_all};
use crate::inputs::Tensors;
use crate::memory::status;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Length of the whole sequence.
    #[arg(long, default_value_t = 16384)]
    seq_len: usize,
    /// Query heads.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// KV heads.
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,
    /// Features of Q, K and V.
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    /// causal, full or window:KEYS.
    #[arg(long, default_value = "causal")]
    mask: String,
    /// Element type of K and V.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Keys of a block.
    #[arg(long, default_value_t = DEFAULT_BLOCK_KEYS)]
    block_keys: usize,
    /// Threads of each rank. 1: the calling thread alone.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// One query against a cache of this length in place of the whole sequence against itself.
    #[arg(long)]
    decode: bool,
    /// Runs; the fastest counts.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
}

pub fn run(ring: &Ring, world: &SimpleCommunicator, args: &Args) -> Result<()> {
    match args.dtype {
        Dtype::F32 => measure::<f32>(ring, world, args),
        Dtype::Bf16 => measure::<bf16>(ring, world, args),
    }
}

fn measure<K: Wire>(ring: &Ring, world: &SimpleCommunicator, args: &Args) -> Result<()> {
    let &Args { seq_len, heads: num_heads, kv_heads: num_kv_heads, head_dim, block_keys, .. } = args;
    let shape = RingShape { batch: 1, num_heads, num_kv_heads, head_dim, value_dim: head_dim };
    let mut config = match args.mask.split_once(':') {
        None if args.mask == "causal" => AttentionConfig::causal(),
        None if args.mask == "full" => AttentionConfig::full(),
        Some(("window", keys)) => AttentionConfig::sliding_window(keys.parse()?),
        _ => return Err(format!("mask {:?} is none of causal, full, window:KEYS", args.mask).into()),
    };
    if args.threads == 1 {
        config = config.with_parallelism(Parallelism::Serial);
    } else {
        rayon::ThreadPoolBuilder::new().num_threads(args.threads).build_global()?;
    }
    if args.decode {
        return measure_decode::<K>(ring, world, args, &shape, &config);
    }
    let shares = Shares::for_mask(&config, seq_len, ring.ranks());
    let before = status("VmRSS")?;
    let own = Tensors::<K>::of_rank(&shape, &shares, ring.rank());
    let rows = own.q.len() / head_dim;
    let (mut out, mut logsumexp) = (vec![0.0; rows * head_dim], vec![0.0; rows]);
    let mut plan = RingPlan::new(ring, &shape, &shares, &config, block_keys)?;
    let share = Share { q: &own.q, k: &own.k, v: &own.v };
    let mut seconds = f64::INFINITY;
    let mut report = Report::default();
    for _ in 0..args.repeats {
        world.barrier();
        let started = Instant::now();
        let this = plan.run(ring, &share, &mut out, &mut logsumexp)?;
        let slowest = max_of_all(world, started.elapsed().as_secs_f64());
        if slowest < seconds {
            (seconds, report) = (slowest, this);
        }
    }
    let grown = max_of_all(world, status("VmHWM")? - before);
    let waiting = max_of_all(world, report.waiting.as_secs_f64());
    let bytes = sum_of_all(world, report.bytes_sent);
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let qkv = seq_len * head_dim * (num_heads * size_of::<f32>() + 2 * num_kv_heads * size_of::<K>());
    let outputs = size_of_val(&out[..]) + size_of_val(&logsumexp[..]);
    if ring.rank() == 0 {
        println!(
            "| ranks x threads | T | heads / KV | d | mask | K, V | seconds | waiting | MiB sent | MiB a rank | Q, K, V / n + out + buffers |"
        );
        println!(
            "| {} x {} | {seq_len} | {num_heads} / {num_kv_heads} | {head_dim} | {} | {} | {seconds:.4} | {:.1} % | {:.1} | {:.1} | {:.1} |",
            ring.ranks(),
            args.threads,
            args.mask,
            K::NAME,
            100.0 * waiting / seconds,
            mib(bytes as f64),
            mib(grown),
            mib(qkv as f64 / ring.ranks() as f64 + outputs as f64 + plan.buffer_bytes() as f64),
        );
    }
    if ring.ranks() == 1 {
        // The same without any of this: one call.
        let seq = [1, num_heads, seq_len, head_dim];
        let mut fastest = f64::INFINITY;
        for _ in 0..args.repeats {
            let view = TensorViewMut::from_bhsd(&mut out, seq)?;
            let mut outputs = AttentionOutputs::new(view).with_logsumexp(&mut logsumexp);
            let started = Instant::now();
            attention_into(&AttentionInputs::new(own.q(), own.k(), own.v()), &mut outputs, &config)?;
            fastest = fastest.min(started.elapsed().as_secs_f64());
        }
        println!("one call of the library: {fastest:.4} seconds");
    }
    Ok(())
}

fn measure_decode<K: Wire>(
    ring: &Ring,
    world: &SimpleCommunicator,
    args: &Args,
    shape: &RingShape,
    config: &AttentionConfig,
) -> Result<()> {
    let RingShape { num_heads, num_kv_heads, head_dim, .. } = *shape;
    let shares = Shares::contiguous(args.seq_len, ring.ranks());
    let own = Tensors::<K>::of_rank(shape, &shares, ring.rank());
    let query = Tensors::<K>::of_positions(shape, &[args.seq_len]).q;
    let shard = CacheShard { k: own.k(), v: own.v(), positions: shares.of(ring.rank()) };
    let decode = DecodeShape { ring: *shape, q_len: 1, position: args.seq_len };
    let mut seconds = f64::INFINITY;
    for _ in 0..args.repeats {
        world.barrier();
        let started = Instant::now();
        ring.decode(&decode, config, (0, &query), &shard)?;
        seconds = seconds.min(max_of_all(world, started.elapsed().as_secs_f64()));
    }
    if ring.rank() == 0 {
        let bytes = 2 * args.seq_len * num_kv_heads * head_dim * size_of::<K>();
        println!(
            "decode, {} x {}: {num_heads} heads on {num_kv_heads} of {head_dim}, {} keys, {}: {:.3} ms, {:.1} GB/s of K and V",
            ring.ranks(),
            args.threads,
            args.seq_len,
            K::NAME,
            seconds * 1e3,
            bytes as f64 / seconds / 1e9
        );
    }
    Ok(())
}
