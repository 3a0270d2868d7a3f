//! What communication costs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Counters of one rank since [`Ddp::init`](crate::Ddp::init), over all of its wrapped models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    /// Reductions, i.e. optimizer steps if each is followed by one.
    pub steps: u64,
    /// Collectives that carried gradients: one per bucket and step.
    pub collectives: u64,
    /// Those among them that started while backward was still running.
    pub overlapped: u64,
    /// Bytes of gradients and flags handed to the engine by this rank.
    pub bytes: u64,
    /// Time that backward stood still until the averaged gradients were there: what communication costs.
    pub wait: Duration,
    /// Time that the communication thread was busy, most of it beside backward.
    pub busy: Duration,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct StatsCell(Arc<Mutex<Stats>>);

impl StatsCell {
    pub(crate) fn get(&self) -> Stats {
        *self.lock()
    }

    pub(crate) fn launched(&self, bytes: usize, overlapped: bool) {
        let mut s = self.lock();
        s.collectives += 1;
        s.overlapped += u64::from(overlapped);
        s.bytes += bytes as u64;
    }

    pub(crate) fn busy(&self, busy: Duration) {
        self.lock().busy += busy;
    }

    pub(crate) fn step(&self, wait: Duration) {
        let mut s = self.lock();
        s.steps += 1;
        s.wait += wait;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Stats> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
