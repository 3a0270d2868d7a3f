//! Uneven shards with Burn's own loaders: one rank has more batches than the other.
//!
//! ```sh
//! cargo run --bin uneven_data   # two ranks
//! ```
//!
//! `ddp.loader` needs none of this: it cuts each step so that every rank has a batch and every item counts once. `join`
//! is for shards of given sizes, such as a file per rank. In torch: `with Join([model]):`.
#![forbid(unsafe_code)]

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::transform::PartialDataset;
use burn::nn::{LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::AdamConfig;
use burn_ddp::prelude::*;
use burn_ddp_examples::mnist::{MnistBatcher, MnistDataset, Split};

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("uneven_data.rs"));
    burn_ddp_examples::log_to_stderr();
    Ddp::launch(2, |ddp| {
        train(&ddp)?;
        Ok(ddp.finish()?)
    })
}

fn train(ddp: &Ddp) -> anyhow::Result<()> {
    let device = ddp.device()?.autodiff();
    device.seed(42);
    let mut model = ddp.wrap(LinearConfig::new(28 * 28, 10).init(&device))?;
    let mut optim = AdamConfig::new().init();
    // Rank 0 has 500 digits, rank 1 has 1,010: 16 and 32 batches, and the last ones are smaller.
    let (start, end) = if ddp.is_main() { (0, 500) } else { (500, 1510) };
    let own = PartialDataset::new(MnistDataset::sample(Split::Train)?, start, end);
    let train = DataLoaderBuilder::new(MnistBatcher).batch_size(32).set_device(device.clone()).build(own);

    let mut steps = 0;
    for batch in train.iter() {
        let batch = batch?;
        let items = batch.labels.dims()[0] as f64;
        let logits = model.forward(batch.images.flatten(1, 3));
        let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, batch.labels);
        // Each item counts the same, in whatever batch it is.
        let Some(grads) = ddp.weighted(items).backward(&loss, &model)? else { continue };
        model = optim.step(1e-3, model, grads);
        steps += 1;
    }
    // A rank that is done takes part in the reductions of the others with weight 0, and gets their model in the end.
    let missed = ddp.join(&mut model, &mut optim)?;
    println!("rank {}: {steps} steps, {missed} missed, parameters {}", ddp.rank(), &param_hash(&model)?[..16]);
    Ok(())
}
