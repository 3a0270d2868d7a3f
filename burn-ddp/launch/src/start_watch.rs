//! Kills a rank's process that was forked but does not execute its program: because it is stopped, or because the
//! program's file system does not answer.
//!
//! Until [`Command::spawn`](std::process::Command::spawn) returns, the main thread handles no events. In the meantime a
//! thread of this module handles the signals, and kills such a process after a deadline. Then the call returns, and the
//! rank counts as killed.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::event::Event;
use crate::job_spec::JobSpec;
use crate::leftover_processes::MARK;
use crate::nodes::Link;
use crate::process_table::{Process, processes};
use crate::report::user_notices::NoticeSink;
use crate::signals::Listening;

/// Time between two scans. After the deadline, a process that two scans in a row find is killed.
const LOOK: Duration = Duration::from_millis(200);
/// Time after SIGKILL from which on a process that still exists counts as one that cannot be killed.
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Watches the starts of a generation's ranks on this machine until it is dropped.
pub(crate) struct StartWatch {
    /// Dropping it closes the thread's channel, which ends the thread.
    signals: Option<Listening>,
    thread: Option<JoinHandle<()>>,
}

impl StartWatch {
    /// Begins the watch. Must be called by the thread that starts the ranks, whose environments hold `mark`. The
    /// deadline is the join timeout of `spec`; after a signal to end, or once `link` reports the end of the generation,
    /// it is at most the grace time away. Signals that `launcher` has got before count, too: it handles them only when
    /// all ranks are started.
    pub(crate) fn begin(
        spec: &JobSpec,
        mark: &str,
        launcher: &Listening,
        link: Option<&Link>,
        generation: u32,
    ) -> io::Result<Self> {
        let is_over = link.map(|link| link.end_of(generation));
        let thread = fs::read_link("/proc/thread-self").unwrap_or_default();
        let children = Path::new("/proc").join(thread).join("children");
        let starts = Starts { before: numbers_in(&children), children, mark: format!("{MARK}={mark}") };
        let (limit, grace, sink) = (spec.join_timeout, spec.grace, spec.notices);
        let (sender, events) = channel();
        let signals = launcher.repeat_to(sender);
        let thread = thread::Builder::new().name("burn-ddp-start-watch".into()).spawn(move || {
            starts.watch(&events, limit, grace, sink, || is_over.as_ref().is_some_and(|is_over| is_over()))
        })?;
        Ok(Self { signals: Some(signals), thread: Some(thread) })
    }
}

impl Drop for StartWatch {
    fn drop(&mut self) {
        drop(self.signals.take());
        // Takes no long time: the thread ends now that its channel is closed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Starts {
    /// File of the kernel with the children of the thread that starts the ranks.
    children: PathBuf,
    /// Children of that thread that are older than the ranks.
    before: HashSet<i32>,
    /// The generation's mark in the ranks' environments, as `NAME=value`.
    mark: String,
}

impl Starts {
    fn watch(
        &self,
        events: &Receiver<Event>,
        limit: Duration,
        grace: Duration,
        sink: NoticeSink,
        is_over: impl Fn() -> bool,
    ) {
        let is_end = |signal| ![libc::SIGTSTP, libc::SIGWINCH].contains(&signal);
        let (mut until, mut interrupted) = (Instant::now() + limit, false);
        let (mut seen, mut kills) = (HashSet::new(), Kills::default());
        loop {
            match events.recv_timeout(until.saturating_duration_since(Instant::now()).min(LOOK)) {
                // The main thread waits for a process that cannot be killed: only an exit ends this launcher.
                Ok(Event::Signal(signal)) if is_end(signal) && kills.are_in_vain() => {
                    std::process::exit(128 + signal);
                }
                Ok(Event::Signal(signal)) if is_end(signal) => {
                    let patience = if interrupted { Duration::ZERO } else { grace };
                    until = until.min(Instant::now() + patience);
                    interrupted = true;
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) if Instant::now() >= until => {
                    let unstarted = self.unstarted();
                    for process in unstarted.iter().filter(|process| seen.contains(&name(process))) {
                        kills.notice(process, Instant::now()).iter().for_each(|text| sink.show(text));
                        end(process);
                    }
                    seen = unstarted.iter().map(name).collect();
                    kills.forget_all_but(&seen);
                    until = Instant::now() + LOOK;
                }
                Err(RecvTimeoutError::Timeout) => {
                    if !interrupted && is_over() {
                        until = until.min(Instant::now() + grace);
                        interrupted = true;
                    }
                }
            }
        }
    }

