//! Neighbours: programs that compute while the ranks are measured, each in a session of its own, as programs of other
//! users are.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};

/// Options for neighbours of the ranks.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct NeighbourOptions {
    /// Repeats each measurement while this number of programs compute without a pause, each in a session of its own.
    /// `taskset -c 0,1 burn-ddp-bench …` limits ranks and neighbours to two cores.
    #[arg(long, default_value_t = 0, value_name = "PROGRAMS", conflicts_with_all = ["oversubscribe", "scaling"])]
    neighbours: usize,
    /// Niceness of the neighbours and of their sessions.
    #[arg(long, default_value_t = 0, requires = "neighbours", allow_negative_numbers = true)]
    neighbour_nice: i8,
    /// Runs the neighbours only on idle cores (`SCHED_IDLE`), so that they give way to ranks at once. Programs of
    /// niceness 19 also get little time, but the kernel counts their core as busy and wakes two ranks on one core.
    #[arg(long, requires = "neighbours", conflicts_with = "neighbour_nice")]
    neighbour_idle: bool,
}

/// The neighbours. They are stopped until [`wake`](Self::wake), and ended on drop.
pub(crate) struct Neighbours {
    children: Vec<Child>,
}

/// Guard: the neighbours compute until it is dropped.
pub(crate) struct Awake<'a>(&'a Neighbours);

impl NeighbourOptions {
    /// Starts the neighbours; `None` if the options ask for none.
    ///
    /// # Errors
    /// If a program cannot be started.
    pub(crate) fn start(self) -> Result<Option<Neighbours>> {
        let mut neighbours = Neighbours { children: Vec::new() };
        for _ in 0..self.neighbours {
            // A kernel without autogroups has no such file.
            let nice = self.neighbour_nice;
            let text = format!("echo {nice} 2>/dev/null >/proc/$$/autogroup; while :; do :; done");
            let nice = nice.to_string();
            let policy = if self.neighbour_idle { "--idle" } else { "--other" };
            // The programs end with this process, even if it is killed.
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", "setsid", "chrt", policy, "0", "nice", "-n", &nice]);
            command.args(["sh", "-c", &text]);
            let child =
                command.stdin(Stdio::null()).spawn().context("cannot run setpriv, setsid, chrt, nice and sh")?;
            neighbours.children.push(child);
        }
        neighbours.send(Signal::STOP);
        Ok(Some(neighbours).filter(|neighbours| neighbours.count() > 0))
    }
}

impl Neighbours {
    /// Number of programs.
    pub(crate) fn count(&self) -> usize {
        self.children.len()
    }

    /// Lets the neighbours compute until the guard is dropped.
    pub(crate) fn wake(&self) -> Awake<'_> {
        self.send(Signal::CONT);
        Awake(self)
    }

    fn send(&self, signal: Signal) {
        for pid in self.children.iter().filter_map(|child| Pid::from_raw(child.id() as i32)) {
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Awake<'_> {
    fn drop(&mut self) {
        self.0.send(Signal::STOP);
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}
