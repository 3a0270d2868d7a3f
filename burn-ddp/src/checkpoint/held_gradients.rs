//! Gradients of micro-batches that were not reduced yet when a checkpoint is saved.
//!
//! Each rank's sums are written as they are: in a world of the same size each rank gets its own sums back, and the next
//! reduction has the bits of an uninterrupted run. A reduction at `save` would add the sums in another order.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Bytes, Device, TensorData};
use burn_ddp_comm::{DType, ProcessGroup};

use crate::file_failure::FileFailure;
use crate::gradients::{HeldBatches, Sum};
use crate::intercept::WrappedModel;
use crate::model::burnpack_reader::TensorFile;
use crate::model::burnpack_tensors::{StoredTensor, tensors};
use crate::model::burnpack_writer::{Source, Write};
use crate::model::schema::Schema;
use crate::tensor_conversion::burn_dtype;
use crate::{Error, Result, agreement, main_first};

/// The micro-batches that each rank holds, and the sums of their gradients, for the wrapped models in a module.
pub(super) struct HeldGradients {
    /// By wrapped model and rank.
    pub(super) batches: Vec<Vec<HeldBatches>>,
    pub(super) sums: Vec<HeldSum>,
}

/// The sum of one rank for one parameter of a wrapped model.
pub(super) struct HeldSum {
    model: Arc<WrappedModel>,
    /// Number of the wrapped model in the module.
    nth: usize,
    slot: usize,
    /// The rank that holds the sum.
    holder: usize,
    /// This rank.
    rank: usize,
}

/// True if `model`, which has this `schema`, is the one that is being trained: it has a trainable parameter, and its
/// device records gradients. Copies for evaluation or a moving average have the same taps, but no gradients.
pub(super) fn is_trained<M: Module>(model: &M, schema: &Schema) -> bool {
    schema.entries.iter().any(|entry| entry.trainable) && model.devices().iter().any(Device::is_autodiff)
}

/// A wrapped model that was saved in a file, as the model that is trained or as a copy.
#[derive(Debug)]
pub(super) struct SavedWrapped {
    pub(super) file: String,
    pub(super) model: Arc<WrappedModel>,
    pub(super) is_trained: bool,
}

/// Warns of copies that were saved without the model that holds gradients of micro-batches.
pub(super) fn warn_of_copies(saved: &[SavedWrapped]) {
    let has = |model| saved.iter().any(|saved| saved.is_trained && Arc::ptr_eq(model, &saved.model));
    for SavedWrapped { file, model, .. } in saved.iter().filter(|saved| !has(&saved.model)) {
        let (batches, sums) = model.held();
        if !sums.is_empty() {
            tracing::warn!(
                target: "burn_ddp::checkpoint",
                "the checkpoint has a copy that is not trained ({file}), and not the gradients of {} micro-batch(es) \
                that the model holds: a resumed run goes on without them. Save the model that is trained, too",
                batches.count
            );
        }
    }
}

/// Micro-batches and sums that the ranks hold for these wrapped models; `None` if no rank holds any. *Collective*.
#[track_caller]
pub(super) fn of(group: &ProcessGroup, models: &[Arc<WrappedModel>]) -> Result<Option<HeldGradients>> {
    let own: Vec<_> = models.iter().map(|model| model.held()).collect();
    let all = group.all_gather_object(&own)?;
    if all.iter().flatten().all(|(batches, _)| batches.count == 0) {
        return Ok(None);
    }
    let mut held = HeldGradients { batches: vec![Vec::new(); models.len()], sums: Vec::new() };
    for (holder, of_rank) in all.into_iter().enumerate() {
        for (nth, ((batches, slots), model)) in of_rank.into_iter().zip(models).enumerate() {
            held.batches[nth].push(batches);
            let sum = |slot| HeldSum { model: model.clone(), nth, slot, holder, rank: group.rank() };
            held.sums.extend(slots.into_iter().map(sum));
        }
    }
    Ok(Some(held))
}

