//! Worlds for the suite: ranks as threads over each engine, also on machines of several layouts.

use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{EngineChoice, Error, JobKey, LaunchEnv, Meeting, ProcessGroup, StoreServer, World, WorldOptions};

/// Makes the ranks of a world, in rank order.
pub type Make = fn(usize, WorldOptions) -> Vec<World>;

/// Ranks that meet and talk over TCP, though they live in one process.
pub fn over_tcp(n: usize, options: WorldOptions) -> Vec<World> {
    joined(n, WorldOptions { engine: Some(EngineChoice::Tcp), ..options })
}

/// Ranks that meet over TCP and talk through shared memory, each with a mapping of its own, though they live in one
/// process.
pub fn over_shm(n: usize, options: WorldOptions) -> Vec<World> {
    joined(n, WorldOptions { engine: Some(EngineChoice::Shm), ..options })
}

/// Ranks on two machines, in blocks, though they live in one process.
pub fn on_two_machines(n: usize, options: WorldOptions) -> Vec<World> {
    placed(n, options, |rank, n| rank * 2 / n)
}

/// Ranks dealt out to two machines.
pub fn on_machines_in_turn(n: usize, options: WorldOptions) -> Vec<World> {
    placed(n, options, |rank, _| rank % 2)
}

/// The first rank alone, the others on one machine.
pub fn on_machines_of_one_and_many(n: usize, options: WorldOptions) -> Vec<World> {
    placed(n, options, |rank, _| usize::from(rank > 0))
}

/// Ranks on machines of three.
pub fn on_machines_of_three(n: usize, options: WorldOptions) -> Vec<World> {
    placed(n, options, |rank, _| rank / 3)
}

fn joined(n: usize, options: WorldOptions) -> Vec<World> {
    placed(n, options, |_, _| 0)
}

fn placed(n: usize, options: WorldOptions, machine: fn(usize, usize) -> usize) -> Vec<World> {
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::trusting_network("conformance", 0)).expect("a store");
    let port = store.local_addr().port();
    thread::scope(|scope| {
        let join = |rank| {
            let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port };
            let machine = Some(machine(rank, n).to_string());
            let env = LaunchEnv { trust_network: true, machine, ..LaunchEnv::new(rank, n, meeting, "conformance") };
            World::join(&env, WorldOptions { join_timeout: patient().join_timeout, ..options.clone() })
                .expect("a world")
        };
        let joining: Vec<_> = (0..n).map(|rank| scope.spawn(move || join(rank))).collect();
        joining.into_iter().map(|rank| rank.join().expect("a rank that joins")).collect()
    })
}

/// The sizes of worlds.
pub const WORLDS: [usize; 5] = [1, 2, 3, 4, 7];

/// Long enough never to pass in a test that goes well.
pub fn patient() -> WorldOptions {
    WorldOptions { timeout: Duration::from_secs(60), join_timeout: Duration::from_secs(60), ..WorldOptions::default() }
}

/// Time limit of operations that must be immediate, so that none of them ends by a deadline.
pub const AT_ONCE: Duration = Duration::from_secs(10);

/// Runs `rank_main` on `n` ranks, each of which owns its world; yields how they ended, in rank order.
pub fn outcomes<R: Send>(
    make: Make,
    n: usize,
    options: WorldOptions,
    rank_main: impl Fn(World) -> R + Sync,
) -> Vec<thread::Result<R>> {
    thread::scope(|scope| {
        let rank_main = &rank_main;
        let ranks: Vec<_> = make(n, options).into_iter().map(|world| scope.spawn(move || rank_main(world))).collect();
        ranks.into_iter().map(|rank| rank.join()).collect()
    })
}

/// Runs ranks that do not panic.
pub fn ranks<R: Send>(make: Make, n: usize, rank_main: impl Fn(World) -> R + Sync) -> Vec<R> {
    outcomes(make, n, patient(), rank_main).into_iter().map(|rank| rank.expect("a rank panicked")).collect()
}

/// Runs ranks, each with a group, that begin when all have made theirs, so that no rank's actions meet another rank
/// that still makes its group.
pub fn lined_up<R: Send>(
    make: Make,
    n: usize,
    options: WorldOptions,
    rank_main: impl Fn(World, ProcessGroup) -> R + Sync,
) -> Vec<thread::Result<R>> {
    let start = Together::new(n);
    outcomes(make, n, options, |world| {
        let group = world.group().expect("a group");
        start.wait();
        rank_main(world, group)
    })
}

/// [`lined_up`] ranks that do not panic.
pub fn members<R: Send>(make: Make, n: usize, rank_main: impl Fn(World, ProcessGroup) -> R + Sync) -> Vec<R> {
    lined_up(make, n, patient(), rank_main).into_iter().map(|rank| rank.expect("a rank panicked")).collect()
}

/// [`members`] that need only the group, not the world.
pub fn groups<R: Send>(make: Make, n: usize, rank_main: impl Fn(&ProcessGroup) -> R + Sync) -> Vec<R> {
    members(make, n, |_, group| rank_main(&group))
}

/// Runs `f` and fails if it takes longer than [`AT_ONCE`].
pub fn at_once<R>(f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    assert!(start.elapsed() < AT_ONCE, "took {:?}", start.elapsed());
    result
}

/// Waits until the rank has learned what ended its world; its calls before that could still meet calls of its peers.
pub fn until_ended(world: &World) {
    let start = Instant::now();
    while world.check().is_ok() {
        assert!(start.elapsed() < AT_ONCE, "the world goes on");
        thread::yield_now();
    }
}

/// The error of `result`, which must not be one that leaves the group usable.
pub fn fatal<R: std::fmt::Debug>(result: Result<R, Error>) -> Error {
    let error = result.expect_err("an error");
    assert!(!error.group_usable(), "{error}");
    error
}

/// The error of `result`, which must leave the group usable.
pub fn refused<R: std::fmt::Debug>(result: Result<R, Error>) -> Error {
    let error = result.expect_err("a refusal");
    assert!(error.group_usable(), "{error}");
    error
}

/// Like `std::sync::Barrier`, for once, and with a deadline: a test that fails must not hang.
pub struct Together {
    missing: Mutex<usize>,
    changed: Condvar,
}

impl Together {
    pub fn new(n: usize) -> Together {
        Together { missing: Mutex::new(n), changed: Condvar::new() }
    }

    pub fn wait(&self) {
        let mut missing = self.missing.lock().unwrap();
        *missing -= 1;
        self.changed.notify_all();
        let (missing, _) = self.changed.wait_timeout_while(missing, AT_ONCE, |missing| *missing > 0).unwrap();
        assert_eq!(*missing, 0, "ranks that did not get here");
    }
}
