//! Loading batches: on demand on the caller's thread, or ahead of demand on worker threads.
//!
//! A [`Pool`] belongs to a loader and outlives its epochs, since backends keep a stream and its memory per thread. A
//! [`Pass`] loads the batches of one [`BatchList`]. Batch k is loaded by worker k mod n into that worker's bounded
//! channel and taken from there, which keeps the order and bounds memory. A pass borrows a team of workers from the
//! pool and gives it back when dropped; two passes at once use two teams, so that an idle pass cannot block another.
//! Workers whose pool was dropped find their job channel closed and end; no thread joins them.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::Device;

/// Largest number of finished batches in a worker's channel.
const AHEAD_PER_WORKER: usize = 2;

/// Workers of a loader by default: one, which loads ahead of the training.
pub(crate) const DEFAULT_WORKERS: usize = 1;

/// Interval at which a waiting pass checks that the job has not ended.
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// A dataset and a batcher, without the type of items.
pub(super) trait Load<O>: Send + Sync {
    fn load(&self, indices: Vec<usize>, device: &Device) -> Result<O, DatasetError>;
}

pub(super) struct Source<I, O> {
    pub(super) dataset: Arc<dyn Dataset<I>>,
    pub(super) batcher: Arc<dyn Batcher<I, O>>,
}

impl<I, O> Load<O> for Source<I, O> {
    fn load(&self, indices: Vec<usize>, device: &Device) -> Result<O, DatasetError> {
        Ok(self.batcher.batch(self.dataset.get_many(indices)?, device))
    }
}

/// The batches of a pass: their number, and the items of each.
#[derive(Clone)]
pub(super) struct BatchList {
    pub(super) batches: usize,
    pub(super) indices: Arc<dyn Fn(usize) -> Vec<usize> + Send + Sync>,
}

/// Why a batch was not loaded.
pub(super) enum Failure<E> {
    /// The dataset returned an error. Later batches may be fine.
    Dataset(DatasetError),
    /// Dataset or batcher panicked on a worker. Later batches may be fine.
    Panicked { worker: usize, message: String },
    /// The worker did not deliver in time. The pass is over.
    Stalled { worker: usize },
    /// The job ended while this rank waited. The pass is over.
    JobEnded(E),
}

/// Starts passes over a source, and keeps the worker threads between them.
pub(super) struct Pool<O> {
    source: Arc<dyn Load<O>>,
    device: Device,
    num_workers: usize,
    /// Teams that no pass uses.
    idle: Mutex<Vec<Team<O>>>,
}

/// One job channel per worker. Dropping them ends the workers.
type Team<O> = Vec<Sender<Job<O>>>;

/// A worker's part of a pass: batches `first`, `first + stride`, …
struct Job<O> {
    list: BatchList,
    first: usize,
    stride: usize,
    to: SyncSender<Loaded<O>>,
}

enum Loaded<O> {
    Batch(O),
    Error(DatasetError),
    Panic(String),
}

