//! Queue of a group's `_async` calls. One thread, which the first call starts, runs them in order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::{io, thread};

use crate::call::CallingThread;
use crate::poison_free_locks::{lock, wait};

/// A call to run. Once it has delivered its result, it calls [`done`](CallQueue::done).
pub(super) type Job = Box<dyn FnOnce(&CallQueue) + Send>;

/// The group and its thread own the queue. The queue does not own the group, so a dropped group is freed once it has no
/// calls left.
pub(super) struct CallQueue {
    /// The thread that runs the jobs; it may not have started yet.
    worker: CallingThread,
    /// True if jobs are waiting or under way. Written under the lock, read by every blocking call.
    busy: AtomicBool,
    jobs: Mutex<Jobs>,
    /// Notified when a job is added, when one is done, and when the queue is closed.
    changed: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// Number of jobs ever added, and number of jobs done.
    added: u64,
    done: u64,
    /// The thread that added the last job.
    submitter: Option<CallingThread>,
    /// True while the thread exists; a panic may have ended an earlier one.
    running: bool,
    /// True once no more jobs will be added.
    closed: bool,
}

impl Default for CallQueue {
    fn default() -> CallQueue {
        let (jobs, changed) = (Mutex::default(), Condvar::new());
        CallQueue { worker: CallingThread::new(), busy: AtomicBool::new(false), jobs, changed }
    }
}

impl CallQueue {
    /// The thread that runs the jobs.
    pub(super) fn worker(&self) -> &CallingThread {
        &self.worker
    }

    /// Adds `job` at the end of the queue.
    ///
    /// # Errors
    /// If the thread cannot be started; the job is then dropped.
    pub(super) fn add(self: &Arc<CallQueue>, name: impl FnOnce() -> String, job: Job) -> io::Result<()> {
        let mut jobs = lock(&self.jobs);
        if !jobs.running {
            let queue = self.clone();
            thread::Builder::new().name(name()).spawn(move || queue.work())?;
            jobs.running = true;
        }
        jobs.submitter = Some(CallingThread::current());
        jobs.waiting.push_back(job);
        jobs.added += 1;
        self.busy.store(true, Ordering::Release);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until all jobs that were added before are done. Each job is a call with a deadline of its own.
    #[inline]
    pub(super) fn settle(&self) {
        if self.busy.load(Ordering::Acquire) {
            self.wait();
        }
    }

    #[cold]
    fn wait(&self) {
        let mut jobs = lock(&self.jobs);
        let before = jobs.added;
        self.worker.awaited(|| {
            while jobs.done < before {
                jobs = wait(&self.changed, jobs);
            }
        });
    }

    /// Ends the queue: jobs that were added still run, then the thread ends. Does not block.
    pub(super) fn close(&self) {
        lock(&self.jobs).closed = true;
        self.changed.notify_all();
    }

    /// Notes that the job under way is done.
    pub(super) fn done(&self) {
        let mut jobs = lock(&self.jobs);
        jobs.done += 1;
        self.busy.store(jobs.done < jobs.added, Ordering::Release);
        self.changed.notify_all();
    }

    fn work(self: Arc<CallQueue>) {
        self.worker.begin();
        let queue = Running(self);
        while let Some(job) = queue.0.next() {
            job(&queue.0);
        }
    }

    /// The next job; `None` when there will be none.
    fn next(&self) -> Option<Job> {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                return Some(job);
            }
            if jobs.closed {
                return None;
            }
            // While idle, this thread counts as waiting for the thread that submits: see `CallingThread`.
            jobs = match jobs.submitter.clone() {
                Some(submitter) => submitter.awaited(|| wait(&self.changed, jobs)),
                None => wait(&self.changed, jobs),
            };
        }
    }
}

/// Held by the thread of a queue. If a panic ends the thread, the drop discards the jobs that are left, and each
/// waiting [`Pending`](super::Pending) gets an error.
struct Running(Arc<CallQueue>);

impl Drop for Running {
    fn drop(&mut self) {
        let queue = &*self.0;
        let dropped = {
            let mut jobs = lock(&queue.jobs);
            jobs.running = false;
            jobs.done = jobs.added;
            queue.busy.store(false, Ordering::Release);
            std::mem::take(&mut jobs.waiting)
        };
        queue.changed.notify_all();
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn add(queue: &Arc<CallQueue>, job: impl FnOnce() + Send + 'static) {
        let job = move |queue: &CallQueue| {
            job();
            queue.done();
        };
        queue.add(|| "test".to_string(), Box::new(job)).unwrap();
    }

    #[test]
    fn jobs_are_done_in_order_also_after_the_end() {
        let queue = Arc::new(CallQueue::default());
        let (tell, told) = mpsc::channel();
        for nth in 0..100 {
            let tell = tell.clone();
            add(&queue, move || tell.send(nth).unwrap());
        }
        queue.close();
        drop(tell);
        assert_eq!(told.iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn settling_waits_for_what_was_added() {
        let queue = Arc::new(CallQueue::default());
        queue.settle();
        let (tell, told) = mpsc::channel();
        add(&queue, move || told.recv_timeout(PATIENCE).unwrap());
        thread::scope(|scope| {
            let settled = scope.spawn(|| queue.settle());
            assert!(!settled.is_finished());
            tell.send(()).unwrap();
        });
        assert!(!queue.busy.load(Ordering::Relaxed));
    }

    #[test]
    fn a_panic_leaves_nobody_waiting() {
        let queue = Arc::new(CallQueue::default());
        let (go, gone) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel::<()>();
        add(&queue, move || panic!("meant to panic, {:?}", gone.recv_timeout(PATIENCE)));
        add(&queue, move || tell.send(()).unwrap());
        go.send(()).unwrap();
        queue.settle();
        assert!(told.recv_timeout(PATIENCE).is_err(), "the job was dropped");
        // The next job starts a new thread.
        let (tell, told) = mpsc::channel();
        add(&queue, move || tell.send(()).unwrap());
        assert!(told.recv_timeout(PATIENCE).is_ok());
    }
}
