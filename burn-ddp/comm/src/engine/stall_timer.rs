//! Timer of the reports of a long wait.

use std::time::{Duration, Instant};

use crate::call::Call;
use crate::net::wait::deadline_in;

/// The next time at which a wait is reported as taking long: after an interval, then after twice that interval, and so
/// on.
#[derive(Debug)]
pub struct Stall {
    pub(crate) at: Instant,
    interval: Duration,
}

impl Stall {
    /// For a wait of `call`.
    pub fn new(call: &Call, after: Duration) -> Stall {
        // What is never due is due at the deadline, which comes first.
        Stall { at: call.started().checked_add(after).unwrap_or_else(|| call.deadline()), interval: after }
    }

    /// True if it is time for a report; the next one is then later.
    pub fn is_due(&mut self) -> bool {
        let due = Instant::now() >= self.at;
        if due {
            self.at = deadline_in(self.interval);
            self.interval = self.interval.saturating_mul(2);
        }
        due
    }
}
