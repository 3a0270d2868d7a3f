//! Ranks that share memory: `shm` is chosen where it works, is right under any timing, and leaves no files behind.

mod common;

use std::time::{Duration, Instant};

use burn_ddp_comm::{
    DType, EngineChoice, Error, PartReduction, ProcessGroup, ReduceOp, RowDivision, SharedView, World, WorldOptions,
};
use common::{Process, join_all, launcher_store, options, rank_at, role, say};

/// All survivors learn of a rank's death within this time.
const SOON: Duration = Duration::from_secs(2);

fn shm() -> WorldOptions {
    WorldOptions { engine: Some(EngineChoice::Shm), ..options() }
}

/// Ranks of a world that joined with `options`, each on a thread; what they yield.
fn on_ranks<R: Send>(n: usize, options: &WorldOptions, rank_main: impl Fn(World) -> R + Sync) -> Vec<R> {
    let store = launcher_store();
    let envs = (0..n).map(|rank| rank_at(&store, rank, n)).collect();
    let worlds: Vec<_> = join_all(envs, options).into_iter().map(|world| world.unwrap()).collect();
    std::thread::scope(|s| {
        let rank_main = &rank_main;
        let ranks: Vec<_> = worlds.into_iter().map(|world| s.spawn(move || rank_main(world))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Numbers that look random and are the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    /// Waits: mostly not at all, sometimes so long that the waiting peers go to sleep.
    fn dawdle(&mut self) {
        match self.below(16) {
            0 => std::thread::sleep(Duration::from_micros(self.below(300))),
            1..4 => std::thread::yield_now(),
            4..8 => (0..self.below(2000)).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
    }
}

/// Element `at` of rank `rank` in call number `call`.
fn element(call: u64, rank: usize, at: usize) -> i64 {
    (call * 1_000_003) as i64 + (rank as i64 + 1) * (at as i64 % 9973 + 1)
}

fn elements(call: u64, rank: usize, len: usize) -> Vec<i64> {
    (0..len).map(|at| element(call, rank, at)).collect()
}

fn sums(call: u64, n: usize, len: usize) -> Vec<i64> {
    (0..len).map(|at| (0..n).map(|rank| element(call, rank, at)).sum()).collect()
}

/// Lengths around all the borders between algorithms.
fn length(random: &mut Random) -> usize {
    const LENGTHS: [usize; 10] = [0, 1, 4, 5, 100, 1000, 4096, 9001, 40_000, 140_001];
    LENGTHS[random.below(LENGTHS.len() as u64) as usize]
}

/// One collective, chosen by `script`, which is the same on all ranks; fails if a number is wrong.
fn collective(group: &ProcessGroup, script: &mut Random, call: u64) -> Result<(), Error> {
    let (me, n, len) = (group.rank(), group.world_size(), length(script));
    let root = script.below(n as u64) as usize;
    match script.below(5) {
        0 => {
            let mut buf = elements(call, me, len);
            group.all_reduce(&mut buf, ReduceOp::Sum)?;
            assert!(buf == sums(call, n, len), "all_reduce of {len}");
        }
        1 => {
            let mut buf = elements(call, me, len);
            group.broadcast(&mut buf, root)?;
            assert!(buf == elements(call, root, len), "broadcast of {len}");
        }
        2 => {
            let all = group.all_gather(&elements(call, me, len))?;
            let expected: Vec<i64> = (0..n).flat_map(|rank| elements(call, rank, len)).collect();
            assert!(all == expected, "all_gather of {len}");
        }
        3 => {
            let mut row = vec![0; len];
            group.reduce_scatter(&elements(call, me, len * n), &mut row, ReduceOp::Sum)?;
            assert!(row == sums(call, n, len * n)[me * len..][..len], "reduce_scatter of {len}");
        }
        _ => group.barrier()?,
    }
    Ok(())
}

#[test]
fn results_are_right_under_thousands_of_schedules() {
    for (n, seed) in [(2, 1), (2, 2), (3, 3), (4, 4)] {
        on_ranks(n, &shm(), |world| {
            let group = world.group().unwrap();
            assert_eq!(world.engine(), "shm");
            let (mut script, mut own) = (Random(seed), Random(seed * 1000 + world.rank() as u64));
            for call in 0..800 {
                own.dawdle();
                collective(&group, &mut script, call).unwrap();
            }
        });
    }
}

#[test]
fn views_stay_what_they_are_while_ranks_reduce_on() {
    const LEN: usize = 5000;
    for n in [1, 2, 3] {
        on_ranks(n, &shm(), |world| {
            let group = world.group().unwrap();
            let (mut script, mut own) = (Random(n as u64), Random(77 + world.rank() as u64));
            let mut buffers = group.shared_buffers(&[LEN * 8, 8, 0, LEN * 8]).unwrap();
            let bytes = |elements: Vec<i64>| -> Vec<u8> { elements.iter().flat_map(|x| x.to_le_bytes()).collect() };
            let mut kept: Vec<(u64, Vec<u8>, SharedView)> = Vec::new();
            for call in 0..500 {
                own.dawdle();
                let buffer = &mut buffers[script.below(4) as usize];
                let len = buffer.len_bytes() / 8;
                let division = RowDivision { rows: len, row_bytes: 8, world_size: n };
                let mine = division.bytes_of(world.rank());
                buffer.bytes_mut().copy_from_slice(&bytes(elements(call, world.rank(), len)));
                let (view, expected) = match script.below(3) {
                    0 => {
                        let whole = bytes(elements(call, 0, len));
                        let part = &whole[mine];
                        let view = group.all_gather_parts_shared(DType::I64, division, part, buffer, 0).unwrap();
                        (view, whole)
                    }
                    1 => {
                        let (sum, whole) = (PartReduction::Op(ReduceOp::Sum), bytes(sums(call, n, len)));
                        let part = group.reduce_scatter_parts_shared(DType::I64, division, buffer, &sum, 0).unwrap();
                        assert!(part == whole[mine], "call {call}");
                        continue;
                    }
                    _ => {
                        let view = group.all_reduce_shared(DType::I64, buffer, ReduceOp::Sum, 0).unwrap();
                        (view, bytes(sums(call, n, len)))
                    }
                };
                // This rank may overwrite its input at once; the view must not change.
                buffer.bytes_mut().fill(0xee);
                if own.below(3) == 0 {
                    kept.push((call, expected.clone(), view.clone()));
                }
                kept.push((call, expected, view));
                while kept.len() > own.below(6) as usize {
                    let (call, expected, view) = kept.swap_remove(own.below(kept.len() as u64) as usize);
                    assert!(*view == expected[..], "call {call}");
                }
            }
            // Views outlive the group.
            drop((group, buffers, world));
            assert!(kept.iter().all(|(_, expected, view)| **view == expected[..]));
        });
    }
}

#[test]
fn buffers_of_different_kinds_are_reduced_all_the_same() {
    on_ranks(2, &shm(), |world| {
        let (group, other) = (world.group().unwrap(), world.group().unwrap());
        let mut shared = group.shared_buffers(&[16]).unwrap().remove(0);
        let mut plain = burn_ddp_comm::SharedBuffer::plain(16);
        let mut foreign = other.shared_buffers(&[16]).unwrap().remove(0);
        for buffer in [&mut plain, &mut foreign] {
            let buffer = if world.rank() == 0 { &mut shared } else { buffer };
            buffer.bytes_mut().copy_from_slice(&[1; 16]);
            let sum = group.all_reduce_shared(DType::U8, buffer, ReduceOp::Sum, 0).unwrap();
            assert_eq!(*sum, [2; 16]);
        }
    });
}

#[test]
fn memory_is_shared_unless_told_otherwise() {
    for (engine, expected) in [(None, "shm"), (Some(EngineChoice::Shm), "shm"), (Some(EngineChoice::Tcp), "tcp")] {
        on_ranks(2, &WorldOptions { engine, ..options() }, |world| {
            assert_eq!(world.engine(), expected);
            let mut x = [1.0_f32];
            world.group().unwrap().all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, [2.0]);
        });
    }
}

#[test]
fn ranks_that_want_different_engines_do_not_meet() {
    let store = launcher_store();
    std::thread::scope(|s| {
        let join = |rank, engine| {
            let env = rank_at(&store, rank, 2);
            s.spawn(move || World::join(&env, WorldOptions { engine, ..options() }))
        };
        for rank in [join(0, None), join(1, Some(EngineChoice::Shm))] {
            let error = rank.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("BURN_DDP_ENGINE") && error.contains("has shm"), "{error}");
        }
    });
}

/// A rank with no address space left cannot map the memory that the others can map.
#[test]
fn all_ranks_share_memory_or_none_does() {
    const TEST: &str = "all_ranks_share_memory_or_none_does";
    if let Some((role, env)) = role() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let engine = role.ends_with("forced").then_some(EngineChoice::Shm);
        let world = World::join(&env, WorldOptions { engine, ..options() }).unwrap();
        let before = getrlimit(Resource::As);
        if role.starts_with("poor") {
            setrlimit(Resource::As, Rlimit { current: Some(1 << 20), ..before }).unwrap();
        }
        let group = world.group();
        setrlimit(Resource::As, before).unwrap();
        let result = group.and_then(|group| {
            let mut x = [1.0_f32; 3];
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(format!("{x:?} over {}", world.engine()))
        });
        return say(&result.unwrap_or_else(|error| error.to_string()));
    }
    for (poor, roles) in [(1, ["rich", "poor", "rich"]), (0, ["poor", "rich", "rich"])] {
        for forced in [false, true] {
            let store = launcher_store();
            let role = |role: &str| if forced { format!("{role} forced") } else { role.to_owned() };
            let mut ranks: Vec<Process> =
                (0..3).map(|rank| Process::start(TEST, &role(roles[rank]), &rank_at(&store, rank, 3))).collect();
            for rank in &mut ranks {
                let said = rank.hear();
                if forced {
                    assert!(
                        said.contains("cannot share memory") && said.contains(&format!("rank {poor} cannot")),
                        "{said}"
                    );
                } else {
                    assert_eq!(said, "[3.0, 3.0, 3.0] over tcp");
                }
            }
        }
    }
}

/// Names in `/dev/shm`, where files of shared memory would be.
fn in_dev_shm() -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = std::fs::read_dir("/dev/shm")
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect())
        .unwrap_or_default();
    names.sort();
    names
}

