//! `--max-restarts`: a new generation after all ranks of the last one are dead.
#![cfg(feature = "cli")]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use common::{Job, assert_gone, burnrun, is_running, run, script};
use rustix::process::Signal;

const DESCRIBE: &str = r#"echo "$BURN_DDP_RESTART_COUNT $BURN_DDP_MASTER $BURN_DDP_JOB_ID $$""#;

#[test]
fn a_failed_job_starts_anew_with_places_of_its_own() {
    let program = format!("{DESCRIBE}; [ $RANK = 1 ] && [ $BURN_DDP_RESTART_COUNT -lt 2 ] && exit 9; exit 0");
    let finished = run(&mut script(2, &["--max-restarts", "3", "--stdio", "plain", "--grace", "0.3"], &program));
    assert_eq!(finished.code(), 0, "{}", finished.stderr);
    let lines: Vec<Vec<&str>> = finished.stdout.iter().map(|line| line.split(' ').collect()).collect();
    let column = |i: usize| lines.iter().map(|line| line[i]).collect::<BTreeSet<_>>();
    assert_eq!(lines.len(), 6, "{lines:?}");
    assert_eq!(column(0), BTreeSet::from(["0", "1", "2"]));
    // The kernel may give the new store the port of the previous one.
    assert_eq!(column(2).len(), 3, "an id per generation: {lines:?}");
    for line in ["exited with code 9", "burnrun: restart 1 of at most 3\n", "burnrun: restart 2 of at most 3\n"] {
        assert!(finished.stderr.contains(line), "{}", finished.stderr);
    }
    assert!(!finished.stderr.contains("restart 3"), "{}", finished.stderr);
}

#[test]
fn restarts_are_used_up() {
    let finished = run(&mut script(1, &["--max-restarts", "2"], "echo x; exit 5"));
    assert_eq!((finished.code(), finished.stdout.len()), (5, 3));
    assert!(finished.stderr.contains("the job had been restarted 2 times before"), "{}", finished.stderr);
}

#[test]
fn the_old_generation_is_dead_before_the_new_one_starts() {
    let dir = tempfile::tempdir().unwrap();
    // Rank 0 and its child would not end by themselves.
    let program = r#"
        if [ $RANK = 1 ]; then [ $BURN_DDP_RESTART_COUNT = 0 ] && { sleep 0.3; exit 3; }; exit 0; fi
        if [ $BURN_DDP_RESTART_COUNT = 0 ]; then
            trap '' TERM; sleep 100 & echo "$$ $!" >"$DIR/pids"; while :; do sleep 0.05; done
        fi
        for pid in $(cat "$DIR/pids"); do
            [ -d /proc/$pid ] && grep -q 'State:.[RSD]' /proc/$pid/status && echo $pid lives
        done
        exit 0"#;
    let finished = run(script(2, &["--max-restarts", "1", "--grace", "0.2"], program).env("DIR", dir.path()));
    assert_eq!((finished.code(), finished.stdout), (0, vec![]), "{}", finished.stderr);
    let pids = fs::read_to_string(dir.path().join("pids")).unwrap();
    pids.split_whitespace().for_each(|pid| assert_gone(pid.parse().unwrap()));
}

#[test]
fn what_a_restart_does_not_cure_is_not_restarted() {
    for (program, code) in [("echo started; exit 2", 2), ("echo started; kill -TERM $PPID; sleep 10", 143)] {
        let finished = run(&mut script(1, &["--max-restarts", "5"], program));
        assert_eq!((finished.code(), finished.stdout.len()), (code, 1), "{program}: {}", finished.stderr);
    }
    let finished = run(&mut burnrun(["--max-restarts", "5", "no-such-program-anywhere"]));
    assert_eq!(finished.code(), 127);
    assert!(!finished.stderr.contains("restart"), "{}", finished.stderr);
}

#[test]
fn an_interrupt_while_a_failed_job_settles_prevents_the_restart() {
    let program = "[ $RANK = 1 ] && exit 3; trap '' TERM INT; sleep 0.5; echo $$; while :; do sleep 0.05; done";
    let job = Job::start(&mut script(2, &["--max-restarts", "5", "--grace", "60"], program));
    let pid = job.line().rsplit(' ').next().unwrap().parse().unwrap();
    assert!(is_running(pid));
    job.signal(Signal::INT);
    // The kernel merges two signals of one kind that come at the same moment.
    std::thread::sleep(Duration::from_millis(500));
    job.signal(Signal::INT);
    let finished = job.finish();
    assert_eq!(finished.code(), 3, "{}", finished.stderr);
    assert!(!finished.stderr.contains("restart 1"), "{}", finished.stderr);
    assert_gone(pid);
}
