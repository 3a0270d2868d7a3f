//! Several machines: one launcher on each, which meet in a store that node 0's launcher hosts.
//!
//! A generation is one start of all ranks; a restart begins the next. Node 0 numbers the ranks, publishes where they
//! meet, collects their exits, and decides on the outcome of the generation and whether another one follows. Node 0's
//! launcher ends the job when another launcher is silent for too long, the others when they cannot reach node 0.

mod launcher_messages;
mod launcher_watch;
mod meet;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use burn_ddp_comm::StopSignal;
use burn_ddp_comm::post_mortem::PostMortem;
use burn_ddp_comm::{Store, StoreServer};

pub(crate) use launcher_messages::{GenerationPlan, Node, Verdict};
pub(crate) use launcher_watch::Link;
pub(crate) use meet::{Meet, meet};

use crate::error::LaunchError;
use crate::event::{Event, Stop, Trouble};
use crate::node_outcome::NodeOutcome;
use launcher_messages::{encode, put, take};

/// Interval between two looks at the store and at the signals.
const LOOK: Duration = Duration::from_millis(100);
/// Longest time that node 0 keeps its store open for launchers that have not read the last verdict.
const FAREWELL: Duration = Duration::from_secs(5);

/// This launcher's node rank, and its connection to the job's other launchers.
pub(crate) struct Nodes {
    pub(crate) node: usize,
    pub(crate) host: String,
    others: Option<Others>,
}

struct Others {
    nodes: Vec<Node>,
    link: Link,
    /// The launchers' store; `None` on nodes other than 0, which hosts it.
    server: Option<StoreServer>,
}

/// Reason why a wait for the other launchers ended early.
pub(crate) enum Interrupted {
    /// This process was sent a signal.
    Signal(i32),
    Error(LaunchError),
}

impl From<burn_ddp_comm::Error> for Interrupted {
    fn from(error: burn_ddp_comm::Error) -> Self {
        Self::Error(LaunchError::Nodes(error.to_string()))
    }
}

impl Nodes {
    /// The only launcher of its job.
    pub(crate) fn alone(host: String) -> Self {
        Self { node: 0, host, others: None }
    }

    pub(crate) fn decides(&self) -> bool {
        self.node == 0
    }

    pub(crate) fn link(&self) -> Option<&Link> {
        self.others.as_ref().map(|others| &others.link)
    }

    /// All launchers, by node rank; empty where there is only this one.
    pub(crate) fn all(&self) -> &[Node] {
        self.others.as_ref().map_or(&[], |others| &others.nodes)
    }

    /// Publishes node 0's plan of a generation. Called by node 0 only.
    pub(crate) fn announce(&self, generation: u32, plan: &GenerationPlan) -> Result<(), Interrupted> {
        let Some(others) = &self.others else { return Ok(()) };
        others.link.enter(generation);
        // All launchers have concluded the previous generation, so none reads entries of the one before it any more.
        if let (Some(server), Some(old)) = (&others.server, generation.checked_sub(2)) {
            server.forget(&format!("{old}/"));
        }
        Ok(put(&*others.link.store(), &format!("{generation}/plan"), plan)?)
    }

    /// Waits for node 0's plan of a generation. Called by all nodes but 0.
    pub(crate) fn await_plan(&self, generation: u32, events: &Receiver<Event>) -> Result<GenerationPlan, Interrupted> {
        let Some(others) = &self.others else {
            return Err(Interrupted::Error(LaunchError::Nodes(
                "a job of one machine has no node 0 to wait for".into(),
            )));
        };
        others.link.enter(generation);
        let key = format!("{generation}/plan");
        loop {
            // Errors are retried: if node 0 stays unreachable, the link reports it as `Event::Cut`.
            match take(&*others.link.store(), &key, LOOK) {
                Ok(Some(plan)) => return Ok(plan),
                Ok(None) => {}
                Err(error) => tracing::debug!(%error, "no plan yet"),
            }
            match look(events, LOOK / 10) {
                Some(Event::Signal(libc::SIGWINCH)) => {}
                Some(Event::Signal(libc::SIGTSTP)) => others.link.suspend(),
                Some(Event::Signal(signal)) => {
                    others.link.stop(Stop::Interrupted { host: self.host.clone(), signal });
                    return Err(self.leave(others, generation, signal));
                }
                Some(Event::Ordered { stop: Stop::Interrupted { signal, .. }, .. }) => {
                    return Err(self.leave(others, generation, signal));
                }
                Some(Event::Cut(trouble)) => return Err(Interrupted::Error(LaunchError::Nodes(trouble.message))),
                _ => {}
            }
        }
    }

