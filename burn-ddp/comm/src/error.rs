//! Errors, sorted by who can act on them: a peer, the caller, the environment, this crate.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::call::{CallInfo, RankCall};
use crate::membership::{PeerInfo, Progress, StuckCall, Track, list_ranks};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of a collective, or of joining a world.
///
/// Errors of a collective name the operation, its sequence number in its group, and the line that called it. An error
/// ends the world: pending and later collectives of all groups return the same root cause on every rank. Only an error
/// for which [`group_usable`](Error::group_usable) is true leaves the world as it is.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Error {
    // A peer: look at that rank's log.
    /// A rank's process ended or its connection broke, without a goodbye.
    #[error("{peer} died{}: {cause}", amid(.during))]
    PeerLost {
        /// The rank.
        peer: PeerInfo,
        /// Sign of the loss, such as a closed connection or a long silence.
        cause: String,
        /// This rank's first collective that returned the error.
        during: Option<Box<CallInfo>>,
    },
    /// A rank dropped its world or group while others still needed it.
    #[error("{peer} left{}", needed(.during))]
    PeerLeft {
        /// The rank.
        peer: PeerInfo,
        /// This rank's first collective that returned the error.
        during: Option<Box<CallInfo>>,
    },
    /// A rank gave up: it panicked, or called [`World::fail`](crate::World::fail).
    #[error("{peer} failed: {cause}{}", noticed(.during))]
    PeerFailed {
        /// The rank.
        peer: PeerInfo,
        /// Reason that the rank gave.
        cause: String,
        /// This rank's first collective that returned the error.
        during: Option<Box<CallInfo>>,
    },
    /// A collective did not complete within [`WorldOptions::timeout`](crate::WorldOptions::timeout).
    #[error(
        "rank {reporter} waited {} s for {} in {call}{}",
        .timeout.as_secs_f64(), list_ranks(.waiting_for), behind(.why)
    )]
    Timeout {
        /// The rank whose deadline passed first.
        reporter: usize,
        /// The ranks whose part of the collective had not arrived.
        waiting_for: Vec<usize>,
        /// The rank that kept all others waiting, if a single rank is known to have. May not be in `waiting_for`: an
        /// awaited rank may itself have waited for it.
        culprit: Option<usize>,
        /// Time that the reporter waited.
        timeout: Duration,
        /// The reporter's call.
        call: Box<CallInfo>,
        /// Description of what the awaited ranks did instead; empty if that is not known.
        why: String,
    },

    // The caller: fix the program.
    /// Two ranks called different collectives.
    #[error(
        "ranks called different collectives ({} differ): rank {} called {}; rank {} called {}; \
         all ranks of a group must call the same collectives in the same order",
        .first.call.differences(&.second.call).join(", "), .first.rank, .first.call, .second.rank, .second.call
    )]
    Mismatch {
        /// The call of the lower of the two ranks.
        first: Box<RankCall>,
        /// The call of the higher of the two ranks.
        second: Box<RankCall>,
    },
    /// Ranks wait for each other in calls of different groups, and none can go on.
    #[error(
        "ranks wait for each other in different calls, for ever: {}; all ranks must make the same calls in the same \
         order: check if only some ranks make one of these calls",
        listed(.calls)
    )]
    Deadlock {
        /// The calls, in a circle: each waits for ranks that are in the next call, and the last for ranks in the first.
        calls: Vec<StuckCall>,
    },
    /// A rank went on where another had stopped; see [`World::stop`](crate::World::stop).
    #[error(
        "{stopped} stopped {what} at {}, but rank {ahead} went on to {}{}; all ranks must stop at the same step",
        .stopped_at, .reached, noticed(.during)
    )]
    OutOfStep {
        /// The track that one rank stopped and the other advanced.
        track: Track,
        /// Name of what was stopped, given by the rank that stopped, such as `loader 0 (10 steps)`.
        what: String,
        /// The rank that stopped.
        stopped: Box<PeerInfo>,
        /// The last step of the rank that stopped.
        stopped_at: Progress,
        /// The rank that went on.
        ahead: usize,
        /// The step that it reached.
        reached: Progress,
        /// This rank's first collective that returned the error.
        during: Option<Box<CallInfo>>,
    },
    /// An argument that the collective refuses. All ranks that make the same call get this error, so the group stays
    /// usable.
    #[error("{message}{}", within(.during))]
    InvalidArgument {
        /// The problem and its remedy.
        message: String,
        /// The rank that passed the argument, if it was a single rank.
        rank: Option<usize>,
        /// The call to which the argument was passed.
        during: Option<Box<CallInfo>>,
    },
    /// A rank could not decode the value that another rank sent.
    #[error("rank {rank} could not read the value from rank {from}{}: {message}", within(.during))]
    Object {
        /// The rank that could not decode the value.
        rank: usize,
        /// The rank that sent the value.
        from: usize,
        /// The reason.
        message: String,
        /// The call that carried the value.
        during: Option<Box<CallInfo>>,
    },

    // The environment: fix how the job is started, or the machine.
    /// Something outside the program cannot be used: a variable, an address, a port, a file, an engine.
    #[error("{message}")]
    Environment {
        /// The problem and its remedy.
        message: String,
    },
    /// The rendezvous store refused a request or could not be reached.
    #[error("store: {message}")]
    Store {
        /// The problem.
        message: String,
    },
    /// A key did not appear in the rendezvous store in time.
    #[error("store: no {key:?} after {} s", .waited.as_secs_f64())]
    StoreTimeout {
        /// The key that was waited for.
        key: String,
        /// Time that this rank waited for the key.
        waited: Duration,
    },
    /// The ranks did not come together.
    #[error("{message}{}", attendance(.came, .missing))]
    Rendezvous {
        /// The reason.
        message: String,
        /// The ranks that came.
        came: Vec<PeerInfo>,
        /// The ranks that did not come.
        missing: Vec<usize>,
    },
    /// A peer sent bytes that do not follow the protocol, or that follow another version of it.
    #[error("rank {peer} sent something unexpected{}: {message}", within(.during))]
    Protocol {
        /// The rank.
        peer: usize,
        /// The expected value and the received one.
        message: String,
        /// The collective in which it arrived.
        during: Option<Box<CallInfo>>,
    },

    // Us.
    /// A bug in this crate. Please report it.
    #[error("internal error, please report it: {message}")]
    Internal {
        /// Description of the bug.
        message: String,
    },
}

