//! Where a training is, as its checkpoints hold it.

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_ddp::Ddp;
use burn_ddp::checkpoint::Checkpoints;
use burn_ddp::data::ShardedLoader;
use serde::{Deserialize, Serialize};

use super::args::Args;
use crate::measure::Losses;
use crate::report::Epoch;

/// How far all ranks together have come.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Steps of the optimizer.
    pub(super) step: usize,
    /// The epochs that have ended.
    pub(super) epochs: Vec<Epoch>,
    /// Sum of the losses of the epoch under way, and of how many items.
    loss_sum: f64,
    items: f64,
}

impl Progress {
    /// Takes in what this rank has lost since the last time. *Collective*.
    ///
    /// # Errors
    ///
    /// A peer that failed.
    pub(super) fn add(&mut self, ddp: &Ddp, losses: &mut Losses) -> Result<u64> {
        let (loss_sum, items) = std::mem::take(losses).total();
        self.loss_sum += ddp.sum(loss_sum)?;
        self.items += ddp.sum(items as f64)?;
        Ok(items)
    }

    /// The mean loss of the epoch, which ends.
    pub(super) fn take_loss(&mut self) -> f64 {
        std::mem::take(&mut self.loss_sum) / std::mem::take(&mut self.items)
    }
}

/// The checkpoints of a training, if it has any.
pub(super) struct Saves {
    checkpoints: Option<Checkpoints>,
    every: usize,
}

impl Saves {
    /// Those that `args` ask for. *Collective*.
    ///
    /// # Errors
    ///
    /// A directory that cannot be made, a peer that failed.
    pub(super) fn new(ddp: &Ddp, args: &Args) -> Result<Saves> {
        let checkpoints = args.checkpoints.as_ref().map(|directory| ddp.checkpoints(directory)).transpose()?;
        Ok(Saves { checkpoints: checkpoints.map(|checkpoints| checkpoints.keep_last(2)), every: args.checkpoint_every })
    }

    /// Goes on from the newest one; begins where there is none. *Collective*.
    ///
    /// # Errors
    ///
    /// A checkpoint of another model or of other data, a training that has ended, a peer that failed.
    pub(super) fn load<M: Module, O: Send + 'static>(
        &self,
        model: &mut M,
        optim: &mut ModuleOptimizer,
        train: &ShardedLoader<O>,
        epochs: usize,
    ) -> Result<Progress> {
        let Some(found) = self.checkpoints.as_ref().map(Checkpoints::latest).transpose()?.flatten() else {
            return Ok(Progress::default());
        };
        *model = found.model(model.clone())?;
        *optim = found.optimizer(optim.clone(), model)?;
        train.resume(&found.value("loader")?)?;
        let progress: Progress = found.value("progress")?;
        ensure!(
            progress.epochs.len() < epochs,
            "{} is of the end of a training: ask for more --epochs",
            found.path().display()
        );
        Ok(progress)
    }

    /// Whether one is due within an epoch.
    pub(super) fn is_due(&self, step: usize) -> bool {
        self.checkpoints.is_some() && step.is_multiple_of(self.every)
    }

    /// Saves everything, on the disk when it returns. *Collective*.
    ///
    /// # Errors
    ///
    /// A directory that cannot be written to, a peer that failed.
    pub(super) fn save<M: Module, O: Send + 'static>(
        &self,
        progress: &Progress,
        model: &M,
        optim: &ModuleOptimizer,
        train: &ShardedLoader<O>,
    ) -> Result<()> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        checkpoints.save(progress.step as u64, |c| {
            c.model(model)?;
            c.optimizer(optim, model)?;
            c.value("loader", &train.position())?;
            c.value("progress", progress)
        })?;
        Ok(())
    }
}
