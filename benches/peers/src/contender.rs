//! What takes turns with what, and how a turn is timed.

use std::time::Instant;

use crate::Result;

/// A turn: long enough that its first, cold sample is not its only one unless samples are long.
pub const TURN_SECONDS: f64 = 0.010;
/// Shorter calls are timed several at a time, as reading the clock takes some 20 ns.
const SAMPLE_SECONDS: f64 = 50e-6;
/// Rounds that everyone gets even if they take longer than the time given.
const MIN_ROUNDS: usize = 3;

/// Something that is measured in turns with others.
pub trait Contender {
    /// Seconds of a call (of a GFLOP, of a GB), the best of a turn.
    fn turn(&mut self) -> Result<f64>;

    /// What the last call computed, `[batch, heads, queries, features]`. Limits compute nothing.
    fn output(&mut self) -> Result<Vec<f32>>;
}

/// A peer in this process: it is prepared with its inputs, and calls cost what its users pay.
pub trait Call {
    /// One call. The result is kept for [`output`](Self::output) and not copied.
    fn call(&mut self) -> Result<()>;

    fn output(&mut self) -> Result<Vec<f32>>;
}

impl Call for Box<dyn Call> {
    fn call(&mut self) -> Result<()> {
        (**self).call()
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        (**self).output()
    }
}

/// Times the calls of a peer.
pub struct Timed<C> {
    peer: C,
    /// Calls of a sample.
    calls: usize,
}

impl<C: Call> Timed<C> {
    /// Warms it up.
    pub fn new(mut peer: C) -> Result<Self> {
        let mut once = seconds_of(&mut peer, 1)?;
        // What faulted pages in and filled caches says little about a short call.
        if once < 100.0 * SAMPLE_SECONDS {
            once = seconds_of(&mut peer, 3)?;
        }
        let calls = (SAMPLE_SECONDS / once).ceil().clamp(1.0, 1e4) as usize;
        Ok(Self { peer, calls })
    }
}

impl<C: Call> Contender for Timed<C> {
    fn turn(&mut self) -> Result<f64> {
        turn(|| seconds_of(&mut self.peer, self.calls))
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        self.peer.output()
    }
}

/// A limit of the machine: seconds of a unit of work.
pub struct Limit<F>(pub F);

impl<F: FnMut() -> f64> Contender for Limit<F> {
    fn turn(&mut self) -> Result<f64> {
        turn(|| Ok((self.0)()))
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(Vec::new())
    }
}

/// Interleaves them, so that a phase in which the machine is slow (other guests, heat) hits all alike. The best of each; a contender that
/// fails is out, with its error.
pub fn take_turns(contenders: &mut [(String, Box<dyn Contender + '_>)], repeat_seconds: f64) -> Vec<Result<f64>> {
    let start = Instant::now();
    let mut best: Vec<Result<f64>> = contenders.iter().map(|_| Ok(f64::INFINITY)).collect();
    let mut rounds = 0;
    while rounds < MIN_ROUNDS || start.elapsed().as_secs_f64() < repeat_seconds {
        for ((_, contender), best) in contenders.iter_mut().zip(&mut best) {
            if let Ok(before) = best {
                *best = contender.turn().map(|seconds| before.min(seconds));
            }
        }
        rounds += 1;
    }
    best
}

fn turn(mut sample: impl FnMut() -> Result<f64>) -> Result<f64> {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    loop {
        best = best.min(sample()?);
        if start.elapsed().as_secs_f64() >= TURN_SECONDS {
            return Ok(best);
        }
    }
}

fn seconds_of(peer: &mut impl Call, calls: usize) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..calls {
        peer.call()?;
    }
    Ok(start.elapsed().as_secs_f64() / calls as f64)
}
