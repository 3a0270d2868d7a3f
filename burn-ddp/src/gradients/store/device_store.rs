//! Gradients that never leave their device: they are summed there, and lent to the group's engine, which reduces them
//! there. In a world of 1 nothing is lent: the sums are the averages.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Scalar, Shape, TensorData};
use burn_ddp_comm::SharedView;

use super::{Arrival, GradientStore, Outcome};
use crate::gradients::accumulation::{Contribution, Sum};
use crate::gradients::bucket_plan::{Bucket, BucketRange, Slot};
use crate::gradients::device_loan::DeviceLoan;
use crate::gradients::leaf_nodes::{Nodes, OwnRun};
use crate::gradients::memory::GradientMemory;
use crate::gradients::packing::first_not_finite;
use crate::tensor_conversion::{burn_dtype, cast};

pub(super) struct DeviceStore<B: GradientMemory> {
    slots: Arc<[Slot]>,
    device: B::Device,
    /// True if other ranks add to the gradients.
    lends: bool,
    /// The leaves, with logical ranks in a world of 1.
    run: Option<OwnRun>,
    /// Gradients of the running step, until they are lent.
    gradients: Vec<Option<Gradient<B>>>,
    /// Averages of the step being finished.
    averages: Vec<Option<FloatTensor<B>>>,
}

enum Gradient<B: GradientMemory> {
    Whole(FloatTensor<B>),
    /// Over micro-batches: in f64 for f64, in f32 for everything narrower; rounded once, when it is lent.
    Sums(Nodes<FloatTensor<B>>),
}

impl<B: GradientMemory> DeviceStore<B> {
    pub(super) fn new(slots: Arc<[Slot]>, device: B::Device, lends: bool, run: Option<OwnRun>) -> Self {
        DeviceStore {
            device,
            lends,
            run,
            gradients: slots.iter().map(|_| None).collect(),
            averages: slots.iter().map(|_| None).collect(),
            slots,
        }
    }

    fn zeros(&self, slot: usize) -> FloatTensor<B> {
        let Slot { dims, dtype, .. } = &self.slots[slot];
        B::float_zeros(Shape::from(dims.clone()), &self.device, burn_dtype(*dtype).into())
    }
}

impl<B: GradientMemory> GradientStore<FloatTensor<B>> for DeviceStore<B> {
    fn packs(&self) -> bool {
        false
    }

    /// Buffers hold flags only. Taking a bucket back before backward has ended would make the rest of it wait for the
    /// reduction.
    fn ring_len(&self) -> Option<usize> {
        None
    }

    fn packs_at_once(&self) -> bool {
        false
    }

    fn put(
        &mut self,
        slot: usize,
        gradient: FloatTensor<B>,
        contribution: Contribution,
        _: Option<&mut [u8]>,
    ) -> Result<Arrival, String> {
        let Slot { path, dims, dtype, .. } = &self.slots[slot];
        let (shape, dtype) = (Shape::from(dims.clone()), burn_dtype(*dtype));
        if gradient.shape() != shape || gradient.dtype() != dtype {
            let (got, of) = (gradient.shape(), gradient.dtype());
            return Err(format!(
                "the gradient of {path} is {got:?} of {of:?}, but the model was wrapped with {shape:?} of {dtype:?}"
            ));
        }
        let gradient = match contribution {
            Contribution::Ignored => return Ok(Arrival::Now),
            Contribution::Whole { .. } => Gradient::Whole(gradient),
            Contribution::Added { weight, leaf } => {
                let gradient = if is_narrow(dtype) { B::float_cast(gradient, FloatDType::F32) } else { gradient };
                let gradient =
                    if weight == 1.0 { gradient } else { B::float_mul_scalar(gradient, Scalar::Float(weight)) };
                let mut nodes = match self.gradients[slot].take() {
                    Some(Gradient::Sums(nodes)) => nodes,
                    _ => Nodes::default(),
                };
                match nodes.at(leaf) {
                    Some(sum) => *sum = B::float_add(sum.clone(), gradient),
                    None => nodes.push(self.run, leaf, gradient, B::float_add),
                }
                Gradient::Sums(nodes)
            }
        };
        self.gradients[slot] = Some(gradient);
        Ok(Arrival::Now)
    }

    fn next_late(&mut self) -> Result<Option<usize>, String> {
        Ok(None)
    }

    fn holds(&self, slot: usize) -> bool {
        self.gradients[slot].is_some()
    }

    /// Nothing is read before the end.
    fn not_finite(&self, _: usize) -> Option<usize> {
        None
    }

