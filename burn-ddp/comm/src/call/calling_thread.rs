//! Threads that make calls, and which thread of a rank waits for which.
//!
//! To find deadlocks, a rank must know if a peer can still make the call that it waits for. A peer whose thread is
//! blocked in a call of another group cannot; a peer whose thread computes can. So heartbeats say which threads are
//! blocked. A thread that hands its calls to a worker and waits for the worker is as blocked as the worker is.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::poison_free_locks::lock;

/// A thread that makes calls, or hands them to a worker.
///
/// While a worker and the thread that hands calls to it wait for each other, the waiting one names the other. So
/// deadlocks are found also where workers make the calls:
///
/// ```
/// use burn_ddp_comm::CallingThread;
/// use std::sync::mpsc::channel;
///
/// let (jobs, todo) = channel::<(u32, CallingThread)>();
/// let (finished, done) = channel();
/// let worker = CallingThread::new();
/// let (this, mut submitter) = (worker.clone(), CallingThread::current());
/// let thread = std::thread::spawn(move || {
///     this.begin();
///     // Idle, the worker waits for the thread that submitted last.
///     while let Ok((job, by)) = submitter.awaited(|| todo.recv()) {
///         submitter = by;
///         finished.send(2 * job).unwrap(); // a collective, in earnest
///     }
/// });
/// jobs.send((21, CallingThread::current())).unwrap();
/// assert_eq!(worker.awaited(|| done.recv()), Ok(42));
/// # drop(jobs);
/// # thread.join().unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct CallingThread {
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// Unique in the process; never 0.
    id: u64,
    /// The thread for which this one waits. Written by this thread, read by the thread that makes heartbeats.
    awaits: Mutex<Option<CallingThread>>,
    /// Written by the thread itself when it begins and ends.
    ended: AtomicBool,
}

/// Longest chain of threads that wait for each other: worker, submitter, and room for more.
const LONGEST_CHAIN: usize = 8;

/// Thread-local handle. Dropping it, at the thread's end, marks the thread as ended.
struct This(CallingThread);

impl Drop for This {
    fn drop(&mut self) {
        self.0.state.ended.store(true, Ordering::Release);
    }
}

thread_local! {
    /// Id of this thread, 0 before its first call: read by every call.
    static ID: Cell<u64> = const { Cell::new(0) };
    static THIS: RefCell<Option<This>> = const { RefCell::new(None) };
}

impl CallingThread {
    /// A thread that is about to start and will call [`begin`](Self::begin).
    #[expect(clippy::new_without_default, reason = "each is another thread")]
    pub fn new() -> CallingThread {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        CallingThread { state: Arc::new(State { id, awaits: Mutex::new(None), ended: AtomicBool::new(false) }) }
    }

    /// This thread.
    pub fn current() -> CallingThread {
        let known = THIS.try_with(|this| this.borrow().as_ref().map(|this| this.0.clone()));
        // In a thread that is ending, the thread-local is gone: each call gets a new identity.
        known.ok().flatten().unwrap_or_else(|| {
            let new = CallingThread::new();
            new.begin();
            new
        })
    }

    /// Makes the current thread the one that this value stands for. Called by the thread itself, before its first call.
    pub fn begin(&self) {
        self.state.ended.store(false, Ordering::Release);
        let earlier = THIS.try_with(|this| this.replace(Some(This(self.clone()))));
        if earlier.is_ok() {
            ID.with(|id| id.set(self.state.id));
        }
    }

    /// Runs `wait`, which blocks the current thread until the thread `self` has done something for it.
    pub fn awaited<R>(&self, wait: impl FnOnce() -> R) -> R {
        struct Clear(CallingThread);
        impl Drop for Clear {
            fn drop(&mut self) {
                *lock(&self.0.state.awaits) = None;
            }
        }
        let this = CallingThread::current();
        *lock(&this.state.awaits) = Some(self.clone());
        let _clear = Clear(this);
        wait()
    }

    pub(crate) fn current_id() -> u64 {
        match ID.try_with(Cell::get) {
            Ok(id) if id != 0 => id,
            _ => CallingThread::current().id(),
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.state.id
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.state.ended.load(Ordering::Acquire)
    }

    /// This thread, the one for which it waits, and so on.
    pub(crate) fn chain(&self) -> impl Iterator<Item = CallingThread> {
        let next = |thread: &CallingThread| lock(&thread.state.awaits).clone();
        std::iter::successors(Some(self.clone()), next).take(LONGEST_CHAIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(thread: &CallingThread) -> Vec<u64> {
        thread.chain().map(|thread| thread.id()).collect()
    }

    #[test]
    fn a_thread_is_one_until_it_ends() {
        let here = CallingThread::current();
        assert_eq!((here.id(), CallingThread::current_id()), (CallingThread::current().id(), here.id()));
        let there = std::thread::spawn(|| {
            let this = CallingThread::current();
            assert!(!this.has_ended());
            this
        });
        let there = there.join().unwrap();
        assert!(there.has_ended() && there.id() != here.id() && !here.has_ended());
    }

    #[test]
    fn waits_are_followed_and_end() {
        let (a, b) = (CallingThread::current(), CallingThread::new());
        b.awaited(|| assert_eq!(ids(&a), [a.id(), b.id()]));
        assert_eq!(ids(&a), [a.id()]);
        let panicked = std::panic::catch_unwind(|| b.awaited(|| std::panic::resume_unwind(Box::new(()))));
        assert!(panicked.is_err());
        assert_eq!(ids(&a), [a.id()], "a wait that panicked is over");
        *lock(&b.state.awaits) = Some(a.clone());
        b.awaited(|| assert_eq!(ids(&a).len(), LONGEST_CHAIN, "a circle ends"));
        *lock(&b.state.awaits) = None;
    }
}
