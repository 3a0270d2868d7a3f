//! Context of one generation on this machine: its plan, and the listeners of its events (the user, the other launchers,
//! ranks that have yet to join).

use crate::event::Stop;
use crate::node_outcome::Blame;
use crate::nodes::{GenerationPlan, Nodes};
use crate::rank_exit::RankExit;
use crate::rank_store::JoinAbort;
use crate::report::event_file::EventFile;
use crate::report::user_notices::{NoticeSink, Notices};

/// Everything that a generation's events are passed on to.
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

    /// A rank here exited before any rank was told to end: ranks that wait for it to join need not wait, and after a
    /// failure the other launchers end their parts.
    pub(crate) fn announce_exit(&self, rank: usize, pid: u32, exit: RankExit) {
        let host = self.nodes.host.clone();
        let cause = format!("rank {rank} (host {host}, pid {pid}) {exit} before all ranks had joined");
        self.join_abort.announce(rank, cause);
        if let Some(link) = self.nodes.link().filter(|_| exit != RankExit::Code(0)) {
            link.stop(Stop::Failed { rank, host, pid, exit });
        }
    }

    /// A signal to this launcher ends the job.
    pub(crate) fn announce_interrupt(&self, signal: i32) {
        if let Some(link) = self.nodes.link() {
            link.stop(Stop::Interrupted { host: self.nodes.host.clone(), signal });
        }
    }

    /// This process is about to stop for a while, or goes on.
    pub(crate) fn announce_pause(&self, paused: bool) {
        if let Some(link) = self.nodes.link() {
            link.pause(paused);
        }
    }

    /// Reason for the end of the generation, if another launcher has already reported it.
    pub(crate) fn stop_order(&self) -> Option<Stop> {
        self.nodes.link().and_then(|link| link.stopped(self.generation))
    }

    /// Reads the events that ranks here reported since the last call, and shows those that are news.
    pub(crate) fn read_reports(&mut self) {
        let Some(file) = &mut self.event_file else { return };
        for event in file.read() {
            if let Some(text) = self.notices.notice(event, self.plan) {
                self.sink.show(&text);
            }
        }
    }
}
