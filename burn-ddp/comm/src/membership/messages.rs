//! Messages between the ranks of a world besides data, and the traits of those that carry them and of those that wait.

use serde::{Deserialize, Serialize};

use super::step_position::{Progress, Track};
use crate::Error;
use crate::call::CallInfo;
use crate::net::wait::Waker;

/// A message on a control connection: of the rank at its other end, or of one for which that rank passes it on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Envelope<M> {
    pub(crate) origin: usize,
    pub(crate) message: M,
}

/// A message from one rank to all others, besides data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ControlMessage {
    /// Something went wrong: this ends the world.
    Fail {
        /// The root cause.
        cause: Error,
    },
    /// The sender is alive.
    Heartbeat(Heartbeat),
    /// The sender leaves in peace.
    Goodbye,
    /// The sender has been silent on its connection to the rank that passes this on. Ranks that are connected to the
    /// sender see that themselves.
    Silent {
        /// Duration of its silence, in milliseconds.
        silent_ms: u64,
    },
    /// The sender stopped on a track; see [`World::stop`](crate::World::stop).
    Stop {
        /// The track.
        track: Track,
        /// The sender's last step on it.
        at: Progress,
        /// The sender's name for the track.
        what: String,
    },
}

/// Activity of a rank, as it reports it at every heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Training step, if the program sets it.
    pub step: Option<u64>,
    /// Collectives under way.
    pub pending: Vec<PendingCall>,
    /// Last collective that ended.
    pub last: Option<CallInfo>,
    /// Time since then, in milliseconds.
    pub idle_ms: u64,
    /// Groups whose next call can only come from threads that are blocked in other calls.
    pub blocked: Vec<BlockedGroup>,
}

/// A group of a rank on which no thread of the rank can call before a pending call of it ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockedGroup {
    /// Number of the group; that of the next group of all ranks stands for the group that is not made yet.
    pub group: u64,
    /// Place of the last call on it among those of all its ranks, see [`CallInfo::place`]; 0 if there was none.
    pub place: u64,
    /// Pending calls in which the threads that call on this group are blocked, by their index in
    /// [`Heartbeat::pending`].
    pub calls: Vec<u32>,
}

/// A collective under way on a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PendingCall {
    /// The call.
    pub call: CallInfo,
    /// Time since it began, in milliseconds.
    pub since_ms: u64,
    /// Ranks whose part has not arrived.
    pub waiting_for: Vec<usize>,
}

/// The way to the other ranks.
pub trait Outbox: Send + Sync {
    /// Sends `message` to every other rank that can be reached, without blocking. Called from any thread, never with a
    /// lock of [`Membership`](super::Membership) held. Messages of one rank arrive in the order they were sent.
    fn send_all(&self, message: &ControlMessage);
}

/// A wait that must look at the membership again after each change.
pub trait Wake: Send + Sync {
    /// Called after each change, from any thread, never with a lock of [`Membership`](super::Membership) held. Must not
    /// block.
    fn wake(&self);
}

/// A poll that waits for this, too.
impl Wake for Waker {
    fn wake(&self) {
        Waker::wake(self);
    }
}
