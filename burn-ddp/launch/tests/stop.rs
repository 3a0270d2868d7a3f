//! However a job is stopped, none of its processes and files stay behind.
#![cfg(feature = "cli")]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::process::Command;
use std::time::Duration;

use common::{Job, assert_gone, child_of, is_running, pid_in, run, script};
use rustix::process::{Signal, kill_process};

/// Each rank starts a child in its group and prints both pids.
const FAMILY: &str = r#"sleep 600 & echo "$$ $!"; wait"#;

fn pids(lines: &[String]) -> Vec<u32> {
    let words = lines.iter().flat_map(|line| line.rsplit("] ").next().unwrap().split(' '));
    words.map(|word| word.parse().expect("a pid")).collect()
}

#[test]
fn signals_stop_all_ranks_and_their_children() {
    for (signal, code, name) in [
        (Signal::INT, 130, "SIGINT"),
        (Signal::TERM, 143, "SIGTERM"),
        (Signal::HUP, 129, "SIGHUP"),
        (Signal::QUIT, 131, "SIGQUIT"),
        (Signal::ALARM, 142, "SIGALRM"),
        (Signal::XCPU, 152, "SIGXCPU"),
    ] {
        // These tests themselves may run under `nohup`, which `burnrun` respects.
        if signal == Signal::HUP && hangup_is_ignored() {
            continue;
        }
        // A background child of a non-interactive shell ignores SIGINT; it goes with its group in the end.
        let job = Job::start(&mut script(3, &["--grace", "60"], FAMILY));
        let pids = pids(&job.lines(3));
        assert!(pids.iter().all(|&pid| is_running(pid)));
        job.signal(signal);
        let finished = job.finish();
        assert_eq!(finished.code(), code, "{}", finished.stderr);
        assert!(finished.stderr.contains(&format!("burnrun: stopped by {name} after ")), "{}", finished.stderr);
        assert!(finished.took < Duration::from_secs(30), "it does not wait for the grace time: {:?}", finished.took);
        pids.into_iter().for_each(assert_gone);
    }
}

#[test]
fn ranks_may_end_in_their_own_way_within_the_grace_time() {
    let program = "trap 'echo saving; sleep 0.3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let job = Job::start(&mut script(2, &["--grace", "60"], program));
    job.lines(2);
    job.signal(Signal::TERM);
    let finished = job.finish();
    assert_eq!(finished.code(), 143);
    assert_eq!(finished.stdout.iter().filter(|line| line.ends_with("] saved")).count(), 2, "{finished:?}");
    assert!(!finished.stderr.contains("killed"), "{}", finished.stderr);
}

/// Such as Slurm's `--signal=USR1@60`: a program that handles it goes on, and one that does not is told why it ended.
#[test]
fn user_signals_are_for_the_ranks() {
    let program = "trap 'echo heard one' USR1; trap 'echo heard two; exit 0' USR2; echo ready; \
        while :; do sleep 0.05; done";
    let job = Job::start(&mut script(2, &[], program));
    job.lines(2);
    job.signal(Signal::USR1);
    assert_eq!(job.lines(2).iter().filter(|line| line.ends_with("] heard one")).count(), 2);
    job.signal(Signal::USR2);
    let finished = job.finish();
    assert_eq!(finished.code(), 0, "{}", finished.stderr);
    assert_eq!(finished.stdout.iter().filter(|line| line.ends_with("] heard two")).count(), 2, "{finished:?}");

    let job = Job::start(&mut script(2, &[], "echo ready; while :; do sleep 0.05; done"));
    job.lines(2);
    job.signal(Signal::USR1);
    let finished = job.finish();
    assert_eq!(finished.code(), 138, "{}", finished.stderr);
    assert!(finished.stderr.contains("was killed by SIGUSR1"), "{}", finished.stderr);
    assert!(finished.stderr.contains("passes SIGUSR1 and SIGUSR2 on to all ranks"), "{}", finished.stderr);
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let program = "trap 'echo heard' INT; echo ready; while :; do sleep 0.05; done";
    let job = Job::start(&mut script(2, &["--grace", "600"], program));
    assert_eq!(job.lines(2), ["[rank 0] ready", "[rank 1] ready"]);
    job.signal(Signal::INT);
    assert_eq!(job.lines(2), ["[rank 0] heard", "[rank 1] heard"]);
    job.signal(Signal::INT);
    let finished = job.finish();
    assert_eq!(finished.code(), 130);
    assert!(finished.stderr.contains("ranks 0, 1 did not end"), "{}", finished.stderr);
}

#[test]
fn the_grace_time_ends_in_a_kill() {
    let job = Job::start(&mut script(1, &["--grace", "0.2"], "trap '' TERM; echo $$; while :; do sleep 0.05; done"));
    let pids = pids(&[job.line()]);
    job.signal(Signal::TERM);
    let finished = job.finish();
    assert_eq!(finished.code(), 143);
    pids.into_iter().for_each(assert_gone);
}

#[test]
fn nothing_survives_a_killed_launcher() {
    let job = Job::start(&mut script(3, &[], FAMILY));
    let pids = pids(&job.lines(3));
    assert_eq!(pids.len(), 6);
    assert!(pids.iter().all(|&pid| is_running(pid)));
    job.signal(Signal::KILL);
    pids.into_iter().for_each(assert_gone);
}

/// Without the guardian (no shell for it, or it was killed), the kernel alone ends the ranks.
#[test]
fn no_rank_survives_a_launcher_killed_together_with_its_guardian() {
    // No process is left that would remove the job's temporary directory.
    let tmp = tempfile::tempdir().unwrap();
    let job = Job::start(script(3, &[], "echo $$; exec sleep 600").env("TMPDIR", tmp.path()));
    let pids = pids(&job.lines(3));
    let group = common::control_group(pids[0]);
    kill_process(child_of(job.pid(), "burnrun-guardian").expect("a guardian"), Signal::KILL).unwrap();
    assert!(pids.iter().all(|&pid| is_running(pid)));
    job.signal(Signal::KILL);
    pids.into_iter().for_each(assert_gone);
    // The job's control group, now empty, stays too.
    if let Some(group) = group {
        common::poll_until("the control group is empty", || std::fs::remove_dir(&group).ok());
    }
}

#[test]
fn children_of_ranks_end_with_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pid");
    // Its output goes elsewhere, so only its process group ties it to the job.
    let program = r#"sleep 600 >/dev/null 2>&1 & echo $! >"$FILE"; exit $CODE"#;
    for code in ["0", "3"] {
        let finished = run(script(1, &[], program).env("FILE", &file).env("CODE", code));
        assert_eq!(finished.code().to_string(), code);
        assert_gone(pid_in(&file));
    }
}

/// By this process, and so by those it starts.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 == 1
}

#[test]
fn nohup_is_respected() {
    let program = r#"echo $$; while [ ! -e "$FILE" ]; do sleep 0.02; done; echo finished"#;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("go");
    let mut command = Command::new("sh");
    let burnrun = env!("CARGO_BIN_EXE_burnrun");
    command.args(["-c", r#"trap '' HUP; exec "$0" "$@""#, burnrun, "sh", "-c", program]).env("FILE", &file);
    let job = Job::start(&mut command);
    job.line();
    job.signal(Signal::HUP);
    std::fs::write(file, "").unwrap();
    let finished = job.finish();
    assert_eq!((finished.code(), finished.stdout), (0, vec!["[rank 0] finished".to_owned()]));
}
