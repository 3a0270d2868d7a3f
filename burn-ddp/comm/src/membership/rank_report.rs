//! Events, and the post-mortem report, that a rank writes for its launcher.

use std::time::Instant;

use super::{Membership, PendingCall};
use crate::LaunchEnv;
use crate::poison_free_locks::lock;
use crate::post_mortem::{self, Event, PeerState, Pending, PostMortem, millis};

impl Membership {
    /// Appends `event` to the launcher's event file, if there is one.
    pub(crate) fn append_event(&self, event: &Event) {
        let Some(LaunchEnv { events: Some(file), .. }) = self.shared.launch.get() else { return };
        if let Err(error) = post_mortem::append(file, event) {
            tracing::warn!(%error, file = %file.display(), "cannot write an event for the launcher");
        }
    }

    /// Writes this rank's report to the launcher's directory if the world has ended. Only the first call writes.
    pub(super) fn report(&self) {
        self.reported.get_or_init(|| {
            let Some(LaunchEnv { report_dir: Some(dir), .. }) = self.shared.launch.get() else { return };
            let Some(report) = self.post_mortem() else { return };
            if let Err(error) = report.write(dir) {
                tracing::warn!(%error, dir = %dir.display(), "cannot write the report of this rank");
            }
        });
    }

    /// This rank's report; `None` while the world goes on.
    fn post_mortem(&self) -> Option<PostMortem> {
        let cause = self.check().err()?;
        let me = &self.shared.peers[self.rank];
        let launch = self.shared.launch.get();
        let peers = self.shared.peers.iter().filter(|peer| peer.rank != self.rank).map(|peer| {
            let activity = self.activity(peer.rank);
            let beat = activity.as_ref().and_then(|activity| activity.beat.clone()).unwrap_or_default();
            PeerState {
                rank: peer.rank,
                host: peer.host.clone(),
                pid: peer.pid,
                last_heard_ms: lock(&self.shared.liveness).silence(peer.rank, Instant::now()).map(millis),
                left: self.said_goodbye(peer.rank),
                pending: beat.pending.iter().map(|pending| pending.call.to_string()).collect(),
                step: beat.step,
            }
        });
        let pending = self.history().pending().into_iter().map(|PendingCall { call, since_ms, waiting_for }| Pending {
            waiting_for: self.missing(&call, &waiting_for),
            since_ms,
            group: call.group,
            sequence: call.sequence,
            call: call.to_string(),
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
            pending: pending.collect(),
            peers: peers.collect(),
            history: self.history().records(),
        })
    }
}
