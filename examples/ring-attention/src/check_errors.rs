//! Wrong calls: the same error on every rank, whoever was wrong, and the next call works.

use fused_attention::{AttentionConfig, AttentionError};
use ring_attention::{CacheShard, DecodeShape, Ring, RingError, RingPlan, RingShape, Share, Shares};

use crate::Result;
use crate::inputs::Tensors;

const SHAPE: RingShape = RingShape { batch: 1, num_heads: 4, num_kv_heads: 2, head_dim: 8, value_dim: 8 };
const SEQ_LEN: usize = 64;

/// Gives how many.
pub fn check(ring: &Ring) -> Result<usize> {
    let (last, ranks) = (ring.ranks() - 1, ring.ranks());
    let is_last = ring.rank() == last;
    let shares = Shares::zig_zag(SEQ_LEN, ranks);
    let causal = AttentionConfig::causal();
    let plan = |shape: RingShape, shares: &Shares, config: AttentionConfig| {
        RingPlan::<f32>::new(ring, &shape, shares, &config, 16).map(|_| ()).err()
    };
    let mut checked = 0;
    let mut expect = |what: &str, found: Option<RingError>, is_expected: &dyn Fn(&RingError) -> bool| {
        checked += 1;
        match found {
            Some(error) if is_expected(&error) => Ok(()),
            other => Err(format!("{what}: {other:?}")),
        }
    };

    // The last rank differs. Alone, it can differ from nobody.
    if ranks > 1 {
        let differs = |field: &'static str, numbers: [u64; 2]| {
            move |error: &RingError| {
                let [expected, found] = numbers;
                *error == RingError::Disagreement { rank: last, field, expected, found }
            }
        };
        let shape = RingShape { head_dim: if is_last { 9 } else { 8 }, ..SHAPE };
        expect("head_dim", plan(shape, &shares, causal), &differs("head_dim", [8, 9]))?;
        let longer = Shares::zig_zag(SEQ_LEN + usize::from(is_last), ranks);
        expect("seq_len", plan(SHAPE, &longer, causal), &differs("a sequence length of", [64, 65]))?;
        let other = if is_last { Shares::contiguous(SEQ_LEN, ranks) } else { shares.clone() };
        let is_expected = |error: &RingError| matches!(error, RingError::Disagreement { rank, .. } if *rank == last);
        expect("shares", plan(SHAPE, &other, causal), &is_expected)?;
        let config = causal.with_window(is_last.then_some(7), None);
        expect("window", plan(SHAPE, &shares, config), &differs("window.left", [u64::MAX, 7]))?;
        let found = if is_last {
            RingPlan::<fused_attention::bf16>::new(ring, &SHAPE, &shares, &causal, 16).map(|_| ()).err()
        } else {
            plan(SHAPE, &shares, causal)
        };
        expect("element type", found, &differs("bytes of an element of K and V", [4, 2]))?;
    }
    // All are wrong together.
    let is_divisible = |error: &RingError| {
        *error == RingError::Attention(AttentionError::HeadsNotDivisible { num_heads: 4, num_kv_heads: 3 })
    };
    expect("heads", plan(RingShape { num_kv_heads: 3, ..SHAPE }, &shares, causal), &is_divisible)?;
    let more = Shares::zig_zag(SEQ_LEN, ranks + 1);
    let is_expected = |error: &RingError| *error == RingError::RanksMismatch { shares: ranks + 1, ranks };
    expect("ranks", plan(SHAPE, &more, causal), &is_expected)?;
    let zero = RingShape { num_kv_heads: 0, ..SHAPE };
    expect("no heads", plan(zero, &shares, causal), &|error| *error == RingError::Zero { field: "num_kv_heads" })?;

    // A tensor that is too short, on the last rank.
    let own = Tensors::<f32>::of_rank(&SHAPE, &shares, ring.rank());
    let mut right = RingPlan::new(ring, &SHAPE, &shares, &causal, 16)?;
    let (mut out, mut logsumexp) = (vec![7.0; own.q.len()], vec![7.0; own.q.len() / SHAPE.head_dim]);
    let k = if is_last { &own.k[1..] } else { &own.k };
    let found = right.run(ring, &Share { q: &own.q, k, v: &own.v }, &mut out, &mut logsumexp).err();
    let positions = shares.len_of(last);
    let expected = (positions * SHAPE.num_kv_heads * SHAPE.head_dim) as u64;
    let too_short = RingError::ShareLenMismatch { rank: last, tensor: "k", positions, expected, found: expected - 1 };
    expect("a short k", found, &|error| *error == too_short)?;
    if out.iter().chain(&logsumexp).any(|&x| x != 7.0) {
        return Err("a refused call has written".into());
    }

    // A part of a cache that is not what it says; the others hear who refused.
    let decode = DecodeShape { ring: SHAPE, q_len: 1, position: SEQ_LEN };
    let positions = if is_last { &[0..1][..] } else { shares.of(ring.rank()) };
    let shard = CacheShard { k: own.k(), v: own.v(), positions };
    let found = ring.decode(&decode, &causal, (0, &own.q[..SHAPE.num_heads * SHAPE.head_dim]), &shard).err();
    let is_expected = |error: &RingError| match error {
        RingError::ShardShapeMismatch { rank, tensor: "k", .. } => is_last && *rank == last,
        error => !is_last && *error == RingError::Refused { rank: last },
    };
    expect("a cache", found, &is_expected)?;

    let rights = right.run(ring, &Share { q: &own.q, k: &own.k, v: &own.v }, &mut out, &mut logsumexp);
    rights.map_err(|error| format!("after an error, a right call fails: {error}"))?;
    Ok(checked)
}
