//! One generation on this machine, from the first rank's start to the last one's end: who failed first, who is told to stop,
//! who must be killed.
//!
//! ```text
//! Running ──a rank fails, here or elsewhere──▶ Settling ──the others had their time──▶ Stopping ──grace over──▶ Killing ──▶ over
//!    └────────a signal to this process, or to another launcher of the job──────────────▶┘   (SIGINT here kills at once)
//! ```

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};
use std::{io, mem};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::event::{Event, Relayed, Stop, Trouble};
use crate::exit::{RankExit, signal_name};
use crate::generation::GenerationContext;
use crate::node_outcome::{NodeOutcome, RankOutcome};
use crate::output::relay::Relay;
use crate::signals;

/// After a failure the others usually notice within a second, and say what they saw; no longer than this is it waited for.
const SETTLE: Duration = Duration::from_secs(3);
/// A killed process may take seconds to give back a device or much memory.
const KILL_PATIENCE: Duration = Duration::from_secs(30);
/// How long processes that outlive their rank may still print, first undisturbed, then after SIGTERM.
const STRAGGLERS: Duration = Duration::from_secs(1);

/// How long a rank may take to be stopped.
const SUSPENDING: Duration = Duration::from_secs(1);

/// How often the ranks' own reports are looked at.
const TURN: Duration = Duration::from_millis(200);
/// The same while ranks have until a deadline to end: a wait that ends later than this shows that nobody here ran meanwhile.
const SHORT_TURN: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug)]
enum Phase {
    Running,
    Settling { until: Instant },
    Stopping { until: Instant },
    Killing { until: Instant },
}

impl Phase {
    fn deadline(self) -> Option<Instant> {
        match self {
            Self::Running => None,
            Self::Settling { until } | Self::Stopping { until } | Self::Killing { until } => Some(until),
        }
    }
}

impl Phase {
    /// Time in which this process did not run does not count.
    fn put_off(&mut self, by: Duration) {
        match self {
            Self::Running => {}
            Self::Settling { until } | Self::Stopping { until } | Self::Killing { until } => *until += by,
        }
    }
}

struct Rank {
    child: Child,
    pid: Pid,
    ended: Option<(RankExit, Instant)>,
    /// Stopped (SIGSTOP), by whomever.
    suspended: bool,
    log: Option<PathBuf>,
}

/// The ranks of a running job. Not reaped before the end, so that their pids, which name their groups, stay theirs.
pub(crate) struct Job<'a> {
    ranks: Vec<Rank>,
    sender: Sender<Event>,
    events: &'a Receiver<Event>,
    /// Those that came while only some were waited for.
    deferred: VecDeque<Event>,
    grace: Duration,
    /// Rank 0 has the terminal and hears when its size changes.
    first_rank_has_terminal: bool,
    /// The number, among all ranks of the job, of this machine's first.
    first_rank: usize,
    started: Instant,
    phase: Phase,
    /// Ranks that failed before any rank was told to stop, in the order in which that was seen.
    failed: Vec<usize>,
    interrupted_by: Option<i32>,
    /// This process was told to end, before or after something else ended the job.
    signalled: bool,
    trouble: Option<Trouble>,
    stopped: Vec<usize>,
    killed: Vec<usize>,
    relayed: Option<Relayed>,
}

impl<'a> Job<'a> {
    pub(crate) fn new(
        sender: Sender<Event>,
        events: &'a Receiver<Event>,
        grace: Duration,
        first_rank: usize,
        first_rank_has_terminal: bool,
    ) -> Self {
        Self {
            ranks: Vec::new(),
            sender,
            events,
            deferred: VecDeque::new(),
            grace,
            first_rank_has_terminal,
            first_rank,
            started: Instant::now(),
            phase: Phase::Running,
            failed: Vec::new(),
            interrupted_by: None,
            signalled: false,
            trouble: None,
            stopped: Vec::new(),
            killed: Vec::new(),
            relayed: None,
        }
    }

    /// Takes over the next rank and starts waiting for its end.
    pub(crate) fn add(&mut self, mut child: Child, log: Option<PathBuf>) -> io::Result<()> {
        let rank = self.ranks.len();
        let pid = Pid::from_child(&child);
        let events = self.sender.clone();
        let waiter = thread::Builder::new().name(format!("burn-ddp-rank-{rank}")).spawn(move || {
            // Without a receiver the job was given up, and nobody wants to know.
            let end = wait_for_end(pid, |change| drop(events.send(change.of(rank))));
            let _ = events.send(Event::Exited { rank, exit: end, at: Instant::now() });
        });
        if let Err(error) = waiter {
            // Without its waiter the rank could not be supervised.
            child.kill()?;
            child.wait()?;
            return Err(error);
        }
        tracing::debug!(rank, pid = child.id(), "rank started");
        self.ranks.push(Rank { child, pid, ended: None, suspended: false, log });
        Ok(())
    }

