//! A failure on one device is an error on all ranks, in time, and leaves nothing behind.

use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{DType, Error, ReduceOp};
use burn_ddp_nccl::fake::{Fault, Machine};
use burn_ddp_nccl::{Communicator, Device, HostMemory, NcclOp};

use crate::common::{AT_ONCE, Rank, all_reduce, assert_clean, hasty, on_devices, patient, place, run, soon};

/// Reduces once and waits for it on the host, or for the end of the world.
fn once(rank: &Rank, group: &burn_ddp_comm::ProcessGroup) -> Result<(), Error> {
    let buffer = rank.room(16);
    let mut place = place(rank.rank(), &[&buffer], None);
    all_reduce(group, &mut place, 16, ReduceOp::Max)?;
    let done = place.done().unwrap();
    let start = Instant::now();
    while !done.is_done().unwrap() {
        rank.world.check()?;
        assert!(start.elapsed() < AT_ONCE, "neither done nor failed");
        thread::sleep(Duration::from_millis(1));
    }
    rank.world.check()
}

/// The errors of all ranks, which must name rank `culprit` and say `says`, and come within `limit`.
fn assert_told(results: Vec<(Result<(), Error>, Duration)>, culprit: usize, says: &str, limit: Duration) {
    for (rank, (result, took)) in results.into_iter().enumerate() {
        let error = result.expect_err("a failure");
        assert!(!error.group_usable() && error.rank() == Some(culprit), "rank {rank}: {error}");
        assert!(error.to_string().contains(says), "rank {rank}: {error}");
        assert!(took < limit, "rank {rank} took {took:?}");
    }
}

fn timed(f: impl FnOnce() -> Result<(), Error>) -> (Result<(), Error>, Duration) {
    let start = Instant::now();
    (f(), start.elapsed())
}

#[test]
fn a_communicator_that_cannot_be_made_ends_the_world() {
    for memory in [HostMemory::ByHost, HostMemory::ThroughDevice] {
        let machine = Machine::new(3);
        machine.inject(1, Fault::InitFails);
        let results = run(&machine, 3, (patient(), memory), |rank| {
            let group = rank.world.group().unwrap();
            timed(|| match memory {
                HostMemory::ByHost => once(&rank, &group),
                HostMemory::ThroughDevice => group.all_reduce(&mut [1.0_f32], ReduceOp::Sum),
            })
        });
        assert_told(results, 1, "ncclCommInitRankConfig: unhandled system error", AT_ONCE);
        assert_clean(&machine);
    }
}

#[test]
fn a_communicator_that_never_gets_ready_ends_at_the_deadline() {
    let machine = Machine::new(2);
    machine.inject(1, Fault::InitHangs);
    let results = on_devices(&machine, 2, hasty(2000), |rank| {
        let group = rank.world.group().unwrap();
        timed(|| once(&rank, &group))
    });
    for (result, took) in results {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(took >= Duration::from_millis(400) && took < AT_ONCE, "{took:?}");
    }
    assert_clean(&machine);
}

#[test]
fn a_launch_that_is_refused_ends_the_world() {
    let machine = Machine::new(2);
    machine.inject(0, Fault::LaunchFails(3));
    let results = on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        (0..3).for_each(|_| once(&rank, &group).unwrap());
        timed(|| once(&rank, &group))
    });
    assert_told(results, 0, "invalid argument", AT_ONCE);
    assert_clean(&machine);
}

/// On device memory the call has returned by then: the watchdog finds the error.
#[test]
fn an_error_in_the_background_ends_the_world() {
    for memory in [HostMemory::ByHost, HostMemory::ThroughDevice] {
        let machine = Machine::new(2);
        machine.inject(1, Fault::AsyncError(2));
        let results = run(&machine, 2, (patient(), memory), |rank| {
            let group = rank.world.group().unwrap();
            let call = || match memory {
                HostMemory::ByHost => once(&rank, &group),
                HostMemory::ThroughDevice => group.all_reduce(&mut [1.0_f32], ReduceOp::Sum),
            };
            (0..2).for_each(|_| call().unwrap());
            timed(call)
        });
        assert_told(results, 1, "unhandled system error", AT_ONCE);
        assert_clean(&machine);
    }
}

