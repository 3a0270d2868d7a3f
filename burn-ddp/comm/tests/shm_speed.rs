//! What the shm engine costs, next to what the hardware does. Run by hand:
//! `cargo test --release -p burn-ddp-comm --test shm_speed -- --ignored --nocapture`.

mod common;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn_ddp_comm::{DType, EngineChoice, ProcessGroup, ReduceOp, World, WorldOptions};
use common::{join_all, launcher_store, options, rank_at};

fn worlds(n: usize) -> Vec<World> {
    let store = launcher_store();
    let envs = (0..n).map(|rank| rank_at(&store, rank, n)).collect();
    let options = WorldOptions { engine: Some(EngineChoice::Shm), ..options() };
    join_all(envs, &options).into_iter().map(|world| world.unwrap()).collect()
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// Runs `body` on `n` ranks; what rank 0 yields.
fn on_ranks<R: Send>(n: usize, body: impl Fn(ProcessGroup) -> R + Sync) -> R {
    std::thread::scope(|s| {
        let body = &body;
        let ranks: Vec<_> = worlds(n).into_iter().map(|world| s.spawn(move || body(world.group().unwrap()))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>().swap_remove(0)
    })
}

/// Threads that meet without sleeping.
struct Meet {
    n: usize,
    came: AtomicUsize,
}

impl Meet {
    fn wait(&self) {
        let turn = self.came.fetch_add(1, Ordering::AcqRel) / self.n;
        while self.came.load(Ordering::Acquire) / self.n == turn {
            std::hint::spin_loop();
        }
    }
}

/// Two threads that each write a line and await the other's.
fn bare_exchange(rounds: u64) -> f64 {
    #[repr(align(128))]
    struct Line(AtomicU64);
    let lines = [Line(AtomicU64::new(0)), Line(AtomicU64::new(0))];
    let begin = Instant::now();
    std::thread::scope(|s| {
        for me in 0..2 {
            let lines = &lines;
            s.spawn(move || {
                for round in 1..=rounds {
                    lines[me].0.store(round, Ordering::Release);
                    while lines[1 - me].0.load(Ordering::Acquire) < round {}
                }
            });
        }
    });
    begin.elapsed().as_secs_f64() * 1e9 / rounds as f64
}

#[test]
#[ignore = "a measurement"]
fn small() {
    for n in [1, 2, 2, 2, 2, 2] {
        let bare = bare_exchange(300_000);
        let ours = on_ranks(n, |group| {
            let mut x = [1.0_f32, 2.0];
            const ROUNDS: u32 = 200_000;
            let begin = Instant::now();
            for _ in 0..ROUNDS {
                group.all_reduce(&mut x, ReduceOp::Max).unwrap();
            }
            begin.elapsed().as_secs_f64() * 1e9 / f64::from(ROUNDS)
        });
        println!("{n} ranks, 8 B: {ours:.0} ns, bare exchange {bare:.0} ns, ratio {:.2}", ours / bare);
    }
}

#[test]
#[ignore = "a measurement"]
fn large() {
    for mib in [1, 4, 16, 25, 64] {
        let (len, rounds) = (mib << 20, (1024 / mib).clamp(6, 40));
        let meet = Meet { n: 2, came: AtomicUsize::new(0) };
        let (copy, slice, arena) = on_ranks(2, |group| {
            let source = vec![1_u8; len];
            let mut target = vec![0_u8; len];
            let mut buf = vec![1.0_f32; len / 4];
            let mut shared = group.shared_buffers(&[len]).unwrap();
            shared[0].bytes_mut().fill(0);
            let (mut copies, mut slices, mut arenas) = (Vec::new(), Vec::new(), Vec::new());
            let timed = |times: &mut Vec<Duration>, f: &mut dyn FnMut()| {
                meet.wait();
                let begin = Instant::now();
                f();
                meet.wait();
                times.push(begin.elapsed());
            };
            for _ in 0..rounds {
                timed(&mut copies, &mut || target.copy_from_slice(&source));
                timed(&mut slices, &mut || group.all_reduce(&mut buf, ReduceOp::Max).unwrap());
                timed(&mut arenas, &mut || {
                    drop(group.all_reduce_shared(DType::F32, &mut shared[0], ReduceOp::Sum, 0).unwrap());
                });
            }
            (median(copies), median(slices), median(arenas))
        });
        println!(
            "{mib} MiB: memcpy {copy:.0} us, slices {slice:.0} us ({:.2}), arena {arena:.0} us ({:.2})",
            slice / copy,
            arena / copy
        );
    }
}

#[test]
#[ignore = "a measurement"]
fn oversubscribed() {
    for n in [4, 8] {
        for len in [2048, 4 << 20] {
            let rounds = if len > 10_000 { 20 } else { 2000 };
            let (median_us, p99) = on_ranks(n, |group| {
                let mut buf = vec![1.0_f32; len];
                let mut times = Vec::new();
                for _ in 0..rounds {
                    let begin = Instant::now();
                    group.all_reduce(&mut buf, ReduceOp::Max).unwrap();
                    times.push(begin.elapsed());
                }
                times.sort_unstable();
                (median(times.clone()), times[times.len() * 99 / 100].as_secs_f64() * 1e6)
            });
            println!("{n} ranks, {} KiB: median {median_us:.0} us, p99 {p99:.0} us", len / 256);
        }
    }
}
