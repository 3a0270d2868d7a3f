//! Pauses between two looks at a state that changes without waking the waiter.

use std::hint::spin_loop;
use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use crate::PeerInfo;

/// A sleep takes this part of the time waited so far, so a wait ends late by at most that part.
const SLEEP_PART: u32 = 8;
/// Longest sleep between two looks.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// The pauses of a polling loop: it spins, then yields, then sleeps, longer the longer it has waited.
///
/// For engines whose library or device offers no event to block on.
///
/// ```
/// use burn_ddp_comm::Backoff;
/// use std::time::Duration;
///
/// let mut looks = 0;
/// let mut backoff = Backoff::new(Duration::from_micros(50), Duration::from_micros(200));
/// while looks < 10 {
///     looks += 1; // a look that finds nothing
///     backoff.pause();
/// }
/// backoff.reset(); // something was found: the next wait starts anew
/// ```
#[derive(Debug)]
pub struct Backoff {
    spin: Duration,
    yields: Duration,
    /// Time of the first pause since the last reset.
    since: Option<Instant>,
}

impl Backoff {
    /// Spins for the first `spin` of a wait, yields to other threads until `yields`, then sleeps. Both count from the
    /// first pause. A `spin` of zero never spins: for waits on machines whose ranks [outnumber](core_per_rank) the
    /// cores.
    pub fn new(spin: Duration, yields: Duration) -> Backoff {
        Backoff { spin, yields, since: None }
    }

    /// Starts a new wait at the next pause: progress was made.
    pub fn reset(&mut self) {
        self.since = None;
    }

    /// One pause, after a look that found nothing new. At most 1 ms long, but for the scheduler's delays.
    pub fn pause(&mut self) {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < self.spin {
            spin_loop();
        } else if waited < self.yields {
            thread::yield_now();
        } else {
            thread::sleep((waited / SLEEP_PART).min(LONGEST_SLEEP));
        }
    }
}

/// True if the machine of `rank`, one of `peers`, has a core for each rank on it. Otherwise a spinning rank keeps its
/// peers from running.
pub fn core_per_rank(rank: usize, peers: &[PeerInfo]) -> bool {
    let here = peers.get(rank).map(|peer| &peer.host);
    cores_suffice(peers.iter().filter(|peer| Some(&peer.host) == here).count())
}

/// True if this process may use at least `local_ranks` cores.
pub(crate) fn cores_suffice(local_ranks: usize) -> bool {
    local_ranks <= thread::available_parallelism().map_or(1, NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_sleeps() {
        let mut backoff = Backoff::new(Duration::from_micros(500), LONGEST_SLEEP);
        backoff.since = Instant::now().checked_sub(SLEEP_PART * LONGEST_SLEEP);
        let began = Instant::now();
        backoff.pause();
        assert!(began.elapsed() >= LONGEST_SLEEP);
        backoff.reset();
        assert_eq!(backoff.since, None);
    }

    #[test]
    fn ranks_that_outnumber_cores_are_noticed() {
        let cores = thread::available_parallelism().unwrap().get();
        let peers: Vec<PeerInfo> = (0..=cores).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        assert!(!core_per_rank(0, &peers));
        assert!(core_per_rank(0, &peers[..cores]));
    }
}
