//! Ranks that are asked to save and end.

use std::time::{Duration, Instant};

use burn_ddp_comm::StopSignal;
use burn_ddp_comm::post_mortem::Event;

use super::{Phase, Supervisor};
use crate::preemption::SAME_WISH;
use crate::rank_exit::RankExit;

impl Supervisor {
    /// Takes in what ranks of this machine report of themselves.
    pub(crate) fn note(&mut self, reported: &Event) {
        let (rank, stopping) = match reported {
            Event::CanStop { rank, .. } => (rank, false),
            Event::Stopping { rank, .. } => (rank, true),
            Event::Saved { checkpoint, .. } => return self.checkpoint = Some(checkpoint.clone()),
            _ => return,
        };
        let local = rank.checked_sub(self.settings.first_rank);
        let Some(rank) = local.and_then(|local| self.ranks.get_mut(local)) else { return };
        (rank.can_stop, rank.stopping) = (true, rank.stopping || stopping);
        // A rank may catch the signal just after this launcher took it for one that does not.
        if let (Phase::Stopping { until }, Some(asked), false) = (self.phase, self.asked, self.hurried) {
            self.phase = Phase::Stopping { until: until.max(asked + self.grace()) };
        }
    }

    /// Ends the ranks because a launcher of the job was sent `signal`, which may ask them to stop.
    pub(super) fn end_by(&mut self, now: Instant, signal: i32) {
        self.asked = self.settings.preemption.is_by(signal).then_some(now);
        self.stop(now, signal);
    }

    /// A further signal: ranks that were asked to stop have no more time to save.
    pub(super) fn hurry(&mut self, now: Instant, signal: i32) {
        let Phase::Stopping { until } = self.phase else { return };
        if self.asked.is_none() || self.hurried {
            return;
        }
        self.hurried = true;
        if signal == libc::SIGINT {
            return self.kill(now);
        }
        self.signal_all(signal);
        self.phase = Phase::Stopping { until: until.min(now + self.settings.grace) };
    }

    /// Moves deadlines by a time in which this process did not run.
    pub(super) fn put_off(&mut self, by: Duration) {
        self.phase.put_off(by);
        for time in [&mut self.asked, &mut self.again].into_iter().flatten() {
            *time += by;
        }
    }

    /// True for the first exit of a rank by a chosen signal to stop, sent to it alone before it was caught.
    pub(super) fn was_asked_by(&self, exit: RankExit) -> bool {
        let preemption = &self.settings.preemption;
        let by_signal = matches!(exit, RankExit::Signal(signal) if preemption.is_by(signal));
        preemption.is_chosen && by_signal && self.phase == Phase::Running
    }

    /// True if the ranks have just been asked to stop, and `signal` says the same.
    pub(super) fn preemption_is_under_way(&self, now: Instant, signal: i32) -> bool {
        let just = |asked: Instant| now.saturating_duration_since(asked) < SAME_WISH;
        let preemption = &self.settings.preemption;
        preemption.is_by(signal) && (preemption.is_chosen || self.can_stop()) && self.asked.is_some_and(just)
    }

    /// Time that the ranks have between the signal to end and SIGKILL.
    pub(super) fn grace(&self) -> Duration {
        let preemption = &self.settings.preemption;
        if self.asked.is_some() && (preemption.is_chosen || self.can_stop()) {
            preemption.grace
        } else {
            self.settings.grace
        }
    }

    /// True for the exit of a rank that did its work, or has stopped because it was asked to.
    pub(super) fn ended_well(&self, rank: usize, exit: RankExit) -> bool {
        exit == RankExit::Code(0) || self.ranks[rank].stopping && exit == RankExit::Code(StopSignal::EXIT_CODE.into())
    }

    /// True for the exit of a rank that was asked to save, and not by the signal itself, which a rank may not have
    /// caught yet.
    pub(super) fn was_to_save(&self, rank: usize, exit: RankExit) -> bool {
        let by_signal = matches!(exit, RankExit::Signal(signal) if self.settings.preemption.is_by(signal));
        self.asked.is_some() && !self.hurried && self.can_stop() && !by_signal && !self.killed.contains(&rank)
    }

    /// True if a rank takes `signal` for the wish to stop.
    pub(super) fn takes_for_wish(&self, signal: i32) -> bool {
        self.can_stop() && self.settings.preemption.is_by(signal)
    }

    /// True if a rank has caught the signal that asks to stop.
    pub(super) fn can_stop(&self) -> bool {
        self.ranks.iter().any(|rank| rank.can_stop)
    }
}
