//! Groups that launch at the same time do so in one order on all ranks, whatever the timing.

use std::thread;
use std::time::Duration;

use burn_ddp_comm::ReduceOp;
use burn_ddp_nccl::fake::Machine;

use crate::common::{Rank, all_reduce, assert_clean, hasty, on_devices, place};

/// Does `rounds` reductions on `group`; the input of each rank is ready at another time.
fn rounds(rank: &Rank, group: &burn_ddp_comm::ProcessGroup, rounds: usize, seed: usize) {
    let buffer = rank.room(100);
    for round in 0..rounds {
        let busy = Duration::from_micros(((rank.rank() * 7919 + round * 104_729 + seed * 31) % 5 * 150) as u64);
        thread::sleep(busy);
        let ready = rank.compute(&buffer, vec![round as f32; 100], busy);
        let mut place = place(rank.rank(), &[&buffer], Some(ready));
        all_reduce(group, &mut place, 100, ReduceOp::Sum).unwrap();
        let expected = (round * group.world_size()) as f32;
        assert_eq!(rank.result(&buffer, place.done()), vec![expected; 100], "round {round} of group {}", group.id());
    }
}

#[test]
fn two_groups_of_the_same_ranks() {
    let machine = Machine::new(2);
    machine.set_jitter(Duration::from_micros(300), 42);
    on_devices(&machine, 2, hasty(20_000), |rank| {
        let groups = [rank.world.group().unwrap(), rank.world.group().unwrap()];
        thread::scope(|scope| {
            for (nth, group) in groups.iter().enumerate() {
                let rank = rank.on_another_stream();
                scope.spawn(move || rounds(&rank, group, 60, nth));
            }
        });
    });
    assert!(machine.launched(0) == 120 && machine.launched(1) == 120);
    assert_clean(&machine);
}

#[test]
fn three_groups_that_overlap() {
    let machine = Machine::new(3);
    machine.set_jitter(Duration::from_micros(300), 7);
    on_devices(&machine, 3, hasty(20_000), |rank| {
        let whole = rank.world.group().unwrap();
        // Ranks 0 and 1, ranks 1 and 2, and all of them.
        let left = whole.split(Some(0).filter(|_| rank.rank() < 2), 0).unwrap();
        let right = whole.split(Some(0).filter(|_| rank.rank() > 0), 0).unwrap();
        let groups = [Some(whole), left, right];
        thread::scope(|scope| {
            for (nth, group) in groups.iter().enumerate() {
                let Some(group) = group else { continue };
                let rank = rank.on_another_stream();
                scope.spawn(move || rounds(&rank, group, 40, nth));
            }
        });
    });
    assert!(machine.launched(0) == 80 && machine.launched(1) == 120 && machine.launched(2) == 80);
    assert_clean(&machine);
}

/// A group that waits for a rank does not hold up another group.
#[test]
fn a_group_that_waits_for_a_rank_holds_up_nobody() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, hasty(20_000), |rank| {
        let (first, second) = (rank.world.group().unwrap(), rank.world.group().unwrap());
        let (gate, passed) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            let own = rank.on_another_stream();
            let first = &first;
            scope.spawn(move || {
                // Rank 1 comes to the first group only when it is through with the second.
                if own.rank() == 1 {
                    passed.recv().unwrap();
                }
                rounds(&own, first, 1, 0);
            });
            rounds(&rank, &second, 20, 1);
            gate.send(()).unwrap();
        });
    });
    assert_clean(&machine);
}
