//! Many calls at once, from threads and pools of any size and from each other: every one ends, with the bits of a serial call, and memory stays flat.
//!
//! One test at a time, since they measure memory and the clock. `cargo test --release --test load -- --ignored` runs random shapes for a minute, or
//! for `FUSED_ATTENTION_LOAD_SECONDS`.
#![cfg(feature = "rayon")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Barrier, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use common::{Generator, Operands, Problem, by_profile, instruction_sets, one_head};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, CuSeqlens, Parallelism,
    ScoreContext, ScoreModifier, ScoreVector, attention, attention_into_with_modifier, attention_varlen, f16,
};
use rayon::prelude::*;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Fails if this has not ended after so long: a deadlock is not to be waited for.
fn within(limit: Duration, run: impl FnOnce() + Send + 'static) {
    let (ended, end) = channel();
    let thread = std::thread::spawn(move || {
        run();
        let _ = ended.send(());
    });
    match end.recv_timeout(limit) {
        Err(RecvTimeoutError::Timeout) => panic!("has not ended after {limit:?}: a deadlock?"),
        Ok(()) | Err(RecvTimeoutError::Disconnected) => thread.join().unwrap(), // with its panic, if it had one
    }
}

/// Far more than the slowest machine needs.
const LIMIT: Duration = Duration::from_secs(300);

/// A call and the bits that it gives serially.
struct Work {
    name: String,
    call: Box<dyn Fn(Parallelism) -> Vec<u64> + Send + Sync>,
    expected: Vec<u64>,
}

impl Work {
    fn new(name: String, call: impl Fn(Parallelism) -> Vec<u64> + Send + Sync + 'static) -> Self {
        let expected = call(Parallelism::Serial);
        Self { name, call: Box::new(call), expected }
    }

    fn check(&self) {
        assert!((self.call)(Parallelism::Rayon) == self.expected, "{}: other bits than the serial call", self.name);
    }
}

/// Prefill, decode in chunks, masks and packed sequences on every set, each large enough to be shared among threads.
fn works() -> Arc<Vec<Work>> {
    let len = by_profile(200, 100);
    let prefill = AttentionShape { num_heads: 6, num_kv_heads: 2, ..one_head(len, len, 48, 40) };
    let decode = AttentionShape { num_heads: 6, num_kv_heads: 2, ..one_head(1, 3000, 48, 40) };
    let mut works = Vec::new();
    for set in instruction_sets() {
        let config =
            move |parallelism| AttentionConfig::causal().with_instruction_set(set).with_parallelism(parallelism);
        for (name, shape) in [("prefill", prefill), ("decode", decode)] {
            let threads = || AttentionPlan::new(&shape, &config(Parallelism::Rayon)).unwrap().threads();
            assert_eq!(pool(3).install(threads), 3, "{name} is shared");
            let problem = Problem::<f32, f16>::normal(&shape, 1);
            works.push(Work::new(format!("{name} on {set}"), move |parallelism| {
                let answer = common::run(&problem, &config(parallelism)).bits();
                [answer.0, answer.1].concat()
            }));
        }
        let mut masked = Problem::<f32>::normal(&prefill, 2);
        masked.operands = Operands::all(&prefill, 2, [true, false, false, false]);
        works.push(Work::new(format!("masks on {set}"), move |parallelism| {
            common::run(&masked, &config(parallelism)).out_bits()
        }));
        let packed = Problem::<f32>::normal(&AttentionShape { q_len: len + 1, kv_len: 2400 + len, ..prefill }, 3);
        works.push(Work::new(format!("packed sequences on {set}"), move |parallelism| {
            let (q, k) = ([0, 1, 1, len + 1], [0, 2400, 2400, 2400 + len]);
            let out = attention_varlen(&packed.inputs(), CuSeqlens::new(&q, &k), &config(parallelism)).unwrap();
            common::bits(&out)
        }));
    }
    Arc::new(works)
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

#[test]
fn eight_threads_at_once_get_the_serial_bits() {
    let _alone = alone();
    within(LIMIT, || {
        let works = works();
        let start = Barrier::new(8);
        std::thread::scope(|scope| {
            for first in 0..8 {
                let (works, start) = (&works, &start);
                scope.spawn(move || {
                    start.wait();
                    // Each begins with another call, so that different ones meet.
                    (0..works.len()).for_each(|i| works[(first * 3 + i) % works.len()].check());
                });
            }
        });
    });
}

/// The last of them have more threads than this machine has cores.
#[test]
fn pools_of_any_size_get_the_serial_bits() {
    let _alone = alone();
    let cores = std::thread::available_parallelism().unwrap().get();
    let sizes = by_profile((1..=16).collect(), vec![1, 2, 3, 7, 16]);
    within(LIMIT, move || {
        let works = works();
        for threads in sizes.into_iter().chain([2 * cores + 1]) {
            pool(threads).install(|| works.iter().for_each(Work::check));
        }
    });
}

#[test]
fn calls_nested_in_parallel_iterators_get_the_serial_bits() {
    let _alone = alone();
    within(LIMIT, || {
        let works = works();
        for threads in [1, 2, 5] {
            pool(threads).install(|| {
                (0..3).into_par_iter().for_each(|_| works.par_iter().for_each(Work::check));
            });
        }
    });
}

/// Pools that wait for each other, each with calls in all of its threads.
#[test]
fn calls_in_pools_inside_pools_get_the_serial_bits() {
    let _alone = alone();
    within(LIMIT, || {
        let works = works();
        let (outer, inner) = (pool(3), pool(2));
        outer.install(|| {
            works.par_iter().for_each(|work| {
                work.check();
                inner.install(|| work.check());
            });
        });
    });
}

/// Splits work among threads in the middle of a score tile, now and then, and calls attention in every task.
struct Busy<'a> {
    small: AttentionInputs<'a, f32>,
    expected: &'a [f32],
    config: AttentionConfig,
    /// Parameters from one whole call to the next.
    interval: usize,
    parameters: AtomicUsize,
    vectors: AtomicUsize,
}

