//! The secret and the events reach ranks that a program starts as another user or in another PID namespace. This test
//! program launches itself.
#![cfg(target_os = "linux")]

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use burn_ddp_comm::{LaunchEnv, ReduceOp, World, WorldOptions};
use burn_ddp_launch::{Launcher, Outcome};

const AS_A_RANK: [&str; 4] = ["--exact", "as_a_rank", "--ignored", "--nocapture"];

/// Two ranks of this program, started by `wrapper`, which is followed by a program and its arguments.
fn launch(wrapper: &[&str]) -> Outcome {
    // Other users need not reach the directory in which this program was built.
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = dir.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let program = program.to_str().unwrap();
    let words: Vec<&str> = wrapper.iter().copied().chain([program]).chain(AS_A_RANK).collect();
    Launcher::new(words[0], words[1..].iter().copied()).nproc(2).run().unwrap()
}

/// The program of a launched rank.
#[test]
#[ignore = "started by the other tests"]
fn as_a_rank() {
    let env = LaunchEnv::detect().unwrap().expect("the launcher's variables");
    let world = World::join(&env, WorldOptions::default()).unwrap();
    let mut sum = [1.0_f32];
    world.group().unwrap().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [2.0]);
    let mut events = std::fs::OpenOptions::new().append(true).open(env.events.as_ref().unwrap()).expect("events");
    events.write_all(b"not an event\n").unwrap();
}

#[test]
fn ranks_behind_wrappers_get_the_secret_and_the_events() {
    let mut tried = 0;
    for wrapper in [
        &["env"][..],
        // As Python's `subprocess` does, which closes inherited descriptors.
        &[
            "bash",
            "-c",
            r#"for fd in /proc/self/fd/*; do fd=${fd##*/}; [ $fd -lt 10 ] || eval "exec $fd>&-"; done; "$@"; exit"#,
            "sh",
        ],
        &["unshare", "--pid", "--fork"],
        &["unshare", "--pid", "--fork", "--mount-proc"],
        &["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"],
    ] {
        let possible = Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").output();
        if !possible.as_ref().is_ok_and(|output| output.status.success()) {
            println!("skipped: {wrapper:?} is not possible here: {possible:?}");
            continue;
        }
        let outcome = launch(wrapper);
        assert_eq!(outcome.exit_code, 0, "{wrapper:?}: {outcome}");
        tried += 1;
    }
    assert!(tried >= 2, "env and bash are everywhere");
}

#[test]
fn a_closed_descriptor_is_explained() {
    // Another user that inherits nothing can read neither the descriptor nor the launcher's.
    let close = r#"for fd in /proc/self/fd/*; do fd=${fd##*/}; [ $fd -lt 10 ] || eval "exec $fd>&-"; done; exec "$@""#;
    let wrapper = ["bash", "-c", close, "sh", "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
    if !Command::new(wrapper[4]).args(&wrapper[5..]).arg("true").status().is_ok_and(|status| status.success()) {
        println!("skipped: this test needs the right to change the user");
        return;
    }
    let script = r#"out=$("$@" 2>&1) && exit 1; case $out in *--secret-file*) exit 0;; esac; echo "$out"; exit 2"#;
    let outcome = launch(&[&["bash", "-c", script, "sh"][..], &wrapper].concat());
    assert_eq!(outcome.exit_code, 0, "{outcome}");
}
