//! Nothing is read or written outside the slices: they end, or begin, at memory that may not be touched.

#![cfg(unix)]
#![allow(unsafe_code)] // maps and protects pages

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Mutex;

use crate::common::{Layout, Number, Problem, by_types, for_each_pair, instruction_sets, masks_for, one_head, run_on};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, Parallelism, TensorView, TensorViewMut,
    attention_into,
};

/// Which end of the slice lies at the guard.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Guard {
    Before,
    After,
}

/// Pages between two that may not be touched; the slice lies at one end of them.
struct Guarded<T> {
    mapping: NonNull<libc::c_void>,
    mapping_bytes: usize,
    start: *mut T,
    len: usize,
}

impl<T: Number> Guarded<T> {
    fn new(values: &[T], guard: Guard) -> Self {
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

    fn as_slice(&self) -> &[T] {
        // SAFETY: `start` is aligned (page plus a multiple of its size) and `len` elements from it lie in the readable pages,
        // initialised by the kernel and by `new`; borrowed as long as the mapping.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [T] {
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
fn now_running(what: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // SAFETY: the caller holds ONE_AT_A_TIME, and the handler reads in this very thread, if ever.
    let text = unsafe { &mut *RUNNING.0.get() };
    text.fill(b' ');
    let _ = writeln!(&mut text[..], "{what}"); // cut where it is too long
    text[511] = b'\n';
}

fn install_handler() {
    // SAFETY: the handler keeps to what a handler may do.
    unsafe {
        libc::signal(libc::SIGSEGV, touched_a_guard as *const () as libc::sighandler_t);
        libc::signal(libc::SIGBUS, touched_a_guard as *const () as libc::sighandler_t);
    }
}

/// Runs with all five slices at guards; the result must be that on ordinary memory.
fn check<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, out_layout: Layout, config: &AttentionConfig) {
    let expected = crate::common::run_into(problem, config, out_layout);
    for guard in [Guard::Before, Guard::After] {
        now_running(format_args!("{guard:?} {:?} out {out_layout:?} {config:?}", problem.shape()));
        let q = Guarded::new(&problem.q.data, guard);
        let [k, v] = [&problem.k, &problem.v].map(|tensor| Guarded::new(&tensor.data, guard));
        let inputs = AttentionInputs::new(
            TensorView::with_strides(q.as_slice(), problem.q.shape, problem.q.strides).unwrap(),
            TensorView::with_strides(k.as_slice(), problem.k.shape, problem.k.strides).unwrap(),
            TensorView::with_strides(v.as_slice(), problem.v.shape, problem.v.strides).unwrap(),
        );
        let unwritten = crate::common::Tensor::<T>::unwritten(problem.out_shape(), out_layout);
        let mut out = Guarded::new(&unwritten.data, guard);
        let mut logsumexp = Guarded::new(&vec![T::Real::CANARY; expected.logsumexp.len()], guard);
        let view = TensorViewMut::with_strides(out.as_mut_slice(), unwritten.shape, unwritten.strides).unwrap();
        let mut outputs = AttentionOutputs::new(view).with_logsumexp(logsumexp.as_mut_slice());
        attention_into(&inputs, &mut outputs, config).unwrap();
        assert_eq!(crate::common::bits(out.as_slice()), crate::common::bits(&expected.out.data));
        assert_eq!(crate::common::bits(logsumexp.as_slice()), crate::common::bits(&expected.logsumexp));
    }
}

/// The layouts in which a tensor's last element is the last of its slice in each of its ways.
const LAYOUTS: [Layout; 4] = [Layout::Bhsd, Layout::Bshd, Layout::PaddedRows, Layout::Transposed];

fn check_on_every_set<T: Number, K: Number<Real = T::Real>>(shape: &AttentionShape) {
    let problem = Problem::<T, K>::normal(shape, 1);
    for layout in LAYOUTS {
        let problem = problem.in_layout(layout);
        for set in instruction_sets() {
            for config in masks_for::<T, K>() {
                check(&problem, layout, &config.with_instruction_set(set).with_parallelism(Parallelism::Serial));
            }
        }
    }
}

#[test]
fn lengths_around_tiles_and_panels_stay_inside_the_slices() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    install_handler();
    for_each_pair!(lengths_around_tiles_and_panels_stay_inside_the_slices_for);
}

fn lengths_around_tiles_and_panels_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    let all = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33];
    for len in by_types::<T, K, _>(all.to_vec(), vec![1, 7, 13, 17]) {
        for (q_len, kv_len) in [(len, len), (3, len), (len, 5)] {
            let shape = AttentionShape { num_heads: 2, num_kv_heads: 2, ..one_head(q_len, kv_len, 5, 6) };
            check_on_every_set::<T, K>(&shape);
        }
    }
}

#[test]
fn head_dims_around_tiles_and_vectors_stay_inside_the_slices() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    install_handler();
    for_each_pair!(head_dims_around_tiles_and_vectors_stay_inside_the_slices_for);
}

fn head_dims_around_tiles_and_vectors_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for dim in by_types::<T, K, _>(vec![1, 2, 3, 7, 8, 15, 16, 17, 31, 40, 64, 67], vec![1, 7, 31, 40]) {
        for (head_dim, value_dim) in [(dim, dim), (5, dim), (dim, 3)] {
            check_on_every_set::<T, K>(&AttentionShape {
                num_heads: 4,
                num_kv_heads: 2,
                ..one_head(7, 9, head_dim, value_dim)
            });
        }
    }
}

#[test]
fn lengths_around_blocks_stay_inside_the_slices() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    install_handler();
    for_each_pair!(lengths_around_blocks_stay_inside_the_slices_for);
}

fn lengths_around_blocks_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for kv_len in by_types::<T, K, _>(vec![95, 96, 97, 127, 129, 191, 192, 193, 385], vec![97, 193]) {
        for (q_len, dim) in by_types::<T, K, _>(vec![(9, 3), (9, 8), (1, 3), (1, 8)], vec![(9, 3), (1, 8)]) {
            check_on_every_set::<T, K>(&one_head(q_len, kv_len, dim, dim));
        }
    }
}

/// The variant that selects where edge blocks hold NaN reads V in its own way.
#[test]
fn nan_in_an_edge_block_stays_inside_the_slices() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    install_handler();
    for_each_pair!(nan_in_an_edge_block_stays_inside_the_slices_for);
}

fn nan_in_an_edge_block_stays_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for dim in by_types::<T, K, _>(vec![1, 3, 7, 8, 31, 40, 67], vec![7, 40]) {
        for q_len in [3, 9] {
            let mut problem = Problem::<T, K>::normal(&one_head(q_len, 14, dim, dim), 1);
            problem.v.fill_row([0, 0, 13], K::exactly(f64::NAN));
            for set in instruction_sets() {
                let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Serial);
                check(&problem, Layout::Bhsd, &config);
                assert!(run_on(set, &problem, &config).row_values([0, 0, q_len - 1]).0.iter().all(|x| x.is_nan()));
            }
        }
    }
}
