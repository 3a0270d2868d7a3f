//! Loading a saved checkpoint: rank 0 reads its files and broadcasts them.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use burn::tensor::{Bool, Bytes, Int, Tensor};
use serde::de::DeserializeOwned;

use super::manifest::{Checksum, Manifest};
use crate::ddp::Ddp;
use crate::model::schema::{Entry, Schema};
use crate::optimizer::state as optimizer_state;
use crate::{Error, Result, agreement, byte_stream, intercept, main_first};

/// A complete checkpoint, the same one on all ranks; from [`Checkpoints::latest`](super::Checkpoints::latest).
///
/// Rank 0 reads the files and broadcasts their contents, so all ranks load the same things in the same order.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    ddp: Ddp,
    path: PathBuf,
    manifest: Arc<Manifest>,
    prefix: String,
}

impl Checkpoint {
    pub(super) fn new(ddp: Ddp, path: PathBuf, manifest: &str) -> Result<Self> {
        let manifest = Manifest::parse(manifest).map_err(|e| Error::file(format!("{}: {e}", path.display())))?;
        Ok(Checkpoint { ddp, path, manifest: Arc::new(manifest), prefix: String::new() })
    }

    /// Optimizer steps before it was saved.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Number of ranks of the job that saved it.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.manifest.world_size
    }

    /// Its directory on rank 0's machine.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The part that was saved under this name, see [`CheckpointWriter::named`](super::CheckpointWriter::named).
    #[must_use]
    pub fn named(&self, name: &str) -> Checkpoint {
        Checkpoint { prefix: format!("{}{name}-", self.prefix), ..self.clone() }
    }

    /// Returns `model` with the parameters and buffers of the checkpoint. *Collective*.
    ///
    /// The model may be wrapped or not; parameter ids do not change.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::Invalid`] naming the first parameter that differs from the checkpoint, with both shapes;
    /// [`Error::File`] if rank 0 can no longer read the file.
    #[track_caller]
    pub fn model<M: Module>(&self, model: M) -> Result<M> {
        let name = format!("{}model.bpk", self.prefix);
        let entries = self.manifest.models.get(&name).ok_or_else(|| self.missing(&name))?;
        intercept::refuse_sharded(&model, "loading a checkpoint", "load before `wrap`: it holds whole parameters")?;
        let load = |model: M| intercept::bypass(|| load_model(model, entries, self.read_file(&name)?));
        let loaded =
            main_first::main_first(self.ddp.group(), || if self.ddp.is_main() { load(model) } else { Ok(model) })?;
        let model = agreement::on_outcome(self.ddp.group(), &format!("load {name}"), loaded)?;
        self.ddp.broadcast_parameters(model, 0)
    }

    /// Returns `optim` with the state of the checkpoint, for the parameters of `model`, wrapped or not. *Collective*.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::Invalid`] if the state belongs to another kind of optimizer or to parameters that
    /// `model` does not have; [`Error::File`] if rank 0 can no longer read the file.
    #[track_caller]
    pub fn optimizer<M: Module>(&self, optim: ModuleOptimizer, model: &M) -> Result<ModuleOptimizer> {
        let name = format!("{}optimizer.bpk", self.prefix);
        let saved_ids = self.manifest.optimizers.get(&name).ok_or_else(|| self.missing(&name))?;
        let whole = "its state is of whole parameters; train without `with_sharding`, or with a new optimizer";
        intercept::refuse_sharded(model, "loading the state of an optimizer", whole)?;
        let bytes = self.broadcast_file(&name)?;
        optimizer_state::warn_of_detour(model, &bytes);
        let ids = intercept::bypass(|| Schema::of(model)).map(|schema| optimizer_state::ids(&schema));
        let loaded = ids.and_then(|ids| optimizer_state::read(optim, &bytes, saved_ids, &ids));
        agreement::on_outcome(self.ddp.group(), &format!("load {name}"), loaded)
    }

    /// State of the learning-rate schedule: `scheduler = scheduler.load_record(checkpoint.scheduler()?)`. *Collective*.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::Invalid`] if none was saved; [`Error::File`] if rank 0 can no longer read the file.
    #[track_caller]
    pub fn scheduler(&self) -> Result<LrSchedulerRecord> {
        let name = format!("{}scheduler.bpk", self.prefix);
        if !self.manifest.files.contains_key(&name) {
            return Err(self.missing(&name));
        }
        let bytes = self.broadcast_file(&name)?;
        LrSchedulerRecord::from_bytes(Bytes::from_bytes_vec(bytes)).map_err(|e| Error::file(format!("{name}: {e}")))
    }

    /// The value that was saved under `name`. Not collective.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is none, or it is of another type.
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

    /// Reads a file and compares its checksum with the manifest's.
    fn read_file(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.path.join(name);
        let bytes = fs::read(&path).map_err(|e| Error::file(format!("cannot read {}: {e}", path.display())))?;
        match self.manifest.files.get(name) {
            Some(checksum) if *checksum == Checksum::of(&bytes) => Ok(bytes),
            _ => Err(Error::file(format!("{} has changed since the checkpoint was chosen", path.display()))),
        }
    }

    /// Reads a file on rank 0 and broadcasts its contents. *Collective*.
    #[track_caller]
    fn broadcast_file(&self, name: &str) -> Result<Vec<u8>> {
        let (group, mut bytes) = (self.ddp.group(), Vec::new());
        let len = main_first::on_main(group, || {
            bytes = self.read_file(name).map_err(|e| e.to_string())?;
            Ok(bytes.len())
        })?;
        if !self.ddp.is_main() {
            return Ok(byte_stream::receive(group, len, 0)?);
        }
        byte_stream::send(group, &bytes)?;
        Ok(bytes)
    }
}

