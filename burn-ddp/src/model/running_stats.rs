//! Running statistics (BatchNorm's), which the ranks keep equal though they are no parameters.
//!
//! Clones of a model share one value per Burn `RunningState`. So a clone, made when the model is wrapped and stripped
//! of its trainable parameters, is a handle to the statistics of the model that trains: a backward reads and writes
//! them through it, since it has no access to the model.

use std::collections::{HashSet, VecDeque};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use burn_ddp_comm::{DType, ProcessGroup};

use super::digest::digest;
use super::schema::Schema;
use crate::gradients::AlignedBytes;
use crate::tensor_conversion::{comm_dtype, data_of};
use crate::{Error, Result, agreement, intercept};

/// Policy for running statistics (BatchNorm's mean and variance). Each reduction applies it to the statistics that its
/// forward has changed, and [`sync_buffers`](crate::Ddp::sync_buffers) to those that later forwards have changed;
/// `save` and checkpoints write what it would set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferPolicy {
    /// All ranks get the mean over the ranks, weighted by items like the gradients. The default, so that the data of
    /// all ranks count.
    #[default]
    Average,
    /// All ranks get the statistics of rank 0, or of the first rank that has not [joined](crate::Ddp::join), as with
    /// torch's `broadcast_buffers=True`.
    Broadcast,
    /// Each rank keeps its own statistics, as with torch's `broadcast_buffers=False`. `save` and checkpoints write
    /// those of rank 0, and each rank validates with its own.
    Local,
}

/// Reads and writes the running statistics of a wrapped model of any type.
pub(crate) trait Buffers: Send {
    /// Current values, in traversal order.
    fn read(&self) -> Result<Vec<TensorData>>;

    /// Sets their values, in the same order.
    fn write(&mut self, values: Vec<TensorData>);

    /// Current values by id, not read from their device.
    fn values(&self) -> GradientsParams;

    /// Sets values that [`values`](Self::values) returned, except those of the buffers `except`.
    fn set(&mut self, values: &GradientsParams, except: &HashSet<ParamId>);
}

/// For each float parameter and buffer in traversal order, true if it is a buffer: if it refuses to require a gradient.
///
/// Asks a clone of `model` that shares no running statistics with it.
pub(crate) fn which<M: Module>(model: &M) -> Vec<bool> {
    struct RequireGrad;
    impl ModuleMapper for RequireGrad {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            // Quantized values take no gradient, and running statistics are never quantized.
            param.map(|value| if value.dtype().is_float() { value.detach().require_grad() } else { value })
        }
    }
    struct Refusals(Vec<bool>);
    impl ModuleVisitor for Refusals {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.base();
            self.0.push(value.dtype().is_float() && !value.is_require_grad());
        }
    }
    let mut refusals = Refusals(Vec::new());
    intercept::bypass(|| unshared(model.clone()).map(&mut RequireGrad).visit(&mut refusals));
    refusals.0
}

/// The same model with running statistics of its own. Its parameters are new leaves.
pub(crate) fn unshared<M: Module>(model: M) -> M {
    struct NewLeaves;
    impl ModuleMapper for NewLeaves {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| match (value.dtype().is_float(), value.is_require_grad()) {
                // Quantized values have no graph.
                (false, _) => value,
                (true, requires_grad) => value.detach().set_require_grad(requires_grad),
            })
        }
    }
    // `valid().train()` would lose the gradient-checkpointing strategy, also of tensors that are no parameters. `train`
    // cannot take parameters that are no leaves, as `to_device` makes them.
    model.map(&mut NewLeaves).train()
}

/// A handle to the running statistics of `model`; `None` if it has none. `is_buffer` comes from [`which`].
pub(crate) fn handle<M: Module + 'static>(model: &M, is_buffer: &[bool]) -> Option<Box<dyn Buffers>> {
    if !is_buffer.contains(&true) {
        return None;
    }
    let model = model.clone().map(&mut Strip { is_buffer: is_buffer.to_vec().into() });
    Some(Box::new(Handle { model: Some(model), is_buffer: is_buffer.to_vec() }))
}

