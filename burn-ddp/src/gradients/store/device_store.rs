//! Gradients that never leave their device: summed there, lent to the engine there, averages there.

use std::fmt;

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Scalar, Shape};

use super::{Contribution, DeviceLoan, Keeper};
use crate::convert::burn_dtype;
use crate::gradients::bucket_plan::Slot;
use crate::gradients::memory::GradientMemory;

/// The gradients and averages of a wrapped model on a device of `B`.
pub(crate) struct Kept<B: GradientMemory> {
    device: B::Device,
    slots: Vec<(Shape, DType)>,
    /// Of the running step, until they are lent.
    gradients: Vec<Option<Gradient<B>>>,
    /// Of the step that ends.
    averages: Vec<Option<FloatTensor<B>>>,
}

enum Gradient<B: GradientMemory> {
    Whole(FloatTensor<B>),
    /// Over micro-batches, in f64 for f64 and in f32 for everything narrower, rounded once when it is lent.
    Sum(FloatTensor<B>),
}

impl<B: GradientMemory> Kept<B> {
    pub(crate) fn new(device: B::Device, slots: &[Slot]) -> Self {
        let like = |slot: &Slot| (Shape::from(slot.dims.clone()), burn_dtype(slot.dtype));
        let none = || 0..slots.len();
        Kept {
            device,
            slots: slots.iter().map(like).collect(),
            gradients: none().map(|_| None).collect(),
            averages: none().map(|_| None).collect(),
        }
    }

    /// Takes the gradient of a slot.
    pub(crate) fn put(&mut self, slot: usize, gradient: FloatTensor<B>, take: Contribution) -> Result<(), String> {
        let (shape, dtype) = &self.slots[slot];
        if gradient.shape() != *shape || gradient.dtype() != *dtype {
            let (got, of) = (gradient.shape(), gradient.dtype());
            return Err(format!("{got:?} of {of:?}, but the model was wrapped with {shape:?} of {dtype:?}"));
        }
        let gradient = match take {
            Contribution::Ignored => return Ok(()),
            Contribution::Whole => Gradient::Whole(gradient),
            Contribution::Added(weight) => {
                let gradient = if is_narrow(*dtype) { B::float_cast(gradient, FloatDType::F32) } else { gradient };
                let gradient =
                    if weight == 1.0 { gradient } else { B::float_mul_scalar(gradient, Scalar::Float(weight)) };
                Gradient::Sum(match self.gradients[slot].take() {
                    Some(Gradient::Sum(sum)) => B::float_add(sum, gradient),
                    _ => gradient,
                })
            }
        };
        self.gradients[slot] = Some(gradient);
        Ok(())
    }

    /// The average of a slot, once.
    pub(crate) fn average(&mut self, slot: usize) -> Option<FloatTensor<B>> {
        self.averages[slot].take()
    }
}

impl<B: GradientMemory> Keeper for Kept<B> {
    fn holds(&self, slot: usize) -> bool {
        self.gradients[slot].is_some()
    }

    fn lend(&mut self, slots: &[usize], divisor: f64) -> Result<Box<dyn DeviceLoan>, String> {
        let tensors = slots.iter().map(|&slot| {
            let (shape, dtype) = &self.slots[slot];
            match self.gradients[slot].take() {
                Some(Gradient::Whole(gradient)) => gradient,
                Some(Gradient::Sum(sum)) => {
                    let mean = if divisor == 1.0 { sum } else { B::float_div_scalar(sum, Scalar::Float(divisor)) };
                    if is_narrow(*dtype) { B::float_cast(mean, (*dtype).into()) } else { mean }
                }
                None => B::float_zeros(shape.clone(), &self.device, (*dtype).into()),
            }
        });
        B::lend(tensors.collect())
    }

    fn take_back(&mut self, slots: &[usize], lent: Box<dyn DeviceLoan>) -> Result<(), String> {
        let averages = B::take_back(lent)?;
        if averages.len() != slots.len() {
            return Err(format!("{} averages of {}", averages.len(), slots.len()));
        }
        for (&slot, average) in slots.iter().zip(averages) {
            self.averages[slot] = Some(average);
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.gradients.iter_mut().for_each(|gradient| *gradient = None);
        self.averages.iter_mut().for_each(|average| *average = None);
    }
}

impl<B: GradientMemory> fmt::Debug for Kept<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kept({} slots on {:?})", self.slots.len(), self.device)
    }
}

fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}
