//! Starts the ranks of contenders.

use std::any::Any;
use std::process::Command;

use anyhow::{Result, bail, ensure};
use burn_ddp_comm::{DType, JobKey, LaunchEnv, Meeting, StoreServer};

use super::{Contender, Engine, Framework, Peer, Script, Setting, Trainer};
use crate::contender_ranks::{Scratch, Team};
use crate::machine::{cores, find_program};
use crate::rank::BufferKind;
use crate::simulated_machines::CABLE;
use crate::spin_barrier::SharedLines;

/// Starts the ranks of `contender`.
///
/// # Errors
/// If the contender is not installed, does not support the dtype, or does not start.
pub(crate) fn start(contender: Contender, setting: &Setting<'_>) -> Result<Team> {
    let &Setting { world, dtype, .. } = setting;
    let scratch = Scratch::new()?;
    let own = |what: &str, kind: BufferKind| OwnRank { what: what.to_owned(), kind, world, dtype };
    let name = contender.to_string();
    let (mut commands, keep): Started = match contender {
        Contender::Ours(Engine::Nccl, _) => bail!("nccl reduces only data on GPUs, such as the gradients of `step`"),
        Contender::Ours(Engine::Threads, kind) => (vec![own("threads", kind).command(&scratch, 0)?], Vec::new()),
        Contender::Ours(engine, kind) => {
            let (envs, keep) = setting.envs()?;
            let command = |(rank, env): (usize, LaunchEnv)| {
                let mut command = own("engine", kind).command(&scratch, rank)?;
                command.envs(env.variables());
                set_engine(&mut command, engine);
                anyhow::Ok(command)
            };
            (envs.into_iter().enumerate().map(command).collect::<Result<_>>()?, keep)
        }
        Contender::Floor(kind) => with_lines(&own("floor", kind), &scratch, world.min(cores()))?,
        Contender::Training(trainer) => training(trainer, setting, &own("train", BufferKind::Slice), &scratch)?,
        Contender::Theirs(Peer::Gloo) => (gloo(setting, &scratch)?, Vec::new()),
        Contender::Theirs(Peer::Mpich) => (vec![mpi(&MPICH, setting, &scratch)?], Vec::new()),
        Contender::Theirs(Peer::Openmpi) => (vec![mpi(&OPEN_MPI, setting, &scratch)?], Vec::new()),
        Contender::Theirs(limit) => with_lines(&own(&limit.to_string(), BufferKind::Slice), &scratch, world)?,
    };
    if let Some(machines) = setting.machines {
        commands = commands.iter().enumerate().map(|(rank, command)| machines.place(rank, command)).collect();
    }
    let ranks = if matches!(contender, Contender::Floor(_)) { world.min(cores()) } else { world };
    Team::start(&name, ranks, scratch, commands, keep)
}

/// Commands that start the ranks, and values that must live as long as they do.
type Started = (Vec<Command>, Vec<Box<dyn Any>>);

/// Variables of each rank, and values that must live as long as the ranks do.
type Envs = (Vec<LaunchEnv>, Vec<Box<dyn Any>>);

/// Name of the job in which ranks meet.
const JOB: &str = "burn-ddp-bench";

impl Setting<'_> {
    /// Variables of each rank, and the store in which the ranks meet; on several machines rank 0 hosts the store.
    fn envs(&self) -> Result<Envs> {
        match self.machines {
            Some(machines) => Ok((machines.envs(JOB), Vec::new())),
            None => envs(self.world).map(|(envs, store)| (envs, vec![Box::new(store) as Box<dyn Any>])),
        }
    }

    /// Network interface of gloo.
    fn interface(&self) -> &'static str {
        if self.machines.is_some() { CABLE } else { "lo" }
    }
}

/// Variables of `world` ranks on this machine, and the store in which they meet.
pub(crate) fn envs(world: usize) -> Result<(Vec<LaunchEnv>, StoreServer)> {
    let store = StoreServer::bind("127.0.0.1:0", &JobKey::trusting_network(JOB, 0))?;
    let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port: store.local_addr().port() };
    let env = |rank| LaunchEnv { trust_network: true, ..LaunchEnv::new(rank, world, meeting.clone(), JOB) };
    Ok(((0..world).map(env).collect(), store))
}

/// A rank that runs this program itself, with the sub-command `rank`.
struct OwnRank {
    what: String,
    kind: BufferKind,
    world: usize,
    dtype: DType,
}

impl OwnRank {
    fn command(&self, scratch: &Scratch, rank: usize) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["rank", "--what", &self.what, "--buffers", &self.kind.to_string()]);
        command.arg("--control").arg(scratch.socket());
        command.args(["--rank", &rank.to_string(), "--world", &self.world.to_string()]);
        command.args(["--dtype", &self.dtype.to_string()]);
        Ok(command)
    }
}

/// Variables that make glibc keep freed memory, with the values that `burnrun` sets.
const KEEP_MEMORY: [(&str, &str); 3] =
    [("MALLOC_MMAP_THRESHOLD_", "33554432"), ("MALLOC_TRIM_THRESHOLD_", "268435456"), ("MALLOC_ARENA_MAX", "4")];

/// Text with the settings of glibc's allocator in trainers.
pub(crate) fn describe_allocator(keeps_memory: bool) -> String {
    match keeps_memory {
        true => KEEP_MEMORY.map(|(name, value)| format!("{name}={value}")).join(" "),
        false => "glibc's defaults".into(),
    }
}

/// Sets up glibc's allocator for a trainer, overriding this process's environment.
fn set_allocator(command: &mut Command, keeps_memory: bool) {
    for (name, value) in KEEP_MEMORY {
        if keeps_memory {
            command.env(name, value)
        } else {
            command.env_remove(name)
        };
    }
}

