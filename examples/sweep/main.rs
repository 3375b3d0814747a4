//! The project's ruler: how fast is attention at which length, how much of the machine's peak or bandwidth is that, and
//! is the result right. `cargo run --release --example sweep -- --help` lists the options.

#[path = "../common/font.rs"]
mod font;

mod args;
mod bandwidth;
mod inputs;
mod measure;
mod memory;
mod number;
mod peak;
mod plot;
mod rate;
mod report;
mod threads;
mod unfused;
mod vectors;
mod verify;

use std::fs::File;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use fused_attention::{AttentionPlan, AttentionShape};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::Args;
use crate::measure::{Sweep, measure_of};
use crate::peak::Peak;
use crate::report::Row;
use crate::threads::Threads;

/// Errors may cross from a pool's thread to the main one.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let shapes = args.shapes()?;
    let measure = measure_of(args)?;
    let threads = Threads::new(args.threads)?;
    let json_to_stdout = args.json.as_deref() == Some("-");
    // Opened before minutes are spent on what could not be written.
    let create = |option: &str, path: &str| File::create(path).map_err(|error| format!("{option} {path}: {error}"));
    let json: Option<Box<dyn Write>> = match args.json.as_deref() {
        None => None,
        Some("-") => Some(Box::new(io::stdout())),
        Some(path) => Some(Box::new(create("--json", path)?)),
    };
    let plot = args.plot.as_deref().map(|path| create("--plot", path)).transpose()?;
    let mut table: Box<dyn Write> = if json_to_stdout { Box::new(io::stderr()) } else { Box::new(io::stdout()) };

    // The library's choice where none was forced.
    let instruction_set = AttentionPlan::new(&shapes[0], &args.config())?.instruction_set();
    let peak = threads.run(|| Peak::new(args.dtype.accumulator(), instruction_set, &threads));
    let sweep = Sweep { args, threads: &threads, instruction_set, peak: &peak };

    let progress = progress_bar(&shapes)?;
    let title = Row::title(args, instruction_set.name());
    writeln!(table, "{title}\n\n{}", Row::heading(args))?;
    let mut rows = Vec::new();
    for shape in &shapes {
        let phase = |phase: &str| {
            let AttentionShape { head_dim, q_len, kv_len, .. } = shape;
            progress.set_message(format!("head_dim {head_dim}, q_len {q_len}, kv_len {kv_len}: {phase}"));
            progress.tick();
        };
        let row = threads.run(|| measure(&sweep, shape, &phase)).inspect_err(|_| progress.finish_and_clear())?;
        progress.suspend(|| writeln!(table, "{}", row.line()))?;
        progress.inc(weight(shape));
        rows.push(row);
    }
    progress.finish_and_clear();

    if let Some(mut json) = json {
        serde_json::to_writer_pretty(&mut json, &rows)?;
        writeln!(json)?;
        json.flush()?;
    }
    if let Some((mut file, path)) = plot.zip(args.plot.as_deref()) {
        file.write_all(plot::svg(&title, &rows)?.as_bytes()).map_err(|error| format!("--plot {path}: {error}"))?;
    }
    Ok(())
}

/// Goes to stderr, and nowhere if that is not a terminal. It is redrawn between phases only: a ticking thread would
/// take its share of what is measured.
fn progress_bar(shapes: &[AttentionShape]) -> Result<ProgressBar> {
    let bar = ProgressBar::new(shapes.iter().map(weight).sum());
    bar.set_style(ProgressStyle::with_template("[{elapsed_precise}] {wide_bar} {percent}%  {msg}")?);
    Ok(bar)
}

/// How much of the progress a shape is: the repetitions of short ones, the products of long ones.
fn weight(shape: &AttentionShape) -> u64 {
    let sizes = [shape.batch, shape.num_heads, shape.q_len, shape.kv_len, shape.head_dim + shape.value_dim];
    1 + (sizes.iter().map(|&size| size as f64).product::<f64>() / 2e9) as u64
}
