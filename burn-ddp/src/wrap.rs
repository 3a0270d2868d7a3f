//! `wrap` and `unwrap`: from a model to a data-parallel model and back.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::Location;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterizer};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType as BurnDType, Device, Int, Tensor, TensorData};
use burn_ddp_comm::{DType, ProcessGroup};
use serde::{Deserialize, Serialize};

use crate::buffers::{self, BufferPolicy};
use crate::convert::comm_dtype;
use crate::ddp::Ddp;
use crate::gradients::{Caps, Reduction, Settings, Slot};
use crate::intercept::{MAX_RANK, SyncedStatistics, TAP_NAME, Tap, WrappedModel};
use crate::schema::{Entry, Schema, difference, digest, unreadable};
use crate::{Error, Result, intercept, placement};

/// How [`Ddp::wrap_with`] averages. Must be the same on every rank.
///
/// ```
/// use burn_ddp::{Reduction, WrapConfig};
/// let config = WrapConfig::new().with_accumulation(4).with_reduction(Reduction::Mean).with_bucket_cap_bytes(4 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WrapConfig {
    /// 1 unless it says.
    accumulation: Option<usize>,
    reduction: Reduction,
    /// What fits the place where gradients are reduced, unless they say.
    first_bucket_cap_bytes: Option<usize>,
    bucket_cap_bytes: Option<usize>,
    buffers: BufferPolicy,
    replica_check: usize,
    overlap: Option<bool>,
    alone: bool,
}

impl Default for WrapConfig {
    fn default() -> Self {
        WrapConfig {
            accumulation: None,
            reduction: Reduction::Mean,
            first_bucket_cap_bytes: None,
            bucket_cap_bytes: None,
            buffers: BufferPolicy::default(),
            replica_check: 100,
            overlap: None,
            alone: false,
        }
    }
}

impl WrapConfig {
    /// One backward per step, mean, buckets of 1 MiB (25 MiB for NCCL), running statistics averaged, replicas compared every 100 steps.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Every `k`-th backward reduces, and yields the mean over the items of all `k` micro-batches and all ranks; the others
    /// yield no gradients: call the optimizer after the `k`-th only. 1 by default.
    #[must_use]
    pub fn with_accumulation(mut self, k: usize) -> Self {
        self.accumulation = Some(k);
        self
    }

    /// Mean (the default) or sum.
    #[must_use]
    pub fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Size limit of a bucket: by default 1 MiB, and 25 MiB for gradients that NCCL reduces on their device, as in torch (not measured
    /// here). Results do not depend on it, but for NCCL's.
    #[must_use]
    pub fn with_bucket_cap_bytes(mut self, bytes: usize) -> Self {
        self.bucket_cap_bytes = Some(bytes);
        self
    }

    /// Size limit of the first bucket: by default 256 KiB, and 1 MiB for NCCL. Small, so that communication starts early.
    #[must_use]
    pub fn with_first_bucket_cap_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_cap_bytes = Some(bytes);
        self
    }

    /// What happens to running statistics such as BatchNorm's: averaged over the ranks by default.
    #[must_use]
    pub fn with_buffers(mut self, policy: BufferPolicy) -> Self {
        self.buffers = policy;
        self
    }

    /// Every how many steps the ranks compare digests of their parameters, 100 by default, 0 for never. The first two steps
    /// after the first are compared too, since that is where mistakes show.
    ///
    /// A step compares what its forward read. Where values differ, the backward fails on every rank with
    /// [`Error::ReplicasDiffer`], which names the parameter and the rank.
    #[must_use]
    pub fn with_replica_check(mut self, every_steps: usize) -> Self {
        self.replica_check = every_steps;
        self
    }

    /// Whether a thread reduces buckets while backward goes on, or the caller all of them at its end. Without this it is a thread where
    /// communication waits for a network, where a GPU computes, or where each rank of the machine has two cores; else it would only take
    /// turns with backward.
    /// Results do not depend on it.
    #[must_use]
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// Whether gradients are intercepted and reduced in a world of 1 too, where there is nothing to average: to measure what that costs.
    /// By default they are not, unless they are accumulated.
    #[must_use]
    pub fn with_reduction_alone(mut self, alone: bool) -> Self {
        self.alone = alone;
        self
    }

