//! Memory for tensors: as a `Vec` gives it, or on huge pages.

use std::ops::{Deref, DerefMut};

use aligned_vec::{AVec, ConstAlign};

use crate::number::Number;

/// A huge page of x86-64, and of aarch64 with pages of 4 KiB.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What memory to ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// Whatever the allocator gives, as most callers do.
    Plain,
    /// Huge pages where the system has them (Linux), as a KV cache does: a core that streams through more memory than
    /// its page table caches cover would wait for page walks.
    Huge,
}

/// The elements of a tensor.
pub enum Memory<T> {
    Plain(Vec<T>),
    Huge(AVec<T, ConstAlign<HUGE_PAGE_BYTES>>),
}

impl<T: Number> Memory<T> {
    /// Zeros for `shape`, or an error that names what it would have taken.
    pub fn zeros<const AXES: usize>(shape: [usize; AXES], pages: Pages) -> crate::Result<Self> {
        let zero = T::from_f64(0.0);
        if pages == Pages::Plain {
            return Ok(Self::Plain(filled(shape, zero)?));
        }
        let too_large = || too_large::<T>(&shape);
        let len = len_of(&shape).ok_or_else(too_large)?;
        // Whole pages, or the end would lie on small ones.
        let page = HUGE_PAGE_BYTES / size_of::<T>();
        let capacity = len.checked_next_multiple_of(page).ok_or_else(too_large)?;
        let mut data = AVec::new(HUGE_PAGE_BYTES);
        data.try_reserve_exact(capacity).map_err(|_| too_large())?;
        advise_huge_pages(&mut data); // before the first write, which is when pages come into being
        data.resize(len, zero);
        Ok(Self::Huge(data))
    }
}

impl<T> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Plain(data) => data,
            Self::Huge(data) => data,
        }
    }
}

impl<T> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Plain(data) => data,
            Self::Huge(data) => data,
        }
    }
}

/// Memory for `shape`, or an error that names what it would have taken.
pub fn filled<T: Number, const AXES: usize>(shape: [usize; AXES], value: T) -> crate::Result<Vec<T>> {
    let too_large = || too_large::<T>(&shape);
    let len = len_of(&shape).ok_or_else(too_large)?;
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| too_large())?;
    data.resize(len, value);
    Ok(data)
}

fn len_of(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size))
}

fn too_large<T: Number>(shape: &[usize]) -> String {
    format!("no memory for a tensor of shape {shape:?} ({})", T::DTYPE.name())
}

#[cfg(target_os = "linux")]
#[allow(unsafe_code)] // a system call
fn advise_huge_pages<T>(data: &mut AVec<T, ConstAlign<HUGE_PAGE_BYTES>>) {
    let bytes = data.capacity() * size_of::<T>();
    // SAFETY: the range is this vector's own memory, and the advice changes no contents. Where the kernel does not know
    // it (the result is an error then), the pages stay small.
    unsafe { libc::madvise(data.as_mut_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages<T>(_: &mut AVec<T, ConstAlign<HUGE_PAGE_BYTES>>) {}
