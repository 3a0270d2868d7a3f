//! From the first rank's start to the last one's end: who failed first, who is told to stop, who must be killed.
//!
//! ```text
//! Running ──a rank fails──▶ Settling ──the others had their time──▶ Stopping ──grace over──▶ Killing ──▶ over
//!    └────────a signal to this process───────────────────────────────▶┘   (SIGINT here kills at once)
//! ```

use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};
use std::{io, mem};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::relay::{Relay, Relayed};
use crate::report::{End, Failure, Outcome, signal_name};

/// After a failure the others usually notice within a second, and say what they saw; no longer than this is it waited for.
const SETTLE: Duration = Duration::from_secs(3);
/// A killed process may take seconds to give back a device or much memory.
const KILL_PATIENCE: Duration = Duration::from_secs(30);
/// How long processes that outlive their rank may still print, first undisturbed, then after SIGTERM.
const STRAGGLERS: Duration = Duration::from_secs(1);

/// What the supervisor waits for.
#[derive(Debug)]
pub(crate) enum Event {
    /// From a rank's waiter thread.
    Ended { rank: usize, end: End, at: Instant },
    /// From the signal thread: this process was sent a signal.
    Signal(i32),
    /// From the relay: all output is passed on.
    Relayed(Relayed),
}

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

struct Rank {
    child: Child,
    pid: Pid,
    ended: Option<(End, Instant)>,
}

/// The ranks of a running job. Not reaped before the end, so that their pids, which name their groups, stay theirs.
pub(crate) struct Job {
    ranks: Vec<Rank>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    grace: Duration,
    /// Rank 0 has the terminal and hears when its size changes.
    first_rank_has_terminal: bool,
    started: Instant,
    phase: Phase,
    /// Ranks that failed before any rank was told to stop, in the order in which that was seen.
    failed: Vec<usize>,
    /// How many ranks ran when the first one failed, itself not counted.
    running_at_failure: usize,
    interrupted_by: Option<i32>,
    stopped: Vec<usize>,
    killed: Vec<usize>,
    relayed: Option<Relayed>,
}

impl Job {
    pub(crate) fn new(
        sender: Sender<Event>,
        events: Receiver<Event>,
        grace: Duration,
        first_rank_has_terminal: bool,
    ) -> Self {
        Self {
            ranks: Vec::new(),
            sender,
            events,
            grace,
            first_rank_has_terminal,
            started: Instant::now(),
            phase: Phase::Running,
            failed: Vec::new(),
            running_at_failure: 0,
            interrupted_by: None,
            stopped: Vec::new(),
            killed: Vec::new(),
            relayed: None,
        }
    }

    /// Takes over the next rank and starts waiting for its end.
    pub(crate) fn add(&mut self, mut child: Child) -> io::Result<()> {
        let rank = self.ranks.len();
        let pid = Pid::from_child(&child);
        let events = self.sender.clone();
        let waiter = thread::Builder::new().name(format!("burn-ddp-rank-{rank}")).spawn(move || {
            let end = wait_for_end(pid);
            // Without a receiver the job was given up, and nobody wants to know.
            let _ = events.send(Event::Ended { rank, end, at: Instant::now() });
        });
        if let Err(error) = waiter {
            // Without its waiter the rank could not be supervised.
            child.kill()?;
            child.wait()?;
            return Err(error);
        }
        tracing::debug!(rank, pid = child.id(), "rank started");
        self.ranks.push(Rank { child, pid, ended: None });
        Ok(())
    }

    /// Waits for the end of the job, stopping it where needed. Every wait but that for healthy ranks has a deadline.
    pub(crate) fn supervise(mut self, relay: Option<Relay>, culprit: impl FnOnce() -> Option<usize>) -> Outcome {
        while self.is_running() {
            match self.next_event(self.phase.deadline()) {
                Some(Event::Ended { rank, end, at }) => self.on_end(rank, end, at),
                Some(Event::Signal(signal)) => self.on_signal(signal),
                Some(Event::Relayed(relayed)) => self.relayed = Some(relayed),
                None if matches!(self.phase, Phase::Killing { .. }) => break,
                None => self.on_deadline(),
            }
        }
        let elapsed = self.started.elapsed();
        self.end_stragglers(relay);
        self.reap();
        self.outcome(elapsed, culprit())
    }