impl HeldSum {
    fn dtype(&self) -> DType {
        match self.model.slots[self.slot].dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    fn len_bytes(&self) -> usize {
        self.model.slots[self.slot].len_elems() * self.dtype().size_bytes()
    }

    fn read(&self) -> Result<Sum, String> {
        let missing = || format!("the gradient of {} is not held any more", self.model.slots[self.slot].path);
        self.model.held_sum(self.slot)?.ok_or_else(missing)
    }
}

impl Source for HeldSum {
    fn stored(&self) -> Result<StoredTensor> {
        let slot = &self.model.slots[self.slot];
        let name = name_of(self.nth, self.holder, &slot.path);
        let (dtype, dims, len_bytes) = (burn_dtype(self.dtype()), slot.dims.clone(), self.len_bytes());
        Ok(StoredTensor { name, dtype, dims, len_bytes, id: None })
    }

    fn is_on_main(&self) -> bool {
        self.holder == 0
    }

    fn own_len_bytes(&self) -> usize {
        if self.rank == self.holder { self.len_bytes() } else { 0 }
    }

    fn own(&self) -> Result<TensorData> {
        let bytes = match self.rank == self.holder {
            true => self.read().map_err(Error::invalid)?.bytes().to_vec(),
            false => Vec::new(),
        };
        let len = bytes.len();
        Ok(TensorData::from_bytes_vec(bytes, [len], burn::tensor::DType::U8))
    }

    fn gather(&self, group: &ProcessGroup, own: &[u8]) -> Result<Bytes> {
        if self.rank == self.holder {
            group.send_bytes(DType::U8, own, 0)?;
        }
        let mut whole = vec![0; if self.rank == 0 { self.len_bytes() } else { 0 }];
        if self.rank == 0 {
            group.recv_bytes(DType::U8, &mut whole, self.holder)?;
        }
        Ok(Bytes::from_bytes_vec(whole))
    }

