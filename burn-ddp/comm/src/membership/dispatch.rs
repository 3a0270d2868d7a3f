//! Effects of control messages on this rank's membership, and the control messages that this rank sends.

use std::sync::Weak;
use std::time::{Duration, Instant};

use super::step_position::{Progress, Track};
use super::world_failure::capped;
use super::{ControlMessage, Membership};
use crate::Result;
use crate::poison_free_locks::lock;
use crate::post_mortem::millis;

impl Membership {
    /// Applies a control message of a rank in another process.
    pub fn receive(&self, from: usize, message: ControlMessage) {
        let change = {
            let (mut liveness, now) = (lock(&self.shared.liveness), Instant::now());
            match &message {
                ControlMessage::Silent { silent_ms } => {
                    liveness.reported_silent(from, Duration::from_millis(*silent_ms), now)
                }
                _ => liveness.heard(from, now),
            }
        };
        self.note_changes(change);
        match message {
            ControlMessage::Silent { .. } => {}
            ControlMessage::Heartbeat(beat) => lock(&self.shared.liveness).beat(from, beat),
            ControlMessage::PassedOn(beats) => {
                beats.into_iter().for_each(|(rank, beat)| self.receive(rank, ControlMessage::Heartbeat(beat)));
            }
            // Counts after the goodbye of this rank, too.
            ControlMessage::Fail { cause } => self.end(cause, true),
            ControlMessage::Goodbye => self.mark_left(from),
            ControlMessage::Stop { track, at, what } => self.mark_stop(from, track, at, &what),
        }
    }

    /// Messages with all that this rank knows of `rank`, for ranks that may have missed the originals.
    pub(crate) fn known_of(&self, rank: usize) -> Vec<ControlMessage> {
        // Not `check`: a cause that is being sent was not sent to a rank that connects just now.
        let news = match self.cause() {
            Err(cause) => vec![ControlMessage::Fail { cause: self.for_others(cause) }],
            Ok(()) => {
                let stops = lock(&self.shared.state).tracks.stops_of(rank);
                stops
                    .into_iter()
                    .map(|(track, at, what)| ControlMessage::Stop { track, at, what: capped(what) })
                    .collect()
            }
        };
        let silent = {
            let liveness = lock(&self.shared.liveness);
            liveness.silence(rank, Instant::now()).filter(|_| liveness.suspects(rank))
        };
        let silent = silent.map(|silent| ControlMessage::Silent { silent_ms: millis(silent) });
        let goodbye = self.said_goodbye(rank).then_some(ControlMessage::Goodbye);
        news.into_iter().chain(silent).chain(goodbye).collect()
    }

    /// Leaves the world.
    pub(crate) fn goodbye(&self) {
        self.announce_stops();
        // A cause that is being sent goes first: nothing is sent after the goodbye.
        drop(lock(&self.shared.ending));
        self.mark_left(self.rank);
        self.send_all(&ControlMessage::Goodbye);
    }

    /// See [`World::advance`](crate::World::advance).
    pub(crate) fn advance(&self, track: Track, at: Progress) -> Result<()> {
        self.announce_stops();
        self.check()?;
        let conflict = lock(&self.shared.state).tracks.advance(self.rank, track, at, &self.shared.peers);
        conflict.into_iter().for_each(|cause| self.fail(cause));
        self.check()
    }

    /// See [`World::stop`](crate::World::stop).
    pub(crate) fn stop(&self, track: Track, at: Progress, what: &str) {
        // Marked here before it is sent, so that a rank that connects in between hears of it, too.
        self.mark_stop(self.rank, track, at, what);
        self.send_all(&ControlMessage::Stop { track, at, what: capped(what.to_string()) });
    }

    /// Notes that `rank` has ended unheard: no connection was left on which this rank could have heard its goodbye. A
    /// call that waits for it fails, but the world goes on, since the rank may have left in peace. Does nothing if the
    /// goodbye or a connection of the rank has come meanwhile; if one comes later, it counts.
    pub(super) fn ended_unheard(&self, rank: usize) {
        {
            let mut liveness = lock(&self.shared.liveness);
            if liveness.is_near(rank) || !self.shared.presence.end_unheard(rank) {
                return;
            }
            liveness.forget(rank);
        }
        self.wake_all();
    }

    fn mark_left(&self, rank: usize) {
        {
            let mut liveness = lock(&self.shared.liveness);
            self.shared.presence.leave(rank);
            liveness.forget(rank);
        }
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
