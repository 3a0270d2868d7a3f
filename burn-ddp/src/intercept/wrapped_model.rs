//! A wrapped model on one rank: the state that the taps of all its copies share.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use burn::backend::autodiff::NodeId;
use burn::module::ParamId;
use burn::tensor::{DType, Device, FloatDType, TensorData};
use burn_ddp_comm::{LogicalRanks, ProcessGroup};

use super::model_state::ModelState;
use super::shard::{CHANGES_BITS, ShardGroup};
use crate::ddp::Ddp;
use crate::gradients::{GradientReduction, ReducerSettings, Slot};
use crate::model::running_stats::BufferPolicy;
use crate::model::schema::{Entry, list_paths};
use crate::telemetry::MemoryUse;
use crate::tensor_conversion::burn_dtype;
use crate::{Error, Result};

/// A wrapped model, shared by all its taps and by the autodiff nodes that its reads leave in graphs.
pub(crate) struct WrappedModel {
    pub(crate) ddp: Ddp,
    /// Autodiff device of the model.
    pub(super) device: Device,
    /// Orders the wrapped models of a rank in the same way on all ranks.
    pub(super) id: u64,
    pub(crate) slots: Arc<[Slot]>,
    /// What reads and maps of a slot change without the state's lock.
    pub(super) shared: Vec<SharedSlot>,
    local: Local,
    /// The group of the sharded parameters, if there are some.
    shards: Option<ShardGroup>,
    reduction: GradientReduction,
    /// Division of the leaves of a step, if gradients are added up the tree over them.
    leaves: Option<LogicalRanks>,
    /// True if what breaks the promise of logical ranks is an error.
    pub(super) is_exact: bool,
    /// Keeps the model in the rank's report on memory, until its last tap is gone.
    memory: Mutex<Option<Arc<MemoryUse>>>,
    /// Number of all taps, plus that of the [`Taps`](crate::wrap) values that may attach more.
    holders: AtomicUsize,
    /// Locked by hooks, on the thread that runs backward, by the call that runs it, and by reads for a moment.
    state: Mutex<Box<dyn ModelState>>,
    /// Number of calls that named this model and ended, with or without an error.
    pub(super) ended: AtomicU64,
    /// True if the next reduction compares the ranks' parameters: then reads of frozen ones are noted, too. Written at
    /// the end of a reduction.
    pub(super) comparing: AtomicBool,
    /// True if a copy of the model went through `valid().train()`, which gives it running statistics of its own.
    pub(super) retrained: AtomicBool,
    /// Running statistics of each `SyncBatchNorm`, whose passes all ranks make together.
    synced_norms: RwLock<HashSet<ParamId>>,
}

/// Part of a slot's state.
#[derive(Debug)]
pub(super) struct SharedSlot {
    /// True if the settings divide the parameter. In a world of 1 its part is the whole.
    divided: bool,
    /// Type to which reads cast the parameter.
    compute: Option<FloatDType>,
    /// True if some optimizer was found to step the parameter element by element.
    optimizer_fits: AtomicBool,
    /// The [`StepOf`] of the optimizer that is making a step.
    step_of: AtomicU8,
    /// Node of a sharded parameter's leaf in the last backward; 0 before the first.
    trained_leaf: AtomicU64,
    /// Number of the last value that a mapper gave the parameter in any copy.
    value_id: AtomicU64,
    /// Number of reads whose hook may still run. Raised by forward, lowered when a hook's state is dropped.
    pub(super) outstanding: AtomicI64,
}

impl SharedSlot {
    fn new(divided: bool, compute: Option<FloatDType>) -> Self {
        SharedSlot {
            divided,
            compute,
            optimizer_fits: AtomicBool::new(false),
            step_of: AtomicU8::new(StepOf::Unknown as u8),
            trained_leaf: AtomicU64::new(0),
            value_id: AtomicU64::new(0),
            outstanding: AtomicI64::new(0),
        }
    }
}

/// Parameters and buffers that each rank keeps for itself.
#[derive(Default)]
struct Local {
    entries: Vec<Entry>,
    /// The paths of the entries.
    paths: HashSet<String>,
    /// For each parameter and buffer, by the id that it had at `wrap`, true if each rank keeps it for itself.
    by_id: HashMap<ParamId, bool>,
    /// True once a warning said that files hold rank 0's values. Used by rank 0.
    warned: AtomicBool,
}

/// What a map of a sharded parameter is, as far as the optimizer that maps it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepOf {
    /// The program has not said.
    Unknown,
    /// A checked optimizer steps each element by itself.
    Elements,
    /// An optimizer of Burn that has no gradient for the parameter, so it changes nothing.
    Nothing,
}

