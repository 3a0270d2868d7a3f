//! Real processes that end in all possible ways: the errors of the survivors, and how soon these come.
//!
//! Each test starts this binary again, once per rank, with only itself to run; see [`common::Process`].

mod common;

use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, Progress, ReduceOp, StoreServer, Track, World, WorldOptions};
use common::{Process, await_go, launcher_store, options, rank_at, role, say};
use rustix::process::Signal;

/// All survivors learn of a rank's death within this time.
const SOON: Duration = Duration::from_secs(2);

/// The ranks of a job, as processes that run `test` in the roles given, and the store they meet at.
fn start(test: &str, roles: &[&str]) -> (StoreServer, Vec<Process>) {
    let store = launcher_store();
    let start = |(rank, role): (usize, &&str)| Process::start(test, role, &rank_at(&store, rank, roles.len()));
    let mut ranks: Vec<Process> = roles.iter().enumerate().map(start).collect();
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    (store, ranks)
}

/// What a survivor reports: the error's kind, the culprit, and the text.
fn report(error: &Error) -> String {
    let kind = format!("{error:?}");
    let kind = kind.split([' ', '{']).next().unwrap_or_default();
    format!("{kind} of {:?}: {error}", error.rank())
}

/// Large all-reduces until something goes wrong.
fn reduce_until_error(world: &World) -> Error {
    let group = world.group().unwrap();
    let mut buf = vec![1.0_f32; 25 << 18];
    group.all_reduce(&mut buf, ReduceOp::Mean).unwrap();
    world.set_step(28);
    say("ready");
    loop {
        if let Err(error) = group.all_reduce(&mut buf, ReduceOp::Mean) {
            return error;
        }
    }
}

