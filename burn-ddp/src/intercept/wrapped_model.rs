//! One wrapped model on one rank: what its taps share.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use burn::backend::Backend;
use burn::backend::autodiff::NodeId;
use burn::tensor::{Bytes, Device, TensorData};
use burn_ddp_comm::Track;

use super::nodes::AutodiffTensor;
use super::stand_in::Waiting;
use crate::model::running_stats::{self, BufferPolicy, Buffers};
use crate::convert::burn_dtype;
use crate::ddp::Ddp;
use crate::gradients::{Piggyback, Reducer, GradientReduction, Unread};
use crate::{Error, Result};

pub(super) type Erased = Box<dyn Any + Send>;

thread_local! {
    /// `Ddp::backward` runs on this thread and wants the first error back instead of a panic, whichever model it is about.
    pub(super) static CAPTURED: RefCell<Option<Option<Error>>> = const { RefCell::new(None) };
    /// The wrapped models that the backward on this thread has reached, until their first gate.
    pub(super) static ENTERED: RefCell<Vec<Weak<WrappedModel>>> = const { RefCell::new(Vec::new()) };
}

/// Shared by all taps of a wrapped model and by the autodiff nodes that its reads leave in graphs.
pub(crate) struct WrappedModel {
    pub(crate) ddp: Ddp,
    /// Autodiff device of the model, for stand-in leaves.
    pub(crate) device: Device,
    /// What orders the wrapped models of a rank in the same way on all ranks.
    pub(super) id: u64,
    /// Reads of each slot whose hook may still fire. Written by forward (up) and by dropped hook states (down).
    pub(super) outstanding: Vec<AtomicUsize>,
    /// Taps of each slot that there are, over all copies of the model.
    pub(super) taps: Vec<AtomicUsize>,
    /// Their sum, and who may attach more.
    pub(super) holders: AtomicUsize,
    /// Slots of parameters that were clones of each other when the model was wrapped.
    pub(super) cloned: Vec<bool>,
    /// Slots that `wrap` gave a tap: not those of tied clones and of bases under another reparameterization (LoRA).
    pub(super) tapped: OnceLock<Vec<bool>>,
    pub(super) state: Mutex<State>,
    /// Averages of parameters that this rank did not use. Written by the last gate, read by `Tap::visit`.
    pub(super) waiting: Waiting,
    /// Backwards that reached this model and ended, well or not.
    pub(super) ended: AtomicU64,
    /// Depth of nested `no_sync`.
    pub(super) holding: AtomicUsize,
    /// The next reduction compares the ranks' parameters: reads of frozen ones are noted too. Written by the last gate.
    pub(super) comparing: AtomicBool,
    /// A copy of the model went through `valid().train()`, and so has running statistics of its own.
    pub(super) retrained: AtomicBool,
    /// The model, or a copy, was mapped: clones of a parameter may have parted.
    pub(super) mapped: AtomicBool,
}

/// The model's running statistics, and what happens to them.
pub(crate) struct SyncedStatistics {
    pub(crate) buffers: Box<dyn Buffers>,
    pub(crate) policy: BufferPolicy,
    /// What was read for the running step: the shapes of what comes back.
    pub(crate) sent: Vec<TensorData>,
}

