//! One unit of everything that a run needs to go on: model, optimizers, schedules, and values such as a loader's position.
//!
//! Rank 0 writes and reads; what it reads travels to the others. So the directory needs to be on its machine only, and a
//! checkpoint of any number of ranks is loaded by any other number. See [`Checkpoints`].

mod directory;
mod draft;
mod found;
mod manifest;
mod writing;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::ddp::Ddp;
use crate::{Error, Result, agreement};
use directory::Directory;
pub use draft::Draft;
pub use found::Found;
pub(crate) use writing::Writing;

/// A directory of checkpoints, each of which is there complete or not at all. Made by [`Ddp::checkpoints`].
///
/// # Example
///
/// Two ranks train, and three go on from what they saved.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{AdamConfig, GradientsParams};
/// use burn::prelude::*;
/// use burn_ddp::prelude::*;
///
/// let directory = tempfile::tempdir()?;
/// let run = |ddp: Ddp| -> anyhow::Result<u64> {
///     let device = ddp.device()?.autodiff();
///     let mut model = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
///     let mut optim = AdamConfig::new().init();
///     let mut start = 0;
///     let checkpoints = ddp.checkpoints(directory.path())?.keep(2);
///     if let Some(found) = checkpoints.latest()? {
///         model = found.model(model)?;
///         optim = found.optimizer(optim, &model)?;
///         start = found.step();
///     }
///     for step in start..start + 10 {
///         let grads = model.forward(Tensor::<2>::ones([4, 2], &device)).mean().backward();
///         let grads = GradientsParams::from_grads(grads, &model);
///         model = optim.step(0.1, model, grads);
///         if (step + 1) % 5 == 0 {
///             checkpoints.save(step + 1, |c| {
///                 c.model(&model)?;
///                 c.optimizer(&optim, &model)?;
///                 c.value("config", &vec![4, 2, 1]) // any serde value
///             })?;
///         }
///     }
///     Ok(start)
/// };
/// assert_eq!(Ddp::spawn(2, run)?, [0, 0]);
/// assert_eq!(Ddp::spawn(3, run)?, [10, 10, 10]);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub struct Checkpoints {
    ddp: Ddp,
    directory: Arc<Directory>,
    keep: Option<usize>,
    asynchronous: bool,
    writing: Arc<Writing>,
}

impl Ddp {
    /// The checkpoints in `directory` on rank 0's machine, which is made if it is not there. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::File`] on every rank if rank 0 cannot make the directory.
    #[track_caller]
    pub fn checkpoints(&self, directory: impl AsRef<Path>) -> Result<Checkpoints> {
        let directory = Directory::new(directory.as_ref());
        self.on_main(|| directory.make())?;
        let writing = Arc::new(Writing::default());
        self.state().add_checkpoint_writer(&writing);
        Ok(Checkpoints { ddp: self.clone(), directory: Arc::new(directory), keep: None, asynchronous: false, writing })
    }

    /// What `f` returns on rank 0, which alone runs it. *Collective*.
    #[track_caller]
    fn on_main<T: serde::Serialize + serde::de::DeserializeOwned>(
        &self,
        f: impl FnOnce() -> std::result::Result<T, String>,
    ) -> Result<T> {
        let told = self.is_main().then(f);
        let told: std::result::Result<T, String> = self.group().broadcast_object(told, 0)?;
        told.map_err(|reason| Error::File(format!("rank 0 {reason}")))
    }
}

impl Checkpoints {
    /// After each new checkpoint only the `n` newest stay, 1 or more. Without this all do.
    #[must_use]
    pub fn keep(mut self, n: usize) -> Self {
        self.keep = Some(n);
        self
    }

    /// Whether [`save`](Checkpoints::save) returns as soon as everything is copied to host memory, and a thread of rank 0 writes it.
    /// The next `save`, [`wait`](Checkpoints::wait) or [`Ddp::finish`] waits for that thread and returns its error on every rank.
    #[must_use]
    pub fn asynchronous(mut self, asynchronous: bool) -> Self {
        self.asynchronous = asynchronous;
        self
    }

    /// Saves what `fill` puts into the [`Draft`], as the state after `step` optimizer steps. *Collective*; `fill` runs on every
    /// rank, and rank 0's contents are written.
    ///
    /// When it returns (asynchronously: when the wait for it does), the checkpoint is on the disk, durably. It appears complete or
    /// not at all: files are written under a temporary name, synced, and renamed at last. Steps go up; saving a step again makes a
    /// second checkpoint of it, and the second one counts.
    ///
    /// # Errors
    ///
    /// On every rank, and all older checkpoints are still there: [`Error::File`] if rank 0 cannot write, another job writes to the
    /// directory, or it holds a checkpoint of a later step; [`Error::Use`] if `fill` fails or the ranks save different steps;
    /// [`Error::Comm`] if a rank does not call it.
    #[track_caller]
    pub fn save(&self, step: u64, fill: impl FnOnce(&mut Draft<'_>) -> Result<()>) -> Result<()> {
        let group = self.ddp.group();
        let all = group.all_gather_object(&(step, self.asynchronous))?;
        if let Some((rank, other)) = all.iter().enumerate().find(|(_, other)| **other != all[0]) {
            let say =
                |(step, asynchronous)| format!("step {step}{}", if asynchronous { " asynchronously" } else { "" });
            return Err(Error::Use(format!(
                "the ranks save different checkpoints: rank 0 {}, rank {rank} {}",
                say(all[0]),
                say(*other)
            )));
        }
        if self.keep == Some(0) {
            return Err(Error::Use("checkpoints keep the newest one at least: `keep(1)`".into()));
        }
        self.wait()?;
        let mut contents = draft::Contents::new(step, self.ddp.world_size(), self.ddp.is_main());
        let filled = fill(&mut Draft::new(&mut contents));
        agreement::on_outcome(group, "fill its checkpoint", filled)?;
        self.ddp.on_main(|| self.directory.own())?;
        let (directory, keep) = (self.directory.clone(), self.keep);
        let write = move || directory.write(contents, keep);
        if !self.asynchronous {
            return self.ddp.on_main(write);
        }
        let started = if self.ddp.is_main() { Some(self.writing.start(step, write)) } else { None };
        if !self.ddp.is_main() {
            self.writing.expect();
        }
        let started: std::result::Result<(), String> = group.broadcast_object(started, 0)?;
        started.map_err(|reason| Error::File(format!("rank 0 {reason}")))
    }

    /// Waits until the last [asynchronous](Checkpoints::asynchronous) checkpoint is written. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::File`] on every rank if rank 0 could not write it.
    #[track_caller]
    pub fn wait(&self) -> Result<()> {
        self.writing.wait(self.ddp.group())
    }

    /// The newest complete checkpoint, the same one for all ranks, or `None` if there is none. *Collective*.
    ///
    /// Every file's checksum is compared. What is torn or damaged is passed over, with a warning in the log.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::File`] if rank 0 cannot read the directory, or the newest one was written by a later version.
    #[track_caller]
    pub fn latest(&self) -> Result<Option<Found>> {
        self.wait()?;
        let found: Option<(PathBuf, String)> = self.ddp.on_main(|| self.directory.newest())?;
        found.map(|(path, manifest)| Found::new(self.ddp.clone(), path, &manifest)).transpose()
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        if self.writing.is_under_way() {
            tracing::warn!("a checkpoint is still being written: `ddp.finish()` waits for it, and so does `wait`");
        }
    }
}
