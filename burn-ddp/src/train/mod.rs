//! Burn's trainer on all ranks: `SupervisedTraining` with a data-parallel strategy.
//!
//! | | |
//! |---|---|
//! | [`Ddp::training`] | Burn's `SupervisedTraining` for this rank: the strategy is set, and ranks other than 0 are silent |
//! | [`Ddp::metric`], [`MeanMetric`] | metrics whose value is a mean: exact over all ranks |
//! | [`Ddp::gathered_metric`], [`GatherInput`] | metrics that must see all items, such as AUROC |
//! | [`Ddp::checkpointer`] | checkpoints whose files are on rank 0's machine only |
//! | [`SilentRenderer`] | shows nothing |
//!
//! `docs/trainer.md` tells what changes for a program that uses Burn's trainer.

mod micro_batches;
mod stop;
mod shared_checkpointer;
mod gathered_metric;
mod mean_metric;
mod silent_ui;
mod strategy;

use std::path::Path;
use std::sync::Arc;

use burn::train::metric::{Metric, Numeric};
use burn::train::{InferenceStep, LearnerModel, SupervisedTraining, TrainStep, TrainingStrategy};

pub use shared_checkpointer::SharedCheckpointer;
pub use gathered_metric::{GatherInput, GatheredMetric};
pub use mean_metric::{GlobalMetric, MeanMetric};
pub use silent_ui::SilentRenderer;

use crate::data::{EvalLoader, ShardedLoader};
use crate::{Ddp, WrapConfig};
use silent_ui::SilentLogger;
use strategy::DdpStrategy;

/// Burn's trainer.
impl Ddp {
    /// Burn's `SupervisedTraining::new` for all ranks: each trains on its share of `train`, gradients are averaged, and metrics made by
    /// [`Ddp::metric`] are those of all ranks. What else is set on it, and `launch`, is as in Burn, and the same on every rank.
    ///
    /// Rank 0 renders, and writes metrics, logs and checkpoints to `directory`; the others show and write nothing. The model that is launched must
    /// not be wrapped: all ranks start with rank 0's weights. Early stopping is decided on rank 0; an interruption on any rank ends training on all
    /// ranks after the same step, and so does an error, which all of them report. `launch` is *collective*, this call is not.
    ///
    /// # Example
    ///
    /// ```no_run
    /// # use burn::prelude::*;
    /// use burn::optim::AdamConfig;
    /// use burn::train::metric::{AccuracyMetric, LossMetric};
    /// use burn::train::{Learner, LearnerModel};
    /// use burn_ddp::data::{EvalLoader, ShardedLoader};
    /// use burn_ddp::prelude::*;
    /// # use burn::train::{ClassificationOutput, InferenceStep, TrainStep};
    ///
    /// fn train<M, B>(ddp: &Ddp, model: M, train: ShardedLoader<B>, valid: EvalLoader<B>) -> anyhow::Result<M>
    /// where
    ///     M: LearnerModel + TrainStep<Input = B, Output = ClassificationOutput>,
    ///     M: InferenceStep<Input = B, Output = ClassificationOutput>,
    ///     B: Send + 'static,
    /// {
    ///     let result = ddp
    ///         .training("artifacts", train, valid)
    ///         .metrics((ddp.metric(AccuracyMetric::new()), ddp.metric(LossMetric::new())))
    ///         .with_default_checkpointers()
    ///         .num_epochs(10)
    ///         .launch(Learner::new(model, AdamConfig::new().init().into(), 1e-3));
    ///     match result.error {
    ///         Some(error) => Err(error.into()),
    ///         None => Ok(result.model),
    ///     }
    /// }
    /// ```
    pub fn training<M: LearnerModel>(
        &self,
        directory: impl AsRef<Path>,
        train: ShardedLoader<<M as TrainStep>::Input>,
        valid: EvalLoader<<M as InferenceStep>::Input>,
    ) -> SupervisedTraining<M> {
        self.training_with(directory, train, valid, &WrapConfig::new())
    }

    /// [`Ddp::training`] with settings for the gradients, the same on every rank. Accumulation is set by Burn's `grads_accumulation`.
    pub fn training_with<M: LearnerModel>(
        &self,
        directory: impl AsRef<Path>,
        train: ShardedLoader<<M as TrainStep>::Input>,
        valid: EvalLoader<<M as InferenceStep>::Input>,
        config: &WrapConfig,
    ) -> SupervisedTraining<M> {
        let strategy = DdpStrategy::new(self.clone(), config.clone(), train.clone());
        let training = SupervisedTraining::new(directory, Arc::new(train), Arc::new(valid))
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)));
        if self.is_main() {
            return training;
        }
        training.renderer(Box::new(SilentRenderer)).with_metric_logger(SilentLogger).with_application_logger(None)
    }

    /// `metric` with the value of all ranks at the end of each split, which is what tables, early stopping and the choice of the best checkpoint read.
    ///
    /// For metrics that are means, see [`MeanMetric`]; for others there is [`Ddp::gathered_metric`]. While a split runs, rank 0 shows its own share.
    /// Register it on every rank, in the same order, on what [`Ddp::training`] returned.
    pub fn metric<Me: MeanMetric>(&self, metric: Me) -> GlobalMetric<Me> {
        GlobalMetric::new(self.clone(), metric)
    }

    /// `metric` computed from the items of all ranks, in rank order, at the end of each split: for AUROC, F-scores, precision and the like.
    ///
    /// Every rank holds what the metric reads of a whole split in host memory for that moment. Register it on every rank, in the same order, on what
    /// [`Ddp::training`] returned.
    pub fn gathered_metric<Me>(&self, metric: Me) -> GatheredMetric<Me>
    where
        Me: Metric + Numeric,
        Me::Input: GatherInput,
    {
        GatheredMetric::new(self.clone(), metric)
    }

    /// A checkpointer for Burn's `with_custom_checkpointers`, whose files only rank 0 writes and reads: on loading, the others get the content from it.
    ///
    /// Burn's `with_default_checkpointers` is enough where all ranks see one directory. `directory` and `name` are those of Burn's `FileCheckpointer`,
    /// which reads the same files; the default ones are `checkpoint` in the training's directory, and `model`, `optim` and `scheduler`.
    pub fn checkpointer(&self, directory: impl AsRef<Path>, name: &str) -> SharedCheckpointer {
        SharedCheckpointer::new(self.clone(), directory.as_ref(), name)
    }
}
