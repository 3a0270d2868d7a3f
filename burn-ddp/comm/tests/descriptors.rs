//! Real processes with a low limit of open files: all ranks get an error at once, which names the rank and the fix.
#![cfg(target_os = "linux")]

mod common;

use std::fs::File;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{JobKey, LaunchEnv, Result, Store, StoreClient, StoreServer, World};
use common::{JOB, Process, await_go, launcher_store, listening, options, rank_at, role, say};

/// Half of the deadline of joining and of calls.
const AT_ONCE: Duration = Duration::from_secs(30);

/// Starts the ranks of `test`, each after its `ulimit` command of the shell; an empty command sets no limit.
fn start(test: &str, limits: &[&str]) -> (StoreServer, Vec<Process>) {
    let store = launcher_store();
    let start = |(rank, limit): (usize, &&str)| start_limited(test, limit, &rank_at(&store, rank, limits.len()));
    let ranks: Vec<Process> = limits.iter().enumerate().map(start).collect();
    (store, ranks)
}

/// Starts a rank of `test` after a `ulimit` command of the shell.
fn start_limited(test: &str, limit: &str, env: &LaunchEnv) -> Process {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{limit}\nexec \"$0\" \"$@\"")]).arg(std::env::current_exe().unwrap());
    Process::start_by(shell, test, if limit.is_empty() { "rank" } else { "limited" }, env)
}

fn tell<R>(result: Result<R>) {
    match result {
        Ok(_) => say("fine"),
        Err(error) => say(&format!("{:?}: {error}", error.rank())),
    }
}

#[test]
fn a_rank_with_too_few_for_the_world_ends_the_joining_of_all_at_once() {
    const TEST: &str = "a_rank_with_too_few_for_the_world_ends_the_joining_of_all_at_once";
    if let Some((_, env)) = role() {
        return tell(World::join(&env, options()));
    }
    let begin = Instant::now();
    let (_store, mut ranks) = start(TEST, &["", "", "ulimit -n 16", ""]);
    for rank in &mut ranks {
        let said = rank.hear();
        assert!(said.starts_with("Some(2): rank 2 (host "), "{said}");
        assert!(said.contains("may have 16 open files") && said.contains("in a world of 4 ranks"), "{said}");
        assert!(said.contains("ulimit -Hn"), "{said}");
    }
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}

#[test]
fn a_rank_with_too_few_for_its_place_among_machines_says_how_many_it_needs() {
    const TEST: &str = "a_rank_with_too_few_for_its_place_among_machines_says_how_many_it_needs";
    if let Some((_, env)) = role() {
        return tell(World::join(&env, options()));
    }
    // Rank 0 is connected with rank 1, on its machine, and with each rank that is alone on another.
    let (store, limit) = (launcher_store(), "ulimit -n 22");
    let start = |rank: usize| {
        let machine = Some(rank.saturating_sub(1).to_string());
        let (local_rank, local_world_size) = if rank < 2 { (rank, 2) } else { (0, 1) };
        let env = LaunchEnv { machine, local_rank, local_world_size, ..rank_at(&store, rank, 12) };
        start_limited(TEST, if rank == 0 { limit } else { "" }, &env)
    };
    let mut ranks: Vec<Process> = (0..12).map(start).collect();
    for rank in &mut ranks {
        let said = rank.hear();
        assert!(said.starts_with("Some(0): rank 0 (host ") && said.contains("may have 22 open files"), "{said}");
        assert!(said.contains("in a world of 12 ranks") && said.contains("ulimit -Hn"), "{said}");
    }
}

#[test]
fn a_soft_limit_is_raised() {
    const TEST: &str = "a_soft_limit_is_raised";
    if let Some((_, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        return tell(world.group().and_then(|group| group.barrier()));
    }
    let (_store, mut ranks) = start(TEST, &["ulimit -S -n 10", "", "ulimit -S -n 10"]);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "fine");
    }
}

#[test]
fn idle_strangers_take_no_descriptors_that_a_group_needs() {
    const TEST: &str = "idle_strangers_take_no_descriptors_that_a_group_needs";
    if let Some((_, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
        say(&format!("{open} {}", listening()[0].port()));
        await_go();
        return tell(world.group().and_then(|group| group.barrier()));
    }
    let (_store, mut ranks) = start(TEST, &["ulimit -n 64", "ulimit -n 64"]);
    let mut idle = Vec::new();
    for rank in &mut ranks {
        let said = rank.hear();
        let (open, port) = said.split_once(' ').unwrap();
        let (open, port): (usize, u16) = (open.parse().unwrap(), port.parse().unwrap());
        // As many connections as the rank has descriptors left.
        idle.extend((open..64).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()));
    }
    // Time to accept as many of these connections as the limit allows.
    thread::sleep(Duration::from_millis(200));
    ranks.iter_mut().for_each(Process::go);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "fine");
    }
}

#[test]
fn a_rank_that_runs_out_of_descriptors_says_so_and_no_other_is_blamed() {
    const TEST: &str = "a_rank_that_runs_out_of_descriptors_says_so_and_no_other_is_blamed";
    if let Some((role, env)) = role() {
        let world = World::join(&env, options()).unwrap();
        let mut files = Vec::new();
        while role == "limited" && files.len() < 64 {
            let Ok(file) = File::open("/dev/null") else { break };
            files.push(file);
        }
        say("ready");
        await_go();
        return tell(world.group().and_then(|group| group.barrier()));
    }
    for limited in 0..2 {
        let mut limits = [""; 2];
        limits[limited] = "ulimit -n 64";
        let (_store, mut ranks) = start(TEST, &limits);
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "ready");
        }
        let begin = Instant::now();
        ranks.iter_mut().for_each(Process::go);
        for rank in &mut ranks {
            let said = rank.hear();
            assert!(said.starts_with(&format!("Some({limited}): rank {limited} (host ")), "{said}");
            assert!(said.contains("it has all 64 open files that it may have"), "{said}");
        }
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    }
}

/// Hundredths of a second of processor time that a process has used.
fn processor_time(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, after_name) = stat.rsplit_once(')').unwrap();
    after_name.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[test]
fn a_store_without_free_descriptors_waits_for_some_and_costs_no_processor_time() {
    const TEST: &str = "a_store_without_free_descriptors_waits_for_some_and_costs_no_processor_time";
    if role().is_some() {
        let store = launcher_store();
        let files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).take(64).collect();
        assert!(files.len() < 64, "the limit is in force");
        say(&store.local_addr().port().to_string());
        await_go();
        drop(files);
        return await_go();
    }
    let mut process = start_limited(TEST, "ulimit -n 64", &rank_at(&launcher_store(), 0, 1));
    let address = format!("127.0.0.1:{}", process.hear());
    // The kernel completes the connection, but the store has no descriptor left to accept it or later ones.
    let _stranger = TcpStream::connect(&address).unwrap();
    let used = processor_time(process.id());
    thread::sleep(Duration::from_millis(500));
    let used = processor_time(process.id()) - used;
    assert!(used <= 5, "{used} hundredths of a second of processor time to wait half a second");
    process.go();
    let store = StoreClient::connect(&address, &JobKey::trusting_network(JOB, 0), options().join_timeout).unwrap();
    store.set("key", b"value").unwrap();
    process.go();
}
