//! Outcome of a job: the observations of all machines put together, and the rank that brought it down.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::node_outcome::{Blame, NodeOutcome, RankOutcome};
use crate::preemption::{Preempted, Preemption};
use crate::rank_exit::RankExit;

/// Outcome of a started job. Its `Display` is the report that `burnrun` prints; it is empty after a success.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Outcome {
    /// 0 if every rank succeeded; else the exit code of [`failure`](Self::failure), of [`trouble`](Self::trouble), that
    /// of [preempted](Self::preempted) jobs, or 128 + the signal that stopped the job.
    pub exit_code: i32,
    /// The rank that caused the end of the job: the first that failed by itself, not because the job was being stopped.
    ///
    /// A rank that reacts to a peer's failure may exit a moment before that peer does. Therefore a rank that was killed
    /// by a signal such as SIGKILL, or that the ranks report as the cause, takes precedence over the first to exit.
    pub failure: Option<Failure>,
    /// The other ranks that failed by themselves, usually because they noticed the first failure. Ordered by the time
    /// from the start of their machine's ranks to their exit.
    pub also_failed: Vec<(usize, RankExit)>,
    /// Reason for the end of the job other than a rank's exit: a machine that is lost, or could not start the program.
    pub trouble: Option<String>,
    /// The signal that stopped the job; one of its launchers received it.
    pub interrupted_by: Option<i32>,
    /// True if the job was asked to stop, and can be started again: see
    /// [`Launcher::preempt_signal`](crate::Launcher::preempt_signal).
    pub preempted: bool,
    /// Path or address of the last checkpoint that the ranks report, if they report any.
    pub checkpoint: Option<String>,
    /// The ranks that still ran when the job was stopped, and so were sent a signal to end.
    pub stopped: Vec<usize>,
    /// The ranks that were killed because they did not end within the grace time.
    pub killed: Vec<usize>,
    /// The ranks, with their pids, that did not exit even after SIGKILL (a process stuck in the kernel).
    pub left_over: Vec<(usize, u32)>,
    /// Reason why some of the ranks' output is missing; `None` if none is missing.
    pub output_lost: Option<String>,
    /// Waits of the surviving ranks, a line each: waits of at least a second, except the one that the cause names.
    pub waiting: Vec<String>,
    /// The number of ranks.
    pub nproc: usize,
    /// The number of machines.
    pub nnodes: usize,
    /// Number of restarts before this generation.
    pub restarts: u32,
    /// Path of the report in Markdown, if there is a log directory.
    pub report: Option<PathBuf>,
    /// The time from the start of the first rank to the end of the last, in the last generation.
    pub elapsed: Duration,
}

/// The rank that brought the job down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Failure {
    /// Number of the rank.
    pub rank: usize,
    /// The name of its machine.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Exit of the process.
    #[serde(rename = "end")]
    pub exit: RankExit,
    /// Time from the start of the job to the exit.
    pub after: Duration,
    /// The last panics that the rank wrote to stderr, each as `src/main.rs:5:9: message`.
    pub panics: Vec<String>,
    /// Cause that the ranks report, if it says more than the exit and the panics.
    pub cause: Option<String>,
    /// The last lines that the rank wrote to stderr, at most ten; empty if its output was not relayed.
    pub last_lines: Vec<String>,
    /// File with the rank's whole stderr, on its machine; `None` without a log directory.
    pub log: Option<PathBuf>,
    /// Number of other ranks that were still running when this rank failed.
    pub running: usize,
}

