//! The weights of the softmax, for people to look at.
//!
//! The fused pass never has them: it forgets a block of scores once it has met its values. Here it runs again for the rows that were asked for,
//! without values, and each block of scores is copied out as the softmax is about to take it, scaled, capped and biased. With the
//! log-sum-exp that the pass gives in the end, `weight = exp(score - logsumexp)`. So masks and modifiers are those of every other call.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::attention::{with_thread_workspace, zeros};
use crate::kernels::lane::Lane;
use crate::mask::VisibleKeys;
use crate::row_block::RowBlock;
use crate::score_modifier::Unmodified;
use crate::score_pass::{CallPass, ScorePass, ScoreRow, ScoreTile};
use crate::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, Element,
    TensorView, TensorViewMut,
};

/// Rows of one run of the pass, whose log-sum-exps are kept: a task's, so that they share what is read of K.
const MOST_ROWS: usize = 512;

/// The attention weights of some heads and queries: `[batch, heads.len(), query_rows.len(), kv_len]`, contiguous, in the type of the
/// accumulator. Heads and rows may come in any order, and more than once.
///
/// ```text
/// weight[j] = exp(score[j] - logsumexp)        so that out = sum_j weight[j] * v[j]
/// ```
///
/// - A key that a row does not see, by mask, window, length or bias, has a weight of exactly 0. A row that sees none has nothing else.
/// - The weights of every other row sum to 1, up to the rounding of `logsumexp` (in `f32` a part in 10^7 of its size). With
///   [sinks](AttentionInputs::with_sinks) they sum to 1 less the weight of the sink.
/// - A row whose output is NaN by its scores has weights of NaN where it sees keys.
///
/// This is a diagnostic, to look at a model or to test one. Weights show where a layer looked. They are not an explanation of what a model
/// does: what a key's value holds, how large it is and what later layers make of it decide as much, and different weights can give the same output
/// (Jain and Wallace, *Attention is not Explanation*, 2019, <https://arxiv.org/abs/1902.10186>; Wiegreffe and Pinter, *Attention is not not
/// Explanation*, 2019, <https://arxiv.org/abs/1908.04626>).
///
/// Costs the time of the scores of the rows asked for, and memory for the result alone beyond the workspace of a call. V is not read.
///
/// ```
/// use fused_attention::*;
/// // 2 heads, 4 tokens; all scores are equal.
/// let x = [0.5f32; 2 * 4 * 8];
/// let view = TensorView::from_bhsd(&x, [1, 2, 4, 8])?;
/// let inputs = AttentionInputs::new(view, view, view);
/// let weights = attention_weights(&inputs, &AttentionConfig::causal(), &[1], &[0, 3])?; // of head 1, the first and the last row
/// assert_eq!(weights[..4], [1.0, 0.0, 0.0, 0.0]);
/// assert!(weights[4..].iter().all(|weight| (weight - 0.25).abs() < 1e-6));
/// # Ok::<(), AttentionError>(())
/// ```
///
/// # Errors
/// [`AttentionError::HeadOutOfRange`], [`AttentionError::QueryRowOutOfRange`], and what [`attention`](crate::attention()) says of inputs and
/// config.
pub fn attention_weights<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    heads: &[usize],
    query_rows: &[usize],
) -> Result<Vec<T::Acc>, AttentionError> {
    let shape = AttentionShape::of(inputs)?;
    let AttentionShape { batch, num_heads, q_len, kv_len, .. } = shape;
    if let Some(&head) = heads.iter().find(|&&head| head >= num_heads) {
        return Err(AttentionError::HeadOutOfRange { head, num_heads });
    }
    if let Some(&row) = query_rows.iter().find(|&&row| row >= q_len) {
        return Err(AttentionError::QueryRowOutOfRange { row, q_len });
    }
    AttentionPlan::<T::Acc>::with_accumulator(&shape, config)?; // tells what is wrong with the config, whatever is asked for
    let mut weights: Vec<T::Acc> = zeros([batch, heads.len(), query_rows.len(), kv_len], &shape)?;
    if weights.is_empty() {
        return Ok(weights);
    }
    let heads = (0..batch).flat_map(|batch| heads.iter().map(move |&head| [batch, head]));
    for (head, mut weights) in heads.zip(weights.chunks_exact_mut(query_rows.len() * kv_len)) {
        // Neighbours in the list that are neighbours in the tensor go together.
        for rows in query_rows.chunk_by(|before, row| *row == before + 1).flat_map(|rows| rows.chunks(MOST_ROWS)) {
            let (these, others) = weights.split_at_mut(rows.len() * kv_len);
            weights_of_rows(inputs, (config, &shape), head, rows[0]..rows[0] + rows.len(), these)?;
            weights = others;
        }
    }
    Ok(weights)
}

