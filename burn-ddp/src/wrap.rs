//! `wrap` and `unwrap`: from a model to a data-parallel model and back.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::Location;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterizer};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType as BurnDType, Device, Int, Tensor, TensorData};
use burn_ddp_comm::DType;
use serde::{Deserialize, Serialize};

use crate::buffers::{self, BufferPolicy};
use crate::convert::comm_dtype;
use crate::ddp::Ddp;
use crate::reducer::{Caps, Reducer, Reduction, Settings, Slot};
use crate::schema::{Entry, Snapshot, difference, digest};
use crate::tap::{MAX_RANK, SharedBuffers, TAP_NAME, Tap, Tapped};
use crate::{Error, Result, tap};

/// How [`Ddp::wrap_with`] averages. Must be the same on every rank.
///
/// ```
/// use burn_ddp::{Reduction, WrapConfig};
/// let config = WrapConfig::new().with_accumulation(4).with_reduction(Reduction::Mean).with_bucket_cap_bytes(4 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WrapConfig {
    accumulation: usize,
    reduction: Reduction,
    first_bucket_cap_bytes: usize,
    bucket_cap_bytes: usize,
    buffers: BufferPolicy,
    replica_check: usize,
    overlap: Option<bool>,
    alone: bool,
}

impl Default for WrapConfig {
    fn default() -> Self {
        WrapConfig {
            accumulation: 1,
            reduction: Reduction::Mean,
            first_bucket_cap_bytes: 256 << 10,
            bucket_cap_bytes: 1 << 20,
            buffers: BufferPolicy::default(),
            replica_check: 100,
            overlap: None,
            alone: false,
        }
    }
}

impl WrapConfig {
    /// One backward per step, mean, 1 MiB buckets, running statistics averaged, replicas compared every 100 steps.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Every `k`-th backward reduces, and yields the mean over the items of all `k` micro-batches and all ranks; the others
    /// yield no gradients: call the optimizer after the `k`-th only. 1 by default.
    #[must_use]
    pub fn with_accumulation(mut self, k: usize) -> Self {
        self.accumulation = k;
        self
    }

    /// Mean (the default) or sum.
    #[must_use]
    pub fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Size limit of a bucket, 1 MiB by default. Results do not depend on it.
    #[must_use]
    pub fn with_bucket_cap_bytes(mut self, bytes: usize) -> Self {
        self.bucket_cap_bytes = bytes;
        self
    }

    /// Size limit of the first bucket, 256 KiB by default: small, so that communication starts early.
    #[must_use]
    pub fn with_first_bucket_cap_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_cap_bytes = bytes;
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
    /// communication waits for a network, or where each rank of the machine has two cores; else it would only take turns with backward.
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

    fn check(&self) -> Result<()> {
        if self.accumulation == 0 {
            return Err(Error::Use("accumulation counts micro-batches per step: 1 or more".into()));
        }
        if self.bucket_cap_bytes == 0 || self.first_bucket_cap_bytes == 0 {
            return Err(Error::Use("a bucket cap is a number of bytes: 1 or more".into()));
        }
        Ok(())
    }
}

#[track_caller]
pub(crate) fn wrap<M: Module + 'static>(ddp: &Ddp, model: M, config: &WrapConfig) -> Result<M> {
    let prepared = prepare(&model, config);
    agree_on_outcome(ddp, &prepared)?;
    let Prepared { device, devices, mut snapshot, is_buffer } = prepared?;
    agree_on_schema(ddp, &snapshot.entries, config)?;
    broadcast_values(ddp, &mut snapshot)?;

    let first = snapshot.first_clones();
    let (slots, slot_of) = slots_of(&snapshot, &first, &is_buffer);
    // Ranks that are threads may have started from one model, whose clones share running statistics.
    let model = if is_buffer.contains(&true) { buffers::unshared(model) } else { model };
    let values = snapshot.values.into();
    let model = model.map(&mut SetValues { values, devices: devices.into(), first, leaves: HashMap::new(), next: 0 });
    if let Some(seed) = ddp.next_seed_of_rank() {
        device.seed(seed);
    }
    // Alone and without accumulation there is nothing to do in backward.
    if ddp.world_size() == 1 && config.accumulation == 1 && !config.alone {
        return Ok(model);
    }
    let settings = Settings {
        reduction: config.reduction,
        accumulation: config.accumulation,
        caps: Caps { first_bytes: config.first_bucket_cap_bytes, bytes: config.bucket_cap_bytes },
        timeout: ddp.world().options().timeout,
        site: Location::caller(),
        replica_check: config.replica_check as u64,
        overlap: config.overlap.unwrap_or_else(|| overlap_pays(ddp)),
    };
    let group = ddp.world().group()?;
    let reducer = Reducer::new(group, slots, settings, ddp.stats_cell())?;
    let buffers = (config.buffers != BufferPolicy::Local).then(|| buffers::handle(&model, &is_buffer)).flatten();
    let shared = buffers.map(|buffers| SharedBuffers { buffers, policy: config.buffers, sent: Vec::new() });
    let tapped = Arc::new(Tapped::new(ddp.without_presence(), device, reducer, config.accumulation, shared));
    let model = model.apply_reparameterization(Attach { ddp: ddp.clone(), tapped: tapped.clone(), slot_of });
    tapped.taps_are_complete();
    Ok(model)
}

/// Whether communication has something to wait for, or a core of its own.
fn overlap_pays(ddp: &Ddp) -> bool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    ddp.engine() == "tcp" || cores >= 2 * ddp.local_world_size()
}

