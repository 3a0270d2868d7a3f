//! Checks the driver, NCCL and this crate on a machine with GPUs, and measures the speed of all-reduces.
//!
//! ```text
//! cargo build --release -p burn-ddp-nccl --example nccl_check
//! target/release/examples/nccl_check                          # one rank, one GPU
//! burnrun -n 8 target/release/examples/nccl_check             # one rank per GPU
//! burnrun -n 8 target/release/examples/nccl_check --rounds 50
//! RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 target/release/examples/nccl_check --fault kill & …
//! ```
//!
//! Exit code 0: all reductions were right. 1: a result was wrong, or something is missing; the message says which. The
//! times are medians: of an all-reduce by burn-ddp until the device has done it, and of a bare ncclAllReduce on a
//! blocking communicator, by turns; and how long each call keeps the host, of which the messages between the ranks are
//! one part and a launch by a non-blocking communicator is another.
//!
//! With `--fault` the last rank is killed (`kill`), is stopped (`stop`) or sleeps (`lag`) while reductions are on the
//! devices. Each other rank prints the error and its delay, and how long NCCL's work then stays on its device. Exit
//! code 0: an error came, and the device is idle. Start the ranks without a launcher, which would kill the others when
//! one dies. `BURN_DDP_TIMEOUT` is how long a rank that is stopped or sleeps is waited for.

use std::io::{self, Write};
use std::process::exit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_ddp_comm::engine::OnDevice;
use burn_ddp_comm::{DType, Error, LaunchEnv, ProcessGroup, ReduceOp, World, WorldOptions};
use burn_ddp_nccl::{
    Communicator, Decision, Device, DeviceBuffer, DeviceElements, DeviceError, Driver, Event, HostMemory, Nccl,
    NcclFabric, NcclOp, Piece, RankInfo, Stream, UniqueId, decide,
};

const MIB: usize = 1024 * 1024;

pub(crate) fn main() {
    if let Err(error) = work().and_then(run) {
        // In one write: other ranks may be writing theirs to the same place.
        let _ = io::stderr().write_all(format!("nccl_check: {error}\n").as_bytes());
        exit(1);
    }
}

/// What the command line asks for.
#[derive(Clone, Copy)]
enum Work {
    /// Checks, and times this many rounds.
    Rounds(usize),
    /// Lets the last rank fail in this way: `kill`, `stop` or `lag`.
    Fault(&'static str),
}

fn work() -> Result<Work, String> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Ok(Work::Rounds(20)),
        ["--rounds", number] => {
            Ok(Work::Rounds(number.parse().map_err(|_| format!("--rounds {number}: not a number"))?))
        }
        ["--fault", cause] => match ["kill", "stop", "lag"].into_iter().find(|known| *known == cause) {
            Some(cause) => Ok(Work::Fault(cause)),
            None => Err(format!("--fault {cause}: not kill, stop or lag")),
        },
        _ => Err("usage: nccl_check [--rounds N | --fault kill|stop|lag]".to_owned()),
    }
}

/// The device of a rank: that of its local rank. With `BURN_DDP_SHARE_DEVICES=1` ranks share the devices there are.
fn device_of(local_rank: usize) -> usize {
    let share = std::env::var("BURN_DDP_SHARE_DEVICES").is_ok_and(|value| value == "1");
    let devices = Driver::load().ok().and_then(|driver| driver.device_count().ok()).unwrap_or(0);
    if share && devices > 0 { local_rank % devices } else { local_rank }
}

/// State that all checks use.
struct Setup {
    world: World,
    group: ProcessGroup,
    nccl: Nccl,
    device: Device,
    stream: Stream,
}