impl Outcome {
    /// Merges the observations of all machines' launchers. With several machines, `first` is the rank whose failure was
    /// published first, since times of different machines cannot be compared.
    pub(crate) fn of(nodes: &[NodeOutcome], restarts: u32, first: Option<usize>, preemption: &Preemption) -> Self {
        let mut ranks: Vec<(&NodeOutcome, &RankOutcome)> =
            nodes.iter().flat_map(|node| node.ranks.iter().map(move |rank| (node, rank))).collect();
        ranks.sort_by_key(|(_, rank)| rank.rank);
        let chosen = |wanted: fn(&RankOutcome) -> bool| {
            ranks.iter().map(|(_, r)| *r).filter(|r| wanted(r)).map(|r| r.rank).collect()
        };

        let is_explained = preemption.explains_failures(nodes);
        let is_cause = |rank: &RankOutcome| rank.failed && !(rank.stopped && is_explained);
        let mut failed: Vec<_> = ranks.iter().filter(|(_, rank)| is_cause(rank)).copied().collect();
        failed.sort_by_key(|(_, rank)| (Some(rank.rank) != first, rank.after));
        // The ranks of the machine on which the first failure was seen also noticed its cause first.
        let begun_on = failed.first().map(|(node, _)| node.node);
        let blames = nodes.iter().flat_map(|node| node.blames.iter().map(move |blame| (node.node, blame)));
        let blame = blames.min_by_key(|(node, blame)| (Some(*node) != begun_on, blame.at)).map(|(_, blame)| blame);
        let root = root_cause(&ranks, &failed, blame);
        let failure = root.and_then(|(node, rank)| {
            Some(Failure {
                rank: rank.rank,
                host: node.host.clone(),
                pid: rank.pid,
                exit: rank.exit?,
                after: rank.after,
                panics: rank.panics.clone(),
                cause: blame.filter(|blame| says_more(blame, rank)).map(|blame| blame.cause.clone()),
                last_lines: rank.last_lines.clone(),
                log: rank.log.clone(),
                // Ranks that failed earlier had merely reacted to this one.
                running: ranks
                    .iter()
                    .filter(|(_, r)| r.rank != rank.rank && (r.failed || r.after >= rank.after))
                    .count(),
            })
        });
        let trouble = nodes.iter().find_map(|node| node.trouble.as_ref());
        let interrupted_by = nodes.iter().find_map(|node| node.interrupted_by);
        let preempted = match failed.is_empty() && trouble.is_none() {
            true => preemption.of(nodes, interrupted_by),
            false => Preempted::No,
        };
        let interrupted_by = interrupted_by.filter(|_| preempted != Preempted::TooLate);
        // The culprit may have exited with 0, but too early; the exit code of a failed job is not 0.
        let of_ranks = failure.as_ref().map(|failure| failure.exit.exit_code()).filter(|code| *code != 0);
        let of_first = failed.iter().find_map(|(_, rank)| rank.exit).map(RankExit::exit_code);
        let exit_code = match (of_ranks.or(of_first), trouble, interrupted_by) {
            (Some(code), ..) => code,
            (None, Some(trouble), _) => trouble.exit_code,
            (None, None, _) if preempted == Preempted::Yes => preemption.exit_code,
            (None, None, Some(signal)) => signal.saturating_add(128),
            (None, None, None) => 0,
        };
        let others = failed.iter().filter(|(_, rank)| failure.as_ref().is_some_and(|first| first.rank != rank.rank));
        Outcome {
            exit_code,
            also_failed: others.filter_map(|(_, rank)| Some((rank.rank, rank.exit?))).collect(),
            failure,
            trouble: trouble.map(|trouble| trouble.message.clone()),
            interrupted_by,
            preempted: preempted == Preempted::Yes,
            checkpoint: nodes.iter().find_map(|node| node.checkpoint.clone()),
            stopped: chosen(|rank| rank.stopped),
            killed: chosen(|rank| rank.killed),
            left_over: ranks.iter().filter(|(_, r)| r.exit.is_none()).map(|(_, r)| (r.rank, r.pid)).collect(),
            output_lost: nodes.iter().find_map(|node| node.output_lost.clone()),
            waiting: Vec::new(),
            nproc: ranks.len(),
            nnodes: nodes.len(),
            restarts,
            report: None,
            elapsed: nodes.iter().map(|node| node.elapsed).max().unwrap_or_default(),
        }
    }
}

