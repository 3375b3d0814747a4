//! fused-attention beside what one could use instead, on this machine, in one run. README.md says what is measured and how.

// The ruler is the sweep's, file by file. It has options that are of no use here.
#[path = "../../../examples/sweep/args.rs"]
#[allow(dead_code)]
mod args;
#[path = "../../../examples/sweep/bandwidth.rs"]
mod bandwidth;
#[path = "../../../examples/common/font.rs"]
mod font;
#[path = "../../../examples/sweep/inputs.rs"]
#[allow(dead_code)]
mod inputs;
#[path = "../../../examples/sweep/memory.rs"]
mod memory;
#[path = "../../../examples/sweep/number.rs"]
mod number;
#[path = "../../../examples/sweep/peak.rs"]
mod peak;
#[path = "../../../examples/sweep/rate.rs"]
mod rate;
#[path = "../../../examples/sweep/threads.rs"]
mod threads;
#[path = "../../../examples/sweep/unfused.rs"]
mod unfused;
#[path = "../../../examples/sweep/vectors.rs"]
mod vectors;
#[path = "../../../examples/sweep/verify.rs"]
#[allow(dead_code)]
mod verify;

mod case;
mod contender;
mod draw;
mod machine;
mod measure;
mod options;
mod peak_memory;
mod peers;
mod python;
mod report;
mod table;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use crate::machine::Machine;
use crate::measure::Bench;
use crate::number::Dtype;
use crate::options::{Options, Part};
use crate::python::Workers;
use crate::report::Report;

/// Errors may cross from a pool's thread to the main one.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    options.check()?;
    if let Some(peer) = &options.memory_of {
        return peak_memory::print(options, peer);
    }
    let machine = Machine::new(options.cpu.as_deref());
    let out = results_stem(options, &machine)?;
    let workers = options.python.as_deref().map(Workers::start).transpose()?.unwrap_or_default();
    let mut report = Report::new(machine, &workers);
    let cases = case::cases(options);

    let progress = ProgressBar::new(cases.len() as u64);
    progress.set_style(ProgressStyle::with_template("[{elapsed_precise}] {wide_bar} {pos}/{len}  {msg}")?);
    let mut bench = Bench::new(options, workers);
    for case in &cases {
        let (what, x) = case.x();
        progress.set_message(format!("{}, {what} {x}", case.series()));
        progress.tick();
        if case.part == Part::Memory {
            let (rows, absences) = peak_memory::of_all(options, case, bench.workers());
            progress.suspend(|| rows.iter().for_each(|row| eprintln!("{}", row.line())));
            report.memory.extend(rows);
            report.absent(case, absences);
        } else {
            let (rows, absences) = match case.dtype {
                Dtype::F32 => bench.measure::<f32>(case),
                Dtype::F16 => bench.measure::<half::f16>(case),
                Dtype::Bf16 => bench.measure::<half::bf16>(case),
                Dtype::F64 => Err("no peer is measured in f64".into()),
            }?;
            progress.suspend(|| rows.iter().for_each(|row| eprintln!("{}", row.line())));
            report.add(rows);
            report.absent(case, absences);
        }
        progress.inc(1);
        // What a run of hours has found is kept if it is interrupted.
        if let Some(stem) = &out {
            fs::write(format!("{stem}.json"), report.json()?)?;
        }
    }
    progress.finish_and_clear();

    if let Some(stem) = &out {
        fs::write(format!("{stem}.md"), table::markdown(&report))?;
        fs::write(format!("{stem}.svg"), draw::svg(&report)?)?;
        eprintln!("written: {stem}.json, .md, .svg");
    }
    match options.json.as_deref() {
        None => {
            if out.is_none() {
                print!("{}", table::markdown(&report));
            }
        }
        Some("-") => print!("{}", report.json()?),
        Some(path) => fs::write(path, report.json()?)?,
    }
    Ok(())
}

/// The results' path without its extension, if they are to be written.
fn results_stem(options: &Options, machine: &Machine) -> Result<Option<String>> {
    let folder = match &options.out {
        Some(folder) => folder.clone(),
        None if options.quick => return Ok(None),
        None => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../results")),
    };
    fs::create_dir_all(&folder).map_err(|error| format!("--out {}: {error}", folder.display()))?;
    let stem = folder.join(format!("{}-{}", machine.slug(), machine.date));
    Ok(Some(stem.to_str().ok_or("--out is not valid UTF-8")?.to_owned()))
}
