//! Errors of datasets, samplers and loaders, sorted by who can act on them: the caller, a peer, the environment.

use std::sync::Arc;
use std::time::Duration;

use burn::data::dataset::DatasetError;
use burn_ddp_comm as comm;

use super::prefetch::Failure;

/// Error of building or reading a loader, sampler or shard.
///
/// All ranks get the same error from `build`, so the job can go on after it, unless it is [`DataError::Comm`].
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    // For the caller: use another dataset or batch size.
    /// The dataset has no item.
    #[error("the dataset is empty: check its path and filters; training needs at least one item per rank")]
    EmptyDataset,
    /// A training step must give every rank at least one item.
    #[error(
        "the dataset has {items} item(s) for {world} ranks (or logical ranks), but each needs one in every step: \
         start at most {items}, or use more data"
    )]
    DatasetTooSmall {
        /// Items in the dataset.
        items: usize,
        /// Ranks in the world.
        world: usize,
    },
    /// A global batch must have at least one item per rank; a batch per rank at least one item.
    #[error("{}", too_small(*global_batch, *world))]
    BatchTooSmall {
        /// Items of one step over all ranks.
        global_batch: usize,
        /// Ranks in the world.
        world: usize,
    },
    /// Only full steps are loaded, and there is none.
    #[error(
        "the dataset has {items} item(s), but a step takes {global_batch} over all ranks and `drop_last` leaves out \
         steps that are not full: use a smaller batch, or leave out `drop_last`"
    )]
    NoFullStep {
        /// Items in the dataset.
        items: usize,
        /// Items of one step over all ranks.
        global_batch: usize,
    },
    /// An epoch has at least one batch.
    #[error("max_batches is 0: use at least 1")]
    NoBatches,
    /// Steps are counted in 32 bits.
    #[error("an epoch has {steps} steps, the limit is {}: use a larger batch", u32::MAX - 1)]
    TooManySteps {
        /// Steps of one epoch.
        steps: usize,
    },
    /// Epochs are counted in 32 bits.
    #[error("epoch {epoch} is beyond the limit of {}", u32::MAX - 1)]
    EpochTooLarge {
        /// The epoch that was asked for.
        epoch: usize,
    },
    /// There is no such rank.
    #[error("rank {rank} is not in a world of {world}: ranks count from 0, and a world has at least one")]
    NoSuchRank {
        /// The rank that was given.
        rank: usize,
        /// The world size that was given.
        world: usize,
    },
    /// A sampler for a dataset of another length.
    #[error(
        "the sampler was made for {sampler} item(s) but the dataset has {dataset}: \
         make the sampler with `dataset.len()`, or with a weight for each item"
    )]
    SamplerMismatch {
        /// Dataset length that the sampler was made for.
        sampler: usize,
        /// Items in the dataset.
        dataset: usize,
    },
    /// A sampler that gives no order of the dataset.
    #[error("the sampler gives no order of the dataset: {reason}")]
    Sampler {
        /// The problem with the weights or the order.
        reason: String,
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
    /// The ranks built a loader from different arguments.
    #[error(
        "the ranks built {loader} differently: {difference}; all ranks must build the same loaders in the same order"
    )]
    LoadersDiffer {
        /// The loader, as this rank names it.
        loader: String,
        /// The arguments that differ: each value with the ranks that have it.
        difference: String,
    },
    /// An item that is another one each time it is read, found by [`check_items`](super::LoaderBuilder::check_items).
    #[error(
        "item {index} of the dataset is {first} when it is read first, and {again} when it is read again: \
         an item must depend on its index alone, or the ranks do not share the data"
    )]
    ItemChanges {
        /// The item's index.
        index: usize,
        /// The item at its first read.
        first: String,
        /// The item at its second read.
        again: String,
    },
    /// A position of another loader.
    #[error(
        "the position to resume from is not one of this loader: {difference}; \
         resume with the dataset, the order and the settings that it was saved with"
    )]
    PositionMismatch {
        /// The setting that differs, with both values.
        difference: String,
    },

    // For the owner of the data: look at the dataset.
    /// The dataset returned an error for an item of this batch.
    #[error("{what} could not be loaded: {source}")]
    Dataset {
        /// The batch: step, epoch, loader and rank.
        what: String,
        /// The dataset's error.
        source: Arc<DatasetError>,
    },
    /// The weight of this batch is not allowed: see [`weigh`](super::LoaderBuilder::weigh).
    #[error("{what} has no weight: {reason}")]
    Weight {
        /// The batch: step, epoch, loader and rank.
        what: String,
        /// Range of allowed weights, and the weight of the batch.
        reason: String,
    },
    /// The dataset or the batcher panicked on a worker thread.
    #[error("{what} could not be loaded: worker {worker} panicked: {message}")]
    WorkerPanicked {
        /// The batch: step, epoch, loader and rank.
        what: String,
        /// Number of the worker.
        worker: usize,
        /// The panic's message.
        message: String,
    },
    /// A worker did not deliver a batch within [`WorldOptions::timeout`](comm::WorldOptions::timeout), in a job of
    /// several ranks. Alone a rank waits on, with a warning.
    #[error("{what} did not arrive: worker {worker} has been loading it for {seconds} s; is its storage reachable?")]
    WorkerStalled {
        /// The batch: step, epoch, loader and rank.
        what: String,
        /// Number of the worker.
        worker: usize,
        /// Seconds that this rank waited.
        seconds: u64,
    },

    /// Another rank could not read its part of a source that is read from front to back.
    #[error("{what} does not come: rank {rank} could not read its part of the source, and its error says why")]
    StreamFailed {
        /// The step: epoch, loader and this rank.
        what: String,
        /// The rank that failed.
        rank: usize,
    },
    /// A rank's part of a source has no item.
    #[error("{what} has no item, nor had any step before: the source has fewer parts than ranks and workers")]
    EmptyPart {
        /// The step: epoch, loader and rank.
        what: String,
    },

    // From the environment.
    /// The system refused a thread for a worker.
    #[error("worker {worker} could not be started: {source}; use fewer workers or raise the limit of threads")]
    WorkerNotStarted {
        /// Number of the worker.
        worker: usize,
        /// The system's error.
        source: Arc<std::io::Error>,
    },

    // From a peer.
    /// Communication between ranks failed: see the inner error.
    #[error(transparent)]
    Comm(#[from] comm::Error),
}