    /// How many, if that was said.
    pub(crate) fn accumulation(&self) -> Option<usize> {
        self.accumulation
    }

    /// How large buckets are.
    fn caps(&self, on_device: bool) -> Caps {
        let (first_bytes, bytes) = if on_device { (1 << 20, 25 << 20) } else { (256 << 10, 1 << 20) };
        Caps {
            first_bytes: self.first_bucket_cap_bytes.unwrap_or(first_bytes),
            bytes: self.bucket_cap_bytes.unwrap_or(bytes),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.accumulation == Some(0) {
            return Err(Error::Use("accumulation counts micro-batches per step: 1 or more".into()));
        }
        if self.bucket_cap_bytes == Some(0) || self.first_bucket_cap_bytes == Some(0) {
            return Err(Error::Use("a bucket cap is a number of bytes: 1 or more".into()));
        }
        Ok(())
    }
}

#[track_caller]
pub(crate) fn wrap<M: Module + 'static>(ddp: &Ddp, model: M, config: &WrapConfig) -> Result<M> {
    let (model, agreed) = share(ddp, model, config)?;
    Ok(match agreed.taps(ddp, &model)? {
        Some(taps) => taps.attach(model),
        None => model,
    })
}

/// `model` with rank 0's values on every rank, and what taps are made of. *Collective*.
#[track_caller]
pub(crate) fn share<M: Module + 'static>(ddp: &Ddp, model: M, config: &WrapConfig) -> Result<(M, Agreed)> {
    let prepared = prepare(&model, config);
    agree_on_outcome(ddp, &prepared)?;
    let Prepared { device, devices, schema, first, is_buffer } = prepared?;
    agree_on_schema(ddp, &schema.entries, config)?;
    let accumulation = config.accumulation.unwrap_or(1);
    // Alone and without accumulation there is nothing to do in backward.
    let reduces = ddp.world_size() > 1 || accumulation > 1 || config.alone;
    let on_device = placement::choose(ddp, &device, reduces)?;
    // Rank 0's values will be everybody's, so it knows which clones are still equal.
    let first = ddp.group().broadcast_object(ddp.is_main().then_some(first), 0)?;
    let (slots, slot_of) = slots_of(&schema, &first, &is_buffer);
    let group = if reduces {
        let mut group = ddp.world().group()?;
        // What errors in backward show as the caller.
        group.attribute_to(Location::caller());
        Some(group)
    } else {
        None
    };
    // Ranks that are threads may have started from one model, whose clones share running statistics.
    let model = if is_buffer.contains(&true) { buffers::unshared(model) } else { model };
    let shared_by = group.as_ref().filter(|_| ddp.world_size() > 1).map(|group| (group, 0));
    let model = share_values(model, shared_by, devices, &schema, first)?;
    if let Some(seed) = ddp.next_seed_of_rank() {
        device.seed(seed);
    }
    Ok((model, Agreed { device, group, on_device, slots, slot_of, is_buffer, config: config.clone() }))
}

/// What the ranks know of the model that they share.
pub(crate) struct Agreed {
    pub(crate) device: Device,
    /// Of the gradients; `None` where nothing is to be reduced.
    group: Option<ProcessGroup>,
    /// They are reduced on their device.
    on_device: bool,
    slots: Vec<Slot>,
    slot_of: VecDeque<Option<usize>>,
    is_buffer: Vec<bool>,
    config: WrapConfig,
}

impl Agreed {
    /// The taps of the shared model, whose running statistics are those of `model`; `None` where nothing is to be reduced. *Collective*.
    pub(crate) fn taps<M: Module + 'static>(self, ddp: &Ddp, model: &M) -> Result<Option<Taps>> {
        let Agreed { device, group, on_device, slots, slot_of, is_buffer, config } = self;
        let Some(group) = group else { return Ok(None) };
        let accumulation = config.accumulation.unwrap_or(1);
        let settings = Settings {
            reduction: config.reduction,
            accumulation,
            caps: config.caps(on_device),
            timeout: ddp.world().options().timeout,
            replica_check: config.replica_check as u64,
            // A backward that waited for a device's reductions at its end would hold up the device.
            overlap: on_device || config.overlap.unwrap_or_else(|| overlap_pays(ddp, &device)),
            on_device,
        };
        let buffers = (config.buffers != BufferPolicy::Local).then(|| buffers::handle(model, &is_buffer)).flatten();
        let statistics = buffers.map(|buffers| SyncedStatistics::new(buffers, config.buffers));
        let tapped =
            Arc::new(WrappedModel::new(ddp.without_presence(), device, group, slots, settings, statistics)?);
        tapped.count_holder(true);
        Ok(Some(Taps { ddp: ddp.clone(), tapped, slot_of }))
    }
}

