//! Burn's trainer on all ranks: `SupervisedTraining` with a data-parallel strategy.
//!
//! | | |
//! |---|---|
//! | [`DdpTrainer`] | the entry: methods of [`Ddp`](crate::Ddp) for Burn's trainer |
//! | [`DdpTrainer::training`] | Burn's `SupervisedTraining` for this rank; ranks other than 0 show and write nothing |
//! | [`DdpTrainer::metric`], [`MeanMetric`] | metrics whose value is a mean: exact over all ranks |
//! | [`DdpTrainer::gathered_metric`], [`GatherInput`] | metrics that must see all items, such as AUROC |
//! | [`DdpTrainer::checkpointer`] | checkpoints with files on rank 0's machine only |
//! | [`SilentRenderer`] | a renderer that shows nothing |
//!
//! `docs/trainer.md` describes the changes to a program that uses Burn's trainer.

mod accepted_loaders;
mod agreed_stop;
mod ddp_trainer;
mod gathered_batches;
mod gathered_metric;
mod interrupted_epoch;
mod mean_metric;
mod micro_batches;
mod sharded_learner;
mod shared_checkpointer;
mod silent_ui;
mod strategy;
mod validation;

pub use accepted_loaders::RankLoader;
pub use ddp_trainer::DdpTrainer;
pub use gathered_metric::{GatherInput, GatheredMetric};
pub use mean_metric::{GlobalMetric, MeanMetric};
pub use shared_checkpointer::SharedCheckpointer;
pub use silent_ui::SilentRenderer;
