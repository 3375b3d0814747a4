//! One case: everyone is prepared, takes turns, and is compared with the reference.

use std::any::Any;
use std::collections::HashMap;

use fused_attention::{InstructionSet, TensorView};

use crate::Result;
use crate::args::{InputKind, Layout};
use crate::bandwidth::Bandwidth;
use crate::case::Case;
use crate::contender::{Contender, Limit, Timed, take_turns};
use crate::inputs::Tensors;
use crate::memory::Pages;
use crate::number::{Dtype, Number};
use crate::options::{Options, Part};
use crate::peak::Peak;
use crate::peers::{Baseline, FOREIGN, Operands, Ours, Scalar, UNFUSED, our_name};
use crate::python::Workers;
use crate::report::{Absence, Row};
use crate::threads::Threads;
use crate::verify::{Reference, tolerance};

/// What all cases share.
pub struct Bench<'a> {
    options: &'a Options,
    workers: Workers,
    /// The last FLOP/s of a peer in a series: what a longer call will take.
    speeds: HashMap<(String, String), f64>,
}

/// Who takes part, and who cannot.
type Field<'a> = (Vec<(String, Box<dyn Contender + 'a>)>, Vec<Absence>);

const PEAK: &str = "peak";
const READ: &str = "read";

impl<'a> Bench<'a> {
    pub fn new(options: &'a Options, workers: Workers) -> Self {
        Self { options, workers, speeds: HashMap::new() }
    }

    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    /// The rows of a case, ours first.
    ///
    /// # Errors
    /// If ours refuses or is wrong. What a peer fails at is an absence.
    pub fn measure<T: Scalar>(&mut self, case: &Case) -> Result<(Vec<Row>, Vec<Absence>)> {
        // Everything runs inside a pool of exactly these threads, also if it is one: peers that use rayon take what they find.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(case.threads).build()?;
        let threads = Threads::new(case.threads)?;
        match &threads {
            Threads::Serial => pool.install(|| self.measure_on::<T>(case, &threads)),
            Threads::Pool(_) => threads.run(|| self.measure_on::<T>(case, &threads)),
        }
    }

    fn measure_on<T: Scalar>(&mut self, case: &Case, threads: &Threads) -> Result<(Vec<Row>, Vec<Absence>)> {
        let pages = if case.part == Part::Decode { Pages::Huge } else { Pages::Plain };
        let bhsd = Tensors::<T>::new(&case.shape, Layout::Bhsd, InputKind::Normal, pages)?;
        let config = case.mask.config().with_parallelism(threads.parallelism());
        let reference = Reference::new(&bhsd.inputs()?, &config)?;
        let strict = tolerance(&bhsd, &case.shape);

        let token_major = match case.part {
            Part::Decode => Some(Tensors::<T>::new(&case.shape, Layout::Bshd, InputKind::Normal, pages)?),
            _ => None,
        };
        let (instruction_set, workspace_bytes) = Ours::new(&bhsd, Layout::Bhsd, config)?.path()?;
        let (mut field, mut absences): Field<'_> = (Vec::new(), Vec::new());
        field.push((PEAK.into(), Box::new(peak_of(threads))));
        if case.part == Part::Decode {
            let mut bandwidth = Bandwidth::new(bhsd.keys_and_values(), threads);
            field.push((READ.into(), Box::new(Limit(move || 1.0 / bandwidth.sample()))));
        }
        for (layout, tensors) in [(Layout::Bhsd, Some(&bhsd)), (Layout::Bshd, token_major.as_ref())] {
            if let Some(tensors) = tensors {
                let ours = Timed::new(Ours::new(tensors, layout, config)?)?;
                field.push((our_name(layout).into(), Box::new(ours)));
            }
        }
        self.add_unfused(case, &bhsd, threads, &mut (&mut field, &mut absences));
        self.add_peers(case, &bhsd, &mut (&mut field, &mut absences))?;

        let times = take_turns(&mut field, self.options.repeat_seconds());
        let limit = |name: &str| {
            let index = field.iter().position(|(contender, _)| contender == name)?;
            times[index].as_ref().ok().map(|seconds| 1.0 / seconds)
        };
        let (peak, read) = (limit(PEAK).ok_or("no peak")?, limit(READ));
        let mut rows = Vec::new();
        for ((name, contender), time) in field.iter_mut().zip(&times) {
            if [PEAK, READ].contains(&name.as_str()) {
                continue;
            }
            let layout = [Layout::Bhsd, Layout::Bshd].into_iter().find(|&layout| our_name(layout) == name);
            let checked = time.as_ref().map_err(ToString::to_string).and_then(|seconds| {
                let out = contender.output().map_err(|error| error.to_string())?;
                Ok((*seconds, check::<T>(&out, &reference, case, strict, layout.is_some())?))
            });
            match checked {
                Err(error) if layout.is_some() => return Err(format!("{name}: {error}, in {case:?}").into()),
                Err(error) => absences.push((name.clone(), error)),
                Ok((seconds, max_abs_error)) => {
                    let mut row = row::<T>(name, case, seconds, peak, read);
                    row.max_abs_error = max_abs_error;
                    row.verified_rows = reference.len();
                    row.repeat_seconds = self.options.repeat_seconds();
                    row.layout = layout;
                    row.instruction_set = layout.map(|_| instruction_set);
                    row.workspace_bytes = layout.map(|_| workspace_bytes);
                    self.speeds.insert((row.peer.clone(), row.series.clone()), case.flops() / seconds);
                    rows.push(row);
                }
            }
        }
        Ok((rows, absences))
    }