pub(super) struct State {
    pub(super) rank: usize,
    pub(super) reducer: Reducer,
    pub(super) accumulation: usize,
    /// A tensor whose entry in a `Gradients` says that the running backward is the one we know.
    pub(super) sentinel: Option<Erased>,
    /// Untracked tensors of growing depth, one for each read since the last backward.
    pub(super) ladder: Option<Erased>,
    /// Reads since the last backward: decides the rung, and nothing else may.
    pub(super) reads: usize,
    pub(super) running: bool,
    pub(super) fired: usize,
    pub(super) gated: usize,
    /// Its buckets are all under way.
    pub(super) submitted: bool,
    pub(super) slots: Vec<SlotState>,
    /// The value of each slot that was read last, from its read to the end of the backward: where a gradient would be that
    /// went past the tap, and what the replica check compares.
    pub(super) values: Vec<Option<Erased>>,
    pub(super) buffers: Option<SyncedStatistics>,
    /// Why this rank's parameters are no longer those of the others.
    pub(super) stale: Option<Error>,
    /// What the last backward put on each slot's leaf: its digest, or [`UNREAD`]; noted for [`Ddp::backward`].
    pub(super) delivered: Vec<Option<i64>>,
    /// Whether those digests were computed: in steps that look closely.
    pub(super) digested: bool,
    /// The user was told which parameters have no gradient.
    pub(super) told_unused: bool,
    pub(super) error: Option<Error>,
    /// The averages of the last step by bucket, which the gradients it delivered look at. Kept until the next backward.
    pub(super) averages: Vec<Option<Arc<Bytes>>>,
    /// Gradients that an asynchronous device still works on.
    pub(super) unread: Unread,
    /// Batches read from loaders when the last backward began.
    pub(super) last_batch: u64,
    /// Track and epoch of that batch, if it came from a loader.
    pub(super) epoch: Option<(Track, u32)>,
}

#[derive(Default)]
pub(super) struct SlotState {
    pub(super) leaf: Option<NodeId>,
    /// Sum of the gradients of earlier reads in this backward.
    pub(super) partial: Option<Erased>,
    pub(super) done: bool,
}

/// One read of a parameter, outstanding until its hook has run or its graph is gone.
pub(crate) struct Read {
    pub(crate) tapped: Arc<WrappedModel>,
    pub(super) slot: usize,
}

impl Read {
    pub(crate) fn new(tapped: Arc<WrappedModel>, slot: usize) -> Self {
        tapped.outstanding[slot].fetch_add(1, Ordering::AcqRel);
        Read { tapped, slot }
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        self.tapped.outstanding[self.slot].fetch_sub(1, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for Read {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Read(slot {})", self.slot)
    }
}

impl std::fmt::Debug for WrappedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "WrappedModel({} parameters on rank {} of {})",
            self.outstanding.len(),
            self.ddp.rank(),
            self.ddp.world_size()
        )
    }
}

impl WrappedModel {
    pub(crate) fn new(
        ddp: Ddp,
        device: Device,
        reducer: Reducer,
        accumulation: usize,
        buffers: Option<SyncedStatistics>,
    ) -> Self {
        let mut clones = vec![0; reducer.slots().len()];
        reducer.slots().iter().for_each(|s| clones[s.first_clone] += 1);
        let cloned = reducer.slots().iter().map(|s| clones[s.first_clone] > 1).collect();
        let (slots, rank) = (reducer.slots().len(), ddp.rank());
        WrappedModel {
            id: reducer.id(),
            cloned,
            ddp,
            device,
            outstanding: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
            taps: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
            holders: AtomicUsize::new(0),
            tapped: OnceLock::new(),
            state: Mutex::new(State {
                rank,
                reducer,
                accumulation,
                sentinel: None,
                ladder: None,
                reads: 0,
                running: false,
                fired: 0,
                gated: 0,
                submitted: false,
                slots: (0..slots).map(|_| SlotState::default()).collect(),
                values: (0..slots).map(|_| None).collect(),
                buffers,
                stale: None,
                delivered: vec![None; slots],
                digested: false,
                told_unused: false,
                error: None,
                averages: Vec::new(),
                unread: Unread::default(),
                last_batch: 0,
                epoch: None,
            }),
            waiting: Waiting::default(),
            ended: AtomicU64::new(0),
            holding: AtomicUsize::new(0),
            comparing: AtomicBool::new(false),
            retrained: AtomicBool::new(false),
            mapped: AtomicBool::new(false),
        }
    }

    /// A tap of a slot appears, or goes.
    pub(crate) fn count_tap(&self, slot: usize, appears: bool) {
        if appears {
            self.taps[slot].fetch_add(1, Ordering::AcqRel);
        } else {
            self.taps[slot].fetch_sub(1, Ordering::AcqRel);
        }
        self.count_holder(appears);
    }

