//! Trains a small convolutional network on handwritten digits.
//!
//! ```sh
//! cargo run -p burn-ddp-examples --bin mnist -- --nproc 1                          # one process
//! cargo run -p burn-ddp-examples --bin mnist                                       # two ranks, started by the program
//! burnrun --nproc-per-node 2 target/debug/mnist --epochs 2 --summary summary.json  # two ranks, started by a launcher
//! ```
#![forbid(unsafe_code)]

use burn_ddp::Ddp;
use burn_ddp_examples::mnist::{args::Args, train};
use clap::Parser;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    args.check()?;
    burn_ddp_examples::log_to_stderr();
    Ddp::launch(args.ranks(), |ddp| {
        train::run(&ddp, &args)?;
        Ok(ddp.finish()?)
    })
}
