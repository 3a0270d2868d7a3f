//! Text of an [`Outcome`]: the cause first, then details that help to understand it.

use std::fmt;
use std::time::Duration;

use crate::rank_exit::{RankExit, signal_name};
use crate::report::outcome::{Failure, Outcome};

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = Vec::new();
        if let Some(failure) = &self.failure {
            lines.push(format!("{failure}{}", self.fate_of_the_others(failure)));
            lines.extend(failure.panics.iter().map(|panic| format!("it panicked at {panic}")));
            lines.extend(failure.exit.hint().filter(|_| failure.panics.is_empty()));
            lines.extend(failure.own_words());
            lines.extend(failure.cause.iter().map(|cause| format!("cause that the ranks report: {cause}")));
            lines.extend(self.followers());
        }
        if let Some(trouble) = &self.trouble {
            let after = if lines.is_empty() { "" } else { "also: " };
            lines.push(format!("{after}{trouble}"));
        } else if self.preempted {
            lines.push(self.preemption());
        } else if let (Some(signal), None) = (self.interrupted_by, &self.failure) {
            let (signal, after) = (signal_name(signal), seconds(self.elapsed));
            lines.push(match self.stopped.len() {
                1 if self.nproc == 1 => format!("stopped by {signal} after {after}"),
                stopped => format!("stopped by {signal} after {after}, with {stopped} of {} ranks running", self.nproc),
            });
        }
        lines.extend(self.waiting.iter().cloned());
        if !self.killed.is_empty() {
            lines.push(format!("{} did not end after the signal and had to be killed", ranks(&self.killed)));
        }
        for (rank, pid) in &self.left_over {
            lines.push(format!(
                "rank {rank} (pid {pid}) did not exit even after SIGKILL: it is stuck in the kernel, or its control \
                 group is frozen"
            ));
        }
        lines.extend(self.output_lost.clone());
        if self.exit_code != 0 && self.restarts > 0 {
            let times = if self.restarts == 1 { "once".into() } else { format!("{} times", self.restarts) };
            lines.push(format!("the job had been restarted {times} before"));
        }
        let log = self.failure.as_ref().and_then(|failure| Some((failure.rank, failure.log.as_ref()?)));
        lines.extend(log.map(|(rank, log)| format!("stderr of rank {rank}: {}", log.display())));
        let report = self.report.as_ref().filter(|_| self.exit_code != 0);
        lines.extend(report.map(|report| format!("report: {}", report.display())));
        f.write_str(&lines.join("\n"))
    }
}

impl Outcome {
    /// Line with the other ranks that failed; it names the first few.
    fn followers(&self) -> Option<String> {
        const SHOWN: usize = 8;
        let (shown, more) = self.also_failed.split_at(self.also_failed.len().min(SHOWN));
        let mut parts: Vec<_> = shown.iter().map(|(rank, end)| format!("rank {rank} {end}")).collect();
        if !more.is_empty() {
            parts.push(format!("{} more failed", more.len()));
        }
        (!parts.is_empty()).then(|| format!("after it {}", parts.join(", ")))
    }

    /// Line that says that the job was preempted, and from which checkpoint it can go on.
    fn preemption(&self) -> String {
        let by = self.interrupted_by.map(|signal| format!(" by {}", signal_name(signal))).unwrap_or_default();
        let checkpoint = match &self.checkpoint {
            Some(checkpoint) => format!("the last checkpoint is {checkpoint}"),
            None => "the ranks have reported no checkpoint".into(),
        };
        format!("preempted{by} after {}; {checkpoint}", seconds(self.elapsed))
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
            _ => format!("; of the other {running} ranks {by_themselves} ended by themselves, the rest were stopped"),
        }
    }
}

impl Failure {
    /// The last lines that the rank wrote to stderr, with a heading; without those that are shown as its panics.
    fn own_words(&self) -> Vec<String> {
        let mut panic: Option<&String> = None;
        let is_own = |line: &&String| {
            let start = line.split_once(" panicked at ").map(|(_, place)| place);
            let text = start.unwrap_or(line.trim());
            if start.is_some() {
                panic = self.panics.iter().find(|panic| panic.starts_with(text));
            } else if !panic.is_some_and(|panic| panic.contains(text) || text.starts_with("note: ")) {
                panic = None;
            }
            panic.is_none()
        };
        let mut lines: Vec<_> = self.last_lines.iter().filter(is_own).map(|line| format!("  {line}")).collect();
        if !lines.is_empty() {
            lines.insert(0, format!("the last lines that rank {} wrote to stderr:", self.rank));
        }
        lines
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, host, pid, exit, after, .. } = self;
        let too_early = if *exit == RankExit::Code(0) { ", while others still needed it" } else { "" };
        write!(f, "rank {rank} (host {host}, pid {pid}) {exit} after {}{too_early}", seconds(*after))
    }
}

pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

pub(crate) fn ranks(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(running: usize, stopped: Vec<usize>) -> Outcome {
        let failure = Failure {
            rank: 1,
            host: "node7".into(),
            pid: 123,
            exit: RankExit::Signal(libc::SIGKILL),
            after: Duration::from_millis(4210),
            panics: Vec::new(),
            cause: None,
            last_lines: vec!["epoch 3".into(), "step 7".into()],
            log: None,
            running,
        };
        Outcome { exit_code: 137, failure: Some(failure), stopped, nproc: 4, ..Outcome::default() }
    }

    #[test]
    fn success_says_nothing() {
        assert_eq!(Outcome { nproc: 4, restarts: 3, ..Outcome::default() }.to_string(), "");
    }

    #[test]
    fn a_failure_is_reported_in_full() {
        assert_eq!(
            failed(3, vec![0, 2, 3]).to_string(),
            "rank 1 (host node7, pid 123) was killed by SIGKILL after 4.2 s; stopped the other 3 ranks\n\
             the launcher did not send it; the kernel often does when memory runs out (see `dmesg`)\n\
             the last lines that rank 1 wrote to stderr:\n  epoch 3\n  step 7"
        );
    }

    #[test]
    fn a_panic_is_shown_instead_of_guessed_from_the_exit_code() {
        let mut outcome = failed(0, vec![]);
        outcome.failure = outcome.failure.map(|failure| Failure { exit: RankExit::Code(101), ..failure });
        assert!(outcome.to_string().contains("that panicked"));
        outcome.failure.as_mut().unwrap().panics = vec!["src/a.rs:1:2: no".into()];
        let report = outcome.to_string();
        assert!(
            report.contains("\nit panicked at src/a.rs:1:2: no\n") && !report.contains("that panicked"),
            "{report}"
        );
    }

    #[test]
    fn the_rank_s_own_words_come_before_what_the_others_saw_and_nothing_comes_twice() {
        let mut outcome = Outcome { also_failed: vec![(0, RankExit::Code(1))], ..failed(1, vec![]) };
        let failure = outcome.failure.as_mut().unwrap();
        failure.exit = RankExit::Code(1);
        failure.last_lines = vec!["epoch 3".into(), "Error: no file /data/x".into()];
        failure.cause = Some("rank 1 (host node7, pid 123) left while it was needed".into());
        assert_eq!(
            outcome.to_string(),
            "rank 1 (host node7, pid 123) exited with code 1 after 4.2 s; the other rank ended after it\n\
             the last lines that rank 1 wrote to stderr:\n  epoch 3\n  Error: no file /data/x\n\
             cause that the ranks report: rank 1 (host node7, pid 123) left while it was needed\n\
             after it rank 0 exited with code 1"
        );
        let failure = outcome.failure.as_mut().unwrap();
        (failure.panics, failure.cause) = (vec!["src/a.rs:1:2: no luck today".into()], None);
        failure.last_lines = [
            "luck",
            "thread 'main' (7) panicked at src/a.rs:1:2:",
            "no luck",
            "today",
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace",
        ]
        .map(String::from)
        .to_vec();
        let report = outcome.to_string();
        assert!(
            report.ends_with(
                "it panicked at src/a.rs:1:2: no luck today\n\
                 the last lines that rank 1 wrote to stderr:\n  luck\n\
                 after it rank 0 exited with code 1"
            ),
            "{report}"
        );
    }

    #[test]
    fn the_fate_of_the_others_is_exact() {
        for (running, stopped, expected) in [
            (3, vec![], "; the other 3 ranks ended after it\n"),
            (3, vec![2], "; of the other 3 ranks 2 ended by themselves, the rest were stopped\n"),
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
        let mut outcome = Outcome {
            also_failed: vec![(2, RankExit::Code(3)), (0, RankExit::Signal(libc::SIGABRT))],
            ..failed(2, vec![])
        };
        assert!(outcome.to_string().ends_with("\nafter it rank 2 exited with code 3, rank 0 was killed by SIGABRT"));
        outcome.also_failed = (0..20).map(|rank| (rank, RankExit::Code(1))).collect();
        assert!(outcome.to_string().ends_with("rank 7 exited with code 1, 12 more failed"), "{outcome}");
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
             rank 1 did not end after the signal and had to be killed"
        );
    }
}
