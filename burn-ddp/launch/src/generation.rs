//! Who else hears what happens to the ranks of this machine while they run: the user, the other launchers, and the ranks that
//! are still about to meet.

use crate::event::Stop;
use crate::exit::RankExit;
use crate::node_outcome::Blame;
use crate::nodes::{Nodes, Start};
use crate::rank_store::JoinAbort;
use crate::report::event_file::EventFile;
use crate::report::notices::{NoticeSink, Notices};

/// One generation's surroundings.
pub(crate) struct GenerationContext<'a> {
    pub(crate) generation: u32,
    pub(crate) notices: NoticeSink,
    pub(crate) nodes: &'a Nodes,
    pub(crate) start: &'a Start,
    pub(crate) absence: JoinAbort,
    pub(crate) events: Option<EventFile>,
    pub(crate) told: Notices,
}

impl GenerationContext<'_> {
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn node(&self) -> usize {
        self.nodes.node
    }

    pub(crate) fn host(&self) -> &str {
        &self.nodes.host
    }

    pub(crate) fn notice(&self, text: &str) {
        self.notices.say(text);
    }

    pub(crate) fn blames(&self) -> Vec<Blame> {
        self.told.blames.clone()
    }

    /// A rank here has ended before anybody was told to stop.
    pub(crate) fn rank_ended(&self, rank: usize, pid: u32, end: RankExit) {
        let host = self.host().to_owned();
        let cause = format!("rank {rank} (host {host}, pid {pid}) {end} before all ranks had joined");
        self.absence.tell(rank, cause);
        if let Some(link) = self.nodes.link().filter(|_| end != RankExit::Code(0)) {
            link.stop(Stop::Failed { rank, host, pid, exit: end });
        }
    }

    pub(crate) fn interrupted(&self, signal: i32) {
        if let Some(link) = self.nodes.link() {
            link.stop(Stop::Interrupted { host: self.host().to_owned(), signal });
        }
    }

    /// Why the generation is over already, if another launcher has said so.
    pub(crate) fn stopped(&self) -> Option<Stop> {
        self.nodes.link().and_then(|link| link.stopped(self.generation))
    }

    pub(crate) fn pausing(&self) {
        if let Some(link) = self.nodes.link() {
            link.pause(true);
        }
    }

    pub(crate) fn resumed(&self) {
        if let Some(link) = self.nodes.link() {
            link.pause(false);
        }
    }

    /// Takes in, and passes on to the user, what the ranks here report.
    pub(crate) fn read_events(&mut self) {
        let Some(events) = &mut self.events else { return };
        for event in events.read() {
            if let Some(text) = self.told.take_in(event, self.start) {
                self.notices.say(&text);
            }
        }
    }
}
