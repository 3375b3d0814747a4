//! What the benchmarks share: the sweep's tensors, reference and baseline, and a benchmark that checks its answer.

#[path = "../../examples/sweep/args.rs"]
#[allow(dead_code)]
pub mod args;
#[path = "../../examples/sweep/inputs.rs"]
#[allow(dead_code)]
pub mod inputs;
#[path = "../../examples/sweep/verify.rs"]
#[allow(dead_code)]
pub mod verify;

use std::cell::LazyCell;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use fused_attention::{AttentionConfig, AttentionShape};

use args::{InputKind, Layout};
use inputs::{Tensors, view};
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
pub fn self_attention([num_heads, num_kv_heads, head_dim]: [usize; 3], len: usize) -> AttentionShape {
    AttentionShape { batch: 1, num_heads, num_kv_heads, q_len: len, kv_len: len, head_dim, value_dim: head_dim }
}

/// Tensors of a shape, and what causal attention makes of them.
pub struct Case {
    pub tensors: Tensors,
    reference: Reference,
    tolerance: f64,
}

impl Case {
    pub fn new(shape: &AttentionShape) -> Self {
        let tensors = Tensors::new(shape, Layout::Bhsd, InputKind::Normal).expect("small enough for memory");
        let inputs = tensors.inputs().expect("tensors of one shape");
        let reference = Reference::new(&inputs, &AttentionConfig::causal()).expect("a valid shape");
        let tolerance = tolerance(&tensors, shape);
        Self { tensors, reference, tolerance }
    }
}

/// Benchmarks what `make` returns, which writes the output of a case. Its answer is checked once, before. Nothing is made
/// for a benchmark that the command line filters out.
pub fn bench_checked<'a, Run: FnMut(&mut [f32])>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    id: &str,
    case: &'a LazyCell<Case, impl FnOnce() -> Case>,
    make: impl Fn(&'a Case) -> Run,
) {
    let mut ready = None;
    // Criterion calls this for every sample.
    group.bench_function(id, |bencher| {
        let (run, out) = ready.get_or_insert_with(|| {
            let mut out = case.tensors.new_output().expect("small enough for memory");
            let mut run = make(case);
            run(&mut out);
            let view = view(Layout::Bhsd, &out, case.tensors.output_shape()).expect("an output of this shape");
            let error = case.reference.max_abs_error(&view);
            assert!(error <= case.tolerance, "{id}: differs from the reference by {error:e} > {:e}", case.tolerance);
            (run, out)
        });
        bencher.iter(|| run(out));
    });
}