#[test]
fn what_never_completes_ends_at_the_deadline() {
    for memory in [HostMemory::ByHost, HostMemory::ThroughDevice] {
        let machine = Machine::new(2);
        machine.inject(0, Fault::Hangs(1));
        let results = run(&machine, 2, (hasty(600), memory), |rank| {
            let group = rank.world.group().unwrap();
            let call = || match memory {
                HostMemory::ByHost => once(&rank, &group),
                HostMemory::ThroughDevice => group.all_reduce(&mut [1.0_f32], ReduceOp::Sum),
            };
            call().unwrap();
            let first = timed(call);
            let error = call().unwrap_err();
            assert_eq!(Some(error.to_string()), first.0.as_ref().err().map(ToString::to_string), "the cause stays");
            first
        });
        for (result, took) in results {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            assert!(took >= Duration::from_millis(400) && took < AT_ONCE, "{took:?}");
            if memory == HostMemory::ByHost {
                assert!(error.to_string().contains("does not complete on the device"), "{error}");
            }
        }
        assert_clean(&machine);
    }
}

/// The rank dies before the launch: the exchange between the hosts finds out, and nothing is launched.
#[test]
fn a_rank_that_dies_before_the_launch_is_named() {
    let machine = Machine::new(3);
    let results = on_devices(&machine, 3, patient(), |rank| {
        let group = rank.world.group().unwrap();
        if rank.rank() == 2 {
            thread::sleep(Duration::from_millis(100));
            rank.membership.peer_lost(2, "killed by signal 9");
            return timed(|| rank.world.check());
        }
        timed(|| once(&rank, &group))
    });
    assert_told(results, 2, "killed by signal 9", AT_ONCE);
    assert_eq!(machine.launched(0) + machine.launched(1), 0);
    assert_clean(&machine);
}

/// The rank dies after the launch: the work on the devices that waits for it is aborted.
#[test]
fn a_rank_that_dies_after_the_launch_is_named() {
    for memory in [HostMemory::ByHost, HostMemory::ThroughDevice] {
        let machine = Machine::new(2);
        machine.inject(1, Fault::Hangs(1));
        let results = run(&machine, 2, (patient(), memory), |rank| {
            let group = rank.world.group().unwrap();
            let call = || match memory {
                HostMemory::ByHost => once(&rank, &group),
                HostMemory::ThroughDevice => group.all_reduce(&mut [1.0_f32], ReduceOp::Sum),
            };
            call().unwrap();
            thread::scope(|scope| {
                if rank.rank() == 1 {
                    scope.spawn(|| {
                        soon("no launch", || rank.machine.launched(0) == 2);
                        rank.membership.peer_lost(1, "killed by signal 9");
                    });
                }
                timed(call)
            })
        });
        assert_told(results, 1, "killed by signal 9", AT_ONCE);
        assert_clean(&machine);
    }
}

/// NCCL launches on a thread of its own, which uses the stream until an abort has ended it.
#[test]
fn a_launch_that_is_given_up_keeps_its_stream() {
    let machine = Machine::new(1);
    {
        let (driver, nccl) = (machine.driver(), machine.nccl());
        let device = Device::new(&driver, 0).unwrap();
        let (stream, buffer) = (device.stream().unwrap(), device.alloc(16).unwrap());
        let (id, alive) = (nccl.unique_id().unwrap(), || Ok(()));
        let mut communicator = Communicator::init((&nccl, &device), id, (0, 1), false, &alive).unwrap();
        let failed = || Err(Error::Environment { message: "the world failed".to_owned() });
        // SAFETY: the buffer is dropped when the communicator has been closed.
        let region = unsafe { buffer.region() };
        let sum = (DType::F32, NcclOp::Builtin(ReduceOp::Sum));
        let error = communicator.all_reduce(&stream, &[(region, region)], sum, &failed).unwrap_err();
        assert_eq!(error.to_string(), "the world failed");
        let again = communicator.all_reduce(&device.stream().unwrap(), &[(region, region)], sum, &alive).unwrap_err();
        assert_eq!(again.to_string(), "an earlier call of the communicator failed");
        drop(stream);
        drop(communicator);
        soon("the communicator is left", || machine.communicators() == 0);
    }
    assert_clean(&machine);
}