    fn add_unfused<'t, T: Scalar>(
        &self,
        case: &Case,
        tensors: &'t Tensors<T>,
        threads: &'t Threads,
        (field, absences): &mut (&mut Vec<(String, Box<dyn Contender + 't>)>, &mut Vec<Absence>),
    ) {
        if !self.options.wants(UNFUSED) {
            return;
        }
        // Its scores of T x T are part of what it is, but not beyond reason.
        let scores = case.shape.q_len * case.shape.kv_len * size_of::<f32>();
        let made = match (tensors as &dyn Any).downcast_ref::<Tensors<f32>>() {
            None => Err("f32 only".into()),
            Some(_) if scores > 2 << 30 => Err("its scores would take more than 2 GiB".into()),
            Some(tensors) => self.is_affordable(UNFUSED, case).and_then(|()| {
                let baseline = Baseline::new(tensors, case, threads).and_then(Timed::new);
                baseline.map_err(|error| error.to_string())
            }),
        };
        match made {
            Ok(baseline) => field.push((UNFUSED.into(), Box::new(baseline))),
            Err(reason) => absences.push((UNFUSED.into(), reason)),
        }
    }

    fn add_peers<T: Scalar>(
        &self,
        case: &Case,
        tensors: &Tensors<T>,
        (field, absences): &mut (&mut Vec<(String, Box<dyn Contender + '_>)>, &mut Vec<Absence>),
    ) -> Result<()> {
        let inputs = tensors.inputs()?;
        let [q, k, v] = [inputs.q.data(), inputs.k.data(), inputs.v.data()].map(bytemuck::cast_slice);
        let operands = Operands { case, q, k, v };
        for peer in FOREIGN.iter().filter(|peer| self.options.wants(peer.name)) {
            let prepared = self.is_affordable(peer.name, case).and_then(|()| peer.prepare(&operands));
            match prepared {
                Ok(contender) => field.push((peer.name.into(), contender)),
                Err(reason) => absences.push((peer.name.into(), reason)),
            }
        }
        let wants = |name: &str| match self.options.wants(name) {
            true => self.is_affordable(name, case).map(|()| true),
            false => Ok(false),
        };
        for (name, prepared) in self.workers.prepare(&operands, &wants)? {
            match prepared {
                Ok(contender) => field.push((name, contender)),
                Err(reason) => absences.push((name, reason)),
            }
        }
        Ok(())
    }

    /// Judging by the last case of the series.
    fn is_affordable(&self, peer: &str, case: &Case) -> std::result::Result<(), String> {
        let speed = self.speeds.get(&(peer.to_owned(), case.series()));
        match speed.map(|speed| case.flops() / speed) {
            Some(seconds) if seconds > self.options.call_limit => {
                Err(format!("left out: a call would take more than {} s", self.options.call_limit))
            }
            _ => Ok(()),
        }
    }
}

fn peak_of(threads: &Threads) -> Limit<impl FnMut() -> f64 + '_> {
    let peak = Peak::new(Dtype::F32, InstructionSet::detect(), threads);
    Limit(move || 1.0 / peak.sample())
}

/// The largest error, if it is one of rounding. Ours is held to the sweep's bound.
fn check<T: Scalar>(
    out: &[f32],
    reference: &Reference,
    case: &Case,
    strict: f64,
    is_ours: bool,
) -> std::result::Result<f64, String> {
    let shape = &case.shape;
    let view = TensorView::from_bhsd(out, [shape.batch, shape.num_heads, shape.q_len, shape.value_dim]);
    let view = view.map_err(|error| format!("wrong: {error}"))?;
    let max_abs_error = reference.check(&view, f64::INFINITY).map_err(|_| "wrong: NaN".to_owned())?;
    // `strict` is 3e-6 of the largest |V|. Weights in 16 bits err by some ULP of that.
    let largest = strict / 3e-6;
    let allowed = if is_ours { strict + T::HALF_ULP * largest } else { 30.0 * strict + 4.0 * T::HALF_ULP * largest };
    if max_abs_error > allowed {
        return Err(format!("wrong: differs from the reference by {max_abs_error:.1e}"));
    }
    Ok(max_abs_error)
}

fn row<T: Number>(peer: &str, case: &Case, seconds: f64, peak: f64, read: Option<f64>) -> Row {
    let shape = &case.shape;
    let visible_flops = case.mask.visible_flops(shape);
    let gflops = visible_flops as f64 / seconds / 1e9;
    let kv_gbytes_per_second = case.kv_bytes() as f64 / seconds / 1e9;
    Row {
        peer: peer.to_owned(),
        part: case.part,
        series: case.series(),
        mode: case.mode,
        instruction_set: None,
        dtype: T::DTYPE,
        kv_dtype: T::DTYPE,
        layout: None,
        inputs: InputKind::Normal,
        mask: case.mask,
        window: case.window(),
        batch: shape.batch,
        num_heads: shape.num_heads,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        value_dim: shape.value_dim,
        q_len: shape.q_len,
        kv_len: shape.kv_len,
        threads: case.threads,
        repeat_seconds: 0.0,
        seconds,
        visible_flops,
        gflops,
        peak_gflops: peak,
        fraction_of_peak: gflops / peak,
        kv_bytes: case.kv_bytes(),
        kv_gbytes_per_second,
        read_gbytes_per_second: read,
        fraction_of_bandwidth: read.map(|read| kv_gbytes_per_second / read),
        max_abs_error: f64::NAN,
        verified_rows: 0,
        workspace_bytes: None,
    }
}
