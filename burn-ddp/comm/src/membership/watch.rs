//! Watching the others: heartbeats, suspects, stalls, and what is left behind when the world ends.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::diagnosis::{Diagnosis, Known, diagnose};
use super::failure::capped;
use super::heartbeats::Change;
use super::{ControlMessage, Membership};
use crate::Error;
use crate::call::Call;
use crate::history::millis;
use crate::post_mortem::{self, Event, PeerState, PostMortem};
use crate::sync::lock;

impl Membership {
    /// What to tell the others at every heartbeat.
    pub(crate) fn heartbeat(&self) -> ControlMessage {
        ControlMessage::Heartbeat(self.history().heartbeat(self.step()))
    }

    /// To whom a heartbeat is due.
    pub(crate) fn due(&self, now: Instant) -> Vec<usize> {
        lock(&self.shared.liveness).due(now)
    }

    /// When the monitor should look next.
    pub(crate) fn next_look(&self, now: Instant) -> Option<Instant> {
        lock(&self.shared.liveness).next_look(now)
    }

    /// Looks who is silent; the look comes `late`. Very late means that this process itself was stopped: it accuses nobody then.
    pub(crate) fn look(&self, now: Instant, late: Duration) {
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

    pub(super) fn note_changes(&self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            let at = post_mortem::now_ms();
            match change {
                Change::Suspect { peer, silent } => {
                    tracing::warn!(rank = self.rank, peer = %self.shared.peers[peer], ?silent, "no sign of life");
                    self.note(&Event::Suspect { rank: self.rank, peer, silent_ms: millis(silent), at });
                }
                Change::Recovered { peer } => {
                    tracing::info!(rank = self.rank, peer = %self.shared.peers[peer], "heard again");
                    self.note(&Event::Recovered { rank: self.rank, peer, at });
                }
                Change::Lost { peer, silent } => self.peer_lost(
                    peer,
                    format!(
                        "silent for {:.1} s, longer than the peer timeout allows: its process is stopped, or its machine is overloaded or cut off",
                        silent.as_secs_f64()
                    ),
                ),
            }
        }
    }

    /// `call` has waited for long, now for these group ranks: reported, but not an error yet.
    pub fn stalled(&self, call: &Call, waiting_for: Vec<usize>) {
        let waiting_for = call.world_ranks(&waiting_for);
        let Diagnosis { text, .. } = self.diagnose(call, &waiting_for);
        let described = if text.is_empty() { call.info.to_string() } else { format!("{}; {text}", call.info) };
        let since = call.started().elapsed();
        tracing::warn!(rank = self.rank, ?waiting_for, ?since, call = described, "a collective takes long");
        let (since_ms, at) = (millis(since), post_mortem::now_ms());
        self.note(&Event::Stall { rank: self.rank, waiting_for, call: described, since_ms, at });
    }

    /// `error`, with what is known of those who were waited for.
    pub(super) fn explained(&self, mut error: Error, of: &Call) -> Error {
        if let Error::Timeout { waiting_for, culprit, why, .. } = &mut error {
            let diagnosis = self.diagnose(of, waiting_for);
            *culprit = diagnosis.culprit;
            *why = capped(diagnosis.text);
        }
        error
    }

    fn diagnose(&self, call: &Call, waiting_for: &[usize]) -> Diagnosis {
        diagnose(&call.info, waiting_for, |rank| self.known(rank))
    }

    /// What is known of `rank`. `None` for one that does not exist.
    fn known(&self, rank: usize) -> Option<Known> {
        let left = self.shared.left.get(rank)?.load(Ordering::Acquire);
        if rank == self.rank || self.shared.local {
            let doing = &self.shared.doing[rank];
            return Some(Known { left, silent: None, beat: Some(doing.history.heartbeat(doing.step())) });
        }
        let liveness = lock(&self.shared.liveness);
        let silent = liveness.suspects(rank).then(|| liveness.silence(rank, Instant::now())).flatten();
        Some(Known { left, silent, beat: liveness.last_beat(rank).cloned() })
    }

    /// This rank's report; `None` as long as the world goes on.
    pub(super) fn post_mortem(&self) -> Option<PostMortem> {
        let cause = self.check().err()?;
        let me = &self.shared.peers[self.rank];
        let launch = self.shared.launch.get();
        let peers = self.shared.peers.iter().filter(|peer| peer.rank != self.rank).map(|peer| {
            let known = self.known(peer.rank);
            let beat = known.as_ref().and_then(|known| known.beat.clone()).unwrap_or_default();
            PeerState {
                rank: peer.rank,
                host: peer.host.clone(),
                pid: peer.pid,
                last_heard_ms: lock(&self.shared.liveness).silence(peer.rank, Instant::now()).map(millis),
                left: known.is_some_and(|known| known.left),
                pending: beat.pending.iter().map(|pending| pending.call.to_string()).collect(),
                step: beat.step,
            }
        });
        Some(PostMortem {
            rank: self.rank,
            world_size: self.shared.peers.len(),
            job_id: launch.map(|launch| launch.job_id.clone()).unwrap_or_default(),
            restart_count: launch.map_or(0, |launch| launch.restart_count),
            host: me.host.clone(),
            pid: me.pid,
            at: post_mortem::now_ms(),
            cause: cause.to_string(),
            culprit: cause.culprit(),
            step: self.step(),
            pending: self.history().pending(),
            peers: peers.collect(),
            history: self.history().records(),
        })
    }
}
