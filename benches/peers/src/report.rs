//! What comes out: rows as the sweep writes them, with a peer's name, and who is missing why.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::args::{InputKind, Layout, MaskKind, Mode};
use crate::case::Case;
use crate::machine::Machine;
use crate::number::Dtype;
use crate::options::Part;
use crate::peers::{FOREIGN, version_of};
use crate::python::Workers;

/// A peer's name, and why there is no number of it.
pub type Absence = (String, String);

/// All of a run.
#[derive(Debug)]
pub struct Report {
    pub machine: Machine,
    pub command: String,
    pub versions: BTreeMap<String, String>,
    pub rows: Vec<Row>,
    pub memory: Vec<MemoryOfPeer>,
    /// Why a peer has no row, with the cases it concerns.
    pub absent: Vec<AbsentPeer>,
}

#[derive(Debug)]
pub struct AbsentPeer {
    pub peer: String,
    pub reason: String,
    pub cases: Vec<String>,
}

/// One measurement. The keys are the sweep's.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub peer: String,
    pub part: Part,
    pub series: String,
    pub mode: Mode,
    /// Ours; peers do not tell.
    pub instruction_set: Option<&'static str>,
    pub dtype: Dtype,
    pub kv_dtype: Dtype,
    /// Ours; peers have the tensors in the order that they ask for.
    pub layout: Option<Layout>,
    pub inputs: InputKind,
    pub mask: MaskKind,
    pub window: Option<usize>,
    pub batch: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub threads: usize,
    pub repeat_seconds: f64,
    /// Of one call, the best.
    pub seconds: f64,
    /// `2 * (head_dim + value_dim)` for each visible score of each head.
    pub visible_flops: u64,
    pub gflops: f64,
    /// Of independent multiply-add chains on the same threads: in turns with everyone, the best of the run.
    pub peak_gflops: f64,
    pub fraction_of_peak: f64,
    pub kv_bytes: usize,
    pub kv_gbytes_per_second: f64,
    /// Decode: of a streaming read of the same memory on the same threads, in the same rounds.
    pub read_gbytes_per_second: Option<f64>,
    pub fraction_of_bandwidth: Option<f64>,
    /// Against the reference in f64, over `verified_rows` rows.
    pub max_abs_error: f64,
    pub verified_rows: usize,
    /// Ours.
    pub workspace_bytes: Option<usize>,
}

/// What a call adds to the memory of a process, at its highest.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryOfPeer {
    pub peer: String,
    pub part: Part,
    pub series: String,
    pub x: usize,
    /// Beyond the inputs, the output included.
    pub peak_bytes: u64,
    pub output_bytes: u64,
}

impl Report {
    pub fn new(machine: Machine, workers: &Workers) -> Self {
        let mut versions: BTreeMap<String, String> =
            FOREIGN.iter().map(|peer| (peer.package.into(), version_of(peer.package))).collect();
        versions.insert("gemm".into(), version_of("gemm"));
        versions.insert("fused-attention".into(), version_of("fused-attention"));
        versions.extend(workers.versions());
        let absent = workers.absences().into_iter().map(|(peer, reason)| AbsentPeer { peer, reason, cases: vec![] });
        let llama = AbsentPeer {
            peer: "llama.cpp, ik_llama.cpp".into(),
            reason: "no package of a registry has their CPU attention as a function that can be called".into(),
            cases: vec![],
        };
        let absent = absent.chain([llama]).collect();
        // The program's own name would tell a path.
        let command =
            std::iter::once("peers".to_owned()).chain(hidden_python(std::env::args().skip(1))).collect::<Vec<_>>();
        Self { machine, command: command.join(" "), versions, rows: vec![], memory: vec![], absent }
    }

    /// Adds the rows of a case. The peak is the best that was seen so far on as many threads: what else the machine does hits a case of
    /// a few rounds harder than a run.
    pub fn add(&mut self, rows: Vec<Row>) {
        let Some(first) = rows.first() else { return };
        let threads = first.threads;
        self.rows.extend(rows);
        let of_threads = || self.rows.iter().filter(|row| row.threads == threads);
        let peak = of_threads().map(|row| row.peak_gflops).fold(0.0, f64::max);
        for row in self.rows.iter_mut().filter(|row| row.threads == threads) {
            (row.peak_gflops, row.fraction_of_peak) = (peak, row.gflops / peak);
        }
    }

    /// All rows as a JSON array, one a line.
    pub fn json(&self) -> crate::Result<String> {
        let rows = self.rows.iter().map(serde_json::to_string);
        let lines: Vec<String> = rows.chain(self.memory.iter().map(serde_json::to_string)).collect::<Result<_, _>>()?;
        Ok(format!("[\n{}\n]\n", lines.join(",\n")))
    }

    /// Notes who has no number for a case.
    pub fn absent(&mut self, case: &Case, absences: Vec<Absence>) {
        for (peer, reason) in absences {
            let here = format!("{}, {} {}", case.series(), case.x().0, case.x().1);
            match self.absent.iter_mut().find(|absent| absent.peer == peer && absent.reason == reason) {
                Some(absent) => absent.cases.push(here),
                None => self.absent.push(AbsentPeer { peer, reason, cases: vec![here] }),
            }
        }
    }
}

/// Arguments without the place of a Python or of results on this machine.
fn hidden_python(arguments: impl Iterator<Item = String>) -> impl Iterator<Item = String> {
    let mut is_place = false;
    arguments.map(move |argument| {
        let places = ["--python", "--out", "--json"];
        if std::mem::take(&mut is_place) {
            return argument.rsplit('/').next().unwrap_or_default().to_owned();
        }
        is_place = places.contains(&argument.as_str());
        match argument.split_once('=') {
            Some((option, place)) if places.contains(&option) => {
                format!("{option}={}", place.rsplit('/').next().unwrap_or_default())
            }
            _ => argument,
        }
    })
}

impl Row {
    /// What is told while it runs.
    pub fn line(&self) -> String {
        let rate = match self.fraction_of_bandwidth {
            Some(fraction) => {
                format!("{:8.2} GB/s ({:4.1}% of read)", self.kv_gbytes_per_second, 100.0 * fraction)
            }
            None => format!("{:8.1} GFLOP/s ({:4.1}% of peak)", self.gflops, 100.0 * self.fraction_of_peak),
        };
        format!(
            "{:<42} q {:>5} kv {:>5} {:>12.4} ms {rate}  error {:.1e}",
            self.peer,
            self.q_len,
            self.kv_len,
            1e3 * self.seconds,
            self.max_abs_error
        )
    }
}

impl MemoryOfPeer {
    pub fn line(&self) -> String {
        format!("{:<42} {:>10.1} MiB", self.peer, self.peak_bytes as f64 / (1 << 20) as f64)
    }
}