impl<O: Send + 'static> Pool<O> {
    pub(super) fn new(source: Arc<dyn Load<O>>, device: Device, num_workers: usize) -> Arc<Self> {
        Arc::new(Pool { source, device, num_workers, idle: Mutex::new(Vec::new()) })
    }

    /// A pool with as many workers over the same source, whose batches are on `device`.
    pub(super) fn on_device(&self, device: &Device) -> Arc<Self> {
        Self::new(self.source.clone(), device.clone(), self.num_workers)
    }

    /// Starts a pass over `list`. The error has the number of the worker that could not be started.
    pub(super) fn start(self: &Arc<Self>, list: BatchList) -> Result<Pass<O>, (usize, std::io::Error)> {
        let workers = match self.num_workers {
            0 => None,
            _ => Some(self.assign(&list)?),
        };
        Ok(Pass { pool: self.clone(), list, next: 0, workers })
    }

    /// Gives `list` to an idle team of workers, or to a new one.
    fn assign(&self, list: &BatchList) -> Result<Workers<O>, (usize, std::io::Error)> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let team = match idle {
            Some(team) => team,
            None => (0..self.num_workers).map(|worker| self.spawn(worker)).collect::<Result<_, _>>()?,
        };
        let give = |(worker, jobs): (usize, &Sender<Job<O>>)| {
            let (to, from) = mpsc::sync_channel(AHEAD_PER_WORKER);
            let job = Job { list: list.clone(), first: worker, stride: team.len(), to };
            // If the worker has ended, `from` has no sender; the pass reports it at that worker's batch.
            let _ = jobs.send(job);
            from
        };
        let from = team.iter().enumerate().map(give).collect();
        Ok(Workers { team, from, usable: true })
    }

    fn spawn(&self, worker: usize) -> Result<Sender<Job<O>>, (usize, std::io::Error)> {
        let (jobs, receiver) = mpsc::channel::<Job<O>>();
        let (source, device) = (self.source.clone(), self.device.clone());
        let work = move || {
            while let Ok(job) = receiver.recv() {
                do_job(&*source, &device, job);
            }
        };
        let named = thread::Builder::new().name(format!("data-worker-{worker}"));
        named.spawn(work).map(|_| jobs).map_err(|error| (worker, error))
    }
}

