//! Which variables say who this process is: the one table.
//!
//! | meaning | ours | plain (torchrun's) | needed |
//! |---|---|---|---|
//! | rank in the world | `BURN_DDP_RANK` | `RANK` | yes |
//! | number of ranks | `BURN_DDP_WORLD_SIZE` | `WORLD_SIZE` | yes |
//! | where to meet | `BURN_DDP_MASTER=host:port` | `MASTER_ADDR`, `MASTER_PORT` | yes |
//! | rank on this machine | `BURN_DDP_LOCAL_RANK` | `LOCAL_RANK` | if the master is another machine |
//! | ranks on this machine | `BURN_DDP_LOCAL_WORLD_SIZE` | `LOCAL_WORLD_SIZE` | with the one above |
//! | rank of this machine | `BURN_DDP_NODE_RANK` | `GROUP_RANK` | no |
//! | job | `BURN_DDP_JOB_ID` | `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT` | no |
//! | who hosts the store | `BURN_DDP_STORE=launcher\|rank0\|above` | `TORCHELASTIC_USE_AGENT_STORE` | no |
//! | which attempt | `BURN_DDP_RESTART_COUNT` | `TORCHELASTIC_RESTART_COUNT` | no |
//! | the job's secret | `BURN_DDP_SECRET_FILE=file` | | between machines |
//! | do without it | `BURN_DDP_TRUST_NETWORK=1` | | no |
//! | which network | `BURN_DDP_INTERFACE=name or address` | | no |
//! | what the launcher should know | `BURN_DDP_EVENTS=file`, `BURN_DDP_REPORT_DIR=dir` | | no |
//!
//! Ours come first. A family of which something is set is set completely, or it is an error: never a world of 1 by accident. Two complete
//! families must agree.

use std::path::PathBuf;

use crate::net::address;
use crate::rendezvous::PORTS_ABOVE;
use crate::{Error, Result};

/// Longest job id, in bytes.
pub(crate) const JOB_ID_CAP: usize = 256;

/// Who this process is within a job, and where the job meets, as its launcher said.
///
/// ```
/// use burn_ddp_comm::{LaunchEnv, Meeting};
///
/// let set = [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];
/// let lookup = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
///
/// let env = LaunchEnv::from_lookup(&lookup)?.expect("variables are set");
/// assert_eq!((env.rank, env.world_size, env.local_rank), (3, 4, 3));
/// assert_eq!(env.meeting, Meeting::Rank0 { host: "localhost".into(), port: 29500 });
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
    /// Where the ranks meet.
    pub meeting: Meeting,
    /// Tells this job from others that may be met by mistake.
    pub job_id: String,
    /// Whose variables they are: "burnrun" (ours), "torchrun", or "variables" (plain ones, set by hand or a script).
    pub launcher: &'static str,
    /// Which attempt at the job this is: 0 first, one more after each restart.
    pub restart_count: u32,
    /// A file that holds the job's secret.
    pub secret_file: Option<PathBuf>,
    /// Whoever reaches the job's ports may join: no secret is needed.
    pub trust_network: bool,
    /// The network interface, or the address, on which this rank listens and from which it connects.
    pub interface: Option<String>,
    /// A file to which each process appends its [events](crate::post_mortem::Event), as lines of JSON.
    pub events: Option<PathBuf>,
    /// A directory in which a rank whose world ends in an error leaves its [report](crate::post_mortem::PostMortem).
    pub report_dir: Option<PathBuf>,
}

/// Where ranks meet: who hosts the store, at which address. Shown as that.
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
    /// Rank 0 hosts the store on a port it finds free above the given one, which the launcher keeps for itself.
    Rank0Above {
        /// Name or address of rank 0's machine.
        host: String,
        /// The port below those to search.
        port: u16,
    },
    /// All ranks run on one machine, as one user: rank 0 hosts the store on a socket of the system that nobody else can serve or
    /// reach, so no secret is needed.
    Local {
        /// What the ranks of this job know it by, and no other job of this user.
        name: String,
    },
}

impl std::fmt::Display for Meeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Launcher { host, port } | Self::Rank0 { host, port } => f.write_str(&address::join(host, *port)),
            Self::Rank0Above { host, port } => write!(f, "{host}, one of the {PORTS_ABOVE} ports above {port}"),
            Self::Local { name } => write!(f, "local socket {name:?}"),
        }
    }
}

