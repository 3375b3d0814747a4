//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::case::Case;
use crate::number::Dtype;

/// Measures fused-attention beside what one could use instead, on this machine, in one interleaved run, and writes
/// `<cpu>-<date>.json`, `.md` and `.svg`.
///
/// Every contender gets the same numbers in the memory order that it asks for, the same threads, a call to warm up, and then turns of some
/// milliseconds, round after round, together with independent FMA chains (the peak) and, in decode, a streaming read of the same K and V.
/// `seconds` is the best. Outputs are compared with attention in f64; what is wrong is named and not quoted.
#[derive(Debug, Clone, Parser)]
#[command(name = "peers", version = None)]
pub struct Options {
    /// Short lengths and few repetitions: shows that everything runs, measures nothing worth keeping
    #[arg(long)]
    pub quick: bool,

    /// A Python that has torch, onnxruntime with onnx, openvino or some of them [default: Rust peers only]
    #[arg(long, value_name = "PYTHON")]
    pub python: Option<String>,

    /// What to measure [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,...")]
    part: Vec<Part>,

    /// What the tensors hold [default: f32,f16,bf16]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "DTYPE,...")]
    dtype: Vec<Dtype>,

    /// Thread counts [default: 1 and all]
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,

    /// Features of a head [default: 64,128; decode, windows and memory: 128; batches: 64]
    #[arg(long = "head-dim", value_delimiter = ',', value_name = "N,...")]
    head_dims: Vec<usize>,

    /// Prefill: tokens [default: 1,2,4..16384]
    #[arg(long, value_delimiter = ',', value_name = "N,...")]
    seq_lens: Vec<usize>,

    /// Decode: keys [default: 1024,2048..65536]
    #[arg(long, value_delimiter = ',', value_name = "N,...")]
    kv_lens: Vec<usize>,

    /// Heads of prompts
    #[arg(long, default_value = "8", value_name = "N")]
    pub heads: usize,

    /// KV heads of prompts [default: --heads]
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<usize>,

    /// Only peers whose name contains one of these, ignoring case; ours always runs
    #[arg(long, value_delimiter = ',', value_name = "TEXT,...")]
    pub peers: Vec<String>,

    /// Time for each case, all contenders together; everyone gets three turns however long they take [default: 1; --quick: 0]
    #[arg(long, value_name = "SECONDS")]
    repeat_seconds: Option<f64>,

    /// A peer whose call must be expected to take longer, judging by the next smaller case, is left out, and said so
    #[arg(long, default_value = "20", value_name = "SECONDS")]
    pub call_limit: f64,

    /// Where the results go [default: benches/results of the repository; --quick: nowhere]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// The name of this CPU in the results [default: what the system calls it]
    #[arg(long, value_name = "NAME")]
    pub cpu: Option<String>,

    /// Also writes the rows, as a JSON array, to FILE, or with `-` to stdout
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<String>,

    /// Internal: measures the memory of one peer in this process
    #[arg(long, hide = true, value_name = "PEER")]
    pub memory_of: Option<String>,
}

/// A part of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Causal prompts of growing length
    Prefill,
    /// One query of 32 heads on 8 KV heads against caches of growing length
    Decode,
    /// Sliding windows of growing size over a long prompt
    Window,
    /// Batches of short prompts with 12 heads
    Batch,
    /// What a call adds to the memory of its process, at its highest
    Memory,
}

impl Options {
    pub fn check(&self) -> crate::Result<()> {
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        let sizes = [&self.head_dims, &self.seq_lens, &self.kv_lens];
        if self.heads == 0 || kv_heads == 0 || sizes.into_iter().flatten().any(|&size| size == 0) {
            return Err("sizes of 0 make no benchmark".into());
        }
        if !self.heads.is_multiple_of(kv_heads) {
            return Err(format!("--heads {} cannot be divided among --kv-heads {kv_heads}", self.heads).into());
        }
        let seconds = [self.repeat_seconds(), self.call_limit];
        if seconds.iter().any(|seconds| !(0.0..=1e6).contains(seconds)) {
            return Err("--repeat-seconds and --call-limit are seconds, 0 or more".into());
        }
        if self.dtypes().contains(&Dtype::F64) {
            return Err("--dtype f64: the reference computes in f64, and few peers do at all".into());
        }
        Ok(())
    }

    pub fn parts(&self) -> Vec<Part> {
        if self.part.is_empty() { Part::value_variants().to_vec() } else { sorted(&self.part) }
    }

    pub fn dtypes(&self) -> Vec<Dtype> {
        if self.dtype.is_empty() { vec![Dtype::F32, Dtype::F16, Dtype::Bf16] } else { self.dtype.clone() }
    }

    pub fn threads(&self) -> Vec<usize> {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let given = self.threads.iter().map(|&threads| usize::from(threads)).collect::<Vec<_>>();
        sorted(if given.is_empty() { vec![1, all] } else { given }.as_slice())
    }

    pub fn head_dims(&self, part: Part) -> Vec<usize> {
        match part {
            _ if !self.head_dims.is_empty() => self.head_dims.clone(),
            Part::Prefill if self.quick => vec![64],
            Part::Prefill => vec![64, 128],
            Part::Batch => vec![64],
            _ => vec![128],
        }
    }

    pub fn lens_or(&self, default: Vec<usize>) -> Vec<usize> {
        if self.seq_lens.is_empty() { default } else { sorted(&self.seq_lens) }
    }

    pub fn kv_lens_or(&self, default: Vec<usize>) -> Vec<usize> {
        if self.kv_lens.is_empty() { default } else { sorted(&self.kv_lens) }
    }

    pub fn repeat_seconds(&self) -> f64 {
        self.repeat_seconds.unwrap_or(if self.quick { 0.0 } else { 1.0 })
    }

    pub fn wants(&self, peer: &str) -> bool {
        let peer = peer.to_lowercase();
        self.peers.is_empty() || self.peers.iter().any(|part| peer.contains(&part.to_lowercase()))
    }

    /// How a process of its own is told to measure the memory of one peer.
    pub fn memory_arguments(&self, peer: &str, case: &Case) -> Vec<String> {
        let shape = &case.shape;
        let mut arguments: Vec<String> = vec![
            "--memory-of".into(),
            peer.into(),
            "--part=memory".into(),
            format!("--threads={}", case.threads),
            format!("--dtype={}", case.dtype.name()),
            format!("--heads={}", shape.num_heads),
            format!("--kv-heads={}", shape.num_kv_heads),
            format!("--head-dim={}", shape.head_dim),
        ];
        if self.quick {
            arguments.push("--quick".into());
        }
        arguments
    }
}

fn sorted<T: Copy + Ord>(items: &[T]) -> Vec<T> {
    let mut items = items.to_vec();
    items.sort_unstable();
    items.dedup();
    items
}
