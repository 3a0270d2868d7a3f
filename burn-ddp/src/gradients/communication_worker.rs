//! Runs the collectives of one wrapped model in the order in which they are submitted: on a communication thread, or,
//! where no core is free for one, all together when backward is done.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use burn_ddp_comm::engine::OnDevice;
use burn_ddp_comm::{CallingThread, DType, LogicalRanks, OwnLeaves, ProcessGroup, ReduceOp, SharedBuffer, SharedView};

use super::aligned_bytes::AlignedBytes;
use super::device_loan::DeviceLoan;

/// A collective.
#[derive(Debug)]
pub(crate) enum Job {
    /// Makes buffers of these lengths in bytes, to reduce in.
    Allocate(Vec<usize>),
    /// Reduces a bucket.
    Reduce {
        bucket: usize,
        dtype: DType,
        buffer: SharedBuffer,
        /// The gradients, if they are on their device instead of in the buffer.
        loan: Option<Box<dyn DeviceLoan>>,
        share: Share,
        /// Names step and bucket; compared between the ranks.
        tag: u64,
    },
    /// Makes running statistics equal on all ranks.
    Statistics { dtype: DType, buffer: AlignedBytes, source: StatisticsSource },
    /// Gathers digests of parameters.
    Digests(Vec<i64>),
    /// Broadcasts rank 0's order of gradients.
    AgreeOrder(Vec<u32>),
}

/// What this rank adds to a reduction.
#[derive(Clone, Debug)]
pub(crate) enum Share {
    /// Its elements.
    Sum,
    /// Its elements times their items.
    Mean(f64),
    /// Sums of leaves with these weights by row; a sum over all leaves if there are none.
    Leaves { division: LogicalRanks, weights: Vec<f64> },
}

impl Share {
    fn reduce(
        &self,
        group: &ProcessGroup,
        dtype: DType,
        buffer: &mut SharedBuffer,
        tag: u64,
    ) -> burn_ddp_comm::Result<SharedView> {
        match self {
            Share::Sum => group.all_reduce_shared(dtype, buffer, ReduceOp::Sum, tag),
            Share::Mean(items) => group.all_reduce_weighted_shared(dtype, buffer, *items, tag),
            Share::Leaves { division, weights } => {
                group.all_reduce_leaves_shared(dtype, buffer, OwnLeaves { division: *division, weights }, tag)
            }
        }
    }
}

/// Source of the running statistics after the step.
#[derive(Clone, Debug)]
pub(crate) enum StatisticsSource {
    /// The mean over the ranks, in which this rank has this weight.
    All(f64),
    /// The mean over the leaves, in which this rank's rows have these weights.
    Leaves { division: LogicalRanks, weights: Vec<f64> },
    /// The first rank that trains.
    First { trains: bool },
}

/// Result of a [`Job`].
#[derive(Debug)]
pub(crate) enum Done {
    Allocated(burn_ddp_comm::Result<Vec<SharedBuffer>>),
    Reduced {
        bucket: usize,
        buffer: SharedBuffer,
        loan: Option<Box<dyn DeviceLoan>>,
        result: Result<SharedView, Fault>,
    },
    Statistics {
        dtype: DType,
        buffer: AlignedBytes,
        result: burn_ddp_comm::Result<()>,
    },
    Digests(burn_ddp_comm::Result<Vec<Vec<i64>>>),
    Order(burn_ddp_comm::Result<Vec<u32>>),
}

/// Failure of a reduction.
#[derive(Debug)]
pub(crate) enum Fault {
    Comm(burn_ddp_comm::Error),
    /// This rank's device did not answer, or answered with an error.
    Device(String),
}

impl From<burn_ddp_comm::Error> for Fault {
    fn from(error: burn_ddp_comm::Error) -> Self {
        Fault::Comm(error)
    }
}

/// A finished job, and when it ran.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) done: Done,
    pub(crate) time: Range<Instant>,
}

/// Executor of the collectives.
#[derive(Debug)]
pub(crate) enum Worker {
    /// A thread, which ends after the running collective when this value is dropped.
    Threaded {
        /// Jobs, each with the thread that submits it.
        jobs: Sender<(Job, CallingThread)>,
        done: Receiver<Finished>,
        thread: CallingThread,
        patience: Duration,
    },
    /// The thread that calls [`flush`](Worker::flush).
    Inline { group: ProcessGroup, todo: VecDeque<Job>, done: VecDeque<Finished> },
    /// The thread has ended.
    Retired,
}