impl ScoreModifier for Busy<'_> {
    const PARAMETERS: usize = 1;

    /// Now and then a whole call, on whose threads this one waits.
    fn parameter(&self, _: usize, _: usize, head: usize) -> f64 {
        if self.parameters.fetch_add(1, Ordering::Relaxed).is_multiple_of(self.interval) {
            let (one, other) =
                rayon::join(|| attention(&self.small, &self.config), || attention(&self.small, &self.config));
            assert!(one.unwrap() == self.expected && other.unwrap() == self.expected);
        }
        head as f64 / 8.0
    }

    fn modify<V: ScoreVector>(&self, score: V, at: &ScoreContext<'_, V>) -> V {
        if self.vectors.fetch_add(1, Ordering::Relaxed).is_multiple_of(64) {
            rayon::join(|| std::hint::black_box(()), || std::hint::black_box(()));
        }
        score + at.parameters[0]
    }
}

#[test]
fn score_functions_may_use_the_pool_themselves() {
    let _alone = alone();
    within(LIMIT, || {
        let len = by_profile(120, 90);
        let shape = AttentionShape { num_heads: 4, num_kv_heads: 2, ..one_head(len, len, 40, 40) };
        let small = Problem::<f32>::normal(&AttentionShape { num_heads: 4, ..one_head(100, 110, 33, 40) }, 2);
        for shape in [shape, AttentionShape { q_len: 1, kv_len: 4000, ..shape }] {
            let problem = Problem::<f32>::normal(&shape, 1);
            for set in instruction_sets() {
                let config = AttentionConfig::causal().with_instruction_set(set);
                let expected = attention(&small.inputs(), &config.with_parallelism(Parallelism::Serial)).unwrap();
                let (parameters, vectors) = (AtomicUsize::new(0), AtomicUsize::new(0));
                let interval = by_profile(8, 64);
                let busy = Busy { small: small.inputs(), expected: &expected, config, interval, parameters, vectors };
                let run = |parallelism| {
                    let mut out = common::Tensor::<f32>::unwritten(problem.out_shape(), common::Layout::Bhsd);
                    let mut outputs = AttentionOutputs::new(out.view_mut());
                    let config = config.with_parallelism(parallelism);
                    attention_into_with_modifier(&problem.inputs(), &mut outputs, &config, &busy).unwrap();
                    common::bits(&out.data)
                };
                let expected = run(Parallelism::Serial);
                for threads in [1, 3] {
                    assert!(pool(threads).install(|| run(Parallelism::Rayon)) == expected, "{set}, {threads} threads");
                }
            }
        }
    });
}

/// Resident memory of this process.
#[cfg(target_os = "linux")]
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
}

#[cfg(not(target_os = "linux"))]
fn resident_bytes() -> usize {
    0
}

/// What may come after the first round: a workspace of each thread of the pools, below 2 MiB, and what the allocator holds back.
const MOST_GROWTH: usize = 48 << 20;

