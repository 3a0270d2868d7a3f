//! Errors of this crate, sorted by their cause.

use std::io;
use std::path::PathBuf;

use burn_ddp_comm as comm;
use burn_ddp_launch::LaunchError;

use crate::file_failure::FileFailure;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation of burn-ddp failed.
///
/// [`job_usable`](Self::job_usable) says whether training can go on, and [`rank`](Self::rank) which rank to look at.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A peer, the network or the launcher failed. The inner error names the rank.
    #[error(transparent)]
    Comm(Box<comm::Error>),
    /// Starting ranks failed, or a rank that this process started failed.
    #[error(transparent)]
    Launch(#[from] std::sync::Arc<LaunchError>),
    /// Loading or sharding data failed.
    #[error(transparent)]
    Data(Box<crate::data::DataError>),
    /// The arguments, a setting or the machine do not allow the operation.
    #[error("{}{reason}", prefix(.rank))]
    Invalid {
        /// The rank that found the problem; `None` for this rank, or for all ranks alike.
        rank: Option<usize>,
        /// The problem, and what to do.
        reason: String,
    },
    /// A value cannot be read from this rank's device. The other ranks, which wait for it, get this as an error of this
    /// rank.
    #[error("{reason}")]
    Unreadable {
        /// The value, and the error of the device.
        reason: String,
    },
    /// The ranks hold models with different parameters or buffers.
    #[error("the ranks do not hold the same model: {difference}")]
    ModelsDiffer {
        /// The first rank whose model differs from rank 0's.
        rank: usize,
        /// The first parameter or buffer that differs, on both ranks.
        difference: String,
    },
    /// The replicas have drifted apart: parameters differ between ranks by more than rounding, or at all where they are
    /// compared exactly.
    #[error(
        "the replicas differ{}: {difference}; a rank changed parameters by itself, steps with another optimizer or \
         learning rate, or used a gradient that was not averaged: fix that, and go on from a checkpoint",
        in_step(.step)
    )]
    ReplicasDiffer {
        /// The step whose forward read the parameters; `None` outside of a step.
        step: Option<u64>,
        /// Path of the first parameter that differs.
        parameter: String,
        /// Ranks that differ from most others, or all that hold different values.
        ranks: Vec<usize>,
        /// The parameter and the ranks, in words.
        difference: String,
    },
    /// A backward could not deliver averaged gradients.
    #[error("backward on rank {rank}: {reason}")]
    Backward {
        /// The rank that failed first, as far as this rank knows.
        rank: usize,
        /// The problem, and what to do.
        reason: String,
    },
    /// An averaged gradient is not finite, and the settings of `wrap` make that an error, or a loss scale has become
    /// too small. All ranks get it in the same step, of which nothing remains.
    #[error("{reason}")]
    NotFinite {
        /// The first rank with a gradient that is not finite; `None` if the average alone is not.
        rank: Option<usize>,
        /// Path of its first such parameter, if it is known.
        parameter: Option<String>,
        /// The step, the parameter and the rank, and what to do.
        reason: String,
    },
    /// The ranks did not gather or reduce sharded parameters together.
    #[error("sharded parameters on rank {rank}: {reason}")]
    Sharding {
        /// The first rank whose calls differ from the other ranks'.
        rank: usize,
        /// The parameters, the calls of each rank, and what to do.
        reason: String,
    },
    /// Reading or writing a file failed.
    #[error("{}{reason}", prefix(.rank))]
    File {
        /// The rank that failed; `None` if it is this one.
        rank: Option<usize>,
        /// The file, directory or URL on that rank; `None` if the failure belongs to no single path.
        path: Option<PathBuf>,
        /// Kind of the I/O error, [`io::ErrorKind::InvalidData`] for damaged checkpoints, and
        /// [`io::ErrorKind::Other`] for kinds that files and object storage rarely have. `None` if the failure was no
        /// I/O error, or Burn wrote the file (an optimizer's state), whose errors say no kind.
        kind: Option<io::ErrorKind>,
        /// The file and the problem, in words.
        reason: String,
    },
    /// The job that `Ddp::launch` started did not succeed.
    #[error("{report}")]
    Job {
        /// Exit code for a launcher: the code of the rank that failed first, 128 + signal if a signal killed it or
        /// stopped the job.
        exit_code: i32,
        /// The rank that failed first; `None` if no rank failed by itself: a signal or a lost machine ended the job.
        rank: Option<usize>,
        /// The rank that failed first and how, or the signal that stopped the job.
        report: String,
    },
    /// A rank's closure returned an error or panicked (`Ddp::spawn`), or rank 0's did (`Ddp::main_first`).
    #[error("rank {rank} failed: {reason}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// The error or panic message of that rank.
        reason: String,
    },
}