struct Handle<M> {
    /// `None` only inside of `write` and `set`.
    model: Option<M>,
    is_buffer: Vec<bool>,
}

impl<M: Module> Buffers for Handle<M> {
    fn read(&self) -> Result<Vec<TensorData>> {
        let Some(model) = &self.model else { return Ok(Vec::new()) };
        // Moves what this thread's last forward computed into the value.
        drop(model.valid());
        let mut read = Read { is_buffer: &self.is_buffer, next: 0, values: Ok(Vec::new()) };
        model.visit(&mut read);
        read.values
    }

    fn write(&mut self, values: Vec<TensorData>) {
        let mut write = Write { is_buffer: self.is_buffer.clone().into(), values: values.into() };
        self.model = self.model.take().map(|model| model.map(&mut write));
    }

    fn values(&self) -> GradientsParams {
        struct Values<'a> {
            is_buffer: &'a [bool],
            next: usize,
            values: GradientsParams,
        }
        impl ModuleVisitor for Values<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if self.is_buffer.get(self.next) == Some(&true) {
                    self.values.register(param.id, param.base());
                }
                self.next += 1;
            }
        }
        let mut values = Values { is_buffer: &self.is_buffer, next: 0, values: GradientsParams::new() };
        if let Some(model) = &self.model {
            // Moves what this thread's last forward computed into the value.
            drop(model.valid());
            model.visit(&mut values);
        }
        values.values
    }

    fn set(&mut self, values: &GradientsParams, except: &HashSet<ParamId>) {
        struct Set<'a> {
            values: &'a GradientsParams,
            except: &'a HashSet<ParamId>,
        }
        impl ModuleMapper for Set<'_> {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                match self.values.get::<D>(param.id).filter(|_| !self.except.contains(&param.id)) {
                    Some(value) => param.map(|_| value),
                    None => param,
                }
            }
        }
        // A forward may have left an update behind.
        self.model.iter().for_each(|model| drop(model.valid()));
        self.model = self.model.take().map(|model| model.map(&mut Set { values, except }));
    }
}

/// This rank's own running statistics of a model, while the model has those that the ranks agreed on. They are put back
/// when this value is dropped.
#[must_use]
pub(crate) struct OwnStatistics<M: Module> {
    handle: Handle<M>,
    /// `None` if they stay replaced.
    values: Option<GradientsParams>,
}

impl<M: Module> OwnStatistics<M> {
    /// Leaves the values that the ranks agreed on in the model.
    pub(crate) fn replace(mut self) {
        self.values = None;
    }
}

impl<M: Module> Drop for OwnStatistics<M> {
    fn drop(&mut self) {
        if let Some(values) = self.values.take() {
            intercept::bypass(|| self.handle.set(&values, &HashSet::new()));
        }
    }
}

/// Makes the running statistics of `model` equal on all ranks, except those whose path and id are `is_excluded`: if any
/// differs between ranks, all become rank 0's, or the mean over the ranks. In the mean each rank counts by the `items`
/// of the micro-batches that it holds, as in their reduction; alike if no rank holds any. Returns this rank's own
/// values if they were replaced. *Collective*.
#[track_caller]
pub(crate) fn sync<M: Module>(
    group: &ProcessGroup,
    model: &M,
    policy: BufferPolicy,
    items: f64,
    is_excluded: impl Fn(&str, ParamId) -> bool,
) -> Result<Option<OwnStatistics<M>>> {
    let is_buffer = shared(model, which(model), is_excluded)?;
    if policy == BufferPolicy::Local || group.world_size() == 1 || !is_buffer.contains(&true) {
        return Ok(None);
    }
    // The clone shares the statistics.
    let mut handle = Handle { model: Some(model.clone()), is_buffer };
    let values = agreement::on_outcome(group, "sync its running statistics", intercept::bypass(|| handle.read()))?;
    let digests: Vec<i64> = values.iter().map(|value| digest(value.as_bytes())).collect();
    let own = (digests, items);
    let all = group.all_gather_object(&own)?;
    if all.iter().all(|(of_rank, _)| *of_rank == own.0) {
        return Ok(None);
    }
    let weight = if all.iter().any(|(_, items)| *items > 0.0) { items } else { 1.0 };
    let mut packed = pack(&values);
    for (dtype, buffer) in &mut packed {
        match policy {
            BufferPolicy::Broadcast => group.broadcast_bytes(*dtype, buffer.bytes_mut(), 0)?,
            _ => group.all_reduce_weighted_bytes(*dtype, buffer.bytes_mut(), weight, 0)?,
        }
    }
    let own = intercept::bypass(|| {
        let own = handle.values();
        handle.write(unpack(&values, &packed));
        own
    });
    Ok(Some(OwnStatistics { handle, values: Some(own) }))
}

