//! What is allocated, counted by the allocator: nothing by a planned call, and never a score matrix.

#![allow(unsafe_code)] // GlobalAlloc is an unsafe trait

mod common;
#[cfg(feature = "multi-head")]
#[path = "allocation/multi_head.rs"]
mod multi_head;
#[path = "allocation/panics.rs"]
mod panics;

use std::alloc::{GlobalAlloc, Layout as AllocLayout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{
    Layout, Number, Operands, Problem, Tensor, by_types, for_each_pair, instruction_sets, masks_for, one_head,
};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, Capacity, CuSeqlens, Element,
    KvCache, KvCacheShape, Parallelism, PartialAttention, TensorViewMut, VarlenPlan, Workspace, attention_into,
    attention_weights, bf16, f16,
};

/// What threads that report to it have allocated.
struct Meter {
    allocations: AtomicUsize,
    bytes_now: AtomicUsize,
    bytes_peak: AtomicUsize,
}

thread_local! {
    /// The meter that this thread reports to. Tests run side by side, so each has its own.
    static METER: Cell<Option<&'static Meter>> = const { Cell::new(None) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn report(change: impl Fn(&Meter)) {
    if let Some(meter) = METER.get() {
        change(meter);
    }
}

impl Meter {
    /// One that lives as long as the program.
    fn leaked() -> &'static Self {
        let zero = || AtomicUsize::new(0);
        Box::leak(Box::new(Self { allocations: zero(), bytes_now: zero(), bytes_peak: zero() }))
    }

    fn add(&self, bytes: usize) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
        let now = self.bytes_now.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes);
        // What was allocated before the meter was attached may be freed under it: then the count is below zero.
        if now <= isize::MAX as usize {
            self.bytes_peak.fetch_max(now, Ordering::Relaxed);
        }
    }

    fn subtract(&self, bytes: usize) {
        self.bytes_now.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn allocations(&self) -> usize {
        self.allocations.load(Ordering::Relaxed)
    }
}

