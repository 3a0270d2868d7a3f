//! Runnable examples of burn-ddp.
//!
//! | program | shows |
//! |---|---|
//! | `custom_loop` | the smallest complete training loop, to copy from |
//! | `mnist` | a trainer with evaluation, progress, a final table and a JSON summary |
//! | `mnist_learner` | the same through Burn's `SupervisedTraining` |
//! | `resnet`, `alexnet` | the same for pictures: synthetic ones, CIFAR-10, a folder of your own |
//! | `seed_gradients` | what averaging does, in numbers that can be checked by hand |
//! | `existing_loop`, `accumulation`, `uneven_data`, `checkpoint_resume`, `early_stopping`, `custom_metric`, `lora`, `mixed_devices` | one thing each |
//!
//! Each file in `src/bin` opens with the lines that run it. What `mnist` is made of is in [`mnist`], the networks for pictures are in
//! [`vision`]; [`cli`], [`measure`], [`report`] and [`schedule`] serve both.
#![forbid(unsafe_code)]

pub mod cli;
#[cfg(feature = "download")]
mod download;
pub mod measure;
pub mod mnist;
pub mod report;
pub mod schedule;
pub mod vision;

/// Shows the library's warnings on standard error; `RUST_LOG=info` shows more.
pub fn log_to_stderr() {
    use std::io::{IsTerminal, stderr};
    use tracing_subscriber::EnvFilter;

    // Why the job ended is what `main` returns; once is enough.
    let default = "warn,burn_ddp_comm::membership=off";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr).with_ansi(stderr().is_terminal());
    // Someone who has set up a subscriber already keeps it.
    let _ = lines.try_init();
}
