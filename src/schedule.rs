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

/// Starts up to `threads` workers, each with its own `scratch_len` bytes of `scratch` and the numbers of the tasks that
/// it is to run; together they run every task below `tasks` once.
///
/// # Panics
/// If `scratch` is shorter than `threads * scratch_len` (the caller checks).
pub(crate) fn for_each_worker(
    threads: usize,
    tasks: usize,
    scratch: &mut [u8],
    scratch_len: usize,
    work: &(impl Fn(&mut dyn Iterator<Item = usize>, &mut [u8]) + Sync),
) {
    let workers = threads.min(tasks);
    if workers <= 1 {
        // No counter: a locked instruction between tasks keeps them from overlapping. [measured, 8 heads of one key]
        // 700 ns with it, 670 ns without.
        return work(&mut (0..tasks), &mut scratch[..scratch_len]);
    }
    let next = AtomicUsize::new(0);
    let pull = |scratch: &mut [u8]| {
        // Relaxed: the counter only hands out numbers, the results are published by the joins.
        let mut numbers =
            std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&task| task < tasks));
        work(&mut numbers, scratch);
    };
    fan_out(workers, scratch, scratch_len, &pull);
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

/// Cuts rows of `row_len` elements (the last may be shorter) into about as many parts as threads; `work` gets the number of a part's first row, and
/// the part.
#[cfg(feature = "multi-head")]
pub(crate) fn for_each_part<T: Send>(
    threads: usize,
    rows: &mut [T],
    row_len: usize,
    first_row: usize,
    work: &(impl Fn(usize, &mut [T]) + Sync),
) {
    #[cfg(feature = "rayon")]
    if threads > 1 && rows.len() > row_len {
        let left_threads = threads / 2;
        let left_rows = (rows.len().div_ceil(row_len) * left_threads / threads).max(1);
        let (left, right) = rows.split_at_mut(left_rows * row_len);
        rayon::join(
            || for_each_part(left_threads, left, row_len, first_row, work),
            || for_each_part(threads - left_threads, right, row_len, first_row + left_rows, work),
        );
        return;
    }
    let _ = (threads, row_len);
    work(first_row, rows);
}
