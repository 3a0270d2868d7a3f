//! A signal that asks the ranks to save and end: what the launcher makes of it.
#![cfg(feature = "cli")]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::fs;
use std::time::Duration;

use common::{Finished, Job, script};
use rustix::process::Signal;

/// A rank that does what a program of burn-ddp does: it catches the signal, tells the launcher that it does, and when
/// the signal has come, that it stops; rank 0 then saves. `CODE` is its exit code.
const STOPS: &str = r#"
say() { echo "{\"event\":\"$1\",\"rank\":$BURN_DDP_RANK,\"at\":1$2}" >> "$BURN_DDP_EVENTS"; }
signal=${BURN_DDP_PREEMPT_SIGNAL:-SIGTERM}
trap 'stop=1' "${signal#SIG}"
say can_stop
echo ready
while [ -z "$stop" ]; do sleep 0.05; done
say stopping
sleep 0.2
if [ "$BURN_DDP_RANK" = 0 ]; then say saved ',"checkpoint":"/checkpoints/step-7"'; fi
"#;

fn stops(nproc: usize, options: &[&str], then: &str) -> Job {
    let job = Job::start(&mut script(nproc, options, &format!("{STOPS}{then}")));
    job.lines(nproc);
    job
}

fn asked(job: Job, signal: Signal) -> Finished {
    job.signal(signal);
    job.finish()
}

#[test]
fn ranks_that_save_and_end_are_a_preempted_job() {
    let logs = tempfile::tempdir().unwrap();
    let log_dir = logs.path().to_str().unwrap();
    for (options, signal, name, then, code) in [
        (&["--log-dir", log_dir][..], Signal::TERM, "SIGTERM", "exit 0", 75),
        // As `ddp.exit_code()`.
        (&[], Signal::TERM, "SIGTERM", "exit 75", 75),
        (&["--preempt-signal", "USR1"], Signal::USR1, "SIGUSR1", "exit 0", 75),
        (&["--preempt-exit-code", "9", "--preempt-signal", "xcpu"], Signal::XCPU, "SIGXCPU", "exit 75", 9),
    ] {
        // The grace time of other signals would kill them.
        let options = [options, &["--grace", "0"]].concat();
        let finished = asked(stops(3, &options, then), signal);
        assert_eq!(finished.code(), code, "{finished:?}");
        let line = format!("burnrun: preempted by {name} after ");
        let last = "; the last checkpoint is /checkpoints/step-7\n";
        assert!(finished.stderr.contains(&line) && finished.stderr.contains(last), "{}", finished.stderr);
        assert!(!finished.stderr.contains("killed by"), "{}", finished.stderr);
    }
    let report = fs::read_to_string(logs.path().join("latest/report.md")).unwrap();
    assert!(report.starts_with("# preempted by SIGTERM after "), "{report}");
}

#[test]
fn a_signal_to_a_rank_alone_preempts_the_job_if_the_ranks_agree() {
    // Both are sent it, as a flag in the next step would tell the other.
    let program = format!("echo $$ > $DIR/$BURN_DDP_RANK\n{STOPS}exit 75");
    let dir = tempfile::tempdir().unwrap();
    let job = Job::start(script(2, &[], &program).env("DIR", dir.path()));
    job.lines(2);
    for rank in ["0", "1"] {
        let pid = fs::read_to_string(dir.path().join(rank)).unwrap().trim().parse().unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    }
    let finished = job.finish();
    assert_eq!(finished.code(), 75, "{finished:?}");
    assert!(finished.stderr.contains("burnrun: preempted after "), "{}", finished.stderr);
}

