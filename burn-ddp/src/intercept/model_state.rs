//! State of a wrapped model in tensors of its backend. [`ModelState`] erases the backend; only [`ModelState::of`]
//! restores it.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_ddp_comm::{ProcessGroup, Track};

use super::absent_gradients::AbsentGradients;
use super::hook_depth::{AutodiffTensor, Ladder, scalar, untracked};
use super::identical_data_check::SameGradients;
use super::shadow_collectives;
use super::shard::ShardedGradients;
use super::synced_statistics::SyncedStatistics;
use super::unused_parameter_averages::{StandIns, WaitingAverages};
use super::wrapped_model::WrappedModel;
use crate::gradients::{GradientMemory, HeldBatches, Reducer, ReducerSettings, Slot, Sum, open_store};
use crate::model::parameter_movement::Movements;
use crate::model::running_stats::BufferPolicy;
use crate::telemetry::step_meter::Meter;
use crate::{Error, Result};

/// State of a wrapped model for callers that do not know its backend.
pub(super) trait ModelState: Any + Send {
    /// Number of reductions so far.
    fn steps(&self) -> u64;

    /// True if gradients of micro-batches are waiting for their reduction.
    fn holds_gradients(&self) -> bool;

    /// Drops gradients of micro-batches that were not reduced yet.
    fn discard(&mut self);

    /// The micro-batches that are waiting, and the slots that this rank holds a sum for.
    fn held(&self) -> (HeldBatches, Vec<usize>);

    /// The sum over the waiting micro-batches for a slot.
    fn held_sum(&self, slot: usize) -> Result<Option<Sum>, String>;

    /// Drops the sums that are held, and makes `batches` the micro-batches that are waiting.
    fn restore_held(&mut self, batches: HeldBatches);

    /// Adds to the sum of a slot, whose parameter is `sharded` or not.
    fn add_held_sum(&mut self, slot: usize, sharded: bool, sum: Sum);

    /// Ends the communication thread.
    fn retire(&mut self);

    /// See [`WrappedModel::shadow`].
    fn shadow(&mut self, model: &WrappedModel) -> Result<bool>;

    /// Digests of the averages that the last backward put on leaves.
    fn delivered(&self) -> &Delivered;

    /// Averages that wait on stand-in leaves.
    fn waiting(&mut self) -> &mut WaitingAverages;

    /// Movements of the parameters, unless they are compared bit by bit.
    fn movements(&mut self) -> Option<&mut Movements>;

    /// Policy for running statistics, if the model has some that the ranks make equal.
    fn buffer_policy(&self) -> Option<BufferPolicy>;
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
    /// A tensor that is registered in the `Gradients` of the running backward, to recognise them.
    pub(super) sentinel: AutodiffTensor<B>,
    pub(super) ladder: Ladder<B>,
    /// True if a backward has begun and not ended.
    pub(super) running: bool,
    /// Number of hooks that have run in the running backward.
    pub(super) fired: usize,
    /// Number of gates that have run in the running backward.
    pub(super) gated: usize,
    /// True if all buckets of the running backward are submitted.
    pub(super) submitted: bool,
    pub(super) slots: Vec<SlotState<B>>,
    pub(super) sharded: ShardedGradients<B>,
    /// Each slot's parameter as it was last read, kept until the backward ends. The tap keeps this rank's gradient off
    /// such a leaf: one that is there before the averages are delivered came around the tap, which is an error.
    pub(super) values: Vec<Option<AutodiffTensor<B>>>,
    /// Values that the replica check compares, kept until the backward ends. For a parameter that gets a gradient it is
    /// the value that the gradient belongs to, since a lagging copy of the model may be read, too; for others it is a
    /// value that was noted.
    pub(super) compared: Vec<Option<FloatTensor<B>>>,
    /// Movements of the parameters; `None` if they are compared bit by bit, or in a world of 1.
    pub(super) movements: Option<Movements>,
    /// True if the user was warned of ranks that differ by rounding.
    pub(super) warned_rounding: bool,
    pub(super) same_gradients: SameGradients,
    pub(super) stand_ins: StandIns<B>,
    pub(super) statistics: Option<SyncedStatistics>,
    pub(super) delivered: Delivered,
    pub(super) absent: AbsentGradients,
    /// True if the user was warned of a step that may have missed an average.
    pub(super) warned_missed: bool,
    /// First error of the running backward.
    pub(super) error: Option<Error>,
    /// Number of the batch of the last backward; 0 if there is none.
    pub(super) last_batch: u64,
    /// Track and epoch of that batch, if it came from a loader.
    pub(super) epoch: Option<(Track, u32)>,
}

/// State of a slot in the running backward.
pub(super) struct SlotState<B: GradientMemory> {
    pub(super) leaf: Option<NodeId>,
    /// True if the copy that was read may have clones of the parameter on leaves of their own.
    pub(super) apart: bool,
    /// Sum of the gradients of earlier reads.
    pub(super) partial: Option<FloatTensor<B>>,
    /// True if the final gradient is with the reducer.
    pub(super) done: bool,
}

