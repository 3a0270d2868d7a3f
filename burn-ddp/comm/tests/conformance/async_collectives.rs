//! `_async` collectives: started, and waited for later.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, ReduceOp, WorldOptions};

use crate::harness::{
    AT_ONCE, Make, Together, WORLDS, at_once, fatal, groups, lined_up, members, patient, refused, until_ended,
};
use crate::reference_values::{assert_bits, samples};

pub fn each_yields_what_the_blocking_one_does(make: Make) {
    for n in WORLDS {
        groups(make, n, |group| {
            let rank = group.rank();
            for len in [0, 5, 30_000] {
                let mine: Vec<f32> = samples(rank, 0, len);
                let rows: Vec<f32> = samples(rank, 0, n * len);
                let root = n - 1;
                let all_reduce = group.all_reduce_async(mine.clone(), ReduceOp::Mean);
                let weighted = group.all_reduce_weighted_async(mine.clone(), rank as f64 + 1.0);
                let reduce = group.reduce_async(mine.clone(), ReduceOp::Max, root);
                let reduce_scatter = group.reduce_scatter_async(rows.clone(), ReduceOp::Sum);
                let broadcast = group.broadcast_async(mine.clone(), root);
                let all_gather = group.all_gather_async(mine.clone());
                let gather = group.gather_async(mine.clone(), root);
                let scatter = group.scatter_async((rank == root).then(|| rows.clone()), len, root);
                let all_to_all = group.all_to_all_async(rows.clone());
                let barrier = group.barrier_async();

                let mut expected = mine.clone();
                group.all_reduce(&mut expected, ReduceOp::Mean).unwrap();
                assert!(barrier.is_done(), "a blocking call comes after what was started before");
                assert_bits(&all_reduce.wait().unwrap(), |at| expected[at], || "all_reduce".to_string());
                let mut expected = mine.clone();
                group.all_reduce_weighted(&mut expected, rank as f64 + 1.0).unwrap();
                assert_bits(&weighted.wait().unwrap(), |at| expected[at], || "all_reduce_weighted".to_string());
                let mut expected = mine.clone();
                group.reduce(&mut expected, ReduceOp::Max, root).unwrap();
                assert_bits(&reduce.wait().unwrap(), |at| expected[at], || "reduce".to_string());
                let mut expected = vec![0.0; len];
                group.reduce_scatter(&rows, &mut expected, ReduceOp::Sum).unwrap();
                assert_eq!(reduce_scatter.wait().unwrap(), expected);
                let expected: Vec<f32> = samples(root, 0, len);
                assert_eq!(broadcast.wait().unwrap(), expected);
                assert_eq!(all_gather.wait().unwrap(), group.all_gather(&mine).unwrap());
                assert_eq!(gather.wait().unwrap(), group.gather(&mine, root).unwrap());
                let expected: Vec<f32> = samples(root, rank * len, len);
                assert_eq!(scatter.wait().unwrap(), expected);
                let mut expected = vec![0.0; n * len];
                group.all_to_all(&rows, &mut expected).unwrap();
                assert_eq!(all_to_all.wait().unwrap(), expected);
                barrier.wait().unwrap();
            }
        });
    }
}

/// Any mixture of `_async` and blocking calls runs in the order of the program; otherwise the ranks' calls would not
/// match.
pub fn the_order_is_that_of_the_program(make: Make) {
    groups(make, 3, |group| {
        let mut pending = Vec::new();
        for nth in 0..300_usize {
            if nth % 7 == group.rank() {
                thread::yield_now();
            }
            // Different lengths: a swap would be a mismatch.
            match nth % 3 {
                0 => pending.push((nth, group.all_reduce_async(vec![nth as f64; nth % 10 + 1], ReduceOp::Sum))),
                1 => {
                    let mut x = vec![nth as f64; nth % 11 + 2];
                    group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    assert!(x.iter().all(|x| *x == 3.0 * nth as f64));
                }
                _ => {
                    let nth_last = pending.len() / 2;
                    if let Some((nth, sum)) = (!pending.is_empty()).then(|| pending.swap_remove(nth_last)) {
                        assert_eq!(sum.wait().unwrap(), vec![3.0 * nth as f64; nth % 10 + 1]);
                    }
                }
            }
        }
        for (nth, sum) in pending {
            assert_eq!(sum.wait().unwrap(), vec![3.0 * nth as f64; nth % 10 + 1]);
        }
    });
}

pub fn many_at_once(make: Make) {
    groups(make, 4, |group| {
        let sums: Vec<_> = (0..2000).map(|nth| group.all_reduce_async(vec![nth; 50], ReduceOp::Sum)).collect();
        for (nth, sum) in sums.into_iter().enumerate().rev() {
            assert_eq!(sum.wait().unwrap(), [4 * nth as i64; 50]);
        }
    });
}

/// Rank 0 drops its handle without waiting or blocking; the others still need rank 0's part.
pub fn a_dropped_handle_is_still_done(make: Make) {
    let started = Together::new(2);
    groups(make, 2, |group| {
        if group.rank() == 0 {
            let start = Instant::now();
            for _ in 0..3 {
                drop(group.all_reduce_async(vec![1.0_f32; 100_000], ReduceOp::Sum));
            }
            assert!(start.elapsed() < AT_ONCE / 2);
            started.wait();
        } else {
            started.wait();
            for _ in 0..3 {
                let mut x = vec![2.0_f32; 100_000];
                group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert!(x.iter().all(|x| *x == 3.0));
            }
        }
        group.barrier().unwrap();
    });
}

