//! Environment variables of all launchers. Launchers are looked for in the order of the table, from left to right.
//!
//! | meaning | burnrun | torchrun, plain | Open MPI | MPICH | Slurm (`srun`) |
//! |---|---|---|---|---|---|
//! | rank | `BURN_DDP_RANK` | `RANK` | `OMPI_COMM_WORLD_RANK` | `PMI_RANK` | `SLURM_PROCID` |
//! | number of ranks | `BURN_DDP_WORLD_SIZE` | `WORLD_SIZE` | `OMPI_COMM_WORLD_SIZE` | `PMI_SIZE` | `SLURM_STEP_NUM_TASKS` |
//! | rank on this machine | `BURN_DDP_LOCAL_RANK` ¹ | `LOCAL_RANK` ¹ | `OMPI_COMM_WORLD_LOCAL_RANK` | `MPI_LOCALRANKID` | `SLURM_LOCALID` |
//! | ranks on this machine | `BURN_DDP_LOCAL_WORLD_SIZE` ¹ | `LOCAL_WORLD_SIZE` ¹ | `OMPI_COMM_WORLD_LOCAL_SIZE` | `MPI_LOCALNRANKS` | `SLURM_STEP_TASKS_PER_NODE` |
//! | rank of this machine | `BURN_DDP_NODE_RANK` ² | `GROUP_RANK` ² | ² | ² | `SLURM_NODEID` |
//! | meeting point | `BURN_DDP_MASTER=host:port` or `local:name` | `MASTER_ADDR`, `MASTER_PORT` | one machine: `PMIX_NAMESPACE`; several: ³ | `PMI_FD` ³ | `SLURM_STEP_NODELIST`, `SLURM_JOB_ID`, `SLURM_STEP_ID` ³ |
//! | host of the store | `BURN_DDP_STORE=launcher\|rank0\|above` | `TORCHELASTIC_USE_AGENT_STORE` | | | |
//! | id of the job | `BURN_DDP_JOB_ID` | `TORCHELASTIC_RUN_ID` | `PMIX_NAMESPACE` | by `PMI_FD` | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//! | number of restarts | `BURN_DDP_RESTART_COUNT` | `TORCHELASTIC_RESTART_COUNT` | | | `SLURM_RESTART_COUNT` |
//!
//! ¹ Needed only if the master may be another machine. ² If not set, computed as if ranks were numbered machine by
//! machine. ³ Ranks of several machines meet at `BURN_DDP_MASTER`, else at `MASTER_ADDR` and `MASTER_PORT`, if set.
//!
//! With every launcher: `BURN_DDP_SECRET_FILE=file` (needed between machines, except with MPICH),
//! `BURN_DDP_TRUST_NETWORK=1` (instead of a secret), `BURN_DDP_INTERFACE=name or address`, `BURN_DDP_BIND=address`,
//! `BURN_DDP_ADVERTISE=name or address`, `BURN_DDP_EVENTS=file`, `BURN_DDP_REPORT_DIR=dir`, `BURN_DDP_JOB_ID`, and for
//! tests `BURN_DDP_MACHINE=name`.
//! [`WorldOptions`](crate::WorldOptions) reads the variables for deadlines and records.
//!
//! - The first launcher whose variables are complete is the one that started this process.
//! - If only some variables of a launcher are set, or only some of `BURN_DDP_*`, that is an error: a rank must not
//!   start as a world of 1 by accident.
//! - Variables of other launchers must agree, unless they describe an outer process: burnrun and torchrun may run in a
//!   task of mpirun or srun, mpirun in an allocation of Slurm.
//! - If no launcher gives a job id, the id consists of the port and the name of the program, so that two programs that
//!   use one port by mistake do not join each other. Ranks whose programs have different names need one
//!   `BURN_DDP_JOB_ID`.
//! - Ranks that are all on one machine meet at a unix socket with the job's name; then no port is opened.

mod inherited_files;
mod launchers;
mod names;
mod parse;
mod rendezvous_endpoint;
mod slurm_lists;

use std::path::PathBuf;

use crate::net::bind_and_connect;
use crate::{Error, Result};
use launchers::Launcher;
use names::*;
use parse::Lookup;
use rendezvous_endpoint::{JobMeeting, LOCAL};

pub use inherited_files::HANDED_OVER;
pub use rendezvous_endpoint::Meeting;
pub(crate) use rendezvous_endpoint::PORTS_ABOVE;

/// Longest job id, in bytes.
pub(crate) const JOB_ID_CAP: usize = 256;

