//! Options of a world: deadlines, heartbeats, engine, and records of what ranks do.

use std::path::PathBuf;
use std::time::Duration;

use crate::{EngineChoice, Error, Result};

/// Options of a [`World`](crate::World). All ranks should use the same.
///
/// ```
/// use burn_ddp_comm::WorldOptions;
/// use std::time::Duration;
///
/// let options = WorldOptions { timeout: Duration::from_secs(30), ..WorldOptions::default() };
/// assert_eq!(options.join_timeout, Duration::from_secs(300));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldOptions {
    /// Deadline of a collective, counted from its call. 10 minutes by default.
    pub timeout: Duration,
    /// Deadline for all ranks to join. 5 minutes by default.
    pub join_timeout: Duration,
    /// Time between heartbeats to ranks of other processes. 1 second by default. A rank that misses two heartbeats is
    /// reported, but does not count as lost yet.
    pub heartbeat: Duration,
    /// Silence after which a rank counts as lost. `None`, the default: 30 seconds if the rank's machine does not
    /// answer; if the machine answers but the process does not, only the collective's deadline ends the wait, since a
    /// process that is stopped or debugged may go on.
    pub peer_timeout: Option<Duration>,
    /// Time after which a waiting collective is reported; again after twice the time, and so on. 30 seconds by default.
    pub stall: Duration,
    /// Number of collectives that each rank keeps for its report. 128 by default.
    pub history: usize,
    /// Engine of all groups. `None`, the default: shm for groups whose ranks share a machine, tcp for others.
    pub engine: Option<EngineChoice>,
    /// True if data that the tcp engine carries between processes are encrypted and authenticated; shared memory and
    /// local sockets stay plain. False by default. Engines of other crates do not encrypt, so it is an error to choose
    /// one in `engine` and to set this.
    pub encrypt_data: bool,
    /// Number of connections, 1 to 64, over which the tcp engine spreads the data between two ranks of different
    /// machines. 1 by default: more help on networks that limit the speed of each connection; on other networks they
    /// compete with each other.
    pub flows: u8,
    /// Number of logical ranks: the micro-batches of a training step over all ranks, however many those are. `None`,
    /// the default: a program may set it later. This crate only compares it between the ranks.
    pub logical_ranks: Option<usize>,
    /// File of the [timeline](crate::timeline), on each machine. `None`, the default: no timeline.
    pub timeline: Option<PathBuf>,
    /// Names and values of further settings that must be the same on all ranks, which compare them when they join.
    /// Empty by default.
    pub config: Vec<(String, String)>,
}

/// Time after which a machine that does not answer is given up, unless the user sets one.
const MACHINE_TIMEOUT: Duration = Duration::from_secs(30);
/// Shortest heartbeat; shorter ones would only make work.
const SHORTEST_HEARTBEAT: Duration = Duration::from_millis(10);
/// Limit on connections per rank pair.
const MAX_FLOWS: u8 = 64;
/// Longest history.
const MAX_HISTORY: usize = 1_000_000;

impl Default for WorldOptions {
    fn default() -> Self {
        WorldOptions {
            timeout: Duration::from_secs(600),
            join_timeout: Duration::from_secs(300),
            heartbeat: Duration::from_secs(1),
            peer_timeout: None,
            stall: Duration::from_secs(30),
            history: 128,
            engine: None,
            encrypt_data: false,
            flows: 1,
            logical_ranks: None,
            timeline: None,
            config: Vec::new(),
        }
    }
}

