//! What can go wrong, sorted by who can act on it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::call::{CallInfo, RankCall};
use crate::membership::{PeerInfo, list_ranks, show_position};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a collective, or joining a world, did not succeed.
///
/// Errors of a collective name the operation, its sequence number in its group, and the line that called it. All but
/// those for which [`group_usable`](Error::group_usable) holds end the world: pending and later collectives of all
/// groups return the same root cause on every rank.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Error {
    // A peer: look at that rank's log.
    /// A rank's process ended or its connection broke, without a goodbye.
    #[error("{peer} died{}: {cause}", amid(.during))]
    PeerLost {
        /// Who.
        peer: PeerInfo,
        /// How it was noticed.
        cause: String,
        /// The collective on this rank that noticed first.
        during: Option<Box<CallInfo>>,
    },
    /// A rank dropped its world or group while others still needed it.
    #[error("{peer} left{}", needed(.during))]
    PeerLeft {
        /// Who.
        peer: PeerInfo,
        /// The collective on this rank that noticed first.
        during: Option<Box<CallInfo>>,
    },
    /// A rank gave up: it panicked, or called [`World::fail`](crate::World::fail).
    #[error("{peer} failed: {cause}{}", noticed(.during))]
    PeerFailed {
        /// Who.
        peer: PeerInfo,
        /// What it said.
        cause: String,
        /// The collective on this rank that noticed first.
        during: Option<Box<CallInfo>>,
    },
    /// A collective did not complete within [`Options::timeout`](crate::Options::timeout).
    #[error("rank {reporter} waited {} s for {} in {call}{}", .timeout.as_secs_f64(), list_ranks(.waiting_for), behind(.why))]
    Timeout {
        /// The rank whose deadline passed first.
        reporter: usize,
        /// The ranks whose part had not come.
        waiting_for: Vec<usize>,
        /// The rank that keeps all others waiting, if that is one and known: it need not be one that the reporter waited for.
        culprit: Option<usize>,
        /// How long it waited.
        timeout: Duration,
        /// What the reporter was calling.
        call: Box<CallInfo>,
        /// What the ranks that were waited for did instead; empty if that is not known.
        why: String,
    },

    // The caller: fix the program.
    /// Two ranks called different collectives.
    #[error(
        "ranks called different collectives ({} differ): rank {} called {}; rank {} called {}; all ranks of a group must call the same collectives in the same order",
        .first.call.differences(&.second.call).join(", "), .first.rank, .first.call, .second.rank, .second.call
    )]
    Mismatch {
        /// The call of the lower of the two ranks.
        first: Box<RankCall>,
        /// The call of the higher of the two ranks.
        second: Box<RankCall>,
    },
    /// A rank went on where another had stopped; see [`World::stop`](crate::World::stop).
    #[error(
        "{stopped} stopped {what} at {}, but rank {ahead} went on to {}{}; all ranks must stop at the same step",
        show_position(*.stopped_at), show_position(*.position), noticed(.during)
    )]
    OutOfStep {
        /// The track both were on.
        track: u64,
        /// What the stopped rank calls it.
        what: String,
        /// The rank that stopped.
        stopped: PeerInfo,
        /// Where it stopped.
        stopped_at: u64,
        /// The rank that went on.
        ahead: usize,
        /// Where it is.
        position: u64,
        /// The collective on this rank that noticed first.
        during: Option<Box<CallInfo>>,
    },
    /// An argument that no rank can use. All ranks see it alike, so the group stays usable.
    #[error("{message}{}", within(.during))]
    InvalidArgument {
        /// What is wrong, and what would be right.
        message: String,
        /// The rank that passed it, if it is known to be one.
        rank: Option<usize>,
        /// The call it was passed to.
        during: Option<Box<CallInfo>>,
    },
    /// A value could not be turned into bytes or back.
    #[error("rank {rank} could not read the value from rank {from}{}: {message}", within(.during))]
    Object {
        /// The rank that could not read it.
        rank: usize,
        /// The rank that sent it.
        from: usize,
        /// Why.
        message: String,
        /// The call it came with.
        during: Option<Box<CallInfo>>,
    },

    // The environment: fix how the job is started, or the machine.
    /// Variables, addresses or ports that cannot be used.
    #[error("{message}")]
    Environment {
        /// What is wrong, and what would be right.
        message: String,
    },
    /// The rendezvous store refused or could not be reached.
    #[error("store: {message}")]
    Store {
        /// What is wrong.
        message: String,
    },
    /// A key did not appear in the rendezvous store in time.
    #[error("store: no {key:?} after {} s", .waited.as_secs_f64())]
    StoreTimeout {
        /// The key that was waited for.
        key: String,
        /// How long.
        waited: Duration,
    },
    /// The ranks did not come together.
    #[error("{message}{}", attendance(.came, .missing))]
    Rendezvous {
        /// What went wrong.
        message: String,
        /// Who came.
        came: Vec<PeerInfo>,
        /// The ranks that did not.
        missing: Vec<usize>,
    },
    /// A peer sent something that is not this protocol, or another version of it.
    #[error("rank {peer} sent something unexpected{}: {message}", within(.during))]
    Protocol {
        /// Who.
        peer: usize,
        /// What was expected, and what came.
        message: String,
        /// The collective it was sent to.
        during: Option<Box<CallInfo>>,
    },

    // Us.
    /// A bug in this crate. Please report it.
    #[error("internal error, please report it: {message}")]
    Internal {
        /// What was found.
        message: String,
    },
}

impl Error {
    /// Whether the group can be used further: true only for what all ranks are certain to see alike.
    pub fn group_usable(&self) -> bool {
        matches!(self, Error::InvalidArgument { .. })
    }

    /// The rank to look at first, where there is one.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Error::PeerLost { peer, .. } | Error::PeerLeft { peer, .. } | Error::PeerFailed { peer, .. } => {
                Some(peer.rank)
            }
            Error::Timeout { culprit, waiting_for, .. } => culprit.or(waiting_for.first().copied()),
            Error::OutOfStep { stopped, .. } => Some(stopped.rank),
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

    /// The rank that caused it, where that is certain.
    pub(crate) fn culprit(&self) -> Option<usize> {
        match self {
            Error::PeerLost { .. } | Error::PeerLeft { .. } | Error::PeerFailed { .. } | Error::OutOfStep { .. } => {
                self.rank()
            }
            Error::Timeout { culprit, .. } => *culprit,
            _ => None,
        }
    }

    /// This argument error as one of `rank`.
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

    /// This error without this rank's call: what other ranks are told.
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
            | Error::Environment { .. }
            | Error::Store { .. }
            | Error::StoreTimeout { .. }
            | Error::Rendezvous { .. }
            | Error::Internal { .. } => None,
        }
    }
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
