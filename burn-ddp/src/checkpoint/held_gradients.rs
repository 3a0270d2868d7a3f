//! State of a trained model that differs between ranks: gradients of micro-batches that were not reduced yet, and
//! running statistics that were not averaged since they changed.
//!
//! Each rank's values are written as they are: in a world of the same size each rank gets its own back, and the next
//! reduction has the bits of an uninterrupted run. A reduction at `save` would add the sums in another order.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Bytes, DType as BurnDType, Device, TensorData};
use burn_ddp_comm::{DType, LogicalRanks, ProcessGroup};

use crate::file_failure::FileFailure;
use crate::gradients::{HeldBatches, HeldLeaves, Sum, sum_dtype};
use crate::intercept::WrappedModel;
use crate::model::burnpack_reader::TensorFile;
use crate::model::burnpack_tensors::{StoredTensor, tensors};
use crate::model::burnpack_writer::{self, Source, Write};
use crate::model::digest::digest;
use crate::model::schema::Schema;
use crate::tensor_conversion::burn_dtype;
use crate::{Error, Result, agreement, main_first};

/// The micro-batches that each rank holds for the wrapped models in a module, and each rank's tensors.
pub(super) struct HeldGradients {
    /// By wrapped model and rank.
    pub(super) batches: Vec<Vec<HeldBatches>>,
    pub(super) tensors: Vec<HeldTensor>,
}

/// A tensor of one rank for a wrapped model.
pub(super) struct HeldTensor {
    model: Arc<WrappedModel>,
    /// Number of the wrapped model in the module.
    nth: usize,
    /// The rank that has the tensor.
    holder: usize,
    /// This rank.
    rank: usize,
    kind: HeldKind,
}

enum HeldKind {
    /// The sum of the gradients of a slot, with logical ranks from a leaf on.
    Sum { slot: usize, leaf: usize },
    /// Weighted sums of running statistics from a leaf on: those of the `nth` dtype.
    LeafStatistics { nth: usize, leaf: usize, dtype: DType, len: usize },
    /// A running statistic: its number among those of the model, its path, its dtype and shape, and its value on the
    /// rank that has it.
    Statistic { number: usize, path: String, dtype: BurnDType, dims: Vec<usize>, value: Option<TensorData> },
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
        if !sums.gradients.is_empty() {
            tracing::warn!(
                target: "burn_ddp::checkpoint",
                "the checkpoint has a copy that is not trained ({file}), and not the gradients of {} micro-batch(es) \
                that the model holds: a resumed run goes on without them. Save the model that is trained, too",
                batches.count
            );
        }
    }
}

/// What the ranks hold for these wrapped models; `None` if no rank holds gradients, and all have the same running
/// statistics. *Collective*.
#[track_caller]
pub(super) fn of(group: &ProcessGroup, models: &[Arc<WrappedModel>]) -> Result<Option<HeldGradients>> {
    let statistics = models.iter().map(|model| model.read_statistics()).collect::<Result<Vec<_>>>();
    let statistics = agreement::on_outcome(group, "read its running statistics", statistics)?;
    let digests = |of: &Vec<TensorData>| of.iter().map(|value| digest(value.as_bytes())).collect::<Vec<i64>>();
    let own: Vec<_> = models.iter().zip(&statistics).map(|(model, own)| (model.held(), digests(own))).collect();
    let all = group.all_gather_object(&own)?;
    let differ = |nth: usize| all.iter().any(|of_rank| of_rank[nth].1 != own[nth].1);
    let differing: Vec<bool> = (0..models.len()).map(differ).collect();
    if all.iter().flatten().all(|((batches, _), _)| batches.count == 0) && !differing.contains(&true) {
        return Ok(None);
    }
    let mut held = HeldGradients { batches: vec![Vec::new(); models.len()], tensors: Vec::new() };
    for (holder, of_rank) in all.into_iter().enumerate() {
        for (nth, (((batches, sums), _), model)) in of_rank.into_iter().zip(models).enumerate() {
            held.batches[nth].push(batches);
            let tensor = |kind| HeldTensor { model: model.clone(), nth, holder, rank: group.rank(), kind };
            held.tensors
                .extend(sums.gradients.into_iter().map(|(slot, leaf)| HeldKind::Sum { slot, leaf }).map(tensor));
            let of_leaves = sums.statistics.into_iter().filter_map(|(number, leaf)| {
                let (dtype, len) = model.like_leaf_statistics(number)?;
                Some(HeldKind::LeafStatistics { nth: number, leaf, dtype, len })
            });
            held.tensors.extend(of_leaves.map(tensor));
            if !differing[nth] {
                continue;
            }
            for (number, (value, path)) in statistics[nth].iter().zip(model.paths_of_statistics()).enumerate() {
                let (dtype, dims) = (value.dtype(), value.shape().to_vec());
                let value = (holder == group.rank()).then(|| value.clone());
                held.tensors.push(tensor(HeldKind::Statistic { number, path, dtype, dims, value }));
            }
        }
    }
    Ok(Some(held))
}

