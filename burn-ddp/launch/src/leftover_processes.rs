//! Leftovers: processes that the ranks started. This module finds, signals and reaps them.
//!
//! A signal to a rank's process group misses processes that have left the group: jobs of an interactive shell,
//! `setsid`, daemons. A process is a leftover of the job if
//!
//! - it is in the generation's control group, if there is one;
//! - or its session is a rank's (each rank leads one, and is not reaped before the end);
//! - or it was started with the generation's mark in its environment;
//! - or this process adopts orphans, and it is a child of this process that is neither a rank nor the guardian: the
//!   kernel makes this process the parent of orphans of the ranks;
//! - or its parent is a leftover or a rank.
//!
//! Without `/proc` no leftovers are found, and only the ranks' groups are ended.

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::cgroup::ControlGroup;
use crate::process_table::{Process, processes};

/// Longest wait for killed leftovers to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// Time between leftover scans.
const LOOK: Duration = Duration::from_millis(5);
/// Time between two scans for orphans to reap.
const COLLECT: Duration = Duration::from_secs(2);

/// Name of the variable that marks the processes of one launcher's generation.
pub(crate) const MARK: &str = "BURNRUN_MARK";

/// Asks the kernel to make this process the parent of all its descendants whose parents have exited. If the kernel
/// cannot, leftovers are found by their control group, session and mark alone.
pub(crate) fn become_parent_of_orphans() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        tracing::warn!(%error, "orphans of ranks do not become children of this process");
    }
}

/// The leftovers of one generation on this machine.
pub(crate) struct Leftovers<'a> {
    group: Option<&'a ControlGroup>,
    /// Pids of the ranks, which are also the ids of their sessions.
    ranks: HashSet<i32>,
    guardian: Option<i32>,
    /// The generation's mark in the environment, as `NAME=value`.
    mark: String,
    /// True if every child of this process but ranks and guardian is an orphan of the job.
    adopts: bool,
    /// Leftovers that were seen running, by pid and start time.
    seen: HashSet<(i32, u64)>,
    collected: Instant,
}

impl<'a> Leftovers<'a> {
    pub(crate) fn new(mark: &str, group: Option<&'a ControlGroup>, guardian: Option<u32>, adopts: bool) -> Self {
        Self {
            group,
            ranks: HashSet::new(),
            guardian: guardian.map(|pid| pid as i32),
            mark: format!("{MARK}={mark}"),
            adopts,
            seen: HashSet::new(),
            collected: Instant::now(),
        }
    }

    pub(crate) fn add_rank(&mut self, pid: u32) {
        self.ranks.insert(pid as i32);
    }

    /// Sends `signal` to all leftovers that run. After SIGKILL, waits up to five seconds until none runs, and returns
    /// the leftovers that still run, each with the error of the last signal.
    pub(crate) fn signal(&mut self, signal: Signal) -> Vec<(Process, Option<Errno>)> {
        let start = Instant::now();
        if signal == Signal::KILL {
            self.group.inspect(|group| group.kill());
        }
        loop {
            let table = processes();
            let running = self.running(&table);
            let sent: Vec<_> = running.iter().map(|process| (*process, send(process, signal).err())).collect();
            self.collect(&table);
            if signal != Signal::KILL || sent.is_empty() {
                return Vec::new();
            }
            // Waiting is useless for processes of other users, which this one may not kill.
            if start.elapsed() > KILL_PATIENCE || sent.iter().all(|(_, error)| *error == Some(Errno::PERM)) {
                return sent;
            }
            thread::sleep(LOOK);
        }
    }

    /// Reaps orphans that have ended, at most every two seconds. Otherwise they would fill the process table during a
    /// long job.
    pub(crate) fn collect_now_and_then(&mut self) {
        let is_first = rustix::process::getpid().is_init();
        if (self.adopts || is_first) && self.collected.elapsed() > COLLECT {
            let table = processes();
            self.running(&table);
            self.collect(&table);
            self.collected = Instant::now();
        }
    }

