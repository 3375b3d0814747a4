//! Every allocation between pages that may not be touched, and never used again once it is freed: caches, workspaces, outputs, weights of a layer, and
//! whatever else the library allocates by itself. A binary of its own, for its allocator.
#![cfg(all(unix, target_pointer_width = "64"))]
#![allow(unsafe_code)] // an allocator, which maps and protects pages

mod common;

use std::alloc::{GlobalAlloc, Layout as AllocLayout, System};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use common::cache::{Stored, new_tokens};
use common::{Layout, Number, Operands, Problem, Tensor, for_each_pair, instruction_sets, one_head};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, Capacity, CuSeqlens, KvCache, KvCacheShape,
    attention, attention_varlen, attention_varlen_into, attention_weights, bf16, f16,
};

/// At which end of an allocation a guard lies: exactly, but for what its alignment asks for.
const NOWHERE: usize = 0;
const BEHIND: usize = 1;
const BEFORE: usize = 2;

/// Addresses, of which only what is allocated may be touched.
const REGION_BYTES: usize = 64 << 30;
/// As large as any system's, or several of them.
const PAGE: usize = 64 << 10;
/// Every page begins on a multiple of it.
const MOST_ALIGN: usize = 4096;

struct Guarding {
    guard: AtomicUsize,
    /// Of the region, once there is one.
    start: AtomicUsize,
    used: AtomicUsize,
}

#[global_allocator]
static ALLOCATOR: Guarding =
    Guarding { guard: AtomicUsize::new(NOWHERE), start: AtomicUsize::new(0), used: AtomicUsize::new(0) };

impl Guarding {
    /// The pages of an allocation, which begin at `start`; a guard follows.
    fn pages(layout: AllocLayout) -> usize {
        layout.size().next_multiple_of(layout.align()).next_multiple_of(PAGE)
    }

    fn protect(start: usize, bytes: usize, protection: libc::c_int) {
        let start = std::ptr::without_provenance_mut(start);
        // SAFETY: whole pages of the region, which belongs to this allocator.
        assert_eq!(unsafe { libc::mprotect(start, bytes, protection) }, 0);
    }

    /// Runs with a guard at this end of everything that is allocated meanwhile, by any thread.
    fn while_guarded<R>(&self, guard: usize, run: impl FnOnce() -> R) -> R {
        if self.start.load(Ordering::Relaxed) == 0 {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new anonymous mapping, placed by the kernel, touches no other memory.
            let region = unsafe { libc::mmap(std::ptr::null_mut(), REGION_BYTES, libc::PROT_NONE, flags, -1, 0) };
            assert_ne!(region, libc::MAP_FAILED);
            self.used.store(PAGE, Ordering::Relaxed);
            self.start.store(region.expose_provenance(), Ordering::Relaxed);
        }
        let used = self.used.load(Ordering::Relaxed);
        self.guard.store(guard, Ordering::SeqCst);
        let result = run();
        self.guard.store(NOWHERE, Ordering::SeqCst);
        assert!(self.used.load(Ordering::Relaxed) > used, "nothing was allocated");
        result
    }
}

