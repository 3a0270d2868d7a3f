//! A rank that leaves while its groups are open: its peers notice at once, and still receive all data that it sent
//! before. Groups that are closed leave no open file behind.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::engine::{Engine, Fabric, HostEngine, Incoming, Outgoing, Transport};
use burn_ddp_comm::{Call, Error, ReduceOp, Result, World, WorldOptions};
use common::{PATIENCE, on_world, options, placed, world};
#[cfg(target_os = "linux")]
use common::{Process, launcher_store, rank_at, role, say};

/// Half of the deadline of a call.
const AT_ONCE: Duration = Duration::from_secs(30);

/// The last rank leaves and holds its group, while the others wait for it or soon will.
fn one_leaves(worlds: Vec<World>) {
    let last = worlds.len() - 1;
    let left = OnceLock::new();
    let others_done = Barrier::new(last + 1);
    on_world(worlds, |world| {
        let group = world.group().unwrap();
        let mut x = vec![1.0_f32; 100_000];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        if world.rank() == last {
            // Most of the others are in their calls by then; the rest notice when they begin theirs.
            thread::sleep(Duration::from_millis(100));
            left.set(Instant::now()).unwrap();
            world.leave();
        } else {
            let error = group.all_reduce(&mut x, ReduceOp::Sum).unwrap_err();
            assert!(matches!(&error, Error::PeerLeft { peer, .. } if peer.rank == last), "{error}");
            let took = left.get().unwrap().elapsed();
            assert!(took < AT_ONCE, "{took:?}");
        }
        others_done.wait();
        drop(group);
    });
}

#[test]
fn a_rank_that_leaves_with_its_group_open_is_named_at_once() {
    one_leaves(world(3, &options()));
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_leaves_with_its_group_open_is_named_at_once_between_machines() {
    one_leaves(placed(&[0, 0, 1, 1], &options()));
    one_leaves(placed(&[0, 0, 1], &options()));
}

/// Rank 0 leaves while the others make a group with it, or before that.
#[test]
fn a_rank_that_leaves_instead_of_making_a_group_is_named_at_once() {
    for leaves_first in [false, true] {
        let [left, others_done] = [(); 2].map(|()| Barrier::new(3));
        on_world(world(3, &options()), |world| {
            let first = world.group().unwrap();
            if world.rank() == 0 {
                // The others have connected for the group by then.
                thread::sleep(Duration::from_millis(if leaves_first { 0 } else { 300 }));
                world.leave();
                if leaves_first {
                    left.wait();
                }
            } else {
                if leaves_first {
                    left.wait();
                }
                let began = Instant::now();
                let error = world.group().unwrap_err();
                assert!(matches!(&error, Error::PeerLeft { peer, .. } if peer.rank == 0), "{error}");
                assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
            }
            others_done.wait();
            drop(first);
        });
    }
}

/// A rank leaves while another of its threads waits for a peer, which then fails.
fn call_under_way(worlds: Vec<World>) {
    let ended = Barrier::new(2);
    on_world(worlds, |world| {
        let group = world.group().unwrap();
        if world.rank() == 0 {
            thread::scope(|scope| {
                let call = scope.spawn(|| group.recv(&mut [0_u8], 1).unwrap_err());
                // Time for that thread to enter its call.
                thread::sleep(Duration::from_millis(100));
                world.leave();
                let begin = Instant::now();
                let error = call.join().unwrap();
                assert_eq!(error.rank(), Some(1), "{error}");
                assert!(error.to_string().contains("disk full"), "{error}");
                assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
            });
        } else {
            thread::sleep(Duration::from_millis(300));
            world.fail("disk full");
        }
        ended.wait();
    });
}

#[test]
fn a_call_under_way_when_its_rank_leaves_ends_with_the_world() {
    call_under_way(world(2, &options()));
    call_under_way(World::threads(2, options()));
}

#[cfg(target_os = "linux")]
#[test]
fn a_call_under_way_when_its_rank_leaves_ends_with_the_world_between_machines_and_in_shared_memory() {
    call_under_way(placed(&[0, 1], &options()));
    call_under_way(placed(&[0, 0], &options()));
}

/// Data that a rank sent before it left arrive, even if the receiver asks for them after it left.
#[test]
fn what_was_sent_before_the_goodbye_arrives() {
    let bytes = vec![7_u8; 8 << 20];
    on_world(world(2, &options()), |world| {
        let group = world.group().unwrap();
        if world.rank() == 1 {
            group.send(&bytes, 0).unwrap();
            world.leave();
        } else {
            thread::sleep(Duration::from_millis(50));
            let mut got = vec![0; bytes.len()];
            group.recv(&mut got, 1).unwrap();
            assert!(got == bytes);
        }
    });
}

/// An engine that is in a call until it is released, and counts how often it was closed.
struct Held {
    entered: Sender<()>,
    release: Receiver<()>,
    closed: Arc<AtomicUsize>,
}

impl Transport for Held {
    fn name(&self) -> &'static str {
        "held"
    }

    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn exchange(&mut self, _: &Call, _: &[Outgoing<'_>], _: &mut [Incoming<'_>]) -> Result<()> {
        self.entered.send(()).unwrap();
        self.release.recv_timeout(PATIENCE).unwrap();
        assert_eq!(self.closed.load(Ordering::SeqCst), 0, "closed in a call");
        Ok(())
    }

    fn leave(&mut self) {
        self.closed.fetch_add(1, Ordering::SeqCst);
    }
}

