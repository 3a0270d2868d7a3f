//! Heartbeats to the other ranks, and the ranks that are silent.

use std::time::{Duration, Instant};

use super::liveness::Change;
use super::{ControlMessage, Membership};
use crate::poison_free_locks::lock;
use crate::post_mortem::{self, Event, millis};

impl Membership {
    /// This rank's heartbeat.
    pub(crate) fn heartbeat(&self) -> ControlMessage {
        ControlMessage::Heartbeat(self.history().heartbeat(self.step()))
    }

    /// Ranks to which a heartbeat is due.
    pub(crate) fn due(&self, now: Instant) -> Vec<usize> {
        lock(&self.shared.liveness).due(now)
    }

    /// Time of the next heartbeat or check for silence.
    pub(crate) fn next_look(&self, now: Instant) -> Option<Instant> {
        lock(&self.shared.liveness).next_look(now)
    }

    /// Checks the peers for silence. `late` is how much later than planned this check runs: if that is much, this
    /// process itself was stopped, and its peers get that time.
    pub(crate) fn look(&self, now: Instant, late: Duration) {
        self.announce_old_stops(now);
        let changes = {
            let mut liveness = lock(&self.shared.liveness);
            if late > liveness.late() {
                tracing::debug!(rank = self.rank, ?late, "this process was stopped, or had no processor");
                liveness.excuse(late, now);
            }
            liveness.look(now)
        };
        self.note_changes(changes);
    }

    /// Reports that ranks fell silent or were heard again; a lost one ends the world.
    pub(super) fn note_changes(&self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            let at = post_mortem::now_ms();
            match change {
                Change::Suspect { peer, silent } => {
                    tracing::warn!(rank = self.rank, peer = %self.shared.peers[peer], ?silent, "no sign of life");
                    self.append_event(&Event::Suspect { rank: self.rank, peer, silent_ms: millis(silent), at });
                }
                Change::Recovered { peer } => {
                    tracing::info!(rank = self.rank, peer = %self.shared.peers[peer], "heard again");
                    self.append_event(&Event::Recovered { rank: self.rank, peer, at });
                }
                Change::Lost { peer, silent } => self.peer_lost(
                    peer,
                    format!(
                        "silent for {:.1} s, longer than the peer timeout allows: \
                         its process is stopped, or its machine is overloaded or cut off",
                        silent.as_secs_f64()
                    ),
                ),
            }
        }
    }
}