// SAFETY: everything is handed on to the system's allocator, whose promises these then are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: AllocLayout) -> *mut u8 {
        report(|meter| meter.add(layout.size()));
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: AllocLayout) -> *mut u8 {
        report(|meter| meter.add(layout.size()));
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: AllocLayout) {
        report(|meter| meter.subtract(layout.size()));
        // SAFETY: as above; `alloc` gave out what the system's allocator did.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: AllocLayout, new_size: usize) -> *mut u8 {
        report(|meter| {
            meter.add(new_size);
            meter.subtract(layout.size());
        });
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Allocations of this thread while `run` runs.
fn allocations_of(run: impl FnOnce()) -> usize {
    let meter = Meter::leaked();
    METER.set(Some(meter));
    run();
    METER.set(None);
    meter.allocations()
}

/// Every path through a task: one row and many, groups, packed Q, K, V and outputs, a NaN in an edge block.
fn problems<T: Number, K: Number<Real = T::Real>>() -> Vec<(Problem<T, K>, Layout)> {
    let group = AttentionShape { num_heads: 6, num_kv_heads: 2, ..one_head(40, 210, 24, 20) };
    let plain = [one_head(1, 300, 16, 16), one_head(70, 70, 64, 64), one_head(9, 0, 8, 8), group];
    let mut problems: Vec<_> = plain.iter().map(|shape| (Problem::normal(shape, 1), Layout::Bhsd)).collect();
    for layout in [Layout::Bshd, Layout::Transposed, Layout::PowerOfTwoRows] {
        problems.push((Problem::normal(&group, 1).in_layout(layout), layout));
    }
    let mut with_nan = Problem::<T, K>::normal(&group, 1);
    with_nan.v.fill_row([0, 1, 205], K::exactly(f64::NAN));
    // Mask, bias, slopes and sinks, broadcast or not, on few rows and on many.
    for (q_len, broadcast) in [(40, [false; 4]), (40, [true, true, true, false]), (1, [true, false, true, false])] {
        let shape = AttentionShape { q_len, ..group };
        let mut with_operands = Problem::<T, K>::normal(&shape, 1);
        with_operands.v = if q_len > 1 { with_nan.v.clone() } else { with_operands.v };
        with_operands.operands = Operands::all(&shape, 1, broadcast);
        problems.push((with_operands, Layout::Bhsd));
    }
    problems.push((with_nan, Layout::Bhsd));
    problems
}

#[test]
fn the_meter_counts() {
    assert_eq!(allocations_of(|| ()), 0);
    assert_eq!(allocations_of(|| drop(std::hint::black_box(Box::new(7)))), 1);
    let meter = Meter::leaked();
    METER.set(Some(meter));
    drop(std::hint::black_box(vec![1u8; 1000]));
    drop(std::hint::black_box(vec![0u8; 3000]));
    METER.set(None);
    assert_eq!(meter.bytes_peak.load(Ordering::Relaxed), 3000);
    assert_eq!(meter.bytes_now.load(Ordering::Relaxed), 0);
}

#[test]
fn a_serial_plan_runs_without_allocating() {
    for_each_pair!(a_serial_plan_runs_without_allocating_for);
}

fn a_serial_plan_runs_without_allocating_for<T: Number, K: Number<Real = T::Real>>() {
    let problems = problems::<T, K>();
    for set in instruction_sets() {
        for config in masks_for::<T, K>() {
            let config = config.with_instruction_set(set).with_parallelism(Parallelism::Serial);
            for (problem, layout) in &problems {
                let plan = T::plan(&problem.shape(), &config).unwrap();
                let mut workspace = T::workspace(&plan);
                let mut out = Tensor::unwritten(problem.out_shape(), *layout);
                let mut logsumexp = vec![T::Real::CANARY; problem.out_shape()[..3].iter().product()];
                let allocations = allocations_of(|| {
                    let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
                    T::run_plan(&plan, &problem.inputs(), &mut outputs, &mut workspace);
                });
                assert_eq!(allocations, 0, "{set} {:?} {layout:?}", problem.shape());
            }
        }
    }
}

#[test]
fn attention_into_allocates_on_the_first_call_of_a_thread_at_most() {
    for_each_pair!(attention_into_allocates_on_the_first_call_of_a_thread_at_most_for);
}

fn attention_into_allocates_on_the_first_call_of_a_thread_at_most_for<T: Number, K: Number<Real = T::Real>>() {
    let problems = problems::<T, K>();
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Serial);
        for (problem, layout) in &problems {
            let mut out = Tensor::unwritten(problem.out_shape(), *layout);
            let mut call = || {
                attention_into(&problem.inputs(), &mut AttentionOutputs::new(out.view_mut()), &config).unwrap();
            };
            call();
            assert_eq!(allocations_of(|| (0..3).for_each(|_| call())), 0, "{set} {:?} {layout:?}", problem.shape());
        }
    }
}

/// Three packed sequences: decode in chunks, none, prefill.
fn packed() -> (Problem, [usize; 4], [usize; 4]) {
    let shape = AttentionShape { num_heads: 4, num_kv_heads: 2, ..one_head(101, 2600, 32, 32) };
    (Problem::normal(&shape, 1), [0, 1, 1, 101], [0, 2400, 2400, 2600])
}

#[test]
fn a_plan_of_packed_sequences_and_a_merge_run_without_allocating() {
    let (problem, q, k) = packed();
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Serial);
        let plan = VarlenPlan::new(&problem.shape(), CuSeqlens::new(&q, &k), &config).unwrap();
        let mut workspace = Workspace::new();
        workspace.reserve_len(plan.workspace_len()).unwrap();
        let [mut out, mut sum] = [(); 2].map(|()| Tensor::<f32>::unwritten(problem.out_shape(), Layout::Bshd));
        let [mut logsumexp, mut sum_lse] = [(); 2].map(|()| vec![f32::NEG_INFINITY; 4 * 101]);
        let allocations = allocations_of(|| {
            let mut outputs = AttentionOutputs::new(out.view_mut()).with_logsumexp(&mut logsumexp);
            plan.run(&problem.inputs(), &mut outputs, &mut workspace).unwrap();
            let partial = PartialAttention::new(out.view(), &logsumexp).unwrap();
            let mut sum = AttentionOutputs::new(sum.view_mut()).with_logsumexp(&mut sum_lse);
            partial.add_to(&mut sum).unwrap();
            PartialAttention::merge_into(&[partial, partial], &mut sum).unwrap();
        });
        assert_eq!(allocations, 0, "{set}");
    }
}

