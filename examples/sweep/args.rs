//! The command line. Everything that can be refused without running is refused here, with the values in the message.

use std::fmt;
use std::ops::Range;

use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use fused_attention::{AttentionConfig, AttentionShape, InstructionSet};
use serde::{Serialize, Serializer};

use crate::number::Dtype;

/// Times attention over a sweep of sequence lengths, against what the same threads can do at most, and checks every shape
/// against the f64 reference.
///
/// `--mode prefill` takes prompts of growing length and measures against the FMA peak of the type that is accumulated
/// in. `--mode decode` takes a few queries against caches of growing length and measures against the read bandwidth too:
/// a streaming SIMD read of the very same K and V, which lie on huge pages where the system offers them (Linux), as a KV
/// cache does. Both are repeated over the same K and V, so that small caches are read from the CPU's own.
///
/// Timed is `attention_into` as users call it in a loop: it keeps its workspace per thread, so from the second call on
/// the workspace is warm. Each shape runs once to warm up, then, in turns, attention, the independent FMA chains that
/// measure the peak, (in decode) the read and (with --compare) the unfused baseline, at least 3 turns each; `seconds` is
/// the best.
///
/// Inputs are computed in f64 and rounded to their type. The output is compared with textbook attention in f64: all rows while that is cheap, else rows spread over batch,
/// heads and queries, the first and the last included. Half a ULP of the output type is allowed beyond the bound of the accumulator. An output
/// that is wrong ends the sweep with an error.
#[derive(Debug, Clone, Parser)]
#[command(name = "sweep")]
pub struct Args {
    /// Many queries, or a few against a cache
    #[arg(long, value_enum, default_value = "prefill")]
    pub mode: Mode,

    /// Prefill: sequence lengths (queries; keys too unless --kv-len says otherwise) [default: 128,512,1024,2048]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = size())]
    pub seq_lens: Vec<usize>,

    /// Prefill: keys of every shape: chunked prefill, the last query sees every key [default: as many as queries]
    #[arg(long, value_name = "N", value_parser = size())]
    pub kv_len: Option<usize>,

    /// Decode: keys in the cache [default: 1024,4096,16384,65536]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = size())]
    pub kv_lens: Vec<usize>,

    /// Decode: queries; with --mask causal they are the last tokens of the cache [default: 1]
    #[arg(long, value_name = "N", value_parser = size())]
    pub q_len: Option<usize>,

    /// Features of Q and K [default: 64,128; decode: 128]
    #[arg(long = "head-dim", value_name = "N,...", value_delimiter = ',', value_parser = size())]
    pub head_dims: Vec<usize>,

    /// Features of V and the output [default: --head-dim]
    #[arg(long, value_name = "N", value_parser = size())]
    pub value_dim: Option<usize>,

    /// Query heads [default: 8; decode: 32]
    #[arg(long, value_name = "N", value_parser = size())]
    pub heads: Option<usize>,

    /// KV heads; must divide --heads [default: --heads; decode without --heads: 8]
    #[arg(long, value_name = "N", value_parser = size())]
    pub kv_heads: Option<usize>,

    /// What Q and the output hold
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: Dtype,

    /// What K and V hold: f16, bf16 and f32 go together, f64 goes with itself [default: --dtype]
    #[arg(long, value_enum)]
    pub kv_dtype: Option<Dtype>,

    /// Independent sequences
    #[arg(long, value_name = "N", default_value = "1", value_parser = size())]
    pub batch: usize,

    /// Threads: 1 runs serially on the main thread, N > 1 inside a rayon pool of exactly N threads
    #[arg(long, value_name = "N", default_value = "1", value_parser = size().range(..=1024))]
    pub threads: usize,

    /// causal, full, window:W (causal, the last W keys, the query's own included) or prefix:N (causal, but every query sees
    /// the first N keys). Causal masks are aligned bottom-right
    #[arg(long, value_name = "MASK", value_parser = MaskKind::from_name, default_value = "causal")]
    pub mask: MaskKind,

    #[command(flatten)]
    pub modifiers: Modifiers,

    /// Prefill: N sequences packed into one tensor, of random lengths from 1 to 2 * --seq-lens - 1 tokens (the same in every
    /// run) whose mean is --seq-lens
    #[arg(long, value_name = "N", value_parser = size())]
    pub varlen: Option<usize>,

