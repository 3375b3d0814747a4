//! A call of a layer: project, turn, attend, project.

use std::ops::Range;

use super::heads::{Heads, TokenRows};
use super::projection::Threads;
use super::{MultiHeadAttention, MultiHeadInputs, MultiHeadWorkspace, Qkv};
use crate::rotary::Rotary;
use crate::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, CausalAlignment,
    Element, InstructionSet, KvCache, KvPadding, Mask, TensorView, TensorViewMut, Workspace, schedule,
};

/// A checked call.
pub(super) struct Call<'c, 'i, T: Element<Acc = f32>> {
    layer: &'c MultiHeadAttention<'c, T>,
    inputs: MultiHeadInputs<'i>,
    config: &'c AttentionConfig,
    heads: Heads,
    threads: Threads,
}

impl<'c, 'i, T: Element<Acc = f32>> Call<'c, 'i, T> {
    pub(super) fn new(
        layer: &'c MultiHeadAttention<'_, T>,
        inputs: MultiHeadInputs<'i>,
        config: &'c AttentionConfig,
    ) -> Result<Self, AttentionError> {
        inputs.check(&layer.shape)?;
        let [batch, q_len, _] = inputs.x_shape;
        let [_, kv_len, _] = inputs.source().1;
        let heads = Heads::new(&layer.shape, &layer.qkv, [batch, q_len, kv_len], inputs.source.is_some())?;
        let instruction_set = InstructionSet::resolve(config.instruction_set)?;
        let threads = Threads { parallelism: config.parallelism, instruction_set };
        Ok(Self { layer, inputs, config, heads, threads })
    }

    /// Projects all tokens and turns them. `held` are the tokens of each sequence that stand before.
    pub(super) fn project(
        &self,
        held: Option<&[usize]>,
        workspace: &mut MultiHeadWorkspace,
    ) -> Result<(), AttentionError> {
        let Self { layer, inputs, heads, threads, .. } = self;
        let Heads { q, k, v, len, .. } = *heads;
        workspace.reserve_heads(len)?;
        let MultiHeadWorkspace { heads: data, widened, .. } = workspace;
        let x = inputs.x_rows();
        let source = inputs.source_rows();
        match &layer.qkv {
            Qkv::Separate([to_q, to_k, to_v]) => {
                for (projection, from, rows) in [(to_q, x, q), (to_k, source, k), (to_v, source, v)] {
                    projection.apply(0..rows.features(), from, rows.rows_mut(data), widened, *threads)?;
                }
            }
            Qkv::Fused(projection) => {
                let (q_features, all) = (q.features(), projection.out_features());
                let joined = if inputs.source.is_some() { q_features } else { all };
                let first = TokenRows { heads: 1, dim: joined, ..q };
                projection.apply(0..joined, x, first.rows_mut(data), widened, *threads)?;
                let second = TokenRows { heads: 1, dim: all - joined, ..k };
                projection.apply(joined..all, source, second.rows_mut(data), widened, *threads)?;
            }
        }
        // Without tokens nothing bounds the number of sequences: a loop over them might not end.
        if let Some(rotary) = layer.rotary.as_ref().filter(|_| x.count > 0 || source.count > 0) {
            for sequence in 0..q.batch {
                let first = inputs.first_position.saturating_add(held.map_or(0, |held| held[sequence]));
                let tokens = |rows: TokenRows| rows.of_sequence(sequence, self.tokens(sequence, rows.seq));
                if inputs.source.is_some() {
                    self.turn(rotary, q.of_sequence(sequence, 0..q.seq), first, data);
                    self.turn(rotary, tokens(k), 0, data);
                } else {
                    self.turn(rotary, tokens(q), first, data);
                    self.turn(rotary, tokens(k), first, data);
                }
            }
        }
        Ok(())
    }

    fn turn(&self, rotary: &Rotary, rows: TokenRows, first_position: usize, data: &mut [f32]) {
        let data = &mut data[rows.range()];
        let threads = if data.len() < SERIAL_BELOW { 1 } else { schedule::max_threads(self.threads.parallelism) };
        schedule::for_each_part(threads, data, rows.stride, 0, &|first_row, part: &mut [f32]| {
            let position = first_position.saturating_add(first_row);
            rotary.turn_tokens(part, rows.stride, [rows.heads, rows.dim], position);
        });
    }

    /// The tokens of a sequence of `seq` that are no padding.
    fn tokens(&self, sequence: usize, seq: usize) -> Range<usize> {
        match (self.inputs.lens, self.config.kv_padding) {
            (None, _) => 0..seq,
            (Some(lens), KvPadding::Right) => 0..lens[sequence],
            (Some(lens), KvPadding::Left) => seq - lens[sequence]..seq,
        }
    }