    /// Tells node 0, which may have started its ranks, that this machine starts none.
    fn leave(&self, others: &Others, generation: u32, signal: i32) -> Interrupted {
        let own = NodeOutcome {
            node: self.node,
            host: self.host.clone(),
            interrupted_by: Some(signal),
            signalled: true,
            ..NodeOutcome::default()
        };
        if let Err(error) = put(&*others.link.store(), &format!("{generation}/done/{}", self.node), &own) {
            tracing::debug!(%error, "node 0 does not hear that this launcher leaves");
        }
        Interrupted::Signal(signal)
    }

    /// Ends a generation after this machine's ranks have exited. Publishes `own`, this machine's outcome; node 0 waits
    /// for the outcomes of all machines and computes the verdict by `decide`, the others wait for its verdict. Returns
    /// the verdict, and the signal that this process received meanwhile, if any.
    pub(crate) fn conclude(
        &mut self,
        generation: u32,
        (own, reports): (NodeOutcome, Vec<PostMortem>),
        (patience, stop): (Duration, StopSignal),
        events: &Receiver<Event>,
        decide: impl FnOnce(&[NodeOutcome], &[PostMortem], Option<usize>) -> Verdict,
    ) -> (Verdict, Option<i32>) {
        let Some(others) = &self.others else { return (decide(&[own], &reports, None), None) };
        let stopped =
            own.trouble.is_some() || own.interrupted_by.is_some() || own.ranks.iter().any(|r| r.failed || r.stopped);
        let until = stopped.then(|| Instant::now() + patience);
        let (host, heard) = (&self.host, own.asked.then(|| stop.number()));
        let mut wait =
            Wait { others, host, generation, patience, until, heard, signal: None, impatient: false, events };
        let store = others.link.store();
        let verdict = if self.node == 0 {
            let outcomes = wait.collect(generation, own);
            let first = first_failed(&*store, generation);
            let verdict = decide(&outcomes, &collect_reports(&*store, generation, reports), first);
            if let Err(error) = put(&*store, &format!("{generation}/verdict"), &verdict) {
                tracing::warn!(%error, "the outcome of the job could not be published to the other launchers");
            }
            verdict
        } else {
            for report in &reports {
                if let Err(error) = put(&*store, &report_key(generation, report.rank), &shortened(report)) {
                    tracing::warn!(%error, rank = report.rank, "this rank's report could not be sent to node 0");
                    // A store that does not answer delays each call by the peer timeout, so the other reports are
                    // dropped.
                    break;
                }
            }
            wait.verdict(generation, self.node, &own).unwrap_or_else(|trouble| {
                let trouble = own.trouble.clone().or(Some(trouble));
                decide(&[NodeOutcome { trouble, ..own }], &reports, None)
            })
        };
        (verdict, wait.signal)
    }

    /// Leaves the meeting at the end of the job. Node 0 waits, at most [`FAREWELL`], until the others have read the
    /// last verdict.
    pub(crate) fn part(self) {
        let Some(others) = self.others else { return };
        let store = others.link.store();
        if others.server.is_none() {
            // An error is ignored: node 0 stops waiting by itself.
            if others.link.cut().is_none() {
                let _ = store.set(&bye_key(self.node), b"");
            }
            return;
        }
        let until = Instant::now() + FAREWELL;
        let lost = others.link.lost();
        for node in (1..others.nodes.len()).filter(|node| !lost.contains_key(node)) {
            // A launcher that has not read the verdict by then will report that node 0 cannot be reached.
            let _ = store.get(&bye_key(node), until.saturating_duration_since(Instant::now()));
        }
    }
}

