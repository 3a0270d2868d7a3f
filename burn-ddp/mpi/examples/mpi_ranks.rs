//! Ranks over MPI, to try an installation: the results of every collective are compared bit for bit with those of ranks
//! that are threads; and one rank can be made to fail.
//!
//! ```text
//! MPICC=mpicc.mpich cargo build -p burn-ddp-mpi --example mpi_ranks
//! mpirun.mpich -n 4 target/debug/examples/mpi_ranks
//! ```
//!
//! The argument is `all` (the default), `mismatch` or `leaves-early`; or a fault of the last rank in the middle of its
//! steps: `kill`, `exit`, `panic`, `leave` or `late`. The other ranks then end with exit code 3 and `rank R: after N
//! ms: ERROR`.

use std::process::exit;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::{Element, Error, ProcessGroup, ReduceOp, Result, World, WorldOptions};
use bytemuck::NoUninit;
use half::bf16;

fn main() {
    let what = std::env::args().nth(1).unwrap_or_else(|| "all".to_owned());
    let began = Instant::now();
    let mut rank = 0;
    if let Err(error) = run(&what, &mut rank) {
        // In one write, since other ranks write to the same terminal.
        let line = format!("rank {rank}: after {} ms: {error}\n", began.elapsed().as_millis());
        eprint!("{line}");
        // When a rank has died, MPICH's mpirun tells the others, and kills all of them if one ends meanwhile.
        thread::sleep(Duration::from_secs(2));
        exit(3);
    }
}

fn run(what: &str, rank: &mut usize) -> Result<()> {
    let world = match burn_ddp_mpi::detect()? {
        Some(env) => World::join(&env, WorldOptions::from_env()?)?,
        None => World::solo(WorldOptions::from_env()?),
    };
    *rank = world.rank();
    burn_ddp_mpi::attach(&world)?;
    let last = world.rank() + 1 == world.world_size();
    match what {
        "all" => all(&world)?,
        "mismatch" => {
            let group = world.group()?;
            if last { group.barrier()? } else { group.broadcast(&mut vec![0.0_f32; 100_000], 0)? }
        }
        "leaves-early" => {
            let group = world.group()?;
            // The last rank is not needed any more, and sends nothing for a second while the others go on.
            if let Some(part) = group.split(Some(u64::from(last)), 0)?.filter(|_| !last) {
                drop(group);
                for _ in 0..20 {
                    part.all_reduce(&mut vec![1.0_f32; 10_000], ReduceOp::Sum)?;
                    thread::sleep(Duration::from_millis(50));
                }
            }
        }
        _ => misbehave(&world, what, last)?,
    }
    println!("rank {} of {}: done", world.rank(), world.world_size());
    Ok(())
}

/// Every collective on a group of all ranks, on two groups from two threads at once, and on parts.
fn all(world: &World) -> Result<()> {
    let size = world.world_size();
    let group = world.group()?;
    let results = workout(&group, 1)?;
    compare(world, "all ranks", &results, size, 1);

    let second = world.group()?;
    thread::scope(|scope| {
        let both = [(&group, 2), (&second, 3)].map(|(group, salt)| scope.spawn(move || workout(group, salt)));
        for (nth, results) in both.into_iter().enumerate() {
            let results = results.join().map_err(|_| Error::Internal { message: "a thread panicked".to_owned() })??;
            compare(world, "two groups at once", &results, size, nth as u64 + 2);
        }
        Ok::<_, Error>(())
    })?;

    // In the opposite order, so that the ranks within a part differ from those of the world.
    if let Some(part) = group.split(Some(world.rank() as u64 % 2), -(world.rank() as i64))? {
        let results = workout(&part, 4)?;
        compare_at(&part, "a part", &results, 4);
    }
    let pending = (0..10).map(|nth| second.all_reduce_async(vec![nth as f64; 20_000], ReduceOp::Sum));
    for (nth, pending) in pending.collect::<Vec<_>>().into_iter().enumerate() {
        let sums: Vec<f64> = pending.wait()?;
        assert!(sums.iter().all(|sum| *sum == (nth * size) as f64));
    }
    group.barrier()
}

fn compare(world: &World, what: &str, results: &[(String, Vec<u8>)], size: usize, salt: u64) {
    same(&format!("rank {}: {what}", world.rank()), results, &by_threads(size, salt)[world.rank()]);
}

fn compare_at(group: &ProcessGroup, what: &str, results: &[(String, Vec<u8>)], salt: u64) {
    let expected = by_threads(group.world_size(), salt);
    same(&format!("rank {} of {what}", group.rank()), results, &expected[group.rank()]);
}

fn same(rank: &str, results: &[(String, Vec<u8>)], expected: &[(String, Vec<u8>)]) {
    assert_eq!(results.len(), expected.len());
    for ((name, bytes), (_, right)) in results.iter().zip(expected) {
        assert!(bytes == right, "{rank}: {name} differs from ranks that are threads");
    }
    println!("{rank}: {} results have the bits that they have among threads", results.len());
}

