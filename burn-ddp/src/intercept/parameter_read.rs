//! Reads of parameters in forward.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::tensor::FloatTensor;
use burn::tensor::FloatDType;

use super::hook_depth::{AutodiffTensor, scalar, untracked};
use super::tap_handle::TapHandle;
use super::wrapped_model::WrappedModel;
use crate::gradients::GradientMemory;

/// A read of a parameter. It is outstanding until this value is dropped, when its hook has run or its graph is gone.
pub(crate) struct Read {
    pub(super) model: Arc<WrappedModel>,
    pub(super) slot: usize,
}

impl Read {
    pub(super) fn new(model: Arc<WrappedModel>, slot: usize) -> Self {
        model.shared[slot].outstanding.fetch_add(1, Ordering::AcqRel);
        Read { model, slot }
    }

    /// True if no other read of the slot is outstanding.
    pub(super) fn is_last(&self) -> bool {
        self.model.shared[self.slot].outstanding.load(Ordering::Acquire) <= 1
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
        self.model.shared[self.slot].outstanding.fetch_sub(1, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for Read {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Read(slot {})", self.slot)
    }
}

impl WrappedModel {
    /// Number of reads of each slot whose hooks may still run.
    pub(super) fn outstanding(&self) -> Vec<i64> {
        self.shared.iter().map(|slot| slot.outstanding.load(Ordering::Acquire)).collect()
    }

    /// Notes the value of a parameter until the next backward ends.
    pub(super) fn note_value<B: GradientMemory>(&self, tap: &TapHandle, value: &AutodiffTensor<B>) {
        // The ranks hold different parts of a sharded parameter, and step only the first of clones.
        if tap.first
            && !self.is_sharded(tap.slot)
            && let Some(state) = self.lock().of::<B>()
        {
            state.compared[tap.slot] = Some(value.primitive().clone());
        }
    }

    /// Notes a read of a parameter. Returns the rung of the ladder on which its hook hangs.
    pub(super) fn rung<B: GradientMemory, C: CheckpointStrategy>(
        &self,
        slot: usize,
        like: &AutodiffTensor<B>,
    ) -> NodeGuard {
        match self.lock().of::<B>() {
            Some(state) => state.ladder.next::<C>(like, self.is_sharded(slot)),
            None => untracked::<B>(scalar::<B>(&like.device(), like.dtype())).node(),
        }
    }

    /// The value of a parameter in the type in which the model computes. A value that is read again before a backward
    /// ends is cast once.
    pub(super) fn read_as<B: GradientMemory>(
        &self,
        slot: usize,
        master: &AutodiffTensor<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        let cast = || B::float_cast(master.primitive().clone(), dtype);
        let mut state = self.lock();
        let Some(state) = state.of::<B>() else { return cast() };
        match &state.slots[slot].narrow {
            Some((of, narrow)) if *of == master.id() => narrow.clone(),
            _ => state.slots[slot].narrow.insert((master.id(), cast())).1.clone(),
        }
    }

    /// The average of a slot that the last backward has left, once; `None` if no rank had a gradient.
    pub(super) fn take_average<B: GradientMemory>(&self, slot: usize) -> Option<FloatTensor<B>> {
        self.lock().of::<B>()?.averages[slot].take()
    }
}
