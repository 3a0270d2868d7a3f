//! Whatever happens to one rank, the others learn of it, at once if it can be known at once.

use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, Progress, ReduceOp, Track, WorldOptions};

use crate::harness::{AT_ONCE, Make, Together, at_once, fatal, groups, lined_up, members, outcomes, patient};

const TRACK: Track = Track::Batches { group: 1, loader: 1, run: 0 };
const FIRST_STEP: Progress = Progress { epoch: 0, step: 1 };

pub fn a_panic_ends_pending_calls_everywhere(make: Make) {
    for n in [2, 4] {
        let outcomes = at_once(|| {
            lined_up(make, n, patient(), |world, group| {
                assert!(world.rank() != 1, "meant to panic");
                group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum)
            })
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            if rank == 1 {
                assert!(outcome.is_err(), "rank 1 did not panic");
                continue;
            }
            let error = fatal(outcome.expect("no panic"));
            assert!(matches!(&error, Error::PeerFailed { peer, .. } if peer.rank == 1), "{error}");
            let text = error.to_string();
            assert!(text.contains("panicked") && text.contains("all_reduce #0 of group 1"), "{text}");
        }
    }
}

pub fn giving_up_ends_pending_calls_everywhere(make: Make) {
    let results = at_once(|| {
        members(make, 3, |world, group| {
            if world.rank() == 2 {
                world.fail("no space left on device");
            }
            group.broadcast(&mut [0_u8; 5], 0)
        })
    });
    for result in results {
        let error = fatal(result);
        assert_eq!(error.rank(), Some(2), "{error}");
        assert!(matches!(&error, Error::PeerFailed { cause, .. } if cause == "no space left on device"), "{error}");
    }
}

/// A rank that fails also ends a call in which another of its threads waits.
pub fn giving_up_ends_own_calls_too(make: Make) {
    let together = Together::new(2);
    at_once(|| {
        members(make, 2, |world, group| {
            if world.rank() == 0 {
                thread::scope(|scope| {
                    let pending = scope.spawn(|| group.barrier());
                    world.fail("enough");
                    let error = fatal(pending.join().unwrap());
                    assert!(error.to_string().contains("enough"), "{error}");
                });
                assert_eq!(fatal(group.barrier()).rank(), Some(0));
            }
            together.wait();
        })
    });
}

/// Rank 2 is alive but does something else.
pub fn a_rank_that_never_comes_is_named_after_the_deadline(make: Make) {
    let timeout = Duration::from_secs(1);
    let options = WorldOptions { timeout, heartbeat: Duration::from_millis(50), ..patient() };
    let others_done = Together::new(3);
    let results = lined_up(make, 3, options, |world, group| {
        let start = Instant::now();
        if world.rank() == 2 {
            others_done.wait();
        }
        let error = fatal(group.all_reduce(&mut vec![1_i32; 50_000], ReduceOp::Sum));
        if world.rank() != 2 {
            assert!(start.elapsed() >= timeout - Duration::from_millis(200) && start.elapsed() < AT_ONCE);
            others_done.wait();
        }
        (world.machines().count(), error)
    });
    for (machines, error) in results.into_iter().map(|result| result.unwrap()) {
        let Error::Timeout { reporter, waiting_for, timeout, call, culprit, why } = &error else { panic!("{error}") };
        assert!(*culprit == Some(2) && why.starts_with("rank 2 "), "{error}");
        // Between machines a rank may wait for a rank that waits for the missing one.
        assert!(*waiting_for == [2] || machines > 1 && !waiting_for.contains(reporter), "{error}");
        assert!(*reporter != 2 && timeout.as_secs() == 1, "{error}");
        assert!(call.site.to_string().starts_with(file!()), "{error}");
        let text = error.to_string();
        assert!(
            machines > 1
                || text.contains("waited 1 s for rank 2 in all_reduce #0 of group 1 (i32, sum, 50000 elements)"),
            "{text}"
        );
    }
}

