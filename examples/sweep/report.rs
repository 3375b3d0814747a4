//! The rows, as JSON and as a table.

use serde::Serialize;

use crate::args::{Args, Baseline, InputKind, Layout, MaskKind, Mode, Modifiers};
use crate::number::Dtype;

/// Everything that one measurement was made with, and what came out.
#[derive(Debug, Serialize)]
pub struct Row {
    pub mode: Mode,
    pub instruction_set: &'static str,
    pub dtype: Dtype,
    pub kv_dtype: Dtype,
    pub layout: Layout,
    pub inputs: InputKind,
    pub mask: MaskKind,
    #[serde(flatten)]
    pub modifiers: Modifiers,
    /// Packed sequences, of `q_len` tokens in the mean.
    pub varlen: Option<usize>,
    pub batch: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub threads: usize,
    pub compare: Option<Baseline>,
    pub repeat_seconds: f64,
    /// Of one call, the best.
    pub seconds: f64,
    /// `2 * (head_dim + value_dim)` for each visible score of each head.
    pub visible_flops: u64,
    pub gflops: f64,
    /// Of independent multiply-add chains on the same threads.
    pub peak_gflops: f64,
    pub fraction_of_peak: f64,
    /// In decode.
    #[serde(flatten)]
    pub memory: Option<MemoryRow>,
    /// Against the reference in f64, over `verified_rows` rows.
    pub max_abs_error: f64,
    pub verified_rows: usize,
    /// Of all threads together.
    pub workspace_bytes: usize,
    pub unfused_seconds: Option<f64>,
    pub unfused_max_abs_error: Option<f64>,
}

/// What concerns the memory of K and V.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct MemoryRow {
    /// Of K and V, each byte counted once.
    pub kv_bytes: usize,
    pub kv_gbytes_per_second: f64,
    /// Of a streaming read of the same memory on the same threads.
    pub read_gbytes_per_second: f64,
    pub fraction_of_bandwidth: f64,
}

impl Row {
    /// What all rows of a sweep have in common.
    pub fn title(args: &Args, instruction_set: &str) -> String {
        let Args { batch, mode, dtype, threads, .. } = *args;
        let (heads, kv_heads) = args.heads();
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        let name = |option: &dyn std::fmt::Debug| format!("{option:?}").to_lowercase();
        let kv_dtype = match args.kv_dtype() {
            same if same == dtype => String::new(),
            other => format!(" over {}", other.name()),
        };
        let queries = match (mode, args.q_len.unwrap_or(1)) {
            (Mode::Prefill, _) => String::new(),
            (Mode::Decode, 1) => ", 1 query".into(),
            (Mode::Decode, q_len) => format!(", {q_len} queries"),
        };
        format!(
            "{} {}, {}{kv_dtype}, {instruction_set}, batch {batch}, {heads} head{}, {kv_heads} of KV{queries}, {}, {} inputs{}, \
             {threads} thread{}",
            args.mask,
            if mode == Mode::Decode { "decode" } else { "attention" },
            dtype.name(),
            plural(heads),
            name(&args.layout),
            name(&args.inputs),
            modifiers(args),
            plural(threads),
        )
    }

    /// The names of the columns.
    pub fn heading(args: &Args) -> String {
        let mut heading =
            String::from("head_dim  value_dim    q_len   kv_len    time (ms)   GFLOP/s      peak   of peak");
        if args.mode == Mode::Decode {
            heading += "   KV (MiB)   KV GB/s   read GB/s   of read";
        }
        heading += "   max error   rows checked   workspace (KiB)";
        if args.compare == Some(Baseline::Unfused) {
            heading += "   unfused (ms)   unfused/ours   unfused error";
        }
        heading
    }

    /// The line of this row.
    pub fn line(&self) -> String {
        let mut line = format!(
            "{:>8} {:>10} {:>8} {:>8} {:>12.4} {:>9.1} {:>9.1} {:>8.1}%",
            self.head_dim,
            self.value_dim,
            self.q_len,
            self.kv_len,
            1e3 * self.seconds,
            self.gflops,
            self.peak_gflops,
            100.0 * self.fraction_of_peak,
        );
        if let Some(memory) = &self.memory {
            line += &format!(
                " {:>10.1} {:>9.2} {:>11.2} {:>8.1}%",
                memory.kv_bytes as f64 / (1 << 20) as f64,
                memory.kv_gbytes_per_second,
                memory.read_gbytes_per_second,
                100.0 * memory.fraction_of_bandwidth,
            );
        }
        let workspace_kib = self.workspace_bytes as f64 / 1024.0;
        line += &format!(" {:>11.1e} {:>14} {:>17.1}", self.max_abs_error, self.verified_rows, workspace_kib);
        if let Some((seconds, error)) = self.unfused_seconds.zip(self.unfused_max_abs_error) {
            line += &format!(" {:>14.4} {:>14.2} {:>15.1e}", 1e3 * seconds, seconds / self.seconds, error);
        }
        line
    }
}

/// Those given, each behind a comma.
fn modifiers(args: &Args) -> String {
    let Modifiers { softcap, alibi, sinks, bias } = args.modifiers;
    let flag = |is_given: bool, name: &str| is_given.then(|| name.to_owned());
    let given = [
        softcap.map(|softcap| format!("softcap {softcap}")),
        flag(alibi, "ALiBi"),
        flag(sinks, "sinks"),
        flag(bias, "bias"),
        args.varlen.map(|sequences| format!("{sequences} packed sequences of random lengths")),
    ];
    given.into_iter().flatten().map(|name| format!(", {name}")).collect()
}
