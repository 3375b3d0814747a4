//! The ring on paper: what a layer takes on many nodes.
//!
//! ```text
//! share    = T / n                                    positions of a node
//! block    = min(block_keys, share)                   keys of a block, of one KV head
//! own      = heads * share^2 / 2 * pair / cores       pairs of a row and a key in a node's own triangle
//! compute  = group * (share * block / 2 * pair + share * row) / cores
//! message  = block * (d + d) * bytes / bandwidth + 4 * latency
//! layer    = own + kv_heads * ceil(share / block) * (n - 1) * max(compute, message)
//! ideal    = heads * T^2 / 2 * pair / cores / n
//! ```
//! Zig-zag shares: of every block that visits, half of the pairs are visible, the same on every node. A block travels while the one
//! before is computed, so the longer of the two counts. Communication hides while
//!
//! ```text
//! share * group >= 4 * d * bytes / (pair / cores * bandwidth)
//! ```
//! which contains neither T nor the size of a block: only how many queries a node has for each byte that passes.
//!
//! What it leaves out: ranks that are late for other reasons, a network that is shared with others, memory bandwidth. It takes cores to be
//! worth what the one that was measured is.

use std::path::PathBuf;

use crate::{Result, plot};

/// What to model.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What `constants` printed.
    #[arg(long)]
    constants: PathBuf,
    /// Cores of a node.
    #[arg(long, default_value_t = 64)]
    cores: usize,
    /// Query heads.
    #[arg(long, default_value_t = 32)]
    heads: usize,
    /// KV heads.
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,
    /// Bytes of an element of K and V: 2 for bf16, 4 for f32.
    #[arg(long, default_value_t = 2)]
    bytes: usize,
    /// Keys of a block.
    #[arg(long, default_value_t = ring_attention::DEFAULT_BLOCK_KEYS)]
    block_keys: usize,
    /// Microseconds that a message takes on its way, in place of the measured ones.
    #[arg(long)]
    latency_us: Option<f64>,
    /// Lengths of the sequences.
    #[arg(long, value_delimiter = ',', default_values_t = SEQ_LENS)]
    seq_lens: Vec<usize>,
    /// Draw the efficiency to this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// Unless told otherwise.
const SEQ_LENS: [usize; 4] = [1 << 17, 1 << 20, 1 << 22, 1 << 24];
/// Nodes, by powers of two.
const MOST_DOUBLINGS: u32 = 10;
const GBITS: [f64; 2] = [10.0, 100.0];
const HEAD_DIM: f64 = 128.0;

/// Seconds, as `constants` measures them.
#[derive(Debug, Clone, Copy)]
struct Constants {
    pair: f64,
    row: f64,
    latency: f64,
}

/// What the model says of one case.
#[derive(Debug, Clone, Copy)]
pub struct Modelled {
    pub nodes: usize,
    pub seconds: f64,
    pub efficiency: f64,
    /// Whether the network is waited for.
    pub is_network_bound: bool,
}

/// A line of the plot, and of the tables.
pub struct Series {
    pub seq_len: usize,
    pub gbits: f64,
    pub points: Vec<Modelled>,
}

pub fn run(args: &Args) -> Result<()> {
    let text = std::fs::read_to_string(&args.constants)?;
    let constant = |name: &str| -> Result<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.ok_or(format!("no {name} in {}", args.constants.display()))?.trim().parse()?)
    };
    let latency = args.latency_us.map_or_else(|| constant("latency"), |us| Ok(us * 1e-6))?;
    let pair = constant(if args.bytes == 2 { "pair_bf16" } else { "pair_f32" })?;
    let constants = Constants { pair, row: constant("row")?, latency };
    let mut all = Vec::new();
    for gbits in GBITS {
        for &seq_len in &args.seq_lens {
            let points = (0..=MOST_DOUBLINGS).map(|i| model(args, &constants, seq_len, 1 << i, gbits)).collect();
            all.push(Series { seq_len, gbits, points });
        }
    }
    let rate = 4.0 * HEAD_DIM / pair * args.cores as f64 / 1e9;
    println!(
        "{} query heads on {} KV heads of {HEAD_DIM}, causal, K and V of {} bytes, {} cores a node ({rate:.0} GFLOP/s), {:.1} us a message\n",
        args.heads,
        args.kv_heads,
        args.bytes,
        args.cores,
        latency * 1e6
    );
    for series in &all {
        table(series);
    }
    println!("\nCommunication hides while a node has at least this many positions:");
    for gbits in GBITS {
        let hides = hiding_share(args, &constants, gbits);
        println!(
            "- {gbits} Gbit/s: {hides:.0}, which T = {} has on up to {:.0} nodes",
            named(1 << 20),
            (1 << 20) as f64 / hides
        );
    }
    if let Some(path) = &args.plot {
        let title = format!(
            "Ring attention on paper: {} heads on {} KV heads of {HEAD_DIM}, {} cores a node",
            args.heads, args.kv_heads, args.cores
        );
        std::fs::write(path, plot::svg(&title, &all)?)?;
    }
    Ok(())
}

