//! Ends the start of a rank whose process does not come to its program: it is stopped, or the program's file system
//! does not answer.
//!
//! Until [`Command::spawn`](std::process::Command::spawn) returns, the main thread handles no events. A thread of this
//! module hears the signals meanwhile and kills such a process; the call returns then, and the rank counts as killed.

use std::collections::HashSet;
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
use crate::process_table::{Process, processes};
use crate::report::user_notices::NoticeSink;
use crate::signals::{self, Listening};

/// Time between two looks; a process that both of them see is killed.
const LOOK: Duration = Duration::from_millis(200);

/// Watches the starts of a generation's ranks on this machine until it is dropped.
pub(crate) struct StartWatch {
    /// Its end is the thread's.
    signals: Option<Listening>,
    thread: Option<JoinHandle<()>>,
}

impl StartWatch {
    /// To be called by the thread that starts the ranks. `mark` is in their environments. Starts may last for the time
    /// to meet, and for the grace time after a signal to end.
    pub(crate) fn begin(spec: &JobSpec, mark: &str) -> io::Result<Self> {
        let thread = fs::read_link("/proc/thread-self").unwrap_or_default();
        let children = Path::new("/proc").join(thread).join("children");
        let starts = Starts { before: numbers_in(&children), children, mark: format!("{MARK}={mark}") };
        let (limit, grace, sink) = (spec.join_timeout, spec.grace, spec.notices);
        let (sender, events) = channel();
        let signals = signals::listen(sender)?;
        let thread = thread::Builder::new()
            .name("burn-ddp-start-watch".into())
            .spawn(move || starts.watch(&events, limit, grace, sink))?;
        Ok(Self { signals: Some(signals), thread: Some(thread) })
    }
}

impl Drop for StartWatch {
    fn drop(&mut self) {
        drop(self.signals.take());
        // Short: its channel is closed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Starts {
    /// The kernel's list of the children of the thread that starts the ranks.
    children: PathBuf,
    /// Those that are older than the ranks.
    before: HashSet<i32>,
    /// `NAME=value`.
    mark: String,
}

impl Starts {
    fn watch(&self, events: &Receiver<Event>, limit: Duration, grace: Duration, sink: NoticeSink) {
        let (mut until, mut interrupted, mut seen) = (Instant::now() + limit, false, HashSet::new());
        loop {
            match events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Event::Signal(libc::SIGINT | libc::SIGTERM | libc::SIGHUP)) => {
                    let patience = if interrupted { Duration::ZERO } else { grace };
                    until = until.min(Instant::now() + patience);
                    interrupted = true;
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let unstarted = self.unstarted();
                    unstarted.iter().filter(|process| seen.contains(&process.raw_pid())).for_each(|it| end(it, sink));
                    seen = unstarted.iter().map(Process::raw_pid).collect();
                    until = Instant::now() + LOOK;
                }
            }
        }
    }

    /// Children that run the program of this process and lack the mark: copies of it that are to become ranks.
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

/// None where the system has no such list.
fn numbers_in(file: &Path) -> HashSet<i32> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// Kills a process, which this one has not collected, so that its pid is its own.
fn end(process: &Process, sink: NoticeSink) {
    let why = match process.state {
        'T' | 't' => "it is stopped",
        _ => "the program's file may be on a disk or a network that does not answer",
    };
    sink.show(&format!("process {} has not begun the program of its rank: {why}; killing it", process.raw_pid()));
    if let Err(error) = kill_process(process.pid, Signal::KILL) {
        tracing::warn!(%error, "cannot kill a process that is to become a rank");
    }
}
