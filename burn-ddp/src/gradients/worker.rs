//! Does the collectives of one wrapped model in the order in which they are handed over: on a thread beside backward, or, where no core
//! is free for one, all together when backward is done.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use burn_ddp_comm::engine::OnDevice;
use burn_ddp_comm::{DType, ProcessGroup, ReduceOp, SharedBuffer, SharedView};

use super::accumulation::Buffer;
use super::store::DeviceLoan;

#[derive(Debug)]
pub(crate) enum Job {
    /// Buffers of these lengths in bytes, to reduce in.
    Allocate(Vec<usize>),
    Reduce {
        bucket: usize,
        dtype: DType,
        buffer: SharedBuffer,
        /// The gradients, if they are not in the buffer.
        lent: Option<Box<dyn DeviceLoan>>,
        /// Items this rank contributes to the mean; `None` sums.
        weight: Option<f64>,
        /// Names step and bucket; compared between the ranks.
        tag: u64,
    },
    /// Running statistics.
    Buffers { dtype: DType, buffer: Buffer, source: StatisticsSource },
    /// Everybody gets everybody's.
    Digests(Vec<i64>),
    /// Rank 0's value becomes everybody's.
    AgreeOrder(Vec<u32>),
}

/// StatisticsSource running statistics become everybody's.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StatisticsSource {
    /// The mean, in which this rank's have this weight.
    All(f64),
    /// Those of the first rank that trains, which this one does or not.
    First { trains: bool },
}

#[derive(Debug)]
pub(crate) enum Done {
    Allocated(burn_ddp_comm::Result<Vec<SharedBuffer>>),
    Reduced {
        bucket: usize,
        buffer: SharedBuffer,
        lent: Option<Box<dyn DeviceLoan>>,
        result: Result<SharedView, Fault>,
    },
    Buffers {
        dtype: DType,
        buffer: Buffer,
        result: burn_ddp_comm::Result<()>,
    },
    Digests(burn_ddp_comm::Result<Vec<Vec<i64>>>),
    Order(burn_ddp_comm::Result<Vec<u32>>),
}

/// Why a reduction failed.
#[derive(Debug)]
pub(crate) enum Fault {
    Comm(burn_ddp_comm::Error),
    /// This rank's device did not say where its gradients are.
    Device(String),
}

impl From<burn_ddp_comm::Error> for Fault {
    fn from(error: burn_ddp_comm::Error) -> Self {
        Fault::Comm(error)
    }
}

/// A job that was done, and when.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) done: Done,
    pub(crate) time: Range<Instant>,
}

/// Who does the collectives.
#[derive(Debug)]
pub(crate) enum Worker {
    /// A thread, which ends after the collective it is in when this is dropped.
    Threaded { jobs: Sender<Job>, done: Receiver<Finished>, patience: Duration },
    /// Whoever [flushes](Worker::flush).
    Inline { group: ProcessGroup, todo: VecDeque<Job>, done: VecDeque<Finished> },
    /// Nobody any more.
    Retired,
}

impl Worker {
    /// A thread that works on `group`.
    pub(crate) fn threaded(group: ProcessGroup, timeout: Duration) -> std::io::Result<Self> {
        let (jobs, todo) = channel();
        let (finished, done) = channel();
        std::thread::Builder::new().name(format!("ddp-reduce-{}", group.rank())).spawn(move || {
            // Once this rank's device failed it is out of step: nothing more may be called until the world has heard of it.
            let mut failed: Option<String> = None;
            while let Ok(job) = todo.recv() {
                let done = match &failed {
                    None => timed(&group, job, timeout),
                    Some(why) => Finished { done: refuse(job, why), time: Instant::now()..Instant::now() },
                };
                if let Done::Reduced { result: Err(Fault::Device(why)), .. } = &done.done {
                    failed.get_or_insert_with(|| why.clone());
                }
                if finished.send(done).is_err() {
                    return;
                }
            }
        })?;
        // The group keeps its own deadline; the slack only guards against a lost thread.
        Ok(Worker::Threaded { jobs, done, patience: timeout.saturating_add(Duration::from_secs(30)) })
    }

    /// The thread that calls works on `group`.
    pub(crate) fn inline(group: ProcessGroup) -> Self {
        Worker::Inline { group, todo: VecDeque::new(), done: VecDeque::new() }
    }

    /// Whether jobs are done while the caller goes on.
    pub(crate) fn is_threaded(&self) -> bool {
        matches!(self, Worker::Threaded { .. })
    }

    /// Hands over one job. Never blocks.
    pub(crate) fn submit(&mut self, job: Job) -> Result<(), String> {
        let sent = match self {
            Worker::Threaded { jobs, .. } => jobs.send(job).is_ok(),
            Worker::Inline { todo, .. } => {
                todo.push_back(job);
                true
            }
            Worker::Retired => false,
        };
        if sent { Ok(()) } else { Err("the communication thread has ended: the wrapped model is gone".to_string()) }
    }

    /// Does what was handed over, if nobody else does.
    pub(crate) fn flush(&mut self) {
        if let Worker::Inline { group, todo, done } = self {
            done.extend(todo.drain(..).map(|job| timed(group, job, Duration::ZERO)));
        }
    }

