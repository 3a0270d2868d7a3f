//! A wrapped model on one rank: the state that the taps of all its copies share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::module::ParamId;
use burn::tensor::{DType, Device};
use burn_ddp_comm::ProcessGroup;

use super::backward_failure;
use super::gradient_lookup_warning::Lookups;
use super::model_state::ModelState;
use super::shard::{CHANGES_BITS, ShardGroup};
use super::short_step_warning::ShortSteps;
use crate::ddp::Ddp;
use crate::gradients::{GradientReduction, HeldBatches, Slot, Sum};
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
    /// Parameters and buffers that each rank keeps for itself.
    local: Vec<Entry>,
    /// For each parameter and buffer, by the id that it had at `wrap`, true if each rank keeps it for itself.
    is_local: HashMap<ParamId, bool>,
    /// True once a warning said that files hold rank 0's values of local parameters. Used by rank 0.
    warned_local: AtomicBool,
    /// The group of the sharded parameters, if there are some.
    shards: Option<ShardGroup>,
    /// True for each slot whose parameter the settings divide. In a world of 1 its part is the whole.
    divided: Vec<bool>,
    /// True for each slot whose parameter some optimizer was found to step element by element.
    optimizer_fits: Vec<AtomicBool>,
    /// For each slot, the [`StepOf`] of the optimizer that is making a step.
    steps_of: Vec<AtomicU8>,
    /// Node of each sharded slot's leaf in the last backward; 0 before the first.
    pub(super) trained_leaves: Vec<AtomicU64>,
    /// Number of the last value that a mapper gave the parameter of a slot in any copy.
    value_ids: Vec<AtomicU64>,
    reduction: GradientReduction,
    /// Keeps the model in the rank's report on memory, until its last tap is gone.
    memory: Mutex<Option<Arc<MemoryUse>>>,
    /// Number of reads of each slot whose hook may still run. Raised by forward, lowered when a hook's state is
    /// dropped.
    pub(super) outstanding: Vec<AtomicUsize>,
    /// Number of taps of each slot, over all copies of the model.
    pub(super) taps: Vec<AtomicUsize>,
    /// Number of all taps, plus that of the [`Taps`](crate::wrap) values that may attach more.
    holders: AtomicUsize,
    /// True for each slot whose parameter had clones in the model when it was wrapped.
    pub(super) cloned: Vec<bool>,
    /// True for each slot that `wrap` gave a tap: not for tied clones and bases under another reparameterization
    /// (LoRA).
    pub(super) attached: OnceLock<Vec<bool>>,
    /// Locked by hooks and gates, on the thread that runs backward, and by reads for a moment.
    state: Mutex<Box<dyn ModelState>>,
    /// Reads that are looked up in `Gradients`.
    pub(super) lookups: Lookups,
    /// True if averages may wait on stand-in leaves. Set by the last gate, unset by the first hook; read by visits and
    /// maps.
    pub(super) averages_wait: AtomicBool,
    /// True once a warning said that an average was too old for a step.
    pub(super) warned_outdated: AtomicBool,
    /// True once a warning said that the model was mapped before an average was taken.
    pub(super) warned_unclear: AtomicBool,
    /// Number of backwards that reached this model and ended, with or without an error.
    pub(super) ended: AtomicU64,
    /// Depth of nested `no_sync`.
    pub(super) holding: AtomicUsize,
    /// Steps of fewer micro-batches than others. Written by backward and by taps.
    pub(super) short_steps: ShortSteps,
    /// True if the next backward adds no gradients, and reduces those that are held.
    pub(super) reducing_held: AtomicBool,
    /// True if the next reduction compares the ranks' parameters: then reads of frozen ones are noted, too. Written by
    /// the last gate.
    pub(super) comparing: AtomicBool,
    /// True if a copy of the model went through `valid().train()`, which gives it running statistics of its own.
    pub(super) retrained: AtomicBool,
    /// True if the model has a `SyncBatchNorm`, whose passes all ranks make together.
    synced_norm: AtomicBool,
    /// True if the model, or a copy, was mapped.
    pub(super) mapped: AtomicBool,
    /// True if clones of a parameter are on leaves of their own in every copy.
    pub(super) clones_apart: AtomicBool,
    /// Error after which this rank's parameters differ from the other ranks'; all further backwards return it.
    pub(super) stale: OnceLock<Error>,
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

