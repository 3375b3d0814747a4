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
//! 1. Scores are kept times `log2(e)`, so that `exp` is an `exp2`: the integer part goes into the exponent by an addition, a polynomial makes the rest.
//! 2. While no maximum of a panel rises, `rescale` is 1 everywhere and is left out.
//! 3. A row that has seen no key yet has `m` of negative infinity; its `rescale` is taken as 0, which `exp(-inf - -inf)` is not.
//! 4. What is visible decides only which blocks are computed and which of their scores are set to negative infinity. Blocks that nobody sees are never read; V of a hidden key is
//!    taken as 0 where it is not finite, so that `0 * NaN` does not reach anyone.
//!
//! # Prefill: rows in the lanes
//! A task is up to 512 rows of one KV head; the queries of a group of heads are rows side by side, as they read the same keys. Its Q is packed once into panels of some 16 rows, feature by
//! feature, so that a vector holds one feature of several rows. Then, for every block of 192 keys and every panel:
//!
//! ```text
//! scores tile   keys x rows: for each feature, load a vector or two of Q, broadcast k, multiply and add       registers: 12 x 2 accumulators (AVX-512)
//! softmax       down the columns: maximum, exponential, sum; vertical operations, a row in each lane         from L1 to L1
//! values tile   features x rows: for each key, load a vector or two of probabilities, broadcast v            registers: the same tile
//! ```
//!
//! With rows in the lanes the softmax needs no shuffles, the causal edge is a comparison with a vector of row numbers, and both products are the same tile: two loads of vectors and some broadcasts,
//! which the multiply-add takes from memory, for 24 multiply-adds.
//!
//! # Decode: features in the lanes
//! With up to 8 rows (queries times heads of a group) most lanes would be empty. Then `head_dim` lies in the lanes: K is read as it lies in memory, a few rows at a time are multiplied with it and summed
//! across, and V is accumulated by rows. K and V are read once for all rows, in blocks of 32 keys, while later ones are prefetched; numbers of 16 bits are widened in registers.
//!
//! # Threads, and why bits do not depend on them
//! Rows are independent, so tasks are handed out as threads come. Where few rows meet many keys (up to 256 rows of a KV head), the keys are cut into chunks of a
//! fixed size, each a task that leaves `m`, `l` and `o`; the last one to finish merges them in the order of the keys. What is added to what is decided by the shape alone.
//!
//! # What it costs
//! `2 * (head_dim + value_dim)` operations for every visible score, and an `exp2` of about 10 instructions for each, which is a few percent at 128 features and more at 32. K and V are read
//! once for every 512 rows. The workspace of a thread is below 2 MiB for `head_dim + value_dim <= 512`
//! ([`AttentionPlan::workspace_len`](crate::AttentionPlan::workspace_len)).
//!
//! # Sources
//! - Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018, <https://arxiv.org/abs/1805.02867>
//! - Dao, Fu, Ermon, Rudra and Ré, *FlashAttention*, 2022, <https://arxiv.org/abs/2205.14135>; Dao, *FlashAttention-2*, 2023, <https://arxiv.org/abs/2307.08691>
//! - Ainslie et al., *GQA*, 2023, <https://arxiv.org/abs/2305.13245>
//! - Press, Smith and Lewis, *Train short, test long* (ALiBi), 2021, <https://arxiv.org/abs/2108.12409>
//! - Liu, Zaharia and Abbeel, *Ring attention*, 2023, <https://arxiv.org/abs/2310.01889>
