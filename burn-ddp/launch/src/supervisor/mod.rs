//! Supervisor of the ranks of one machine during one generation. It decides which rank failed first, when the others
//! are sent a signal to end, and when they are killed.
//!
//! A pure state machine. It makes no system calls, starts no threads and reads no clock: the caller passes the time
//! with each event, and carries out the [`Action`]s that come back
//! ([`Processes`](crate::rank_processes::Processes) does).
//!
//! ```text
//! Running ──a rank fails, here or elsewhere──▶ Settling ──settle time over──▶ Stopping ──grace time over──▶ Killing
//!    └────────a signal to this process, or to another launcher of the job──────▶┘ ─────second Ctrl-C──────────▶┘
//! each of them ──all ranks have exited──▶ Draining ──▶ Terminating ──▶ Flushing ──▶ Over
//! processes that the ranks left behind:   may print    get SIGTERM     are killed
//! ```
//!
//! A signal that asks the ranks to save and end is one to this process, with a longer grace time.
//!
//! Ctrl-Z suspends the state machine in any of the first four phases ([`Suspension`]).

mod phase;
mod preempted_ranks;
mod suspension;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::mem;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::event::{Event, Relayed, Stop, Trouble};
use crate::node_outcome::{NodeOutcome, RankOutcome};
use crate::preemption::{Preemption, SAME_WISH};
use crate::rank_exit::{RankExit, signal_name};
use phase::Phase;
use suspension::Suspension;

/// Longest time after a failure that the other ranks have to end by themselves. They usually notice the failure within
/// a second, and then report what they observed of it.
const SETTLE: Duration = Duration::from_secs(3);
/// Longest wait for a killed process, which may take seconds to give back a device or much memory.
const KILL_PATIENCE: Duration = Duration::from_secs(30);
/// Time that processes which outlive their rank have to finish their output; and again the same time after SIGTERM.
const LEFTOVERS: Duration = Duration::from_secs(1);

/// Interval in which the ranks' reports are read.
const TURN: Duration = Duration::from_millis(200);
/// The same interval while a deadline runs. A wake-up that is later than this shows that this process did not run in
/// the meantime, so deadlines are put off.
const SHORT_TURN: Duration = Duration::from_millis(20);

/// Action for the caller to carry out. Ranks are local ranks, except in [`AnnounceExit`](Self::AnnounceExit).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send a signal to the process group of a rank.
    Signal { rank: usize, signal: i32 },
    /// Send a signal to every process that ranks started, whatever its group, session or parent; after SIGKILL, wait a
    /// few seconds until they are gone.
    SignalLeftovers(i32),
    /// Show a line to the user.
    Notice(String),
    /// Tell the ranks that have yet to join, and if it `failed` the other launchers, that rank `rank` of the job has
    /// exited.
    AnnounceExit { rank: usize, pid: u32, exit: RankExit, failed: bool },
    /// Tell the other launchers that a signal ended the job.
    AnnounceInterrupt(i32),
    /// Tell the other launchers that a further signal came after the one that asked the ranks to stop.
    AnnounceHurry(i32),
    /// Tell the other launchers that this one pauses, then call [`Supervisor::pause_announced`].
    AnnouncePause,
    /// Stop this process; when it is continued, call [`Supervisor::launcher_continued`].
    StopLauncher,
    /// Tell the other launchers that this one goes on.
    AnnounceResume,
    /// Pass on the output that the pipes still hold, and close them.
    CloseOutput,
}

/// Settings of a generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Number of the generation.
    pub(crate) generation: u32,
    /// Time between the signal to end and SIGKILL.
    pub(crate) grace: Duration,
    /// The signal that asks the ranks to stop, and what follows.
    pub(crate) preemption: Preemption,
    /// Rank of this machine's local rank 0 among all ranks of the job.
    pub(crate) first_rank: usize,
    /// True if local rank 0 keeps the terminal, so that SIGWINCH (its size has changed) is passed on to that rank.
    pub(crate) first_rank_has_terminal: bool,
    /// True if this launcher shows after Ctrl-C how long it waits for the ranks. Of several launchers that one burnrun
    /// has started, only the first does.
    pub(crate) shows_grace: bool,
}

