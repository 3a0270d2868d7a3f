//! Trains a small convolutional network on handwritten digits with Burn's `SupervisedTraining`. Needs the crate feature
//! `train`.
//!
//! ```sh
//! cargo run --bin mnist_learner --features train -- --nproc 1             # one process
//! cargo run --bin mnist_learner --features train                          # two ranks, started by the program
//! burnrun -n 2 target/debug/mnist_learner --artifacts artifacts           # two ranks, started by a launcher
//! target/debug/mnist_learner --artifacts artifacts --epochs 8 --resume 6  # two more epochs
//! burnrun -n 2 target/debug/mnist_learner --artifacts artifacts --resume last  # after SIGTERM, goes on where it was
//! ```
//!
//! The differences to a program on one device are in `mnist/learner.rs`: the loaders, `ddp.training` and `ddp.metric`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Result;
use burn_ddp_examples::mnist::learner::{self, LearnerArgs};
use burn_ddp_examples::{log_to_stderr, trainer};
use clap::Parser;

fn main() -> ExitCode {
    trainer::exit_code(run(&LearnerArgs::parse()))
}

fn run(args: &LearnerArgs) -> Result<ExitCode> {
    args.check()?;
    trainer::launch(args.digits.options.nproc, |ddp| {
        if !ddp.is_main() {
            // On rank 0, Burn's trainer writes log lines to the log file of the experiment.
            log_to_stderr();
        }
        learner::run(ddp, args)
    })
}