impl HeldTensor {
    fn name(&self) -> String {
        let path = match &self.kind {
            HeldKind::Sum { slot, leaf } => {
                return name_of(self.nth, self.holder, Some(*leaf), &self.model.slots[*slot].path);
            }
            HeldKind::Statistic { path, .. } => path,
            HeldKind::LeafStatistics { nth, leaf, .. } => {
                return name_of(self.nth, self.holder, Some(*leaf), &format!("{STATISTICS}{nth}"));
            }
        };
        name_of(self.nth, self.holder, None, path)
    }

    fn like(&self) -> (BurnDType, Vec<usize>) {
        match &self.kind {
            HeldKind::Sum { slot, .. } => {
                (burn_dtype(sum_dtype(self.model.slots[*slot].dtype)), self.model.slots[*slot].dims.clone())
            }
            HeldKind::LeafStatistics { dtype, len, .. } => (burn_dtype(*dtype), vec![*len]),
            HeldKind::Statistic { dtype, dims, .. } => (*dtype, dims.clone()),
        }
    }

    /// The rank of a world that gets the tensor: the one of its first leaf, if it has one.
    fn receiver(&self, world: usize) -> usize {
        let leaf = match &self.kind {
            HeldKind::Sum { leaf, .. } | HeldKind::LeafStatistics { leaf, .. } => Some(*leaf),
            HeldKind::Statistic { .. } => None,
        };
        match (self.model.leaves(), leaf) {
            (Some(division), Some(leaf)) if division.ranks() == world => {
                (0..world).find(|rank| division.of_rank(*rank).contains(&leaf)).unwrap_or_default()
            }
            _ => self.holder % world,
        }
    }

    fn len_bytes(&self) -> usize {
        let (dtype, dims) = self.like();
        dims.iter().product::<usize>() * dtype.size()
    }

    fn read(&self) -> Result<Vec<u8>, String> {
        match &self.kind {
            HeldKind::LeafStatistics { nth, leaf, .. } => {
                let sum = self.model.leaf_statistics(*nth, *leaf);
                Ok(sum.ok_or("the running statistics of a leaf are not held any more")?.bytes().to_vec())
            }
            HeldKind::Sum { slot, leaf } => {
                let missing = || format!("the gradient of {} is not held any more", self.model.slots[*slot].path);
                Ok(self.model.held_sum(*slot, *leaf)?.ok_or_else(missing)?.bytes().to_vec())
            }
            HeldKind::Statistic { value, .. } => Ok(value.iter().flat_map(|value| value.as_bytes().to_vec()).collect()),
        }
    }

