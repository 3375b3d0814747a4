//! The command line. Everything that can be refused without running is refused here, with the values in the message.

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use fused_attention::{AttentionConfig, AttentionShape, InstructionSet};
use serde::Serialize;

/// Times causal attention over a sweep of sequence lengths, against the FMA peak of the same threads, and checks every
/// shape against the f64 reference.
///
/// Timed is `attention_into` as users call it in a loop: it keeps its workspace per thread, so from the second call on
/// the workspace is warm. Each shape runs once to warm up, then, in turns, attention, the independent FMA chains that
/// measure the peak and (with --compare) the unfused baseline, at least 3 turns each; `seconds` is the best.
///
/// The output is compared with textbook attention in f64: all rows while that is cheap, else rows spread over batch,
/// heads and queries, the first and the last included. An output that is wrong ends the sweep with an error.
#[derive(Debug, Clone, Parser)]
#[command(name = "sweep")]
pub struct Args {
    /// Sequence lengths (queries; keys too unless --kv-len says otherwise)
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "128,512,1024,2048", value_parser = size())]
    pub seq_lens: Vec<usize>,

    /// Features of Q and K
    #[arg(long = "head-dim", value_name = "N,...", value_delimiter = ',', default_value = "64,128", value_parser = size())]
    pub head_dims: Vec<usize>,

    /// Features of V and the output [default: --head-dim]
    #[arg(long, value_name = "N", value_parser = size())]
    pub value_dim: Option<usize>,

    /// Keys of every shape: chunked prefill, the last query sees every key [default: as many as queries]
    #[arg(long, value_name = "N", value_parser = size())]
    pub kv_len: Option<usize>,

    /// Query heads
    #[arg(long, value_name = "N", default_value = "8", value_parser = size())]
    pub heads: usize,

    /// KV heads; must divide --heads [default: --heads]
    #[arg(long, value_name = "N", value_parser = size())]
    pub kv_heads: Option<usize>,

    /// Independent sequences
    #[arg(long, value_name = "N", default_value = "1", value_parser = size())]
    pub batch: usize,

    /// Threads: 1 runs serially on the main thread, N > 1 inside a rayon pool of exactly N threads
    #[arg(long, value_name = "N", default_value = "1", value_parser = size().range(..=1024))]
    pub threads: usize,

    /// Which keys a query sees
    #[arg(long, value_enum, default_value = "causal")]
    pub mask: MaskKind,

    /// avx512, avx2, neon, portable, portable-256 or portable-512 [default: what the library chooses]
    #[arg(long, value_name = "NAME", value_parser = InstructionSet::from_name)]
    pub instruction_set: Option<InstructionSet>,

    /// Order of the tensors in memory
    #[arg(long, value_enum, default_value = "bhsd")]
    pub layout: Layout,

    /// What Q, K and V hold
    #[arg(long, value_enum, default_value = "normal")]
    pub inputs: InputKind,

    /// Also time and check a baseline
    #[arg(long, value_enum)]
    pub compare: Option<Baseline>,

    /// Time spent on repetitions of each shape, all that is measured together
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds, allow_negative_numbers = true)]
    pub repeat_seconds: f64,

    /// Writes the rows as a JSON array to FILE, or with `-` alone to stdout (the table then goes to stderr)
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<String>,

    /// Draws throughput against sequence length, a line for each head_dim, with the measured peak and the baseline
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<String>,
}

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MaskKind {
    /// Those up to its own position, aligned bottom-right
    Causal,
    /// All
    Full,
}

/// Order of a tensor's axes in memory, slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// [batch, heads, seq, head_dim], PyTorch's
    Bhsd,
    /// [batch, seq, heads, head_dim], FlashAttention's
    Bshd,
}

/// What the tensors hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InputKind {
    /// N(0, 1) everywhere
    Normal,
    /// Scores that grow with the key, so that the running maximum rises in every block
    Ascending,
}

/// What to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Baseline {
    /// gemm, softmax with libm's exp over the visible scores, gemm; buffers allocated before, same threads. Its gemm
    /// takes the best instructions of the CPU whatever --instruction-set says
    Unfused,
}

impl Args {
    /// The shapes in the order in which they run.
    pub fn shapes(&self) -> crate::Result<Vec<AttentionShape>> {
        let (num_heads, num_kv_heads) = (self.heads, self.kv_heads.unwrap_or(self.heads));
        if num_heads % num_kv_heads != 0 {
            return Err(format!("--heads {num_heads} cannot be divided among --kv-heads {num_kv_heads}").into());
        }
        let shape = |head_dim, q_len| AttentionShape {
            batch: self.batch,
            num_heads,
            num_kv_heads,
            q_len,
            kv_len: self.kv_len.unwrap_or(q_len),
            head_dim,
            value_dim: self.value_dim.unwrap_or(head_dim),
        };
        Ok(self.head_dims.iter().flat_map(|&dim| self.seq_lens.iter().map(move |&len| shape(dim, len))).collect())
    }

    /// The library's view of these options; the threads are set later.
    pub fn config(&self) -> AttentionConfig {
        let config = match self.mask {
            MaskKind::Causal => AttentionConfig::causal(),
            MaskKind::Full => AttentionConfig::full(),
        };
        match self.instruction_set {
            Some(set) => config.with_instruction_set(set),
            None => config,
        }
    }
}

impl MaskKind {
    /// Keys that query `i` sees: always the first ones.
    pub fn visible_keys(self, shape: &AttentionShape, i: usize) -> usize {
        match self {
            Self::Causal => (i + 1 + shape.kv_len).saturating_sub(shape.q_len).min(shape.kv_len),
            Self::Full => shape.kv_len,
        }
    }

    /// Floating-point operations that the visible scores of all heads take.
    pub fn visible_flops(self, shape: &AttentionShape) -> u64 {
        let scores: usize = (0..shape.q_len).map(|i| self.visible_keys(shape, i)).sum();
        2 * ((shape.head_dim + shape.value_dim) * scores * shape.batch * shape.num_heads) as u64
    }
}

/// Sizes of nothing make no benchmark.
fn size() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        Ok(seconds) => Err(format!("{seconds} is not in 0..=3600")),
        Err(_) => Err("not a number".into()),
    }
}
