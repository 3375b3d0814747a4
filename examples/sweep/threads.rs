//! The threads that everything in a sweep runs on. The only file of the example that names rayon.

use fused_attention::Parallelism;

/// The main thread alone, or a pool. Whatever is timed runs inside [`run`](Self::run), as in a program that owns its
/// threads: waking a pool up from outside is not part of the measurement.
pub enum Threads {
    Serial,
    #[cfg(feature = "rayon")]
    Pool(rayon::ThreadPool),
}

impl Threads {
    /// Exactly `threads` of them.
    pub fn new(threads: usize) -> crate::Result<Self> {
        if threads == 1 {
            return Ok(Self::Serial);
        }
        #[cfg(feature = "rayon")]
        {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .map_err(|error| format!("--threads {threads}: {error}"))?;
            let built = pool.current_num_threads(); // rayon caps it silently
            if built != threads {
                return Err(format!("--threads {threads}: rayon gives no more than {built}").into());
            }
            Ok(Self::Pool(pool))
        }
        #[cfg(not(feature = "rayon"))]
        Err(format!("--threads {threads} needs the feature `rayon`, without it there is 1").into())
    }

    pub fn count(&self) -> usize {
        match self {
            Self::Serial => 1,
            #[cfg(feature = "rayon")]
            Self::Pool(pool) => pool.current_num_threads(),
        }
    }

    /// What tells the library to use these threads from inside [`run`](Self::run).
    pub fn parallelism(&self) -> Parallelism {
        match self {
            Self::Serial => Parallelism::Serial,
            #[cfg(feature = "rayon")]
            Self::Pool(_) => Parallelism::Rayon,
        }
    }

    /// What tells gemm to use these threads from inside [`run`](Self::run).
    pub fn gemm_parallelism(&self) -> gemm::Parallelism {
        match self {
            Self::Serial => gemm::Parallelism::None,
            #[cfg(feature = "rayon")]
            Self::Pool(pool) => gemm::Parallelism::Rayon(pool.current_num_threads()),
        }
    }

    /// Runs `op` on one of the threads; what it starts may use all.
    pub fn run<R: Send>(&self, op: impl FnOnce() -> R + Send) -> R {
        match self {
            Self::Serial => op(),
            #[cfg(feature = "rayon")]
            Self::Pool(pool) => pool.install(op),
        }
    }

    /// Runs `op` on every thread at the same time.
    pub fn on_each<R: Send>(&self, op: impl Fn() -> R + Sync) -> Vec<R> {
        match self {
            Self::Serial => vec![op()],
            #[cfg(feature = "rayon")]
            Self::Pool(pool) => pool.broadcast(|_| op()),
        }
    }

    /// Cuts `items` into chunks and gives each, with its index, to one of the threads.
    pub fn for_each_chunk<T: Send>(&self, items: &mut [T], chunk_len: usize, op: impl Fn(usize, &mut [T]) + Sync) {
        match self {
            Self::Serial => items.chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| op(i, chunk)),
            #[cfg(feature = "rayon")]
            Self::Pool(pool) => pool.install(|| {
                use rayon::prelude::*;
                items.par_chunks_mut(chunk_len).with_max_len(1).enumerate().for_each(|(i, chunk)| op(i, chunk));
            }),
        }
    }
}