    /// Q, K and V, with the operands of the call.
    pub(super) fn views<'w>(&self, data: &'w [f32]) -> Result<AttentionInputs<'w, f32>, AttentionError>
    where
        'i: 'w,
    {
        let Heads { q, k, v, .. } = self.heads;
        let views = AttentionInputs::new(q.view(data)?, k.view(data)?, v.view(data)?);
        Ok(AttentionInputs { kv_lens: self.inputs.lens, ..self.with_operands(views) })
    }

    /// Attention of the tokens to themselves, or to the source.
    pub(super) fn attend(&self, workspace: &mut MultiHeadWorkspace) -> Result<(), AttentionError> {
        let Heads { q, k, v, context, .. } = self.heads;
        let (projected, written) = workspace.heads.split_at_mut(context.start);
        let context = TokenRows { start: 0, ..context };
        if self.inputs.source.is_some() || self.inputs.lens.is_none() {
            let inputs = self.views(projected)?;
            return attend(&inputs, context.view_mut(written)?, self.config, &mut workspace.attention);
        }
        for sequence in 0..q.batch {
            let tokens = self.tokens(sequence, q.seq);
            let [q, k, v] = [q, k, v].map(|rows| rows.of_sequence(sequence, tokens.clone()).view(projected));
            let inputs = AttentionInputs::new(q?, k?, v?);
            let inputs = self.with_operands_of(inputs, sequence, [tokens.clone(), tokens.clone()], self.heads.q.seq)?;
            let out = context.of_sequence(sequence, tokens).view_mut(written)?;
            attend(&inputs, out, self.config, &mut workspace.attention)?;
        }
        Ok(())
    }

    /// Whether the layer's heads fit the cache.
    pub(super) fn check_cache<K: Element<Acc = f32>>(&self, cache: &KvCache<K>) -> Result<(), AttentionError> {
        if self.inputs.source.is_some() {
            return Err(AttentionError::NotWithCache { operand: "source" });
        }
        let Heads { q, k, v, .. } = self.heads;
        let held = cache.shape();
        for (tensor, rows, dim) in [("k", k, held.head_dim), ("v", v, held.value_dim)] {
            let found = [q.batch, rows.heads, q.seq, rows.dim];
            let expected = [held.batch, held.num_kv_heads, q.seq, dim];
            if found != expected {
                return Err(AttentionError::AppendShapeMismatch { tensor, expected, found });
            }
        }
        Ok(())
    }

    /// Appends keys and values and attends to all that the cache holds then. On an error the cache is as it was.
    pub(super) fn attend_to_cache<K: Element<Acc = f32>>(
        &self,
        cache: &mut KvCache<K>,
        layer: usize,
        workspace: &mut MultiHeadWorkspace,
    ) -> Result<(), AttentionError> {
        let Heads { q, k, v, .. } = self.heads;
        let mut appended = 0;
        let mut append = || {
            let data = &workspace.heads;
            if self.inputs.lens.is_none() {
                cache.append(layer, &k.view(data)?, &v.view(data)?)?;
                appended = q.batch;
                return Ok(());
            }
            for sequence in 0..q.batch {
                let tokens = self.tokens(sequence, q.seq);
                let [k, v] = [k, v].map(|rows| rows.of_sequence(sequence, tokens.clone()).view(data));
                cache.append_to(layer, sequence, &k?, &v?)?;
                appended = sequence + 1;
            }
            Ok(())
        };
        let result = append().and_then(|()| self.attend_to_held(cache, layer, workspace));
        if result.is_err() {
            for sequence in 0..appended {
                cache.retract(layer, sequence, self.tokens(sequence, q.seq).len());
            }
        }
        result
    }

    fn attend_to_held<K: Element<Acc = f32>>(
        &self,
        cache: &KvCache<K>,
        layer: usize,
        workspace: &mut MultiHeadWorkspace,
    ) -> Result<(), AttentionError> {
        let Heads { q, context, .. } = self.heads;
        let (projected, written) = workspace.heads.split_at_mut(context.start);
        let context = TokenRows { start: 0, ..context };
        let lens = cache.lens(layer)?;
        let is_even = lens.windows(2).all(|pair| pair[0] == pair[1]);
        if self.inputs.lens.is_none() && (is_even || !self.has_offset()) {
            let config = self.config_of_step(lens.first().map_or(0, |len| len - q.seq));
            let inputs = AttentionInputs::new(q.view(projected)?, cache.k(layer)?, cache.v(layer)?).with_kv_lens(lens);
            let inputs = self.with_operands(inputs);
            return attend(&inputs, context.view_mut(written)?, &config, &mut workspace.attention);
        }
        let longest = lens.iter().copied().max().unwrap_or(0);
        for (sequence, &len) in lens.iter().enumerate() {
            let tokens = self.tokens(sequence, q.seq);
            let config = self.config_of_step(len - tokens.len());
            let q = q.of_sequence(sequence, tokens.clone()).view(projected)?;
            let inputs = AttentionInputs::new(q, cache.k_of(layer, sequence)?, cache.v_of(layer, sequence)?);
            let inputs = self.with_operands_of(inputs, sequence, [tokens.clone(), 0..len], longest)?;
            let out = context.of_sequence(sequence, tokens).view_mut(written)?;
            attend(&inputs, out, &config, &mut workspace.attention)?;
        }
        Ok(())
    }

    /// Whether the causal diagonal lies so far from each token's own position.
    fn has_offset(&self) -> bool {
        matches!(self.config.mask, Mask::Causal(CausalAlignment::Offset(_)))
    }

    /// What one call over the whole sequence says of tokens behind `held` others, whose keys and queries begin together.
    fn config_of_step(&self, held: usize) -> AttentionConfig {
        let alignment = match self.config.mask {
            Mask::Causal(CausalAlignment::TopLeft) => Some(CausalAlignment::BottomRight),
            Mask::Causal(CausalAlignment::Offset(offset)) => {
                Some(CausalAlignment::Offset(offset.saturating_add_unsigned(held)))
            }
            _ => None,
        };
        let config = self.config.with_kv_padding(KvPadding::Right); // the cache's
        alignment.map_or(config, |alignment| config.with_causal_alignment(alignment))
    }

    /// What [`project_out`](Self::project_out) can fail for.
    pub(super) fn reserve_project_out(&self, workspace: &mut MultiHeadWorkspace) -> Result<(), AttentionError> {
        let tokens = self.inputs.x_shape[0] * self.inputs.x_shape[1];
        workspace.widened.reserve_len(self.layer.out.widened_len(tokens, self.threads.parallelism))
    }

    /// Projects the heads' outputs. Rows of padding are zeros.
    pub(super) fn project_out(
        &self,
        out: &mut [f32],
        workspace: &mut MultiHeadWorkspace,
    ) -> Result<(), AttentionError> {
        let (context, d_model) = (self.heads.context, self.layer.shape.d_model);
        let MultiHeadWorkspace { heads: data, widened, .. } = workspace;
        let to = self.inputs.out_rows(out);
        self.layer.out.apply(0..d_model, context.rows(data), to, widened, self.threads)?;
        if self.inputs.lens.is_some() && self.inputs.source.is_none() {
            for sequence in 0..context.batch {
                let tokens = self.tokens(sequence, context.seq);
                let rows = &mut out[sequence * context.seq * d_model..][..context.seq * d_model];
                rows[..tokens.start * d_model].fill(0.0);
                rows[tokens.end * d_model..].fill(0.0);
            }
        }
        Ok(())
    }

    fn with_operands<'w, K>(&self, inputs: AttentionInputs<'w, f32, K>) -> AttentionInputs<'w, f32, K>
    where
        'i: 'w,
    {
        let MultiHeadInputs { mask, bias, alibi_slopes, sinks, .. } = self.inputs;
        AttentionInputs { mask, bias, alibi_slopes, sinks, ..inputs }
    }

    /// The operands of one sequence: these queries and keys of masks and biases over `[batch, num_heads, q_len, kv_len]`.
    fn with_operands_of<'w, K>(
        &self,
        inputs: AttentionInputs<'w, f32, K>,
        sequence: usize,
        [queries, keys]: [Range<usize>; 2],
        kv_len: usize,
    ) -> Result<AttentionInputs<'w, f32, K>, AttentionError>
    where
        'i: 'w,
    {
        let TokenRows { batch, seq, heads, .. } = self.heads.q;
        let scores = [batch, heads, seq, kv_len];
        let part = [sequence..sequence + 1, 0..heads, queries, keys];
        let mut inputs = self.with_operands(inputs);
        inputs.mask = inputs.mask.map(|mask| part_of_scores("mask", &mask, scores, &part)).transpose()?;
        inputs.bias = inputs.bias.map(|bias| part_of_scores("bias", &bias, scores, &part)).transpose()?;
        Ok(inputs)
    }
}