/// A rank may wait for one that itself waits for the missing rank; by heartbeats the error names the missing one.
pub fn a_rank_that_never_makes_the_group_is_named(make: Make) {
    let heartbeat = Duration::from_millis(50);
    let options = WorldOptions { timeout: Duration::from_secs(3), heartbeat, ..patient() };
    let (all_joined, others_done) = (Together::new(3), Together::new(3));
    let results = outcomes(make, 3, options, |world| {
        all_joined.wait();
        let result = if world.rank() == 1 { None } else { Some(world.group()) };
        others_done.wait();
        result.map(fatal)
    });
    for error in results.into_iter().filter_map(|result| result.unwrap()) {
        let Error::Timeout { waiting_for, culprit, .. } = &error else { panic!("{error}") };
        assert!(waiting_for.contains(&1) || *culprit == Some(1), "{error}");
    }
}

pub fn early_leavers_are_named(make: Make) {
    let results = at_once(|| {
        members(make, 3, |world, group| {
            if world.rank() == 0 {
                return None;
            }
            Some(fatal(group.all_reduce(&mut [1.0_f64], ReduceOp::Sum)))
        })
    });
    for error in results.into_iter().flatten() {
        assert!(matches!(&error, Error::PeerLeft { peer, .. } if peer.rank == 0), "{error}");
        assert!(error.to_string().contains("left while it was needed by all_reduce #0 of group 1"), "{error}");
    }
}

pub fn leaving_is_no_error_for_those_who_need_nothing(make: Make) {
    let left = Together::new(2);
    let results = at_once(|| {
        members(make, 2, |world, group| {
            if world.rank() == 0 {
                world.leave();
                world.leave();
                left.wait();
                return group.barrier();
            }
            left.wait();
            world.advance(TRACK, FIRST_STEP).and_then(|()| world.check())
        })
    });
    assert!(matches!(&results[0], Err(Error::PeerLeft { peer, .. }) if peer.rank == 0), "{results:?}");
    assert_eq!(results[1], Ok(()));
}

/// The rank that closed its group stays in the world.
pub fn a_closed_group_is_named(make: Make) {
    let done = Together::new(2);
    at_once(|| {
        members(make, 2, |world, group| {
            if world.rank() == 1 {
                drop(group);
            } else {
                let error = fatal(group.barrier());
                assert!(matches!(&error, Error::PeerLeft { peer, .. } if peer.rank == 1), "{error}");
            }
            done.wait();
        })
    });
}

pub fn the_first_cause_stays_for_all_groups(make: Make) {
    let ready = Together::new(3);
    let results = at_once(|| {
        members(make, 3, |world, first| {
            let second = world.group().unwrap();
            ready.wait();
            let cause = match world.rank() {
                0 => fatal(first.all_reduce(&mut [1_u8], ReduceOp::Sum)),
                _ => fatal(first.all_reduce(&mut [1_u8], ReduceOp::Max)),
            };
            world.fail("later");
            assert_eq!(fatal(first.barrier()), cause);
            assert_eq!(fatal(second.barrier()), cause);
            assert_eq!(fatal(second.all_gather_object(&1)), cause);
            assert_eq!(fatal(world.group()), cause);
            assert_eq!(fatal(world.check()), cause);
            assert_eq!(fatal(world.advance(TRACK, FIRST_STEP)), cause);
            cause
        })
    });
    assert!(results.iter().all(|cause| matches!(cause, Error::Mismatch { .. })), "{results:?}");
}

pub fn errors_name_the_call(make: Make) {
    let errors = at_once(|| {
        groups(make, 2, |group| {
            let line = line!() + 1;
            let result = if group.rank() == 0 { group.barrier() } else { Ok(()) };
            (result, line)
        })
    });
    let (result, line) = errors[0].clone();
    let error = fatal(result);
    let text = error.to_string();
    let call = format!("barrier #0 of group 1 called at {}:{line}:", file!());
    let who = format!("pid {})", std::process::id());
    assert!(text.starts_with("rank 1 (host ") && text.contains(&who) && text.contains(&call), "{text}");
}
