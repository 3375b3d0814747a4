//! Scratch memory of a layer: [`MultiHeadWorkspace`].

use std::fmt;

use aligned_vec::{AVec, ConstAlign};

use crate::workspace::ALIGN_BYTES;
use crate::{AttentionError, Workspace};

/// Scratch memory for [`MultiHeadAttention::forward_into`](crate::MultiHeadAttention::forward_into) and
/// [`step_into`](crate::MultiHeadAttention::step_into): Q, K, V and the heads' outputs of all tokens, a block of widened weights a thread, and what
/// attention needs. One serves any number of layers, one after the other. It grows as needed and never shrinks.
#[derive(Clone)]
pub struct MultiHeadWorkspace {
    pub(super) heads: AVec<f32, ConstAlign<ALIGN_BYTES>>,
    pub(super) widened: Workspace,
    pub(super) attention: Workspace,
}

impl MultiHeadWorkspace {
    /// An empty workspace, which grows when it is used.
    pub fn new() -> Self {
        Self { heads: AVec::new(ALIGN_BYTES), widened: Workspace::new(), attention: Workspace::new() }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.heads.len() * size_of::<f32>() + self.widened.len() + self.attention.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Grows to so many numbers of heads.
    pub(super) fn reserve_heads(&mut self, len: usize) -> Result<(), AttentionError> {
        if self.heads.len() < len {
            // The old contents are of no use.
            self.heads = AVec::new(ALIGN_BYTES);
            let bytes = len.saturating_mul(size_of::<f32>());
            self.heads.try_reserve_exact(len).map_err(|_| AttentionError::AllocationFailed { bytes })?;
            self.heads.resize(len, 0.0);
        }
        Ok(())
    }
}

impl fmt::Debug for MultiHeadWorkspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiHeadWorkspace").field("len", &self.len()).finish()
    }
}

impl Default for MultiHeadWorkspace {
    fn default() -> Self {
        Self::new()
    }
}
