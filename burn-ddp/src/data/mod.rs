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
mod builder;
mod epoch;
mod error;
mod eval;
mod loader;
mod permutation;
mod plan;
mod position;
mod sampler;
mod sharded;
mod unreadable;
mod worker;

pub use builder::{EvalLoaderBuilder, LoaderBuilder};
pub use epoch::{Epoch, Epochs};
pub use error::DataError;
pub use eval::{EvalBatches, EvalLoader};
pub use loader::ShardedLoader;
pub use permutation::permutation;
pub use plan::EpochPlan;
pub use position::Position;
pub use sampler::DistributedSampler;
pub use sharded::ShardedDataset;

#[cfg(test)]
mod tests;