/// Commands of a trainer: in Burn like those of [`Contender::Ours`], in torch like gloo's.
fn training(trainer: Trainer, setting: &Setting<'_>, own: &OwnRank, scratch: &Scratch) -> Result<Started> {
    let world = setting.world;
    let lines = SharedLines::create(world)?;
    let fd = lines.fd().to_string();
    let (model, side) = (trainer.model.to_string(), trainer.side.to_string());
    let Framework::Burn(engine) = trainer.framework else {
        let script = Script::new("train.py", include_str!("../../peers/train.py"), setting.programs, scratch)?;
        let bucket_mb = trainer.bucket_bytes.map_or(0.0, |bytes| bytes as f64 / f64::from(1 << 20));
        let meeting = format!("file://{}", scratch.path().join("store").display());
        let command = |rank: usize| {
            let mut command = script.command(setting.interface());
            command.args([&meeting, &rank.to_string(), &world.to_string()]);
            command.args([&model, &side, &fd, &bucket_mb.to_string()]);
            set_allocator(&mut command, trainer.keeps_memory);
            command
        };
        return Ok(((0..world).map(command).collect(), vec![Box::new(lines)]));
    };
    ensure!(cfg!(feature = "burn"), "this program was built without its feature `burn`");
    let (envs, mut keep) = setting.envs()?;
    keep.push(Box::new(lines));
    let command = |(rank, env): (usize, LaunchEnv)| {
        let mut command = own.command(scratch, rank)?;
        command.args(["--lines", &fd, "--model", &model, "--side", &side]);
        trainer.bucket_bytes.map(|bytes| command.args(["--bucket-bytes", &bytes.to_string()]));
        command.envs(env.variables()).env("RAYON_NUM_THREADS", "1");
        set_allocator(&mut command, trainer.keeps_memory);
        if world > 1 || engine == Engine::Nccl {
            set_engine(&mut command, engine);
        }
        anyhow::Ok(command)
    };
    let commands = envs.into_iter().enumerate().map(command).collect::<Result<_>>()?;
    Ok((commands, keep))
}

fn set_engine(command: &mut Command, engine: Engine) {
    if engine != Engine::Auto {
        command.env("BURN_DDP_ENGINE", engine.to_string());
    }
}

fn with_lines(own: &OwnRank, scratch: &Scratch, ranks: usize) -> Result<Started> {
    let lines = SharedLines::create(ranks)?;
    let command = |rank| {
        let mut command = own.command(scratch, rank)?;
        command.args(["--lines", &lines.fd().to_string()]);
        anyhow::Ok(command)
    };
    let commands = (0..ranks).map(command).collect::<Result<_>>()?;
    Ok((commands, vec![Box::new(lines)]))
}

fn gloo(setting: &Setting<'_>, scratch: &Scratch) -> Result<Vec<Command>> {
    let &Setting { world, dtype, .. } = setting;
    let script = Script::new("gloo.py", include_str!("../../peers/gloo.py"), setting.programs, scratch)?;
    let command = |rank: usize| {
        let mut command = script.command(setting.interface());
        command.arg(scratch.path().join("store")).args([rank.to_string(), world.to_string(), dtype.to_string()]);
        command
    };
    Ok((0..world).map(command).collect())
}

/// An implementation of MPI.
struct Mpi {
    name: &'static str,
    /// Compiler and launcher, by their names where several implementations are installed.
    programs: [&'static str; 2],
    /// Text in the output of this implementation's `mpirun --version`.
    says: &'static str,
    flags: &'static [&'static str],
}

const MPICH: Mpi = Mpi { name: "MPICH", programs: ["mpicc.mpich", "mpirun.mpich"], says: "HYDRA", flags: &[] };
const OPEN_MPI: Mpi = Mpi {
    name: "Open MPI",
    programs: ["mpicc.openmpi", "mpirun.openmpi"],
    says: "Open",
    flags: &["--oversubscribe", "--allow-run-as-root"],
};

/// Compiles `peers/mpi.c` with this implementation; returns the command that runs its ranks.
fn mpi(mpi: &Mpi, setting: &Setting<'_>, scratch: &Scratch) -> Result<Command> {
    let &Setting { world, dtype, machines, .. } = setting;
    ensure!(matches!(dtype, DType::F32 | DType::F64), "MPI has no {dtype}");
    let found = [mpi.programs, ["mpicc", "mpirun"]].into_iter().find_map(|[cc, run]| {
        let (cc, run) = (find_program(cc)?, find_program(run)?);
        let version = Command::new(&run).arg("--version").output().ok()?;
        String::from_utf8_lossy(&version.stdout).contains(mpi.says).then_some((cc, run))
    });
    let Some((cc, run)) = found else {
        let [cc, run] = mpi.programs;
        bail!("{0} is not installed: PATH has neither {cc} and {run}, nor the mpicc and mpirun of {0}", mpi.name);
    };
    let (source, program) = (scratch.path().join("mpi.c"), scratch.path().join("mpi"));
    std::fs::write(&source, include_str!("../../peers/mpi.c"))?;
    let compiled = Command::new(&cc).args(["-O2", "-o"]).arg(&program).arg(&source).output()?;
    ensure!(compiled.status.success(), "{}: {}", cc.display(), String::from_utf8_lossy(&compiled.stderr));
    let mut command = Command::new(run);
    command.args(mpi.flags).args(["-n", &world.to_string()]);
    if let Some(machines) = machines {
        ensure!(mpi.says == OPEN_MPI.says, "only Open MPI is started on several machines");
        command.args(machines.mpirun(&scratch.path().join("agent"))?);
    }
    command.arg(&program).arg(scratch.socket());
    command.arg(dtype.to_string());
    Ok(command)
}