impl std::fmt::Debug for WrappedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, world_size) = (self.ddp.rank(), self.ddp.world_size());
        write!(f, "WrappedModel({} parameters on rank {rank} of {world_size})", self.slots.len())
    }
}

impl WrappedModel {
    pub(super) fn new(
        ddp: Ddp,
        device: Device,
        id: u64,
        slots: Arc<[Slot]>,
        settings: &ReducerSettings,
        state: Box<dyn ModelState>,
    ) -> Self {
        WrappedModel {
            ddp,
            device,
            id,
            shared: slots.iter().map(|_| SharedSlot::new(false, None)).collect(),
            slots,
            local: Local::default(),
            shards: None,
            reduction: settings.reduction,
            leaves: settings.tree().map(|run| run.division),
            is_exact: settings.exact,
            memory: Mutex::new(None),
            holders: AtomicUsize::new(0),
            state: Mutex::new(state),
            ended: AtomicU64::new(0),
            comparing: AtomicBool::new(false),
            retrained: AtomicBool::new(false),
            synced_norms: RwLock::default(),
        }
    }

    /// Number of the model, the same on all ranks.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Counts a tap, or an owner that attaches taps, when it appears or goes.
    pub(crate) fn count_holder(&self, appears: bool) {
        if appears {
            self.holders.fetch_add(1, Ordering::AcqRel);
        } else if self.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = None;
            // The last copy of the model is gone. Nodes that it left in graphs may keep this value for long, but they
            // need no communication thread and no group of the parts. If the state is locked, a backward runs, which
            // still needs them.
            if let Ok(mut state) = self.state.try_lock() {
                let lost = state.holds_gradients() && !std::thread::panicking() && self.ddp.world().check().is_ok();
                if lost {
                    self.warn_of_lost_gradients("the model was dropped");
                }
                state.retire();
                self.shards().into_iter().for_each(ShardGroup::retire);
            }
        }
    }

    /// Warns, on rank 0, that gradients of micro-batches are lost by what the program did.
    fn warn_of_lost_gradients(&self, how: &str) {
        if self.ddp.is_main() {
            tracing::warn!(
                target: "burn_ddp::accumulation",
                "{how} with gradients of micro-batches that no optimizer step has used: before, call \
                `ddp.flush(&model)?` on every rank to reduce them for a last step"
            );
        }
    }

    /// The model with the parameters and buffers that each rank keeps for itself.
    pub(crate) fn with_local(self, entries: Vec<Entry>, by_id: HashMap<ParamId, bool>) -> Self {
        let paths = entries.iter().map(|entry| entry.path.clone()).collect();
        WrappedModel { local: Local { entries, paths, by_id, warned: AtomicBool::new(false) }, ..self }
    }

    /// The model with the parameters that its settings divide, the types in which they are read, and the group in which
    /// they are gathered: in the memory of their device if `on_device`. *Collective* with such a group.
    pub(crate) fn with_shards(
        self,
        divided: Vec<bool>,
        compute: Vec<Option<FloatDType>>,
        group: Option<ProcessGroup>,
        on_device: bool,
    ) -> Result<Self> {
        #[cfg(feature = "nccl")]
        let ordinal = crate::device::cuda_ordinal(&self.device).unwrap_or_default();
        #[cfg(not(feature = "nccl"))]
        let ordinal = 0;
        let where_to = (on_device.then_some(ordinal), self.ddp.world().options().timeout);
        let shards = |group| ShardGroup::new(group, self.slots.clone(), self.ddp.state().meter.clone(), where_to);
        let shards = group.map(shards).transpose()?;
        let shared =
            divided.into_iter().zip(compute).map(|(divided, compute)| SharedSlot::new(divided, compute)).collect();
        Ok(WrappedModel { shared, shards, ..self })
    }

    /// The model in the rank's report on memory.
    pub(crate) fn with_memory(self, memory: Arc<MemoryUse>) -> Self {
        WrappedModel { memory: Mutex::new(Some(memory)), ..self }
    }

    /// The group of the sharded parameters, if there are some.
    pub(crate) fn shards(&self) -> Option<&ShardGroup> {
        self.shards.as_ref()
    }

    /// Notes that an optimizer steps the parameter of a slot element by element.
    pub(crate) fn note_optimizer(&self, slot: usize) {
        self.shared[slot].optimizer_fits.store(true, Ordering::Release);
    }

    /// Notes what maps of the parameter of a slot are from now on.
    pub(super) fn note_step_of(&self, slot: usize, step: StepOf) {
        self.shared[slot].step_of.store(step as u8, Ordering::Release);
    }

    /// What a map of the parameter of a slot is now.
    pub(super) fn step_of(&self, slot: usize) -> StepOf {
        match self.shared[slot].step_of.load(Ordering::Acquire) {
            n if n == StepOf::Elements as u8 => StepOf::Elements,
            n if n == StepOf::Nothing as u8 => StepOf::Nothing,
            _ => StepOf::Unknown,
        }
    }

    /// Refuses to train a sharded parameter that no checked optimizer steps, or whose value, now on `leaf`, was changed
    /// by a mapper that may mix elements.
    pub(super) fn refuse_mixed_elements(&self, slot: usize, leaf: NodeId, mixed: bool) -> Result<()> {
        let (path, shared) = (&self.slots[slot].path, &self.shared[slot]);
        if !shared.optimizer_fits.load(Ordering::Acquire) {
            return Err(self.fault(format!(
                "no optimizer was checked for the sharded parameter {path}: call `let mut optim = \
                ddp.optimizer(optim, &model)?` before the first backward, with each optimizer and the model or the \
                part of it that it steps; freeze parameters that no optimizer steps"
            )));
        }
        let last = shared.trained_leaf.swap(leaf.value, Ordering::AcqRel);
        if mixed && last != 0 && last != leaf.value {
            return Err(self.fault(format!(
                "the sharded parameter {path} was changed since its last backward by something that \
                `ddp.optimizer` did not check: an optimizer, or a mapper of the program. Each rank has only some rows, \
                so every element must be stepped by itself. Step with the optimizers that `ddp.optimizer(optim, \
                &model)` returns, and put a mapper that treats each element by itself into `ddp.element_wise(|| ..)`"
            )));
        }
        Ok(())
    }

    /// Number of a value that a mapper has just given the parameter of a slot. After each backward the numbers go on
    /// from the number of that backward, so that ranks agree again after one of them alone changed a copy.
    pub(super) fn next_value_id(&self, slot: usize) -> u64 {
        let (least, value_id) = (self.ended.load(Ordering::Acquire) << CHANGES_BITS, &self.shared[slot].value_id);
        let next = |last: u64| Some(last.max(least) + 1);
        let last = value_id.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        last.unwrap_or_default().max(least) + 1
    }

    /// True if each of several ranks holds a part of the parameter of a slot.
    pub(crate) fn is_sharded(&self, slot: usize) -> bool {
        self.slots[slot].sharded
    }

    /// True if the settings divide the parameter of a slot, also in a world of 1.
    pub(crate) fn is_divided(&self, slot: usize) -> bool {
        self.shared[slot].divided
    }

    /// True if the settings divide some parameter, also in a world of 1.
    pub(crate) fn has_divided(&self) -> bool {
        self.shared.iter().any(|slot| slot.divided)
    }

    /// True if each rank keeps the parameter or buffer with this path and id for itself. The path may be one in a part
    /// of the wrapped model, or in a module that holds it, so the id decides; the path does if the id is unknown, as
    /// after a record with other ids.
    pub(crate) fn is_local(&self, path: &str, id: ParamId) -> bool {
        self.local.by_id.get(&id).copied().unwrap_or_else(|| self.local.paths.contains(path))
    }

    /// True if a parameter or buffer of the model had this id at `wrap`.
    pub(crate) fn has_id(&self, id: ParamId) -> bool {
        self.local.by_id.contains_key(&id)
    }

    /// Parameters and buffers that each rank keeps for itself.
    pub(crate) fn local(&self) -> &[Entry] {
        &self.local.entries
    }

    /// Warns, on rank 0 and once, that a file of the model lacks the other ranks' local parameters.
    pub(crate) fn warn_of_local(&self) {
        let loses = !self.local().is_empty() && self.ddp.is_main() && self.ddp.world_size() > 1;
        if loses && !self.local.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "burn_ddp::checkpoint",
                "files of the model hold rank 0's values of its local parameters ({}): save those of the other ranks \
                by hand, or after a resume every rank has rank 0's",
                list_paths(self.local())
            );
        }
    }

    pub(crate) fn reduction(&self) -> GradientReduction {
        self.reduction
    }

    /// True if a rank's gradients are weighted by its number of items.
    pub(crate) fn weighs_items(&self) -> bool {
        self.reduction == GradientReduction::Mean
    }

    /// True if the next reduction compares the ranks' parameters.
    pub(crate) fn compares(&self) -> bool {
        self.comparing.load(Ordering::Acquire)
    }

    /// Type to which reads cast the parameter of a slot, if they do.
    pub(super) fn compute_dtype(&self, slot: usize) -> Option<FloatDType> {
        self.shared[slot].compute
    }

    /// True if reads of some parameters cast them.
    #[cfg(feature = "train")]
    pub(crate) fn computes_in_half(&self) -> bool {
        self.shared.iter().any(|slot| slot.compute.is_some())
    }

    /// True if the parameter of a slot was not frozen at `wrap`.
    pub(super) fn is_trainable(&self, slot: usize) -> bool {
        self.slots[slot].trainable
    }

    /// Policy for running statistics, if the model has some that the ranks make equal.
    pub(crate) fn buffer_policy(&self) -> Option<BufferPolicy> {
        let mut state = self.lock();
        state.statistics().filter(|statistics| statistics.is_synced()).map(|statistics| statistics.policy())
    }

    /// Notes that the model, or a copy of it, went through `valid().train()`.
    pub(super) fn note_train(&self) {
        self.retrained.store(true, Ordering::Release);
    }

    /// Keeps the running statistics as those to go on from after a batch that does not count and, if a step has ended,
    /// after a step that fails.
    pub(crate) fn keep_statistics(&self, step_ended: bool) {
        if let Some(statistics) = self.lock().statistics() {
            statistics.keep(step_ended);
        }
    }

    /// Puts running statistics back to what they were before the batch of the call, which has weight 0. Those of a
    /// `SyncBatchNorm` do not contain it, unless this rank is alone.
    pub(super) fn forget_batch(&self) {
        let of_all_ranks = match self.ddp.world_size() {
            1 => HashSet::new(),
            _ => self.synced_norms.read().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        if let Some(statistics) = self.lock().statistics() {
            statistics.forget_batch(&of_all_ranks);
        }
    }

    /// This rank's running statistics, read from their device, in traversal order; none if the model that is trained
    /// has others.
    pub(crate) fn read_statistics(&self) -> Result<Vec<TensorData>> {
        if self.retrained.load(Ordering::Acquire) {
            return Ok(Vec::new());
        }
        self.lock().statistics().map_or(Ok(Vec::new()), |statistics| statistics.read())
    }

    /// Paths of the running statistics, in traversal order.
    pub(crate) fn paths_of_statistics(&self) -> Vec<String> {
        self.lock().statistics().map_or(Vec::new(), |statistics| statistics.paths().to_vec())
    }

    /// Sets this rank's running statistics.
    pub(crate) fn load_statistics(&self, values: Vec<TensorData>) {
        if let Some(statistics) = self.lock().statistics() {
            statistics.load(values);
        }
    }

    /// Division of the leaves of a step, if the job has logical ranks.
    pub(crate) fn leaves(&self) -> Option<LogicalRanks> {
        self.leaves
    }

    /// Notes the running statistics of a `SyncBatchNorm` of the model.
    pub(crate) fn note_synced_norm(&self, statistics: &[ParamId]) {
        let known = self.synced_norms.read().unwrap_or_else(PoisonError::into_inner);
        if statistics.iter().any(|id| !known.contains(id)) {
            drop(known);
            self.synced_norms.write().unwrap_or_else(PoisonError::into_inner).extend(statistics);
        }
    }

    /// True if the model has a `SyncBatchNorm`.
    pub(crate) fn has_synced_norm(&self) -> bool {
        !self.synced_norms.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Shape and dtype of a slot.
    pub(super) fn shape(&self, slot: usize) -> (Vec<usize>, DType) {
        let s = &self.slots[slot];
        (s.dims.clone(), burn_dtype(s.dtype))
    }

    /// Number of reductions so far.
    pub(crate) fn steps(&self) -> u64 {
        self.lock().steps()
    }

    /// Number of steps so far that all ranks have skipped.
    pub(crate) fn skipped(&self) -> u64 {
        self.lock().skipped()
    }

    /// Drops gradients of micro-batches that were not reduced yet.
    pub(crate) fn discard(&self) {
        self.lock().discard();
    }

    /// Drops gradients of micro-batches, since a checkpoint without some is loaded.
    pub(crate) fn discard_for_load(&self) {
        let mut state = self.lock();
        if state.holds_gradients() {
            self.warn_of_lost_gradients("a checkpoint was loaded into a model");
        }
        state.discard();
    }

    /// True if gradients of micro-batches are waiting for their reduction.
    pub(crate) fn holds_gradients(&self) -> bool {
        self.lock().holds_gradients()
    }

    /// Drops the averages that the last backward has left.
    pub(crate) fn forget_averages(&self) {
        self.lock().forget_averages();
    }

    /// True if the last backward has left an average for a slot.
    pub(super) fn has_average(&self, slot: usize) -> bool {
        self.lock().has_average(slot)
    }

    /// An error of a backward that names this rank.
    pub(crate) fn fault(&self, reason: String) -> Error {
        Error::Backward { rank: self.ddp.world().rank(), reason }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Box<dyn ModelState>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