/// True if the cause that the ranks report says more than the culprit's signal or exit code, its panic and its last
/// lines.
fn says_more(blame: &Blame, culprit: &RankOutcome) -> bool {
    let failed_with = |exit: &RankExit| *exit != RankExit::Code(0) && blame.cause.ends_with(&exit.to_string());
    let seen = !culprit.panics.is_empty()
        || matches!(culprit.exit, Some(RankExit::Signal(_)))
        || culprit.exit.as_ref().is_some_and(failed_with);
    let repeats = culprit.last_lines.iter().any(|line| line.contains(&blame.cause));
    !repeats && (!seen || blame.culprit != Some(culprit.rank))
}

/// The rank that caused the end of the job; the first of these that exists:
///
/// 1. a rank that died suddenly: a killed process needs time to free its memory or device, so its peers may notice and
///    exit with an error before its own exit is seen;
/// 2. the rank that the ranks report as the cause: survivors may exit before it, and it may even have exited with 0;
/// 3. the first rank that failed.
fn root_cause<'a>(
    ranks: &[(&'a NodeOutcome, &'a RankOutcome)],
    failed: &[(&'a NodeOutcome, &'a RankOutcome)],
    blame: Option<&Blame>,
) -> Option<(&'a NodeOutcome, &'a RankOutcome)> {
    let first = failed.first()?;
    let sudden = failed.iter().find(|(_, rank)| rank.exit.is_some_and(RankExit::is_sudden));
    let culprit = blame.and_then(|blame| blame.culprit);
    let ended_alone = |rank: &RankOutcome| rank.failed || (rank.exit == Some(RankExit::Code(0)) && !rank.stopped);
    let blamed = || ranks.iter().find(|(_, rank)| Some(rank.rank) == culprit && ended_alone(rank));
    sudden.or_else(blamed).or(Some(first)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: usize, exit: RankExit, after_ms: u64) -> RankOutcome {
        RankOutcome {
            rank,
            pid: 100 + rank as u32,
            exit: Some(exit),
            after: Duration::from_millis(after_ms),
            failed: exit != RankExit::Code(0),
            stopped: false,
            killed: false,
            last_lines: Vec::new(),
            panics: Vec::new(),
            log: None,
        }
    }

    fn node(node: usize, ranks: Vec<RankOutcome>, blamed: Option<usize>) -> NodeOutcome {
        let blame = |culprit| Blame { by: 0, culprit: Some(culprit), cause: "it died".into(), at: 5 };
        let blames = blamed.into_iter().map(blame).collect();
        NodeOutcome { node, host: format!("host{node}"), ranks, blames, ..NodeOutcome::default() }
    }

    /// The rank that is found to be the cause, and the exit code.
    fn cause(nodes: &[NodeOutcome]) -> (Option<usize>, i32) {
        let outcome = Outcome::of(nodes, 0, None, &Preemption::new());
        (outcome.failure.map(|failure| failure.rank), outcome.exit_code)
    }

    #[test]
    fn the_cause_is_the_sudden_death_then_whom_the_ranks_blame_then_the_first() {
        let (kill, exit) = (RankExit::Signal(libc::SIGKILL), RankExit::Code);
        for (ends, blamed, expected) in [
            ([exit(0), exit(0), exit(0)], None, (None, 0)),
            ([exit(3), exit(4), exit(0)], None, (Some(0), 3)),
            ([exit(3), exit(4), kill], None, (Some(2), 137)),
            ([exit(3), exit(4), exit(5)], Some(1), (Some(1), 4)),
            ([exit(3), exit(4), exit(0)], Some(2), (Some(2), 3)),
        ] {
            let ends = ends.into_iter().enumerate().map(|(i, end)| rank(i, end, 10 * i as u64)).collect();
            assert_eq!(cause(&[node(0, ends, blamed)]), expected);
        }
    }

    #[test]
    fn what_the_ranks_say_is_left_out_where_it_was_seen() {
        let shown = |exit, last: &str, text: &str| {
            let culprit = RankOutcome { last_lines: vec![last.into()], ..rank(1, exit, 10) };
            let mut node = node(0, vec![rank(0, RankExit::Code(1), 20), culprit], Some(1));
            node.blames[0].cause = text.into();
            Outcome::of(&[node], 0, None, &Preemption::new()).failure.unwrap().cause.is_some()
        };
        let died = "rank 1 (host h, pid 7) died: its process ended without a goodbye: it exited with code 3";
        assert!(!shown(RankExit::Code(3), "", died));
        assert!(shown(RankExit::Code(3), "", "rank 1 (host h, pid 7) left while it was needed"));
        assert!(!shown(RankExit::Code(3), "Error: the models differ: w", "the models differ: w"));
        let early = "rank 1 (host h, pid 7) died: its process ended: it exited with code 0";
        assert!(shown(RankExit::Code(0), "", early), "that it is no success has to be said");
    }

    #[test]
    fn a_stopped_rank_is_not_the_cause_even_if_blamed() {
        let late = RankOutcome { stopped: true, failed: false, ..rank(1, RankExit::Signal(libc::SIGTERM), 50) };
        assert_eq!(cause(&[node(0, vec![rank(0, RankExit::Code(9), 10), late], Some(1))]), (Some(0), 9));
    }

    #[test]
    fn the_first_failure_may_be_on_another_machine() {
        let nodes =
            [node(0, vec![rank(0, RankExit::Code(1), 30)], None), node(1, vec![rank(1, RankExit::Code(7), 20)], None)];
        let outcome = Outcome::of(&nodes, 2, None, &Preemption::new());
        let failure = outcome.failure.unwrap();
        assert_eq!((failure.rank, &failure.host[..], failure.running), (1, "host1", 1));
        assert_eq!((outcome.exit_code, outcome.also_failed), (7, vec![(0, RankExit::Code(1))]));
        assert_eq!((outcome.nproc, outcome.nnodes, outcome.restarts), (2, 2, 2));
    }

    #[test]
    fn a_senseless_signal_of_another_launcher_is_no_panic() {
        let nodes = [NodeOutcome { interrupted_by: Some(i32::MAX), ..node(0, vec![], None) }];
        assert_eq!(Outcome::of(&nodes, 0, None, &Preemption::new()).exit_code, i32::MAX);
        assert_eq!(RankExit::Signal(i32::MAX).exit_code(), i32::MAX);
    }

    #[test]
    fn clocks_of_machines_do_not_decide_which_failure_was_first() {
        let code = RankExit::Code;
        // The ranks of host1 were started later, so less time had passed there, and its wall clock is behind.
        let mut nodes = [node(0, vec![rank(0, code(7), 5000)], Some(0)), node(1, vec![rank(1, code(1), 20)], Some(1))];
        nodes[0].blames[0].at = 9000;
        let outcome = Outcome::of(&nodes, 0, Some(0), &Preemption::new());
        assert_eq!(outcome.failure.map(|failure| failure.rank), Some(0));
        assert_eq!((outcome.exit_code, outcome.also_failed), (7, vec![(1, code(1))]));
        assert_eq!(Outcome::of(&nodes, 0, Some(1), &Preemption::new()).exit_code, 1);
    }

    #[test]
    fn errors_of_ranks_that_lost_a_rank_to_the_signal_are_not_the_cause() {
        let late = |number, exit| RankOutcome { stopped: true, ..rank(number, exit, 10) };
        let nodes = |killed| {
            let ranks = vec![late(0, RankExit::Code(1)), RankOutcome { failed: false, ..late(1, killed) }];
            [NodeOutcome { asked: true, can_stop: true, ..node(0, ranks, None) }]
        };
        let outcome = Outcome::of(&nodes(RankExit::Signal(libc::SIGTERM)), 0, None, &Preemption::new());
        assert_eq!((outcome.exit_code, outcome.preempted, outcome.failure), (75, true, None));
        let outcome = Outcome::of(&nodes(RankExit::Code(0)), 0, None, &Preemption::new());
        assert_eq!((outcome.exit_code, outcome.preempted, outcome.failure.unwrap().rank), (1, false, 0));
    }
}
