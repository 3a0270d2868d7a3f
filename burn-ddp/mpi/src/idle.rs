//! What a wait does when nothing has moved: MPI has nothing to sleep on.

use std::hint::spin_loop;
use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::PeerInfo;

/// How long a wait keeps its core, if ranks do not outnumber cores.
const SPIN: Duration = Duration::from_micros(500);
/// How long it lets others run and looks whenever it is its turn.
const YIELD: Duration = Duration::from_millis(1);
/// Then it sleeps for this part of the time that it has waited, so that it ends late by no more than that, but never longer than
/// [`LONGEST_SLEEP`].
const PART: u32 = 8;
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// One wait: looks again and again, then yields, then sleeps. Where ranks outnumber cores it yields at once.
#[derive(Debug)]
pub(crate) struct Idle {
    spins: bool,
    since: Option<Instant>,
}

impl Idle {
    /// For the waits of `rank`, one of `peers`.
    pub(crate) fn new(rank: usize, peers: &[PeerInfo]) -> Idle {
        let here = peers.get(rank).map(|peer| &peer.host);
        let local_ranks = peers.iter().filter(|peer| Some(&peer.host) == here).count();
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        Idle { spins: local_ranks <= cores, since: None }
    }

    /// Something has moved.
    pub(crate) fn reset(&mut self) {
        self.since = None;
    }

    /// Nothing has.
    pub(crate) fn pause(&mut self) {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if self.spins && waited < SPIN {
            spin_loop();
        } else if waited < YIELD {
            thread::yield_now();
        } else {
            thread::sleep((waited / PART).min(LONGEST_SLEEP));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_sleeps() {
        let mut idle = Idle::new(0, &[PeerInfo::here(0, 0, 0)]);
        idle.since = Instant::now().checked_sub(PART * LONGEST_SLEEP);
        let began = Instant::now();
        idle.pause();
        assert!(began.elapsed() >= LONGEST_SLEEP);
        idle.reset();
        assert_eq!(idle.since, None);
    }

    #[test]
    fn ranks_that_outnumber_cores_do_not_spin() {
        let cores = thread::available_parallelism().unwrap().get();
        let peers: Vec<PeerInfo> = (0..=cores).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        assert!(!Idle::new(0, &peers).spins);
        assert!(Idle::new(0, &peers[..cores]).spins);
    }
}