/// A fabric that hands out its only engine.
struct Once(Mutex<Option<Held>>);

impl Fabric for Once {
    fn name(&self) -> &'static str {
        "held"
    }

    fn open(&self, _: &Call) -> Result<Box<dyn Engine>> {
        Ok(Box::new(HostEngine::new(self.0.lock().unwrap().take().unwrap())))
    }
}

#[test]
fn a_group_in_a_call_closes_after_it() {
    let world = World::solo(WorldOptions::default());
    let ((entered, has_entered), (free, release)) = (channel(), channel());
    let closed = Arc::new(AtomicUsize::new(0));
    let held = Held { entered, release, closed: closed.clone() };
    world.set_fabric(|_, _| Ok::<Arc<dyn Fabric>, Error>(Arc::new(Once(Some(held).into())))).unwrap();
    free.send(()).unwrap();
    let group = world.group().unwrap();
    has_entered.recv_timeout(PATIENCE).unwrap();
    thread::scope(|scope| {
        let call = scope.spawn(|| group.barrier());
        has_entered.recv_timeout(PATIENCE).unwrap();
        // Does not wait for the call of the other thread.
        world.leave();
        free.send(()).unwrap();
        call.join().unwrap().unwrap();
    });
    let begin = Instant::now();
    while closed.load(Ordering::SeqCst) == 0 {
        assert!(begin.elapsed() < PATIENCE, "never closed");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(group.barrier().is_err());
    drop(group);
    assert_eq!(closed.load(Ordering::SeqCst), 1);
}

/// Opens and closes `count` groups of two ranks over each engine, in a process of their own. All groups connect.
#[cfg(target_os = "linux")]
fn groups_close(test: &str, count: usize) {
    if role().is_none() {
        let mut child = Process::start(test, "all ranks", &rank_at(&launcher_store(), 0, 1));
        assert_eq!(child.hear(), "fine");
        return;
    }
    // One rank's failed assertion ends both.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::exit(1);
    }));
    let in_turn = Barrier::new(2);
    let use_it = |group: burn_ddp_comm::ProcessGroup| group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
    for worlds in [world(2, &options()), placed(&[0, 0], &options()), placed(&[0, 1], &options())] {
        on_world(worlds, |world| {
            let group = world.group().unwrap();
            let mut open = Vec::new();
            for round in 0..=count {
                match round % 4 {
                    0 => use_it(group.split(Some(0), -(world.rank() as i64)).unwrap().unwrap()),
                    _ => use_it(world.group().unwrap()),
                }
                if round == 0 || round == count {
                    in_turn.wait();
                    // By then the monitors have accepted all connections, and dropped those for closed groups.
                    group.barrier().unwrap();
                    in_turn.wait();
                    open.push(std::fs::read_dir("/proc/self/fd").unwrap().count());
                    in_turn.wait();
                }
            }
            // One more is allowed: the other rank of this process has the directory open to count, too.
            assert!(open[1] <= open[0] + 1, "{open:?} open files, in {}", world.engine());
        });
    }
    say("fine");
}

#[cfg(target_os = "linux")]
#[test]
fn three_hundred_groups_leave_no_open_files() {
    groups_close("three_hundred_groups_leave_no_open_files", 300);
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "takes a minute"]
fn ten_thousand_groups_leave_no_open_files() {
    groups_close("ten_thousand_groups_leave_no_open_files", 10_000);
}