impl Worker {
    /// A worker with a thread.
    pub(crate) fn threaded(group: ProcessGroup, timeout: Duration) -> std::io::Result<Self> {
        let (jobs, todo) = channel();
        let (finished, done) = channel();
        let (thread, mut submitter) = (CallingThread::new(), CallingThread::current());
        let this = thread.clone();
        std::thread::Builder::new().name(format!("ddp-reduce-{}", group.rank())).spawn(move || {
            // After a failure of its device this rank is out of step: it enters no further collective, and the failure
            // ends the world.
            let mut failed: Option<String> = None;
            this.begin();
            // While idle, this thread is known to wait for the submitting thread, so that a deadlock between ranks is
            // found also then.
            while let Ok((job, by)) = submitter.awaited(|| todo.recv()) {
                submitter = by;
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
        Ok(Worker::Threaded { jobs, done, thread, patience: timeout.saturating_add(Duration::from_secs(30)) })
    }

    /// A worker without a thread.
    pub(crate) fn inline(group: ProcessGroup) -> Self {
        Worker::Inline { group, todo: VecDeque::new(), done: VecDeque::new() }
    }

    /// True if jobs run while the caller goes on.
    pub(crate) fn is_threaded(&self) -> bool {
        matches!(self, Worker::Threaded { .. })
    }

    /// Submits a job. Never blocks.
    pub(crate) fn submit(&mut self, job: Job) -> Result<(), String> {
        let sent = match self {
            Worker::Threaded { jobs, .. } => jobs.send((job, CallingThread::current())).is_ok(),
            Worker::Inline { todo, .. } => {
                todo.push_back(job);
                true
            }
            Worker::Retired => false,
        };
        if sent { Ok(()) } else { Err("the communication thread has ended: the wrapped model is gone".to_string()) }
    }

    /// Runs submitted jobs on the calling thread; no-op with a thread.
    pub(crate) fn flush(&mut self) {
        if let Worker::Inline { group, todo, done } = self {
            done.extend(todo.drain(..).map(|job| timed(group, job, Duration::ZERO)));
        }
    }

    /// Takes back reductions that have not begun: buckets and their buffers.
    pub(crate) fn recall(&mut self) -> Vec<(usize, SharedBuffer)> {
        let Worker::Inline { todo, .. } = self else { return Vec::new() };
        let reductions = todo.drain(..).filter_map(|job| match job {
            Job::Reduce { bucket, buffer, .. } => Some((bucket, buffer)),
            _ => None,
        });
        reductions.collect()
    }

    /// Ends the thread after the jobs submitted so far.
    pub(crate) fn retire(&mut self) {
        *self = Worker::Retired;
    }

    /// The next finished job in the order of submission, if it has finished already.
    pub(crate) fn try_next(&mut self) -> Option<Finished> {
        match self {
            Worker::Threaded { done, .. } => done.try_recv().ok(),
            Worker::Inline { done, .. } => done.pop_front(),
            Worker::Retired => None,
        }
    }

    /// Error text for a result of another kind than the one that is due.
    pub(crate) fn out_of_order() -> String {
        "the communication thread answered out of order".to_owned()
    }

    /// The next finished job, in the order of submission.
    pub(crate) fn next(&mut self) -> Result<Finished, String> {
        self.flush();
        match self {
            Worker::Threaded { done, thread, patience, .. } => {
                thread.awaited(|| done.recv_timeout(*patience)).map_err(|e| match e {
                    RecvTimeoutError::Timeout => format!("the communication thread has not answered for {patience:?}"),
                    RecvTimeoutError::Disconnected => "the communication thread has ended".to_string(),
                })
            }
            Worker::Inline { done, .. } => done.pop_front().ok_or_else(|| "no collective is under way".to_string()),
            Worker::Retired => Err("the wrapped model is gone".to_string()),
        }
    }
}

fn timed(group: &ProcessGroup, job: Job, patience: Duration) -> Finished {
    let start = Instant::now();
    let done = run(group, job, patience);
    Finished { done, time: start..Instant::now() }
}

/// The result of a `job` that does not run because of `why`.
fn refuse(job: Job, why: &str) -> Done {
    let error = || burn_ddp_comm::Error::Internal { message: format!("an earlier reduction failed: {why}") };
    match job {
        Job::Allocate(_) => Done::Allocated(Err(error())),
        Job::Reduce { bucket, buffer, loan, .. } => {
            Done::Reduced { bucket, buffer, loan, result: Err(Fault::Device(why.to_owned())) }
        }
        Job::Statistics { dtype, buffer, .. } => Done::Statistics { dtype, buffer, result: Err(error()) },
        Job::Digests(_) => Done::Digests(Err(error())),
        Job::AgreeOrder(_) => Done::Order(Err(error())),
    }
}

/// Runs a job. Waits at most `patience` for a device to give the place of its gradients.
fn run(group: &ProcessGroup, job: Job, patience: Duration) -> Done {
    match job {
        Job::Allocate(lens) => Done::Allocated(group.shared_buffers(&lens)),
        Job::Reduce { bucket, dtype, mut buffer, mut loan, share, tag } => {
            let result = share.reduce(group, dtype, &mut buffer, tag).map_err(Fault::from).and_then(|view| {
                loan.as_deref_mut()
                    .map_or(Ok(()), |loan| reduce_on_device(group, dtype, loan, &share, tag, patience))?;
                Ok(view)
            });
            Done::Reduced { bucket, buffer, loan, result }
        }
        Job::Statistics { dtype, mut buffer, source } => {
            let result = match source {
                StatisticsSource::All(weight) => group.all_reduce_weighted_bytes(dtype, buffer.bytes_mut(), weight, 0),
                StatisticsSource::Leaves { division, weights } => {
                    let mut rows = SharedBuffer::plain(buffer.bytes().len());
                    rows.bytes_mut().copy_from_slice(buffer.bytes());
                    Share::Leaves { division, weights }.reduce(group, dtype, &mut rows, 0).map(|mean| {
                        buffer = AlignedBytes::zeroed(mean.len());
                        buffer.bytes_mut().copy_from_slice(&mean);
                    })
                }
                StatisticsSource::First { trains } => broadcast_first(group, trains, dtype, &mut buffer),
            };
            Done::Statistics { dtype, buffer, result }
        }
        Job::Digests(digests) => Done::Digests(gather(group, &digests)),
        Job::AgreeOrder(order) => Done::Order(group.broadcast_object((group.rank() == 0).then_some(order), 0)),
    }
}

/// Returns when the reduction is enqueued on the device.
fn reduce_on_device(
    group: &ProcessGroup,
    dtype: DType,
    loan: &mut dyn DeviceLoan,
    share: &Share,
    tag: u64,
    patience: Duration,
) -> Result<(), Fault> {
    let len_elems = loan.len_elems();
    let place = loan.place(patience).map_err(Fault::Device)?;
    let elements = OnDevice { dtype, len_elems, place };
    match share {
        Share::Mean(items) => group.all_reduce_weighted_on_device(elements, *items, tag)?,
        Share::Sum | Share::Leaves { .. } => group.all_reduce_on_device(elements, ReduceOp::Sum, tag)?,
    }
    Ok(())
}

/// Broadcasts the statistics of the first rank that trains; changes nothing if none does.
fn broadcast_first(
    group: &ProcessGroup,
    trains: bool,
    dtype: DType,
    buffer: &mut AlignedBytes,
) -> burn_ddp_comm::Result<()> {
    let training = group.all_gather(&[u8::from(trains)])?;
    match training.iter().position(|trains| *trains == 1) {
        Some(first) => group.broadcast_bytes(dtype, buffer.bytes_mut(), first),
        None => Ok(()),
    }
}

/// Gathers one row per rank.
fn gather(group: &ProcessGroup, mine: &[i64]) -> burn_ddp_comm::Result<Vec<Vec<i64>>> {
    let all = group.all_gather(mine)?;
    Ok(all.chunks(mine.len().max(1)).map(<[i64]>::to_vec).collect())
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::tensor::Tensor;
    use burn_ddp_comm::WorldOptions;

    use super::*;
    use crate::{Ddp, Error, WrapConfig};

    #[test]
    fn a_scalar_of_one_rank_that_meets_a_backward_of_the_others_is_found_at_once() {
        for overlap in [true, false] {
            let heartbeat = Duration::from_millis(50);
            let options = WorldOptions { heartbeat, timeout: Duration::from_secs(60), ..WorldOptions::default() };
            let begin = Instant::now();
            let errors = Ddp::spawn_with(3, options, |ddp| {
                let device = ddp.device()?.autodiff();
                let config = WrapConfig::default().with_overlap(overlap);
                let model = ddp.wrap_with(LinearConfig::new(2, 2).init(&device), &config)?;
                let step = || ddp.backward(&model.forward(Tensor::<2>::ones([1, 2], &device)).sum(), &model);
                let steps = || -> crate::Result<()> {
                    for _ in 0..3 {
                        step()?;
                    }
                    if ddp.is_main() {
                        ddp.sum(1.0)?;
                    }
                    step().map(drop)
                };
                let Err(Error::Comm(error)) = steps() else { panic!("no error of the ranks") };
                Ok(error)
            })
            .unwrap();
            for error in errors {
                let text = error.to_string();
                assert!(matches!(*error, burn_ddp_comm::Error::Deadlock { .. }), "{text}");
                assert!(text.contains("rank 0 is in all_reduce #"), "{text}");
                assert!(text.contains("ranks 1 and 2 are in ") && text.contains("of group 2"), "{text}");
            }
            assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
        }
    }
}