    /// Children that still run this process's own program and lack the mark: forked copies that have yet to execute the
    /// program of their rank.
    fn unstarted(&self) -> Vec<Process> {
        let program = |pid: &str| fs::read_link(format!("/proc/{pid}/exe")).ok();
        let Some(own) = program("self") else { return Vec::new() };
        let children = numbers_in(&self.children);
        let mut found = processes();
        found.retain(|process| {
            let pid = process.raw_pid();
            children.contains(&pid)
                && !self.before.contains(&pid)
                && process.is_running()
                && program(&pid.to_string()).as_ref() == Some(&own)
                && !process.was_started_with(&self.mark)
        });
        found
    }
}

/// Numbers in a file; empty if there is no such file.
fn numbers_in(file: &Path) -> HashSet<i32> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// Pid and start time, which identify a process also after its pid was used again.
fn name(process: &Process) -> (i32, u64) {
    (process.raw_pid(), process.started)
}

/// The processes that were sent SIGKILL and still exist.
#[derive(Default)]
struct Kills {
    /// Time of the first kill of each, by [`name`].
    first: HashMap<(i32, u64), Instant>,
    /// The processes that count as ones that cannot be killed.
    in_vain: HashSet<(i32, u64)>,
}

impl Kills {
    /// Notice for a process that is being killed, perhaps not for the first time; `None` if it says nothing new.
    fn notice(&mut self, process: &Process, now: Instant) -> Option<String> {
        let (name, pid, state) = (name(process), process.raw_pid(), process.state);
        let Some(first) = self.first.get(&name) else {
            self.first.insert(name, now);
            let why = match state {
                'T' | 't' => "it is stopped",
                _ => "the program's file may be on a disk or a network that does not answer",
            };
            return Some(format!("process {pid} has not begun the program of its rank: {why}; killing it"));
        };
        let news = now.duration_since(*first) >= KILL_PATIENCE && self.in_vain.insert(name);
        news.then(|| format!("process {pid} cannot be killed (state {state}); Ctrl-C ends burnrun without it"))
    }

    /// True if there is a process that cannot be killed.
    fn are_in_vain(&self) -> bool {
        !self.in_vain.is_empty()
    }

    fn forget_all_but(&mut self, left: &HashSet<(i32, u64)>) {
        self.first.retain(|name, _| left.contains(name));
        self.in_vain.retain(|name| left.contains(name));
    }
}

/// Kills a process. The call that starts it may reap it in the meantime, but the kernel assigns pids in turn, so no
/// other process has its pid so soon.
fn end(process: &Process) {
    if let Err(error) = kill_process(process.pid, Signal::KILL) {
        tracing::warn!(%error, "cannot kill a process that is to become a rank");
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::Pid;

    use super::*;

    #[test]
    fn a_process_that_does_not_die_is_named_twice_and_lets_the_next_signal_end_the_launcher() {
        let process =
            |started| Process { pid: Pid::from_raw(42).unwrap(), state: 'D', parent: 1, session: 42, started };
        let (mut kills, begin) = (Kills::default(), Instant::now());
        let mut notices = Vec::new();
        for look in 0..100 {
            notices.extend(kills.notice(&process(7), begin + look * LOOK));
            assert_eq!(kills.are_in_vain(), look * LOOK >= KILL_PATIENCE);
        }
        let [first, second] = &notices[..] else { panic!("{notices:?}") };
        assert!(first.contains("process 42 has not begun the program of its rank"), "{first}");
        assert!(second.contains("process 42 cannot be killed (state D)"), "{second}");
        kills.forget_all_but(&HashSet::new());
        assert!(!kills.are_in_vain());
        assert!(kills.notice(&process(8), begin).is_some(), "another process of the same pid");
    }
}
