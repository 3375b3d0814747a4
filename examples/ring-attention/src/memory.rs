//! Memory of a rank, as the system counts it: its share of Q, K and V, the output, and buffers of a constant size.

use fused_attention::{AttentionConfig, Parallelism};
use mpi::topology::SimpleCommunicator;
use ring_attention::{Ring, RingPlan, RingShape, Share, Shares};

use crate::Result;
use crate::check::max_of_all;
use crate::inputs::Tensors;

const SHAPE: RingShape = RingShape { batch: 1, num_heads: 8, num_kv_heads: 8, head_dim: 64, value_dim: 64 };
const SEQ_LEN: usize = 16384;
const BLOCK_KEYS: usize = 2048;
/// Two blocks, and the output of a slice: whatever the length of the sequence.
const BUFFERS: usize = size_of::<f32>() * (2 * (BLOCK_KEYS + 2) * (64 + 64) + 512 * (64 + 1));
/// The library's scratch (2 MiB a thread at most) and what MPI keeps for messages under way, beyond the buffers that the plan tells.
const CONSTANT: f64 = (10 << 20) as f64;

/// Asserts it in a process that has done nothing else yet; gives the line to print.
pub fn check(ring: &Ring, world: &SimpleCommunicator) -> Result<String> {
    let ranks = ring.ranks();
    let shares = Shares::zig_zag(SEQ_LEN, ranks);
    let config = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
    let before = status("VmRSS")?;
    let own = Tensors::<f32>::of_rank(&SHAPE, &shares, ring.rank());
    let mut plan = RingPlan::new(ring, &SHAPE, &shares, &config, BLOCK_KEYS)?;
    let mut out = vec![0.0f32; own.q.len()];
    let mut logsumexp = vec![0.0f32; own.q.len() / SHAPE.head_dim];
    plan.run(ring, &Share { q: &own.q, k: &own.k, v: &own.v }, &mut out, &mut logsumexp)?;
    let grown = max_of_all(world, status("VmHWM")? - before);

    let qkv = (3 * SHAPE.num_heads * SEQ_LEN * SHAPE.head_dim * size_of::<f32>()) as f64;
    let outputs = (size_of_val(&out[..]) + size_of_val(&logsumexp[..])) as f64;
    let buffers = plan.buffer_bytes() as f64;
    let bound = 1.15 / ranks as f64 * qkv + outputs + buffers + CONSTANT;
    let longer = RingPlan::<f32>::new(ring, &SHAPE, &Shares::zig_zag(4 * SEQ_LEN, ranks), &config, BLOCK_KEYS)?;
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let line = format!(
        "memory: a rank grows by at most {:.1} MiB, its part of Q, K and V ({:.0} MiB in all) is {:.1}, of the output {:.1}, buffers are {:.1}; bound {:.1}",
        mib(grown),
        mib(qkv),
        mib(qkv / ranks as f64),
        mib(outputs),
        mib(buffers),
        mib(bound)
    );
    let largest = plan.buffer_bytes().max(longer.buffer_bytes());
    if grown > bound || largest > BUFFERS {
        return Err(format!("{line}; {largest} bytes of buffers, they should be {BUFFERS} at most").into());
    }
    Ok(line)
}

/// A field of /proc/self/status, in bytes.
pub fn status(field: &str) -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with(field)).ok_or(format!("no {field} in /proc/self/status"))?;
    let kib = line.split_whitespace().nth(1).ok_or("no number")?;
    Ok(kib.parse::<f64>()? * 1024.0)
}
