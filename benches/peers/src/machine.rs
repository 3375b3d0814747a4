//! Where the numbers come from, in words: the CPU, never the host.

use std::fs;

#[derive(Debug, Clone)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub date: String,
    pub instruction_set: &'static str,
}

impl Machine {
    pub fn new(cpu: Option<&str>) -> Self {
        Self {
            cpu: cpu.map_or_else(|| cpu_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned()), str::to_owned),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
            instruction_set: fused_attention::InstructionSet::detect().name(),
        }
    }

    /// The CPU's name in a file's.
    pub fn slug(&self) -> String {
        let dashed: String =
            self.cpu.to_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        dashed.split('-').filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
    }
}

/// As Linux tells it: the name, and behind it family and model, as virtual machines hide the name.
fn cpu_name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let field = |name: &str| {
        let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let name = field("model name")?;
    Some(match field("cpu family").zip(field("model")) {
        Some((family, model)) => format!("{name} family {family} model {model}"),
        None => name,
    })
}
