//! Sixty-four ranks, as sixteen machines of four, on one host: they join, reduce and end. Prints what that takes.
#![cfg(target_os = "linux")]

mod common;

use std::time::Instant;

use burn_ddp_comm::{LaunchEnv, ReduceOp, World, WorldOptions};
use common::{Process, launcher_store, options, rank_at, role, say};

const RANKS: usize = 64;
const MACHINES: usize = 16;
const STEPS: usize = 20;

/// Number of sockets that this process has open.
fn sockets() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().map(|fd| std::fs::read_link(fd.unwrap().path()));
    links.filter(|link| link.as_ref().is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))).count()
}

/// Largest resident memory of this process so far, and the part of it now that no other process maps, in KiB.
fn memory_kib() -> [usize; 2] {
    let line = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
    };
    [line("/proc/self/status", "VmHWM:"), line("/proc/self/status", "RssAnon:")]
}

fn rank_main(env: &LaunchEnv) {
    let begin = Instant::now();
    let world = World::join(env, WorldOptions { engine: None, ..options() }).unwrap();
    let joined_ms = begin.elapsed().as_millis();
    let group = world.group().unwrap();
    assert_eq!(group.engine(), "shm+tcp");
    let opened_ms = begin.elapsed().as_millis();
    let mut times_us: Vec<u128> = (0..STEPS)
        .map(|step| {
            let mut x = vec![(step * world.rank()) as f32; 1000];
            let begin = Instant::now();
            group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x[999], (step * (RANKS * (RANKS - 1) / 2)) as f32);
            begin.elapsed().as_micros()
        })
        .collect();
    times_us.sort_unstable();
    let [peak, own] = memory_kib();
    say(&format!("{joined_ms} {opened_ms} {} {} {peak} {own}", times_us[STEPS / 2], sockets()));
}

#[test]
#[ignore = "64 processes: takes up to a minute"]
fn sixty_four_ranks_on_sixteen_machines() {
    if let Some((_, env)) = role() {
        return rank_main(&env);
    }
    let store = launcher_store();
    let start = |rank: usize| {
        let env = LaunchEnv { machine: Some((rank * MACHINES / RANKS).to_string()), ..rank_at(&store, rank, RANKS) };
        Process::start("sixty_four_ranks_on_sixteen_machines", "rank", &env)
    };
    let mut ranks: Vec<Process> = (0..RANKS).map(start).collect();
    let said: Vec<Vec<usize>> =
        ranks.iter_mut().map(|rank| rank.hear().split(' ').map(|number| number.parse().unwrap()).collect()).collect();
    let begin = Instant::now();
    ranks.iter_mut().for_each(|rank| assert!(rank.end().success()));
    println!("{RANKS} ranks on {MACHINES} machines; least and most of a rank:");
    let names = ["joined, ms", "group opened, ms", "all-reduce of 4 KB, us", "sockets", "peak KiB", "own KiB"];
    for (nth, name) in names.iter().enumerate() {
        let of_ranks = || said.iter().map(|said| said[nth]);
        println!("  {name}: {} to {}", of_ranks().min().unwrap(), of_ranks().max().unwrap());
    }
    println!("  last rank ended {} ms after it was done", begin.elapsed().as_millis());
}