struct Rank {
    pid: u32,
    log: Option<PathBuf>,
    exited: Option<(RankExit, Instant)>,
    /// True while the process is stopped by a signal such as SIGSTOP, from this launcher or from elsewhere.
    suspended: bool,
    /// True once it has caught the signal that asks to stop.
    can_stop: bool,
    /// True once it knows that all ranks stop.
    stopping: bool,
}

/// State machine of one generation on this machine. See the [module](self).
pub(crate) struct Supervisor {
    settings: Settings,
    started: Instant,
    phase: Phase,
    /// Set from Ctrl-Z until the ranks go on.
    suspension: Option<Suspension>,
    /// Events that came during a suspension.
    deferred: VecDeque<Event>,
    /// Actions decided in the current step.
    actions: Vec<Action>,
    /// Time for which the caller was asked to wake up.
    wake: Option<Instant>,
    ranks: Vec<Rank>,
    /// Ranks that failed before the ranks were sent a signal to end, in the order in which their exits were seen.
    failed: Vec<usize>,
    stopped: Vec<usize>,
    killed: Vec<usize>,
    interrupted_by: Option<i32>,
    /// True if this process was sent a signal to end, even if the job was already being stopped for another reason.
    signalled: bool,
    /// Time at which the ranks were asked to stop, if they were.
    asked: Option<Instant>,
    /// True if a further signal ends them at once.
    hurried: bool,
    /// True if a further signal came when they had ended.
    insisted: bool,
    /// Time of the second SIGTERM after a failure: ranks that can stop take the first one for a wish.
    again: Option<Instant>,
    /// The last checkpoint that a rank of this machine has reported.
    checkpoint: Option<String>,
    trouble: Option<Trouble>,
    /// True if a relay passes on the ranks' output.
    relays_output: bool,
    relayed: Option<Relayed>,
    /// Time from the start to the last exit.
    elapsed: Duration,
}

impl Supervisor {
    pub(crate) fn new(settings: Settings, started: Instant) -> Self {
        Self {
            settings,
            started,
            phase: Phase::Running,
            suspension: None,
            deferred: VecDeque::new(),
            actions: Vec::new(),
            wake: None,
            ranks: Vec::new(),
            failed: Vec::new(),
            stopped: Vec::new(),
            killed: Vec::new(),
            interrupted_by: None,
            signalled: false,
            asked: None,
            hurried: false,
            insisted: false,
            again: None,
            checkpoint: None,
            trouble: None,
            relays_output: false,
            relayed: None,
            elapsed: Duration::ZERO,
        }
    }

    /// Adds the next local rank, which was just started. `log` is the file of its stderr.
    pub(crate) fn add_rank(&mut self, pid: u32, log: Option<PathBuf>) {
        self.ranks.push(Rank { pid, log, exited: None, suspended: false, can_stop: false, stopping: false });
    }

    /// Notes that a relay passes on the ranks' output, so that [`Event::Relayed`] will come.
    pub(crate) fn relay_started(&mut self) {
        self.relays_output = true;
    }

    /// True when nothing is left to wait for.
    pub(crate) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// True if the rank's exit was seen.
    pub(crate) fn has_exited(&self, rank: usize) -> bool {
        self.ranks[rank].exited.is_some()
    }

    /// Time at which [`step`](Self::step) must be called if no event comes before; `None` if only an event can change
    /// the state.
    pub(crate) fn wake_at(&mut self, now: Instant) -> Option<Instant> {
        let wake = match (&self.suspension, self.phase) {
            (Some(suspension), _) => suspension.deadline(),
            (None, Phase::Running) => Some(now + TURN),
            (None, phase) if phase.has_ranks() => phase.deadline().map(|until| until.min(now + SHORT_TURN)),
            (None, phase) => phase.deadline(),
        };
        self.wake = wake;
        wake
    }

