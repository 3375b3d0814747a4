//! A call of a layer: project, turn, attend, project.

use super::{MultiHeadAttention, MultiHeadInputs, MultiHeadWorkspace};
use crate::{AttentionConfig, AttentionError, AttentionInputs, Element, KvCache};

impl<T: Element<Acc = f32>> MultiHeadAttention<'_, T> {
    pub(super) fn new_output(&self, _inputs: &MultiHeadInputs<'_>) -> Result<Vec<f32>, AttentionError> {
        todo!()
    }

    pub(super) fn forward_checked(
        &self,
        _inputs: &MultiHeadInputs<'_>,
        _out: &mut [f32],
        _config: &AttentionConfig,
        _workspace: &mut MultiHeadWorkspace,
    ) -> Result<(), AttentionError> {
        todo!()
    }

    pub(super) fn step_checked<K: Element<Acc = f32>>(
        &self,
        _inputs: &MultiHeadInputs<'_>,
        _out: &mut [f32],
        _cache: &mut KvCache<K>,
        _layer: usize,
        _config: &AttentionConfig,
        _workspace: &mut MultiHeadWorkspace,
    ) -> Result<(), AttentionError> {
        todo!()
    }

    pub(super) fn project_checked<'w>(
        &self,
        _inputs: &MultiHeadInputs<'w>,
        _config: &AttentionConfig,
        _workspace: &'w mut MultiHeadWorkspace,
    ) -> Result<AttentionInputs<'w, f32>, AttentionError> {
        todo!()
    }
}
