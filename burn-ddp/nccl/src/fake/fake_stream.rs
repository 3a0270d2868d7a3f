//! Fake streams, which are threads, and fake events.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::poison_free_lock::lock;

/// Longest time between two checks whether a waiting task was aborted.
pub(super) const GLANCE: Duration = Duration::from_millis(2);

/// Work of a stream.
pub(super) enum Task {
    /// Waits until the event was completed as often as it was recorded when this task was enqueued.
    Wait(Arc<FakeEvent>, u64),
    Complete(Arc<FakeEvent>, u64),
    Run(Box<dyn FnOnce() + Send>),
}

/// A queue of work, done by a thread of its own.
pub(super) struct FakeStream {
    pub(super) ordinal: usize,
    state: Mutex<StreamState>,
    changed: Condvar,
}

struct StreamState {
    tasks: VecDeque<Task>,
    closed: bool,
}

/// A mark in streams.
#[derive(Default)]
pub(super) struct FakeEvent {
    /// Number of times it was recorded, and number of those that are completed.
    counts: Mutex<(u64, u64)>,
    changed: Condvar,
}

impl FakeStream {
    /// A stream of the device `ordinal`, with its thread.
    pub(super) fn start(ordinal: usize, delays: Arc<Delays>) -> Arc<FakeStream> {
        let state = Mutex::new(StreamState { tasks: VecDeque::new(), closed: false });
        let stream = Arc::new(FakeStream { ordinal, state, changed: Condvar::new() });
        let worker = stream.clone();
        std::thread::spawn(move || worker.work(&delays));
        stream
    }

    /// Ends the thread when all enqueued work is done.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }

    pub(super) fn push(&self, task: Task) {
        lock(&self.state).tasks.push_back(task);
        self.changed.notify_all();
    }

    fn work(&self, delays: &Delays) {
        loop {
            let waiting = |state: &mut StreamState| state.tasks.is_empty() && !state.closed;
            let mut state = self.changed.wait_while(lock(&self.state), waiting).unwrap_or_else(PoisonError::into_inner);
            let Some(task) = state.tasks.pop_front() else { return };
            drop(state);
            delays.dawdle();
            match task {
                Task::Wait(event, count) => event.wait(count),
                Task::Complete(event, count) => event.complete(count),
                Task::Run(work) => work(),
            }
        }
    }
}

impl FakeEvent {
    /// Number of times it was recorded, and number of those that are completed.
    pub(super) fn counts(&self) -> (u64, u64) {
        *lock(&self.counts)
    }

    /// Counts one more record, and returns the number of records.
    pub(super) fn record(&self) -> u64 {
        let mut counts = lock(&self.counts);
        counts.0 += 1;
        counts.0
    }

    fn wait(&self, count: u64) {
        let waiting = |counts: &mut (u64, u64)| counts.1 < count;
        drop(self.changed.wait_while(lock(&self.counts), waiting).unwrap_or_else(PoisonError::into_inner));
    }

    fn complete(&self, count: u64) {
        let mut counts = lock(&self.counts);
        counts.1 = counts.1.max(count);
        self.changed.notify_all();
    }
}

/// Random delays, up to `most_us`.
pub(super) struct Delays {
    most_us: AtomicU64,
    seed: AtomicU64,
}

impl Default for Delays {
    fn default() -> Delays {
        Delays { most_us: AtomicU64::new(0), seed: AtomicU64::new(1) }
    }
}

impl Delays {
    pub(super) fn set(&self, most: Duration, seed: u64) {
        self.most_us.store(most.as_micros() as u64, Ordering::Relaxed);
        self.seed.store(seed, Ordering::Relaxed);
    }

    pub(super) fn dawdle(&self) {
        let most = self.most_us.load(Ordering::Relaxed);
        if most == 0 {
            return;
        }
        let seed = self.seed.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let mixed = (seed ^ seed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33;
        if !mixed.is_multiple_of(3) {
            std::thread::sleep(Duration::from_micros(mixed % most));
        }
    }
}
