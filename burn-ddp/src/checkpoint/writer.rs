//! Filling a checkpoint: models, optimizers, schedules and values, encoded in memory.

use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_ddp_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::manifest::Manifest;
use crate::model::digest::digest;
use crate::model::param_hash::param_hash;
use crate::model::schema::Schema;
use crate::model::sync_buffers::sync_wrapped;
use crate::optimizer::state as optimizer_state;
use crate::wrap::wrapped_in;
use crate::{Error, Result, agreement, intercept};

/// Name of the work in errors of ranks that fill a checkpoint.
const FILL: &str = "fill its checkpoint";

/// Refusal of models with sharded parameters, and what to do.
const CHECKPOINT: &str = "a checkpoint";
const SAVE: &str = "it would hold rank 0's parts; `ddp.save(&model, path)` writes the whole model, without the \
    optimizer's state";

/// Takes the contents of a new checkpoint, in [`Checkpoints::save`](super::Checkpoints::save).
///
/// Every rank calls the same methods. Only rank 0 copies the contents.
#[derive(Debug)]
pub struct CheckpointWriter<'a> {
    contents: &'a mut Contents,
    group: &'a ProcessGroup,
    /// Prefix of names, such as `"generator-"`; empty without [`named`](Self::named).
    prefix: String,
}

/// The encoded files of a checkpoint.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) manifest: Manifest,
    pub(super) files: Vec<(String, Vec<u8>)>,
    /// True on rank 0; the other ranks collect nothing.
    collect: bool,
    /// Error of another rank, which has ended the filling on every rank.
    ended: Option<Error>,
    /// Names and digests of models that are not wrapped; empty in a world of 1.
    not_wrapped: Vec<(String, i64)>,
}

impl Contents {
    pub(super) fn new(step: u64, world_size: usize, collect: bool) -> Self {
        let manifest = Manifest::new(step, world_size);
        Contents { manifest, files: Vec::new(), collect, ended: None, not_wrapped: Vec::new() }
    }

    /// Agrees on the outcome of filling. Returns the models that are not wrapped and differ between ranks.
    /// *Collective*, unless another rank has ended it.
    #[track_caller]
    pub(super) fn end(&mut self, group: &ProcessGroup, filled: Result<()>) -> Result<Vec<String>> {
        match self.ended.take() {
            Some(error) => Err(error),
            None => agreement::on_outcome(group, FILL, filled),
        }?;
        let all = group.all_gather_object(&self.not_wrapped)?;
        let differs = |(name, digest): &&(String, i64)| {
            all.iter().flatten().any(|(other, of_other)| other == name && of_other != digest)
        };
        Ok(self.not_wrapped.iter().filter(differs).map(|(name, _)| name.clone()).collect())
    }

    /// Adds a file. The thread that writes it makes its checksum.
    fn add(&mut self, name: String, bytes: Vec<u8>) -> Result<()> {
        if self.files.iter().any(|(other, _)| *other == name) {
            return Err(Error::invalid(format!("{name} is in the checkpoint already: tell them apart with `named`")));
        }
        self.files.push((name, bytes));
        Ok(())
    }
}

impl<'a> CheckpointWriter<'a> {
    pub(super) fn new(contents: &'a mut Contents, group: &'a ProcessGroup) -> Self {
        CheckpointWriter { contents, group, prefix: String::new() }
    }

