//! What a call adds to the memory of its process at its highest, the output included and the inputs not. Each peer is asked in a fresh
//! process, behind a short call that loads its code and starts its threads. Linux only: the system counts.

use std::fs;
use std::process::Command;

use fused_attention::{AttentionShape, Parallelism};

use crate::Result;
use crate::args::{InputKind, Layout};
use crate::case::{Case, cases};
use crate::contender::Call;
use crate::inputs::Tensors;
use crate::memory::Pages;
use crate::number::Dtype;
use crate::options::{Options, Part};
use crate::peers::{Baseline, FOREIGN, Operands, Ours, Scalar, UNFUSED, our_name};
use crate::python::Workers;
use crate::report::{Absence, MemoryOfPeer};
use crate::threads::Threads;

/// Of every peer that is wanted. Who fails is an absence.
pub fn of_all(options: &Options, case: &Case, workers: &Workers) -> (Vec<MemoryOfPeer>, Vec<Absence>) {
    let ours = our_name(Layout::Bhsd);
    let names = [ours, UNFUSED].into_iter().chain(FOREIGN.iter().map(|peer| peer.name));
    let wanted = names.filter(|&name| name == ours || options.wants(name));
    let mut found: Vec<(String, std::result::Result<u64, String>)> = wanted
        .map(|name| (name.to_owned(), in_child(options, case, name).map_err(|error| error.to_string())))
        .collect();
    let foreign = match case.dtype {
        Dtype::F32 => of_python::<f32>(options, case, workers),
        Dtype::F16 => of_python::<half::f16>(options, case, workers),
        _ => of_python::<half::bf16>(options, case, workers),
    };
    match foreign {
        Ok(foreign) => found.extend(foreign),
        Err(error) => found.push(("Python peers".into(), Err(error.to_string()))),
    }
    let AttentionShape { batch, num_heads, q_len, value_dim, .. } = case.shape;
    let element_bytes = if case.dtype == Dtype::F32 { 4 } else { 2 };
    let output_bytes = (batch * num_heads * q_len * value_dim * element_bytes) as u64;
    let (mut rows, mut absences) = (Vec::new(), Vec::new());
    for (peer, bytes) in found {
        match bytes {
            Ok(peak_bytes) => {
                rows.push(MemoryOfPeer {
                    peer,
                    part: Part::Memory,
                    series: case.series(),
                    x: case.x().1,
                    peak_bytes,
                    output_bytes,
                });
            }
            Err(reason) => absences.push((peer, reason)),
        }
    }
    (rows, absences)
}

fn of_python<T: Scalar>(
    options: &Options,
    case: &Case,
    workers: &Workers,
) -> Result<Vec<(String, std::result::Result<u64, String>)>> {
    let tensors = Tensors::<T>::new(&case.shape, Layout::Bhsd, InputKind::Normal, Pages::Plain)?;
    let inputs = tensors.inputs()?;
    let [q, k, v] = [inputs.q.data(), inputs.k.data(), inputs.v.data()].map(bytemuck::cast_slice);
    Ok(workers.memory(&Operands { case, q, k, v }, &|name| options.wants(name)))
}

fn in_child(options: &Options, case: &Case, peer: &str) -> Result<u64> {
    let program = std::env::current_exe()?;
    let output = Command::new(program).args(options.memory_arguments(peer, case)).output()?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !output.status.success() {
        let error = said(&output.stderr);
        let last = error.lines().last().unwrap_or("no message").trim_start_matches("error: ").to_owned();
        return Err(last.into());
    }
    Ok(said(&output.stdout).parse()?)
}

/// The work of such a process: prints the bytes.
pub fn print(options: &Options, peer: &str) -> Result<()> {
    let case = cases(options).into_iter().find(|case| case.part == Part::Memory).ok_or("no case")?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(case.threads).build()?;
    let threads = Threads::new(case.threads)?;
    let measure = || match case.dtype {
        Dtype::F32 => measured::<f32>(peer, &case, &threads),
        Dtype::F16 => measured::<half::f16>(peer, &case, &threads),
        _ => measured::<half::bf16>(peer, &case, &threads),
    };
    let bytes = match &threads {
        Threads::Serial => pool.install(measure),
        Threads::Pool(_) => threads.run(measure),
    }?;
    println!("{bytes}");
    Ok(())
}

fn measured<T: Scalar>(peer: &str, case: &Case, threads: &Threads) -> Result<u64> {
    let short = Case { shape: AttentionShape { q_len: 64, kv_len: 64, ..case.shape }, ..*case };
    called::<T>(peer, &short, threads)?;
    called::<T>(peer, case, threads)
}

/// Prepares a peer, and measures its first call.
fn called<T: Scalar>(peer: &str, case: &Case, threads: &Threads) -> Result<u64> {
    let tensors = Tensors::<T>::new(&case.shape, Layout::Bhsd, InputKind::Normal, Pages::Plain)?;
    if peer == our_name(Layout::Bhsd) {
        let parallelism: Parallelism = threads.parallelism();
        // With its output, which others allocate in the call.
        return added(|| Ours::new(&tensors, Layout::Bhsd, case.mask.config().with_parallelism(parallelism))?.call());
    }
    if peer == UNFUSED {
        let tensors = (&tensors as &dyn std::any::Any).downcast_ref::<Tensors<f32>>().ok_or("f32 only")?;
        return added(|| Baseline::new(tensors, case, threads)?.call());
    }
    let foreign = FOREIGN.iter().find(|foreign| foreign.name == peer).ok_or("no such peer")?;
    let inputs = tensors.inputs()?;
    let [q, k, v] = [inputs.q.data(), inputs.k.data(), inputs.v.data()].map(bytemuck::cast_slice);
    let operands = Operands { case, q, k, v };
    let mut call = foreign.load(&operands)?;
    added(|| call.call())
}

/// What `op` adds to the memory of this process at its highest.
fn added(op: impl FnOnce() -> Result<()>) -> Result<u64> {
    release_freed();
    // Resets the peak to what there is.
    fs::write("/proc/self/clear_refs", "5").map_err(|error| format!("memory is measured on Linux only: {error}"))?;
    let before = status("VmRSS:")?;
    op()?;
    Ok(status("VmHWM:")?.saturating_sub(before))
}

/// What was freed and is kept for reuse would hide what `op` takes.
fn release_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: gives free memory back to the system, which is allowed at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn status(field: &str) -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).ok_or("memory is measured on Linux only")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib << 10)
}
