//! Memory between pages that may not be touched, and a word on what ran when it was.

#![allow(unsafe_code)] // maps and protects pages

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};

/// Which end of the slice lies at the guard.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Guard {
    Before,
    After,
}

impl Guard {
    pub const BOTH: [Self; 2] = [Self::Before, Self::After];
}

/// Pages between two that may not be touched; the slice lies at one end of them.
pub struct Guarded<T> {
    mapping: NonNull<libc::c_void>,
    mapping_bytes: usize,
    start: *mut T,
    len: usize,
}

impl<T: Copy> Guarded<T> {
    pub fn new(values: &[T], guard: Guard) -> Self {
        // SAFETY: asks for a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let inner_bytes = size_of_val(values).next_multiple_of(page);
        let mapping_bytes = inner_bytes + 2 * page;
        // SAFETY: a new anonymous mapping, placed by the kernel, touches no other memory.
        let mapping = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), mapping_bytes, libc::PROT_NONE, flags, -1, 0)
        };
        assert_ne!(mapping, libc::MAP_FAILED);
        let inner = mapping.wrapping_byte_add(page);
        if inner_bytes > 0 {
            // SAFETY: these pages lie inside the mapping.
            let failed = unsafe { libc::mprotect(inner, inner_bytes, libc::PROT_READ | libc::PROT_WRITE) };
            assert_eq!(failed, 0);
        }
        let offset = if guard == Guard::Before { 0 } else { inner_bytes - size_of_val(values) };
        let start = inner.wrapping_byte_add(offset).cast::<T>();
        let mut guarded = Self { mapping: NonNull::new(mapping).unwrap(), mapping_bytes, start, len: values.len() };
        guarded.as_mut_slice().copy_from_slice(values);
        guarded
    }

    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `start` is aligned (page plus a multiple of its size) and `len` elements from it lie in the readable pages,
        // initialised by the kernel and by `new`; borrowed as long as the mapping.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as `as_slice`, and exclusively borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; no slice outlives `self`.
        unsafe { libc::munmap(self.mapping.as_ptr(), self.mapping_bytes) };
    }
}

/// What runs now, for the message of a crash. Written by the one test that holds [`ONE_AT_A_TIME`].
struct Running(UnsafeCell<[u8; 512]>);

// SAFETY: written under the lock ONE_AT_A_TIME only; read by the signal handler after a fault of that same test.
unsafe impl Sync for Running {}

static RUNNING: Running = Running(UnsafeCell::new([b' '; 512]));
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

extern "C" fn touched_a_guard(_signal: libc::c_int) {
    // SAFETY: only async-signal-safe calls, on memory that lives for ever; the default action then ends the process.
    unsafe {
        let text = b"touched memory outside of a slice, or crashed, in: ";
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::write(2, RUNNING.0.get().cast(), 512);
        libc::signal(libc::SIGSEGV, libc::SIG_DFL);
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
    }
}

/// Names the case, so that a crash tells which one it was.
pub fn now_running(what: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // SAFETY: the caller holds ONE_AT_A_TIME, and the handler reads in this very thread, if ever.
    let text = unsafe { &mut *RUNNING.0.get() };
    text.fill(b' ');
    let _ = writeln!(&mut text[..], "{what}"); // cut where it is too long
    text[511] = b'\n';
}

/// Until it is dropped, no other test has memory at guards, and a crash is told by name.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    let one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    install_handler();
    one
}

fn install_handler() {
    // SAFETY: the handler keeps to what a handler may do.
    unsafe {
        libc::signal(libc::SIGSEGV, touched_a_guard as *const () as libc::sighandler_t);
        libc::signal(libc::SIGBUS, touched_a_guard as *const () as libc::sighandler_t);
    }
}