impl WorldOptions {
    /// The defaults, changed by the environment variables `BURN_DDP_TIMEOUT`, `BURN_DDP_JOIN_TIMEOUT`,
    /// `BURN_DDP_HEARTBEAT`, `BURN_DDP_PEER_TIMEOUT` and `BURN_DDP_STALL` (seconds, fractions allowed),
    /// `BURN_DDP_HISTORY` (a number), `BURN_DDP_ENGINE` (`shm`, `tcp`, `mpi` or `nccl`), `BURN_DDP_ENCRYPT` (`data` or
    /// `none`), `BURN_DDP_FLOWS` and `BURN_DDP_LOGICAL_RANKS` (numbers) and `BURN_DDP_TIMELINE` (a file).
    ///
    /// # Errors
    /// [`Error::Environment`] if the value of a variable cannot be parsed or is out of range, a peer timeout is no more
    /// than two heartbeats, or data are to be encrypted by an engine that does not encrypt.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp_comm::WorldOptions;
    ///
    /// // A longer deadline than the environment's, for a program that is debugged.
    /// let mut options = WorldOptions::from_env()?;
    /// options.timeout *= 10;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    pub fn from_env() -> Result<WorldOptions> {
        WorldOptions::from_lookup(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Like [`from_env`](WorldOptions::from_env), with the variables looked up by `lookup`.
    ///
    /// ```
    /// use burn_ddp_comm::WorldOptions;
    /// use std::time::Duration;
    ///
    /// let options = WorldOptions::from_lookup(&|name| (name == "BURN_DDP_TIMEOUT").then(|| "2.5".into()))?;
    /// assert_eq!(options.timeout, Duration::from_millis(2500));
    /// assert!(WorldOptions::from_lookup(&|_| Some("soon".into())).is_err());
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`from_env`](WorldOptions::from_env).
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<WorldOptions> {
        let mut options = WorldOptions::default();
        if let Some(timeout) = seconds("BURN_DDP_TIMEOUT", lookup)? {
            options.timeout = timeout;
        }
        if let Some(timeout) = seconds("BURN_DDP_JOIN_TIMEOUT", lookup)? {
            options.join_timeout = timeout;
        }
        if let Some(heartbeat) = seconds("BURN_DDP_HEARTBEAT", lookup)? {
            options.heartbeat = heartbeat;
        }
        options.peer_timeout = seconds("BURN_DDP_PEER_TIMEOUT", lookup)?;
        if let Some(stall) = seconds("BURN_DDP_STALL", lookup)? {
            options.stall = stall;
        }
        if let Some(text) = lookup("BURN_DDP_HISTORY") {
            options.history = text.trim().parse().ok().filter(|n| *n <= MAX_HISTORY).ok_or_else(|| {
                Error::environment(format!(
                    "BURN_DDP_HISTORY={text:?} is not a number of collectives from 0 to \
                                            {MAX_HISTORY}"
                ))
            })?;
        }
        options.engine = lookup("BURN_DDP_ENGINE").map(|text| text.parse()).transpose()?;
        options.encrypt_data = encrypt_data(lookup)?;
        options.flows = flows(lookup)?.unwrap_or(options.flows);
        options.logical_ranks = logical_ranks(lookup)?;
        options.timeline = lookup("BURN_DDP_TIMELINE").map(PathBuf::from);
        options.check()?;
        Ok(options)
    }

    /// Checks that the options fit together.
    pub(crate) fn check(&self) -> Result<()> {
        let (heartbeat, timeout) = (self.heartbeat, self.peer_timeout);
        if heartbeat < SHORTEST_HEARTBEAT {
            return Err(Error::environment(format!(
                "a heartbeat of {heartbeat:?}: the shortest is \
                                                   {SHORTEST_HEARTBEAT:?}"
            )));
        }
        if !(1..=MAX_FLOWS).contains(&self.flows) {
            return Err(Error::environment(format!(
                "{} connections between two ranks: 1 to {MAX_FLOWS} are possible (BURN_DDP_FLOWS)",
                self.flows
            )));
        }
        if let Some(EngineChoice::External(name)) = self.engine
            && self.encrypt_data
        {
            return Err(Error::environment(format!(
                "BURN_DDP_ENCRYPT=data, but BURN_DDP_ENGINE={name}: {name}'s connections are not encrypted; leave one \
                 of the two unset"
            )));
        }
        match timeout {
            Some(timeout) if timeout <= heartbeat.saturating_mul(2) => Err(Error::environment(format!(
                "a peer timeout of {timeout:?} with a heartbeat of {heartbeat:?}: healthy ranks would count as lost; \
                 it must be more than two heartbeats (BURN_DDP_PEER_TIMEOUT, BURN_DDP_HEARTBEAT)"
            ))),
            _ => Ok(()),
        }
    }

    /// Time after which a machine that does not answer is given up.
    pub(crate) fn machine_timeout(&self) -> Duration {
        self.peer_timeout.unwrap_or(MACHINE_TIMEOUT)
    }
}

