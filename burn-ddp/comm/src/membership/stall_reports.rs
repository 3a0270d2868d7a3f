//! Reports of calls that wait for long, and explanations of timeouts, from what is known of the ranks they wait for.

use std::time::Instant;

use super::Membership;
use super::stall_diagnosis::{Activity, Diagnosis, diagnose, missing};
use super::world_failure::capped;
use crate::Error;
use crate::call::{Call, CallInfo};
use crate::poison_free_locks::lock;
use crate::post_mortem::{self, Event, millis};

impl Membership {
    /// Reports, as a warning and an event, that `call` has waited for long, and still waits for these group ranks.
    pub fn stalled(&self, call: &Call, waiting_for: Vec<usize>) {
        let waiting_for = self.missing(&call.info, &call.world_ranks(&waiting_for));
        let Diagnosis { text, .. } = self.diagnose(call, &waiting_for);
        let described = if text.is_empty() { call.info.to_string() } else { format!("{}; {text}", call.info) };
        let since = call.started().elapsed();
        tracing::warn!(rank = self.rank, ?waiting_for, ?since, call = described, "a collective takes long");
        let (since_ms, at) = (millis(since), post_mortem::now_ms());
        self.append_event(&Event::Stall { rank: self.rank, waiting_for, call: described, since_ms, at });
    }

    /// `error` of `call`. If it is a timeout, adds the reason that the awaited ranks did not come.
    pub(super) fn explained(&self, mut error: Error, call: &Call) -> Error {
        if let Error::Timeout { waiting_for, culprit, why, .. } = &mut error {
            *waiting_for = self.missing(&call.info, waiting_for);
            let diagnosis = self.diagnose(call, waiting_for);
            *culprit = diagnosis.culprit;
            *why = capped(diagnosis.text);
        }
        error
    }

    /// Ranks whose part in `call` has not arrived, see [`missing`].
    pub(super) fn missing(&self, call: &CallInfo, waiting_for: &[usize]) -> Vec<usize> {
        missing(call, waiting_for, |rank| self.activity(rank))
    }

    fn diagnose(&self, call: &Call, waiting_for: &[usize]) -> Diagnosis {
        let mut diagnosis = diagnose(self.rank, &call.info, waiting_for, |rank| self.activity(rank));
        let crosses = |&&(waits, awaited): &&(usize, usize)| !self.routes.machine_of(waits).contains(&awaited);
        if diagnosis.text.is_empty()
            && !self.shared.local
            && let Some((waits, awaited)) = diagnosis.data_missing.iter().find(crosses)
        {
            diagnosis.text = format!(
                "ranks {waits} and {awaited} are both in this call and their heartbeats arrive, but data from rank \
                 {awaited} do not reach rank {waits}: a firewall or NAT between their machines may have forgotten a \
                 connection that was idle (a shorter BURN_DDP_PEER_TIMEOUT probes idle connections more often), or the \
                 network loses packets or is slow"
            );
        }
        diagnosis
    }

    /// Activity of `rank`, as far as it is known. `None` for a rank that does not exist.
    pub(super) fn activity(&self, rank: usize) -> Option<Activity> {
        self.shared.peers.get(rank)?;
        let ended = if self.is_unannounced(rank) { "has ended without a goodbye" } else { "has left" };
        let left = self.has_left(rank).then_some(ended);
        if rank == self.rank || self.shared.local {
            let local = &self.shared.local_ranks[rank];
            return Some(Activity { left, hidden_by: None, silent: None, beat: Some(local.heartbeat()) });
        }
        let liveness = lock(&self.shared.liveness);
        let through = if liveness.is_near(rank) {
            Vec::new()
        } else if let Some(through) = self.routes.through(rank, |rank| self.has_left(rank)) {
            through
        } else {
            // No rank is left to pass on its messages, so its last heartbeat is out of date.
            return Some(Activity { left, hidden_by: None, silent: None, beat: None });
        };
        let hidden_by = through.into_iter().find(|through| liveness.suspects(*through));
        let silent = liveness.suspects(rank).then(|| liveness.silence(rank, Instant::now())).flatten();
        Some(Activity { left, hidden_by, silent, beat: liveness.last_beat(rank).cloned() })
    }
}
