//! Programs that compute beside the ranks, each in a session of its own, as those of other users are.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};

/// Neighbours of the ranks.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct NeighbourOptions {
    /// Takes each measurement a second time beside this number of programs that compute without a pause, each in a
    /// session of its own. `taskset -c 0,1 burn-ddp-bench …` leaves ranks and neighbours two cores.
    #[arg(long, default_value_t = 0, value_name = "PROGRAMS", conflicts_with_all = ["oversubscribe", "scaling"])]
    neighbours: usize,
    /// Niceness of these programs and of their sessions.
    #[arg(long, default_value_t = 0, requires = "neighbours", allow_negative_numbers = true)]
    neighbour_nice: i8,
    /// Runs these programs only where a core is idle (`SCHED_IDLE`): they give way at once. Programs of niceness 19 get
    /// little time, but the kernel does not take their core for a free one, and wakes ranks beside each other.
    #[arg(long, requires = "neighbours", conflicts_with = "neighbour_nice")]
    neighbour_idle: bool,
}

/// The programs, stopped until they are [woken](Self::wake). Dropping it ends them.
pub(crate) struct Neighbours {
    children: Vec<Child>,
}

/// Lets the neighbours compute until it is dropped.
pub(crate) struct Awake<'a>(&'a Neighbours);

impl NeighbourOptions {
    /// The neighbours, if they were asked for.
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
            // They end with this process, even where it is killed.
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

    /// Lets them compute.
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
