//! Queues in memory through which the ranks of a group pass frames.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use crate::frame::Header;
use crate::membership::Wake;
use crate::poison_free_locks::lock;

/// State shared by the ranks of a group.
pub(super) struct Hub {
    /// By group rank.
    pub(super) inboxes: Vec<Arc<Inbox>>,
    /// Buffers that were read and can be filled again.
    spare: Mutex<Vec<Vec<u8>>>,
}

/// Frames for one rank, as they arrive.
pub(super) struct Inbox {
    pub(super) arrivals: Mutex<Arrivals>,
    /// Notified by senders, by ranks that close, and by changes of membership. The owner waits.
    pub(super) changed: Condvar,
}

pub(super) struct Arrivals {
    /// By sender's group rank, oldest first. Never long: every collective waits for all ranks.
    pub(super) frames: Vec<VecDeque<Frame>>,
    /// By group rank: the time at which the rank closed the group.
    pub(super) closed: Vec<Option<Instant>>,
}

pub(super) struct Frame {
    pub(super) header: Header,
    /// Shared by all receivers of the same bytes.
    pub(super) payload: Arc<Vec<u8>>,
}

impl Hub {
    pub(super) fn new(group_size: usize) -> Hub {
        let inbox = || {
            let frames = (0..group_size).map(|_| VecDeque::new()).collect();
            let arrivals = Arrivals { frames, closed: vec![None; group_size] };
            Arc::new(Inbox { arrivals: Mutex::new(arrivals), changed: Condvar::new() })
        };
        Hub { inboxes: (0..group_size).map(|_| inbox()).collect(), spare: Mutex::new(Vec::new()) }
    }

    /// A copy of `payload`, in a recycled buffer if there is one.
    pub(super) fn copy(&self, payload: &[u8]) -> Arc<Vec<u8>> {
        let mut buffer = lock(&self.spare).pop().unwrap_or_default();
        buffer.extend_from_slice(payload);
        Arc::new(buffer)
    }

    /// Takes the buffer back once its last receiver has read it.
    pub(super) fn recycle(&self, payload: Arc<Vec<u8>>) {
        if let Some(mut buffer) = Arc::into_inner(payload).filter(|buffer| buffer.capacity() > 0) {
            buffer.clear();
            lock(&self.spare).push(buffer);
        }
    }
}

impl Wake for Inbox {
    /// Takes the lock, so that no wake falls between a waiter's look at the membership and its wait.
    fn wake(&self) {
        drop(lock(&self.arrivals));
        self.changed.notify_all();
    }
}
