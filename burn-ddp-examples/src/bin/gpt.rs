//! Trains a small transformer to predict the next byte of a text, then generates text with it.
//!
//! ```sh
//! cargo run --bin gpt                                         # two ranks, on this project's documentation
//! cargo run --bin gpt -- --text my.txt --layers 4 --width 128 # a larger one, on a file of your own
//! cargo run --bin gpt -- --shard --nproc 4                    # a quarter of parameters, gradients, state per rank
//! burnrun -n 2 target/debug/gpt --summary summary.json        # two ranks, started by a launcher
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;
use burn_ddp_examples::text::train_text::{self, TextArgs};
use burn_ddp_examples::{log_to_stderr, trainer};
use clap::Parser;

/// Trains a transformer to predict the next byte of a text, data-parallel, then generates text with it.
///
/// Without a launcher, the program starts its ranks itself; under burnrun or torchrun it joins their job.
/// Losses are in nats per byte; accuracy is the share of bytes that are predicted correctly.
#[derive(Parser, Debug)]
#[command(version)]
pub(crate) struct Cli {
    #[command(flatten)]
    text: TextArgs,
}

fn main() -> ExitCode {
    log_to_stderr();
    trainer::exit_code(run(&Cli::parse()))
}

pub(crate) fn run(Cli { text }: &Cli) -> Result<ExitCode> {
    text.check()?;
    trainer::launch(text.options.nproc, |ddp| train_text::run(ddp, text))
}