/// Makes every thread of a pool steal a job from another: what rayon sets up for that, it allocates when a thread first
/// does.
#[cfg(feature = "rayon")]
fn warm_up(pool: &rayon::ThreadPool) {
    let threads = pool.current_num_threads();
    for origin in 0..threads {
        let all_at_once = std::sync::Barrier::new(threads);
        pool.broadcast(|context| {
            if context.index() == origin {
                // As many jobs as threads, none of which ends before all have begun: each runs on another thread.
                rayon::scope(|scope| (0..threads).for_each(|_| scope.spawn(|_| _ = all_at_once.wait())));
            }
        });
    }
}

#[cfg(feature = "rayon")]
#[test]
fn a_plan_inside_a_pool_runs_without_allocating() {
    let meter = Meter::leaked();
    let pool =
        rayon::ThreadPoolBuilder::new().num_threads(3).start_handler(|_| METER.set(Some(meter))).build().unwrap();
    warm_up(&pool);
    let len = common::by_profile(400, 96);
    let shape = AttentionShape { num_heads: 4, num_kv_heads: 2, ..one_head(len, len, 64, 64) };
    let problem = common::normal_problem(&shape, 1);
    let packed = problem.in_layout(Layout::Transposed);
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Rayon);
        for problem in [&problem, &packed] {
            let mut out = Tensor::<f32>::unwritten(problem.out_shape(), Layout::Bhsd);
            let allocations = pool.install(|| {
                let plan = AttentionPlan::new(&shape, &config).unwrap();
                assert_eq!(plan.threads(), 3);
                let mut workspace = Workspace::for_plan(&plan).unwrap();
                let mut run = || {
                    plan.run(&problem.inputs(), &mut AttentionOutputs::new(out.view_mut()), &mut workspace).unwrap();
                };
                run();
                let before = meter.allocations();
                (0..5).for_each(|_| run());
                meter.allocations() - before
            });
            assert_eq!(allocations, 0, "{set}");
        }
        let (problem, q, k) = self::packed();
        let mut out = Tensor::<f32>::unwritten(problem.out_shape(), Layout::Bshd);
        let allocations = pool.install(|| {
            let plan = VarlenPlan::new(&problem.shape(), CuSeqlens::new(&q, &k), &config).unwrap();
            assert_eq!(plan.threads(), 3);
            let mut workspace = Workspace::new();
            workspace.reserve_len(plan.workspace_len()).unwrap();
            let before = meter.allocations();
            for _ in 0..5 {
                plan.run(&problem.inputs(), &mut AttentionOutputs::new(out.view_mut()), &mut workspace).unwrap();
            }
            meter.allocations() - before
        });
        assert_eq!(allocations, 0, "{set}, packed sequences");
    }
    assert!(meter.allocations() > 0, "the pool's threads report to the meter");
}

/// Fault 20 of FIELD.md (transformers#46960, oneDNN), measured.
#[test]
fn peak_memory_does_not_grow_with_the_length() {
    for_each_pair!(peak_memory_does_not_grow_with_the_length_for);
}

