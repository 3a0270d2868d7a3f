//! Groups of some of the ranks.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use burn_ddp_comm::{Error, GroupId, ProcessGroup, ReduceOp, WorldOptions};

use crate::harness::{
    Make, Together, WORLDS, at_once, fatal, groups, lined_up, members, patient, ranks, refused, until_ended,
};
use crate::reference_values::{assert_bits, samples};

/// A part of `group`.
fn part(group: &ProcessGroup, color: u64, key: i64) -> ProcessGroup {
    group.split(Some(color), key).unwrap().expect("a group")
}

pub fn members_are_ordered_by_key(make: Make) {
    for n in WORLDS {
        groups(make, n, |group| {
            // Backwards within each half; equal keys keep the order of the parent.
            let (rank, half) = (group.rank(), group.rank() % 2);
            let backwards = part(group, half as u64, -(rank as i64));
            let expected: Vec<usize> = (0..n).rev().filter(|other| other % 2 == half).collect();
            assert_eq!(backwards.ranks(), expected);
            assert_eq!((backwards.world_size(), backwards.ranks()[backwards.rank()]), (expected.len(), rank));
            let alike = part(group, u64::MAX, 7);
            assert_eq!(alike.ranks(), (0..n).collect::<Vec<_>>());
            assert_eq!(group.ranks(), (0..n).collect::<Vec<_>>());
        });
    }
}

pub fn ids_are_unique_and_agreed(make: Make) {
    let told = ranks(make, 4, |world| {
        let group = world.group().unwrap();
        let mut groups = Vec::new();
        for color in [0, world.rank() as u64 % 2, world.rank() as u64 / 2, world.rank() as u64] {
            let outer = part(&group, color, 0);
            groups.push(part(&outer, outer.rank() as u64, 0));
            groups.push(outer);
        }
        groups.push(world.group().unwrap());
        groups.iter().map(|group| (group.id(), group.ranks().to_vec())).collect::<Vec<_>>()
    });
    let all: BTreeSet<(u64, Vec<usize>)> = told.iter().flatten().cloned().collect();
    let ids: BTreeSet<u64> = all.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids.len(), all.len(), "one id, one group: {all:?}");
    for (id, ranks) in &all {
        for (rank, told) in told.iter().enumerate() {
            assert_eq!(told.iter().any(|(other, _)| other == id), ranks.contains(&rank), "group {}", GroupId(*id));
        }
    }
}

pub fn who_wants_none_gets_none(make: Make) {
    groups(make, 4, |group| {
        let color = (group.rank() != 1).then_some(5);
        let part = group.split(color, 0).unwrap();
        assert_eq!(part.is_some(), group.rank() != 1);
        if let Some(part) = part {
            assert_eq!(part.all_gather(&[group.rank() as u8]).unwrap(), [0, 2, 3]);
        }
        assert!(group.split(None, 0).unwrap().is_none(), "nobody wants one");
        group.barrier().unwrap();
    });
}

/// Every collective in groups whose order is not that of the world.
pub fn all_collectives_in_a_part(make: Make) {
    groups(make, 7, |group| {
        let me = group.rank();
        let part = part(group, u64::from(me % 3 == 0), -(me as i64));
        let (rank, n, ranks) = (part.rank(), part.world_size(), part.ranks().to_vec());
        let value = |member: usize, index: usize| samples::<i64>(ranks[member], index, 1)[0];
        let sum = |index: usize| (0..n).map(|member| value(member, index)).sum::<i64>();
        for len in [0, 3, 40_000] {
            let mine: Vec<i64> = samples(me, 0, len);
            let mut buf = mine.clone();
            part.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
            assert_bits(&buf, sum, || "all_reduce".to_string());
            let rows = part.all_gather(&mine).unwrap();
            assert_bits(&rows, |at| value(at / len, at % len), || "all_gather".to_string());
            let input: Vec<i64> = samples(me, 0, n * len);
            let mut row = vec![0; len];
            part.reduce_scatter(&input, &mut row, ReduceOp::Sum).unwrap();
            assert_bits(&row, |index| sum(rank * len + index), || "reduce_scatter".to_string());
            let mut rows = vec![0; n * len];
            part.all_to_all(&input, &mut rows).unwrap();
            assert_bits(&rows, |at| value(at / len, rank * len + at % len), || "all_to_all".to_string());
            for root in 0..n {
                let mut buf = mine.clone();
                part.broadcast(&mut buf, root).unwrap();
                assert_bits(&buf, |index| value(root, index), || "broadcast".to_string());
                let mut buf = mine.clone();
                part.reduce(&mut buf, ReduceOp::Sum, root).unwrap();
                assert_bits(&buf, |at| if rank == root { sum(at) } else { value(rank, at) }, || "reduce".to_string());
                let rows = part.gather(&mine, root).unwrap();
                assert_eq!(rows.is_some(), rank == root);
                assert_bits(&rows.unwrap_or_default(), |at| value(at / len, at % len), || "gather".to_string());
                part.scatter(Some(&input), &mut row, root).unwrap();
                assert_bits(&row, |index| value(root, rank * len + index), || "scatter".to_string());
                let object = (rank == root).then(|| format!("from {root}"));
                assert_eq!(part.broadcast_object(object, root).unwrap(), format!("from {root}"));
            }
            let before = (rank + n - 1) % n;
            part.send_recv(&mine, (rank + 1) % n, &mut buf, before).unwrap();
            assert_bits(&buf, |index| value(before, index), || "send_recv".to_string());
            let mut weighted = vec![ranks[rank] as f64; len];
            part.all_reduce_weighted(&mut weighted, 1.0).unwrap();
            let mean = ranks.iter().sum::<usize>() as f64 / n as f64;
            assert!(weighted.iter().all(|x| (x - mean).abs() < 1e-12));
        }
        assert_eq!(part.all_gather_object(&me).unwrap(), ranks);
    });
}

