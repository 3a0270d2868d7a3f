//! Runs programs as a user runs them.
#![allow(dead_code)] // each test uses its part

#[path = "../../../burn-ddp/comm/tests/common/free_port.rs"]
mod free_port;

use std::process::{Command, Output, Stdio};

use free_port::FreePort;

/// Runs `program` with `arguments`, without the launcher's variables of a job in which the tests may run.
pub(crate) fn run(program: &str, arguments: &str) -> Output {
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace());
    for (name, _) in std::env::vars().filter(|(name, _)| is_launch_variable(name)) {
        command.env_remove(name);
    }
    command.output().unwrap()
}

fn is_launch_variable(name: &str) -> bool {
    name.starts_with("BURN_DDP_")
        || name.starts_with("TORCHELASTIC_")
        || ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
            .contains(&name)
}

/// Standard output of a run that succeeds.
#[track_caller]
pub(crate) fn shown(program: &str, arguments: &str) -> String {
    let output = run(program, arguments);
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{shown}\n{}", String::from_utf8_lossy(&output.stderr));
    shown
}

/// Checks that the program ends with an error that contains `reason`, not with a panic.
#[track_caller]
pub(crate) fn fails(program: &str, arguments: &str, reason: &str) {
    let output = run(program, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments}");
    assert!(error.contains(reason), "{arguments}: {error}");
    assert!(!error.contains("panicked"), "{arguments}: {error}");
}

/// Standard output of two ranks, joined by torchrun's variables.
pub(crate) fn two_ranks(program: &str) -> [String; 2] {
    let held = FreePort::reserve();
    let ranks = [0, 1].map(|rank| {
        Command::new(program)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", held.port.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    ranks.map(|rank| {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    })
}