/// Wait for the other launchers after this machine's ranks have ended.
struct Wait<'a> {
    others: &'a Others,
    host: &'a str,
    generation: u32,
    /// Longest wait for the other launchers once the generation is known to be over.
    patience: Duration,
    /// End of the wait; set once the generation is known to be over.
    until: Option<Instant>,
    /// The signal that asks to stop, if it has been heard in this generation.
    heard: Option<i32>,
    /// The last signal to this process during the wait.
    signal: Option<i32>,
    /// True once this process was sent a second signal, which ends the wait.
    impatient: bool,
    events: &'a Receiver<Event>,
}

impl Wait<'_> {
    /// Outcomes of all machines. The outcome of a machine that is lost or does not answer holds only a [`Trouble`].
    fn collect(&mut self, generation: u32, own: NodeOutcome) -> Vec<NodeOutcome> {
        let store = self.others.link.store();
        let mut outcomes = BTreeMap::from([(0, own)]);
        for node in &self.others.nodes[1..] {
            let key = format!("{generation}/done/{}", node.node);
            let outcome = loop {
                match take::<NodeOutcome>(&*store, &key, LOOK) {
                    Ok(Some(outcome)) => break outcome,
                    Ok(None) => {}
                    Err(error) => break missing(node, error.to_string()),
                }
                if let Some(silent) = self.others.link.lost().get(&node.node) {
                    break missing(node, launcher_watch::lost(node.node, *silent).message);
                }
                if self.is_over() {
                    break missing(
                        node,
                        format!("node {} (host {}) did not report how its ranks ended", node.node, node.host),
                    );
                }
            };
            outcomes.insert(node.node, outcome);
        }
        outcomes.into_values().collect()
    }

    fn verdict(&mut self, generation: u32, node: usize, own: &NodeOutcome) -> Result<Verdict, Trouble> {
        let store = self.others.link.store();
        let mut published = false;
        loop {
            let reachable = self.others.link.cut().is_none();
            published = published || reachable && put(&*store, &format!("{generation}/done/{node}"), own).is_ok();
            if published {
                match take::<Verdict>(&*store, &format!("{generation}/verdict"), LOOK) {
                    Ok(Some(verdict)) => return Ok(verdict),
                    Ok(None) => {}
                    Err(error) => tracing::debug!(%error, "no verdict yet"),
                }
            }
            if let Some(cut) = self.others.link.cut() {
                return Err(cut);
            }
            if self.is_over() {
                let message = "node 0's launcher did not report how the job ended".into();
                return Err(Trouble { message, exit_code: 1 });
            }
        }
    }

    /// Handles the next event, if there is one; true if the wait is over.
    fn is_over(&mut self) -> bool {
        match look(self.events, LOOK / 10) {
            Some(Event::Signal(libc::SIGWINCH)) => {}
            Some(Event::Signal(libc::SIGTSTP)) => self.others.link.suspend(),
            // By another way than the first time.
            Some(Event::Signal(signal)) if self.heard == Some(signal) => {}
            Some(Event::Signal(signal)) => {
                self.impatient = self.signal.replace(signal).is_some();
                self.others.link.stop(Stop::Interrupted { host: self.host.to_owned(), signal });
            }
            _ => {}
        }
        if self.until.is_none() && self.others.link.stopped(self.generation).is_some() {
            self.until = Some(Instant::now() + self.patience.max(STOPPING));
        }
        self.impatient || self.until.is_some_and(|until| Instant::now() >= until)
    }
}

/// Least time to wait for the other launchers once a generation has ended on one of them: longer than a launcher takes
/// to end its ranks at the default grace time.
const STOPPING: Duration = Duration::from_secs(60);

fn missing(node: &Node, message: String) -> NodeOutcome {
    let trouble = Some(Trouble { message, exit_code: 1 });
    NodeOutcome { node: node.node, host: node.host.clone(), trouble, ..NodeOutcome::default() }
}

fn look(events: &Receiver<Event>, wait: Duration) -> Option<Event> {
    events.recv_timeout(wait).ok()
}

