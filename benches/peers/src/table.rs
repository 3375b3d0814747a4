//! The results as tables: a row for each length, a column for each peer, ours first.

use std::fmt::Write;

use crate::options::Part;
use crate::report::{Report, Row};

/// Rows of one series, in the order in which they were measured.
pub struct Series<'a> {
    pub title: &'a str,
    pub part: Part,
    pub rows: Vec<&'a Row>,
}

impl<'a> Series<'a> {
    pub fn all(report: &'a Report) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for row in &report.rows {
            match all.iter_mut().find(|series| series.title == row.series) {
                Some(series) => series.rows.push(row),
                None => all.push(Self { title: &row.series, part: row.part, rows: vec![row] }),
            }
        }
        all
    }

    pub fn peers(&self) -> Vec<&'a str> {
        let mut peers: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !peers.contains(&row.peer.as_str()) {
                peers.push(&row.peer);
            }
        }
        peers
    }

    pub fn xs(&self) -> Vec<usize> {
        let mut xs: Vec<usize> = self.rows.iter().map(|row| row.x()).collect();
        xs.sort_unstable();
        xs.dedup();
        xs
    }

    pub fn row(&self, peer: &str, x: usize) -> Option<&'a Row> {
        self.rows.iter().copied().find(|row| row.peer == peer && row.x() == x)
    }
}

impl Row {
    /// What grows in its series.
    pub fn x(&self) -> usize {
        match self.part {
            Part::Prefill | Part::Memory => self.q_len,
            Part::Decode => self.kv_len,
            Part::Window => self.window.unwrap_or(self.kv_len),
            Part::Batch => self.batch,
        }
    }

    pub fn is_ours(&self) -> bool {
        self.layout.is_some()
    }

    /// What its series is drawn and tabled in.
    pub fn rate(&self) -> f64 {
        if self.part == Part::Decode { self.kv_gbytes_per_second } else { self.gflops }
    }

    /// The limit of the machine for that.
    pub fn limit(&self) -> f64 {
        self.read_gbytes_per_second.unwrap_or(self.peak_gflops)
    }
}

/// A Markdown document.
pub fn markdown(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "# {}, {}\n\n{} cores, {}. `{}`\n\n",
        machine.cpu, machine.date, machine.cores, machine.instruction_set, report.command
    );
    text += "Versions: ";
    let versions: Vec<String> = report.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    text += &versions.join(", ");
    text += ".\n\nPeak is what independent multiply-adds reach on the same threads, in turns with everyone, the best of the run; read what a streaming \
             read of the same K and V does, the best of the case. \"Best peer\" is ours divided by the fastest of the others: below 1 we lose. Empty: see the end.\n";
    for series in Series::all(report) {
        write_series(&mut text, &series);
    }
    write_memory(&mut text, report);
    write_errors(&mut text, report);
    write_absent(&mut text, report);
    text
}

fn write_series(text: &mut String, series: &Series<'_>) {
    let (x, unit, limit) = match series.part {
        Part::Decode => ("keys", "GB/s of K and V", "read"),
        Part::Window => ("window", "GFLOP/s on visible scores", "peak"),
        Part::Batch => ("batch", "GFLOP/s on visible scores", "peak"),
        _ => ("tokens", "GFLOP/s on visible scores", "peak"),
    };
    let peers = series.peers();
    let _ = writeln!(text, "\n## {}\n\n{unit}.\n", series.title);
    let names = peers.join(" | ");
    let also = if series.part == Part::Decode { " of peak |" } else { "" };
    let _ = writeln!(text, "| {x} | {limit} | {names} | ours of {limit} |{also} best peer |");
    let columns = 4 + peers.len() + usize::from(series.part == Part::Decode);
    let _ = writeln!(text, "|{}", "---:|".repeat(columns));
    for len in series.xs() {
        let rows: Vec<_> = peers.iter().map(|peer| series.row(peer, len)).collect();
        let measured = || rows.iter().flatten().copied();
        let best = |ours: bool| measured().filter(|row| row.is_ours() == ours).map(Row::rate).fold(0.0, f64::max);
        let limit = measured().next().map_or(f64::NAN, Row::limit);
        let _ = write!(text, "| {len} | {limit:.1} |");
        for row in &rows {
            let _ = match row {
                Some(row) => write!(text, " {:.2} |", row.rate()),
                None => write!(text, " |"),
            };
        }
        let _ = write!(text, " {:.0} % |", 100.0 * best(true) / limit);
        if series.part == Part::Decode {
            let of_peak = measured().filter(|row| row.is_ours()).map(|row| row.fraction_of_peak).fold(0.0, f64::max);
            let _ = write!(text, " {:.0} % |", 100.0 * of_peak);
        }
        let _ = match best(false) {
            0.0 => writeln!(text, " |"),
            other => writeln!(text, " {:.2} |", best(true) / other),
        };
    }
}

fn write_memory(text: &mut String, report: &Report) {
    let mut titles: Vec<&str> = report.memory.iter().map(|row| row.series.as_str()).collect();
    titles.dedup();
    for title in titles {
        let rows: Vec<_> = report.memory.iter().filter(|row| row.series == title).collect();
        let _ = writeln!(
            text,
            "\n## {title}\n\nWhat a first call adds to its process at its highest, beyond the inputs. {:.1} MiB of it are the output.\n\n\
             | | MiB |\n|---|---:|",
            mib(rows[0].output_bytes)
        );
        for row in rows {
            let _ = writeln!(text, "| {} | {:.1} |", row.peer, mib(row.peak_bytes));
        }
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

/// The largest error of each peer and type, over all its rows.
fn write_errors(text: &mut String, report: &Report) {
    let mut worst: Vec<(&str, &str, f64)> = Vec::new();
    for row in &report.rows {
        let (peer, dtype) = (row.peer.as_str(), row.dtype.name());
        match worst.iter_mut().find(|found| (found.0, found.1) == (peer, dtype)) {
            Some(found) => found.2 = found.2.max(row.max_abs_error),
            None => worst.push((peer, dtype, row.max_abs_error)),
        }
    }
    worst.sort_by(|a, b| (a.1, a.2).partial_cmp(&(b.1, b.2)).unwrap_or(std::cmp::Ordering::Equal));
    text.push_str("\n## Errors\n\nThe largest against attention in f64 over all rows above, V being normal numbers.\n\n| type | | error |\n|---|---|---:|\n");
    for (peer, dtype, error) in worst {
        let _ = writeln!(text, "| {dtype} | {peer} | {error:.1e} |");
    }
}

fn write_absent(text: &mut String, report: &Report) {
    text.push_str("\n## Not in the tables\n\n| | why | where |\n|---|---|---|\n");
    for absent in &report.absent {
        let (peer, reason) = (&absent.peer, absent.reason.replace(['\n', '|'], " "));
        let place = match &absent.cases[..] {
            [] => "everywhere".to_owned(),
            [one] => one.clone(),
            [first, .., last] => format!("{} cases, from {first} to {last}", absent.cases.len()),
        };
        let _ = writeln!(text, "| {peer} | {reason} | {place} |");
    }
}