impl Error {
    /// [`Error::Environment`] with this message.
    pub(crate) fn environment(message: impl Into<String>) -> Error {
        Error::Environment { message: message.into() }
    }

    /// True if the group can be used further: only after errors that all ranks are certain to see alike.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp_comm::{ReduceOp, World, WorldOptions};
    ///
    /// let group = World::solo(WorldOptions::default()).group()?;
    /// let error = group.all_reduce(&mut [1_i32], ReduceOp::Mean).unwrap_err(); // integers have no mean
    /// assert!(error.group_usable());
    /// group.barrier()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    pub fn group_usable(&self) -> bool {
        matches!(self, Error::InvalidArgument { .. })
    }

    /// The rank to look at first, if there is one.
    ///
    /// # Example
    ///
    /// As in [`World::fail`](crate::World::fail).
    pub fn rank(&self) -> Option<usize> {
        match self {
            Error::PeerLost { peer, .. } | Error::PeerLeft { peer, .. } | Error::PeerFailed { peer, .. } => {
                Some(peer.rank)
            }
            Error::Timeout { culprit, waiting_for, .. } => culprit.or(waiting_for.first().copied()),
            Error::OutOfStep { stopped, .. } => Some(stopped.rank),
            // The call that the fewest ranks are in is probably the mistake.
            Error::Deadlock { calls } => {
                calls.iter().min_by_key(|call| call.ranks.len()).and_then(|call| call.ranks.first().copied())
            }
            Error::InvalidArgument { rank, .. } => *rank,
            Error::Object { rank, .. } => Some(*rank),
            Error::Protocol { peer, .. } => Some(*peer),
            Error::Rendezvous { missing, .. } => missing.first().copied(),
            Error::Mismatch { .. }
            | Error::Environment { .. }
            | Error::Store { .. }
            | Error::StoreTimeout { .. }
            | Error::Internal { .. } => None,
        }
    }

    /// True for an error that names no rank, since it concerns the process that returned it first.
    pub(crate) fn is_of_this_process(&self) -> bool {
        matches!(self, Error::Environment { .. } | Error::Internal { .. })
    }

    /// The rank that caused the error, if that is certain.
    pub(crate) fn culprit(&self) -> Option<usize> {
        match self {
            Error::PeerLost { .. } | Error::PeerLeft { .. } | Error::PeerFailed { .. } | Error::OutOfStep { .. } => {
                self.rank()
            }
            Error::Timeout { culprit, .. } => *culprit,
            _ => None,
        }
    }

    /// This error with `culprit` as the rank that passed the argument; other errors stay as they are.
    pub(crate) fn blaming(mut self, culprit: usize) -> Error {
        if let Error::InvalidArgument { rank, .. } = &mut self {
            *rank = Some(culprit);
        }
        self
    }

    /// This error as seen by `call`; an error that already names a call keeps it.
    pub(crate) fn noticed_by(mut self, call: &CallInfo) -> Error {
        if let Some(during) = self.during_mut() {
            during.get_or_insert_with(|| Box::new(call.clone()));
        }
        self
    }

    /// This error without this rank's call, as other ranks receive it.
    pub(crate) fn root_cause(mut self) -> Error {
        if let Some(during) = self.during_mut() {
            *during = None;
        }
        self
    }

    fn during_mut(&mut self) -> Option<&mut Option<Box<CallInfo>>> {
        match self {
            Error::PeerLost { during, .. }
            | Error::PeerLeft { during, .. }
            | Error::PeerFailed { during, .. }
            | Error::OutOfStep { during, .. }
            | Error::InvalidArgument { during, .. }
            | Error::Object { during, .. }
            | Error::Protocol { during, .. } => Some(during),
            Error::Timeout { .. }
            | Error::Mismatch { .. }
            | Error::Deadlock { .. }
            | Error::Environment { .. }
            | Error::Store { .. }
            | Error::StoreTimeout { .. }
            | Error::Rendezvous { .. }
            | Error::Internal { .. } => None,
        }
    }
}

fn listed(calls: &[StuckCall]) -> String {
    calls.iter().map(StuckCall::to_string).collect::<Vec<_>>().join("; ")
}

fn behind(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!("; {why}") }
}

fn amid(call: &Option<Box<CallInfo>>) -> String {
    call.as_ref().map(|call| format!(" during {call}")).unwrap_or_default()
}

fn noticed(call: &Option<Box<CallInfo>>) -> String {
    call.as_ref().map(|call| format!(" (noticed by {call})")).unwrap_or_default()
}

fn needed(call: &Option<Box<CallInfo>>) -> String {
    call.as_ref().map(|call| format!(" while it was needed by {call}")).unwrap_or_default()
}

fn within(call: &Option<Box<CallInfo>>) -> String {
    call.as_ref().map(|call| format!(" in {call}")).unwrap_or_default()
}

fn attendance(came: &[PeerInfo], missing: &[usize]) -> String {
    let mut text = String::new();
    if !came.is_empty() {
        let came: Vec<String> = came.iter().map(PeerInfo::to_string).collect();
        text.push_str(&format!("; came: {}", came.join(", ")));
    }
    if !missing.is_empty() {
        text.push_str(&format!("; missing: {}", list_ranks(missing)));
    }
    text
}
