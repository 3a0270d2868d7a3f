//! Command lines of the trainers.

use std::path::{Path, PathBuf};

use anyhow::{Error, Result, anyhow, ensure};
use burn_ddp::{Ddp, Precision};
use clap::Args;

use super::schedule::Schedule;

/// Options of all trainers.
#[derive(Args, Debug, Clone)]
#[command(allow_negative_numbers = true)]
pub struct Options {
    /// Ranks to start on this machine; under a launcher the launcher decides [default: 2]
    #[arg(long, value_name = "N")]
    pub nproc: Option<usize>,

    /// Passes over the training data
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub epochs: usize,

    /// Items per backward
    #[arg(long, default_value_t = 16, value_name = "ITEMS")]
    pub batch_size: usize,

    /// Highest learning rate
    #[arg(long, value_name = "RATE")]
    pub lr: Option<f64>,

    /// Seed of the weights, of the order of the data and of all random changes; the same seed gives the same run
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// Threads per rank that prepare batches
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub num_workers: usize,

    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub summary: Option<PathBuf>,

    /// Save the trained model; plain Burn reads the file
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

/// Options of the trainers with a loop of their own: mnist, resnet, alexnet and gpt.
#[derive(Args, Debug, Clone)]
pub struct LoopOptions {
    /// Backwards of each rank per optimizer step; 1 x 8, 2 x 4, 4 x 2 and 8 x 1 ranks and backwards train the same bits
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub accumulate: usize,

    /// Type in which forward and backward compute: f32, bf16 or f16; parameters and the optimizer's state are f32
    #[arg(long, default_value_t = Precision::F32, value_name = "TYPE")]
    pub precision: Precision,

    /// Course of the learning rate after a warm-up over the first tenth of all steps
    #[arg(long, value_enum, default_value = "cosine")]
    pub schedule: Schedule,

    /// Save checkpoints in this directory after each epoch, and go on from the newest one there, on any number of ranks
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Option<PathBuf>,

    /// Also save a checkpoint each time this many steps are done [default: after epochs only]
    #[arg(long, default_value_t = 0, value_name = "STEPS", hide_default_value = true, requires = "checkpoints")]
    pub checkpoint_every: usize,
}

impl Options {
    /// Refuses values that cannot work, naming the first option that has one.
    pub fn check(&self) -> Result<()> {
        ensure!(self.nproc != Some(0), "--nproc 0: a job has at least one rank");
        ensure!(self.epochs > 0, "--epochs 0: there is nothing to train");
        ensure!(self.batch_size > 0, "--batch-size 0: a step needs at least one item");
        if let Some(lr) = self.lr {
            ensure!(lr.is_finite() && lr > 0.0, "--lr {lr}: a learning rate is a positive number");
        }
        for (option, file) in [("--summary", &self.summary), ("--save", &self.save)] {
            if let Some(file) = file {
                check_writable(option, file)?;
            }
        }
        Ok(())
    }
}

impl LoopOptions {
    /// Refuses values that cannot work.
    pub fn check(&self) -> Result<()> {
        ensure!(self.accumulate > 0, "--accumulate 0: a step needs at least one backward");
        Ok(())
    }

    /// Fixes the number of backwards per step over all ranks, before loaders are made: by `burnrun --logical-ranks`, or
    /// as many for each rank as `--accumulate` says. *Collective*.
    pub(crate) fn fix_step(&self, ddp: &Ddp) -> Result<()> {
        match ddp.world().options().logical_ranks {
            None => ddp.set_logical_ranks(self.accumulate * ddp.world_size())?,
            Some(count) => ensure!(
                self.accumulate == 1,
                "--accumulate {}, but `--logical-ranks {count}` says how many backwards a step has",
                self.accumulate
            ),
        }
        Ok(())
    }
}

/// The error of `option`, which needs the crate feature `feature`, in a program built without it.
pub(crate) fn not_built(option: &str, feature: &str) -> Error {
    anyhow!("{option} needs a build with `--features {feature}`")
}

/// Refuses a file that could not be written, before the training rather than after it.
fn check_writable(option: &str, file: &Path) -> Result<()> {
    let shown = file.display();
    ensure!(!file.is_dir(), "{option} {shown}: this is a folder, not a file");
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(folder.is_dir(), "{option} {shown}: the folder {} does not exist", folder.display());
    Ok(())
}