/// Attaches the taps of one shared model to it. While this lives the reducer stays, also when no tapped copy does.
pub(crate) struct Taps {
    ddp: Ddp,
    pub(crate) tapped: Arc<WrappedModel>,
    slot_of: VecDeque<Option<usize>>,
}

impl Taps {
    /// The same parameters, tapped: with values that they had at first, or that an optimizer has given them since.
    pub(crate) fn attach<M: Module>(&self, model: M) -> M {
        let (ddp, tapped, slot_of) = (self.ddp.clone(), self.tapped.clone(), self.slot_of.clone());
        let model = model.apply_reparameterization(Attach { ddp, tapped, slot_of });
        self.tapped.taps_are_complete();
        model
    }
}

impl Drop for Taps {
    fn drop(&mut self) {
        self.tapped.count_holder(false);
    }
}

/// Whether communication has something to wait for, or a core of its own, or backward needs none.
fn overlap_pays(ddp: &Ddp, device: &Device) -> bool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    ddp.host_engine() == "tcp" || cores >= 2 * ddp.local_world_size() || crate::device::is_asynchronous(device)
}

pub(crate) fn unwrap<M: Module>(model: M) -> Result<M> {
    let mut others = Others(None);
    model.visit(&mut others);
    if let Some(name) = others.0 {
        return Err(Error::Use(format!(
            "the model carries the reparameterization {name:?} beside burn-ddp's: removing one would fold the other into the weights"
        )));
    }
    for tapped in intercept::find(&model) {
        if tapped.holds_gradients() {
            tracing::warn!("unwrap discards gradients of micro-batches that were not reduced");
            tapped.discard();
        }
    }
    // Burn removes a reparameterization by folding it in; ours is the identity.
    Ok(intercept::bypass(|| model.materialize()))
}

/// What one rank knows about its model.
struct Prepared {
    /// Where the float parameters are.
    device: Device,
    /// Where each parameter and buffer is, in traversal order.
    devices: Vec<Device>,
    schema: Schema,
    /// See [`Schema::first_clones`].
    first: Vec<usize>,
    /// See [`buffers::which`].
    is_buffer: Vec<bool>,
}

/// Everything that one rank can check alone.
fn prepare<M: Module>(model: &M, config: &WrapConfig) -> Result<Prepared> {
    config.check()?;
    if !intercept::find(model).is_empty() {
        return Err(Error::Use("the model is wrapped already; `ddp.unwrap(model)` first to wrap it anew".into()));
    }
    let mut floats = Floats::default();
    model.visit(&mut floats);
    if let Some(problem) = floats.problem {
        return Err(Error::Use(problem));
    }
    let Some(device) = floats.device else {
        return Err(Error::Use("the model has no float parameters: there is nothing to train".into()));
    };
    crate::device::check_supported(&device)?;
    // Running statistics lag one update behind what `visit` shows; `valid` brings them up to date.
    drop(model.valid());
    let schema = Schema::of(model)?;
    let first = schema.first_clones(model)?;
    Ok(Prepared { device, devices: floats.devices, schema, first, is_buffer: buffers::which(model) })
}

/// What one rank finds wrong becomes everybody's error, so that nobody waits in vain.
#[track_caller]
fn agree_on_outcome<T>(ddp: &Ddp, prepared: &Result<T>) -> Result<()> {
    let mine = prepared.as_ref().err().map(ToString::to_string);
    let all = ddp.group().all_gather_object(&mine)?;
    match all.iter().enumerate().find_map(|(rank, problem)| problem.as_ref().map(|p| (rank, p))) {
        None => Ok(()),
        Some((rank, problem)) if rank == ddp.rank() || mine.is_some() => {
            Err(Error::Use(mine.clone().unwrap_or_else(|| problem.clone())))
        }
        Some((rank, problem)) => Err(Error::Use(format!("rank {rank} cannot wrap its model: {problem}"))),
    }
}

