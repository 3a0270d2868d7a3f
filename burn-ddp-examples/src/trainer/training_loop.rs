//! Training and evaluation over all ranks.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::prelude::*;
use burn_ddp::data::{EvalLoader, ShardedLoader};
use burn_ddp::prelude::*;

use super::checkpoints::{Progress, Saves};
use super::display::Display;
use super::loss_and_accuracy::{Losses, accuracy};
use super::options::{LoopOptions, Options};
use super::summary::{Epoch, RankReport, Summary, Work};

/// Loss of a trainer's model on a batch, and the number of items that it classifies correctly.
pub(crate) trait Task {
    /// The network.
    type Model: Module + 'static;
    /// The items of a backward on one rank.
    type Batch: Clone + Send + 'static;

    /// Plural noun for the items.
    const ITEMS: &str = "samples";

    /// True for the path of a parameter that is read in f32 whatever the precision.
    fn in_full_precision(path: &str) -> bool {
        let _ = path;
        false
    }

    /// Mean loss of `batch` in `epoch`, counted from 0, as `[1]`, and the number of its items.
    fn loss(&self, model: &Self::Model, batch: Self::Batch, epoch: usize) -> (Tensor<1>, usize);

    /// Number of items of `batch` that `model` classifies correctly, as `[1]`, and the number of all its items.
    fn correct(&self, model: &Self::Model, batch: Self::Batch) -> (Tensor<1, Int>, usize);
}

/// A training, ready to be run.
pub(crate) struct Training<'a, T: Task> {
    pub(crate) ddp: &'a Ddp,
    pub(crate) options: &'a Options,
    pub(crate) steps: &'a LoopOptions,
    pub(crate) task: T,
    /// The model, not yet wrapped.
    pub(crate) model: T::Model,
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) sharding: Sharding,
    /// Made by [`loaders`], as is `test`.
    pub(crate) train: ShardedLoader<T::Batch>,
    pub(crate) test: EvalLoader<T::Batch>,
    pub(crate) peak_lr: f64,
}

/// Loaders of the training data, whose batches are made on `device`, and of the test data. *Collective*.
pub(crate) fn loaders<I: 'static, O: Send + 'static>(
    ddp: &Ddp,
    options: &Options,
    batcher: impl Batcher<I, O> + Clone + 'static,
    device: &Device,
    data: [impl Dataset<I> + 'static; 2],
) -> Result<(ShardedLoader<O>, EvalLoader<O>)> {
    let &Options { batch_size, seed, num_workers, .. } = options;
    let [train, test] = data;
    let sharded = ddp.loader(batcher.clone()).batch_size(batch_size).shuffle(seed).num_workers(num_workers);
    let eval = ddp.eval_loader(batcher).batch_size(batch_size).num_workers(num_workers);
    Ok((sharded.set_device(device.clone()).build(train)?, eval.build(test)?))
}

impl<T: Task> Training<'_, T> {
    /// Trains, evaluates after each epoch, reports, and returns the trained model; `None` if the ranks were asked to
    /// stop, and have saved a checkpoint. *Collective*: every rank calls it with the same options.
    pub(crate) fn run(self) -> Result<Option<T::Model>> {
        let Training { ddp, options, task, sharding, train, test, .. } = self;
        let schedule = self.steps.schedule;
        let shards = sharding == Sharding::Parameters;
        ensure!(
            !shards || test.num_items() >= ddp.world_size(),
            "{} test items for {} ranks: each rank of a sharded model evaluates at least one",
            test.num_items(),
            ddp.world_size()
        );
        let config = WrapConfig::new().with_sharding(sharding).with_compute_dtype(self.steps.precision);
        let config = config.with_full_precision_where(&self.model, T::in_full_precision)?;
        let mut model = ddp.wrap_with(self.model, &config)?;
        let mut optimizer = ddp.optimizer(self.optimizer, &model)?;

        let steps = options.epochs * train.steps_per_epoch();
        let display = Display::new(ddp.is_main(), options.epochs, train.steps_per_epoch());
        let mut work = Work::default();
        let saves = Saves::new(ddp, self.steps)?;
        let mut progress = saves.load(&mut model, &mut optimizer, &train, options.epochs)?;
        // Returns false if the ranks stop in the evaluation: it is made again when the training goes on.
        let end_epoch = |progress: &mut Progress, model: &T::Model, optimizer: &ModuleOptimizer, train_time| {
            let valid = model.valid(); // without dropout and gradients, by running statistics
            let correct = |batch| task.correct(&valid, batch);
            let test_accuracy = accuracy(ddp, &test, shards, || saves.stop_wished(ddp), correct)?;
            let stops = saves.stop_requested(ddp);
            if !stops {
                let epoch = Epoch { train_loss: progress.take_loss(), test_accuracy, train_time };
                display.end(progress.epochs.len(), &epoch);
                progress.epochs.push(epoch);
            }
            saves.save(progress, model, optimizer, &train)?;
            anyhow::Ok(!stops)
        };
        if progress.epochs.len() < train.epoch() && !end_epoch(&mut progress, &model, &optimizer, Duration::ZERO)? {
            return Saves::stopped(ddp, &progress);
        }
        for mut epoch in train.epochs(0..options.epochs) {
            let number = epoch.number();
            display.begin(number);
            let start = Instant::now();
            let mut losses = Losses::default();
            while let Some(batch) = epoch.next() {
                let (loss, items) = task.loss(&model, batch?, number);
                // A rank may repeat an item that does not count, to stay in step with the others.
                let counts = epoch.batch_items() > 0;
                losses.push(&loss, if counts { items } else { 0 });
                // In the last backward of a step: the mean over all its items. None, too, if f16 overflows.
                if let Some(grads) = ddp.backward(&loss, &model)? {
                    model = optimizer.step(schedule.rate(self.peak_lr, progress.step, steps), model, grads);
                    progress.step += 1;
                    display.step();
                    let stops = saves.stop_requested(ddp);
                    if stops || epoch.step() < epoch.len() && saves.is_due(progress.step) {
                        work.items += progress.add(ddp, &mut losses)?;
                        saves.save(&progress, &model, &optimizer, &train)?;
                    }
                    if stops {
                        return Saves::stopped(ddp, &progress);
                    }
                }
            }
            work.items += progress.add(ddp, &mut losses)?;
            let train_time = start.elapsed();
            work.time += train_time;
            if !end_epoch(&mut progress, &model, &optimizer, train_time)? {
                return Saves::stopped(ddp, &progress);
            }
        }

        if let Some(file) = &options.save {
            ddp.save(&model, file)?;
        }
        let ranks = RankReport::gather(ddp, &model, Some(&optimizer), work)?;
        let summary = Summary::new(ddp.engine(), train.items_per_step(), &progress.epochs, &ranks);
        display.finish(&summary.speed(T::ITEMS));
        summary.conclude(ddp, options.summary.as_deref())?;
        Ok(Some(model))
    }
}
