//! Faults of a rank while a group that spans machines reduces: every other rank names it.
#![cfg(target_os = "linux")]

mod common;

use std::time::{Duration, Instant};

use burn_ddp_comm::{LaunchEnv, ReduceOp, World, WorldOptions};
use common::{Process, launcher_store, options, rank_at, role, say};
use rustix::process::Signal;

/// Time from a death to the error of the last survivor, with as much again for a machine of few cores.
const SOON: Duration = Duration::from_secs(2 * 3);

/// Half of the deadline of a call.
const AT_ONCE: Duration = Duration::from_secs(30);

/// In a child: reduces until something goes wrong, or does what its role says in the middle.
fn rank_main() -> bool {
    let Some((role, env)) = role() else { return false };
    let peer_timeout = match role.as_str() {
        "silent" => Some(Duration::from_secs(2)),
        "patient" => Some(Duration::from_secs(60)),
        _ => None,
    };
    let lively = WorldOptions { engine: None, heartbeat: Duration::from_millis(100), peer_timeout, ..options() };
    let world = World::join(&env, lively).unwrap();
    let group = world.group().unwrap();
    assert_eq!(group.engine(), "shm+tcp");
    let mut buf = vec![1.0_f32; 1 << 20];
    group.all_reduce(&mut buf, ReduceOp::Mean).unwrap();
    say("ready");
    let begin = Instant::now();
    loop {
        let result = group.all_reduce(&mut buf, ReduceOp::Mean);
        if let Err(error) = result {
            say(&format!("{:?}: {error}", error.rank()));
            if role == "exits" {
                std::process::exit(1);
            }
            return true;
        }
        if begin.elapsed() > Duration::from_millis(300) {
            match role.as_str() {
                "panics" => panic!("out of luck"),
                "fails" => world.fail("the disk is full"),
                _ => {}
            }
        }
    }
}

/// Four ranks on two machines, with their roles, once a group of them has reduced.
fn on_two_machines<'a>(test: &str, role: impl Fn(usize) -> &'a str) -> Vec<Process> {
    on_machines(test, 2, 2, role)
}

/// Ranks with these roles on several machines of `each` ranks, once a group of them has reduced.
fn on_machines<'a>(test: &str, machines: usize, each: usize, role: impl Fn(usize) -> &'a str) -> Vec<Process> {
    let (store, count) = (launcher_store(), machines * each);
    let start = |rank: usize| {
        let env = LaunchEnv { machine: Some((rank / each).to_string()), ..rank_at(&store, rank, count) };
        Process::start(test, role(rank), &env)
    };
    let mut ranks: Vec<Process> = (0..count).map(start).collect();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks
}

/// Four ranks on two machines, of which one has the role `faulty`: the last of its machine, or the first.
fn check(test: &str, [faulty, waits]: [&str; 2], harm: impl Fn(&mut Process), expected: &str) {
    for culprit in [1, 2] {
        let mut ranks = on_two_machines(test, |rank| if rank == culprit { faulty } else { waits });
        let begin = Instant::now();
        harm(&mut ranks[culprit]);
        for rank in (0..4).filter(|rank| *rank != culprit) {
            let said = ranks[rank].hear();
            assert!(said.starts_with(&format!("Some({culprit}): rank {culprit} (host ")), "rank {rank}: {said}");
            assert!(said.contains(expected), "rank {rank}: {said}");
        }
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_killed_rank_is_named_on_both_machines() {
    if !rank_main() {
        check("a_killed_rank_is_named_on_both_machines", ["waits"; 2], Process::kill, "it was killed by SIGKILL");
    }
}

#[test]
fn a_killed_rank_is_named_soon_by_all_ranks_of_four_machines_of_four() {
    const TEST: &str = "a_killed_rank_is_named_soon_by_all_ranks_of_four_machines_of_four";
    if rank_main() {
        return;
    }
    // The killed rank is in the middle: most others learn of it through their counterparts. The programs of the others
    // end as soon as a call fails, without a goodbye, and none of them is taken for the cause.
    for others in ["waits", "exits", "exits", "exits"] {
        let (culprit, mut ranks) = (6, on_machines(TEST, 4, 4, |_| others));
        let begin = Instant::now();
        ranks[culprit].kill();
        for rank in (0..ranks.len()).filter(|rank| *rank != culprit) {
            let said = ranks[rank].hear();
            assert!(said.starts_with(&format!("Some({culprit}): rank {culprit} (host ")), "rank {rank}: {said}");
            assert!(said.contains("it was killed by SIGKILL"), "rank {rank}: {said}");
        }
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_silent_rank_is_named_on_both_machines() {
    if !rank_main() {
        let stop = |rank: &mut Process| rank.signal(Signal::STOP);
        check("a_silent_rank_is_named_on_both_machines", ["silent"; 2], stop, "silent for ");
    }
}

#[test]
fn a_frozen_machine_is_named_as_a_whole_also_by_its_own_ranks_when_it_goes_on() {
    const TEST: &str = "a_frozen_machine_is_named_as_a_whole_also_by_its_own_ranks_when_it_goes_on";
    if rank_main() {
        return;
    }
    let mut ranks = on_two_machines(TEST, |_| "silent");
    let begin = Instant::now();
    ranks[2..].iter_mut().for_each(|rank| rank.signal(Signal::STOP));
    let (here, frozen) = ranks.split_at_mut(2);
    let check = |rank: &mut Process| {
        let said = rank.hear();
        assert!(said.starts_with("Some(2): rank 2 (host ") || said.starts_with("Some(3): rank 3 (host "), "{said}");
        assert!(said.contains("like all of its machine (ranks 2 and 3)"), "{said}");
    };
    here.iter_mut().for_each(check);
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    frozen.iter_mut().for_each(|rank| rank.signal(Signal::CONT));
    frozen.iter_mut().for_each(check);
}

#[test]
fn a_machine_that_thaws_in_time_goes_on() {
    const TEST: &str = "a_machine_that_thaws_in_time_goes_on";
    if rank_main() {
        return;
    }
    let mut ranks = on_two_machines(TEST, |_| "patient");
    ranks[2..].iter_mut().for_each(|rank| rank.signal(Signal::STOP));
    // Several heartbeats.
    std::thread::sleep(Duration::from_millis(500));
    ranks[2..].iter_mut().for_each(|rank| rank.signal(Signal::CONT));
    ranks[0].kill();
    for rank in &mut ranks[1..] {
        let said = rank.hear();
        assert!(said.starts_with("Some(0): rank 0 (host ") && said.contains("killed by SIGKILL"), "{said}");
    }
}

#[test]
fn a_rank_that_panics_is_named_on_both_machines() {
    if !rank_main() {
        let nothing = |_: &mut Process| {};
        check("a_rank_that_panics_is_named_on_both_machines", ["panics", "waits"], nothing, "out of luck");
    }
}

#[test]
fn a_rank_that_gives_up_is_named_on_both_machines() {
    if !rank_main() {
        let nothing = |_: &mut Process| {};
        check("a_rank_that_gives_up_is_named_on_both_machines", ["fails", "waits"], nothing, "the disk is full");
    }
}
