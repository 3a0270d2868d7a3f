//! Meeting point of the ranks (the store's host and address), as each launcher's variables give it.

use super::launchers::{Identity, Launcher};
use super::names::*;
use super::parse::{Lookup, flag, needed, number, text};
use super::slurm_lists;
use crate::net::bind_and_connect;
use crate::{Error, Result};

/// Number of ports above the given one, which is torchrun's own, that rank 0 may choose from.
pub(crate) const PORTS_ABOVE: u16 = 64;
/// Prefix of `BURN_DDP_MASTER` that names a local socket.
pub(super) const LOCAL: &str = "local:";
/// Most bytes of the program's name in a job id.
const PROGRAM_CAP: usize = 100;
/// Ports for Slurm jobs, chosen by job and step: below the ephemeral ports of most systems.
const SLURM_PORTS: std::ops::Range<u64> = 20_000..32_000;

/// Meeting point of the ranks: the host of the store and its address, which `Display` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// The launcher hosts the store.
    Launcher {
        /// Name or address of its machine.
        host: String,
        /// The store's port.
        port: u16,
    },
    /// Rank 0 hosts the store.
    Rank0 {
        /// Name or address of rank 0's machine.
        host: String,
        /// The store's port.
        port: u16,
    },
    /// Rank 0 hosts the store on a free port above the given one, which the launcher keeps for itself.
    Rank0Above {
        /// Name or address of rank 0's machine.
        host: String,
        /// The port above which rank 0 looks for a free one.
        port: u16,
    },
    /// All ranks run on one machine, as one user: rank 0 hosts the store on a local socket that no other user can serve
    /// or reach, so no secret is needed.
    Local {
        /// Name of the socket, different from that of any other job of this user.
        name: String,
    },
    /// MPICH's process manager gives the ranks the meeting point and the secret.
    Pmi {
        /// Descriptor of this process's socket to the process manager.
        fd: i32,
        /// Name or address of this machine, as other machines know it.
        host: String,
    },
}

impl std::fmt::Display for Meeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Launcher { host, port } | Self::Rank0 { host, port } => {
                f.write_str(&bind_and_connect::join(host, *port))
            }
            Self::Rank0Above { host, port } => write!(f, "{host}, one of the {PORTS_ABOVE} ports above {port}"),
            Self::Local { name } => write!(f, "local socket {name:?}"),
            Self::Pmi { .. } => f.write_str("MPICH's process manager"),
        }
    }
}

impl Meeting {
    /// Name or address of the store's machine; "localhost" for [`Local`](Self::Local) and [`Pmi`](Self::Pmi).
    pub fn host(&self) -> &str {
        match self {
            Self::Launcher { host, .. } | Self::Rank0 { host, .. } | Self::Rank0Above { host, .. } => host,
            Self::Local { .. } | Self::Pmi { .. } => "localhost",
        }
    }

    /// The port, as the variables give it; 0 if the meeting point has no port.
    pub fn port(&self) -> u16 {
        match self {
            Self::Launcher { port, .. } | Self::Rank0 { port, .. } | Self::Rank0Above { port, .. } => *port,
            Self::Local { .. } | Self::Pmi { .. } => 0,
        }
    }
}

/// Meeting point and id of a job, from its launcher's variables.
pub(super) struct JobMeeting {
    pub(super) meeting: Meeting,
    pub(super) job_id: String,
    /// True if neither user nor launcher chose the id, so that other jobs of this user may have the same.
    is_default_id: bool,
    /// Name of the launcher.
    pub(super) launcher: &'static str,
    /// This process's rank on its machine, and the number of ranks there.
    pub(super) local: (usize, usize),
}

impl JobMeeting {
    pub(super) fn find(launcher: Launcher, me: &Identity, restarts: u32, lookup: Lookup<'_>) -> Result<JobMeeting> {
        let job = match launcher {
            Launcher::Ours => ours(me, lookup),
            Launcher::Plain => plain(me, lookup),
            Launcher::OpenMpi => open_mpi(me, lookup),
            Launcher::Mpich => mpich(me, lookup),
            Launcher::Slurm => by_slurm(me, lookup),
        };
        let mut job = job?;
        let chosen = lookup(JOB_ID);
        if let Some(job_id) = &chosen {
            job.job_id.clone_from(job_id);
        }
        if let Meeting::Local { name } = &mut job.meeting
            && name.is_empty()
        {
            *name = format!("{}, {}, restart {restarts}", job.launcher, job.job_id);
        }
        // Two jobs that use one port by mistake meet; the program's name makes their ids differ.
        if job.is_default_id && chosen.is_none() {
            job.job_id = format!("{}, program {}", job.job_id, program());
        }
        Ok(job)
    }
}