impl From<comm::Error> for Error {
    fn from(error: comm::Error) -> Self {
        Error::Comm(Box::new(error))
    }
}

impl From<crate::data::DataError> for Error {
    fn from(error: crate::data::DataError) -> Self {
        Error::Data(Box::new(error))
    }
}

impl Error {
    /// The rank to look at first: the rank that failed, or whose model, arguments or data the error is about. `None` if
    /// that is not known, or if it is this rank or all ranks alike.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_ddp::prelude::*;
    ///
    /// let job = Ddp::spawn(2, |ddp| {
    ///     anyhow::ensure!(ddp.rank() == 0, "no data");
    ///     Ok(ddp.barrier()?)
    /// });
    /// assert_eq!(job.unwrap_err().rank(), Some(1));
    /// ```
    #[must_use]
    pub fn rank(&self) -> Option<usize> {
        match self {
            Error::Comm(error) => error.rank(),
            Error::Data(error) => error.rank(),
            Error::Launch(error) => match **error {
                LaunchError::Spawn { rank, .. } => Some(rank),
                _ => None,
            },
            Error::Invalid { rank, .. }
            | Error::File { rank, .. }
            | Error::Job { rank, .. }
            | Error::NotFinite { rank, .. } => *rank,
            Error::ModelsDiffer { rank, .. }
            | Error::Backward { rank, .. }
            | Error::Sharding { rank, .. }
            | Error::Rank { rank, .. } => Some(*rank),
            Error::ReplicasDiffer { ranks, .. } => ranks.first().copied(),
            Error::Unreadable { .. } => None,
        }
    }

    /// True if the job can go on after this error, as
    /// [`comm::Error::group_usable`](burn_ddp_comm::Error::group_usable) of a collective. All ranks must then handle
    /// the error alike: those that go on make the same calls.
    ///
    /// False if a rank failed, if the ranks are out of step, and for errors of a job that is over; then start again
    /// from a checkpoint. If the job has ended for another reason, the next collective returns that reason.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     # let model = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
    ///     // Rank 0 cannot write here, and both ranks get that error.
    ///     let error = ddp.save(&model, "/dev/null/model").unwrap_err();
    ///     assert_eq!(error.rank(), Some(0));
    ///     assert!(error.job_usable());
    ///     Ok(ddp.barrier()?)
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn job_usable(&self) -> bool {
        match self {
            Error::Comm(error) => error.group_usable(),
            Error::Data(error) => error.job_usable(),
            Error::Invalid { .. } | Error::ModelsDiffer { .. } | Error::File { .. } | Error::NotFinite { .. } => true,
            Error::Unreadable { .. }
            | Error::ReplicasDiffer { .. }
            | Error::Backward { .. }
            | Error::Sharding { .. }
            | Error::Launch(_)
            | Error::Job { .. }
            | Error::Rank { .. } => false,
        }
    }

    /// [`Error::Invalid`] of this rank, or of all ranks alike.
    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Error::Invalid { rank: None, reason: reason.into() }
    }

    /// [`Error::File`] of this rank.
    pub(crate) fn file(failure: impl Into<FileFailure>) -> Self {
        failure.into().into_error(None)
    }
}

