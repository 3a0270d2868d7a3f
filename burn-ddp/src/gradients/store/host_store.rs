//! Gradients that are reduced in host memory: packed into the buffer of their bucket when they come, or, if it is in
//! use, when the bucket is complete.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Bytes, DType, Shape};
use burn_ddp_comm::SharedView;

use super::{Arrival, GradientStore, Outcome};
use crate::gradients::accumulation::{Contribution, Sum};
use crate::gradients::bucket_plan::{Bucket, BucketRange, Slot};
use crate::gradients::device_loan::DeviceLoan;
use crate::gradients::memory::{GradientMemory, shared_bytes};
use crate::gradients::readback::{HostGradient, Readback};
use crate::tensor_conversion::{burn_dtype, comm_dtype};

/// Buffers that buckets share in turn where averages are copied out of them: one is filled, one reduced, one read.
const RING_LEN: usize = 3;

pub(super) struct HostStore<B: GradientMemory> {
    slots: Arc<[Slot]>,
    /// Device of the last gradient, for averages.
    device: B::Device,
    gradients: Vec<Option<Gradient<B>>>,
    averages: Vec<Option<FloatTensor<B>>>,
    /// Bytes that the last step's averages are views of.
    viewed: Vec<Arc<Bytes>>,
    readback: Readback<B>,
    /// Gradients that were copied and not yet returned by `next_late`.
    copied: VecDeque<HostGradient>,
}

enum Gradient<B: GradientMemory> {
    Tensor(FloatTensor<B>),
    /// In the buffer of its bucket.
    Packed,
    Bytes(Bytes),
    /// Over micro-batches.
    Sum(Sum),
}

impl<B: GradientMemory> HostStore<B> {
    pub(super) fn new(slots: Arc<[Slot]>, device: B::Device, portion_bytes: usize) -> Self {
        HostStore {
            device,
            gradients: slots.iter().map(|_| None).collect(),
            averages: slots.iter().map(|_| None).collect(),
            viewed: Vec::new(),
            readback: Readback::new(portion_bytes),
            copied: VecDeque::new(),
            slots,
        }
    }

    /// An error unless a gradient of `slot` has this type and length.
    fn check(&self, slot: usize, dtype: DType, len_bytes: usize) -> Result<(), String> {
        let s = &self.slots[slot];
        if comm_dtype(dtype) != Some(s.dtype) {
            return Err(format!(
                "the gradient of {} is {dtype:?}, but the model was wrapped with {}: wrap again after changing dtypes",
                s.path, s.dtype
            ));
        }
        if len_bytes != s.len_bytes() {
            let Slot { path, dims, dtype, .. } = s;
            let expected = s.len_bytes();
            return Err(format!(
                "the gradient of {path} has {len_bytes} bytes, but {dims:?} of {dtype} takes {expected}"
            ));
        }
        Ok(())
    }

    /// Adds `weight` times a gradient to the sum over micro-batches.
    fn add(&mut self, slot: usize, gradient: &[u8], weight: f64) {
        let s = &self.slots[slot];
        let held = self.gradients[slot].get_or_insert_with(|| Gradient::Sum(Sum::zeros(s.dtype, s.len_elems())));
        if let Gradient::Sum(sum) = held {
            sum.add(s.dtype, gradient, weight);
        }
    }

    fn unreadable(&self, slot: usize, reason: &str) -> String {
        format!("reading the gradient of {}: {reason}", self.slots[slot].path)
    }
}

impl<B: GradientMemory> GradientStore<FloatTensor<B>> for HostStore<B> {
    fn packs(&self) -> bool {
        true
    }

    fn ring_len(&self) -> Option<usize> {
        (!B::VIEWS_AVERAGES && !B::ASYNCHRONOUS).then_some(RING_LEN)
    }

    fn packs_at_once(&self) -> bool {
        !B::ASYNCHRONOUS
    }

