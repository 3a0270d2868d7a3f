//! Ranks bound to cores, as their processes see it.
#![cfg(all(feature = "cli", target_os = "linux"))]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use common::{Job, run, script};

/// Prints the cores of a rank and the threads of its pools.
const SHOW: &str = "grep Cpus_allowed_list: /proc/self/status; echo threads: $RAYON_NUM_THREADS";

/// `burnrun`, whose locks on cores are in `directory`, so that other jobs of this machine do not matter.
fn bound(directory: &Path, nproc: usize, options: &[&str], text: &str) -> Command {
    let mut command = script(nproc, &[&["--stdio", "plain"], options].concat(), text);
    command.env("TMPDIR", directory);
    command
}

/// Numbers of a list such as `0-3,8`.
fn numbers(list: &str) -> BTreeSet<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse().unwrap()..=last.parse().unwrap()
    };
    list.trim().split(',').flat_map(range).collect()
}

/// Cores of each rank, as the lines of its output say.
fn shown<'a>(lines: &'a [String], name: &'a str) -> impl Iterator<Item = &'a str> {
    lines.iter().filter_map(move |line| line.strip_prefix(name)).map(str::trim)
}

fn own_cores() -> BTreeSet<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    numbers(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap())
}

#[test]
fn each_rank_has_cores_of_its_own_and_as_many_threads() {
    let (directory, own) = (tempfile::tempdir().unwrap(), own_cores());
    let nproc = own.len().min(2);
    let finished = run(&mut bound(directory.path(), nproc, &["--bind-to", "core"], SHOW));
    assert_eq!(finished.code(), 0, "{finished:?}");
    let cores: Vec<_> = shown(&finished.stdout, "Cpus_allowed_list:").map(numbers).collect();
    assert_eq!(cores.len(), nproc);
    for (rank, one) in cores.iter().enumerate() {
        assert!(!one.is_empty() && one.is_subset(&own), "{finished:?}");
        assert!(cores[rank + 1..].iter().all(|other| other.is_disjoint(one)), "{finished:?}");
    }
    let quota = std::thread::available_parallelism().unwrap().get() / nproc;
    let threads = cores[0].len().min(quota).max(1).to_string();
    assert!(shown(&finished.stdout, "threads:").all(|shown| shown == threads), "{finished:?}");
    assert!(finished.stderr.contains("local ranks are bound to cores: 0: "), "{finished:?}");
}

#[test]
fn cores_of_another_job_are_left_alone_until_it_ends() {
    let (directory, own) = (tempfile::tempdir().unwrap(), own_cores());
    let first = Job::start(&mut bound(directory.path(), 1, &["--bind-to", "numa"], "echo here; sleep 60"));
    assert_eq!(first.line(), "here");
    // It holds a node, or the cores of this process there.
    let nproc = own.len().to_string();
    let second = |to: &str| run(&mut bound(directory.path(), own.len(), &["--bind-to", to], "true"));
    let refused = second("core");
    assert_eq!(refused.code(), 1, "{refused:?}");
    for part in [&format!("cannot bind {nproc} ranks to cores")[..], "other jobs", "taskset -c", "--bind-to none"] {
        assert!(refused.stderr.contains(part), "{part}: {refused:?}");
    }
    assert_eq!(second("none").code(), 0);
    // Even if it is killed.
    drop(first);
    common::poll_until("the cores are free", || (second("core").code() == 0).then_some(()));
}

#[test]
fn more_ranks_than_cores_are_refused_with_the_fix() {
    let (directory, cores) = (tempfile::tempdir().unwrap(), own_cores().len());
    let refused = run(&mut bound(directory.path(), cores + 1, &["--bind-to", "core"], "true"));
    assert_eq!(refused.code(), 1, "{refused:?}");
    assert!(refused.stderr.contains(&format!("(-n {cores})")), "{refused:?}");
}

#[test]
fn ranks_of_a_launcher_that_is_bound_are_bound_without_being_asked() {
    let (directory, own) = (tempfile::tempdir().unwrap(), own_cores());
    let online = numbers(&std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap());
    if own.len() < 2 || online.len() < 3 {
        println!("skipped: this test needs 2 of 3 cores");
        return;
    }
    // A part of the machine's cores, two of them.
    let two: Vec<String> = own.iter().take(2).map(usize::to_string).collect();
    let inner = bound(directory.path(), 2, &[], SHOW);
    let mut command = Command::new("taskset");
    command
        .args(["-c", &two.join(",")])
        .arg(inner.get_program())
        .args(inner.get_args())
        .env("TMPDIR", directory.path());
    command.env_remove("BURNRUN_BIND_TO").env_remove("RAYON_NUM_THREADS");
    let finished = run(&mut command);
    assert_eq!(finished.code(), 0, "{finished:?}");
    let mut cores: Vec<String> = shown(&finished.stdout, "Cpus_allowed_list:").map(str::to_owned).collect();
    cores.sort_by_key(|core| core.parse::<usize>().unwrap());
    assert_eq!(cores, two, "{finished:?}");
}
