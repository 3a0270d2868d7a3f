//! Gradients of a backward that are still on their device.

use std::any::Any;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Bytes, DType, read_sync};

use super::memory::{GradientMemory, HostCopy};

/// Gradients of an asynchronous device, in the order in which backward came to them. Backward reaches its end long before the device does:
/// until then they are only launched to be read, a bucket's worth at a time, and waited for at the end, one after the other, while the
/// device still computes later ones and buckets that are complete are reduced.
#[derive(Default)]
pub(crate) struct Unread {
    /// Not launched yet: slots, and a `Vec<FloatTensor<B>>`.
    slots: Vec<usize>,
    tensors: Option<Box<dyn Any + Send>>,
    len_bytes: usize,
    launched: Vec<Launched>,
}

/// Gradients on their way to host memory.
struct Launched {
    slots: Vec<usize>,
    /// `None` once it was waited for.
    reading: Option<HostCopy>,
}

impl Launched {
    /// What the device holds for each slot.
    fn wait(&mut self) -> Result<Vec<(DType, Bytes)>, String> {
        self.reading.take().map_or(Ok(Vec::new()), read_sync)
    }
}

/// Of a backward that ended half-way. Nobody wants them any more, but CubeCL would use their staging buffer for something else while it is
/// still mapped, which wgpu refuses.
impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

/// What the device holds for a slot.
pub(crate) type Read = (usize, DType, Bytes);

impl Unread {
    /// Takes the gradient of a slot. With `enough_bytes` of them, reading begins.
    pub(crate) fn add<B: GradientMemory>(&mut self, slot: usize, gradient: FloatTensor<B>, enough_bytes: usize) {
        self.len_bytes += gradient.shape().num_elements() * gradient.dtype().size();
        self.slots.push(slot);
        self.tensors::<B>().push(gradient);
        if self.len_bytes >= enough_bytes {
            self.begin::<B>();
        }
    }

    /// Launches what was not launched yet.
    pub(crate) fn begin<B: GradientMemory>(&mut self) {
        if self.slots.is_empty() {
            return;
        }
        let tensors = std::mem::take(self.tensors::<B>());
        let slots = std::mem::take(&mut self.slots);
        self.launched.push(Launched { slots, reading: Some(B::begin_read(tensors)) });
        self.len_bytes = 0;
    }

    /// Waits for each in turn and hands it to `put`.
    ///
    /// # Errors
    ///
    /// The first of `put`, or what the device says as an error of `fault`. Nothing is left then.
    pub(crate) fn finish<E>(
        &mut self,
        fault: impl Fn(String) -> E,
        mut put: impl FnMut(Read) -> Result<(), E>,
    ) -> Result<(), E> {
        for mut launched in std::mem::take(&mut self.launched) {
            let gradients = launched.wait().map_err(&fault)?;
            let slots = &launched.slots;
            if gradients.len() != slots.len() {
                return Err(fault(format!("the device returned {} gradients of {}", gradients.len(), slots.len())));
            }
            for (&slot, (dtype, bytes)) in slots.iter().zip(gradients) {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn what_nobody_wants_any_more_is_waited_for() {
        let read = Arc::new(AtomicBool::new(false));
        let reading = {
            let read = read.clone();
            async move {
                read.store(true, Ordering::Relaxed);
                Ok(Vec::new())
            }
        };
        let mut unread = Unread::default();
        unread.launched.push(Launched { slots: vec![0], reading: Some(Box::pin(reading)) });
        drop(unread);
        assert!(read.load(Ordering::Relaxed));
    }
}
