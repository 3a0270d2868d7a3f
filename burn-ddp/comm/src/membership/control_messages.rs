//! Control messages: all messages between the ranks of a world except data. Traits for sending them and for waits.

use serde::{Deserialize, Serialize};

use super::step_position::{Progress, Track};
use crate::Error;
use crate::call::CallInfo;
use crate::net::wait::Waker;

/// A message on a control connection, with its origin: the rank at the other end, or one whose message that rank passes
/// on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Envelope<M> {
    pub(crate) origin: usize,
    pub(crate) message: M,
}

/// A message from one rank to all others, besides data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ControlMessage {
    /// A failure, which ends the world.
    Fail {
        /// The root cause.
        cause: Error,
    },
    /// The sender is alive.
    Heartbeat(Heartbeat),
    /// Last heartbeats of ranks that have no connection to the receiver. The sender passes them on together.
    PassedOn(Vec<(usize, Heartbeat)>),
    /// The sender leaves in peace.
    Goodbye,
    /// The origin has been silent on its connection to the rank that sends this. Sent to ranks that have no connection
    /// to the origin; others notice its silence themselves.
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

/// Activity of a rank, which it reports with every heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Training step, if the program sets it.
    pub step: Option<u64>,
    /// Collectives under way.
    pub pending: Vec<PendingCall>,
    /// Last collective that ended.
    pub last: Option<CallInfo>,
    /// Time since it ended, in milliseconds.
    pub idle_ms: u64,
    /// Groups whose next call can only come from threads that are blocked in other calls.
    pub blocked: Vec<BlockedGroup>,
}

/// A group of a rank on which no thread of the rank can call before a pending call of it ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockedGroup {
    /// Number of the group. The next unused number means the next group of all ranks, which is not made yet.
    pub group: u64,
    /// Place of the rank's last call on the group in the order of its collectives, see [`CallInfo::place`]; 0 if there
    /// was none.
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
    /// Ranks whose part in the call has not arrived.
    pub waiting_for: Vec<usize>,
}

/// Sends control messages to the other ranks.
pub trait Outbox: Send + Sync {
    /// Sends `message` to every other rank that can be reached, without blocking. Called from any thread. Must not end
    /// the world: the membership may hold the lock of its end. Messages of one rank arrive in the order they were sent.
    fn send_all(&self, message: &ControlMessage);
}

/// A wait that must look at the membership again after each change.
pub trait Wake: Send + Sync {
    /// Called after each change, from any thread, never with a lock of [`Membership`](super::Membership) held. Must not
    /// block.
    fn wake(&self);
}

/// A waker to poll together with sockets.
impl Wake for Waker {
    fn wake(&self) {
        Waker::wake(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Collective;
    use crate::frame::PROTOCOL_VERSION;

    /// A change of these bytes needs another version.
    #[test]
    fn messages_have_the_layout_of_this_version() {
        let call = CallInfo::bare(Collective::Barrier, 1, 2, "a.rs:1:1");
        let pending = vec![PendingCall { call: call.clone(), since_ms: 300, waiting_for: vec![1] }];
        let blocked = vec![BlockedGroup { group: 1, place: 2, calls: vec![0] }];
        let beat = Heartbeat { step: Some(5), pending, last: Some(call), idle_ms: 6, blocked };
        let (track, at) = (Track::Batches { group: 1, loader: 4, run: 0 }, Progress { epoch: 1, step: 2 });
        let messages = [
            ControlMessage::Fail { cause: Error::environment("no") },
            ControlMessage::Heartbeat(beat.clone()),
            ControlMessage::PassedOn(vec![(3, beat)]),
            ControlMessage::Goodbye,
            ControlMessage::Silent { silent_ms: 7 },
            ControlMessage::Stop { track, at, what: "it".to_owned() },
        ];
        let bytes = messages.map(|message| postcard::to_stdvec(&Envelope { origin: 9, message }).unwrap());
        const CALL: &[u8] = &[1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 2, 8, b'a', b'.', b'r', b's', b':', b'1', b':', b'1', 0];
        let beat = [&[1, 5, 1], &CALL[1..], &[172, 2, 1, 1], CALL, &[6, 1, 1, 2, 1, 0]].concat();
        let expected = [
            &[9, 0, 9, 2, b'n', b'o', 9, 1][..],
            &beat,
            &[9, 2, 1, 3],
            &beat,
            &[9, 3, 9, 4, 7, 9, 5, 1, 4, 130, 128, 128, 128, 16, 2, b'i', b't'],
        ];
        assert_eq!((PROTOCOL_VERSION, bytes.concat()), (7, expected.concat()));
    }
}
