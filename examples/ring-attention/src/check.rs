//! Results of all ranks against one process and against the reference in f64, under every mask and share.

use std::time::Duration;

use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, CausalAlignment, Parallelism, TensorViewMut, attention_into,
    bf16, reference,
};
use mpi::collective::SystemOperation;
use mpi::topology::SimpleCommunicator;
use mpi::traits::CommunicatorCollectives;
use ring_attention::{Report, Ring, RingPlan, RingShape, Share, Shares, Wire};

use crate::Result;
use crate::inputs::Tensors;
use crate::{check_decode, check_errors, memory};

const EPS: f64 = f32::EPSILON as f64;

/// One call.
pub struct Case {
    pub shape: RingShape,
    pub shares: Shares,
    pub config: AttentionConfig,
    pub block_keys: usize,
}

/// What all ranks found, together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Found {
    pub cases: usize,
    /// The largest error, as a part of what it may be.
    pub worst: f64,
    /// Of the bits of all outputs.
    pub digest: u64,
}

pub fn run(ring: &Ring, world: &SimpleCommunicator) -> Result<()> {
    // First: what other checks allocate would hide the peak.
    let memory = memory::check(ring, world)?;
    let mut found = Found::default();
    for case in cases(ring.ranks()) {
        check_case::<f32>(ring, world, &case, &mut found)?;
        check_case::<bf16>(ring, world, &case, &mut found)?;
    }
    check_traffic(ring, world)?;
    check_decode::check(ring, world, &mut found)?;
    let errors = check_errors::check(ring)?;
    if ring.rank() == 0 {
        println!("{memory}");
        println!("{errors} wrong calls are the same error on all ranks");
        println!("digest of all outputs: {:016x}", found.digest);
        println!(
            "{} calls on {} ranks agree with one process and with f64: largest error {:.2} of its bound",
            found.cases,
            ring.ranks(),
            found.worst
        );
    }
    Ok(())
}

fn cases(ranks: usize) -> Vec<Case> {
    let (causal, full) = (AttentionConfig::causal(), AttentionConfig::full());
    let configs = [
        causal,
        full,
        AttentionConfig::sliding_window(37),
        AttentionConfig::sliding_window(20).with_prefix_len(9),
        full.with_window(Some(25), Some(30)),
        full.with_window(Some(10), None),
        causal.with_prefix_len(50),
        causal.with_softcap(2.0).with_softmax_scale(0.4),
        causal.with_causal_alignment(CausalAlignment::Offset(-20)),
    ];
    let plain = RingShape { batch: 1, num_heads: 2, num_kv_heads: 2, head_dim: 16, value_dim: 16 };
    let grouped = RingShape { batch: 2, num_heads: 6, num_kv_heads: 2, head_dim: 20, value_dim: 12 };
    let uneven: Vec<usize> = [31, 0, 77, 2].into_iter().chain(std::iter::repeat(5)).take(ranks).collect();
    let uneven = Shares::with_lens(&uneven);
    let mut cases = Vec::new();
    for config in configs {
        for (shares, block_keys) in [
            (Shares::for_mask(&config, 131, ranks), 16),
            (Shares::zig_zag(96, ranks), 1000),
            (Shares::contiguous(75, ranks), 7),
            (uneven.clone(), 13),
        ] {
            cases.push(Case { shape: grouped, shares, config, block_keys });
        }
        for seq_len in [0, 1, ranks, 2 * ranks + 1] {
            cases.push(Case { shape: plain, shares: Shares::for_mask(&config, seq_len, ranks), config, block_keys: 4 });
        }
    }
    // Long enough for full blocks of the kernels, and for threads.
    let long = RingShape { batch: 1, num_heads: 4, num_kv_heads: 1, head_dim: 64, value_dim: 64 };
    for parallelism in [Parallelism::Serial, Parallelism::Rayon] {
        let config = causal.with_parallelism(parallelism);
        cases.push(Case { shape: long, shares: Shares::zig_zag(700, ranks), config, block_keys: 64 });
    }
    cases
}