// SAFETY: allocations are distinct pages of a mapping that stays, aligned as asked, or the system's.
unsafe impl GlobalAlloc for Guarding {
    unsafe fn alloc(&self, layout: AllocLayout) -> *mut u8 {
        let guard = self.guard.load(Ordering::Relaxed);
        if guard == NOWHERE || layout.align() > MOST_ALIGN {
            // SAFETY: the caller's promises are those that the system's allocator asks for.
            return unsafe { System.alloc(layout) };
        }
        let pages = Self::pages(layout);
        let offset = self.used.fetch_add(pages + PAGE, Ordering::Relaxed);
        if offset + pages + PAGE > REGION_BYTES {
            return std::ptr::null_mut();
        }
        let start = self.start.load(Ordering::Relaxed) + offset;
        Self::protect(start, pages, libc::PROT_READ | libc::PROT_WRITE);
        let behind = (start + pages - layout.size()) & !(layout.align() - 1);
        std::ptr::with_exposed_provenance_mut(if guard == BEHIND { behind } else { start })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: AllocLayout) {
        let start = self.start.load(Ordering::Relaxed);
        if start == 0 || !(start..start + REGION_BYTES).contains(&pointer.addr()) {
            // SAFETY: not of the region, so it was the system's.
            return unsafe { System.dealloc(pointer, layout) };
        }
        let first = start + (pointer.addr() - start) / PAGE * PAGE;
        let pages = Self::pages(layout);
        // SAFETY: the pages of this allocation, which nobody uses any more.
        unsafe { libc::madvise(std::ptr::without_provenance_mut(first), pages, libc::MADV_DONTNEED) };
        Self::protect(first, pages, libc::PROT_NONE);
    }
}

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The bits that `run` gives do not depend on where its memory lies, and it touches none but its own.
fn check(run: impl Fn() -> Vec<u64> + Sync) {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let expected = run();
    assert!(!expected.is_empty());
    // On a thread of its own, which has no workspace yet.
    let run = || std::thread::scope(|scope| scope.spawn(&run).join()).unwrap_or_else(|panic| resume_unwind(panic));
    for guard in [BEHIND, BEFORE] {
        assert!(ALLOCATOR.while_guarded(guard, run) == expected);
    }
}

/// A read behind the end of an allocation, in a process of its own, ends it.
#[test]
fn guards_are_there() {
    const CHILD: &str = "FUSED_ATTENTION_TEST_TOUCHES_A_GUARD";
    if std::env::var_os("FUSED_ATTENTION_TEST_RUNNER").is_some() {
        println!("skipped: an emulator would have to be started for the child, too");
        return;
    }
    if let Ok(guard) = std::env::var(CHILD) {
        let (guard, past) = if guard == "behind" { (BEHIND, 4) } else { (BEFORE, usize::MAX) };
        ALLOCATOR.while_guarded(guard, || {
            let numbers = std::hint::black_box(vec![1.0f32; 4]);
            // SAFETY: none. This is what must end the process.
            println!("{}", unsafe { numbers.as_ptr().wrapping_add(past).read_volatile() });
        });
        return;
    }
    for guard in ["behind", "before"] {
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", "guards_are_there"]).env(CHILD, guard).output().unwrap();
        assert!(!output.status.success(), "{guard}: {output:?}");
    }
}

fn cache_for<T: Stored>(capacity: Capacity) -> Vec<u64> {
    // 64 bytes divide the buffers of some lengths, which then end where their pages do.
    let shape = KvCacheShape { num_layers: 2, batch: 2, num_kv_heads: 2, head_dim: 24, value_dim: 20 };
    let mut cache = KvCache::<T>::new(&shape, capacity).unwrap();
    let mut found = Vec::new();
    let mut attend = |cache: &KvCache<T>, q_len: usize| {
        for set in instruction_sets() {
            let q: Tensor<f32> = common::Generator::new(5).normal_tensor([2, 4, q_len, 24]);
            let q = q.in_layout(Layout::Bshd);
            let inputs = AttentionInputs::new(q.view(), cache.k(1).unwrap(), cache.v(1).unwrap());
            let config = AttentionConfig::causal().with_instruction_set(set);
            let out = attention(&inputs.with_kv_lens(cache.lens(1).unwrap()), &config).unwrap();
            found.extend(common::bits(&out));
        }
    };
    for (tokens, seed) in [(1, 1), (5, 2), (10, 3)] {
        let [k, v] = new_tokens(&shape, 2, tokens, [Layout::Bshd, Layout::Bhsd], seed);
        for layer in 0..2 {
            cache.append(layer, &k.view(), &v.view()).unwrap();
        }
        attend(&cache, 1);
        attend(&cache, 11);
    }
    cache.truncate(9).unwrap();
    let [k, v] = new_tokens(&shape, 1, 7, [Layout::Bhsd; 2], 4);
    cache.append_to(1, 1, &k.view(), &v.view()).unwrap();
    cache.truncate_sequence(0, 3).unwrap();
    attend(&cache, 3);
    cache.clear();
    found
}

