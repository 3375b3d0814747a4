//! Prefill by the ring, then steps of decoding over the caches of all ranks, each against the reference.

use fused_attention::{AttentionConfig, AttentionInputs, Capacity, KvCache, KvCacheShape, TensorView, bf16, reference};
use mpi::topology::SimpleCommunicator;
use ring_attention::{CacheShard, DecodeShape, Ring, RingShape, Shares, Wire};

use crate::Result;
use crate::check::{Found, difference, max_of_all, sum_of_all};
use crate::inputs::Tensors;

const SHAPE: RingShape = RingShape { batch: 2, num_heads: 6, num_kv_heads: 2, head_dim: 20, value_dim: 12 };
const PROMPT: usize = 90;
const STEPS: usize = 7;
/// Values are below 3.5, a row is the mean of up to 100: plain f32 is off by less than 2e-6 here. Twice that, 8 roundings of 3.5, and a
/// few more for the tree.
const BOUND: f64 = 1.2e-5;

pub fn check(ring: &Ring, world: &SimpleCommunicator, found: &mut Found) -> Result<()> {
    let causal = AttentionConfig::causal();
    for config in [causal, AttentionConfig::sliding_window(30), AttentionConfig::sliding_window(12).with_prefix_len(5)]
    {
        for new_tokens in [1, 3] {
            generate::<f32>(ring, world, &config, new_tokens, found)?;
            generate::<bf16>(ring, world, &config, new_tokens, found)?;
        }
    }
    Ok(())
}

/// The keys of new tokens go to the ranks in turn, and so does the part of the root.
fn generate<K: Wire>(
    ring: &Ring,
    world: &SimpleCommunicator,
    config: &AttentionConfig,
    new_tokens: usize,
    found: &mut Found,
) -> Result<()> {
    let RingShape { batch, num_kv_heads, head_dim, value_dim, .. } = SHAPE;
    let shares = Shares::zig_zag(PROMPT, ring.ranks());
    let own = Tensors::<K>::of_rank(&SHAPE, &shares, ring.rank());
    let shape = KvCacheShape { num_layers: 1, batch, num_kv_heads, head_dim, value_dim };
    let mut cache = KvCache::<K>::new(&shape, Capacity::Growing(16))?;
    let mut positions = shares.of(ring.rank()).to_vec();
    cache.append(0, &own.k(), &own.v())?;
    for step in 0..STEPS {
        let first = PROMPT + step * new_tokens;
        let new = first..first + new_tokens;
        let owner = step % ring.ranks();
        let tokens = Tensors::<K>::of_positions(&SHAPE, &new.clone().collect::<Vec<_>>());
        if ring.rank() == owner {
            cache.append(0, &tokens.k(), &tokens.v())?;
            positions.push(new.clone());
        }
        let root = (step * 2 + 1) % ring.ranks();
        let shard = CacheShard { k: cache.k(0)?, v: cache.v(0)?, positions: &positions };
        let decode = DecodeShape { ring: SHAPE, q_len: new_tokens, position: first };
        let q: &[f32] = if ring.rank() == root { &tokens.q } else { &[] };
        let out = ring.decode(&decode, config, (root, q), &shard)?;

        let whole = Tensors::<K>::whole(&SHAPE, new.end);
        let q = TensorView::from_bhsd(&tokens.q, [batch, SHAPE.num_heads, new_tokens, head_dim])?;
        // With fewer queries than keys, they are the last ones.
        let right = reference::attention(&AttentionInputs::new(q, whole.k(), whole.v()), config)?;
        let error = max_of_all(world, difference(&out, &right.out));
        found.cases += 1;
        found.worst = found.worst.max(error / BOUND);
        let digest = out.iter().fold(0u64, |hash, x| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x100_0000_01b3));
        found.digest = found.digest.rotate_left(7) ^ sum_of_all(world, digest);
        if error > BOUND {
            return Err(format!("{} step {step} of {new_tokens} tokens, {config:?}: off by {error:e}", K::NAME).into());
        }
    }
    Ok(())
}