    /// A tap, or who attaches taps, appears or goes.
    pub(crate) fn count_holder(&self, appears: bool) {
        if appears {
            self.holders.fetch_add(1, Ordering::AcqRel);
        } else if self.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            // The model is gone. Nodes that it left in graphs may keep this for long, but need no thread. Whoever holds the state is in a
            // backward that keeps the thread anyway.
            if let Ok(mut state) = self.state.try_lock() {
                state.reducer.retire();
            }
        }
    }

    /// The taps that there are now must stay.
    pub(crate) fn taps_are_complete(&self) {
        self.tapped.get_or_init(|| self.taps.iter().map(|taps| taps.load(Ordering::Acquire) > 0).collect());
    }

    /// Remembers the leaf of a slot until the end of the next backward.
    pub(crate) fn note_leaf<B: Backend>(&self, slot: usize, leaf: &AutodiffTensor<B>) {
        self.lock().values[slot] = Some(Box::new(leaf.clone()));
    }

    /// A frozen parameter is read.
    pub(crate) fn note_frozen<B: Backend>(&self, slot: usize, value: &AutodiffTensor<B>) {
        if self.compares() {
            self.note_leaf::<B>(slot, value);
        }
    }

    /// Whether a rank's gradients count by its items.
    pub(crate) fn weighs_items(&self) -> bool {
        self.lock().reducer.reduction() == GradientReduction::Mean
    }

    /// Whether the next reduction compares the ranks' parameters.
    pub(crate) fn compares(&self) -> bool {
        self.comparing.load(Ordering::Acquire)
    }

    /// The model, or a copy of it, went through `valid().train()`.
    pub(crate) fn note_train(&self) {
        self.retrained.store(true, Ordering::Release);
    }

    /// Whether `on_leaf`, a digest as [`bypassed`](super::bypassed) takes it, is what the last backward put on the slot's leaf. Clones of
    /// a parameter may share theirs, and are not looked at.
    pub(crate) fn was_delivered(&self, slot: usize, on_leaf: Option<i64>) -> bool {
        self.cloned[slot] || self.lock().delivered[slot] == on_leaf
    }

    /// Whether the last backward noted digests of what it delivered.
    pub(crate) fn notes_values(&self) -> bool {
        self.lock().digested
    }

    /// The model, or a copy, was mapped: by an optimizer, for all that is known.
    pub(crate) fn note_map(&self) {
        self.mapped.store(true, Ordering::Release);
    }

    /// Shape and dtype of a slot.
    pub(crate) fn shape(&self, slot: usize) -> (Vec<usize>, burn::tensor::DType) {
        let state = self.lock();
        let s = &state.reducer.slots()[slot];
        (s.dims.clone(), burn_dtype(s.dtype))
    }

    /// An optimizer stepped past an average that waited for it.
    pub(crate) fn note_stale_id(&self, slot: usize) {
        let mut state = self.lock();
        let path = state.reducer.slots()[slot].path.clone();
        let fault = self.fault(format!(
            "the average of {path}, which this rank did not use, missed the optimizer: the parameter's id has changed since `wrap`, as \
             `load_record` does. Load before `wrap`, or `ddp.wrap(ddp.unwrap(model)?)` again"
        ));
        self.ddp.world().fail(fault.to_string());
        state.stale.get_or_insert(fault);
    }

    /// Reductions so far.
    pub(crate) fn steps(&self) -> u64 {
        self.lock().reducer.step()
    }

    /// Takes part in one reduction of the other ranks without a backward. `false` if no rank has a gradient: all stand in.
    pub(crate) fn shadow(&self) -> Result<bool> {
        let mut guard = self.lock();
        let given = self.try_shadow(&mut guard);
        if let Err(error) = &given {
            guard.reducer.discard();
            tell_peers(&self.ddp, error);
        }
        given
    }

    fn try_shadow(&self, state: &mut State) -> Result<bool> {
        if let Some(stale) = &state.stale {
            return Err(stale.clone());
        }
        if std::mem::take(&mut state.running) {
            state.reset();
            state.reducer.abandon()?;
        }
        state.averages.clear();
        state.last_batch = 0;
        state.epoch = None;
        self.ddp.world().set_step(state.reducer.step());
        let mut piggyback = self.statistics(state)?;
        if state.reducer.compares_replicas() {
            // These parameters are not the others' any more: they have no say.
            piggyback.digests = Some(vec![0; state.values.len()]);
        }
        let given = state.reducer.shadow(piggyback)?;
        self.comparing.store(state.reducer.compares_replicas(), Ordering::Release);
        Ok(given)
    }

    /// The running statistics as they travel.
    pub(super) fn statistics(&self, state: &mut State) -> Result<Piggyback> {
        let mut piggyback = Piggyback::default();
        if let Some(shared) = &mut state.buffers {
            if self.retrained.load(Ordering::Acquire) {
                return Err(self.fault(
                    "the wrapped model, or a copy, went through `valid().train()`, which gives it running statistics of its own: \
                     `ddp.wrap(ddp.unwrap(model)?)` it again, or keep the model that `valid()` was called on"
                        .into(),
                ));
            }
            shared.sent = shared.buffers.read()?;
            piggyback.buffers = running_stats::pack(&shared.sent);
            piggyback.from_first = shared.policy == BufferPolicy::Broadcast;
        }
        Ok(piggyback)
    }

    /// Runs `backward` with errors returned instead of panics, and tells whether the backward reached this model.
    pub(crate) fn capture<T>(&self, backward: impl FnOnce() -> T) -> Result<(T, bool)> {
        struct Restore(Option<Option<Error>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CAPTURED.set(self.0.take());
            }
        }
        let restore = Restore(CAPTURED.replace(Some(None)));
        let before = self.ended.load(Ordering::Acquire);
        // An error leaves Burn's graph as it is, which Burn may then find wanting.
        let out = catch_unwind(AssertUnwindSafe(backward));
        let captured = CAPTURED.take().flatten();
        drop(restore);
        match (captured, out) {
            (Some(e), _) => Err(e),
            (None, Ok(out)) => Ok((out, self.ended.load(Ordering::Acquire) > before)),
            (None, Err(panic)) => resume_unwind(panic),
        }
    }

    /// Backwards inside `f` only sum up.
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

    pub(crate) fn discard(&self) {
        let mut state = self.lock();
        state.last_batch = 0;
        state.epoch = None;
        state.reducer.discard_held();
    }

    pub(crate) fn holds_gradients(&self) -> bool {
        self.lock().reducer.holds_gradients()
    }

    pub(super) fn fault(&self, reason: String) -> Error {
        Error::Backward { rank: self.ddp.rank(), reason }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What only this rank knows ends the others' waits, with the reason.
pub(crate) fn tell_peers(ddp: &Ddp, error: &Error) {
    if !matches!(error, Error::Comm(_)) {
        ddp.world().fail(error.to_string());
    }
}

/// A backward has failed: the other ranks hear of it, and `Ddp::backward` if it runs on this thread, else this panics.
pub(crate) fn fail(ddp: &Ddp, error: Error) {
    tell_peers(ddp, &error);
    let unheard = CAPTURED.with_borrow_mut(|captured| match captured {
        Some(first) => {
            first.get_or_insert(error);
            None
        }
        None => Some(error),
    });
    if let Some(error) = unheard {
        panic!(
            "{error}\nnote: `loss.backward()` cannot return an error; `ddp.backward(&loss, &model)` returns this one"
        );
    }
}

/// What to say of a parameter whose gradient its tap did not see.
pub(crate) fn past_tap(path: &str) -> String {
    format!(
        "{path} was read past its tap, so its gradient is not averaged: read parameters through `val()`, not through `base()` or by \
         dereferencing the `Param`"
    )
}

/// What to say of a parameter without a tap.
pub(crate) fn lost_tap(path: &str) -> String {
    format!(
        "{path} is no longer tapped, so its gradient is not averaged: it was replaced after `wrap` (`Param::map` makes a new parameter; \
         `Module::map` keeps the tap). Change it before, or `ddp.wrap(ddp.unwrap(model)?)` again"
    )
}