    /// Processes an event, or, with `None`, the passing of the time that [`wake_at`](Self::wake_at) has returned.
    pub(crate) fn step(&mut self, now: Instant, event: Option<Event>) -> Vec<Action> {
        let late = self.wake.take().map_or(Duration::ZERO, |wake| now.saturating_duration_since(wake));
        if late > SHORT_TURN && self.suspension.is_none() {
            self.put_off(late);
        }
        match event {
            Some(event) if self.suspension.is_some() => self.on_event_while_suspended(now, event),
            Some(event) => self.on_event(now, event),
            None if self.suspension.is_some() => self.advance_suspension(now),
            None if self.phase.deadline().is_some_and(|until| now >= until) => self.on_deadline(now),
            None if self.again.take_if(|again| now >= *again).is_some() => self.signal_all(libc::SIGTERM),
            None => {}
        }
        mem::take(&mut self.actions)
    }

    /// Gives up the job because a rank could not be started: kills the ranks that were started.
    pub(crate) fn abort(&mut self, now: Instant) -> Vec<Action> {
        self.kill(now);
        self.check_exits(now);
        mem::take(&mut self.actions)
    }

    /// This machine's part of the generation's outcome; the caller fills in the node, its host, and the ranks' blames.
    pub(crate) fn into_outcome(mut self) -> NodeOutcome {
        let mut relayed = self.relayed.take().unwrap_or_default();
        let outcomes = self.ranks.iter().enumerate().map(|(local, rank)| {
            let failed = self.failed.contains(&local);
            // The last lines of ranks that did not fail are not needed in the report; their logs have them.
            let stderr = relayed.tails.get_mut(local).filter(|_| failed).map(mem::take).unwrap_or_default();
            RankOutcome {
                rank: self.settings.first_rank + local,
                pid: rank.pid,
                exit: rank.exited.map(|(exit, _)| exit),
                after: rank.exited.map_or(self.elapsed, |(_, at)| at.saturating_duration_since(self.started)),
                failed,
                stopped: self.stopped.contains(&local),
                killed: self.killed.contains(&local),
                last_lines: stderr.lines,
                panics: stderr.panics,
                log: rank.log.clone(),
            }
        });
        NodeOutcome {
            ranks: outcomes.collect(),
            interrupted_by: self.interrupted_by,
            signalled: self.signalled,
            asked: self.asked.is_some(),
            hurried: self.hurried,
            insisted: self.insisted,
            can_stop: self.can_stop(),
            stopping: self.ranks.iter().any(|rank| rank.stopping),
            checkpoint: self.checkpoint,
            output_lost: relayed.lost,
            trouble: self.trouble,
            elapsed: self.elapsed,
            ..NodeOutcome::default()
        }
    }

    fn on_event(&mut self, now: Instant, event: Event) {
        if !self.phase.has_ranks() {
            return self.on_event_after_exits(now, event);
        }
        match event {
            Event::Exited { rank, exit, at } => self.on_exit(now, rank, exit, at),
            Event::Signal(signal) => self.on_signal(now, signal),
            Event::PassOn(signal) => self.signal_all(signal),
            Event::Relayed(relayed) => self.relayed = Some(relayed),
            Event::Stopped { rank, signal } => self.on_rank_stopped(rank, signal),
            Event::Continued { rank } => self.on_rank_continued(rank),
            Event::Ordered { generation, stop } if generation == self.settings.generation => self.on_order(now, &stop),
            Event::Ordered { .. } => {}
            Event::Cut(trouble) => {
                self.trouble.get_or_insert(trouble);
                self.settle(now);
            }
        }
        self.check_exits(now);
    }

