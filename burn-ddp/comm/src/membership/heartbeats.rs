//! Heartbeats of this rank, and reports of ranks that fall silent.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::liveness::Change;
use super::peer_info::list_ranks;
use super::{ControlMessage, Membership};
use crate::Error;
use crate::poison_free_locks::lock;
use crate::post_mortem::{self, Event, millis};

impl Membership {
    /// This rank's heartbeat.
    pub(crate) fn heartbeat(&self) -> ControlMessage {
        ControlMessage::Heartbeat(self.shared.local_ranks[self.rank].heartbeat())
    }

    /// Neighbours to which a heartbeat is due.
    pub(crate) fn due(&self, now: Instant) -> Vec<usize> {
        lock(&self.shared.liveness).due(now)
    }

    /// Time of the next heartbeat or check for silence.
    pub(crate) fn next_look(&self, now: Instant) -> Option<Instant> {
        lock(&self.shared.liveness).next_look(now)
    }

    /// Checks the neighbours for silence. Returns those that fell silent since the last check, with the durations of
    /// their silence. `late` is the delay of this check: if it is long, this process itself was stopped, and the
    /// neighbours' silence does not count for that time.
    pub(crate) fn look(&self, now: Instant, late: Duration) -> Vec<(usize, Duration)> {
        self.announce_old_stops(now);
        let changes = {
            let mut liveness = lock(&self.shared.liveness);
            if late > liveness.late() {
                tracing::debug!(rank = self.rank, ?late, "this process was stopped, or got no time on a processor");
                liveness.excuse(late, now);
            }
            liveness.look(now)
        };
        let fell_silent = changes.iter().filter_map(|change| match change {
            Change::Suspect { peer, silent } => Some((*peer, *silent)),
            _ => None,
        });
        let fell_silent = fell_silent.collect();
        self.note_changes(changes);
        self.look_for_circle(now);
        fell_silent
    }

    /// Ends the world if this rank is in a deadlock with others. Looks once per heartbeat.
    pub(super) fn look_for_circle(&self, now: Instant) {
        let mut circles = lock(&self.shared.circles);
        if !circles.is_due(now) {
            return;
        }
        let number = circles.own_beats(now);
        let found = if self.shared.local {
            let ranks = (0..self.shared.peers.len()).filter(|rank| !self.has_left(*rank));
            let beat = |rank: usize| self.shared.local_ranks[rank].heartbeat();
            let beats: Vec<_> = ranks.map(|rank| (rank, beat(rank))).collect();
            circles.look(&beats.iter().map(|(rank, beat)| (*rank, (number, beat))).collect(), now)
        } else {
            let mine = self.shared.local_ranks[self.rank].heartbeat();
            let liveness = lock(&self.shared.liveness);
            let mut beats = BTreeMap::from([(self.rank, (number, &mine))]);
            // Without a blocked call of its own, this rank is in no deadlock.
            if !mine.blocked.is_empty() {
                beats.extend(liveness.beats());
            }
            circles.look(&beats, now)
        };
        drop(circles);
        if let Some(calls) = found {
            self.fail(Error::Deadlock { calls });
        }
    }

    /// Reports that ranks fell silent or were heard again; a lost one ends the world.
    pub(super) fn note_changes(&self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            let at = post_mortem::now_ms();
            match change {
                Change::Suspect { peer, silent } => {
                    tracing::warn!(rank = self.rank, peer = %self.shared.peers[peer], ?silent, "a peer is silent");
                    self.append_event(&Event::Suspect { rank: self.rank, peer, silent_ms: millis(silent), at });
                }
                Change::Recovered { peer } => {
                    tracing::info!(rank = self.rank, peer = %self.shared.peers[peer], "a silent peer is heard again");
                    self.append_event(&Event::Recovered { rank: self.rank, peer, at });
                }
                Change::Lost { peer, silent } => self.peer_lost(
                    peer,
                    format!(
                        "silent for {:.1} s, longer than the peer timeout allows{}",
                        silent.as_secs_f64(),
                        self.likely_cause(peer)
                    ),
                ),
            }
        }
    }

    /// Likely cause of the silence of `peer`, as the end of a sentence. Blames the machine if all its ranks are silent.
    fn likely_cause(&self, peer: usize) -> String {
        let machine = self.routes.machine_of(peer).iter().copied();
        let machine: Vec<usize> = machine.filter(|rank| !self.has_left(*rank)).collect();
        let liveness = lock(&self.shared.liveness);
        if machine.len() > 1 && machine.iter().all(|rank| liveness.suspects(*rank)) {
            let ranks = list_ranks(&machine);
            return format!(
                ", like all of its machine ({ranks}): that machine is frozen, overloaded or cut off, or all of them \
                 are stopped"
            );
        }
        ": its process is stopped, or its machine is overloaded or cut off".to_owned()
    }
}
