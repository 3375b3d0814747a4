//! How a call's rows and keys are cut: panels, blocks, chunks, and which way they are computed.

use crate::AttentionShape;
use crate::kernels::{MAX_DECODE_ROWS, MAX_LANES, TileSizes};

/// Keys of a block, at absolute positions. Per panel they cost one pass over the accumulators (load, rescale, store), so
/// more is better, until the scores of a panel (192 * 16 rows * 4 bytes = 12 KiB on AVX2, 24 KiB on AVX-512) crowd
/// Q and the accumulators out of L1. Decides the bits, so it is one constant.
pub(crate) const KV_BLOCK: usize = 192;

/// The same where few rows meet the keys: what of K and V is in use and what is being fetched share L1. At head_dim 128 in f32 a block of K
/// or of V is 16 KiB. (Blocks of 64 keys were 20 % slower from L3, see benches/results/log.md.)
pub(crate) const DECODE_KV_BLOCK: usize = 32;

/// Keys of a chunk, where few rows meet many keys, so that one head keeps several threads busy. A constant (up to
/// `MOST_CHUNKS` chunks), never a function of the threads, because it decides the bits. At head_dim 128 in f32 a chunk of K and V is
/// 1 MiB, which takes far longer to read than to merge 4 rows of 128.
const DECODE_CHUNK: usize = 1024;
const DECODE_MOST_CHUNKS: usize = 64;

/// The same for the rows of a few panels (speculative decoding, the tail of a prompt): their accumulators are larger.
const PREFILL_CHUNK: usize = 8 * KV_BLOCK;
const PREFILL_MOST_CHUNKS: usize = 16;

/// Most KV heads of decode that a worker takes together.
pub(crate) const MAX_HEADS_TOGETHER: usize = 8;

/// Keys at which there are the most chunks of rows in decode, and in prefill: with a few more, chunks grow and become fewer.
#[cfg(feature = "multi-head")]
pub(crate) const MOST_CHUNKS_KEYS: [usize; 2] =
    [DECODE_MOST_CHUNKS * DECODE_CHUNK, PREFILL_MOST_CHUNKS * PREFILL_CHUNK];

/// Rows of one KV head above which its keys are not split: there are row blocks enough to share.
pub(crate) const MOST_SPLIT_ROWS: usize = 256;

/// Most rows of a task. A block of K and V is read from memory (and packed) once for all of them: at head_dim 128 a
/// key costs 1 KiB of traffic and 512 * 256 / 16 = 8192 FMA cycles, under 1 GB/s.
pub(crate) const MAX_TASK_ROWS: usize = 512;

/// Q panels and accumulators of a task stay below this: half of the 2 MiB that a thread may use.
pub(crate) const MAX_ROW_BYTES: usize = 1 << 20;

/// Which way rows are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// A row per lane.
    Prefill,
    /// `head_dim` in the lanes: for so few rows that the lanes would stay empty.
    Decode,
}

/// How rows and keys are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) path: Path,
    /// Rows of one (batch, KV head): `q_len * group_size`.
    pub(crate) rows: usize,
    pub(crate) panel_rows: usize,
    /// Rows of a task, a multiple of `panel_rows`.
    pub(crate) task_rows: usize,
    /// Blocks of rows of one (batch, KV head).
    pub(crate) row_blocks: usize,
    pub(crate) kv_block: usize,
    /// Keys of a chunk, a multiple of `kv_block` unless there is only one.
    pub(crate) chunk_keys: usize,
    /// Chunks of keys, each a task of its own.
    pub(crate) chunks: usize,
    /// KV heads of a sequence whose tasks a worker takes together where memory is token-major; 1 in prefill, and where a head has
    /// several blocks of rows. Decides no bits.
    pub(crate) heads_together: usize,
}

impl Blocks {
    /// `tasks_wanted`: in prefill, cut into at least as many tasks while each keeps a panel; decides no bits. In decode heads are taken
    /// together while each of the `threads` keeps a task.
    pub(crate) fn new<A>(
        shape: &AttentionShape,
        tiles: TileSizes,
        threads: usize,
        tasks_wanted: usize,
    ) -> Option<Self> {
        let rows = shape.q_len.checked_mul(shape.group_size())?;
        let path = if rows <= MAX_DECODE_ROWS { Path::Decode } else { Path::Prefill };
        let panel_rows = if path == Path::Decode { 1 } else { tiles.panel_rows() };
        let panels = rows.div_ceil(panel_rows);
        let heads = shape.batch.checked_mul(shape.num_kv_heads)?;
        let row_bytes = shape.head_dim.checked_add(shape.value_dim)?.checked_mul(size_of::<A>())?;
        let (largest_block, chunk, most_chunks) = match path {
            Path::Decode => (DECODE_KV_BLOCK, DECODE_CHUNK, DECODE_MOST_CHUNKS),
            Path::Prefill if rows <= MOST_SPLIT_ROWS => (KV_BLOCK, PREFILL_CHUNK, PREFILL_MOST_CHUNKS),
            Path::Prefill => (KV_BLOCK, KV_BLOCK, 1),
        };
        // Decode reads whole vectors of scores.
        let kv_block = largest_block.min(shape.kv_len.max(1).checked_next_multiple_of(MAX_LANES)?);
        let chunk_keys = shape.kv_len.div_ceil(most_chunks).checked_next_multiple_of(kv_block)?.max(chunk);
        let chunks = shape.kv_len.div_ceil(chunk_keys).max(1);
        let most_rows = MAX_TASK_ROWS.min(MAX_ROW_BYTES / row_bytes);
        // Fewer rows where the heads alone do not give every thread its tasks. Rows of prefill are independent of one
        // another, so this may depend on the thread count without changing a bit. Those of decode share their tiles.
        let blocks_wanted = match path {
            Path::Prefill => tasks_wanted.div_ceil(heads.saturating_mul(chunks).max(1)),
            Path::Decode => 1,
        };
        let most_panels = (most_rows / panel_rows).clamp(1, panels.div_ceil(blocks_wanted).max(1));
        let row_blocks = panels.div_ceil(most_panels);
        // Even blocks: 9 panels as 5 + 4, not 8 + 1.
        let task_panels = panels.div_ceil(row_blocks.max(1));
        let tasks = row_blocks.checked_mul(heads)?.checked_mul(chunks)?;
        let heads_together = match path {
            // Rows so long that a head has several blocks of them are long enough to be read in order.
            Path::Decode if row_blocks == 1 => {
                (tasks / threads).clamp(1, MAX_HEADS_TOGETHER).min(shape.num_kv_heads.max(1))
            }
            _ => 1,
        };
        let task_rows = task_panels * panel_rows;
        Some(Self { path, rows, panel_rows, task_rows, row_blocks, kv_block, chunk_keys, chunks, heads_together })
    }

    /// Elements from a row of scores to the next in decode: room for whole vectors behind a block's last key.
    pub(crate) fn scores_stride(&self) -> usize {
        self.kv_block + MAX_LANES
    }
}