fn prefix(rank: &Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| format!("rank {rank} "))
}

fn in_step(step: &Option<u64>) -> String {
    step.map_or_else(String::new, |step| format!(" in step {step}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::data::DataError;

    fn peer_failed(rank: usize) -> comm::Error {
        let peer = comm::membership::PeerInfo::here(rank, rank, 0);
        comm::Error::PeerFailed { peer, cause: "no data".into(), during: None }
    }

    fn refused(rank: Option<usize>) -> comm::Error {
        comm::Error::InvalidArgument { message: "integers have no mean".into(), rank, during: None }
    }

    #[test]
    fn every_error_has_its_rank_and_says_whether_the_job_can_go_on() {
        let reason = || "a reason".to_string();
        let (path, kind) = (None, Some(io::ErrorKind::StorageFull));
        let spawn = LaunchError::Spawn { rank: 4, source: io::ErrorKind::OutOfMemory.into() };
        let usage = LaunchError::Usage(reason());
        let replicas = |ranks| Error::ReplicasDiffer { step: None, parameter: "a".into(), ranks, difference: reason() };
        for (error, rank, job_usable) in [
            (peer_failed(3).into(), Some(3), false),
            (refused(Some(2)).into(), Some(2), true),
            (refused(None).into(), None, true),
            (Error::Launch(Arc::new(spawn)), Some(4), false),
            (Error::Launch(Arc::new(usage)), None, false),
            (DataError::EmptyDataset.into(), None, true),
            (Error::invalid("a reason"), None, true),
            (Error::Invalid { rank: Some(1), reason: reason() }, Some(1), true),
            (Error::Unreadable { reason: reason() }, None, false),
            (Error::ModelsDiffer { rank: 5, difference: reason() }, Some(5), true),
            (Error::File { rank: Some(0), path, kind, reason: reason() }, Some(0), true),
            (Error::file("a reason"), None, true),
            (replicas(vec![6, 7]), Some(6), false),
            (replicas(Vec::new()), None, false),
            (Error::Backward { rank: 1, reason: reason() }, Some(1), false),
            (Error::Sharding { rank: 2, reason: reason() }, Some(2), false),
            (Error::NotFinite { rank: Some(1), parameter: None, reason: reason() }, Some(1), true),
            (Error::Job { exit_code: 137, rank: Some(3), report: reason() }, Some(3), false),
            (Error::Job { exit_code: 130, rank: None, report: reason() }, None, false),
            (Error::Rank { rank: 1, reason: reason() }, Some(1), false),
        ] {
            assert_eq!((error.rank(), error.job_usable()), (rank, job_usable), "{error:?}");
        }
    }

    #[test]
    fn an_error_of_data_has_the_rank_of_its_cause() {
        let what = || "step 3 of epoch 1 on rank 0".to_string();
        let io_error = io::Error::from(io::ErrorKind::OutOfMemory);
        for (error, rank, job_usable) in [
            (DataError::Comm(peer_failed(3)), Some(3), false),
            (DataError::Comm(refused(Some(1))), Some(1), true),
            (DataError::StreamFailed { what: what(), rank: 2 }, Some(2), false),
            (DataError::NoSuchRank { rank: 9, world: 2 }, None, true),
            (DataError::Weight { what: what(), reason: "-1".into() }, None, false),
            (DataError::WorkerPanicked { what: what(), worker: 0, message: "boom".into() }, None, false),
            (DataError::WorkerStalled { what: what(), worker: 0, seconds: 600 }, None, false),
            (DataError::EmptyPart { what: what() }, None, false),
            (DataError::WorkerNotStarted { worker: 0, source: Arc::new(io_error) }, None, false),
        ] {
            let error = Error::from(error);
            assert_eq!((error.rank(), error.job_usable()), (rank, job_usable), "{error:?}");
        }
    }
}
