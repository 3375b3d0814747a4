//! Scratch memory of a layer: [`MultiHeadWorkspace`].

use crate::{AttentionConfig, AttentionError, Element, MultiHeadAttention, Workspace};

/// Scratch memory for [`MultiHeadAttention::forward_into`] and [`step_into`](MultiHeadAttention::step_into): Q, K, V and the heads' outputs of all tokens,
/// a block of widened weights, and what attention needs. One serves any number of layers, one after the other. It grows as needed and
/// never shrinks.
#[derive(Debug, Clone, Default)]
pub struct MultiHeadWorkspace {
    pub(super) attention: Workspace,
}

impl MultiHeadWorkspace {
    /// An empty workspace, which grows when it is used.
    pub fn new() -> Self {
        Self::default()
    }

    /// Grows to what a call of `[batch, q_len, kv_len]` needs, so that it allocates nothing: `kv_len` is the length of the source in
    /// cross-attention, the capacity of the cache for steps, else `q_len`.
    ///
    /// # Errors
    /// [`AttentionError::AllocationFailed`], and what [`AttentionPlan::new`](crate::AttentionPlan::new) says.
    pub fn reserve<T: Element<Acc = f32>>(
        &mut self,
        layer: &MultiHeadAttention<'_, T>,
        [_batch, _q_len, _kv_len]: [usize; 3],
        _config: &AttentionConfig,
    ) -> Result<(), AttentionError> {
        let _ = layer;
        todo!()
    }
}