#[test]
fn caches_touch_no_other_memory() {
    for capacity in [Capacity::Fixed(16), Capacity::Growing(1), Capacity::Growing(3)] {
        check(|| cache_for::<f32>(capacity));
        check(|| cache_for::<f16>(capacity));
        check(|| cache_for::<bf16>(capacity));
    }
}

/// Prefill, decode, decode in chunks, with everything that a call may be given, packed sequences, plans, weights.
fn calls_for<T: Number, K: Number<Real = T::Real>>() {
    let group = AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, ..one_head(35, 210, 20, 24) };
    let chunks = AttentionShape { batch: 1, q_len: 2, kv_len: 2100, ..group };
    check(|| {
        let mut found = Vec::new();
        for (shape, layout) in
            [(group, Layout::Bshd), (AttentionShape { q_len: 3, ..group }, Layout::Bhsd), (chunks, Layout::Bhsd)]
        {
            let mut problem = Problem::<T, K>::normal(&shape, 1).in_layout(layout);
            problem.operands = Operands::all(&shape, 1, [true, false, false, false]);
            for set in instruction_sets() {
                let config = AttentionConfig::sliding_window(190).with_softcap(9.0).with_instruction_set(set);
                let answer = common::run(&problem, &config).bits();
                found.extend(answer.0.into_iter().chain(answer.1));
                let out = attention(&problem.inputs(), &config).unwrap();
                found.extend(common::bits(&out));
                let weights = attention_weights(&problem.inputs(), &config, &[1, 3], &[0, shape.q_len - 1]).unwrap();
                found.extend(common::bits(&weights));
            }
        }
        found
    });
    let packed = Problem::<T, K>::normal(&AttentionShape { batch: 1, ..group }, 2);
    check(|| {
        let (cu_q, cu_k) = ([0, 3, 3, 35], [0, 17, 30, 210]);
        let mut found = Vec::new();
        for set in instruction_sets() {
            let config = AttentionConfig::causal().with_instruction_set(set);
            let offsets = CuSeqlens::new(&cu_q, &cu_k);
            found.extend(common::bits(&attention_varlen(&packed.inputs(), offsets, &config).unwrap()));
            let mut out = Tensor::<T>::unwritten(packed.out_shape(), Layout::Bhsd);
            let mut outputs = AttentionOutputs::new(out.view_mut());
            attention_varlen_into(&packed.inputs(), &mut outputs, offsets, &config).unwrap();
            found.extend(common::bits(&out.data));
        }
        found
    });
}

#[test]
fn calls_touch_no_other_memory() {
    for_each_pair!(calls_for);
}

#[cfg(feature = "multi-head")]
#[test]
fn layers_touch_no_other_memory() {
    use common::layer::{Form, TextbookLayer, TextbookRotary, as_f32, normal_tokens};
    use fused_attention::{MultiHeadInputs, MultiHeadShape, RotaryPairing};

    let shape = MultiHeadShape { num_kv_heads: 2, head_dim: 6, value_dim: 5, ..MultiHeadShape::new(28, 4).unwrap() };
    let mut textbook = TextbookLayer::normal::<bf16>(shape, [true, false, true, true], 3);
    textbook.rotary = Some(TextbookRotary { dim: 4, pairing: RotaryPairing::HalfSplit, base: 1e4 });
    let tokens = as_f32(&normal_tokens(2 * 9 * 28, 4));
    for form in Form::ALL {
        check(|| {
            let layer = textbook.layer::<bf16>(form).unwrap();
            let mut found = Vec::new();
            let config = AttentionConfig::causal();
            let inputs = MultiHeadInputs::new(&tokens, [2, 9, 28]).with_lens(&[9, 4]);
            found.extend(common::bits(&layer.forward(&inputs, &config).unwrap()));
            let mut cache = KvCache::<f32>::new(&shape.kv_cache_shape(1, 1), Capacity::Growing(2)).unwrap();
            for step in tokens[..9 * 28].chunks(2 * 28) {
                let inputs = MultiHeadInputs::new(step, [1, step.len() / 28, 28]);
                found.extend(common::bits(&layer.step(&inputs, &mut cache, 0, &config).unwrap()));
            }
            found
        });
    }
}