impl Meeting {
    /// Name or address of the machine to meet on.
    pub fn host(&self) -> &str {
        match self {
            Self::Launcher { host, .. } | Self::Rank0 { host, .. } | Self::Rank0Above { host, .. } => host,
            Self::Local { .. } => "localhost",
        }
    }

    /// The port, as the variables give it; 0 if the meeting has none.
    pub fn port(&self) -> u16 {
        match self {
            Self::Launcher { port, .. } | Self::Rank0 { port, .. } | Self::Rank0Above { port, .. } => *port,
            Self::Local { .. } => 0,
        }
    }
}

/// The variables of one family, by meaning.
struct Family {
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_world_size: &'static str,
    node_rank: &'static str,
    master: Master,
    /// Optional ones, whose presence alone says that a launcher was here.
    hints: &'static [&'static str],
}

#[derive(Clone, Copy)]
enum Master {
    /// One variable, `host:port`.
    Joined(&'static str),
    /// A variable for the host and one for the port.
    Split(&'static str, &'static str),
}

const STORE: &str = "BURN_DDP_STORE";
const JOB_ID: &str = "BURN_DDP_JOB_ID";
const RESTART_COUNT: &str = "BURN_DDP_RESTART_COUNT";
const SECRET_FILE: &str = "BURN_DDP_SECRET_FILE";
const TRUST_NETWORK: &str = "BURN_DDP_TRUST_NETWORK";
const INTERFACE: &str = "BURN_DDP_INTERFACE";
const EVENTS: &str = "BURN_DDP_EVENTS";
const REPORT_DIR: &str = "BURN_DDP_REPORT_DIR";
/// What `BURN_DDP_MASTER` begins with if it names a local socket.
const LOCAL: &str = "local:";
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
const RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";

const OURS: Family = Family {
    rank: "BURN_DDP_RANK",
    world_size: "BURN_DDP_WORLD_SIZE",
    local_rank: "BURN_DDP_LOCAL_RANK",
    local_world_size: "BURN_DDP_LOCAL_WORLD_SIZE",
    node_rank: "BURN_DDP_NODE_RANK",
    master: Master::Joined("BURN_DDP_MASTER"),
    hints: &[JOB_ID, STORE],
};

const PLAIN: Family = Family {
    rank: "RANK",
    world_size: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_world_size: "LOCAL_WORLD_SIZE",
    node_rank: "GROUP_RANK",
    master: Master::Split("MASTER_ADDR", "MASTER_PORT"),
    hints: &[AGENT_STORE, RUN_ID, RESTARTS],
};

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl LaunchEnv {
    /// Rank `rank` of `world_size`, all on this machine, as burnrun starts it; the rest is not set.
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
            events: None,
            report_dir: None,
        }
    }

    /// Reads the process's environment. `None` if no launcher left a trace: run alone.
    ///
    /// # Errors
    /// [`Error::Environment`] as for [`from_lookup`](Self::from_lookup).
    pub fn detect() -> Result<Option<LaunchEnv>> {
        // A value that is no text becomes one that is no number either, and is shown.
        Self::from_lookup(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Reads variables through `lookup`. `None` if none of the table is set.
    ///
    /// # Errors
    /// [`Error::Environment`] if a family is set in part (says what is set and what is missing), a value is not what it should be, or both
    /// families are complete and disagree.
    pub fn from_lookup(lookup: Lookup<'_>) -> Result<Option<LaunchEnv>> {
        let (ours, plain) = (OURS.set(lookup), PLAIN.set(lookup));
        if ours.is_empty() && plain.is_empty() {
            return Ok(None);
        }
        if ours.is_empty() {
            return PLAIN.read(lookup).map(Some);
        }
        let env = OURS.read(lookup)?;
        if PLAIN.missing(lookup).is_empty() {
            env.must_agree(&PLAIN.read(lookup)?)?;
        }
        Ok(Some(env))
    }

    /// The variables that make a child process this rank, in both families.
    pub fn variables(&self) -> Vec<(String, String)> {
        let mut variables = vec![(JOB_ID, self.job_id.clone())];
        for family in [OURS, PLAIN] {
            variables.extend([
                (family.rank, self.rank.to_string()),
                (family.world_size, self.world_size.to_string()),
                (family.local_rank, self.local_rank.to_string()),
                (family.local_world_size, self.local_world_size.to_string()),
                (family.node_rank, self.node_rank.to_string()),
            ]);
            let (host, port) = (self.meeting.host(), self.meeting.port());
            match (family.master, &self.meeting) {
                (Master::Joined(master), Meeting::Local { name }) => variables.push((master, format!("{LOCAL}{name}"))),
                (Master::Joined(master), _) => variables.push((master, address::join(host, port))),
                // Others who read these cannot meet there.
                (Master::Split(..), Meeting::Local { .. }) => {}
                (Master::Split(name, name_port), _) => {
                    variables.extend([(name, host.to_owned()), (name_port, port.to_string())]);
                }
            }
        }
        variables.push(match self.meeting {
            Meeting::Launcher { .. } => (STORE, "launcher".to_owned()),
            Meeting::Rank0 { .. } | Meeting::Local { .. } => (STORE, "rank0".to_owned()),
            Meeting::Rank0Above { .. } => (STORE, "above".to_owned()),
        });
        variables.push((RESTART_COUNT, self.restart_count.to_string()));
        if self.trust_network {
            variables.push((TRUST_NETWORK, "1".to_owned()));
        }
        variables.extend(self.interface.iter().map(|interface| (INTERFACE, interface.clone())));
        let paths = [(SECRET_FILE, &self.secret_file), (EVENTS, &self.events), (REPORT_DIR, &self.report_dir)];
        variables.extend(
            paths
                .into_iter()
                .filter_map(|(name, path)| path.as_ref().map(|path| (name, path.to_string_lossy().into_owned()))),
        );
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Two complete families must say the same.
    fn must_agree(&self, plain: &LaunchEnv) -> Result<()> {
        let master = |env: &LaunchEnv| address::join(env.meeting.host(), env.meeting.port());
        let pairs = [
            (OURS.rank, self.rank.to_string(), PLAIN.rank, plain.rank.to_string()),
            (OURS.world_size, self.world_size.to_string(), PLAIN.world_size, plain.world_size.to_string()),
            (OURS.local_rank, self.local_rank.to_string(), PLAIN.local_rank, plain.local_rank.to_string()),
            (
                OURS.local_world_size,
                self.local_world_size.to_string(),
                PLAIN.local_world_size,
                plain.local_world_size.to_string(),
            ),
            (OURS.master.shown(), master(self), PLAIN.master.shown(), master(plain)),
        ];
        let differing: Vec<String> = pairs
            .iter()
            .filter(|(_, ours, _, theirs)| ours != theirs)
            .map(|(name, ours, plain_name, theirs)| format!("{name}={ours} but {plain_name}={theirs}"))
            .collect();
        if differing.is_empty() {
            return Ok(());
        }
        Err(environment(format!(
            "the variables of two launchers disagree: {}; unset one family (BURN_DDP_* or RANK, WORLD_SIZE, MASTER_*)",
            differing.join(", ")
        )))
    }
}

impl Master {
    fn names(&self) -> Vec<&'static str> {
        match *self {
            Self::Joined(name) => vec![name],
            Self::Split(host, port) => vec![host, port],
        }
    }

    fn shown(&self) -> &'static str {
        match *self {
            Self::Joined(name) => name,
            Self::Split(..) => "MASTER_ADDR:MASTER_PORT",
        }
    }
}

