//! One wrapped model on one rank: what its taps share.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Device, Shape, TensorData, read_sync};

use super::ops::{AutodiffTensor, DdpBackend, new_leaf, rung_above, untracked};
use crate::convert::{burn_dtype, comm_dtype};
use crate::ddp::Ddp;
use crate::reducer::Reducer;
use crate::{Error, Result};

/// Depth that each read of a parameter adds to the ladder: about what a layer adds to the graph.
const RUNGS_PER_READ: usize = 4;
/// Rungs alive are swept by every backward of the process, so there is an end.
const MAX_RUNGS: usize = 4096;

type Erased = Box<dyn Any + Send>;

thread_local! {
    /// `Ddp::backward` runs on this thread and wants the first error back instead of a panic, whichever model it is about.
    static CAPTURED: RefCell<Option<Option<Error>>> = const { RefCell::new(None) };
}

/// Shared by all taps of a wrapped model and by the autodiff nodes that its reads leave in graphs.
pub(crate) struct Tapped {
    pub(crate) ddp: Ddp,
    /// Autodiff device of the model, for stand-in leaves.
    pub(crate) device: Device,
    /// Reads of each slot whose hook may still fire. Written by forward (up) and by dropped hook states (down).
    outstanding: Vec<AtomicUsize>,
    state: Mutex<State>,
    /// Leaves under which averages of parameters that this rank did not use are delivered, one per slot, made when first
    /// needed and kept: gradients of several backwards may wait side by side.
    stand_ins: Mutex<BTreeMap<usize, Erased>>,
    /// Slots with such an average, and whether `Tap::visit` has yielded it. Written by the last gate, read by `Tap::visit`,
    /// cleared when a yielded one is mapped: the optimizer has stepped.
    pending: Mutex<BTreeMap<usize, bool>>,
    has_pending: AtomicBool,
    /// Backwards that reached this model and ended, well or not.
    ended: AtomicU64,
    /// Depth of nested `no_sync`.
    holding: AtomicUsize,
}

struct State {
    reducer: Reducer,
    accumulation: usize,
    /// A tensor whose entry in a `Gradients` says that the running backward is the one we know.
    sentinel: Option<Erased>,
    /// Untracked tensors of growing depth.
    ladder: Option<Erased>,
    /// Reads since the last backward: decides the rung, and nothing else may.
    reads: usize,
    running: bool,
    fired: usize,
    gated: usize,
    slots: Vec<SlotState>,
    error: Option<Error>,
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
    pub(crate) fn new(ddp: Ddp, device: Device, reducer: Reducer, accumulation: usize) -> Self {
        let slots = reducer.slots().len();
        Tapped {
            ddp,
            device,
            outstanding: (0..slots).map(|_| AtomicUsize::new(0)).collect(),
            state: Mutex::new(State {
                reducer,
                accumulation,
                sentinel: None,
                ladder: None,
                reads: 0,
                running: false,
                fired: 0,
                gated: 0,
                slots: (0..slots).map(|_| SlotState::default()).collect(),
                error: None,
                last_batch: 0,
                epoch: None,
            }),
            stand_ins: Mutex::default(),
            pending: Mutex::default(),
            has_pending: AtomicBool::new(false),
            ended: AtomicU64::new(0),
            holding: AtomicUsize::new(0),
        }
    }

    /// The ladder's tensor for the next read; `like` says which device the first rung is made on.
    pub(crate) fn rung<B: Backend, C: CheckpointStrategy>(&self, like: &AutodiffTensor<B>) -> AutodiffTensor<B> {
        let mut state = self.lock();
        let depth = (state.reads * RUNGS_PER_READ).min(MAX_RUNGS);
        state.reads += 1;
        let mut ladder = match state.ladder.take().map(|l| l.downcast::<Vec<AutodiffTensor<B>>>()) {
            Some(Ok(ladder)) => ladder,
            // The first read, or the model moved to another backend or checkpointing strategy.
            _ => Box::new(vec![untracked::<B>(scalar::<B>(&like.device(), like.dtype()))]),
        };
        while ladder.len() <= depth {
            let next = rung_above::<B, C>(ladder.last().expect("a ladder has a first rung"));
            ladder.push(next);
        }
        let rung = ladder[depth].clone();
        state.ladder = Some(ladder);
        rung
    }