/// Those of consecutive queries of one head, `[queries, kv_len]`.
fn weights_of_rows<T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    (config, shape): (&AttentionConfig, &AttentionShape),
    [batch, head]: [usize; 2],
    queries: Range<usize>,
    weights: &mut [T::Acc],
) -> Result<(), AttentionError> {
    let all_keys = VisibleKeys::new(config, shape).later_queries(queries.start);
    let visible = match inputs.kv_lens {
        Some(kv_lens) => all_keys.of_sequence(kv_lens[batch], config.kv_padding),
        None => all_keys.whole(),
    };
    let inputs = &part_of(inputs, shape, [batch, head], queries.clone())?;
    let mut plan = AttentionPlan::<T::Acc>::with_accumulator(&AttentionShape::of(inputs)?, config)?;
    plan.visible = all_keys.with_whole(visible);

    let mut logsumexp = vec![T::Acc::ZERO; queries.len()];
    let out = TensorViewMut::from_bhsd(&mut [], [1, 1, queries.len(), 0])?;
    let mut outputs = AttentionOutputs::new(out).with_logsumexp(&mut logsumexp);
    let pass = CallPass::new(&plan, inputs, &Unmodified);
    {
        let recorder = Recorder { pass: &pass, kv_len: shape.kv_len, scores: Mutex::new(&mut *weights) };
        with_thread_workspace(plan.workspace_len(), |workspace| {
            plan.run_with_pass(inputs, &mut outputs, workspace, &recorder)
        })?;
    }

    for (query, (weights, logsumexp)) in weights.chunks_exact_mut(shape.kv_len).zip(logsumexp).enumerate() {
        let logsumexp = Element::to_f64(logsumexp);
        let keys = visible.range(query);
        let other_keys = visible.second_part().map_or(0..0, |part| part.range(query));
        for (key, weight) in weights.iter_mut().enumerate() {
            let in_range = keys.contains(&key) || other_keys.contains(&key);
            // What is hidden was not always recorded, nor is it always -inf.
            *weight = match in_range && !pass.hides([0, 0, query], key) {
                true => T::Acc::from_f64((Element::to_f64(*weight) - logsumexp).exp()),
                false => T::Acc::ZERO,
            };
        }
    }
    Ok(())
}

/// The inputs of one head and some of its queries, without values. Who sees which keys is not in them.
fn part_of<'a, T: Element, K: Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'a, T, K>,
    shape: &AttentionShape,
    [batch, head]: [usize; 2],
    queries: Range<usize>,
) -> Result<AttentionInputs<'a, T, K>, AttentionError> {
    let kv_head = head / shape.group_size();
    let q = inputs.q.part([batch..batch + 1, head..head + 1, queries.clone(), 0..shape.head_dim]);
    let k = inputs.k.part([batch..batch + 1, kv_head..kv_head + 1, 0..shape.kv_len, 0..shape.head_dim]);
    let no_values = TensorView::from_bhsd(&[], [1, 1, shape.kv_len, 0])?;
    let mut part = AttentionInputs::new(q, k, no_values);
    part.mask = inputs.mask.map(|mask| operand_part(&mask, [batch, head], queries.clone()));
    part.bias = inputs.bias.map(|bias| operand_part(&bias, [batch, head], queries));
    part.alibi_slopes = inputs.alibi_slopes.map(|slopes| &slopes[head..=head]);
    part.sinks = inputs.sinks.map(|sinks| &sinks[head..=head]);
    Ok(part)
}

/// The same part of a mask or bias, which is broadcast along axes of size 1.
fn operand_part<'a, E>(
    operand: &TensorView<'a, E>,
    [batch, head]: [usize; 2],
    queries: Range<usize>,
) -> TensorView<'a, E> {
    let shape = operand.shape();
    let along = |axis: usize, range: Range<usize>| if shape[axis] == 1 { 0..1 } else { range };
    operand.part([along(0, batch..batch + 1), along(1, head..head + 1), along(2, queries), 0..shape[3]])
}

/// Does to scores what their call asks for, and keeps a copy.
struct Recorder<'a, 'w, T: Element> {
    pass: &'a CallPass<'a, T, Unmodified>,
    kv_len: usize,
    /// `[queries, kv_len]`. Tasks record different ones, but of rows that lie between one another.
    scores: Mutex<&'w mut [T::Acc]>,
}

impl<T: Element> Recorder<'_, '_, T> {
    /// Scores of one row and neighbouring keys, in order.
    fn record<'s>(&self, task: &RowBlock, row: usize, first_key: usize, scores: impl Iterator<Item = &'s T::Acc>) {
        let [_, _, query] = task.index(row);
        let mut recorded = self.scores.lock().unwrap_or_else(PoisonError::into_inner);
        let recorded = recorded[query * self.kv_len..][..self.kv_len][first_key..].iter_mut();
        recorded.zip(scores).for_each(|(to, score)| *to = *score);
    }
}

impl<T: Element> ScorePass<T::Acc> for Recorder<'_, '_, T> {
    fn modify_tile(&self, tile: ScoreTile<'_, T::Acc>) -> bool {
        let ScoreTile { task, first_row, first_key, keys, scores, max } = tile;
        let hides_keys =
            self.pass.modify_tile(ScoreTile { task, first_row, first_key, keys, scores: &mut *scores, max });
        for lane in 0..task.panel_rows.min(task.rows - first_row) {
            let of_row = scores[lane..].iter().step_by(task.panel_rows).take(keys);
            self.record(task, first_row + lane, first_key, of_row);
        }
        hides_keys
    }

    fn modify_row(&self, row: ScoreRow<'_, T::Acc>) -> bool {
        let ScoreRow { task, row, first_key, keys, scores, scale } = row;
        let hides_keys = self.pass.modify_row(ScoreRow { task, row, first_key, keys, scores: &mut *scores, scale });
        self.record(task, row, first_key, scores.iter().take(keys));
        hides_keys
    }

    fn hides(&self, index: [usize; 3], key: usize) -> bool {
        self.pass.hides(index, key)
    }

    fn shown(&self, task: &RowBlock, rows: Range<usize>, keys: Range<usize>) -> Range<usize> {
        self.pass.shown(task, rows, keys)
    }

    fn may_hide(&self) -> bool {
        self.pass.may_hide()
    }
}