#[test]
fn a_rank_killed_anywhere_leaves_no_wrong_number_and_nobody_waiting() {
    const TEST: &str = "a_rank_killed_anywhere_leaves_no_wrong_number_and_nobody_waiting";
    if let Some((role, env)) = role() {
        let seed: u64 = role.parse().unwrap();
        let world = World::join(&env, shm()).unwrap();
        let group = world.group().unwrap();
        let (mut script, mut own) = (Random(seed), Random(seed + 31 * world.rank() as u64));
        let mut buffer = group.shared_buffers(&[80_000]).unwrap().remove(0);
        say("ready");
        let mut one = |call| {
            own.dawdle();
            collective(&group, &mut script, call)?;
            let input: Vec<u8> = elements(call, world.rank(), 10_000).iter().flat_map(|x| x.to_le_bytes()).collect();
            buffer.bytes_mut().copy_from_slice(&input);
            let view = group.all_reduce_shared(DType::I64, &mut buffer, ReduceOp::Sum, 0)?;
            let expected: Vec<u8> =
                sums(call, world.world_size(), 10_000).iter().flat_map(|x| x.to_le_bytes()).collect();
            assert!(*view == expected[..], "all_reduce_shared");
            drop(view);
            let division = RowDivision { rows: 10_000, row_bytes: 8, world_size: world.world_size() };
            let part = &expected[division.bytes_of(world.rank())];
            let whole = group.all_gather_parts_shared(DType::I64, division, part, &mut buffer, 0)?;
            assert!(*whole == expected[..], "all_gather_parts_shared");
            buffer.bytes_mut().copy_from_slice(&input);
            let sum = PartReduction::Op(ReduceOp::Sum);
            let reduced = group.reduce_scatter_parts_shared(DType::I64, division, &mut buffer, &sum, 0)?;
            assert!(reduced == part, "reduce_scatter_parts_shared");
            Ok::<_, Error>(())
        };
        let error = (0..).find_map(|call| one(call).err()).unwrap();
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer.rank == 1), "{error}");
        return say("lost");
    }
    let before = in_dev_shm();
    for round in 0..12_u64 {
        let store = launcher_store();
        let seed = (round + 1).to_string();
        let mut ranks: Vec<_> = (0..3).map(|rank| Process::start(TEST, &seed, &rank_at(&store, rank, 3))).collect();
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "ready");
        }
        std::thread::sleep(Duration::from_micros(Random(round).below(30_000)));
        ranks[1].kill();
        let begin = Instant::now();
        for rank in [0, 2] {
            assert_eq!(ranks[rank].hear(), "lost");
        }
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    }
    assert_eq!(in_dev_shm(), before);
}

