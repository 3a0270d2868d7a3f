//! The calls of a group that were started and not waited for: done one after the other, in the order in which they were
//! started, by one thread that is there from the first one on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::{io, thread};

use crate::sync::{lock, wait};

/// A call to do. When it has given its result away it says that it is [done](Lane::done).
pub(super) type Job = Box<dyn FnOnce(&Lane) + Send>;

/// Owned by the group, by its thread, and by nothing that a call needs: a group without calls goes when it is dropped.
#[derive(Default)]
pub(super) struct Lane {
    /// Whether jobs are waiting or under way. Written under the lock, read by every blocking call.
    busy: AtomicBool,
    queue: Mutex<Queue>,
    /// Notified when a job is added, when one is done, and when the lane is closed.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// How many jobs were ever added, and how many of them are done.
    added: u64,
    done: u64,
    /// Whether there is a thread, which may have ended by a panic.
    running: bool,
    /// No more jobs come.
    closed: bool,
}

impl Lane {
    /// Has `job` done after those before it.
    ///
    /// # Errors
    /// If there can be no thread; then the job is dropped.
    pub(super) fn add(self: &Arc<Lane>, name: impl FnOnce() -> String, job: Job) -> io::Result<()> {
        let mut queue = lock(&self.queue);
        if !queue.running {
            let lane = self.clone();
            thread::Builder::new().name(name()).spawn(move || lane.work())?;
            queue.running = true;
        }
        queue.jobs.push_back(job);
        queue.added += 1;
        self.busy.store(true, Ordering::Release);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until all jobs that were added before are done. Each of them has its deadline.
    #[inline]
    pub(super) fn settle(&self) {
        if self.busy.load(Ordering::Acquire) {
            self.wait();
        }
    }

    #[cold]
    fn wait(&self) {
        let mut queue = lock(&self.queue);
        let before = queue.added;
        while queue.done < before {
            queue = wait(&self.changed, queue);
        }
    }

    /// No more jobs come; those that are there are done. Does not block.
    pub(super) fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    /// The job under way is done.
    pub(super) fn done(&self) {
        let mut queue = lock(&self.queue);
        queue.done += 1;
        self.busy.store(queue.done < queue.added, Ordering::Release);
        self.changed.notify_all();
    }

    fn work(self: Arc<Lane>) {
        let lane = Running(self);
        while let Some(job) = lane.0.next() {
            job(&lane.0);
        }
    }

    /// The next job; `None` when there will be none.
    fn next(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            queue = wait(&self.changed, queue);
        }
    }
}

/// The thread of a lane. If it ends by a panic nobody waits for it in vain: the jobs that are left are dropped, which breaks
/// their promises.
struct Running(Arc<Lane>);

impl Drop for Running {
    fn drop(&mut self) {
        let lane = &*self.0;
        let dropped = {
            let mut queue = lock(&lane.queue);
            queue.running = false;
            queue.done = queue.added;
            lane.busy.store(false, Ordering::Release);
            std::mem::take(&mut queue.jobs)
        };
        lane.changed.notify_all();
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn add(lane: &Arc<Lane>, job: impl FnOnce() + Send + 'static) {
        let job = move |lane: &Lane| {
            job();
            lane.done();
        };
        lane.add(|| "test".to_string(), Box::new(job)).unwrap();
    }

    #[test]
    fn jobs_are_done_in_order_also_after_the_end() {
        let lane = Arc::new(Lane::default());
        let (tell, told) = mpsc::channel();
        for nth in 0..100 {
            let tell = tell.clone();
            add(&lane, move || tell.send(nth).unwrap());
        }
        lane.close();
        drop(tell);
        assert_eq!(told.iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn settling_waits_for_what_was_added() {
        let lane = Arc::new(Lane::default());
        lane.settle();
        let (tell, told) = mpsc::channel();
        add(&lane, move || told.recv_timeout(PATIENCE).unwrap());
        thread::scope(|scope| {
            let settled = scope.spawn(|| lane.settle());
            assert!(!settled.is_finished());
            tell.send(()).unwrap();
        });
        assert!(!lane.busy.load(Ordering::Relaxed));
    }

    #[test]
    fn a_panic_leaves_nobody_waiting() {
        let lane = Arc::new(Lane::default());
        let (go, gone) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel::<()>();
        add(&lane, move || panic!("meant to panic, {:?}", gone.recv_timeout(PATIENCE)));
        add(&lane, move || tell.send(()).unwrap());
        go.send(()).unwrap();
        lane.settle();
        assert!(told.recv_timeout(PATIENCE).is_err(), "the job was dropped");
        // The next one has a thread again.
        let (tell, told) = mpsc::channel();
        add(&lane, move || tell.send(()).unwrap());
        assert!(told.recv_timeout(PATIENCE).is_ok());
    }
}