    /// Adds the sum to what this rank holds; or puts the value of a running statistic into `statistics`, of each model,
    /// and returns true.
    fn take(self, bytes: &[u8], statistics: &mut [Vec<TensorData>]) -> bool {
        match self.kind {
            HeldKind::Sum { slot, leaf } => {
                self.model.add_held_sum(slot, leaf, Sum::from_bytes(sum_dtype(self.model.slots[slot].dtype), bytes));
                false
            }
            HeldKind::LeafStatistics { nth, leaf, dtype, .. } => {
                self.model.add_leaf_statistics(nth, leaf, Sum::from_bytes(dtype, bytes));
                false
            }
            HeldKind::Statistic { number, dtype, dims, .. } => {
                statistics[self.nth][number] = TensorData::from_bytes_vec(bytes.to_vec(), dims, dtype);
                true
            }
        }
    }
}

impl Source for HeldTensor {
    fn stored(&self) -> Result<StoredTensor> {
        let (dtype, dims) = self.like();
        Ok(StoredTensor { name: self.name(), dtype, dims, len_bytes: self.len_bytes(), id: None })
    }

    fn is_on_main(&self) -> bool {
        self.holder == 0
    }

    fn own_len_bytes(&self) -> usize {
        if self.rank == self.holder { self.len_bytes() } else { 0 }
    }

    fn whole_len_bytes(&self) -> usize {
        self.len_bytes()
    }

    fn own(&self) -> Result<TensorData> {
        let bytes = match self.rank == self.holder {
            true => self.read().map_err(Error::invalid)?,
            false => Vec::new(),
        };
        let len = bytes.len();
        Ok(TensorData::from_bytes_vec(bytes, [len], BurnDType::U8))
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
            None => write(&self.read()?),
        }
    }
}

/// Name of the file, from that of the model's.
pub(super) fn file_of(model: &str) -> String {
    format!("{}held.bpk", model.trim_end_matches("model.bpk"))
}

/// Path of the running statistics of leaves, in front of the number of their dtype. No parameter has a path like it.
const STATISTICS: &str = "/statistics/";

/// Name of a tensor in the file. Leaf 0, the only one without logical ranks, is left out.
fn name_of(nth: usize, holder: usize, leaf: Option<usize>, path: &str) -> String {
    match leaf.filter(|leaf| *leaf > 0) {
        Some(leaf) => format!("{nth}/{holder}@{leaf}/{path}"),
        None => format!("{nth}/{holder}/{path}"),
    }
}

/// Model, rank, leaf and path in the name of a tensor.
fn parts_of(name: &str) -> Option<(usize, usize, usize, &str)> {
    let (nth, rest) = name.split_once('/')?;
    let (holder, path) = rest.split_once('/')?;
    let (holder, leaf) = holder.split_once('@').unwrap_or((holder, "0"));
    Some((nth.parse().ok()?, holder.parse().ok()?, leaf.parse().ok()?, path))
}

/// Checks that these wrapped models can go on with the micro-batches of a checkpoint.
pub(super) fn check(models: &[Arc<WrappedModel>], batches: &[Vec<HeldBatches>]) -> Result<()> {
    let held = batches.iter().flatten().map(|held| held.count).max().unwrap_or_default();
    if held == 0 && models.len() != batches.len() {
        return Ok(()); // Only running statistics, which a model with other parts does not need.
    }
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
        let of_leaves = held.iter().filter(|held| held.count > 0).map(|held| held.leaves.as_ref().map(|all| all.of));
        let is = model.leaves().map(|division| division.count());
        if let Some(was) = of_leaves.into_iter().find(|was| *was != is) {
            let spoken = |count: Option<usize>| count.map_or("no".to_owned(), |count| count.to_string());
            return Err(Error::invalid(format!(
                "{what}, with {} logical ranks, and the model was wrapped with {}",
                spoken(was),
                spoken(is)
            )));
        }
        let of_sums = held.iter().filter(|held| held.count > 0).map(|held| held.reduction);
        if let Some(other) = of_sums.into_iter().find(|other| *other != model.reduction()) {
            let is = model.reduction();
            return Err(Error::invalid(format!("{what} by `{other:?}`, and the model was wrapped with `{is:?}`")));
        }
    }
    Ok(())
}

