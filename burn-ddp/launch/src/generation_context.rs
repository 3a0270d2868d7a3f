//! Context of one generation on this machine: its plan, and the receivers of its events (the user, the other launchers,
//! ranks that have yet to join).

use burn_ddp_comm::post_mortem::Event;

use crate::event::Stop;
use crate::node_outcome::Blame;
use crate::nodes::{GenerationPlan, Nodes};
use crate::rank_exit::RankExit;
use crate::rank_store::JoinAbort;
use crate::report::event_file::EventFile;
use crate::report::user_notices::{NoticeSink, Notices};

/// Plan of a generation, and the receivers of its events.
pub(crate) struct GenerationContext<'a> {
    pub(crate) generation: u32,
    pub(crate) plan: &'a GenerationPlan,
    pub(crate) nodes: &'a Nodes,
    pub(crate) join_abort: JoinAbort,
    /// File to which the ranks append their events; `None` where it could not be made.
    pub(crate) event_file: Option<EventFile>,
    pub(crate) notices: Notices,
    pub(crate) sink: NoticeSink,
}

impl GenerationContext<'_> {
    /// Causes of failure that ranks of this machine reported, oldest first.
    pub(crate) fn blames(&self) -> Vec<Blame> {
        self.notices.blames.clone()
    }

    /// Announces that a rank of this machine exited before the ranks were sent a signal to end: ranks that wait for it
    /// to join stop waiting and, if it failed, the other launchers end their parts.
    pub(crate) fn announce_exit(&self, rank: usize, pid: u32, exit: RankExit, failed: bool) {
        let host = self.nodes.host.clone();
        let cause = format!("rank {rank} (host {host}, pid {pid}) {exit} before all ranks had joined");
        self.join_abort.announce(rank, cause);
        if let Some(link) = self.nodes.link().filter(|_| failed) {
            link.stop(Stop::Failed { rank, host, pid, exit });
        }
    }

    /// Announces to the other launchers that a signal to this one ends the job.
    pub(crate) fn announce_interrupt(&self, signal: i32) {
        if let Some(link) = self.nodes.link() {
            link.stop(Stop::Interrupted { host: self.nodes.host.clone(), signal });
        }
    }

    /// Announces to the other launchers that a further signal came.
    pub(crate) fn announce_hurry(&self, signal: i32) {
        if let Some(link) = self.nodes.link() {
            link.stop(Stop::Hurried { signal });
        }
    }

    /// Announces that this process is about to stop for a while (Ctrl-Z), or goes on.
    pub(crate) fn announce_pause(&self, paused: bool) {
        if let Some(link) = self.nodes.link() {
            link.pause(paused);
        }
    }

    /// Reason for the end of the generation, if another launcher has already reported it.
    pub(crate) fn stop_order(&self) -> Option<Stop> {
        self.nodes.link().and_then(|link| link.stopped(self.generation))
    }

    /// The events that this machine's ranks have reported since the last call. Shows a notice for each new one.
    pub(crate) fn read_reports(&mut self) -> Vec<Event> {
        let events = self.event_file.as_mut().map(EventFile::read).unwrap_or_default();
        for event in &events {
            if let Some(text) = self.notices.notice(event.clone(), self.plan) {
                self.sink.show(&text);
            }
        }
        events
    }
}
