//! Which rows a task computes and where they lie, and the block of keys that they meet.
//!
//! A row is (query, head of the group), query-major: row `r` of a KV head is query `r / group_size`, head `kv_head *
//! group_size + r % group_size`. Neighbouring rows see nearly the same keys, and a few queries of a large group still
//! fill the lanes.

use std::ops::Range;

use crate::blocks::Blocks;
use crate::kernels::fetch::FetchRows;
use crate::mask::KeyRanges;
use crate::score_pass::ScorePass;
use crate::workspace::Scratch;
use crate::{Accumulator, AttentionPlan};

/// A task: a block of rows of one (batch, KV head), and the keys that they see: those of one part, see [`KeyRanges`].
#[derive(Clone)]
pub(crate) struct RowBlock {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) rows: usize,
    pub(crate) panel_rows: usize,
    group_size: usize,
    first_row: usize,
    visible: KeyRanges,
    /// The chunk of keys that it computes, and its number.
    chunk_keys: Range<usize>,
    pub(crate) chunk: usize,
    /// The number of its block of rows in the call.
    pub(crate) block: usize,
}

impl RowBlock {
    /// Task `task` of a plan, counted from the heaviest: the last rows of every head come first. `kv_lens` as in the inputs.
    pub(crate) fn new<A: Accumulator>(plan: &AttentionPlan<A>, task: usize, kv_lens: Option<&[usize]>) -> Self {
        let heads = plan.shape.batch * plan.shape.num_kv_heads;
        let Blocks { chunks, chunk_keys, .. } = plan.blocks;
        let (block, chunk) = (task / chunks, task % chunks);
        let (row_block, head) = (plan.blocks.row_blocks - 1 - block / heads, block % heads);
        let first_row = row_block * plan.blocks.task_rows;
        let batch = head / plan.shape.num_kv_heads;
        let visible = match kv_lens {
            Some(kv_lens) => plan.visible.of_sequence(kv_lens[batch], plan.kv_padding),
            None => plan.visible.whole(),
        };
        Self {
            batch,
            kv_head: head % plan.shape.num_kv_heads,
            rows: plan.blocks.task_rows.min(plan.blocks.rows - first_row),
            panel_rows: plan.blocks.panel_rows,
            group_size: plan.shape.group_size(),
            first_row,
            visible,
            chunk_keys: chunk * chunk_keys..(chunk + 1) * chunk_keys,
            chunk,
            block,
        }
    }

    /// Query, and head within the group, of a row of the task.
    #[inline(always)]
    fn split(&self, row: usize) -> (usize, usize) {
        let row = self.first_row + row;
        match self.group_size {
            1 => (row, 0), // two divisions less, 4 to 7 % of a call of 2 to 4 tokens
            group_size => (row / group_size, row % group_size),
        }
    }

    /// Vectors of the panel that begins with this row which hold rows: half of them where the rows that are left fill no more.
    #[inline(always)]
    pub(crate) fn vectors_in_use<const ROW_VECTORS: usize>(&self, first_row: usize) -> usize {
        if fit_in_half(self.rows - first_row, self.panel_rows) { ROW_VECTORS / 2 } else { ROW_VECTORS }
    }

    /// `[batch, head, query]` of a row of the task.
    #[inline(always)]
    pub(crate) fn index(&self, row: usize) -> [usize; 3] {
        let (query, head) = self.split(row);
        [self.batch, self.kv_head * self.group_size + head, query]
    }

    /// The same rows and the other part of the keys that they see, if there are two. (This is the first.)
    pub(crate) fn second_part(&self) -> Option<Self> {
        let visible = self.visible.second_part()?;
        Some(Self { visible, ..self.clone() })
    }

    /// The same rows of a later KV head of the sequence. Where a head has one block of rows.
    pub(crate) fn with_head(&self, head: usize) -> Self {
        Self { kv_head: self.kv_head + head, block: self.block + head, ..self.clone() }
    }

    /// The key at whose position a row of the task stands. Perhaps there is no such key.
    #[inline(always)]
    pub(crate) fn position(&self, row: usize) -> isize {
        self.visible.position(self.split(row).0)
    }

    /// The keys that a row of the task sees. Neither end falls from a row to the next.
    #[inline(always)]
    pub(crate) fn row_keys(&self, row: usize) -> Range<usize> {
        self.visible.range(self.split(row).0)
    }

    /// Whether mask and window show a row of the task any key, in this chunk and part or another.
    #[inline(always)]
    pub(crate) fn row_sees_keys(&self, row: usize) -> bool {
        self.visible.sees_keys(self.split(row).0)
    }

    /// From the first to the last key of the chunk that any row of the task sees.
    #[inline(always)]
    pub(crate) fn keys(&self) -> Range<usize> {
        self.row_keys(0).start.max(self.chunk_keys.start)..self.row_keys(self.rows - 1).end.min(self.chunk_keys.end)
    }
}

/// Whether so many rows have room in the lower half of a panel.
#[inline(always)]
pub(crate) fn fit_in_half(rows: usize, panel_rows: usize) -> bool {
    rows <= panel_rows / 2
}

/// One block of keys for a task, as `prefill` takes it.
pub(crate) struct KeyBlock<'t, 's, A> {
    pub(crate) task: &'t RowBlock,
    pub(crate) first_key: usize,
    pub(crate) keys: usize,
    /// Valid for reading `keys` rows, each of the steps that `head_dim` elements make ([`Factors`](crate::kernels::factors::Factors)), at
    /// `k_stride`.
    pub(crate) k: *const A,
    pub(crate) k_stride: usize,
    /// Valid for reading `keys` rows of `value_dim` elements at `v_stride`.
    pub(crate) v: *const A,
    pub(crate) v_stride: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// What scores are multiplied with, where Q is not.
    pub(crate) score_scale: A,
    /// V of this block, and K of the next one, where the task does not find them in the cache.
    pub(crate) fetch_values: FetchRows,
    pub(crate) fetch_keys: FetchRows,
    /// What happens to scores, if anything.
    pub(crate) pass: Option<&'t dyn ScorePass<A>>,
    pub(crate) scratch: &'t mut Scratch<'s, A>,
}
