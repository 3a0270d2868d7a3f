//! Loading a saved checkpoint: rank 0 reads its files and sends their contents.

use std::borrow::BorrowMut;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use serde::de::DeserializeOwned;

use super::manifest::{Checksum, Manifest};
use super::storage::Storage;
use super::{held_gradients, load_model, load_optimizer};
use crate::ddp::Ddp;
use crate::file_failure::FileFailure;
use crate::model::broadcast;
use crate::model::burnpack_reader::TensorFile;
use crate::model::schema::{Entry, Schema};
use crate::model::values::values;
use crate::wrap::wrapped_in;
use crate::{Error, Result, agreement, chunked_broadcast, main_first};

/// A complete checkpoint, the same one on all ranks; from [`Checkpoints::latest`](super::Checkpoints::latest).
///
/// Rank 0 reads the files and sends their contents to the other ranks. So all ranks must load the same parts of the
/// checkpoint in the same order.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    ddp: Ddp,
    storage: Arc<dyn Storage>,
    path: PathBuf,
    manifest: Arc<Manifest>,
    prefix: String,
}

impl Checkpoint {
    pub(super) fn new(ddp: Ddp, storage: Arc<dyn Storage>, path: PathBuf, manifest: &str) -> Result<Self> {
        let manifest = Manifest::parse(manifest)
            .map_err(|e| Error::file(FileFailure::from(e).within(path.display()).at(&path)))?;
        Ok(Checkpoint { ddp, storage, path, manifest: Arc::new(manifest), prefix: String::new() })
    }