#[test]
fn a_rank_that_cannot_save_fails_the_job() {
    let finished =
        asked(stops(2, &[], r#"if [ "$BURN_DDP_RANK" = 1 ]; then echo "disk full" >&2; exit 3; fi"#), Signal::TERM);
    assert_eq!(finished.code(), 3, "{finished:?}");
    assert!(finished.stderr.contains("rank 1 ") && finished.stderr.contains("disk full"), "{}", finished.stderr);
    assert!(!finished.stderr.contains("preempted"), "{}", finished.stderr);
}

#[test]
fn ranks_that_were_done_succeed_although_the_signal_came() {
    let program = STOPS.replace("say stopping", "exit 0");
    let job = Job::start(&mut script(2, &[], &program));
    job.lines(2);
    let finished = asked(job, Signal::TERM);
    assert_eq!((finished.code(), &finished.stderr.contains("preempted")), (0, &false), "{finished:?}");
}

#[test]
fn ranks_have_the_grace_time_of_the_signal_and_no_longer() {
    let finished = asked(stops(2, &["--preempt-grace", "0.5"], "sleep 600"), Signal::TERM);
    assert_eq!(finished.code(), 75, "{finished:?}");
    assert!(finished.stderr.contains("had to be killed"), "{}", finished.stderr);
    // SIGINT is another signal.
    let finished = asked(stops(2, &["--preempt-grace", "600", "--grace", "0.2"], "sleep 600"), Signal::INT);
    assert_eq!(finished.code(), 130, "{finished:?}");
}

#[test]
fn a_second_signal_ends_the_job_at_once() {
    for (second, code) in [(Signal::TERM, 143), (Signal::INT, 143), (Signal::QUIT, 143)] {
        let job = stops(2, &["--preempt-grace", "600", "--grace", "0.2"], "sleep 600");
        job.signal(Signal::TERM);
        // What comes within 1.5 s is the same signal.
        if second == Signal::TERM {
            job.signal(second);
            std::thread::sleep(Duration::from_secs(3));
        }
        job.signal(second);
        let finished = job.finish();
        assert_eq!(finished.code(), code, "{second:?}: {finished:?}");
        assert!(finished.stderr.contains("stopped by SIGTERM"), "{}", finished.stderr);
    }
}

#[test]
fn a_program_that_is_not_known_to_stop_ends_as_ever_unless_the_signal_was_chosen() {
    let waits = "echo ready; while :; do sleep 0.05; done";
    let own = "trap 'sleep 0.3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    for (program, options, code) in [
        (waits, &[][..], 143),
        (own, &[], 143),
        (waits, &["--preempt-signal", "SIGTERM"], 75),
        (own, &["--preempt-signal", "SIGTERM", "--grace", "0"], 75),
    ] {
        let job = Job::start(&mut script(2, options, program));
        job.lines(2);
        let finished = asked(job, Signal::TERM);
        assert_eq!(finished.code(), code, "{program} {options:?}: {finished:?}");
    }
}

#[test]
fn a_preempted_job_is_restarted_only_if_asked() {
    let again = r#"if [ "$BURN_DDP_RESTART_COUNT" = 1 ]; then echo resumed; exit 0; fi"#;
    let program = format!("{again}{STOPS}");
    for (options, code, resumed) in [(&[][..], 75, 0), (&["--restart-preempted"], 0, 2)] {
        let job = Job::start(&mut script(2, &[options, &["--max-restarts", "1"]].concat(), &program));
        job.lines(2);
        let finished = asked(job, Signal::TERM);
        assert_eq!(finished.code(), code, "{finished:?}");
        assert_eq!(finished.stdout.iter().filter(|line| line.ends_with("resumed")).count(), resumed, "{finished:?}");
    }
}

#[test]
fn a_signal_to_a_rank_that_has_not_looked_is_a_preemption_if_it_was_chosen() {
    for (options, code) in [(&["--preempt-signal", "TERM"][..], 75), (&[], 143)] {
        let program = "echo $$; exec sleep 600";
        let job = Job::start(&mut script(2, options, program));
        let line = job.line();
        let pid = line.rsplit(' ').next().unwrap().parse().unwrap();
        job.line();
        rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
        let finished = job.finish();
        assert_eq!(finished.code(), code, "{finished:?}");
    }
}

#[test]
fn an_ignored_signal_that_was_chosen_counts() {
    let program = format!("{STOPS}exit 75");
    let burnrun = script(2, &["--preempt-signal", "USR1"], &program);
    let mut ignoring = std::process::Command::new("sh");
    ignoring.args(["-c", "trap '' USR1; exec \"$0\" \"$@\""]).arg(burnrun.get_program()).args(burnrun.get_args());
    let job = Job::start(&mut ignoring);
    // A shell cannot catch what it was told to ignore, so the signal reaches burnrun alone.
    std::thread::sleep(Duration::from_millis(500));
    job.signal(Signal::USR1);
    std::thread::sleep(Duration::from_millis(200));
    job.signal(Signal::INT);
    let finished = job.finish();
    assert!(finished.stderr.contains("waiting up to 60 s"), "{finished:?}");
}

#[test]
fn a_signal_after_the_ranks_have_saved_stops_the_restarts() {
    // A process that holds the output for a second.
    let program = format!("{STOPS}sleep 0.9 & exit 75");
    let job = Job::start(&mut script(1, &["--max-restarts", "5", "--restart-preempted"], &program));
    job.lines(1);
    job.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(700));
    job.signal(Signal::INT);
    let finished = job.finish();
    assert_eq!(finished.code(), 75, "{finished:?}");
    assert!(!finished.stderr.contains("restart 1"), "{}", finished.stderr);
}

#[test]
fn a_burnrun_among_the_ranks_does_not_take_the_default_for_chosen() {
    let inner = format!("{} -n 1 sh -c 'echo ready; exec sleep 600'", env!("CARGO_BIN_EXE_burnrun"));
    let job = Job::start(&mut script(1, &[], &inner));
    job.lines(1);
    let finished = asked(job, Signal::TERM);
    assert_eq!(finished.code(), 143, "{finished:?}");
    assert!(!finished.stderr.contains("preempted"), "{}", finished.stderr);
}
