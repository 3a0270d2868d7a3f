//! Trains AlexNet on pictures.
//!
//! ```sh
//! cargo run --bin alexnet -- --width 16                           # two ranks, computed pictures, a thin network
//! cargo run --bin alexnet --features download -- --data cifar10   # CIFAR-10
//! cargo run --bin alexnet --features images -- --data folder:DIR  # pictures of your own, 224 × 224
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::{Result, ensure};
use burn_ddp_examples::vision::{AlexNetConfig, PictureArgs, train_pictures};
use burn_ddp_examples::{log_to_stderr, trainer};
use clap::Parser;

/// Trains AlexNet on pictures, data-parallel.
///
/// Without a launcher, the program starts its ranks itself; under burnrun or torchrun it joins their job.
/// The default of `--lr` is 0.05 for steps of 256 pictures, and proportional to the pictures of a step.
#[derive(Parser, Debug)]
#[command(version)]
struct Cli {
    /// Channels of the first convolution; 64 is the paper's network
    #[arg(long, default_value_t = 64, value_name = "CHANNELS")]
    width: usize,

    /// No dropout: runs with equal ranks × batch size, such as 1 × 32 and 2 × 16, then learn alike
    #[arg(long)]
    no_dropout: bool,

    #[command(flatten)]
    common: PictureArgs,
}

fn main() -> ExitCode {
    log_to_stderr();
    trainer::exit_code(run(&Cli::parse()))
}

fn run(Cli { width, no_dropout, common }: &Cli) -> Result<ExitCode> {
    common.check()?;
    ensure!(*width > 0, "--width 0: a layer has at least one channel");
    trainer::launch(common.options.nproc, |ddp| {
        train_pictures::run(ddp, common, 0.05, |classes, device| {
            let config = AlexNetConfig { classes, side: common.pictures.side(), width: *width, dropout: !no_dropout };
            config.init(device)
        })
    })
}