/// Rank of this process in its job, and the job's meeting point, as the launcher set them.
///
/// ```
/// use burn_ddp_comm::{LaunchEnv, Meeting};
///
/// let set = [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];
/// let lookup = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
///
/// let env = LaunchEnv::from_lookup(&lookup)?.expect("variables are set");
/// assert_eq!((env.rank, env.world_size, env.local_rank), (3, 4, 3));
/// assert!(matches!(env.meeting, Meeting::Local { .. })); // all on one machine: no port is needed
/// assert_eq!(LaunchEnv::from_lookup(&|_| None)?, None);
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchEnv {
    /// This process's rank in the world.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// This process's rank among those on its machine.
    pub local_rank: usize,
    /// The number of ranks on its machine.
    pub local_world_size: usize,
    /// The rank of its machine among the job's machines.
    pub node_rank: usize,
    /// Meeting point of the ranks.
    pub meeting: Meeting,
    /// Id of the job, by which ranks recognise that they have met another job by mistake.
    pub job_id: String,
    /// Launcher that set the variables: "burnrun", "torchrun", "variables" (`RANK` and so on, set by hand or by a
    /// script), "Open MPI", "MPICH" or "Slurm".
    pub launcher: &'static str,
    /// Number of restarts of the job so far.
    pub restart_count: u32,
    /// A file that holds the job's secret.
    pub secret_file: Option<PathBuf>,
    /// True if any process that reaches the job's ports may join, without a secret.
    pub trust_network: bool,
    /// Network interface or address on which this rank listens and from which it connects.
    pub interface: Option<String>,
    /// Address on which rank 0 listens as host of the store, if no launcher hosts it; `0.0.0.0` or `::` for all
    /// addresses of its machine. `None`: the master's address. Needed if the master's address leads to rank 0's machine
    /// without being an address of that machine, such as the address of a service or a router.
    pub bind: Option<String>,
    /// Name or address at which the other ranks reach this one. `None`: the address on which it listens.
    pub advertise: Option<String>,
    /// Name of the machine on which this rank pretends to be. Different names cut one host into several machines, whose
    /// ranks share no memory, for tests of programs that run on several machines.
    pub machine: Option<String>,
    /// File to which each process appends its [events](crate::post_mortem::Event), as lines of JSON.
    pub events: Option<PathBuf>,
    /// Directory in which a rank whose world ends in an error writes its [report](crate::post_mortem::PostMortem).
    pub report_dir: Option<PathBuf>,
}

/// Parses lists in Slurm's notation.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz_slurm_lists(bytes: &[u8]) {
    slurm_lists::fuzz(bytes);
}

/// Reads variables from lines of `bytes`: the first byte is the number of a name, the rest its value.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz_variables(bytes: &[u8]) {
    let names = launchers::all_names();
    let set: std::collections::BTreeMap<&str, String> = bytes
        .split(|byte| *byte == b'\n')
        .filter_map(|line| {
            let (number, value) = line.split_first()?;
            Some((*names.get(usize::from(*number))?, String::from_utf8_lossy(value).into_owned()))
        })
        .collect();
    if let Ok(Some(env)) = LaunchEnv::from_lookup(&|name| set.get(name).cloned()) {
        assert!(env.rank < env.world_size && env.local_rank < env.local_world_size, "{env:?}");
    }
}

impl LaunchEnv {
    /// Rank `rank` of `world_size`, all on this machine, as burnrun starts it; all optional fields are unset.
    pub fn new(rank: usize, world_size: usize, meeting: Meeting, job_id: impl Into<String>) -> LaunchEnv {
        LaunchEnv {
            rank,
            world_size,
            local_rank: rank,
            local_world_size: world_size,
            node_rank: 0,
            meeting,
            job_id: job_id.into(),
            launcher: "burnrun",
            restart_count: 0,
            secret_file: None,
            trust_network: false,
            interface: None,
            bind: None,
            advertise: None,
            machine: None,
            events: None,
            report_dir: None,
        }
    }

