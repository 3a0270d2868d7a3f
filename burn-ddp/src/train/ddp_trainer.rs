//! The entry to Burn's trainer: methods of [`Ddp`] that make trainers, learners, metrics and checkpointers
//! data-parallel.

use std::panic::Location;
use std::path::Path;
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::ModuleOptimizer;
use burn::train::metric::{Metric, Numeric};
use burn::train::{InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainStep, TrainingStrategy};

use super::accepted_loaders::RankLoader;
use super::gathered_metric::{GatherInput, GatheredMetric};
use super::mean_metric::{GlobalMetric, MeanMetric};
use super::shared_checkpointer::SharedCheckpointer;
use super::silent_ui::{SilentLogger, SilentRenderer};
use super::strategy::DdpStrategy;
use super::{interrupted_epoch, sharded_learner};
use crate::checkpoint::scheme;
use crate::data::{EvalLoader, ShardedLoader};
use crate::{Ddp, Result, WrapConfig};

/// Burn's trainer on all ranks: methods of [`Ddp`], in the prelude with the feature `train`.
///
/// # Example
///
/// ```no_run
/// # // Not run: a dataset and a model that implements Burn's steps take more lines than the trainer.
/// # use burn::prelude::*;
/// use burn::optim::AdamConfig;
/// use burn::train::metric::{AccuracyMetric, AurocMetric, LossMetric};
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
///     let files = |name| ddp.checkpointer("artifacts/checkpoint", name); // on rank 0's machine only
///     let result = ddp
///         .training("artifacts", train, valid)
///         .metrics((ddp.metric(AccuracyMetric::new()), ddp.metric(LossMetric::new()))) // means over all ranks
///         .metric_valid_numeric(ddp.gathered_metric(AurocMetric::binary())) // from the items of all ranks
///         .with_custom_checkpointers(files("model"), files("optim"), files("scheduler"))
///         .num_epochs(10)
///         .launch(Learner::new(model, AdamConfig::new().init().into(), 1e-3));
///     match result.error {
///         Some(error) => Err(error.into()),
///         None => Ok(result.model),
///     }
/// }
/// ```
pub trait DdpTrainer {
    /// Burn's `SupervisedTraining::new` for all ranks: each trains on its share of `train`, gradients are averaged, and
    /// metrics made by [`metric`](Self::metric) are those of all ranks. Other settings and `launch` are as in Burn, and
    /// the same on every rank.
    ///
    /// Rank 0 renders, and writes metrics, logs and checkpoints to `directory`; the other ranks show and write nothing.
    /// The launched model must not be wrapped: `launch` gives rank 0's weights to all ranks. Rank 0 decides on early
    /// stopping. An interruption or an error on any rank ends training on all ranks after the same step, and all of
    /// them report it. `launch` is *collective*, this call is not.
    ///
    /// With a checkpointer the signal to [stop](Ddp::stop_requested) ends it after the same step on all ranks, with a
    /// checkpoint of the epoch under way and, in `checkpoint/position-<epoch>.json`, the position in it;
    /// `.checkpoint(epoch)` goes on from there. `launch` returns, and `ddp.stop_requested()` is true.
    ///
    /// # Panics
    ///
    /// If `directory` is a URL: Burn's trainer writes to folders.
    #[track_caller]
    fn training<M: LearnerModel>(
        &self,
        directory: impl AsRef<Path>,
        train: impl RankLoader<ShardedLoader<<M as TrainStep>::Input>>,
        valid: impl RankLoader<EvalLoader<<M as InferenceStep>::Input>>,
    ) -> SupervisedTraining<M> {
        self.training_with(directory, train, valid, &WrapConfig::new())
    }

