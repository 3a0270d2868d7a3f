//! What a wait does when nothing has moved: MPI has nothing to sleep on.

use std::hint::spin_loop;
use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::PeerInfo;

/// About what giving the core away and getting it back costs: looking longer would never pay.
const SPIN: Duration = Duration::from_micros(60);
/// How long a wait lets others run and looks whenever it is its turn.
const YIELD: Duration = Duration::from_micros(500);
/// Then it sleeps, longer and longer.
const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// One wait: looks again and again, then yields, then sleeps. Where ranks outnumber cores it yields at once.
#[derive(Debug)]
pub(crate) struct Idle {
    spins: bool,
    since: Option<Instant>,
    sleep: Duration,
}

impl Idle {
    /// For the waits of `rank`, one of `peers`.
    pub(crate) fn new(rank: usize, peers: &[PeerInfo]) -> Idle {
        let here = peers.get(rank).map(|peer| &peer.host);
        let local_ranks = peers.iter().filter(|peer| Some(&peer.host) == here).count();
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        Idle { spins: local_ranks <= cores, since: None, sleep: SHORTEST_SLEEP }
    }

    /// Something has moved.
    pub(crate) fn reset(&mut self) {
        self.since = None;
        self.sleep = SHORTEST_SLEEP;
    }

    /// Nothing has.
    pub(crate) fn pause(&mut self) {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if self.spins && waited < SPIN {
            spin_loop();
        } else if waited < YIELD {
            thread::yield_now();
        } else {
            thread::sleep(self.sleep);
            self.sleep = (self.sleep * 2).min(LONGEST_SLEEP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_sleeps_and_what_moves_wakes_it() {
        let mut idle = Idle::new(0, &[PeerInfo::here(0, 0, 0)]);
        while idle.sleep < LONGEST_SLEEP {
            idle.pause();
        }
        assert!(idle.since.is_some_and(|since| since.elapsed() >= YIELD));
        idle.reset();
        assert_eq!((idle.since, idle.sleep), (None, SHORTEST_SLEEP));
    }

    #[test]
    fn ranks_that_outnumber_cores_do_not_spin() {
        let cores = thread::available_parallelism().unwrap().get();
        let peers: Vec<PeerInfo> = (0..=cores).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        assert!(!Idle::new(0, &peers).spins);
        assert!(Idle::new(0, &peers[..cores]).spins);
    }
}