fn by_threads(size: usize, salt: u64) -> Vec<Vec<(String, Vec<u8>)>> {
    let work = |world: World| workout(&world.group()?, salt);
    World::spawn(size, work).into_iter().map(|results| results.expect("ranks as threads")).collect()
}

/// Around the lengths at which frames are cut.
const LENS: [usize; 9] = [0, 1, 10, 463, 465, 929, 30_000, 140_001, 300_003];

/// Calls every collective, and returns the name and the bytes of each result.
fn workout(group: &ProcessGroup, salt: u64) -> Result<Vec<(String, Vec<u8>)>> {
    let mut results = Vec::new();
    for len in LENS {
        reductions::<f32>(group, len, salt, &mut results, |bits| ((bits >> 40) as f32 - 8e6) * 1.000_1e-3)?;
        if len < 100_000 {
            reductions::<f64>(group, len, salt, &mut results, |bits| (bits >> 20) as f64 * 1e-7)?;
            reductions::<bf16>(group, len, salt, &mut results, |bits| bf16::from_f32((bits >> 40) as f32 * 1e-5))?;
        }
        transfers(group, len, salt, &mut results)?;
    }
    let ranks = group.all_gather_object(&format!("rank {}", group.rank()))?;
    results.push(("all_gather_object".to_owned(), ranks.join(" ").into_bytes()));
    group.barrier()?;
    Ok(results)
}

/// Numbers that are different for each rank, salt and index.
fn values<T>(rank: usize, len: usize, salt: u64, make: impl Fn(u64) -> T) -> Vec<T> {
    let seed = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt.wrapping_mul(0xd1b5_4a32_d192_ed03);
    let mix = |at: u64| {
        let x = (seed ^ at).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (x ^ x >> 29).wrapping_mul(0x94d0_49bb_1331_11eb)
    };
    (0..len as u64).map(|at| make(mix(at))).collect()
}

fn reductions<T: Element + NoUninit>(
    group: &ProcessGroup,
    len: usize,
    salt: u64,
    results: &mut Vec<(String, Vec<u8>)>,
    make: impl Fn(u64) -> T + Copy,
) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    let mut note = |what: &str, values: &[T]| results.push((format!("{what} of {len}"), bytes_of(values)));
    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
        let mut x = values(rank, len, salt, make);
        group.all_reduce(&mut x, op)?;
        note("all_reduce", &x);
    }
    let mut x = values(rank, len, salt, make);
    group.all_reduce_weighted(&mut x, 0.5 + rank as f64)?;
    note("all_reduce_weighted", &x);
    let root = len % size;
    let mut x = values(rank, len, salt, make);
    group.reduce(&mut x, ReduceOp::Sum, root)?;
    note("reduce", &x);
    let input = values(rank, len * size, salt, make);
    let mut output = values(rank, len, salt, make);
    group.reduce_scatter(&input, &mut output, ReduceOp::Sum)?;
    note("reduce_scatter", &output);
    Ok(())
}

fn transfers(group: &ProcessGroup, len: usize, salt: u64, results: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let (rank, size) = (group.rank(), group.world_size());
    let mine = |len: usize| values(rank, len, salt, |bits| bits as i64);
    let mut note = |what: &str, values: &[i64]| results.push((format!("{what} of {len}"), bytes_of(values)));
    let root = (len + 1) % size;
    let mut x = mine(len);
    group.broadcast(&mut x, root)?;
    note("broadcast", &x);
    note("all_gather", &group.all_gather(&mine(len))?);
    note("gather", &group.gather(&mine(len), root)?.unwrap_or_default());
    let rows = (rank == root).then(|| mine(len * size));
    group.scatter(rows.as_deref(), &mut x, root)?;
    note("scatter", &x);
    let mut rows = vec![0; len * size];
    group.all_to_all(&mine(len * size), &mut rows)?;
    note("all_to_all", &rows);
    if size > 1 {
        group.send_recv(&mine(len), (rank + 1) % size, &mut x, (rank + size - 1) % size)?;
        note("send_recv", &x);
        if rank == 0 {
            group.send(&mine(len), size - 1)?;
        } else if rank == size - 1 {
            group.recv(&mut x, 0)?;
            note("recv", &x);
        }
    }
    Ok(())
}

fn bytes_of<T: NoUninit>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// Steps that never end by themselves; the last rank fails in step 10, as `how` says.
fn misbehave(world: &World, how: &str, last: bool) -> Result<()> {
    let group = world.group()?;
    for step in 0.. {
        world.set_step(step);
        if last && step == 10 {
            match how {
                "kill" => {
                    let me = std::process::id().to_string();
                    let _ = std::process::Command::new("kill").args(["-9", &me]).status();
                }
                "exit" => exit(0),
                "panic" => panic!("told to"),
                "leave" => return Ok(()),
                "late" => {
                    // Until the other ranks have ended the world.
                    while world.check().is_ok() {
                        thread::sleep(Duration::from_millis(20));
                    }
                }
                _ => {
                    let message = format!("{how:?} is not an argument of this program");
                    return Err(Error::InvalidArgument { message, rank: None, during: None });
                }
            }
        }
        let len = if step % 2 == 0 { 10 } else { 2_000_000 };
        group.all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)?;
    }
    Ok(())
}
