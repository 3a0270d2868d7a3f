//! Checkpoints: all state that a run needs to be resumed, saved as one unit by [`Checkpoints`].
//!
//! Only rank 0 writes and reads files, on its machine or on S3-compatible storage. It sends their contents to the other
//! ranks, so any number of ranks can load a checkpoint that any other number has saved.
//!
//! In the costs below a *round* is an all-gather of small messages: two steps, in which a rank sends some bytes to each
//! other rank; rank 0 adds the manifests of checkpoints it has found. While rank 0 works on files, the ranks make a
//! round at least every 5 seconds, so that they wait as long as rank 0 is alive. A method of [`Checkpoints`] makes one
//! round more if it must wait for an asynchronous save.
//!
//! | | saves | for |
//! |---|---|---|
//! | [`Ddp::save`] | one model, in a file that plain Burn reads | the trained model: inference, other programs |
//! | [`Ddp::checkpoints`] | models, optimizers, schedules, values, as one unit | resuming your own training loop |
//! | `DdpTrainer::checkpointer` | the records of Burn's `Learner`, each epoch | Burn's trainer without a shared disk |

pub(crate) mod background_write;
mod best_checkpoint;
mod checkpoint_name;
mod directory;
mod held_gradients;
pub(crate) mod leftover;
mod load_model;
mod load_optimizer;
mod local_folder;
mod manifest;
#[cfg(feature = "s3")]
mod object_connection;
#[cfg(feature = "s3")]
mod object_storage;
#[cfg(feature = "s3")]
mod object_transfer;
mod saved_checkpoint;
mod storage;
mod storage_choice;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::ddp::Ddp;
use crate::file_failure::FileFailure;
use crate::stop::tell_saved;
use crate::{Error, Result, agreement, main_first};
use background_write::{BackgroundWrite, OpenedDirectory};
pub use best_checkpoint::Best;
use directory::{Directory, Found, Keep};
pub use saved_checkpoint::Checkpoint;
pub(crate) use storage_choice::scheme;
pub use writer::CheckpointWriter;

/// A directory of checkpoints, each of which is complete or absent; from [`Ddp::checkpoints`].
///
/// # Example
///
/// Two ranks train, and three go on from their last checkpoint.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::AdamConfig;
/// use burn::prelude::*;
/// use burn_ddp::prelude::*;
///
/// let directory = tempfile::tempdir()?;
/// let run = |ddp: Ddp| -> anyhow::Result<u64> {
///     let device = ddp.device()?.autodiff();
///     let mut model = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
///     let mut optim = AdamConfig::new().init();
///     let mut start = 0;
///     let checkpoints = ddp.checkpoints(directory.path())?.keep_last(2);
///     if let Some(saved) = checkpoints.latest()? {
///         model = saved.model(model)?;
///         optim = saved.optimizer(optim, &model)?;
///         start = saved.step();
///     }
///     for step in start..start + 10 {
///         let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
///         let Some(grads) = ddp.backward(&loss, &model)? else { continue };
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
    keep: Keep,
    asynchronous: bool,
    background: Arc<BackgroundWrite>,
    /// True once a model that is not wrapped was logged.
    warned: AtomicBool,
}

impl Ddp {
    /// The checkpoints in `directory` on rank 0's machine; a missing directory is created. *Collective*, one
    /// [round](self). A job may open a directory several times, with different settings; saves run one after the other.
    ///
    /// With the feature `s3`, `directory` may be `"s3://bucket/prefix"`: S3-compatible storage, with the settings of
    /// rank 0's `AWS_*` variables. Rank 0 writes the files of a checkpoint to its folder for temporary files, and
    /// uploads them. A directory on S3 has no lock: a later job that saves to it takes it over.
    ///
    /// # Errors
    ///
    /// [`Error::File`] on every rank if rank 0 cannot create the directory, it is a checkpoint itself
    /// (`…/step-00000123`), or a URL or its settings are wrong.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// let steps = Ddp::spawn(2, |ddp| {
    ///     let checkpoints = ddp.checkpoints(directory.join("run-1"))?; // is created
    ///     checkpoints.save(100, |c| c.value("loss", &0.5))?;
    ///     Ok(checkpoints.latest()?.map(|checkpoint| checkpoint.step()))
    /// })?;
    /// assert_eq!(steps, [Some(100), Some(100)]);
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn checkpoints(&self, directory: impl AsRef<Path>) -> Result<Checkpoints> {
        let path = main_first::on_main(self.group(), || storage_choice::make(directory.as_ref()))?;
        let mut opened = self.state().checkpoint_directories();
        let group = &self.state().group;
        let known = opened.iter().position(|opened| opened.path == path && Arc::ptr_eq(&opened.group, group));
        let nth = known.unwrap_or_else(|| {
            opened.push(OpenedDirectory::new(path, group));
            opened.len() - 1
        });
        let opened = &mut opened[nth];
        let directory = opened.state(Directory::new);
        let (keep, background) = (Keep::default(), opened.background.clone());
        let warned = AtomicBool::new(false);
        Ok(Checkpoints { ddp: self.clone(), directory, keep, asynchronous: false, background, warned })
    }
}