    /// Waits for the end of all ranks here, stopping them where needed. Every wait but that for healthy ranks has a deadline.
    pub(crate) fn supervise(mut self, relay: Option<Relay>, outside: &mut GenerationContext<'_>) -> NodeOutcome {
        if let Some(stop) = outside.stopped() {
            self.on_order(&stop);
        }
        while self.is_running() {
            outside.read_events();
            let deadline = match self.phase.deadline() {
                Some(until) => until.min(Instant::now() + SHORT_TURN),
                None => Instant::now() + TURN,
            };
            let event = self.next_event(Some(deadline));
            let late = deadline.elapsed();
            if late > SHORT_TURN {
                self.phase.put_off(late);
            }
            match event {
                Some(Event::Exited { rank, exit: end, at }) => self.on_end(rank, end, at, outside),
                Some(Event::Signal(signal)) => self.on_signal(signal, outside),
                Some(Event::Relayed(relayed)) => self.relayed = Some(relayed),
                Some(Event::Stopped { rank, signal }) => self.on_suspended(rank, signal, outside),
                Some(Event::Continued { rank }) => self.on_continued(rank, outside),
                Some(Event::Ordered { generation, stop }) if generation == outside.generation() => {
                    self.on_order(&stop);
                }
                Some(Event::Ordered { .. }) => {}
                Some(Event::Cut(trouble)) => {
                    self.trouble.get_or_insert(trouble);
                    self.settle();
                }
                None if self.phase.deadline().is_none_or(|until| Instant::now() < until) => {}
                None if matches!(self.phase, Phase::Killing { .. }) => break,
                None => self.on_deadline(),
            }
        }
        let elapsed = self.started.elapsed();
        self.end_stragglers(relay);
        self.reap();
        outside.read_events();
        self.outcome(elapsed, outside)
    }

    /// Gives the job up before it ran: kills what was started.
    pub(crate) fn abort(mut self) {
        self.kill();
        while self.is_running() {
            match self.next_event(self.phase.deadline()) {
                Some(Event::Exited { rank, exit: end, at }) => self.ranks[rank].ended = Some((end, at)),
                Some(_) => {}
                None => break,
            }
        }
        self.reap();
    }

    fn is_running(&self) -> bool {
        self.ranks.iter().any(|rank| rank.ended.is_none())
    }

