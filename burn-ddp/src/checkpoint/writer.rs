//! Filling a checkpoint: models, optimizers, schedules and values, written tensor after tensor, or encoded in memory.

use std::collections::HashMap;
use std::fs::File;
use std::io::Seek;
use std::path::PathBuf;
use std::sync::Arc;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_ddp_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::Sha256;

use super::held_gradients::{self, SavedWrapped};
use super::manifest::{Checksum, Manifest};
use crate::file_failure::{FileFailure, FileWork};
use crate::intercept::{self, Part, WrappedModel};
use crate::model::burnpack_header;
use crate::model::burnpack_writer::{self, Sink};
use crate::model::digest::digest;
use crate::model::param_hash::param_hash;
use crate::model::sync_buffers::agreed_statistics;
use crate::model::values::values;
use crate::optimizer::sharded_state::StateInParts;
use crate::optimizer::state::{self as optimizer_state, Ids};
use crate::wrap::wrapped_in;
use crate::{Error, Result, agreement, main_first};

/// Name of the work of `fill` in errors.
const FILL: &str = "fill its checkpoint";

/// Takes the contents of a new checkpoint, in [`Checkpoints::save`](super::Checkpoints::save).
///
/// Every rank calls the same methods. Only rank 0 writes the contents.
#[derive(Debug)]
pub struct CheckpointWriter<'a> {
    contents: &'a mut Contents,
    group: &'a ProcessGroup,
    /// Prefix of names, such as `"generator-"`; empty without [`named`](Self::named).
    prefix: String,
    /// The writing of the checkpoint, for errors of rank 0.
    work: &'a FileWork,
}

/// The files of a checkpoint.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) manifest: Manifest,
    pub(super) files: Vec<(String, Content)>,
    /// True on rank 0; the other ranks collect nothing.
    collect: bool,
    /// Rank 0's directory for models and optimizers; `None` if a thread writes them later.
    streams_to: Option<PathBuf>,
    /// The error that has ended the filling on every rank.
    ended: Option<Error>,
    /// Names and digests of models that are not wrapped; empty in a world of 1.
    not_wrapped: Vec<(String, i64)>,
    wrapped: Vec<SavedWrapped>,
}

/// A file of a checkpoint.
#[derive(Debug)]
pub(super) enum Content {
    Memory(Vec<u8>),
    /// In the directory already.
    Written(Checksum),
}

impl Contents {
    pub(super) fn new(step: u64, world_size: usize, collect: bool, streams_to: Option<PathBuf>) -> Self {
        let manifest = Manifest::new(step, world_size);
        let (files, not_wrapped, wrapped) = (Vec::new(), Vec::new(), Vec::new());
        Contents { manifest, files, collect, streams_to, ended: None, not_wrapped, wrapped }
    }

    /// Agrees on the outcome of filling. Returns the models that are not wrapped and differ between ranks.
    /// *Collective*, unless an error has ended it on every rank.
    #[track_caller]
    pub(super) fn end(&mut self, group: &ProcessGroup, filled: Result<()>) -> Result<Vec<String>> {
        self.agree(group, "nothing more", filled)?;
        held_gradients::warn_of_copies(&self.wrapped);
        let all = group.all_gather_object(&self.not_wrapped)?;
        let differs = |(name, digest): &&(String, i64)| {
            all.iter().flatten().any(|(other, of_other)| other == name && of_other != digest)
        };
        Ok(self.not_wrapped.iter().filter(differs).map(|(name, _)| name.clone()).collect())
    }

    /// This rank's result, if all ranks save `what` next and no rank has failed. *Collective*, unless an error has
    /// ended the filling on every rank.
    #[track_caller]
    fn agree<T>(&mut self, group: &ProcessGroup, what: &str, mine: Result<T>) -> Result<T> {
        self.ended.clone().map_or(Ok(()), Err)?;
        let reason = mine.as_ref().err().map(ToString::to_string);
        let all = group.all_gather_object(&(what.to_owned(), reason)).map_err(Error::from);
        let agreed = all.and_then(|all| {
            let mine = mine?;
            let mut ranks = group.ranks().iter().zip(&all);
            if let Some((&rank, reason)) = ranks.clone().find_map(|(rank, (_, reason))| Some((rank, reason.as_ref()?)))
            {
                return Err(Error::Invalid { rank: Some(rank), reason: format!("cannot {FILL}: {reason}") });
            }
            match ranks.find(|(_, (other, _))| *other != all[0].0) {
                None => Ok(mine),
                Some((rank, (other, _))) => Err(Error::invalid(format!(
                    "the ranks fill their checkpoints in different ways: rank {} saves {}, rank {rank} {other}",
                    group.ranks()[0],
                    all[0].0
                ))),
            }
        });
        agreed.inspect_err(|e| self.ended = Some(e.clone()))
    }

