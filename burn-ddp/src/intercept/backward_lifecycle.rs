//! Beginning of a backward at its first hook, and submission of what is left at its first gate.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use burn::backend::TensorMetadata;
use burn::backend::autodiff::grads::Gradients;

use super::backward_failure::{note_captured, tell_peers};
use super::model_state::State;
use super::short_step_warning::Finding;
use super::wrapped_model::WrappedModel;
use crate::gradients::{Boundary, GradientMemory, Piggyback};
use crate::{Error, Result};

thread_local! {
    /// The wrapped models that the backward on this thread has reached, until the first gate of any of them.
    static ENTERED: RefCell<Vec<Weak<WrappedModel>>> = const { RefCell::new(Vec::new()) };
}

impl WrappedModel {
    /// Begins a new backward unless `grads` carries the sentinel of the running one.
    pub(super) fn enter<B: GradientMemory>(self: &Arc<Self>, state: &mut State<B>, grads: &mut Gradients) {
        if is_running(state, grads) {
            return;
        }
        ENTERED.with_borrow_mut(|entered| entered.push(Arc::downgrade(self)));
        grads.register::<B>(state.sentinel.id(), state.sentinel.primitive().clone());
        let abandoned = std::mem::take(&mut state.running);
        state.reset();
        if abandoned {
            state.sharded.clear();
        }
        let begun = if abandoned { state.reducer.abandon() } else { Ok(()) }.and_then(|()| self.begin(state));
        self.note_outcome(state, begun);
        state.running = true;
    }

    /// Notes an error of the running backward, which its last gate returns. The other ranks get it at once, as they may
    /// wait in a collective that this rank does not enter any more.
    pub(super) fn note_outcome<B: GradientMemory>(&self, state: &mut State<B>, outcome: Result<()>) {
        if let (None, Err(error)) = (&state.error, outcome) {
            // Before `tell_peers` ends the world: the caller must get this error, not one that follows from that end.
            note_captured(&error);
            tell_peers(&self.ddp, &error);
            state.error = Some(error);
        }
    }

    fn begin<B: GradientMemory>(&self, state: &mut State<B>) -> Result<()> {
        self.lookups.forget_reads();
        self.refuse_stale()?;
        self.warn_missed(state);
        self.measure_movements(state)?;
        self.ddp.world().set_step(state.reducer.step());
        let advice = "step where `GradientsParams::is_empty` is false";
        match self.short_steps.begin() {
            Finding::UnusedTwice if self.ddp.is_main() => tracing::warn!(
                target: "burn_ddp::accumulation",
                "the last micro-batches of two epochs were averaged, and no optimizer took the average: {advice}, \
                unless all ranks skip these steps"
            ),
            Finding::Nothing | Finding::UnusedTwice => {}
            Finding::Miscounted => {
                return Err(self.fault(format!(
                    "the last micro-batches of an epoch were averaged, no optimizer took the average, and then the \
                    model was stepped without one: {advice}, not after every {} backwards; or end the epoch before \
                    them, with `epoch.take(n)` on every rank",
                    state.accumulation
                )));
            }
        }
        if self.reducing_held.load(Ordering::Acquire) {
            self.short_steps.note_kind(false, false);
            return state.reducer.begin(0.0, Boundary::Now).map(drop);
        }
        let batch = self.ddp.state().begin_backward().map_err(|e| match e {
            Error::Invalid { reason, .. } => self.fault(reason),
            other => other,
        })?;
        // A weight that the user has set may be that of several backwards.
        if state.accumulation > 1 && batch.step.is_some() && batch.number == state.last_batch {
            return Err(self.fault(
                "a second backward reached the wrapped model for one batch; with accumulation each micro-batch has \
                one backward: let passes that do not train this model go through `model.clone().no_grad()`"
                    .into(),
            ));
        }
        let epoch = batch.step.map(|s| (s.track, s.at.epoch));
        if state.reducer.holds_gradients() && epoch.is_some() && state.epoch.is_some_and(|held| Some(held) != epoch) {
            return Err(self.fault(format!(
                "an epoch was over while gradients of micro-batches were held (accumulation {}): it was left early, or \
                its last backward ran in `no_sync` or after `set_batch_items`; reduce them at its end with \
                `ddp.sync_gradients(&model)`, or drop them with `ddp.discard_accumulated(&model)`",
                state.accumulation
            )));
        }
        state.epoch = epoch;
        state.last_batch = batch.number;
        let boundary = match self.holding.load(Ordering::Acquire) {
            0 if batch.last => Boundary::Now,
            0 => Boundary::Counted,
            _ => Boundary::Later,
        };
        let short = state.reducer.begin(batch.items, boundary)?;
        // A loop that has never stepped the model only looks at gradients.
        let short = short && self.mapped.load(Ordering::Acquire);
        self.short_steps.note_kind(!state.reducer.micro_batch().reducing, short);
        Ok(())
    }

    /// Submits the gradients that the running backward has not submitted. All hooks have run, so sums that wait for
    /// further reads are final.
    pub(super) fn submit_rest<B: GradientMemory>(&self, state: &mut State<B>) -> Result<()> {
        if std::mem::replace(&mut state.submitted, true) {
            return Ok(());
        }
        let micro_batch = state.reducer.micro_batch();
        let shards = self.shards().filter(|_| micro_batch.reducing);
        if let Some(shards) = shards {
            state.sharded.agree(shards, &self.outstanding, micro_batch)?;
        }
        for slot in 0..state.slots.len() {
            if let Some(sum) = state.slots[slot].partial.take() {
                self.put(state, slot, sum)?;
            } else if let Some(shards) = shards.filter(|_| !state.slots[slot].done && state.sharded.must_reduce(slot)) {
                let device = state.sentinel.device();
                state.sharded.reduce(shards, slot, None, micro_batch.divisor, &device)?;
            }
        }
        state.reducer.receive_late()?;
        let mut piggyback = Piggyback::default();
        if state.reducer.micro_batch().reducing {
            piggyback = self.statistics(state)?;
            if state.reducer.compares_replicas() {
                self.compare(state, &mut piggyback)?;
            }
        }
        state.reducer.submit_rest(piggyback)
    }

    /// The running statistics as a payload behind the buckets.
    pub(super) fn statistics<B: GradientMemory>(&self, state: &mut State<B>) -> Result<Piggyback> {
        let mut piggyback = Piggyback::default();
        if let Some(statistics) = &mut state.statistics {
            self.refuse_retrained()?;
            statistics.send(&mut piggyback)?;
        }
        Ok(piggyback)
    }
}

/// Submits the buckets of every model that the backward of `grads` has reached, in an order that is the same on all
/// ranks. The first gate of a backward does so before any waits: gates may come in another order on other ranks.
pub(super) fn submit_all<B: GradientMemory>(grads: &Gradients) {
    let mut entered: Vec<_> = ENTERED.take().iter().filter_map(Weak::upgrade).collect();
    entered.sort_by_key(|model| model.id);
    for model in entered {
        let mut guard = model.lock();
        let Some(state) = guard.of::<B>() else { continue };
        if is_running(state, grads) && state.error.is_none() {
            let submitted = model.submit_rest(state);
            model.note_outcome(state, submitted);
        }
    }
}

/// True if `grads` belongs to the backward that the model is in.
fn is_running<B: GradientMemory>(state: &State<B>, grads: &Gradients) -> bool {
    state.running && grads.get::<B>(&state.sentinel).is_some()
}