fn peak_memory_does_not_grow_with_the_length_for<T: Number, K: Number<Real = T::Real>>() {
    let lengths = by_types::<T, K, _>([1000, 4000], [200, 800]);
    for set in instruction_sets() {
        for config in masks_for::<T, K>() {
            let config = config.with_instruction_set(set).with_parallelism(Parallelism::Serial);
            for layout in [Layout::Bhsd, Layout::Transposed] {
                let peaks = lengths.map(|len| {
                    // Few rows against many keys and the reverse: len * len scores would take len * len * 4 bytes.
                    [(64, len), (len, 64)].map(|(q_len, kv_len)| {
                        let problem = Problem::<T, K>::normal(&one_head(q_len, kv_len, 16, 16), 1).in_layout(layout);
                        let mut out = Tensor::<T>::unwritten(problem.out_shape(), Layout::Bhsd);
                        let meter = Meter::leaked();
                        // A new thread, so that it has no workspace yet.
                        std::thread::scope(|scope| {
                            scope.spawn(|| {
                                METER.set(Some(meter));
                                let mut outputs = AttentionOutputs::new(out.view_mut());
                                attention_into(&problem.inputs(), &mut outputs, &config).unwrap();
                                METER.set(None);
                            });
                        });
                        meter.bytes_peak.load(Ordering::Relaxed)
                    })
                });
                assert!(peaks[0].iter().all(|&peak| peak > 0), "{set}: the workspace is counted: {peaks:?}");
                assert!(peaks[1].iter().all(|&peak| peak <= 2 << 20), "{set} {layout:?}: {peaks:?}");
            }
        }
    }
}

#[test]
fn weights_take_memory_for_themselves_and_a_workspace() {
    for set in instruction_sets() {
        for kv_len in [500, 4000] {
            let problem: Problem = Problem::normal(&one_head(4000, kv_len, 16, 16), 1);
            // A few rows here and there, and many in a row: more than one run of the pass has.
            for rows in [vec![3999, 7, 100], (1000..1600).collect()] {
                let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Serial);
                let meter = Meter::leaked();
                let bytes = std::thread::scope(|scope| {
                    let weigh = || {
                        METER.set(Some(meter));
                        let weights = attention_weights(&problem.inputs(), &config, &[0], &rows).unwrap();
                        METER.set(None);
                        size_of_val(&weights[..])
                    };
                    scope.spawn(weigh).join().unwrap() // a new thread, so that it has no workspace yet
                });
                let peak = meter.bytes_peak.load(Ordering::Relaxed);
                assert!(peak <= bytes + (1 << 18), "{set}: {peak} bytes for weights of {bytes}");
            }
        }
    }
}

#[test]
fn the_workspace_is_independent_of_long_lengths_and_small_for_small_shapes() {
    for set in instruction_sets() {
        for config in common::masks() {
            let config = config.with_instruction_set(set).with_parallelism(Parallelism::Serial);
            let workspace_len = |shape| AttentionPlan::new(&shape, &config).unwrap().workspace_len();
            for (head_dim, value_dim) in [(64, 64), (128, 128), (256, 256), (500, 12), (1, 1), (1, 511), (192, 128)] {
                for group_size in [1, 8] {
                    let shape = |q_len, kv_len| AttentionShape {
                        batch: 2,
                        num_heads: 2 * group_size,
                        num_kv_heads: 2,
                        q_len,
                        kv_len,
                        head_dim,
                        value_dim,
                    };
                    let long = workspace_len(shape(1 << 13, 1 << 13));
                    assert!(long <= 2 << 20, "{set} {head_dim} {value_dim}: {long}");
                    assert_eq!(workspace_len(shape(1 << 13, 1 << 20)), long, "{set} {head_dim} {value_dim}");
                    assert_eq!(workspace_len(shape(1 << 20, 1 << 13)), long, "{set} {head_dim} {value_dim}");
                    assert!(workspace_len(shape(16, 16)) <= long, "{set} {head_dim} {value_dim}");
                }
            }
            let prompt = workspace_len(one_head(128, 128, 64, 64));
            assert!(prompt <= 256 << 10, "{set}: {prompt} bytes for T = 128, head_dim 64");
            let tiny = workspace_len(one_head(1, 1, 8, 8));
            assert!(tiny <= 16 << 10, "{set}: {tiny} bytes for one row and one key");
        }
    }
}

