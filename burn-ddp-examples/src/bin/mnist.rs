//! Trains a small convolutional network on handwritten digits.
//!
//! ```sh
//! cargo run --bin mnist -- --nproc 1                                # one process
//! cargo run --bin mnist                                             # two ranks, started by the program
//! burnrun -n 2 target/debug/mnist --epochs 2 --summary summary.json # two ranks, started by a launcher
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;
use burn_ddp_examples::mnist::train_digits::{self, DigitArgs};
use burn_ddp_examples::{log_to_stderr, trainer};
use clap::Parser;

/// Trains a small convolutional network on handwritten digits, data-parallel.
///
/// Without a launcher, the program starts its ranks itself; under burnrun or torchrun it joins their job.
#[derive(Parser, Debug)]
#[command(version)]
pub(crate) struct Cli {
    #[command(flatten)]
    digits: DigitArgs,

    #[command(flatten)]
    steps: trainer::LoopOptions,
}

fn main() -> ExitCode {
    log_to_stderr();
    trainer::exit_code(run(&Cli::parse()))
}

pub(crate) fn run(Cli { digits, steps }: &Cli) -> Result<ExitCode> {
    digits.check()?;
    steps.check()?;
    trainer::launch(digits.options.nproc, |ddp| train_digits::run(ddp, digits, steps))
}
