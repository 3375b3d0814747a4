//! Tests that every binary has: which instruction sets really ran.

use std::io::Write;

use fused_attention::{
    AttentionConfig, AttentionOutputs, AttentionPlan, InstructionSet, Workspace, executed_instruction_set,
};

use super::{Tensor, instruction_sets, normal_problem, one_head};

/// Prints past the capture of the test harness, so that a log shows what ran.
fn announce(name: &str) {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "executed instruction set: {name}").unwrap();
    stdout.flush().unwrap();
}

#[test]
fn every_instruction_set_executes() {
    let problem = normal_problem(&one_head(9, 9, 5, 5), 1);
    for set in instruction_sets() {
        let config = AttentionConfig::causal().with_instruction_set(set);
        let plan = AttentionPlan::new(&problem.shape(), &config).unwrap();
        let mut out = Tensor::<f32>::unwritten(problem.out_shape(), super::Layout::Bhsd);
        plan.run(
            &problem.inputs(),
            &mut AttentionOutputs::new(out.view_mut()),
            &mut Workspace::for_plan(&plan).unwrap(),
        )
        .unwrap();
        out.assert_written();
        assert_eq!(plan.instruction_set().name(), set.name());
        // Told from inside the dispatched code.
        assert_eq!(executed_instruction_set(set), set.name());
        announce(executed_instruction_set(set));
    }
}

/// A machine or emulator that was set up for one instruction set must not pass on another.
#[test]
fn the_expected_instruction_set_is_detected() {
    if let Ok(expected) = std::env::var("FUSED_ATTENTION_EXPECT_INSTRUCTION_SET") {
        assert_eq!(InstructionSet::detect().name(), expected);
    }
}
