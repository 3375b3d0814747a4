//! A panic in a user's score function comes out of the call, leaves nothing behind, and breaks nothing: plan, workspace, pool and thread
//! give the right bits afterwards.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::*;
use fused_attention::{CuSeqlens, ScoreContext, ScoreModifier, ScoreVector, attention_into_with_modifier};

/// Panics, with this number, when its calls have come to it.
struct PanicsAt {
    countdown: AtomicUsize,
    in_parameter: bool,
}

/// What it panics with.
#[derive(Debug, PartialEq)]
struct Thrown(usize);

impl PanicsAt {
    fn new(calls: usize, in_parameter: bool) -> Self {
        Self { countdown: AtomicUsize::new(calls), in_parameter }
    }

    fn count(&self) {
        // Below 0 it wraps: other workers go on.
        if self.countdown.fetch_sub(1, Ordering::Relaxed) == 0 {
            resume_unwind(Box::new(Thrown(7))); // without the hook, which would print
        }
    }
}

impl ScoreModifier for PanicsAt {
    const PARAMETERS: usize = 1;

    fn parameter(&self, _: usize, _: usize, _: usize) -> f64 {
        if self.in_parameter {
            self.count();
        }
        0.0
    }

    fn modify<V: ScoreVector>(&self, score: V, _: &ScoreContext<'_, V>) -> V {
        if !self.in_parameter {
            self.count();
        }
        score
    }
}

/// What the call throws, out of it.
fn thrown_by(call: impl FnOnce()) -> Option<Thrown> {
    let payload = catch_unwind(AssertUnwindSafe(call)).err()?;
    Some(*payload.downcast::<Thrown>().expect("what the score function threw"))
}

/// Prefill, and decode in chunks.
fn shapes() -> [AttentionShape; 2] {
    let group = AttentionShape { num_heads: 4, num_kv_heads: 2, ..one_head(100, 120, 48, 40) };
    [group, AttentionShape { q_len: 1, kv_len: 3000, ..group }]
}

/// On every set: panics early and late, in either function, and everything after them. `meter` counts all that is allocated meanwhile.
fn panics_leave_nothing_behind(parallelism: Parallelism, meter: &Meter) {
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(parallelism);
        for shape in shapes() {
            let problem: Problem = Problem::normal(&shape, 1);
            let plan = AttentionPlan::new(&shape, &config).unwrap();
            let mut workspace = Workspace::for_plan(&plan).unwrap();
            let mut out = Tensor::<f32>::unwritten(problem.out_shape(), Layout::Bhsd);
            let inputs = problem.inputs();
            let run = |workspace: &mut Workspace, out: &mut Tensor| {
                plan.run(&inputs, &mut AttentionOutputs::new(out.view_mut()), workspace).unwrap();
            };
            run(&mut workspace, &mut out);
            let (expected, mut held) = (out.data.clone(), None);
            for round in 0..6 {
                for (calls, in_parameter) in [(0, false), (30, false), (0, true), (3, true)] {
                    let thrown = thrown_by(|| {
                        let mut outputs = AttentionOutputs::new(out.view_mut());
                        let panics = PanicsAt::new(calls, in_parameter);
                        plan.run_with_modifier(&inputs, &mut outputs, &mut workspace, &panics).unwrap();
                    });
                    // There may be fewer tasks than that, so fewer parameters.
                    assert!(thrown == Some(Thrown(7)) || in_parameter && calls > 0, "{set} {shape:?}: no panic");
                    assert_eq!(workspace.len(), plan.workspace_len());
                    out.data.fill(f32::NAN);
                    run(&mut workspace, &mut out);
                    assert!(out.data == expected, "{set} {shape:?}: wrong after a panic");

                    // The scratch of the thread is lost in the panic, not leaked; the next call makes another.
                    let thrown = thrown_by(|| {
                        let mut outputs = AttentionOutputs::new(out.view_mut());
                        let panics = PanicsAt::new(calls, in_parameter);
                        attention_into_with_modifier(&inputs, &mut outputs, &config, &panics).unwrap();
                    });
                    assert!(thrown == Some(Thrown(7)) || in_parameter && calls > 0, "{set} {shape:?}: no panic");
                    out.data.fill(f32::NAN);
                    attention_into(&inputs, &mut AttentionOutputs::new(out.view_mut()), &config).unwrap();
                    assert!(out.data == expected, "{set} {shape:?}: wrong after a panic");
                }
                // What rayon sets up once per thread, it has set up in the first rounds.
                let now = meter.bytes_now.load(Ordering::Relaxed);
                if round >= 3 {
                    assert_eq!(*held.get_or_insert(now), now, "{set} {shape:?}: bytes held after round {round}");
                }
            }
        }
        // The thread's workspace serves packed sequences too.
        let (problem, q, k) = packed();
        let out = fused_attention::attention_varlen(&problem.inputs(), CuSeqlens::new(&q, &k), &config).unwrap();
        assert!(out.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn a_panic_in_a_serial_call_leaves_nothing_behind() {
    let meter = Meter::leaked();
    METER.set(Some(meter));
    panics_leave_nothing_behind(Parallelism::Serial, meter);
    METER.set(None);
}

#[cfg(feature = "rayon")]
#[test]
fn a_panic_in_a_pool_leaves_nothing_behind() {
    let meter = Meter::leaked();
    let pool =
        rayon::ThreadPoolBuilder::new().num_threads(3).start_handler(|_| METER.set(Some(meter))).build().unwrap();
    warm_up(&pool);
    pool.install(|| panics_leave_nothing_behind(Parallelism::Rayon, meter));
}
