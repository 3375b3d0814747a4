//! One shape: what to time, in which order, and whether its result is right.

use std::any::Any;
use std::time::Instant;

use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionOutputs, AttentionPlan, AttentionShape, CuSeqlens,
    Element, InstructionSet, VarlenPlan, attention_into, attention_varlen_into, bf16, f16,
};

use crate::args::{Args, Baseline, MaskKind, Mode};
use crate::bandwidth::Bandwidth;
use crate::inputs::{Tensors, packed_offsets, view, view_mut};
use crate::memory::{Pages, filled};
use crate::number::{Dtype, Number};
use crate::peak::Peak;
use crate::report::{MemoryRow, Row};
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
    fn config(&self) -> AttentionConfig {
        self.args.config().with_parallelism(self.threads.parallelism())
    }
}

/// Measures and verifies one shape; call it inside [`Threads::run`]. The function is told what begins.
///
/// # Errors
/// What the library refuses, memory that there is not, and a result that is wrong.
pub type Measure = fn(&Sweep<'_>, &AttentionShape, &dyn Fn(&str)) -> crate::Result<Row>;

/// How to measure with the element types that the options name.
///
/// # Errors
/// For types that do not go together.
pub fn measure_of(args: &Args) -> crate::Result<Measure> {
    use Dtype::{Bf16, F16, F32, F64};
    let (dtype, kv_dtype) = (args.dtype, args.kv_dtype());
    if args.compare == Some(Baseline::Unfused) && (dtype, kv_dtype) != (F32, F32) {
        let given = format!("--dtype {}, --kv-dtype {}", dtype.name(), kv_dtype.name());
        return Err(format!("--compare unfused computes in f32 only, not with {given}").into());
    }
    Ok(match (dtype, kv_dtype) {
        (F32, F32) => measure::<f32, f32>,
        (F32, F16) => measure::<f32, f16>,
        (F32, Bf16) => measure::<f32, bf16>,
        (F16, F32) => measure::<f16, f32>,
        (F16, F16) => measure::<f16, f16>,
        (F16, Bf16) => measure::<f16, bf16>,
        (Bf16, F32) => measure::<bf16, f32>,
        (Bf16, F16) => measure::<bf16, f16>,
        (Bf16, Bf16) => measure::<bf16, bf16>,
        (F64, F64) => measure::<f64, f64>,
        (F64, _) | (_, F64) => {
            let name = |dtype: Dtype| format!("{} (accumulated in {})", dtype.name(), dtype.accumulator().name());
            return Err(format!("--dtype {} does not go with --kv-dtype {}", name(dtype), name(kv_dtype)).into());
        }
    })
}

/// As [`Measure`].
fn measure<T, K>(sweep: &Sweep<'_>, shape: &AttentionShape, phase: &dyn Fn(&str)) -> crate::Result<Row>
where
    T: Element + Number,
    K: Element<Acc = T::Acc> + Number,
{
    let Args { mode, layout, mask, modifiers, varlen, inputs: kind, repeat_seconds, compare, .. } = *sweep.args;
    let call = CallOf::new(sweep, shape)?;
    let workspace_bytes = call.workspace_len::<T>()?;

    phase("inputs");
    let kv_pages = if mode == Mode::Decode { Pages::Huge } else { Pages::Plain };
    let tensors = Tensors::<T, K>::new(&call.shape, layout, kind, kv_pages)?.with_modifiers(&modifiers)?;
    let inputs = tensors.inputs()?;
    let mut out = tensors.new_output()?;
    let mut unfused_out = Vec::<f32>::new();

    phase("timing");
    let times = time(sweep, &call, &tensors, &mut out, &mut unfused_out)?;

    phase("verifying");
    let reference = call.reference(&inputs)?;
    let tolerance = tolerance(&tensors, shape);
    let is_wrong = |name: &'static str| move |error: String| format!("{name} {error}, in {shape:?}");
    let out = view(layout, &out, tensors.output_shape())?;
    let max_abs_error = reference.check(&out, tolerance).map_err(is_wrong("attention_into"))?;
    let unfused_max_abs_error = match times.unfused {
        None => None,
        Some(_) => {
            let out = view(layout, &unfused_out, tensors.output_shape())?;
            Some(reference.check(&out, tolerance).map_err(is_wrong("the unfused baseline"))?)
        }
    };

    let visible_flops = call.visible_flops(mask);
    let gflops = visible_flops as f64 / times.ours / 1e9;
    let memory = times.read.map(|read| {
        let visible = tensors.keys_and_values_from(call.first_key(mask));
        let kv_bytes = visible.into_iter().map(size_of_val).sum();
        let kv_gbytes_per_second = kv_bytes as f64 / times.ours / 1e9;
        let read_gbytes_per_second = 1.0 / read;
        let fraction_of_bandwidth = kv_gbytes_per_second / read_gbytes_per_second;
        MemoryRow { kv_bytes, kv_gbytes_per_second, read_gbytes_per_second, fraction_of_bandwidth }
    });
    Ok(Row {
        mode,
        instruction_set: sweep.instruction_set.name(),
        dtype: T::DTYPE,
        kv_dtype: K::DTYPE,
        layout,
        inputs: kind,
        mask,
        modifiers,
        varlen,
        batch: shape.batch,
        num_heads: shape.num_heads,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        value_dim: shape.value_dim,
        q_len: shape.q_len,
        kv_len: shape.kv_len,
        threads: sweep.threads.count(),
        compare,
        repeat_seconds,
        seconds: times.ours,
        visible_flops,
        gflops,
        peak_gflops: 1.0 / times.peak,
        fraction_of_peak: gflops * times.peak,
        memory,
        max_abs_error,
        verified_rows: reference.len(),
        workspace_bytes,
        unfused_seconds: times.unfused,
        unfused_max_abs_error,
    })
}

/// One shape's call: a batch, or packed sequences.
struct CallOf {
    /// Of the tensors.
    shape: AttentionShape,
    config: AttentionConfig,
    /// Where packed sequences begin and end.
    offsets: Option<Vec<usize>>,
}

impl CallOf {
    /// With packed sequences, `shape` is one of the mean length.
    fn new(sweep: &Sweep<'_>, shape: &AttentionShape) -> crate::Result<Self> {
        let offsets = sweep.args.varlen.map(|sequences| packed_offsets(sequences, shape.q_len)).transpose()?;
        let shape = match offsets.as_ref().and_then(|offsets| offsets.last()) {
            Some(&tokens) => AttentionShape { q_len: tokens, kv_len: tokens, ..*shape },
            None => *shape,
        };
        Ok(Self { shape, config: sweep.config(), offsets })
    }

    fn workspace_len<T: Element>(&self) -> Result<usize, AttentionError> {
        Ok(match &self.offsets {
            None => AttentionPlan::<T::Acc>::with_accumulator(&self.shape, &self.config)?.workspace_len(),
            Some(offsets) => {
                let cu_seqlens = CuSeqlens::same(offsets);
                VarlenPlan::<T::Acc>::with_accumulator(&self.shape, cu_seqlens, &self.config)?.workspace_len()
            }
        })
    }

    fn run<T: Element, K: Element<Acc = T::Acc>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
        outputs: &mut AttentionOutputs<'_, T>,
    ) -> Result<(), AttentionError> {
        match &self.offsets {
            None => attention_into(inputs, outputs, &self.config),
            Some(offsets) => attention_varlen_into(inputs, outputs, CuSeqlens::same(offsets), &self.config),
        }
    }

    fn reference<T: Element, K: Element<Acc = T::Acc>>(
        &self,
        inputs: &AttentionInputs<'_, T, K>,
    ) -> Result<Reference, AttentionError> {
        match &self.offsets {
            None => Reference::new(inputs, &self.config),
            Some(offsets) => Reference::of_packed(inputs, &self.config, offsets),
        }
    }

    fn visible_flops(&self, mask: MaskKind) -> u64 {
        let Some(offsets) = &self.offsets else { return mask.visible_flops(&self.shape) };
        let of_len = |len| mask.visible_flops(&AttentionShape { q_len: len, kv_len: len, ..self.shape });
        offsets.windows(2).map(|ends| of_len(ends[1] - ends[0])).sum()
    }

    /// The first key that any query sees. All behind it are seen.
    fn first_key(&self, mask: MaskKind) -> usize {
        mask.visible_keys(&self.shape, 0).start
    }
}

/// The best that each contender reached: seconds of a call, of a GFLOP, of a GB, of a call.
struct Times {
    ours: f64,
    peak: f64,
    read: Option<f64>,
    unfused: Option<f64>,
}

/// Times all contenders in turns. Leaves the output of attention in `out` and of the baseline in `unfused_out`.
fn time<T, K>(
    sweep: &Sweep<'_>,
    call: &CallOf,
    tensors: &Tensors<T, K>,
    out: &mut [T],
    unfused_out: &mut Vec<f32>,
) -> crate::Result<Times>
where
    T: Element + Number,
    K: Element<Acc = T::Acc> + Number,
{
    let Args { mode, layout, mask, repeat_seconds, compare, .. } = *sweep.args;
    let inputs = tensors.inputs()?;
    let mut outputs = AttentionOutputs::new(view_mut(layout, out, tensors.output_shape())?);
    call.run(&inputs, &mut outputs)?;
    let again = || call.run(&inputs, &mut outputs).expect("the same call succeeded before");
    let mut ours = Contender::new(in_samples(again));
    let mut peak = Contender::new(|| 1.0 / sweep.peak.sample());
    let mut read = (mode == Mode::Decode).then(|| {
        let mut bandwidth = Bandwidth::new(tensors.keys_and_values_from(call.first_key(mask)), sweep.threads);
        Contender::new(move || 1.0 / bandwidth.sample())
    });
    let mut unfused = match compare {
        None => None,
        Some(Baseline::Unfused) => {
            let tensors =
                (tensors as &dyn Any).downcast_ref::<Tensors<f32>>().ok_or("--compare unfused is f32 only")?;
            *unfused_out = filled(tensors.output_shape(), f32::NAN)?;
            let mut unfused = Unfused::new(&call.shape, mask, sweep.instruction_set, sweep.threads)?;
            let inputs = tensors.inputs()?;
            let run = move || unfused.run(&inputs, unfused_out, layout).expect("the output was made for it");
            Some(Contender::new(in_samples(run)))
        }
    };
    let contenders = [Some(&mut ours), Some(&mut peak), read.as_mut(), unfused.as_mut()];
    take_turns(contenders.into_iter().flatten().collect(), repeat_seconds);
    let best = |contender: Option<Contender<'_>>| contender.map(|contender| contender.best);
    Ok(Times { ours: ours.best, peak: peak.best, read: best(read), unfused: best(unfused) })
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
fn take_turns(mut contenders: Vec<&mut Contender<'_>>, repeat_seconds: f64) {
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < MIN_ROUNDS || start.elapsed().as_secs_f64() < repeat_seconds {
        for contender in &mut contenders {
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