    fn running(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].ended.is_none()).collect()
    }

    /// The next event, or `None` at the deadline.
    fn next_event(&mut self, deadline: Option<Instant>) -> Option<Event> {
        if let Some(event) = self.deferred.pop_front() {
            return Some(event);
        }
        let result = match deadline {
            None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())),
        };
        match result {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            // This job holds a sender itself.
            Err(RecvTimeoutError::Disconnected) => None,
        }
    }

    fn on_end(&mut self, rank: usize, end: RankExit, at: Instant, outside: &GenerationContext<'_>) {
        tracing::debug!(rank, %end, "rank ended");
        self.ranks[rank].ended = Some((end, at));
        let told_to_stop = matches!(self.phase, Phase::Stopping { .. } | Phase::Killing { .. });
        if told_to_stop {
            return;
        }
        let number = self.first_rank + rank;
        outside.rank_ended(number, self.ranks[rank].child.id(), end);
        if end == RankExit::Code(0) {
            return;
        }
        self.settle();
        self.failed.push(rank);
    }

    /// The others may end by themselves, and say what they saw.
    fn settle(&mut self) {
        if matches!(self.phase, Phase::Running) {
            self.phase = Phase::Settling { until: Instant::now() + self.grace.min(SETTLE) };
        }
    }

    fn on_signal(&mut self, signal: i32, outside: &GenerationContext<'_>) {
        match signal {
            libc::SIGWINCH if self.first_rank_has_terminal => return self.send(0, Signal::WINCH),
            libc::SIGWINCH => return,
            libc::SIGTSTP => return self.suspend(outside),
            _ => {}
        }
        self.signalled = true;
        tracing::info!(signal = signal_name(signal), "passing a signal on to all ranks");
        let impatient = signal == libc::SIGINT && matches!(self.phase, Phase::Stopping { .. });
        if impatient {
            return self.kill();
        }
        if matches!(self.phase, Phase::Running | Phase::Settling { .. }) {
            if self.failed.is_empty() && self.trouble.is_none() {
                self.interrupted_by = Some(signal);
                outside.interrupted(signal);
            }
            self.interrupt(signal);
        } else if let Some(signal) = Signal::from_named_raw(signal) {
            self.send_all(signal);
        }
    }

    fn interrupt(&mut self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.tell_to_end(signal);
        }
        self.start_stopping();
    }

    /// Another launcher says that the job is over.
    fn on_order(&mut self, stop: &Stop) {
        tracing::info!(?stop, "another launcher ends the job");
        match stop {
            Stop::Interrupted { signal, .. } if matches!(self.phase, Phase::Running | Phase::Settling { .. }) => {
                self.interrupt(*signal);
            }
            Stop::Interrupted { .. } | Stop::Failed { .. } | Stop::Trouble(_) => self.settle(),
        }
    }

    fn on_suspended(&mut self, rank: usize, signal: i32, outside: &GenerationContext<'_>) {
        let Rank { child, suspended, .. } = &mut self.ranks[rank];
        *suspended = true;
        let (number, pid, signal) = (self.first_rank + rank, child.id(), signal_name(signal));
        outside.notice(&format!(
            "rank {number} (pid {pid}) is stopped ({signal}), the others wait for it; `kill -CONT {pid}` lets it go on"
        ));
    }

    fn on_continued(&mut self, rank: usize, outside: &GenerationContext<'_>) {
        let Rank { child, suspended, .. } = &mut self.ranks[rank];
        *suspended = false;
        outside.notice(&format!("rank {} (pid {}) goes on", self.first_rank + rank, child.id()));
    }

    /// Ctrl-Z: stops the ranks, which the terminal does not reach, and this process, until `fg` or `bg`.
    fn suspend(&mut self, outside: &GenerationContext<'_>) {
        outside.pausing();
        let running: Vec<_> = self.running().into_iter().filter(|&rank| !self.ranks[rank].suspended).collect();
        running.iter().for_each(|&rank| self.send(rank, Signal::STOP));
        self.await_suspended(&running, true);
        let before = Instant::now();
        if let Err(error) = signals::stop_here() {
            tracing::warn!(%error, "cannot stop this process");
        }
        self.phase.put_off(before.elapsed());
        running.iter().for_each(|&rank| self.send(rank, Signal::CONT));
        self.await_suspended(&running, false);
        outside.resumed();
    }

    /// Waits until all of `ranks` are stopped, or until all go on, so that neither is news. Not for long: a process that hangs in
    /// the kernel does neither.
    fn await_suspended(&mut self, ranks: &[usize], suspended: bool) {
        let deadline = Instant::now() + SUSPENDING;
        let mut waiting = ranks.to_vec();
        while !waiting.is_empty() {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Stopped { rank, .. }) => self.ranks[rank].suspended = true,
                Ok(Event::Continued { rank }) => self.ranks[rank].suspended = false,
                Ok(event) => {
                    if let Event::Exited { rank, .. } = event {
                        waiting.retain(|&other| other != rank);
                    }
                    self.deferred.push_back(event);
                }
                Err(_) => return,
            }
            waiting.retain(|&rank| self.ranks[rank].suspended != suspended);
        }
    }

    fn on_deadline(&mut self) {
        if matches!(self.phase, Phase::Settling { .. }) {
            self.tell_to_end(Signal::TERM);
            self.start_stopping();
        } else {
            self.kill();
        }
    }

    fn start_stopping(&mut self) {
        self.stopped = self.running();
        self.phase = Phase::Stopping { until: Instant::now() + self.grace };
    }

    fn kill(&mut self) {
        self.killed = self.running();
        self.send_all(Signal::KILL);
        self.phase = Phase::Killing { until: Instant::now() + KILL_PATIENCE };
    }

    /// A stopped process hears of it too.
    fn tell_to_end(&self, signal: Signal) {
        self.send_all(signal);
        for rank in self.running().into_iter().filter(|&rank| self.ranks[rank].suspended) {
            self.send(rank, Signal::CONT);
        }
    }

    /// Also to groups whose rank has ended: what it started may still run.
    fn send_all(&self, signal: Signal) {
        for rank in 0..self.ranks.len() {
            self.send(rank, signal);
        }
    }

    fn send(&self, rank: usize, signal: Signal) {
        // The rank is not reaped yet, so its pid cannot belong to anybody else.
        match kill_process_group(self.ranks[rank].pid, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::warn!(rank, ?signal, %error, "cannot signal a rank"),
        }
    }

    /// The ranks are gone; what they left behind may finish its output, is then told to end, and then killed.
    fn end_stragglers(&mut self, relay: Option<Relay>) {
        if relay.is_some() && !self.await_output(Some(Instant::now() + STRAGGLERS)) {
            self.send_all(Signal::TERM);
            self.await_output(Some(Instant::now() + STRAGGLERS));
        }
        self.send_all(Signal::KILL);
        if relay.is_some() {
            drop(relay);
            // No deadline: what is left to pass on is bounded, and only a reader who paused our output can delay it.
            self.await_output(None);
        }
    }

    /// Waits until all output is passed on, the deadline, or a signal (an impatient user does not wait for output).
    fn await_output(&mut self, deadline: Option<Instant>) -> bool {
        while self.relayed.is_none() {
            match self.next_event(deadline) {
                Some(Event::Relayed(relayed)) => self.relayed = Some(relayed),
                Some(Event::Signal(signal)) if ![libc::SIGWINCH, libc::SIGTSTP].contains(&signal) => {
                    let lost = Some("the rest of the output was dropped at a signal".into());
                    self.relayed = Some(Relayed { tails: Vec::new(), lost });
                }
                Some(Event::Signal(_) | Event::Stopped { .. } | Event::Continued { .. }) => {}
                // The ranks are gone; what the others say is heard again when the outcome is told.
                Some(Event::Ordered { .. } | Event::Cut(_)) => {}
                // Of a rank that was given up as unkillable.
                Some(Event::Exited { rank, exit: end, at }) => self.ranks[rank].ended = Some((end, at)),
                None => return false,
            }
        }
        true
    }

    fn reap(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_some()) {
            // Returns at once: the process has ended. If its status is gone, so is the process.
            let _ = rank.child.wait();
        }
    }

    fn outcome(mut self, elapsed: Duration, outside: &GenerationContext<'_>) -> NodeOutcome {
        let mut relayed = mem::take(&mut self.relayed).unwrap_or_default();
        let ends = (0..self.ranks.len()).map(|local| {
            let rank = &self.ranks[local];
            let at = rank.ended.map_or(elapsed, |(_, at)| at.saturating_duration_since(self.started));
            let failed = self.failed.contains(&local);
            // What others wrote is in their logs; it need not travel.
            let remembered = relayed.tails.get_mut(local).filter(|_| failed).map(mem::take).unwrap_or_default();
            RankOutcome {
                rank: self.first_rank + local,
                pid: rank.child.id(),
                exit: rank.ended.map(|(exit, _)| exit),
                after: at,
                failed,
                stopped: self.stopped.contains(&local),
                killed: self.killed.contains(&local),
                last_lines: remembered.lines,
                panics: remembered.panics,
                log: rank.log.clone(),
            }
        });
        NodeOutcome {
            node: outside.node(),
            host: outside.host().to_owned(),
            ranks: ends.collect(),
            interrupted_by: self.interrupted_by,
            signalled: self.signalled,
            output_lost: relayed.lost,
            trouble: self.trouble.take(),
            blames: outside.blames(),
            elapsed,
        }
    }
}