impl Family {
    fn required(&self) -> Vec<&'static str> {
        [vec![self.rank, self.world_size], self.master.names()].concat()
    }

    /// The variables of this family that are set.
    fn set(&self, lookup: Lookup<'_>) -> Vec<&'static str> {
        let optional = [self.local_rank, self.local_world_size, self.node_rank];
        let all = [&self.required(), &optional[..], self.hints].concat();
        all.into_iter().filter(|name| lookup(name).is_some()).collect()
    }

    fn missing(&self, lookup: Lookup<'_>) -> Vec<&'static str> {
        self.required().into_iter().filter(|name| lookup(name).is_none()).collect()
    }

    /// The family's values, of which at least one is set.
    fn read(&self, lookup: Lookup<'_>) -> Result<LaunchEnv> {
        let missing = self.missing(lookup);
        if !missing.is_empty() {
            return Err(environment(format!(
                "{} set, but {} not: set all of them to run as a rank of a job, or none to run alone",
                listed(&self.set(lookup)),
                listed(&missing)
            )));
        }
        let number = |name| read_number(name, lookup);
        let rank = needed(number(self.rank)?, self.rank)?;
        let world_size = needed(number(self.world_size)?, self.world_size)?;
        if world_size == 0 {
            return Err(environment(format!("{}=0: a world has at least one rank", self.world_size)));
        }
        if rank >= world_size {
            let (rank_name, size_name) = (self.rank, self.world_size);
            return Err(environment(format!(
                "{rank_name}={rank} but {size_name}={world_size}: ranks go from 0 to {}",
                world_size - 1
            )));
        }
        let local_socket = self.local_socket(lookup)?;
        let (host, port) = match local_socket {
            Some(_) => ("localhost".to_owned(), 0),
            None => self.master_address(lookup)?,
        };
        let (local_rank, local_world_size) = self.local(rank, world_size, &host, lookup)?;
        // Machines are numbered in the order of their ranks; exact if all have equally many.
        let node_rank = number(self.node_rank)?.unwrap_or(rank.saturating_sub(local_rank) / local_world_size);
        let (meeting, job_id, launcher) = match (self.master, local_socket) {
            (_, Some(name)) => {
                let job_id = lookup(JOB_ID).unwrap_or_else(|| name.clone());
                (Meeting::Local { name }, job_id, "burnrun")
            }
            (Master::Joined(_), _) => ours_meeting(host, port, lookup)?,
            (Master::Split(..), _) => plain_meeting(host, port, lookup)?,
        };
        if job_id.is_empty() || job_id.len() > JOB_ID_CAP {
            return Err(environment(format!("the job id has {} bytes; it must have 1 to {JOB_ID_CAP}", job_id.len())));
        }
        let path = |name| lookup(name).map(PathBuf::from);
        let restarts = match self.master {
            Master::Joined(_) => RESTART_COUNT,
            Master::Split(..) => RESTARTS,
        };
        let restart_count = read_number(restarts, lookup)?.unwrap_or(0);
        Ok(LaunchEnv {
            rank,
            world_size,
            local_rank,
            local_world_size,
            node_rank,
            meeting,
            job_id,
            launcher,
            restart_count: u32::try_from(restart_count)
                .map_err(|_| environment(format!("{restarts}={restart_count} is too large")))?,
            secret_file: path(SECRET_FILE),
            trust_network: read_flag(TRUST_NETWORK, lookup)?,
            interface: lookup(INTERFACE).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()),
            events: path(EVENTS),
            report_dir: path(REPORT_DIR),
        })
    }

    /// The local socket that the master's variable names, if it does.
    fn local_socket(&self, lookup: Lookup<'_>) -> Result<Option<String>> {
        let Master::Joined(name) = self.master else { return Ok(None) };
        let Some(text) = lookup(name) else { return Ok(None) };
        match text.trim().strip_prefix(LOCAL) {
            Some("") => {
                Err(environment(format!("{name}={text:?} names no local socket, for example {name}=local:job7")))
            }
            socket => Ok(socket.map(str::to_owned)),
        }
    }

    fn master_address(&self, lookup: Lookup<'_>) -> Result<(String, u16)> {
        let value = |name| needed(lookup(name), name);
        let (host, port) = match self.master {
            Master::Joined(name) => {
                let text = value(name)?;
                let (host, port) = address::split(text.trim()).ok_or_else(|| {
                    environment(format!("{name}={text:?} is not of the form host:port, for example {name}=node1:29500"))
                })?;
                (host.to_owned(), port)
            }
            Master::Split(host_name, port_name) => {
                let (host, port) = (value(host_name)?, value(port_name)?);
                if host.trim().is_empty() {
                    return Err(environment(format!("{host_name} is empty: it must name rank 0's machine")));
                }
                let port = port.trim().parse().map_err(|_| {
                    environment(format!("{port_name}={port:?} is not a port: a number from 1 to 65535"))
                })?;
                (host.trim().to_owned(), port)
            }
        };
        if port == 0 {
            let name = self.master.names().pop().unwrap_or_default();
            return Err(environment(format!("{name}: port 0 is no port that other ranks could find")));
        }
        Ok((host, port))
    }

    fn local(&self, rank: usize, world_size: usize, host: &str, lookup: Lookup<'_>) -> Result<(usize, usize)> {
        let (rank_name, size_name) = (self.local_rank, self.local_world_size);
        let (local_rank, size) = match (read_number(rank_name, lookup)?, read_number(size_name, lookup)?) {
            (Some(local_rank), Some(size)) => (local_rank, size),
            (Some(_), None) => {
                return Err(environment(format!("{rank_name} is set, but {size_name} is not: set both or none")));
            }
            (None, Some(_)) => {
                return Err(environment(format!("{size_name} is set, but {rank_name} is not: set both or none")));
            }
            (None, None) if address::is_loopback(host) => (rank, world_size),
            (None, None) => {
                return Err(environment(format!(
                    "{rank_name} and {size_name} are not set; they are needed because the master, {host}, may be another machine (if all ranks run on one, name it 127.0.0.1)"
                )));
            }
        };
        if local_rank >= size || size > world_size {
            return Err(environment(format!(
                "{rank_name}={local_rank}, {size_name}={size} and {}={world_size} contradict each other: local rank < local world size <= world size",
                self.world_size
            )));
        }
        Ok((local_rank, size))
    }
}

