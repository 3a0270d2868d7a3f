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
use crate::gradients::leaf_nodes::{Nodes, OwnRun, Rows};
use crate::gradients::memory::{GradientMemory, shared_bytes};
use crate::gradients::packing::{is_finite, pack};
use crate::gradients::readback::{HostGradient, Readback};
use crate::tensor_conversion::{burn_dtype, cast, comm_dtype};

/// Buffers that buckets share in turn where averages are copied out of them: one is filled, one reduced, one read.
const RING_LEN: usize = 3;

pub(super) struct HostStore<B: GradientMemory> {
    slots: Arc<[Slot]>,
    /// The slots in the types in which their gradients travel.
    sent: Arc<[Slot]>,
    /// Device of the last gradient, for averages.
    device: B::Device,
    gradients: Vec<Option<Gradient<B>>>,
    averages: Vec<Option<FloatTensor<B>>>,
    /// For each slot, the leaf whose gradient is not finite.
    not_finite: Vec<Option<usize>>,
    /// The first slot whose average became infinite by the type in which it travels.
    overflow: Option<usize>,
    /// Bytes that the last step's averages are views of.
    viewed: Vec<Arc<Bytes>>,
    readback: Readback<B>,
    /// Gradients that were copied and not yet returned by `next_late`.
    copied: VecDeque<HostGradient>,
    /// With logical ranks.
    rows: Option<Rows>,
}

enum Gradient<B: GradientMemory> {
    /// Of this leaf, like bytes.
    Tensor(FloatTensor<B>, usize),
    /// In the buffer of its bucket.
    Packed,
    Bytes(Bytes, usize),
    /// Over micro-batches.
    Sums(Nodes<Sum>),
}

