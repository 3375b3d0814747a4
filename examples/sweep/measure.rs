//! One shape: what to time, in which order, and whether its result is right.

use std::time::Instant;

use fused_attention::{AttentionOutputs, AttentionPlan, AttentionShape, InstructionSet, attention_into};

use crate::args::{Args, Baseline};
use crate::inputs::{Tensors, view, view_mut};
use crate::peak::Peak;
use crate::report::Row;
use crate::threads::Threads;
use crate::unfused::Unfused;
use crate::verify::{Reference, tolerance};

/// Rounds that every contender gets even if they take longer than the time given.
const MIN_ROUNDS: usize = 3;
/// A turn of one contender: long enough that its first, cold sample is not its only one unless samples are long.
const TURN_SECONDS: f64 = 0.010;
/// Shorter calls are timed several at a time, as reading the clock takes some 20 ns.
const SAMPLE_SECONDS: f64 = 50e-6;

/// What all shapes of a sweep share.
pub struct Sweep<'a> {
    pub args: &'a Args,
    pub threads: &'a Threads,
    pub instruction_set: InstructionSet,
    pub peak: &'a Peak<'a>,
}

impl Sweep<'_> {
    /// Measures and verifies one shape; call it inside [`Threads::run`]. `phase` is told what begins.
    ///
    /// # Errors
    /// What the library refuses, memory that there is not, and a result that is wrong.
    pub fn measure(&self, shape: &AttentionShape, phase: impl Fn(&str)) -> crate::Result<Row> {
        let Args { layout, mask, inputs: kind, repeat_seconds, .. } = *self.args;
        let config = self.args.config().with_parallelism(self.threads.parallelism());
        let plan = AttentionPlan::new(shape, &config)?;

        phase("inputs");
        let tensors = Tensors::new(shape, layout, kind)?;
        let inputs = tensors.inputs()?;
        let mut out = tensors.new_output()?;
        let mut unfused_out = Vec::new();

        phase("timing");
        let mut outputs = AttentionOutputs::new(view_mut(layout, &mut out, tensors.output_shape())?);
        attention_into(&inputs, &mut outputs, &config)?;
        let ours = || attention_into(&inputs, &mut outputs, &config).expect("the same call succeeded before");
        let peak = || 1.0 / self.peak.sample();
        let mut contenders = vec![Contender::new(in_samples(ours)), Contender::new(peak)];
        if self.args.compare == Some(Baseline::Unfused) {
            unfused_out = tensors.new_output()?;
            let mut unfused = Unfused::new(shape, mask, self.instruction_set, self.threads)?;
            let (inputs, out) = (&inputs, &mut unfused_out);
            let run = move || unfused.run(inputs, out, layout).expect("the output was made for it");
            contenders.push(Contender::new(in_samples(run)));
        }
        take_turns(&mut contenders, repeat_seconds);
        let (seconds, peak_gflops) = (contenders[0].best, 1.0 / contenders[1].best);
        let unfused_seconds = contenders.get(2).map(|unfused| unfused.best);
        drop(contenders);

        phase("verifying");
        let reference = Reference::new(&inputs, &config)?;
        let tolerance = tolerance(&tensors, shape);
        let error_of = |name: &str, out: &[f32]| -> crate::Result<f64> {
            let error = reference.max_abs_error(&view(layout, out, tensors.output_shape())?);
            if error.is_nan() || error > tolerance {
                return Err(
                    format!("{name} differs from the reference by {error:e} > {tolerance:e} at {shape:?}").into()
                );
            }
            Ok(error)
        };
        let max_abs_error = error_of("attention_into", &out)?;
        let unfused_max_abs_error =
            unfused_seconds.map(|_| error_of("the unfused baseline", &unfused_out)).transpose()?;

        let visible_flops = mask.visible_flops(shape);
        let gflops = visible_flops as f64 / seconds / 1e9;
        Ok(Row {
            mode: "prefill",
            instruction_set: self.instruction_set.name(),
            dtype: "f32",
            kv_dtype: "f32",
            layout,
            inputs: kind,
            mask,
            batch: shape.batch,
            num_heads: shape.num_heads,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            q_len: shape.q_len,
            kv_len: shape.kv_len,
            threads: self.threads.count(),
            compare: self.args.compare,
            repeat_seconds,
            seconds,
            visible_flops,
            gflops,
            peak_gflops,
            fraction_of_peak: gflops / peak_gflops,
            max_abs_error,
            verified_rows: reference.len(),
            workspace_bytes: plan.workspace_len(),
            unfused_seconds,
            unfused_max_abs_error,
        })
    }
}

/// Something that is measured in turns with others; less is better.
struct Contender<'a> {
    sample: Box<dyn FnMut() -> f64 + 'a>,
    best: f64,
}

impl<'a> Contender<'a> {
    fn new(sample: impl FnMut() -> f64 + 'a) -> Self {
        Self { sample: Box::new(sample), best: f64::INFINITY }
    }
}

/// Interleaved, so that a phase in which the machine is slow (other guests, heat) hits all of them alike.
fn take_turns(contenders: &mut [Contender<'_>], repeat_seconds: f64) {
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < MIN_ROUNDS || start.elapsed().as_secs_f64() < repeat_seconds {
        for contender in &mut *contenders {
            let turn = Instant::now();
            loop {
                contender.best = contender.best.min((contender.sample)());
                if turn.elapsed().as_secs_f64() >= TURN_SECONDS {
                    break;
                }
            }
        }
        rounds += 1;
    }
}

/// Warms `op` up and makes of it a sample: the seconds of one call, the mean of several where a call is short.
fn in_samples<'a>(mut op: impl FnMut() + 'a) -> impl FnMut() -> f64 + 'a {
    let mut mean_seconds = move |calls: usize| {
        let start = Instant::now();
        for _ in 0..calls {
            op();
        }
        start.elapsed().as_secs_f64() / calls as f64
    };
    let cold = mean_seconds(1);
    // What faulted pages in and filled caches says little about a short call.
    let once = if cold < 100.0 * SAMPLE_SECONDS { mean_seconds(3) } else { cold };
    let calls = (SAMPLE_SECONDS / once).ceil().clamp(1.0, 1e4) as usize;
    move || mean_seconds(calls)
}
