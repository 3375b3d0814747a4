//! Which rows a task computes, and where they lie.
//!
//! A row is (query, head of the group), query-major: row `r` of a KV head is query `r / group_size`, head `kv_head *
//! group_size + r % group_size`. Neighbouring rows see nearly the same keys, and a few queries of a large group still
//! fill the lanes.

use crate::AttentionPlan;
use crate::mask::VisibleKeys;

/// A task: a block of rows of one (batch, KV head).
pub(crate) struct RowBlock {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) rows: usize,
    pub(crate) panel_rows: usize,
    group_size: usize,
    first_row: usize,
    visible: VisibleKeys,
}

impl RowBlock {
    /// Task `task` of a plan, counted from the heaviest: the last rows of every head come first.
    pub(crate) fn new(plan: &AttentionPlan, task: usize) -> Self {
        let heads = plan.shape.batch * plan.shape.num_kv_heads;
        let (row_block, head) = (plan.blocks.row_blocks - 1 - task / heads, task % heads);
        let first_row = row_block * plan.blocks.task_rows;
        Self {
            batch: head / plan.shape.num_kv_heads,
            kv_head: head % plan.shape.num_kv_heads,
            rows: plan.blocks.task_rows.min(plan.blocks.rows - first_row),
            panel_rows: plan.blocks.panel_rows,
            group_size: plan.shape.group_size(),
            first_row,
            visible: plan.visible,
        }
    }

    /// `[batch, head, query]` of a row of the task.
    #[inline(always)]
    pub(crate) fn index(&self, row: usize) -> [usize; 3] {
        let row = self.first_row + row;
        [self.batch, self.kv_head * self.group_size + row % self.group_size, row / self.group_size]
    }

    /// One past the last key that a row of the task sees.
    #[inline(always)]
    pub(crate) fn row_end(&self, row: usize) -> usize {
        self.visible.end((self.first_row + row) / self.group_size)
    }
}