fn model(args: &Args, constants: &Constants, seq_len: usize, nodes: usize, gbits: f64) -> Modelled {
    let Constants { pair, row, .. } = *constants;
    let (cores, heads, kv_heads) = (args.cores as f64, args.heads as f64, args.kv_heads as f64);
    let share = seq_len as f64 / nodes as f64;
    let block = share.min(args.block_keys as f64);
    let own = heads * share * share / 2.0 * pair / cores;
    let group = heads / kv_heads;
    let compute = group * (share * block / 2.0 * pair + share * row) / cores;
    let message = message(args, constants, block, gbits);
    let visits = kv_heads * (share / block).ceil() * (nodes - 1) as f64;
    let seconds = own + visits * compute.max(message);
    let ideal = heads * (seq_len as f64).powi(2) / 2.0 * pair / cores / nodes as f64;
    Modelled { nodes, seconds, efficiency: ideal / seconds, is_network_bound: nodes > 1 && message > compute }
}

/// Seconds for a block to go on to the next node.
fn message(args: &Args, constants: &Constants, block: f64, gbits: f64) -> f64 {
    block * 2.0 * HEAD_DIM * args.bytes as f64 / (gbits * 1e9 / 8.0) + 4.0 * constants.latency
}

/// The least share for which a block is computed for as long as it travels, merging and latency apart.
fn hiding_share(args: &Args, constants: &Constants, gbits: f64) -> f64 {
    let group = args.heads as f64 / args.kv_heads as f64;
    4.0 * HEAD_DIM * args.bytes as f64 / (gbits * 1e9 / 8.0) / (constants.pair / args.cores as f64 * group)
}

fn table(series: &Series) {
    println!("T = {}, {} Gbit/s (*: waits for the network)\n", named(series.seq_len), series.gbits);
    let row = |name: &str, cell: &dyn Fn(&Modelled) -> String| {
        println!("| {name} | {} |", series.points.iter().map(cell).collect::<Vec<_>>().join(" | "));
    };
    row("nodes", &|point| point.nodes.to_string());
    row("---", &|_| "---".to_owned());
    row("seconds a layer", &|point| format!("{:.3}", point.seconds));
    let star = |point: &Modelled| if point.is_network_bound { "*" } else { "" };
    row("efficiency", &|point| format!("{:.2}{}", point.efficiency, star(point)));
    println!();
}

/// 128 Ki, 1 Mi.
pub fn named(len: usize) -> String {
    if len >= 1 << 20 { format!("{} Mi", len >> 20) } else { format!("{} Ki", len >> 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        let (constants, latency_us, seq_lens, plot) = (PathBuf::new(), None, Vec::new(), None);
        Args { constants, cores: 1, heads: 8, kv_heads: 8, bytes: 4, block_keys: 4096, latency_us, seq_lens, plot }
    }

    const CONSTANTS: Constants = Constants { pair: 2e-9, row: 0.0, latency: 0.0 };

    #[test]
    fn where_communication_hides_there_is_no_loss() {
        for nodes in [1, 2, 4, 16] {
            let modelled = model(&args(), &CONSTANTS, 1 << 20, nodes, 1e9);
            assert!((modelled.efficiency - 1.0).abs() < 1e-9, "{modelled:?}");
        }
    }

    #[test]
    fn the_network_is_waited_for_from_the_hiding_share_on() {
        let gbits = 10.0;
        let hides = hiding_share(&args(), &CONSTANTS, gbits);
        let nodes = 16;
        for (part, is_network_bound) in [(0.99, true), (1.01, false)] {
            let modelled = model(&args(), &CONSTANTS, (hides * part * nodes as f64) as usize, nodes, gbits);
            assert_eq!(modelled.is_network_bound, is_network_bound);
        }
    }
}