    fn put(&self, whole: Option<Bytes>, write: &mut Write<'_>) -> Result<(), FileFailure> {
        match whole {
            Some(whole) => write(&whole),
            None => write(self.read()?.bytes()),
        }
    }
}

/// Name of the file, from that of the model's.
pub(super) fn file_of(model: &str) -> String {
    format!("{}held.bpk", model.trim_end_matches("model.bpk"))
}

/// Name of a tensor in the file.
fn name_of(nth: usize, holder: usize, path: &str) -> String {
    format!("{nth}/{holder}/{path}")
}

/// Model, rank and path in the name of a tensor.
fn parts_of(name: &str) -> Option<(usize, usize, &str)> {
    let (nth, rest) = name.split_once('/')?;
    let (holder, path) = rest.split_once('/')?;
    Some((nth.parse().ok()?, holder.parse().ok()?, path))
}

/// Checks that these wrapped models can go on with the micro-batches of a checkpoint.
pub(super) fn check(models: &[Arc<WrappedModel>], batches: &[Vec<HeldBatches>]) -> Result<()> {
    let held = batches.iter().flatten().map(|held| held.count).max().unwrap_or_default();
    let what = format!("the checkpoint holds the gradients of {held} micro-batch(es) whose reduction was to come");
    if models.is_empty() {
        return Err(Error::invalid(format!(
            "{what}, and the model is not wrapped: load it after `ddp.wrap`; for inference, into a model on a device \
            without autodiff"
        )));
    }
    if models.len() != batches.len() {
        let (was, is) = (batches.len(), models.len());
        return Err(Error::invalid(format!("{what}, of {was} wrapped model(s), and this one has {is}")));
    }
    for (model, held) in models.iter().zip(batches) {
        if let Some(other) = held.iter().map(|held| held.reduction).find(|other| *other != model.reduction()) {
            let is = model.reduction();
            return Err(Error::invalid(format!("{what} by `{other:?}`, and the model was wrapped with `{is:?}`")));
        }
    }
    Ok(())
}

/// Gives each rank its micro-batches and sums from rank 0's `file`. In a world of another size, rank r gets those of
/// all ranks of the checkpoint whose number modulo the size is r. *Collective*.
///
/// # Errors
///
/// On every rank: [`Error::File`] if rank 0 cannot read; [`Error::Invalid`] if a sum belongs to no parameter.
#[track_caller]
pub(super) fn load(
    group: &ProcessGroup,
    models: &[Arc<WrappedModel>],
    batches: &[Vec<HeldBatches>],
    mut file: Option<TensorFile>,
) -> Result<()> {
    let names: Vec<String> = main_first::on_main(group, || match &file {
        Some(file) => Ok(tensors(&file.header)?.into_iter().map(|(stored, _)| stored.name).collect()),
        None => Ok(Vec::new()),
    })?;
    let sums = names.iter().map(|name| find(models, name)).collect::<Result<Vec<_>>>();
    let sums = agreement::on_outcome(group, "load gradients of micro-batches", sums)?;
    let (rank, world) = (group.rank(), group.world_size());
    for (model, held) in models.iter().zip(batches) {
        model.restore_held(of_rank(held, rank, world));
    }
    for (name, sum) in names.iter().zip(sums) {
        let mut bytes = Vec::new();
        main_first::on_main(group, || {
            let Some(file) = &mut file else { return Ok(()) };
            bytes = file.tensor(name)?.into_bytes().to_vec();
            match bytes.len() == sum.len_bytes() {
                true => Ok(()),
                false => {
                    let (has, expected) = (bytes.len(), sum.len_bytes());
                    Err(format!("has {has} bytes for gradient {name}, and {expected} were expected").into())
                }
            }
        })?;
        let to = sum.holder % world;
        if rank == 0 && to > 0 {
            group.send_bytes(DType::U8, &bytes, to)?;
        } else if rank == to && to > 0 {
            bytes = vec![0; sum.len_bytes()];
            group.recv_bytes(DType::U8, &mut bytes, 0)?;
        }
        if rank == to {
            sum.model.add_held_sum(sum.slot, Sum::from_bytes(sum.dtype(), &bytes));
        }
    }
    Ok(())
}

/// The sum whose values the tensor `name` of the file holds.
fn find(models: &[Arc<WrappedModel>], name: &str) -> Result<HeldSum> {
    let unknown = || Error::invalid(format!("{name} is no gradient of a parameter of the wrapped model"));
    let (nth, holder, path) = parts_of(name).ok_or_else(unknown)?;
    let model = models.get(nth).ok_or_else(unknown)?.clone();
    let slot = model.slots.iter().position(|slot| slot.path == path).ok_or_else(unknown)?;
    Ok(HeldSum { model, nth, slot, holder, rank: 0 })
}

/// The micro-batches of one rank of `world`, from those of the ranks of a checkpoint.
fn of_rank(held: &[HeldBatches], rank: usize, world: usize) -> HeldBatches {
    if held.len() == world {
        return held[rank];
    }
    // All ranks must have the same count, or a step would end on some of them earlier than on the others.
    let count = held.iter().map(|held| held.count).max().unwrap_or_default();
    let items = held.iter().skip(rank).step_by(world).map(|held| held.items).sum();
    HeldBatches { count, items, reduction: held[0].reduction }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GradientReduction::Mean;

    #[test]
    fn micro_batches_of_any_world_are_those_of_another() {
        let held = |count, items| HeldBatches { count, items, reduction: Mean };
        let saved = [held(2, 1.0), held(2, 2.0), held(1, 4.0)];
        let of_world = |world| (0..world).map(|rank| of_rank(&saved, rank, world)).collect::<Vec<_>>();
        assert_eq!(of_world(1), [held(2, 7.0)]);
        assert_eq!(of_world(2), [held(2, 5.0), held(2, 2.0)]);
        assert_eq!(of_world(3), saved);
        assert_eq!(of_world(4), [held(2, 1.0), held(2, 2.0), held(2, 4.0), held(2, 0.0)]);
    }

    #[test]
    fn names_are_read_back() {
        assert_eq!(parts_of(&name_of(1, 12, "a/b.weight")), Some((1, 12, "a/b.weight")));
        assert_eq!(parts_of("1/x"), None);
    }
}