    fn on_exit(&mut self, now: Instant, rank: usize, exit: RankExit, at: Instant) {
        self.ranks[rank].exited = Some((exit, at));
        let failed = !self.ended_well(rank, exit);
        if self.was_asked_by(exit) {
            return self.on_signal(now, self.settings.preemption.signal.number());
        }
        if !self.phase.lets_run() {
            if failed && self.was_to_save(rank, exit) {
                self.failed.push(rank);
            }
            return;
        }
        let (number, pid) = (self.settings.first_rank + rank, self.ranks[rank].pid);
        self.act(Action::AnnounceExit { rank: number, pid, exit, failed });
        if failed {
            self.settle(now);
            self.failed.push(rank);
        }
    }

    fn on_signal(&mut self, now: Instant, signal: i32) {
        match signal {
            libc::SIGWINCH if self.settings.first_rank_has_terminal => return self.signal(0, libc::SIGWINCH),
            libc::SIGWINCH => return,
            libc::SIGTSTP => return self.suspend(),
            _ => self.signalled = true,
        }
        // Another launcher may have passed it on before.
        if self.preemption_is_under_way(now, signal) {
            return;
        }
        match self.phase {
            Phase::Stopping { .. } if self.asked.is_some() => {
                self.act(Action::AnnounceHurry(signal));
                self.hurry(now, signal);
            }
            Phase::Stopping { .. } if signal == libc::SIGINT => self.kill(now),
            phase if phase.lets_run() => {
                if self.failed.is_empty() && self.trouble.is_none() {
                    self.interrupted_by = Some(signal);
                    self.act(Action::AnnounceInterrupt(signal));
                }
                self.end_by(now, signal);
                let grace = self.grace();
                let says = signal == libc::SIGINT || grace > self.settings.grace;
                if says && self.settings.shows_grace && !grace.is_zero() && !self.stopped.is_empty() {
                    let (most, again) = (grace.as_secs_f64(), if signal == libc::SIGINT { " again" } else { "" });
                    let text = format!("waiting up to {most} s for the ranks to end; Ctrl-C{again} kills them");
                    self.act(Action::Notice(text));
                }
            }
            _ => self.signal_all(signal),
        }
    }

    /// Another launcher reports that the generation is over.
    fn on_order(&mut self, now: Instant, stop: &Stop) {
        match stop {
            Stop::Interrupted { signal, .. } if self.phase.lets_run() => self.end_by(now, *signal),
            Stop::Hurried { signal } => self.hurry(now, *signal),
            Stop::Interrupted { .. } | Stop::Failed { .. } | Stop::Trouble(_) => self.settle(now),
        }
    }

    fn on_rank_stopped(&mut self, rank: usize, signal: i32) {
        self.ranks[rank].suspended = true;
        let (number, pid, signal) = (self.settings.first_rank + rank, self.ranks[rank].pid, signal_name(signal));
        self.act(Action::Notice(format!(
            "rank {number} (pid {pid}) is stopped ({signal}), the others wait for it; `kill -CONT {pid}` lets it go on"
        )));
    }

    fn on_rank_continued(&mut self, rank: usize) {
        self.ranks[rank].suspended = false;
        let (number, pid) = (self.settings.first_rank + rank, self.ranks[rank].pid);
        self.act(Action::Notice(format!("rank {number} (pid {pid}) goes on")));
    }

    fn on_deadline(&mut self, now: Instant) {
        match self.phase {
            Phase::Settling { .. } => {
                self.stop(now, libc::SIGTERM);
                self.again = self.takes_for_wish(libc::SIGTERM).then(|| now + SAME_WISH);
            }
            Phase::Stopping { .. } => self.kill(now),
            // Ranks that survive SIGKILL hang in the kernel: they are given up.
            Phase::Killing { .. } => self.drain(now),
            Phase::Draining { .. } => {
                self.act(Action::SignalLeftovers(libc::SIGTERM));
                self.phase = Phase::Terminating { until: now + LEFTOVERS };
            }
            Phase::Terminating { .. } => self.flush(),
            Phase::Running | Phase::Flushing | Phase::Over => {}
        }
    }