/// Calls of random sizes and kinds on a random number of threads, and the same again until the time is up: memory may hardly grow.
fn random_shapes_for(seconds: f64) {
    let pools: Vec<_> = [1, 2, 4, 7].map(pool).into();
    let (start, mut peaks, mut rounds) = (Instant::now(), [0; 2], 0);
    while rounds < 2 || start.elapsed().as_secs_f64() < seconds {
        let peak = &mut peaks[rounds.min(1)];
        random_shapes(&pools, by_profile(60, 8), || *peak = resident_bytes().max(*peak));
        rounds += 1;
    }
    println!("{rounds} rounds; resident memory at most {} MiB, then {} MiB", peaks[0] >> 20, peaks[1] >> 20);
    assert!(peaks[1] <= peaks[0] + MOST_GROWTH, "memory grew: {peaks:?} bytes");
}

fn random_shapes(pools: &[rayon::ThreadPool], calls: usize, mut after_each: impl FnMut()) {
    let sets = instruction_sets();
    let mut generator = Generator::new(8);
    let mut below = |n: usize| (generator.normal().abs() * 1e6) as usize % n;
    for call in 0..calls {
        let num_kv_heads = 1 + below(3);
        let is_decode = below(2) == 0;
        let shape = AttentionShape {
            batch: 1 + below(2),
            num_heads: num_kv_heads * (1 + below(4)),
            num_kv_heads,
            q_len: if is_decode { 1 + below(3) } else { below(150) },
            kv_len: if is_decode { below(3000) } else { below(150) },
            head_dim: 1 + below(80),
            value_dim: below(80),
        };
        let config =
            [AttentionConfig::full(), AttentionConfig::causal(), AttentionConfig::sliding_window(40)][below(3)];
        let config = config.with_instruction_set(sets[below(sets.len())]);
        let mut problem = Problem::<f32>::normal(&shape, call as u64);
        if below(4) == 0 && !is_decode {
            problem.operands = Operands::all(&shape, 1, [true, true, false, false]);
        }
        let serial = common::run(&problem, &config.with_parallelism(Parallelism::Serial)).bits();
        let pooled = pools[below(pools.len())].install(|| common::run(&problem, &config).bits());
        assert!(pooled == serial, "{shape:?} {config:?}");
        #[cfg(feature = "multi-head")]
        steps_of_a_layer(num_kv_heads, shape.head_dim, config, call as u64);
        after_each();
    }
}

/// A prompt and a token through a growing cache, and the same again behind it.
#[cfg(feature = "multi-head")]
fn steps_of_a_layer(num_kv_heads: usize, head_dim: usize, config: AttentionConfig, seed: u64) {
    use common::layer::{Form, TextbookLayer, as_f32, normal_tokens};
    use fused_attention::{Capacity, KvCache, MultiHeadInputs, MultiHeadShape};

    let shape =
        MultiHeadShape { num_heads: 2 * num_kv_heads, num_kv_heads, head_dim, ..MultiHeadShape::new(48, 1).unwrap() };
    let layer =
        TextbookLayer::normal::<f32>(shape, [true; 4], seed).layer::<f32>(Form::ALL[seed as usize % 4]).unwrap();
    let mut cache = KvCache::<f16>::new(&shape.kv_cache_shape(1, 1), Capacity::Growing(2)).unwrap();
    let x = as_f32(&normal_tokens(20 * 48, seed));
    for tokens in [0..15, 15..16, 16..20] {
        let inputs = MultiHeadInputs::new(&x[tokens.start * 48..tokens.end * 48], [1, tokens.len(), 48]);
        let out = layer.step(&inputs, &mut cache, 0, &config).unwrap();
        assert!(out.iter().all(|x| x.is_finite()));
    }
}

fn seconds(default: f64) -> f64 {
    let set = std::env::var("FUSED_ATTENTION_LOAD_SECONDS").ok();
    set.map_or(default, |seconds| seconds.parse().expect("a number of seconds"))
}

#[test]
fn random_shapes_keep_memory_flat() {
    let _alone = alone();
    let seconds = by_profile(6.0, 1.5);
    within(LIMIT, move || random_shapes_for(seconds));
}

#[test]
#[ignore = "a minute"]
fn random_shapes_keep_memory_flat_for_a_minute() {
    let _alone = alone();
    let seconds = seconds(60.0);
    within(LIMIT + Duration::from_secs_f64(seconds), move || random_shapes_for(seconds));
}