fn ours_meeting(host: String, port: u16, lookup: Lookup<'_>) -> Result<(Meeting, String, &'static str)> {
    let job_id = lookup(JOB_ID).unwrap_or_else(|| format!("port {port}"));
    match lookup(STORE).as_deref().map(str::trim) {
        None | Some("rank0") => Ok((Meeting::Rank0 { host, port }, job_id, "burnrun")),
        Some("launcher") => Ok((Meeting::Launcher { host, port }, job_id, "burnrun")),
        Some("above") => Ok((Meeting::Rank0Above { host, port }, job_id, "burnrun")),
        Some(other) => {
            Err(environment(format!("{STORE}={other:?} is neither \"launcher\" nor \"rank0\" nor \"above\"")))
        }
    }
}

fn plain_meeting(host: String, port: u16, lookup: Lookup<'_>) -> Result<(Meeting, String, &'static str)> {
    let run = lookup(RUN_ID);
    let restarts = read_number(RESTARTS, lookup)?.unwrap_or(0);
    let launcher = if run.is_some() { "torchrun" } else { "variables" };
    let job_id = match run {
        // Static torchrun jobs are all called "none"; the port tells them apart.
        Some(run) => format!("{run}, restart {restarts}, port {port}"),
        None => format!("port {port}"),
    };
    match lookup(AGENT_STORE).as_deref().map(str::trim) {
        Some("True" | "true" | "1") => Ok((Meeting::Rank0Above { host, port }, job_id, launcher)),
        None | Some("False" | "false" | "0") => Ok((Meeting::Rank0 { host, port }, job_id, launcher)),
        Some(other) => Err(environment(format!("{AGENT_STORE}={other:?} is neither True nor False"))),
    }
}

fn read_number(name: &str, lookup: Lookup<'_>) -> Result<Option<usize>> {
    let Some(text) = lookup(name) else { return Ok(None) };
    let number =
        text.trim().parse().map_err(|_| environment(format!("{name}={text:?} is not a number (0, 1, 2, ...)")))?;
    Ok(Some(number))
}

fn read_flag(name: &str, lookup: Lookup<'_>) -> Result<bool> {
    match lookup(name).as_deref().map(str::trim) {
        None | Some("" | "0" | "false") => Ok(false),
        Some("1" | "true") => Ok(true),
        Some(other) => Err(environment(format!("{name}={other:?} is neither 1 nor 0"))),
    }
}

fn needed<T>(value: Option<T>, name: &str) -> Result<T> {
    value.ok_or_else(|| environment(format!("{name} is not set")))
}

/// `A is`, or `A, B and C are`.
fn listed(names: &[&str]) -> String {
    match names {
        [name] => format!("{name} is"),
        [head @ .., last] => format!("{} and {last} are", head.join(", ")),
        [] => "none is".to_owned(),
    }
}

fn environment(message: String) -> Error {
    Error::Environment { message }
}
