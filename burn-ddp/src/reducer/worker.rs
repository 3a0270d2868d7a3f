//! The communication thread of one wrapped model: reduces buckets in the order in which they are handed over, while
//! backward goes on.

use std::panic::Location;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use burn_ddp_comm::{DType, ProcessGroup, ReduceOp};

use super::pack::Buffer;

pub(crate) enum Job {
    Reduce {
        bucket: usize,
        dtype: DType,
        buffer: Buffer,
        /// Items this rank contributes to the mean; `None` sums.
        weight: Option<f64>,
        /// Names step and bucket; compared between the ranks.
        tag: u64,
    },
    /// Running statistics: their mean weighted by items, or rank 0's if `weight` is `None`.
    Buffers { dtype: DType, buffer: Buffer, weight: Option<f64> },
    /// Everybody gets everybody's.
    Digests(Vec<i64>),
    /// Rank 0's value becomes everybody's.
    AgreeOrder(Vec<u32>),
}

pub(crate) enum Done {
    Reduced { bucket: usize, buffer: Buffer, busy: Duration, result: burn_ddp_comm::Result<()> },
    Buffers { dtype: DType, buffer: Buffer, result: burn_ddp_comm::Result<()> },
    Digests(burn_ddp_comm::Result<Vec<Vec<i64>>>),
    Order(burn_ddp_comm::Result<Vec<u32>>),
}

/// Handle of the thread. Dropping it ends the thread after the collective it is in.
#[derive(Debug)]
pub(crate) struct Worker {
    /// `None` once the thread is to end.
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    patience: Duration,
}

impl Worker {
    /// Errors show `site` as the caller: where the model was wrapped.
    pub(crate) fn start(
        group: ProcessGroup,
        timeout: Duration,
        site: &'static Location<'static>,
    ) -> std::io::Result<Self> {
        let (jobs, todo) = channel();
        let (finished, done) = channel();
        std::thread::Builder::new()
            .name(format!("ddp-reduce-{}", group.rank()))
            .spawn(move || run(&group, site, &todo, &finished))?;
        // The group keeps its own deadline; the slack only guards against a lost thread.
        Ok(Worker { jobs: Some(jobs), done, patience: timeout.saturating_add(Duration::from_secs(30)) })
    }

    /// Hands over one job. Never blocks.
    pub(crate) fn submit(&self, job: Job) -> Result<(), String> {
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent { Ok(()) } else { Err("the communication thread has ended: the wrapped model is gone".to_string()) }
    }

    /// Ends the thread after what it was handed.
    pub(crate) fn retire(&mut self) {
        self.jobs = None;
    }

    /// The next finished job, in the order of submission.
    pub(crate) fn next(&self) -> Result<Done, String> {
        self.done.recv_timeout(self.patience).map_err(|e| match e {
            RecvTimeoutError::Timeout => format!("the communication thread has not answered for {:?}", self.patience),
            RecvTimeoutError::Disconnected => "the communication thread has ended".to_string(),
        })
    }
}

fn run(group: &ProcessGroup, site: &'static Location<'static>, todo: &Receiver<Job>, finished: &Sender<Done>) {
    while let Ok(job) = todo.recv() {
        let done = match job {
            Job::Reduce { bucket, dtype, mut buffer, weight, tag } => {
                let start = Instant::now();
                let result = match weight {
                    Some(w) => group.all_reduce_weighted_at(dtype, buffer.bytes_mut(), w, tag, site),
                    None => group.all_reduce_at(dtype, buffer.bytes_mut(), ReduceOp::Sum, tag, site),
                };
                Done::Reduced { bucket, buffer, busy: start.elapsed(), result }
            }
            Job::Buffers { dtype, mut buffer, weight } => {
                let result = match weight {
                    Some(w) => group.all_reduce_weighted_at(dtype, buffer.bytes_mut(), w, 0, site),
                    None => group.broadcast_bytes(dtype, buffer.bytes_mut(), 0),
                };
                Done::Buffers { dtype, buffer, result }
            }
            Job::Digests(digests) => Done::Digests(gather(group, &digests)),
            Job::AgreeOrder(order) => Done::Order(group.broadcast_object((group.rank() == 0).then_some(order), 0)),
        };
        if finished.send(done).is_err() {
            return;
        }
    }
}

/// One row per rank.
fn gather(group: &ProcessGroup, mine: &[i64]) -> burn_ddp_comm::Result<Vec<Vec<i64>>> {
    let all = group.all_gather(mine)?;
    Ok(all.chunks(mine.len().max(1)).map(<[i64]>::to_vec).collect())
}