    /// The gradient of one read has arrived.
    pub(crate) fn hook<B: DdpBackend>(
        &self,
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
    pub(crate) fn gate<B: DdpBackend>(&self, parent_is_leaf: bool, grads: &mut Gradients) {
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
        if result.is_err() {
            state.reducer.discard();
        }
        drop(guard);
        self.ended.fetch_add(1, Ordering::AcqRel);
        if let Err(e) = result {
            self.fail(e);
        }
    }

    fn deliver<B: DdpBackend>(&self, state: &mut State, grads: &mut Gradients) -> Result<()> {
        for slot in 0..state.slots.len() {
            if let Some(Ok(sum)) = state.slots[slot].partial.take().map(|p| p.downcast::<FloatTensor<B>>()) {
                state.put::<B>(slot, *sum)?;
            }
        }
        if !state.reducer.finish()? {
            return Ok(());
        }
        let device = state.device::<B>().ok_or_else(|| self.fault("the backend changed during backward".into()))?;
        let mut unused = Vec::new();
        for slot in 0..state.slots.len() {
            let Some(bytes) = state.reducer.gradient(slot) else { continue };
            let s = &state.reducer.slots()[slot];
            let data = TensorData::from_bytes_vec(bytes.to_vec(), Shape::from(s.dims.clone()), burn_dtype(s.dtype));
            let average = B::float_from_data(data, &device);
            match state.slots[slot].leaf {
                Some(leaf) => grads.register::<B>(leaf, average),
                None => {
                    let mut stand_ins = self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner);
                    let stand_in = stand_ins
                        .entry(slot)
                        .or_insert_with(|| Box::new(new_leaf::<B>(scalar::<B>(&device, average.dtype()))));
                    let stand_in = stand_in
                        .downcast_ref::<AutodiffTensor<B>>()
                        .ok_or_else(|| self.fault("the model changed its backend: wrap it again".into()))?;
                    grads.register::<B>(stand_in.id(), average);
                    unused.push(slot);
                }
            }
        }
        state.reducer.end_step()?;
        if !unused.is_empty() {
            self.lock_pending().extend(unused.into_iter().map(|slot| (slot, false)));
            self.has_pending.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// The stand-in leaf of a slot.
    pub(crate) fn delivered<B: Backend>(&self, slot: usize) -> Option<AutodiffTensor<B>> {
        let stand_ins = self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner);
        stand_ins.get(&slot)?.downcast_ref::<AutodiffTensor<B>>().cloned()
    }

    /// Whether an average waits under the slot's stand-in; notes that it is handed out.
    pub(crate) fn yield_pending(&self, slot: usize) -> bool {
        self.has_pending.load(Ordering::Acquire)
            && self.lock_pending().get_mut(&slot).map(|yielded| *yielded = true).is_some()
    }

    /// A parameter was mapped: if its average was handed out, the optimizer has it. What nobody has taken yet stays, since
    /// the map may be that of a copy.
    pub(crate) fn clear_pending(&self, slot: usize) {
        if self.has_pending.load(Ordering::Acquire) {
            let mut pending = self.lock_pending();
            if pending.get(&slot) == Some(&true) {
                pending.remove(&slot);
            }
            self.has_pending.store(!pending.is_empty(), Ordering::Release);
        }
    }

    fn lock_pending(&self) -> MutexGuard<'_, BTreeMap<usize, bool>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `backward` with errors returned instead of panics, and tells whether the backward reached this model.
    pub(crate) fn capture<T>(&self, backward: impl FnOnce() -> T) -> (T, Result<bool>) {
        struct Restore(Option<Option<Error>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CAPTURED.set(self.0.take());
            }
        }
        let restore = Restore(CAPTURED.replace(Some(None)));
        let before = self.ended.load(Ordering::Acquire);
        let out = backward();
        let captured = CAPTURED.take().flatten();
        drop(restore);
        let result = match captured {
            Some(e) => Err(e),
            None => Ok(self.ended.load(Ordering::Acquire) > before),
        };
        (out, result)
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
    fn enter<B: DdpBackend>(&self, state: &mut State, like: &FloatTensor<B>, grads: &mut Gradients) {
        let sentinel = match state.sentinel.take().map(|s| s.downcast::<AutodiffTensor<B>>()) {
            Some(Ok(sentinel)) => sentinel,
            _ => Box::new(untracked::<B>(scalar::<B>(&like.device(), like.dtype()))),
        };
        let known = state.running && grads.get::<B>(&sentinel).is_some();
        if !known {
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

    fn begin(&self, state: &mut State) -> Result<()> {
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
        state.reducer.begin(batch.items, self.holding.load(Ordering::Acquire) > 0)
    }

    fn fail(&self, error: Error) {
        // What only this rank knows ends the others' waits, with the reason.
        if !matches!(error, Error::Comm(_)) {
            self.ddp.world().fail(error.to_string());
        }
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

    fn fault(&self, reason: String) -> Error {
        Error::Backward { rank: self.ddp.rank(), reason }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Hands the final gradient of a slot to the reducer.
    fn put<B: Backend>(&mut self, slot: usize, gradient: FloatTensor<B>) -> Result<()> {
        self.slots[slot].done = true;
        let s = &self.reducer.slots()[slot];
        let (path, expected) = (s.path.clone(), s.dtype);
        let data = read_sync(B::float_into_data(gradient))
            .map_err(|e| self.reducer.fault(format!("reading the gradient of {path}: {e:?}")))?;
        if comm_dtype(data.dtype()) != Some(expected) {
            return Err(self.reducer.fault(format!("the gradient of {path} is {:?}, but the model was wrapped with {expected}: wrap again after changing dtypes", data.dtype())));
        }
        self.reducer.put(slot, data.as_bytes())
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
        self.reads = 0;
        self.slots.iter_mut().for_each(|s| *s = SlotState::default());
    }
}

fn scalar<B: Backend>(device: &B::Device, dtype: burn::tensor::DType) -> FloatTensor<B> {
    B::float_zeros(Shape::from([1]), device, dtype.into())
}
