//! What the memberships of a world say to each other, and to whoever waits.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::history::Heartbeat;

/// What ranks tell each other besides data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ControlMessage {
    /// Something went wrong: this ends the world.
    Fail {
        /// The root cause.
        cause: Error,
    },
    /// The sender lives, and this is what it does.
    Heartbeat(Heartbeat),
    /// The sender leaves in peace.
    Goodbye,
    /// The sender stopped on a track; see [`World::stop`](crate::World::stop).
    Stop {
        /// Which track.
        track: u64,
        /// Where it stopped.
        position: u64,
        /// What the sender calls it.
        what: String,
    },
}

/// The way to the memberships of the other ranks.
pub trait Outbox: Send + Sync {
    /// Sends `message` to every other rank that can be reached, without blocking. Called from any thread, never with a
    /// lock of [`Membership`](super::Membership) held. Messages of one rank arrive in the order they were sent.
    fn send_all(&self, message: &ControlMessage);
}

/// Something that waits and wants to look at the membership again when it changes.
pub trait Wake: Send + Sync {
    /// Called after each change, from any thread, never with a lock of [`Membership`](super::Membership) held. Must not block.
    fn wake(&self);
}