    /// One read for all averages.
    fn average_not_finite(&mut self) -> Result<Option<usize>, String> {
        let averages = self.averages.iter().enumerate();
        first_not_finite::<B>(averages.filter_map(|(slot, average)| Some((slot, average.clone()?))))
    }

    fn leaves(&self, slot: usize) -> Vec<usize> {
        match &self.gradients[slot] {
            Some(Gradient::Sums(nodes)) => nodes.leaves(),
            _ => Vec::new(),
        }
    }

    fn sum(&self, slot: usize, leaf: usize) -> Result<Option<Sum>, String> {
        let Some(Gradient::Sums(nodes)) = &self.gradients[slot] else { return Ok(None) };
        let Some(sum) = nodes.sum(leaf) else { return Ok(None) };
        let dtype = self.slots[slot].dtype;
        let read = B::with_bytes(sum.clone(), |_, bytes| Sum::from_bytes(dtype, bytes));
        read.map(Some).map_err(|e| format!("reading the gradient of {}: {e}", self.slots[slot].path))
    }

    fn add_sum(&mut self, slot: usize, leaf: usize, sum: Sum) {
        let (dims, dtype) = (self.slots[slot].dims.clone(), burn_dtype(sum.dtype()));
        let data = TensorData::from_bytes_vec(sum.bytes().to_vec(), dims, dtype);
        let sum = B::float_from_data(data, &self.device);
        let held = self.gradients[slot].get_or_insert_with(|| Gradient::Sums(Nodes::default()));
        let Gradient::Sums(nodes) = held else { return };
        match nodes.at(leaf) {
            Some(held) => *held = B::float_add(held.clone(), sum),
            None => nodes.restore(leaf, sum),
        }
    }

    fn fill(
        &mut self,
        bucket: &Bucket,
        _: &[BucketRange],
        divisor: f64,
        _: &mut [u8],
    ) -> Result<Option<Box<dyn DeviceLoan>>, String> {
        if self.lends && bucket.len_elems == 0 {
            return Ok(None);
        }
        let run = self.run;
        // A slot with sums has one at least: they are those of the subtrees of one rank alone, or all of leaf 0.
        let own = |dtype: DType, gradient| match gradient {
            Gradient::Whole(gradient) => Some(cast::<B>(gradient, dtype)),
            Gradient::Sums(nodes) => nodes.fold(run, B::float_add).into_iter().next().map(|(_, sum)| {
                let mean = if divisor == 1.0 { sum } else { B::float_div_scalar(sum, Scalar::Float(divisor)) };
                cast::<B>(mean, dtype)
            }),
        };
        if !self.lends {
            for &slot in &bucket.slots {
                let dtype = burn_dtype(self.slots[slot].dtype);
                self.averages[slot] = self.gradients[slot].take().and_then(|gradient| own(dtype, gradient));
            }
            return Ok(None);
        }
        let mut tensors = Vec::with_capacity(bucket.slots.len());
        for &slot in &bucket.slots {
            let dtype = burn_dtype(bucket.dtype);
            let gradient = self.gradients[slot].take().and_then(|gradient| own(dtype, gradient));
            let gradient = gradient.unwrap_or_else(|| cast::<B>(self.zeros(slot), dtype));
            let shape = gradient.shape();
            tensors.push((gradient, shape));
        }
        B::lend(tensors).map(Some).map_err(|e| format!("gradients were not lent on their device: {e}"))
    }

    fn take_back(
        &mut self,
        bucket: &Bucket,
        _: &[BucketRange],
        present: &[bool],
        _: SharedView,
        loan: Option<Box<dyn DeviceLoan>>,
    ) -> Result<(), String> {
        if !self.lends {
            return Ok(());
        }
        let averages = match loan {
            Some(loan) => B::take_back(loan).map_err(|e| format!("averages did not come back on their device: {e}"))?,
            // None of them has elements.
            None => bucket.slots.iter().map(|&slot| self.zeros(slot)).collect(),
        };
        let (got, expected) = (averages.len(), bucket.slots.len());
        if got != expected {
            return Err(format!("the device returned {got} averages instead of {expected}"));
        }
        for (&slot, average) in bucket.slots.iter().zip(averages).filter(|(slot, _)| present[**slot]) {
            self.averages[slot] = Some(cast::<B>(average, burn_dtype(self.slots[slot].dtype)));
        }
        Ok(())
    }

    fn outcome(&mut self, slot: usize) -> Outcome<FloatTensor<B>> {
        self.averages[slot].take().map_or(Outcome::Absent, Outcome::Whole)
    }

    fn clear(&mut self) {
        self.gradients.iter_mut().for_each(|gradient| *gradient = None);
        self.averages.iter_mut().for_each(|average| *average = None);
    }

    fn release(&mut self) {}
}

fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}