#[test]
fn a_workspace_grows_and_never_shrinks() {
    let config = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
    let plan = |len| AttentionPlan::new(&one_head(len, len, 64, 64), &config).unwrap();
    let (small, large) = (plan(4), plan(400));
    assert!(small.workspace_len() < large.workspace_len());
    let mut workspace = Workspace::new();
    assert!(workspace.is_empty());
    workspace.reserve(&small).unwrap();
    assert_eq!(workspace.len(), small.workspace_len());
    workspace.reserve(&large).unwrap();
    assert_eq!(workspace.len(), large.workspace_len());
    assert_eq!(allocations_of(|| workspace.reserve(&small).unwrap()), 0);
    assert_eq!(workspace.len(), large.workspace_len());
    assert_eq!(Workspace::for_plan(&small).unwrap().len(), small.workspace_len());
}

/// Appends one token and attends to it, over and over; gives the allocations of each step.
fn decode_allocations<T: Element<Acc = f32>>(capacity: Capacity, config: &AttentionConfig) -> Vec<usize> {
    let shape = KvCacheShape { num_layers: 2, batch: 2, num_kv_heads: 2, head_dim: 16, value_dim: 16 };
    let mut cache = KvCache::<T>::new(&shape, capacity).unwrap();
    let long = pattern_tensor([2, 2, 300, 16], Layout::Bhsd);
    let new = [Layout::Bhsd, Layout::Transposed].map(|layout| pattern_tensor([2, 2, 1, 16], layout));
    let q = pattern_tensor([2, 4, 1, 16], Layout::Bhsd);
    let mut out = Tensor::unwritten([2, 4, 1, 16], Layout::Bhsd);
    let mut attend = |cache: &KvCache<T>| {
        let inputs = AttentionInputs::new(q.view(), cache.k(1).unwrap(), cache.v(1).unwrap());
        let out = TensorViewMut::from_bhsd(&mut out.data, [2, 4, 1, 16]).unwrap();
        attention_into(&inputs, &mut AttentionOutputs::new(out), config).unwrap();
    };
    if capacity == Capacity::Fixed(300) {
        // The thread's workspace becomes as large as it will ever be.
        cache.append(1, &long.view(), &long.view()).unwrap();
        attend(&cache);
        cache.clear();
    }
    let steps = (0..300).map(|_| {
        allocations_of(|| {
            cache.append(1, &new[0].view(), &new[1].view()).unwrap();
            attend(&cache);
        })
    });
    steps.collect()
}

fn pattern_tensor(shape: [usize; 4], layout: Layout) -> Tensor {
    Tensor::from_fn(shape, layout, common::pattern)
}

/// Fault 22 of FIELD.md (rten#1305, gemma.cpp#1020).
#[test]
fn a_decode_step_over_a_cache_with_room_allocates_nothing() {
    let step = [decode_allocations::<f32>, decode_allocations::<f16>, decode_allocations::<bf16>];
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Serial);
        for (allocations, name) in
            step.map(|step| step(Capacity::Fixed(300), &config)).iter().zip(["f32", "f16", "bf16"])
        {
            assert_eq!(allocations.iter().sum::<usize>(), 0, "{set} {name}: {allocations:?}");
        }
    }
}

#[test]
fn a_cache_grows_a_logarithmic_number_of_times() {
    let config = AttentionConfig::causal().with_parallelism(Parallelism::Serial);
    decode_allocations::<f32>(Capacity::Fixed(300), &config); // the thread's workspace
    let allocations = decode_allocations::<f32>(Capacity::Growing(1), &config);
    // To 2, 4, 8, ... 512: keys and values each.
    assert_eq!(allocations.iter().sum::<usize>(), 2 * 9, "{allocations:?}");
    assert_eq!(allocations.iter().filter(|&&n| n > 0).count(), 9, "{allocations:?}");
}