fn run(work: Work) -> Result<(), String> {
    let said = |error: Error| error.to_string();
    let options = WorldOptions::from_env().map_err(said)?;
    let world = match LaunchEnv::detect().map_err(said)? {
        Some(env) => World::join(&env, options).map_err(said)?,
        None => World::solo(options),
    };
    let host = world.group().map_err(said)?;
    let ordinal = device_of(world.local_rank());
    let me = RankInfo::here(world.rank(), ordinal);
    match &me.device {
        Ok(device) => println!(
            "rank {} of {}: {} at {} (uuid {}), CUDA {}.{}, NCCL {}, device {} of {}",
            me.rank,
            world.world_size(),
            device.name,
            device.pci_bus_id,
            device.uuid,
            device.cuda_version / 1000,
            device.cuda_version / 10 % 100,
            device.nccl_version,
            device.ordinal,
            device.device_count
        ),
        Err(why) => println!("rank {}: {why}", me.rank),
    }
    let all = host.all_gather_object(&me).map_err(said)?;
    if let Decision::Host(why) = decide(&all) {
        return Err(why);
    }
    let (nccl, device) =
        (Nccl::load().map_err(said)?, Device::new(&Driver::load().map_err(said)?, ordinal).map_err(said)?);
    let fabric = |own, membership| NcclFabric::new(own, membership, nccl.clone(), device.clone(), HostMemory::ByHost);
    world.set_fabric(|own, membership| fabric(own, membership).map(|fabric| Arc::new(fabric) as _)).map_err(said)?;
    let (group, stream) = (world.group().map_err(said)?, device.stream()?);
    let setup = Setup { world, group, nccl, device, stream };
    let rounds = match work {
        Work::Rounds(rounds) => rounds,
        Work::Fault(cause) => return fault(&setup, cause),
    };
    check(&setup)?;
    time(&setup, &host, rounds)?;
    host.barrier().map_err(said)
}

/// Reductions of several sizes and types, with values that are exact in any order of additions.
fn check(setup: &Setup) -> Result<(), String> {
    let (rank, n) = (setup.world.rank(), setup.world.world_size());
    let mut count = 0;
    for len in [1, 2, 1000, 65_537, 4 * MIB] {
        for (dtype, element) in ELEMENTS {
            for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
                let value = |rank: usize, index: usize| ((rank + index) % 5) as f64;
                let input: Vec<u8> = (0..len).flat_map(|index| element(value(rank, index))).collect();
                let buffer = setup.upload(&input)?;
                let done = setup.reduce(&buffer, dtype, len, op)?;
                let got = setup.download(&buffer, input.len(), &done)?;
                for (index, bytes) in got.chunks_exact(dtype.size_bytes()).enumerate() {
                    let values = (0..n).map(|rank| value(rank, index));
                    let expected = element(match op {
                        ReduceOp::Max => values.fold(f64::MIN, f64::max),
                        ReduceOp::Min => values.fold(f64::MAX, f64::min),
                        _ => values.sum(),
                    });
                    if bytes != expected {
                        return Err(format!(
                            "rank {rank}: the {op} of {len} {dtype} is wrong at element {index}: {bytes:?} instead of \
                             {expected:?}"
                        ));
                    }
                }
                count += 1;
            }
        }
    }
    weighted(setup)?;
    println!("rank {rank}: {} reductions are right", count + 1);
    Ok(())
}

/// Elements of a rank of weight 0 do not count, not even NaN.
fn weighted(setup: &Setup) -> Result<(), String> {
    let (rank, n) = (setup.world.rank(), setup.world.world_size());
    let absent = n > 1 && rank == n - 1;
    let value = if absent { f32::NAN } else { 8.0 };
    let buffer = setup.upload(&value.to_le_bytes().repeat(1000))?;
    let mut place = setup.place(&buffer, 1000);
    let elements = OnDevice { dtype: DType::F32, len_elems: 1000, place: &mut place };
    let weight = if absent { 0.0 } else { (rank + 1) as f64 };
    setup.group.all_reduce_weighted_on_device(elements, weight, 0).map_err(|error| error.to_string())?;
    let done = place.done().ok_or("no event")?.clone();
    let got = setup.download(&buffer, 4000, &done)?;
    let near = |bytes: &[u8]| (f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) - 8.0).abs() < 1e-4;
    if got.chunks_exact(4).all(near) {
        Ok(())
    } else {
        Err(format!("rank {rank}: a weighted mean is wrong: {:?}", &got[..4]))
    }
}

/// A number that is small and whole, as an element.
type Encode = fn(f64) -> Vec<u8>;

const ELEMENTS: [(DType, Encode); 8] = [
    (DType::F64, |x| x.to_le_bytes().to_vec()),
    (DType::F32, |x| (x as f32).to_le_bytes().to_vec()),
    (DType::F16, |x| half::f16::from_f64(x).to_le_bytes().to_vec()),
    (DType::BF16, |x| half::bf16::from_f64(x).to_le_bytes().to_vec()),
    (DType::I64, |x| (x as i64).to_le_bytes().to_vec()),
    (DType::I32, |x| (x as i32).to_le_bytes().to_vec()),
    (DType::I8, |x| (x as i8).to_le_bytes().to_vec()),
    (DType::U8, |x| vec![x as u8]),
];

