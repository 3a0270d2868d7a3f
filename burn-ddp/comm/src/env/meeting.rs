//! Where the ranks of each launcher meet.

use super::parse::{Lookup, environment, flag, needed, number, text};
use super::table::{
    AGENT_STORE, JOB_ID, Launcher, MASTER, MASTER_ADDR, MASTER_PORT, MPICH_HOST, PMI_FD, PMIX_DIR, PMIX_NAMESPACE,
    RUN_ID, SLURM_JOB, SLURM_NODES, SLURM_STEP, STORE, Who,
};
use super::{Meeting, slurm};
use crate::Result;
use crate::net::address;

/// What `BURN_DDP_MASTER` begins with if it names a local socket.
pub(super) const LOCAL: &str = "local:";
/// Where Slurm jobs meet, by job and step: below the ports that systems hand out by themselves.
const SLURM_PORTS: std::ops::Range<u64> = 20_000..32_000;

pub(super) struct Place {
    pub(super) meeting: Meeting,
    pub(super) job_id: String,
    /// What the launcher is called.
    pub(super) launcher: &'static str,
    /// This process's rank on its machine, and how many ranks are there.
    pub(super) local: (usize, usize),
}

impl Place {
    pub(super) fn find(launcher: Launcher, who: &Who, restarts: u32, lookup: Lookup<'_>) -> Result<Place> {
        let place = match launcher {
            Launcher::Ours => ours(who, lookup),
            Launcher::Plain => plain(who, lookup),
            Launcher::OpenMpi => open_mpi(who, lookup),
            Launcher::Mpich => mpich(who, lookup),
            Launcher::Slurm => by_slurm(who, lookup),
        };
        let mut place = place?;
        if let Some(job_id) = lookup(JOB_ID) {
            place.job_id = job_id;
        }
        if let Meeting::Local { name } = &mut place.meeting
            && name.is_empty()
        {
            *name = format!("{}, {}, restart {restarts}", place.launcher, place.job_id);
        }
        Ok(place)
    }
}

/// On one machine, under a name yet to be made.
fn here() -> Meeting {
    Meeting::Local { name: String::new() }
}

fn ours(who: &Who, lookup: Lookup<'_>) -> Result<Place> {
    let store = lookup(STORE);
    let store = store.as_deref().map(str::trim);
    if let Some(name) = local_socket(lookup)? {
        let local = who.local.unwrap_or((who.rank, who.world_size));
        return Ok(Place { job_id: name.clone(), meeting: Meeting::Local { name }, launcher: "burnrun", local });
    }
    let (host, port) = needed(master(lookup)?, MASTER)?;
    if let Some((plain_host, plain_port)) = plain_master(lookup)?
        && Launcher::Plain.traces_rank(lookup)
        && (&plain_host, plain_port) != (&host, port)
    {
        return Err(environment(format!(
            "the variables of two launchers disagree: {MASTER}={} but {MASTER_ADDR}:{MASTER_PORT}={}; unset those that do not belong to this job",
            address::join(&host, port),
            address::join(&plain_host, plain_port)
        )));
    }
    let local = local(who, &host, Launcher::Ours)?;
    let job_id = format!("port {port}");
    let meeting = match store {
        None if on_one_machine(local, who) => here(),
        None | Some("rank0") => Meeting::Rank0 { host, port },
        Some("launcher") => Meeting::Launcher { host, port },
        Some("above") => Meeting::Rank0Above { host, port },
        Some(other) => {
            return Err(environment(format!("{STORE}={other:?} is neither \"launcher\" nor \"rank0\" nor \"above\"")));
        }
    };
    Ok(Place { meeting, job_id, launcher: "burnrun", local })
}

/// The local socket that `BURN_DDP_MASTER` names, if it does.
fn local_socket(lookup: Lookup<'_>) -> Result<Option<String>> {
    let Some(text) = lookup(MASTER) else { return Ok(None) };
    match text.trim().strip_prefix(LOCAL) {
        Some("") => {
            Err(environment(format!("{MASTER}={text:?} names no local socket, for example {MASTER}=local:job7")))
        }
        socket => Ok(socket.map(str::to_owned)),
    }
}

fn plain(who: &Who, lookup: Lookup<'_>) -> Result<Place> {
    let (host, port) = needed(plain_master(lookup)?, MASTER_ADDR)?;
    let local = local(who, &host, Launcher::Plain)?;
    let (launcher, job_id) = match lookup(RUN_ID) {
        // Static torchrun jobs are all called "none"; the port tells them apart.
        Some(run) => ("torchrun", format!("{run}, port {port}")),
        None => ("variables", format!("port {port}")),
    };
    // Its own store has the port, even if it is not asked for.
    let taken = flag(AGENT_STORE, lookup)?;
    let meeting = match master(lookup)? {
        _ if on_one_machine(local, who) => here(),
        Some((host, port)) => Meeting::Rank0 { host, port },
        None if taken => Meeting::Rank0Above { host, port },
        None => Meeting::Rank0 { host, port },
    };
    Ok(Place { meeting, job_id, launcher, local })
}