/// Loads a record into `model`, whose parameters keep their ids.
fn load_model<M: Module>(model: M, saved: &[Entry], record: Vec<u8>) -> Result<M> {
    let schema = Schema::of(&model)?;
    if let Some(difference) = difference(saved, &schema.entries) {
        return Err(Error::invalid(format!("the checkpoint is of another model: {difference}")));
    }
    // Applies pending updates of running statistics now, so that they are not added to the loaded ones later.
    drop(model.valid());
    let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(record)).map_err(|e| Error::file(e.to_string()))?;
    let loaded = model.try_load_record(record).map_err(|e| Error::invalid(e.to_string()))?;
    Ok(loaded.map(&mut RestoreIds(schema.ids.into())))
}

/// The first difference between the saved entries and those of the model to load.
fn difference(saved: &[Entry], here: &[Entry]) -> Option<String> {
    let of_path = |entries: &'_ [Entry], path: &str| entries.iter().find(|e| e.path == path).cloned();
    let extra = here.iter().find(|e| of_path(saved, &e.path).is_none());
    saved
        .iter()
        .find_map(|was| match of_path(here, &was.path) {
            None => Some(format!("{was} is not in the model")),
            Some(is) if (&is.dims, &is.dtype) != (&was.dims, &was.dtype) => Some(format!(
                "{} is {:?} {} in the checkpoint, but {:?} {} in the model",
                was.path, was.dims, was.dtype, is.dims, is.dtype
            )),
            Some(_) => None,
        })
        .or_else(|| extra.map(|e| format!("{e} is not in the checkpoint")))
}

/// Sets the ids of a model's parameters and buffers, in traversal order.
struct RestoreIds(VecDeque<ParamId>);

impl RestoreIds {
    fn next(&mut self, old: ParamId) -> ParamId {
        self.0.pop_front().unwrap_or(old)
    }
}

impl ModuleMapper for RestoreIds {
    fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.id = self.next(param.id);
        param
    }

    fn map_int<const D: usize>(&mut self, mut param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.id = self.next(param.id);
        param
    }

    fn map_bool<const D: usize>(&mut self, mut param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.id = self.next(param.id);
        param
    }
}
