//! Phases of a generation on this machine.

use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No rank has failed.
    Running,
    /// A rank has failed; the others may end by themselves.
    Settling { until: Instant },
    /// The ranks were sent a signal to end.
    Stopping { until: Instant },
    /// The ranks were sent SIGKILL.
    Killing { until: Instant },
    /// The ranks have exited; processes that they left behind may finish their output.
    Draining { until: Instant },
    /// The processes left behind were sent SIGTERM.
    Terminating { until: Instant },
    /// The processes left behind were killed; the rest of the output is passed on.
    Flushing,
    /// The generation is over on this machine.
    Over,
}

impl Phase {
    pub(super) fn deadline(self) -> Option<Instant> {
        match self {
            Self::Running | Self::Flushing | Self::Over => None,
            Self::Settling { until }
            | Self::Stopping { until }
            | Self::Killing { until }
            | Self::Draining { until }
            | Self::Terminating { until } => Some(until),
        }
    }

    /// True in the phases in which ranks may still run.
    pub(super) fn has_ranks(self) -> bool {
        matches!(self, Self::Running | Self::Settling { .. } | Self::Stopping { .. } | Self::Killing { .. })
    }

    /// True in the phases before ranks are sent a signal to end.
    pub(super) fn lets_run(self) -> bool {
        matches!(self, Self::Running | Self::Settling { .. })
    }

    /// Moves the deadline of a phase with ranks by a time in which this process did not run.
    pub(super) fn put_off(&mut self, by: Duration) {
        if let Self::Settling { until } | Self::Stopping { until } | Self::Killing { until } = self {
            *until += by;
        }
    }
}