    /// [`training`](Self::training) with settings for the gradients, the same on every rank. Set accumulation by Burn's
    /// `grads_accumulation`, which adds the gradients of k micro-batches; each counts the same, unless
    /// [`weigh`](crate::data::LoaderBuilder::weigh) gives them weights (tokens): then the sum is k times the mean over
    /// the tokens of all k micro-batches and ranks.
    fn training_with<M: LearnerModel>(
        &self,
        directory: impl AsRef<Path>,
        train: impl RankLoader<ShardedLoader<<M as TrainStep>::Input>>,
        valid: impl RankLoader<EvalLoader<<M as InferenceStep>::Input>>,
        config: &WrapConfig,
    ) -> SupervisedTraining<M>;

    /// Burn's `Learner::new` for [sharded](WrapConfig::with_sharding) parameters, with the settings that
    /// [`training_with`](Self::training_with) gets; without sharding it is no different. Not collective.
    ///
    /// While it trains, each rank holds its rows of sharded parameters and of their optimizer's state. Burn's
    /// checkpointers write whole values, which rank 0 gathers in host memory after each epoch; any number of ranks can
    /// load them, sharded or not. An `optimize` of your own gets this rank's parts, and must treat each element by
    /// itself. `result.model` is sharded: call [`Ddp::save`] or [`Ddp::unwrap`] with it on every rank.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) with the parameters that `optim` does not step element by element, as
    /// in [`Ddp::optimizer`]; errors of [`Ddp::wrap_with`] that a rank finds without the other ranks.
    ///
    /// # Example
    ///
    /// ```no_run
    /// # // Not run: a dataset and a model that implements Burn's steps take more lines than the trainer.
    /// # use burn::optim::AdamWConfig;
    /// # use burn::train::LearnerModel;
    /// # use burn_ddp::prelude::*;
    /// # fn train<M: LearnerModel>(ddp: &Ddp, model: M) -> anyhow::Result<()> {
    /// let config = WrapConfig::new().with_sharding(Sharding::Parameters);
    /// let learner = ddp.learner(model, AdamWConfig::new().init(), 1e-3, &config)?;
    /// // ddp.training_with("artifacts", train, valid, &config) … .launch(learner)
    /// # Ok(())
    /// # }
    /// ```
    fn learner<M: LearnerModel>(
        &self,
        model: M,
        optim: ModuleOptimizer,
        lr_scheduler: impl Into<ModuleLrScheduler>,
        config: &WrapConfig,
    ) -> Result<Learner<M>>;

    /// `metric` with its value over all ranks at the end of each split, which tables, early stopping and the choice of
    /// the best checkpoint use.
    ///
    /// For metrics that are means, see [`MeanMetric`]; for others, [`gathered_metric`](Self::gathered_metric). While a
    /// split runs, rank 0 shows its own share. Register it on every rank, in the same order, on the result of
    /// [`training`](Self::training).
    fn metric<Me: MeanMetric>(&self, metric: Me) -> GlobalMetric<Me>;

    /// `metric` computed from the items of all ranks, in rank order, at the end of each split: for AUROC, F-scores,
    /// precision and the like.
    ///
    /// Each rank holds the metric's inputs of its share of a split in host memory; at the end it receives those of the
    /// other ranks a few batches at a time. Register it on every rank, in the same order, on the result of
    /// [`training`](Self::training).
    fn gathered_metric<Me>(&self, metric: Me) -> GatheredMetric<Me>
    where
        Me: Metric + Numeric,
        Me::Input: GatherInput;

    /// The last epoch with a checkpoint in `directory`, that of the training, by Burn's default checkpointers, on rank
    /// 0's machine; `None` if there is none. For `.checkpoint(epoch)` in a program that is started again after it was
    /// stopped. *Collective*, one step in which a rank sends a few bytes to each other rank.
    ///
    /// # Errors
    ///
    /// [`Error::File`](crate::Error::File) if the directory cannot be read.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let folder = tempfile::tempdir()?;
    /// # let artifacts = folder.path().join("artifacts");
    /// let ddp = Ddp::init()?;
    /// assert_eq!(ddp.last_epoch(&artifacts)?, None); // nothing is there yet
    /// // let training = ddp.training(&artifacts, train, valid).with_default_checkpointers();
    /// // let training = match ddp.last_epoch(&artifacts)? {
    /// //     Some(epoch) => training.checkpoint(epoch),
    /// //     None => training,
    /// // };
    /// # anyhow::Ok(())
    /// ```
    fn last_epoch(&self, directory: impl AsRef<Path>) -> Result<Option<usize>>;