impl Checkpoints {
    /// After each save, removes all but the `n` newest complete checkpoints (at least 1). By default all stay. A
    /// damaged checkpoint does not count; it is removed when `n` newer ones are complete.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let checkpoints = ddp.checkpoints(directory)?.keep_last(2);
    ///     for step in [10, 20, 30] {
    ///         checkpoints.save(step, |c| c.value("loss", &0.5))?;
    ///     }
    ///     assert!(checkpoints.at(10)?.is_none() && checkpoints.at(20)?.is_some());
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[must_use]
    pub fn keep_last(mut self, n: usize) -> Self {
        self.keep.last = Some(n);
        self
    }

    /// After each save, keeps the `n` complete checkpoints that are best by the value saved as `c.value(metric,
    /// &number)`, and those of [`keep_last`](Self::keep_last) (without it, the newest one); removes all others. Of two
    /// checkpoints with equal values the newer is better; a checkpoint without the value is never the best.
    ///
    /// ```
    /// use burn_ddp::checkpoint::Best;
    /// use burn_ddp::prelude::*;
    ///
    /// let directory = tempfile::tempdir()?;
    /// Ddp::spawn(2, |ddp| {
    ///     let checkpoints = ddp.checkpoints(directory.path())?.keep_last(2).keep_best(1, "loss", Best::Lowest);
    ///     for (step, loss) in [(1, 0.9), (2, 0.3), (3, 0.5), (4, 0.4), (5, 0.6)] {
    ///         checkpoints.save(step, |c| c.value("loss", &loss))?;
    ///     }
    ///     let steps: Vec<u64> = checkpoints.list()?.iter().map(|checkpoint| checkpoint.step()).collect();
    ///     assert_eq!(steps, [5, 4, 2]);
    ///     assert_eq!(checkpoints.best("loss", Best::Lowest)?.map(|best| best.step()), Some(2));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    #[must_use]
    pub fn keep_best(mut self, n: usize, metric: &str, best: Best) -> Self {
        self.keep.best = Some((n, metric.to_string(), best));
        self
    }

    /// If true, [`save`](Checkpoints::save) returns when rank 0 holds a copy of the contents in host memory, and a
    /// thread of rank 0 writes them. The next `save`, [`wait`](Checkpoints::wait) or [`Ddp::finish`] waits for that
    /// thread and returns its error on every rank.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let checkpoints = ddp.checkpoints(directory)?.asynchronous(true);
    ///     checkpoints.save(10, |c| c.value("loss", &0.5))?; // training goes on while rank 0 writes
    ///     checkpoints.wait()?; // it is on the disk
    ///     assert!(checkpoints.at(10)?.is_some());
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[must_use]
    pub fn asynchronous(mut self, asynchronous: bool) -> Self {
        self.asynchronous = asynchronous;
        self
    }

