//! What is particular to ranks that talk over TCP.

mod common;

use std::time::{Duration, Instant};

use burn_ddp_comm::{Element, LaunchEnv, ProcessGroup, ReduceOp, World, WorldOptions};
use common::{join_all, launcher_store, on_tcp, on_world, options, rank_at, world};

/// Numbers whose sum depends on the order of the additions.
fn ragged(rank: usize, len: usize) -> Vec<f32> {
    let mut state = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / 1e4 - 800.0
    };
    (0..len).map(|_| next().powi(3)).collect()
}

/// The bytes that collectives leave on a rank.
fn results(group: &ProcessGroup, len: usize) -> Vec<u8> {
    fn bytes<T: Element + bytemuck::NoUninit>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }
    let rank = group.rank();
    let input = ragged(rank, len);
    let mut all = Vec::new();
    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product, ReduceOp::Min] {
        let mut x = input.clone();
        group.all_reduce(&mut x, op).unwrap();
        all.extend(bytes(&x));
    }
    let mut halves: Vec<half::bf16> = input.iter().map(|x| half::bf16::from_f32(*x)).collect();
    group.all_reduce(&mut halves, ReduceOp::Mean).unwrap();
    all.extend(bytes(&halves));
    let mut weighted = input.clone();
    group.all_reduce_weighted(&mut weighted, rank as f64 + 0.1).unwrap();
    all.extend(bytes(&weighted));
    let wide: Vec<f32> = (0..group.world_size()).flat_map(|_| input.iter().copied()).collect();
    let mut row = vec![0.0_f32; len];
    group.reduce_scatter(&wide, &mut row, ReduceOp::Sum).unwrap();
    all.extend(bytes(&row));
    all.extend(bytes(&group.all_gather(&input).unwrap()));
    all
}

#[test]
fn the_bits_are_those_of_ranks_in_one_process() {
    for n in [2, 3, 5] {
        for len in [1, 1000, 100_003] {
            let over_tcp = on_tcp(n, |world| results(&world.group().unwrap(), len));
            let in_process = World::spawn(n, |world| results(&world.group().unwrap(), len));
            assert!(over_tcp == in_process, "{n} ranks, {len} elements");
        }
    }
}

#[test]
fn encrypted_data_have_the_same_bits() {
    let encrypted = WorldOptions { encrypt_data: true, ..options() };
    for n in [2, 3] {
        for len in [1, 1000, 100_003] {
            let over_tcp = on_world(world(n, &encrypted), |world| results(&world.group().unwrap(), len));
            let in_process = World::spawn(n, |world| results(&world.group().unwrap(), len));
            assert!(over_tcp == in_process, "{n} ranks, {len} elements");
        }
    }
}

/// A world of one rank on each of `n` machines.
fn apart(n: usize, options: &WorldOptions) -> Vec<World> {
    let store = launcher_store();
    let env = |rank: usize| LaunchEnv { machine: Some(rank.to_string()), ..rank_at(&store, rank, n) };
    join_all((0..n).map(env).collect(), options).into_iter().map(|world| world.unwrap()).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn any_number_of_flows_has_the_same_bits() {
    for (n, len) in [(2, 1), (2, 1000), (2, 300_007), (3, 100_003)] {
        let in_process = World::spawn(n, |world| results(&world.group().unwrap(), len));
        for (flows, encrypt_data) in [(1, false), (3, true), (8, false)] {
            let options = WorldOptions { flows, encrypt_data, ..options() };
            let over_tcp = on_world(apart(n, &options), |world| results(&world.group().unwrap(), len));
            assert!(over_tcp == in_process, "{n} ranks, {len} elements, {flows} flows, encrypted: {encrypt_data}");
        }
    }
}

/// Errors of two ranks whose options differ.
fn disagreement(options: [WorldOptions; 2]) -> Vec<String> {
    let store = launcher_store();
    std::thread::scope(|s| {
        let join = |(rank, options): (usize, WorldOptions)| {
            let env = rank_at(&store, rank, 2);
            s.spawn(move || World::join(&env, options).unwrap_err().to_string())
        };
        let ranks: Vec<_> = options.into_iter().enumerate().map(join).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_that_disagree_about_encryption_or_flows_say_so() {
    let encryption = [false, true].map(|encrypt_data| WorldOptions { encrypt_data, ..options() });
    let flows = [1, 3].map(|flows| WorldOptions { flows, ..options() });
    for (options, parts) in [
        (encryption, ["disagree about encryption of data (BURN_DDP_ENCRYPT)", "has none", "has data"]),
        (flows, ["disagree about flows between two ranks (BURN_DDP_FLOWS)", "has 1", "has 3"]),
    ] {
        for error in disagreement(options) {
            for part in parts {
                assert!(error.contains(part), "{error}");
            }
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn waiting_costs_no_processor_time() {
    /// Hundredths of a second that this thread has used.
    fn ticks() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, after_name) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
    on_tcp(2, |world| {
        let group = world.group().unwrap();
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
            return group.barrier().unwrap();
        }
        let (begin, used) = (Instant::now(), ticks());
        group.barrier().unwrap();
        assert!(begin.elapsed() > Duration::from_millis(300), "{:?}", begin.elapsed());
        let used = ticks() - used;
        assert!(used <= 5, "{used} hundredths of a second of processor time to wait half a second");
    });
}

#[test]
fn groups_made_while_others_are_busy_do_not_wait() {
    on_tcp(2, |world| {
        let first = world.group().unwrap();
        std::thread::scope(|s| {
            // Rank 0 is in this collective during all that follows.
            let pending = (world.rank() == 0).then(|| s.spawn(|| first.barrier()));
            for _ in 0..20 {
                world.group().unwrap().barrier().unwrap();
            }
            match pending {
                Some(pending) => pending.join().unwrap().unwrap(),
                None => first.barrier().unwrap(),
            }
        });
    });
}

/// Number of connections of this process on which the kernel sends probes while they are idle.
#[cfg(target_os = "linux")]
fn probed_connections() -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let mine: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| Some(std::fs::read_link(fd.ok()?.path()).ok()?.to_string_lossy().into_owned()))
        .collect();
    let probed = |line: &&str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        const ESTABLISHED: &str = "01";
        const KEEP_ALIVE: &str = "02:";
        columns[3] == ESTABLISHED
            && columns[5].starts_with(KEEP_ALIVE)
            && mine.contains(&format!("socket:[{}]", columns[9]))
    };
    table.lines().skip(1).filter(probed).count()
}

/// Without probes, a router that forgets idle connections would cut a group that is used once an hour.
#[test]
#[cfg(target_os = "linux")]
fn idle_groups_are_probed() {
    let n = 5;
    let groups: Vec<_> = common::on_tcp(n, |world| {
        let groups: Vec<_> = (0..20).map(|_| world.group().unwrap()).collect();
        (world, groups)
    });
    // The other tests of this process add only a few such connections.
    let begin = std::time::Instant::now();
    while probed_connections() < 20 * n * (n - 1) && begin.elapsed() < common::PATIENCE {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(probed_connections() >= 20 * n * (n - 1), "{}", probed_connections());
    drop(groups);
}
