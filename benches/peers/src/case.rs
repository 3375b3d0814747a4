//! What is measured: the shapes, and the order in which they run.

use fused_attention::AttentionShape;
use serde::Serialize;

use crate::args::{MaskKind, Mode};
use crate::number::Dtype;
use crate::options::{Options, Part};

/// One call, that every contender makes.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub part: Part,
    pub mode: Mode,
    pub dtype: Dtype,
    pub mask: MaskKind,
    pub shape: AttentionShape,
    pub threads: usize,
}

/// A case as the Python peers are told of it.
#[derive(Debug, Serialize)]
pub struct CaseMessage {
    batch: usize,
    num_heads: usize,
    num_kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    dtype: Dtype,
    causal: bool,
    window: Option<usize>,
    threads: usize,
}

impl Case {
    /// A single query at the end sees every key, as without a mask: peers are called without one then.
    pub fn sees_everything(&self) -> bool {
        self.mask == MaskKind::Full || (self.mask == MaskKind::Causal && self.shape.q_len == 1)
    }

    pub fn window(&self) -> Option<usize> {
        match self.mask {
            MaskKind::Window(keys) => Some(keys),
            _ => None,
        }
    }

    pub fn flops(&self) -> f64 {
        self.mask.visible_flops(&self.shape) as f64
    }

    /// Of K and V, each byte counted once.
    pub fn kv_bytes(&self) -> usize {
        let AttentionShape { batch, num_kv_heads, kv_len, head_dim, value_dim, .. } = self.shape;
        let bytes = match self.dtype {
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 => 4,
            Dtype::F64 => 8,
        };
        batch * num_kv_heads * kv_len * (head_dim + value_dim) * bytes
    }

    pub fn message(&self) -> CaseMessage {
        let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, .. } = self.shape;
        CaseMessage {
            batch,
            num_heads,
            num_kv_heads,
            q_len,
            kv_len,
            head_dim,
            dtype: self.dtype,
            causal: !self.sees_everything(),
            window: self.window(),
            threads: self.threads,
        }
    }

    /// The key of a table or a drawing: cases of one series differ in [`x`](Self::x) alone.
    pub fn series(&self) -> String {
        let AttentionShape { num_heads, num_kv_heads, q_len, head_dim, .. } = self.shape;
        let heads = format!("{num_heads} heads on {num_kv_heads}, head_dim {head_dim}, {}", self.dtype.name());
        let threads = if self.threads == 1 { "1 thread".into() } else { format!("{} threads", self.threads) };
        match self.part {
            Part::Prefill => format!("prefill, {}, {heads}, {threads}", self.mask),
            Part::Decode => format!("decode, 1 query, {heads}, {threads}"),
            Part::Window => format!("windows, {q_len} tokens, {heads}, {threads}"),
            Part::Batch => format!("batches of {q_len} tokens, {}, {heads}, {threads}", self.mask),
            Part::Memory => format!("peak memory, {q_len} tokens, {heads}, {threads}"),
        }
    }

    /// What grows in a series, and its name.
    pub fn x(&self) -> (&'static str, usize) {
        match self.part {
            Part::Prefill | Part::Memory => ("tokens", self.shape.q_len),
            Part::Decode => ("keys", self.shape.kv_len),
            Part::Window => ("window", self.window().unwrap_or(self.shape.kv_len)),
            Part::Batch => ("batch", self.shape.batch),
        }
    }
}

/// All cases of a run, a series behind the other, each from small to large: a peer that grows too slow can be left out
/// before it takes minutes.
pub fn cases(options: &Options) -> Vec<Case> {
    let mut cases = Vec::new();
    for part in options.parts() {
        for dtype in options.dtypes() {
            for head_dim in options.head_dims(part) {
                for threads in options.threads() {
                    for (mask, shape) in shapes(options, part, head_dim) {
                        let mode = if part == Part::Decode { Mode::Decode } else { Mode::Prefill };
                        cases.push(Case { part, mode, dtype, mask, shape, threads });
                    }
                }
            }
        }
    }
    // Windows, batches and memory say the same in every type; they are measured in f32, or in the only one asked for.
    let first = options.dtypes()[0];
    cases.retain(|case| matches!(case.part, Part::Prefill | Part::Decode) || case.dtype == first);
    cases
}

fn shapes(options: &Options, part: Part, head_dim: usize) -> Vec<(MaskKind, AttentionShape)> {
    let quick = options.quick;
    let pick = |all: &[usize], few: &[usize]| if quick { few.to_vec() } else { all.to_vec() };
    let shape = |batch, (num_heads, num_kv_heads), q_len, kv_len| AttentionShape {
        batch,
        num_heads,
        num_kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim: head_dim,
    };
    let prompt = |tokens| shape(1, (options.heads, options.kv_heads.unwrap_or(options.heads)), tokens, tokens);
    match part {
        Part::Prefill => {
            let all: Vec<usize> = (0..=14).map(|exponent| 1 << exponent).collect();
            options.lens_or(pick(&all, &[1, 16, 128])).into_iter().map(|len| (MaskKind::Causal, prompt(len))).collect()
        }
        Part::Decode => options
            .kv_lens_or(pick(&[1024, 2048, 4096, 8192, 16384, 32768, 65536], &[256, 1024]))
            .into_iter()
            .map(|kv_len| (MaskKind::Causal, shape(1, (32, 8), 1, kv_len)))
            .collect(),
        Part::Window => {
            let tokens = if quick { 256 } else { 8192 };
            let windows = pick(&[128, 512, 1024, 2048, 4096], &[32, 128]);
            windows.into_iter().map(|keys| (MaskKind::Window(keys), prompt(tokens))).collect()
        }
        Part::Batch => {
            let batches = pick(&[1, 4, 16, 32], &[1, 4]);
            let tokens = if quick { 32 } else { 128 };
            let of = |mask| batches.iter().map(move |&batch| (mask, shape(batch, (12, 12), tokens, tokens)));
            of(MaskKind::Causal).chain(of(MaskKind::Full)).collect()
        }
        Part::Memory => vec![(MaskKind::Causal, prompt(if quick { 512 } else { 16384 }))],
    }
}
