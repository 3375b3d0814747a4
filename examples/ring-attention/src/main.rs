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
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};
use ring_attention::Ring;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Sequence-parallel attention over MPI.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Seconds that a rank waits for the others before it ends the job.
    #[arg(long, global = true, default_value_t = 60)]
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
    let Some(universe) = mpi::initialize() else {
        eprintln!("MPI was initialised before");
        return ExitCode::FAILURE;
    };
    let world = universe.world();
    let ring = Ring::new(&world).with_time_limit(Duration::from_secs(args.time_limit));
    end_the_job_on_panic(ring.rank());
    let result = match args.command {
        None | Some(Command::Check) => check::run(&ring, &world),
        Some(Command::Bench(args)) => bench::run(&ring, &world, &args),
        Some(Command::Constants) => constants::run(&world),
        Some(Command::Fault { kind }) => fault::run(&ring, kind),
        Some(Command::Model(_)) => Ok(()),
    };
    let code = exit_code(result, ring.rank());
    world.barrier(); // mpirun ends the others as soon as one fails: let all of them say why
    code
}

fn exit_code(result: Result<()>, rank: usize) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rank {rank}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A rank that panics would otherwise wait in `MPI_Finalize` for the others, which wait for it.
fn end_the_job_on_panic(rank: usize) {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        eprintln!("rank {rank} panicked: the job ends");
        SimpleCommunicator::world().abort(101);
    }));
}
