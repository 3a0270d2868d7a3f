//! Reads of parameters in forward.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::ops::NodeGuard;

use super::hook_depth::{AutodiffTensor, scalar, untracked};
use super::wrapped_model::WrappedModel;
use crate::gradients::GradientMemory;

/// A read of a parameter. It is outstanding until this value is dropped, when its hook has run or its graph is gone.
pub(crate) struct Read {
    pub(super) model: Arc<WrappedModel>,
    pub(super) slot: usize,
}

impl Read {
    pub(super) fn new(model: Arc<WrappedModel>, slot: usize) -> Self {
        model.outstanding[slot].fetch_add(1, Ordering::AcqRel);
        Read { model, slot }
    }

    /// True if no other read of the slot is outstanding.
    pub(super) fn is_last(&self) -> bool {
        self.model.outstanding[self.slot].load(Ordering::Acquire) <= 1
    }
}

/// Burn requires that the state of a node is `Clone`, but clones none.
impl Clone for Read {
    fn clone(&self) -> Self {
        Read::new(self.model.clone(), self.slot)
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        self.model.outstanding[self.slot].fetch_sub(1, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for Read {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Read(slot {})", self.slot)
    }
}

impl WrappedModel {
    /// Notes the value of a slot until the next backward ends.
    pub(super) fn note_value<B: GradientMemory>(&self, slot: usize, value: &AutodiffTensor<B>) {
        if let Some(state) = self.lock().of::<B>() {
            // The ranks hold different parts of a sharded parameter.
            if !self.is_sharded(slot) {
                state.compared[slot] = Some(value.primitive().clone());
            }
            state.values[slot] = Some(value.clone());
        }
    }

    /// Notes a read of a parameter. Returns the rung of the ladder on which its hook hangs.
    pub(super) fn rung<B: GradientMemory, C: CheckpointStrategy>(
        &self,
        slot: usize,
        like: &AutodiffTensor<B>,
    ) -> NodeGuard {
        match self.lock().of::<B>() {
            Some(state) => {
                state.values[slot] = Some(like.clone());
                state.ladder.next::<C>(like, self.is_sharded(slot))
            }
            None => untracked::<B>(scalar::<B>(&like.device(), like.dtype())).node(),
        }
    }
}
