//! One wrapped model on one rank: what its taps share.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Bytes, Device, Shape, TensorData, read_sync};

use super::UNREAD;
use super::memory::{GradientMemory, shared_bytes};
use super::ops::{AutodiffTensor, DdpBackend, new_leaf, rung_above, untracked};
use super::waiting::Waiting;
use crate::buffers::{self, BufferPolicy, Buffers};
use crate::convert::{burn_dtype, comm_dtype};
use crate::ddp::Ddp;
use crate::reducer::{Beside, Reducer, Reduction};
use crate::{Error, Result, replicas};

/// Depth that each read of a parameter adds to the ladder: about what a layer adds to the graph.
const RUNGS_PER_READ: usize = 4;
/// Rungs alive are swept by every backward of the process, so only those are kept on which hooks hang, and there is an end.
const MAX_LADDER: usize = 1024;

type Erased = Box<dyn Any + Send>;

thread_local! {
    /// `Ddp::backward` runs on this thread and wants the first error back instead of a panic, whichever model it is about.
    static CAPTURED: RefCell<Option<Option<Error>>> = const { RefCell::new(None) };
    /// The wrapped models that the backward on this thread has reached, until their first gate.
    static ENTERED: RefCell<Vec<Weak<Tapped>>> = const { RefCell::new(Vec::new()) };
}

/// Shared by all taps of a wrapped model and by the autodiff nodes that its reads leave in graphs.
pub(crate) struct Tapped {
    pub(crate) ddp: Ddp,
    /// Autodiff device of the model, for stand-in leaves.
    pub(crate) device: Device,
    /// What orders the wrapped models of a rank in the same way on all ranks.
    id: u64,
    /// Reads of each slot whose hook may still fire. Written by forward (up) and by dropped hook states (down).
    outstanding: Vec<AtomicUsize>,
    /// Taps of each slot that there are, over all copies of the model.
    taps: Vec<AtomicUsize>,
    /// Their sum, and who may attach more.
    holders: AtomicUsize,
    /// Slots of parameters that were clones of each other when the model was wrapped.
    cloned: Vec<bool>,
    /// Slots that `wrap` gave a tap: not those of tied clones and of bases under another reparameterization (LoRA).
    tapped: OnceLock<Vec<bool>>,
    state: Mutex<State>,
    /// Averages of parameters that this rank did not use. Written by the last gate, read by `Tap::visit`.
    pub(super) waiting: Waiting,
    /// Backwards that reached this model and ended, well or not.
    ended: AtomicU64,
    /// Depth of nested `no_sync`.
    holding: AtomicUsize,
    /// The next reduction compares the ranks' parameters: reads of frozen ones are noted too. Written by the last gate.
    comparing: AtomicBool,
    /// A copy of the model went through `valid().train()`, and so has running statistics of its own.
    retrained: AtomicBool,
    /// The model, or a copy, was mapped: clones of a parameter may have parted.
    mapped: AtomicBool,
}

/// See [`Tapped::tied`].
enum Tied {
    /// On this leaf.
    Leaf(NodeId),
    /// Under the stand-in of this slot.
    StandIn(usize),
}

/// The model's running statistics, and what happens to them.
pub(crate) struct SharedBuffers {
    pub(crate) buffers: Box<dyn Buffers>,
    pub(crate) policy: BufferPolicy,
    /// What was read for the running step: the shapes of what comes back.
    pub(crate) sent: Vec<TensorData>,
}