/// Numbers that are not worth the threads to turn them.
const SERIAL_BELOW: usize = 1 << 16;

/// A part of a mask or bias; axes of size 1 are broadcast, and stay.
fn part_of_scores<'w, E>(
    operand: &'static str,
    view: &TensorView<'w, E>,
    scores: [usize; 4],
    part: &[Range<usize>; 4],
) -> Result<TensorView<'w, E>, AttentionError> {
    let found = view.shape();
    if found.iter().zip(scores).any(|(&found, expected)| found != expected && found != 1) {
        return Err(AttentionError::ScoreShapeMismatch { operand, expected: scores, found });
    }
    let range = |axis: usize| if found[axis] == 1 { 0..1 } else { part[axis].clone() };
    Ok(view.part([range(0), range(1), range(2), range(3)]))
}

fn attend<K: Element<Acc = f32>>(
    inputs: &AttentionInputs<'_, f32, K>,
    out: TensorViewMut<'_, f32>,
    config: &AttentionConfig,
    workspace: &mut Workspace,
) -> Result<(), AttentionError> {
    let plan = AttentionPlan::new(&AttentionShape::of(inputs)?, config)?;
    workspace.reserve(&plan)?;
    plan.run(inputs, &mut AttentionOutputs::new(out), workspace)
}