/// Control group in which a rank's memory is limited; removed by the drop. `None` if this process may not make one.
struct LimitedMemory(std::path::PathBuf);

impl LimitedMemory {
    fn new(bytes: usize) -> Option<LimitedMemory> {
        let name = format!("burn-ddp-test-{}-{bytes}", std::process::id());
        [("memory", "memory.limit_in_bytes"), ("", "memory.max")].into_iter().find_map(|(part, file)| {
            let group = std::path::Path::new("/sys/fs/cgroup").join(part).join(&name);
            std::fs::create_dir(&group).ok()?;
            let limited = std::fs::OpenOptions::new().write(true).open(group.join(file));
            let written =
                limited.and_then(|mut file| std::io::Write::write_all(&mut file, bytes.to_string().as_bytes()));
            let group = LimitedMemory(group);
            written.is_ok().then_some(group)
        })
    }
}

impl Drop for LimitedMemory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Runs four ranks with shared buffers of 32 MiB; rank `limited` may use `mib` MiB of memory. `None` in a
/// child, or if memory cannot be limited; else true if the buffers are shared.
fn shared_under_a_limit(test: &str, limited: usize, mib: usize) -> Option<bool> {
    const GROUP: &str = "BURN_DDP_TEST_GROUP";
    if let Some((_, env)) = role() {
        if let Some(group) = std::env::var_os(GROUP) {
            std::fs::write(std::path::Path::new(&group).join("cgroup.procs"), "0").unwrap();
        }
        let world = World::join(&env, shm()).unwrap();
        let group = world.group().unwrap();
        let mut buffer = group.shared_buffers(&[32 << 20]).unwrap().remove(0);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_large = |line: &str| {
            let (start, rest) = line.split_once('-')?;
            let bytes = |hex| u64::from_str_radix(hex, 16).ok();
            (bytes(rest.split_once(' ')?.0)? - bytes(start)? > 64 << 20).then_some(())
        };
        let shared = maps.lines().filter(|line| line.contains("memfd:burn-ddp")).any(|line| is_large(line).is_some());
        buffer.set_len(4);
        buffer.bytes_mut().copy_from_slice(&1.0_f32.to_ne_bytes());
        let sum = group.all_reduce_shared(DType::F32, &mut buffer, ReduceOp::Sum, 0).unwrap();
        assert_eq!(*sum, 4.0_f32.to_ne_bytes());
        say(if shared { "shared" } else { "plain" });
        return None;
    }
    let Some(group) = LimitedMemory::new(mib << 20) else {
        println!("skipped: this test needs the right to limit the memory of a control group");
        return None;
    };
    let store = launcher_store();
    let start = |rank| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        if rank == limited {
            command.env(GROUP, &group.0);
        }
        Process::start_by(command, test, "rank", &rank_at(&store, rank, 4))
    };
    let mut ranks: Vec<Process> = (0..4).map(start).collect();
    let said: Vec<String> = ranks.iter_mut().map(Process::hear).collect();
    ranks.iter_mut().for_each(|rank| assert!(rank.end().success()));
    assert!(said.iter().all(|one| *one == said[0]), "{said:?}");
    Some(said[0] == "shared")
}

