//! Micro-batches that wait for their reduction, taken out for a checkpoint and put back.

use super::accumulation::{HeldBatches, Sum};
use super::reducer::Reducer;

impl<T> Reducer<T> {
    /// The micro-batches that are held. Between backwards.
    pub(crate) fn held(&self) -> HeldBatches {
        self.batches.held()
    }

    /// The sum that is held for a slot, if this rank has one. Waits for the device.
    pub(crate) fn held_sum(&self, slot: usize) -> Result<Option<Sum>, String> {
        self.store.sum(slot)
    }

    /// True if this rank holds a sum for a slot.
    pub(crate) fn holds_sum(&self, slot: usize) -> bool {
        self.store.holds(slot)
    }

    /// Makes `held` the micro-batches that are held; their sums are [added](Self::add_held_sum).
    pub(crate) fn restore_held(&mut self, held: HeldBatches) {
        self.batches.restore(held);
    }

    /// Adds to the sum that is held for a slot.
    pub(crate) fn add_held_sum(&mut self, slot: usize, sum: Sum) {
        self.store.add_sum(slot, sum);
    }
}
