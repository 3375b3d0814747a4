//! Bringing rows of K and V into the cache before they are needed.

#![allow(unsafe_code)]

/// Rows of a matrix with unit stride inside a row.
#[derive(Clone, Copy)]
pub(crate) struct Rows<K> {
    pub(crate) start: *const K,
    pub(crate) stride: usize,
}

impl<K> Rows<K> {
    /// The rows from `row` on.
    pub(crate) fn from(self, row: usize) -> Self {
        Self { start: self.start.wrapping_add(row.wrapping_mul(self.stride)), ..self }
    }
}

/// The rows of a matrix that is needed next, fetched into the cache while a product runs: in the order in which they lie in memory, from
/// the first byte to the last. V of a block while its K is read, and the next K while V is. [measured, 8 heads of 16384 keys in f32, a
/// program of these loops alone, AVX-512] fraction of the read bandwidth with blocks of 64 keys: nothing fetched 0.43, line by line
/// across the rows 0.61, in order 0.70; and in order with blocks of 32 keys 0.75.
#[derive(Clone, Copy)]
pub(crate) struct Fetch {
    row: *const u8,
    at: usize,
    row_bytes: usize,
    stride_bytes: usize,
}

impl Fetch {
    /// Rows of so many elements. `None`: nothing is needed. Then a line of `in_cache` is fetched again and again, which costs less than to ask each time.
    pub(crate) fn new<A, K: Copy>(rows: Option<(Rows<K>, usize)>, in_cache: *const A) -> Self {
        let (row, stride, dim) = match rows {
            Some((rows, dim)) => (rows.start.cast(), rows.stride, dim),
            None => (in_cache.cast(), 0, CACHE_LINE / size_of::<K>()),
        };
        Self { row, at: 0, row_bytes: dim * size_of::<K>(), stride_bytes: stride.wrapping_mul(size_of::<K>()) }
    }

    /// Goes on by `bytes`. Where that is less than a line, a line is fetched several times: without a branch.
    #[inline(always)]
    pub(super) fn fetch(&mut self, bytes: usize) {
        let mut line = 0;
        while line < bytes {
            prefetch(self.row.wrapping_add(self.at + line));
            line += CACHE_LINE;
        }
        self.at += bytes;
        let is_done = self.at >= self.row_bytes;
        self.row = self.row.wrapping_add(if is_done { self.stride_bytes } else { 0 });
        self.at = if is_done { 0 } else { self.at };
    }
}

const CACHE_LINE: usize = 64;

/// Brings a cache line closer. A hint: any address is allowed.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is no access.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(address.cast())
    };
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch of any address is no access.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{0}]", in(reg) address, options(nostack, preserves_flags, readonly))
    };
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// The same for the tiles of prefill, some rows before each tile: for tasks of so few rows that they would wait for memory. (Each tile of value
/// dims walks down all keys, a new cache line for each, which no hardware prefetcher follows.)
#[derive(Clone, Copy)]
pub(crate) struct FetchRows {
    start: *const u8,
    stride_bytes: usize,
    row_bytes: usize,
    rows: usize,
}

impl FetchRows {
    pub(crate) const NOTHING: Self = Self { start: core::ptr::null(), stride_bytes: 0, row_bytes: 0, rows: 0 };

    /// `keys` rows of `dim` elements.
    pub(crate) fn new<K>(rows: Rows<K>, keys: usize, dim: usize) -> Self {
        Self {
            start: rows.start.cast(),
            stride_bytes: rows.stride.wrapping_mul(size_of::<K>()),
            row_bytes: dim * size_of::<K>(),
            rows: keys,
        }
    }

    /// Those that belong to tile `tile` of `tiles`.
    #[inline(always)]
    pub(super) fn fetch(&self, tile: usize, tiles: usize) {
        if self.rows == 0 {
            return;
        }
        for row in self.rows * tile / tiles..self.rows * (tile + 1) / tiles {
            let row = self.start.wrapping_add(row.wrapping_mul(self.stride_bytes));
            let mut line = 0;
            while line < self.row_bytes {
                prefetch(row.wrapping_add(line));
                line += CACHE_LINE;
            }
        }
    }
}
