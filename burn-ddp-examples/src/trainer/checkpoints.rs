//! Progress of a training, and the checkpoints that hold it.

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_ddp::Ddp;
use burn_ddp::DdpOptimizer;
use burn_ddp::checkpoint::Checkpoints;
use burn_ddp::data::ShardedLoader;
use serde::{Deserialize, Serialize};

use super::loss_and_accuracy::Losses;
use super::options::LoopOptions;
use super::summary::Epoch;

/// Progress of all ranks together.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Steps of the optimizer so far.
    pub(super) step: usize,
    /// The epochs that have ended.
    pub(super) epochs: Vec<Epoch>,
    /// Sum of the losses of the epoch under way.
    loss_sum: f64,
    /// Items in `loss_sum`.
    items: f64,
}

impl Progress {
    /// Adds the losses of all ranks since the last call; returns the number of this rank's items. *Collective*.
    pub(super) fn add(&mut self, ddp: &Ddp, losses: &mut Losses) -> Result<u64> {
        let mut sum = ddp.exact_sums();
        let items = std::mem::take(losses).add_to(&mut sum);
        self.loss_sum += sum.sum()?;
        self.items += ddp.sum(items)? as f64;
        Ok(items)
    }

    /// Ends the epoch under way and returns its mean loss.
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
    /// The checkpoints of `--checkpoints`. *Collective*.
    pub(super) fn new(ddp: &Ddp, options: &LoopOptions) -> Result<Saves> {
        let checkpoints = options.checkpoints.as_ref().map(|directory| ddp.checkpoints(directory)).transpose()?;
        Ok(Saves {
            checkpoints: checkpoints.map(|checkpoints| checkpoints.keep_last(2)),
            every: options.checkpoint_every,
        })
    }

    /// Loads the newest checkpoint, or begins at the start where there is none. *Collective*.
    pub(super) fn load<M: Module, O: Send + 'static>(
        &self,
        model: &mut M,
        optim: &mut DdpOptimizer,
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
            "{} was saved at the end of a training: ask for more --epochs",
            found.path().display()
        );
        Ok(progress)
    }

    /// True if a checkpoint is due after this step within an epoch.
    pub(super) fn is_due(&self, step: usize) -> bool {
        self.checkpoints.is_some() && step.is_multiple_of(self.every)
    }

    /// True once all ranks have agreed to stop. Without `--checkpoints` a signal ends the program as any other.
    pub(super) fn stop_requested(&self, ddp: &Ddp) -> bool {
        self.checkpoints.is_some() && ddp.stop_requested()
    }

    /// True if this rank was asked to stop: all of them agree in the next sum.
    pub(super) fn stop_wished(&self, ddp: &Ddp) -> bool {
        self.checkpoints.is_some() && ddp.stop_wished()
    }

    /// Says that the ranks have stopped after a save.
    pub(super) fn stopped<M>(ddp: &Ddp, progress: &Progress) -> Result<Option<M>> {
        if ddp.is_main() {
            println!("stopped and saved after step {}: the same command goes on from there", progress.step);
        }
        Ok(None)
    }

    /// Saves a checkpoint, which is on disk when this returns; does nothing without `--checkpoints`. *Collective*.
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
