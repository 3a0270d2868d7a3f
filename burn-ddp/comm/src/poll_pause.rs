//! Pauses between two looks at a state that changes without waking the waiter.

use std::hint::spin_loop;
use std::thread;
use std::time::{Duration, Instant};

/// A sleep takes one eighth of the time waited so far, so a wait ends late by at most an eighth.
const SLEEP_PART: u32 = 8;
/// Longest sleep between two looks.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Pauses of a polling loop: it spins, then yields, then sleeps, longer the longer it has waited.
///
/// Made for engines whose library or device offers no event to block on.
///
/// ```
/// use burn_ddp_comm::PollPause;
/// use std::time::Duration;
///
/// let mut looks = 0;
/// let mut pause = PollPause::new(Duration::from_micros(50), Duration::from_micros(200));
/// while looks < 10 {
///     looks += 1; // a look that finds nothing
///     pause.wait();
/// }
/// pause.reset(); // something was found: the next wait starts anew
/// ```
#[derive(Debug)]
pub struct PollPause {
    spin: Duration,
    yields: Duration,
    /// Time of the first pause since the last reset.
    since: Option<Instant>,
}

impl PollPause {
    /// Spins for the first `spin` of a wait, yields to other threads until `yields`, then sleeps. Both count from the
    /// first pause. A `spin` of zero never spins: for waits on machines whose ranks
    /// [outnumber](crate::core_per_rank) the cores.
    pub fn new(spin: Duration, yields: Duration) -> PollPause {
        PollPause { spin, yields, since: None }
    }

    /// Starts a new wait at the next pause: progress was made.
    pub fn reset(&mut self) {
        self.since = None;
    }

    /// Pauses after a look that found nothing new: at most 1 ms, and the scheduler's delays.
    pub fn wait(&mut self) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_sleeps() {
        let mut pause = PollPause::new(Duration::from_micros(500), LONGEST_SLEEP);
        pause.since = Instant::now().checked_sub(SLEEP_PART * LONGEST_SLEEP);
        let began = Instant::now();
        pause.wait();
        assert!(began.elapsed() >= LONGEST_SLEEP);
        pause.reset();
        assert_eq!(pause.since, None);
    }
}
