//! Ring attention over MPI: checks itself, measures itself, and models what larger clusters would do.
//!
//! `mpirun -np 4 target/release/ring-attention` runs the checks; `--help` lists the rest.

mod bench;
mod check;
mod check_decode;
mod check_errors;
mod constants;
mod fault;
mod inputs;
mod memory;
mod model;
mod plot;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use mpi::Threading;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};
use ring_attention::{Ring, print_error};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Sequence-parallel attention over MPI.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Seconds that a rank waits for the others before it ends the job.
    #[arg(long, global = true, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    time_limit: u64,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Results against one process and the f64 reference, memory, bits, errors (the default).
    Check,
    /// How long one layer takes; under `mpirun -np 1` besides, how long the library's own call does.
    Bench(bench::Args),
    /// The constants of the model, on two ranks.
    Constants,
    /// Time and efficiency on up to 1024 nodes, on paper. Needs no mpirun.
    Model(model::Args),
    /// The last rank does something wrong while the others compute: for .ci/ring.
    Fault {
        /// What it does.
        kind: fault::Kind,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(Command::Model(args)) = &args.command {
        return exit_code(model::run(args), 0);
    }
    // A thread that panics ends the job while the others may be calling MPI too.
    let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Multiple) else {
        eprintln!("MPI was initialised before");
        return ExitCode::FAILURE;
    };
    let world = universe.world();
    let ring = Ring::new(&world).with_time_limit(Duration::from_secs(args.time_limit));
    end_the_job_on_panic(ring.rank(), threading);
    let result = match args.command {
        None | Some(Command::Check) => check::run(&ring, &world),
        Some(Command::Bench(args)) => bench::run(&ring, &world, &args),
        Some(Command::Constants) => constants::run(&world),
        Some(Command::Fault { kind }) => fault::run(&ring, kind),
        Some(Command::Model(_)) => Ok(()),
    };
    let code = exit_code(result, ring.rank());
    // mpirun ends the others as soon as one fails: let all of them say why.
    ring.finish(world.immediate_barrier(), "all ranks to end");
    code
}

fn exit_code(result: Result<()>, rank: usize) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&format_args!("rank {rank}: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Sizes that must not be 0, with the names of their options.
fn at_least_one(options: &[(&str, usize)]) -> Result<()> {
    match options.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => Err(format!("--{name} is 0, it must be at least 1").into()),
        None => Ok(()),
    }
}

/// A rank that panics would otherwise wait in `MPI_Finalize` for the others, which wait for it.
fn end_the_job_on_panic(rank: usize, threading: Threading) {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        print_error(&format_args!("rank {rank} panicked: the job ends"));
        if threading < Threading::Multiple {
            std::process::abort(); // MPI may not be called from here; a rank that dies ends the job as well
        }
        SimpleCommunicator::world().abort(101);
    }));
}
