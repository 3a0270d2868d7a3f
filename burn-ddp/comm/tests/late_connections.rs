//! Data connections between machines: only those that the collectives need, each made when it is first used.
#![cfg(target_os = "linux")]

mod common;

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, LaunchEnv, ProcessGroup, ReduceOp, Result, World, WorldOptions};
use common::{
    Process, await_connections, await_go, launcher_store, on_world, options, placed, rank_at, role, say, world,
};
use rustix::process::Signal;

/// Half of the deadline of a call.
const AT_ONCE: Duration = Duration::from_secs(30);

/// Every collective that uses only connections between counterparts (ranks of the same number on their machines).
fn collectives(group: &ProcessGroup) -> Result<()> {
    for len in [1, 5000] {
        let mut x = vec![1.0_f32; len];
        group.all_reduce(&mut x, ReduceOp::Sum)?;
        assert!(x.iter().all(|x| *x == group.world_size() as f32));
        group.all_reduce_weighted(&mut x, 1.0)?;
        group.reduce(&mut x, ReduceOp::Max, 1)?;
        group.broadcast(&mut x, 3)?;
        group.all_gather(&x[..len.min(10)])?;
        group.reduce_scatter(&vec![1.0_f32; group.world_size()], &mut x[..1], ReduceOp::Sum)?;
    }
    group.barrier()
}

#[test]
fn a_rank_has_one_data_connection_for_each_other_machine() {
    const TEST: &str = "a_rank_has_one_data_connection_for_each_other_machine";
    let (machines, ranks_each) = (16, 4);
    let count = machines * ranks_each;
    if role().is_none() {
        // In a process of its own, where no other test has connections that would be counted.
        let store = launcher_store();
        let mut child = Process::start(TEST, "all ranks", &rank_at(&store, 0, 1));
        assert_eq!(child.hear(), "fine");
        return;
    }
    // One rank's failed assertion ends all of them.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::exit(1);
    }));
    let place: Vec<usize> = (0..count).map(|rank| rank / ranks_each).collect();
    let control = count * (ranks_each - 1 + machines - 1);
    let data = count * (machines - 1);
    let worlds = placed(&place, &options());
    await_connections(control);
    let in_turn = Barrier::new(count);
    let all_have = |world: &World, wanted: usize| {
        in_turn.wait();
        if world.rank() == 0 {
            await_connections(wanted);
        }
        in_turn.wait();
    };
    on_world(worlds, |world| {
        let group = world.group().unwrap();
        all_have(&world, control + data);
        collectives(&group).unwrap();
        all_have(&world, control + data);
        // A message between ranks that no collective has connected makes a connection.
        match world.rank() {
            0 => group.send(&[7_u8], count - 1).unwrap(),
            rank if rank == count - 1 => group.recv(&mut [0_u8], 0).unwrap(),
            _ => {}
        }
        // A message inside a machine makes none.
        match world.rank() {
            0 => group.send(&[7_u8], 1).unwrap(),
            1 => group.recv(&mut [0_u8], 0).unwrap(),
            _ => {}
        }
        all_have(&world, control + data + 2);
        drop(group);
        all_have(&world, control);
    });
    say("fine");
}

#[test]
fn ranks_that_all_connect_to_each_other_at_once_do_so() {
    let uneven = [0, 0, 0, 1, 1, 2];
    on_world(placed(&uneven, &options()), |world| {
        let (group, rank, count) = (world.group().unwrap(), world.rank(), uneven.len());
        for distance in 1..count {
            let (to, from) = ((rank + distance) % count, (rank + count - distance) % count);
            let mut got = [0];
            group.send_recv(&[rank as i64], to, &mut got, from).unwrap();
            assert_eq!(got, [from as i64]);
        }
        let (group, rank, ranks) = (world.group().unwrap(), rank as i64, (0..count as i64).collect::<Vec<_>>());
        let mut output = vec![0; count];
        group.all_to_all(&vec![rank; count], &mut output).unwrap();
        assert_eq!(output, ranks);
        for root in 0..count {
            let is_root = world.rank() == root;
            assert_eq!(group.gather(&[rank], root).unwrap(), is_root.then(|| ranks.clone()));
            let mut row = [0];
            group.scatter(is_root.then_some(&ranks[..]), &mut row, root).unwrap();
            assert_eq!(row, [rank]);
        }
    });
}

