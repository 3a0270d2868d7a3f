//! Each rank's share of the data.
//!
//! | | |
//! |---|---|
//! | [`Ddp::loader`](crate::Ddp::loader) → [`ShardedLoader`] | training: every rank equally many steps, every item once, a new order every epoch |
//! | [`Ddp::eval_loader`](crate::Ddp::eval_loader) → [`EvalLoader`] | evaluation: every item once, in order, no padding |
//! | [`Position`] | how far all ranks have read: what a checkpoint holds, for any world that goes on |
//! | [`EpochPlan`], [`permutation`] | what the training loader reads, as pure functions |
//! | [`ShardedDataset`] | a rank's share of any Burn `Dataset`, as a `Dataset` |
//! | [`DistributedSampler`] | torch's arithmetic, for those who want exactly that |
//!
//! Words: an *epoch* is one reading of the dataset by all ranks together; a *step* is what all ranks read between two
//! optimizer steps; a rank's *share* of it is its *batch*. Epochs count from 0. Steps count from 0 in arguments and from
//! 1 in messages ("step 3 of 10").

mod agree;
mod loader_builder;
mod epoch;
mod data_error;
mod eval_loader;
mod sharded_loader;
mod permutation;
mod epoch_plan;
mod position;
mod distributed_sampler;
mod sharded_dataset;
mod burn_data_loader;
mod prefetch;

pub use loader_builder::{EvalLoaderBuilder, LoaderBuilder};
pub use epoch::{Epoch, Epochs};
pub use data_error::DataError;
pub use eval_loader::{EvalBatches, EvalLoader};
pub use sharded_loader::ShardedLoader;
pub use permutation::permutation;
pub use epoch_plan::EpochPlan;
pub use position::Position;
pub use distributed_sampler::DistributedSampler;
pub use sharded_dataset::ShardedDataset;

#[cfg(test)]
mod tests;
