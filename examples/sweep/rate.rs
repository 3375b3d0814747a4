//! How much all threads together do in a second, measured one sample at a time.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::threads::Threads;

/// Runs `parts` parts of some work and divides what they say they did by the time from the first start to the last end.
///
/// Threads pull parts from one counter: one that the system holds up does not hold up the sample, and more threads than
/// cores finish together.
pub fn rate(threads: &Threads, parts: usize, run_part: impl Fn(usize) -> f64 + Sync) -> f64 {
    let count = threads.count();
    let (started, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let spans = threads.on_each(|| {
        // Threads that start one after the other would idle in the measured span. Spinning, as waking up from a lock
        // takes as long as a hundredth of a sample; yielding, as there may be more threads than cores.
        started.fetch_add(1, Ordering::Relaxed);
        let mut spins = 0u32;
        while started.load(Ordering::Relaxed) < count {
            spins += 1;
            if spins.is_multiple_of(1 << 12) { std::thread::yield_now() } else { spin_loop() }
        }
        let start = Instant::now();
        let mut done = 0.0;
        loop {
            let part = taken.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                break (start, Instant::now(), done);
            }
            done += run_part(part);
        }
    });
    // A thread that came too late to do anything is not part of it.
    let working = || spans.iter().filter(|span| span.2 > 0.0);
    let start = working().map(|span| span.0).min();
    let end = working().map(|span| span.1).max();
    let seconds = start.zip(end).map_or(f64::NAN, |(start, end)| (end - start).as_secs_f64());
    spans.iter().map(|span| span.2).sum::<f64>() / seconds
}