#[test]
fn a_rank_that_waits_for_a_connection_sends_to_its_other_peers() {
    // Rank `first` sends to `second`. Rank `third` needs a message of `second` before it connects to `first`.
    let (first, second, third) = (0, 3, 5);
    let machines = [0, 0, 1, 1, 2, 2];
    for worlds in [placed(&machines, &options()), world(machines.len(), &options())] {
        on_world(worlds, |world| {
            let (group, mut got) = (world.group().unwrap(), [0_u8]);
            match world.rank() {
                rank if rank == first => group.send_recv(&[1], second, &mut got, third).unwrap(),
                rank if rank == second => {
                    group.recv(&mut got, first).unwrap();
                    group.send(&[got[0] + 1], third).unwrap();
                }
                rank if rank == third => {
                    group.recv(&mut got, second).unwrap();
                    group.send(&[got[0] + 1], first).unwrap();
                }
                _ => return,
            }
            assert_eq!(got[0], if world.rank() == first { 3 } else { 1 + u8::from(world.rank() == third) });
        });
    }
}

#[test]
fn groups_that_are_called_in_opposite_order_connect() {
    const LEN: usize = 8 << 20;
    on_world(placed(&[0, 0, 1, 1], &options()), |world| {
        let groups = [world.group().unwrap(), world.group().unwrap()];
        // Ranks that are no counterparts: each exchange is the first use of a connection between them.
        let peer = 3 - world.rank();
        let first = usize::from(world.rank() > 1);
        let exchange = |group: &ProcessGroup| {
            let mut got = vec![0; LEN];
            group.send_recv(&vec![world.rank() as u8; LEN], peer, &mut got, peer).unwrap();
            assert!(got.iter().all(|byte| usize::from(*byte) == peer));
        };
        thread::scope(|scope| {
            scope.spawn(|| exchange(&groups[first]));
            thread::sleep(Duration::from_millis(50));
            exchange(&groups[1 - first]);
        });
    });
}

#[test]
fn a_rank_that_closed_its_group_is_named_by_one_that_would_connect() {
    // Of two ranks, the higher one connects and the lower one waits for the connection.
    for (closes, calls) in [(3, 0), (0, 3)] {
        let errors = on_world(placed(&[0, 0, 1, 1], &options()), |world| {
            let group = world.group().unwrap();
            let closed = world.group().unwrap();
            if world.rank() == closes {
                drop(closed);
                // Waits until the world ends.
                return group.barrier().unwrap_err().to_string();
            }
            let begin = Instant::now();
            let error = match world.rank() == calls {
                true => closed.recv(&mut [0_u8], closes).unwrap_err(),
                false => group.barrier().unwrap_err(),
            };
            assert_eq!(error.rank(), Some(closes), "{error}");
            assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
            error.to_string()
        });
        assert!(errors.iter().all(|error| error.contains(&format!("rank {closes} "))), "{errors:?}");
    }
}

/// Errors of ranks 0 and 3, which have no connection, when one of them calls and the other does not; `meanwhile` runs
/// on rank 1.
fn errors_of_one_that_connects(options: &WorldOptions, meanwhile: impl Fn(&World) + Sync) -> [Error; 2] {
    // Of two ranks, the higher one connects and the lower one waits for the connection.
    let of_caller = &|caller: usize| {
        let done = Barrier::new(4);
        let errors = on_world(placed(&[0, 0, 1, 1], options), |world| {
            let group = world.group().unwrap();
            let rank = world.rank();
            let begin = Instant::now();
            let error = (rank == caller).then(|| group.recv(&mut [0_u8], 3 - caller).unwrap_err());
            assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
            if rank == 1 {
                meanwhile(&world);
            }
            done.wait();
            error
        });
        errors.into_iter().flatten().next().unwrap()
    };
    thread::scope(|scope| {
        let both = [0, 3].map(|caller| scope.spawn(move || of_caller(caller)));
        both.map(|errors| errors.join().unwrap())
    })
}

