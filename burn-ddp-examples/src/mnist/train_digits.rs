//! Training and evaluation over all ranks.

use std::time::Instant;

use anyhow::Result;
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_ddp::prelude::*;

use super::args::Args;
use super::{CnnConfig, MnistBatcher, source};
use crate::measure::{Losses, accuracy};
use crate::report::{Display, Epoch, Run, Work, conclude};
use crate::schedule::Schedule;

/// Trains, evaluates after each epoch and reports. *Collective*: every rank calls it with the same arguments.
///
/// # Errors
///
/// Data that cannot be had, a peer that failed, a file that cannot be written.
pub fn run(ddp: &Ddp, args: &Args) -> Result<()> {
    let (train_data, test_data) = source::load(ddp, &args.data)?;

    let device = ddp.device()?.autodiff();
    ddp.seed(&device, args.seed);
    let model = CnnConfig::new().with_dropout(!args.no_dropout).init(&device);
    let mut model = ddp.wrap(model)?;
    let mut optim = AdamConfig::new().init();

    let train = ddp
        .loader(MnistBatcher)
        .batch_size(args.batch_size)
        .shuffle(args.seed)
        .num_workers(args.num_workers)
        .set_device(device)
        .build(train_data)?;
    let test =
        ddp.eval_loader(MnistBatcher).batch_size(args.batch_size).num_workers(args.num_workers).build(test_data)?;

    let steps = args.epochs * train.steps_per_epoch();
    let display = Display::new(ddp.is_main(), args.epochs, train.steps_per_epoch());
    let mut epochs = Vec::with_capacity(args.epochs);
    let (mut step, mut work) = (0, Work::default());
    for epoch in train.epochs(0..args.epochs) {
        let number = epoch.number();
        display.begin(number);
        let start = Instant::now();
        let mut losses = Losses::default();
        for batch in epoch {
            let batch = batch?;
            let [items] = batch.labels.dims();
            let loss = model.loss(batch);
            losses.push(&loss, items);
            let grads = ddp.backward(&loss, &model)?; // averaged over all ranks
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(Schedule::Cosine.rate(args.lr, step, steps), model, grads);
            step += 1;
            display.step();
        }
        let (loss_sum, items) = losses.total();
        let train_time = start.elapsed();
        work.items += items;
        work.time += train_time;

        let train_loss = ddp.sum(loss_sum)? / ddp.sum(items as f64)?;
        let valid = model.valid(); // no dropout, no gradients
        let test_accuracy = accuracy(ddp, &test, |batch| {
            let [items] = batch.labels.dims();
            (valid.correct(batch), items)
        })?;
        let epoch = Epoch { train_loss, test_accuracy, train_time };
        display.end(number, &epoch);
        epochs.push(epoch);
    }

    if let Some(file) = &args.save {
        ddp.save(&model, file)?;
    }
    let run = Run { epochs: &epochs, global_batch: train.items_per_step(), work };
    conclude(ddp, &model, &display, run, args.summary.as_deref())
}
