//! The peers that are Python packages. Each library has a process of its own (`peers.py`), which waits for its turn and is told by lines of
//! JSON what to do; so they take turns with the Rust peers, and a library that is missing or crashes is missing alone.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Result;
use crate::contender::{Contender, TURN_SECONDS};
use crate::peers::{Operands, Prepared};
use crate::report::Absence;

/// Of `peers.py`.
const LIBRARIES: [&str; 3] = ["torch", "onnxruntime", "openvino"];
/// Behind a turn: thread pools of these libraries spin for some milliseconds when their work is done, which would slow down who comes next.
const PAUSE: Duration = Duration::from_millis(30);
const NOT_ASKED: &str = "not asked for: --python";

/// All processes.
#[derive(Default)]
pub struct Workers {
    python: Option<String>,
    workers: Vec<Arc<Mutex<Worker>>>,
    absences: Vec<Absence>,
}

struct Worker {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    library: &'static str,
    version: String,
    peers: Vec<String>,
    has_ended: bool,
    /// For tensors, which are too large for lines.
    folder: TempDir,
}

/// What a process says about itself.
#[derive(Deserialize)]
struct Hello {
    version: String,
    peers: Vec<String>,
}

impl Workers {
    /// Starts all that can be had.
    pub fn start(python: &str) -> Result<Self> {
        let mut all = Self { python: Some(python.to_owned()), ..Self::default() };
        for library in LIBRARIES {
            match Worker::start(python, library) {
                Ok(worker) => all.workers.push(Arc::new(Mutex::new(worker))),
                Err(error) => all.absences.push((library.to_owned(), error.to_string())),
            }
        }
        Ok(all)
    }

    pub fn versions(&self) -> Vec<(String, String)> {
        self.workers.iter().map(|worker| lock(worker)).map(|w| (w.library.to_owned(), w.version.clone())).collect()
    }

    /// Libraries that are not there at all.
    pub fn absences(&self) -> Vec<Absence> {
        if self.python.is_some() {
            return self.absences.clone();
        }
        LIBRARIES.map(|library| (library.to_owned(), NOT_ASKED.to_owned())).into()
    }

    /// All peers that are wanted, prepared and warm, or why not.
    pub fn prepare(
        &self,
        operands: &Operands<'_>,
        wants: &dyn Fn(&str) -> std::result::Result<bool, String>,
    ) -> Result<Vec<(String, Prepared)>> {
        let mut prepared = Vec::new();
        for shared in &self.workers {
            let mut worker = lock(shared);
            if worker.has_ended {
                continue;
            }
            let mut names = Vec::new();
            for name in worker.peers.clone() {
                match wants(&name) {
                    Ok(true) => names.push(name),
                    Ok(false) => {}
                    Err(reason) => prepared.push((name, Err(reason))),
                }
            }
            if names.is_empty() {
                continue;
            }
            worker.load(operands)?;
            for name in names {
                let contender = worker.ask(json!({"do": "prepare", "peer": name})).map_err(|error| error.to_string());
                let contender = contender.map(|_| {
                    let count = operands.q_shape().iter().product();
                    Box::new(Foreign { worker: shared.clone(), name: name.clone(), count }) as Box<dyn Contender>
                });
                prepared.push((name, contender));
            }
            // So do the threads that warmed it up.
            sleep(PAUSE);
        }
        Ok(prepared)
    }

    /// The bytes that a first call adds at its highest, for each peer, each in a process of its own.
    pub fn memory(
        &self,
        operands: &Operands<'_>,
        wants: &dyn Fn(&str) -> bool,
    ) -> Vec<(String, std::result::Result<u64, String>)> {
        let Some(python) = &self.python else { return Vec::new() };
        let mut found = Vec::new();
        for shared in &self.workers {
            let (library, names) = {
                let worker = lock(shared);
                (worker.library, worker.peers.clone())
            };
            for name in names.into_iter().filter(|name| wants(name)) {
                let bytes = Worker::start(python, library).and_then(|mut worker| {
                    worker.load(operands)?;
                    let reply = worker.ask(json!({"do": "memory", "peer": name}))?;
                    reply["bytes"].as_u64().ok_or_else(|| "says nothing of bytes".into())
                });
                found.push((name, bytes.map_err(|error| error.to_string())));
            }
        }
        found
    }
}

/// A panic elsewhere has not changed what a process is.
fn lock(worker: &Mutex<Worker>) -> std::sync::MutexGuard<'_, Worker> {
    worker.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    fn start(python: &str, library: &'static str) -> Result<Self> {
        let mut child = Command::new(python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers.py"))
            .arg(library)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("--python: {error}"))?;
        let input = child.stdin.take().ok_or("no pipe")?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let folder = tempfile::tempdir()?;
        let (version, peers) = (String::new(), Vec::new());
        let mut worker = Self { child, input, output, library, version, peers, has_ended: false, folder };
        let hello: Hello = serde_json::from_value(worker.answer()?)?;
        (worker.version, worker.peers) = (hello.version, hello.peers);
        Ok(worker)
    }

    /// Gives it a case and its tensors.
    fn load(&mut self, operands: &Operands<'_>) -> Result<()> {
        for (name, bytes) in [("q", operands.q), ("k", operands.k), ("v", operands.v)] {
            fs::write(self.folder.path().join(name), bytes)?;
        }
        self.ask(json!({"do": "load", "folder": self.folder.path(), "case": operands.case.message()}))?;
        Ok(())
    }

    fn ask(&mut self, question: Value) -> Result<Value> {
        let sent = writeln!(self.input, "{question}").and_then(|()| self.input.flush());
        if let Err(error) = sent {
            self.has_ended = true;
            return Err(format!("its process has ended: {error}").into());
        }
        self.answer()
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            self.has_ended = true;
            return Err("its process has ended".into());
        }
        let answer: Value = serde_json::from_str(&line)?;
        match answer["error"].as_str() {
            Some(error) => Err(error.to_owned().into()),
            None => Ok(answer),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends when its input does; one that hangs in a library does not.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A peer of a process.
struct Foreign {
    worker: Arc<Mutex<Worker>>,
    name: String,
    /// Numbers of the output.
    count: usize,
}

impl Contender for Foreign {
    fn turn(&mut self) -> Result<f64> {
        let answer = lock(&self.worker).ask(json!({"do": "turn", "peer": self.name, "seconds": TURN_SECONDS}));
        sleep(PAUSE);
        answer?["seconds"].as_f64().ok_or_else(|| "says nothing of seconds".into())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let mut worker = lock(&self.worker);
        worker.ask(json!({"do": "output", "peer": self.name}))?;
        let bytes = fs::read(worker.folder.path().join("out"))?;
        let out = bytemuck::pod_collect_to_vec::<u8, f32>(&bytes);
        if out.len() != self.count {
            return Err(format!("wrong: {} numbers instead of {}", out.len(), self.count).into());
        }
        Ok(out)
    }
}
