//! Checkpoints: kill it at any moment, start it again, on any number of ranks, and it goes on where it was. After
//! SIGTERM it saves first: no step is lost, and burnrun ends with 75, by which a script knows to start it again.
//!
//! ```sh
//! cargo run --bin checkpoint_resume -- /tmp/checkpoints   # one process
//!
//! # two ranks, restarted when one dies
//! burnrun -n 2 --max-restarts 3 target/debug/checkpoint_resume /tmp/checkpoints
//! ```
//!
//! Each item of each epoch is read once, however often the run was interrupted. In torch: `torch.save` of each state on
//! rank 0, a rename by hand, and no position in the epoch.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Context;
use burn::nn::{LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::AdamConfig;
use burn_ddp::prelude::*;
use burn_ddp_examples::mnist::{MnistBatcher, MnistDataset, Split};

const EPOCHS: usize = 3;

fn main() -> anyhow::Result<ExitCode> {
    burn_ddp_examples::help(include_str!("checkpoint_resume.rs"));
    burn_ddp_examples::log_to_stderr();
    let directory = std::env::args_os().nth(1).context("usage: checkpoint_resume DIRECTORY")?;
    let ddp = Ddp::init()?;
    let device = ddp.device()?.autodiff();
    ddp.seed(&device, 42);
    let mut model = ddp.wrap(LinearConfig::new(28 * 28, 10).init(&device))?;
    let mut optim = AdamConfig::new().init();
    let digits = MnistDataset::sample(Split::Train)?;
    let train = ddp.loader(MnistBatcher).batch_size(16).shuffle(42).set_device(device.clone()).build(digits)?;

    let checkpoints = ddp.checkpoints(&directory)?.keep_last(2);
    let mut step = 0;
    if let Some(found) = checkpoints.latest()? {
        model = found.model(model)?;
        optim = found.optimizer(optim, &model)?;
        train.resume(&found.value("loader")?)?;
        step = found.step();
        if ddp.is_main() {
            println!("going on after step {step}");
        }
    }
    'epochs: for epoch in train.epochs(0..EPOCHS) {
        for batch in epoch {
            let batch = batch?;
            let logits = model.forward(batch.images.flatten(1, 3));
            let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, batch.labels);
            let Some(grads) = ddp.backward(&loss, &model)? else { continue };
            model = optim.step(1e-3, model, grads);
            step += 1;
            // The same on all ranks after each step.
            let stops = ddp.stop_requested();
            if step % 50 == 0 || stops {
                // All ranks call this. When it returns, the complete checkpoint is on disk.
                checkpoints.save(step, |c| {
                    c.model(&model)?;
                    c.optimizer(&optim, &model)?;
                    c.value("loader", &train.position())
                })?;
            }
            if stops {
                break 'epochs;
            }
        }
    }
    println!("rank {}: {step} steps, parameters {}", ddp.rank(), &param_hash(&model)?[..16]);
    let code = ddp.exit_code(); // 75 if the ranks were stopped
    ddp.finish()?;
    Ok(code)
}