/// A change of a rank that is not its end.
enum Change {
    Stopped(i32),
    Continued,
}

impl Change {
    fn of(self, rank: usize) -> Event {
        match self {
            Self::Stopped(signal) => Event::Stopped { rank, signal },
            Self::Continued => Event::Continued { rank },
        }
    }
}

/// Waits for the end of a child but leaves it unreaped; meanwhile tells when it is stopped and continued.
fn wait_for_end(pid: Pid, changed: impl Fn(Change)) -> RankExit {
    let changes = WaitIdOptions::STOPPED | WaitIdOptions::CONTINUED;
    loop {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | changes;
        let status = match rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), options)) {
            Ok(Some(status)) => status,
            Ok(None) | Err(_) => return RankExit::Unknown,
        };
        if let Some(code) = status.exit_status() {
            return RankExit::Code(code);
        }
        if let Some(signal) = status.terminating_signal() {
            return RankExit::Signal(signal);
        }
        // Seen, but still there: taken away, or it would be seen again. Its end is not taken by that.
        match rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), changes | WaitIdOptions::NOHANG)) {
            Ok(Some(status)) if status.continued() => changed(Change::Continued),
            Ok(Some(status)) => changed(Change::Stopped(status.stopping_signal().unwrap_or(libc::SIGSTOP))),
            // It ended, or changed, meanwhile.
            Ok(None) => {}
            Err(_) => return RankExit::Unknown,
        }
    }
}
