//! Gradient accumulation: four micro-batches per optimizer step, and one reduction for all of them.
//!
//! ```sh
//! cargo run --bin accumulation   # two ranks
//! ```
//!
//! Two ranks with four micro-batches of 8 each follow the loss curve of two ranks with one batch of 32, but hold the
//! activations of 8 items only. In torch: `with model.no_sync():` around all backwards but the last, and `loss / 4`.
#![forbid(unsafe_code)]

use burn::data::dataset::transform::PartialDataset;
use burn::nn::{LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::SgdConfig;
use burn_ddp::prelude::*;
use burn_ddp_examples::mnist::{MnistBatcher, MnistDataset, Split};

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("accumulation.rs"));
    burn_ddp_examples::log_to_stderr();
    Ddp::launch(2, |ddp| {
        let at_once = train(&ddp, 1, 32)?;
        let accumulated = train(&ddp, 4, 8)?;
        anyhow::ensure!((at_once - accumulated).abs() < 1e-4, "a loss of {at_once}, accumulated {accumulated}");
        Ok(ddp.finish()?)
    })
}

/// Mean loss of an epoch.
fn train(ddp: &Ddp, micro_batches: usize, batch_size: usize) -> anyhow::Result<f64> {
    let device = ddp.device()?.autodiff();
    ddp.seed(&device, 42);
    let model = LinearConfig::new(28 * 28, 10).init(&device);
    let mut model = ddp.wrap_with(model, &WrapConfig::new().with_accumulation(micro_batches))?;
    let mut optim = SgdConfig::new().init();
    let digits = PartialDataset::new(MnistDataset::sample(Split::Train)?, 0, 1024);
    let train = ddp.loader(MnistBatcher).batch_size(batch_size).shuffle(42).set_device(device.clone()).build(digits)?;

    let before = ddp.telemetry().stats();
    let mut sum = 0.0;
    for batch in train.iter() {
        let batch = batch?;
        let logits = model.forward(batch.images.flatten(1, 3));
        let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, batch.labels);
        sum += loss.clone().into_scalar::<f64>();
        // `None` before the last micro-batch of a step or epoch, then the mean over all items since the last step.
        let Some(grads) = ddp.backward(&loss, &model)? else { continue };
        model = optim.step(0.1, model, grads);
    }
    let loss = ddp.mean(sum / train.steps_per_epoch() as f64)?; // all batches have the same size here
    if ddp.is_main() {
        let (stats, backwards) = (ddp.telemetry().stats(), train.steps_per_epoch());
        let (steps, collectives) = (stats.steps - before.steps, stats.collectives - before.collectives);
        println!("{backwards} backwards, {steps} steps, {collectives} collectives: loss {loss:.6}");
    }
    Ok(loss)
}
