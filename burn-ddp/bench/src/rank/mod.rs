//! A rank of one of this project's contenders or limits: a process (or, for the engine `threads`, a thread) that
//! executes the driver's commands.

mod determinism_digest;
mod engine_rank;
mod hardware_limits;
mod socket_limit;
#[cfg(feature = "burn")]
mod train;
#[cfg(feature = "burn")]
mod transformer;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use burn_ddp_comm::{DType, World};
use clap::{Args, ValueEnum};

use crate::driver_protocol::{Lines, RankTimes, RoundPlan};
use crate::exact_inputs;
use crate::machine::{self, Cpu, cpu_ns};
use crate::spin_barrier::{Meeting, SharedLines};

/// Arguments from the driver.
#[derive(Args, Debug)]
pub(crate) struct RankArgs {
    /// Kind of rank.
    #[arg(long)]
    what: What,
    /// The driver's socket.
    #[arg(long)]
    control: PathBuf,
    #[arg(long)]
    rank: usize,
    #[arg(long)]
    world: usize,
    #[arg(long, value_parser = exact_inputs::parse_dtype)]
    dtype: DType,
    #[arg(long, default_value = "slice")]
    buffers: BufferKind,
    /// File descriptor of the driver's shared memory, for kinds of ranks that meet there.
    #[arg(long)]
    lines: Option<i32>,
    /// Model to train.
    #[cfg(feature = "burn")]
    #[arg(long, default_value = "tensors")]
    model: crate::contender::Model,
    /// Way of training.
    #[cfg(feature = "burn")]
    #[arg(long, default_value = "plain")]
    side: crate::contender::Side,
    /// Bucket size, instead of the reducer's default.
    #[cfg(feature = "burn")]
    #[arg(long)]
    bucket_bytes: Option<usize>,
}

/// Kind of a rank's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum BufferKind {
    /// The rank's own memory, reduced in place.
    Slice,
    /// Memory of the group (`shared_buffers`), reduced without copies; results are views.
    Arena,
}

/// Kinds of ranks that this program implements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum What {
    /// A rank of a world that the environment describes.
    Engine,
    /// All ranks of a world, as threads.
    Threads,
    /// The limit that copies bytes.
    Memcpy,
    /// The limit that exchanges a cache line.
    Cacheline,
    /// The limit that sends bytes through a socket both ways.
    Pump,
    /// The limit that does a share of the copies and sums of all ranks.
    Floor,
    /// Trains a model with Burn.
    #[cfg(feature = "burn")]
    Train,
}

/// Work of a rank. Steps are numbered from 0 in each round; step `n` uses buffer `n mod count`.
trait Workload {
    /// Makes `count` buffers of `bytes`, and drops earlier ones.
    fn prepare(&mut self, bytes: usize, count: usize) -> Result<()>;

    /// Number of buffers that [`prepare`](Self::prepare) has made for `count`.
    fn buffers(&self, count: usize) -> usize {
        count
    }

    /// Fills buffer `nth` with this rank's input.
    fn fill(&mut self, nth: usize, seed: u64);

    /// Does the measured step on buffer `nth`.
    fn step(&mut self, nth: usize) -> Result<()>;

    /// Checks that buffer `nth`, filled with `seed`, holds the right values after `uses` steps.
    fn check(&mut self, nth: usize, seed: u64, uses: usize) -> Result<()>;

    /// Digest that `determinism` compares.
    fn digest(&mut self, _run: u64, _pause_us: u64) -> Result<u64> {
        bail!("`determinism` compares only engines of burn-ddp")
    }
}