    /// The leftovers in `table` that run. Adds them to `seen`.
    fn running(&mut self, table: &[Process]) -> Vec<Process> {
        let me = rustix::process::getpid().as_raw_nonzero().get();
        let spared = |process: &Process| {
            let pid = process.raw_pid();
            pid == me || self.guardian == Some(pid) || self.ranks.contains(&pid)
        };
        let in_group = self.group.map(ControlGroup::pids).unwrap_or_default();
        let adopted = |process: &Process| self.adopts && process.parent == me;
        let is_root = |process: &Process| {
            in_group.contains(&process.raw_pid())
                || self.ranks.contains(&process.session)
                || adopted(process)
                || process.was_started_with(&self.mark)
        };
        let found = family(table, spared, is_root, &self.ranks);
        let running: Vec<_> = found.into_iter().filter(Process::is_running).collect();
        self.seen.extend(running.iter().map(|process| (process.raw_pid(), process.started)));
        running
    }

    /// Reaps leftovers that are children of this process and have ended.
    fn collect(&mut self, table: &[Process]) {
        let me = rustix::process::getpid().as_raw_nonzero().get();
        for process in table.iter().filter(|process| process.parent == me && !process.is_running()) {
            let pid = process.raw_pid();
            let is_leftover =
                self.adopts || self.ranks.contains(&process.session) || self.seen.contains(&(pid, process.started));
            if is_leftover && !self.ranks.contains(&pid) && self.guardian != Some(pid) {
                // Fails if other code of this process has reaped the child.
                let _ = waitid(WaitId::Pid(process.pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
            }
        }
    }
}

/// The processes of `table` for which `is_root` holds, and all descendants of them and of `parents`, without processes
/// for which `spared` holds.
fn family(
    table: &[Process],
    spared: impl Fn(&Process) -> bool,
    is_root: impl Fn(&Process) -> bool,
    parents: &HashSet<i32>,
) -> Vec<Process> {
    let (mut found, mut rest): (Vec<_>, Vec<_>) =
        table.iter().copied().filter(|process| !spared(process)).partition(is_root);
    let mut family: HashSet<i32> = found.iter().map(Process::raw_pid).chain(parents.iter().copied()).collect();
    loop {
        let (children, others): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|process| family.contains(&process.parent));
        if children.is_empty() {
            return found;
        }
        family.extend(children.iter().map(Process::raw_pid));
        found.extend(children);
        rest = others;
    }
}

/// Sends a signal to `process`; sends none if the pid meanwhile belongs to another process.
fn send(process: &Process, signal: Signal) -> Result<(), Errno> {
    let same = || Process::read(process.raw_pid()).is_some_and(|now| now.started == process.started);
    let gone_is_fine = |error| if error == Errno::SRCH { Ok(()) } else { Err(error) };
    #[cfg(target_os = "linux")]
    match rustix::process::pidfd_open(process.pid, rustix::process::PidfdFlags::empty()) {
        Ok(fd) if same() => return rustix::process::pidfd_send_signal(fd, signal).or_else(gone_is_fine),
        Ok(_) | Err(Errno::SRCH) => return Ok(()),
        // Some kernels and containers have no pidfd: plain `kill` below.
        Err(_) => {}
    }
    if same() { kill_process(process.pid, signal).or_else(gone_is_fine) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Pid;

    fn process(pid: i32, parent: i32, session: i32) -> Process {
        Process { pid: Pid::from_raw(pid).unwrap(), state: 'S', parent, session, started: pid as u64 }
    }

    #[test]
    fn a_family_holds_descendants_in_any_order_of_their_pids() {
        let table = [
            process(1, 0, 1),
            process(100, 1, 1),   // the launcher
            process(110, 100, 1), // its guardian
            process(200, 100, 200),
            process(90, 200, 90),   // in a session of its own, of a rank
            process(80, 90, 80),    // its child
            process(300, 1, 200),   // an orphan in a rank's session
            process(301, 300, 301), // its child
            process(400, 1, 400),   // another user's
        ];
        let ranks = HashSet::from([200]);
        let spared = |process: &Process| [100, 110, 200].contains(&process.raw_pid());
        let found = family(&table, spared, |process| ranks.contains(&process.session), &ranks);
        let mut pids: Vec<_> = found.iter().map(Process::raw_pid).collect();
        pids.sort_unstable();
        assert_eq!(pids, [80, 90, 300, 301]);
    }
}