    /// Gives the other ranks time to end by themselves, and to report what they observed.
    fn settle(&mut self, now: Instant) {
        if self.phase == Phase::Running {
            self.phase = Phase::Settling { until: now + self.settings.grace.min(SETTLE) };
        }
    }

    /// Sends all ranks the signal to end. A suspended rank is continued, so that it handles the signal.
    fn stop(&mut self, now: Instant, signal: i32) {
        self.signal_all(signal);
        self.stopped = self.running();
        let suspended: Vec<_> = self.stopped.iter().copied().filter(|&rank| self.ranks[rank].suspended).collect();
        suspended.into_iter().for_each(|rank| self.signal(rank, libc::SIGCONT));
        self.phase = Phase::Stopping { until: now + self.grace() };
    }

    fn kill(&mut self, now: Instant) {
        self.killed = self.running();
        self.signal_all(libc::SIGKILL);
        self.phase = Phase::Killing { until: now + KILL_PATIENCE };
    }

    fn check_exits(&mut self, now: Instant) {
        if self.phase.has_ranks() && self.suspension.is_none() && self.running().is_empty() {
            self.drain(now);
        }
    }

    /// Ends the phases with ranks. Processes that the ranks left behind may finish their output.
    fn drain(&mut self, now: Instant) {
        self.elapsed = now.saturating_duration_since(self.started);
        if self.relays_output && self.relayed.is_none() {
            self.phase = Phase::Draining { until: now + LEFTOVERS };
        } else {
            self.flush();
        }
    }

    fn on_event_after_exits(&mut self, now: Instant, event: Event) {
        match event {
            Event::Relayed(relayed) => self.on_output_complete(relayed),
            // A user who sends a signal now does not want to wait for the output.
            Event::Signal(signal) if ![libc::SIGWINCH, libc::SIGTSTP].contains(&signal) => {
                if self.preemption_is_under_way(now, signal) {
                    return;
                }
                self.signalled = true;
                self.insisted = self.asked.is_some();
                let lost = Some("the rest of the output was dropped at a signal".into());
                self.on_output_complete(Relayed { tails: Vec::new(), lost });
            }
            // The late exit of a rank that was given up because it survived SIGKILL.
            Event::Exited { rank, exit, at } => self.ranks[rank].exited = Some((exit, at)),
            // The end on other machines is read again from the store when the outcome is agreed upon.
            Event::Signal(_) | Event::PassOn(_) | Event::Stopped { .. } | Event::Continued { .. } => {}
            Event::Ordered { .. } | Event::Cut(_) => {}
        }
    }

    fn on_output_complete(&mut self, relayed: Relayed) {
        self.relayed.get_or_insert(relayed);
        match self.phase {
            Phase::Draining { .. } | Phase::Terminating { .. } => self.flush(),
            _ => self.phase = Phase::Over,
        }
    }

    /// Kills the processes that the ranks left behind. Passing on the rest of the output has no deadline: its size is
    /// bounded, and only a paused reader of this process's output can delay it.
    fn flush(&mut self) {
        self.act(Action::SignalLeftovers(libc::SIGKILL));
        if self.relays_output {
            self.act(Action::CloseOutput);
        }
        self.phase = if self.relays_output && self.relayed.is_none() { Phase::Flushing } else { Phase::Over };
    }

    fn running(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].exited.is_none()).collect()
    }

    /// Sends a signal to the groups of all ranks, also of those that have exited: processes that they started may still
    /// run.
    fn signal_all(&mut self, signal: i32) {
        (0..self.ranks.len()).for_each(|rank| self.signal(rank, signal));
    }

    fn signal(&mut self, rank: usize, signal: i32) {
        self.act(Action::Signal { rank, signal });
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }
}
