//! Reads of parameters in forward, and the hooks that take their gradients in backward.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;

use super::failure::fail;
use super::ladder::{AutodiffTensor, scalar, untracked};
use super::model_state::State;
use super::read::Read;
use super::wrapped_model::WrappedModel;
use crate::Result;
use crate::gradients::GradientMemory;

impl WrappedModel {
    /// Remembers the leaf of a slot until the end of the next backward.
    pub(super) fn note_leaf<B: GradientMemory>(&self, slot: usize, leaf: &AutodiffTensor<B>) {
        if let Some(state) = self.lock().of::<B>() {
            state.values[slot] = Some(leaf.clone());
        }
    }

    /// The rung of the ladder for a read of a parameter.
    pub(super) fn rung<B: GradientMemory, C: CheckpointStrategy>(
        &self,
        slot: usize,
        like: &AutodiffTensor<B>,
    ) -> AutodiffTensor<B> {
        match self.lock().of::<B>() {
            Some(state) => {
                state.values[slot] = Some(like.clone());
                state.ladder.next::<C>(like)
            }
            None => untracked::<B>(scalar::<B>(&like.device(), like.dtype())),
        }
    }

    /// The stand-in leaf of a slot, if it has been needed.
    pub(super) fn stand_in<B: GradientMemory>(&self, slot: usize) -> Option<AutodiffTensor<B>> {
        self.lock().of::<B>()?.stand_ins.get(slot)
    }

    /// Takes the gradient of one read.
    pub(super) fn hook<B: GradientMemory>(
        self: Arc<Self>,
        read: Arc<Read>,
        leaf: NodeId,
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
        if state.error.is_none()
            && let Err(error) = self.take(state, &read, leaf, gradient)
        {
            state.error = Some(error);
        }
        drop(read);
    }

    /// Adds the gradient of a read to those of earlier reads of its slot. The last one's sum goes to the reducer.
    fn take<B: GradientMemory>(
        &self,
        state: &mut State<B>,
        read: &Read,
        leaf: NodeId,
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
        slot.leaf = Some(leaf);
        let sum = match slot.partial.take() {
            Some(earlier) => B::float_add(gradient, earlier),
            None => gradient,
        };
        if !read.is_last() {
            slot.partial = Some(sum);
            return Ok(());
        }
        slot.done = true;
        state.reducer.put(read.slot, sum)
    }
}
