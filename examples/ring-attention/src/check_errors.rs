//! Wrong calls: the same error on every rank, whoever was wrong, and the next call works.

use std::ops::Range;

use fused_attention::{AttentionConfig, AttentionError};
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::Communicator;
use ring_attention::{CacheShard, DecodeShape, Ring, RingError, RingPlan, RingShape, Share, Shares};

use crate::Result;
use crate::inputs::Tensors;

const SHAPE: RingShape = RingShape { batch: 1, num_heads: 4, num_kv_heads: 2, head_dim: 8, value_dim: 8 };
const SEQ_LEN: usize = 64;

/// Checks one call: its name, what it gave, and whether that is right.
type Expect<'a> = &'a mut dyn FnMut(&str, Option<RingError>, &dyn Fn(&RingError) -> bool) -> Result<()>;

/// Gives how many.
pub fn check(ring: &Ring, world: &SimpleCommunicator) -> Result<usize> {
    let (last, ranks) = (ring.ranks() - 1, ring.ranks());
    let is_last = ring.rank() == last;
    let shares = Shares::zig_zag(SEQ_LEN, ranks);
    let causal = AttentionConfig::causal();
    let plan = |shape: RingShape, shares: &Shares, config: AttentionConfig| {
        RingPlan::<f32>::new(ring, &shape, shares, &config, 16).map(|_| ()).err()
    };
    let mut checked = 0;
    let mut expect = |what: &str, found: Option<RingError>, is_expected: &dyn Fn(&RingError) -> bool| -> Result<()> {
        checked += 1;
        match found {
            Some(error) if is_expected(&error) => Ok(()),
            other => Err(format!("{what}: {other:?}").into()),
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
        expect_error_of_mixed_plans(ring, &shares, &mut expect)?;
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
    let endless = Shares::with_lens(&vec![usize::MAX; ranks]);
    expect("positions beyond counting", plan(SHAPE, &endless, causal), &is_too_long(usize::MAX))?;
    for wide in [1 << 59, usize::MAX] {
        for shape in [
            RingShape { batch: wide, ..SHAPE },
            RingShape { num_heads: wide - wide % 2, ..SHAPE },
            RingShape { head_dim: wide, ..SHAPE },
            RingShape { value_dim: wide, ..SHAPE },
        ] {
            expect("elements beyond counting", plan(shape, &shares, causal), &exceeds_the_address_space)?;
        }
    }

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
    if ranks > 1 {
        let alone = world.split_by_color(Color::with_value(ring.rank() as i32)).expect("a color gives a communicator");
        let share = Share { q: &own.q, k: &own.k, v: &own.v };
        let found = right.run(&Ring::new(&alone), &share, &mut out, &mut logsumexp).err();
        let is_expected = |error: &RingError| *error == RingError::RanksMismatch { shares: ranks, ranks: 1 };
        expect("a ring of others", found, &is_expected)?;
    }
    if out.iter().chain(&logsumexp).any(|&x| x != 7.0) {
        return Err("a refused call has written".into());
    }

    decode_errors(ring, &own, &shares, &mut expect)?;

    let rights = right.run(ring, &Share { q: &own.q, k: &own.k, v: &own.v }, &mut out, &mut logsumexp);
    rights.map_err(|error| format!("after an error, a right call fails: {error}"))?;
    Ok(checked)
}

/// The last rank runs another plan than the others.
fn expect_error_of_mixed_plans(ring: &Ring, shares: &Shares, expect: Expect<'_>) -> Result<()> {
    let causal = AttentionConfig::causal();
    let mut plans = [16, 17].map(|block_keys| RingPlan::<f32>::new(ring, &SHAPE, shares, &causal, block_keys));
    let last = ring.ranks() - 1;
    let plan = plans[usize::from(ring.rank() == last)].as_mut().map_err(|error| error.clone())?;
    let own = Tensors::<f32>::of_rank(&SHAPE, shares, ring.rank());
    let (mut out, mut logsumexp) = (vec![0.0; own.q.len()], vec![0.0; own.q.len() / SHAPE.head_dim]);
    let found = plan.run(ring, &Share { q: &own.q, k: &own.k, v: &own.v }, &mut out, &mut logsumexp).err();
    expect(
        "two plans",
        found,
        &|error| matches!(error, RingError::Disagreement { rank, field: "a plan of the fingerprint", .. } if *rank == last),
    )
}

fn decode_errors(ring: &Ring, own: &Tensors<f32>, shares: &Shares, expect: Expect<'_>) -> Result<()> {
    let (last, ranks) = (ring.ranks() - 1, ring.ranks());
    let is_last = ring.rank() == last;
    let right = DecodeShape { ring: SHAPE, q_len: 1, position: SEQ_LEN };
    let decode = |shape: DecodeShape, root: usize, positions: &[Range<usize>]| {
        let shard = CacheShard { k: own.k(), v: own.v(), positions };
        ring.decode(&shape, &AttentionConfig::causal(), (root, &own.q[..SHAPE.num_heads * SHAPE.head_dim]), &shard)
            .err()
    };
    let positions = shares.of(ring.rank());

    // A part of a cache that is not what it says; the others hear who refused.
    let found = decode(right, 0, if is_last { &[0..1] } else { positions });
    let is_expected = |error: &RingError| match error {
        RingError::ShardShapeMismatch { rank, tensor: "k", .. } => is_last && *rank == last,
        error => !is_last && *error == RingError::Refused { rank: last },
    };
    expect("a cache", found, &is_expected)?;
    let len = shares.len_of(last);
    for (wrong, [bound, behind]) in [
        (vec![9..9 + len - 1, 0..1], [8 + len, 0]),
        (vec![0..3, 2..len - 1], [3, 2]),
        (vec![0..len, Range { start: len + 2, end: len }], [len + 2, len]),
        (vec![0..usize::MAX, 0..len + 1], [usize::MAX, 0]),
    ] {
        let found = decode(right, 0, if is_last { &wrong } else { positions });
        let expected = RingError::PositionsNotAscending { rank: last, bound, behind };
        let is_expected =
            |error: &RingError| *error == if is_last { expected.clone() } else { RingError::Refused { rank: last } };
        expect("positions in another order", found, &is_expected)?;
    }

    let is_expected = |error: &RingError| *error == RingError::RootOutOfRange { root: ranks, ranks };
    expect("root", decode(right, ranks, positions), &is_expected)?;
    let late = DecodeShape { position: usize::MAX, ..right };
    expect("a position beyond counting", decode(late, 0, positions), &is_too_long(usize::MAX))?;
    let many = DecodeShape { q_len: 1 << 59, ..right };
    expect("queries beyond counting", decode(many, 0, positions), &exceeds_the_address_space)?;
    let long = DecodeShape { q_len: 1 << 28, ..right };
    let is_expected = |error: &RingError| *error == RingError::MessageTooLong { elements: (1 << 28) * 4 * 9 };
    expect("queries beyond a message", decode(long, 0, positions), &is_expected)
}

fn is_too_long(found: usize) -> impl Fn(&RingError) -> bool {
    move |error| matches!(error, RingError::SequenceTooLong { seq_len, .. } if *seq_len == found)
}

fn exceeds_the_address_space(error: &RingError) -> bool {
    matches!(error, RingError::Attention(AttentionError::PlanOverflow { .. }))
}
