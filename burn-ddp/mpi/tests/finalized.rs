//! A program that initialises MPI itself, and finalizes it while groups still need it.

use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, ReduceOp, World, WorldOptions};
use mpi::Threading;

#[test]
fn calls_after_mpi_finalize_are_errors() {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).expect("MPI is not initialised yet");
    let worlds = World::threads(2, WorldOptions::default());
    burn_ddp_mpi::attach_threads(&worlds).expect("MPI");
    let groups = on_all(&worlds, |world| {
        let group = world.group().unwrap();
        let mut x = [1.0_f32];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [2.0]);
        group
    });
    // Calls MPI_Finalize.
    drop(universe);

    let start = Instant::now();
    for error in on_all(&groups, |group| group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err()) {
        assert!(matches!(error, Error::PeerFailed { .. }) && !error.group_usable(), "{error}");
        assert!(error.to_string().contains("MPI_Finalize was called in this rank's process"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // Dropping cancels messages and frees the communicator, if MPI can still be called.
    drop((groups, worlds));
    let error = burn_ddp_mpi::attach_threads(&World::threads(2, WorldOptions::default())).unwrap_err();
    assert!(matches!(error, Error::Environment { .. }) && error.to_string().contains("MPI_Finalize"), "{error}");
}

/// Runs `work` for all ranks at the same time, each on a thread of its own.
fn on_all<T: Sync, R: Send>(ranks: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || work(rank))).collect();
        running.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}
