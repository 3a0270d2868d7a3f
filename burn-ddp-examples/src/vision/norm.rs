//! A convolution with its batch normalisation, of one rank or of all.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Initializer, PaddingConfig2d};
use burn::prelude::*;

/// A convolution without bias, then batch normalisation.
#[derive(Module, Debug)]
pub struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    /// Square kernels of `kernel` (odd) pixels, padded so that stride 1 keeps the size. Weights as He et al. 2015 ("Delving Deep
    /// into Rectifiers") draw them, by the fan out.
    pub fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Self {
        let padding = kernel / 2;
        let conv = Conv2dConfig::new(channels, [kernel; 2])
            .with_stride([stride; 2])
            .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
            .with_bias(false)
            .with_initializer(Initializer::KaimingNormal { gain: f64::sqrt(2.0), fan_out_only: true })
            .init(device);
        Self { conv, norm: BatchNormConfig::new(channels[1]).init(device) }
    }

    /// The same, yielding zeros until it has learned better.
    #[must_use]
    pub fn zeroed(mut self) -> Self {
        self.norm.gamma = self.norm.gamma.map(|gamma| gamma.zeros_like().require_grad());
        self
    }

    /// `[items, channels[0], rows, columns]` → `[items, channels[1], rows / stride, columns / stride]`.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}
