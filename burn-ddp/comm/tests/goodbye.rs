//! Ranks leave in any order without being reported as lost, and leave no thread or socket behind.

mod common;

use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, ReduceOp, World};
use common::{options, world};

fn pick(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) % below
}

/// A rank that runs collectives, waits for a while and leaves. Returns the error of its world when it leaves, if any.
fn rank_main(world: World, mut state: u64) -> Result<(), Error> {
    let group = world.group()?;
    let mut x = vec![1.0_f32; 1 << pick(&mut state, 16)];
    x.resize(1000, 1.0);
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    let linger = Instant::now() + Duration::from_micros(pick(&mut state, 3000));
    while Instant::now() < linger {
        world.check()?;
        std::thread::sleep(Duration::from_micros(50));
    }
    world.check()
}

#[test]
fn two_hundred_worlds_end_without_a_death() {
    let before = open_files();
    for seed in 0..200 {
        let n = 2 + seed as usize % 3;
        std::thread::scope(|s| {
            for world in world(n, &options()) {
                s.spawn(move || {
                    let rank = world.rank();
                    rank_main(world, seed * 16 + rank as u64)
                        .unwrap_or_else(|e| panic!("world {seed}, rank {rank}: {e}"));
                });
            }
        });
    }
    // All ranks have left, so the monitor threads end at once and close their sockets.
    let begin = Instant::now();
    while open_files() > before && begin.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(open_files() <= before, "{} files were open before, {} are now", before, open_files());
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