/// The world, its halves and their pairs, each used by a thread of its own, at its own pace on every rank.
pub fn parts_and_parents_at_the_same_time(make: Make) {
    groups(make, 4, |group| {
        let rank = group.rank();
        let half = part(group, rank as u64 / 2, 0);
        let pair = part(group, rank as u64 % 2, 0);
        let alone = part(&half, half.rank() as u64, 0);
        thread::scope(|scope| {
            for (nth, group) in [group, &half, &pair, &alone].into_iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..60_u64 {
                        if (round + rank as u64 * 7 + nth as u64 * 3).is_multiple_of(13) {
                            thread::sleep(Duration::from_millis(1));
                        }
                        let mut x =
                            vec![(group.ranks()[group.rank()] as u64 + round) as i64; 1 + 300 * (round as usize % 40)];
                        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                        let expected: i64 = group.ranks().iter().map(|rank| *rank as i64 + round as i64).sum();
                        assert!(x.iter().all(|x| *x == expected));
                    }
                });
            }
        });
        group.barrier().unwrap();
    });
}

/// The halves are independent: one may be far ahead of the other, and may have dropped its group.
pub fn siblings_do_not_wait_for_each_other(make: Make) {
    let ahead = Together::new(4);
    groups(make, 4, |group| {
        let half = part(group, group.rank() as u64 / 2, 0);
        if group.rank() < 2 {
            (0..100).for_each(|_| half.barrier().unwrap());
            drop(half);
            ahead.wait();
        } else {
            ahead.wait();
            (0..3).for_each(|_| half.barrier().unwrap());
        }
        group.barrier().unwrap();
    });
}

/// Down to single ranks, then from the parent again.
pub fn parts_of_parts(make: Make) {
    for n in [2, 7] {
        groups(make, n, |group| {
            let mut current = part(group, 0, 0);
            while current.world_size() > 1 {
                let middle = current.world_size() / 2;
                let next = part(&current, u64::from(current.rank() < middle), 0);
                assert!(next.ranks().iter().all(|rank| current.ranks().contains(rank)));
                current.barrier().unwrap();
                current = next;
                let mut x = [1_i32];
                current.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x[0] as usize, current.world_size());
            }
            assert_eq!(current.ranks(), [group.rank()]);
            group.barrier().unwrap();
        });
    }
}

pub fn the_parent_may_go_first(make: Make) {
    members(make, 3, |world, group| {
        let part = part(&group, 0, -(world.rank() as i64));
        drop((group, world));
        assert_eq!(part.all_gather(&[part.rank() as u8]).unwrap(), [0, 1, 2]);
    });
}