fn encrypt_data(lookup: &dyn Fn(&str) -> Option<String>) -> Result<bool> {
    match lookup("BURN_DDP_ENCRYPT").as_deref().map(str::trim) {
        None | Some("" | "none") => Ok(false),
        Some("data") => Ok(true),
        Some(other) => Err(Error::environment(format!(
            "BURN_DDP_ENCRYPT={other:?} is neither \"data\" nor \"none\"; store and control connections are always \
             encrypted"
        ))),
    }
}

fn flows(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<u8>> {
    let Some(text) = lookup("BURN_DDP_FLOWS") else { return Ok(None) };
    let number = text.trim().parse().ok().ok_or_else(|| {
        Error::environment(format!("BURN_DDP_FLOWS={text:?} is not a number of connections from 1 to {MAX_FLOWS}"))
    })?;
    Ok(Some(number))
}

fn logical_ranks(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<usize>> {
    let Some(text) = lookup("BURN_DDP_LOGICAL_RANKS") else { return Ok(None) };
    let number = text.trim().parse().ok().filter(|count| *count > 0).ok_or_else(|| {
        Error::environment(format!("BURN_DDP_LOGICAL_RANKS={text:?} is not a number of micro-batches of a step"))
    })?;
    Ok(Some(number))
}

fn seconds(name: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<Duration>> {
    let Some(text) = lookup(name) else {
        return Ok(None);
    };
    text.trim()
        .parse::<f64>()
        .ok()
        .filter(|seconds| *seconds > 0.0)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .map(Some)
        .ok_or_else(|| {
            Error::environment(format!("{name}={text:?} is not a positive number of seconds (for example {name}=60)"))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(set: &[(&str, &str)]) -> Result<WorldOptions> {
        WorldOptions::from_lookup(&|name| {
            set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn each_variable_sets_its_option() {
        let options = from(&[
            ("BURN_DDP_TIMEOUT", "1"),
            ("BURN_DDP_JOIN_TIMEOUT", "2"),
            ("BURN_DDP_HEARTBEAT", "0.5"),
            ("BURN_DDP_PEER_TIMEOUT", "4"),
            ("BURN_DDP_STALL", "5"),
            ("BURN_DDP_HISTORY", "6"),
            ("BURN_DDP_ENGINE", "tcp"),
            ("BURN_DDP_ENCRYPT", "data"),
            ("BURN_DDP_FLOWS", "8"),
            ("BURN_DDP_LOGICAL_RANKS", "12"),
            ("BURN_DDP_TIMELINE", "trace.json"),
        ]);
        let expected = WorldOptions {
            timeout: Duration::from_secs(1),
            join_timeout: Duration::from_secs(2),
            heartbeat: Duration::from_millis(500),
            peer_timeout: Some(Duration::from_secs(4)),
            stall: Duration::from_secs(5),
            history: 6,
            engine: Some(EngineChoice::Tcp),
            encrypt_data: true,
            flows: 8,
            logical_ranks: Some(12),
            timeline: Some("trace.json".into()),
            config: Vec::new(),
        };
        assert_eq!(options, Ok(expected));
    }

    #[test]
    fn what_cannot_work_is_refused_with_a_reason() {
        for (set, reason) in [
            (&[("BURN_DDP_HEARTBEAT", "0")][..], "positive number of seconds"),
            (&[("BURN_DDP_HEARTBEAT", "0.001")], "the shortest is 10ms"),
            (&[("BURN_DDP_HISTORY", "-1")], "from 0 to"),
            (&[("BURN_DDP_ENGINE", "gloo")], "is not an engine"),
            (&[("BURN_DDP_PEER_TIMEOUT", "2")], "more than two heartbeats"),
            (&[("BURN_DDP_LOGICAL_RANKS", "0")], "is not a number of micro-batches"),
            (&[("BURN_DDP_FLOWS", "0")], "1 to 64 are possible"),
            (&[("BURN_DDP_FLOWS", "many")], "from 1 to 64"),
            (&[("BURN_DDP_ENCRYPT", "all")], "neither \"data\" nor \"none\""),
            (&[("BURN_DDP_ENCRYPT", "data"), ("BURN_DDP_ENGINE", "nccl")], "nccl's connections are not encrypted"),
        ] {
            let error = from(set).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
