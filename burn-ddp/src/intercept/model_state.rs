//! State of a wrapped model in tensors of its backend. [`ModelState`] erases the backend; only [`ModelState::of`]
//! restores it.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::backend::tensor::FloatTensor;
use burn_ddp_comm::{ProcessGroup, Track};

use super::hook_depth::Ladder;
use super::identical_data_check::SameGradients;
use super::overflow_verdict::Verdict;
use super::shadow_collectives;
use super::shard::ShardedGradients;
use super::synced_statistics::SyncedStatistics;
use super::wrapped_model::WrappedModel;
use crate::Result;
use crate::batch_weight::Batch;
use crate::gradients::{
    Culprit, FirstNotFinite, GradientMemory, HeldBatches, HeldSums, OwnRun, Reducer, ReducerSettings, Slot, Sum,
    is_finite, open_store,
};
use crate::loss_scaling::{LossScale, LossScaler};
use crate::model::parameter_movement::Movements;
use crate::stop::StopWish;
use crate::telemetry::step_meter::Meter;

/// State of a wrapped model for callers that do not know its backend.
pub(super) trait ModelState: Any + Send {
    /// Number of reductions so far.
    fn steps(&self) -> u64;

    /// Number of reductions so far without averages, since they were not finite.
    fn skipped(&self) -> u64;

    /// Opens the state for a call. Returns false if one is open.
    fn open(&mut self) -> bool;

    /// Begins to count reads anew.
    fn restart_reads(&mut self);

    /// True if the backward of the open call has reached the model.
    fn is_reached(&self) -> bool;

    /// See [`State::begin_step`].
    fn begin(&mut self, model: &WrappedModel, batch: Option<(&Batch, bool)>, loss_scale: Option<f64>) -> Result<bool>;

    /// See [`State::submit_rest`].
    fn submit(&mut self, model: &WrappedModel) -> Result<()>;

    /// See [`State::finish_step`].
    fn finish(&mut self, model: &WrappedModel) -> Result<bool>;

    /// The scale for the next loss, if the model has one.
    fn loss_scale(&mut self) -> Option<&mut LossScale>;

    /// The first gradient that is not finite, as far as it is known, if the step that has ended has scaled losses and
    /// an average that is not finite.
    fn overflow(&self) -> Option<Culprit>;

    /// See [`State::end_scaled_step`].
    fn end_scaled_step(&mut self, model: &WrappedModel, verdict: &Verdict) -> Result<()>;

    /// See [`State::abandon_step`].
    fn abandon(&mut self, alike: bool);

    /// True if the last backward has left an average for a slot.
    fn has_average(&self, slot: usize) -> bool;

    /// Drops the averages that the last backward has left.
    fn forget_averages(&mut self);

    /// True if gradients of micro-batches are waiting for their reduction.
    fn holds_gradients(&self) -> bool;

    /// Drops gradients of micro-batches that were not reduced yet.
    fn discard(&mut self);

    /// The micro-batches that are waiting, and the sums over them.
    fn held(&self) -> (HeldBatches, HeldSums);

    /// The sum over the waiting micro-batches for a slot from a leaf on.
    fn held_sum(&self, slot: usize, leaf: usize) -> Result<Option<Sum>, String>;

    /// Drops the sums that are held, and makes `batches` the micro-batches that are waiting.
    fn restore_held(&mut self, batches: HeldBatches);

    /// Adds to the sum of a slot, whose parameter is `sharded` or not, from a leaf on.
    fn add_held_sum(&mut self, slot: usize, leaf: usize, sharded: bool, sum: Sum);

    /// Ends the communication thread.
    fn retire(&mut self);

    /// See [`WrappedModel::shadow`].
    fn shadow(&mut self, model: &WrappedModel) -> Result<bool>;

    /// Movements of the parameters, unless they are compared bit by bit.
    fn movements(&mut self) -> Option<&mut Movements>;

    /// The running statistics, if the model has some.
    fn statistics(&mut self) -> Option<&mut SyncedStatistics>;
}

impl dyn ModelState {
    /// The state, if it is of this backend. It is not if the model was moved to another one after `wrap`.
    pub(super) fn of<B: GradientMemory>(&mut self) -> Option<&mut State<B>> {
        let state: &mut dyn Any = self;
        state.downcast_mut()
    }
}