/// Runs a case twice, the second time with other delays.
fn check_case<K: Wire>(ring: &Ring, world: &SimpleCommunicator, case: &Case, found: &mut Found) -> Result<()> {
    let Case { shape, shares, config, block_keys } = case;
    let own = Tensors::<K>::of_rank(shape, shares, ring.rank());
    let mut plan = RingPlan::new(ring, shape, shares, config, *block_keys)?;
    let mut run = || attend(ring, &mut plan, shape, &own);
    let first = run()?;
    std::thread::sleep(Duration::from_micros(ring.rank() as u64 * 300));
    let second = run()?;
    let bits = |(out, logsumexp): &(Vec<f32>, Vec<f32>)| -> Vec<u32> {
        out.iter().chain(logsumexp).map(|x| x.to_bits()).collect()
    };
    let is_repeatable = bits(&first) == bits(&second);
    let whole = Tensors::<K>::whole(shape, shares.seq_len());
    let positions: Vec<usize> = shares.positions(ring.rank()).collect();
    let errors = Errors::new(world, case, &whole, &positions, &first)?;
    found.cases += 1;
    found.worst = found.worst.max(errors.worst);
    let hash =
        bits(&first).iter().fold(ring.rank() as u64, |hash, &x| (hash ^ u64::from(x)).wrapping_mul(0x100_0000_01b3));
    found.digest = (found.digest.rotate_left(7)) ^ sum_of_all(world, hash);
    let is_right = is_repeatable && errors.worst <= 1.0;
    if !is_right {
        let what = format!("{} {shape:?} {shares:?} {config:?}, blocks of {block_keys}", K::NAME);
        eprintln!("rank {}: bits repeat: {is_repeatable}, {errors:?}: {what}", ring.rank());
    }
    if sum_of_all(world, u64::from(!is_right)) > 0 {
        return Err("results are wrong".into());
    }
    Ok(())
}

/// The output and logsumexp of one rank.
fn attend<K: Wire>(
    ring: &Ring,
    plan: &mut RingPlan<K>,
    shape: &RingShape,
    own: &Tensors<K>,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let rows = own.q.len() / shape.head_dim;
    let (mut out, mut logsumexp) = (vec![f32::NAN; rows * shape.value_dim], vec![f32::NAN; rows]);
    let share = Share { q: &own.q, k: &own.k, v: &own.v };
    plan.run(ring, &share, &mut out, &mut logsumexp)?;
    Ok((out, logsumexp))
}

/// Errors of this rank's rows.
#[derive(Debug)]
struct Errors {
    /// The larger of both, as a part of its bound.
    worst: f64,
    /// Against f64, and against one process.
    #[allow(dead_code)] // printed
    out: [f64; 2],
    #[allow(dead_code)]
    logsumexp: [f64; 2],
}