#[test]
fn a_wait_for_a_connection_ends_at_the_deadline() {
    let options = WorldOptions { timeout: Duration::from_secs(3), ..options() };
    for (error, silent) in errors_of_one_that_connects(&options, |_| {}).into_iter().zip([3, 0]) {
        assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [silent]), "{error}");
    }
}

#[test]
fn a_wait_for_a_connection_ends_with_the_world() {
    let give_up = |world: &World| {
        thread::sleep(Duration::from_millis(100));
        world.fail("disk full");
    };
    for error in errors_of_one_that_connects(&options(), give_up) {
        assert_eq!(error.rank(), Some(1), "{error}");
        assert!(error.to_string().contains("disk full"), "{error}");
    }
}

#[test]
fn a_wait_for_a_connection_ends_when_the_peer_leaves() {
    for (caller, leaves) in [(0, 3), (3, 0)] {
        let all_have = Barrier::new(4);
        on_world(placed(&[0, 0, 1, 1], &options()), |world| {
            let group = world.group().unwrap();
            all_have.wait();
            if world.rank() == caller {
                let begin = Instant::now();
                let error = group.recv(&mut [0_u8], leaves).unwrap_err();
                assert_eq!(error.rank(), Some(leaves), "{error}");
                assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
            }
        });
    }
}

/// In a child: a group whose ranks 0 and 3 have no connection. One of them wants to connect, while the other is
/// stopped.
fn rank_main() -> bool {
    let Some((role, env)) = role() else { return false };
    let peer_timeout = (role == "impatient").then_some(Duration::from_secs(2));
    let lively = WorldOptions { engine: None, heartbeat: Duration::from_millis(100), peer_timeout, ..options() };
    let world = World::join(&env, lively).unwrap();
    let group = world.group().unwrap();
    collectives(&group).unwrap();
    say("ready");
    await_go();
    say("goes on");
    let error = match world.rank() {
        0 | 3 => group.recv(&mut [0_u8], 3 - world.rank()).unwrap_err(),
        _ => group.barrier().unwrap_err(),
    };
    say(&format!("{:?}: {error}", error.rank()));
    true
}

/// Four ranks on two machines. One is stopped while another, which has no connection to it, calls it; then `harm` is
/// done to the stopped one.
fn check(test: &str, role: &str, harm: impl Fn(&mut Process), expected: &str) {
    for culprit in [0, 3] {
        let store = launcher_store();
        let start = |rank: usize| {
            let env = LaunchEnv { machine: Some((rank / 2).to_string()), ..rank_at(&store, rank, 4) };
            Process::start(test, role, &env)
        };
        let mut ranks: Vec<Process> = (0..4).map(start).collect();
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "ready"));
        ranks[culprit].signal(Signal::STOP);
        let others = || (0..4).filter(|rank| *rank != culprit);
        others().for_each(|rank| ranks[rank].go());
        others().for_each(|rank| assert_eq!(ranks[rank].hear(), "goes on"));
        // Time to connect.
        thread::sleep(Duration::from_millis(200));
        let begin = Instant::now();
        harm(&mut ranks[culprit]);
        for rank in others() {
            let said = ranks[rank].hear();
            assert!(said.starts_with(&format!("Some({culprit}): rank {culprit} (host ")), "rank {rank}: {said}");
            assert!(said.contains(expected), "rank {rank}: {said}");
        }
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_rank_that_is_killed_while_another_connects_to_it_is_named() {
    const TEST: &str = "a_rank_that_is_killed_while_another_connects_to_it_is_named";
    if !rank_main() {
        check(TEST, "patient", Process::kill, "it was killed by SIGKILL");
    }
}

#[test]
fn a_rank_that_is_stopped_while_another_connects_to_it_is_named() {
    const TEST: &str = "a_rank_that_is_stopped_while_another_connects_to_it_is_named";
    if !rank_main() {
        check(TEST, "impatient", |_| {}, "silent for ");
    }
}
