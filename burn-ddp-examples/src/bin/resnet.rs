//! Trains ResNet-18, 34 or 50 on pictures.
//!
//! ```sh
//! cargo run --bin resnet -- --width 16                           # two ranks, computed pictures, a thin network
//! cargo run --bin resnet --features download -- --data cifar10   # CIFAR-10
//! cargo run --bin resnet --features images -- --data folder:DIR  # pictures of your own, 224 × 224
//! burnrun -n 2 target/debug/resnet --width 16                    # two ranks, started by a launcher
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::{Result, ensure};
use burn::nn::BatchNorm;
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp_examples::vision::resnet::Depth;
use burn_ddp_examples::vision::{PictureArgs, ResNetConfig, train_pictures};
use burn_ddp_examples::{log_to_stderr, trainer};
use clap::Parser;

/// Trains a residual network on pictures, data-parallel.
///
/// Without a launcher, the program starts its ranks itself; under burnrun or torchrun it joins their job.
/// The default of `--lr` is 0.1 for steps of 256 pictures, and proportional to the pictures of a step.
#[derive(Parser, Debug)]
#[command(version)]
pub(crate) struct Cli {
    /// Layers of the network
    #[arg(long, value_enum, default_value = "18")]
    depth: Depth,

    /// Channels of the first stage; 64 is the paper's network
    #[arg(long, default_value_t = 64, value_name = "CHANNELS")]
    width: usize,

    /// Initialise blocks as the identity, which helps with large batches
    #[arg(long)]
    zero_init_residual: bool,

    /// Normalise over the batches of all ranks together, so that 2 ranks × 16 items learn like 1 × 32
    #[arg(long)]
    sync_bn: bool,

    #[command(flatten)]
    common: PictureArgs,
}

fn main() -> ExitCode {
    log_to_stderr();
    trainer::exit_code(run(&Cli::parse()))
}

pub(crate) fn run(Cli { depth, width, zero_init_residual, sync_bn, common }: &Cli) -> Result<ExitCode> {
    common.check()?;
    ensure!(*width > 0, "--width 0: a layer has at least one channel");
    let config = |classes| ResNetConfig {
        depth: *depth,
        classes,
        side: common.pictures.side(),
        width: *width,
        zero_init_residual: *zero_init_residual,
    };
    trainer::launch(common.options.nproc, |ddp| match sync_bn {
        false => train_pictures::run(ddp, common, 0.1, |classes, device| config(classes).init::<BatchNorm>(device)),
        true => train_pictures::run(ddp, common, 0.1, |classes, device| config(classes).init::<SyncBatchNorm>(device)),
    })
}