fn do_job<O>(source: &dyn Load<O>, device: &Device, job: Job<O>) {
    for batch in (job.first..job.list.batches).step_by(job.stride) {
        // Unwind safe: threads share dataset and batcher by reference only, and a panic poisons locks in them.
        let loaded = match catch_unwind(AssertUnwindSafe(|| source.load((job.list.indices)(batch), device))) {
            Ok(Ok(batch)) => Loaded::Batch(batch),
            Ok(Err(error)) => Loaded::Error(error),
            Err(panic) => Loaded::Panic(message_of(&*panic)),
        };
        if job.to.send(loaded).is_err() {
            return; // The pass was dropped.
        }
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a non-string payload".to_string())
}

/// Loads the batches of a list, in order.
pub(super) struct Pass<O> {
    pool: Arc<Pool<O>>,
    list: BatchList,
    /// The batch that is taken next.
    next: usize,
    /// `None` if the caller's thread loads the batches.
    workers: Option<Workers<O>>,
}

struct Workers<O> {
    team: Team<O>,
    /// Finished batches of each worker.
    from: Vec<Receiver<Loaded<O>>>,
    /// False if a worker hangs or has ended: then the team gets no other pass.
    usable: bool,
}

impl<O> Pass<O> {
    /// The next batch, or `None` after the last. Waits for a worker up to `timeout`, and while `check` returns `Ok`.
    pub(super) fn next<E>(
        &mut self,
        timeout: Duration,
        check: impl Fn() -> Result<(), E>,
    ) -> Option<Result<O, Failure<E>>> {
        if self.next >= self.list.batches {
            return None;
        }
        let batch = self.next;
        self.next += 1;
        let Some(workers) = &mut self.workers else {
            let indices = (self.list.indices)(batch);
            return Some(self.pool.source.load(indices, &self.pool.device).map_err(Failure::Dataset));
        };
        let taken = workers.take(batch, timeout, check);
        if matches!(taken, Err(Failure::Stalled { .. } | Failure::JobEnded(_))) {
            // A batch that arrives after its deadline must not be taken for a later batch.
            self.next = self.list.batches;
        }
        Some(taken)
    }
}

impl<O> Workers<O> {
    fn take<E>(&mut self, batch: usize, timeout: Duration, check: impl Fn() -> Result<(), E>) -> Result<O, Failure<E>> {
        let worker = batch % self.from.len();
        let begin = Instant::now();
        loop {
            let left = timeout.saturating_sub(begin.elapsed());
            match self.from[worker].recv_timeout(left.min(CHECK_EVERY)) {
                Ok(Loaded::Batch(batch)) => return Ok(batch),
                Ok(Loaded::Error(error)) => return Err(Failure::Dataset(error)),
                Ok(Loaded::Panic(message)) => return Err(Failure::Panicked { worker, message }),
                Err(RecvTimeoutError::Disconnected) => {
                    self.usable = false;
                    return Err(Failure::Panicked { worker, message: "its thread ended".to_string() });
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    self.usable = false;
                    return Err(Failure::Stalled { worker });
                }
                Err(RecvTimeoutError::Timeout) => check().map_err(Failure::JobEnded)?,
            }
        }
    }
}

impl<O> Drop for Pass<O> {
    fn drop(&mut self) {
        let Some(Workers { team, from, usable }) = self.workers.take() else { return };
        // Workers that wait to send a batch get an error, and are ready for the next job.
        drop(from);
        if usable {
            self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).push(team);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const LONG: Duration = Duration::from_secs(60);

    struct Loader<F>(F);

    impl<F: Fn(usize) -> Result<usize, DatasetError> + Send + Sync> Load<usize> for Loader<F> {
        fn load(&self, indices: Vec<usize>, _: &Device) -> Result<usize, DatasetError> {
            (self.0)(indices[0])
        }
    }

    fn pool(
        num_workers: usize,
        load: impl Fn(usize) -> Result<usize, DatasetError> + Send + Sync + 'static,
    ) -> Arc<Pool<usize>> {
        Pool::new(Arc::new(Loader(load)), Device::default(), num_workers)
    }

    fn list(batches: usize) -> BatchList {
        BatchList { batches, indices: Arc::new(|batch| vec![batch]) }
    }

    fn next(pass: &mut Pass<usize>) -> Option<Result<usize, Failure<Infallible>>> {
        pass.next(LONG, || Ok(()))
    }

    fn all(pass: &mut Pass<usize>) -> Vec<usize> {
        std::iter::from_fn(|| next(pass)).map(|batch| batch.unwrap_or_else(|_| panic!("a batch failed"))).collect()
    }

    #[test]
    fn order_is_kept_by_any_number_of_workers() {
        for num_workers in 0..5 {
            // Later batches are ready first.
            let pool = pool(num_workers, |batch| {
                thread::sleep(Duration::from_micros((batch as u64 * 7919) % 300));
                Ok(batch)
            });
            for _ in 0..3 {
                let mut pass = pool.start(list(50)).unwrap();
                assert_eq!(all(&mut pass), (0..50).collect::<Vec<_>>());
                assert!(next(&mut pass).is_none());
            }
            assert_eq!(pool.idle.lock().unwrap().len(), usize::from(num_workers > 0), "one team served all passes");
        }
    }

    #[test]
    fn workers_run_at_the_same_time_and_ahead_but_not_without_bound() {
        let (started, both) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(2)));
        let counted = started.clone();
        let pool = pool(2, move |batch| {
            counted.fetch_add(1, Ordering::SeqCst);
            if batch < 2 {
                both.wait(); // would never return if one thread loaded both
            }
            Ok(batch)
        });
        let mut pass = pool.start(list(1000)).unwrap();
        assert_eq!(next(&mut pass).unwrap().ok(), Some(0));
        // Taken: 1. Then each worker has at most its channel full and one in its hands.
        let most = 1 + 2 * (AHEAD_PER_WORKER + 1);
        let begin = Instant::now();
        while started.load(Ordering::SeqCst) < most && begin.elapsed() < LONG {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(20)); // time to go beyond, if it could
        assert_eq!(started.load(Ordering::SeqCst), most);
    }

    #[test]
    fn errors_and_panics_come_in_their_place_and_the_rest_follows() {
        let pool = pool(3, |batch| match batch {
            4 => Err(DatasetError::new(std::io::Error::other("disk on fire"))),
            5 => panic!("bad item {batch}"),
            batch => Ok(batch),
        });
        let mut pass = pool.start(list(9)).unwrap();
        let text = |batch| match batch {
            Ok(batch) => format!("{batch}"),
            Err(Failure::Dataset(error)) => format!("{error}"),
            Err(Failure::Panicked { worker, message }) => format!("worker {worker}: {message}"),
            Err(Failure::Stalled { .. } | Failure::JobEnded(_)) => unreachable!(),
        };
        let texts: Vec<String> = std::iter::from_fn(|| next(&mut pass)).map(text).collect();
        assert_eq!(texts, ["0", "1", "2", "3", "disk on fire", "worker 2: bad item 5", "6", "7", "8"]);
    }

    #[test]
    fn an_idle_pass_does_not_block_another() {
        let pool = pool(2, Ok);
        let mut first = pool.start(list(100)).unwrap();
        assert_eq!(next(&mut first).unwrap().ok(), Some(0));
        let mut second = pool.start(list(100)).unwrap();
        assert_eq!(all(&mut second).len(), 100);
        assert_eq!(next(&mut first).unwrap().ok(), Some(1));
        drop((first, second));
        assert_eq!(pool.idle.lock().unwrap().len(), 2);
    }

    #[test]
    fn what_a_dropped_pass_did_not_take_is_not_loaded() {
        let loads = Arc::new(AtomicUsize::new(0));
        let counted = loads.clone();
        let pool = pool(1, move |batch| {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(batch)
        });
        for _ in 0..3 {
            assert_eq!(next(&mut pool.start(list(100_000)).unwrap()).unwrap().ok(), Some(0));
        }
        // Each pass: one taken, the channel full, one in hand.
        assert!(loads.load(Ordering::SeqCst) <= 3 * (AHEAD_PER_WORKER + 2), "{loads:?}");
    }

    #[test]
    fn dropping_a_pass_and_the_pool_ends_the_workers() {
        let alive = Arc::new(());
        let held = alive.clone();
        let pool = pool(4, move |batch| {
            let _held = &held;
            Ok(batch)
        });
        let mut pass = pool.start(list(1000)).unwrap();
        assert!(next(&mut pass).is_some());
        drop(pass);
        drop(pool);
        // Workers own the source: once all have ended, so has its last clone.
        let begin = Instant::now();
        while Arc::strong_count(&alive) > 1 {
            assert!(begin.elapsed() < LONG, "workers are still there");
            thread::yield_now();
        }
    }

    #[test]
    fn a_worker_that_hangs_is_named_in_time_and_blocks_nothing() {
        let (release, hang) = mpsc::channel::<()>();
        let hang = Mutex::new(hang);
        let pool = pool(2, move |batch| {
            if batch == 1 {
                let _ = hang.lock().unwrap().recv_timeout(LONG);
            }
            Ok(batch)
        });
        let mut pass = pool.start(list(10)).unwrap();
        let mut next = || pass.next(Duration::from_secs(2), || Ok::<_, Infallible>(()));
        assert_eq!(next().unwrap().ok(), Some(0));
        assert!(matches!(next(), Some(Err(Failure::Stalled { worker: 1 }))));
        assert!(next().is_none());
        let begin = Instant::now();
        drop(pass);
        assert!(begin.elapsed() < LONG);
        assert!(pool.idle.lock().unwrap().is_empty(), "a team with a hanging worker is not used again");
        drop(release);
    }

    #[test]
    fn waiting_ends_when_the_job_does() {
        let (release, hang) = mpsc::channel::<()>();
        let hang = Mutex::new(hang);
        let pool = pool(1, move |batch| {
            let _ = hang.lock().unwrap().recv_timeout(LONG);
            Ok(batch)
        });
        let mut pass = pool.start(list(10)).unwrap();
        assert!(matches!(pass.next(LONG, || Err("rank 3 died")), Some(Err(Failure::JobEnded("rank 3 died")))));
        assert!(next(&mut pass).is_none());
        drop(release);
    }
}
