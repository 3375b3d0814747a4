//! What the arithmetic of these threads can do at most: independent chains of multiply-adds in registers, in the accumulator's type. (Products of
//! pairs of bf16 are faster, so prefill of bf16 with `avx512-bf16` may pass 100 %.)

use std::hint::black_box;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use fused_attention::InstructionSet;
use pulp::{Simd, WithSimd};

use crate::number::Dtype;
use crate::rate::rate;
use crate::threads::Threads;
use crate::vectors::{Vectors, has_fma, run_with};

/// One sample: long against the skew of starting threads, short against a time slice of the system.
const SAMPLE: Duration = Duration::from_millis(2);
/// Parts of a sample for each thread.
const PARTS_PER_THREAD: u32 = 64;

/// The peak of one instruction set on some threads, in numbers of the type that is accumulated in.
pub struct Peak<'a> {
    threads: &'a Threads,
    instruction_set: InstructionSet,
    /// Runs the chains for some iterations; the flops that it did.
    chains: fn(InstructionSet, u64) -> f64,
    /// Of one part.
    iterations: u64,
}

impl<'a> Peak<'a> {
    /// Finds how many iterations fill a sample.
    pub fn new(accumulator: Dtype, instruction_set: InstructionSet, threads: &'a Threads) -> Self {
        let chains = match accumulator {
            Dtype::F64 => chains_of::<f64>,
            _ => chains_of::<f32>,
        };
        // The portable sets are the same instructions, those that every CPU of the architecture has. From 8 lanes the
        // compiler makes the plain loop; at 4 it transposes groups of chains and loses 5/6 of the speed.
        let portable = match accumulator {
            Dtype::F64 => InstructionSet::portable_512(),
            _ => InstructionSet::portable_256(),
        };
        let is_portable = instruction_set.name().starts_with("portable");
        let instruction_set = if is_portable { portable } else { instruction_set };
        let mut iterations = 1 << 7;
        loop {
            let start = Instant::now();
            chains(instruction_set, iterations);
            if start.elapsed() * PARTS_PER_THREAD >= SAMPLE {
                return Self { threads, instruction_set, chains, iterations };
            }
            iterations *= 2;
        }
    }

    /// GFLOP/s of all threads together.
    pub fn sample(&self) -> f64 {
        let parts = self.threads.count() * PARTS_PER_THREAD as usize;
        rate(self.threads, parts, |_| (self.chains)(self.instruction_set, self.iterations)) / 1e9
    }
}

fn chains_of<A: Vectors>(instruction_set: InstructionSet, iterations: u64) -> f64 {
    run_with(instruction_set, Chains::<A> { iterations, accumulator: PhantomData })
}

/// `a = a * m + c` again and again in as many chains as fit the registers. That hides the latency: a chain issues every
/// 4 cycles (6 to 8 where multiply and add are separate) and cores start 2 a cycle (4 on some with NEON).
struct Chains<A> {
    iterations: u64,
    accumulator: PhantomData<A>,
}

impl<A: Vectors> WithSimd for Chains<A> {
    /// Floating-point operations done.
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f64 {
        // 32 registers (AVX-512, NEON): 24 chains. 16: 12, and as many on the portable set, whose 8 lanes are two registers
        // (f64: four).
        match (has_fma::<S>(), S::REGISTER_COUNT, size_of::<A>()) {
            (true, 32.., _) => run_chains::<A, S, 24>(simd, self.iterations),
            (true, _, _) => run_chains::<A, S, 12>(simd, self.iterations),
            (false, _, 4) => run_chains::<A, S, 6>(simd, self.iterations),
            (false, _, _) => run_chains::<A, S, 3>(simd, self.iterations),
        }
    }
}

#[inline(always)]
fn run_chains<A: Vectors, S: Simd, const CHAINS: usize>(simd: S, iterations: u64) -> f64 {
    // Towards 0.01, never to a denormal.
    let (factor, term) = (A::splat(simd, black_box(0.9999)), A::splat(simd, black_box(1e-6)));
    let mut chains = [term; CHAINS];
    for (i, chain) in chains.iter_mut().enumerate() {
        *chain = A::splat(simd, 0.5 + i as f32); // distinct, else they would be merged into one
    }
    for _ in 0..iterations {
        for chain in &mut chains {
            *chain = A::multiply_add(simd, *chain, factor, term);
        }
    }
    let mut sum = chains[0];
    for &chain in &chains[1..] {
        sum = A::add(simd, sum, chain);
    }
    black_box(sum);
    (iterations * 2 * (CHAINS * A::lanes::<S>()) as u64) as f64
}
