//! What happens to a wrapped model in forward and in one backward: reads, hooks, gates, and the averages that come out.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Bytes, Shape, read_sync};

use super::nodes::{AutodiffTensor, DdpBackend, new_leaf, rung_above, untracked};
use super::reparameterization::UNREAD;
use super::wrapped_model::{CAPTURED, ENTERED, Erased, Read, SlotState, State, WrappedModel, fail, lost_tap, past_tap};
use crate::model::digest;
use crate::model::running_stats;
use crate::convert::{burn_dtype, comm_dtype};
use crate::gradients::{GradientMemory, Kept, Piggyback, Reducer, Unread, shared_bytes};
use crate::{Error, Result};

/// Depth that each read of a parameter adds to the ladder: about what a layer adds to the graph.
const RUNGS_PER_READ: usize = 4;
/// Rungs alive are swept by every backward of the process, so only those are kept on which hooks hang, and there is an end.
const MAX_LADDER: usize = 1024;

/// See [`WrappedModel::tied`].
enum Tied {
    /// On this leaf.
    Leaf(NodeId),
    /// Under the stand-in of this slot.
    StandIn(usize),
}

impl WrappedModel {
    /// A parameter of the model is seen for the first time: its gradients are to stay where it is, if they are to stay.
    pub(crate) fn keep_on<B: GradientMemory>(&self, like: &AutodiffTensor<B>) {
        let mut state = self.lock();
        if state.reducer.is_on_device() && !state.reducer.has_keeper() {
            let kept = Kept::<B>::new(like.device(), state.reducer.slots());
            state.reducer.keep_by(Box::new(kept));
        }
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
        // Gates run after all hooks. If several wrapped models meet in this backward, all of them submit_rest before any waits:
        // their gates may come in another order on other ranks.
        let mut entered: Vec<_> = ENTERED.take().iter().filter_map(Weak::upgrade).collect();
        entered.sort_by_key(|tapped| tapped.id);
        for entered in entered {
            let mut guard = entered.lock();
            let state = &mut *guard;
            if entered.is_running::<B>(state, grads) && state.error.is_none() {
                state.error = entered.submit_rest::<B>(state).err();
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
    fn submit_rest<B: DdpBackend + GradientMemory>(&self, state: &mut State) -> Result<()> {
        if std::mem::replace(&mut state.submitted, true) {
            return Ok(());
        }
        for slot in 0..state.slots.len() {
            if let Some(Ok(sum)) = state.slots[slot].partial.take().map(|p| p.downcast::<FloatTensor<B>>()) {
                state.put::<B>(slot, *sum)?;
            }
        }
        state.put_unread::<B>()?;
        let piggyback = self.piggyback::<B>(state)?;
        state.reducer.submit_rest(piggyback)
    }

    fn deliver<B: DdpBackend + GradientMemory>(&self, state: &mut State, grads: &mut Gradients) -> Result<()> {
        self.submit_rest::<B>(state)?;
        state.delivered.fill(None);
        state.digested = state.reducer.step() <= 2 || state.reducer.compares_replicas();
        state.digested &= CAPTURED.with_borrow(Option::is_some);
        self.refuse_lost_taps(state)?;
        self.refuse_bypass::<B>(state, grads)?;
        let step = state.reducer.step();
        let Some(settled) = state.reducer.finish()? else { return Ok(()) };
        if !settled.digests.is_empty() {
            let paths: Vec<&str> = state.reducer.slots().iter().map(|s| s.path.as_str()).collect();
            digest::compare(&paths, &settled.digests, Some(step))?;
        }
        if let Some(shared) = &mut state.buffers {
            let sent = std::mem::take(&mut shared.sent);
            shared.buffers.write(running_stats::unpack(&sent, &settled.buffers));
        }
        let device = state.device::<B>().ok_or_else(|| self.fault("the backend changed during backward".into()))?;
        let mut unused = Vec::new();
        for slot in 0..state.slots.len() {
            let Some(average) = state.average::<B>(slot, &device)? else { continue };
            match state.slots[slot].leaf {
                Some(leaf) => {
                    let digest = if state.digested { digest::<B>(&state.reducer, slot, &average)? } else { UNREAD };
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

    /// What travels with this step's gradients.
    fn piggyback<B: Backend>(&self, state: &mut State) -> Result<Piggyback> {
        if !state.reducer.is_reducing() {
            return Ok(Piggyback::default());
        }
        let mut piggyback = self.statistics(state)?;
        if state.reducer.compares_replicas() {
            let mut digests = vec![0; state.values.len()];
            for (digest, value) in digests.iter_mut().zip(&mut state.values) {
                if let Some(Ok(value)) = value.take().map(|value| value.downcast::<AutodiffTensor<B>>()) {
                    let data = read_sync(B::float_into_data(value.primitive().clone()))
                        .map_err(|e| self.fault(format!("reading parameters failed: {e:?}")))?;
                    *digest = digest::digest(data.as_bytes());
                }
            }
            piggyback.digests = Some(digests);
        }
        Ok(piggyback)
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
        let batch = self.ddp.state().begin_backward().map_err(|e| match e {
            Error::Invalid { reason, .. } => self.fault(reason),
            other => other,
        })?;
        if state.accumulation > 1 && batch.number > 0 && batch.number == state.last_batch {
            return Err(self.fault(
                "a second backward reached the wrapped model for one batch; with accumulation each micro-batch has one backward".into(),
            ));
        }
        let epoch = batch.step.map(|s| (s.track, s.at.epoch));
        if state.reducer.holds_gradients() && epoch.is_some() && state.epoch.is_some_and(|held| Some(held) != epoch) {
            return Err(self.fault(format!(
                "an epoch ended while gradients of micro-batches were held: the number of steps does not divide by the accumulation of {}; \
                 call `ddp.discard_accumulated(&model)` at the end of the epoch",
                state.accumulation
            )));
        }
        state.epoch = epoch;
        state.last_batch = batch.number;
        self.ddp.world().set_step(state.reducer.step());
        state.averages.clear();
        state.reducer.begin(batch.items, self.holding.load(Ordering::Acquire) > 0)
    }
}

impl State {
    /// Hands the final gradient of a slot to the reducer, now or when it is off its device.
    fn put<B: GradientMemory>(&mut self, slot: usize, gradient: FloatTensor<B>) -> Result<()> {
        self.slots[slot].done = true;
        if self.reducer.is_on_device() {
            return self.reducer.put_on_device(slot, |reducer, take| {
                let kept = match reducer.keeper::<Kept<B>>() {
                    Some(kept) => kept.put(slot, gradient, take),
                    None => Err("the model changed its backend: wrap it again".to_owned()),
                };
                let path = &reducer.slots()[slot].path;
                kept.map_err(|e| reducer.fault(format!("the gradient of {path}: {e}")))
            });
        }
        if B::ASYNCHRONOUS {
            let enough_bytes = self.reducer.bucket_bytes();
            self.unread.add::<B>(slot, gradient, enough_bytes);
            return Ok(());
        }
        let reducer = &mut self.reducer;
        match B::with_bytes(gradient, |dtype, bytes| put(reducer, slot, dtype, bytes)) {
            Ok(put) => put,
            Err(e) => {
                let path = &self.reducer.slots()[slot].path;
                Err(self.reducer.fault(format!("reading the gradient of {path}: {e}")))
            }
        }
    }

    /// The last gradients were put: those on an asynchronous device follow as they become ready.
    fn put_unread<B: GradientMemory>(&mut self) -> Result<()> {
        self.unread.begin::<B>();
        let (reducer, rank) = (&mut self.reducer, self.rank);
        let fault = |e| Error::Backward { rank, reason: format!("reading gradients from the device: {e}") };
        self.unread.finish(fault, |(slot, dtype, bytes)| put(reducer, slot, dtype, &bytes))
    }

    /// The average of a slot, after a reduction; `None` if no rank had a gradient for it.
    fn average<B: GradientMemory>(&mut self, slot: usize, device: &B::Device) -> Result<Option<FloatTensor<B>>> {
        let Some((bucket, range)) = self.reducer.gradient(slot) else { return Ok(None) };
        if self.reducer.is_on_device() {
            let average = self.reducer.keeper::<Kept<B>>().and_then(|kept| kept.average(slot));
            let path = &self.reducer.slots()[slot].path;
            let lost = || self.reducer.fault(format!("the average of {path} is not where its gradient was"));
            return average.ok_or_else(lost).map(Some);
        }
        let Some(bytes) = self.averages(bucket) else { return Ok(None) };
        let s = &self.reducer.slots()[slot];
        Ok(Some(B::from_shared(&bytes, range, Shape::from(s.dims.clone()), burn_dtype(s.dtype), device)))
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

    pub(super) fn reset(&mut self) {
        self.running = false;
        self.fired = 0;
        self.gated = 0;
        self.submitted = false;
        self.reads = 0;
        self.unread = Unread::default();
        self.slots.iter_mut().for_each(|s| *s = SlotState::default());
    }
}

/// Of the elements of a slot's average, wherever they are.
fn digest<B: GradientMemory>(reducer: &Reducer, slot: usize, average: &FloatTensor<B>) -> Result<i64> {
    B::with_bytes(average.clone(), |_, bytes| digest::digest(bytes)).map_err(|e| {
        let path = &reducer.slots()[slot].path;
        reducer.fault(format!("reading the average of {path}: {e}"))
    })
}

/// Hands a gradient to the reducer.
fn put(reducer: &mut Reducer, slot: usize, dtype: burn::tensor::DType, bytes: &[u8]) -> Result<()> {
    let s = &reducer.slots()[slot];
    if comm_dtype(dtype) != Some(s.dtype) {
        return Err(reducer.fault(format!(
            "the gradient of {} is {dtype:?}, but the model was wrapped with {}: wrap again after changing dtypes",
            s.path, s.dtype
        )));
    }
    reducer.put(slot, bytes)
}

fn scalar<B: Backend>(device: &B::Device, dtype: burn::tensor::DType) -> FloatTensor<B> {
    B::float_zeros(Shape::from([1]), device, dtype.into())
}

/// Has no elements, so that whoever counts or joins parameters counts it as nothing.
fn empty<B: Backend>(device: &B::Device, dtype: burn::tensor::DType) -> FloatTensor<B> {
    B::float_zeros(Shape::from([0]), device, dtype.into())
}