/// Dropping the group does not block, and the calls that were started are still done.
pub fn a_handle_outlives_its_group(make: Make) {
    let dropped = Together::new(2);
    at_once(|| {
        members(make, 2, |world, group| {
            if world.rank() == 0 {
                let sums: Vec<_> =
                    (0..5).map(|nth| group.all_reduce_async(vec![nth as f32; 20_000], ReduceOp::Sum)).collect();
                drop((group, world));
                dropped.wait();
                for (nth, sum) in sums.into_iter().enumerate() {
                    assert_eq!(sum.wait().unwrap(), vec![nth as f32 + 1.0; 20_000]);
                }
            } else {
                dropped.wait();
                for _ in 0..5 {
                    let mut x = vec![1.0_f32; 20_000];
                    group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                }
            }
        })
    });
}

pub fn errors_come_out_of_wait(make: Make) {
    let results = at_once(|| {
        groups(make, 2, |group| {
            let refusal = refused(group.all_reduce_async(vec![1_i32], ReduceOp::Mean).wait());
            assert!(refusal.to_string().contains(file!()), "{refusal}");
            refused(group.scatter_async(None::<Vec<u8>>, 3, 2).wait());
            group.barrier_async().wait().unwrap();
            let len = if group.rank() == 0 { 4 } else { 5 };
            let first = group.all_reduce_async(vec![1.0_f32; len], ReduceOp::Sum);
            let second = group.barrier_async();
            [first.wait().map(drop), second.wait(), group.barrier()]
        })
    });
    for results in results {
        let errors = results.map(fatal);
        let Error::Mismatch { first, second } = &errors[0] else { panic!("{}", errors[0]) };
        assert!([first, second].iter().all(|side| side.call.site.to_string().starts_with(file!())), "{}", errors[0]);
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
}

pub fn the_end_of_the_world_ends_what_is_pending(make: Make) {
    let results = at_once(|| {
        members(make, 3, |world, group| {
            if world.rank() == 2 {
                world.fail("enough");
                return vec![world.check()];
            }
            let pending: Vec<_> = (0..10).map(|_| group.all_gather_async(vec![1_u8; 1000])).collect();
            until_ended(&world);
            pending.into_iter().map(|rows| rows.wait().map(drop)).collect()
        })
    });
    for result in results.into_iter().flatten() {
        let error = fatal(result);
        assert!(matches!(&error, Error::PeerFailed { peer, .. } if peer.rank == 2), "{error}");
    }
}

/// If a rank panics, its pending calls end with it, and the other ranks get an error.
pub fn a_panic_with_pending_calls_is_told(make: Make) {
    let outcomes = at_once(|| {
        lined_up(make, 2, patient(), |world, group| {
            let pending = group.all_reduce_async(vec![1.0_f32; 10], ReduceOp::Sum);
            assert!(world.rank() != 1, "meant to panic");
            pending.wait().and_then(|_| group.barrier())
        })
    });
    assert!(outcomes[1].is_err());
    let error = fatal(outcomes.into_iter().next().unwrap().unwrap());
    assert!(matches!(&error, Error::PeerFailed { peer, .. } if peer.rank == 1), "{error}");
}

pub fn a_missing_rank_is_named(make: Make) {
    let options = WorldOptions { timeout: Duration::from_secs(1), heartbeat: Duration::from_millis(50), ..patient() };
    let done = Together::new(2);
    let errors = lined_up(make, 2, options, |world, group| {
        let error = (world.rank() == 0).then(|| fatal(group.all_reduce_async(vec![1_i64; 3], ReduceOp::Sum).wait()));
        done.wait();
        error
    });
    let error = errors.into_iter().find_map(|error| error.unwrap()).unwrap();
    assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]), "{error}");
    assert!(error.to_string().contains(file!()), "{error}");
}

/// Sub-groups have queues of their own, which run at the same time.
pub fn groups_have_their_own(make: Make) {
    groups(make, 4, |group| {
        let half = group.split(Some(group.rank() as u64 % 2), 0).unwrap().expect("a group");
        let mut pending = Vec::new();
        for nth in 0..100 {
            pending.push((4, nth, group.all_reduce_async(vec![nth; 100], ReduceOp::Sum)));
            pending.push((2, nth, half.all_reduce_async(vec![nth; 100], ReduceOp::Sum)));
        }
        for (ranks, nth, sum) in pending {
            assert_eq!(sum.wait().unwrap(), [ranks * nth; 100]);
        }
    });
}

pub fn several_threads_may_start_and_wait(make: Make) {
    groups(make, 2, |group| {
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let ones = group.all_reduce_async(vec![1_i32], ReduceOp::Sum).wait().unwrap();
                        sum.fetch_add(ones[0] as usize, Ordering::Relaxed);
                        group.all_reduce(&mut [1_i32], ReduceOp::Sum).unwrap();
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 50 * 2);
    });
}
