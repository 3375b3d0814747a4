//! What the arithmetic of these threads can do at most: independent chains of multiply-adds in registers.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fused_attention::InstructionSet;
use pulp::{Simd, WithSimd};

use crate::threads::Threads;
use crate::vectors::{has_fma, run_with};

/// One sample: long against the skew of starting threads, short against a time slice of the system.
const SAMPLE: Duration = Duration::from_millis(2);
/// Parts of a sample for each thread, pulled from one counter: a thread that the system holds up does not hold up the
/// sample, and more threads than cores finish together.
const PARTS_PER_THREAD: u32 = 64;

/// The f32 peak of one instruction set on some threads, measured one sample at a time.
pub struct Peak<'a> {
    instruction_set: InstructionSet,
    threads: &'a Threads,
    /// Of one part.
    iterations: u64,
}

impl<'a> Peak<'a> {
    /// Finds how many iterations fill a sample.
    pub fn new(instruction_set: InstructionSet, threads: &'a Threads) -> Self {
        // The portable sets are the same instructions, those that every CPU of the architecture has. From 8 lanes the
        // compiler makes the plain loop; at 4 it transposes groups of chains and loses 5/6 of the speed.
        let portable = instruction_set.name().starts_with("portable");
        let instruction_set = if portable { InstructionSet::portable_256() } else { instruction_set };
        let mut iterations = 1 << 7;
        loop {
            let start = Instant::now();
            run_with(instruction_set, Chains { iterations });
            if start.elapsed() * PARTS_PER_THREAD >= SAMPLE {
                return Self { instruction_set, threads, iterations };
            }
            iterations *= 2;
        }
    }

    /// GFLOP/s of all threads together, from the first start to the last end.
    pub fn sample(&self) -> f64 {
        let count = self.threads.count();
        let (started, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let spans = self.threads.on_each(|| {
            // Threads that start one after the other would idle in the measured span. Spinning, as waking up from a
            // lock takes as long as a hundredth of a sample; yielding, as there may be more threads than cores.
            started.fetch_add(1, Ordering::Relaxed);
            let mut spins = 0u32;
            while started.load(Ordering::Relaxed) < count {
                spins += 1;
                if spins.is_multiple_of(1 << 12) { std::thread::yield_now() } else { spin_loop() }
            }
            let start = Instant::now();
            let mut flops = 0.0;
            while taken.fetch_add(1, Ordering::Relaxed) < count * PARTS_PER_THREAD as usize {
                flops += run_with(self.instruction_set, Chains { iterations: self.iterations });
            }
            (start, Instant::now(), flops)
        });
        // A thread that came too late to do anything is not part of it.
        let working = || spans.iter().filter(|span| span.2 > 0.0);
        let start = working().map(|span| span.0).min();
        let end = working().map(|span| span.1).max();
        let seconds = start.zip(end).map_or(f64::NAN, |(start, end)| (end - start).as_secs_f64());
        spans.iter().map(|span| span.2).sum::<f64>() / seconds / 1e9
    }
}

/// `a = a * m + c` again and again in as many chains as fit the registers. That hides the latency: a chain issues every
/// 4 cycles (6 to 8 where multiply and add are separate) and cores start 2 a cycle (4 on some with NEON).
struct Chains {
    iterations: u64,
}

impl WithSimd for Chains {
    /// Floating-point operations done.
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f64 {
        // 32 registers (AVX-512, NEON): 24 chains. 16: 12, and as many on the portable set, whose 8 lanes are two registers.
        match (has_fma::<S>(), S::REGISTER_COUNT) {
            (true, 32..) => run_chains::<S, 24>(simd, self.iterations),
            (true, _) => run_chains::<S, 12>(simd, self.iterations),
            (false, _) => run_chains::<S, 6>(simd, self.iterations),
        }
    }
}

#[inline(always)]
fn run_chains<S: Simd, const CHAINS: usize>(simd: S, iterations: u64) -> f64 {
    // Towards 0.01, never to a denormal.
    let (factor, term) = (simd.splat_f32s(black_box(0.9999)), simd.splat_f32s(black_box(1e-6)));
    let mut chains = [term; CHAINS];
    for (i, chain) in chains.iter_mut().enumerate() {
        *chain = simd.splat_f32s(0.5 + i as f32); // distinct, else they would be merged into one
    }
    for _ in 0..iterations {
        for chain in &mut chains {
            *chain = if has_fma::<S>() {
                simd.mul_add_f32s(*chain, factor, term)
            } else {
                simd.add_f32s(simd.mul_f32s(*chain, factor), term)
            };
        }
    }
    let mut sum = chains[0];
    for &chain in &chains[1..] {
        sum = simd.add_f32s(sum, chain);
    }
    black_box(simd.reduce_sum_f32s(sum));
    (iterations * 2 * (CHAINS * S::F32_LANES) as u64) as f64
}
