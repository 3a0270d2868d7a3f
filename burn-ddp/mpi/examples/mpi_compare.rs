//! All-reduce over the mpi engine next to `MPI_Allreduce` of the same MPI, by turns on the same ranks.
//!
//! ```text
//! MPICC=mpicc.mpich cargo build --release -p burn-ddp-mpi --example mpi_compare
//! mpirun.mpich -n 4 target/release/examples/mpi_compare
//! ```
//!
//! Each time is that of the slowest rank, from a common start. The last column is the ratio of the medians.

use std::time::{Duration, Instant};

use burn_ddp_comm::{ProcessGroup, ReduceOp, World, WorldOptions};
use mpi::collective::SystemOperation;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};

/// Bytes of an all-reduce, and number of its rounds.
const SIZES: [(usize, usize); 4] = [(8, 400), (64 << 10, 200), (1 << 20, 60), (16 << 20, 15)];

fn main() -> Result<(), burn_ddp_comm::Error> {
    let env = burn_ddp_mpi::detect()?
        .ok_or_else(|| burn_ddp_comm::Error::Environment { message: "start it by mpirun -n 4".to_owned() })?;
    let world = World::join(&env, WorldOptions::from_env()?)?;
    burn_ddp_mpi::attach(&world)?;
    let group = world.group()?;
    let native = SimpleCommunicator::world();
    if world.rank() == 0 {
        println!("{} ranks, {}", world.world_size(), mpi::environment::library_version().unwrap_or_default().trim());
        println!("{:>10} {:>12} {:>16} {:>8}", "bytes", "engine µs", "MPI_Allreduce µs", "ratio");
    }
    for (bytes, rounds) in SIZES {
        let input = vec![1.0 + world.rank() as f32; bytes / 4];
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let mut sums = vec![0.0_f32; input.len()];
        for round in 0..rounds + 5 {
            let mut x = input.clone();
            let time = slowest(&group, || group.all_reduce(&mut x, ReduceOp::Sum))?;
            let native_time = slowest(&group, || {
                native.all_reduce_into(&input[..], &mut sums[..], SystemOperation::sum());
                Ok(())
            })?;
            assert_eq!(x, sums);
            if round >= 5 {
                ours.push(time);
                theirs.push(native_time);
            }
        }
        let (ours, theirs) = (median(ours), median(theirs));
        if world.rank() == 0 {
            println!("{bytes:>10} {ours:>12.1} {theirs:>16.1} {:>8.2}", ours / theirs);
        }
    }
    assert_eq!(native.size() as usize, world.world_size());
    group.barrier()
}

/// The time that the slowest rank takes for `f`.
fn slowest(
    group: &ProcessGroup,
    f: impl FnOnce() -> Result<(), burn_ddp_comm::Error>,
) -> Result<Duration, burn_ddp_comm::Error> {
    group.barrier()?;
    let start = Instant::now();
    f()?;
    let mut seconds = [start.elapsed().as_secs_f64()];
    group.all_reduce(&mut seconds, ReduceOp::Max)?;
    Ok(Duration::from_secs_f64(seconds[0]))
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}