/// Times by turns all-reduces of burn-ddp and of two bare NCCL communicators, and the messages between the ranks.
fn time(setup: &Setup, host: &ProcessGroup, rounds: usize) -> Result<(), String> {
    let said = |error: Error| error.to_string();
    let mut blocking = Bare::init(setup, host, true)?;
    let mut non_blocking = Bare::init(setup, host, false)?;
    for bytes in [MIB, 8 * MIB, 32 * MIB, 128 * MIB] {
        let buffer = setup.upload(&vec![0; bytes])?;
        let mut calls: [Timed; 3] = Default::default();
        let mut messages = Vec::new();
        // The first rounds connect the ranks.
        for round in 0..rounds + 3 {
            let measured = [
                timed(host, || setup.reduce(&buffer, DType::F32, bytes / 4, ReduceOp::Sum))?,
                timed(host, || blocking.reduce(setup, &buffer))?,
                timed(host, || non_blocking.reduce(setup, &buffer))?,
            ];
            host.barrier().map_err(said)?;
            let start = Instant::now();
            host.all_gather(&[0_i64, 0]).map_err(said)?;
            host.all_gather(&[0_i64]).map_err(said)?;
            let exchanged = start.elapsed();
            if round >= 3 {
                calls.iter_mut().zip(measured).for_each(|(call, (launched, took))| {
                    call.host.push(launched);
                    call.whole.push(took);
                });
                messages.push(exchanged);
            }
        }
        if setup.world.rank() == 0 {
            let [ours, bare, _] = calls.each_mut().map(|call| median(&mut call.whole));
            let [host_ours, host_bare, host_non_blocking] = calls.each_mut().map(|call| median(&mut call.host));
            println!(
                "{:>4} MiB: burn-ddp {ours:.0} us, bare NCCL {bare:.0} us, ratio {:.3}; host: {host_ours:.0} us, of \
                 which messages {:.0} us; bare {host_bare:.0} us, bare and non-blocking {host_non_blocking:.0} us",
                bytes / MIB,
                ours / bare,
                median(&mut messages)
            );
        }
    }
    Ok(())
}

/// Times of one kind of call: until it returned, and until the device had done it.
#[derive(Default)]
struct Timed {
    host: Vec<Duration>,
    whole: Vec<Duration>,
}

/// Calls `reduce` on all ranks at once; until it returned, and until the device had done it.
fn timed(host: &ProcessGroup, reduce: impl FnOnce() -> Result<Event, String>) -> Result<(Duration, Duration), String> {
    host.barrier().map_err(|error| error.to_string())?;
    let start = Instant::now();
    let done = reduce()?;
    let launched = start.elapsed();
    wait(&done)?;
    Ok((launched, start.elapsed()))
}

/// A communicator of all ranks, used without this crate's engine.
struct Bare(Communicator);

impl Bare {
    fn init(setup: &Setup, host: &ProcessGroup, blocking: bool) -> Result<Bare, String> {
        let mut id = setup.nccl.unique_id()?.0.to_vec();
        host.broadcast(&mut id, 0).map_err(|error| error.to_string())?;
        let id = UniqueId(id.try_into().map_err(|_| "an id of another length")?);
        let (place, ranks) = ((&setup.nccl, &setup.device), (setup.world.rank(), setup.world.world_size()));
        let communicator = Communicator::init(place, id, ranks, blocking, &|| setup.world.check());
        communicator.map(Bare).map_err(|fault| fault.to_string())
    }

    fn reduce(&mut self, setup: &Setup, buffer: &DeviceBuffer) -> Result<Event, String> {
        // SAFETY: the buffer lives until the event is done.
        let region = unsafe { buffer.region() };
        let what = (DType::F32, NcclOp::Builtin(ReduceOp::Sum));
        let enqueued = self.0.all_reduce(&setup.stream, &[(region, region)], what, &|| setup.world.check());
        enqueued.map_err(|fault: DeviceError| fault.to_string())?;
        let done = setup.device.event()?;
        setup.stream.record(&done)?;
        Ok(done)
    }
}

