//! Trains a small convolutional network on handwritten digits.
//!
//! ```sh
//! cargo run -p burn-ddp-examples --bin mnist -- --nproc 1                          # one process
//! cargo run -p burn-ddp-examples --bin mnist                                       # two ranks, started by the program
//! burnrun --nproc-per-node 2 target/debug/mnist --epochs 2 --summary summary.json  # two ranks, started by a launcher
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use burn_ddp_examples::mnist::{args::Args, train};
use burn_ddp_examples::{cli, log_to_stderr};
use clap::Parser;

fn main() -> ExitCode {
    log_to_stderr();
    let args = Args::parse();
    cli::exit_code(args.check().and_then(|()| cli::launch(args.nproc, |ddp| train::run(ddp, &args))))
}
