//! How a job ended, and how that is told.

use std::fmt;
use std::time::Duration;

/// How a started job ended. Its `Display` is the report that `burnrun` prints: nothing after a success.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// 0 if every rank succeeded; else that of [`failure`](Self::failure), or 128 + the signal that stopped the job.
    pub exit_code: i32,
    /// The rank that failed first, by itself and not because the job was being stopped.
    ///
    /// As seen from outside: a rank that reacts to a peer's failure may end a moment before that peer does. Then the peer is in
    /// [`also_failed`](Self::also_failed).
    pub failure: Option<Failure>,
    /// The other ranks that failed by themselves, usually since they noticed, in the order in which they ended.
    pub also_failed: Vec<(usize, End)>,
    /// The signal to this process that stopped the job.
    pub interrupted_by: Option<i32>,
    /// The ranks that still ran when the job was stopped, and so were told to end.
    pub stopped: Vec<usize>,
    /// The ranks among them that had to be killed, since they did not end within the grace time.
    pub killed: Vec<usize>,
    /// The ranks, with their pids, that did not even die when killed (a process stuck in the kernel).
    pub left_over: Vec<(usize, u32)>,
    /// Why some of the ranks' output is missing, if it is.
    pub output_lost: Option<String>,
    /// The number of ranks.
    pub nproc: usize,
    /// The time from the start of the first rank to the end of the last.
    pub elapsed: Duration,
}

/// The rank that brought the job down.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// Its rank.
    pub rank: usize,
    /// Its process id.
    pub pid: u32,
    /// How it ended.
    pub end: End,
    /// When it ended, counted from the start of the job.
    pub after: Duration,
    /// The last lines that it wrote to stderr, at most ten, where its output was relayed.
    pub last_lines: Vec<String>,
    /// How many other ranks were still running at that moment.
    pub running: usize,
}

/// How one rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// It exited with this code.
    Exit(i32),
    /// This signal killed it.
    Signal(i32),
    /// It ended, but the system would not say how (someone else in this process collected its status).
    Unknown,
}

impl End {
    /// The code by which a shell would report this end: 128 + the number for a signal.
    #[must_use]
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Exit(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::Unknown => 1,
        }
    }

    /// A death that no program chooses, so it is a cause and hardly the reaction to another rank's failure.
    pub(crate) fn is_sudden(self) -> bool {
        matches!(self, Self::Signal(libc::SIGKILL | libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE))
    }

    fn hint(self) -> Option<String> {
        let hint = match self {
            Self::Exit(101) => "101 is how a Rust program ends that panicked",
            Self::Exit(code @ 129..=159) => {
                return Some(format!(
                    "a shell ends with {code} when its program was killed by {}",
                    signal_name(code - 128)
                ));
            }
            Self::Signal(libc::SIGKILL) => {
                "the launcher did not send it; the kernel often does when memory runs out (see `dmesg`)"
            }
            Self::Signal(libc::SIGBUS) => "SIGBUS often means that shared memory is full (see `df -h /dev/shm`)",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "was killed by {}", signal_name(*signal)),
            Self::Unknown => f.write_str("ended in a way that could not be observed"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = Vec::new();
        if let Some(failure) = &self.failure {
            lines.push(format!("{failure}{}", self.fate_of_the_others(failure)));
            lines.extend(failure.end.hint());
            lines.extend(self.followers());
        } else if let Some(signal) = self.interrupted_by {
            let (signal, after) = (signal_name(signal), seconds(self.elapsed));
            lines.push(match self.stopped.len() {
                1 if self.nproc == 1 => format!("stopped by {signal} after {after}"),
                stopped => format!("stopped by {signal} after {after}, with {stopped} of {} ranks running", self.nproc),
            });
        }
        if !self.killed.is_empty() {
            lines.push(format!("{} did not end when told to and had to be killed", ranks(&self.killed)));
        }
        for (rank, pid) in &self.left_over {
            lines.push(format!("rank {rank} (pid {pid}) does not die even of SIGKILL: it is stuck in the kernel"));
        }
        lines.extend(self.output_lost.clone());
        if let Some(Failure { rank, last_lines, .. }) = &self.failure
            && !last_lines.is_empty()
        {
            lines.push(format!("the last lines that rank {rank} wrote to stderr:"));
            lines.extend(last_lines.iter().map(|line| format!("  {line}")));
        }
        f.write_str(&lines.join("\n"))
    }
}

