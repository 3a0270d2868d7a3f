//! Trains a small convolutional network on handwritten digits.
//!
//! ```sh
//! cargo run -p burn-ddp-examples --bin mnist -- --nproc 1                          # one process
//! cargo run -p burn-ddp-examples --bin mnist                                       # two ranks, started by the program
//! burnrun --nproc-per-node 2 target/debug/mnist --epochs 2 --summary summary.json  # two ranks, started by a launcher
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use burn_ddp::{Ddp, Error};
use burn_ddp_examples::mnist::{args::Args, train};
use clap::Parser;

fn main() -> ExitCode {
    burn_ddp_examples::log_to_stderr();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The causes in one line: the launcher repeats a rank's last lines, and a backtrace would push them out.
            eprintln!("Error: {error:#}");
            match error.downcast_ref() {
                // As the rank that failed, or 130 after Ctrl-C.
                Some(Error::Job { exit_code, .. }) => ExitCode::from(u8::try_from(*exit_code).unwrap_or(1)),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    args.check()?;
    Ddp::launch(args.ranks(), |ddp| {
        train::run(&ddp, args)?;
        Ok(ddp.finish()?)
    })
}
