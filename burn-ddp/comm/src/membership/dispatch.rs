//! What ranks hear from each other and say in turn: causes, goodbyes, stops.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::failure::capped;
use super::{ControlMessage, Membership};
use crate::Result;
use crate::sync::lock;

impl Membership {
    /// Takes in what another process' rank says.
    pub fn receive(&self, from: usize, message: ControlMessage) {
        let change = lock(&self.shared.liveness).heard(from, Instant::now());
        self.note_changes(change);
        match message {
            ControlMessage::Heartbeat(beat) => lock(&self.shared.liveness).beat(from, beat),
            // Whoever ended the world told everybody; it is passed on only when leaving, see `goodbye`.
            ControlMessage::Fail { cause } => self.end(cause, false),
            ControlMessage::Goodbye => self.mark_left(from),
            ControlMessage::Stop { track, position, what } => self.mark_stop(from, track, position, &what),
        }
    }

    /// This rank leaves. If the world has ended, it repeats why first: else a peer that has not heard it from elsewhere
    /// would take the leaving for the cause.
    pub(crate) fn goodbye(&self) {
        if let Err(cause) = self.check() {
            self.tell(&ControlMessage::Fail { cause });
        }
        self.mark_left(self.rank);
        self.tell(&ControlMessage::Goodbye);
    }

    /// See [`World::advance`](crate::World::advance).
    pub(crate) fn advance(&self, track: u64, position: u64) -> Result<()> {
        let conflict = {
            let mut state = lock(&self.shared.state);
            if let Some(cause) = &state.cause {
                return Err(cause.clone());
            }
            state.tracks.advance(self.rank, track, position, &self.shared.peers)
        };
        conflict.into_iter().for_each(|cause| self.fail(cause));
        self.check()
    }

    /// See [`World::stop`](crate::World::stop).
    pub(crate) fn stop(&self, track: u64, position: u64, what: &str) {
        self.tell(&ControlMessage::Stop { track, position, what: capped(what.to_string()) });
        self.mark_stop(self.rank, track, position, what);
    }

    fn mark_left(&self, rank: usize) {
        self.shared.left[rank].store(true, Ordering::Release);
        lock(&self.shared.liveness).forget(rank);
        self.wake_all();
    }

    fn mark_stop(&self, rank: usize, track: u64, position: u64, what: &str) {
        let conflict = lock(&self.shared.state).tracks.stop(rank, track, position, what, &self.shared.peers);
        conflict.into_iter().for_each(|cause| self.fail(cause));
    }

    pub(super) fn tell(&self, message: &ControlMessage) {
        if let Some(outbox) = self.shared.outbox.get().and_then(Weak::upgrade) {
            outbox.send_all(message);
        }
    }

    pub(super) fn wake_all(&self) {
        let wakers: Vec<_> = lock(&self.shared.wakers).iter().filter_map(Weak::upgrade).collect();
        wakers.iter().for_each(|waker| waker.wake());
    }
}
