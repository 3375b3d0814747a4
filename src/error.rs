//! Everything that can be wrong with a call, one variant per rule, with the numbers that break it.

/// Why a call was refused. Nothing was written when one of these is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// The slice behind a tensor does not reach its last element.
    #[error("the slice holds {len} elements, shape {shape:?} with strides {strides:?} reaches {needed}")]
    SliceTooShort {
        /// Elements that the shape and strides reach.
        needed: usize,
        /// Elements in the slice.
        len: usize,
        /// `[batch, heads, seq, head_dim]`.
        shape: [usize; 4],
        /// Elements between neighbours along each axis.
        strides: [usize; 4],
    },
    /// The size or an offset of a tensor does not fit in `isize`.
    #[error("shape {shape:?} with strides {strides:?} reaches past the address space")]
    SizeOverflow {
        /// `[batch, heads, seq, head_dim]`.
        shape: [usize; 4],
        /// Elements between neighbours along each axis.
        strides: [usize; 4],
    },
    /// Two elements of an output may lie at the same place. The (sufficient) rule is at
    /// [`TensorViewMut::with_strides`](crate::TensorViewMut::with_strides).
    #[error("output elements may overlap: shape {shape:?} with strides {strides:?}")]
    OverlappingOutput {
        /// `[batch, heads, seq, head_dim]`.
        shape: [usize; 4],
        /// Elements between neighbours along each axis.
        strides: [usize; 4],
    },
    /// A tensor's batch differs from that of `q`.
    #[error("{tensor} has batch {found}, q has batch {expected}")]
    BatchMismatch {
        /// The tensor that differs.
        tensor: &'static str,
        /// Batch of `q`.
        expected: usize,
        /// Batch of `tensor`.
        found: usize,
    },
    /// `v` and `k` have different numbers of heads.
    #[error("v has {v} heads, k has {k}")]
    NumKvHeadsMismatch {
        /// Heads of `k`.
        k: usize,
        /// Heads of `v`.
        v: usize,
    },
    /// `out` and `q` have different numbers of heads.
    #[error("out has {out} heads, q has {q}")]
    NumHeadsMismatch {
        /// Heads of `q`.
        q: usize,
        /// Heads of `out`.
        out: usize,
    },
    /// The number of query heads is no multiple of the number of KV heads.
    #[error("{num_heads} query heads cannot be divided among {num_kv_heads} KV heads")]
    HeadsNotDivisible {
        /// Heads of `q`.
        num_heads: usize,
        /// Heads of `k` and `v`.
        num_kv_heads: usize,
    },
    /// `out` and `q` have different sequence lengths.
    #[error("out has q_len {out}, q has q_len {q}")]
    QLenMismatch {
        /// Sequence length of `q`.
        q: usize,
        /// Sequence length of `out`.
        out: usize,
    },
    /// `v` and `k` have different sequence lengths.
    #[error("v has kv_len {v}, k has kv_len {k}")]
    KvLenMismatch {
        /// Sequence length of `k`.
        k: usize,
        /// Sequence length of `v`.
        v: usize,
    },
    /// There are not as many lengths as sequences.
    #[error("kv_lens holds {found} lengths, the batch has {expected} sequences")]
    KvLensLenMismatch {
        /// Batch of `q`.
        expected: usize,
        /// Lengths given.
        found: usize,
    },
    /// Tensors of packed sequences have one batch entry, along whose positions the sequences lie.
    #[error("q has batch {found}, that of packed sequences is 1")]
    PackedBatch {
        /// Batch of `q`.
        found: usize,
    },
    /// Packed sequences were given an operand that has rows or lengths of a batch.
    #[error("{operand} cannot be given for packed sequences, whose lengths are in cu_seqlens")]
    NotWithCuSeqlens {
        /// The operand.
        operand: &'static str,
    },
    /// Cumulative lengths hold one number more than there are sequences, so at least one.
    #[error("{name} is empty, it must hold at least its first offset, 0")]
    CuSeqlensEmpty {
        /// `"cu_seqlens_q"` or `"cu_seqlens_k"`.
        name: &'static str,
    },
    /// Cumulative lengths begin with 0.
    #[error("{name}[0] is {found}, it must be 0")]
    CuSeqlensStart {
        /// `"cu_seqlens_q"` or `"cu_seqlens_k"`.
        name: &'static str,
        /// The first offset.
        found: usize,
    },
    /// A sequence would end before it begins.
    #[error("{name}[{index}] is {found}, less than the {previous} before it")]
    CuSeqlensFall {
        /// `"cu_seqlens_q"` or `"cu_seqlens_k"`.
        name: &'static str,
        /// The first offset that is less than the one before it.
        index: usize,
        /// That offset.
        found: usize,
        /// The one before it.
        previous: usize,
    },
    /// The last sequence ends behind the tensor.
    #[error("{name}[{index}] is {found}, the tensor has {total} positions")]
    CuSeqlensTooLong {
        /// `"cu_seqlens_q"` or `"cu_seqlens_k"`.
        name: &'static str,
        /// Index of the last offset.
        index: usize,
        /// The last offset.
        found: usize,
        /// Positions of `q`, or of `k` and `v`.
        total: usize,
    },
    /// The two lists of cumulative lengths are of different numbers of sequences.
    #[error("cu_seqlens_q holds {q} offsets, cu_seqlens_k holds {k}")]
    CuSeqlensLenMismatch {
        /// Offsets in `cu_seqlens_q`.
        q: usize,
        /// Offsets in `cu_seqlens_k`.
        k: usize,
    },
    /// Some of a tensor's positions were asked for that it does not have.
    #[error("positions {start}..{end} of a tensor that has {seq}")]
    SeqRangeOutOfBounds {
        /// The first position asked for.
        start: usize,
        /// The end of the range, which must not be before its start.
        end: usize,
        /// Positions of the tensor.
        seq: usize,
    },
    /// Partial results that are to be merged have different shapes.
    #[error("{tensor} of partial result {index} has shape {found:?}, expected {expected:?}")]
    PartialShapeMismatch {
        /// `"out"` or `"logsumexp"`.
        tensor: &'static str,
        /// Index in the list of partial results; 0 where there is no list.
        index: usize,
        /// Shape that the merged result has.
        expected: [usize; 4],
        /// Shape of the tensor.
        found: [usize; 4],
    },
    /// Partial results were to be merged into new memory, but there are none that say how much.
    #[error("0 partial results to merge, at least 1 is needed to know their shape")]
    NoPartials,
    /// A partial result was to be added to outputs without `logsumexp`, which says how much theirs weighs.
    #[error("outputs of shape {shape:?} have no logsumexp, which a partial result needs to be added to them")]
    MissingLogsumexp {
        /// Shape of the outputs.
        shape: [usize; 4],
    },
    /// A sequence is longer than the tensors of its keys and values.
    #[error("kv_lens[{index}] is {found}, k and v have room for {kv_len}")]
    KvLenTooLong {
        /// Index in the batch.
        index: usize,
        /// The length given.
        found: usize,
        /// Sequence length of `k` and `v`.
        kv_len: usize,
    },
    /// `k` and `q` have different head dimensions.
    #[error("k has head_dim {k}, q has head_dim {q}")]
    HeadDimMismatch {
        /// Head dimension of `q`.
        q: usize,
        /// Head dimension of `k`.
        k: usize,
    },
    /// `out` and `v` have different value dimensions.
    #[error("out has value_dim {out}, v has value_dim {v}")]
    ValueDimMismatch {
        /// Value dimension of `v`.
        v: usize,
        /// Value dimension of `out`.
        out: usize,
    },
    /// `head_dim` is 0, so there is nothing to take a product of.
    #[error("head_dim is 0 (in shape {shape:?}), it must be at least 1")]
    ZeroHeadDim {
        /// Shape of `q`, or of the keys of a cache.
        shape: [usize; 4],
    },
    /// The slice for `logsumexp` is not `batch * num_heads * q_len` long.
    #[error("logsumexp holds {found} elements, batch * num_heads * q_len is {expected}")]
    LogsumexpLenMismatch {
        /// `batch * num_heads * q_len`.
        expected: usize,
        /// Length of the slice.
        found: usize,
    },
    /// `softmax_scale` is NaN, infinite, or too large for the accumulator.
    #[error("softmax_scale is {value}, it must be finite in the accumulator's type (in f32 at most 3.4e38)")]
    InvalidSoftmaxScale {
        /// The value given.
        value: f64,
    },
    /// `softcap` is NaN, infinite, not above 0, or so small or large that the accumulator cannot hold it or `2 / softcap`.
    #[error("softcap is {value}, it must be above 0, and it and 2 / softcap finite in the accumulator's type")]
    InvalidSoftcap {
        /// The value given.
        value: f64,
    },
    /// A mask or bias has an axis that is neither that of the scores nor 1.
    #[error("{operand} has shape {found:?}, the scores have {expected:?} (axes of size 1 are broadcast)")]
    ScoreShapeMismatch {
        /// `"mask"` or `"bias"`.
        operand: &'static str,
        /// `[batch, num_heads, q_len, kv_len]`.
        expected: [usize; 4],
        /// Shape of the operand.
        found: [usize; 4],
    },
    /// There is not one number for each head.
    #[error("{operand} holds {found} numbers, there are {expected} query heads")]
    HeadNumbersMismatch {
        /// `"alibi_slopes"` or `"sinks"`.
        operand: &'static str,
        /// Heads of `q`.
        expected: usize,
        /// Numbers given.
        found: usize,
    },
    /// The workspace or the number of tasks of this shape does not fit in `isize`.
    #[error("a call of {shape:?} exceeds the address space")]
    PlanOverflow {
        /// The shape asked for.
        shape: crate::AttentionShape,
    },
    /// The system has no memory for the workspace, the output or the cache.
    #[error("{bytes} bytes cannot be allocated")]
    AllocationFailed {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The weights of a head were asked for that the inputs do not have.
    #[error("head {head} does not exist, q has {num_heads}")]
    HeadOutOfRange {
        /// The head asked for, from 0.
        head: usize,
        /// Heads of `q`.
        num_heads: usize,
    },
    /// The weights of a query were asked for that the inputs do not have.
    #[error("query row {row} does not exist, q has {q_len}")]
    QueryRowOutOfRange {
        /// The query asked for, from 0.
        row: usize,
        /// Sequence length of `q`.
        q_len: usize,
    },
    /// A plan was run on tensors of another shape.
    #[error("the plan is for {planned:?}, the tensors have {found:?}")]
    PlanShapeMismatch {
        /// The shape that the plan was made for.
        planned: crate::AttentionShape,
        /// The shape of the tensors.
        found: crate::AttentionShape,
    },
    /// The workspace is smaller than the plan asks for.
    #[error("the workspace holds {len} bytes, the plan needs {needed}")]
    WorkspaceTooSmall {
        /// `plan.workspace_len()`.
        needed: usize,
        /// `workspace.len()`.
        len: usize,
    },
    /// No instruction set has this name.
    #[error("no instruction set is called {name:?}, this machine has: {available}")]
    UnknownInstructionSet {
        /// The name given.
        name: String,
        /// The names that this machine accepts.
        available: String,
    },
    /// The instruction set exists, but this CPU or build does not have it.
    #[error("this CPU does not have the instruction set {name:?}, it has: {available}")]
    UnavailableInstructionSet {
        /// The name given.
        name: String,
        /// The names that this machine accepts.
        available: String,
    },
    /// A cache has no layer of this number.
    #[error("layer {layer} does not exist, the cache has {num_layers}")]
    LayerOutOfRange {
        /// The layer asked for, from 0.
        layer: usize,
        /// Layers of the cache.
        num_layers: usize,
    },
    /// A cache has no sequence of this number.
    #[error("sequence {sequence} does not exist, the cache has a batch of {batch}")]
    SequenceOutOfRange {
        /// The sequence asked for, from 0.
        sequence: usize,
        /// Sequences of the cache.
        batch: usize,
    },
    /// Tokens for a cache have other sizes than its own.
    #[error("{tensor} to append has shape {found:?}, the cache takes {expected:?}")]
    AppendShapeMismatch {
        /// `"k"` or `"v"`.
        tensor: &'static str,
        /// `[batch (1 for a single sequence), num_kv_heads, any number of tokens, head_dim or value_dim]`.
        expected: [usize; 4],
        /// Shape of the tensor.
        found: [usize; 4],
    },
    /// A cache of fixed capacity has no room for the tokens.
    #[error("sequence {sequence} of layer {layer} holds {len} tokens, {tokens} more exceed its capacity of {capacity}")]
    CacheFull {
        /// The layer appended to.
        layer: usize,
        /// The fullest of the sequences appended to.
        sequence: usize,
        /// Tokens that it holds.
        len: usize,
        /// Tokens to be added.
        tokens: usize,
        /// Tokens that there is memory for.
        capacity: usize,
    },
    /// A cache was to keep more tokens than it holds.
    #[error("cannot truncate to {new_len} tokens, sequence {sequence} of layer {layer} holds {len}")]
    TruncateBeyondLen {
        /// The first layer that holds fewer.
        layer: usize,
        /// The sequence in that layer.
        sequence: usize,
        /// Tokens that it holds.
        len: usize,
        /// Tokens to be kept.
        new_len: usize,
    },
    /// The features of a token cannot be divided evenly among heads.
    #[error("d_model of {d_model} cannot be divided among {num_heads} heads")]
    ModelNotDivisible {
        /// Features of a token.
        d_model: usize,
        /// Query heads.
        num_heads: usize,
    },
    /// A slice of weights is not as long as its shape says.
    #[error("the weights are {len} numbers, shape {shape:?} has {} of them", .shape[0].saturating_mul(.shape[1]))]
    WeightLenMismatch {
        /// In the order of the storage.
        shape: [usize; 2],
        /// Numbers in the slice.
        len: usize,
    },
    /// A bias does not have a number for each output.
    #[error("the bias holds {found} numbers, the projection has {expected} outputs")]
    BiasLenMismatch {
        /// Outputs of the projection.
        expected: usize,
        /// Numbers in the bias.
        found: usize,
    },
    /// A projection does not fit the sizes of its layer.
    #[error("projection {projection} maps {} features to {}, the layer needs {} to {}", .found[0], .found[1], .expected[0], .expected[1])]
    ProjectionShapeMismatch {
        /// `"q"`, `"k"`, `"v"`, `"qkv"` or `"out"`.
        projection: &'static str,
        /// `[in, out]` features that the sizes ask for.
        expected: [usize; 2],
        /// `[in, out]` features of the projection.
        found: [usize; 2],
    },
    /// A fused projection reads one kind of tokens, the layer two.
    #[error("a fused QKV projection cannot read d_model of {d_model} and d_source of {d_source}")]
    FusedSourceMismatch {
        /// Features of what Q is projected from.
        d_model: usize,
        /// Features of what K and V are projected from.
        d_source: usize,
    },
    /// Tokens have another number of features than the layer reads.
    #[error("{tensor} has {found} features, the layer reads {expected}")]
    FeaturesMismatch {
        /// `"x"` or `"source"`.
        tensor: &'static str,
        /// `d_model` or `d_source`.
        expected: usize,
        /// Features of the tensor.
        found: usize,
    },
    /// A slice of tokens is not as long as its shape says.
    #[error("{tensor} holds {len} numbers, shape {shape:?} has another number of them")]
    FeaturesLenMismatch {
        /// `"x"`, `"source"` or `"out"`.
        tensor: &'static str,
        /// `[batch, tokens, features]`.
        shape: [usize; 3],
        /// Numbers in the slice.
        len: usize,
    },
    /// Cross-attention was to append to a cache, which holds the keys of past tokens of `x`.
    #[error("{operand} cannot be given for a step over a cache")]
    NotWithCache {
        /// The operand.
        operand: &'static str,
    },
    /// A rotary embedding turns pairs of features.
    #[error("rotary_dim is {rotary_dim}, it must be even and at least 2")]
    InvalidRotaryDim {
        /// The number given.
        rotary_dim: usize,
    },
    /// A rotary embedding turns more features than a head has.
    #[error("rotary_dim is {rotary_dim}, a head has {head_dim} features")]
    RotaryDimTooLarge {
        /// Features that it turns.
        rotary_dim: usize,
        /// Features of a head.
        head_dim: usize,
    },
    /// A number of a rotary embedding is not above its lower limit and finite.
    #[error("{name} of a rotary embedding is {value}, it must be finite and above {above}")]
    InvalidRotaryNumber {
        /// `"base"`, `"factor"`, `"low_freq_factor"`, `"high_freq_factor"`, `"original_len"`, or what they give.
        name: &'static str,
        /// The number given.
        value: f64,
        /// What it must exceed.
        above: f64,
    },
    /// A file has no tensor of this name.
    #[error("there is no tensor {tensor:?}")]
    TensorMissing {
        /// The name asked for.
        tensor: String,
    },
    /// A tensor of a file has another shape than the layer needs.
    #[error("tensor {tensor:?} has shape {found:?}, expected {expected:?}")]
    TensorShapeMismatch {
        /// Its name.
        tensor: String,
        /// The shape that the layer needs.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor of a file has another element type than was asked for.
    #[error("tensor {tensor:?} is of {found}, expected {expected}")]
    TensorTypeMismatch {
        /// Its name.
        tensor: String,
        /// The element type asked for.
        expected: &'static str,
        /// The element type in the file.
        found: String,
    },
}
