//! One example for each task.
//!
//! # A prompt
//! Many queries, as many keys, causal. Tensors are slices with a shape; [`TensorView::from_bshd`](crate::TensorView::from_bshd) reads memory in
//! which the heads of a token lie side by side, which is what a projection writes.
//!
//! ```
//! use fused_attention::*;
//! let (heads, kv_heads, tokens, head_dim) = (8, 2, 100, 64);
//! let q = vec![0.1f32; tokens * heads * head_dim];
//! let (k, v) = (vec![0.2f32; tokens * kv_heads * head_dim], vec![0.3f32; tokens * kv_heads * head_dim]);
//! let inputs = AttentionInputs::new(
//!     TensorView::from_bshd(&q, [1, tokens, heads, head_dim])?,
//!     TensorView::from_bshd(&k, [1, tokens, kv_heads, head_dim])?,
//!     TensorView::from_bshd(&v, [1, tokens, kv_heads, head_dim])?,
//! );
//! // Into memory of one's own, token by token as the output projection reads it.
//! let mut out = vec![0.0; tokens * heads * head_dim];
//! let view = TensorViewMut::from_bshd(&mut out, [1, tokens, heads, head_dim])?;
//! attention_into(&inputs, &mut AttentionOutputs::new(view), &AttentionConfig::causal())?;
//! # assert!((out[0] - 0.3).abs() < 1e-6);
//! # Ok::<(), AttentionError>(())
//! ```
//!
//! # A decode loop
//! A [`KvCache`](crate::KvCache) holds the past of all layers, here in `f16`. Each step appends a token and attends from it; the causal mask is
//! aligned to the end of what the cache holds.
//!
//! ```
//! use fused_attention::*;
//! let (layers, heads, kv_heads, head_dim) = (2, 8, 2, 64);
//! let shape = KvCacheShape { num_layers: layers, batch: 1, num_kv_heads: kv_heads, head_dim, value_dim: head_dim };
//! let mut cache = KvCache::<f16>::new(&shape, Capacity::Growing(256))?;
//! for _token in 0..3 {
//!     for layer in 0..layers {
//!         // What the projections of this token gave.
//!         let (q, kv) = (vec![0.1f32; heads * head_dim], vec![0.2f32; kv_heads * head_dim]);
//!         let q = TensorView::from_bshd(&q, [1, 1, heads, head_dim])?;
//!         let kv = TensorView::from_bshd(&kv, [1, 1, kv_heads, head_dim])?;
//!         cache.append(layer, &kv, &kv)?;
//!         let inputs = AttentionInputs::new(q, cache.k(layer)?, cache.v(layer)?).with_kv_lens(cache.lens(layer)?);
//!         let out = attention(&inputs, &AttentionConfig::causal())?;
//!         assert_eq!(out.len(), heads * head_dim);
//!     }
//! }
//! assert_eq!(cache.lens(1)?, [3]);
//! cache.truncate(2)?; // a token was rejected
//! # Ok::<(), AttentionError>(())
//! ```
//!
//! # A long prompt in chunks
//! The queries of a chunk see all keys before them: that is the causal mask as it is by default, which ends at the last key.
//!
//! ```
//! use fused_attention::*;
//! let (tokens, chunk, dim) = (10, 4, 8);
//! let x: Vec<f32> = (0..tokens * dim).map(|i| (i as f32).sin()).collect();
//! let all = TensorView::from_bhsd(&x, [1, 1, tokens, dim])?;
//! let whole = attention(&AttentionInputs::new(all, all, all), &AttentionConfig::causal())?;
//! for start in (0..tokens).step_by(chunk) {
//!     let end = tokens.min(start + chunk);
//!     let (q, kv) = (all.seq_range(start..end)?, all.seq_range(0..end)?);
//!     let out = attention(&AttentionInputs::new(q, kv, kv), &AttentionConfig::causal())?;
//!     for (found, expected) in out.iter().zip(&whole[start * dim..]) {
//!         assert!((found - expected).abs() < 1e-6);
//!     }
//! }
//! # Ok::<(), AttentionError>(())
//! ```
//!
//! # A padded batch, and a packed one
//! Padded: every sequence has room for the longest, and [`with_kv_lens`](crate::AttentionInputs::with_kv_lens) says how much of it is in use.
//! Packed: the sequences lie behind one another, and [`attention_varlen`](crate::attention_varlen()) is told where each begins.
//!
//! ```
//! use fused_attention::*;
//! let dim = 8;
//! // Padded: two sequences of 3 and 5 keys, one query each.
//! let (q, kv) = (vec![0.5f32; 2 * dim], vec![0.25f32; 2 * 5 * dim]);
//! let (q, kv) = (TensorView::from_bhsd(&q, [2, 1, 1, dim])?, TensorView::from_bhsd(&kv, [2, 1, 5, dim])?);
//! let padded = attention(&AttentionInputs::new(q, kv, kv).with_kv_lens(&[3, 5]), &AttentionConfig::full())?;
//! # assert_eq!(padded.len(), 2 * dim);
//!
//! // Packed: the same two, of which the first has 3 tokens and the second 5, each attending to itself.
//! let x = vec![0.5f32; 8 * dim];
//! let x = TensorView::from_bshd(&x, [1, 8, 1, dim])?;
//! let cu_seqlens = [0, 3, 8];
//! let packed =
//!     attention_varlen(&AttentionInputs::new(x, x, x), CuSeqlens::same(&cu_seqlens), &AttentionConfig::causal())?;
//! # assert_eq!(packed.len(), 8 * dim);
//! # Ok::<(), AttentionError>(())
//! ```
//!
//! # A sliding window, sinks, a bias
//! Masks and score modifiers combine freely, see [`AttentionConfig`](crate::AttentionConfig) and
//! [`AttentionInputs`](crate::AttentionInputs).
//!
//! ```
//! use fused_attention::*;
//! let (heads, tokens, dim) = (2, 6, 8);
//! let x = vec![0.5f32; heads * tokens * dim];
//! let x = TensorView::from_bhsd(&x, [1, heads, tokens, dim])?;
//! let (sinks, bias) = ([0.1, -0.3], vec![0.0f32; tokens * tokens]);
//! let inputs = AttentionInputs::new(x, x, x)
//!     .with_sinks(&sinks)
//!     .with_bias(TensorView::from_bhsd(&bias, [1, 1, tokens, tokens])?); // the same for all heads, not copied
//! // Each query sees the last 4 keys, its own included, and the first two.
//! let config = AttentionConfig::sliding_window(4).with_prefix_len(2).with_softcap(30.0);
//! let out = attention(&inputs, &config)?;
//! # assert_eq!(out.len(), heads * tokens * dim);
//! # Ok::<(), AttentionError>(())
//! ```
//!
#![cfg_attr(
    feature = "multi-head",
    doc = r#"# A whole layer