/// The last rank meets `cause` half-way through many reductions; the others see an error, and the end of NCCL's work on
/// their device.
fn fault(setup: &Setup, cause: &str) -> Result<(), String> {
    const BYTES: usize = 64 * MIB;
    const REDUCTIONS: usize = 200;
    let (rank, n) = (setup.world.rank(), setup.world.world_size());
    if n < 2 {
        return Err("--fault needs two ranks or more".to_owned());
    }
    // Never freed: after a failure NCCL may still use it.
    let buffer = std::mem::ManuallyDrop::new(setup.upload(&vec![0; BYTES])?);
    let reduce = || setup.reduce(&buffer, DType::F32, BYTES / 4, ReduceOp::Sum);
    let mut done = reduce()?;
    wait(&done)?;
    let mut last_call = Instant::now();
    for nth in 0..REDUCTIONS {
        if rank == n - 1 && nth == REDUCTIONS / 2 {
            println!("rank {rank}: {cause} before reduction {nth}");
            suffer(cause)?;
        }
        match reduce() {
            Ok(event) => (done, last_call) = (event, Instant::now()),
            Err(error) => {
                let busy = if done.is_done()? { "idle" } else { "busy" };
                println!(
                    "rank {rank}: error {} ms after the last call, in reduction {nth}, with the device {busy}: {error}",
                    last_call.elapsed().as_millis()
                );
                return idle(&done, rank);
            }
        }
    }
    Err(format!("rank {rank}: {REDUCTIONS} reductions, and no error of a rank that did {cause}"))
}

/// Waits until the device has ended what was enqueued before `done`, by an abort if need be.
fn idle(done: &Event, rank: usize) -> Result<(), String> {
    let start = Instant::now();
    while !done.is_done()? {
        if start.elapsed() > Duration::from_secs(30) {
            return Err(format!("rank {rank}: NCCL's work is on the device 30 s after the error: it was not aborted"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("rank {rank}: the device is idle {} ms after the error", start.elapsed().as_millis());
    Ok(())
}

fn suffer(cause: &str) -> Result<(), String> {
    let signal = match cause {
        "kill" => "KILL",
        "stop" => "STOP",
        _ => {
            std::thread::sleep(Duration::from_secs(60));
            return Ok(());
        }
    };
    // The parent of the shell is this process.
    let sent = std::process::Command::new("sh").args(["-c", "kill -s \"$0\" \"$PPID\"", signal]).status();
    sent.map(drop).map_err(|error| format!("sh, to send {signal}: {error}"))
}

fn wait(done: &Event) -> Result<(), String> {
    while !done.is_done()? {
        std::hint::spin_loop();
    }
    Ok(())
}

/// In microseconds.
fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default().as_secs_f64() * 1e6
}

impl Setup {
    fn place(&self, buffer: &DeviceBuffer, len_elems: usize) -> DeviceElements {
        let pieces = vec![Piece::reduced(buffer.pointer(), buffer.pointer(), len_elems)];
        // SAFETY: all callers wait for the reduction before the buffer goes, and pass no more elements than it has.
        unsafe { DeviceElements::new(self.device.ordinal(), pieces, None) }
    }

    fn reduce(&self, buffer: &DeviceBuffer, dtype: DType, len_elems: usize, op: ReduceOp) -> Result<Event, String> {
        let mut place = self.place(buffer, len_elems);
        let elements = OnDevice { dtype, len_elems, place: &mut place };
        self.group.all_reduce_on_device(elements, op, 0).map_err(|error| error.to_string())?;
        place.done().cloned().ok_or_else(|| "no event".to_owned())
    }

    /// Copies `bytes` to a new buffer on the device, and waits for the copy.
    fn upload(&self, bytes: &[u8]) -> Result<DeviceBuffer, String> {
        let buffer = self.device.alloc(bytes.len())?;
        buffer.write(&self.stream, bytes, &|| self.world.check()).map_err(|fault| fault.to_string())?;
        Ok(buffer)
    }

    fn download(&self, buffer: &DeviceBuffer, len: usize, after: &Event) -> Result<Vec<u8>, String> {
        self.stream.wait(after)?;
        buffer.read(&self.stream, len, &|| self.world.check()).map_err(|fault| fault.to_string())
    }
}