struct State {
    reducer: Reducer,
    accumulation: usize,
    /// A tensor whose entry in a `Gradients` says that the running backward is the one we know.
    sentinel: Option<Erased>,
    /// Untracked tensors of growing depth, one for each read since the last backward.
    ladder: Option<Erased>,
    /// Reads since the last backward: decides the rung, and nothing else may.
    reads: usize,
    running: bool,
    fired: usize,
    gated: usize,
    /// Its buckets are all under way.
    departed: bool,
    slots: Vec<SlotState>,
    /// The value of each slot that was read last, from its read to the end of the backward: where a gradient would be that
    /// went past the tap, and what the replica check compares.
    values: Vec<Option<Erased>>,
    buffers: Option<SharedBuffers>,
    /// Why this rank's parameters are no longer those of the others.
    stale: Option<Error>,
    /// What the last backward put on each slot's leaf: its digest, or [`UNREAD`]; noted for [`Ddp::backward`].
    delivered: Vec<Option<i64>>,
    /// Whether those digests were computed: in steps that look closely.
    digested: bool,
    /// The user was told which parameters have no gradient.
    told_unused: bool,
    error: Option<Error>,
    /// The averages of the last step by bucket, which the gradients it delivered look at. Kept until the next backward.
    averages: Vec<Option<Arc<Bytes>>>,
    /// Batches read from loaders when the last backward began.
    last_batch: u64,
    /// Track and epoch of that batch, if it came from a loader.
    epoch: Option<(u64, u64)>,
}

#[derive(Default)]
struct SlotState {
    leaf: Option<NodeId>,
    /// Sum of the gradients of earlier reads in this backward.
    partial: Option<Erased>,
    done: bool,
}

/// One read of a parameter, outstanding until its hook has run or its graph is gone.
pub(crate) struct Read {
    pub(crate) tapped: Arc<Tapped>,
    slot: usize,
}

impl Read {
    pub(crate) fn new(tapped: Arc<Tapped>, slot: usize) -> Self {
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

impl std::fmt::Debug for Tapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Tapped({} parameters on rank {} of {})",
            self.outstanding.len(),
            self.ddp.rank(),
            self.ddp.world_size()
        )
    }
}

