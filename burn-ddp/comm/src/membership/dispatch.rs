//! Control messages in and out: their effect on this rank's membership, and what this rank sends.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::step_position::{Progress, Track};
use super::world_failure::capped;
use super::{ControlMessage, Membership};
use crate::Result;
use crate::poison_free_locks::lock;

impl Membership {
    /// Applies a control message of a rank in another process.
    pub fn receive(&self, from: usize, message: ControlMessage) {
        let change = lock(&self.shared.liveness).heard(from, Instant::now());
        self.note_changes(change);
        match message {
            ControlMessage::Heartbeat(beat) => lock(&self.shared.liveness).beat(from, beat),
            // The rank that ended the world has sent this to all; it is passed on only when leaving, see `goodbye`.
            ControlMessage::Fail { cause } => self.end(cause, false),
            ControlMessage::Goodbye => self.mark_left(from),
            ControlMessage::Stop { track, at, what } => self.mark_stop(from, track, at, &what),
        }
    }

    /// Leaves the world. If it has ended, this rank repeats the cause first: a peer that has not heard it otherwise
    /// would take the leaving for the cause.
    pub(crate) fn goodbye(&self) {
        self.announce_stops();
        if let Err(cause) = self.check() {
            self.send_all(&ControlMessage::Fail { cause });
        }
        self.mark_left(self.rank);
        self.send_all(&ControlMessage::Goodbye);
    }

    /// See [`World::advance`](crate::World::advance).
    pub(crate) fn advance(&self, track: Track, at: Progress) -> Result<()> {
        self.announce_stops();
        let conflict = {
            let mut state = lock(&self.shared.state);
            if let Some(cause) = &state.cause {
                return Err(cause.clone());
            }
            state.tracks.advance(self.rank, track, at, &self.shared.peers)
        };
        conflict.into_iter().for_each(|cause| self.fail(cause));
        self.check()
    }

    /// See [`World::stop`](crate::World::stop).
    pub(crate) fn stop(&self, track: Track, at: Progress, what: &str) {
        self.send_all(&ControlMessage::Stop { track, at, what: capped(what.to_string()) });
        self.mark_stop(self.rank, track, at, what);
    }

    fn mark_left(&self, rank: usize) {
        self.shared.left[rank].store(true, Ordering::Release);
        lock(&self.shared.liveness).forget(rank);
        self.wake_all();
    }

    fn mark_stop(&self, rank: usize, track: Track, at: Progress, what: &str) {
        let conflict = lock(&self.shared.state).tracks.stop(rank, track, at, what, &self.shared.peers);
        conflict.into_iter().for_each(|cause| self.fail(cause));
    }

    pub(super) fn send_all(&self, message: &ControlMessage) {
        if let Some(outbox) = self.shared.outbox.get().and_then(Weak::upgrade) {
            outbox.send_all(message);
        }
    }

    pub(super) fn wake_all(&self) {
        let wakers: Vec<_> = lock(&self.shared.wakers).iter().filter_map(Weak::upgrade).collect();
        wakers.iter().for_each(|waker| waker.wake());
    }
}
