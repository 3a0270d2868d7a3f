//! AlexNet: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", in torchvision's
//! layout.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;

use super::train_pictures::Classifier;

/// Pictures with at least this many rows go through the paper's layers, whose strides are too large for smaller ones.
pub const LARGE: usize = 64;

/// Configuration of the network.
#[derive(Debug, Clone)]
pub struct AlexNetConfig {
    /// Number of classes.
    pub classes: usize,
    /// Rows and columns of a picture. From [`LARGE`] on, the first convolution is 11 × 11 with stride 4 and pools are
    /// 3 × 3; below, the convolution is 3 × 3 with stride 2 and pools are 2 × 2, as is usual for CIFAR-10.
    pub side: usize,
    /// Channels of the first convolution, 64 in the paper; all other layers follow in proportion.
    pub width: usize,
    /// True to drop activations at random while training.
    pub dropout: bool,
}

/// Five convolutions, three linear layers.
#[derive(Module, Debug)]
pub struct AlexNet {
    convs: Vec<Conv2d>,
    pool: MaxPool2d,
    average: AdaptiveAvgPool2d,
    dropout: Dropout,
    linears: Vec<Linear>,
}

impl AlexNetConfig {
    /// A network with random weights from the device's generator; call `device.seed(…)` first to make them repeat.
    pub fn init(&self, device: &Device) -> AlexNet {
        let large = self.side >= LARGE;
        let conv = |channels, kernel: usize, stride: usize, padding| {
            Conv2dConfig::new(channels, [kernel; 2])
                .with_stride([stride; 2])
                .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
                .init(device)
        };
        let [a, b, c, d] = [1, 3, 6, 4].map(|times| times * self.width);
        let (first, second, pool, average) = if large {
            (conv([3, a], 11, 4, 2), conv([a, b], 5, 1, 2), 3, 6)
        } else {
            (conv([3, a], 3, 2, 1), conv([a, b], 3, 1, 1), 2, 2)
        };
        let hidden = 64 * self.width;
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        AlexNet {
            convs: vec![first, second, conv([b, c], 3, 1, 1), conv([c, d], 3, 1, 1), conv([d, d], 3, 1, 1)],
            pool: MaxPool2dConfig::new([pool; 2]).with_strides([2, 2]).init(),
            average: AdaptiveAvgPool2dConfig::new([average; 2]).init(),
            dropout: DropoutConfig::new(if self.dropout { 0.5 } else { 0.0 }).init(),
            linears: vec![linear(d * average * average, hidden), linear(hidden, hidden), linear(hidden, self.classes)],
        }
    }
}

impl Classifier for AlexNet {
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let mut x = images;
        for (number, conv) in self.convs.iter().enumerate() {
            x = relu(conv.forward(x));
            if matches!(number, 0 | 1 | 4) {
                x = self.pool.forward(x);
            }
        }
        let mut x = self.average.forward(x).flatten(1, 3);
        let last = self.linears.len() - 1;
        for linear in &self.linears[..last] {
            x = relu(linear.forward(self.dropout.forward(x)));
        }
        self.linears[last].forward(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_the_parameters_of_torchvisions_model() {
        let model = AlexNetConfig { classes: 1000, side: 224, width: 64, dropout: true }.init(&Device::flex());
        assert_eq!(model.num_params(), 61_100_840);
    }

    #[test]
    fn takes_pictures_of_every_size_from_16_pixels_on() {
        for side in [16, 17, 32, 63, 64, 65, 80] {
            let model = AlexNetConfig { classes: 3, side, width: 2, dropout: false }.init(&Device::flex());
            let images = Tensor::random([2, 3, side, side], burn::tensor::Distribution::Default, &Device::flex());
            let values: Vec<f32> = model.forward(images).into_data().iter().collect();
            assert_eq!(values.len(), 2 * 3, "{side}");
            assert!(values.iter().all(|value| value.is_finite()), "{side}: {values:?}");
        }
    }
}