/// Gives each rank its micro-batches, sums and running statistics from rank 0's `file`. In a world of another size,
/// rank r gets the micro-batches and sums of all ranks of the checkpoint whose number modulo the size is r, and keeps
/// the statistics that the ranks of the checkpoint agreed on. *Collective*.
///
/// # Errors
///
/// On every rank: [`Error::File`] if rank 0 cannot read; [`Error::Invalid`] if a tensor belongs to no parameter.
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
    let places: Vec<_> = models.iter().map(|model| places_by_path(model)).collect();
    let statistics = models.iter().map(|model| model.read_statistics()).collect::<Result<Vec<_>>>();
    let mut statistics = agreement::on_outcome(group, "read its running statistics", statistics)?;
    let tensors = names.iter().map(|name| find(models, &places, &statistics, name)).collect::<Result<Vec<_>>>();
    let tensors = agreement::on_outcome(group, "load gradients of micro-batches", tensors)?;
    let (rank, world) = (group.rank(), group.world_size());
    for (model, held) in models.iter().zip(batches) {
        match of_rank(held, rank, world, model.leaves()) {
            HeldBatches { count: 0, .. } => model.discard_for_load(),
            held => model.restore_held(held),
        }
    }
    let mut loads_statistics = vec![false; models.len()];
    let is_loaded = |tensor: &HeldTensor| match tensor.kind {
        HeldKind::Sum { .. } | HeldKind::LeafStatistics { .. } => true,
        HeldKind::Statistic { .. } => batches[tensor.nth].len() == world,
    };
    let mut tensors = names.iter().zip(tensors).filter(|(_, tensor)| is_loaded(tensor)).peekable();
    while tensors.peek().is_some() {
        let (mut run, mut len) = (Vec::new(), 0);
        while let Some(next) =
            tensors.next_if(|(_, next)| len == 0 || len + next.len_bytes() <= burnpack_writer::GATHERED_BYTES)
        {
            len += next.1.len_bytes();
            run.push(next);
        }
        let mut read = vec![Vec::new(); run.len()];
        main_first::on_main(group, || {
            let Some(file) = &mut file else { return Ok(()) };
            for ((name, tensor), bytes) in run.iter().zip(&mut read) {
                *bytes = file.tensor(name)?.into_bytes().to_vec();
                let (has, expected) = (bytes.len(), tensor.len_bytes());
                if has != expected {
                    return Err(format!("has {has} bytes for {name}, and {expected} were expected").into());
                }
            }
            Ok(())
        })?;
        for ((_, tensor), mut bytes) in run.into_iter().zip(read) {
            let to = tensor.receiver(world);
            if rank == 0 && to > 0 {
                group.send_bytes(DType::U8, &bytes, to)?;
            } else if rank == to && to > 0 {
                bytes = vec![0; tensor.len_bytes()];
                group.recv_bytes(DType::U8, &mut bytes, 0)?;
            }
            if rank == to {
                let nth = tensor.nth;
                loads_statistics[nth] |= tensor.take(&bytes, &mut statistics);
            }
        }
    }
    for ((model, values), _) in models.iter().zip(statistics).zip(loads_statistics).filter(|(_, loads)| *loads) {
        model.load_statistics(values);
    }
    Ok(())
}

/// Slots of parameters, and numbers of running statistics.
fn places_by_path(model: &WrappedModel) -> [HashMap<String, usize>; 2] {
    let slots = model.slots.iter().map(|slot| slot.path.clone()).collect();
    [slots, model.paths_of_statistics()]
        .map(|paths: Vec<_>| paths.into_iter().enumerate().map(|(n, path)| (path, n)).collect())
}