    /// Reads the process's environment. `None` if no launcher set a variable, so that the process runs alone. If the
    /// launcher handed over the secret and the event file as descriptors, the paths lead to the descriptors that this
    /// process inherited, if they are still open.
    ///
    /// # Errors
    /// [`Error::Environment`](crate::Error::Environment) as for [`from_lookup`](Self::from_lookup).
    pub fn detect() -> Result<Option<LaunchEnv>> {
        // A value that is not UTF-8 stays invalid where a number is needed, and errors can show it.
        let found =
            Self::from_lookup(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))?;
        Ok(found.map(|env| LaunchEnv {
            secret_file: env.secret_file.map(inherited_files::inherited),
            events: env.events.map(inherited_files::inherited),
            ..env
        }))
    }

    /// Reads variables through `lookup`. `None` if no variable of any launcher is set.
    ///
    /// # Errors
    /// [`Error::Environment`](crate::Error::Environment) if some variables of a launcher are set and others missing
    /// (the error names both), a value cannot be parsed, the variables of two launchers disagree, or no variable says
    /// where the ranks meet.
    pub fn from_lookup(lookup: Lookup<'_>) -> Result<Option<LaunchEnv>> {
        let Some(launcher) = Launcher::choose(lookup)? else { return Ok(None) };
        let me = launcher.identity(lookup)?;
        let restart_count = match launcher {
            Launcher::Plain => TORCH_RESTARTS,
            Launcher::Slurm => SLURM_RESTARTS,
            _ => RESTART_COUNT,
        };
        let restart_count = parse::number(restart_count, lookup)?.unwrap_or(0);
        let job = JobMeeting::find(launcher, &me, restart_count, lookup)?;
        if job.job_id.is_empty() || job.job_id.len() > JOB_ID_CAP {
            let len = job.job_id.len();
            return Err(Error::environment(format!("the job id has {len} bytes; it must have 1 to {JOB_ID_CAP}")));
        }
        let (local_rank, local_world_size) = job.local;
        let path = |name| lookup(name).map(PathBuf::from);
        Ok(Some(LaunchEnv {
            rank: me.rank,
            world_size: me.world_size,
            local_rank,
            local_world_size,
            // As if machines were numbered in the order of their ranks, with equally many ranks each.
            node_rank: me.node_rank.unwrap_or(me.rank.saturating_sub(local_rank) / local_world_size),
            meeting: job.meeting,
            job_id: job.job_id,
            launcher: job.launcher,
            restart_count,
            secret_file: path(SECRET_FILE),
            trust_network: parse::flag(TRUST_NETWORK, lookup)?,
            interface: parse::text(INTERFACE, lookup),
            bind: parse::text(BIND, lookup),
            advertise: parse::text(ADVERTISE, lookup),
            machine: parse::text(MACHINE, lookup),
            events: path(EVENTS),
            report_dir: path(REPORT_DIR),
        }))
    }

    /// Variables that make a child process this rank: `BURN_DDP_*`, and `RANK` and so on for programs that know only
    /// these. With [`Meeting::Pmi`] they are not enough: a child then also needs the variables and the socket of this
    /// process.
    pub fn variables(&self) -> Vec<(String, String)> {
        let mut variables = vec![(JOB_ID, self.job_id.clone()), (RESTART_COUNT, self.restart_count.to_string())];
        let (host, port) = (self.meeting.host(), self.meeting.port());
        let store = match &self.meeting {
            Meeting::Launcher { .. } => "launcher",
            Meeting::Rank0 { .. } | Meeting::Local { .. } | Meeting::Pmi { .. } => "rank0",
            Meeting::Rank0Above { .. } => "above",
        };
        variables.push((STORE, store.to_owned()));
        match &self.meeting {
            // `MASTER_ADDR` and `MASTER_PORT` cannot name a local socket.
            Meeting::Local { name } => variables.push((MASTER, format!("{}{name}", LOCAL))),
            Meeting::Pmi { .. } => {}
            _ => variables.extend([
                (MASTER, bind_and_connect::join(host, port)),
                (MASTER_ADDR, host.to_owned()),
                (MASTER_PORT, port.to_string()),
            ]),
        }
        for row in [Launcher::Ours.row(), Launcher::Plain.row()] {
            variables.extend([
                (row.rank, self.rank.to_string()),
                (row.world_size, self.world_size.to_string()),
                (row.local_rank, self.local_rank.to_string()),
                (row.local_world_size, self.local_world_size.to_string()),
            ]);
            variables.extend(row.node_rank.map(|name| (name, self.node_rank.to_string())));
        }
        if self.trust_network {
            variables.push((TRUST_NETWORK, "1".to_owned()));
        }
        let texts =
            [(INTERFACE, &self.interface), (BIND, &self.bind), (ADVERTISE, &self.advertise), (MACHINE, &self.machine)];
        variables.extend(texts.into_iter().filter_map(|(name, text)| text.clone().map(|text| (name, text))));
        let paths = [(SECRET_FILE, &self.secret_file), (EVENTS, &self.events), (REPORT_DIR, &self.report_dir)];
        variables.extend(
            paths
                .into_iter()
                .filter_map(|(name, path)| path.as_ref().map(|path| (name, path.to_string_lossy().into_owned()))),
        );
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}