/// State of a wrapped model on backend `B`.
pub(super) struct State<B: GradientMemory> {
    pub(super) reducer: Reducer<FloatTensor<B>>,
    /// Micro-batches per reduction.
    pub(super) accumulation: usize,
    /// This rank's leaves, if the job has logical ranks.
    pub(super) run: Option<OwnRun>,
    pub(super) device: B::Device,
    pub(super) ladder: Ladder<B>,
    /// True if a call has begun and not ended.
    pub(super) open: bool,
    /// True if the backward of the open call has reached the model.
    pub(super) reached: bool,
    pub(super) slots: Vec<SlotState<B>>,
    pub(super) sharded: ShardedGradients<B>,
    /// Averages that the last backward has left, by slot.
    pub(super) averages: Vec<Option<FloatTensor<B>>>,
    /// Values that the replica check compares, kept until the backward ends. For a parameter that gets a gradient it is
    /// the value that the gradient belongs to, since a lagging copy of the model may be read, too; for others it is a
    /// value that was noted.
    pub(super) compared: Vec<Option<FloatTensor<B>>>,
    /// Movements of the parameters; `None` if they are compared bit by bit, or in a world of 1.
    pub(super) movements: Option<Movements>,
    /// True if the user was warned of ranks that differ by rounding.
    pub(super) warned_rounding: bool,
    pub(super) same_gradients: SameGradients,
    pub(super) statistics: Option<SyncedStatistics>,
    pub(super) scaler: Option<LossScaler>,
    /// Scale of the loss of the running call, if it is scaled.
    pub(super) loss_scale: Option<f64>,
    /// Set by a step with scaled losses that has an average that is not finite: the first such gradient.
    pub(super) overflow: Option<Culprit>,
    /// True if an average that is not finite is an error.
    pub(super) finite: bool,
    /// True if the user was told of one.
    pub(super) told_not_finite: bool,
    /// Steps that were skipped.
    pub(super) skipped: u64,
    /// Number of the batch of the last backward; 0 if there is none.
    pub(super) last_batch: u64,
    /// Number of the batch of a backward that was given up since.
    pub(super) given_up: Option<u64>,
    /// Track and epoch of the last batch, if it came from a loader.
    pub(super) epoch: Option<(Track, u32)>,
}

/// State of a slot in the running backward.
pub(super) struct SlotState<B: GradientMemory> {
    /// Leaf of the parameter, of clones that of the first.
    pub(super) leaf: Option<NodeId>,
    /// Sum of the gradients of earlier reads.
    pub(super) partial: Option<FloatTensor<B>>,
    /// True if the final gradient is with the reducer.
    pub(super) done: bool,
    /// The value read last in the type in which the model computes, and the node of the parameter that it is of.
    pub(super) narrow: Option<(NodeId, FloatTensor<B>)>,
}

impl<B: GradientMemory> Default for SlotState<B> {
    fn default() -> Self {
        SlotState { leaf: None, partial: None, done: false, narrow: None }
    }
}

impl<B: GradientMemory> State<B> {
    fn new(parts: Parts, device: B::Device) -> Result<Self> {
        let Parts { group, slots, settings, meter, stop, statistics } = parts;
        let sent: Arc<[Slot]> = slots.iter().map(|slot| settings.sent(slot)).collect();
        let store = open_store::<B>(slots.clone(), sent.clone(), device.clone(), settings);
        let judges = !settings.exact_replicas && group.world_size() > 1;
        Ok(State {
            reducer: Reducer::new(group, (slots.clone(), sent), store, settings, (meter, stop))?,
            accumulation: settings.accumulation,
            run: settings.run,
            device,
            ladder: Ladder::new(),
            open: false,
            reached: false,
            slots: slots.iter().map(|_| SlotState::default()).collect(),
            sharded: ShardedGradients::new(slots.len(), settings),
            scaler: settings.scaling.map(LossScaler::new),
            loss_scale: None,
            overflow: None,
            finite: settings.finite,
            told_not_finite: false,
            averages: slots.iter().map(|_| None).collect(),
            compared: slots.iter().map(|_| None).collect(),
            movements: judges.then(|| Movements::new(slots.len())),
            warned_rounding: false,
            same_gradients: SameGradients::new(&slots),
            statistics,
            skipped: 0,
            last_batch: 0,
            given_up: None,
            epoch: None,
        })
    }

    /// Forgets the micro-batches that are held, except for those in the reducer.
    pub(super) fn forget_batches(&mut self) {
        self.last_batch = 0;
        self.epoch = None;
        self.sharded.clear();
        self.statistics.iter_mut().for_each(SyncedStatistics::forget_leaves);
    }

    /// Forgets the running backward.
    pub(super) fn reset(&mut self) {
        self.open = false;
        self.reached = false;
        self.ladder.restart();
        self.slots.iter_mut().for_each(|slot| *slot = SlotState::default());
    }
}

impl<B: GradientMemory> ModelState for State<B> {
    fn steps(&self) -> u64 {
        self.reducer.step()
    }

    fn skipped(&self) -> u64 {
        self.skipped
    }

    fn open(&mut self) -> bool {
        !std::mem::replace(&mut self.open, true)
    }

    fn restart_reads(&mut self) {
        self.ladder.restart();
    }

    fn is_reached(&self) -> bool {
        self.reached
    }

    fn begin(&mut self, model: &WrappedModel, batch: Option<(&Batch, bool)>, loss_scale: Option<f64>) -> Result<bool> {
        self.begin_step(model, batch, loss_scale)
    }

    fn submit(&mut self, model: &WrappedModel) -> Result<()> {
        self.submit_rest(model)
    }