    /// The buffers, by bucket, of what was handed over and not begun.
    pub(crate) fn recall(&mut self) -> Vec<(usize, SharedBuffer)> {
        let Worker::Inline { todo, .. } = self else { return Vec::new() };
        let reductions = todo.drain(..).filter_map(|job| match job {
            Job::Reduce { bucket, buffer, .. } => Some((bucket, buffer)),
            _ => None,
        });
        reductions.collect()
    }

    /// Ends the thread after what it was handed.
    pub(crate) fn retire(&mut self) {
        *self = Worker::Retired;
    }

    /// The next finished job, in the order of submission.
    pub(crate) fn next(&mut self) -> Result<Finished, String> {
        self.flush();
        match self {
            Worker::Threaded { done, patience, .. } => done.recv_timeout(*patience).map_err(|e| match e {
                RecvTimeoutError::Timeout => format!("the communication thread has not answered for {patience:?}"),
                RecvTimeoutError::Disconnected => "the communication thread has ended".to_string(),
            }),
            Worker::Inline { done, .. } => done.pop_front().ok_or_else(|| "there is nothing left to do".to_string()),
            Worker::Retired => Err("the wrapped model is gone".to_string()),
        }
    }
}

fn timed(group: &ProcessGroup, job: Job, patience: Duration) -> Finished {
    let start = Instant::now();
    let done = run(group, job, patience);
    Finished { done, time: start..Instant::now() }
}

/// `job`, not done because of `why`.
fn refuse(job: Job, why: &str) -> Done {
    let error = || burn_ddp_comm::Error::Internal { message: format!("an earlier reduction failed: {why}") };
    match job {
        Job::Allocate(_) => Done::Allocated(Err(error())),
        Job::Reduce { bucket, buffer, lent, .. } => {
            Done::Reduced { bucket, buffer, lent, result: Err(Fault::Device(why.to_owned())) }
        }
        Job::Buffers { dtype, buffer, .. } => Done::Buffers { dtype, buffer, result: Err(error()) },
        Job::Digests(_) => Done::Digests(Err(error())),
        Job::AgreeOrder(_) => Done::Order(Err(error())),
    }
}

/// With `patience` for a device that has to say where gradients are.
fn run(group: &ProcessGroup, job: Job, patience: Duration) -> Done {
    match job {
        Job::Allocate(lens) => Done::Allocated(group.shared_buffers(&lens)),
        Job::Reduce { bucket, dtype, mut buffer, mut lent, weight, tag } => {
            let result = match weight {
                Some(w) => group.all_reduce_weighted_shared(dtype, &mut buffer, w, tag),
                None => group.all_reduce_shared(dtype, &mut buffer, ReduceOp::Sum, tag),
            };
            let result = result.map_err(Fault::from).and_then(|view| {
                lent.as_deref_mut().map_or(Ok(()), |lent| reduce_lent(group, dtype, lent, weight, tag, patience))?;
                Ok(view)
            });
            Done::Reduced { bucket, buffer, lent, result }
        }
        Job::Buffers { dtype, mut buffer, source } => {
            let result = match source {
                StatisticsSource::All(weight) => group.all_reduce_weighted_bytes(dtype, buffer.bytes_mut(), weight, 0),
                StatisticsSource::First { trains } => broadcast_first(group, trains, dtype, &mut buffer),
            };
            Done::Buffers { dtype, buffer, result }
        }
        Job::Digests(digests) => Done::Digests(gather(group, &digests)),
        Job::AgreeOrder(order) => Done::Order(group.broadcast_object((group.rank() == 0).then_some(order), 0)),
    }
}

/// Returns when the reduction is enqueued on the device.
fn reduce_lent(
    group: &ProcessGroup,
    dtype: DType,
    lent: &mut dyn DeviceLoan,
    weight: Option<f64>,
    tag: u64,
    patience: Duration,
) -> Result<(), Fault> {
    let len_elems = lent.len_elems();
    let place = lent.place(patience).map_err(Fault::Device)?;
    let elements = OnDevice { dtype, len_elems, place };
    match weight {
        Some(w) => group.all_reduce_weighted_on_device(elements, w, tag)?,
        None => group.all_reduce_on_device(elements, ReduceOp::Sum, tag)?,
    }
    Ok(())
}

/// What the first rank that trains has; nothing changes if none does.
fn broadcast_first(group: &ProcessGroup, trains: bool, dtype: DType, buffer: &mut Buffer) -> burn_ddp_comm::Result<()> {
    let training = group.all_gather(&[u8::from(trains)])?;
    match training.iter().position(|trains| *trains == 1) {
        Some(first) => group.broadcast_bytes(dtype, buffer.bytes_mut(), first),
        None => Ok(()),
    }
}

/// One row per rank.
fn gather(group: &ProcessGroup, mine: &[i64]) -> burn_ddp_comm::Result<Vec<Vec<i64>>> {
    let all = group.all_gather(mine)?;
    Ok(all.chunks(mine.len().max(1)).map(<[i64]>::to_vec).collect())
}
