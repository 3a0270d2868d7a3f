//! Sleeping until a certain rank has published something, and waking only those who sleep.
//!
//! The one who sleeps says so, then looks; the one who publishes does that, then looks who sleeps. With a fence between
//! the two on both sides at least one of them sees the other, so no wake is lost; see README.md.

use std::time::Duration;

use super::atomics::{AtomicU32, Ordering, fence};
use super::futex;

/// The owner is awake.
const AWAKE: u32 = 0;

/// Where one rank sleeps.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct Doorbell {
    /// Counts up with each ring; the kernel compares it before the owner sleeps. Written by whoever rings.
    rings: AtomicU32,
    /// [`AWAKE`], or one more than the rank for which the owner sleeps. Written by the owner, read by the others.
    awaits: AtomicU32,
}

impl Doorbell {
    /// The owner sleeps until somebody rings, or for `timeout`; not at all if `may_sleep` says so, which is asked when
    /// nothing that `rank` publishes from then on can be missed.
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

    /// Wakes the owner if it sleeps for `rank`, which has published something and passed a [`publication`].
    pub(super) fn wake_for(&self, rank: usize) {
        if self.awaits.load(Ordering::Relaxed) == rank as u32 + 1 {
            self.ring();
        }
    }

    /// Wakes the owner, whatever it sleeps for.
    pub(super) fn ring(&self) {
        self.rings.fetch_add(1, Ordering::Release);
        futex::wake(&self.rings);
    }
}

/// Between publishing something and looking who sleeps for it.
pub(super) fn publication() {
    fence(Ordering::SeqCst);
}
