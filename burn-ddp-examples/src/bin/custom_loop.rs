//! The smallest complete training loop: copy it.
//!
//! ```sh
//! cargo run --bin custom_loop             # one process
//! burnrun -n 2 target/debug/custom_loop   # two ranks on this machine
//! ```
#![forbid(unsafe_code)]

use burn::nn::{LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::AdamConfig;
use burn_ddp::prelude::*;
use burn_ddp_examples::mnist::{MnistBatcher, MnistDataset, Split};

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("custom_loop.rs"));
    let ddp = Ddp::init()?; // this rank and its peers; a world of one without a launcher
    let device = ddp.device()?.autodiff();

    ddp.seed(&device, 42); // the same weights in every run; after `wrap` each rank draws its own random numbers
    let mut model = ddp.wrap(LinearConfig::new(28 * 28, 10).init(&device))?; // same type, rank 0's weights everywhere
    let mut optim = AdamConfig::new().init(); // as always: it sees averaged gradients

    let train = ddp
        .loader(MnistBatcher)
        .batch_size(32) // of each rank: two ranks make steps of 64 items
        .shuffle(42) // all ranks agree on the order, another one in each epoch
        .set_device(device.clone())
        .build(MnistDataset::sample(Split::Train)?)?; // every rank opens all data and reads its share

    for epoch in train.epochs(0..3) {
        let (number, mut sum, mut items) = (epoch.number(), 0.0, 0.0);
        for batch in epoch {
            let batch = batch?; // a file that cannot be read ends the job on all ranks, with this error
            let count = batch.labels.dims()[0] as f64;
            let logits = model.forward(batch.images.flatten(1, 3));
            let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, batch.labels); // mean over the batch
            sum += loss.clone().into_scalar::<f64>() * count;
            items += count;
            // The averages over all ranks, each item counting once. `None` comes with accumulation only: no step yet.
            let Some(grads) = ddp.backward(&loss, &model)? else { continue };
            model = optim.step(1e-3, model, grads); // the same step on every rank, so the weights stay the same
        }
        // Every rank must call this, not only the one that prints: it would wait for the others.
        let loss = ddp.sum(sum)? / ddp.sum(items)?;
        if ddp.is_main() {
            println!("epoch {number}: loss {loss:.4}");
        }
    }

    println!("rank {} of {}: parameters {}", ddp.rank(), ddp.world_size(), &param_hash(&model)?[..16]); // all the same
    Ok(ddp.finish()?) // waits for all ranks
}