impl Errors {
    fn new<K: Wire>(
        world: &SimpleCommunicator,
        case: &Case,
        whole: &Tensors<K>,
        positions: &[usize],
        (out, logsumexp): &(Vec<f32>, Vec<f32>),
    ) -> Result<Self> {
        let Case { shape, shares, config, block_keys } = case;
        let RingShape { batch, num_heads, value_dim, .. } = *shape;
        let inputs = AttentionInputs::new(whole.q(), whole.k(), whole.v());
        let seq_len = shares.seq_len();
        let (mut one_out, mut one_lse) =
            (vec![0.0; batch * num_heads * seq_len * value_dim], vec![0.0; batch * num_heads * seq_len]);
        let view = TensorViewMut::from_bhsd(&mut one_out, [batch, num_heads, seq_len, value_dim])?;
        attention_into(&inputs, &mut AttentionOutputs::new(view).with_logsumexp(&mut one_lse), config)?;

        let (mut error, mut plain, mut max_v, mut max_lse) = ([[0.0f64; 2]; 2], [0.0f64; 2], 0.0f64, 1.0f64);
        for (row, (head, position)) in
            (0..batch * num_heads).flat_map(|head| positions.iter().map(move |&position| (head, position))).enumerate()
        {
            let index = [head / num_heads, head % num_heads, position];
            let right = reference::attention_row(&inputs, config, index)?;
            let of_one = (head * seq_len + position) * value_dim;
            let one = (&one_out[of_one..][..value_dim], one_lse[head * seq_len + position]);
            let found = (&out[row * value_dim..][..value_dim], logsumexp[row]);
            let exact = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            for (error, (out, logsumexp)) in error.iter_mut().zip([right.clone(), (exact(one.0), f64::from(one.1))]) {
                error[0] = error[0].max(difference(found.0, &out));
                error[1] = error[1].max(difference(&[found.1], &[logsumexp]));
            }
            let unfused = unfused(&inputs, config, index, right.1);
            plain[0] = plain[0].max(difference(&unfused.0, &right.0));
            plain[1] = plain[1].max(difference(&[unfused.1], &[right.1]));
            max_lse = if right.1.is_finite() { max_lse.max(right.1.abs()) } else { max_lse };
        }
        for &v in &whole.v {
            max_v = max_v.max(f64::from(v.value().abs()));
        }
        // A few rows may by luck be exact in plain arithmetic: the yardstick is the largest error of all ranks.
        let plain = plain.map(|error| max_of_all(world, error));
        let max_lse = max_of_all(world, max_lse);
        // Results that a row is merged from, each with a log-sum-exp off by a rounding, and the roundings of merging.
        let longest = (0..shares.ranks()).map(|rank| shares.len_of(rank)).max().unwrap_or(0);
        let merges = (2 * (shares.ranks() * longest.div_ceil(*block_keys) + 2)) as f64;
        let bounds = [
            2.0 * plain[0] + 8.0 * EPS * max_v + max_v * EPS * (2.0 * max_lse + merges),
            2.0 * plain[1] + (8.0 + merges) * EPS * max_lse,
        ];
        let worst = error.map(|[out, logsumexp]| (out / bounds[0]).max(logsumexp / bounds[1]));
        let worst = max_of_all(world, worst[0].max(worst[1]));
        Ok(Self { worst, out: error.map(|error| error[0]), logsumexp: error.map(|error| error[1]) })
    }
}

/// Infinite where one is NaN or infinite and the other is not the same.
pub fn difference(found: &[f32], expected: &[f64]) -> f64 {
    let one = |(&found, &expected): (&f32, &f64)| {
        let found = f64::from(found);
        let difference = if found == expected { 0.0 } else { (found - expected).abs() };
        if difference.is_nan() { f64::INFINITY } else { difference }
    };
    found.iter().zip(expected).map(one).fold(0.0, f64::max)
}

/// One row in plain f32 with libm's exp. Which keys it sees says the reference, in whose logsumexp keys hidden have no part.
fn unfused<K: Wire>(
    inputs: &AttentionInputs<'_, f32, K>,
    config: &AttentionConfig,
    [batch, head, query]: [usize; 3],
    logsumexp: f64,
) -> (Vec<f32>, f32) {
    let ([_, num_heads, seq_len, head_dim], value_dim) = (inputs.q.shape(), inputs.v.shape()[3]);
    let kv_head = head / (num_heads / inputs.k.shape()[1]);
    let scale = config.softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt()) as f32;
    let q = |p| inputs.q.get([batch, head, query, p]).expect("inside");
    let k = |key, p| inputs.k.get([batch, kv_head, key, p]).expect("inside").value();
    let v = |key, d| inputs.v.get([batch, kv_head, key, d]).expect("inside").value();
    if logsumexp == f64::NEG_INFINITY {
        return (vec![0.0; value_dim], f32::NEG_INFINITY);
    }
    let visible: Vec<usize> = (0..seq_len).filter(|&key| shows(config, query, key)).collect();
    let score = |&key: &usize| {
        let score = scale * (0..head_dim).map(|p| q(p) * k(key, p)).sum::<f32>();
        config.softcap.map_or(score, |softcap| softcap as f32 * (score / softcap as f32).tanh())
    };
    let mut weights: Vec<f32> = visible.iter().map(score).collect();
    let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    weights.iter_mut().for_each(|weight| *weight = (*weight - max).exp());
    let sum: f32 = weights.iter().sum();
    let mean = |d| visible.iter().zip(&weights).map(|(&key, weight)| weight / sum * v(key, d)).sum();
    ((0..value_dim).map(mean).collect(), max + sum.ln())
}

