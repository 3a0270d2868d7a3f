//! Jobs of processes that are killed, or whose disk is full, go on from the last checkpoint.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use burn_ddp_tests::{job, number};

use super::names;

const RANK: &str = env!("CARGO_BIN_EXE_rank");

/// The arguments of a rank that trains and saves in `directory`.
fn args<'a>(directory: &'a Path, steps: &'a str, every: &'a str, rest: &[&'a str]) -> Vec<&'a str> {
    [&["checkpoint", directory.to_str().unwrap(), steps, every], rest].concat()
}

/// Runs a job of two ranks to its end and returns the output of rank 0.
fn run(directory: &Path, steps: &str, every: &str) -> String {
    let ranks = job::job(RANK, 2, &args(directory, steps, every, &[]));
    let hashes: Vec<_> = ranks.iter().map(|rank| job::line(&job::stdout(rank), "hash ").to_string()).collect();
    assert_eq!(hashes[0], hashes[1]);
    job::stdout(&ranks[0])
}

#[test]
fn a_full_disk_is_an_error_on_every_rank_and_costs_nothing() {
    let directory = tempfile::tempdir().unwrap();
    run(directory.path(), "2", "1");
    let limited = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
    let args = args(directory.path(), "4", "1", &[]);
    let ranks = job::job("/bin/sh", 2, &[&["-c", limited, RANK][..], &args].concat());
    for rank in &ranks {
        let e = job::stderr(rank);
        assert!(!rank.status.success());
        assert!(e.contains("rank 0 cannot write the checkpoint of step 3") && e.contains("File too large"), "{e}");
    }
    assert_eq!(names(directory.path()), [".lock", "model.bpk", "step-00000001", "step-00000002"]);
    assert_eq!(job::line(&run(directory.path(), "4", "1"), "resumed "), "2");
}

/// A job of two ranks, which is killed when this is dropped.
struct Victim {
    ranks: Vec<Child>,
    out: BufReader<std::process::ChildStdout>,
    _port: job::FreePort,
}

impl Victim {
    fn start(directory: &Path, rest: &[&str]) -> Self {
        let port = job::FreePort::reserve();
        let args = args(directory, "1000000", "1", rest);
        let mut ranks: Vec<Child> = (0..2)
            .map(|rank| job::rank(RANK, rank, 2, port.port, &args).stderr(std::process::Stdio::null()).spawn().unwrap())
            .collect();
        let out = BufReader::new(ranks[0].stdout.take().unwrap());
        Victim { ranks, out, _port: port }
    }

    /// Waits until the job has resumed, and returns the step from which it resumes.
    fn resumed(&mut self) -> u64 {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim().strip_prefix("resumed ").unwrap_or_else(|| panic!("{line:?}")).parse().unwrap()
    }

    /// Kills every rank, and returns the last step whose `save` had returned.
    fn kill(mut self) -> Option<u64> {
        self.end();
        self.out
            .by_ref()
            .lines()
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("saved ")?.parse().ok())
            .last()
    }

    fn end(&mut self) {
        self.ranks.iter_mut().for_each(|rank| drop(rank.kill()));
        self.ranks.iter_mut().for_each(|rank| drop(rank.wait()));
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.end();
    }
}

/// Kills a job `times` times at random moments; each start resumes from the newest checkpoint. No finished checkpoint
/// is lost, and the final parameters are those of an uninterrupted run.
fn kill_and_go_on(times: usize, mode: &str) {
    let directory = tempfile::tempdir().unwrap();
    let mut saved = 0;
    for round in 0..times {
        let mut victim = Victim::start(directory.path(), &[mode]);
        let resumed = victim.resumed();
        assert!(resumed >= saved, "round {round}: {saved} was saved, and {resumed} came back");
        let pause = (number(round, 9) + 1.0) * 30.0;
        std::thread::sleep(Duration::from_micros((pause * 1000.0) as u64));
        let last = victim.kill().unwrap_or(resumed);
        // An asynchronous `save` returns before its checkpoint is on disk; only the next `save` waits for that.
        saved = if mode == "later" { last.saturating_sub(1) } else { last };
    }
    let steps = (saved + 5).to_string();
    let end = run(directory.path(), &steps, "1");
    assert!(job::line(&end, "resumed ").parse::<u64>().unwrap() >= saved);
    let left =
        names(directory.path()).into_iter().find(|name| name.starts_with(".burn-ddp-") || name.ends_with(".tmp"));
    assert_eq!(left, None, "nothing is left over");
    let uninterrupted = tempfile::tempdir().unwrap();
    assert_eq!(job::line(&end, "hash "), job::line(&run(uninterrupted.path(), &steps, "1000"), "hash "));
}

#[test]
fn killed_at_random_moments_nothing_that_was_saved_is_lost() {
    kill_and_go_on(30, "now");
}

#[test]
fn killed_at_random_moments_while_a_thread_writes() {
    kill_and_go_on(8, "later");
}

/// The killed jobs have sharded parameters; the last job loads their checkpoint into whole parameters.
#[test]
fn killed_at_random_moments_while_parts_are_gathered() {
    kill_and_go_on(6, "sharded");
}

#[test]
#[ignore = "takes minutes: 1,000 kills"]
fn killed_a_thousand_times() {
    kill_and_go_on(1000, "now");
}

#[test]
fn burnrun_restarts_a_job_that_goes_on_where_it_was() {
    let burnrun = PathBuf::from(RANK).with_file_name("burnrun");
    assert!(burnrun.exists(), "build it with `cargo build --bins`");
    let (killed, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut command = Command::new(burnrun);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BURN")) {
        command.env_remove(name);
    }
    let output = command
        .args(["-n", "2", "--max-restarts", "2", RANK])
        .args(args(killed.path(), "20", "3", &["now", "kill", "11"]))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", job::stderr(&output));
    assert!(killed.path().join("was killed").exists());
    let said = job::stdout(&output);
    assert!(said.contains("resumed 0") && said.contains("resumed 9"), "{said}");
    let hash = said.lines().find_map(|line| line.split("hash ").nth(1)).unwrap();
    assert_eq!(hash, job::line(&run(whole.path(), "20", "1000"), "hash "));
}