    /// Destination of a new file of this name.
    fn open(&self, name: &str) -> Result<Sink> {
        self.check_new(name)?;
        Ok(match &self.streams_to {
            _ if !self.collect => Sink::Absent,
            None => Sink::Memory(Vec::new()),
            Some(directory) => {
                let path = directory.join(name);
                let failed = |e| Error::file(FileFailure::from(e).within(path.display()).at(&path));
                let file = File::create_new(&path).map_err(failed)?;
                Sink::File(file, 0, Some(Sha256::default()))
            }
        })
    }

    /// Adds a file.
    fn add(&mut self, name: String, content: Content) {
        self.files.push((name, content));
    }

    /// Checks that a file is new.
    fn check_new(&self, name: &str) -> Result<()> {
        match self.files.iter().any(|(other, _)| *other == name) {
            false => Ok(()),
            true => Err(Error::invalid(format!("{name} is in the checkpoint already: tell them apart with `named`"))),
        }
    }
}

impl From<Sink> for Content {
    fn from(sink: Sink) -> Self {
        match sink {
            Sink::File(_, len, sha) => Content::Written(Checksum::new(len, sha.unwrap_or_default())),
            Sink::Memory(bytes) => Content::Memory(bytes),
            Sink::Absent => Content::Memory(Vec::new()),
        }
    }
}

impl<'a> CheckpointWriter<'a> {
    pub(super) fn new(contents: &'a mut Contents, group: &'a ProcessGroup, work: &'a FileWork) -> Self {
        CheckpointWriter { contents, group, prefix: String::new(), work }
    }