/// Whether a query sees a key of the sequence.
pub fn shows(config: &AttentionConfig, query: usize, key: usize) -> bool {
    use fused_attention::Mask;
    let (offset, right) = match config.mask {
        Mask::Causal(CausalAlignment::Offset(offset)) => (offset as i64, Some(0)),
        Mask::Causal(_) => (0, Some(0)),
        _ => (0, config.window.right),
    };
    let (at, key) = (query as i64 + offset, key as i64);
    key < config.prefix_len as i64
        || (right.is_none_or(|right| key <= at + right as i64)
            && config.window.left.is_none_or(|left| key >= at - left as i64))
}

/// What is not seen is not sent.
fn check_traffic(ring: &Ring, world: &SimpleCommunicator) -> Result<()> {
    let shape = RingShape { batch: 1, num_heads: 1, num_kv_heads: 1, head_dim: 8, value_dim: 8 };
    let (seq_len, window, block_keys, ranks) = (1024, 50, 16, ring.ranks());
    let sent = |config: AttentionConfig, shares: Shares| -> Result<usize> {
        let own = Tensors::<f32>::of_rank(&shape, &shares, ring.rank());
        let mut plan = RingPlan::new(ring, &shape, &shares, &config, block_keys)?;
        let rows = own.q.len() / shape.head_dim;
        let (mut out, mut logsumexp) = (vec![0.0; rows * shape.value_dim], vec![0.0; rows]);
        let share = Share { q: &own.q, k: &own.k, v: &own.v };
        let report: Report = plan.run(ring, &share, &mut out, &mut logsumexp)?;
        let bytes = sum_of_all(world, report.bytes_sent) as usize;
        Ok(bytes / ((shape.head_dim + shape.value_dim) * size_of::<f32>()))
    };
    let contiguous = || Shares::contiguous(seq_len, ranks);
    let full = sent(AttentionConfig::full(), contiguous())?;
    let causal = sent(AttentionConfig::causal(), contiguous())?;
    let windowed = sent(AttentionConfig::sliding_window(window), contiguous())?;
    let zig_zag = sent(AttentionConfig::causal(), Shares::zig_zag(seq_len, ranks))?;
    // Every key to all others; to those behind; of each rank but the last, the blocks that the window reaches; all but the last chunk, which is rank 0's.
    let last_chunk = seq_len - (2 * ranks - 1) * seq_len / (2 * ranks);
    let of_all = (ranks - 1) * seq_len;
    let is_right = full == of_all
        && causal.abs_diff(of_all / 2) <= ranks * ranks
        && windowed >= (ranks - 1) * (window - 1)
        && windowed <= (ranks - 1) * (window - 1 + block_keys + 1)
        && zig_zag == of_all - (ranks - 1) * last_chunk;
    if !is_right {
        return Err(format!(
            "keys sent: full {full}, causal {causal}, window {windowed}, zig-zag {zig_zag} of {of_all}"
        )
        .into());
    }
    Ok(())
}

pub fn sum_of_all(world: &SimpleCommunicator, x: u64) -> u64 {
    let mut sum = 0u64;
    world.all_reduce_into(&x, &mut sum, SystemOperation::sum());
    sum
}

pub fn max_of_all(world: &SimpleCommunicator, x: f64) -> f64 {
    let mut max = 0.0f64;
    world.all_reduce_into(&x, &mut max, SystemOperation::max());
    max
}
