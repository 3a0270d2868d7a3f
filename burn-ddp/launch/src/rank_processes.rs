//! The processes of one machine's ranks: waits for them, signals them, stops this process with them, and reaps them, as
//! the [`Supervisor`] decides.

use std::io;
use std::path::PathBuf;
use std::process::Child;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::Instant;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::event::Event;
use crate::generation_context::GenerationContext;
use crate::leftover_processes::Leftovers;
use crate::node_outcome::NodeOutcome;
use crate::output::relay::Relay;
use crate::rank_exit::{RankExit, signal_name};
use crate::report::user_notices::NoticeSink;
use crate::signals;
use crate::supervisor::{Action, Settings, Supervisor};

/// The ranks that run on this machine. They are reaped only at the end of the generation: until then the kernel gives
/// their pids, which are also the ids of their process groups, to no other process.
pub(crate) struct Processes<'a> {
    supervisor: Supervisor,
    /// By local rank.
    children: Vec<Child>,
    /// The processes that the ranks started.
    leftovers: Leftovers<'a>,
    sender: Sender<Event>,
    events: &'a Receiver<Event>,
}

impl<'a> Processes<'a> {
    pub(crate) fn new(
        settings: Settings,
        leftovers: Leftovers<'a>,
        sender: Sender<Event>,
        events: &'a Receiver<Event>,
    ) -> Self {
        let supervisor = Supervisor::new(settings, Instant::now());
        Self { supervisor, children: Vec::new(), leftovers, sender, events }
    }

    /// Takes over the next rank and starts waiting for its exit. `log` is the file of its stderr.
    pub(crate) fn add(&mut self, mut child: Child, log: Option<PathBuf>) -> io::Result<()> {
        let rank = self.children.len();
        let pid = Pid::from_child(&child);
        let events = self.sender.clone();
        let waiter = thread::Builder::new().name(format!("burn-ddp-rank-{rank}")).spawn(move || {
            // Sending fails if the main thread has given up the job; then the exit does not matter.
            let exit = wait_for_exit(pid, |change| drop(events.send(change.of(rank))));
            let _ = events.send(Event::Exited { rank, exit, at: Instant::now() });
        });
        if let Err(error) = waiter {
            // Without its waiter the rank could not be supervised.
            child.kill()?;
            child.wait()?;
            return Err(error);
        }
        tracing::debug!(rank, pid = child.id(), "rank started");
        self.supervisor.add_rank(child.id(), log);
        self.leftovers.add_rank(child.id());
        self.children.push(child);
        Ok(())
    }

    /// Waits for the exit of all ranks of this machine, and stops them if the supervisor decides so. Every wait has a
    /// deadline, except the wait for healthy ranks.
    pub(crate) fn supervise(mut self, relay: Option<Relay>, context: &mut GenerationContext<'_>) -> NodeOutcome {
        let mut relay = relay;
        if relay.is_some() {
            self.supervisor.relay_started();
        }
        if let Some(stop) = context.stop_order() {
            let order = Event::Ordered { generation: context.generation, stop };
            let actions = self.supervisor.step(Instant::now(), Some(order));
            self.execute(actions, &mut relay, context);
        }
        while !self.supervisor.is_over() {
            self.leftovers.collect_now_and_then();
            let wake = self.supervisor.wake_at(Instant::now());
            let event = self.next_event(wake);
            // After the event: what a rank has reported before its exit says how to take the exit.
            context.read_reports().iter().for_each(|reported| self.supervisor.note(reported));
            let actions = self.supervisor.step(Instant::now(), event);
            self.execute(actions, &mut relay, context);
        }
        self.reap();
        context.read_reports().iter().for_each(|reported| self.supervisor.note(reported));
        let (node, host) = (context.nodes.node, context.nodes.host.clone());
        NodeOutcome { node, host, blames: context.blames(), ..self.supervisor.into_outcome() }
    }

    /// Gives up the job because a rank could not be started: kills the other ranks and the processes that they started.
    pub(crate) fn abort(mut self, sink: NoticeSink) {
        let mut actions = self.supervisor.abort(Instant::now());
        loop {
            for action in actions {
                match action {
                    Action::Signal { rank, signal } => self.signal(rank, signal),
                    Action::SignalLeftovers(signal) => self.signal_leftovers(signal, sink),
                    _ => {}
                }
            }
            if self.supervisor.is_over() {
                break;
            }
            let wake = self.supervisor.wake_at(Instant::now());
            let event = self.next_event(wake).filter(|event| matches!(event, Event::Exited { .. }));
            actions = self.supervisor.step(Instant::now(), event);
        }
        self.reap();
    }