fn open_mpi(who: &Who, lookup: Lookup<'_>) -> Result<Place> {
    let local = needed(who.local, Launcher::OpenMpi.row().local_rank)?;
    let namespace = needed(text(PMIX_NAMESPACE, lookup), PMIX_NAMESPACE)?;
    let meeting = if on_one_machine(local, who) {
        // Two jobs' namespaces may be equal, the directories of two running ones not.
        let job = format!("{namespace} {}", lookup(PMIX_DIR).unwrap_or_default());
        Meeting::Local { name: format!("Open MPI, {}", job.trim()) }
    } else if let Some((host, port)) = told_where(lookup)? {
        Meeting::Rank0 { host, port }
    } else {
        return Err(environment(format!(
            "Open MPI's mpirun does not tell the ranks of several machines where to meet; name the machine of rank 0 and a free port there: mpirun -x {MASTER}=node1:29500 -x BURN_DDP_SECRET_FILE=$HOME/.burn-ddp-secret ... (`burnrun secret $HOME/.burn-ddp-secret` makes the file; each machine needs it)"
        )));
    };
    Ok(Place { meeting, job_id: namespace, launcher: "Open MPI", local })
}

fn mpich(who: &Who, lookup: Lookup<'_>) -> Result<Place> {
    let local = needed(who.local, Launcher::Mpich.row().local_rank)?;
    let fd = needed(number(PMI_FD, lookup)?, PMI_FD)?;
    let told = if on_one_machine(local, who) { None } else { told_where(lookup)? };
    let meeting = match told {
        Some((host, port)) => Meeting::Rank0 { host, port },
        None => Meeting::Pmi { fd, host: text(MPICH_HOST, lookup).unwrap_or_else(hostname) },
    };
    Ok(Place { meeting, job_id: "MPICH".into(), launcher: "MPICH", local })
}

fn by_slurm(who: &Who, lookup: Lookup<'_>) -> Result<Place> {
    let local = needed(who.local, Launcher::Slurm.row().local_rank)?;
    let job: u64 = needed(number(SLURM_JOB, lookup)?, SLURM_JOB)?;
    let step: u64 = needed(number(SLURM_STEP, lookup)?, SLURM_STEP)?;
    let meeting = if on_one_machine(local, who) {
        here()
    } else if let Some((host, port)) = told_where(lookup)? {
        Meeting::Rank0 { host, port }
    } else {
        let list = lookup(SLURM_NODES).unwrap_or_default();
        let host = slurm::first_machine(&list).ok_or_else(|| {
            environment(format!(
                "{SLURM_NODES}={list:?} is not a list of machines (such as node[01-04]); {MASTER}=host:port says where to meet, too"
            ))
        })?;
        let ports = SLURM_PORTS.end - SLURM_PORTS.start;
        // Jobs that run side by side have numbers near each other; rank 0 takes the first free port above this one.
        let port = SLURM_PORTS.start + job.wrapping_mul(67).wrapping_add(step.wrapping_mul(7)) % ports;
        Meeting::Rank0Above { host, port: port as u16 }
    };
    Ok(Place { meeting, job_id: format!("Slurm job {job}.{step}"), launcher: "Slurm", local })
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// What was set to say where to meet, under launchers that only say who.
fn told_where(lookup: Lookup<'_>) -> Result<Option<(String, u16)>> {
    match master(lookup)? {
        Some(place) => Ok(Some(place)),
        None => plain_master(lookup),
    }
}

fn master(lookup: Lookup<'_>) -> Result<Option<(String, u16)>> {
    let Some(text) = lookup(MASTER) else { return Ok(None) };
    let (host, port) = address::split(text.trim()).ok_or_else(|| {
        environment(format!("{MASTER}={text:?} is not of the form host:port, for example {MASTER}=node1:29500"))
    })?;
    a_port(MASTER, port)?;
    Ok(Some((host.to_owned(), port)))
}

/// `None` unless both variables are set.
fn plain_master(lookup: Lookup<'_>) -> Result<Option<(String, u16)>> {
    let (Some(host), Some(port)) = (lookup(MASTER_ADDR), lookup(MASTER_PORT)) else { return Ok(None) };
    if host.trim().is_empty() {
        return Err(environment(format!("{MASTER_ADDR} is empty: it must name rank 0's machine")));
    }
    let port = port
        .trim()
        .parse()
        .map_err(|_| environment(format!("{MASTER_PORT}={port:?} is not a port: a number from 1 to 65535")))?;
    a_port(MASTER_PORT, port)?;
    Ok(Some((host.trim().to_owned(), port)))
}

fn a_port(name: &str, port: u16) -> Result<()> {
    if port == 0 {
        return Err(environment(format!("{name}: port 0 is no port that other ranks could find")));
    }
    Ok(())
}

/// The rank on this machine and their number, where they need not be said.
fn local(who: &Who, host: &str, launcher: Launcher) -> Result<(usize, usize)> {
    let row = launcher.row();
    match who.local {
        Some(local) => Ok(local),
        None if address::is_loopback(host) || who.world_size == 1 => Ok((who.rank, who.world_size)),
        None => Err(environment(format!(
            "{} and {} are not set; they are needed because the master, {host}, may be another machine (if all ranks run on one, name it 127.0.0.1)",
            row.local_rank, row.local_world_size
        ))),
    }
}

fn on_one_machine((_, local_world_size): (usize, usize), who: &Who) -> bool {
    local_world_size == who.world_size
}
