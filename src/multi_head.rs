//! The whole layer: projections, heads, output projection. See [`MultiHeadAttention`].

mod call;
mod heads;
mod inputs;
#[cfg(feature = "safetensors")]
mod loading;
mod product;
mod projection;
mod shape;
mod workspace;

use call::Call;
use heads::Heads;
use inputs::check_features_len;

use crate::blocks::MOST_CHUNKS_KEYS;
use crate::kernels::MAX_DECODE_ROWS;
use crate::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionPlan, AttentionShape, Element, KvCache, Parallelism,
    Rotary,
};

pub use inputs::MultiHeadInputs;
#[cfg(feature = "safetensors")]
pub use loading::ProjectionNames;
pub use projection::{Projection, WeightStorage};
pub use shape::MultiHeadShape;
pub use workspace::MultiHeadWorkspace;

/// Multi-head attention with its weights: what a transformer calls its attention layer.
///
/// ```text
/// Q = x W_q + b_q      K = source W_k + b_k      V = source W_v + b_v      source is x in self-attention
/// head h = softmax(Q_h K_g^T / sqrt(head_dim) + mask) V_g                  g = h / (num_heads / num_kv_heads)
/// out = concat(head 0, head 1, ...) W_o + b_o
/// ```
///
/// ```
/// use fused_attention::*;
/// let (tokens, d_model, num_heads) = (5, 16, 4);
/// let shape = MultiHeadShape::new(d_model, num_heads)?;
/// let weight = |seed: usize| (0..d_model * d_model).map(|i| ((i * 7 + seed) % 13) as f32 / 50.0).collect::<Vec<_>>();
/// let layer = MultiHeadAttention::new(
///     shape,
///     Projection::from_out_in(weight(0), [d_model, d_model])?, // PyTorch's storage; from_in_out for the textbook's
///     Projection::from_out_in(weight(1), [d_model, d_model])?,
///     Projection::from_out_in(weight(2), [d_model, d_model])?,
///     Projection::from_out_in(weight(3), [d_model, d_model])?,
/// )?;
///
/// let x = vec![0.1f32; tokens * d_model];
/// let inputs = MultiHeadInputs::new(&x, [1, tokens, d_model]);
/// let out = layer.forward(&inputs, &AttentionConfig::causal())?; // full() for an encoder
/// assert_eq!(out.len(), tokens * d_model);
/// # Ok::<(), AttentionError>(())
/// ```
///
/// # Weights
/// Of `f32`, [`f16`](struct@crate::f16) or [`bf16`](crate::bf16); activations, sums and biases are `f32`. The layer borrows its weights or owns them,
/// whichever it is given, and keeps no other copy. In each call, blocks of about 1 MiB of `f32` a thread are made of weights of 16 bits (widened, exactly), and of
/// weights stored `[out, in]` that meet more than a few tokens (transposed, as `gemm` would do for each product, but slower).
///
/// # Where the work runs
/// The projections run through the crate `gemm`, in blocks that the threads share which [`AttentionConfig::parallelism`] names, and write the layout that the
/// attention kernels read: Q, K and V are neither transposed nor copied. `gemm` detects the CPU's instructions by itself:
/// [`AttentionConfig::instruction_set`] rules the rest. It allocates scratch memory in its calls, but not for a single token; nothing else does, where the caller keeps
/// a [`MultiHeadWorkspace`]. How blocks are cut depends on tokens and threads, so the same bits are promised for the same call on as many threads alone.
#[derive(Debug, Clone)]
pub struct MultiHeadAttention<'a, T: Element<Acc = f32> = f32> {
    shape: MultiHeadShape,
    qkv: Qkv<'a, T>,
    out: Projection<'a, T>,
    rotary: Option<Rotary>,
}