    /// Optimizer steps before the checkpoint was saved.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| Ok(ddp.checkpoints(directory)?.save(10, |c| c.value("loss", &0.5))?))?;
    /// Ddp::spawn(3, |ddp| {
    ///     let checkpoint = ddp.checkpoints(directory)?.latest()?.expect("saved by two ranks");
    ///     assert_eq!((checkpoint.step(), checkpoint.world_size()), (10, 2));
    ///     assert!(checkpoint.path().starts_with(directory));
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[must_use]
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Number of ranks that saved the checkpoint.
    ///
    /// # Example
    ///
    /// As in [`step`](Self::step).
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.manifest.world_size
    }

    /// Directory of the checkpoint on rank 0's machine, or its URL.
    ///
    /// # Example
    ///
    /// As in [`step`](Self::step).
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The part that was saved under this name, see [`CheckpointWriter::named`](super::CheckpointWriter::named).
    ///
    /// # Example
    ///
    /// As in [`CheckpointWriter::named`](super::CheckpointWriter::named).
    #[must_use]
    pub fn named(&self, name: &str) -> Checkpoint {
        Checkpoint { prefix: format!("{}{name}-", self.prefix), ..self.clone() }
    }

    /// Returns `model` with the parameters and buffers of the checkpoint. *Collective*.
    ///
    /// The model may be wrapped or not, also with [sharded](crate::WrapConfig::with_sharding) parameters; parameter ids
    /// do not change. Rank 0 reads one tensor after the other. It broadcasts a tensor, or sends each rank its rows of a
    /// sharded one.
    ///
    /// A wrapped model that is trained discards the gradients of micro-batches that it holds, and gets those that it
    /// held at the save: the next backward adds to them. In a world of the same size each rank gets its own sums and
    /// running statistics, so that the step has the bits of a run without interruption; in a world of another size the
    /// sums are added in another order, which rounds differently, and all ranks get the same statistics. Its
    /// [loss scale](crate::WrapConfig::with_loss_scaling) is that of the save, if both have one.
    ///
    /// Costs some [rounds](crate::checkpoint), a broadcast of each tensor, and, for each sharded tensor, a round and a
    /// message with its rows to each rank.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::Invalid`] naming the first parameter that differs from the checkpoint, with both shapes;
    /// if the model was wrapped by another handle; if the checkpoint holds gradients of micro-batches, and the model is
    /// to be trained but not wrapped yet, or wrapped with another [`GradientReduction`](crate::GradientReduction).
    /// [`Error::File`] if rank 0 can no longer read the file.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     let model = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     checkpoints.save(10, |c| c.model(&model))?;
    ///     let checkpoint = checkpoints.latest()?.expect("just saved");
    ///     let again = checkpoint.model(ddp.wrap(LinearConfig::new(2, 1).init(&device))?)?;
    ///     assert_eq!(param_hash(&again)?, param_hash(&model)?);
    ///     let wider = checkpoint.model(LinearConfig::new(3, 1).init(&device)).err().unwrap();
    ///     assert!(wider.to_string().contains("the checkpoint is of another model: weight"), "{wider}");
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn model<M: Module>(&self, model: M) -> Result<M> {
        let name = format!("{}model.bpk", self.prefix);
        let entries = self.manifest.models.get(&name).ok_or_else(|| self.missing(&name))?;
        let group = self.ddp.group();
        let of_name = self.manifest.held.get(&name);
        let held = of_name.filter(|held| !held.is_empty());
        // A checkpoint of an earlier version has no entry for models that held no gradients.
        let held_nothing = held.is_none() && (of_name.is_some() || self.manifest.held.is_empty());
        // The file holds rank 0's model. Those of the other ranks may have other local parameters.
        let is_other = |schema: &Schema| difference(entries, &schema.entries).filter(|_| self.ddp.is_main());
        let fits = wrapped_in(group, &model).and_then(|wrapped| {
            let (schema, _) = values(&model)?;
            if let Some(difference) = is_other(&schema) {
                return Err(Error::invalid(format!("the checkpoint is of another model: {difference}")));
            }
            if !held_gradients::is_trained(&model, &schema) {
                return Ok(Vec::new());
            }
            held.map_or(Ok(()), |held| held_gradients::check(&wrapped, held))?;
            Ok(wrapped)
        });
        let trained = agreement::on_outcome(group, &format!("load {name}"), fits)?;
        let file = self.open(&name)?;
        let model = load_model::load(group, model, file, &name)?;
        let model = broadcast::model(&self.ddp, model, 0)?;
        trained.iter().for_each(|wrapped| wrapped.measure_movements_from(&model));
        let scales = self.manifest.loss_scales.get(&name).filter(|scales| scales.len() == trained.len());
        let scales = trained.iter().zip(scales.into_iter().flatten());
        scales.for_each(|(wrapped, scale)| scale.iter().for_each(|scale| wrapped.load_loss_scale(*scale)));
        match held.filter(|held| held.len() == trained.len()) {
            Some(held) => {
                let file = self.open(&held_gradients::file_of(&name))?;
                held_gradients::load(group, &trained, held, file)?;
            }
            None if held_nothing || held.is_some() => trained.iter().for_each(|wrapped| wrapped.discard_for_load()),
            None => {}
        }
        Ok(model)
    }

    /// Returns `optim` with the state of the checkpoint, for the parameters of `model`, wrapped or not. *Collective*.
    ///
    /// Of [sharded](crate::WrapConfig::with_sharding) parameters each rank gets the state of its rows: call
    /// [`Ddp::optimizer`] before. Rank 0 reads the state piece by piece. Burn loads a state as a whole only, so each
    /// rank needs host memory for a copy of its state.
    ///
    /// Costs some [rounds](crate::checkpoint), and a broadcast of the state in pieces of 4 MiB with a round for each;
    /// for each tensor of sharded parameters a round and a message with its rows to each rank.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::Invalid`] if the state belongs to another kind of optimizer or to parameters that
    /// `model` does not have, or if the model was wrapped by another handle; [`Error::File`] if rank 0 can no longer
    /// read the file.
    ///
    /// # Example
    ///
    /// As in [`Checkpoints`](super::Checkpoints).
    #[track_caller]
    pub fn optimizer<O: BorrowMut<ModuleOptimizer>, M: Module>(&self, mut optim: O, model: &M) -> Result<O> {
        let name = format!("{}optimizer.bpk", self.prefix);
        let saved_ids = self.manifest.optimizers.get(&name).ok_or_else(|| self.missing(&name))?;
        let file = self.open(&name)?;
        let own = optim.borrow_mut();
        *own = load_optimizer::load(self.ddp.group(), own.clone(), model, file.as_ref(), saved_ids, &name)?;
        Ok(optim)
    }

    /// State of the learning-rate schedule: `scheduler = scheduler.load_record(checkpoint.scheduler()?)`. *Collective*.
    /// Costs one [round](crate::checkpoint) and a broadcast of the schedule's small file.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::Invalid`] if none was saved; [`Error::File`] if rank 0 can no longer read the file.
    ///
    /// # Example
    ///
    /// As in [`CheckpointWriter::scheduler`](super::CheckpointWriter::scheduler).
    #[track_caller]
    pub fn scheduler(&self) -> Result<LrSchedulerRecord> {
        let name = format!("{}scheduler.bpk", self.prefix);
        if !self.manifest.files.contains_key(&name) {
            return Err(self.missing(&name));
        }
        let bytes = self.broadcast_file(&name)?;
        let failed = |e: String| Error::file(FileFailure::from(e).within(&name).at(&self.path.join(&name)));
        LrSchedulerRecord::from_bytes(Bytes::from_bytes_vec(bytes)).map_err(|e| failed(e.to_string()))
    }

    /// The value that was saved under `name`. Not collective: every rank has the values since it has the checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is none, or it is of another type.
    ///
    /// # Example
    ///
    /// As in [`CheckpointWriter::value`](super::CheckpointWriter::value).
    pub fn value<V: DeserializeOwned>(&self, name: &str) -> Result<V> {
        let name = format!("{}{name}", self.prefix);
        let value = self.manifest.values.get(&name).ok_or_else(|| self.missing(&format!("value {name:?}")))?;
        serde_json::from_value(value.clone())
            .map_err(|e| Error::invalid(format!("the value {name:?} of the checkpoint: {e}")))
    }

    fn missing(&self, what: &str) -> Error {
        let held = self.manifest.files.keys().chain(self.manifest.values.keys()).cloned().collect::<Vec<_>>();
        Error::invalid(format!("the checkpoint of step {} has no {what}; it holds {}", self.step(), held.join(", ")))
    }

    /// Opens a file, and compares its checksum with the manifest's.
    fn verified(&self, name: &str) -> Result<File, FileFailure> {
        let path = self.path.join(name);
        let failed = |e: io::Error| FileFailure::of("cannot read", &path, e);
        let checkpoint = self.path.file_name().unwrap_or_default().to_string_lossy();
        let mut file = self.storage.open(&checkpoint, name).map_err(failed)?;
        let checksum = Checksum::of_file(&mut file).map_err(failed)?;
        if self.manifest.files.get(name) != Some(&checksum) {
            let reason = format!("{} has changed since the checkpoint was chosen", path.display());
            return Err(FileFailure::from(reason).at(&path).of_kind(io::ErrorKind::InvalidData));
        }
        file.rewind().map_err(failed)?;
        Ok(file)
    }

    /// Opens a file of tensors on rank 0. *Collective*.
    #[track_caller]
    fn open(&self, name: &str) -> Result<Option<TensorFile>> {
        let mut opened = None;
        main_first::on_main(self.ddp.group(), || {
            let (file, path) = (self.verified(name)?, self.path.join(name));
            let failed = |e: FileFailure| FileFailure::of("cannot read", &path, e);
            opened = Some(TensorFile::read(file, &path).map_err(failed)?);
            Ok(())
        })?;
        Ok(opened)
    }

    /// Reads a file on rank 0 and broadcasts its contents. *Collective*.
    #[track_caller]
    fn broadcast_file(&self, name: &str) -> Result<Vec<u8>> {
        let (group, mut bytes) = (self.ddp.group(), Vec::new());
        let len = main_first::on_main(group, || {
            let failed = |e| FileFailure::from(e).at(&self.path.join(name));
            self.verified(name)?.read_to_end(&mut bytes).map_err(failed)?;
            Ok(bytes.len())
        })?;
        if !self.ddp.is_main() {
            return Ok(chunked_broadcast::receive(group, len, 0)?);
        }
        chunked_broadcast::send(group, &bytes)?;
        Ok(bytes)
    }
}

/// The first difference between the saved entries and those of the model to load.
fn difference(saved: &[Entry], here: &[Entry]) -> Option<String> {
    let (of_saved, of_here) = (by_path(saved), by_path(here));
    let extra = here.iter().find(|e| !of_saved.contains_key(e.path.as_str()));
    saved
        .iter()
        .find_map(|was| match of_here.get(was.path.as_str()) {
            None => Some(format!("{was} is not in the model")),
            Some(is) if (&is.dims, &is.dtype) != (&was.dims, &was.dtype) => Some(format!(
                "{} is {:?} {} in the checkpoint, but {:?} {} in the model",
                was.path, was.dims, was.dtype, is.dims, is.dtype
            )),
            Some(_) => None,
        })
        .or_else(|| extra.map(|e| format!("{e} is not in the checkpoint")))
}

fn by_path(entries: &[Entry]) -> HashMap<&str, &Entry> {
    entries.iter().map(|entry| (entry.path.as_str(), entry)).collect()
}