/// Name of this process's program, without its directory.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Linux appends this if the program's file was replaced while it runs.
    let name = name.trim_end_matches(" (deleted)");
    name[..name.floor_char_boundary(PROGRAM_CAP)].to_owned()
}

/// Meeting point on this machine; `find` fills in the name.
fn here() -> Meeting {
    Meeting::Local { name: String::new() }
}

fn ours(me: &Identity, lookup: Lookup<'_>) -> Result<JobMeeting> {
    let store = lookup(STORE);
    let store = store.as_deref().map(str::trim);
    if let Some(name) = local_socket(lookup)? {
        let local = me.local.unwrap_or((me.rank, me.world_size));
        let (job_id, meeting) = (name.clone(), Meeting::Local { name });
        return Ok(JobMeeting { meeting, job_id, is_default_id: false, launcher: "burnrun", local });
    }
    let (host, port) = needed(master(lookup)?, MASTER)?;
    if let Some((plain_host, plain_port)) = plain_master(lookup)?
        && Launcher::Plain.traces_rank(lookup)
        && (&plain_host, plain_port) != (&host, port)
    {
        return Err(Error::environment(format!(
            "the variables of two launchers disagree: {MASTER}={} but {MASTER_ADDR}:{MASTER_PORT}={}; unset those \
             that do not belong to this job",
            bind_and_connect::join(&host, port),
            bind_and_connect::join(&plain_host, plain_port)
        )));
    }
    let local = local(me, &host, Launcher::Ours)?;
    let job_id = format!("port {port}");
    let meeting = match store {
        None if on_one_machine(local, me) => here(),
        None | Some("rank0") => Meeting::Rank0 { host, port },
        Some("launcher") => Meeting::Launcher { host, port },
        Some("above") => Meeting::Rank0Above { host, port },
        Some(other) => {
            return Err(Error::environment(format!(
                "{STORE}={other:?} is neither \"launcher\" nor \"rank0\" nor \
                                                   \"above\""
            )));
        }
    };
    Ok(JobMeeting { meeting, job_id, is_default_id: true, launcher: "burnrun", local })
}

/// The local socket that `BURN_DDP_MASTER` names, if it names one.
fn local_socket(lookup: Lookup<'_>) -> Result<Option<String>> {
    let Some(text) = lookup(MASTER) else { return Ok(None) };
    match text.trim().strip_prefix(LOCAL) {
        Some("") => {
            Err(Error::environment(format!("{MASTER}={text:?} names no local socket, for example {MASTER}=local:job7")))
        }
        socket => Ok(socket.map(str::to_owned)),
    }
}

fn plain(me: &Identity, lookup: Lookup<'_>) -> Result<JobMeeting> {
    let (host, port) = needed(plain_master(lookup)?, MASTER_ADDR)?;
    let local = local(me, &host, Launcher::Plain)?;
    let (launcher, job_id, is_default_id) = match lookup(RUN_ID) {
        // torchrun without `--rdzv-id` calls every job "none"; the port makes the ids differ.
        Some(run) => ("torchrun", format!("{run}, port {port}"), run == "none"),
        None => ("variables", format!("port {port}"), true),
    };
    // torchrun's own store listens on this port, although these ranks do not use that store.
    let taken = flag(AGENT_STORE, lookup)?;
    let meeting = match master(lookup)? {
        _ if on_one_machine(local, me) => here(),
        Some((host, port)) => Meeting::Rank0 { host, port },
        None if taken => Meeting::Rank0Above { host, port },
        None => Meeting::Rank0 { host, port },
    };
    Ok(JobMeeting { meeting, job_id, is_default_id, launcher, local })
}

fn open_mpi(me: &Identity, lookup: Lookup<'_>) -> Result<JobMeeting> {
    let local = needed(me.local, Launcher::OpenMpi.row().local_rank)?;
    let namespace = needed(text(PMIX_NAMESPACE, lookup), PMIX_NAMESPACE)?;
    let meeting = if on_one_machine(local, me) {
        // Two jobs may have the same namespace, but two running jobs never have the same directory.
        let job = format!("{namespace} {}", lookup(PMIX_DIR).unwrap_or_default());
        Meeting::Local { name: format!("Open MPI, {}", job.trim()) }
    } else if let Some((host, port)) = set_by_user(lookup)? {
        Meeting::Rank0 { host, port }
    } else {
        return Err(Error::environment(format!(
            "Open MPI's mpirun does not tell the ranks of several machines where to meet; name the machine of rank 0 \
             and a free port there: mpirun -x {MASTER}=node1:29500 -x BURN_DDP_SECRET_FILE=$HOME/.burn-ddp-secret \
             ... (`burnrun secret $HOME/.burn-ddp-secret` makes the file; each machine needs it)"
        )));
    };
    Ok(JobMeeting { meeting, job_id: namespace, is_default_id: false, launcher: "Open MPI", local })
}

