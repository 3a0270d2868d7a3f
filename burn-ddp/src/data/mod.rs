//! Each rank's share of the data.
//!
//! | | |
//! |---|---|
//! | [`ShardedLoader`] | training: equally many steps on every rank, every item once, a new order every epoch |
//! | [`EvalLoader`] | evaluation: every item once, no padding, in order unless shuffled |
//! | [`LoaderBuilder`] | builds either; from `Ddp::loader` and `Ddp::eval_loader` |
//! | [`StreamLoader`] | training on a [`StreamSource`], which is read from front to back; from `Ddp::stream` |
//! | [`Position`] | the items that all ranks have consumed: saved in a checkpoint, resumed by a world of any size |
//! | [`EpochPlan`], [`permutation`] | the items of each step and rank, as pure functions |
//! | [`Sampler`], [`WeightedSampler`] | another order of an epoch: items drawn by weight, sorted by length, … |
//! | [`ShardedDataset`] | a rank's share of any Burn `Dataset`, as a `Dataset` |
//! | [`DistributedSampler`] | torch's arithmetic, for programs that need exactly that |
//!
//! The modules in the order in which a batch passes them: `loader_builder` compares the settings of the ranks;
//! `sharded_loader` makes an `epoch`, which `epoch_plan` cuts into steps; the epoch's `batch_stream` takes batches that
//! `prefetch` loads ahead on worker threads.
//!
//! Words: an *epoch* is one pass over the dataset by all ranks together; a *step* is the items that all ranks load for
//! one backward (with accumulation, several steps make an optimizer step); a rank's *share* of a step is its *batch*. A
//! batch is *loaded* by a worker, perhaps ahead of time, and *consumed* when the loop takes it. Epochs and steps count
//! from 0 in arguments and from 1 in messages ("step 3 of 10 in epoch 1").

mod batch_stream;
mod burn_data_loader;
mod data_error;
mod deal;
mod distributed_sampler;
mod epoch;
mod epoch_cursor;
mod epoch_order;
mod epoch_plan;
mod eval_loader;
mod item_check;
mod left_early;
mod loader_builder;
mod permutation;
mod prefetch;
mod resume_position;
mod sampler;
mod sharded_dataset;
mod sharded_loader;
mod stream;
mod stream_epoch;
mod stream_loader;
mod training_builder;

pub use data_error::DataError;
pub use distributed_sampler::DistributedSampler;
pub use epoch::{Epoch, Epochs};
pub use epoch_plan::EpochPlan;
pub use eval_loader::{EvalBatches, EvalLoader};
pub use loader_builder::{Evaluation, LoaderBuilder, Training};
pub use permutation::permutation;
pub(crate) use prefetch::DEFAULT_WORKERS;
pub use resume_position::Position;
pub use sampler::{Sampler, WeightedSampler};
pub use sharded_dataset::ShardedDataset;
pub use sharded_loader::ShardedLoader;
pub use stream::{Stream, StreamShard, StreamSource};
pub use stream_epoch::StreamEpoch;
pub use stream_loader::{StreamBuilder, StreamLoader, StreamPosition};

#[cfg(test)]
mod tests;