impl Tapped {
    pub(crate) fn new(
        ddp: Ddp,
        device: Device,
        reducer: Reducer,
        accumulation: usize,
        buffers: Option<SharedBuffers>,
    ) -> Self {
        let mut clones = vec![0; reducer.slots().len()];
        reducer.slots().iter().for_each(|s| clones[s.first_clone] += 1);
        let cloned = reducer.slots().iter().map(|s| clones[s.first_clone] > 1).collect();
        let slots = reducer.slots().len();
        Tapped {
            id: reducer.id(),
            cloned,
            ddp,
            device,
            outstanding: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
            taps: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
            holders: AtomicUsize::new(0),
            tapped: OnceLock::new(),
            state: Mutex::new(State {
                reducer,
                accumulation,
                sentinel: None,
                ladder: None,
                reads: 0,
                running: false,
                fired: 0,
                gated: 0,
                departed: false,
                slots: (0..slots).map(|_| SlotState::default()).collect(),
                values: (0..slots).map(|_| None).collect(),
                buffers,
                stale: None,
                delivered: vec![None; slots],
                digested: false,
                told_unused: false,
                error: None,
                averages: Vec::new(),
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
        self.lock().reducer.reduction() == Reduction::Mean
    }

    /// Whether the next reduction compares the ranks' parameters.
    pub(crate) fn compares(&self) -> bool {
        self.comparing.load(Ordering::Acquire)
    }

    /// The model, or a copy of it, went through `valid().train()`.
    pub(crate) fn note_train(&self) {
        self.retrained.store(true, Ordering::Release);
    }

    /// A parameter is read: the ladder's tensor for this read.
    pub(crate) fn rung<B: Backend, C: CheckpointStrategy>(
        &self,
        slot: usize,
        like: &AutodiffTensor<B>,
    ) -> AutodiffTensor<B> {
        let mut state = self.lock();
        state.values[slot] = Some(Box::new(like.clone()));
        let nth = state.reads.min(MAX_LADDER - 1);
        state.reads += 1;
        let mut ladder = match state.ladder.take().map(|l| l.downcast::<Vec<AutodiffTensor<B>>>()) {
            Some(Ok(ladder)) => ladder,
            // The first read, or the model moved to another backend or checkpointing strategy.
            _ => Box::new(vec![untracked::<B>(scalar::<B>(&like.device(), like.dtype()))]),
        };
        while ladder.len() <= nth {
            let last = ladder.last().expect("a ladder has a first rung").clone();
            ladder.push((0..RUNGS_PER_READ).fold(last, |below, _| rung_above::<B, C>(below)));
        }
        let rung = ladder[nth].clone();
        state.ladder = Some(ladder);
        rung
    }

    /// The gradient of one read has arrived.
    pub(crate) fn hook<B: DdpBackend + GradientMemory>(
        self: Arc<Self>,
        read: Arc<Read>,
        leaf: NodeId,
        gradient: FloatTensor<B>,
        grads: &mut Gradients,
    ) {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.enter::<B>(state, &gradient, grads);
        state.fired += 1;
        if state.error.is_some() {
            return;
        }
        let slot = read.slot;
        let s = &mut state.slots[slot];
        if s.leaf.is_some_and(|known| known != leaf) || s.done {
            let path = state.reducer.slots()[slot].path.clone();
            state.error = Some(self.fault(format!(
                "two copies of the wrapped model met in one backward, or {path} was read while backward ran: wrap the copy itself \
                 (a target network, an EMA) or detach it"
            )));
            return;
        }
        s.leaf = Some(leaf);
        let sum = match s.partial.take().map(|p| p.downcast::<FloatTensor<B>>()) {
            Some(Ok(earlier)) => B::float_add(gradient, *earlier),
            _ => gradient,
        };
        // This read still counts itself.
        if self.outstanding[slot].load(Ordering::Acquire) > 1 {
            s.partial = Some(Box::new(sum));
        } else if let Err(e) = state.put::<B>(slot, sum) {
            state.error = Some(e);
        }
        drop(read);
    }

    /// A gate was reached. The last one of a backward waits for the averages and registers them.
    pub(crate) fn gate<B: DdpBackend + GradientMemory>(&self, parent_is_leaf: bool, grads: &mut Gradients) {
        // Gates run after all hooks. If several wrapped models meet in this backward, all of them depart before any waits:
        // their gates may come in another order on other ranks.
        let mut entered: Vec<_> = ENTERED.take().iter().filter_map(Weak::upgrade).collect();
        entered.sort_by_key(|tapped| tapped.id);
        for entered in entered {
            let mut guard = entered.lock();
            let state = &mut *guard;
            if entered.is_running::<B>(state, grads) && state.error.is_none() {
                state.error = entered.depart::<B>(state).err();
            }
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        if !parent_is_leaf {
            state.error.get_or_insert_with(|| {
                self.fault("a parameter of the wrapped model is not a leaf of the graph: move models with `fork`, not `to_device`".into())
            });
        }
        state.gated += 1;
        if state.gated < state.fired {
            return;
        }
        let result = match state.error.take() {
            Some(e) => Err(e),
            None => self.deliver::<B>(state, grads),
        };
        state.reset();
        state.values.iter_mut().for_each(|value| *value = None);
        if result.is_err() {
            state.reducer.discard();
        }
        drop(guard);
        self.ended.fetch_add(1, Ordering::AcqRel);
        if let Err(e) = result {
            fail(&self.ddp, e);
        }
    }

    /// All hooks have fired: what waits for other reads goes as it is, and every bucket is under way when it returns.
    fn depart<B: DdpBackend + GradientMemory>(&self, state: &mut State) -> Result<()> {
        if std::mem::replace(&mut state.departed, true) {
            return Ok(());
        }
        for slot in 0..state.slots.len() {
            if let Some(Ok(sum)) = state.slots[slot].partial.take().map(|p| p.downcast::<FloatTensor<B>>()) {
                state.put::<B>(slot, *sum)?;
            }
        }
        let beside = self.beside::<B>(state)?;
        state.reducer.depart(beside)
    }

    fn deliver<B: DdpBackend + GradientMemory>(&self, state: &mut State, grads: &mut Gradients) -> Result<()> {
        self.depart::<B>(state)?;
        state.delivered.fill(None);
        state.digested = state.reducer.step() <= 2 || state.reducer.compares_replicas();
        state.digested &= CAPTURED.with_borrow(Option::is_some);
        self.refuse_lost_taps(state)?;
        self.refuse_bypass::<B>(state, grads)?;
        let step = state.reducer.step();
        let Some(settled) = state.reducer.finish()? else { return Ok(()) };
        if !settled.digests.is_empty() {
            let paths: Vec<&str> = state.reducer.slots().iter().map(|s| s.path.as_str()).collect();
            if let Some(difference) = replicas::difference(&paths, &settled.digests) {
                return Err(Error::ReplicasDiffer(format!("in what step {step} read, {difference}")));
            }
        }
        if let Some(shared) = &mut state.buffers {
            let sent = std::mem::take(&mut shared.sent);
            shared.buffers.write(buffers::unpack(&sent, &settled.buffers));
        }
        let device = state.device::<B>().ok_or_else(|| self.fault("the backend changed during backward".into()))?;
        let mut unused = Vec::new();
        for slot in 0..state.slots.len() {
            let Some((bucket, range)) = state.reducer.gradient(slot) else { continue };
            let Some(bytes) = state.averages(bucket) else { continue };
            let s = &state.reducer.slots()[slot];
            let average =
                B::from_shared(&bytes, range.clone(), Shape::from(s.dims.clone()), burn_dtype(s.dtype), &device);
            match state.slots[slot].leaf {
                Some(leaf) => {
                    let digest = if state.digested { replicas::digest(&bytes[range]) } else { UNREAD };
                    state.delivered[slot] = Some(digest);
                    grads.register::<B>(leaf, average);
                }
                None => match self.tied(state, slot) {
                    Tied::Leaf(leaf) => grads.register::<B>(leaf, average),
                    Tied::StandIn(slot) => {
                        let make = || new_leaf::<B>(empty::<B>(&device, average.dtype()));
                        let stand_in = self.waiting.place::<B>(slot, make);
                        let stand_in = stand_in
                            .ok_or_else(|| self.fault("the model changed its backend: wrap it again".into()))?;
                        grads.register::<B>(stand_in, average);
                        unused.push(slot);
                    }
                },
            }
        }
        unused.dedup();
        self.tell_unused(state);
        state.reducer.end_step()?;
        self.comparing.store(state.reducer.compares_replicas(), Ordering::Release);
        self.waiting.note(&unused, state.reducer.step());
        Ok(())
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

    /// A parameter that lost its tap would train on this rank's gradients alone.
    fn refuse_lost_taps(&self, state: &State) -> Result<()> {
        let tapped = self.tapped.get().into_iter().flatten();
        let lost = |(taps, tapped): (&AtomicUsize, &bool)| *tapped && taps.load(Ordering::Acquire) == 0;
        match self.taps.iter().zip(tapped).position(lost) {
            None => Ok(()),
            Some(slot) => Err(self.fault(lost_tap(&state.reducer.slots()[slot].path))),
        }
    }

    /// A gradient that is on a leaf before any average was put there went past the tap. Seen is what came before the last gate;
    /// [`Ddp::backward`] sees the rest.
    fn refuse_bypass<B: DdpBackend>(&self, state: &State, grads: &Gradients) -> Result<()> {
        let past = |value: &Erased| {
            value
                .downcast_ref::<AutodiffTensor<B>>()
                .is_some_and(|leaf| leaf.is_tracked() && grads.get::<B>(leaf).is_some())
        };
        match state.values.iter().position(|value| value.as_ref().is_some_and(past)) {
            None => Ok(()),
            Some(slot) => Err(self.fault(past_tap(&state.reducer.slots()[slot].path))),
        }
    }

    /// Where the average of a slot goes that this rank did not use. Until an optimizer steps, clones of a parameter share a leaf.
    fn tied(&self, state: &State, slot: usize) -> Tied {
        let slots = state.reducer.slots();
        let first = slots[slot].first_clone;
        if !self.cloned[slot] || self.mapped.load(Ordering::Acquire) {
            return Tied::StandIn(slot);
        }
        let mut clones = (first..slots.len()).filter(|&other| slots[other].first_clone == first);
        clones.find_map(|other| state.slots[other].leaf).map_or(Tied::StandIn(first), Tied::Leaf)
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
    pub(crate) fn stand_in(&self) -> Result<bool> {
        let mut guard = self.lock();
        let given = self.try_stand_in(&mut guard);
        if let Err(error) = &given {
            guard.reducer.discard();
            tell_peers(&self.ddp, error);
        }
        given
    }

    fn try_stand_in(&self, state: &mut State) -> Result<bool> {
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
        let mut beside = self.statistics(state)?;
        if state.reducer.compares_replicas() {
            // These parameters are not the others' any more: they have no say.
            beside.digests = Some(vec![0; state.values.len()]);
        }
        let given = state.reducer.stand_in(beside)?;
        self.comparing.store(state.reducer.compares_replicas(), Ordering::Release);
        Ok(given)
    }

    /// What travels with this step's gradients.
    fn beside<B: Backend>(&self, state: &mut State) -> Result<Beside> {
        if !state.reducer.is_reducing() {
            return Ok(Beside::default());
        }
        let mut beside = self.statistics(state)?;
        if state.reducer.compares_replicas() {
            let mut digests = vec![0; state.values.len()];
            for (digest, value) in digests.iter_mut().zip(&mut state.values) {
                if let Some(Ok(value)) = value.take().map(|value| value.downcast::<AutodiffTensor<B>>()) {
                    let data = read_sync(B::float_into_data(value.primitive().clone()))
                        .map_err(|e| self.fault(format!("reading parameters failed: {e:?}")))?;
                    *digest = replicas::digest(data.as_bytes());
                }
            }
            beside.digests = Some(digests);
        }
        Ok(beside)
    }

    /// The running statistics as they travel.
    fn statistics(&self, state: &mut State) -> Result<Beside> {
        let mut beside = Beside::default();
        if let Some(shared) = &mut state.buffers {
            if self.retrained.load(Ordering::Acquire) {
                return Err(self.fault(
                    "the wrapped model, or a copy, went through `valid().train()`, which gives it running statistics of its own: \
                     `ddp.wrap(ddp.unwrap(model)?)` it again, or keep the model that `valid()` was called on"
                        .into(),
                ));
            }
            shared.sent = shared.buffers.read()?;
            beside.buffers = buffers::pack(&shared.sent);
            beside.from_first = shared.policy == BufferPolicy::Broadcast;
        }
        Ok(beside)
    }

    /// Says once which parameters no rank used.
    fn tell_unused(&self, state: &mut State) {
        if std::mem::replace(&mut state.told_unused, true) || self.ddp.rank() != 0 {
            return;
        }
        let slots = state.reducer.slots().iter().enumerate();
        let unused: Vec<&str> = slots
            .filter(|(slot, s)| s.trainable && state.reducer.gradient(*slot).is_none())
            .map(|(_, s)| s.path.as_str())
            .collect();
        if !unused.is_empty() {
            tracing::warn!(
                parameters = unused.join(", "),
                "parameters that had no gradient on any rank in the first step: unused, or read past their taps"
            );
        }
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

    /// Begins a new backward unless `grads` carries the sentinel of the one that is running.
    fn enter<B: DdpBackend>(self: &Arc<Self>, state: &mut State, like: &FloatTensor<B>, grads: &mut Gradients) {
        let sentinel = match state.sentinel.take().map(|s| s.downcast::<AutodiffTensor<B>>()) {
            Some(Ok(sentinel)) => sentinel,
            _ => Box::new(untracked::<B>(scalar::<B>(&like.device(), like.dtype()))),
        };
        let known = state.running && grads.get::<B>(&sentinel).is_some();
        if !known {
            ENTERED.with_borrow_mut(|entered| entered.push(Arc::downgrade(self)));
            grads.register::<B>(sentinel.id(), sentinel.primitive().clone());
            let abandoned = std::mem::take(&mut state.running);
            state.reset();
            state.error = None;
            let begun = if abandoned { state.reducer.abandon() } else { Ok(()) }.and_then(|()| self.begin(state));
            state.error = begun.err();
            state.running = true;
        }
        state.sentinel = Some(sentinel);
    }

    /// Whether `grads` belongs to the backward that this model is in.
    fn is_running<B: Backend>(&self, state: &State, grads: &Gradients) -> bool {
        let sentinel = state.sentinel.as_ref().and_then(|s| s.downcast_ref::<AutodiffTensor<B>>());
        state.running && sentinel.is_some_and(|sentinel| grads.get::<B>(sentinel).is_some())
    }

    fn begin(&self, state: &mut State) -> Result<()> {
        if let Some(stale) = &state.stale {
            return Err(stale.clone());
        }
        let batch = self.ddp.begin_backward().map_err(|e| match e {
            Error::Use(reason) => self.fault(reason),
            other => other,
        })?;
        if state.accumulation > 1 && batch.number > 0 && batch.number == state.last_batch {
            return Err(self.fault(
                "a second backward reached the wrapped model for one batch; with accumulation each micro-batch has one backward".into(),
            ));
        }
        let epoch = batch.step.map(|s| (s.track, s.position >> 32));
        if state.reducer.holds_gradients() && epoch.is_some() && state.epoch.is_some_and(|held| Some(held) != epoch) {
            return Err(self.fault(format!(
                "an epoch ended while gradients of micro-batches were held: the number of steps does not divide by the accumulation of {}; \
                 call `ddp.discard(&model)` at the end of the epoch",
                state.accumulation
            )));
        }
        state.epoch = epoch;
        state.last_batch = batch.number;
        self.ddp.world().set_step(state.reducer.step());
        state.averages.clear();
        state.reducer.begin(batch.items, self.holding.load(Ordering::Acquire) > 0)
    }

    fn fault(&self, reason: String) -> Error {
        Error::Backward { rank: self.ddp.rank(), reason }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Hands the final gradient of a slot to the reducer.
    fn put<B: GradientMemory>(&mut self, slot: usize, gradient: FloatTensor<B>) -> Result<()> {
        self.slots[slot].done = true;
        let reducer = &mut self.reducer;
        let put = B::with_bytes(gradient, |dtype, bytes| {
            let s = &reducer.slots()[slot];
            if comm_dtype(dtype) != Some(s.dtype) {
                return Err(reducer.fault(format!(
                    "the gradient of {} is {dtype:?}, but the model was wrapped with {}: wrap again after changing dtypes",
                    s.path, s.dtype
                )));
            }
            reducer.put(slot, bytes)
        });
        put.map_err(|e| {
            self.reducer.fault(format!("reading the gradient of {}: {e}", self.reducer.slots()[slot].path))
        })?
    }

    /// The bytes that the gradients of a bucket look at, after a reduction.
    fn averages(&mut self, bucket: usize) -> Option<Arc<Bytes>> {
        if self.averages.len() <= bucket {
            self.averages.resize(bucket + 1, None);
        }
        if self.averages[bucket].is_none() {
            self.averages[bucket] = self.reducer.average(bucket).map(shared_bytes);
        }
        self.averages[bucket].clone()
    }

    /// Device of the backend that runs, known from the sentinel.
    fn device<B: Backend>(&self) -> Option<B::Device> {
        let sentinel = self.sentinel.as_ref()?.downcast_ref::<AutodiffTensor<B>>()?;
        Some(sentinel.primitive().device())
    }

    fn reset(&mut self) {
        self.running = false;
        self.fired = 0;
        self.gated = 0;
        self.departed = false;
        self.reads = 0;
        self.slots.iter_mut().for_each(|s| *s = SlotState::default());
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

fn scalar<B: Backend>(device: &B::Device, dtype: burn::tensor::DType) -> FloatTensor<B> {
    B::float_zeros(Shape::from([1]), device, dtype.into())
}

/// Has no elements, so that whoever counts or joins parameters counts it as nothing.
fn empty<B: Backend>(device: &B::Device, dtype: burn::tensor::DType) -> FloatTensor<B> {
    B::float_zeros(Shape::from([0]), device, dtype.into())
}
