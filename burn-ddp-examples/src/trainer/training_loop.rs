//! Training and evaluation over all ranks.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::prelude::*;

use super::args::Args;
use super::augment::Augment;
use super::picture::PictureBatcher;
use super::progress::Saves;
use super::source::{self, Source};
use crate::measure::{Losses, accuracy, recognised};
use crate::report::{Display, Epoch, Run, Work, conclude};

/// A network that tells what is on a picture.
pub trait Classifier: Module + 'static {
    /// `[items, 3, side, side]` → `[items, classes]`, unnormalised log-probabilities of the classes.
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

/// Items of a step for which `lr_of_256` is the highest learning rate; others in proportion (Goyal et al. 2017).
const ITEMS: f64 = 256.0;

/// Trains what `init` makes for a number of classes, evaluates after each epoch and reports. *Collective*: every rank calls it with
/// the same arguments.
///
/// SGD with momentum 0.9, as the papers have it. `lr_of_256` is the highest learning rate for steps of 256 items, unless `--lr` says
/// another one.
///
/// # Errors
///
/// Data that cannot be had, a peer that failed, a file that cannot be written, epochs shorter than a step.
pub fn run<M: Classifier>(
    ddp: &Ddp,
    args: &Args,
    lr_of_256: f64,
    init: impl FnOnce(usize, &Device) -> M,
) -> Result<()> {
    let Source { train, test, classes, channels } = source::load(ddp, args)?;

    let device = ddp.device()?.autodiff();
    ddp.seed(&device, args.seed);
    let config = WrapConfig::new().with_accumulation(args.accumulate);
    let mut model = ddp.wrap_with(init(classes, &device), &config)?;
    let mut optim = SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new().with_momentum(0.9).with_dampening(0.0)))
        .with_weight_decay(Some(WeightDecayConfig::new(args.weight_decay)))
        .init();

    let train = ddp
        .loader(PictureBatcher)
        .batch_size(args.batch_size)
        .shuffle(args.seed)
        .num_workers(args.num_workers)
        .build(train)?;
    let test = ddp.eval_loader(PictureBatcher).batch_size(args.batch_size).num_workers(args.num_workers).build(test)?;

    let steps_per_epoch = train.steps_per_epoch() / args.accumulate;
    ensure!(
        steps_per_epoch > 0,
        "--accumulate {}: an epoch has {} backward(s), so no step would be made",
        args.accumulate,
        train.steps_per_epoch()
    );
    let (steps, backwards) = (args.epochs * steps_per_epoch, steps_per_epoch * args.accumulate);
    let global_batch = train.items_per_step() * args.accumulate;
    let peak = args.lr.unwrap_or(lr_of_256 * global_batch as f64 / ITEMS);
    let criterion = CrossEntropyLossConfig::new().with_smoothing(Some(args.label_smoothing)).init(&device);

    let display = Display::new(ddp.is_main(), args.epochs, backwards);
    let mut work = Work::default();
    let saves = Saves::new(ddp, args)?;
    let mut progress = saves.load(&mut model, &mut optim, &train, args.epochs)?;
    for epoch in train.epochs(0..args.epochs) {
        let number = epoch.number();
        // What accumulation left out at the end of an epoch is all that was left of it.
        if number < progress.epochs.len() {
            continue;
        }
        let left = (epoch.len() - epoch.step()) / args.accumulate * args.accumulate;
        let augment = (!args.no_augment).then_some(Augment { seed: args.seed, epoch: number });
        display.begin(number);
        let start = Instant::now();
        let mut losses = Losses::default();
        for (backward, batch) in epoch.take(left).enumerate() {
            let batch = batch?;
            let images = batch.images(args.side(), &channels, augment.as_ref(), &device);
            let loss = criterion.forward(model.forward(images), batch.labels(&device));
            losses.push(&loss, batch.items());
            let grads = ddp.backward(&loss, &model)?; // of the step's last backward: averaged over all its items of all ranks
            if (backward + 1) % args.accumulate == 0 {
                let grads = GradientsParams::from_grads(grads, &model);
                model = optim.step(args.schedule.rate(peak, progress.step, steps), model, grads);
                progress.step += 1;
                if backward + 1 < left && saves.is_due(progress.step) {
                    work.items += progress.add(ddp, &mut losses)?;
                    saves.save(&progress, &model, &optim, &train)?;
                }
            }
            display.step();
        }
        work.items += progress.add(ddp, &mut losses)?;
        let train_loss = progress.take_loss();
        let train_time = start.elapsed();
        work.time += train_time;

        let valid = model.valid(); // no dropout, running statistics, no gradients
        let device = ddp.device()?;
        let test_accuracy = accuracy(ddp, &test, |batch| {
            let logits = valid.forward(batch.images(args.side(), &channels, None, &device));
            (recognised(logits, batch.labels(&device)), batch.items())
        })?;
        let epoch = Epoch { train_loss, test_accuracy, train_time };
        display.end(number, &epoch);
        progress.epochs.push(epoch);
        saves.save(&progress, &model, &optim, &train)?;
    }

    if let Some(file) = &args.save {
        ddp.save(&model, file)?;
    }
    conclude(ddp, &model, &display, Run { epochs: &progress.epochs, global_batch, work }, args.summary.as_deref())
}
