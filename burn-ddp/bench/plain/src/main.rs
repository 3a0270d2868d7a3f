//! The CNN of `mnist` on plain Burn, trained on random digits. Building it shows the build time of Burn alone.
#![forbid(unsafe_code)]

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::activation::relu;

#[derive(Module, Debug)]
struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    dropout: Dropout,
    fc1: Linear,
    fc2: Linear,
}

fn main() {
    let device = Device::flex().autodiff();
    let mut model = Cnn {
        conv1: Conv2dConfig::new([1, 32], [3, 3]).init(&device),
        conv2: Conv2dConfig::new([32, 64], [3, 3]).init(&device),
        pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
        dropout: DropoutConfig::new(0.25).init(),
        fc1: LinearConfig::new(64 * 12 * 12, 128).init(&device),
        fc2: LinearConfig::new(128, 10).init(&device),
    };
    let mut optim = AdamConfig::new().init();
    for step in 0..20 {
        let x = Tensor::<4>::random([16, 1, 28, 28], Distribution::Default, &device);
        let labels = Tensor::<1, Int>::arange(0..16, &device).remainder_scalar(10);
        let x = relu(model.conv2.forward(relu(model.conv1.forward(x))));
        let x = relu(model.fc1.forward(model.dropout.forward(model.pool.forward(x)).flatten::<2>(1, 3)));
        let loss = CrossEntropyLossConfig::new().init(&device).forward(model.fc2.forward(x), labels);
        println!("step {step}: loss {}", loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-3, model, grads);
    }
}