    fn finish(&mut self, model: &WrappedModel) -> Result<bool> {
        self.finish_step(model)
    }

    fn loss_scale(&mut self) -> Option<&mut LossScale> {
        self.scaler.as_mut().map(|scaler| &mut scaler.state)
    }

    fn overflow(&self) -> Option<Culprit> {
        self.overflow
    }

    fn end_scaled_step(&mut self, model: &WrappedModel, verdict: &Verdict) -> Result<()> {
        self.end_scaled_step(model, verdict)
    }

    fn abandon(&mut self, alike: bool) {
        self.abandon_step(alike);
    }

    fn has_average(&self, slot: usize) -> bool {
        self.averages[slot].is_some()
    }

    fn forget_averages(&mut self) {
        self.averages.iter_mut().for_each(|average| *average = None);
    }

    fn holds_gradients(&self) -> bool {
        self.reducer.holds_gradients()
    }

    fn discard(&mut self) {
        self.forget_batches();
        self.reducer.discard_held();
    }

    fn held(&self) -> (HeldBatches, HeldSums) {
        let of_slot = |slot: usize| {
            let leaves = self.reducer.held_leaves(slot).into_iter().chain(self.sharded.held_leaves(slot));
            leaves.map(move |leaf| (slot, leaf))
        };
        let gradients = (0..self.slots.len()).flat_map(of_slot).collect();
        let statistics = self.statistics.as_ref().map_or(Vec::new(), SyncedStatistics::held_leaves);
        (self.reducer.held(), HeldSums { gradients, statistics })
    }

    fn held_sum(&self, slot: usize, leaf: usize) -> Result<Option<Sum>, String> {
        match self.sharded.held_sum(slot, leaf) {
            Some(sum) => Ok(Some(sum.clone())),
            None => self.reducer.held_sum(slot, leaf),
        }
    }

    fn restore_held(&mut self, batches: HeldBatches) {
        self.discard();
        self.reducer.restore_held(batches);
    }

    fn add_held_sum(&mut self, slot: usize, leaf: usize, sharded: bool, sum: Sum) {
        let mut not_finite = FirstNotFinite::default();
        not_finite.note_unless(!sharded || is_finite(sum.dtype(), sum.bytes()), slot, leaf);
        self.reducer.note_sharded(not_finite);
        // Without a tree all micro-batches are one sum.
        let leaf = if self.reducer.has_tree() { leaf } else { 0 };
        match sharded {
            true => self.sharded.add_held_sum(slot, leaf, sum),
            false => self.reducer.add_held_sum(slot, leaf, sum),
        }
    }

    fn retire(&mut self) {
        self.reducer.retire();
    }

    fn shadow(&mut self, model: &WrappedModel) -> Result<bool> {
        shadow_collectives::run(model, self)
    }

    fn movements(&mut self) -> Option<&mut Movements> {
        self.movements.as_mut()
    }

    fn statistics(&mut self) -> Option<&mut SyncedStatistics> {
        self.statistics.as_mut()
    }
}

/// Everything that a [`State`] is made of, except its backend.
struct Parts {
    group: ProcessGroup,
    slots: Arc<[Slot]>,
    settings: ReducerSettings,
    meter: Meter,
    stop: Arc<StopWish>,
    statistics: Option<SyncedStatistics>,
}

enum Opening {
    Prepared(Box<Parts>),
    Open(Result<Box<dyn ModelState>>),
    Taken,
}

/// Carries what `wrap` knows of a model to the backend of the model's device, which alone can make the state with its
/// own types of tensors, and carries that state back. Opaque: made by `wrap`, passed through
/// [`DdpBackend`](crate::backend::DdpBackend).
#[derive(Clone)]
pub struct ModelOpening(Arc<Mutex<Opening>>);

impl ModelOpening {
    pub(super) fn new(
        group: ProcessGroup,
        slots: Arc<[Slot]>,
        settings: ReducerSettings,
        (meter, stop): (Meter, Arc<StopWish>),
        statistics: Option<SyncedStatistics>,
    ) -> Self {
        let parts = Parts { group, slots, settings, meter, stop, statistics };
        ModelOpening(Arc::new(Mutex::new(Opening::Prepared(Box::new(parts)))))
    }

    /// Makes the state on backend `B`. *Collective* over the group.
    pub(super) fn open<B: GradientMemory>(&self, device: B::Device) {
        let mut opening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Opening::Prepared(parts) = std::mem::replace(&mut *opening, Opening::Taken) {
            let state = State::<B>::new(*parts, device);
            *opening = Opening::Open(state.map(|state| Box::new(state) as Box<dyn ModelState>));
        }
    }

    /// The state, once; `None` if no backend has made it.
    pub(super) fn take(&self) -> Option<Result<Box<dyn ModelState>>> {
        let mut opening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *opening, Opening::Taken) {
            Opening::Open(state) => Some(state),
            _ => None,
        }
    }
}

impl std::fmt::Debug for ModelOpening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ModelOpening")
    }
}