fn mpich(me: &Identity, lookup: Lookup<'_>) -> Result<JobMeeting> {
    let local = needed(me.local, Launcher::Mpich.row().local_rank)?;
    let fd = needed(number(PMI_FD, lookup)?, PMI_FD)?;
    let set = if on_one_machine(local, me) { None } else { set_by_user(lookup)? };
    let meeting = match set {
        Some((host, port)) => Meeting::Rank0 { host, port },
        None => Meeting::Pmi { fd, host: text(MPICH_HOST, lookup).unwrap_or_else(hostname) },
    };
    Ok(JobMeeting { meeting, job_id: "MPICH".into(), is_default_id: false, launcher: "MPICH", local })
}

fn by_slurm(me: &Identity, lookup: Lookup<'_>) -> Result<JobMeeting> {
    let local = needed(me.local, Launcher::Slurm.row().local_rank)?;
    let job: u64 = needed(number(SLURM_JOB, lookup)?, SLURM_JOB)?;
    let step: u64 = needed(number(SLURM_STEP, lookup)?, SLURM_STEP)?;
    let meeting = if on_one_machine(local, me) {
        here()
    } else if let Some((host, port)) = set_by_user(lookup)? {
        Meeting::Rank0 { host, port }
    } else {
        let list = lookup(SLURM_NODES).unwrap_or_default();
        let host = slurm_lists::first_machine(&list).ok_or_else(|| {
            Error::environment(format!(
                "{SLURM_NODES}={list:?} is not a list of machines (such as node[01-04]); {MASTER}=host:port says \
                 where to meet, too"
            ))
        })?;
        let ports = SLURM_PORTS.end - SLURM_PORTS.start;
        // Multiplying spreads the neighbouring numbers of jobs that run at the same time. Rank 0 takes the first free
        // port above this one.
        let port = SLURM_PORTS.start + job.wrapping_mul(67).wrapping_add(step.wrapping_mul(7)) % ports;
        Meeting::Rank0Above { host, port: port as u16 }
    };
    let job_id = format!("Slurm job {job}.{step}");
    Ok(JobMeeting { meeting, job_id, is_default_id: false, launcher: "Slurm", local })
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Address that the user has set, under launchers that set ranks but no meeting point.
fn set_by_user(lookup: Lookup<'_>) -> Result<Option<(String, u16)>> {
    match master(lookup)? {
        Some(job) => Ok(Some(job)),
        None => plain_master(lookup),
    }
}

fn master(lookup: Lookup<'_>) -> Result<Option<(String, u16)>> {
    let Some(text) = lookup(MASTER) else { return Ok(None) };
    let (host, port) = bind_and_connect::split(text.trim()).ok_or_else(|| {
        Error::environment(format!("{MASTER}={text:?} is not of the form host:port, for example {MASTER}=node1:29500"))
    })?;
    a_port(MASTER, port)?;
    Ok(Some((host.to_owned(), port)))
}

/// `None` unless both variables are set.
fn plain_master(lookup: Lookup<'_>) -> Result<Option<(String, u16)>> {
    let (Some(host), Some(port)) = (lookup(MASTER_ADDR), lookup(MASTER_PORT)) else { return Ok(None) };
    if host.trim().is_empty() {
        return Err(Error::environment(format!("{MASTER_ADDR} is empty: it must name rank 0's machine")));
    }
    let port = port
        .trim()
        .parse()
        .map_err(|_| Error::environment(format!("{MASTER_PORT}={port:?} is not a port: a number from 1 to 65535")))?;
    a_port(MASTER_PORT, port)?;
    Ok(Some((host.trim().to_owned(), port)))
}

fn a_port(name: &str, port: u16) -> Result<()> {
    if port == 0 {
        return Err(Error::environment(format!("{name}: other ranks cannot find port 0; choose one from 1 to 65535")));
    }
    Ok(())
}

/// Rank on this machine and number of ranks there. The variables may be missing if all ranks must be on this machine.
fn local(me: &Identity, host: &str, launcher: Launcher) -> Result<(usize, usize)> {
    let row = launcher.row();
    match me.local {
        Some(local) => Ok(local),
        None if bind_and_connect::is_loopback(host) || me.world_size == 1 => Ok((me.rank, me.world_size)),
        None => Err(Error::environment(format!(
            "{} and {} are not set; they are needed because the master, {host}, may be another machine (if all ranks \
             run on one machine, give 127.0.0.1 as the master's address)",
            row.local_rank, row.local_world_size
        ))),
    }
}

fn on_one_machine((_, local_world_size): (usize, usize), me: &Identity) -> bool {
    local_world_size == me.world_size
}
