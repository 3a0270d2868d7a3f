//! Preemption: a signal asks the ranks to save and end, and the launcher then ends with a code of its own, by which a
//! scheduler starts the job again.

use std::time::Duration;

use burn_ddp_comm::StopSignal;

use crate::node_outcome::{NodeOutcome, RankOutcome};
use crate::rank_exit::RankExit;
use crate::report::outcome::Outcome;

/// The signal that asks to stop is the same if it comes again within this time: a scheduler may send it to several
/// processes that pass it on to this one. Longer than the time that ranks have for that, so that they take a second one
/// for a second.
pub(crate) const SAME_WISH: Duration = Duration::from_millis(1500);

/// Settings of a job's preemption.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Preemption {
    /// The signal that asks the ranks to stop.
    pub(crate) signal: StopSignal,
    /// True if the user has chosen the signal, and so says that the program can stop. Otherwise the program shows it,
    /// by [`Event::CanStop`](burn_ddp_comm::post_mortem::Event::CanStop).
    pub(crate) is_chosen: bool,
    /// Time that ranks have to end after the signal, before they are killed.
    pub(crate) grace: Duration,
    /// Exit code of a job that was preempted.
    pub(crate) exit_code: i32,
    /// True if a restart follows, as after a failure.
    pub(crate) restarts: bool,
}

impl Preemption {
    pub(crate) const GRACE: Duration = Duration::from_secs(60);

    /// The defaults. The variable BURN_DDP_PREEMPT_SIGNAL chooses the signal; one that is wrong is left to
    /// [`JobSpec::check`](crate::job_spec::JobSpec::check).
    pub(crate) fn new() -> Self {
        let chosen = StopSignal::from_env().ok().flatten();
        Self {
            signal: chosen.unwrap_or_default(),
            is_chosen: chosen.is_some(),
            grace: Self::GRACE,
            exit_code: StopSignal::EXIT_CODE.into(),
            restarts: false,
        }
    }

    /// True for the signal that asks to stop.
    pub(crate) fn is_by(&self, signal: i32) -> bool {
        signal == self.signal.number()
    }

    /// Effect of the signal on a generation that ended without a failure.
    pub(crate) fn of(&self, nodes: &[NodeOutcome], interrupted_by: Option<i32>) -> Preempted {
        let any = |holds: fn(&NodeOutcome) -> bool| nodes.iter().any(holds);
        if any(|node| node.hurried) || interrupted_by.is_some_and(|signal| !self.is_by(signal)) {
            return Preempted::No;
        }
        if any(|node| node.stopping) {
            return Preempted::Yes;
        }
        let ended_well = || nodes.iter().flat_map(|node| &node.ranks).all(|rank| rank.exit == Some(RankExit::Code(0)));
        match any(|node| node.asked) {
            true if any(|node| node.can_stop) && ended_well() => Preempted::TooLate,
            asked if asked && (self.is_chosen || any(|node| node.can_stop)) => Preempted::Yes,
            _ => Preempted::No,
        }
    }

    /// True if a restart follows after this generation.
    pub(crate) fn restarts_after(&self, nodes: &[NodeOutcome], outcome: &Outcome) -> bool {
        self.restarts && outcome.left_over.is_empty() && !nodes.iter().any(|node| node.insisted)
    }

    /// True if ranks that were asked to stop failed because the signal had killed a rank that did not catch it yet, or
    /// this launcher or another one killed a rank.
    pub(crate) fn explains_failures(&self, nodes: &[NodeOutcome]) -> bool {
        let by_signal = |rank: &RankOutcome| rank.exit == Some(RankExit::Signal(self.signal.number()));
        let killed = |rank: &RankOutcome| rank.killed || by_signal(rank);
        let asked = nodes.iter().any(|node| node.asked);
        asked && nodes.iter().any(|node| node.hurried || node.ranks.iter().any(killed))
    }
}

/// Effect of the signal on a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preempted {
    /// No signal came, or something else ended the job.
    No,
    /// The signal ended the job.
    Yes,
    /// The ranks were in their last step, and had done their work.
    TooLate,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(is_chosen: bool) -> Preemption {
        Preemption { signal: StopSignal::default(), is_chosen, ..Preemption::new() }
    }

    fn node(exit: RankExit) -> NodeOutcome {
        let rank = RankOutcome {
            rank: 0,
            pid: 7,
            exit: Some(exit),
            after: Duration::ZERO,
            failed: false,
            stopped: true,
            killed: false,
            last_lines: Vec::new(),
            panics: Vec::new(),
            log: None,
        };
        NodeOutcome { ranks: vec![rank], asked: true, can_stop: true, ..NodeOutcome::default() }
    }

    #[test]
    fn a_job_is_preempted_if_the_signal_ended_it_and_its_program_can_stop() {
        let (well, terminated) = (RankExit::Code(0), RankExit::Signal(libc::SIGTERM));
        let unable = |exit| NodeOutcome { can_stop: false, ..node(exit) };
        let saved = |exit| NodeOutcome { stopping: true, ..node(exit) };
        for (what, chosen, node, expected) in [
            ("it saved", false, saved(well), Preempted::Yes),
            ("a rank alone was sent the signal", false, NodeOutcome { asked: false, ..saved(well) }, Preempted::Yes),
            ("it was done", false, node(well), Preempted::TooLate),
            ("it could stop, but a rank was not ready", false, node(terminated), Preempted::Yes),
            ("before any rank was ready", true, unable(terminated), Preempted::Yes),
            ("a handler of its own", true, unable(well), Preempted::Yes),
            ("a program that cannot stop", false, unable(terminated), Preempted::No),
            ("a second signal", false, NodeOutcome { hurried: true, ..saved(well) }, Preempted::No),
            ("no signal", true, NodeOutcome { asked: false, ..node(well) }, Preempted::No),
        ] {
            assert_eq!(settings(chosen).of(&[node], None), expected, "{what}");
        }
        assert_eq!(settings(true).of(&[saved(well)], Some(libc::SIGINT)), Preempted::No);
        let signal = "USR1".parse().unwrap();
        let by_usr1 = Preemption { signal, ..settings(true) };
        assert_eq!(by_usr1.of(&[saved(well)], Some(libc::SIGTERM)), Preempted::No);
        assert_eq!(by_usr1.of(&[saved(well)], Some(libc::SIGUSR1)), Preempted::Yes);
    }
}
