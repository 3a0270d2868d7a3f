//! What can go wrong, sorted by who can act.

use burn_ddp_comm as comm;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation of burn-ddp failed.
///
/// After [`Error::Backward`] and [`Error::ReplicasDiffer`] the ranks are no longer in step: start again from a checkpoint. After [`Error::Comm`] ask
/// [`comm::Error::group_usable`]. What all ranks see alike ([`Error::Use`], [`Error::ModelsDiffer`], [`Error::File`]) leaves the
/// job usable.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A peer, the network or the launcher: see the inner error, which names the rank.
    #[error(transparent)]
    Comm(Box<comm::Error>),
    /// Starting ranks failed, or a rank that this process started failed.
    #[error(transparent)]
    Launch(#[from] std::sync::Arc<burn_ddp_launch::LaunchError>),
    /// Loading or sharding data failed.
    #[error(transparent)]
    Data(Box<crate::data::DataError>),
    /// The models that the ranks hand to `wrap` are not the same model.
    #[error("the ranks do not hold the same model: {0}")]
    ModelsDiffer(String),
    /// The call cannot work as it is written; nothing was sent and the job can go on.
    #[error("{0}")]
    Use(String),
    /// The replicas have drifted apart: parameters differ between ranks that should be the same bits.
    #[error("the replicas differ: {0}; something changed parameters on one rank only, or a gradient went past its tap")]
    ReplicasDiffer(String),
    /// A backward could not deliver averaged gradients.
    #[error("backward on rank {rank}: {reason}")]
    Backward {
        /// The rank that failed first, as far as this rank knows.
        rank: usize,
        /// What happened and what to do.
        reason: String,
    },
    /// Reading or writing a file failed, on the rank that is named.
    #[error("{0}")]
    File(String),
    /// The job that `Ddp::launch` started did not succeed.
    #[error("{report}")]
    Job {
        /// What a launcher would exit with: the code of the rank that failed first, 128 + signal if a signal killed it or
        /// stopped the job.
        exit_code: i32,
        /// Which rank failed first and how, or which signal stopped the job.
        report: String,
    },
    /// A rank's closure returned an error or panicked (`Ddp::spawn`), or rank 0's did (`Ddp::rank_zero_first`).
    #[error("rank {rank} failed: {reason}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// Its error or panic message.
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
