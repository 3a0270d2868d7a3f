//! Sleeping in the kernel while a word in shared memory has a value; in loom's models, without a kernel.

#[cfg(not(loom))]
mod kernel {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use rustix::thread::Timespec;
    use rustix::thread::futex::{self, Flags};

    /// Sleeps while `word` is `value`, until a [`wake`] or for `timeout`; sometimes shorter.
    pub(in crate::engine::shm) fn wait(word: &AtomicU32, value: u32, timeout: Duration) {
        let timeout = Timespec::try_from(timeout).ok();
        // Word changed, call interrupted, or time over: the caller looks again in any case.
        let _ = futex::wait(word, Flags::empty(), value, timeout.as_ref());
    }

    /// Wakes the sleeper on `word`.
    pub(in crate::engine::shm) fn wake(word: &AtomicU32) {
        // There is one sleeper per doorbell.
        let _ = futex::wake(word, Flags::empty(), 1);
    }
}

/// A model of the kernel: a wait yields until the word has changed. A lost wake is a thread that never goes on, which
/// loom reports.
#[cfg(loom)]
mod kernel {
    use std::time::Duration;

    use loom::sync::atomic::{AtomicU32, Ordering};

    pub(in crate::engine::shm) fn wait(word: &AtomicU32, value: u32, _timeout: Duration) {
        while word.load(Ordering::SeqCst) == value {
            loom::thread::yield_now();
        }
    }

    pub(in crate::engine::shm) fn wake(_word: &AtomicU32) {}
}

pub(super) use kernel::{wait, wake};
