//! docs/trainer.md.
#![allow(unused)]

use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{ClassificationOutput, InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainStep};
use burn_ddp::data::EvalLoader;

use super::*;

/// A model of Burn's trainer that classifies.
trait Classifier:
    LearnerModel
    + TrainStep<Input = Tensor<2>, Output = ClassificationOutput>
    + InferenceStep<Input = Tensor<2>, Output = ClassificationOutput>
{
}

fn training<M: Classifier>(ddp: &Ddp, model: M, train_data: Data, valid_data: Data) -> anyhow::Result<()> {
    let batcher = MyBatcher;
    let train = ddp.loader(batcher.clone()).batch_size(64).shuffle(42).num_workers(2).build(train_data)?;
    let valid = ddp.eval_loader(batcher).batch_size(64).build(valid_data)?;

    let result = ddp
        .training("artifacts", train, valid)
        .metrics((ddp.metric(AccuracyMetric::new()), ddp.metric(LossMetric::new())))
        .with_default_checkpointers()
        .num_epochs(10)
        .summary()
        .launch(Learner::new(model, AdamConfig::new().init(), 1e-3));
    if let Some(error) = result.error {
        anyhow::bail!("{error}");
    }
    ddp.save(&result.model, "model")?;
    Ok(())
}

type Loaders = (ShardedLoader<Tensor<2>>, EvalLoader<Tensor<2>>);

fn sharding<M: Classifier>(ddp: &Ddp, model: M, (train, valid): Loaders) -> anyhow::Result<()> {
    let config = WrapConfig::new().with_sharding(Sharding::Parameters);
    let learner = ddp.learner(model, AdamWConfig::new().init(), 1e-3, &config)?;
    let result = ddp.training_with("artifacts", train, valid, &config).num_epochs(10).launch(learner);
    ddp.save(&result.model, "model")?;
    Ok(())
}

fn checkpointers<M: Classifier>(ddp: &Ddp, training: SupervisedTraining<M>) -> SupervisedTraining<M> {
    let files = |name| ddp.checkpointer("artifacts/checkpoint", name);
    training.with_custom_checkpointers(files("model"), files("optim"), files("scheduler")).checkpoint(3)
}