pub(crate) fn unwrap<M: Module>(model: M) -> Result<M> {
    let mut others = Others(None);
    model.visit(&mut others);
    if let Some(name) = others.0 {
        return Err(Error::Use(format!(
            "the model carries the reparameterization {name:?} beside burn-ddp's: removing one would fold the other into the weights"
        )));
    }
    for tapped in tap::find(&model) {
        if tapped.holds_gradients() {
            tracing::warn!("unwrap discards gradients of micro-batches that were not reduced");
            tapped.discard();
        }
    }
    // Burn removes a reparameterization by folding it in; ours is the identity.
    Ok(tap::bypass(|| model.materialize()))
}

/// What one rank knows about its model.
struct Prepared {
    /// Where the float parameters are.
    device: Device,
    /// Where each parameter and buffer is, in traversal order.
    devices: Vec<Device>,
    snapshot: Snapshot,
    /// See [`buffers::which`].
    is_buffer: Vec<bool>,
}

/// Everything that one rank can check alone.
fn prepare<M: Module>(model: &M, config: &WrapConfig) -> Result<Prepared> {
    config.check()?;
    if !tap::find(model).is_empty() {
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
    let snapshot = Snapshot::of(model)?;
    Ok(Prepared { device, devices: floats.devices, snapshot, is_buffer: buffers::which(model) })
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

/// Rank 0's values everywhere, in chunks so that a large model needs no second copy on the wire.
#[track_caller]
fn broadcast_values(ddp: &Ddp, snapshot: &mut Snapshot) -> Result<()> {
    const CHUNK_BYTES: usize = 16 << 20;
    if ddp.world_size() == 1 {
        return Ok(());
    }
    let is_root = ddp.is_main();
    let total: usize = snapshot.values.iter().map(|v| v.as_bytes().len()).sum();
    let mut chunk = Vec::with_capacity(CHUNK_BYTES.min(total));
    let mut start = 0;
    while start < snapshot.values.len() {
        // As many whole values as fit, at least one.
        let mut end = start;
        let mut len = 0;
        while end < snapshot.values.len()
            && (end == start || len + snapshot.values[end].as_bytes().len() <= CHUNK_BYTES)
        {
            len += snapshot.values[end].as_bytes().len();
            end += 1;
        }
        chunk.clear();
        if is_root {
            snapshot.values[start..end].iter().for_each(|v| chunk.extend_from_slice(v.as_bytes()));
        } else {
            chunk.resize(len, 0);
        }
        ddp.group().broadcast_bytes(DType::U8, &mut chunk, 0)?;
        if !is_root {
            let mut rest = &chunk[..];
            for value in &mut snapshot.values[start..end] {
                let (bytes, tail) = rest.split_at(value.as_bytes().len());
                *value = TensorData::from_bytes_vec(bytes.to_vec(), value.shape().clone(), value.dtype());
                rest = tail;
            }
        }
        start = end;
    }
    Ok(())
}

/// The parameters that can have gradients, in traversal order, and which of these slots each float has: buffers and quantized
/// parameters have none. Clones of a parameter (tied weights) have slots of their own, which know the first one's.
fn slots_of(snapshot: &Snapshot, first: &[usize], is_buffer: &[bool]) -> (Vec<Slot>, VecDeque<Option<usize>>) {
    let floats = (0..first.len()).filter(|&i| snapshot.is_float[i]);
    let is_param = |(i, buffer): (usize, &bool)| (!buffer && snapshot.values[i].dtype().is_float()).then_some(i);
    let params: Vec<usize> = floats.clone().zip(is_buffer).filter_map(is_param).collect();
    let slot = |&i: &usize| Slot {
        path: snapshot.entries[i].path.clone(),
        dims: snapshot.entries[i].dims.clone(),
        dtype: comm_dtype(snapshot.values[i].dtype()).expect("checked when the values were read"),
        trainable: snapshot.entries[i].trainable,
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

/// Replaces every value by one of `values`, as a fresh leaf: ranks that are threads must not share nodes.
struct SetValues {
    values: VecDeque<TensorData>,
    /// With the checkpointing strategy, which a tensor's device carries.
    devices: VecDeque<Device>,
    /// See [`Snapshot::first_clones`].
    first: Vec<usize>,
    /// Leaves by entry, so that clones of a `Param` go on sharing theirs.
    leaves: HashMap<usize, Box<dyn Any>>,
    next: usize,
}

impl SetValues {
    fn value<const D: usize, K: Basic>(&mut self) -> Tensor<D, K> {
        self.next += 1;
        let data = self.values.pop_front().expect("map and visit see the same parameters");
        let device = self.devices.pop_front().expect("map and visit see the same parameters");
        // A quantized value says by itself what it is.
        match data.dtype() {
            BurnDType::QFloat(_) => Tensor::from_data(data, &device),
            dtype => Tensor::from_data(data, (&device, dtype)),
        }
    }
}

impl ModuleMapper for SetValues {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let first = self.first[self.next];
        param.map(|old| {
            let fresh = self.value();
            let fresh = if old.is_require_grad() { fresh.require_grad() } else { fresh };
            let leaf = self.leaves.entry(first).or_insert_with(|| Box::new(fresh.clone()));
            leaf.downcast_ref::<Tensor<D>>().cloned().unwrap_or(fresh)
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|_| self.value())
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|_| self.value())
    }
}

/// Puts a tap on every float parameter; the order of calls is the order of slots.
struct Attach {
    ddp: Ddp,
    tapped: Arc<Tapped>,
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