#[track_caller]
fn agree_on_schema(ddp: &Ddp, entries: &[Entry], config: &WrapConfig) -> Result<()> {
    let all = ddp.group().all_gather_object(&(digest(entries), config.clone()))?;
    if let Some((rank, (_, other))) = all.iter().enumerate().find(|(_, (_, c))| *c != all[0].1) {
        return Err(Error::Use(format!(
            "the ranks wrap with different settings: {:?} on rank 0, {other:?} on rank {rank}",
            all[0].1
        )));
    }
    if all.iter().all(|(d, _)| *d == all[0].0) {
        return Ok(());
    }
    let models = ddp.group().all_gather_object(&entries.to_vec())?;
    Err(Error::ModelsDiffer(difference(&models).unwrap_or_else(|| "their digests differ".into())))
}

/// Where each parameter and buffer of `model` is, in traversal order, with its checkpointing strategy.
pub(crate) fn devices<M: Module>(model: &M) -> Vec<Device> {
    let mut floats = Floats::default();
    intercept::bypass(|| model.visit(&mut floats));
    floats.devices
}

/// The parameters that can have gradients, in traversal order, and which of these slots each float has: buffers and quantized
/// parameters have none. Clones of a parameter (tied weights) have slots of their own, which know the first one's.
fn slots_of(schema: &Schema, first: &[usize], is_buffer: &[bool]) -> (Vec<Slot>, VecDeque<Option<usize>>) {
    let floats = (0..first.len()).filter(|&i| schema.is_float[i]);
    let is_param = |(i, buffer): (usize, &bool)| (!buffer && schema.dtypes[i].is_float()).then_some(i);
    let params: Vec<usize> = floats.clone().zip(is_buffer).filter_map(is_param).collect();
    let slot = |&i: &usize| Slot {
        path: schema.entries[i].path.clone(),
        dims: schema.entries[i].dims.clone(),
        dtype: comm_dtype(schema.dtypes[i]).expect("checked when the model was looked at"),
        trainable: schema.entries[i].trainable,
        first_clone: params.binary_search(&first[i]).expect("clones are parameters too"),
    };
    let slot_of = floats.map(|i| params.binary_search(&i).ok()).collect();
    (params.iter().map(slot).collect(), slot_of)
}

/// Checks float parameters before anything is read.
#[derive(Default)]
struct Floats {
    path: Vec<String>,
    device: Option<Device>,
    /// Of each parameter and buffer of any kind.
    devices: Vec<Device>,
    problem: Option<String>,
    /// Path of the parameter visited last, if it requires a gradient.
    trainable: Option<String>,
}

impl ModuleVisitor for Floats {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization"
            && let Some(base) = self.trainable.take()
        {
            let problem = format!(
                "{base} is trained itself and carries the reparameterization {name:?}: Burn keeps one per parameter, so its \
                 gradients could not be averaged; freeze the base (as `apply_lora` does), or fold it in with `materialize`"
            );
            self.problem = self.problem.take().or(Some(problem));
        }
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let base = param.base();
        let device = base.device();
        self.devices.push(device.clone());
        let problem = if D == 0 || D > MAX_RANK {
            Some(format!("{path} has {D} dimensions; burn-ddp handles 1 to {MAX_RANK}"))
        } else if !base.is_autodiff() {
            Some(format!("{path} is on a device without autodiff: make the model on `device.autodiff()`"))
        } else if self.device.as_ref().is_some_and(|first| *first != device) {
            Some(format!(
                "{path} is on {device:?}, other parameters are on {:?}: a wrapped model lives on one device",
                self.device
            ))
        } else {
            None
        };
        self.problem = self.problem.take().or(problem);
        self.trainable = param.is_require_grad().then_some(path);
        self.device.get_or_insert(device);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.devices.push(param.base().device());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.devices.push(param.base().device());
    }
}

/// Finds reparameterizations that are not ours.
struct Others(Option<String>);