impl DataError {
    /// The error of loading the batch `what`.
    pub(super) fn from_failure(what: String, failure: Failure<comm::Error>, timeout: Duration) -> Self {
        match failure {
            Failure::Dataset(source) => DataError::Dataset { what, source: source.into() },
            Failure::Panicked { worker, message } => DataError::WorkerPanicked { what, worker, message },
            Failure::Stalled { worker } => DataError::WorkerStalled { what, worker, seconds: timeout.as_secs() },
            Failure::JobEnded(error) => DataError::Comm(error),
        }
    }

    /// The rank to look at first, see [`crate::Error::rank`].
    pub(crate) fn rank(&self) -> Option<usize> {
        match self {
            DataError::Comm(error) => error.rank(),
            DataError::StreamFailed { rank, .. } => Some(*rank),
            _ => None,
        }
    }

    /// True if the job can go on, see [`crate::Error::job_usable`]: false for the error of a batch, for which the other
    /// ranks wait.
    pub(crate) fn job_usable(&self) -> bool {
        match self {
            DataError::Comm(error) => error.group_usable(),
            DataError::WorkerNotStarted { .. }
            | DataError::WorkerStalled { .. }
            | DataError::EmptyPart { .. }
            | DataError::StreamFailed { .. } => false,
            other => !other.is_skippable(),
        }
    }

    /// True if only this batch is lost, so that the epoch can go on if all ranks agree to skip it.
    pub(super) fn is_skippable(&self) -> bool {
        matches!(self, DataError::Dataset { .. } | DataError::Weight { .. } | DataError::WorkerPanicked { .. })
    }
}

fn too_small(global_batch: usize, world: usize) -> String {
    match global_batch {
        0 => "the batch size is 0: use at least 1".to_string(),
        _ => format!("global_batch_size {global_batch} is smaller than the {world} ranks: use at least {world}"),
    }
}