    /// A checkpointer for Burn's `with_custom_checkpointers` with files on rank 0's machine only: rank 0 writes and
    /// reads them, and broadcasts their contents.
    ///
    /// Burn's `with_default_checkpointers` is enough where all ranks share a directory. `directory` and `name` are
    /// those of Burn's `FileCheckpointer`, which reads the same files; the default ones are `checkpoint` in the
    /// training's directory, and `model`, `optim` and `scheduler`.
    ///
    /// # Panics
    ///
    /// If `directory` is a URL.
    #[track_caller]
    fn checkpointer(&self, directory: impl AsRef<Path>, name: &str) -> SharedCheckpointer;
}

impl DdpTrainer for Ddp {
    #[track_caller]
    fn training_with<M: LearnerModel>(
        &self,
        directory: impl AsRef<Path>,
        train: impl RankLoader<ShardedLoader<<M as TrainStep>::Input>>,
        valid: impl RankLoader<EvalLoader<<M as InferenceStep>::Input>>,
        config: &WrapConfig,
    ) -> SupervisedTraining<M> {
        refuse_url(directory.as_ref());
        let (train, valid) = (train.into(), valid.into());
        let folder = directory.as_ref().to_path_buf();
        let strategy = DdpStrategy::new(self.clone(), config.clone(), train.clone(), folder, Location::caller());
        let training = SupervisedTraining::new(directory, Arc::new(train), Arc::new(valid))
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)));
        if self.is_main() {
            return training;
        }
        training.renderer(Box::new(SilentRenderer)).with_metric_logger(SilentLogger).with_application_logger(None)
    }

    fn learner<M: LearnerModel>(
        &self,
        model: M,
        optim: ModuleOptimizer,
        lr_scheduler: impl Into<ModuleLrScheduler>,
        config: &WrapConfig,
    ) -> Result<Learner<M>> {
        sharded_learner::new(self, model, optim, lr_scheduler.into(), config)
    }

    #[track_caller]
    fn metric<Me: MeanMetric>(&self, metric: Me) -> GlobalMetric<Me> {
        GlobalMetric::new(self.clone(), metric, Location::caller())
    }

    #[track_caller]
    fn gathered_metric<Me>(&self, metric: Me) -> GatheredMetric<Me>
    where
        Me: Metric + Numeric,
        Me::Input: GatherInput,
    {
        GatheredMetric::new(self.clone(), metric, Location::caller())
    }

    #[track_caller]
    fn last_epoch(&self, directory: impl AsRef<Path>) -> Result<Option<usize>> {
        interrupted_epoch::last_epoch(self, directory.as_ref())
    }

    #[track_caller]
    fn checkpointer(&self, directory: impl AsRef<Path>, name: &str) -> SharedCheckpointer {
        refuse_url(directory.as_ref());
        SharedCheckpointer::new(self.clone(), directory.as_ref(), name, Location::caller())
    }
}

#[track_caller]
fn refuse_url(directory: &Path) {
    assert!(
        scheme(directory).is_none(),
        "{} is no folder, which Burn's trainer writes to; `ddp.checkpoints` can be on S3",
        directory.display()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "s3://bucket/run is no folder")]
    fn a_url_is_refused_before_the_training() {
        let made = Ddp::spawn(1, |ddp| {
            ddp.checkpointer("s3://bucket/run", "model");
            Ok(())
        });
        made.unwrap();
    }
}
