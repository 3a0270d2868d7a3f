//! Gradients of an asynchronous device on their way to host memory.

use std::collections::VecDeque;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Bytes, DType, read_sync};

use super::accumulation::Contribution;
use super::memory::{GradientMemory, HostCopy};

/// A gradient in host memory: its slot and treatment, its type and its elements.
pub(super) type HostGradient = (usize, Contribution, DType, Bytes);

/// Gradients in the order in which backward produced them.
///
/// Backward ends long before the device has computed its gradients. During backward copies are only started, a portion
/// at a time. At its end each copy is awaited in turn, while the device computes later gradients and complete buckets
/// are reduced.
pub(super) struct Readback<B: GradientMemory> {
    /// Gradients whose copy has not been started.
    waiting: Vec<FloatTensor<B>>,
    waiting_for: Vec<(usize, Contribution)>,
    waiting_bytes: usize,
    portion_bytes: usize,
    started: VecDeque<Portion>,
}

/// Gradients whose copy has been started.
struct Portion {
    slots: Vec<(usize, Contribution)>,
    /// `None` once it was awaited.
    copy: Option<HostCopy>,
}

impl Portion {
    fn wait(&mut self) -> Result<Vec<(DType, Bytes)>, String> {
        self.copy.take().map_or(Ok(Vec::new()), read_sync)
    }
}

/// Waits for copies of a backward that ended half-way: CubeCL would use their staging buffer for something else while
/// it is still mapped, which wgpu refuses.
impl Drop for Portion {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

impl<B: GradientMemory> Readback<B> {
    /// A readback that starts a copy for each `portion_bytes` of gradients.
    pub(super) fn new(portion_bytes: usize) -> Self {
        Readback {
            waiting: Vec::new(),
            waiting_for: Vec::new(),
            waiting_bytes: 0,
            portion_bytes,
            started: VecDeque::new(),
        }
    }

    /// Takes the gradient of a slot. Starts a copy when a portion is complete.
    pub(super) fn add(&mut self, slot: usize, contribution: Contribution, gradient: FloatTensor<B>) {
        self.waiting_bytes += gradient.shape().num_elements() * gradient.dtype().size();
        self.waiting_for.push((slot, contribution));
        self.waiting.push(gradient);
        if self.waiting_bytes >= self.portion_bytes {
            self.start();
        }
    }

    /// Starts the copies that have not been started, and waits for the next portion; `None` after the last.
    ///
    /// # Errors
    ///
    /// The device's error.
    pub(super) fn next(&mut self) -> Result<Option<Vec<HostGradient>>, String> {
        self.start();
        let Some(mut portion) = self.started.pop_front() else { return Ok(None) };
        let gradients = portion.wait()?;
        let (got, expected) = (gradients.len(), portion.slots.len());
        if got != expected {
            return Err(format!("the device returned {got} gradients instead of {expected}"));
        }
        let slots = std::mem::take(&mut portion.slots).into_iter();
        Ok(Some(
            slots
                .zip(gradients)
                .map(|((slot, contribution), (dtype, bytes))| (slot, contribution, dtype, bytes))
                .collect(),
        ))
    }

    /// Drops all gradients, after waiting for copies that have been started.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.waiting_for.clear();
        self.waiting_bytes = 0;
        self.started.clear();
    }

    fn start(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let slots = std::mem::take(&mut self.waiting_for);
        let copy = Some(B::begin_read(std::mem::take(&mut self.waiting)));
        self.started.push_back(Portion { slots, copy });
        self.waiting_bytes = 0;
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
        let copy = {
            let read = read.clone();
            async move {
                read.store(true, Ordering::Relaxed);
                Ok(Vec::new())
            }
        };
        drop(Portion { slots: vec![(0, Contribution::Whole { leaf: 0 })], copy: Some(Box::pin(copy)) });
        assert!(read.load(Ordering::Relaxed));
    }
}