/// The tensor that is called `name` in a file.
fn find(
    models: &[Arc<WrappedModel>],
    places: &[[HashMap<String, usize>; 2]],
    statistics: &[Vec<TensorData>],
    name: &str,
) -> Result<HeldTensor> {
    let unknown =
        || Error::invalid(format!("{name} is of no parameter or shared running statistic of the wrapped model"));
    let (nth, holder, leaf, path) = parts_of(name).ok_or_else(unknown)?;
    let model = models.get(nth).ok_or_else(unknown)?.clone();
    let [slots, numbers] = &places[nth];
    let of_leaf = path.strip_prefix(STATISTICS).and_then(|nth| nth.parse().ok());
    let kind = match (slots.get(path), of_leaf) {
        (_, Some(nth)) => {
            let (dtype, len) = model.like_leaf_statistics(nth).ok_or_else(unknown)?;
            HeldKind::LeafStatistics { nth, leaf, dtype, len }
        }
        (Some(slot), _) => HeldKind::Sum { slot: *slot, leaf },
        (None, None) => {
            let number = *numbers.get(path).ok_or_else(unknown)?;
            let value = statistics[nth].get(number).ok_or_else(unknown)?;
            let (dtype, dims) = (value.dtype(), value.shape().to_vec());
            HeldKind::Statistic { number, path: path.into(), dtype, dims, value: None }
        }
    };
    Ok(HeldTensor { model, nth, holder, rank: 0, kind })
}

/// The micro-batches of one rank of `world`, from those of the ranks of a checkpoint. `leaves` are those of the model.
fn of_rank(held: &[HeldBatches], rank: usize, world: usize, leaves: Option<LogicalRanks>) -> HeldBatches {
    if held.len() == world {
        return held[rank].clone();
    }
    // All ranks must have the same count, or a step would end on some of them earlier than on the others.
    let count = held.iter().map(|held| held.count).max().unwrap_or_default();
    let reduction = held[0].reduction;
    let Some(division) = leaves else {
        let items = held.iter().skip(rank).step_by(world).map(|held| held.items).sum();
        return HeldBatches { count, items, reduction, leaves: None };
    };
    let (own, all) = (division.of_rank(rank), held.iter().filter_map(|held| held.leaves.as_ref()));
    let done = all.clone().flat_map(|leaves| &leaves.done).copied().filter(|leaf| own.contains(leaf)).collect();
    let weights = all.flat_map(|leaves| &leaves.weights).copied().filter(|(leaf, _)| own.contains(leaf)).collect();
    // Items in another order of additions count only where the engine adds in an order of its own, too.
    let items = if rank == 0 { held.iter().map(|held| held.items).sum() } else { 0.0 };
    HeldBatches { count, items, reduction, leaves: Some(HeldLeaves { of: division.count(), done, weights }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GradientReduction::Mean;

    #[test]
    fn micro_batches_of_any_world_are_those_of_another() {
        let held = |count, items| HeldBatches { count, items, reduction: Mean, leaves: None };
        let saved = [held(2, 1.0), held(2, 2.0), held(1, 4.0)];
        let of_world = |world| (0..world).map(|rank| of_rank(&saved, rank, world, None)).collect::<Vec<_>>();
        assert_eq!(of_world(1), [held(2, 7.0)]);
        assert_eq!(of_world(2), [held(2, 5.0), held(2, 2.0)]);
        assert_eq!(of_world(3), saved);
        assert_eq!(of_world(4), [held(2, 1.0), held(2, 2.0), held(2, 4.0), held(2, 0.0)]);
    }

    #[test]
    fn names_are_read_back() {
        for leaf in [0, 7] {
            assert_eq!(parts_of(&name_of(1, 12, Some(leaf), "a/b.weight")), Some((1, 12, leaf, "a/b.weight")));
        }
        assert_eq!(name_of(1, 12, None, "a"), "1/12/a");
        assert_eq!(parts_of("1/x"), None);
    }
}