/// A parameter of a wrapped model. Opaque: made by `wrap`, passed through [`DdpBackend`](super::DdpBackend).
#[derive(Clone, Debug)]
pub struct TapHandle {
    pub(super) model: Arc<WrappedModel>,
    pub(super) slot: usize,
    /// True if the copy of the model may have clones of the parameter on leaves of their own.
    pub(super) apart: bool,
    /// Number of the parameter's value in this copy. Copies whose values may differ have different numbers, which are
    /// the same on every rank.
    pub(super) value_id: u64,
    /// True if the parameter is sharded and a mapper that may mix its elements has come to this copy.
    pub(super) mixed: bool,
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
        reduction: GradientReduction,
        state: Box<dyn ModelState>,
    ) -> Self {
        let mut clones = vec![0; slots.len()];
        slots.iter().for_each(|s| clones[s.first_clone] += 1);
        WrappedModel {
            lookups: Lookups::new(slots.clone()),
            ddp,
            device,
            id,
            local: Vec::new(),
            is_local: HashMap::new(),
            warned_local: AtomicBool::new(false),
            shards: None,
            divided: vec![false; slots.len()],
            optimizer_fits: slots.iter().map(|_| AtomicBool::new(false)).collect(),
            steps_of: slots.iter().map(|_| AtomicU8::new(StepOf::Unknown as u8)).collect(),
            trained_leaves: slots.iter().map(|_| AtomicU64::new(0)).collect(),
            value_ids: slots.iter().map(|_| AtomicU64::new(0)).collect(),
            reduction,
            memory: Mutex::new(None),
            outstanding: slots.iter().map(|_| AtomicUsize::new(0)).collect(),
            taps: slots.iter().map(|_| AtomicUsize::new(0)).collect(),
            holders: AtomicUsize::new(0),
            cloned: slots.iter().map(|s| clones[s.first_clone] > 1).collect(),
            slots,
            attached: OnceLock::new(),
            state: Mutex::new(state),
            averages_wait: AtomicBool::new(false),
            warned_outdated: AtomicBool::new(false),
            warned_unclear: AtomicBool::new(false),
            ended: AtomicU64::new(0),
            holding: AtomicUsize::new(0),
            short_steps: ShortSteps::default(),
            reducing_held: AtomicBool::new(false),
            comparing: AtomicBool::new(false),
            retrained: AtomicBool::new(false),
            synced_norm: AtomicBool::new(false),
            mapped: AtomicBool::new(false),
            clones_apart: AtomicBool::new(false),
            stale: OnceLock::new(),
        }
    }

    /// Counts a tap of a slot, when it appears or goes.
    pub(super) fn count_tap(&self, slot: usize, appears: bool) {
        if appears {
            self.taps[slot].fetch_add(1, Ordering::AcqRel);
        } else {
            self.taps[slot].fetch_sub(1, Ordering::AcqRel);
        }
        self.count_holder(appears);
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
                let lost = state.holds_gradients() && self.ddp.is_main() && !std::thread::panicking();
                if lost && self.ddp.world().check().is_ok() {
                    tracing::warn!(
                        target: "burn_ddp::accumulation",
                        "a wrapped model is dropped with gradients of micro-batches that no optimizer step has used: \
                        before, call `ddp.sync_gradients(&model)` to reduce them for a last step, or \
                        `ddp.discard_accumulated(&model)` to drop them"
                    );
                }
                state.retire();
                self.shards().into_iter().for_each(ShardGroup::retire);
            }
        }
    }

    /// Notes that all taps are attached. From now on a slot that loses its last tap is an error.
    pub(crate) fn taps_are_complete(&self) {
        self.attached.get_or_init(|| self.taps.iter().map(|taps| taps.load(Ordering::Acquire) > 0).collect());
    }

    /// The model with the parameters and buffers that each rank keeps for itself.
    pub(crate) fn with_local(self, local: Vec<Entry>, is_local: HashMap<ParamId, bool>) -> Self {
        WrappedModel { local, is_local, ..self }
    }

    /// The model with the parameters that its settings divide, and the group in which they are gathered: in the memory
    /// of their device if `on_device`. *Collective* with such a group.
    pub(crate) fn with_shards(self, divided: Vec<bool>, group: Option<ProcessGroup>, on_device: bool) -> Result<Self> {
        #[cfg(feature = "nccl")]
        let ordinal = crate::device::cuda_ordinal(&self.device).unwrap_or_default();
        #[cfg(not(feature = "nccl"))]
        let ordinal = 0;
        let where_to = (on_device.then_some(ordinal), self.ddp.world().options().timeout);
        let shards = |group| ShardGroup::new(group, self.slots.clone(), self.ddp.state().meter.clone(), where_to);
        let shards = group.map(shards).transpose()?;
        Ok(WrappedModel { divided, shards, ..self })
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
        self.optimizer_fits[slot].store(true, Ordering::Release);
    }

    /// Notes what maps of the parameter of a slot are from now on.
    pub(super) fn note_step_of(&self, slot: usize, step: StepOf) {
        self.steps_of[slot].store(step as u8, Ordering::Release);
    }

    /// What a map of the parameter of a slot is now.
    pub(super) fn step_of(&self, slot: usize) -> StepOf {
        match self.steps_of[slot].load(Ordering::Acquire) {
            n if n == StepOf::Elements as u8 => StepOf::Elements,
            n if n == StepOf::Nothing as u8 => StepOf::Nothing,
            _ => StepOf::Unknown,
        }
    }

    /// Refuses to train a sharded parameter that no checked optimizer steps, or whose value, now on `leaf`, was changed
    /// by a mapper that may mix elements.
    pub(super) fn refuse_mixed_elements(&self, slot: usize, leaf: NodeId, mixed: bool) -> Result<()> {
        let path = &self.slots[slot].path;
        if !self.optimizer_fits[slot].load(Ordering::Acquire) {
            return Err(self.fault(format!(
                "no optimizer was checked for the sharded parameter {path}: call `let mut optim = \
                ddp.optimizer(optim, &model)?` before the first backward, with each optimizer and the model or the \
                part of it that it steps; freeze parameters that no optimizer steps"
            )));
        }
        let last = self.trained_leaves[slot].swap(leaf.value, Ordering::AcqRel);
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
        let least = self.ended.load(Ordering::Acquire) << CHANGES_BITS;
        let next = |last: u64| Some(last.max(least) + 1);
        let last = self.value_ids[slot].fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        last.unwrap_or_default().max(least) + 1
    }

    /// True if each of several ranks holds a part of the parameter of a slot.
    pub(crate) fn is_sharded(&self, slot: usize) -> bool {
        self.slots[slot].sharded
    }

    /// True if the settings divide the parameter of a slot, also in a world of 1.
    pub(crate) fn is_divided(&self, slot: usize) -> bool {
        self.divided[slot]
    }

    /// True if the settings divide some parameter, also in a world of 1.
    pub(crate) fn has_divided(&self) -> bool {
        self.divided.contains(&true)
    }

    /// True if each rank keeps the parameter or buffer with this path and id for itself. The path may be one in a part
    /// of the wrapped model, or in a module that holds it, so the id decides; the path does if the id is unknown, as
    /// after a record with other ids.
    pub(crate) fn is_local(&self, path: &str, id: ParamId) -> bool {
        let by_path = || self.local.iter().any(|local| local.path == path);
        self.is_local.get(&id).copied().unwrap_or_else(by_path)
    }

    /// Parameters and buffers that each rank keeps for itself.
    pub(crate) fn local(&self) -> &[Entry] {
        &self.local
    }

    /// Warns, on rank 0 and once, that a file of the model lacks the other ranks' local parameters.
    pub(crate) fn warn_of_local(&self) {
        let loses = !self.local.is_empty() && self.ddp.is_main() && self.ddp.world_size() > 1;
        if loses && !self.warned_local.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "burn_ddp::checkpoint",
                "files of the model hold rank 0's values of its local parameters ({}): save those of the other ranks \
                by hand, or after a resume every rank has rank 0's",
                list_paths(&self.local)
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
    pub(super) fn compares(&self) -> bool {
        self.comparing.load(Ordering::Acquire)
    }

    /// True if the parameter of a slot was not frozen at `wrap`.
    pub(super) fn is_trainable(&self, slot: usize) -> bool {
        self.slots[slot].trainable
    }

    /// Policy for running statistics, if the model has some that the ranks make equal.
    pub(crate) fn buffer_policy(&self) -> Option<BufferPolicy> {
        self.lock().buffer_policy()
    }

    /// Notes that the model, or a copy of it, went through `valid().train()`.
    pub(super) fn note_train(&self) {
        self.retrained.store(true, Ordering::Release);
    }

    /// Notes that the model has a `SyncBatchNorm`.
    pub(crate) fn note_synced_norm(&self) {
        self.synced_norm.store(true, Ordering::Release);
    }

    /// True if the model has a `SyncBatchNorm`.
    pub(crate) fn has_synced_norm(&self) -> bool {
        self.synced_norm.load(Ordering::Acquire)
    }

    /// Notes that the model, or a copy, was mapped, as an optimizer does in a step.
    pub(crate) fn note_map(&self) {
        self.short_steps.note_map();
        self.mapped.store(true, Ordering::Release);
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

    /// Runs `backward` with errors returned instead of panics, and says whether the backward reached this model.
    pub(crate) fn capture<T>(&self, backward: impl FnOnce() -> T) -> Result<(T, bool)> {
        let before = self.ended.load(Ordering::Acquire);
        let out = backward_failure::capture(backward)?;
        Ok((out, self.ended.load(Ordering::Acquire) > before))
    }

    /// Runs `f`, whose backwards only sum up gradients.
    pub(crate) fn hold<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Release<'a>(&'a AtomicUsize);
        impl Drop for Release<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
        self.holding.fetch_add(1, Ordering::AcqRel);
        let _release = Release(&self.holding);
        f()
    }

    /// Runs `f`. Its one backward adds nothing to the gradients that are held, and reduces them.
    pub(crate) fn reduce_held<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Restore<'a>(&'a AtomicBool);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Release);
            }
        }
        self.reducing_held.store(true, Ordering::Release);
        let _restore = Restore(&self.reducing_held);
        f()
    }

    /// Drops gradients of micro-batches that were not reduced yet.
    pub(crate) fn discard(&self) {
        self.lock().discard();
    }

    /// True if gradients of micro-batches are waiting for their reduction.
    pub(crate) fn holds_gradients(&self) -> bool {
        self.lock().holds_gradients()
    }

    /// The micro-batches that this rank holds, and the slots for which it holds a sum over them.
    pub(crate) fn held(&self) -> (HeldBatches, Vec<usize>) {
        self.lock().held()
    }

    /// The sum that is held for a slot; for a sharded parameter it is that of the whole. Waits for the device.
    pub(crate) fn held_sum(&self, slot: usize) -> Result<Option<Sum>, String> {
        self.lock().held_sum(slot)
    }

    /// Drops the sums that are held, as all ranks do, and makes `batches` the micro-batches that are held.
    pub(crate) fn restore_held(&self, batches: HeldBatches) {
        self.lock().restore_held(batches);
    }

    /// Adds to the sum that is held for a slot.
    pub(crate) fn add_held_sum(&self, slot: usize, sum: Sum) {
        self.lock().add_held_sum(slot, self.is_sharded(slot), sum);
    }

    /// An error of a backward that names this rank.
    pub(super) fn fault(&self, reason: String) -> Error {
        Error::Backward { rank: self.ddp.world().rank(), reason }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Box<dyn ModelState>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
