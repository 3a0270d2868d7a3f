//! Ctrl-Z: stops the ranks, which are not in the terminal's process group, and then this process, until `fg` or `bg`.

use std::mem;
use std::time::{Duration, Instant};

use super::{Action, Supervisor};
use crate::event::Event;

/// Longest wait for ranks to stop, and for them to go on. A limit is needed as a process that hangs in the kernel does
/// neither.
const SUSPENDING: Duration = Duration::from_secs(1);

/// Steps of a suspension, in their order. `ranks` are the ranks that ran before it, and are continued after it.
pub(super) enum Suspension {
    /// The pause is being announced to the other launchers.
    Announcing,
    /// The ranks were sent SIGSTOP; the ranks in `waiting` have not stopped yet.
    StoppingRanks { ranks: Vec<usize>, waiting: Vec<usize>, until: Instant },
    /// This process is stopped.
    Stopped { ranks: Vec<usize>, since: Instant },
    /// The ranks were sent SIGCONT; the ranks in `waiting` do not run yet.
    ContinuingRanks { waiting: Vec<usize>, until: Instant },
}

impl Suspension {
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::StoppingRanks { until, .. } | Self::ContinuingRanks { until, .. } => Some(*until),
            Self::Announcing | Self::Stopped { .. } => None,
        }
    }
}

impl Supervisor {
    pub(super) fn suspend(&mut self) {
        self.suspension = Some(Suspension::Announcing);
        self.act(Action::AnnouncePause);
    }

    /// Stops the ranks, once the caller has carried out [`Action::AnnouncePause`].
    pub(crate) fn pause_announced(&mut self, now: Instant) -> Vec<Action> {
        let ranks: Vec<_> = self.running().into_iter().filter(|&rank| !self.ranks[rank].suspended).collect();
        ranks.iter().for_each(|&rank| self.signal(rank, libc::SIGSTOP));
        let waiting = ranks.clone();
        self.suspension = Some(Suspension::StoppingRanks { ranks, waiting, until: now + SUSPENDING });
        self.advance_suspension(now);
        mem::take(&mut self.actions)
    }

    /// Continues after [`Action::StopLauncher`]: this process runs again. Deadlines move by the time it was stopped.
    pub(crate) fn launcher_continued(&mut self, now: Instant) -> Vec<Action> {
        if let Some(Suspension::Stopped { ranks, since }) = self.suspension.take() {
            self.put_off(now.saturating_duration_since(since));
            ranks.iter().for_each(|&rank| self.signal(rank, libc::SIGCONT));
            self.suspension = Some(Suspension::ContinuingRanks { waiting: ranks, until: now + SUSPENDING });
            self.advance_suspension(now);
        }
        mem::take(&mut self.actions)
    }

    /// Follows the ranks as they stop and go on, without notices; all other events wait until the suspension is over.
    pub(super) fn on_event_while_suspended(&mut self, now: Instant, event: Event) {
        let mut gone = None;
        match event {
            Event::Stopped { rank, .. } => self.ranks[rank].suspended = true,
            Event::Continued { rank } => self.ranks[rank].suspended = false,
            event => {
                if let Event::Exited { rank, .. } = event {
                    gone = Some(rank);
                }
                self.deferred.push_back(event);
            }
        }
        let ranks = &self.ranks;
        match &mut self.suspension {
            Some(Suspension::StoppingRanks { waiting, .. }) => {
                waiting.retain(|&rank| Some(rank) != gone && !ranks[rank].suspended);
            }
            Some(Suspension::ContinuingRanks { waiting, .. }) => {
                waiting.retain(|&rank| Some(rank) != gone && ranks[rank].suspended);
            }
            _ => {}
        }
        self.advance_suspension(now);
    }

    /// Takes the next step once all ranks have stopped or gone on, or the time for it is over.
    pub(super) fn advance_suspension(&mut self, now: Instant) {
        match self.suspension.take() {
            Some(Suspension::StoppingRanks { ranks, waiting, until }) if waiting.is_empty() || now >= until => {
                self.suspension = Some(Suspension::Stopped { ranks, since: now });
                self.act(Action::StopLauncher);
            }
            Some(Suspension::ContinuingRanks { waiting, until }) if waiting.is_empty() || now >= until => {
                self.act(Action::AnnounceResume);
                self.take_in_deferred(now);
            }
            unchanged => self.suspension = unchanged,
        }
    }

    fn take_in_deferred(&mut self, now: Instant) {
        // If one of them is another Ctrl-Z, the rest stays deferred.
        while self.suspension.is_none()
            && let Some(event) = self.deferred.pop_front()
        {
            self.on_event(now, event);
        }
    }
}