    /// avx512-bf16, avx512, avx2, neon, portable, portable-256 or portable-512 [default: what the library chooses]
    #[arg(long, value_name = "NAME", value_parser = InstructionSet::from_name)]
    pub instruction_set: Option<InstructionSet>,

    /// Order of the tensors in memory
    #[arg(long, value_enum, default_value = "bhsd")]
    pub layout: Layout,

    /// The numbers in Q, K and V
    #[arg(long, value_enum, default_value = "normal")]
    pub inputs: InputKind,

    /// Also time and check a baseline (f32 only, masks but no --softcap, --alibi, --sinks, --bias or --varlen)
    #[arg(long, value_enum)]
    pub compare: Option<Baseline>,

    /// Time spent on repetitions of each shape, all that is measured together
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds, allow_negative_numbers = true)]
    pub repeat_seconds: f64,

    /// Writes the rows as a JSON array to FILE, or with `-` alone to stdout (the table then goes to stderr)
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<String>,

    /// Draws throughput against sequence length, a line for each head_dim, with the measured peak (decode: bandwidth) and
    /// the baseline
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<String>,
}

/// What a shape is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Prompts: many queries
    Prefill,
    /// Generation: a few queries against a cache of keys
    Decode,
}

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskKind {
    /// Those up to its own position, aligned bottom-right
    Causal,
    /// All
    Full,
    /// As causal, the last so many
    Window(usize),
    /// As causal, and the first so many always
    Prefix(usize),
}

/// What else happens to the scores.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args, Serialize)]
pub struct Modifiers {
    /// Bounds the scores: C * tanh(score / C)
    #[arg(long, value_name = "C", value_parser = softcap, allow_negative_numbers = true)]
    pub softcap: Option<f64>,

    /// ALiBi with the standard slopes
    #[arg(long)]
    pub alibi: bool,

    /// An attention sink for each head
    #[arg(long)]
    pub sinks: bool,

    /// An additive bias [1, 1, queries, keys] of --dtype, normal, the same for all heads and batch entries
    #[arg(long)]
    pub bias: bool,
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
        self.check_mode()?;
        self.check_combination()?;
        let (num_heads, num_kv_heads) = self.heads();
        if num_heads % num_kv_heads != 0 {
            return Err(format!("--heads {num_heads} cannot be divided among --kv-heads {num_kv_heads}").into());
        }
        let or_default = |given: &[usize], default: &[usize]| if given.is_empty() { default } else { given }.to_vec();
        let lens: Vec<(usize, usize)> = match self.mode {
            Mode::Prefill => or_default(&self.seq_lens, &[128, 512, 1024, 2048])
                .into_iter()
                .map(|len| (len, self.kv_len.unwrap_or(len)))
                .collect(),
            Mode::Decode => or_default(&self.kv_lens, &[1024, 4096, 16384, 65536])
                .into_iter()
                .map(|kv_len| (self.q_len.unwrap_or(1), kv_len))
                .collect(),
        };
        let head_dims = or_default(&self.head_dims, if self.mode == Mode::Decode { &[128] } else { &[64, 128] });
        let shape = |head_dim, (q_len, kv_len)| AttentionShape {
            batch: self.batch,
            num_heads,
            num_kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim: self.value_dim.unwrap_or(head_dim),
        };
        Ok(head_dims.iter().flat_map(|&dim| lens.iter().map(move |&lens| shape(dim, lens))).collect())
    }

    /// Query heads and KV heads.
    pub fn heads(&self) -> (usize, usize) {
        match (self.mode, self.heads, self.kv_heads) {
            (Mode::Decode, None, kv_heads) => (32, kv_heads.unwrap_or(8)),
            (_, heads, kv_heads) => (heads.unwrap_or(8), kv_heads.or(heads).unwrap_or(8)),
        }
    }

    /// What K and V hold.
    pub fn kv_dtype(&self) -> Dtype {
        self.kv_dtype.unwrap_or(self.dtype)
    }

    /// Refuses options that the mode would ignore.
    fn check_mode(&self) -> crate::Result<()> {
        let (other, given) = match self.mode {
            Mode::Prefill => ("decode", [("--kv-lens", !self.kv_lens.is_empty()), ("--q-len", self.q_len.is_some())]),
            Mode::Decode => {
                ("prefill", [("--seq-lens", !self.seq_lens.is_empty()), ("--kv-len", self.kv_len.is_some())])
            }
        };
        match given.into_iter().find(|option| option.1) {
            Some((option, _)) => Err(format!("{option} goes with --mode {other}").into()),
            None => Ok(()),
        }
    }

    /// Refuses options that say nothing together.
    fn check_combination(&self) -> crate::Result<()> {
        let Modifiers { softcap, alibi, sinks, bias } = self.modifiers;
        let given = [
            ("--mode decode", self.mode == Mode::Decode),
            ("--kv-len", self.kv_len.is_some()),
            ("--batch above 1", self.batch > 1),
            ("--bias", bias),
        ];
        if let (true, Some((option, _))) = (self.varlen.is_some(), given.into_iter().find(|option| option.1)) {
            return Err(format!(
                "--varlen does not go with {option}: packed sequences are prompts of their own lengths, in a batch of 1 \
                 without a bias"
            )
            .into());
        }
        let given = [
            ("--softcap", softcap.is_some()),
            ("--alibi", alibi),
            ("--sinks", sinks),
            ("--bias", bias),
            ("--varlen", self.varlen.is_some()),
        ];
        match (self.compare, given.into_iter().find(|option| option.1)) {
            (Some(Baseline::Unfused), Some((option, _))) => {
                Err(format!("--compare unfused knows masks only, it does not go with {option}").into())
            }
            _ => Ok(()),
        }
    }

    /// The library's view of these options; the threads are set later.
    pub fn config(&self) -> AttentionConfig {
        let config = self.mask.config();
        let config = match self.modifiers.softcap {
            Some(softcap) => config.with_softcap(softcap),
            None => config,
        };
        match self.instruction_set {
            Some(set) => config.with_instruction_set(set),
            None => config,
        }
    }
}

