//! Runnable examples of burn-ddp.
//!
//! | program | shows |
//! |---|---|
//! | `custom_loop` | the smallest complete training loop, to copy from |
//! | `mnist` | a trainer with evaluation, progress, a final table and a JSON summary |
//! | `mnist_learner` | the same through Burn's `SupervisedTraining` |
//! | `resnet`, `alexnet` | the same for pictures: synthetic ones, CIFAR-10, a folder of your own |
//! | `gpt` | the same for a text: a small transformer that predicts bytes, and then generates text |
//! | `hand_checked_gradient` | what averaging does, in numbers that can be checked by hand |
//! | `existing_loop`, `accumulation`, `uneven_data`, `checkpoint_resume`, `early_stopping`, `custom_metric`, `lora`, `mixed_devices` | one thing each |
//!
//! Each file in `src/bin` opens with the lines that run it. The trainers share [`trainer`]; [`mnist`], [`vision`]
//! and [`text`] hold the data, networks and losses of each.
//!
//! | crate feature | adds |
//! |---|---|
//! | `train` | the programs that use Burn's trainer: `mnist_learner`, `custom_metric` |
//! | `images` | pictures from folders: `resnet --data folder:DIR` |
//! | `download` | datasets that Burn downloads: `mnist --data full`, `resnet --data cifar10` |
//! | `ndarray`, `wgpu`, `cuda`, `tch` | devices, for `mixed_devices` and for `BURN_DEVICE` |
#![forbid(unsafe_code)]

#[cfg(feature = "download")]
mod guarded_download;
pub mod mnist;
pub mod text;
pub mod trainer;
pub mod vision;

/// Shows the library's warnings on standard error; `RUST_LOG=info` shows more. Keeps a subscriber that is already set.
pub fn log_to_stderr() {
    use std::io::{IsTerminal, stderr};
    use tracing_subscriber::filter::Targets;
    use tracing_subscriber::prelude::*;

    // `main` returns the error that ended the job, so the log of `membership` would only repeat it.
    // With a wrong --checkpoints the training would start anew unnoticed: the log always shows what was found there.
    let default = "warn,burn_ddp_comm::membership=off,burn_ddp::checkpoint=info";
    let wanted = std::env::var("RUST_LOG").ok().and_then(|targets| targets.parse().ok());
    let targets: Targets = wanted.unwrap_or_else(|| default.parse().unwrap_or_default());
    let lines = tracing_subscriber::fmt::layer().with_writer(stderr).with_ansi(stderr().is_terminal());
    let _ = tracing_subscriber::registry().with(targets).with(lines).try_init();
}

/// If the first argument is `--help` or `-h`, prints the first comment of `source`, the program's file, and ends the
/// process.
pub fn help(source: &str) {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "--help" || argument == "-h") {
        print!("{}", first_comment(source));
        std::process::exit(0);
    }
}

/// The comment with which a file begins, without the marks of code blocks.
fn first_comment(source: &str) -> String {
    let lines = source.lines().map_while(|line| line.strip_prefix("//!")).filter(|line| !line.contains("```"));
    lines.map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line))).collect()
}
