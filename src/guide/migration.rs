//! Coming from candle, burn or PyTorch: which call is which, and what to look out for.
//!
//! All three hold tensors; this crate takes slices with a shape or strides, so nothing is copied on the way in. What differs most
//! is where a causal mask ends, whether `true` hides or shows, and in which order the output lies.
//!
//! # From candle
//! `candle_nn::attention::flash_attn(q, k, v, softmax_scale, mask, max_bias, softcap)` (0.11):
//!
//! | candle | here |
//! |---|---|
//! | Q, K, V `[batch, tokens, heads, features]`, contiguous | [`TensorView::from_bshd`](crate::TensorView::from_bshd) over `storage_and_layout()`'s slice; any other strides by [`with_strides`](crate::TensorView::with_strides) |
//! | output `[batch, heads, tokens, features]` | the same from [`attention`](crate::attention()); any order from [`attention_into`](crate::attention_into) |
//! | `softmax_scale` | [`with_softmax_scale`](crate::AttentionConfig::with_softmax_scale), by default `1 / sqrt(head_dim)` |
//! | `AttnMask::None` | [`AttentionConfig::full`](crate::AttentionConfig::full) |
//! | `AttnMask::Causal { kv_offset }` | [`AttentionConfig::causal`](crate::AttentionConfig::causal) where `kv_offset` is `kv_len - q_len`, which it is over a cache; else [`CausalAlignment::Offset`](crate::CausalAlignment::Offset) |
//! | `AttnMask::Mask(tensor)`, added | [`with_bias`](crate::AttentionInputs::with_bias), or [`with_mask`](crate::AttentionInputs::with_mask) where it only hides |
//! | `max_bias` (ALiBi) | [`with_alibi_slopes`](crate::AttentionInputs::with_alibi_slopes), with [`alibi_slopes`](crate::alibi_slopes) for `max_bias` of 8 |
//! | `softcap` | [`with_softcap`](crate::AttentionConfig::with_softcap) |
//! | `flash_attn_varlen_cpu`, lengths | [`attention_varlen`](crate::attention_varlen()), offsets: `[0, len0, len0 + len1, ..]` |
//! | batches: `f32` and `f16`, causal or none, no softcap | everything, for every element type |
//!
//! In place of `candle_nn::kv_cache::KvCache` there is [`KvCache`](crate::KvCache), which keeps each head of the keys as one stream, as decoding reads it, and can round `f32` to `f16` or `bf16` on the way in.
//!
//! # From burn
//! `burn::tensor::module::attention(query, key, value, mask, attn_bias, options)`, on the backend flex (0.22):
//!
//! | burn | here |
//! |---|---|
//! | `[batch, heads, tokens, features]` | [`TensorView::from_bhsd`](crate::TensorView::from_bhsd) over `TensorData::as_slice` |
//! | `mask`: **true hides** | [`with_mask`](crate::AttentionInputs::with_mask): **true may attend**, so the opposite |
//! | `attn_bias`, `options.softcap`, `options.scale` | [`with_bias`](crate::AttentionInputs::with_bias), [`with_softcap`](crate::AttentionConfig::with_softcap), [`with_softmax_scale`](crate::AttentionConfig::with_softmax_scale) |
//! | `options.is_causal`, aligned to the last key | [`AttentionConfig::causal`](crate::AttentionConfig::causal): the same |
//! | heads of the query a multiple of those of the keys | the same |
//! | `f16` and `bf16` tensors are converted whole on every call | blocks of them, into a workspace |
//! | a row that sees no key: zeros | the same |
//!
//! # From PyTorch
//! `torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)`:
//!
//! | PyTorch | here |
//! |---|---|
//! | `[batch, heads, tokens, features]`, any strides | [`TensorView::from_bhsd`](crate::TensorView::from_bhsd), [`with_strides`](crate::TensorView::with_strides) |
//! | `is_causal=True`, aligned to the **first** key | [`CausalAlignment::TopLeft`](crate::CausalAlignment::TopLeft) where `q_len` and `kv_len` differ. Over a cache the default is what one wants |
//! | `attn_mask` of bool, true may attend | [`with_mask`](crate::AttentionInputs::with_mask): the same |
//! | `attn_mask` of floats | [`with_bias`](crate::AttentionInputs::with_bias): the same |
//! | `enable_gqa=True` | always: query head `h` reads KV head `h / (num_heads / num_kv_heads)` |
//! | `scale` | [`with_softmax_scale`](crate::AttentionConfig::with_softmax_scale) |
//! | `dropout_p` | none: this is for inference, and for the forward pass |
//! | a row that sees no key: NaN, or zeros, by version and backend | zeros |
//!
//! `flash_attn_varlen_func` of FlashAttention is [`attention_varlen`](crate::attention_varlen()) with the same offsets, and `cache_seqlens` is
//! [`with_kv_lens`](crate::AttentionInputs::with_kv_lens). `nn.MultiheadAttention` stores its weights `[out, in]`, with those of Q, K and V on top of one another:
//! `MultiHeadAttention::from_fused_qkv` with `Projection::from_out_in`.