impl Outcome {
    /// Names the first few.
    fn followers(&self) -> Option<String> {
        const SHOWN: usize = 8;
        let (shown, more) = self.also_failed.split_at(self.also_failed.len().min(SHOWN));
        let mut parts: Vec<_> = shown.iter().map(|(rank, end)| format!("rank {rank} {end}")).collect();
        if !more.is_empty() {
            parts.push(format!("{} more failed", more.len()));
        }
        (!parts.is_empty()).then(|| format!("after it {}", parts.join(", ")))
    }

    fn fate_of_the_others(&self, failure: &Failure) -> String {
        let running = failure.running;
        let by_themselves = running - self.stopped.len().min(running);
        match (running, by_themselves) {
            (0, _) if self.nproc == 1 => String::new(),
            (0, _) => "; no other rank was running".into(),
            (1, 0) => "; stopped the other rank".into(),
            (1, _) => "; the other rank ended after it".into(),
            (_, 0) => format!("; stopped the other {running} ranks"),
            _ if by_themselves == running => format!("; the other {running} ranks ended after it"),
            _ => format!("; of the other {running} ranks {by_themselves} ended after it, stopped the rest"),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {}) {} after {}", self.rank, self.pid, self.end, seconds(self.after))
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn ranks(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}") }
}

/// `SIGKILL` for 9.
pub(crate) fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        _ => return format!("signal {signal}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(running: usize, stopped: Vec<usize>) -> Outcome {
        let failure = Failure {
            rank: 1,
            pid: 123,
            end: End::Signal(libc::SIGKILL),
            after: Duration::from_millis(4210),
            last_lines: vec!["epoch 3".into(), "step 7".into()],
            running,
        };
        Outcome { exit_code: 137, failure: Some(failure), stopped, nproc: 4, ..Outcome::default() }
    }

    #[test]
    fn success_says_nothing() {
        assert_eq!(Outcome { nproc: 4, ..Outcome::default() }.to_string(), "");
    }

    #[test]
    fn a_failure_is_told_in_full() {
        assert_eq!(
            failed(3, vec![0, 2, 3]).to_string(),
            "rank 1 (pid 123) was killed by SIGKILL after 4.2 s; stopped the other 3 ranks\n\
             the launcher did not send it; the kernel often does when memory runs out (see `dmesg`)\n\
             the last lines that rank 1 wrote to stderr:\n  epoch 3\n  step 7"
        );
    }

    #[test]
    fn the_fate_of_the_others_is_exact() {
        for (running, stopped, expected) in [
            (3, vec![], "; the other 3 ranks ended after it\n"),
            (3, vec![2], "; of the other 3 ranks 2 ended after it, stopped the rest\n"),
            (1, vec![0], "; stopped the other rank\n"),
            (1, vec![], "; the other rank ended after it\n"),
            (0, vec![], "; no other rank was running\n"),
        ] {
            let report = failed(running, stopped).to_string();
            assert!(report.contains(expected), "{report}");
        }
    }

    #[test]
    fn others_that_failed_are_named_but_not_all_of_many() {
        let mut outcome =
            Outcome { also_failed: vec![(2, End::Exit(3)), (0, End::Signal(libc::SIGABRT))], ..failed(2, vec![]) };
        assert!(outcome.to_string().contains("\nafter it rank 2 exited with code 3, rank 0 was killed by SIGABRT\n"));
        outcome.also_failed = (0..20).map(|rank| (rank, End::Exit(1))).collect();
        assert!(outcome.to_string().contains("rank 7 exited with code 1, 12 more failed\n"), "{outcome}");
    }

    #[test]
    fn an_interrupt_names_the_signal_and_who_had_to_be_killed() {
        let outcome = Outcome {
            interrupted_by: Some(libc::SIGTERM),
            stopped: vec![0, 1],
            killed: vec![1],
            nproc: 2,
            elapsed: Duration::from_secs(60),
            ..Outcome::default()
        };
        assert_eq!(
            outcome.to_string(),
            "stopped by SIGTERM after 60.0 s, with 2 of 2 ranks running\n\
             rank 1 did not end when told to and had to be killed"
        );
    }
}