[`MultiHeadAttention`](crate::MultiHeadAttention) holds the weights, and runs the projections too.

```
use fused_attention::*;
let d_model = 16;
let shape = MultiHeadShape::new(d_model, 4)?; // 4 heads of 4
let weight = || Projection::from_out_in(vec![0.1f32; d_model * d_model], [d_model, d_model]);
let layer = MultiHeadAttention::new(shape, weight()?, weight()?, weight()?, weight()?)?;
let x = vec![1.0f32; 3 * d_model];
let out = layer.forward(&MultiHeadInputs::new(&x, [1, 3, d_model]), &AttentionConfig::causal())?;
assert_eq!(out.len(), 3 * d_model);
# Ok::<(), AttentionError>(())
```
"#
)]
//! # No allocation, chosen threads, a chosen instruction set
//! An [`AttentionPlan`](crate::AttentionPlan) is made once for a shape, and its workspace is yours. Threads are those of the rayon pool that a call
//! comes from. Threads change no bit of the result, nor does planning ahead; another instruction set does.
//!
//! ```
//! use fused_attention::*;
//! let config = AttentionConfig::causal()
//!     .with_parallelism(Parallelism::Serial) // touches no pool
//!     .with_instruction_set(InstructionSet::from_name("portable")?); // an error where the CPU does not have it
//! let shape = AttentionShape {
//!     batch: 1, num_heads: 2, num_kv_heads: 2, q_len: 5, kv_len: 5, head_dim: 8, value_dim: 8,
//! };
//! let plan = AttentionPlan::new(&shape, &config)?;
//! let mut workspace = Workspace::for_plan(&plan)?;
//! let (x, mut out) = (vec![0.5f32; 2 * 5 * 8], vec![0.0; 2 * 5 * 8]);
//! for _layer in 0..12 {
//!     let x = TensorView::from_bhsd(&x, [1, 2, 5, 8])?;
//!     let mut outputs = AttentionOutputs::new(TensorViewMut::from_bhsd(&mut out, [1, 2, 5, 8])?);
//!     plan.run(&AttentionInputs::new(x, x, x), &mut outputs, &mut workspace)?;
//! }
//! println!("{plan}"); // what was chosen
//! # Ok::<(), AttentionError>(())
//! ```