#[test]
fn a_rank_killed_in_a_large_all_reduce_is_named_by_all_at_once() {
    const TEST: &str = "a_rank_killed_in_a_large_all_reduce_is_named_by_all_at_once";
    if let Some((_, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        let error = reduce_until_error(&world);
        assert_eq!(world.group().unwrap_err().rank(), Some(2), "later calls repeat the cause");
        return say(&report(&error));
    }
    let (_store, mut ranks) = start(TEST, &["rank"; 3]);
    let begin = Instant::now();
    ranks[2].kill();
    let pid = ranks[2].id();
    for rank in &mut ranks[..2] {
        let said = rank.hear();
        assert!(said.starts_with("PeerLost of Some(2): rank 2 (host "), "{said}");
        assert!(said.contains(&format!("pid {pid}) died during all_reduce")), "{said}");
        assert!(
            said.contains("in step 28 called at burn-ddp/comm/tests/faults.rs:"),
            "the step and the call site: {said}"
        );
        assert!(said.contains("it was killed by SIGKILL"), "{said}");
    }
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    for rank in &mut ranks[..2] {
        assert!(rank.end().success());
    }
}

#[test]
fn a_rank_that_exits_without_a_goodbye_is_dead() {
    const TEST: &str = "a_rank_that_exits_without_a_goodbye_is_dead";
    if let Some((role, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        let group = world.group().unwrap();
        say("ready");
        if role == "exits" {
            await_go();
            std::process::exit(0);
        }
        return say(&report(&group.barrier().unwrap_err()));
    }
    let (_store, mut ranks) = start(TEST, &["waits", "exits", "waits"]);
    let begin = Instant::now();
    ranks[1].go();
    for rank in [0, 2] {
        let said = ranks[rank].hear();
        assert!(said.starts_with("PeerLost of Some(1)") && said.contains("ended without a goodbye"), "{said}");
        // The test has not reaped the process yet, so the kernel still has its exit code.
        assert!(said.contains("it exited with code 0 without leaving the job"), "{said}");
    }
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    assert!(ranks[1].end().success());
}

#[test]
fn a_rank_killed_between_collectives_is_known_before_the_next() {
    const TEST: &str = "a_rank_killed_between_collectives_is_known_before_the_next";
    if let Some((_, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        say("ready");
        let begin = Instant::now();
        while world.check().is_ok() && begin.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(1));
        }
        return say(&report(&world.group().unwrap_err()));
    }
    let (_store, mut ranks) = start(TEST, &["rank"; 2]);
    ranks[0].kill();
    let said = ranks[1].hear();
    assert!(said.starts_with("PeerLost of Some(0)"), "{said}");
}

#[test]
fn a_rank_that_panics_says_so_though_its_process_ends() {
    const TEST: &str = "a_rank_that_panics_says_so_though_its_process_ends";
    if let Some((role, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        let group = world.group().unwrap();
        say("ready");
        if role == "panics" {
            await_go();
            panic!("out of luck");
        }
        return say(&report(&group.barrier().unwrap_err()));
    }
    let (_store, mut ranks) = start(TEST, &["panics", "waits"]);
    ranks[0].go();
    let said = ranks[1].hear();
    assert!(said.starts_with("PeerFailed of Some(0)"), "{said}");
    assert!(said.contains("failed: panicked at burn-ddp/comm/tests/faults.rs:"), "where: {said}");
    assert!(said.contains(&format!("in thread {TEST:?}: out of luck")), "{said}");
    assert!(!ranks[0].end().success());
}

#[test]
fn a_stopped_rank_is_named_at_the_deadline_and_not_called_dead() {
    const TEST: &str = "a_stopped_rank_is_named_at_the_deadline_and_not_called_dead";
    if let Some((_, env)) = role() {
        let world = World::join(&env, WorldOptions { timeout: Duration::from_secs(2), ..options() }).unwrap();
        let group = world.group().unwrap();
        say("ready");
        await_go();
        // The stopped rank's first barrier may succeed: its sockets may hold all frames that it needs.
        let mut barriers = std::iter::repeat_with(|| group.barrier());
        return say(&report(&barriers.find_map(|barrier| barrier.err()).unwrap()));
    }
    let (_store, mut ranks) = start(TEST, &["rank"; 3]);
    ranks[1].signal(Signal::STOP);
    for rank in [0, 2] {
        ranks[rank].go();
    }
    for rank in [0, 2] {
        let said = ranks[rank].hear();
        assert!(said.starts_with("Timeout of Some(1)") && said.contains("waited 2 s for rank 1 in barrier"), "{said}");
    }
    // When the stopped rank goes on, it finds that the others gave up; it does not hang.
    ranks[1].signal(Signal::CONT);
    ranks[1].go();
    let said = ranks[1].hear();
    assert!(said.starts_with("Timeout") || said.starts_with("PeerLeft"), "{said}");
}

#[test]
fn a_rank_that_reads_nothing_blocks_nobody_and_is_given_up() {
    const TEST: &str = "a_rank_that_reads_nothing_blocks_nobody_and_is_given_up";
    if let Some((_, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        say("ready");
        await_go();
        let what = "x".repeat(4000);
        let mut slowest = Duration::ZERO;
        let told = (0..100_000).find(|_| {
            let begin = Instant::now();
            world.stop(Track::Batches { group: 1, loader: 0, run: 0 }, Progress::default(), &what);
            slowest = slowest.max(begin.elapsed());
            world.check().is_err()
        });
        assert!(told.is_some() && slowest < SOON, "{told:?}, {slowest:?}");
        return say(&report(&world.check().unwrap_err()));
    }
    let (_store, mut ranks) = start(TEST, &["rank"; 2]);
    ranks[1].signal(Signal::STOP);
    ranks[0].go();
    let said = ranks[0].hear();
    assert!(said.starts_with("PeerLost of Some(1)") && said.contains("does not read"), "{said}");
}

#[test]
fn processes_that_leave_in_any_order_are_never_called_dead() {
    const TEST: &str = "processes_that_leave_in_any_order_are_never_called_dead";
    if let Some((role, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        let group = world.group().unwrap();
        say("ready");
        let mut buf = vec![1.0_f32; 1 << 18];
        group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
        say("done");
        if role == "stays" {
            await_go();
            // All others have left, or are about to: the error must be `PeerLeft`, not a loss.
            return say(&report(&group.barrier().unwrap_err()));
        }
        let linger = Duration::from_micros(role.parse().unwrap());
        std::thread::sleep(linger);
        drop((group, world));
        // Ends the process right after the goodbye; returning to the test harness would take longer.
        std::process::exit(0);
    }
    for round in 0..12_u64 {
        // The ranks leave together, or one after the other in changing order.
        let linger: Vec<String> =
            (0..3).map(|rank| ((round * 7 + rank * 5) % 6 * round / 2 * 300).to_string()).collect();
        let (_store, mut ranks) = start(TEST, &[&linger[0], &linger[1], "stays", &linger[2]]);
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "done");
        }
        ranks[2].go();
        let said = ranks[2].hear();
        assert!(said.starts_with("PeerLeft of Some("), "{said}");
        for rank in &mut ranks {
            assert!(rank.end().success());
        }
    }
}

#[test]
fn a_rank_that_dies_while_joining_costs_the_others_the_deadline_at_most() {
    const TEST: &str = "a_rank_that_dies_while_joining_costs_the_others_the_deadline_at_most";
    if let Some((_, env)) = role() {
        say("ready");
        let options = WorldOptions { join_timeout: Duration::from_millis(1500), ..options() };
        return say(&report(&World::join(&env, options).unwrap_err()));
    }
    let store = launcher_store();
    let mut ranks: Vec<_> = (0..2).map(|rank| Process::start(TEST, "rank", &rank_at(&store, rank, 3))).collect();
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ready");
    }
    ranks[1].kill();
    let said = ranks[0].hear();
    assert!(said.starts_with("Rendezvous of Some(") && said.contains("missing: rank"), "{said}");
}

#[test]
fn all_of_this_on_two_machines() {
    common::again_on_two_machines();
}