    /// A writer for a further model, optimizer or schedule: `c.named("generator").model(&generator)?`. Load it by the
    /// same name, see [`Checkpoint::named`](super::Checkpoint::named).
    pub fn named(&mut self, name: &str) -> CheckpointWriter<'_> {
        CheckpointWriter { prefix: format!("{}{name}-", self.prefix), contents: self.contents, group: self.group }
    }

    /// Saves parameters and buffers of `model`, wrapped or not. Plain Burn reads the file `model.bpk`. Of [local
    /// parameters](crate::WrapConfig::with_local_parameters) it holds rank 0's, with a warning the first time.
    ///
    /// *Collective* for a wrapped model with running statistics, which the ranks bring together first, as
    /// [`Ddp::sync_buffers`](crate::Ddp::sync_buffers) does.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the model cannot be read from its device, or a model of this name was saved already; if
    /// any rank holds gradients of micro-batches, which a resumed run would miss: save after the optimizer step.
    #[track_caller]
    pub fn model<M: Module>(&mut self, model: &M) -> Result<()> {
        let wrapped = wrapped_in(self.group, model)?;
        intercept::refuse_sharded(model, CHECKPOINT, SAVE)?;
        self.sync(model)?;
        if wrapped.iter().any(|wrapped| wrapped.holds_gradients()) {
            return Err(Error::invalid(
                "the model holds gradients of micro-batches, which a checkpoint would lose: save after the optimizer \
                 step; `ddp.sync_gradients(&model)` completes one, `ddp.discard_accumulated(&model)` drops them",
            ));
        }
        wrapped.iter().for_each(|wrapped| wrapped.warn_of_local());
        if wrapped.is_empty() && self.group.world_size() > 1 {
            let name = format!("{}model", self.prefix);
            self.contents.not_wrapped.push((name, digest(param_hash(model)?.as_bytes())));
        }
        if !self.contents.collect {
            return Ok(());
        }
        let name = self.file("model.bpk")?;
        let (schema, bytes) = intercept::bypass(|| {
            // `valid` brings running statistics up to date.
            Ok::<_, Error>((Schema::of(model)?, model.valid().into_record().into_bytes()))
        })?;
        let bytes = bytes.map_err(|e| Error::invalid(format!("the model cannot be saved: {e}")))?;
        self.contents.manifest.models.insert(name.clone(), schema.entries);
        self.contents.add(name, bytes.to_vec())
    }

    /// Brings the running statistics of a wrapped `model` together. *Collective* if it has some. An error of a rank
    /// that has ended before it came here is the error of all.
    #[track_caller]
    fn sync<M: Module>(&mut self, model: &M) -> Result<()> {
        if intercept::find(model).iter().all(|wrapped| wrapped.buffer_policy().is_none()) {
            return Ok(());
        }
        self.contents.ended.clone().map_or(Ok(()), Err)?;
        // Such a rank is in `Contents::end`.
        agreement::on_outcome(self.group, FILL, Ok(())).inspect_err(|e| self.contents.ended = Some(e.clone()))?;
        sync_wrapped(self.group, model)
    }

    /// Saves the state of the optimizer that trains `model`. Plain Burn reads the file `optimizer.bpk`, together with
    /// `model.bpk`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if it has state of parameters that are not in `model`, or an optimizer of this name was saved
    /// already.
    pub fn optimizer<M: Module>(&mut self, optim: &ModuleOptimizer, model: &M) -> Result<()> {
        intercept::refuse_sharded(model, CHECKPOINT, SAVE)?;
        if !self.contents.collect {
            return Ok(());
        }
        let name = self.file("optimizer.bpk")?;
        let ids = optimizer_state::ids(&intercept::bypass(|| Schema::of(model))?);
        let bytes = optimizer_state::write(optim)?;
        optimizer_state::check(&bytes, &ids)?;
        self.contents.manifest.optimizers.insert(name.clone(), ids);
        self.contents.add(name, bytes)
    }

    /// Saves the state of a learning-rate schedule of any type: `c.scheduler(scheduler.to_record())`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a scheduler of this name was saved already.
    pub fn scheduler(&mut self, record: LrSchedulerRecord) -> Result<()> {
        if !self.contents.collect {
            return Ok(());
        }
        let name = self.file("scheduler.bpk")?;
        let bytes = record.into_bytes().map_err(|e| Error::invalid(format!("the scheduler cannot be saved: {e}")))?;
        self.contents.add(name, bytes.to_vec())
    }

    /// Saves rank 0's serde value: a loader's position, a configuration, the best loss so far. Floats keep their bits.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if JSON cannot hold the value exactly (NaN, infinities), or the name is taken.
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

    fn file(&self, name: &str) -> Result<String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if self.prefix.chars().all(plain) {
            return Ok(format!("{}{name}", self.prefix));
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
