//! Errors of this crate, sorted by their cause.

use std::io;
use std::path::PathBuf;

use burn_ddp_comm as comm;

use crate::file_failure::FileFailure;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation of burn-ddp failed.
///
/// After [`Error::Backward`], [`Error::Sharding`] and [`Error::ReplicasDiffer`] the ranks are no longer in step: start
/// again from a checkpoint. After [`Error::Comm`] ask [`comm::Error::group_usable`]. An [`Error::Invalid`],
/// [`Error::ModelsDiffer`] or [`Error::File`] that all ranks return leaves the job usable.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A peer, the network or the launcher failed. The inner error names the rank.
    #[error(transparent)]
    Comm(Box<comm::Error>),
    /// Starting ranks failed, or a rank that this process started failed.
    #[error(transparent)]
    Launch(#[from] std::sync::Arc<burn_ddp_launch::LaunchError>),
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