impl ModuleVisitor for Others {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" && name != TAP_NAME {
            self.0 = Some(name.to_string());
        }
    }
}

/// `model` with the root's values, see [`ShareValues`]. *Collective* over the group.
pub(crate) fn share_values<M: Module>(
    model: M,
    root: Option<(&ProcessGroup, usize)>,
    devices: Vec<Device>,
    schema: &Schema,
    first: Vec<usize>,
) -> Result<M> {
    let paths = schema.entries.iter().map(|entry| entry.path.as_str()).collect();
    let mut share =
        ShareValues { root, devices: devices.into(), paths, first, leaves: HashMap::new(), next: 0, error: None };
    let model = model.map(&mut share);
    share.error.map_or(Ok(model), Err)
}

/// Replaces every value by the root's, as a fresh leaf: ranks that are threads must not share nodes. One at a time, in the memory of the old
/// one if nobody else has it, so that a model never needs its size again.
struct ShareValues<'a> {
    /// Whose values they are, in which group; `None` if there is nobody to share with.
    root: Option<(&'a ProcessGroup, usize)>,
    /// With the checkpointing strategy, which a tensor's device carries.
    devices: VecDeque<Device>,
    paths: Vec<&'a str>,
    /// See [`Schema::first_clones`].
    first: Vec<usize>,
    /// Leaves by entry, so that clones of a `Param` go on sharing theirs.
    leaves: HashMap<usize, Box<dyn Any>>,
    next: usize,
    /// The first one; nothing is shared after it.
    error: Option<Error>,
}

impl ShareValues<'_> {
    fn value<const D: usize, K: Basic>(&mut self, old: Tensor<D, K>) -> Tensor<D, K> {
        let device = self.devices.pop_front().expect("map and visit see the same parameters");
        let path = self.paths[self.next];
        self.next += 1;
        if self.error.is_some() {
            return old;
        }
        let dims = old.dims();
        let shared = old.try_into_data().map_err(|e| unreadable(path, &e)).and_then(|data| self.share(data));
        match shared {
            // A quantized value says by itself what it is.
            Ok(data) => match data.dtype() {
                BurnDType::QFloat(_) => Tensor::from_data(data, &device),
                dtype => Tensor::from_data(data, (&device, dtype)),
            },
            Err(e) => {
                self.error = Some(e);
                Tensor::empty(dims, &device)
            }
        }
    }

    /// The root's `data` on every rank.
    fn share(&self, data: TensorData) -> Result<TensorData> {
        let Some((group, root)) = self.root else { return Ok(data) };
        let mut bytes = data.as_bytes().to_vec();
        if group.rank() == root {
            group.broadcast_bytes(DType::U8, &mut bytes, root)?;
            return Ok(data);
        }
        let (shape, dtype) = (data.shape().clone(), data.dtype());
        drop(data);
        group.broadcast_bytes(DType::U8, &mut bytes, root)?;
        Ok(TensorData::from_bytes_vec(bytes, shape, dtype))
    }
}

impl ModuleMapper for ShareValues<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let first = self.first[self.next];
        param.map(|old| {
            let requires_grad = old.is_require_grad();
            let fresh = self.value(old);
            let fresh = if requires_grad { fresh.require_grad() } else { fresh };
            let leaf = self.leaves.entry(first).or_insert_with(|| Box::new(fresh.clone()));
            leaf.downcast_ref::<Tensor<D>>().cloned().unwrap_or(fresh)
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|old| self.value(old))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|old| self.value(old))
    }
}

/// Puts a tap on every float parameter; the order of calls is the order of slots.
struct Attach {
    ddp: Ddp,
    tapped: Arc<WrappedModel>,
    /// Slots of the floats to come.
    slot_of: VecDeque<Option<usize>>,
}

impl Reparameterizer for Attach {
    type Reparam = Tap;

    fn reparameterize<const D: usize>(&mut self, _: &str, param: Param<Tensor<D>>) -> (Param<Tensor<D>>, Option<Tap>) {
        let slot = self.slot_of.pop_front().expect("map and visit see the same parameters");
        let tap = slot.map(|slot| Tap::new(self.ddp.clone(), self.tapped.clone(), slot, &param));
        (param, tap)
    }
}
