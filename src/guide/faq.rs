//! Questions and answers.
//!
//! # Why are there NaN in my output?
//! Because a NaN, or an infinity that makes one, is visible: in Q, in a K or V that the row may see, or in a bias. NaN shows in exactly the rows that
//! see it. What a mask, a window or a length hides cannot reach a row, even if it is NaN: the memory behind a cache's last token
//! may hold anything. A row that sees no key at all is 0, with a `logsumexp` of negative infinity (with sinks, the sink).
//!
//! # Where does the causal mask end?
//! At the last key: the last query sees all of them, whatever `q_len` and `kv_len` are. That is right for a prompt, for a step over a cache and for a chunk
//! of a prompt. PyTorch's `is_causal` begins at the first key instead; [`CausalAlignment`](crate::CausalAlignment) has both, and any offset.
//!
//! # Which memory order is fastest?
//! Prefill does not mind: it packs blocks whose rows lie far apart. Decode reads K and V once, as fast as memory gives them, which is fastest
//! where each KV head is one stream: [`from_bhsd`](crate::TensorView::from_bhsd), or a [`KvCache`](crate::KvCache). README.md says what token-major order costs.
//!
//! # How do I choose the number of threads?
//! By the rayon pool that you call from: `pool.install(|| attention(..))`. Without one it is rayon's global pool. [`Parallelism::Serial`](crate::Parallelism::Serial) touches none, for
//! servers with a thread for each request. Calls too small to share ([`SERIAL_BELOW_FLOPS`](crate::SERIAL_BELOW_FLOPS)) run where they are called. Calls from several threads at once, from
//! inside a pool or from a parallel iterator are fine.
//!
//! # Are results deterministic?
//! Yes: the same bits on any number of threads, for any strides, and whatever else is in the batch, on one instruction set and in one version. Between instruction
//! sets results differ by roundings, as sums are taken in another order.
//! `MultiHeadAttention` promises that only for the same call on as many threads, since `gemm` does.
//!
//! # How exact is it?
//! Against attention in f64 the error is at most twice that of textbook attention in f32, plus `8 * eps * max |V|`. Elements of 16 bits are widened exactly and
//! accumulated in f32, and a result of 16 bits is rounded once. (With `avx512-bf16`, the default on AMD's CPUs that have it, what is below 2^-126 counts as 0 in the scores of prefill with Q and K of `bf16`, see
//! [`InstructionSet`](crate::InstructionSet).) The tests hold every instruction set and pair of element types to that.
//!
//! # What does it allocate?
//! [`attention`](crate::attention()) its output and, like [`attention_into`](crate::attention_into), a workspace, once per calling thread; an [`AttentionPlan`](crate::AttentionPlan) with a
//! [`Workspace`](crate::Workspace) of yours nothing, where it is serial or called from inside a pool. Nothing anywhere grows with `q_len * kv_len`.
//!
//! # May masks be large? Are they copied?
//! They are read where they are, with any strides; an axis of size 1 or stride 0 is broadcast. Windows, prefixes, lengths and the causal edge need no tensor at all, and what
//! they hide is skipped. So are blocks of a boolean mask that are all false. A bias is read wherever it is visible.
//!
//! # Why is a short call no faster on more threads?
//! Waking a thread takes some microseconds. A call of fewer than 2^19 operations takes hardly longer as a whole.
//!
//! # Can I have gradients?
//! No. [`AttentionOutputs::with_logsumexp`](crate::AttentionOutputs::with_logsumexp) gives what a backward pass would start from.
//!
//! # Can I see the attention weights?
//! Some of them: [`attention_weights`](crate::attention_weights()) computes those of the heads and queries that you name, and never more.
//!
//! # Which CPU runs which code?
//! [`InstructionSet::detect`](crate::InstructionSet::detect) says; a plan prints it. The environment variable `FUSED_ATTENTION_INSTRUCTION_SET` forces one for a process,
//! [`with_instruction_set`](crate::AttentionConfig::with_instruction_set) for a call. Nothing has to be compiled for a CPU: no `target-cpu` flag is needed.