    fn put(
        &mut self,
        slot: usize,
        gradient: FloatTensor<B>,
        contribution: Contribution,
        place: Option<&mut [u8]>,
    ) -> Result<Arrival, String> {
        let dtype = gradient.dtype();
        self.check(slot, dtype, gradient.shape().num_elements() * dtype.size())?;
        self.device = gradient.device();
        if B::ASYNCHRONOUS {
            self.readback.add(slot, contribution, gradient);
            return Ok(Arrival::Later);
        }
        match (contribution, place) {
            (Contribution::Ignored, _) => {}
            // Copied at once, while the gradient is in the processor's cache; its memory is then free for the next one.
            (Contribution::Whole, Some(place)) => {
                B::with_bytes(gradient, |_, bytes| place.copy_from_slice(bytes))
                    .map_err(|e| self.unreadable(slot, &e))?;
                self.gradients[slot] = Some(Gradient::Packed);
            }
            (Contribution::Whole, None) => self.gradients[slot] = Some(Gradient::Tensor(gradient)),
            (Contribution::Added(weight), _) => B::with_bytes(gradient, |_, bytes| self.add(slot, bytes, weight))
                .map_err(|e| self.unreadable(slot, &e))?,
        }
        Ok(Arrival::Now)
    }

    fn next_late(&mut self) -> Result<Option<usize>, String> {
        while self.copied.is_empty() {
            let portion = self.readback.next().map_err(|e| format!("reading gradients from the device: {e}"))?;
            let Some(portion) = portion else { return Ok(None) };
            self.copied.extend(portion);
        }
        let Some((slot, contribution, dtype, bytes)) = self.copied.pop_front() else { return Ok(None) };
        self.check(slot, dtype, bytes.len())?;
        match contribution {
            Contribution::Ignored => {}
            Contribution::Whole => self.gradients[slot] = Some(Gradient::Bytes(bytes)),
            Contribution::Added(weight) => self.add(slot, &bytes, weight),
        }
        Ok(Some(slot))
    }

    fn holds(&self, slot: usize) -> bool {
        self.gradients[slot].is_some()
    }

    fn sum(&self, slot: usize) -> Result<Option<Sum>, String> {
        Ok(match &self.gradients[slot] {
            Some(Gradient::Sum(sum)) => Some(sum.clone()),
            _ => None,
        })
    }

    fn add_sum(&mut self, slot: usize, sum: Sum) {
        match &mut self.gradients[slot] {
            Some(Gradient::Sum(held)) => held.add(sum.dtype(), sum.bytes(), 1.0),
            // As it is: zero plus -0 would be another zero.
            empty => *empty = Some(Gradient::Sum(sum)),
        }
    }

    fn fill(
        &mut self,
        bucket: &Bucket,
        ranges: &[BucketRange],
        divisor: f64,
        buffer: &mut [u8],
    ) -> Result<Option<Box<dyn DeviceLoan>>, String> {
        for &slot in &bucket.slots {
            let out = &mut buffer[ranges[slot].bytes()];
            match self.gradients[slot].take() {
                Some(Gradient::Tensor(gradient)) => {
                    B::with_bytes(gradient, |_, bytes| out.copy_from_slice(bytes))
                        .map_err(|e| self.unreadable(slot, &e))?;
                }
                Some(Gradient::Packed) => {}
                Some(Gradient::Bytes(bytes)) => out.copy_from_slice(&bytes),
                Some(Gradient::Sum(sum)) => sum.write(bucket.dtype, divisor, out),
                None => out.fill(0),
            }
        }
        Ok(None)
    }

    fn take_back(
        &mut self,
        bucket: &Bucket,
        ranges: &[BucketRange],
        present: &[bool],
        reduced: SharedView,
        _: Option<Box<dyn DeviceLoan>>,
    ) -> Result<(), String> {
        let bytes = shared_bytes(reduced);
        for &slot in bucket.slots.iter().filter(|&&slot| present[slot]) {
            let s = &self.slots[slot];
            let shape = Shape::from(&s.dims[..]);
            let average = B::from_shared(&bytes, ranges[slot].bytes(), shape, burn_dtype(s.dtype), &self.device);
            self.averages[slot] = Some(average);
        }
        if B::VIEWS_AVERAGES {
            self.viewed.push(bytes);
        }
        Ok(())
    }

    fn outcome(&mut self, slot: usize) -> Outcome<FloatTensor<B>> {
        self.averages[slot].take().map_or(Outcome::Absent, Outcome::Whole)
    }

    fn clear(&mut self) {
        self.gradients.iter_mut().for_each(|gradient| *gradient = None);
        self.averages.iter_mut().for_each(|average| *average = None);
        self.readback.clear();
        self.copied.clear();
    }

    fn release(&mut self) {
        self.viewed.clear();
    }
}
