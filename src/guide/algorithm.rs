//! How it works, from the formula to the registers.
//!
//! # The formula
//! For every query `i` of every head, over the keys `j` that it may see:
//!
//! ```text
//! s_ij = softmax_scale * q_i . k_j           then softcap, ALiBi, modifier, bias
//! p_ij = exp(s_ij - m_i)                     m_i = max over j of s_ij
//! o_i  = sum_j p_ij v_j / sum_j p_ij
//! ```
//!
//! The textbook computes all `s_ij` first, `q_len * kv_len` numbers, writes them to memory, reads them for the softmax, writes them again, and reads them for the
//! product with V. At 16384 tokens that is 1 GiB for each head, moved four times.
//!
//! # One pass
//! Maximum and sum can be carried along (Milakov and Gimelshein 2018). Let a row have seen some keys, with the maximum `m`, the sum `l = sum p_j` and the output
//! `o = sum p_j v_j`, both relative to `m`. With the next block of keys the maximum becomes `m'`, and since `exp(s - m') = exp(s - m) exp(m - m')`,
//!
//! ```text
//! rescale = exp(m - m')
//! l' = l * rescale + sum over the block of exp(s_j - m')
//! o' = o * rescale + sum over the block of exp(s_j - m') v_j
//! ```
//!
//! At the end `o / l` is the output and `m + ln l` the `logsumexp`. No exponent is above 0, so nothing overflows, and the scores of a block need to live only until the next
//! one: they stay in the L1 cache (FlashAttention, Dao et al. 2022).
//!
//! Where the code departs from that:
//! 1. `log2(e)` is multiplied in inside the exponential, after the maximum was subtracted, where it costs nothing and rounds no score; in front of it, folded into Q, it
//!    would round each score by its size.
//! 2. The exponential of 0 is exactly 1, so a block that does not raise the maximum changes nothing of what was there.
//! 3. While a row has seen no key, its maximum is negative infinity, and 0 is subtracted instead: `-inf - -inf` would be NaN.
//! 4. What is visible decides only which blocks are computed and which of their scores are set to negative infinity. Blocks that nobody sees are never read. A weight of 0
//!    would not keep a NaN in V from a row (`0 * NaN`), so blocks with hidden keys are searched for what is not finite, and it is kept from those who do not see it.
//!
//! # Prefill: rows in the lanes
//! A task is up to 512 rows of one KV head; the queries of a group of heads are rows side by side, as they read the same keys. Its Q is packed once into panels of 8 to 32 rows, feature by
//! feature, so that a vector holds one feature of several rows. Then, for every block of 192 keys and every panel:
//!
//! ```text
//! scores tile   keys x rows: for each feature, load the vectors of Q, broadcast k, multiply and add       registers: 12 x 2 accumulators (AVX-512)
//! softmax       down the columns: maximum, exponential, sum; vertical operations, a row in each lane         from L1 to L1
//! values tile   features x rows: for each key, load the vectors of probabilities, broadcast v           registers: the same tile
//! ```
//!
//! Where the CPU multiplies pairs of bf16 fast (AMD's with AVX512-BF16) and Q and K hold it, a step of the scores tile is two features: a sum of the same products in `f32`, in half of the time.
//!
//! With rows in the lanes the softmax needs no shuffles, the causal edge is a comparison with a vector of row numbers, and both products are the same tile: two
//! vectors and twelve broadcasts are loaded for 24 multiply-adds.
//!
//! # Decode: features in the lanes
//! With up to 8 rows (queries times heads of a group) most lanes would be empty. Then `head_dim` lies in the lanes: K is read as it lies in memory, a few rows at a time are multiplied with it and summed
//! across, and V is accumulated by rows. K and V are read from memory once for all rows, in blocks of 32 keys, while later ones are prefetched; numbers of 16 bits are widened in registers.
//!
//! # Threads, and why bits do not depend on them
//! Rows are independent, so tasks are handed out as threads come. Where few rows meet many keys (up to 256 rows of a KV head), the keys are cut into chunks of a
//! fixed size, each a task that leaves `m`, `l` and `o`; the last one to finish merges them in the order of the keys. What is added to what is decided by the shape alone.
//!
//! # What it costs
//! `2 * (head_dim + value_dim)` operations for every visible score, and an exponential for each, which weighs the less the more features there are. K and V are read
//! once for every 512 rows. The workspace of a thread is below 2 MiB for `head_dim + value_dim <= 512`
//! ([`AttentionPlan::workspace_len`](crate::AttentionPlan::workspace_len)).
//!
//! # Sources
//! - Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018, <https://arxiv.org/abs/1805.02867>
//! - Dao, Fu, Ermon, Rudra and Ré, *FlashAttention*, 2022, <https://arxiv.org/abs/2205.14135>; Dao, *FlashAttention-2*, 2023, <https://arxiv.org/abs/2307.08691>
//! - Ainslie et al., *GQA*, 2023, <https://arxiv.org/abs/2305.13245>
//! - Press, Smith and Lewis, *Train short, test long* (ALiBi), 2021, <https://arxiv.org/abs/2108.12409>
//! - Liu, Zaharia and Abbeel, *Ring attention*, 2023, <https://arxiv.org/abs/2310.01889>