#[test]
fn each_rank_gives_memory_to_its_part_of_shared_buffers() {
    const TEST: &str = "each_rank_gives_memory_to_its_part_of_shared_buffers";
    // The whole segment has 160 MiB, one rank's part of it 40 MiB.
    for limited in [0, 1] {
        assert_ne!(shared_under_a_limit(TEST, limited, 80), Some(false), "rank {limited}");
    }
}

#[test]
fn a_rank_without_memory_for_its_part_makes_buffers_plain_everywhere() {
    const TEST: &str = "a_rank_without_memory_for_its_part_makes_buffers_plain_everywhere";
    for limited in [0, 3] {
        assert_ne!(shared_under_a_limit(TEST, limited, 30), Some(true), "rank {limited}");
    }
}

/// Two users of one number, as in two containers without root: the kernel of each turns the other away.
#[test]
#[ignore = "needs root, `setpriv` and `unshare`"]
fn users_of_different_namespaces_talk_over_tcp() {
    const TEST: &str = "users_of_different_namespaces_talk_over_tcp";
    if let Some((_, env)) = role() {
        let world = World::join(&env, WorldOptions { engine: None, ..options() }).unwrap();
        let sum = world.group().and_then(|group| {
            let mut x = [1.0_f32];
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(x[0])
        });
        return say(&format!("{} {sum:?}", world.engine()));
    }
    let store = launcher_store();
    let start = |(rank, user): (usize, &str)| {
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid", user, "--clear-groups", "unshare", "-r"]).arg(std::env::current_exe().unwrap());
        Process::start_by(command, TEST, "rank", &rank_at(&store, rank, 2))
    };
    let ranks: Vec<Process> = ["1001", "1002"].into_iter().enumerate().map(start).collect();
    for mut rank in ranks {
        assert_eq!(rank.hear(), "tcp Ok(2.0)");
    }
}
