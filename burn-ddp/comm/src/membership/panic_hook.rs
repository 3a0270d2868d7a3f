//! Message and line of a rank's panic, for its peers.
//!
//! Only the process's panic hook gets both. So the first world of a process installs a hook that notes them for the
//! thread that panics, and then calls the hook that was there before. Where a panic ends the process
//! (`panic = "abort"`), no destructor runs, so the hook itself sends the cause to the peers of all ranks of the
//! process.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Mutex, Once, Weak, mpsc};
use std::thread;
use std::time::Duration;

use super::Membership;
use crate::poison_free_locks::lock;

/// Longest time that a panic waits before it ends the process.
const FAREWELL: Duration = Duration::from_secs(2);

thread_local! {
    /// The last panic of this thread.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

static INSTALLED: Once = Once::new();

/// The ranks of this process; needed only where panics abort.
static RANKS: Mutex<Vec<Weak<Membership>>> = Mutex::new(Vec::new());

/// Notes panics of this process from now on; a panic that ends the process fails `membership`.
pub(crate) fn watch(membership: &Arc<Membership>) {
    if cfg!(panic = "abort") {
        let mut ranks = lock(&RANKS);
        ranks.retain(|rank| rank.strong_count() > 0);
        ranks.push(Arc::downgrade(membership));
    }
    // A thread that is panicking cannot replace the hook; the next world does.
    if thread::panicking() {
        return;
    }
    INSTALLED.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            note(info);
            previous(info);
        }));
    });
}

/// Message and line of this thread's last panic, as far as they were noted.
pub(crate) fn describe() -> String {
    let noted = LAST.try_with(|last| last.borrow().clone()).ok().flatten();
    noted.unwrap_or_else(|| format!("panicked in {}", this_thread()))
}

fn note(info: &PanicHookInfo<'_>) {
    let message = info.payload_as_str().unwrap_or("a non-string payload");
    let text = match info.location() {
        Some(location) => format!("panicked at {location} in {}: {message}", this_thread()),
        None => format!("panicked in {}: {message}", this_thread()),
    };
    if cfg!(panic = "abort") {
        // If another thread holds the lock, the process ends without a message to its peers rather than in a deadlock.
        let ranks = RANKS.try_lock().map(|ranks| ranks.clone()).unwrap_or_default();
        fail_all(ranks, &text);
    }
    // A panic while the thread ends, or within this very function, is not noted.
    let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| *last = Some(text)));
}

/// Fails `ranks` because of `text`, in a thread of its own, and waits until that is sent, at most [`FAREWELL`]: the
/// thread that panics may hold a lock that sending needs.
fn fail_all(ranks: Vec<Weak<Membership>>, text: &str) {
    let text = text.to_owned();
    let (done, is_done) = mpsc::channel::<()>();
    let failing = thread::Builder::new().name("burn-ddp panic".into()).spawn(move || {
        ranks.iter().filter_map(Weak::upgrade).for_each(|membership| membership.fail_self(text.clone()));
        drop(done);
    });
    if failing.is_ok() {
        let _ = is_done.recv_timeout(FAREWELL);
    }
}

fn this_thread() -> String {
    format!("thread {:?}", thread::current().name().unwrap_or("unnamed"))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::membership::{ControlMessage, Outbox};
    use crate::{Machines, PeerInfo, WorldOptions};

    /// An outbox that cannot send while the test holds its lock.
    struct Locked(Mutex<usize>);

    impl Outbox for Locked {
        fn send_all(&self, _: &ControlMessage) {
            *lock(&self.0) += 1;
        }
    }

    #[test]
    fn a_panic_under_a_lock_that_its_message_needs_does_not_hang() {
        let peers = (0..2).map(|rank| PeerInfo::here(rank, rank, 0)).collect();
        let membership = Membership::new(0, peers, Machines::new(&[(); 2]), WorldOptions::default());
        let outbox = Arc::new(Locked(Mutex::new(0)));
        membership.set_outbox(Arc::downgrade(&(outbox.clone() as Arc<dyn Outbox>)));
        let held = lock(&outbox.0);
        fail_all(vec![Arc::downgrade(&membership)], "panicked here");
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(60);
        while *lock(&outbox.0) == 0 {
            assert!(Instant::now() < deadline, "nothing was sent after the lock was free");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(membership.check().unwrap_err().to_string().contains("panicked here"));
    }
}