impl<B: GradientMemory> Default for SlotState<B> {
    fn default() -> Self {
        SlotState { leaf: None, apart: false, partial: None, done: false }
    }
}

/// Averages that the last backward put on leaves.
pub(super) struct Delivered {
    /// Digest of each slot's average, [`UNREAD`](super::tap_and_replica_checks::UNREAD) unless `digested`; `None` if
    /// the slot's leaf got no average.
    pub(super) digests: Vec<Option<i64>>,
    /// True if the digests were computed, as in the first steps and in those that compare the ranks' parameters.
    pub(super) digested: bool,
}

impl<B: GradientMemory> State<B> {
    fn new(parts: Parts, device: B::Device, dtype: DType) -> Result<Self> {
        let Parts { group, slots, settings, meter, statistics } = parts;
        let sentinel = untracked::<B>(scalar::<B>(&device, dtype));
        let store = open_store::<B>(slots.clone(), device, settings);
        let judges = !settings.exact_replicas && group.world_size() > 1;
        Ok(State {
            reducer: Reducer::new(group, slots.clone(), store, settings, meter)?,
            accumulation: settings.accumulation,
            sentinel,
            ladder: Ladder::new(),
            running: false,
            fired: 0,
            gated: 0,
            submitted: false,
            slots: slots.iter().map(|_| SlotState::default()).collect(),
            sharded: ShardedGradients::new(slots.len()),
            values: slots.iter().map(|_| None).collect(),
            compared: slots.iter().map(|_| None).collect(),
            movements: judges.then(|| Movements::new(slots.len())),
            warned_rounding: false,
            same_gradients: SameGradients::new(&slots),
            stand_ins: StandIns::new(),
            statistics,
            delivered: Delivered { digests: vec![None; slots.len()], digested: false },
            absent: AbsentGradients::default(),
            warned_missed: false,
            error: None,
            last_batch: 0,
            epoch: None,
        })
    }

    /// Forgets the running backward.
    pub(super) fn reset(&mut self) {
        self.error = None;
        self.running = false;
        self.fired = 0;
        self.gated = 0;
        self.submitted = false;
        self.ladder.restart();
        self.slots.iter_mut().for_each(|s| *s = SlotState::default());
    }
}

impl<B: GradientMemory> ModelState for State<B> {
    fn steps(&self) -> u64 {
        self.reducer.step()
    }

    fn holds_gradients(&self) -> bool {
        self.reducer.holds_gradients()
    }

    fn discard(&mut self) {
        self.last_batch = 0;
        self.epoch = None;
        self.sharded.clear();
        self.reducer.discard_held();
    }

    fn held(&self) -> (HeldBatches, Vec<usize>) {
        let holds = |slot: &usize| self.reducer.holds_sum(*slot) || self.sharded.held_sum(*slot).is_some();
        (self.reducer.held(), (0..self.slots.len()).filter(holds).collect())
    }

    fn held_sum(&self, slot: usize) -> Result<Option<Sum>, String> {
        match self.sharded.held_sum(slot) {
            Some(sum) => Ok(Some(sum.clone())),
            None => self.reducer.held_sum(slot),
        }
    }

    fn restore_held(&mut self, batches: HeldBatches) {
        self.discard();
        self.reducer.restore_held(batches);
    }

    fn add_held_sum(&mut self, slot: usize, sharded: bool, sum: Sum) {
        match sharded {
            true => self.sharded.add_held_sum(slot, sum),
            false => self.reducer.add_held_sum(slot, sum),
        }
    }

    fn retire(&mut self) {
        self.reducer.retire();
    }

    fn shadow(&mut self, model: &WrappedModel) -> Result<bool> {
        shadow_collectives::run(model, self)
    }

    fn delivered(&self) -> &Delivered {
        &self.delivered
    }

    fn waiting(&mut self) -> &mut WaitingAverages {
        self.stand_ins.waiting()
    }

    fn movements(&mut self) -> Option<&mut Movements> {
        self.movements.as_mut()
    }

    fn buffer_policy(&self) -> Option<BufferPolicy> {
        self.statistics.as_ref().map(SyncedStatistics::policy)
    }
}

/// Everything that a [`State`] is made of, except its backend.
struct Parts {
    group: ProcessGroup,
    slots: Arc<[Slot]>,
    settings: ReducerSettings,
    meter: Meter,
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
        meter: Meter,
        statistics: Option<SyncedStatistics>,
    ) -> Self {
        let parts = Parts { group, slots, settings, meter, statistics };
        ModelOpening(Arc::new(Mutex::new(Opening::Prepared(Box::new(parts)))))
    }

    /// Makes the state on backend `B`. *Collective* over the group.
    pub(super) fn open<B: GradientMemory>(&self, device: B::Device, dtype: DType) {
        let mut opening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Opening::Prepared(parts) = std::mem::replace(&mut *opening, Opening::Taken) {
            let state = State::<B>::new(*parts, device, dtype);
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