impl<B: GradientMemory> HostStore<B> {
    /// A store for gradients of the first slots, which travel as the second.
    pub(super) fn new(
        (slots, sent): (Arc<[Slot]>, Arc<[Slot]>),
        device: B::Device,
        portion_bytes: usize,
        run: Option<OwnRun>,
    ) -> Self {
        HostStore {
            sent,
            not_finite: vec![None; slots.len()],
            overflow: None,
            device,
            gradients: slots.iter().map(|_| None).collect(),
            averages: slots.iter().map(|_| None).collect(),
            viewed: Vec::new(),
            readback: Readback::new(portion_bytes),
            copied: VecDeque::new(),
            rows: run.map(Rows::new),
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

    /// Adds `weight` times a gradient to the sum over the micro-batches of a leaf.
    fn add(&mut self, slot: usize, gradient: &[u8], (weight, leaf): (f64, usize)) {
        let s = &self.slots[slot];
        let run = self.rows.as_ref().map(|rows| rows.run);
        if !is_finite(s.dtype, gradient) {
            self.not_finite[slot].get_or_insert(leaf);
        }
        let Gradient::Sums(nodes) = self.gradients[slot].get_or_insert_with(|| Gradient::Sums(Nodes::default())) else {
            return;
        };
        nodes.add(run, (leaf, weight), s.dtype, gradient);
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
            (Contribution::Whole { leaf }, Some(place)) => {
                let (from, to) = (self.slots[slot].dtype, self.sent[slot].dtype);
                let packed = B::with_bytes(gradient, |_, bytes| pack(from, bytes, to, place));
                let is_finite = packed.map_err(|e| self.unreadable(slot, &e))?;
                self.gradients[slot] = Some(Gradient::Packed);
                self.not_finite[slot] = (!is_finite).then_some(leaf);
            }
            (Contribution::Whole { leaf }, None) => self.gradients[slot] = Some(Gradient::Tensor(gradient, leaf)),
            (Contribution::Added { weight, leaf }, _) => {
                B::with_bytes(gradient, |_, bytes| self.add(slot, bytes, (weight, leaf)))
                    .map_err(|e| self.unreadable(slot, &e))?
            }
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
            Contribution::Whole { leaf } => self.gradients[slot] = Some(Gradient::Bytes(bytes, leaf)),
            Contribution::Added { weight, leaf } => self.add(slot, &bytes, (weight, leaf)),
        }
        Ok(Some(slot))
    }

    fn holds(&self, slot: usize) -> bool {
        self.gradients[slot].is_some()
    }

    fn not_finite(&self, slot: usize) -> Option<usize> {
        self.not_finite[slot]
    }

    fn average_not_finite(&mut self) -> Result<Option<usize>, String> {
        Ok(self.overflow)
    }

    fn leaves(&self, slot: usize) -> Vec<usize> {
        match &self.gradients[slot] {
            Some(Gradient::Sums(nodes)) => nodes.leaves(),
            _ => Vec::new(),
        }
    }

    fn sum(&self, slot: usize, leaf: usize) -> Result<Option<Sum>, String> {
        Ok(match &self.gradients[slot] {
            Some(Gradient::Sums(nodes)) => nodes.sum(leaf).cloned(),
            _ => None,
        })
    }

    fn add_sum(&mut self, slot: usize, leaf: usize, sum: Sum) {
        if !is_finite(sum.dtype(), sum.bytes()) {
            self.not_finite[slot].get_or_insert(leaf);
        }
        let held = self.gradients[slot].get_or_insert_with(|| Gradient::Sums(Nodes::default()));
        if let Gradient::Sums(nodes) = held {
            nodes.add_sum(leaf, sum);
        }
    }

    fn fill(
        &mut self,
        bucket: &Bucket,
        ranges: &[BucketRange],
        divisor: f64,
        buffer: &mut [u8],
    ) -> Result<Option<Box<dyn DeviceLoan>>, String> {
        let row_bytes = buffer.len() / self.rows.as_ref().map_or(1, |rows| rows.run.division.rows());
        let (buffer, others) = buffer.split_at_mut(row_bytes);
        Rows::clear(bucket.dtype, others);
        for &slot in &bucket.slots {
            let out = &mut buffer[ranges[slot].bytes()];
            let dtype = self.slots[slot].dtype;
            match self.gradients[slot].take() {
                Some(Gradient::Tensor(gradient, leaf)) => {
                    let packed = B::with_bytes(gradient, |_, bytes| pack(dtype, bytes, bucket.dtype, out));
                    let is_finite = packed.map_err(|e| self.unreadable(slot, &e))?;
                    self.not_finite[slot] = (!is_finite).then_some(leaf);
                }
                Some(Gradient::Packed) => {}
                Some(Gradient::Bytes(bytes, leaf)) => {
                    self.not_finite[slot] = (!pack(dtype, &bytes, bucket.dtype, out)).then_some(leaf);
                }
                Some(Gradient::Sums(nodes)) => match &self.rows {
                    None => {
                        nodes.iter().for_each(|(_, sum)| sum.write(bucket.dtype, divisor, out));
                        if !is_finite(bucket.dtype, out) {
                            self.not_finite[slot].get_or_insert(0);
                        }
                    }
                    Some(rows) => {
                        Rows::clear(bucket.dtype, out);
                        for (leaf, sum) in nodes.fold(Some(rows.run), Sum::plus) {
                            // The first row is `buffer`.
                            let out = match rows.of_leaf(leaf).checked_sub(1) {
                                None => &mut *out,
                                Some(row) => &mut others[row * row_bytes..][ranges[slot].bytes()],
                            };
                            sum.write(bucket.dtype, 1.0, out);
                            if !is_finite(bucket.dtype, out) {
                                self.not_finite[slot].get_or_insert(leaf);
                            }
                        }
                    }
                },
                None if self.rows.is_some() => Rows::clear(bucket.dtype, out),
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
            let average = B::from_shared(&bytes, ranges[slot].bytes(), shape, burn_dtype(bucket.dtype), &self.device);
            // It may have travelled in another type.
            let average = cast::<B>(average, burn_dtype(s.dtype));
            if bucket.dtype.size_bytes() == 2 && !is_finite(bucket.dtype, &bytes[ranges[slot].bytes()]) {
                self.overflow = self.overflow.or(Some(slot));
            }
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
        self.not_finite.iter_mut().for_each(|leaf| *leaf = None);
        self.overflow = None;
        self.readback.clear();
        self.copied.clear();
    }

    fn release(&mut self) {
        self.viewed.clear();
    }
}