    /// The next event, or `None` when it is time to wake up.
    fn next_event(&self, wake: Option<Instant>) -> Option<Event> {
        // The channel is never disconnected, since `self` holds a sender.
        let event = match wake {
            None => self.events.recv().ok(),
            Some(wake) => self.events.recv_timeout(wake.saturating_duration_since(Instant::now())).ok(),
        };
        match &event {
            Some(Event::Exited { rank, exit, .. }) => tracing::debug!(rank, %exit, "rank exited"),
            Some(Event::Signal(signal) | Event::PassOn(signal)) => {
                tracing::info!(signal = signal_name(*signal), "signal");
            }
            Some(Event::Ordered { stop, .. }) => tracing::info!(?stop, "another launcher ends the job"),
            _ => {}
        }
        event
    }

    fn execute(&mut self, actions: Vec<Action>, relay: &mut Option<Relay>, context: &GenerationContext<'_>) {
        for action in actions {
            match action {
                Action::Signal { rank, signal } => self.signal(rank, signal),
                Action::SignalLeftovers(signal) => self.signal_leftovers(signal, context.sink),
                Action::Notice(text) => context.sink.show(&text),
                Action::AnnounceExit { rank, pid, exit, failed } => context.announce_exit(rank, pid, exit, failed),
                Action::AnnounceInterrupt(signal) => context.announce_interrupt(signal),
                Action::AnnounceHurry(signal) => context.announce_hurry(signal),
                Action::AnnouncePause => {
                    context.announce_pause(true);
                    let next = self.supervisor.pause_announced(Instant::now());
                    self.execute(next, relay, context);
                }
                Action::StopLauncher => {
                    if let Err(error) = signals::stop_here() {
                        tracing::warn!(%error, "cannot stop this process");
                    }
                    let next = self.supervisor.launcher_continued(Instant::now());
                    self.execute(next, relay, context);
                }
                Action::AnnounceResume => context.announce_pause(false),
                Action::CloseOutput => drop(relay.take()),
            }
        }
    }

    fn signal(&self, rank: usize, signal: i32) {
        let Some(signal) = Signal::from_named_raw(signal) else { return };
        // The rank is not reaped yet, so its pid cannot belong to another process.
        match kill_process_group(Pid::from_child(&self.children[rank]), signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::warn!(rank, ?signal, %error, "cannot signal a rank"),
        }
    }

    fn signal_leftovers(&mut self, number: i32, sink: NoticeSink) {
        let Some(signal) = Signal::from_named_raw(number) else { return };
        // Signals the groups too: without `/proc`, no leftovers are found.
        (0..self.children.len()).for_each(|rank| self.signal(rank, number));
        for (process, error) in self.leftovers.signal(signal) {
            let why = error.map_or("SIGKILL did not end it".to_owned(), |error| error.to_string());
            let pid = process.raw_pid();
            sink.show(&format!("process {pid}, which a rank started, survives the job: {why}"));
        }
    }

    fn reap(&mut self) {
        let supervisor = &self.supervisor;
        for (_, child) in self.children.iter_mut().enumerate().filter(|(rank, _)| supervisor.has_exited(*rank)) {
            // Returns at once, since the process has exited. An error means that it is already reaped.
            let _ = child.wait();
        }
    }
}

/// A change of a rank that is not its exit.
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

/// Waits for the exit of a child but leaves it unreaped; meanwhile reports when it is stopped and continued.
fn wait_for_exit(pid: Pid, changed: impl Fn(Change)) -> RankExit {
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
        // `NOWAIT` leaves the change in place, so it is taken here; otherwise the next turn would see it again. Without
        // `EXITED`, this call does not reap the rank.
        match rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), changes | WaitIdOptions::NOHANG)) {
            Ok(Some(status)) if status.continued() => changed(Change::Continued),
            Ok(Some(status)) => changed(Change::Stopped(status.stopping_signal().unwrap_or(libc::SIGSTOP))),
            // The rank has exited or changed again in the meantime.
            Ok(None) => {}
            Err(_) => return RankExit::Unknown,
        }
    }
}
