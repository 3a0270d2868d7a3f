//! Gradients of a backward that are still on their device.

use std::any::Any;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Bytes, DType, read_sync};

use super::memory::{GradientMemory, Reading};

/// Gradients of an asynchronous device, in the order in which backward came to them. Backward reaches its end long before the device does:
/// until then they are only launched to be read, a bucket's worth at a time, and waited for at the end, one after the other, while the
/// device still computes later ones and buckets that are complete are reduced.
#[derive(Default)]
pub(super) struct Unread {
    /// Not launched yet: slots, and a `Vec<FloatTensor<B>>`.
    slots: Vec<usize>,
    tensors: Option<Box<dyn Any + Send>>,
    len_bytes: usize,
    /// Launched.
    readings: Vec<(Vec<usize>, Reading)>,
}

/// What the device holds for a slot.
pub(super) type Read = (usize, DType, Bytes);

impl Unread {
    /// Takes the gradient of a slot. With `enough_bytes` of them, reading begins.
    pub(super) fn add<B: GradientMemory>(&mut self, slot: usize, gradient: FloatTensor<B>, enough_bytes: usize) {
        self.len_bytes += gradient.shape().num_elements() * gradient.dtype().size();
        self.slots.push(slot);
        self.tensors::<B>().push(gradient);
        if self.len_bytes >= enough_bytes {
            self.begin::<B>();
        }
    }

    /// Launches what was not launched yet.
    pub(super) fn begin<B: GradientMemory>(&mut self) {
        if self.slots.is_empty() {
            return;
        }
        let tensors = std::mem::take(self.tensors::<B>());
        self.readings.push((std::mem::take(&mut self.slots), B::begin_read(tensors)));
        self.len_bytes = 0;
    }

    /// Waits for each in turn and hands it to `put`.
    ///
    /// # Errors
    ///
    /// The first of `put`, or what the device says as an error of `fault`. Nothing is left then.
    pub(super) fn finish<E>(
        &mut self,
        fault: impl Fn(String) -> E,
        mut put: impl FnMut(Read) -> Result<(), E>,
    ) -> Result<(), E> {
        for (slots, reading) in std::mem::take(&mut self.readings) {
            let gradients = read_sync(reading).map_err(&fault)?;
            if gradients.len() != slots.len() {
                return Err(fault(format!("the device returned {} gradients of {}", gradients.len(), slots.len())));
            }
            for (slot, (dtype, bytes)) in slots.into_iter().zip(gradients) {
                put((slot, dtype, bytes))?;
            }
        }
        Ok(())
    }

    /// Of another backend there is nothing: a backward has one.
    fn tensors<B: Backend>(&mut self) -> &mut Vec<FloatTensor<B>> {
        let known = self.tensors.take().and_then(|tensors| tensors.downcast::<Vec<FloatTensor<B>>>().ok());
        let tensors = self.tensors.insert(known.unwrap_or_default());
        tensors.downcast_mut().expect("it was made of this type")
    }
}