    /// Gives the job up before it ran: kills what was started.
    pub(crate) fn abort(mut self) {
        self.kill();
        while self.is_running() {
            match self.next_event(self.phase.deadline()) {
                Some(Event::Ended { rank, end, at }) => self.ranks[rank].ended = Some((end, at)),
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
    fn next_event(&self, deadline: Option<Instant>) -> Option<Event> {
        let result = match deadline {
            None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())),
        };
        match result {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("this job holds a sender itself"),
        }
    }

    fn on_end(&mut self, rank: usize, end: End, at: Instant) {
        tracing::debug!(rank, %end, "rank ended");
        self.ranks[rank].ended = Some((end, at));
        let told_to_stop = matches!(self.phase, Phase::Stopping { .. } | Phase::Killing { .. });
        if end == End::Exit(0) || told_to_stop {
            return;
        }
        if self.failed.is_empty() {
            self.running_at_failure = self.running().len();
            self.phase = Phase::Settling { until: Instant::now() + self.grace.min(SETTLE) };
        }
        self.failed.push(rank);
    }

    fn on_signal(&mut self, signal: i32) {
        if signal == libc::SIGWINCH {
            if self.first_rank_has_terminal {
                self.send(0, Signal::WINCH);
            }
            return;
        }
        tracing::info!(signal = signal_name(signal), "passing a signal on to all ranks");
        let impatient = signal == libc::SIGINT && matches!(self.phase, Phase::Stopping { .. });
        if impatient {
            return self.kill();
        }
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.send_all(signal);
        }
        if matches!(self.phase, Phase::Running | Phase::Settling { .. }) {
            if self.failed.is_empty() {
                self.interrupted_by = Some(signal);
            }
            self.start_stopping();
        }
    }

    fn on_deadline(&mut self) {
        if matches!(self.phase, Phase::Settling { .. }) {
            self.send_all(Signal::TERM);
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
                Some(Event::Signal(signal)) if signal != libc::SIGWINCH => {
                    let lost = Some("the rest of the output was dropped at a signal".into());
                    self.relayed = Some(Relayed { tails: Vec::new(), lost });
                }
                Some(Event::Signal(_)) => {}
                // Of a rank that was given up as unkillable.
                Some(Event::Ended { rank, end, at }) => self.ranks[rank].ended = Some((end, at)),
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

    fn outcome(mut self, elapsed: Duration, culprit: Option<usize>) -> Outcome {
        let mut relayed = mem::take(&mut self.relayed).unwrap_or_default();
        let cause = self.root_cause(culprit);
        let others = self.failed.iter().filter(|&&rank| cause.is_some_and(|(first, ..)| first != rank));
        let also_failed = others.filter_map(|&rank| Some((rank, self.ranks[rank].ended?.0))).collect();
        let failure = cause.map(|(rank, end, at)| Failure {
            rank,
            pid: self.ranks[rank].child.id(),
            end,
            after: at.saturating_duration_since(self.started),
            last_lines: relayed.tails.get_mut(rank).map(mem::take).unwrap_or_default(),
            running: self.running_at_failure,
        });
        let left_over = self.running().into_iter().map(|rank| (rank, self.ranks[rank].child.id())).collect();
        let exit_code = match (&failure, self.interrupted_by) {
            (Some(failure), _) => failure.end.exit_code(),
            (None, Some(signal)) => 128 + signal,
            (None, None) => 0,
        };
        Outcome {
            exit_code,
            failure,
            also_failed,
            interrupted_by: self.interrupted_by,
            stopped: self.stopped,
            killed: self.killed,
            left_over,
            output_lost: relayed.lost,
            nproc: self.ranks.len(),
            elapsed,
        }
    }

    /// The first rank that failed, unless another one died suddenly right after: giving back a large memory or a device takes
    /// a killed process so long that its peers may notice, and exit with an error about it, before its own end is seen.
    fn root_cause(&self, culprit: Option<usize>) -> Option<(usize, End, Instant)> {
        let ends = || self.failed.iter().filter_map(|&rank| self.ranks[rank].ended.map(|(end, at)| (rank, end, at)));
        let sudden = ends().find(|(_, end, _)| end.is_sudden());
        // Survivors may be reaped before the rank that brought them down: they say whom they heard of first.
        let blamed = || ends().find(|(rank, ..)| Some(*rank) == culprit);
        sudden.or_else(blamed).or_else(|| ends().next())
    }
}

/// Waits for the end of a child but leaves it unreaped.
fn wait_for_end(pid: Pid) -> End {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    match rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), options)) {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => End::Exit(code),
            (None, Some(signal)) => End::Signal(signal),
            (None, None) => End::Unknown,
        },
        Ok(None) | Err(_) => End::Unknown,
    }
}
