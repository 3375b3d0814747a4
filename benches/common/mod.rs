//! What the benchmarks share: the sweep's tensors, reference and baseline, and a benchmark that checks its answer.

#[path = "../../examples/sweep/args.rs"]
#[allow(dead_code)]
pub mod args;
#[path = "../../examples/sweep/inputs.rs"]
#[allow(dead_code)]
pub mod inputs;
#[path = "../../examples/sweep/memory.rs"]
#[allow(dead_code)]
pub mod memory;
#[path = "../../examples/sweep/number.rs"]
#[allow(dead_code)]
pub mod number;
#[path = "../../examples/sweep/verify.rs"]
#[allow(dead_code)]
pub mod verify;

use std::cell::LazyCell;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use fused_attention::{
    AttentionConfig, AttentionOutputs, AttentionPlan, AttentionShape, Element, Parallelism, Workspace,
};

use args::{InputKind, Layout};
use inputs::{Tensors, view, view_mut};
use memory::Pages;
use number::Number;
use verify::{Reference, tolerance};

/// As the sweep's.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Short measurements, as there are many; options on the command line override them.
pub fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args()
}

/// Self-attention of one sequence.
#[allow(dead_code)]
pub fn self_attention([num_heads, num_kv_heads, head_dim]: [usize; 3], len: usize) -> AttentionShape {
    AttentionShape { batch: 1, num_heads, num_kv_heads, q_len: len, kv_len: len, head_dim, value_dim: head_dim }
}

/// The name of an element type, with that of K and V where it is another.
#[allow(dead_code)]
pub fn dtypes<T: Number, K: Number>() -> String {
    match (T::DTYPE.name(), K::DTYPE.name()) {
        (dtype, kv_dtype) if dtype == kv_dtype => dtype.into(),
        (dtype, kv_dtype) => format!("{dtype}_{kv_dtype}"),
    }
}

/// Tensors of a shape, and what causal attention makes of them.
pub struct Case<T, K = T> {
    pub tensors: Tensors<T, K>,
    reference: Reference,
    tolerance: f64,
}

impl<T: Element + Number, K: Element<Acc = T::Acc> + Number> Case<T, K> {
    /// `kv_pages` is where K and V lie.
    pub fn new(shape: &AttentionShape, kv_pages: Pages) -> Self {
        let tensors = Tensors::new(shape, Layout::Bhsd, InputKind::Normal, kv_pages).expect("small enough for memory");
        let inputs = tensors.inputs().expect("tensors of one shape");
        let reference = Reference::new(&inputs, &AttentionConfig::causal()).expect("a valid shape");
        let tolerance = tolerance(&tensors, shape);
        Self { tensors, reference, tolerance }
    }
}

/// Benchmarks what `make` returns, which writes the output of a case. Its answer is checked once, before. Nothing is made
/// for a benchmark that the command line filters out.
pub fn bench_checked<'a, T: Number, K: Number, Run: FnMut(&mut [T])>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    id: &str,
    case: &'a LazyCell<Case<T, K>, impl FnOnce() -> Case<T, K>>,
    make: impl Fn(&'a Case<T, K>) -> Run,
) {
    let mut ready = None;
    // Criterion calls this for every sample.
    group.bench_function(id, |bencher| {
        let (run, out) = ready.get_or_insert_with(|| {
            let mut out = case.tensors.new_output().expect("small enough for memory");
            let mut run = make(case);
            run(&mut out);
            let view = view(Layout::Bhsd, &out, case.tensors.output_shape()).expect("an output of this shape");
            case.reference.check(&view, case.tolerance).unwrap_or_else(|error| panic!("{id} {error}"));
            (run, out)
        });
        bencher.iter(|| run(out));
    });
}

/// Serial attention of a case, planned before. What [`bench_checked`] wants.
#[allow(dead_code)]
pub fn runner<'a, T, K>(
    case: &'a Case<T, K>,
    shape: &AttentionShape,
    config: &AttentionConfig,
) -> impl FnMut(&mut [T]) + use<'a, T, K>
where
    T: Element<Acc = f32> + Number,
    K: Element<Acc = f32> + Number,
{
    let config = config.with_parallelism(Parallelism::Serial);
    let plan = AttentionPlan::new(shape, &config).expect("a valid shape");
    let mut workspace = Workspace::for_plan(&plan).expect("small enough for memory");
    let inputs = case.tensors.inputs().expect("tensors of one shape");
    move |out| {
        let out = view_mut(Layout::Bhsd, out, case.tensors.output_shape()).expect("made for this output");
        plan.run(&inputs, &mut AttentionOutputs::new(out), &mut workspace).expect("planned for these tensors");
    }
}
