//! A convolution with its batch normalisation.

use burn::module::{Module, ModuleDisplay};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Initializer, PaddingConfig2d};
use burn::prelude::*;
use burn_ddp::nn::SyncBatchNorm;

use crate::trainer::loss_and_accuracy::widened;

/// A batch normalisation, made from Burn's: over the items of one rank, or over the items of all ranks.
pub trait Norm: Module + ModuleDisplay + From<BatchNorm> + 'static {
    /// `[items, channels, rows, columns]` → the same shape.
    fn forward(&self, x: Tensor<4>) -> Tensor<4>;
}

/// In f32 at least, since running statistics would lose updates in a half.
impl Norm for BatchNorm {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let dtype = x.dtype();
        BatchNorm::forward(self, widened(x)).cast(dtype)
    }
}

impl Norm for SyncBatchNorm {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        SyncBatchNorm::forward(self, x)
    }
}

/// A convolution without bias, then batch normalisation.
#[derive(Module, Debug)]
pub struct ConvNorm<N: Module> {
    conv: Conv2d,
    norm: N,
}

impl<N: Norm> ConvNorm<N> {
    /// Square kernels of `kernel` (odd) pixels, padded so that stride 1 keeps the size. Weights as He et al. 2015
    /// ("Delving Deep into Rectifiers") draw them, by the fan out. With `zeroed`, the scale of the normalisation
    /// begins as zero, and so does the result.
    pub fn new(channels: [usize; 2], kernel: usize, stride: usize, zeroed: bool, device: &Device) -> Self {
        let padding = kernel / 2;
        let conv = Conv2dConfig::new(channels, [kernel; 2])
            .with_stride([stride; 2])
            .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
            .with_bias(false)
            .with_initializer(Initializer::KaimingNormal { gain: f64::sqrt(2.0), fan_out_only: true })
            .init(device);
        let mut norm = BatchNormConfig::new(channels[1]).init(device);
        if zeroed {
            norm.gamma = Initializer::Zeros.init([channels[1]], device);
        }
        Self { conv, norm: norm.into() }
    }

    /// `[items, channels[0], rows, columns]` → `[items, channels[1], rows / stride, columns / stride]`.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}