/// So are the copies of host memory that it works on.
#[test]
fn a_launch_that_hangs_keeps_its_memory_until_the_abort() {
    let machine = Machine::new(2);
    machine.inject(0, Fault::LaunchHangs(1));
    let results = run(&machine, 2, (hasty(600), HostMemory::ThroughDevice), |rank| {
        let group = rank.world.group().unwrap();
        group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
        timed(|| group.all_reduce(&mut [1.0_f32], ReduceOp::Sum))
    });
    for (result, took) in results {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(took < AT_ONCE, "{took:?}");
    }
    assert_clean(&machine);
}

#[test]
fn a_panic_ends_what_is_on_the_device() {
    let machine = Machine::new(2);
    machine.inject(0, Fault::Hangs(0));
    let results = on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        if rank.rank() == 0 {
            let launch_and_panic = || {
                let buffer = rank.room(16);
                let group = group;
                all_reduce(&group, &mut place(0, &[&buffer], None), 16, ReduceOp::Max).unwrap();
                panic!("meant to panic");
            };
            let panicked: thread::Result<()> = std::panic::catch_unwind(std::panic::AssertUnwindSafe(launch_and_panic));
            assert!(panicked.is_err());
            return None;
        }
        Some(once(&rank, &group).unwrap_err())
    });
    let error = results.into_iter().flatten().next().unwrap();
    assert!(error.rank() == Some(0) && error.to_string().contains("meant to panic"), "{error}");
    assert_clean(&machine);
}

/// Groups, worlds and reductions are dropped in any order, with work under way, and no drop waits.
#[test]
fn what_is_under_way_may_be_dropped_in_any_order() {
    for order in 0..6 {
        let machine = Machine::new(2);
        on_devices(&machine, 2, patient(), |rank| {
            let group = rank.world.group().unwrap();
            let other = rank.world.group().unwrap();
            let buffer = rank.room(16);
            all_reduce(&other, &mut place(rank.rank(), &[&buffer], None), 16, ReduceOp::Max).unwrap();
            let ready = rank.compute(&buffer, vec![1.0; 16], Duration::from_millis(800));
            let mut place = place(rank.rank(), &[&buffer], Some(ready));
            all_reduce(&group, &mut place, 16, ReduceOp::Sum).unwrap();
            let done = place.done().unwrap().clone();
            let world = rank.world.clone();
            let start = Instant::now();
            let mut parts: Vec<Option<Box<dyn std::any::Any>>> =
                vec![Some(Box::new(group)), Some(Box::new(other)), Some(Box::new(place)), Some(Box::new(world))];
            for nth in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1], [3, 0, 1, 2], [0, 3, 2, 1]][order] {
                parts[nth] = None;
            }
            assert!(start.elapsed() < Duration::from_millis(700), "a drop waited: {:?}", start.elapsed());
            // The enqueued work is still done, so the memory has to be there until then.
            assert_eq!(rank.result(&buffer, Some(&done)), [2.0; 16]);
        });
        assert_clean(&machine);
    }
}

/// The same with work that never completes.
#[test]
fn what_hangs_may_be_dropped() {
    let machine = Machine::new(2);
    machine.inject(0, Fault::Hangs(0));
    on_devices(&machine, 2, hasty(2000), |rank| {
        let group = rank.world.group().unwrap();
        let buffer = rank.room(16);
        let mut place = place(rank.rank(), &[&buffer], None);
        all_reduce(&group, &mut place, 16, ReduceOp::Sum).unwrap();
        let done = place.done().unwrap().clone();
        let start = Instant::now();
        drop((group, place));
        assert!(start.elapsed() < Duration::from_millis(1500), "a drop waited: {:?}", start.elapsed());
        soon("not aborted", || done.is_done().unwrap());
        assert!(matches!(rank.world.check(), Err(Error::Timeout { .. })));
    });
    assert_clean(&machine);
}
