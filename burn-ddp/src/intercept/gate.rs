//! Gates: the last one of a backward waits for the averages and registers them on the leaves.

use std::sync::atomic::Ordering;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::grads::Gradients;

use super::backward_failure::{fail, is_captured};
use super::backward_lifecycle::submit_all;
use super::model_state::State;
use super::tap_and_replica_checks::UNREAD;
use super::tied_clones::Substitute;
use super::unused_parameter_averages::Delivery;
use super::wrapped_model::WrappedModel;
use crate::Result;
use crate::gradients::{GradientMemory, Outcome};

impl WrappedModel {
    /// Counts a gate. The last one of a backward waits for the averages and registers them.
    pub(super) fn gate<B: GradientMemory>(&self, parent_is_leaf: bool, grads: &mut Gradients) {
        submit_all::<B>(grads);
        let mut guard = self.lock();
        // The hooks of a model that changed its backend have failed.
        let Some(state) = guard.of::<B>() else { return };
        if !parent_is_leaf {
            let fault = "a parameter of the wrapped model is not a leaf of the graph: move models with `fork`, not \
                `to_device`";
            self.note_outcome(state, Err(self.fault(fault.into())));
        }
        state.gated += 1;
        if state.gated < state.fired {
            return;
        }
        let result = match state.error.take() {
            Some(e) => Err(e),
            None => self.deliver(state, grads),
        };
        state.reset();
        if let Some(shards) = self.shards() {
            shards.restart();
        }
        state.sharded.end_backward();
        state.values.iter_mut().for_each(|value| *value = None);
        state.compared.iter_mut().for_each(|value| *value = None);
        if result.is_err() {
            state.reducer.discard();
            state.sharded.clear();
        }
        drop(guard);
        self.ended.fetch_add(1, Ordering::AcqRel);
        if let Err(e) = result {
            fail(&self.ddp, e);
        }
    }

    /// Waits for the averages and registers them.
    fn deliver<B: GradientMemory>(&self, state: &mut State<B>, grads: &mut Gradients) -> Result<()> {
        // `submit_all` has done it, unless another backward on this thread emptied `ENTERED` in between.
        self.submit_rest(state)?;
        state.delivered.digests.fill(None);
        let closely = state.reducer.step() <= 2 || state.reducer.compares_replicas();
        state.delivered.digested = closely && is_captured();
        self.refuse_lost_taps()?;
        self.refuse_past_tap(state, grads)?;
        let step = state.reducer.step();
        let Some(results) = state.reducer.finish()? else { return Ok(()) };
        self.refuse_differences(state, step, &results)?;
        if let Some(statistics) = &mut state.statistics {
            statistics.receive(&results);
        }
        let mut unused = Vec::new();
        let mut present = vec![false; state.slots.len()];
        for (slot, present) in present.iter_mut().enumerate() {
            let average = match state.sharded.take(slot) {
                Some(part) => part,
                None => match state.reducer.outcome(slot) {
                    Outcome::Whole(average) => average,
                    Outcome::Absent => continue,
                },
            };
            *present = true;
            let leaf = match state.slots[slot].leaf {
                Some(leaf) => {
                    let digest = if state.delivered.digested { self.digest::<B>(slot, &average)? } else { UNREAD };
                    state.delivered.digests[slot] = Some(digest);
                    leaf
                }
                None => match self.substitute(state, slot) {
                    Substitute::Leaf(leaf) => leaf,
                    Substitute::StandIns(keys) => {
                        unused.push(slot);
                        for key in keys {
                            let leaf = state.stand_ins.leaf_of(key, &average);
                            grads.register::<B>(leaf, average.clone());
                        }
                        continue;
                    }
                },
            };
            grads.register::<B>(leaf, average);
        }
        self.warn_absent(state, &present);
        self.lookups.delivered();
        state.reducer.end_step()?;
        self.comparing.store(state.reducer.compares_replicas(), Ordering::Release);
        // Also in a world of 1: an earlier micro-batch may have used a parameter that this backward has not.
        let waits = !unused.is_empty();
        let ended = self.ended.load(Ordering::Acquire);
        let delivery = Delivery::new(state.reducer.step(), ended, present, unused);
        state.stand_ins.deliver(delivery, &state.sentinel.device(), grads);
        self.averages_wait.fetch_or(waits, Ordering::AcqRel);
        Ok(())
    }
}
