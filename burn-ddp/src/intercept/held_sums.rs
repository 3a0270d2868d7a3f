//! What a wrapped model holds between the micro-batches of a step, taken out for a checkpoint and put back.

use burn_ddp_comm::DType;

use super::wrapped_model::WrappedModel;
use crate::gradients::{HeldBatches, HeldSums, Sum};

impl WrappedModel {
    /// The micro-batches that this rank holds, and the sums over them.
    pub(crate) fn held(&self) -> (HeldBatches, HeldSums) {
        self.lock().held()
    }

    /// The sum that is held for a slot from a leaf on; for a sharded parameter it is that of the whole. Waits for the
    /// device.
    pub(crate) fn held_sum(&self, slot: usize, leaf: usize) -> Result<Option<Sum>, String> {
        self.lock().held_sum(slot, leaf)
    }

    /// Drops the sums that are held, as all ranks do, and makes `batches` the micro-batches that are held.
    pub(crate) fn restore_held(&self, batches: HeldBatches) {
        self.lock().restore_held(batches);
    }

    /// Adds to the sum that is held for a slot from a leaf on.
    pub(crate) fn add_held_sum(&self, slot: usize, leaf: usize, sum: Sum) {
        self.lock().add_held_sum(slot, leaf, self.is_sharded(slot), sum);
    }

    /// The weighted sum of running statistics of the `nth` dtype that is held from a leaf on.
    pub(crate) fn leaf_statistics(&self, nth: usize, leaf: usize) -> Option<Sum> {
        self.lock().statistics().and_then(|statistics| statistics.held_leaf(nth, leaf))
    }

    /// Adds to the weighted sum of running statistics of the `nth` dtype that is held from a leaf on.
    pub(crate) fn add_leaf_statistics(&self, nth: usize, leaf: usize, sum: Sum) {
        if let Some(statistics) = self.lock().statistics() {
            statistics.add_held_leaf(nth, leaf, sum);
        }
    }

    /// Type and number of elements of a sum of running statistics of the `nth` dtype; `None` if the model has none.
    pub(crate) fn like_leaf_statistics(&self, nth: usize) -> Option<(DType, usize)> {
        self.lock().statistics().and_then(|statistics| statistics.like_leaf(nth))
    }
}
