//! The processes of a contender, from the driver's side: started, sent commands, and ended.

use std::any::Any;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::driver_protocol::{Lines, RankTimes, RoundPlan};

/// Longest time until all ranks have sent `hello`: torch takes seconds to load, and more if processes outnumber cores.
const START: Duration = Duration::from_secs(120);
/// Longest time until a rank answers a command, such as a round.
const ROUND: Duration = Duration::from_secs(120);
/// Longest time for processes to end by themselves.
const FAREWELL: Duration = Duration::from_secs(3);
/// Time for a process to end after SIGTERM.
const GRACE: Duration = Duration::from_millis(300);

/// The ranks of a contender, which wait for the driver's commands.
pub(crate) struct Team {
    name: String,
    members: Vec<Lines>,
    children: Vec<Child>,
    scratch: Scratch,
    /// Values that must live as long as the ranks: a store, shared memory.
    _keep: Vec<Box<dyn Any>>,
}

/// Times of a round over all ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Round {
    /// Per sample, nanoseconds per step on the slowest rank.
    pub(crate) ns: Vec<f64>,
    /// CPU time per rank of the timed steps.
    pub(crate) cpu_ns: Vec<f64>,
}

/// A temporary directory, removed on drop.
pub(crate) struct Scratch {
    directory: tempfile::TempDir,
}

impl Scratch {
    pub(crate) fn new() -> Result<Scratch> {
        let directory = tempfile::tempdir().context("cannot make a temporary directory")?;
        Ok(Scratch { directory })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Socket of the driver.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path().join("control")
    }
}

impl Team {
    /// Runs `commands`, which start `world` ranks in total, and waits until each has sent `hello` on
    /// [`Scratch::socket`].
    ///
    /// # Errors
    /// If a command cannot be run or ends early, or ranks do not connect in time. The error has the last lines that the
    /// processes wrote.
    pub(crate) fn start(
        name: &str,
        world: usize,
        scratch: Scratch,
        commands: Vec<Command>,
        keep: Vec<Box<dyn Any>>,
    ) -> Result<Team> {
        let listener = UnixListener::bind(scratch.socket())?;
        listener.set_nonblocking(true)?;
        let mut team = Team { name: name.to_owned(), members: Vec::new(), children: Vec::new(), scratch, _keep: keep };
        for mut command in commands {
            let log = File::options().create(true).append(true).open(team.log())?;
            command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
            let child = command.spawn().with_context(|| format!("cannot run {:?}", command.get_program()))?;
            team.children.push(child);
        }
        let came = team.await_all(&listener, world);
        came.map_err(|error| team.explained(error))?;
        Ok(team)
    }

    fn await_all(&mut self, listener: &UnixListener, world: usize) -> Result<()> {
        let deadline = Instant::now() + START;
        let mut arrived: Vec<Option<Lines>> = (0..world).map(|_| None).collect();
        while arrived.iter().any(Option::is_none) {
            if let Ok((stream, _)) = listener.accept() {
                stream.set_nonblocking(false)?;
                let mut lines = Lines::new(stream);
                lines.set_patience(START)?;
                let hello = lines.hear()?.context("a rank closed its connection before `hello`")?;
                let rank: usize =
                    hello.strip_prefix("hello ").context("a rank did not send `hello`")?.trim().parse()?;
                *arrived.get_mut(rank).with_context(|| format!("rank {rank} in a world of {world}"))? = Some(lines);
                continue;
            }
            for child in &mut self.children {
                if let Some(status) = child.try_wait()? {
                    bail!("a process ended early ({status})");
                }
            }
            if Instant::now() > deadline {
                bail!("only {} of {world} ranks connected in time", arrived.iter().flatten().count());
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.members = arrived.into_iter().flatten().collect();
        for member in &self.members {
            member.set_patience(ROUND)?;
        }
        Ok(())
    }

    /// Makes `count` buffers of `bytes` on each rank, and drops earlier ones.
    pub(crate) fn prepare(&mut self, bytes: usize, count: usize) -> Result<()> {
        self.tell(&format!("prepare {bytes} {count}")).map(drop)
    }

    /// Runs a round on all ranks.
    pub(crate) fn round(&mut self, plan: &RoundPlan) -> Result<Round> {
        let answers = self.tell(&plan.line())?;
        let ranks: Vec<RankTimes> = answers.iter().map(|answer| RankTimes::parse(answer)).collect::<Result<_>>()?;
        let slowest = |sample: usize| ranks.iter().filter_map(|rank| rank.ns.get(sample).copied()).fold(0.0, f64::max);
        Ok(Round {
            ns: (0..plan.samples).map(slowest).collect(),
            cpu_ns: ranks.iter().map(|rank| rank.cpu_ns).collect(),
        })
    }

    /// Sends `line` to all ranks. Returns their answers, by rank.
    pub(crate) fn tell(&mut self, line: &str) -> Result<Vec<String>> {
        self.order(0..self.world(), line).map_err(|error| self.explained(error))?;
        self.answers()
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    /// Sends `line` to some ranks; [`answers`](Self::answers) waits for all answers.
    pub(crate) fn order(&mut self, ranks: Range<usize>, line: &str) -> Result<()> {
        self.members[ranks].iter_mut().try_for_each(|member| member.say(line))
    }

    /// The next answer of each rank.
    pub(crate) fn answers(&mut self) -> Result<Vec<String>> {
        let answers = self.hear_all();
        answers.map_err(|error| self.explained(error))
    }

    fn hear_all(&mut self) -> Result<Vec<String>> {
        let mut answers = Vec::with_capacity(self.members.len());
        for (rank, member) in self.members.iter_mut().enumerate() {
            let answer = member.hear()?.with_context(|| format!("rank {rank} has closed its connection"))?;
            if let Some(message) = answer.strip_prefix("error ") {
                bail!("rank {rank}: {message}");
            }
            answers.push(answer);
        }
        Ok(answers)
    }

    fn log(&self) -> PathBuf {
        self.scratch.path().join("log")
    }

    fn explained(&self, error: anyhow::Error) -> anyhow::Error {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = lines[lines.len().saturating_sub(8)..].join("\n  ");
        if last.is_empty() {
            error.context(self.name.clone())
        } else {
            error.context(format!("{}, which wrote:\n  {last}\n", self.name))
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.say("quit");
        }
        let deadline = Instant::now() + FAREWELL;
        while Instant::now() < deadline
            && self.children.iter_mut().any(|child| child.try_wait().is_ok_and(|status| status.is_none()))
        {
            thread::sleep(Duration::from_millis(10));
        }
        for child in &mut self.children {
            // SIGTERM first: after it a launcher such as mpirun ends its ranks, which it cannot after SIGKILL.
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            if child.try_wait().is_ok_and(|status| status.is_none())
                && let Some(pid) = pid
            {
                let _ = kill_process(pid, Signal::TERM);
                thread::sleep(GRACE);
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