    /// A writer for a further model, optimizer or schedule: `c.named("generator").model(&generator)?`. Load it by the
    /// same name, see [`Checkpoint::named`](super::Checkpoint::named).
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
    ///     let generator = ddp.wrap(LinearConfig::new(2, 4).init(&device))?;
    ///     let critic = ddp.wrap(LinearConfig::new(4, 1).init(&device))?;
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     checkpoints.save(10, |c| {
    ///         c.named("generator").model(&generator)?;
    ///         c.named("critic").model(&critic)
    ///     })?;
    ///     let checkpoint = checkpoints.latest()?.expect("just saved");
    ///     let again = checkpoint.named("critic").model(LinearConfig::new(4, 1).init(&device))?;
    ///     assert_eq!(param_hash(&again)?, param_hash(&critic)?);
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    pub fn named(&mut self, name: &str) -> CheckpointWriter<'_> {
        let prefix = format!("{}{name}-", self.prefix);
        CheckpointWriter { prefix, contents: self.contents, group: self.group, work: self.work }
    }

    /// Saves parameters and buffers of `model`, wrapped or not. *Collective*. Plain Burn reads the file `model.bpk`. Of
    /// [local parameters](crate::WrapConfig::with_local_parameters) the file holds rank 0's values; the first such save
    /// logs a warning.
    ///
    /// The file holds the running statistics that would be set by
    /// [`Ddp::sync_buffers`](crate::Ddp::sync_buffers). Rank 0 writes one parameter after the other; each
    /// [sharded](crate::WrapConfig::with_sharding) one is gathered before. In an
    /// [asynchronous](super::Checkpoints::asynchronous) save rank 0 keeps a copy of all parameters in host memory.
    ///
    /// If the wrapped model holds gradients of micro-batches that were not reduced yet, they are saved in a further
    /// file: each rank's sums, of 4 bytes per parameter and rank (8 for f64). It also holds each rank's running
    /// statistics where they differ. So a checkpoint may be saved in the
    /// middle of an accumulation, with the position of the loader. A copy that is not trained (`valid()`, `no_grad`) is
    /// saved without gradients, with a warning if the checkpoint does not also hold the model that is trained.
    /// Gradients in Burn's `GradientsAccumulator` are not saved: save after its step.
    ///
    /// Costs some [rounds](crate::checkpoint), those of `sync_buffers`, and a gather of 8 bytes per running statistic.
    /// Values travel only of sharded parameters (an all-gather each) and of gradients that are held on ranks other than
    /// 0 (each sum once, to rank 0).
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::Invalid`] if the model cannot be read from its device, or a model of this name was saved
    /// already; [`Error::File`] if rank 0 cannot write.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     let model = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     checkpoints.save(10, |c| c.model(&model))?;
    ///     let checkpoint = checkpoints.latest()?.expect("just saved");
    ///     let plain = LinearConfig::new(2, 1).init(&device).load_file(checkpoint.path().join("model.bpk"));
    ///     assert_eq!(param_hash(&plain)?, param_hash(&model)?); // plain Burn reads the file
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[track_caller]
    pub fn model<M: Module>(&mut self, model: &M) -> Result<()> {
        let name = format!("{}model.bpk", self.prefix);
        let ready = self.ready_to_save(&name, model);
        let (mut sink, wrapped) = self.contents.agree(self.group, &name, ready)?;
        let saved = agreed_statistics(self.group, model, &wrapped).and_then(|_own_statistics| {
            let (schema, values) = agreement::on_outcome(self.group, FILL, values(model))?;
            burnpack_writer::write(self.group, values, &[], &mut sink, self.work)?;
            Ok(schema)
        });
        let schema = saved.inspect_err(|e| self.contents.ended = Some(e.clone()))?;
        let is_trained = held_gradients::is_trained(model, &schema);
        let saved = |model: &Arc<WrappedModel>| SavedWrapped { file: name.clone(), model: model.clone(), is_trained };
        self.contents.wrapped.extend(wrapped.iter().map(saved));
        if self.contents.collect {
            let scales: Vec<_> = wrapped.iter().map(|wrapped| wrapped.loss_scale_state()).collect();
            if is_trained && scales.iter().any(Option::is_some) {
                self.contents.manifest.loss_scales.insert(name.clone(), scales);
            }
            self.contents.manifest.models.insert(name.clone(), schema.entries);
            self.contents.add(name.clone(), sink.into());
        }
        match is_trained {
            true => self.held_gradients(name, &wrapped).inspect_err(|e| self.contents.ended = Some(e.clone())),
            false => Ok(()),
        }
    }

    /// Saves the gradients of micro-batches that the ranks hold for the wrapped models in the file `model`, and their
    /// running statistics if they differ. *Collective*.
    fn held_gradients(&mut self, model: String, wrapped: &[Arc<WrappedModel>]) -> Result<()> {
        let Some(held) = held_gradients::of(self.group, wrapped)? else {
            if self.contents.collect {
                self.contents.manifest.held.insert(model, Vec::new());
            }
            return Ok(());
        };
        let name = held_gradients::file_of(&model);
        let sink = self.contents.open(&name);
        let mut sink = self.contents.agree(self.group, &name, sink)?;
        burnpack_writer::write(self.group, held.tensors, &[], &mut sink, self.work)?;
        if self.contents.collect {
            self.contents.manifest.held.insert(model, held.batches);
            self.contents.add(name, sink.into());
        }
        Ok(())
    }

    /// Destination of the file of `model`, and the wrapped models in it, if this rank can save it.
    fn ready_to_save<M: Module>(&mut self, name: &str, model: &M) -> Result<(Sink, Vec<Arc<WrappedModel>>)> {
        self.check_name()?;
        let wrapped = wrapped_in(self.group, model)?;
        wrapped.iter().for_each(|wrapped| wrapped.warn_of_local());
        if wrapped.is_empty() && self.group.world_size() > 1 {
            let digest = digest(param_hash(model)?.as_bytes());
            self.contents.not_wrapped.push((format!("{}model", self.prefix), digest));
        }
        Ok((self.contents.open(name)?, wrapped))
    }

    /// Saves the state of the optimizer that trains `model`. *Collective*. Plain Burn reads the file `optimizer.bpk`,
    /// together with `model.bpk`.
    ///
    /// Burn exports an optimizer's state as a whole only, so rank 0 needs host memory for a copy of the state. If
    /// parameters are [sharded](crate::WrapConfig::with_sharding), each rank needs memory for copies of its part.
    ///
    /// Costs two [rounds](crate::checkpoint); no state travels. If parameters are sharded: some rounds, and for each
    /// tensor of their state an all-gather and a round.
    ///
    /// # Errors
    ///
    /// On every rank: [`Error::Invalid`] if the optimizer has state of parameters that are not in `model`, or an
    /// optimizer of this name was saved already; [`Error::File`] if rank 0 cannot write.
    ///
    /// # Example
    ///
    /// As in [`Checkpoints`](super::Checkpoints).
    #[track_caller]
    pub fn optimizer<M: Module>(&mut self, optim: &ModuleOptimizer, model: &M) -> Result<()> {
        let name = format!("{}optimizer.bpk", self.prefix);
        let ready = self.check_name().and_then(|()| {
            self.contents.check_new(&name)?;
            wrapped_in(self.group, model)?;
            Ok((intercept::parts(model), optimizer_state::ids_of(model)?))
        });
        let (parts, ids) = self.contents.agree(self.group, &name, ready)?;
        let saved = match parts.is_empty() {
            true => self.whole_state(&name, optim, &ids),
            false => self.state_in_parts(&name, optim, &ids, &parts),
        };
        let content = saved.inspect_err(|e| self.contents.ended = Some(e.clone()))?;
        if self.contents.collect {
            self.contents.manifest.optimizers.insert(name.clone(), ids);
            self.contents.add(name, content);
        }
        Ok(())
    }

    /// Writes rank 0's state. *Collective*.
    fn whole_state(&self, name: &str, optim: &ModuleOptimizer, ids: &Ids) -> Result<Content> {
        let mut content = Content::Memory(Vec::new());
        let refused = main_first::on_main(self.group, || {
            let header;
            (header, content) = match &self.contents.streams_to {
                None => {
                    let bytes = optimizer_state::write(optim).map_err(|e| self.work.failed(e.to_string()))?;
                    (burnpack_header::read_header(&mut bytes.as_slice()), Content::Memory(bytes))
                }
                Some(directory) => {
                    let path = directory.join(name);
                    // Into the file without a second copy.
                    optim.to_record().save(&path).map_err(|e| self.work.failed(e.to_string()))?;
                    let mut file = File::open(path).map_err(|e| self.work.failed(e))?;
                    let header = burnpack_header::read_header(&mut file);
                    file.rewind().map_err(|e| self.work.failed(e))?;
                    (header, Content::Written(Checksum::of_file(&mut file).map_err(|e| self.work.failed(e))?))
                }
            };
            let (header, _) = header.map_err(|e| self.work.failed(e))?;
            Ok(optimizer_state::check(&header, ids).err().map(|e| e.to_string()))
        })?;
        match refused {
            None => Ok(content),
            Some(reason) => Err(Error::Invalid { rank: Some(self.group.ranks()[0]), reason }),
        }
    }

    /// Writes the state of all ranks' parts, tensor after tensor. *Collective*.
    fn state_in_parts(
        &self,
        name: &str,
        optim: &ModuleOptimizer,
        ids: &Ids,
        parts: &HashMap<String, Part>,
    ) -> Result<Content> {
        let bytes = optimizer_state::write(optim);
        let own = bytes.as_ref().map_err(Clone::clone).and_then(|bytes| StateInParts::read(bytes, ids, parts));
        let own = own.and_then(|state| Ok((state, self.contents.open(name)?)));
        let (state, mut sink) = agreement::on_outcome(self.group, FILL, own)?;
        state.write(self.group, &mut sink, self.work)?;
        Ok(sink.into())
    }

    /// Saves rank 0's state of a learning-rate schedule of any type: `c.scheduler(scheduler.to_record())`. No
    /// communication.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a scheduler of this name was saved already.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let init = || LinearLrSchedulerConfig::new(0.1, 0.0, 10).init().map_err(anyhow::Error::msg);
    ///     let mut scheduler = init()?;
    ///     scheduler.step();
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     checkpoints.save(1, |c| c.scheduler(scheduler.to_record()))?;
    ///     let checkpoint = checkpoints.latest()?.expect("just saved");
    ///     let mut again = init()?.load_record(checkpoint.scheduler()?);
    ///     assert_eq!(again.step().base(), scheduler.step().base());
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    pub fn scheduler(&mut self, record: LrSchedulerRecord) -> Result<()> {
        if !self.contents.collect {
            return Ok(());
        }
        self.check_name()?;
        let name = format!("{}scheduler.bpk", self.prefix);
        let bytes = record.into_bytes().map_err(|e| Error::invalid(format!("the scheduler cannot be saved: {e}")))?;
        self.contents.check_new(&name)?;
        self.contents.add(name, Content::Memory(bytes.to_vec()));
        Ok(())
    }

    /// Saves rank 0's serde value: a loader's position, a configuration, the best loss so far. Floats keep their bits.
    /// No communication.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if JSON cannot hold the value exactly (NaN, infinities), or the name is taken.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let checkpoints = ddp.checkpoints(directory)?;
    ///     checkpoints.save(1, |c| c.value("layers", &vec![4, 2, 1 + ddp.rank()]))?; // rank 0's
    ///     let checkpoint = checkpoints.latest()?.expect("just saved");
    ///     assert_eq!(checkpoint.value::<Vec<usize>>("layers")?, [4, 2, 1]);
    ///     assert!(checkpoint.value::<f64>("loss").is_err()); // was not saved
    ///     Ok(())
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    pub fn value<V: Serialize + DeserializeOwned>(&mut self, name: &str, value: &V) -> Result<()> {
        if !self.contents.collect {
            return Ok(());
        }
        let name = format!("{}{name}", self.prefix);
        let json = json_of(value).map_err(|e| Error::invalid(format!("the value {name:?} cannot be saved: {e}")))?;
        match self.contents.manifest.values.insert(name.clone(), json) {
            None => Ok(()),
            Some(_) => Err(Error::invalid(format!("the value {name:?} is in the checkpoint already"))),
        }
    }

    /// Checks that the name of the part can be in the names of files.
    fn check_name(&self) -> Result<()> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if self.prefix.chars().all(plain) {
            return Ok(());
        }
        let named = self.prefix.trim_end_matches('-');
        Err(Error::invalid(format!("{named:?} becomes part of a file's name: use letters, digits, - and _")))
    }
}

/// `value` as JSON.
///
/// # Errors
///
/// A value that does not survive the round trip: numbers that are not finite, keys that are not strings.
fn json_of<V: Serialize + DeserializeOwned>(value: &V) -> std::result::Result<Value, String> {
    let json = serde_json::to_value(value).map_err(|e| e.to_string())?;
    let again: V = serde_json::from_str(&json.to_string()).map_err(|e| e.to_string())?;
    match serde_json::to_value(&again) {
        Ok(read) if read == json => Ok(json),
        _ => Err("it does not survive a round trip through JSON".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// serde_json reads floats exactly only with its feature `float_roundtrip`.
        #[test]
        fn numbers_keep_their_bits(numbers in prop::collection::vec(any::<u64>(), 0..50), seconds in any::<f32>()) {
            let numbers: Vec<f64> = numbers.into_iter().map(f64::from_bits).filter(|x| x.is_finite()).collect();
            let value = (numbers, seconds, u64::MAX, i64::MIN, "text".to_string(), None::<u8>);
            let text = json_of(&value).unwrap().to_string();
            let read: (Vec<f64>, f32, u64, i64, String, Option<u8>) = serde_json::from_str(&text).unwrap();
            let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&read.0), bits(&value.0));
            prop_assert_eq!(read.1.to_bits(), value.1.to_bits());
            prop_assert_eq!((read.2, read.3, read.4, read.5), (value.2, value.3, value.4, value.5));
        }
    }

    #[test]
    fn what_json_cannot_hold_is_refused() {
        assert!(json_of(&f64::NAN).is_err());
        assert!(json_of(&vec![1.0, f64::INFINITY]).is_err());
        assert_eq!(json_of(&Some(1.5)).unwrap(), serde_json::json!(1.5));
    }
}