/// Serves the driver until it sends `quit`.
pub(crate) fn run(args: &RankArgs) -> Result<()> {
    let &RankArgs { rank, world, dtype, buffers, .. } = args;
    let serve = |workload: Box<dyn Workload>| serve(&args.control, rank, workload, Cpu::Process);
    let lines = || SharedLines::inherited(args.lines.context("needs --lines")?);
    match args.what {
        What::Engine => serve(Box::new(engine_rank::EngineRank::new(engine_rank::join()?, dtype, buffers))),
        What::Threads => threads(&args.control, world, dtype, buffers),
        What::Memcpy => serve(Box::new(hardware_limits::Memcpy::new(Meeting::new(lines()?, rank, world)))),
        What::Cacheline => serve(Box::new(hardware_limits::Cacheline::new(Meeting::new(lines()?, rank, world)))),
        What::Pump => serve(Box::new(socket_limit::Pump::new(&lines()?, rank, world)?)),
        What::Floor => {
            let cores = crate::machine::cores().min(world);
            let shares = (0..world).filter(|of| of % cores == rank).count();
            let meeting = Meeting::new(lines()?, rank, cores);
            serve(Box::new(hardware_limits::Floor::new(meeting, world, shares, buffers)))
        }
        #[cfg(feature = "burn")]
        What::Train => {
            let meeting = args.lines.map(|_| lines()).transpose()?.map(|lines| Meeting::new(lines, rank, world));
            serve(Box::new(train::TrainRank::new(
                engine_rank::join()?,
                args.model,
                args.side,
                args.bucket_bytes,
                meeting,
            )?))
        }
    }
}

/// Runs each rank on a thread, with its own connection to the driver.
fn threads(control: &Path, world: usize, dtype: DType, buffers: BufferKind) -> Result<()> {
    let worlds = World::threads(world, burn_ddp_comm::WorldOptions::default());
    thread::scope(|scope| {
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                scope.spawn(move || {
                    let rank = world.rank();
                    serve(control, rank, Box::new(engine_rank::EngineRank::new(world, dtype, buffers)), Cpu::Thread)
                })
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or_else(|_| bail!("a rank panicked")))
    })
}

fn serve(control: &Path, rank: usize, mut workload: Box<dyn Workload>, cpu: Cpu) -> Result<()> {
    let mut lines = Lines::connect(control)?;
    lines.say(&format!("hello {rank}"))?;
    let mut count = 0;
    while let Some(line) = lines.hear()? {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words[..] {
            ["prepare", bytes, buffers] => {
                let prepared = workload.prepare(bytes.parse()?, buffers.parse()?);
                count = workload.buffers(buffers.parse()?);
                prepared.map(|()| "ok".to_owned())
            }
            ["usage"] => Ok(machine::Usage::here().line()),
            ["round", ..] => {
                let plan = RoundPlan::parse(&words[1..])?;
                round(workload.as_mut(), rank, count, &plan, cpu).map(|times| times.line())
            }
            ["digest", run, pause_us] => {
                workload.digest(run.parse()?, pause_us.parse()?).map(|digest| format!("ok {digest:016x}"))
            }
            ["quit"] => break,
            _ => bail!("unknown command {line:?} from the driver"),
        };
        lines.say(&answer.unwrap_or_else(|error| format!("error {}", format!("{error:#}").replace('\n', " "))))?;
    }
    Ok(())
}

fn round(workload: &mut dyn Workload, rank: usize, count: usize, plan: &RoundPlan, cpu: Cpu) -> Result<RankTimes> {
    ensure!(count > 0, "`round` came before `prepare`");
    let seed = |nth: usize| plan.seed + nth as u64;
    for nth in 0..count {
        workload.fill(nth, seed(nth));
    }
    let mut steps = 0;
    let mut step = || {
        steps += 1;
        workload.step((steps - 1) % count)
    };
    for _ in 0..plan.warmup {
        step()?;
    }
    let mut ns = Vec::with_capacity(plan.samples);
    let cpu_before = cpu_ns(cpu);
    for _ in 0..plan.samples {
        if let Some((_, by)) = plan.late.filter(|(late, _)| *late == rank) {
            thread::sleep(by);
        }
        let start = Instant::now();
        for _ in 0..plan.per_sample {
            step()?;
        }
        ns.push(start.elapsed().as_nanos() as f64 / plan.per_sample as f64);
    }
    let cpu_ns = cpu_ns(cpu).saturating_sub(cpu_before) as f64;
    for nth in 0..count.min(steps) {
        workload.check(nth, seed(nth), (steps - nth).div_ceil(count))?;
    }
    // A last step with fresh inputs: its result is known exactly, also if those of reused buffers are not.
    workload.fill(0, seed(count));
    workload.step(0)?;
    workload.check(0, seed(count), 1)?;
    Ok(RankTimes { cpu_ns, ns })
}
