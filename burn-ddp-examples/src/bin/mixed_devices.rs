//! Ranks on different kinds of devices in one job: the ranks share the model, not the hardware. Needs the crate feature
//! `ndarray` or `wgpu`.
//!
//! ```sh
//! cargo run --bin mixed_devices --features ndarray        # two ranks: Flex and NdArray
//! cargo run --bin mixed_devices --features ndarray,wgpu   # three: a GPU as well
//! ```
//!
//! Gradients of every device meet in host memory. Kernels of different devices round differently, so the losses follow
//! those of equal devices closely and not bit for bit; all ranks hold the same bits, as always. The slowest rank sets
//! the pace: give it smaller batches, each item still counts once. torch has no such thing: a process group's ranks use
//! one backend.
#![forbid(unsafe_code)]

use burn::nn::{LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn_ddp::prelude::*;
use burn_ddp_examples::mnist::{MnistBatcher, MnistDataset, Split};

/// The kinds of devices that are built in, one for each rank.
const KINDS: &[fn() -> Device] = &[
    Device::flex,
    #[cfg(feature = "ndarray")]
    #[allow(deprecated)]
    Device::ndarray,
    #[cfg(feature = "wgpu")]
    || Device::wgpu(DeviceKind::DefaultDevice),
];

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("mixed_devices.rs"));
    burn_ddp_examples::log_to_stderr();
    anyhow::ensure!(
        KINDS.len() > 1,
        "a second kind of device needs a build with `--features ndarray` or `--features wgpu`"
    );
    Ddp::launch(KINDS.len(), |ddp| {
        train(&ddp)?;
        Ok(ddp.finish()?)
    })
}

fn train(ddp: &Ddp) -> anyhow::Result<()> {
    let device = KINDS[ddp.local_rank() % KINDS.len()]().autodiff();
    println!("rank {}: {device:?}", ddp.rank());
    let mut model = ddp.wrap(LinearConfig::new(28 * 28, 10).init(&device))?;
    let mut optim = AdamConfig::new().init();
    let data = MnistDataset::sample(Split::Train)?;
    let train = ddp.loader(MnistBatcher).batch_size(32).shuffle(42).set_device(device.clone()).build(data)?;

    for epoch in train.epochs(0..3) {
        let (number, mut sum, mut steps) = (epoch.number(), 0.0, 0.0);
        for batch in epoch {
            let batch = batch?;
            let logits = model.forward(batch.images.flatten(1, 3));
            let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, batch.labels);
            sum += loss.clone().into_scalar::<f64>();
            steps += 1.0;
            let Some(grads) = ddp.backward(&loss, &model)? else { continue };
            model = optim.step(1e-3, model, grads);
        }
        let loss = ddp.mean(sum / steps)?;
        if ddp.is_main() {
            println!("epoch {number}: train loss {loss:.4}");
        }
    }
    println!("rank {}: parameters {}", ddp.rank(), &param_hash(&model)?[..16]);
    Ok(())
}
