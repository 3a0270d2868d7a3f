//! Order of calls: many collectives in a row, several groups, several threads.

use std::collections::BTreeSet;
use std::thread;

use burn_ddp_comm::ReduceOp;

use crate::harness::{Make, groups, ranks};
use crate::reference_values::{assert_bits, samples};

pub fn mixed_collectives_back_to_back(make: Make) {
    for n in [2, 3, 7] {
        groups(make, n, |group| {
            let mut state = 12_345_u64;
            let mut random = |below: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % below
            };
            for _ in 0..150 {
                let len = [0, 1, 7, 1000, 20_000][random(5)];
                let mine: Vec<i64> = samples(group.rank(), 0, len);
                let value = |rank: usize, index: usize| samples::<i64>(rank, index, 1)[0];
                let sum = |index: usize| (0..n).map(|rank| value(rank, index)).sum::<i64>();
                match random(5) {
                    0 => {
                        let mut buf = mine;
                        group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                        assert_bits(&buf, sum, || "sum".to_string());
                    }
                    1 => {
                        let (root, mut buf) = (random(n), mine);
                        group.broadcast(&mut buf, root).unwrap();
                        assert_bits(&buf, |index| value(root, index), || "copy".to_string());
                    }
                    2 => {
                        let rows = group.all_gather(&mine).unwrap();
                        assert_bits(&rows, |at| value(at / len, at % len), || "rows".to_string());
                    }
                    3 => {
                        let input: Vec<i64> = samples(group.rank(), 0, n * len);
                        let mut row = vec![0; len];
                        group.reduce_scatter(&input, &mut row, ReduceOp::Sum).unwrap();
                        assert_bits(&row, |index| sum(group.rank() * len + index), || "row".to_string());
                    }
                    _ => group.barrier().unwrap(),
                }
            }
        });
    }
}

pub fn ten_thousand_small_collectives(make: Make) {
    groups(make, 3, |group| {
        for nth in 0..10_000 {
            let mut x = [nth as f32, group.rank() as f32];
            group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, [3.0 * nth as f32, 3.0]);
        }
    });
}

/// Two groups that ranks use in opposite order do not wait for each other.
pub fn groups_are_independent(make: Make) {
    ranks(make, 3, |world| {
        let (a, b) = (world.group().unwrap(), world.group().unwrap());
        assert_ne!(a.id(), b.id());
        thread::scope(|scope| {
            for (group, factor) in [(&a, 1.0), (&b, 10.0)] {
                scope.spawn(move || {
                    for nth in 0..200 {
                        let mut x = vec![factor * nth as f64; 1 + 100 * (nth % 50)];
                        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                        assert!(x.iter().all(|x| *x == 3.0 * factor * nth as f64));
                    }
                });
            }
        });
        // Dropping one group on all ranks does not affect the others.
        drop(a);
        b.barrier().unwrap();
        world.group().unwrap().barrier().unwrap();
        b.barrier().unwrap();
    });
}

pub fn threads_of_a_rank_take_turns(make: Make) {
    groups(make, 2, |group| {
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let mut x = [1_i32];
                        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                        assert_eq!(x, [2]);
                    }
                });
            }
        });
    });
}

/// A rank leaves once its last collective is done; the data that it sent still arrive.
pub fn leaving_after_the_last_collective_is_fine(make: Make) {
    for round in 0..20 {
        let gathered = ranks(make, 4, |world| {
            let group = world.group().unwrap();
            let rows = group.all_gather(&vec![world.rank() as i32; 1 + round * 3000]).unwrap();
            drop((group, world));
            rows.into_iter().collect::<BTreeSet<_>>()
        });
        gathered.into_iter().for_each(|ranks| assert_eq!(ranks, BTreeSet::from([0, 1, 2, 3])));
    }
}

pub fn a_world_knows_its_ranks(make: Make) {
    let seen = ranks(make, 3, |world| {
        let group = world.group().unwrap();
        assert_eq!((group.rank(), group.world_size()), (world.rank(), 3));
        assert_eq!((world.world_size(), world.local_world_size(), world.node_rank()), (3, 3, 0));
        assert_eq!(world.local_rank(), world.rank());
        assert_eq!(world.peers()[world.rank()].pid, std::process::id());
        assert_eq!(world.check(), Ok(()));
        (world.rank(), world.peers().to_vec())
    });
    for (rank, (own, peers)) in seen.iter().enumerate() {
        assert_eq!(rank, *own);
        assert_eq!(peers, &seen[0].1);
        assert_eq!(peers.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [0, 1, 2]);
    }
}
