//! Hooks: each takes the gradient of one read of a parameter in backward, and gives the sum of a slot to the reducer.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;

use super::backward_failure::fail;
use super::model_state::State;
use super::parameter_read::Read;
use super::wrapped_model::WrappedModel;
use crate::Result;
use crate::gradients::GradientMemory;

impl WrappedModel {
    /// Takes the gradient of one read, which had this `value` if it is to be compared. `apart` is true if clones of its
    /// parameter may be on leaves of their own.
    pub(super) fn hook<B: GradientMemory>(
        self: Arc<Self>,
        read: Read,
        (leaf, apart, mixed): (NodeId, bool, bool),
        value: Option<FloatTensor<B>>,
        gradient: FloatTensor<B>,
        grads: &mut Gradients,
    ) {
        let mut guard = self.lock();
        let Some(state) = guard.of::<B>() else {
            drop(guard);
            return fail(&self.ddp, self.fault("the model changed its backend: wrap it again".into()));
        };
        self.enter::<B>(state, grads);
        state.fired += 1;
        state.slots[read.slot].apart = apart;
        if value.is_some() {
            state.compared[read.slot] = value;
        }
        if state.error.is_none() {
            let taken = self.take(state, &read, (leaf, mixed), gradient);
            self.note_outcome(state, taken);
        }
        drop(read);
    }

    /// Adds the gradient of a read to those of earlier reads of its slot. The last one's sum goes to the reducer.
    fn take<B: GradientMemory>(
        &self,
        state: &mut State<B>,
        read: &Read,
        (leaf, mixed): (NodeId, bool),
        gradient: FloatTensor<B>,
    ) -> Result<()> {
        let slot = &mut state.slots[read.slot];
        if slot.leaf.is_some_and(|known| known != leaf) || slot.done {
            let path = &self.slots[read.slot].path;
            return Err(self.fault(format!(
                "two copies of the wrapped model met in one backward, or {path} was read while backward ran: wrap the \
                copy itself (a target network, an EMA) or detach it"
            )));
        }
        if self.is_divided(read.slot) {
            self.refuse_mixed_elements(read.slot, leaf, mixed)?;
        }
        slot.leaf = Some(leaf);
        let sum = match slot.partial.take() {
            Some(earlier) => B::float_add(gradient, earlier),
            None => gradient,
        };
        let (number, micro_batch) = (read.slot, state.reducer.micro_batch());
        let is_last = match self.shards().filter(|_| self.is_sharded(number) && micro_batch.reducing) {
            None => read.is_last(),
            Some(shards) => {
                state.sharded.agree(shards, &self.outstanding, micro_batch)?;
                state.sharded.is_last_hook(number)
            }
        };
        if !is_last {
            state.slots[number].partial = Some(sum);
            return Ok(());
        }
        self.put(state, number, sum)
    }

    /// Gives the final gradient of a slot to the reducer, or reduces it to this rank's part.
    pub(super) fn put<B: GradientMemory>(
        &self,
        state: &mut State<B>,
        slot: usize,
        gradient: FloatTensor<B>,
    ) -> Result<()> {
        state.slots[slot].done = true;
        if self.compares() && self.ddp.state().batch_weight.items() > 0.0 {
            let read = state.same_gradients.add::<B>(slot, &gradient);
            read.map_err(|e| self.fault(format!("reading the gradient of {}: {e}", self.slots[slot].path)))?;
        }
        match self.shards().filter(|_| self.is_sharded(slot)) {
            None => state.reducer.put(slot, gradient),
            Some(shards) => {
                let micro_batch = state.reducer.micro_batch();
                state.sharded.put(shards, slot, gradient, micro_batch)
            }
        }
    }
}
