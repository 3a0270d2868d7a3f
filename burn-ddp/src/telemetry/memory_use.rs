//! Memory that wrapped models take on a rank, computed from shapes.

use std::fmt;
use std::iter::Sum;

use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{DType, Device, Tensor};

use crate::{Error, Result};

/// Bytes that models take on one rank: from [`estimate`](Self::estimate) before training, and for the rank's wrapped
/// models from [`Telemetry::memory`](super::Telemetry::memory) and [`Report::memory`](super::Report::memory).
///
/// The numbers are computed from shapes. They do not include activations, data, memory that Burn's kernels keep, and
/// sums of accumulation; nor the whole model on each rank during `wrap` and `unwrap`, or a copy of the saved values on
/// rank 0 during `save_safetensors` and asynchronous checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Parameters and buffers, or this rank's parts of them.
    pub parameters: u64,
    /// Parameters and buffers of the whole models, which the parts of all ranks make up. Not in
    /// [`total`](Self::total).
    pub whole_parameters: u64,
    /// Averaged gradients, from a backward until the optimizer's step has used them. In a world of several ranks Flex
    /// keeps the averages of whole parameters between steps, too, in the buffers in which they are reduced.
    pub gradients: u64,
    /// State of the optimizer; `None` if unknown.
    pub optimizer: Option<u64>,
    /// Largest amount of whole [sharded](crate::WrapConfig::with_sharding) parameters and whole gradients of them at
    /// one moment of a step, if the step reads each parameter once and none is frozen.
    pub gathered: u64,
    /// Values of whole parameters in the [compute dtype](crate::WrapConfig::with_compute_dtype), from forward to
    /// backward.
    #[serde(default)]
    pub casts: u64,
    /// Buffers of the collectives in host memory: at most three of the size of the largest bucket; with sharded
    /// parameters, one for the largest of them of at most 48 MiB and one for this rank's rows of it, and one for the
    /// largest above that. If gradients come from a GPU and NCCL does not reduce them, every bucket has a buffer. With
    /// NCCL there are none (and this is 0, except in an estimate), but NCCL has buffers of its own on the GPU.
    pub engine_buffers: u64,
}

impl MemoryUse {
    /// Sum of all that this rank holds.
    #[must_use]
    pub fn total(&self) -> u64 {
        let MemoryUse { parameters, gradients, optimizer, gathered, casts, engine_buffers, .. } = self;
        parameters + gradients + optimizer.unwrap_or(0) + gathered + casts + engine_buffers
    }

    /// The same, with the state that an optimizer like `optim` has after its first step. It measures the state of
    /// copies of `optim` after a step of two small parameters named `weight`, and assumes that the state grows linearly
    /// with the number of elements of a parameter.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the optimizer cannot write its state.
    ///
    /// # Example
    ///
    /// As in [`estimate`](Self::estimate).
    pub fn with_optimizer(self, optim: &ModuleOptimizer) -> Result<Self> {
        let (small, large) = (state_bytes(optim, 32)?, state_bytes(optim, 64)?);
        let element_bytes = DType::from(Device::default().settings().float_dtype).size();
        let per_byte = (large - small) as f64 / ((64 * 64 - 32 * 32) * element_bytes) as f64;
        Ok(MemoryUse { optimizer: Some((self.gradients as f64 * per_byte).round() as u64), ..self })
    }
}

/// Length of the state that a fresh optimizer like `optim` writes after a step of a parameter of `side` × `side`.
fn state_bytes(optim: &ModuleOptimizer, side: usize) -> Result<usize> {
    let device = Device::default().without_autodiff();
    let mut optim = optim.clone().load_record(OptimizerRecord::default());
    let model = LinearConfig::new(side, side).with_bias(false).init(&device.clone().autodiff());
    let mut gradients = GradientsParams::new();
    gradients.register(model.weight.id, Tensor::<2>::ones([side, side], &device));
    optim.step(1e-3, model, gradients);
    let bytes = optim.into_bytes().map_err(|e| Error::invalid(format!("the optimizer's state: {e}")))?;
    Ok(bytes.len())
}

impl Sum for MemoryUse {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(MemoryUse::default(), |sum, one| MemoryUse {
            parameters: sum.parameters + one.parameters,
            whole_parameters: sum.whole_parameters + one.whole_parameters,
            gradients: sum.gradients + one.gradients,
            optimizer: sum.optimizer.or(one.optimizer).map(|_| sum.optimizer.unwrap_or(0) + one.optimizer.unwrap_or(0)),
            gathered: sum.gathered + one.gathered,
            casts: sum.casts + one.casts,
            engine_buffers: sum.engine_buffers + one.engine_buffers,
        })
    }
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(f, "parameters {:.1} MiB", mib(self.parameters))?;
        if self.parameters < self.whole_parameters {
            write!(f, " of {:.1} MiB", mib(self.whole_parameters))?;
        }
        write!(f, ", gradients {:.1} MiB", mib(self.gradients))?;
        if let Some(optimizer) = self.optimizer {
            write!(f, ", optimizer {:.1} MiB", mib(optimizer))?;
        }
        if self.casts > 0 {
            write!(f, ", casts {:.1} MiB", mib(self.casts))?;
        }
        write!(f, ", gathered {:.1} MiB, engine buffers {:.1} MiB", mib(self.gathered), mib(self.engine_buffers))
    }
}

#[cfg(test)]
mod tests {
    use burn::optim::momentum::MomentumConfig;
    use burn::optim::{AdamConfig, AdamWConfig, SgdConfig};

    use super::*;

    #[test]
    fn optimizers_hold_none_one_or_two_tensors_per_parameter() {
        let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        for (optim, tensors) in [
            (SgdConfig::new().init(), 0),
            (momentum.init(), 1),
            (AdamConfig::new().init(), 2),
            (AdamWConfig::new().init(), 2),
        ] {
            let memory = MemoryUse { gradients: 1 << 30, ..MemoryUse::default() }.with_optimizer(&optim).unwrap();
            assert_eq!(memory.optimizer, Some(tensors << 30));
            assert_eq!(memory.total(), (tensors + 1) << 30);
        }
    }

    #[test]
    fn memory_is_said_in_words_and_added() {
        let one =
            MemoryUse { parameters: 3 << 19, whole_parameters: 3 << 19, gradients: 1 << 20, ..MemoryUse::default() };
        assert_eq!(one.to_string(), "parameters 1.5 MiB, gradients 1.0 MiB, gathered 0.0 MiB, engine buffers 0.0 MiB");
        let part = MemoryUse { whole_parameters: 3 << 20, ..one };
        assert!(part.to_string().starts_with("parameters 1.5 MiB of 3.0 MiB, gradients"), "{part}");
        assert_eq!(part.total(), one.total());
        let other = MemoryUse { optimizer: Some(1 << 21), ..one };
        let both: MemoryUse = [one, other].into_iter().sum();
        assert_eq!((both.parameters, both.whole_parameters, both.optimizer), (3 << 20, 3 << 20, Some(1 << 21)));
        assert!(both.to_string().contains("optimizer 2.0 MiB"));
    }
}
