//! What goes wrong on purpose, on the last rank, while the others compute.

use std::process::Command;
use std::time::Duration;

use clap::ValueEnum;
use fused_attention::{AttentionConfig, Parallelism};
use ring_attention::{Ring, RingPlan, RingShape, Share, Shares};

use crate::Result;
use crate::inputs::Tensors;

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// None: what would be computed takes its time and ends well.
    None,
    /// K lacks an element.
    Shape,
    /// It panics.
    Panic,
    /// It ends as if all were well, without a word to MPI.
    Exit,
    /// It is killed.
    Kill,
    /// It is stopped: alive, and silent.
    Stop,
}

pub fn run(ring: &Ring, kind: Kind) -> Result<()> {
    let shape = RingShape { batch: 1, num_heads: 8, num_kv_heads: 8, head_dim: 64, value_dim: 64 };
    let shares = Shares::zig_zag(16384, ring.ranks());
    let config = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
    let mut own = Tensors::<f32>::of_rank(&shape, &shares, ring.rank());
    let (mut out, mut logsumexp) = (vec![0.0; own.q.len()], vec![0.0; own.q.len() / shape.head_dim]);
    let mut plan = RingPlan::new(ring, &shape, &shares, &config, 1024)?;
    if ring.rank() + 1 == ring.ranks() {
        match kind {
            Kind::None => {}
            Kind::Shape => own.k.truncate(own.k.len() - 1),
            // In the middle of the ring: the call takes some hundred milliseconds.
            _ => drop(std::thread::spawn(move || fail(kind))),
        }
    }
    let report = plan.run(ring, &Share { q: &own.q, k: &own.k, v: &own.v }, &mut out, &mut logsumexp)?;
    println!("rank {}: done, {:?}", ring.rank(), report);
    Ok(())
}

fn fail(kind: Kind) {
    std::thread::sleep(Duration::from_millis(100));
    let signal = |name: &str| Command::new("kill").args([name, &std::process::id().to_string()]).status();
    match kind {
        Kind::None | Kind::Shape => {}
        Kind::Panic => panic!("on purpose"),
        Kind::Exit => std::process::exit(0),
        Kind::Kill => drop(signal("-KILL")),
        Kind::Stop => drop(signal("-STOP")),
    }
}
