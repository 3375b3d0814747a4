//! The peers that are Rust crates. Each is called as its documentation says, on tensors in the memory order that it asks for.

mod burn;
mod candle;
mod ours;
mod tract;
mod unfused;

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytemuck::Pod;
use fused_attention::{AttentionShape, Element};

pub use ours::Ours;
pub use unfused::Baseline;

use crate::Result;
use crate::args::Layout;
use crate::case::Case;
use crate::contender::{Call, Contender, Timed};
use crate::number::Number;

/// A number that every peer can be given: as bytes.
pub trait Scalar: Element<Acc = f32> + Number + Pod {}
impl<T: Element<Acc = f32> + Number + Pod> Scalar for T {}

/// What a foreign peer is made of: contiguous bytes in `[batch, heads, tokens, features]`.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    pub case: &'a Case,
    pub q: &'a [u8],
    pub k: &'a [u8],
    pub v: &'a [u8],
}

impl Operands<'_> {
    pub fn q_shape(&self) -> [usize; 4] {
        let AttentionShape { batch, num_heads, q_len, head_dim, .. } = self.case.shape;
        [batch, num_heads, q_len, head_dim]
    }

    pub fn kv_shape(&self) -> [usize; 4] {
        let AttentionShape { batch, num_kv_heads, kv_len, head_dim, .. } = self.case.shape;
        [batch, num_kv_heads, kv_len, head_dim]
    }

    /// For each query, whether a key is hidden from it: for peers that take windows as masks.
    pub fn hidden(&self) -> Vec<bool> {
        let shape = &self.case.shape;
        let rows = (0..shape.q_len).map(|query| self.case.mask.visible_keys(shape, query));
        rows.flat_map(|visible| (0..shape.kv_len).map(move |key| !visible.contains(&key))).collect()
    }
}

/// A prepared and warm peer, or why there is none for this case.
pub type Prepared = std::result::Result<Box<dyn Contender>, String>;
/// A peer that has its inputs, or why it cannot have them.
pub type Loaded = std::result::Result<Box<dyn Call>, String>;

/// A peer of another crate.
pub struct Foreign {
    pub name: &'static str,
    /// Whose version is told.
    pub package: &'static str,
    load: fn(&Operands<'_>) -> Loaded,
}

impl Foreign {
    pub fn load(&self, operands: &Operands<'_>) -> Loaded {
        without_panic(|| (self.load)(operands))
    }

    pub fn prepare(&self, operands: &Operands<'_>) -> Prepared {
        let peer = self.load(operands)?;
        without_panic(|| match Timed::new(peer) {
            Ok(timed) => Ok(Box::new(timed) as Box<dyn Contender>),
            Err(error) => Err(error.to_string()),
        })
    }
}

/// Some report what they do not take by a panic.
fn without_panic<R>(op: impl FnOnce() -> std::result::Result<R, String>) -> std::result::Result<R, String> {
    // What a panic leaves behind is dropped.
    catch_unwind(AssertUnwindSafe(op)).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(format!("panics: {}", message.unwrap_or("without a message")))
    })
}

pub const FOREIGN: [Foreign; 4] = [
    Foreign { name: "candle flash_attn", package: "candle-nn", load: candle::flash_attn },
    Foreign { name: "candle interleaved decode", package: "candle-nn", load: candle::interleaved_decode },
    Foreign { name: "burn attention", package: "burn-flex", load: burn::attention },
    Foreign { name: "tract FlashSdpaOp", package: "tract-transformers", load: tract::flash_sdpa },
];
/// What ours is called, by memory order.
pub fn our_name(layout: Layout) -> &'static str {
    match layout {
        Layout::Bhsd => "fused-attention",
        Layout::Bshd => "fused-attention, token-major",
    }
}

pub const UNFUSED: &str = "unfused (gemm)";

/// The version that was built, from this package's lock file.
pub fn version_of(package: &str) -> String {
    let lock = include_str!("../../Cargo.lock");
    let name = format!("name = \"{package}\"\nversion = \"");
    let version = lock.split_once(&name).and_then(|(_, rest)| rest.split('"').next());
    version.unwrap_or("unknown").to_owned()
}

fn boxed(peer: impl Call + 'static) -> Loaded {
    Ok(Box::new(peer))
}

/// A tensor `[batch, heads, tokens, features]` with the middle axes exchanged.
fn heads_behind_tokens<T: Copy>(data: &[T], [batch, heads, tokens, features]: [usize; 4]) -> Vec<T> {
    let mut exchanged = Vec::with_capacity(data.len());
    for b in 0..batch {
        for token in 0..tokens {
            for head in 0..heads {
                let start = ((b * heads + head) * tokens + token) * features;
                exchanged.extend_from_slice(&data[start..start + features]);
            }
        }
    }
    exchanged
}

/// Bytes of numbers as `f32`, which holds all of them exactly.
fn to_f32<T: Number + Pod>(bytes: &[u8]) -> Result<Vec<f32>> {
    let numbers = bytemuck::try_cast_slice::<u8, T>(bytes).map_err(|error| error.to_string())?;
    Ok(numbers.iter().map(|x| x.to_f64() as f32).collect())
}
