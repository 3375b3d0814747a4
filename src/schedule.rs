//! Tasks to threads. The only file that names rayon.
//!
//! Workers pull task numbers from one counter, so that tasks start in the order given (heaviest first) and a slow core
//! takes fewer. A parallel iterator would halve the range instead and start them in another order. Workers are a
//! binary tree of `join`s, whose jobs live on the stack: nothing is allocated from inside a pool.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Parallelism;

/// Threads that a call may use.
pub(crate) fn max_threads(parallelism: Parallelism) -> usize {
    match parallelism {
        Parallelism::Serial => 1,
        #[cfg(feature = "rayon")]
        Parallelism::Rayon => rayon::current_num_threads(),
    }
}

/// Runs `run(task, scratch)` for every `task < tasks` on `threads` threads, each with its own `scratch_len` bytes.
///
/// # Panics
/// If `scratch` is shorter than `threads * scratch_len` (checked by the caller).
pub(crate) fn for_each_task(
    threads: usize,
    tasks: usize,
    scratch: &mut [u8],
    scratch_len: usize,
    run: &(impl Fn(usize, &mut [u8]) + Sync),
) {
    let next = AtomicUsize::new(0);
    let work = |scratch: &mut [u8]| {
        loop {
            // Relaxed: the counter only hands out numbers, the results are published by the joins.
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            run(task, scratch);
        }
    };
    fan_out(threads.min(tasks).max(1), scratch, scratch_len, &work);
}

fn fan_out(workers: usize, scratch: &mut [u8], scratch_len: usize, work: &(impl Fn(&mut [u8]) + Sync)) {
    #[cfg(feature = "rayon")]
    if workers > 1 {
        let left = workers / 2;
        let (left_scratch, right_scratch) = scratch.split_at_mut(left * scratch_len);
        rayon::join(
            || fan_out(left, left_scratch, scratch_len, work),
            || fan_out(workers - left, right_scratch, scratch_len, work),
        );
        return;
    }
    debug_assert_eq!(workers, 1);
    work(&mut scratch[..scratch_len]);
}
