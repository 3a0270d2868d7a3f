//! What can go wrong between a dataset and a batch, sorted by who can act.

use std::sync::Arc;
use std::time::Duration;

use burn::data::dataset::DatasetError;
use burn_ddp_comm as comm;

use super::prefetch::Failure;

/// Why a loader, sampler or shard could not be built or read.
///
/// What `build` returns is seen alike by all ranks, so the job can go on after it, unless it is [`DataError::Comm`].
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    // The caller: another dataset, another batch size.
    /// The dataset has no item.
    #[error("the dataset is empty: check its path and filters; training needs at least one item per rank")]
    EmptyDataset,
    /// A training step must give every rank at least one item.
    #[error(
        "the dataset has {items} item(s) for {world} ranks, so some rank would have none in every step: start at most {items} rank(s), or use more data"
    )]
    DatasetTooSmall {
        /// Items in the dataset.
        items: usize,
        /// Ranks in the world.
        world: usize,
    },
    /// A global batch must have at least one item per rank; a batch per rank at least one item.
    #[error("a global batch of {global_batch} item(s) does not give each of {world} ranks one: use at least {world}")]
    BatchTooSmall {
        /// Items of one step over all ranks.
        global_batch: usize,
        /// Ranks in the world.
        world: usize,
    },
    /// Steps are counted in 32 bits.
    #[error("{steps} steps in one epoch are more than the {} that can be counted: use a larger batch", u32::MAX - 1)]
    TooManySteps {
        /// Steps of one epoch.
        steps: usize,
    },
    /// Epochs are counted in 32 bits.
    #[error("epoch {epoch} is more than the {} that can be counted", u32::MAX)]
    EpochTooLarge {
        /// The epoch that was asked for.
        epoch: usize,
    },
    /// There is no such rank.
    #[error("rank {rank} is not one of a world of {world}: ranks count from 0 and a world has at least one")]
    NoSuchRank {
        /// The rank that was given.
        rank: usize,
        /// The world size that was given.
        world: usize,
    },
    /// A sampler made for another dataset.
    #[error(
        "the sampler was made for {sampler} item(s) but the dataset has {dataset}: make the sampler with `dataset.len()`"
    )]
    SamplerMismatch {
        /// Items the sampler was made for.
        sampler: usize,
        /// Items in the dataset.
        dataset: usize,
    },
    /// A slice that is not within the loader's dataset.
    #[error("slice {start}..{end} is not within the {items} item(s) of the loader")]
    SliceOutOfRange {
        /// First item of the slice.
        start: usize,
        /// One past the last item of the slice.
        end: usize,
        /// Items of the loader's dataset.
        items: usize,
    },
    /// Ranks built one loader from different arguments.
    #[error(
        "the ranks built {loader} differently: {difference}; all ranks must build the same loaders in the same order"
    )]
    LoadersDiffer {
        /// Which loader, as this rank knows it.
        loader: String,
        /// What differs, with the values and the ranks that have them.
        difference: String,
    },
    /// A position that another loader was at.
    #[error(
        "the position to resume from is not one of this loader: {difference}; resume with the dataset and the shuffle seed that it was saved with"
    )]
    PositionMismatch {
        /// What differs, with both values.
        difference: String,
    },

    // The data: look at the dataset.
    /// The dataset returned an error for an item of this batch.
    #[error("{what} could not be loaded: {source}")]
    Dataset {
        /// The batch: step, epoch, loader and rank.
        what: String,
        /// The dataset's error.
        source: Arc<DatasetError>,
    },
    /// The dataset or the batcher panicked on a worker thread.
    #[error("{what} could not be loaded: worker {worker} panicked: {message}")]
    WorkerPanicked {
        /// The batch: step, epoch, loader and rank.
        what: String,
        /// Which worker.
        worker: usize,
        /// What the panic said.
        message: String,
    },
    /// A worker did not deliver a batch within [`Options::timeout`](comm::Options::timeout).
    #[error("{what} did not arrive: worker {worker} has been loading it for {seconds} s; is its storage reachable?")]
    WorkerStalled {
        /// The batch: step, epoch, loader and rank.
        what: String,
        /// Which worker.
        worker: usize,
        /// How long this rank waited.
        seconds: u64,
    },

    // The environment.
    /// The system gave no thread for a worker.
    #[error("worker {worker} could not be started: {source}; use fewer workers or raise the limit of threads")]
    WorkerNotStarted {
        /// Which worker.
        worker: usize,
        /// The system's error.
        source: Arc<std::io::Error>,
    },

    // A peer.
    /// A peer or the network: see the inner error, which names the rank.
    #[error(transparent)]
    Comm(#[from] comm::Error),
}

impl DataError {
    /// `what` was not loaded.
    pub(super) fn from_failure(what: String, failure: Failure<comm::Error>, timeout: Duration) -> Self {
        match failure {
            Failure::Dataset(source) => DataError::Dataset { what, source: source.into() },
            Failure::Panicked { worker, message } => DataError::WorkerPanicked { what, worker, message },
            Failure::Stalled { worker } => DataError::WorkerStalled { what, worker, seconds: timeout.as_secs() },
            Failure::Checked(error) => DataError::Comm(error),
        }
    }

    /// This error as Burn's own, which its `DataLoader` yields.
    pub(super) fn into_burn(self) -> DatasetError {
        DatasetError::new(self)
    }
}
