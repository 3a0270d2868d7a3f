//! Trains a small convolutional network on handwritten digits with Burn's `SupervisedTraining`.
//!
//! ```sh
//! cargo run -p burn-ddp-examples --bin mnist_learner -- --nproc 1                        # one process
//! cargo run -p burn-ddp-examples --bin mnist_learner                                     # two ranks, started by the program
//! burnrun --nproc-per-node 2 target/debug/mnist_learner --epochs 2 --artifacts artifacts # two ranks, started by a launcher
//! target/debug/mnist_learner --epochs 4 --artifacts artifacts --resume 2                 # two more epochs
//! ```
//!
//! What differs from a program on one device is in `mnist/learner.rs`: the loaders, `ddp.training` and `ddp.metric`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use burn_ddp_examples::mnist::learner::{self, LearnerArgs};
use burn_ddp_examples::{cli, log_to_stderr};
use clap::Parser;

fn main() -> ExitCode {
    let args = LearnerArgs::parse();
    cli::exit_code(args.mnist.check().and_then(|()| {
        cli::launch(args.mnist.nproc, |ddp| {
            if !ddp.is_main() {
                // Rank 0's lines go to the experiment's log.
                log_to_stderr();
            }
            learner::run(ddp, &args)
        })
    }))
}