/// Rank whose failure was published first. The order in the store decides, since the machines' clocks may differ.
fn first_failed(store: &dyn Store, generation: u32) -> Option<usize> {
    match take(store, &format!("{generation}/stop"), Duration::ZERO) {
        Ok(Some(Stop::Failed { rank, .. })) => Some(rank),
        _ => None,
    }
}

/// Reports of the ranks of all machines.
fn collect_reports(store: &dyn Store, generation: u32, mut reports: Vec<PostMortem>) -> Vec<PostMortem> {
    let keys = store.keys(&report_key(generation, "")).unwrap_or_else(|error| {
        tracing::warn!(%error, "the reports of other machines cannot be read");
        Vec::new()
    });
    reports.extend(keys.iter().filter_map(|key| take(store, key, Duration::ZERO).ok().flatten()));
    reports.sort_by_key(|report| report.rank);
    reports
}

/// Largest size in bytes of a report to node 0, which receives one report per rank.
const REPORT_CAP: usize = 16 * 1024;
/// Largest number of other ranks' states in a report to node 0.
const PEERS_CAP: usize = 8;

/// The part of a report that is sent to node 0; the whole report stays in this machine's files. It has the states of
/// the culprit and of the ranks that `report`'s rank waited for, and as many of the last collectives as fit.
fn shortened(report: &PostMortem) -> PostMortem {
    let mut short = report.clone();
    let awaited: BTreeSet<usize> = report.pending.iter().flat_map(|call| call.waiting_for.iter().copied()).collect();
    short.peers.retain(|peer| Some(peer.rank) == report.culprit || awaited.contains(&peer.rank));
    short.peers.sort_by_key(|peer| Some(peer.rank) != report.culprit);
    short.peers.truncate(PEERS_CAP);
    while !short.history.is_empty() && encode(&short).len() > REPORT_CAP {
        short.history.drain(..short.history.len().div_ceil(4));
    }
    short
}

fn report_key(generation: u32, rank: impl std::fmt::Display) -> String {
    format!("{generation}/post-mortem/{rank}")
}

fn bye_key(node: usize) -> String {
    format!("bye/{node}")
}

#[cfg(test)]
mod tests {
    use burn_ddp_comm::post_mortem::{PeerState, Pending, Record};

    use super::*;

    #[test]
    fn reports_of_a_thousand_ranks_fit_into_the_store() {
        let peer = |rank| PeerState {
            rank,
            host: "a-machine-of-the-cluster".into(),
            pid: 1_000_000,
            last_heard_ms: Some(1000),
            left: false,
            pending: vec!["all_reduce (f32, mean, 1000000 elements)".into()],
            step: Some(1),
        };
        let record = |sequence| Record {
            group: 1,
            sequence,
            peer: None,
            ranks: (0..512).collect(),
            call: "all_reduce (f32, mean, 1000000 elements)".into(),
            site: "src/main.rs:100:10".into(),
            step: Some(1),
            started: 1,
            took_us: Some(1),
            ok: true,
        };
        let pending = Pending {
            call: "all_reduce (f32, mean, 1000000 elements)".into(),
            group: 1,
            sequence: 64,
            since_ms: 1000,
            waiting_for: (0..1023).collect(),
        };
        let report = PostMortem {
            rank: 1023,
            world_size: 1024,
            job_id: "job".into(),
            restart_count: 0,
            host: "host".into(),
            pid: 1,
            at: 1,
            cause: "rank 1000 is lost".into(),
            culprit: Some(1000),
            step: Some(1),
            pending: vec![pending.clone()],
            peers: (0..1023).map(peer).collect(),
            history: (0..64).map(record).collect(),
        };
        assert!(encode(&report).len() > 256 * 1024, "a thousand of these fill a store");
        let short = shortened(&report);
        assert!(encode(&short).len() <= REPORT_CAP);
        assert_eq!((&short.pending[..], short.peers[0].rank), (&[pending][..], 1000));
        assert_eq!(short.history.last(), report.history.last(), "the last collectives are the ones that matter");
        let small = PostMortem { peers: Vec::new(), history: vec![record(1)], ..report };
        assert_eq!(shortened(&small), small);
    }
}
