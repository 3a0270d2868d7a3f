//! Ranks that are asked to save and end.

use std::time::{Duration, Instant};

use burn_ddp_comm::post_mortem::Event;

use super::{Phase, Supervisor};
use crate::preemption::{Preemption, SAME_WISH};
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

    /// True if the ranks have just been asked to stop, and `signal` says the same.
    pub(super) fn preemption_is_under_way(&self, now: Instant, signal: i32) -> bool {
        let just = |asked: Instant| now.saturating_duration_since(asked) < SAME_WISH;
        self.settings.preemption.is_by(signal) && self.asked.is_some_and(just)
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
        exit == RankExit::Code(0) || self.ranks[rank].stopping && exit == RankExit::Code(Preemption::EXIT_CODE)
    }

    /// True for the exit of a rank that was asked to save, and not by the signal itself, which a rank may not have
    /// caught yet.
    pub(super) fn was_to_save(&self, rank: usize, exit: RankExit) -> bool {
        let by_signal = matches!(exit, RankExit::Signal(signal) if self.settings.preemption.is_by(signal));
        self.asked.is_some() && !self.hurried && self.can_stop() && !by_signal && !self.killed.contains(&rank)
    }

    /// True if a rank has caught the signal that asks to stop.
    pub(super) fn can_stop(&self) -> bool {
        self.ranks.iter().any(|rank| rank.can_stop)
    }
}
