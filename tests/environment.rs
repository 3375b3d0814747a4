//! `FUSED_ATTENTION_INSTRUCTION_SET`: chooses the set of a process, loses against the config, and an impossible value
//! is an error, not another set. Read once a process, so every case is a process: this binary again.

mod common;

use std::process::Command;

use fused_attention::{AttentionConfig, AttentionPlan, AttentionShape, InstructionSet};

const VARIABLE: &str = "FUSED_ATTENTION_INSTRUCTION_SET";
/// Tells the child which set its config forces, if any.
const FORCED: &str = "FUSED_ATTENTION_TEST_FORCED";

fn plan(config: &AttentionConfig) -> String {
    let shape =
        AttentionShape { batch: 1, num_heads: 1, num_kv_heads: 1, q_len: 3, kv_len: 3, head_dim: 4, value_dim: 4 };
    match AttentionPlan::new(&shape, config) {
        Ok(plan) => format!("runs on {}", plan.instruction_set().name()),
        Err(error) => format!("error: {error}"),
    }
}

#[test]
#[ignore = "run by the other tests in a process of their own"]
fn child() {
    let config = match std::env::var(FORCED) {
        Ok(name) => AttentionConfig::causal().with_instruction_set(InstructionSet::from_name(&name).unwrap()),
        Err(_) => AttentionConfig::causal(),
    };
    println!("child: {}", plan(&config));
}

/// What a process with this environment says.
fn in_a_process(value: Option<&str>, forced: Option<&str>) -> String {
    let binary = std::env::current_exe().unwrap();
    // Under a user-mode emulator the child needs the emulator too.
    let runner = std::env::var("FUSED_ATTENTION_TEST_RUNNER").unwrap_or_default();
    let mut words = runner.split_whitespace();
    let mut command = match words.next() {
        Some(emulator) => Command::new(emulator),
        None => Command::new(&binary),
    };
    if !runner.is_empty() {
        command.args(words).arg(&binary);
    }
    command.args(["child", "--exact", "--ignored", "--nocapture"]).env_remove(VARIABLE).env_remove(FORCED);
    if let Some(value) = value {
        command.env(VARIABLE, value);
    }
    if let Some(forced) = forced {
        command.env(FORCED, forced);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    let said = stdout.lines().find_map(|line| line.split("child: ").nth(1)).expect("the child says one line");
    said.to_owned()
}

#[test]
fn without_the_variable_the_best_set_runs() {
    assert_eq!(in_a_process(None, None), format!("runs on {}", InstructionSet::detect()));
}

#[test]
fn the_variable_chooses_any_available_set() {
    for set in InstructionSet::available().chain([InstructionSet::portable_512()]) {
        assert_eq!(in_a_process(Some(set.name()), None), format!("runs on {set}"));
    }
}

#[test]
fn the_config_wins_over_the_variable() {
    assert_eq!(in_a_process(Some("portable-256"), Some("portable")), "runs on portable");
    assert_eq!(in_a_process(Some("no such set"), Some("portable")), "runs on portable");
}

#[test]
fn an_unknown_set_is_an_error_that_lists_the_available_ones() {
    let said = in_a_process(Some("sse9"), None);
    assert!(said.starts_with("error: ") && said.contains("\"sse9\"") && said.contains("portable"), "{said}");
    assert!(in_a_process(Some(""), None).starts_with("error: "));
}

#[test]
fn a_set_of_another_cpu_is_an_error_and_not_an_illegal_instruction() {
    let foreign = if cfg!(target_arch = "aarch64") { "avx512" } else { "neon" };
    let said = in_a_process(Some(foreign), None);
    assert!(said.starts_with("error: this CPU does not have") && said.contains(foreign), "{said}");
}
