//! Ranks that stop early where others go on.

use burn_ddp_comm::{Error, Progress, ReduceOp, Track};

use crate::harness::{Make, Together, at_once, fatal, members, until_ended};

const TRACK: Track = Track::Batches { group: 1, loader: 9, run: 0 };

fn at(epoch: u32, step: u32) -> Progress {
    Progress { epoch, step }
}

fn assert_out_of_step(error: &Error, ahead: usize, steps: (u32, u32)) {
    let Error::OutOfStep { track: TRACK, what, stopped, stopped_at, ahead: got, reached, .. } = error else {
        panic!("not out of step: {error}")
    };
    assert_eq!((what.as_str(), stopped.rank, *got), ("loader \"train\"", 1, ahead), "{error}");
    assert_eq!((*stopped_at, *reached), (at(2, steps.0), at(2, steps.1)), "{error}");
}

pub fn stopping_before_a_peer_gets_there(make: Make) {
    at_once(|| {
        members(make, 2, |world, group| {
            if world.rank() == 1 {
                world.stop(TRACK, at(2, 3), "loader \"train\"");
                until_ended(&world);
                assert_out_of_step(&fatal(group.barrier()), 0, (3, 4));
                return;
            }
            world.advance(TRACK, at(2, 3)).expect("not beyond it");
            // The message of the stop may still be on its way: then the barrier returns the error.
            let error = fatal(world.advance(TRACK, at(2, 4)).and_then(|()| group.barrier()));
            assert_out_of_step(&error, 0, (3, 4));
        })
    });
}

pub fn stopping_after_a_peer_passed(make: Make) {
    let passed = Together::new(3);
    at_once(|| {
        members(make, 3, |world, group| {
            if world.rank() == 2 {
                world.advance(TRACK, at(2, 8)).unwrap();
            }
            passed.wait();
            if world.rank() == 1 {
                world.stop(TRACK, at(2, 5), "loader \"train\"");
            }
            if world.rank() == 0 {
                world.advance(TRACK, at(2, 5)).ok();
            }
            // Rank 1's call could arrive at its peers before its stop, and would then be a mismatch.
            if world.rank() == 1 {
                until_ended(&world);
                return assert_out_of_step(&fatal(group.all_gather(&[1_u8])), 2, (5, 8));
            }
            let error = fatal(group.all_reduce(&mut [1.0_f32], ReduceOp::Sum));
            assert_out_of_step(&error, 2, (5, 8));
        })
    });
}

/// Rank 0 has gone on and waits for rank 1 when rank 1 breaks out of its loop.
pub fn stopping_ends_pending_collectives(make: Make) {
    let gone_on = Together::new(2);
    at_once(|| {
        members(make, 2, |world, group| {
            for step in 0..=5 {
                world.advance(TRACK, at(2, step)).unwrap();
                group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
            }
            if world.rank() == 1 {
                gone_on.wait();
                world.stop(TRACK, at(2, 5), "loader \"train\"");
                until_ended(&world);
                return assert_out_of_step(&fatal(group.broadcast_object(Some(1), 1)), 0, (5, 6));
            }
            world.advance(TRACK, at(2, 6)).unwrap();
            gone_on.wait();
            let error = fatal(group.all_reduce(&mut [1.0_f32], ReduceOp::Sum));
            assert_out_of_step(&error, 0, (5, 6));
            assert!(error.to_string().contains("all_reduce #6 of group 1"), "{error}");
        })
    });
}

pub fn stopping_together_is_fine(make: Make) {
    members(make, 3, |world, group| {
        for step in 0..4 {
            world.advance(TRACK, at(0, step)).unwrap();
            group.barrier().unwrap();
        }
        world.stop(TRACK, at(0, 3), "loader");
        group.barrier().unwrap();
        assert_eq!(world.check(), Ok(()));
    });
}

pub fn a_later_epoch_is_fine(make: Make) {
    members(make, 2, |world, group| {
        for epoch in 0..5 {
            for step in 0..=epoch {
                world.advance(TRACK, at(epoch, step)).unwrap();
                group.barrier().unwrap();
            }
            world.stop(TRACK, at(epoch, epoch), "loader");
        }
        world.advance(Track::Batches { group: 1, loader: 10, run: 0 }, at(0, 99)).unwrap();
        group.barrier().unwrap();
    });
}
