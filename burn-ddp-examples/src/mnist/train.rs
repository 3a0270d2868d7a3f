//! Training and evaluation over all ranks.

use std::f64::consts::PI;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_ddp::data::EvalLoader;
use burn_ddp::prelude::*;

use super::args::Args;
use super::report::{Display, Epoch, RankReport, Summary};
use super::{Cnn, CnnConfig, MnistBatch, MnistBatcher, source};

/// Share of all steps during which the learning rate rises.
const WARM_UP: f64 = 0.1;

/// Trains, evaluates after each epoch and reports. *Collective*: every rank calls it with the same arguments.
///
/// # Errors
///
/// Data that cannot be had, a peer that failed, a file that cannot be written.
pub fn run(ddp: &Ddp, args: &Args) -> Result<()> {
    if let Some(ranks) = args.nproc {
        let world_size = ddp.world_size();
        ensure!(
            ranks == world_size,
            "--nproc {ranks}, but the launcher started {world_size} rank(s): leave out --nproc"
        );
    }
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
    let (mut step, mut own_items, mut own_time) = (0, 0, Duration::ZERO);
    for epoch in train.epochs(0..args.epochs) {
        let number = epoch.number();
        display.begin(number);
        let start = Instant::now();
        let mut losses = Vec::with_capacity(epoch.len());
        for batch in epoch {
            let batch = batch?;
            let [items] = batch.labels.dims();
            let loss = model.loss(batch);
            // Read when the epoch is over, so that no step waits for the device.
            losses.push((loss.clone().inner(), items));
            let grads = ddp.backward(&loss, &model)?; // averaged over all ranks
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(learning_rate(args.lr, step, steps), model, grads);
            step += 1;
            display.step();
        }
        let (loss_sum, items) = total_loss(losses);
        let train_time = start.elapsed();
        own_items += items;
        own_time += train_time;

        let train_loss = ddp.sum(loss_sum)? / ddp.sum(items as f64)?;
        let test_accuracy = accuracy(ddp, &model, &test)?;
        let epoch = Epoch { train_loss, test_accuracy, train_time };
        display.end(number, &epoch);
        epochs.push(epoch);
    }

    if let Some(file) = &args.save {
        ddp.save(&model, file)?;
    }
    let own = RankReport {
        items: own_items,
        seconds: own_time.as_secs_f64(),
        wait_seconds: ddp.stats().wait.as_secs_f64(),
        param_hash: param_hash(&model)?,
    };
    let ranks = ddp.group().all_gather_object(&own)?;
    let summary = Summary::new(ddp.engine(), train.items_per_step(), &epochs, &ranks);
    display.finish(&summary.speed());
    if let Some(file) = args.summary.as_ref().filter(|_| ddp.is_main()) {
        summary.write(file)?;
    }
    ensure!(
        ranks.iter().all(|rank| rank.param_hash == own.param_hash),
        "the ranks ended with different parameters: {:?}",
        summary.param_hash
    );
    Ok(())
}

/// Share of the test items that `model` recognises, over all ranks. Each rank reads its share; none is read twice.
fn accuracy(ddp: &Ddp, model: &Cnn, test: &EvalLoader<MnistBatch>) -> Result<f64> {
    let model = model.valid(); // no dropout, no gradients
    let (mut correct, mut items) = (0, 0);
    for batch in test.iter() {
        let batch = batch?;
        items += batch.labels.dims()[0] as i64;
        correct += model.correct(batch).into_scalar::<i64>();
    }
    let mut counts = [correct, items];
    ddp.group().all_reduce(&mut counts, ReduceOp::Sum)?;
    Ok(counts[0] as f64 / counts[1] as f64)
}

/// Sum of the losses of all items, and how many items these were.
fn total_loss(losses: Vec<(Tensor<1>, usize)>) -> (f64, u64) {
    let add = |(sum, count), (mean, items): (Tensor<1>, usize)| {
        (sum + mean.into_scalar::<f64>() * items as f64, count + items as u64)
    };
    losses.into_iter().fold((0.0, 0), add)
}

/// Rises linearly to `peak`, then falls to zero along a cosine.
fn learning_rate(peak: f64, step: usize, steps: usize) -> f64 {
    let progress = (step + 1) as f64 / (steps + 1) as f64;
    if progress < WARM_UP {
        peak * progress / WARM_UP
    } else {
        peak * (1.0 + (PI * (progress - WARM_UP) / (1.0 - WARM_UP)).cos()) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_rises_then_falls_and_is_never_zero() {
        let rates: Vec<f64> = (0..99).map(|step| learning_rate(0.5, step, 99)).collect();
        assert!(rates.iter().all(|&rate| rate > 0.0 && rate <= 0.5));
        assert_eq!(rates[9], 0.5);
        assert!(rates[..10].is_sorted() && rates[9..].is_sorted_by(|a, b| a > b));
        assert!(learning_rate(0.5, 0, 1) > 0.0);
    }
}
