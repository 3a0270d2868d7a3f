//! Sleeping until a certain rank has published something, and waking only ranks that sleep.
//!
//! The sleeper says that it sleeps, then looks; the publisher publishes, then looks for sleepers. With a fence between
//! the two steps on both sides, at least one of the two ranks sees the other, so no wake is lost; see README.md.

use std::time::Duration;

use super::atomics::{AtomicU32, Ordering, fence};
use super::futex;

const AWAKE: u32 = 0;

/// The place on which one rank sleeps.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct Doorbell {
    /// Counts up with each ring; the kernel compares it before the owner sleeps. Written by the ringing rank.
    rings: AtomicU32,
    /// [`AWAKE`], or one more than the rank for which the owner sleeps. Written by the owner, read by the others.
    awaits: AtomicU32,
    /// Core on which the owner last waited or rang, plus 1; 0 before that. Written by the owner, read by the others.
    core: AtomicU32,
}

impl Doorbell {
    /// Puts the owner to sleep until a ring, or for `timeout`. Calls `may_sleep` before, when nothing that `rank`
    /// publishes from then on can be missed; if it returns false, the owner does not sleep.
    pub(super) fn sleep<E>(
        &self,
        rank: usize,
        timeout: Duration,
        may_sleep: impl FnOnce() -> Result<bool, E>,
    ) -> Result<(), E> {
        let rings = self.rings.load(Ordering::Acquire);
        self.awaits.store(rank as u32 + 1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let verdict = may_sleep();
        if let Ok(true) = verdict {
            futex::wait(&self.rings, rings, timeout);
        }
        self.awaits.store(AWAKE, Ordering::Relaxed);
        verdict.map(|_| ())
    }

    /// Wakes the owner if it sleeps for `rank`, which has published something and passed a [`publication`]. True if it
    /// was asleep.
    pub(super) fn wake_for(&self, rank: usize) -> bool {
        let asleep = self.awaits.load(Ordering::Relaxed) == rank as u32 + 1;
        if asleep {
            self.ring();
        }
        asleep
    }

    /// Shows the others that the owner runs on `core`. Stores only changes, so that the cache line stays valid on the
    /// others' cores.
    pub(super) fn runs_on(&self, core: usize) {
        let shown = core as u32 + 1;
        if self.core.load(Ordering::Relaxed) != shown {
            self.core.store(shown, Ordering::Relaxed);
        }
    }

    /// True if the owner last waited, or rang, on `core`.
    pub(super) fn last_ran_on(&self, core: usize) -> bool {
        self.core.load(Ordering::Relaxed) == core as u32 + 1
    }

    /// Wakes the owner, whatever it sleeps for.
    pub(super) fn ring(&self) {
        self.rings.fetch_add(1, Ordering::Release);
        futex::wake(&self.rings);
    }
}

/// The fence between publishing something and looking for ranks that sleep for it.
pub(super) fn publication() {
    fence(Ordering::SeqCst);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_on_the_core_that_it_showed_last() {
        let bell = Doorbell::default();
        assert!(!bell.last_ran_on(0), "nothing is known before the first wait");
        bell.runs_on(0);
        assert!(bell.last_ran_on(0) && !bell.last_ran_on(1));
        bell.runs_on(1);
        assert!(bell.last_ran_on(1) && !bell.last_ran_on(0));
    }

    #[test]
    fn a_ring_is_reported_only_if_the_owner_sleeps_for_the_rank() {
        let bell = Doorbell::default();
        assert!(!bell.wake_for(3));
        bell.sleep(3, Duration::ZERO, || {
            assert!(bell.wake_for(3) && !bell.wake_for(2));
            Ok::<_, ()>(false)
        })
        .unwrap();
        assert!(!bell.wake_for(3));
    }
}