/// For each float parameter and buffer of `model`, true if it `is_buffer`, and its path and id are not `is_local`.
fn shared<M: Module>(model: &M, is_buffer: Vec<bool>, is_local: impl Fn(&str, ParamId) -> bool) -> Result<Vec<bool>> {
    let schema = intercept::bypass(|| Schema::of(model))?;
    let entries: Vec<(&str, ParamId)> = schema.paths().into_iter().zip(schema.ids.iter().copied()).collect();
    let is_shared = |((path, id), is_buffer): ((&str, ParamId), bool)| is_buffer && !is_local(path, id);
    Ok(schema.floats(&entries).zip(is_buffer).map(is_shared).collect())
}

/// The values back to back, one buffer per dtype in the order of first appearance.
pub(crate) fn pack(values: &[TensorData]) -> Vec<(DType, AlignedBytes)> {
    let mut runs: Vec<(DType, Vec<u8>)> = Vec::new();
    for value in values {
        let Some(dtype) = comm_dtype(value.dtype()) else { continue };
        match runs.iter_mut().find(|(known, _)| *known == dtype) {
            Some((_, bytes)) => bytes.extend_from_slice(value.as_bytes()),
            None => runs.push((dtype, value.as_bytes().to_vec())),
        }
    }
    runs.into_iter().map(|(dtype, bytes)| (dtype, AlignedBytes::of(&bytes))).collect()
}

/// The inverse of [`pack`]; shapes and dtypes come from `like`.
pub(crate) fn unpack(like: &[TensorData], packed: &[(DType, AlignedBytes)]) -> Vec<TensorData> {
    let mut rests: Vec<(DType, &[u8])> = packed.iter().map(|(dtype, buffer)| (*dtype, buffer.bytes())).collect();
    let next = |value: &TensorData| {
        let (_, rest) = rests.iter_mut().find(|(dtype, _)| Some(*dtype) == comm_dtype(value.dtype()))?;
        let (bytes, tail) = rest.split_at_checked(value.as_bytes().len())?;
        *rest = tail;
        Some(TensorData::from_bytes_vec(bytes.to_vec(), value.shape().clone(), value.dtype()))
    };
    like.iter().filter_map(next).collect()
}

/// Frees the memory of parameters.
struct Strip {
    is_buffer: VecDeque<bool>,
}

impl ModuleMapper for Strip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.is_buffer.pop_front() {
            Some(false) => param.map(|value| Tensor::empty([0; D], &value.device())),
            _ => param,
        }
    }
}

struct Read<'a> {
    is_buffer: &'a [bool],
    next: usize,
    values: Result<Vec<TensorData>>,
}

impl ModuleVisitor for Read<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let is_buffer = self.is_buffer.get(self.next).copied().unwrap_or(false);
        self.next += 1;
        if let (true, Ok(values)) = (is_buffer, &mut self.values) {
            match data_of(param.base()) {
                Ok(data) => values.push(data),
                Err(e) => self.values = Err(Error::invalid(format!("reading running statistics failed: {e}"))),
            }
        }
    }
}

struct Write {
    is_buffer: VecDeque<bool>,
    values: VecDeque<TensorData>,
}

impl ModuleMapper for Write {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.is_buffer.pop_front() {
            Some(true) => match self.values.pop_front() {
                Some(data) => param.map(|old| {
                    let dtype = data.dtype();
                    Tensor::from_data(data, (&old.device(), dtype))
                }),
                None => param,
            },
            _ => param,
        }
    }
}
