//! An existing loop with Burn's own data loader; the lines marked `// +` are all that changes.
//!
//! ```sh
//! cargo run --bin existing_loop             # as before: one process
//! burnrun -n 2 target/debug/existing_loop   # two ranks
//! ```
//!
//! In torch: `init_process_group`, `DDP(model)`, `DistributedSampler` with `drop_last=True`.
#![forbid(unsafe_code)]

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::Dataset;
use burn::nn::{LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::AdamConfig; // +, without `GradientsParams`
use burn_ddp::data::{DistributedSampler, ShardedDataset}; // +
use burn_ddp::prelude::*; // +
use burn_ddp_examples::mnist::{MnistBatcher, MnistDataset, Split};

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("existing_loop.rs"));
    let ddp = Ddp::init()?; // +
    let device = ddp.device()?.autodiff(); // +, was `Device::default().autodiff()`
    device.seed(42);
    let model = LinearConfig::new(28 * 28, 10).init(&device);
    let mut model = ddp.wrap(model)?; // +
    let mut optim = AdamConfig::new().init();
    let digits = MnistDataset::sample(Split::Train)?;
    // A share of the same size for every rank, so that all make equally many steps: what does not divide is left out.
    let sampler = DistributedSampler::new(digits.len(), ddp.rank(), ddp.world_size())?.drop_last(true); // +
    let digits = ShardedDataset::from_sampler(digits, &sampler)?; // +
    let train =
        DataLoaderBuilder::new(MnistBatcher).batch_size(32).shuffle(42).set_device(device.clone()).build(digits);

    for epoch in 0..3 {
        let (mut sum, mut steps) = (0.0, 0.0);
        for batch in train.iter() {
            let batch = batch?;
            let logits = model.forward(batch.images.flatten(1, 3));
            let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, batch.labels);
            sum += loss.clone().into_scalar::<f64>();
            steps += 1.0;
            let Some(grads) = ddp.backward(&loss, &model)? else { continue }; // +, was `from_grads(loss.backward(), …)`
            model = optim.step(1e-3, model, grads);
        }
        let loss = ddp.mean(sum / steps)?; // +, was the loss of this process
        if ddp.is_main() {
            // +
            println!("epoch {epoch}: loss {loss:.4}");
        }
    }
    Ok(ddp.finish()?) // +
}