pub fn a_mismatch_in_a_part_names_ranks_of_the_world(make: Make) {
    let ready = Together::new(5);
    let results = at_once(|| {
        members(make, 5, |world, group| {
            let rank = world.rank();
            let part = group.split((rank > 1).then_some(3), -(rank as i64)).unwrap();
            ready.wait();
            let Some(part) = part else {
                until_ended(&world);
                return group.barrier();
            };
            // Rank 2, the last of the part, passes another root than the other ranks; theirs is rank 4, its first.
            if rank == 2 { part.broadcast(&mut [0_u8; 3], 1) } else { part.broadcast(&mut [0_u8; 3], 0) }
        })
    });
    for result in results {
        let error = fatal(result);
        let Error::Mismatch { first, second } = &error else { panic!("{error}") };
        assert!(first.rank == 2 && [3, 4].contains(&second.rank), "{error}");
        assert_eq!((first.call.root, second.call.root), (Some(3), Some(4)), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 2 called broadcast #0 of group 4.1 (u8, root 3, 3 elements)"), "{text}");
    }
}

pub fn a_missing_member_is_named_by_its_rank_in_the_world(make: Make) {
    let options = WorldOptions { timeout: Duration::from_secs(1), heartbeat: Duration::from_millis(50), ..patient() };
    let (ready, done) = (Together::new(4), Together::new(4));
    let errors = lined_up(make, 4, options, |world, group| {
        let part = group.split((world.rank() != 0).then_some(0), 0).unwrap();
        ready.wait();
        let waiting = part.as_ref().filter(|_| world.rank() != 3);
        let error = waiting.map(|part| fatal(part.all_reduce(&mut [1.0_f32], ReduceOp::Sum)));
        done.wait();
        error.map(|error| (world.machines().count(), error))
    });
    let errors: Vec<(usize, Error)> = errors.into_iter().filter_map(|error| error.unwrap()).collect();
    assert_eq!(errors.len(), 2);
    for (machines, error) in errors {
        let Error::Timeout { reporter, waiting_for, culprit: Some(3), .. } = &error else { panic!("{error}") };
        assert!([1, 2].contains(reporter), "{error}");
        // Between machines a rank may wait for a rank that waits for the missing one.
        assert!(*waiting_for == [3] || machines > 1 && *waiting_for == [3 - *reporter], "{error}");
        assert!(error.to_string().contains("in all_reduce #0 of group 1.1 (f32"), "{error}");
    }
}

/// The failing rank may belong to the part or not.
pub fn a_failure_anywhere_ends_all_parts(make: Make) {
    for failing in 0..4 {
        let ready = Together::new(4);
        let results = at_once(|| {
            members(make, 4, |world, group| {
                let half = part(&group, world.rank() as u64 / 2, 0);
                ready.wait();
                if world.rank() == failing {
                    world.fail("gave up");
                }
                until_ended(&world);
                [half.barrier(), group.barrier(), half.split(None, 0).map(drop)]
            })
        });
        for result in results.into_iter().flatten() {
            let error = fatal(result);
            assert!(matches!(&error, Error::PeerFailed { peer, .. } if peer.rank == failing), "{error}");
        }
    }
}

/// The others wait in a call of the part, or while they make it.
pub fn a_failure_outside_wakes_those_who_wait(make: Make) {
    let results = at_once(|| {
        members(make, 3, |world, group| {
            if world.rank() == 2 {
                assert!(group.split(None, 0).unwrap().is_none());
                world.fail("outside");
                return world.check();
            }
            let part = match group.split(Some(1), 0) {
                Ok(part) => part.expect("a group"),
                Err(error) => return Err(error),
            };
            if world.rank() == 1 {
                until_ended(&world);
                return part.barrier();
            }
            part.recv(&mut [0_u8; 10], 1)
        })
    });
    for result in results {
        let error = fatal(result);
        assert!(matches!(&error, Error::PeerFailed { peer, .. } if peer.rank == 2), "{error}");
    }
}

pub fn an_early_leaver_of_a_part_is_named(make: Make) {
    let (ready, done) = (Together::new(3), Together::new(3));
    at_once(|| {
        members(make, 3, |world, group| {
            let part = group.split((world.rank() > 0).then_some(0), 0).unwrap();
            ready.wait();
            match part {
                Some(part) if world.rank() == 2 => drop(part),
                Some(part) => {
                    let error = fatal(part.barrier());
                    assert!(matches!(&error, Error::PeerLeft { peer, .. } if peer.rank == 2), "{error}");
                }
                None => {}
            }
            done.wait();
        })
    });
}

pub fn a_split_is_compared(make: Make) {
    let results = at_once(|| {
        groups(make, 2, |group| match group.rank() {
            0 => group.split(Some(1), 0).map(drop),
            _ => group.barrier(),
        })
    });
    for result in results {
        let error = fatal(result);
        assert!(matches!(&error, Error::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("rank 0 called split #0 of group 1 called at"), "{error}");
    }
}

pub fn a_part_refuses_ranks_it_does_not_have(make: Make) {
    groups(make, 3, |group| {
        let part = part(group, group.rank() as u64 / 2, 0);
        let error = refused(part.broadcast(&mut [0_u8], 2));
        assert!(error.to_string().contains("root 2 is not a rank of a group of"), "{error}");
        part.barrier().unwrap();
    });
}
