//! The network of PyTorch's basic MNIST example: two convolutions, two linear layers, 1,199,882 parameters.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::relu;

use super::dataset::{CLASSES, MnistBatch};
use crate::trainer::loss_and_accuracy::{recognised, widened};

/// Configuration of [`Cnn`].
#[derive(Config, Debug)]
pub struct CnnConfig {
    /// True to drop activations at random while training.
    #[config(default = true)]
    pub dropout: bool,
}

/// A small convolutional network for digits.
#[derive(Module, Debug)]
pub struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    dropout1: Dropout,
    fc1: Linear,
    dropout2: Dropout,
    fc2: Linear,
}

impl CnnConfig {
    /// A model with random weights from the device's generator; call `device.seed(…)` first to make them repeat.
    pub fn init(&self, device: &Device) -> Cnn {
        let dropout = |probability| DropoutConfig::new(if self.dropout { probability } else { 0.0 }).init();
        Cnn {
            conv1: Conv2dConfig::new([1, 32], [3, 3]).init(device),
            conv2: Conv2dConfig::new([32, 64], [3, 3]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout1: dropout(0.25),
            // 28 pixels, less 2 in each convolution, halved by the pool: 64 channels of 12 × 12.
            fc1: LinearConfig::new(64 * 12 * 12, 128).init(device),
            dropout2: dropout(0.5),
            fc2: LinearConfig::new(128, CLASSES).init(device),
        }
    }
}

impl Cnn {
    /// `[items, 1, 28, 28]` → `[items, 10]`, unnormalised log-probabilities of the classes.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.conv1.forward(images));
        let x = relu(self.conv2.forward(x));
        let x = self.dropout1.forward(self.pool.forward(x));
        let x = relu(self.fc1.forward(x.flatten(1, 3)));
        self.fc2.forward(self.dropout2.forward(x))
    }

    /// Mean cross-entropy over the items of a batch, `[1]`.
    pub fn loss(&self, batch: MnistBatch) -> Tensor<1> {
        let device = batch.labels.device();
        let logits = widened(self.forward(batch.images));
        CrossEntropyLossConfig::new().init(&device).forward(logits, batch.labels)
    }

    /// Number of items of a batch that are classified correctly.
    pub fn correct(&self, batch: MnistBatch) -> Tensor<1, Int> {
        recognised(self.forward(batch.images), batch.labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_the_parameters_of_pytorchs_example() {
        let model = CnnConfig::new().init(&Device::flex());
        assert_eq!(model.num_params(), 1_199_882);
    }
}
