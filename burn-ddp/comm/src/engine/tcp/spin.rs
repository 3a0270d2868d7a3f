//! Looking again before sleeping.

use std::hint::spin_loop;
use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;
use crate::membership::Membership;

/// About what falling asleep and being woken costs: looking longer than that would never pay.
const MOST: Duration = Duration::from_micros(60);
/// Enough to notice that messages come at once again.
const LEAST: Duration = Duration::from_micros(5);

/// How long a wait looks for what it waits for before it sleeps: as long as it tends to help, and not at all where ranks outnumber cores.
pub(super) struct Spin {
    limit: Duration,
    allowed: bool,
}

impl Spin {
    pub(super) fn new(membership: &Membership) -> Spin {
        let here = &membership.peers()[membership.rank()].host;
        let local_ranks = membership.peers().iter().filter(|peer| peer.host == *here).count();
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        Spin { limit: MOST, allowed: local_ranks <= cores }
    }

    /// Calls `look` until it finds something; whether it did in time.
    pub(super) fn until(&mut self, mut look: impl FnMut() -> Result<bool>) -> Result<bool> {
        if !self.allowed {
            return Ok(false);
        }
        let start = Instant::now();
        loop {
            if look()? {
                self.limit = (self.limit * 2).min(MOST);
                return Ok(true);
            }
            if start.elapsed() >= self.limit {
                self.limit = (self.limit / 2).max(LEAST);
                return Ok(false);
            }
            spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_help_is_done_less() {
        let mut spin = Spin { limit: MOST, allowed: true };
        for _ in 0..10 {
            assert_eq!(spin.until(|| Ok(false)), Ok(false));
        }
        assert_eq!(spin.limit, LEAST);
        for _ in 0..10 {
            assert_eq!(spin.until(|| Ok(true)), Ok(true));
        }
        assert_eq!(spin.limit, MOST);
    }

    #[test]
    fn without_a_core_to_spare_nothing_is_looked_at() {
        let mut spin = Spin { limit: MOST, allowed: false };
        assert_eq!(spin.until(|| Ok(true)), Ok(false));
    }
}
