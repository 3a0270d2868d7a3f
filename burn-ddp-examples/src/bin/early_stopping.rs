//! Early stopping in a loop of your own: every rank must stop in the same epoch.
//!
//! ```sh
//! cargo run --bin early_stopping   # two ranks
//! ```
//!
//! The ranks must decide by the same number: a loss over all ranks, not each rank's own. A rank that stopped by itself
//! would end the job with an error that says so. In torch: `dist.all_reduce` of a flag before the `break`.
#![forbid(unsafe_code)]

use burn::data::dataset::transform::PartialDataset;
use burn::nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn_ddp::data::EvalLoader;
use burn_ddp::prelude::*;
use burn_ddp_examples::mnist::{MnistBatch, MnistBatcher, MnistDataset, Split};

/// Epochs without improvement after which training ends.
const PATIENCE: usize = 2;

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("early_stopping.rs"));
    burn_ddp_examples::log_to_stderr();
    Ddp::launch(2, |ddp| {
        train(&ddp)?;
        Ok(ddp.finish()?)
    })
}

fn train(ddp: &Ddp) -> anyhow::Result<()> {
    let device = ddp.device()?.autodiff();
    ddp.seed(&device, 42);
    let mut model = ddp.wrap(LinearConfig::new(28 * 28, 10).init(&device))?;
    let mut optim = AdamConfig::new().init();
    // So few digits that the model soon overfits.
    let few = PartialDataset::new(MnistDataset::sample(Split::Train)?, 0, 256);
    let train = ddp.loader(MnistBatcher).batch_size(16).shuffle(42).set_device(device.clone()).build(few)?;
    let test = ddp.eval_loader(MnistBatcher).batch_size(64).build(MnistDataset::sample(Split::Test)?)?;

    let (mut best, mut since) = (f64::INFINITY, 0);
    for epoch in train.epochs(0..100) {
        let number = epoch.number();
        for batch in epoch {
            let loss = loss(&model, batch?);
            let Some(grads) = ddp.backward(&loss, &model)? else { continue };
            model = optim.step(1e-2, model, grads);
        }
        let loss = test_loss(ddp, &model, &test)?; // the same number on every rank
        if ddp.is_main() {
            println!("epoch {number}: test loss {loss:.4}");
        }
        (best, since) = if loss < best { (loss, 0) } else { (best, since + 1) };
        if since == PATIENCE {
            println!("rank {}: no improvement since epoch {}, stopping", ddp.rank(), number - since);
            break;
        }
    }
    Ok(())
}

fn loss(model: &Linear, batch: MnistBatch) -> Tensor<1> {
    let logits = model.forward(batch.images.flatten(1, 3));
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, batch.labels)
}

/// Mean loss over all items; each rank reads its share.
fn test_loss(ddp: &Ddp, model: &Linear, test: &EvalLoader<MnistBatch>) -> anyhow::Result<f64> {
    let model = model.valid();
    let (mut sum, mut items) = (0.0, 0.0);
    for batch in test.iter() {
        let batch = batch?;
        let count = batch.labels.dims()[0] as f64;
        sum += loss(&model, batch).into_scalar::<f64>() * count;
        items += count;
    }
    Ok(ddp.sum(sum)? / ddp.sum(items)?)
}