/// The projections to heads.
#[derive(Debug, Clone)]
enum Qkv<'a, T: Element<Acc = f32>> {
    Separate([Projection<'a, T>; 3]),
    /// Outputs of Q, K and V behind one another.
    Fused(Projection<'a, T>),
}

impl<'a, T: Element<Acc = f32>> MultiHeadAttention<'a, T> {
    /// A layer of four projections: `q` to `num_heads * head_dim` features, `k` to `num_kv_heads * head_dim`, `v` to `num_kv_heads * value_dim`,
    /// `out` from `num_heads * value_dim` to `d_model`. Each has a bias or none.
    ///
    /// # Errors
    /// [`AttentionError::ProjectionShapeMismatch`], [`AttentionError::HeadsNotDivisible`], [`AttentionError::ZeroHeadDim`],
    /// [`AttentionError::SizeOverflow`].
    pub fn new(
        shape: MultiHeadShape,
        q: Projection<'a, T>,
        k: Projection<'a, T>,
        v: Projection<'a, T>,
        out: Projection<'a, T>,
    ) -> Result<Self, AttentionError> {
        shape.check()?;
        for (name, projection, expected) in
            [("q", &q, shape.q()), ("k", &k, shape.k()), ("v", &v, shape.v()), ("out", &out, shape.out())]
        {
            projection.check_shape(name, expected)?;
        }
        Ok(Self { shape, qkv: Qkv::Separate([q, k, v]), out, rotary: None })
    }

    /// A layer whose first three projections are one, its outputs those of Q, K and V behind one another, heads in order: PyTorch's
    /// `in_proj_weight`, GPT-2's `c_attn`. Self-attention multiplies by it once.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`AttentionError::FusedSourceMismatch`] where `d_source` is not `d_model`.
    pub fn from_fused_qkv(
        shape: MultiHeadShape,
        qkv: Projection<'a, T>,
        out: Projection<'a, T>,
    ) -> Result<Self, AttentionError> {
        shape.check()?;
        qkv.check_shape("qkv", shape.qkv()?)?;
        out.check_shape("out", shape.out())?;
        Ok(Self { shape, qkv: Qkv::Fused(qkv), out, rotary: None })
    }

    /// Turns Q and K by their positions between projection and attention. See [`Rotary`].
    ///
    /// # Errors
    /// [`AttentionError::RotaryDimTooLarge`] where it turns more features than a head has.
    pub fn with_rotary(mut self, rotary: Rotary) -> Result<Self, AttentionError> {
        rotary.check_head_dim(self.shape.head_dim)?;
        self.rotary = Some(rotary);
        Ok(self)
    }

    /// The sizes that it was made with.
    pub fn shape(&self) -> &MultiHeadShape {
        &self.shape
    }

    /// The rotary embedding, if there is one.
    pub fn rotary(&self) -> Option<&Rotary> {
        self.rotary.as_ref()
    }

    /// Computes the layer into a new contiguous `[batch, q_len, d_model]`: self-attention, or cross-attention where the inputs have a
    /// [source](MultiHeadInputs::with_source).
    ///
    /// # Errors
    /// [`AttentionError::FeaturesMismatch`], [`AttentionError::FeaturesLenMismatch`] and what [`attention`](crate::attention()) says of
    /// lengths, masks and the other operands.
    pub fn forward(&self, inputs: &MultiHeadInputs<'_>, config: &AttentionConfig) -> Result<Vec<f32>, AttentionError> {
        let mut out = self.new_output(inputs)?;
        self.forward_into(inputs, &mut out, config, &mut MultiHeadWorkspace::new())?;
        Ok(out)
    }

    /// As [`forward`](Self::forward), into `out` of `[batch, q_len, d_model]`, with scratch of the caller, which grows as needed.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); nothing is written to `out` then.
    pub fn forward_into(
        &self,
        inputs: &MultiHeadInputs<'_>,
        out: &mut [f32],
        config: &AttentionConfig,
        workspace: &mut MultiHeadWorkspace,
    ) -> Result<(), AttentionError> {
        let call = Call::new(self, *inputs, config)?;
        check_features_len("out", out, inputs.x_shape)?;
        call.project(None, workspace)?;
        call.attend(workspace)?;
        call.project_out(out, workspace)
    }

    /// Self-attention of new tokens, one or more of each sequence, that also sees the tokens before them: appends their keys and values to a layer
    /// of the cache and attends over all that it holds then. A prompt is the first step. Gives `[batch, new tokens, d_model]`.
    ///
    /// With a causal config, steps give what one [`forward`](Self::forward) over the whole sequence gives (up to roundings; those of the cache's type
    /// too): whatever the [`CausalAlignment`](crate::CausalAlignment), tokens count from where the sequence begins in the cache, and rotary positions do too.
    ///
    /// ```
    /// use fused_attention::*;
    /// let shape = MultiHeadShape::new(8, 2)?;
    /// let weight: Vec<f32> = (0..64).map(|i| (i as f32).sin()).collect();
    /// let projection = || Projection::from_in_out(&weight, [8, 8]);
    /// let layer = MultiHeadAttention::new(shape, projection()?, projection()?, projection()?, projection()?)?;
    ///
    /// let x: Vec<f32> = (0..4 * 8).map(|i| (i as f32).cos()).collect();
    /// let full = layer.forward(&MultiHeadInputs::new(&x, [1, 4, 8]), &AttentionConfig::causal())?;
    ///
    /// let mut cache = KvCache::<f32>::new(&shape.kv_cache_shape(1, 1), Capacity::Fixed(4))?;
    /// let (prompt, next) = x.split_at(3 * 8);
    /// layer.step(&MultiHeadInputs::new(prompt, [1, 3, 8]), &mut cache, 0, &AttentionConfig::causal())?;
    /// let last = layer.step(&MultiHeadInputs::new(next, [1, 1, 8]), &mut cache, 0, &AttentionConfig::causal())?;
    /// assert!(last.iter().zip(&full[3 * 8..]).all(|(step, full)| (step - full).abs() < 1e-5));
    /// # Ok::<(), AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and what [`KvCache::append`] says; [`AttentionError::NotWithCache`] where the inputs have a source. The cache
    /// is as it was before then.
    pub fn step<K: Element<Acc = f32>>(
        &self,
        inputs: &MultiHeadInputs<'_>,
        cache: &mut KvCache<K>,
        layer: usize,
        config: &AttentionConfig,
    ) -> Result<Vec<f32>, AttentionError> {
        let mut out = self.new_output(inputs)?;
        self.step_into(inputs, &mut out, cache, layer, config, &mut MultiHeadWorkspace::new())?;
        Ok(out)
    }

    /// As [`step`](Self::step), into `out` of `[batch, new tokens, d_model]`, with scratch of the caller, which grows as needed. Where it is large enough
    /// (see [`reserve_steps`](Self::reserve_steps)) and the cache has room, a step allocates what `gemm` does and nothing else.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_into<K: Element<Acc = f32>>(
        &self,
        inputs: &MultiHeadInputs<'_>,
        out: &mut [f32],
        cache: &mut KvCache<K>,
        layer: usize,
        config: &AttentionConfig,
        workspace: &mut MultiHeadWorkspace,
    ) -> Result<(), AttentionError> {
        let call = Call::new(self, *inputs, config)?;
        check_features_len("out", out, inputs.x_shape)?;
        let held = cache.lens(layer)?;
        call.check_cache(cache)?;
        call.project(Some(held), workspace)?;
        call.reserve_project_out(workspace)?; // nothing may go wrong once the tokens are appended
        call.attend_to_cache(cache, layer, workspace)?;
        call.project_out(out, workspace)
    }

    /// The heads alone: projects and turns, and gives Q, K and V as [`attention`](crate::attention()) takes them, with the operands of `inputs`. They
    /// lie in the workspace. Of `config`, [`parallelism`](AttentionConfig::parallelism) and [`instruction_set`](AttentionConfig::instruction_set) count, and
    /// with lengths and a rotary embedding [`kv_padding`](AttentionConfig::kv_padding), which says where positions begin.
    ///
    /// Lengths become [`kv_lens`](AttentionInputs::kv_lens). Note that a causal mask then ends with each sequence's own last key, where
    /// [`forward`](Self::forward) computes each sequence by itself.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn project<'w>(
        &self,
        inputs: &MultiHeadInputs<'w>,
        config: &AttentionConfig,
        workspace: &'w mut MultiHeadWorkspace,
    ) -> Result<AttentionInputs<'w, f32>, AttentionError> {
        let call = Call::new(self, *inputs, config)?;
        call.project(None, workspace)?;
        call.views(&workspace.heads)
    }

    /// Grows a workspace to what [`forward_into`](Self::forward_into) needs for `[batch, q_len, kv_len]`, where `kv_len` is the length of the source, or
    /// `q_len` in self-attention, with lengths or without.
    ///
    /// # Errors
    /// [`AttentionError::SizeOverflow`], [`AttentionError::AllocationFailed`], and what [`AttentionPlan::new`](crate::AttentionPlan::new) says.
    pub fn reserve(
        &self,
        workspace: &mut MultiHeadWorkspace,
        [batch, q_len, kv_len]: [usize; 3],
        config: &AttentionConfig,
    ) -> Result<(), AttentionError> {
        // Whether there will be a source, a length that is the same does not say.
        for is_cross in [false, true] {
            self.reserve_heads(workspace, [batch, q_len, kv_len], is_cross, config)?;
        }
        self.reserve_attention(workspace, [batch, q_len, kv_len], config)
    }

    /// Grows a workspace to what [`step_into`](Self::step_into) needs for `[batch, new tokens, tokens of the cache]`, however few of these there are
    /// at first.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn reserve_steps(
        &self,
        workspace: &mut MultiHeadWorkspace,
        [batch, new_tokens, capacity]: [usize; 3],
        config: &AttentionConfig,
    ) -> Result<(), AttentionError> {
        self.reserve_heads(workspace, [batch, new_tokens, new_tokens], false, config)?;
        // With more keys there may be fewer chunks of them, and less to merge.
        for kv_len in MOST_CHUNKS_KEYS.map(|keys| keys.min(capacity)).into_iter().chain([capacity]) {
            self.reserve_attention(workspace, [batch, new_tokens, kv_len], config)?;
        }
        Ok(())
    }

    fn reserve_heads(
        &self,
        workspace: &mut MultiHeadWorkspace,
        [batch, q_len, kv_len]: [usize; 3],
        is_cross: bool,
        config: &AttentionConfig,
    ) -> Result<(), AttentionError> {
        workspace.reserve_heads(Heads::new(&self.shape, &self.qkv, [batch, q_len, kv_len], is_cross)?.len)?;
        let tokens = batch * q_len.max(kv_len); // fits, as the heads do
        let to_heads = match &self.qkv {
            Qkv::Separate(projections) => &projections[..],
            Qkv::Fused(projection) => std::slice::from_ref(projection),
        };
        for projection in to_heads.iter().chain([&self.out]) {
            workspace.widened.reserve_len(projection.widened_len(tokens, config.parallelism))?;
        }
        Ok(())
    }

    fn reserve_attention(
        &self,
        workspace: &mut MultiHeadWorkspace,
        [batch, q_len, kv_len]: [usize; 3],
        config: &AttentionConfig,
    ) -> Result<(), AttentionError> {
        let MultiHeadShape { num_heads, num_kv_heads, head_dim, value_dim, .. } = self.shape;
        // A shorter sequence may be decoded, or be too short for threads, and one worker then takes more heads together.
        let decode_len = (MAX_DECODE_ROWS / (num_heads / num_kv_heads)).max(1);
        for q_len in [q_len, q_len.min(decode_len)] {
            let shape = AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim };
            for config in [*config, config.with_parallelism(Parallelism::Serial)] {
                workspace.attention.reserve(&AttentionPlan::new(&shape, &config)?)?;
            }
        }
        Ok(())
    }

    /// Zeros for the output of a call.
    fn new_output(&self, inputs: &MultiHeadInputs<'_>) -> Result<Vec<f32>, AttentionError> {
        inputs.check_x(self.shape.d_model)?;
        let len = inputs.x.len();
        let mut out = Vec::new();
        let bytes = size_of_val(inputs.x);
        out.try_reserve_exact(len).map_err(|_| AttentionError::AllocationFailed { bytes })?;
        out.resize(len, 0.0);
        Ok(out)
    }
}