impl MaskKind {
    /// A call with this mask and nothing else.
    pub fn config(self) -> AttentionConfig {
        match self {
            Self::Causal => AttentionConfig::causal(),
            Self::Full => AttentionConfig::full(),
            Self::Window(keys) => AttentionConfig::sliding_window(keys),
            Self::Prefix(keys) => AttentionConfig::causal().with_prefix_len(keys),
        }
    }

    /// `window:W` and `prefix:N` exactly as they are printed, so that rows echo what was asked.
    fn from_name(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok();
        let mask = match text.split_once(':') {
            None if text == "causal" => Some(Self::Causal),
            None if text == "full" => Some(Self::Full),
            Some(("window", keys)) => number(keys).filter(|&keys| keys > 0).map(Self::Window),
            Some(("prefix", keys)) => number(keys).map(Self::Prefix),
            _ => None,
        };
        mask.filter(|mask| mask.to_string() == text)
            .ok_or_else(|| "not causal, full, window:W (W at least 1) or prefix:N, in plain digits".into())
    }

    /// Keys that query `i` sees: the mask makes one range of them.
    pub fn visible_keys(self, shape: &AttentionShape, i: usize) -> Range<usize> {
        let causal_end = (i + 1 + shape.kv_len).saturating_sub(shape.q_len).min(shape.kv_len);
        match self {
            Self::Causal => 0..causal_end,
            Self::Full => 0..shape.kv_len,
            Self::Window(keys) => causal_end.saturating_sub(keys)..causal_end,
            Self::Prefix(keys) => 0..causal_end.max(keys.min(shape.kv_len)),
        }
    }

    /// Floating-point operations that the visible scores of all heads take.
    pub fn visible_flops(self, shape: &AttentionShape) -> u64 {
        let scores: usize = (0..shape.q_len).map(|i| self.visible_keys(shape, i).len()).sum();
        2 * ((shape.head_dim + shape.value_dim) * scores * shape.batch * shape.num_heads) as u64
    }
}

impl fmt::Display for MaskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Causal => write!(f, "causal"),
            Self::Full => write!(f, "full"),
            Self::Window(keys) => write!(f, "window:{keys}"),
            Self::Prefix(keys) => write!(f, "prefix:{keys}"),
        }
    }
}

impl Serialize for MaskKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Sizes of nothing make no benchmark.
fn size() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

fn softcap(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(softcap) if softcap > 0.0 && f64::is_finite(softcap) => Ok(softcap),
        Ok(softcap) => Err(format!("{softcap} is not above 0 and finite")),
        Err(_) => Err("not a number".into()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        Ok(seconds) => Err(format!("{seconds} is not in 0..=3600")),
        Err(_) => Err("not a number".into()),
    }
}
