//! Micro-batches that wait for their reduction, taken out for a checkpoint and put back.

use super::accumulation::{HeldBatches, Sum};
use super::reducer::Reducer;

impl<T> Reducer<T> {
    /// The micro-batches that are held. Between backwards.
    pub(crate) fn held(&self) -> HeldBatches {
        self.batches.held()
    }

    /// The sum that is held for a slot from a leaf on, if this rank has one. Waits for the device.
    pub(crate) fn held_sum(&self, slot: usize, leaf: usize) -> Result<Option<Sum>, String> {
        self.store.sum(slot, leaf)
    }

    /// First leaves of the sums that this rank holds for a slot.
    pub(crate) fn held_leaves(&self, slot: usize) -> Vec<usize> {
        self.store.leaves(slot)
    }

    /// Makes `held` the micro-batches that are held; their sums are [added](Self::add_held_sum).
    pub(crate) fn restore_held(&mut self, held: HeldBatches) {
        self.batches.restore(held);
    }

    /// Adds to the sum that is held for a slot from a leaf on.
    pub(crate) fn add_held_sum(&mut self, slot: usize, leaf: usize, sum: Sum) {
        self.store.add_sum(slot, leaf, sum);
    }
}
