//! Stores of gradients until their reduction, and of averages until they are handed out.

mod device_store;
mod host_store;

use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn_ddp_comm::SharedView;

use super::accumulation::{Contribution, Sum};
use super::bucket_plan::{Bucket, BucketRange, Slot};
use super::device_loan::DeviceLoan;
use super::memory::GradientMemory;
use super::reducer_settings::ReducerSettings;
use device_store::DeviceStore;
use host_store::HostStore;

/// Arrival of a gradient in the store, at [`GradientStore::put`] or later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// The gradient is there.
    Now,
    /// The gradient is still on its device, until [`GradientStore::next_late`] returns its slot.
    Later,
}

/// Result of a step for one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome<T> {
    /// The average of all its elements.
    Whole(T),
    /// No rank had a gradient.
    Absent,
}

/// Gradients and averages of all slots of a wrapped model, in tensors `T`.
///
/// Errors are texts that name the parameter; the caller adds the rank.
pub(crate) trait GradientStore<T>: Send {
    /// True if [`fill`](Self::fill) packs gradients into the buffer of their bucket; false if they stay on their
    /// device.
    fn packs(&self) -> bool;

    /// Number of buffers that all buckets share in turn; `None` if each bucket needs its own.
    fn ring_len(&self) -> Option<usize>;

    /// True if [`put`](Self::put) packs gradients into a place in the buffer of their bucket.
    fn packs_at_once(&self) -> bool;

    /// Takes the final gradient of a slot in this backward. One that is whole is copied to `place`, if there is one,
    /// for the [`fill`](Self::fill) of the same buffer.
    fn put(
        &mut self,
        slot: usize,
        gradient: T,
        contribution: Contribution,
        place: Option<&mut [u8]>,
    ) -> Result<Arrival, String>;

    /// Waits for the next gradient that [arrives later](Arrival::Later) and returns its slot; `None` when all have.
    fn next_late(&mut self) -> Result<Option<usize>, String>;

    /// True if this rank has a gradient for the slot in the next reduction.
    fn holds(&self, slot: usize) -> bool;

    /// The leaf of which the slot has a gradient that is not finite, as far as packing has shown.
    fn not_finite(&self, slot: usize) -> Option<usize>;

    /// The first slot with an average that is not finite, as far as the flags of the buckets did not tell. Waits for
    /// the device.
    fn average_not_finite(&mut self) -> Result<Option<usize>, String>;

    /// First leaves of the sums over micro-batches that are held for a slot.
    fn leaves(&self, slot: usize) -> Vec<usize>;

    /// The sum over micro-batches that is held for a slot from this leaf on. Waits for the device.
    fn sum(&self, slot: usize, leaf: usize) -> Result<Option<Sum>, String>;

    /// Adds to the sum over micro-batches that is held for a slot from this leaf on.
    fn add_sum(&mut self, slot: usize, leaf: usize, sum: Sum);

    /// Moves the gradients of a bucket into `buffer`, with zeros for slots without one; sums over micro-batches are
    /// divided by `divisor`, or, with logical ranks, go into a row for each subtree. Gradients that stay on their
    /// device are lent to the group's engine instead. Does not wait for a device.
    fn fill(
        &mut self,
        bucket: &Bucket,
        ranges: &[BucketRange],
        divisor: f64,
        buffer: &mut [u8],
    ) -> Result<Option<Box<dyn DeviceLoan>>, String>;

    /// Takes the averages of a bucket out of `reduced` or `loan`. Slots without a gradient on any rank are not
    /// `present`. Does not wait for a device.
    fn take_back(
        &mut self,
        bucket: &Bucket,
        ranges: &[BucketRange],
        present: &[bool],
        reduced: SharedView,
        loan: Option<Box<dyn DeviceLoan>>,
    ) -> Result<(), String>;

    /// The result of a slot, once.
    fn outcome(&mut self, slot: usize) -> Outcome<T>;

    /// Drops gradients, and averages that were not asked for.
    fn clear(&mut self);

    /// Frees the memory that the last step's averages are views of, for the next reduction.
    fn release(&mut self);
}

/// A store for gradients on `device`, which are reduced there or through host memory, or stay there. They travel in the
/// types of `sent`.
pub(crate) fn open<B: GradientMemory>(
    slots: Arc<[Slot]>,
    sent: Arc<[Slot]>,
    device: B::Device,
    settings: ReducerSettings,
) -> Box<dyn GradientStore<FloatTensor<B>>> {
    if settings.on_device || settings.alone {
        Box::new(DeviceStore::<B>::new(slots, device, !settings.alone, settings.tree()))
    } else {
        // An asynchronous device is read in portions of a bucket.
        Box::new(HostStore::<B>::new((slots, sent), device, settings.caps.bytes, settings.tree()))
    }
}