    /// Saves what `fill` writes, as the state after `step` optimizer steps. *Collective*; `fill` runs on every rank,
    /// and rank 0's contents are written.
    ///
    /// When `save` (if [asynchronous](Checkpoints::asynchronous): the wait for it) returns, the checkpoint is durably
    /// on the disk. It appears complete or not at all: rank 0 writes files under a temporary name, syncs them, and
    /// renames their directory last. Steps must not decrease; saving a step again makes a second checkpoint of it,
    /// which [`latest`](Checkpoints::latest) then returns. Rank 0 may write for longer than the deadline of a
    /// collective. Costs five [rounds](self) and the calls in `fill`.
    ///
    /// # Errors
    ///
    /// On every rank, and all older checkpoints are still there: [`Error::File`] if rank 0 cannot write, another job
    /// writes to the directory, or the directory holds a checkpoint of a later step; [`Error::Invalid`] if `fill` fails
    /// or the ranks save different steps; [`Error::Comm`] if a rank does not call it.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::AdamConfig};
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let model = ddp.wrap(LinearConfig::new(2, 1).init(&ddp.device()?.autodiff()))?;
    ///     let optim = AdamConfig::new().init();
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     checkpoints.save(10, |c| {
    ///         c.model(&model)?;
    ///         c.optimizer(&optim, &model)
    ///     })?;
    ///     let earlier = checkpoints.save(5, |c| c.model(&model));
    ///     assert!(matches!(earlier, Err(burn_ddp::Error::File { .. })));
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn save(&self, step: u64, fill: impl FnOnce(&mut CheckpointWriter<'_>) -> Result<()>) -> Result<()> {
        let _saving = self.ddp.state().meter.saving();
        let group = self.ddp.group();
        let all = group.all_gather_object(&(step, self.asynchronous))?;
        if let Some((&rank, other)) = group.ranks().iter().zip(&all).find(|(_, other)| **other != all[0]) {
            let say = |(step, later)| format!("step {step}{}", if later { " asynchronously" } else { "" });
            return Err(Error::invalid(format!(
                "the ranks save different checkpoints: rank {} {}, rank {rank} {}",
                group.ranks()[0],
                say(all[0]),
                say(*other)
            )));
        }
        if self.keep.last == Some(0) {
            return Err(Error::invalid("the newest checkpoint always stays: use at least `keep_last(1)`"));
        }
        self.wait()?;
        let mut temporary = None;
        main_first::on_main(group, || {
            self.directory.begin(step)?;
            if !self.asynchronous {
                temporary = Some(self.directory.temporary_of(step)?);
            }
            Ok(())
        })?;
        let streams_to = temporary.as_ref().map(|temporary| temporary.path().to_path_buf());
        let mut contents = writer::Contents::new(step, self.ddp.world_size(), self.ddp.is_main(), streams_to);
        let writing = self.directory.writing(step);
        let filled = fill(&mut CheckpointWriter::new(&mut contents, group, &writing));
        let differing = contents.end(group, filled)?;
        if let Some(name) = differing.first().filter(|_| self.ddp.is_main() && !self.warned.swap(true, Relaxed)) {
            tracing::warn!(
                target: "burn_ddp::checkpoint",
                "{name} of the checkpoint of step {step} is not wrapped and differs between the ranks: the file holds \
                that of rank {}. Each rank trains a model of its own unless it went through `ddp.wrap`",
                group.ranks()[0]
            );
        }
        let (directory, keep, world) = (self.directory.clone(), self.keep.clone(), self.ddp.world().clone());
        let write = move || {
            let temporary = temporary.map_or_else(|| directory.temporary_of(step), Ok)?;
            directory.write(contents, temporary, &keep).map(|path| tell_saved(&world, &path.display().to_string()))
        };
        match self.asynchronous {
            false => main_first::on_main(group, write),
            true => self.background.start(group, step, write),
        }
    }

    /// Waits for the last [asynchronous](Checkpoints::asynchronous) save. *Collective*. Costs one
    /// [round](self); nothing if no save is under way.
    ///
    /// # Errors
    ///
    /// [`Error::File`] on every rank if rank 0 could not write the checkpoint.
    ///
    /// # Example
    ///
    /// As in [`asynchronous`](Checkpoints::asynchronous).
    #[track_caller]
    pub fn wait(&self) -> Result<()> {
        self.background.wait(self.ddp.group())
    }

    /// The newest complete checkpoint, the same on all ranks; `None` if there is none. *Collective*, one [round](self).
    ///
    /// Rank 0 compares the checksum of every file, and skips corrupt checkpoints with a warning. Another job may save
    /// and remove checkpoints meanwhile. Rank 0 logs the result at level `info` (target `burn_ddp::checkpoint`).
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::File`] if all checkpoints are damaged; if rank 0 cannot read the directory or a
    /// checkpoint for a reason other than damage (storage that does not answer, missing permission); if the newest
    /// checkpoint has a format that this version does not read.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// let run = |ddp: Ddp| {
    ///     let mut model = ddp.wrap(LinearConfig::new(2, 1).init(&ddp.device()?.autodiff()))?;
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     let mut step = 0;
    ///     if let Some(checkpoint) = checkpoints.latest()? {
    ///         (model, step) = (checkpoint.model(model)?, checkpoint.step());
    ///     }
    ///     checkpoints.save(step + 10, |c| c.model(&model))?;
    ///     Ok((step, param_hash(&model)?))
    /// };
    /// let (first, second) = (Ddp::spawn(2, run)?, Ddp::spawn(3, run)?);
    /// assert_eq!((first[0].0, second[0].0), (0, 10));
    /// assert_eq!(first[0].1, second[0].1); // the same model
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        let latest = self.choose(|directory| directory.newest())?;
        if self.ddp.is_main() {
            let path = self.directory.path().display();
            match &latest {
                Some(found) => tracing::info!(
                    target: "burn_ddp::checkpoint",
                    "the newest checkpoint in {path} is that of step {}",
                    found.step()
                ),
                None => tracing::info!(
                    target: "burn_ddp::checkpoint",
                    "no checkpoint in {path}: the training begins at its start"
                ),
            }
        }
        Ok(latest)
    }

    /// The complete checkpoint of `step`, the last one if the step was saved more than once; `None` if there is none.
    /// *Collective*. Rank 0 compares the checksum of every file. Costs two [rounds](self).
    ///
    /// # Errors
    ///
    /// Those of [`latest`](Checkpoints::latest); [`Error::Invalid`] if the ranks ask for different steps.
    ///
    /// # Example
    ///
    /// As in [`keep_last`](Checkpoints::keep_last).
    #[track_caller]
    pub fn at(&self, step: u64) -> Result<Option<Checkpoint>> {
        self.agree_on("the step of the checkpoint", step.to_string())?;
        self.choose(|directory| directory.at(step))
    }

    /// The complete checkpoint that is best by the value saved as `c.value(metric, &number)`, the newest of equal ones;
    /// `None` if no checkpoint has the value. *Collective*. Rank 0 reads all manifests, and compares the checksums of
    /// the files of the best checkpoint. Costs two [rounds](self).
    ///
    /// # Errors
    ///
    /// Those of [`latest`](Checkpoints::latest); [`Error::Invalid`] if the ranks ask for different metrics.
    ///
    /// # Example
    ///
    /// As in [`keep_best`](Checkpoints::keep_best).
    #[track_caller]
    pub fn best(&self, metric: &str, best: Best) -> Result<Option<Checkpoint>> {
        self.agree_on("the metric of the best checkpoint", format!("{best:?} {metric:?}"))?;
        self.choose(|directory| directory.best(metric, best))
    }

    /// All checkpoints, the newest first, the same ones on all ranks. *Collective*.
    ///
    /// Rank 0 reads and checks the manifests only: a damaged model or optimizer file is an error when it is loaded. The
    /// [values](Checkpoint::value) of each checkpoint need no further communication. One [round](self).
    ///
    /// # Errors
    ///
    /// Those of [`latest`](Checkpoints::latest).
    ///
    /// # Example
    ///
    /// The values of all checkpoints:
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     checkpoints.save(10, |c| c.value("loss", &0.9))?;
    ///     checkpoints.save(20, |c| c.value("loss", &0.5))?;
    ///     for (checkpoint, (step, loss)) in checkpoints.list()?.iter().zip([(20, 0.5), (10, 0.9)]) {
    ///         assert_eq!((checkpoint.step(), checkpoint.value::<f64>("loss")?), (step, loss));
    ///     }
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn list(&self) -> Result<Vec<Checkpoint>> {
        self.wait()?;
        let found: Vec<(PathBuf, String)> = main_first::on_main(self.ddp.group(), || self.directory.list())?;
        let open = |(path, manifest): (PathBuf, String)| self.found(path, &manifest);
        found.into_iter().map(open).collect()
    }

    #[track_caller]
    fn choose(&self, find: impl FnOnce(&Directory) -> Result<Found, FileFailure>) -> Result<Option<Checkpoint>> {
        self.wait()?;
        let found = main_first::on_main(self.ddp.group(), || find(&self.directory))?;
        found.map(|(path, manifest)| self.found(path, &manifest)).transpose()
    }

    fn found(&self, path: PathBuf, manifest: &str) -> Result<Checkpoint> {
        Checkpoint::new(self.ddp.clone(), self.directory.storage.clone(), path, manifest)
    }

    /// Compares an argument between the ranks. *Collective*.
    #[track_caller]
    fn agree_on(&self, name: &str, value: String) -> Result<()> {
        match agreement::on_settings(self.ddp.group(), &vec![(name.to_string(), value)])? {
            None => Ok(()),
            Some(difference) => Err(Error::invalid(difference)),
        }
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        if self.background.is_under_way() {
            tracing::warn!("a checkpoint is still being written; `ddp.finish()` and `wait` wait for it");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::test_event_capture::Listener;

    /// One of two models went through `wrap`.
    #[test]
    fn a_model_whose_wrap_was_forgotten_is_named_once() {
        let warnings = |world: usize, forgotten: bool| {
            let directory = tempfile::tempdir().unwrap();
            let counted = Ddp::spawn(world, |ddp| {
                let listener = Listener::default();
                tracing::subscriber::with_default(listener.clone(), || {
                    let device = ddp.device()?.autodiff();
                    // Ranks have other random values.
                    let linear = || burn::nn::LinearConfig::new(2, 2 + usize::from(forgotten)).init(&device);
                    let judge = ddp.wrap(linear())?;
                    let generator = if forgotten { linear() } else { ddp.wrap(linear())? };
                    let checkpoints = ddp.checkpoints(directory.path())?;
                    for step in 0..2 {
                        checkpoints.save(step, |c| {
                            c.named("judge").model(&judge)?;
                            c.named("generator").model(&generator)
                        })?;
                    }
                    anyhow::Ok(())
                })?;
                let events = listener.events("burn_ddp::checkpoint");
                assert!(events.iter().flatten().all(|(_, text)| text.contains("generator-model") || !forgotten));
                Ok(events.len())
            });
            counted.unwrap()
        };
        assert_eq!(warnings(2, true), [1, 0], "once, on rank 0");
        assert_eq!(warnings(2, false), [0, 0]);
        assert_eq!(warnings(1, true), [0], "alone there is nothing to average");
    }

    #[test]
    fn rank_0_says_whether_there_is_a_checkpoint_to_go_on_from() {
        let directory = tempfile::tempdir().unwrap();
        let texts = Ddp::spawn(2, |ddp| {
            let listener = Listener::default();
            tracing::subscriber::with_default(listener.clone(), || {
                let checkpoints = ddp.checkpoints(directory.path())?;
                checkpoints.latest()?;
                checkpoints.save(7, |c| c.value("loss", &0.5))?;
                checkpoints.latest()?;
                anyhow::Ok(())
            })?;
            let events = listener.events("burn_ddp::checkpoint");
            Ok(events.into_iter().flatten().map(|(_, text)| text).collect::<Vec<_>>())
        });
        let [main, other]: [Vec<String>; 2] = texts.unwrap().try_into().unwrap();
        let path = directory.path().canonicalize().unwrap();
        assert_eq!(main.len(), 2, "{main:?}");
        assert!(main[0].contains(&format!("no checkpoint in {}", path.display())), "{main:?}");
        assert!(main[1].contains("is that of step 7"), "{main:?}");
        assert!(other.is_empty(), "{other:?}");
    }

    #[test]
    fn rank_0_warns_once_that_local_parameters_of_other_ranks_are_not_saved() {
        let warnings = |world: usize, local: &'static [&'static str]| {
            let directory = tempfile::tempdir().unwrap();
            let counted = Ddp::spawn(world, |ddp| {
                let listener = Listener::default();
                tracing::subscriber::with_default(listener.clone(), || {
                    let model = burn::nn::LinearConfig::new(2, 2).init(&ddp.device()?.autodiff());
                    let config = crate::WrapConfig::new().with_local_parameters(local.iter().copied());
                    let model = ddp.wrap_with(model, &config)?;
                    let checkpoints = ddp.checkpoints(directory.path())?;
                    (0..2).try_for_each(|step| checkpoints.save(step, |c| c.model(&model)))?;
                    // A file of another model warns, too.
                    ddp.save(&model, directory.path().join("same"))?;
                    let model = ddp.wrap_with(ddp.unwrap(model)?, &config)?;
                    ddp.save(&model, directory.path().join("other"))?;
                    anyhow::Ok(())
                })?;
                let events = listener.events("burn_ddp::checkpoint");
                assert!(events.iter().flatten().all(|(_, text)| text.contains("local parameters (bias): save")));
                Ok(events.len())
            });
            counted.unwrap()
        };
        assert_eq!(warnings(2, &["bias"]), [2, 0], "once for each model, on rank 0");
        assert_eq!(warnings(2, &[]), [0, 0]);
        assert_eq!(warnings(1, &["bias"]), [0], "alone nothing is lost");
    }

    #[test]
    fn the_thread_that_writes_makes_the_checksums() {
        let directory = tempfile::tempdir().unwrap();
        Ddp::spawn(2, |ddp| {
            let checkpoints = ddp.checkpoints(directory.path())?.asynchronous(true);
            let model = burn::nn::LinearConfig::new(64, 64).init(&ddp.device()?);
            let before = manifest::HASHED.get();
            checkpoints.save(1, |c| c.model(&model))?;
            assert_eq!(manifest::HASHED.get(), before, "hashed by the thread that trains");
            assert_eq!(checkpoints.latest()?.map(|found| found.step()), Some(1));
            Ok(())
        })
        .unwrap();
    }
}
