//! Message and line of a rank's panic, for its peers.
//!
//! Only the process's panic hook knows them. So the first world of a process puts a hook before the one that is there:
//! it notes them for its thread and calls the hook behind it. Where a panic ends the process (`panic = "abort"`) no
//! destructor runs, so the hook itself sends the cause to the peers of all ranks of the process.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Mutex, Once, Weak};

use super::Membership;
use crate::poison_free_locks::lock;

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
    // A thread that panics cannot exchange the hook; the next world will.
    if std::thread::panicking() {
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
    noted.unwrap_or_else(|| format!("panicked in {}", thread()))
}

fn note(info: &PanicHookInfo<'_>) {
    let message = info.payload_as_str().unwrap_or("a non-string payload");
    let text = match info.location() {
        Some(location) => format!("panicked at {location} in {}: {message}", thread()),
        None => format!("panicked in {}: {message}", thread()),
    };
    if cfg!(panic = "abort") {
        // Another thread may hold the lock; better an end without a word than a deadlock.
        let ranks = RANKS.try_lock().map(|ranks| ranks.clone()).unwrap_or_default();
        ranks.iter().filter_map(Weak::upgrade).for_each(|membership| membership.fail_self(text.clone()));
    }
    // A panic while the thread ends, or within this very function, is not noted.
    let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| *last = Some(text)));
}

fn thread() -> String {
    format!("thread {:?}", std::thread::current().name().unwrap_or("unnamed"))
}
