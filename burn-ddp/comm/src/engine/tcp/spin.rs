//! Spinning for a moment before a wait blocks.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use crate::Result;
use crate::enough_cores::core_per_rank;
use crate::membership::Membership;

/// Longest spin, about the cost of falling asleep and being woken: spinning longer would never pay.
const MOST: Duration = Duration::from_micros(60);
/// Shortest spin: enough to notice that messages arrive quickly again.
const LEAST: Duration = Duration::from_micros(5);

/// Time for which waits spin before they block: longer while spinning succeeds, shorter while it does not, and none
/// where ranks outnumber cores.
pub(super) struct Spin {
    limit: Duration,
    allowed: bool,
}

impl Spin {
    pub(super) fn new(membership: &Membership) -> Spin {
        Spin { limit: MOST, allowed: core_per_rank(membership.rank(), membership.peers()) }
    }

    /// Calls `look` until it returns true; false if it did not in time, or ranks do not spin.
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
    fn spinning_that_fails_gets_shorter() {
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
    fn ranks_that_outnumber_cores_do_not_spin() {
        let mut spin = Spin { limit: MOST, allowed: false };
        assert_eq!(spin.until(|| Ok(true)), Ok(false));
    }
}
