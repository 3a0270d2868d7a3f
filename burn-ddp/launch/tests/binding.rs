//! Ranks bound to cores, as their processes see it.
#![cfg(all(feature = "cli", target_os = "linux"))]

#[allow(unreachable_pub, reason = "one module for several test files")]
mod common;

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Mutex;

use common::{Job, run, script};

/// Prints the cores of a rank and the threads of its pools.
const SHOW: &str = "grep Cpus_allowed_list: /proc/self/status; echo threads: $RAYON_NUM_THREADS";

/// Held by a test that binds ranks, since other tests would find its cores taken.
static CORES: Mutex<()> = Mutex::new(());

fn bound(nproc: usize, options: &[&str], text: &str) -> Command {
    script(nproc, &[&["--stdio", "plain"], options].concat(), text)
}

/// Numbers of a list such as `0-3,8`.
fn numbers(list: &str) -> BTreeSet<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse().unwrap()..=last.parse().unwrap()
    };
    list.trim().split(',').flat_map(range).collect()
}

/// Cores of each rank, from the lines of its output.
fn shown<'a>(lines: &'a [String], name: &'a str) -> impl Iterator<Item = &'a str> {
    lines.iter().filter_map(move |line| line.strip_prefix(name)).map(str::trim)
}

fn own_cores() -> BTreeSet<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    numbers(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap())
}

#[test]
fn each_rank_has_cores_of_its_own_and_as_many_threads() {
    let (_cores, own) = (CORES.lock(), own_cores());
    let nproc = own.len().min(2);
    let finished = run(&mut bound(nproc, &["--bind-to", "core"], SHOW));
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
    let (_cores, own) = (CORES.lock(), own_cores());
    let first = Job::start(&mut bound(1, &["--bind-to", "numa"], "echo here; sleep 60"));
    assert_eq!(first.line(), "here");
    // It holds a node, or the cores of this process there.
    let nproc = own.len().to_string();
    let second = |to: &str| run(&mut bound(own.len(), &["--bind-to", to], "true"));
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
    let (_cores, cores) = (CORES.lock(), own_cores().len());
    let refused = run(&mut bound(cores + 1, &["--bind-to", "core"], "true"));
    assert_eq!(refused.code(), 1, "{refused:?}");
    assert!(refused.stderr.contains(&format!("(-n {cores})")), "{refused:?}");
}
